"""The whole pruned loss as one step: simple loss, bounds, joiner, band, gradients."""
