"""Named methods, which combine a rule, a stop policy and a drafter, and the decoders that are built from them."""
