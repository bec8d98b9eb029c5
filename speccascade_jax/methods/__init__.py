"""★ Named methods: what a rule, a stop policy and a drafter make together, and what is built of it."""
