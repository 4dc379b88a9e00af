"""Choosing the band, and cutting to it."""
