"""★ Tasks, vocabularies and where data sets lie."""
