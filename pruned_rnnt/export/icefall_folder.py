"""`pruned-rnnt export --format icefall`: a file that the scripts of icefall's recipe load."""

from __future__ import annotations

from pathlib import Path

import torch

from pruned_rnnt.data.tokens import Tokenizer
from pruned_rnnt.export.extras import ExportError
from pruned_rnnt.model.transducer import TransducerModel
from pruned_rnnt.model.zipformer.icefall_export import to_icefall_state


def export_icefall(model: TransducerModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write pretrained.pt (`{"model": parameters}`), bpe.model and tokens.txt.

    Raises:
        ExportError: a model for which the recipe has no place.
    """
    try:
        state = to_icefall_state(model)
    except ValueError as error:
        raise ExportError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model": state}, folder / "pretrained.pt")
    tokenizer.save(folder)
    (folder / "tokens.model").rename(folder / "bpe.model")
