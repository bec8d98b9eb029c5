"""Acceptance heads: data, training, evaluation."""
