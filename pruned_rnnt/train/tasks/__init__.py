"""Trainable tasks: speech recognisers, language models."""
