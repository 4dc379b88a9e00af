"""Error rates, their significance, and aligned words."""
