"""The data that a configuration names, as parts of a model's chain."""

from __future__ import annotations

from pathlib import Path

from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.licences.chain import Origin


def origins_of_data(config: DataConfig) -> tuple[Origin, ...]:
    """The training data, old data that are mixed in, and recorded noises.

    Raises:
        ValueError: a prepare.json is damaged.
    """
    folders = [Path(config.path)]
    if config.old_path and config.old_share > 0:
        folders.append(Path(config.old_path))
    if config.augmentation.noise_cuts:
        folders.append(Path(config.augmentation.noise_cuts).parent)
    return tuple(PreparedFolder(folder).origin() for folder in folders)
