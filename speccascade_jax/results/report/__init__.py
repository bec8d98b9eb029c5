"""Report of a store as one HTML file, tables and figures. Needs no JAX and no network."""
