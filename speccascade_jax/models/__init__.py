"""★ Language models behind one protocol (`core.protocols.LanguageModel`)."""
