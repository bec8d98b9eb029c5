"""★ Named methods: combinations of a rule, a stop policy and a drafter, and the decoders that are built from them."""
