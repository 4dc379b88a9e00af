"""Size and speed of encoder files with weights of eight and four bits, beside float32.

    pruned-rnnt export RUN
    python -m scripts.quantised_speed RUN/export/onnx/encoder.onnx

Takes float32 files, offline or streaming, quantises copies of them, and runs all on the same noise
in onnxruntime with one thread, in turns. Prints a row of Markdown for each: bytes, milliseconds of
processor time for one run (the least of all repeats and the median, which do not count the time of
other programs), and the relative change of the first output. An offline run has 5 s of audio, a
streaming one a chunk.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from pruned_rnnt.export.graph_pair import onnx_session
from pruned_rnnt.export.precision import QUANTISED, write_quantised

_FRAMES = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="float32 ONNX files")
    parser.add_argument("--repeats", type=int, default=25, metavar="N", help="(default: 25)")
    options = parser.parse_args()
    print("| file | precision | bytes | of fp32 | ms, least | median | change of output |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for path in options.files:
        for row in rows(path, options.repeats):
            print(row, flush=True)


def rows(path: Path, repeats: int) -> Iterator[str]:
    """A row for each precision of the file."""
    with tempfile.TemporaryDirectory() as place:
        paths = {"fp32": path}
        for precision in QUANTISED:
            paths[precision] = Path(place) / f"{precision}.onnx"
            write_quantised(precision, path, paths[precision])
        sizes = {name: file.stat().st_size for name, file in paths.items()}
        sessions = {name: onnx_session(file, 1) for name, file in paths.items()}
    feeds = _noise(sessions["fp32"])
    seconds: dict[str, list[float]] = {name: [] for name in sessions}
    outputs = {}
    for _ in range(repeats):
        for name, session in sessions.items():
            started = time.process_time()
            outputs[name] = session.run(None, feeds)[0]
            seconds[name].append(time.process_time() - started)
    norm = np.linalg.norm(outputs["fp32"])
    for name in sessions:
        cells = (
            path.name,
            name,
            f"{sizes[name]:,}",
            f"1/{sizes['fp32'] / sizes[name]:.2f}",
            f"{1e3 * min(seconds[name]):.2f}",
            f"{1e3 * statistics.median(seconds[name]):.2f}",
            f"{np.linalg.norm(outputs[name] - outputs['fp32']) / norm:.1%}",
        )
        yield f"| {' | '.join(cells)} |"


def _noise(session: Any) -> dict[str, Any]:
    """Inputs of one utterance or chunk: noise as features, zeros as state."""
    feeds = {}
    for each in session.get_inputs():
        shape = [1 if isinstance(axis, str) else axis for axis in each.shape]
        feeds[each.name] = np.zeros(shape, np.int64 if "int64" in each.type else np.float32)
    if "x_lens" in feeds:
        feeds["x"] = np.zeros((1, _FRAMES, feeds["x"].shape[2]), np.float32)
        feeds["x_lens"] = np.array([_FRAMES])
    feeds["x"] = np.random.default_rng(0).standard_normal(feeds["x"].shape).astype(np.float32)
    return feeds


if __name__ == "__main__":
    main()
