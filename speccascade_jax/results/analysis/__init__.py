"""Analysis of records: comparable curves, comparisons between methods, and confidence intervals."""
