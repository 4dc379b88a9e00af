"""The chain of a run: its licence, and the data and weights that the model was made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pruned_rnnt.data.input.data_origins import origins_of_data
from pruned_rnnt.licences.chain import Chain, Origin, read_chain
from pruned_rnnt.licences.terms import spdx
from pruned_rnnt.train.experiment import ExperimentConfig


def chain_of_run(config: ExperimentConfig) -> Chain:
    """With the licence of the section `card`; of a run of an older version, with what is known.

    Raises:
        ValueError: licences.json of the run or prepare.json of its data is damaged.
    """
    chain = read_chain(config.folder)
    if chain is None:
        # Trained by a version that did not record the chain.
        before: tuple[Origin, ...] = ()
        if config.train.init:
            before = (Origin(kind="weights", name=Path(config.train.init).name),)
        chain = Chain(origins=(*before, *origins_of_data(config.data)))
    return replace(chain, licence=spdx(config.card.license), reason=config.card.license_reason)
