"""Language models, which all implement the protocol `core.protocols.LanguageModel`."""
