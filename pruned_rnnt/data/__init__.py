"""Waveforms and texts to batches: manifests, features, augmentation, sampling and tokens.

All data are described by lhotse manifests. A prepared folder (`input/prepared_folder.py`) holds one
CutSet per split, and `DataModule` (`input/datamodule.py`) turns these into `Batch`es.
"""
