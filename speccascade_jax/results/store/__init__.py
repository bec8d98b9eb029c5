"""The store of records and what lies beside it."""
