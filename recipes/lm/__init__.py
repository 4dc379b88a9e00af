"""Texts for a language model that is used in decoding."""
