"""MUSAN: music, speech and noise to mix into training data."""
