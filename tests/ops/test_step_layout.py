"""Live ranges of the pruned step's buffers on CUDA, asserted by the layout built for debugging, and
sizes of workspaces that Python and C++ compute alike."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pruned_rnnt.ops.common.matrix_products import parts_of
from pruned_rnnt.ops.lattice.lattice import split_workspace
from pruned_rnnt.ops.lattice.tdt_lattice import tdt_workspace
from pruned_rnnt.ops.step.step_library import padded_to_16_bytes

CSRC = Path(__file__).parents[2] / "csrc"
TORCH = Path(torch.__file__).parent
COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

SOURCE = """
#include "cuda/step/step_layout.cuh"
#include <string>
using namespace pruned_rnnt::cuda;
namespace {
std::string message;
template <typename Work>
const char* error_of(Work&& work) {
  message.clear();
  try {
    work();
  } catch (const std::exception& error) {
    message = error.what();
  }
  return message.c_str();
}
void* const kMemory = reinterpret_cast<void*>(uintptr_t{1} << 40);
constexpr auto kFloat = pruned_rnnt::ScalarType::Float;
}  // namespace
extern "C" const char* field_names() { return kStepFields; }
extern "C" const char* lay_out(const StepFields* fields) {
  return error_of([&] {
    StepFields all = *fields;
    all.chunk_rows = all.least_chunk_rows;
    all.chunk_rows = roomy_chunk_rows(StepSizes(all));
    const StepSizes s(all);
    const SavedBuffers saved(s, kMemory);
    const WorkBuffers work(s, kMemory);
    if (!s.differentiable) return;
    for (int64_t done = 0; done <= s.chunk_rows; done += s.S) work.hidden_rows_after(done);
  });
}
extern "C" int64_t cut_elements_of(int64_t utterances, int64_t columns, int64_t frames) {
  return pruned_rnnt::cut_elements(utterances, columns, frames);
}
extern "C" int64_t tdt_elements_of(int64_t rows, int64_t utterances, int64_t symbols,
                                   int64_t durations, int64_t longest) {
  return pruned_rnnt::tdt_elements(rows, utterances, symbols, durations, longest);
}
extern "C" int64_t parts_of_sums(int64_t rows, int64_t columns) {
  return pruned_rnnt::parts_of(rows, columns);
}
extern "C" const char* share(int first_until, int second_from) {
  return error_of([&] {
    Arena arena(kMemory);
    arena.take(kFloat, {100}, {kScores, static_cast<Phase>(first_until)});
    arena.rewind();
    arena.take(kFloat, {3}, {static_cast<Phase>(second_from), kBand});
  });
}
extern "C" const char* too_many_hidden_rows(const StepFields* fields) {
  return error_of([&] {
    WorkBuffers work(StepSizes(*fields), kMemory);
    work.first_rows += work.logits.size(0);
    work.hidden_rows_after(1);
  });
}
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("layout")
    (folder / "layout.cpp").write_text(SOURCE)
    command = [str(COMPILER), "-std=c++17", "-O0", "-shared", "-fPIC", "-DPRUNED_RNNT_DEBUG"]
    command += ["-DTORCH_TARGET_VERSION=0x020b000000000000", f"-isystem{TORCH / 'include'}"]
    files = [str(folder / "layout.cpp"), "-o", str(folder / "layout.so")]
    subprocess.run([*command, f"-I{CSRC}", *files], check=True)
    library = ctypes.CDLL(str(folder / "layout.so"))
    for name in ("field_names", "lay_out", "share", "too_many_hidden_rows"):
        getattr(library, name).restype = ctypes.c_char_p
    for name in ("cut_elements_of", "tdt_elements_of", "parts_of_sums"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def packed_fields(layout: ctypes.CDLL, values: dict[str, float]) -> bytes:
    kinds = dict(field.split(":") for field in layout.field_names().decode().split())
    assert values.keys() <= kinds.keys()
    numbers = [
        struct.pack("d" if kind == "d" else "q", values.get(name, 0))
        for name, kind in kinds.items()
    ]
    return b"".join(numbers)


def fields(vocabulary: int, dtype: torch.dtype, differentiable: bool, **others: int) -> dict:
    """Of a step on an H100: 16-bit exponentials, in parts."""
    types = ["float32", "float64", "float16", "bfloat16"]
    frames, columns, batch = 50, 12, 3
    values = {"N": batch, "T": frames, "W": columns, "E": 24, "P": 16, "D": 32, "S": 5}
    values |= {"V": vocabulary, "padded_V": padded_to_16_bytes(vocabulary, dtype)}
    durations = others.get("K", 0)
    values |= {"padded_K": padded_to_16_bytes(durations, dtype), "longest": 4}
    values |= {"padded_O": padded_to_16_bytes(vocabulary + durations, dtype)}
    values |= {"rows": batch * frames * 5, "least_chunk_rows": 50, "hidden_rows": 20}
    values |= {"dtype": types.index(str(dtype).removeprefix("torch.")), "exp_dtype": 3}
    values |= {"am_parts": 2, "lm_parts": 3, "exp_multiple": 8, "exp_together": 2}
    return values | {"differentiable": differentiable} | others


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocabulary", [7, 500, 5000])
def test_buffers_that_share_memory_are_live_at_different_times(
    layout: ctypes.CDLL, vocabulary: int, dtype: torch.dtype
) -> None:
    flags = ("differentiable", "exact_bounds", "packed", "cast_encoder")
    for *values, durations in itertools.product(*[(0, 1)] * len(flags), (0, 5)):
        chosen = dict(zip(flags, values, strict=True)) | {"K": durations}
        memory = packed_fields(layout, fields(vocabulary, dtype, **chosen))
        assert layout.lay_out(memory) == b"", chosen


def test_the_assertions_find_mistakes(layout: ctypes.CDLL) -> None:
    assert layout.share(1, 2) == b""
    assert b"live in the same memory" in layout.share(2, 2)
    values = fields(500, torch.bfloat16, True, chunk_rows=50)
    message: Callable[[bytes], bytes] = layout.too_many_hidden_rows
    assert b"logits that are not read" in message(packed_fields(layout, values))


def test_workspaces_have_the_same_sizes_in_python(layout: ctypes.CDLL) -> None:
    px = torch.empty(1000, device="meta")
    for sizes in ((1, 1, 1), (3, 7, 150), (64, 512, 30_000)):
        assert split_workspace(px, *sizes).numel() == layout.cut_elements_of(*sizes)
    for batch, symbols, durations in ((1, 0, [1]), (3, 12, [0, 1, 2, 3, 4]), (2, 100, [8, 0])):
        sizes = (px.numel(), batch, symbols, len(durations), max(durations))
        work = tdt_workspace(px, batch, symbols, durations)
        assert work.numel() == layout.tdt_elements_of(*sizes)
    for rows, columns in ((0, 5), (31, 8), (47_700, 504), (1 << 20, 8192), (1 << 20, 1 << 20)):
        assert parts_of(rows, columns) == layout.parts_of_sums(rows, columns)
