"""Where a generation's time goes."""
