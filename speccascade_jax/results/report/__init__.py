"""Report of a store as one HTML page, and its tables and figures. Needs no JAX and no network."""
