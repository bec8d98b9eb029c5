"""Training of T5 models, acceptance heads and early-exit heads."""
