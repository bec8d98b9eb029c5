"""Drafters, which write a block of tokens and give the distribution that each token was drawn from."""
