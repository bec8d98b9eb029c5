"""★ Drafters: anything that writes a block of tokens and says what each was drawn from."""
