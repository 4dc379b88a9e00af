"""Normalises texts and converts them to token ids and back."""
