"""Trains the variants of a recipe with several seeds, decodes them and tabulates the results."""
