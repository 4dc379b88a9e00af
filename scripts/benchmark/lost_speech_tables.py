"""Tables of docs/lost_speech.md: what models lose, mark, and mark without reason.

Rows are those of scripts.lost_speech.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from scripts.benchmark.markdown import Row, markdown, provenance, read_rows


def totals() -> str:
    """A line for each model, way of transcription and commit, over all conditions."""
    rows = read_rows("lost_speech")
    header = ["model", "decoding", "commit", "words", "WER, utterances alone", "WER, all"]
    header += ["WER, worst condition", "lost runs", "unmarked", "false marks in 100 utterances"]
    groups = _grouped(rows, ("model", "settings", "live", "commit"))
    lines = [
        [
            group[0]["model"],
            _decoding(group[0]),
            group[0]["commit"],
            f"{_sum(group, 'words'):,}",
            _wer([row for row in group if row["condition"] == "alone"]),
            _wer(group),
            _wer([max(group, key=lambda row: row["errors"] / row["words"])]),
            str(_sum(group, "lost")),
            str(_sum(group, "unmarked")),
            f"{100 * _sum(group, 'false_marks') / _sum(group, 'utterances'):.2f}",
        ]
        for group in groups
    ]
    return markdown(header, lines) + provenance(rows)


def conditions() -> str:
    """Some conditions, and two models that the page calls A and B; the newest rows."""
    by_model = {
        group[0]["model"]: {row["condition"]: row for row in group}
        for group in _grouped(read_rows("lost_speech"), ("model", "settings", "live", "commit"))
        if not group[0]["settings"] and group[0]["live"] is None
    }
    chosen = [by_model[name] for name in _COMPARED]
    header = ["recordings", *(f"{name}: {what}" for name in "AB" for what in _CELLS)]
    lines = [
        [condition, *(cell for rows in chosen for cell in _cells(rows[condition]))]
        for condition in _SHOWN
    ]
    return markdown(header, lines) + provenance(row for rows in chosen for row in rows.values())


_COMPARED = ("quickstart without silence in training", "quickstart")
_SHOWN = (
    "alone",
    "1 s of zeros before",
    "1 s of faint before",
    "1 s of room before",
    "0 to 2 s of silence before and after",
    "level changes of 30 dB",
    "telephone band",
    "two speakers in turns, 10 s",
    "joined to 20 s without pauses",
    "joined to 20 s with pauses",
)
_CELLS = ("WER", "lost", "unmarked", "false")


def _cells(row: Row) -> list[str]:
    return [_wer([row]), str(row["lost"]), str(row["unmarked"]), str(row["false_marks"])]


def cost() -> str:
    """CPU time of the same conditions, before and now: the least of the repetitions."""
    rows = read_rows("lost_cost")
    commits = list(dict.fromkeys(row["commit"] for row in rows))
    header = ["model", "conditions", *(f"CPU time, {commit}" for commit in commits), "ratio"]
    lines = []
    for group in _grouped(rows, ("model",)):
        names = list(dict.fromkeys(row["condition"] for row in group))
        seconds = [
            sum(
                min(
                    row["cpu_seconds"]
                    for row in group
                    if (row["commit"], row["condition"]) == (commit, name)
                )
                for name in names
            )
            for commit in commits
        ]
        times = [f"{each:.1f} s" for each in seconds]
        ratio = f"{seconds[-1] / seconds[0]:.2f}"
        lines.append([group[0]["model"], "; ".join(names), *times, ratio])
    return markdown(header, lines) + provenance(rows)


def chunks() -> str:
    """One model for streams and whole utterances beside models trained for one chunk size."""
    rows = read_rows("lost_chunks")
    header = ["chunk", "model", "errors, alone", "errors, all", "words", "WER, all"]
    lines = []
    for group in _grouped(rows, ("model", "settings", "live")):
        seeds = _grouped(group, ("seed",))
        alone = [row["errors"] for row in group if row["condition"] == "alone"]
        lines.append(
            [
                _decoding(group[0]),
                group[0]["model"],
                ", ".join(map(str, alone)),
                ", ".join(str(_sum(each, "errors")) for each in seeds),
                f"{_sum(group, 'words'):,}",
                _wer(group),
            ]
        )
    return markdown(header, sorted(lines, key=lambda line: _order(line[0]))) + provenance(rows)


def delays() -> str:
    """Causal models by when they emit: the delay that `decode` prints, and errors."""
    rows = read_rows("lost_delays")
    header = ["model, chunks of 16 frames", "delay of correct words, p50", "words", "WER"]
    lines = [
        [row["model"], f"{row['delay_p50_ms']} ms", f"{row['words']:,}", _wer([row])]
        for row in rows
    ]
    return markdown(header, lines) + provenance(rows)


def first_chunks() -> str:
    """A training continued with and without random first chunks: errors in single utterances."""
    rows = read_rows("first_chunks")
    header = ["chunk", "training", "errors, alone", "words"]
    lines = [
        [
            _decoding(group[0]),
            group[0]["model"],
            ", ".join(str(row["errors"]) for row in group),
            f"{group[0]['words']:,}",
        ]
        for group in _grouped(rows, ("settings", "live", "model"))
    ]
    return markdown(header, sorted(lines, key=lambda line: _order(line[0]))) + provenance(rows)


def chunk_seeds() -> str:
    """How trainings of one model for all chunks end: errors on the validation set."""
    rows = read_rows("chunk_seeds")
    header = ["loss", "steps", "errors, each seed", "words of each"]
    lines = [
        [
            group[0]["training"],
            f"{group[0]['steps']:,}",
            ", ".join(str(row["errors"]) for row in group),
            str(group[0]["words"]),
        ]
        for group in _grouped(rows, ("training", "steps"))
    ]
    return markdown(header, lines) + provenance(rows)


def delay_target() -> str:
    """Trainings with a target of the delay, and with penalties that do not change."""
    rows = read_rows("delay_target")
    header = ["training", "p95 of the delay in ms, each seed", "errors, each seed", "words", "WER"]
    lines = [
        [
            group[0]["training"],
            ", ".join(str(row["delay_p95_ms"]) for row in group),
            ", ".join(str(row["errors"]) for row in group),
            f"{_sum(group, 'words'):,}",
            _wer(group),
        ]
        for group in _grouped(rows, ("training",))
    ]
    return markdown(header, lines) + provenance(rows)


def _order(decoding: str) -> int:
    """Streams by their chunks, then whole utterances."""
    digits = "".join(filter(str.isdigit, decoding.partition(" (")[0]))
    return int(digits) if digits else 10**9


def _decoding(row: Row) -> str:
    if row["live"] is None:
        settings = [each for each in row["settings"] if each != "decode.chunk=-1"]
        return " ".join(["whole utterances", *settings])
    chunk = row["live"]["chunk"]
    return f"live, chunks of {chunk} frames" if chunk else "live, chunks as trained"


def _wer(rows: Sequence[Row]) -> str:
    return f"{_sum(rows, 'errors') / _sum(rows, 'words'):.2%}"


def _sum(rows: Iterable[Row], field: str) -> int:
    return sum(int(row[field]) for row in rows)


def _grouped(rows: Iterable[Row], fields: Sequence[str]) -> list[list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(json.dumps([row[field] for field in fields]), []).append(row)
    return list(groups.values())
