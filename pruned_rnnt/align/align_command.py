"""`pruned-rnnt align`, after the model is loaded: align, write the results, report failures."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pruned_rnnt.align.output import (
    AlignmentPlace,
    AlignmentWriter,
    UndividedWordsError,
    cut_of_file,
    location,
)
from pruned_rnnt.align.utterance import AlignedUtterance, NotAligned, align_file, align_set
from pruned_rnnt.data.input.batch import BatchIdentity
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.data.tokens.text_normalisation import normal_form
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.decode.calibration import Calibration
from pruned_rnnt.model.speech_model import SpeechModel
from pruned_rnnt.system.console import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

# Utterances named in the log.
_MAX_NAMED = 20
# Natural log-probability per word below which a text may be wrong. Measured on 300 recorded digit
# strings, with models of 2% WER (characters) and 3% WER (words): all correct texts score at least
# -2.28; 99% of the texts of other utterances at most -4.3; the medians of texts with one of five
# words wrong are -1.8 and -2.8. For speakers with 64% WER (word model), 95% of the texts of other
# utterances and 40% of the correct ones score below -3.
_DOUBTFUL_SCORE = -3.0


def run_align(
    model: SpeechModel,
    tokenizer: Tokenizer,
    source: tuple[DataModule, str] | tuple[Path, str],
    place: AlignmentPlace,
    kind: str,
    *,
    p99_duration: float | None = None,
    calibration: Calibration | None = None,
    console: Console | None = None,
) -> bool:
    """Align a prepared split or an audio file; False if an utterance has no alignment.

    Args:
        source: data and name of a split, or an audio file and its text.
        place: where the files go.
        kind: as for `AlignmentWriter`.
        p99_duration: as for `align_file`.
        calibration: of the model.
        console: shows a progress bar over a split.

    Raises:
        FileNotFoundError, ValueError: as `align_set` and `align_file`.
        UsageError: as `AlignmentPlace`.
    """
    place.check()
    data, split = source
    identity = BatchIdentity()
    if isinstance(data, Path):
        path, text = data, split
        results = align_file(model, tokenizer, path, text, p99_duration, calibration)
        cuts = {path.stem: cut_of_file(path, path.stem, text)} if kind == "lhotse" else {}
        digest = partial(_digest, path, text)
        return write_alignments(results, place, kind, cuts, digest, tokenizer.normalise)
    loader = data.test_loader(split)
    results = align_set(model, tokenizer, data, identity.over(loader), calibration)
    # The loader has read them: a manifest may be large.
    (loaded,) = loader.sampler.cuts
    cuts = {cut.id: cut for cut in loaded} if kind == "lhotse" else {}
    results = chain(results, _unread(loaded, identity.audio))
    with progress_bar(console, "aligning, utterances", loader.utterances) as bar:
        counted = bar.over(results, size=lambda _: 1)
        return write_alignments(
            counted, place, kind, cuts, lambda: identity.digest, tokenizer.normalise
        )


def _unread(cuts: Iterable[Any], read: Container[str]) -> Iterator[NotAligned]:
    """The utterances that the loader has left out, with data.bad_audio=skip."""
    for cut in cuts:
        if cut.id not in read:
            yield NotAligned(id=cut.id, reason="it cannot be read: a warning above says why")


def _digest(path: Path, text: str) -> str:
    return hashlib.sha256(path.read_bytes() + text.encode()).hexdigest()


def write_alignments(
    results: Iterable[AlignedUtterance | NotAligned],
    place: AlignmentPlace,
    kind: str,
    cuts: Mapping[str, Any],
    utterances: Callable[[], str],
    normalise: Callable[[str], str] = normal_form,
) -> bool:
    """Write alignments and log the utterances without one; False if there are any.

    NAME-not-aligned.txt lists them too, one `id<tab>reason` per line. Texts with a low score are
    written like the others, and named in a warning.

    Args:
        place: where the files go; its split is the NAME in theirs.
        kind, cuts, normalise: as for `AlignmentWriter`.
        utterances: called at the end: the digest of the aligned utterances.
    """
    name = place.inputs.split
    failures: list[NotAligned] = []
    unknown: Counter[str] = Counter()
    named: list[tuple[str, float]] = []
    aligned = doubtful = with_unknown = words = 0
    seconds = score = 0.0
    with place.unfinished() as unfinished:
        with AlignmentWriter(unfinished, kind, name, cuts, normalise) as writer:
            for result in results:
                if isinstance(result, NotAligned):
                    failures.append(result)
                    continue
                try:
                    writer.add(result)
                except UndividedWordsError as error:
                    failures.append(NotAligned(id=result.id, reason=str(error)))
                    continue
                aligned += 1
                words += len(result.words)
                seconds += result.seconds
                score += result.word_score
                if result.word_score < _DOUBTFUL_SCORE:
                    doubtful += 1
                    if doubtful <= _MAX_NAMED:
                        named.append((result.id, result.word_score))
                unknown.update(result.unknown)
                with_unknown += bool(result.unknown)
        if failures:
            lines = (f"{failure.id}\t{failure.reason}\n" for failure in failures)
            list_name = f"{name}-not-aligned.txt"
            (unfinished / list_name).write_text("".join(lines), encoding="utf-8")
        folder = place.keep(unfinished, utterances())
    for failure in failures[:_MAX_NAMED]:
        logger.warning("not aligned: %s: %s", failure.id, failure.reason)
    if len(failures) > _MAX_NAMED:
        logger.warning("and %d more", len(failures) - _MAX_NAMED)
    for utterance, word_score in named:
        logger.warning(
            "%s: the text may not match the audio: score per word %.2f, below %g",
            utterance,
            word_score,
            _DOUBTFUL_SCORE,
        )
    if doubtful > _MAX_NAMED:
        logger.warning("and %d more", doubtful - _MAX_NAMED)
    if unknown:
        logger.warning(
            "%d text%s with characters without a token, which were aligned as <unk>: %s",
            with_unknown,
            "s" * (with_unknown > 1),
            # Quoted: one may be a comma.
            ", ".join(map(repr, list(unknown)[:_MAX_NAMED]))
            + ", ..." * (len(unknown) > _MAX_NAMED),
        )
    mean = f", score per word {score / aligned:.2f}" if aligned else ""
    paths = location(folder, kind, name)
    print(f"aligned {aligned} utterances, {words} words, {seconds:.1f} s{mean}: {paths}")
    if doubtful:
        print(
            f"doubtful: {doubtful}, with a score per word below {_DOUBTFUL_SCORE:g} in "
            f"{folder / f'{name}-scores.tsv'}"
        )
    if failures:
        print(f"not aligned: {len(failures)}, listed with reasons in {folder / list_name}")
    return not failures
