"""Corpora without recordings, in the layout of the real ones, for tests of the recipes."""
