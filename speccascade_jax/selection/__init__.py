"""Selection of a drafter for each query (Huang et al., 2024, assistant selection): data, training, online learning."""
