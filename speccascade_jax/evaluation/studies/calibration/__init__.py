"""Search for the setting within a tolerance: successive halving, and Appendix D of Holsman et al. (2025, paper 2)."""
