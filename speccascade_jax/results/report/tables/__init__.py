"""Tables: their cells, the notes below them, and their output forms."""
