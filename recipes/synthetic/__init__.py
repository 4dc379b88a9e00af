"""Spoken commands made by a speech engine: data for everyone, without a download."""
