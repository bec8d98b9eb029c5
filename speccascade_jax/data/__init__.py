"""Tasks, vocabularies and the folder of data sets."""
