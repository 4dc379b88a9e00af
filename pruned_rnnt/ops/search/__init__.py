"""Ops of searches: rows of a beam, and frames of a greedy or beam search."""
