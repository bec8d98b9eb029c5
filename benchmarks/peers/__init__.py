"""Benchmark of other libraries with the same weights, prompts and output lengths, timed in turns: `make bench-peers`.

`pairs` defines the pairs and prompts. `planting` makes random weights with a chosen acceptance rate. `exporting` and
`gguf_file` write the files that the other libraries read. `contenders` lists each library's settings, `measuring` runs
them in turns, and `report` makes tables. Each library runs in its own process and environment (`protocol`, `workers`).
The modules that the other libraries' workers import do not need JAX.
"""
