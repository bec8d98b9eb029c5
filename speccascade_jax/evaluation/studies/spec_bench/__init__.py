"""Spec-Bench: its questions, conversations with a pair, answers in its schema."""
