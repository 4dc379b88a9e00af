"""The settings of fine-tuning, which starts from a trained model (`train.init`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pruned_rnnt.model.lora import LoraConfig


@dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """How training starts from the model that train.init names; the data are in data.*.

    vocabulary: `keep` uses the symbols of the source; `extend` adds the symbols of the data that
        the source lacks; `replace` uses those of the data, with the rows of symbols that the source
        has too; `auto` keeps if the source's symbols cover the texts, and otherwise extends.
    freeze: parts that are not trained, by their names in the model or patterns of them: encoder,
        encoder.layers.0, *.bias.
    layer_decay: the learning rate of each encoder layer as a fraction of that of the layer above;
        predictor, joiner and the top layer have the full rate.
    checkpoint: for a run as source: its checkpoint, as decode.checkpoint names it.
    tokens: for an icefall checkpoint: its bpe.model or tokens.txt, if they are not beside it.
    quantise: round the matrices of the encoder, and those before the joiner's activation, in each
        pass as files of `export --precision` do, so that training makes up for it; none for no
        rounding. The result is an ordinary model.
    trust: allow an icefall checkpoint to run code when it is loaded, as pickle files can.
    """

    vocabulary: Literal["auto", "keep", "extend", "replace"] = "auto"
    freeze: tuple[str, ...] = ()
    layer_decay: float = 1.0
    checkpoint: str = "last"
    tokens: str = ""
    trust: bool = False
    quantise: Literal["none", "int8", "int4"] = "none"
    lora: LoraConfig = field(default_factory=LoraConfig)

    def __post_init__(self) -> None:
        if not 0 < self.layer_decay <= 1:
            raise ValueError(f"finetune.layer_decay is {self.layer_decay}, needs 0 < x <= 1")
        if self.quantise != "none" and self.lora.rank > 0:
            raise ValueError(
                f"finetune.quantise is {self.quantise} and finetune.lora.rank is {self.lora.rank}: "
                "rounded weights need finetune.lora.rank=0; fine-tune with adapters first, and "
                "then fine-tune the result with finetune.quantise"
            )
