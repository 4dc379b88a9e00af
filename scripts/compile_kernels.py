"""Compile the Triton kernels of the encoders in advance; needs no GPU.

    python -m scripts.compile_kernels FOLDER --capabilities 80 90

Writes FOLDER/encoder_kernels_80.zip and so on, which processes look for beside the native libraries
(or in the folder of PRUNED_RNNT_LIBRARY_DIR). csrc/CMakeLists.txt does this when it builds the CUDA
library, if Triton is installed.

The list of kernels comes from passes of all kinds of encoders over short batches. Models of other
sizes mostly need the same kernels; a process compiles those that are missing.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas

from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.encoder import Encoder
from pruned_rnnt.model.encoder_kinds import build_encoder
from pruned_rnnt.model.fastconformer import FastConformerConfig
from pruned_rnnt.model.kernels import prebuilt, variants
from pruned_rnnt.model.kernels.available import call_first_kernel
from pruned_rnnt.model.kernels.binary import Image
from pruned_rnnt.model.kernels.target import SHARED_BYTES, chosen_for
from pruned_rnnt.model.zipformer.config import SIZES
from pruned_rnnt.model.zipformer.schedule import Recorder
from pruned_rnnt.train.optim.scaled_adam_kernels import FusedPasses
from scripts.documented_parser import documented_parser

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Feature frames of batches: kernels over rows of attention have block sizes for each power of two.
_FRAMES = (400, 800, 1600, 3200)
_MOST_PROCESSES = 16

Variant = tuple[Any, int, tuple[Any, ...]]


class EmptyProducts(TorchDispatchMode):
    """Matrix products and convolutions give undefined results: a CPU takes minutes for them in half
    precision, and no choice of a kernel depends on their results."""

    _SKIPPED = (
        torch.ops.aten.addmm,
        torch.ops.aten.baddbmm,
        torch.ops.aten.bmm,
        torch.ops.aten.mm,
        torch.ops.aten.convolution,
        torch.ops.aten.convolution_backward,
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket not in self._SKIPPED:
            return func(*args, **kwargs)
        shapes = func(*tree_map_only(Tensor, _empty_on("meta"), args), **kwargs)
        return tree_map_only(Tensor, _empty_on("cpu"), shapes)


def _empty_on(device: str) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)


def encoders() -> Iterator[Encoder]:
    """One layer in each stack, since all layers of a stack call the same kernels."""
    for config in SIZES.values():
        shallow = dataclasses.replace(config, layers=(1,) * len(config.layers))
        yield build_encoder(shallow)
        yield build_encoder(dataclasses.replace(shallow, causal=True))
    for dim, conformer in product((256, 512), (ConformerConfig, FastConformerConfig)):
        yield build_encoder(conformer(layers=1, dim=dim, feedforward_dim=4 * dim))


def pass_over(encoder: Encoder, frames: int, dtype: torch.dtype) -> None:
    """A training pass, as when it is captured as a graph, and an inference pass."""
    features_NTF = torch.zeros((2, frames, encoder.config.num_mel_bins))
    lengths_N = torch.full((2,), frames)
    clock = getattr(encoder, "clock", None)
    if clock is not None:
        clock.recorder = Recorder(torch.device("cpu"))
    with (
        EmptyProducts(),
        torch.autocast("cpu", dtype, enabled=dtype != torch.float32, cache_enabled=False),
    ):
        encoded_NTE, _ = encoder.train()(features_NTF, lengths_N)
        parameters = [p for p in encoder.parameters() if p.requires_grad]
        torch.autograd.grad(
            encoded_NTE, parameters, torch.zeros_like(encoded_NTE), allow_unused=True
        )
        if clock is not None:
            clock.recorder = None
        with torch.inference_mode():
            encoder.eval()(features_NTF, lengths_N)


def listed(capability: int) -> list[Variant]:
    """The variants that the encoders and the optimiser call."""
    with chosen_for(capability), variants.listed() as names:
        for encoder, dtype in product(encoders(), _DTYPES):
            pass_over(encoder, _FRAMES[0], dtype)
        longer = next(encoders())
        for frames, dtype in product(_FRAMES[1:], _DTYPES):
            pass_over(longer, frames, dtype)
        call_first_kernel(torch.device("cpu"))
        FusedPasses([torch.zeros(8)]).call_usual_kernels()
    return sorted(names.found, key=str)


_work: list[Variant] = []


def compiled(place: int, capability: int) -> Image | None:
    """A variant; None, and a line that says why, if it cannot be compiled."""
    jit, num_warps, parts = _work[place]
    try:
        return variants.compiled_image(jit, num_warps, parts, GPUTarget("cuda", capability, 32))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        print(f"{jit.__name__} {parts} for {capability}: {reason}", file=sys.stderr, flush=True)
        return None


def main(arguments: Sequence[str] | None = None) -> None:
    parser = documented_parser("scripts.compile_kernels", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--capabilities", nargs="+", type=int, required=True, metavar="N", choices=SHARED_BYTES
    )
    parser.add_argument(
        "--processes",
        type=int,
        default=min(len(os.sched_getaffinity(0)), _MOST_PROCESSES),
        metavar="N",
    )
    options = parser.parse_args(arguments)
    if variants.other_code_is_wanted():
        raise SystemExit("environment variables of Triton change the code of kernels: unset them")
    torch.set_num_threads(options.processes)
    for capability in options.capabilities:
        started = time.monotonic()
        _work[:] = listed(capability)
        seconds = time.monotonic() - started
        print(f"{len(_work)} variants of kernels found in {seconds:.1f} s", flush=True)
        # The list and Triton's functions are there in processes that are forked.
        with ProcessPoolExecutor(options.processes, get_context("fork")) as pool:
            found = pool.map(partial(compiled, capability=capability), range(len(_work)))
            images = {
                variant: image
                for variant, image in zip(_work, found, strict=True)
                if image is not None
            }
        path = options.folder / prebuilt.file_name(capability)
        prebuilt.write(path, images, toolkit=get_ptxas(capability).version)
        seconds = time.monotonic() - started
        print(f"{path}: {path.stat().st_size / 2**20:.1f} MiB, {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
