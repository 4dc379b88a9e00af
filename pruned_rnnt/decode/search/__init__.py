"""Searches: greedy, modified beam, k2 fast beam."""
