"""Times and confidences of words, and their calibration."""
