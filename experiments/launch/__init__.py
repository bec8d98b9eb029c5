"""Starting one of the experiments on several devices or machines; `python -m experiments.launch` explains."""
