"""A word n-gram model in a search over letters or pieces of words.

Axes: R rows, V vocabulary, L letters of the longest symbol, S prefixes of words, C letters,
K levels of history.

The score of a symbol is that of the words which remain possible after it:

    log P(words that begin with the letters after it | history)
        - log P(words that begin with the letters before it | history)

so the score of a word is spread over its letters, and the beam keeps the prefixes of likely words.
Words that the model lacks have a share of the probability, with all letters equally likely.
A character that the symbols write in bytes of UTF-8 has these as its letters; each byte that occurs
is one more column of the table.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from pruned_rnnt.data.tokens.tokenizer import BYTE_NAME, WORD_START
from pruned_rnnt.decode.fusion.word_ngram import WordNgram
from pruned_rnnt.decode.search.states import Rows

# Symbols that are no letters have names like this: <blk>.
_SPECIAL = "<"
_ROOT, _DEAD = 0, 1
# The letters of bytes are private characters from here on; one more is that of bytes in no word.
_BYTES = 0xF0000
_OTHER_BYTE = chr(_BYTES + 256)
# Entries of the table of prefixes, of four bytes: 8 GiB.
_MAX_ENTRIES = 2**31
# Keeps logarithms finite.
_LEAST = 1e-30


class WordNgramScorer:
    """A `TokenScorer` whose state is the history of words, the prefix of the word, and its score.

    Args:
        model: the n-gram model; moves to the device of the search.
        symbols: names of the model's symbols, by id; a word's first one begins with U+2581.
        scale: factor of the log-probabilities.
        unknown: the share of words that the model lacks.

    Raises:
        ValueError: no symbol begins a word, the symbols spell few of the model's words, or the
            words have too many prefixes.
    """

    capturable = True

    def __init__(
        self, model: WordNgram, symbols: Sequence[str], *, scale: float, unknown: float
    ) -> None:
        self._model, self._scale, self._unknown = model, scale, unknown
        begins = [symbol.startswith(WORD_START) for symbol in symbols]
        if not any(begins):
            raise ValueError(
                "decode.fusion.word_ngram needs symbols that show where words begin (U+2581): a "
                "model of letters or pieces"
            )
        spelled = [_letters(symbol) for symbol in symbols]
        whole = {letter for letter in "".join(spelled) if letter < chr(_BYTES)}
        words: Sequence[str] = model.words
        if any(map(BYTE_NAME.fullmatch, symbols)):
            words = [_with_bytes(word, whole) for word in words]
            # A column of the table for each of the 256 would multiply its size.
            used = whole.union(*words)
            spelled = [text if used.issuperset(text) else _OTHER_BYTE for text in spelled]
        letters = sorted(set("".join(spelled)))
        trie = _Trie(words, letters)
        known = sum(map(whole.issuperset, words))
        if known < 0.1 * len(words):
            raise ValueError(
                f"the letters {''.join(sorted(whole))!r} spell {known:,} of the "
                f"{len(model.words):,} words of the n-gram model (not, for example, "
                f"{model.words[-1]!r}): it needs words in the spelling of the recogniser's texts, "
                "in capitals if these are"
            )
        if trie.entries > _MAX_ENTRIES:
            raise ValueError(
                f"decode.fusion.word_ngram: {trie.words:,} words of the n-gram model begin with "
                f"{trie.entries // (len(letters) + 1):,} different prefixes; of {len(letters):,} "
                f"letters the table holds {_MAX_ENTRIES // (len(letters) + 1):,} at most: use an "
                "n-gram model of fewer words"
            )
        self._child_SC, self._first_S, self._stop_S, self._word_S = trie.tensors()
        # Without bytes, so that words in another script do not change the score of other words.
        self._letter_log_prob = -math.log(len(whole) + 1)
        number = {letter: i for i, letter in enumerate(letters)}
        # Letter C leads from each prefix to itself: fills short symbols.
        longest = max(len(text) for text in spelled)
        rows = [[number[x] for x in text] + [len(letters)] * longest for text in spelled]
        self._letters_LV = torch.tensor([row[:longest] for row in rows]).t().contiguous()
        self._length_V = torch.tensor([len(text) for text in spelled])
        self._begins_V = torch.tensor(begins)

    def start(self, rows: int, device: torch.device) -> Rows:
        if self._begins_V.device != device:
            self._model.to(device)
            for name in ("child_SC", "first_S", "stop_S", "word_S"):
                setattr(self, f"_{name}", getattr(self, f"_{name}").to(device))
            for name in ("letters_LV", "length_V", "begins_V"):
                setattr(self, f"_{name}", getattr(self, f"_{name}").to(device))
        node_R = torch.full((rows,), _ROOT, device=device)
        zeros_R = torch.zeros(rows, dtype=torch.int64, device=device)
        history_RK = self._model.start(rows)
        return history_RK, node_R, zeros_R, torch.zeros(rows, dtype=torch.float64, device=device)

    def scores(self, state: Rows) -> Tensor:
        symbols_RV = torch.arange(len(self._begins_V), device=state[0].device).expand(
            len(state[0]), -1
        )
        added_RV, _ = self._grow(state, symbols_RV)
        return (self._scale * added_RV).float()

    def advance(self, state: Rows, symbols_R: Tensor, emits_R: Tensor) -> Rows:
        _, grown = self._grow(state, symbols_R[:, None])
        return grown

    def final(self, state: Rows) -> Tensor:
        closed_R, history_RK = self._close(state)
        end_R = torch.full_like(state[1], self._model.end)
        ended_R = (1.0 - self._unknown) * self._model.between(history_RK, end_R, end_R + 1)
        score_R = closed_R + ended_R.clamp(min=_LEAST).log() - state[3]
        return (self._scale * score_R).float()

    def _grow(self, state: Rows, symbols_RQ: Tensor) -> tuple[Tensor, Rows]:
        """(R, Q) log-probabilities of more symbols, and the R * Q states after them."""
        history_RK, node_R, length_R, before_R = state
        closed_R, closed_RK = self._close(state)
        begins_RQ = self._begins_V[symbols_RQ]
        shape = begins_RQ.shape
        node_RQ = torch.where(begins_RQ, _ROOT, node_R[:, None])
        for letter_V in self._letters_LV:
            node_RQ = self._child_SC[node_RQ, letter_V[symbols_RQ]].long()
        length_RQ = torch.where(begins_RQ, 0, length_R[:, None]) + self._length_V[symbols_RQ]
        history_RQK = torch.where(
            begins_RQ[:, :, None], closed_RK[:, None], history_RK[:, None]
        ).contiguous()
        history, node, length = history_RQK.flatten(0, 1), node_RQ.flatten(), length_RQ.flatten()
        after = self._log_prob(history, self._first_S[node], self._stop_S[node], length)
        added_RQ = after.view(shape) - before_R[:, None]
        added_RQ = added_RQ + torch.where(begins_RQ, closed_R[:, None], 0.0)
        return added_RQ, (history, node, length, after)

    def _close(self, state: Rows) -> tuple[Tensor, Tensor]:
        """The log-probability of the word that ends here, 0 if none has begun, and the history."""
        history_RK, node_R, length_R, _ = state
        word_R = self._word_S[node_R]
        known_R = word_R >= 0
        first_R = word_R.clamp(min=0)
        log_prob_R = self._log_prob(history_RK, first_R, first_R + known_R, length_R + 1)
        after_RK = torch.where(
            known_R[:, None],
            self._model.after(history_RK, first_R),
            self._model.forget(history_RK),
        )
        begun_R = length_R > 0
        return (
            torch.where(begun_R, log_prob_R, 0.0),
            torch.where(begun_R[:, None], after_RK, history_RK),
        )

    def _log_prob(
        self, history_QK: Tensor, first_Q: Tensor, stop_Q: Tensor, length_Q: Tensor
    ) -> Tensor:
        """(Q,) of the words first .. stop - 1 and of unknown words with that many letters."""
        known_Q = (1.0 - self._unknown) * self._model.between(history_QK, first_Q, stop_Q)
        unknown_Q = self._unknown * (length_Q.double() * self._letter_log_prob).exp()
        return (known_Q + unknown_Q).clamp(min=_LEAST).log()


def _letters(symbol: str) -> str:
    """The letters of a symbol; empty if it has none, as blank."""
    if byte := BYTE_NAME.fullmatch(symbol):
        return chr(_BYTES + int(byte[1], 16))
    return "" if symbol.startswith(_SPECIAL) else symbol.lstrip(WORD_START)


def _with_bytes(word: str, letters: Collection[str]) -> str:
    """The word, with the bytes of each character that is not among the letters.

    Until its last byte, such a character also has the probability of all words that are sorted
    between those with the same bytes: with large scripts (Korean, Chinese) its first bytes may
    score many nats too high. The total of a word is right.
    """
    return "".join(
        letter if letter in letters else "".join(chr(_BYTES + byte) for byte in letter.encode())
        for letter in word
    )


class _Trie:
    """The prefixes of sorted words.

    words: number of words that the letters spell.
    """

    def __init__(self, words: Sequence[str], letters: Sequence[str]) -> None:
        number = {letter: i for i, letter in enumerate(letters)}
        self._letters = len(letters)
        self._children: list[dict[int, int]] = [{}, {}]
        self._first, self._stop, self._word = [0, 0], [len(words), 0], [-1, -1]
        self.words = 0
        for index, word in enumerate(words):
            path = [number[letter] for letter in word if letter in number]
            if len(path) < len(word):
                continue
            self.words += 1
            node = _ROOT
            for letter in path:
                node = self._children[node].setdefault(letter, len(self._children))
                if node == len(self._children):
                    self._children.append({})
                    self._first.append(index)
                    self._stop.append(index)
                    self._word.append(-1)
                self._stop[node] = index + 1
            self._word[node] = index

    @property
    def entries(self) -> int:
        """Of the largest tensor."""
        return len(self._children) * (self._letters + 1)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The prefix after each letter (S, C + 1), first and stop of its words, and its word."""
        child_SC = torch.full((len(self._children), self._letters + 1), _DEAD, dtype=torch.int32)
        edges = [
            (node, letter, child)
            for node, children in enumerate(self._children)
            for letter, child in children.items()
        ]
        if edges:
            node, letter, child = torch.tensor(edges).unbind(1)
            child_SC[node, letter] = child.int()
        child_SC[:, self._letters] = torch.arange(len(self._children), dtype=torch.int32)
        first, stop = torch.tensor(self._first), torch.tensor(self._stop)
        return child_SC, first, stop, torch.tensor(self._word)
