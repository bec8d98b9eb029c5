"""Benchmarks of speed relative to the machine's limits, as ratios within one run: `make bench`, `python -m benchmarks`.

Each section is one module with one function `run(bench) -> {table: rows}`. `benchmarks/report.py` turns the rows into
tables, and `benchmarks/command.py` is the command line.
"""
