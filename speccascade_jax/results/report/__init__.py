"""One HTML file of a store: plot, tables, outputs, traces, configuration, environment. Needs no JAX and no network."""
