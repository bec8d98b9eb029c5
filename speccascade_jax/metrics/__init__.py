"""★ What generated text is worth. Needs no JAX."""
