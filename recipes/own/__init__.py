"""A user's own recordings and texts."""
