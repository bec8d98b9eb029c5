"""Pairs: a target, its drafts and the vocabulary that they share; prompts for them."""
