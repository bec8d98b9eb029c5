"""Tables of results: their cells, the notes below them, and their output formats."""
