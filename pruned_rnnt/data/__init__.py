"""Waveforms and texts to batches: manifests, features, augmentation, sampling and tokens.

Everything rests on lhotse's manifests: a prepared folder (see `prepared_folder.py`) holds one CutSet a
split, and `DataModule` (see `datamodule.py`) turns them into `Batch`es.
"""
