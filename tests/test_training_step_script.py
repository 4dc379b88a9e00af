"""The measurement of training steps: its batches, its systems, and runs of a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pruned_rnnt
from scripts.benchmark import training_tables
from scripts.training_step.__main__ import main
from scripts.training_step.batches import (
    BatchLengths,
    load_batches,
    make_batches,
    read_lengths,
    save_batches,
)
from scripts.training_step.kernels import Kernel, read_trace, short_name, union
from scripts.training_step.report import kernel_table, table
from scripts.training_step.session import imported
from scripts.training_step.systems import ROOT, System, Worker, read_systems
from scripts.training_step.worker import use_checkout
from tests.bfloat16_lstm import needs_bfloat16_lstm

TINY = [
    "--model=conformer",
    "--seconds=2.5",
    "--batches=2",
    "--turns=2",
    "--precision=float32",
    "model.encoder.layers=1",
    "model.encoder.dim=16",
    "model.encoder.heads=2",
    "model.encoder.feedforward_dim=16",
    "model.encoder.kernel_size=3",
    "model.encoder.subsampling_channels=2",
    "model.predictor.dim=8",
    "model.joiner_dim=8",
    "train.device=cpu",
]


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    path = tmp_path / "shapes.npz"
    frames = np.random.default_rng(0).integers(10, 40, size=2000).astype(np.int16)
    np.savez(path, frames=frames, tokens=frames // 4 + 1)
    return path


def test_batches_are_full_and_of_different_shapes(shapes: Path) -> None:
    utterances = read_lengths(shapes)
    batches = make_batches(utterances, seconds=4.0, count=20, seed=0)
    assert len({batch.shape for batch in batches}) == len(batches) == 20
    longest = utterances.frames_N.max() / 100
    for batch in batches:
        assert 4.0 - longest < batch.audio_seconds <= 4.0
        assert list(batch.frames_N) == sorted(batch.frames_N, reverse=True)
        # 30 buckets over a ratio of 4 between the longest and the shortest utterance.
        assert batch.frames_N.min() > 0.75 * batch.frames_N.max()
        # The pairs of the file: an utterance of t encoder frames has 9 + 4 (t - 1) feature frames.
        assert list(batch.tokens_N) == [((f - 9) // 4 + 1) // 4 + 1 for f in batch.frames_N]
    # Not in the order of their lengths.
    firsts = [batch.shape[1] for batch in batches]
    assert firsts not in (sorted(firsts), sorted(firsts, reverse=True))
    again = make_batches(utterances, seconds=4.0, count=20, seed=0)
    other = make_batches(utterances, seconds=4.0, count=20, seed=1)
    shape_lists = [[batch.shape for batch in made] for made in (batches, again, other)]
    assert shape_lists[0] == shape_lists[1] != shape_lists[2]


def test_too_few_batches_are_an_error(shapes: Path) -> None:
    with pytest.raises(ValueError, match="different batches of 600 s, needs 5: lower --batches"):
        make_batches(read_lengths(shapes), seconds=600.0, count=5, seed=0)


def test_malformed_lengths_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "shapes.npz"
    np.savez(path, frames=np.array([3]))
    with pytest.raises(ValueError, match=r"has no array .*tokens"):
        read_lengths(path)
    np.savez(path, frames=np.array([3, 4]), tokens=np.array([1, 0]))
    with pytest.raises(ValueError, match="at least 1 for each utterance"):
        read_lengths(path)


def test_saved_batches_are_loaded_again(tmp_path: Path) -> None:
    lengths = [([9, 8, 7], [3, 1, 2]), ([5], [4])]
    batches = [BatchLengths(frames_N=np.array(f), tokens_N=np.array(t)) for f, t in lengths]
    save_batches(batches, tmp_path / "batches.npz")
    loaded = load_batches(tmp_path / "batches.npz")
    assert [(list(b.frames_N), list(b.tokens_N)) for b in loaded] == lengths


def test_kernels_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [
        {"cat": "kernel", "name": "a", "ts": 0.0, "dur": 10.0},
        {"cat": "kernel", "name": "b", "ts": 5.0, "dur": 20.0},
        {"cat": "kernel", "name": "a", "ts": 100.0, "dur": 3.0},
        {"cat": "gpu_memcpy", "name": "copy", "ts": 50.0, "dur": 9.0},
        {"ph": "M", "name": "process_name"},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    busy, kernels = read_trace(path, steps=2)
    assert busy == pytest.approx((25 + 3) / 1e6 / 2)
    assert [(kernel.name, kernel.calls) for kernel in kernels] == [("b", 0.5), ("a", 1.0)]
    assert [kernel.seconds for kernel in kernels] == pytest.approx([10e-6, 6.5e-6])


def test_union_of_intervals() -> None:
    assert union([(5, 6), (0, 4), (1, 2), (3, 5)]) == 6
    assert union([(0, 1), (2, 3)]) == 2
    assert union([]) == 0


def test_kernel_names_are_shortened() -> None:
    name = (
        "void at::native::(anonymous namespace)::vectorized_kernel<4, at::native::Add<float>, "
        "std::array<char*, 3ul> >(int, at::native::Add<float>, (lambda)#1)"
    )
    assert short_name(name) == "vectorized_kernel<4, Add<float>, array<char*, 3ul> >"
    assert short_name("triton_fused_3") == "triton_fused_3"
    assert len(short_name("x" * 300)) == 100
    kernels = [Kernel("one(int)", 2.0, 3e-3), Kernel("two", 1.0, 2e-3), Kernel("three", 4.0, 1e-3)]
    lines = kernel_table("this", kernels, 1).splitlines()
    assert lines[2].split() == ["3.00", "2.0", "one"]
    assert lines[3].split() == ["3.00", "5.0", "2", "other", "kernels"]


def test_systems_and_their_settings(tmp_path: Path) -> None:
    (tmp_path / "extra").mkdir()
    systems, common = read_systems(
        [f"old={tmp_path}{os.pathsep}{tmp_path / 'extra'}"],
        [f"old={tmp_path / 'extra'}"],
        ["train.log_every=7", "old:train.precision=float16"],
    )
    this, old = systems
    assert (this.name, this.paths, this.library, this.overrides) == ("this", (ROOT,), None, ())
    assert (old.name, old.paths) == ("old", (tmp_path, tmp_path / "extra"))
    assert (old.library, old.overrides) == (tmp_path / "extra", ("train.precision=float16",))
    assert old.commit == "old"
    assert common == ["train.log_every=7"]


@pytest.mark.parametrize(
    ("others", "libraries", "overrides", "message"),
    [
        (["."], [], [], "--other is '.', needs NAME=PATH"),
        (["this=."], [], [], "names 'this' twice"),
        (["old=/no/such/folder"], [], [], "/no/such/folder is not a folder"),
        ([], ["old=."], [], "no system 'old', only this"),
        ([], [], ["old:train.seed=3"], "no system 'old', only this"),
    ],
)
def test_wrong_systems_are_errors(
    others: list[str], libraries: list[str], overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_systems(others, libraries, overrides)


def test_names_are_found_in_older_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "Batch": ("pruned_rnnt.no_such_module", "pruned_rnnt.data.input.batch"),
        "Trainer": ("pruned_rnnt.no_such_module",),
    }
    monkeypatch.setattr("scripts.training_step.session._MODULES", places)
    assert imported("Batch").__name__ == "Batch"
    with pytest.raises(ImportError, match=r"has no Trainer in pruned_rnnt\.no_such_module"):
        imported("Trainer")


def test_an_editable_installation_of_another_checkout_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wanted", "installed"):
        (tmp_path / name / "pruned_rnnt").mkdir(parents=True)
        (tmp_path / name / "pruned_rnnt" / "__init__.py").touch()

    class Finder:
        """As scikit-build-core's, for one folder."""

        def __init__(self, folder: Path) -> None:
            self.folder = folder

        def find_spec(self, name: str, path: object, target: object = None) -> Any:
            return PathFinder.find_spec(name, [str(self.folder)])

    installed, own = Finder(tmp_path / "installed"), Finder(tmp_path / "wanted")
    monkeypatch.setattr(sys, "meta_path", [installed, own, PathFinder])
    monkeypatch.setattr(sys, "path", list(sys.path))
    use_checkout([str(tmp_path / "wanted"), "/more"])
    assert sys.meta_path == [own, PathFinder]
    assert sys.path[:2] == [str(tmp_path / "wanted"), "/more"]
    with pytest.raises(SystemExit, match=f"{tmp_path} has no package pruned_rnnt"):
        use_checkout([str(tmp_path)])


def row(**changes: Any) -> dict[str, Any]:
    gpu = {"gpu_busy_ms": 80.0, "gpu_busy_share": 0.8, "kernels": 1234.0}
    memory = {"peak_allocated_gib": 2.25, "peak_reserved_gib": 3.0}
    model = {"model": "small", "causal": True, "ctc": False, "precision": "bfloat16"}
    known = {"device": "GPU", "torch": "2", "commit": "c", "date": "d", "parameters": 10**6}
    sizes = {"max_seconds": 551.0, "audio_seconds": 540.0, "batches": 3, "utterances": 4}
    times = {"step_ms": 100.0, "step_ms_range": [90.0, 110.0], "times_real_time": 5400.0}
    rest = {"system": "this", "losses": "native", "skipped_steps": 0, "overrides": []}
    return {**gpu, **memory, **model, **known, **sizes, **times, **rest, **changes}


def test_printed_table() -> None:
    printed = table([row(), row(system="old", step_ms=150.0, gpu_busy_ms=None)])
    *_, first, second = printed.splitlines()
    assert first.split()[:7] == ["this", "c", "100.0", "90.0", "to", "110.0", "1.00"]
    assert second.split()[6:9] == ["1.50", "5,400x", "-"]
    assert printed.startswith("small, causal, 1.0 M parameters, bfloat16, 3 batches of 540 s")


def test_tables_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = {"alone_step_ms": 90.0, "together_step_ms": 100.0, "side_by_side_step_ms": 95.0}
    efficiency = {"together_efficiency": 0.9, "side_by_side_efficiency": 0.95}
    # 300 MB: 3 ms at 100 GB/s and 1 ms at 300 GB/s.
    exchange = {"exchange_step_ms": 92.0, "gradient_bytes": 3 * 10**8}
    rows = [
        row(step_ms=200.0),
        row(),
        row(system="old", step_ms=150.0, commit="b"),
        row(system="a", commit="a"),  # an earlier version of this package: not shown
        row(world_size=2, gpus=2, **together, **efficiency),
        row(world_size=2, gpus=1, **together, **efficiency, **exchange),
    ]
    path = tmp_path / "training_step.jsonl"
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    monkeypatch.setattr(training_tables, "FOLDER", tmp_path)
    lines = training_tables.training_step().splitlines()
    assert lines[2:4] == [
        "| GPU | small, causal, bfloat16 | pruned_rnnt | 540 s | 100 ms | 5,400x | 80 ms | 1,234 "
        "| 2.2 GiB |",
        "| GPU | small, causal, bfloat16 | old | 540 s | 150 ms | 5,400x | 80 ms | 1,234 "
        "| 2.2 GiB |",
    ]
    assert lines[5:] == [
        "Measured on GPU, torch 2, commit c, d.",
        "Measured on GPU, torch 2, commit b, d.",
    ]
    lines = training_tables.training_processes().splitlines()
    assert lines[2:4] == [
        "| GPU | small, causal, bfloat16 | 2 | 2 | 540 s | 90.0 ms | 95.0 ms | 0.950 | - "
        "| 100.0 ms | 0.900 |",
        "| GPU | small, causal, bfloat16 | 2 | 1 | 540 s | 90.0 ms | 95.0 ms | 0.950 | 92.0 ms "
        "| model: 95.0, 93.0 ms | 0.947, 0.968 |",
    ]


@pytest.mark.slow
def test_systems_train_on_the_same_batches(
    shapes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    options = ["--compare-losses", f"--shapes={shapes}", f"--json={path}"]
    slow = [f"--other=slow={ROOT}", "slow:optimiser.learning_rate=1e-9"]
    rows = main([*TINY, *options, *slow])
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert [row["system"] for row in rows] == ["this", "slow"]
    for measured in rows:
        low, high = measured["step_ms_range"]
        assert 0 < low <= measured["step_ms"] <= high
        speed = 1000 * measured["audio_seconds"] / measured["step_ms"]
        assert measured["times_real_time"] == pytest.approx(speed)
        assert 1.0 < measured["audio_seconds"] <= 2.5
        assert measured["skipped_steps"] == 0
        assert measured["kernels"] is None
        assert measured["losses"] == pruned_rnnt.backend_summary("cpu").split()[0]
    assert rows[0]["overrides"] == TINY[5:]
    assert rows[1]["overrides"][-1] == "optimiser.learning_rate=1e-9"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "this", "slow"]
    # Two batches, twice.
    steps = np.array([line.split() for line in lines[1:5]], dtype=float)
    assert list(steps[:, 0]) == [1, 2, 3, 4]
    # The first loss is that of the same parameters; the second system learns almost nothing.
    assert steps[0, 1] == steps[0, 2]
    assert steps[3, 1] < steps[3, 2]


@pytest.mark.slow
def test_a_system_that_ends_is_named(
    shapes: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    system = System(name="empty", paths=(tmp_path,), library=None, overrides=())
    with (
        Worker(system, TINY[5:], shapes, at_step=0) as worker,
        pytest.raises(RuntimeError, match="process of system 'empty' ended with status 1"),
    ):
        worker.answer()
    assert f"{tmp_path} has no package pruned_rnnt" in capfd.readouterr().err


@pytest.mark.slow
def test_processes_are_measured_side_by_side_and_together(shapes: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = ["-m", "scripts.training_step", *TINY, f"--shapes={shapes}", f"--json={path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *launch, *script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (line,) = path.read_text().splitlines()
    measured = json.loads(line)
    assert measured["world_size"] == 2
    assert measured["gpus"] is None
    assert measured["skipped_steps"] == 0
    fastest, slowest = measured["range"]["alone_step_ms"]
    assert 0 < fastest <= measured["alone_step_ms"] <= slowest
    for kind in ("side_by_side", "together"):
        low, high = measured["range"][f"{kind}_efficiency"]
        assert 0 < low <= measured[f"{kind}_efficiency"] <= high
        kind_fastest, kind_slowest = measured["range"][f"{kind}_step_ms"]
        assert fastest / kind_slowest <= low
        assert high <= slowest / kind_fastest


@pytest.mark.slow
@needs_bfloat16_lstm
def test_transformers_model_trains_on_the_batches(shapes: Path) -> None:
    pytest.importorskip("transformers")
    from scripts.training_step.transformers_peer import PADDING, peer_batch, peer_model, train

    (lengths,) = make_batches(read_lengths(shapes), seconds=2.5, count=1, seed=0)
    cpu = torch.device("cpu")
    batch = peer_batch(lengths, cpu, seed=0)
    assert (batch.labels_NU != PADDING).sum(dim=1).tolist() == lengths.tokens_N.tolist()
    assert batch.mask_NT.sum(dim=1).tolist() == lengths.frames_N.tolist()
    torch.manual_seed(0)
    model = peer_model(cpu, layers=1, dim=32)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = [train(model, optimiser, batch) for _ in range(6)]
    assert losses[-1] < losses[0]
