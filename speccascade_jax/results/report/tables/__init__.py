"""Tables: cells, what must be said below them, and their forms."""
