"""Transcribe audio files, streams and microphones with a trained model."""
