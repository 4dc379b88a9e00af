"""Mass that a trained model's band keeps, for several rules that choose the band's windows.

    python -m scripts.benchmark.band_rules RUN [--s-range 3 5 8] [--keep]
    python -m scripts.benchmark.band_rules planted [--steps 1500] [--noise 0.5] [--keep]

The utterances are the test set of a run, or synthetic ones on whose known alignments a small model
is trained first (planted_model). For each width a row is printed for every rule:

    first    the first of the windows whose score is within 1e-5 of the largest
    argmax   the window with the largest score, as in k2: rounding decides between equal windows
    middle   the middle one of the windows within 1e-5 of the largest: prune_bounds
    exact    the windows with the largest sum of scores over all frames: prune_bounds(exact=True)

retained: share of the simple loss's occupancy inside the band. pruned - full: difference in nats
between an utterance's pruned and full loss with the same joiner (mean, 95th percentile, largest).
--keep adds rows to results/band_rules.jsonl.

Axes: N batch, T frames, U symbols, S columns kept per frame, E encoder width, P predictor width.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import pruned_rnnt
from pruned_rnnt.data.input.datamodule import DataModule
from pruned_rnnt.diagnostics import retained_mass
from pruned_rnnt.loss.results import Bounds, Occupancy
from pruned_rnnt.train.run import load_model, run_config
from scripts.benchmark.results import FOLDER, commit

TIE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Row:
    """Means over the utterances of one set; losses in nats per utterance."""

    run: str
    s_range: int
    rule: str
    utterances: int
    tied_frames: float
    retained: float
    excess_mean: float
    excess_95: float
    excess_most: float
    commit: str
    date: str


@dataclass(frozen=True, kw_only=True)
class Lattices:
    """A batch with the arguments of the losses (lengths (N,) int32), the training loss, and the
    simple loss's occupancy."""

    encoder_NTE: Tensor
    predictor_NUP: Tensor
    targets_NU: Tensor
    frames_N: Tensor
    symbols_N: Tensor
    loss: Tensor
    occupancy: Occupancy


def lattices_of(
    criterion: pruned_rnnt.PrunedTransducerLoss,
    encoder_NTE: Tensor,
    predictor_NUP: Tensor,
    targets_NU: Tensor,
    lengths: Iterable[Tensor],
    step: int,
) -> Lattices:
    """Lattices of a batch, after that many training steps."""
    frames_N, symbols_N = (x.int() for x in lengths)
    losses = criterion(encoder_NTE, predictor_NUP, targets_NU, frames_N, symbols_N, step)
    return Lattices(
        encoder_NTE=encoder_NTE,
        predictor_NUP=predictor_NUP,
        targets_NU=targets_NU,
        frames_N=frames_N,
        symbols_N=symbols_N,
        loss=losses.loss,
        occupancy=losses.occupancy,
    )


def window_scores(lattices: Lattices, s_range: int) -> Tensor:
    """score (N,T,W) as in step 1 of prune_bounds.py, -inf after an utterance's last window."""
    emit, blank = lattices.occupancy
    windows = max(blank.shape[2] - s_range, 0) + 1
    wide = torch.nn.functional.pad(blank, (0, max(s_range - blank.shape[2], 0)))
    score = wide.unfold(2, s_range, 1).sum(-1)
    score = score - torch.nn.functional.pad(emit, (1, 0))[:, :, :windows]
    last_N = (lattices.symbols_N.long() + 1 - s_range).clamp_min(0)
    behind = torch.arange(windows) > last_N[:, None]
    return score.masked_fill(behind[:, None, :], -torch.inf)


def band_of(choice_NT: Tensor, lattices: Lattices, s_range: int) -> Bounds:
    """The band for one chosen window per frame: steps 2 to 4 of ops/pruning/prune_bounds.py."""
    t, k = torch.arange(choice_NT.shape[1]), s_range - 1
    last_N1 = (lattices.symbols_N.long()[:, None] + 1 - s_range).clamp_min(0)
    s0 = torch.where(t < lattices.frames_N[:, None] - 1, choice_NT, last_N1)
    s1 = s0.flip(1).cummin(1).values.flip(1)
    reach = (s1 - k * t).flip(1).cummax(1).values.flip(1) + k * t
    return Bounds(torch.minimum(reach, k * t).int(), s_range)


def tied_windows(lattices: Lattices, s_range: int) -> Tensor:
    score = window_scores(lattices, s_range)
    return score >= score.amax(2, keepdim=True) - TIE


def by_first(lattices: Lattices, s_range: int) -> Bounds:
    tied = tied_windows(lattices, s_range)
    return band_of(tied.to(torch.uint8).argmax(2), lattices, s_range)


def by_argmax(lattices: Lattices, s_range: int) -> Bounds:
    return band_of(window_scores(lattices, s_range).argmax(2), lattices, s_range)


def by_library(lattices: Lattices, s_range: int, *, exact: bool) -> Bounds:
    lengths = lattices.frames_N, lattices.symbols_N
    return pruned_rnnt.prune_bounds(lattices.occupancy, *lengths, s_range, exact=exact)


RULES: dict[str, Callable[[Lattices, int], Bounds]] = {
    "first": by_first,
    "argmax": by_argmax,
    "middle": partial(by_library, exact=False),
    "exact": partial(by_library, exact=True),
}


def joiner_loss(joiner: pruned_rnnt.Joiner, lattices: Lattices, bounds: Bounds | None) -> Tensor:
    """Loss (N,) of a joiner, inside a band or over the whole lattice."""
    return pruned_rnnt.rnnt_loss_fused(
        joiner.encoder_proj(lattices.encoder_NTE),
        joiner.decoder_proj(lattices.predictor_NUP),
        joiner.output_linear.weight,
        joiner.output_linear.bias,
        lattices.targets_NU,
        bounds,
        lattices.frames_N,
        lattices.symbols_N,
        activation=joiner.activation,
        reduction="none",
    )


class TrainedJoiner(NamedTuple):
    """A model's joiner, and lattices of utterances on which it was not trained."""

    joiner: pruned_rnnt.Joiner
    lattices: Iterator[Lattices]


def from_run(run: Path) -> TrainedJoiner:
    config = run_config(run, ["train.device=cpu"])
    model = load_model(config).model
    criterion = model.pruned_loss
    if criterion is None or config.loss.rnnt_type != "regular":
        raise SystemExit(f"{run}: needs a model with the pruned loss and the regular topology")

    def lattices() -> Iterator[Lattices]:
        for batch in DataModule(config.data).test_loader():
            encoder_NTE, frames_N = model.encode(batch.features_NTF, batch.feature_lengths_N)
            predictor_NUP = model.predictor.forward_targets(batch.targets_NU)
            lengths = frames_N, batch.target_lengths_N
            yield lattices_of(criterion, encoder_NTE, predictor_NUP, batch.targets_NU, lengths, 0)

    return TrainedJoiner(model.joiner, lattices())


def planted_model(steps: int, noise: float) -> TrainedJoiner:
    """Train two convolutions on synthetic utterances, with the pruned loss of width 5 (seed 0).

    An utterance has 10 to 40 symbols out of 29. Each lasts 4 to 9 frames, which are the symbol's
    vector plus noise. A batch has 8 utterances.
    """
    torch.manual_seed(0)
    vocabulary, width = 30, 64
    symbols = torch.randn(vocabulary, 24)
    encoder = nn.Sequential(
        nn.Conv1d(24, width, 9, padding=4), nn.ReLU(), nn.Conv1d(width, width, 9, padding=4)
    )
    predictor = nn.Embedding(vocabulary, width)
    joiner = pruned_rnnt.Joiner(width, width, width, vocabulary)
    criterion = pruned_rnnt.PrunedTransducerLoss(
        joiner, width, width, vocabulary, warm_up_steps=100, reduction="sum"
    )
    modules = nn.ModuleList([encoder, predictor, criterion])
    optimiser = torch.optim.Adam(modules.parameters(), lr=2e-3)

    def batch(step: int) -> Lattices:
        texts = [torch.randint(1, vocabulary, (int(torch.randint(10, 41, ())),)) for _ in range(8)]
        spoken = [text.repeat_interleave(torch.randint(4, 10, text.shape)) for text in texts]
        targets_NU = nn.utils.rnn.pad_sequence(texts, batch_first=True).int()
        frames = nn.utils.rnn.pad_sequence([symbols[x] for x in spoken], batch_first=True)
        encoder_NTE = encoder((frames + noise * torch.randn_like(frames)).transpose(1, 2))
        encoder_NTE = encoder_NTE.transpose(1, 2)
        predictor_NUP = predictor(nn.functional.pad(targets_NU.long(), (1, 0)))
        lengths = (torch.tensor([len(x) for x in rows]) for rows in (spoken, texts))
        return lattices_of(criterion, encoder_NTE, predictor_NUP, targets_NU, lengths, step)

    for step in range(steps):
        lattices = batch(step)
        loss = lattices.loss / lattices.symbols_N.sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 100 == 0 or step + 1 == steps:
            print(f"step {step}: {loss.item():.3f} nats per symbol, simple and pruned", flush=True)
    return TrainedJoiner(joiner, (batch(steps) for _ in range(25)))


@torch.no_grad()
def measured(name: str, trained: TrainedJoiner, widths: list[int]) -> list[Row]:
    joiner = trained.joiner
    retained, excess, tied = (defaultdict(list) for _ in range(3))
    for lattices in trained.lattices:
        lengths = lattices.frames_N, lattices.symbols_N
        full_N = joiner_loss(joiner, lattices, None)
        for s_range in widths:
            frames = torch.arange(lattices.encoder_NTE.shape[1])
            inside = frames < lattices.frames_N[:, None]
            tied[s_range].append((tied_windows(lattices, s_range).sum(2) > 1)[inside])
            for rule, choose in RULES.items():
                bounds = choose(lattices, s_range)
                kept = retained_mass(lattices.occupancy, bounds, *lengths).total
                retained[s_range, rule].append(kept)
                excess[s_range, rule].append(joiner_loss(joiner, lattices, bounds) - full_N)
    rows = []
    for s_range in widths:
        for rule in RULES:
            more = torch.cat(excess[s_range, rule])
            rows.append(
                Row(
                    run=name,
                    s_range=s_range,
                    rule=rule,
                    utterances=len(more),
                    tied_frames=float(torch.cat(tied[s_range]).double().mean()),
                    retained=float(torch.cat(retained[s_range, rule]).double().mean()),
                    excess_mean=float(more.mean()),
                    excess_95=float(more.quantile(0.95)),
                    excess_most=float(more.max()),
                    commit=commit(),
                    date=datetime.date.today().isoformat(),
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "run", help="folder of a trained run, or `planted` for synthetic utterances"
    )
    parser.add_argument(
        "--steps", type=int, default=1500, help="training steps on synthetic utterances"
    )
    parser.add_argument(
        "--noise", type=float, default=0.5, help="standard deviation of the synthetic noise"
    )
    parser.add_argument("--s-range", type=int, nargs="+", default=[3, 5, 8])
    parser.add_argument("--keep", action="store_true", help="add the rows to the results folder")
    options = parser.parse_args()
    if options.run == "planted":
        name = f"planted, noise {options.noise}, {options.steps} steps"
        trained = planted_model(options.steps, options.noise)
    else:
        name, trained = Path(options.run).name, from_run(Path(options.run))
    print("S  rule    tied frames  retained  pruned - full: mean  95%     largest")
    for row in measured(name, trained, options.s_range):
        print(
            f"{row.s_range:<2} {row.rule:7} {row.tied_frames:11.1%}  {row.retained:8.5f}  "
            f"{row.excess_mean:19.4f}  {row.excess_95:.4f}  {row.excess_most:.4f}"
        )
        if options.keep:
            with (FOLDER / "band_rules.jsonl").open("a") as file:
                file.write(json.dumps(asdict(row)) + "\n")


if __name__ == "__main__":
    main()
