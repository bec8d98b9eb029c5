"""Spec-Bench with a model pair: reading its questions, holding conversations, and writing answers in its schema."""
