"""Rules that decide which drafted tokens are kept, their target distributions, and the verification of blocks."""
