"""Data types, protocols, random bits and checks that all subpackages share; models and methods are elsewhere."""
