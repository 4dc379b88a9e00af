"""What `pruned-rnnt align` does, once the model is loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pruned_rnnt.align.manifest import cut_of_file
from pruned_rnnt.align.output import AlignmentWriter
from pruned_rnnt.align.sources import align_file, align_set
from pruned_rnnt.align.utterance import AlignedUtterance, NotAligned
from pruned_rnnt.data.input.datamodule import DataConfig, DataModule
from pruned_rnnt.data.tokens.tokenizer import Tokenizer
from pruned_rnnt.model.transducer_model import TransducerModel
from pruned_rnnt.progress import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger(__name__)

_NAMED = 20
# Natural log-probability a word, by scripts/align_scores.py. On 300 recorded strings of digits,
# with models of 2 and 3% WER over characters and words, right texts had -2.28 and more, 99% of the
# texts of other utterances -4.3 and less, and texts with one word of five wrong -1.8 and -2.8 in
# the median. Of speakers that the word model makes 64% errors on, 95% of the texts of other
# utterances were below -3, and 40% of the right ones, whose times are as doubtful.
_DOUBTFUL = -3.0


def run_align(
    model: TransducerModel,
    tokenizer: Tokenizer,
    source: tuple[DataConfig, str] | tuple[Path, str],
    folder: Path,
    kind: str,
    *,
    p99_duration: float | None = None,
    console: Console | None = None,
) -> bool:
    """Align a set (data and split) or a file (path and text); False where something was not.

    Args:
        folder, kind: as of `AlignmentWriter`.
        p99_duration: as of `align_file`.
        console: for a progress bar over a set.

    Raises:
        FileNotFoundError, ValueError: as `align_set` and `align_file`.
    """
    where, what = source
    if isinstance(where, Path):
        results = align_file(model, tokenizer, where, what, p99_duration)
        cuts = {where.stem: cut_of_file(where, where.stem, what)} if kind == "lhotse" else {}
        return write_alignments(results, folder, kind, where.stem, cuts)
    data = DataModule(where)
    loader = data.test_loader(what)
    results = align_set(model, tokenizer, data, loader)
    cuts = {cut.id: cut for cut in data.folder.cuts(what)} if kind == "lhotse" else {}
    with progress_bar(console, "aligning, utterances", loader.utterances) as bar:
        counted = bar.over(results, size=lambda _: 1)
        return write_alignments(counted, folder, kind, what, cuts)


def write_alignments(
    results: Iterable[AlignedUtterance | NotAligned],
    folder: Path,
    kind: str,
    name: str,
    cuts: Mapping[str, Any],
) -> bool:
    """Write all that was aligned and tell the rest; False where something was not aligned.

    Texts that are improbable for their audio are aligned and named in a warning. What was not
    aligned is also listed in FOLDER/NAME-not-aligned.txt, `id<tab>reason`.
    Arguments as of `AlignmentWriter`.
    """
    failures: list[NotAligned] = []
    doubtful: list[AlignedUtterance] = []
    aligned = unknown = words = 0
    seconds = score = 0.0
    with AlignmentWriter(folder, kind, name, cuts) as writer:
        for result in results:
            if isinstance(result, NotAligned):
                failures.append(result)
                continue
            writer.add(result)
            aligned += 1
            words += len(result.words)
            seconds += result.seconds
            score += result.word_score
            if result.word_score < _DOUBTFUL:
                doubtful.append(result)
            unknown += result.has_unknown
        place = writer.place
    for failure in failures[:_NAMED]:
        logger.warning("not aligned: %s: %s", failure.id, failure.reason)
    if len(failures) > _NAMED:
        logger.warning("and %d more", len(failures) - _NAMED)
    listed = folder / f"{name}-not-aligned.txt"
    listed.unlink(missing_ok=True)
    if failures:
        lines = (f"{failure.id}\t{failure.reason}\n" for failure in failures)
        listed.write_text("".join(lines), encoding="utf-8")
    for utterance in doubtful[:_NAMED]:
        logger.warning(
            "%s: the text may not be what is said: score %.2f a word, below %g",
            utterance.id,
            utterance.word_score,
            _DOUBTFUL,
        )
    if len(doubtful) > _NAMED:
        logger.warning("and %d more", len(doubtful) - _NAMED)
    if unknown:
        logger.warning("%d texts hold what has no token; that was aligned as <unk>", unknown)
    mean = f", score {score / aligned:.2f} a word" if aligned else ""
    print(f"aligned {aligned} utterances, {words} words, {seconds:.1f} s{mean}: {place}")
    if doubtful:
        print(
            f"doubtful: {len(doubtful)}, which {folder / f'{name}-scores.tsv'} has with a score "
            f"below {_DOUBTFUL:g}"
        )
    if failures:
        print(f"not aligned: {len(failures)}, listed with their reasons in {listed}")
    return not failures
