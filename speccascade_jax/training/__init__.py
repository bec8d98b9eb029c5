"""Training of the models and heads that decode."""
