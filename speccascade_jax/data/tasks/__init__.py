"""★ Tasks: examples, prompts, metrics, and the table of those that have a name."""
