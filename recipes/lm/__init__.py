"""Texts for a language model that helps a recogniser."""
