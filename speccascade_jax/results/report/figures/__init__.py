"""Figures. Importing them loads matplotlib."""
