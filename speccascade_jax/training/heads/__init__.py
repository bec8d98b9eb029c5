"""Acceptance heads: data, training, what they are worth."""
