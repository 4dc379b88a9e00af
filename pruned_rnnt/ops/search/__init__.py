"""Ops of searches: the frames of a beam search."""
