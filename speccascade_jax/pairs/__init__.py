"""Pairs of a target and its drafts with a shared vocabulary, and prompts for a pair's models."""
