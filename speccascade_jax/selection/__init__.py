"""Assistant selection: what policies learn from, how they learn, before serving and while serving (paper 5)."""
