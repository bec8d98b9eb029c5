"""Search for a setting within a tolerance of quality: successive halving, or Appendix D of Holsman et al. (2025)."""
