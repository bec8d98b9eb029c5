"""What generated text is worth and what it cost."""
