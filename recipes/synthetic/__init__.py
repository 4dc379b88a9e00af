"""Synthetic spoken commands: training data without a download."""
