"""The same weights, prompts and lengths in other libraries, in turns in one run: `make bench-peers`.

`pairs` says what is decoded, `planting` makes random weights of a set acceptance, `exporting` and `gguf_file` write
what the others read, `contenders` lists each library's settings, `measuring` runs them in turns, `report` makes tables.
Each library works in a process and an environment of its own (`protocol`, `workers`): what its worker imports needs no
JAX.
"""
