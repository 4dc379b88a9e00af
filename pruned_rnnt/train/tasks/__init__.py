"""The tasks of training: speech recognisers, language models."""
