"""Records and what is made of them: panels, intervals, tables, figures. Needs no JAX."""
