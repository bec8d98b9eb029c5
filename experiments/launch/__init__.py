"""Program that starts an experiment on several devices or machines: see `python -m experiments.launch --help`."""
