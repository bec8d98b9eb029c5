"""The decoding loop and the generation around it."""
