"""★ Drafters: they write a block of tokens, with the distribution that each token was drawn from."""
