"""The decoding loop, and `generate`, which runs the loop as one compiled program."""
