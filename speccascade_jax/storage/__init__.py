"""Durable storage of files: atomic writes, locks, checksums, archives of arrays, and readers of untrusted files."""
