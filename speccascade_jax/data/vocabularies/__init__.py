"""★ Vocabularies: text to ids and back, one file per kind."""
