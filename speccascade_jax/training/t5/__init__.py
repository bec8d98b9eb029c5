"""Training of T5 models on joined sentence pairs: losses, schedule, steps, and the resumable loop."""
