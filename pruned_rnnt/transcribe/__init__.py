"""Audio files, streams and microphones to text, with a trained model."""
