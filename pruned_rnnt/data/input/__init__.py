"""Makes batches from prepared folders: filters, sampling, augmentation, loading."""
