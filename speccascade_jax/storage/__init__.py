"""Durable storage: atomic files, locks, checksums, archives."""
