"""Draws the picture of a transducer lattice: `python scripts/lattice_picture.py [--output FILE]`.

Without input it draws a synthetic utterance whose am and lm scores pass through the package's own
simple loss, pruning bounds and Viterbi alignment. With `--scores FILE` it draws the first utterance
of a torch file holding a dict am (N, T, V), lm (N, U + 1, V), targets (N, U), logit_lengths (N,),
target_lengths (N,), and optionally tokens (list of U strings), as a training run can save.

Axes: N batch, T frames, U symbols, V vocabulary.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

import pruned_rnnt
from pruned_rnnt import diagnostics

SENTENCE = "▁the ▁l at t ice ▁of ▁a ▁trans duc er ▁and ▁the ▁band ▁that ▁prun ing ▁keep s"


def synthetic_scores() -> dict[str, Any]:
    """Scores of one utterance: each symbol has a soft peak at its own time, blank in between."""
    generator = torch.Generator().manual_seed(5)
    tokens = SENTENCE.split()
    symbols, frames = len(tokens), 110
    durations = 2.5 + 6 * torch.rand(symbols, generator=generator)
    for pause, extra in ((5, 6.0), (10, 9.0), (13, 3.0)):
        durations[pause] += extra
    times = durations.cumsum(0)
    times = times / times[-1] * (frames - 8)
    # Each symbol occurs once, so that lm determines the next symbol and am its time.
    am = torch.full((1, frames, symbols + 1), -4.0)
    width = 2.0 + 2.5 * torch.rand(symbols, generator=generator)
    distance = (torch.arange(frames)[:, None] - times) / width
    am[0, :, 1:] = 6.0 - 1.6 * distance.abs().clamp(max=6.0)
    am[0, :, 1:] += 0.8 * torch.randn(frames, symbols, generator=generator)
    am[0, :, 0] = 4.5
    lm = torch.full((1, symbols + 1, symbols + 1), -7.0)
    for position in range(symbols):
        lm[0, position, position + 1] = 0.0
    lm[0, :, 0] = 0.0
    return {
        "am": am,
        "lm": lm,
        "targets": torch.arange(1, symbols + 1)[None].int(),
        "logit_lengths": torch.tensor([frames], dtype=torch.int32),
        "target_lengths": torch.tensor([symbols], dtype=torch.int32),
        "tokens": tokens,
    }


def draw(scores: dict[str, Any], s_range: int, frame_seconds: float, output: Path) -> None:
    """Save the picture of the scores, and print a summary."""
    lengths = scores["logit_lengths"], scores["target_lengths"]
    am, lm, targets = scores["am"], scores["lm"], scores["targets"]
    occupancy = pruned_rnnt.rnnt_loss_simple(am, lm, targets, *lengths).occupancy
    bounds = pruned_rnnt.prune_bounds(occupancy, *lengths, s_range)
    logits = am[:, :, None] + lm[:, None]
    rows = diagnostics.log_prob_rows(logits, targets, *lengths)
    alignment = diagnostics.viterbi_alignment(rows.emit, rows.blank, *lengths)
    figure = diagnostics.lattice_figure(
        occupancy,
        bounds,
        alignment,
        logit_length=int(lengths[0][0]),
        target_length=int(lengths[1][0]),
        tokens=scores.get("tokens"),
        title="Paths of a transducer through the lattice, and the band that pruning keeps",
        frame_seconds=frame_seconds,
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    kept = diagnostics.retained_mass(occupancy, bounds, *lengths)
    print(f"{output}: the band keeps {kept.total[0]:.2%} of the probability.")
    print(diagnostics.band_edge_mass(occupancy, bounds, *lengths).advice)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a transducer lattice.")
    parser.add_argument("--scores", type=Path, help="torch file with am, lm, targets and lengths")
    parser.add_argument("--output", type=Path, default=Path("recipes/lattice.png"))
    parser.add_argument("--s-range", type=int, default=5, help="columns kept per frame")
    parser.add_argument("--frame-seconds", type=float, default=0.04)
    arguments = parser.parse_args()
    scores = synthetic_scores() if arguments.scores is None else torch.load(arguments.scores)
    draw(scores, arguments.s_range, arguments.frame_seconds, arguments.output)


if __name__ == "__main__":
    main()
