"""Table of models in eight-bit and four-bit weights: rows of scripts/quantised_models."""

from __future__ import annotations

from typing import Any

from scripts.benchmark.markdown import Row, markdown, provenance, read_rows


def quantised() -> str:
    """The last row of each model and precision; sizes and errors beside those of float32."""
    rows = read_rows("quantised")
    newest = {(row["model"], row["decoding"], row["precision"]): row for row in rows}
    header = ["model", "steps", "decoding", "files", "MB", "kept", "test", "more test"]
    header += ["more errors", "95% interval", "real time"]
    lines = [
        [
            row["model"],
            f"{row['steps']:,}",
            row["decoding"],
            row["precision"],
            _size(row),
            _kept(row),
            _errors(row["measured"]),
            _errors(row["large"]),
            *_increase(row),
            f"{1 / row['real_time_factors']['1']:,.0f}x",
        ]
        for row in newest.values()
    ]
    return markdown(header, lines) + provenance(newest.values())


def _size(row: Row) -> str:
    size = f"{row['bytes'] / 1e6:.2f}"
    return size if _is_float(row) else f"{size} (1/{row['fp32_bytes'] / row['bytes']:.2f})"


def _kept(row: Row) -> str:
    if _is_float(row):
        return "-"
    kept = f"{len(row['kept'])} of {row['layers']}"
    return f"{kept}, refused" if row["refused"] else kept


def _errors(found: dict[str, Any] | None) -> str:
    return "-" if found is None else f"{found['errors']} of {found['words']:,}"


def _increase(row: Row) -> tuple[str, str]:
    """Errors relative to those of float32, and the interval, in percent of these."""
    large = row["large"]
    if large is None or _is_float(row) or not large["fp32_errors"]:
        return "-", "-"
    rate = large["fp32_errors"] / large["words"]
    change, lower, upper = (
        f"{large[name] / rate:+.1%}" for name in ("difference", "lower", "upper")
    )
    return change, f"{lower} .. {upper}"


def _is_float(row: Row) -> bool:
    return bool(row["precision"] == "fp32")
