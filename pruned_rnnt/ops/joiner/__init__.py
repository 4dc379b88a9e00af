"""From encoder and predictor frames to log-probabilities at lattice nodes."""
