"""The training loop and its checkpoints and logs, for any task."""
