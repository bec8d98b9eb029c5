"""Small networks on top of a draft's hidden states, and the files they are kept in."""
