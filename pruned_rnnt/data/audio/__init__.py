"""Reads audio files and streams, and computes their features."""
