"""The same weights, prompts and lengths in other libraries, in turns in one run: `make bench-peers`.

`pairs` defines the pairs and prompts, `planting` makes random weights of a set acceptance, `exporting` and `gguf_file`
write the files that the other libraries read, `contenders` lists each library's settings, `measuring` runs them in
turns, `report` makes tables. Each library runs in its own process and environment (`protocol`, `workers`): the modules
that its worker imports need no JAX.
"""
