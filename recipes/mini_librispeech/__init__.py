"""Five hours of LibriSpeech."""
