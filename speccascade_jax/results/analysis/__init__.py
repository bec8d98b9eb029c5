"""From records to panels, comparisons and intervals."""
