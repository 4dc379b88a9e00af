"""Encoders of the transformers library: wav2vec 2.0, HuBERT, WavLM and Whisper's encoder.

config.py           settings of the kind `transformers`
architecture.py     what the library says about a model: its configuration, its parameters
encoder.py          the encoder: samples -> the library's module -> frames of 40 ms
whisper_features.py     Whisper's log-mel energies
"""
