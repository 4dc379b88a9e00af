"""AISHELL-1: Mandarin, read."""
