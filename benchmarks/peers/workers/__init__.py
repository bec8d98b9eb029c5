"""The workers: a module per library, run as `python -m benchmarks.peers.workers.NAME` in its environment."""
