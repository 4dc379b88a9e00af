"""`pruned-rnnt export --format icefall`: files that the scripts of icefall's recipe load."""

from __future__ import annotations

from pathlib import Path

import torch

from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.interop.icefall.zipformer_export import to_icefall_state
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.system.usage_errors import ExportError


def export_icefall(model: TransducerModel, tokenizer: Tokenizer, folder: Path) -> None:
    """Write pretrained.pt (`{"model": parameters}`), bpe.model and tokens.txt.

    Raises:
        ExportError: the recipe cannot represent the model.
    """
    try:
        state = to_icefall_state(model)
    except ValueError as error:
        raise ExportError(str(error)) from error
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"model": state}, folder / "pretrained.pt")
    tokenizer.save(folder)
    (folder / "tokens.model").rename(folder / "bpe.model")
