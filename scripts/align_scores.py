"""Scores of correct and wrong texts in forced alignment, to choose the threshold of `align`.

    python -m scripts.align_scores RUN --split test data.path=FOLDER

Aligns every utterance of a prepared set with its own text, with the same text with one word
changed, and with the text of another utterance; prints quantiles of the score per word for each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from pruned_rnnt.align.utterance import AlignedUtterance, align_batches
from pruned_rnnt.data.input.batch import Batch, pad_targets
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from scripts.run_and_split import load_run_and_split

_QUANTILES = (0.0, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def main() -> None:
    _, loaded, batches = load_run_and_split(__doc__.splitlines()[0])
    texts = [text for batch in batches for text in batch.texts]
    rng = random.Random(0)
    words = sorted({word for text in texts for word in text.split()})

    def one_wrong(text: str) -> str:
        parts = text.split()
        place = rng.randrange(len(parts))
        parts[place] = rng.choice([word for word in words if word != parts[place]])
        return " ".join(parts)

    print("quantiles" + "".join(f"{quantile:9.2f}" for quantile in _QUANTILES))
    for name, change in (
        ("right", str),
        ("one wrong", one_wrong),
        ("other", lambda text: rng.choice([other for other in texts if other != text])),
    ):
        changed = [
            _with_texts(batch, [change(text) for text in batch.texts], loaded.tokenizer)
            for batch in batches
        ]
        scores = list(_scores(align_batches(loaded.model, changed, loaded.tokenizer)))
        found = torch.tensor(scores).quantile(torch.tensor(_QUANTILES)).tolist()
        print(f"{name:9}" + "".join(f"{score:9.2f}" for score in found))


def _with_texts(batch: Batch, texts: Sequence[str], tokenizer: Tokenizer) -> Batch:
    targets_NU, target_lengths_N = pad_targets([tokenizer.encode(text) for text in texts])
    return replace(
        batch, texts=tuple(texts), targets_NU=targets_NU, target_lengths_N=target_lengths_N
    )


def _scores(results: Iterator[object]) -> Iterator[float]:
    return (result.word_score for result in results if isinstance(result, AlignedUtterance))


if __name__ == "__main__":
    main()
