"""The one decoding loop, and the generation around it."""
