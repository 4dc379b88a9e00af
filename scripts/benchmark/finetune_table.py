"""Table of fine-tuned .nemo archives: rows of scripts/finetune_nemo."""

from __future__ import annotations

from scripts.benchmark.markdown import markdown, provenance, read_rows


def finetune_nemo() -> str:
    """The last row of each variant."""
    newest = {row["case"]: row for row in read_rows("finetune_nemo")}
    header = ["variant", "steps", "before", "after"]
    lines = [
        [
            name,
            f"{row['steps']:,}",
            f"{row['errors_before'] / row['words']:.2%}",
            f"{row['errors_after'] / row['words']:.2%} ({row['errors_after']:,} of "
            f"{row['words']:,} words)",
        ]
        for name, row in newest.items()
    ]
    return markdown(header, lines) + provenance(newest.values())
