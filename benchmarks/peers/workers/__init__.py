"""One module per library, each run as `python -m benchmarks.peers.workers.NAME` in that library's environment."""
