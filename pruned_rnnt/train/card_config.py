"""Settings of the model card that exported models carry."""

from __future__ import annotations

from dataclasses import dataclass

from pruned_rnnt.licences.terms import UNKNOWN


@dataclass(frozen=True, kw_only=True)
class CardConfig:
    """What the README of an exported model says that this program cannot know.

    name: of the model; empty: the name of the run's folder.
    license: identifier as on the hub, such as apache-2.0, cc-by-4.0 or other; `unknown` until the
        owner of the model sets it. `export` refuses one that contradicts the licences of the data
        and weights that the model was made from.
    license_reason: why the licence may be given although it contradicts one of those; the card
        shows it.
    language: codes of the languages, such as [en] or [zh, en].
    data: what the model was trained on, in words; empty: the recipe and its counts.
    datasets: names of the training data on the hub, such as [openslr/librispeech_asr].
    description: a paragraph about the model, its purpose and limits.
    """

    name: str = ""
    license: str = UNKNOWN
    license_reason: str = ""
    language: tuple[str, ...] = ()
    data: str = ""
    datasets: tuple[str, ...] = ()
    description: str = ""
