"""Sixty recordings of yes and no in Hebrew."""
