"""Speed against the limits of the machine, in ratios measured in one run: `make bench`, or `python -m benchmarks`.

Each section is one module with one function `measure(bench) -> {table: rows}`; `benchmarks/report.py` makes tables
of the rows, `benchmarks/command.py` is the command line.
"""
