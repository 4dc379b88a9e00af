"""Scores that beam search adds to those of the model: language models, hotwords."""
