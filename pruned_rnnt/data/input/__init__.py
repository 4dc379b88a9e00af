"""Prepared folders to batches: filters, sampling, augmentation, loading."""
