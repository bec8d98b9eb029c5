"""Finding the setting for a tolerance: successive halving over method × α × γ, and paper 2's Appendix D."""
