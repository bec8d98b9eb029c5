"""Launcher of an experiment on several devices or machines; `python -m experiments.launch --help` lists options."""
