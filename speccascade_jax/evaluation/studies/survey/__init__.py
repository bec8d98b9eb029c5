"""Estimates of every rule's rates from one pass over given outputs; bounds; histograms."""
