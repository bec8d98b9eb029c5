"""Making the models and heads that decode."""
