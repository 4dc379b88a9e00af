"""Whole processes, from their start: on a machine that has never run them, and again."""
