"""The chain of a run: its licence, and the data and weights that the model was made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pruned_rnnt.data.input.data_config import DataConfig
from pruned_rnnt.data.input.prepared_folder import PreparedFolder
from pruned_rnnt.licences.chain import Chain, Licence, Origin, read_chain
from pruned_rnnt.licences.terms import spdx
from pruned_rnnt.model.parameter_values import fingerprint
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.train.experiment import ExperimentConfig


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


def chain_of_run(config: ExperimentConfig) -> Chain:
    """With the licence of the section `card`; of a run of an older version, with what is known.

    Raises:
        ValueError: licences.json of the run or prepare.json of its data is damaged.
    """
    chain = read_chain(config.folder)
    if chain is None or not chain.origins:
        # Trained by a version that did not record the chain, or the file was emptied.
        before: tuple[Origin, ...] = ()
        if config.train.init:
            before = (Origin(kind="weights", name=Path(config.train.init).name),)
        chain = Chain(origins=(*before, *origins_of_data(config.data)))
    return replace(chain, licence=spdx(config.card.license), reason=config.card.license_reason)


def with_itself(
    chain: Chain, name: str, model: SpeechModel, source: str = ""
) -> tuple[Origin, ...]:
    """The origins of a chain, and the model of this name."""
    licence = Licence(id=chain.licence, source=source, note=chain.reason)
    digest = f"parameters:{fingerprint(model)}"
    return (*chain.origins, Origin(kind="weights", name=name, licence=licence, digest=digest))
