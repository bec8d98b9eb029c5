"""★ Text to ids and back, one file per kind of vocabulary."""
