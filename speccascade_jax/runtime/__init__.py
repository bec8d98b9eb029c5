"""Services for the running process: compilation cache, memory limits, several hosts, paths, and the command line."""
