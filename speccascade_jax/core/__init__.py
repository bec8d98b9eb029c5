"""Values, protocols, randomness and checks that every subpackage shares. No model and no method belongs here."""
