"""Selection of a drafter (Huang et al., 2024, assistant selection): data, training, and learning while serving."""
