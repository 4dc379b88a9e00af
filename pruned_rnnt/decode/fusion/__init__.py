"""Scores that a beam search adds to the model: language models, hotwords."""
