"""Audio files and streams to samples and features."""
