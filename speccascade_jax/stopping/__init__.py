"""Policies that end a draft before its block is full."""
