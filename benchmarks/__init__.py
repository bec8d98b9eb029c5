"""Speed against the limits of the machine, as ratios measured in one run: `make bench`, or `python -m benchmarks`.

Each section is one module with one function `run(bench) -> {table: rows}`. `benchmarks/report.py` turns the rows into
tables, and `benchmarks/command.py` is the command line.
"""
