"""Reads n-gram models of words: ARPA files, and texts that adapt them."""

from __future__ import annotations

from array import array
from pathlib import Path

import torch

from pruned_rnnt.data.tokens.normal_form import normal_form
from pruned_rnnt.decode.fusion.arpa import arpa_ngrams
from pruned_rnnt.decode.fusion.word_ngram import NgramList, WordNgram


def read_word_ngram(arpa: str, texts: str) -> WordNgram:
    """The model of an ARPA file, of texts, or of the first and the second.

    Args:
        texts: a file with a text per line, or a prepared folder, whose training texts are taken
            once each. Empty for none, as is `arpa`.

    Raises:
        FileNotFoundError: a file does not exist.
        ValueError: `arpa` is no ARPA file, or `texts` has no text.
    """
    orders = read_orders(Path(arpa)) if arpa else []
    return WordNgram(orders, read_texts(Path(texts)) if texts else ())


def read_texts(path: Path) -> list[str]:
    """The texts of a file, one per line, or the training texts of a prepared folder, once each.

    Raises:
        FileNotFoundError: there is nothing at `path`.
        ValueError: there is no text.
    """
    if path.is_dir():
        # Imported here because they load lhotse, which transcribing needs for nothing else.
        from pruned_rnnt.data.input.filters import cut_text
        from pruned_rnnt.data.input.prepared_folder import PreparedFolder

        cuts = PreparedFolder(path, allow_commands=True).cuts("train", lazy=True)
        # Copies at other speeds have the same text.
        lines = list(dict.fromkeys(cut_text(cut) for cut in cuts))
    elif path.is_file():
        lines = path.read_text(encoding="utf-8").splitlines()
    else:
        raise FileNotFoundError(f"decode.fusion.word_texts: there is nothing at {path}")
    if not any(line.strip() for line in lines):
        raise ValueError(f"decode.fusion.word_texts: {path} has no text")
    return [text for text in map(normal_form, lines) if text]


def read_orders(path: Path) -> list[NgramList]:
    """The n-grams of each order of an ARPA file.

    Raises:
        FileNotFoundError: `path` does not exist.
        ValueError: the file is no ARPA file; the message names the line.
    """
    logs: list[array[float]] = []
    words: list[list[str]] = []
    for order, log_prob, names, back_off in arpa_ngrams(path):
        while order > len(words):
            logs.append(array("d"))
            words.append([])
        logs[order - 1].extend((log_prob, back_off))
        words[order - 1].extend(map(normal_form, names))
    orders = []
    for order, (pairs, names) in enumerate(zip(logs, words, strict=True), 1):
        values = 10.0 ** torch.tensor(pairs, dtype=torch.float64).view(-1, 2)
        columns = [names[column::order] for column in range(order)]
        orders.append(NgramList(columns, values[:, 0], values[:, 1]))
    return orders
