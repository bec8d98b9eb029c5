"""Values, protocols, randomness and checks that every room shares. No model and no method belongs here."""
