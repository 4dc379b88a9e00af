"""The loss of the trivial joiner."""
