"""★ What is kept of a draft: rules, their laws, and how a block is verified."""
