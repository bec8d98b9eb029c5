"""Workers: one module per library, run as `python -m benchmarks.peers.workers.NAME` in the library's environment."""
