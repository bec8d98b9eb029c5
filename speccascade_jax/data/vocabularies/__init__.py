"""Vocabularies, which convert text to token ids and back; each kind has its own file."""
