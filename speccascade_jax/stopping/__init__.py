"""★ When a draft stops before its block is full."""
