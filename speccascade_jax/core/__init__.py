"""What every room speaks: values, protocols, randomness, checks. No model and no method lives here."""
