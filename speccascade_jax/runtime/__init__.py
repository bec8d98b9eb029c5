"""The process around the computation: caches of programs, memory, paths, the command line."""
