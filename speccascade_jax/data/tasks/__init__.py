"""Tasks: examples, prompts, metrics, and the table of named tasks."""
