"""Durability: atomic files, locks, checksums, archives."""
