"""The encoders' kernels against plain torch, and their CUDA graphs against passes without graphs.

Axes: N batch, T feature frames, F mel bins, E encoder width.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from pruned_rnnt.model import encoder_graphs, inference_graphs
from pruned_rnnt.model.conformer import ConformerConfig
from pruned_rnnt.model.encoder import Encoder, EncoderConfig
from pruned_rnnt.model.encoder_kinds import build_encoder
from pruned_rnnt.model.fastconformer import FastConformerConfig
from pruned_rnnt.model.kernels import available
from pruned_rnnt.model.zipformer import ZipformerConfig
from pruned_rnnt.model.zipformer.schedule import Clock
from pruned_rnnt.selfcheck.problem import Finding, first_line, guarded
from pruned_rnnt.system.switched_kernels import ENCODERS, GRAPHS

_BINS = 24
# The first is no multiple of a tile; the last is shorter than a convolution.
_FRAMES = (157, 96, 9)
# Training graphs pad others, and balancers count the padding.
_FRAMES_OF_GRAPHS = (160, 96, 9)
# Relative error of output and gradients, each as a whole.
_TOLERANCES = {torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
# The random number of a decision that falls only if it always does.
_NEVER = 1.0
# A schedule's step at which balancers and dropout are at work.
_STEP = 100.0


def encoder_configs() -> dict[str, EncoderConfig]:
    """Small encoders of each kind, offline and streaming."""
    zipformer = functools.partial(
        ZipformerConfig,
        num_mel_bins=_BINS,
        downsampling=(1, 2),
        layers=(1, 1),
        dims=(16, 24),
        unmasked_dims=(8, 12),
        feedforward_dims=(24, 32),
        heads=(2, 2),
        kernel_sizes=(7, 15),
        query_head_dim=6,
        value_head_dim=4,
        position_head_dim=4,
        position_dim=12,
        chunk_sizes=(8, -1),
        left_contexts=(16, -1),
        chunk_size=8,
        left_context=16,
    )
    sizes: dict[str, Any] = {"num_mel_bins": _BINS, "layers": 1, "dim": 24, "heads": 2}
    conformer = functools.partial(ConformerConfig, feedforward_dim=32, **sizes)
    fastconformer = functools.partial(FastConformerConfig, feedforward_dim=32, **sizes)
    causal: dict[str, Any] = {"causal": True, "chunk_size": 4, "left_chunks": 2}
    return {
        "Zipformer": zipformer(),
        "streaming Zipformer": zipformer(causal=True),
        "Conformer": conformer(),
        "streaming Conformer": conformer(**causal),
        "FastConformer": fastconformer(),
        "streaming FastConformer": fastconformer(
            **causal, feature_norm="none", convolution_norm="layer"
        ),
    }


def check_encoders(device: torch.device) -> Iterator[Finding]:
    """Passes without dropout against float64, and training passes with kernels against those of
    plain torch."""
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if _runs_kernels(device):
        _compile(device, dtypes)
    for name, config in encoder_configs().items():
        encoder = _new(config)
        wanted = _passed(copy.deepcopy(encoder).double(), torch.float64)
        for dtype in dtypes if device.type == "cuda" else dtypes[:1]:
            what = f"{name}, {str(dtype).removeprefix('torch.')}"
            against = functools.partial(_against_float64, encoder, wanted, dtype, device, what)
            yield guarded(ENCODERS, what, against)
            what += ", training"
            if _runs_kernels(device):
                yield guarded(
                    ENCODERS, what, functools.partial(_against_twins, encoder, dtype, device, what)
                )
    if not _runs_kernels(device):
        note = available.kernel_report(device)
        yield Finding(part=ENCODERS, what="kernels in training passes", note=f"left out: {note}")


def check_graphs(device: torch.device) -> Iterator[Finding]:
    """Passes that CUDA graphs replay against the same passes without graphs."""
    for name, config in encoder_configs().items():
        encoder = _new(config).to(device)
        if obstacle := encoder_graphs.graph_obstacle(encoder):
            yield Finding(part=GRAPHS, what="CUDA graphs", note=f"left out: {obstacle}")
            return
        for what, compare in (
            (f"{name}, training step in a graph", _training_graph),
            (f"{name}, inference in a graph", _inference_graph),
        ):
            yield guarded(GRAPHS, what, functools.partial(compare, encoder, what))


def _compile(device: torch.device, dtypes: Sequence[torch.dtype]) -> None:
    """Compile in parallel what the comparisons need; a kernel that fails fails again there."""
    from pruned_rnnt.model.kernels.variants import compiled_together

    with compiled_together(device):
        for config in encoder_configs().values():
            encoder = _new(config).to(device)
            for dtype in dtypes:
                for is_training in (False, True):
                    with contextlib.suppress(Exception):
                        _passed(encoder.train(is_training), dtype)
            with contextlib.suppress(Exception), torch.inference_mode():
                encoder.eval()(*_features(device))


def _runs_kernels(device: torch.device) -> bool:
    return available.use_kernels(torch.zeros(1, device=device))


def _new(config: EncoderConfig) -> Encoder:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return build_encoder(config).eval()


def _features(device: torch.device, frames: tuple[int, ...] = _FRAMES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    features_NTF = torch.randn((len(frames), max(frames), _BINS), generator=generator)
    return features_NTF.to(device), torch.tensor(frames)


def _passed(
    encoder: Encoder,
    dtype: torch.dtype,
    graphs: Callable[..., tuple[Tensor, Tensor]] | None = None,
    frames: tuple[int, ...] = _FRAMES,
) -> list[Tensor]:
    """The output's real frames and all gradients, in float64 on the CPU."""
    parameter = next(encoder.parameters())
    features_NTF, lengths_N = _features(parameter.device, frames)
    is_half = dtype in (torch.float16, torch.bfloat16)
    encoder.zero_grad(set_to_none=True)
    encoder.set_step(_STEP)
    run = encoder if graphs is None else graphs
    devices = [parameter.device] if parameter.is_cuda else []
    with (
        torch.random.fork_rng(devices),
        _convolutions_without_tf32(),
        torch.autocast(parameter.device.type, dtype, enabled=is_half),
    ):
        torch.manual_seed(2)
        encoded_NTE, encoded_lengths = run(features_NTF.to(parameter.dtype), lengths_N)
        places_T = torch.arange(encoded_NTE.size(1))
        encoded = encoded_NTE[(places_T < encoded_lengths.cpu()[:, None]).to(encoded_NTE.device)]
        weights = torch.randn(encoded.shape, generator=torch.Generator().manual_seed(3))
        (encoded * weights.to(encoded)).sum().backward()
    found = [p.grad.flatten() for p in encoder.parameters() if p.grad is not None]
    return [x.detach().double().cpu() for x in (encoded, torch.cat(found))]


@contextlib.contextmanager
def _convolutions_without_tf32() -> Iterator[None]:
    """By default, convolutions of float32 tensors round them to TF32."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _measured(encoder: Encoder, dtype: torch.dtype, wanted: Sequence[Tensor]) -> tuple[float, str]:
    """The error of a pass; an exception is an infinite one, with its message."""
    try:
        return _error(_passed(encoder, dtype), wanted), ""
    except Exception as error:
        return float("inf"), first_line(error)


def _against_float64(
    encoder: Encoder,
    wanted: Sequence[Tensor],
    dtype: torch.dtype,
    device: torch.device,
    what: str,
) -> Finding:
    encoder = copy.deepcopy(encoder).to(device)
    (error, said), tolerance = _measured(encoder, dtype, wanted), _TOLERANCES[dtype]
    if error <= tolerance:
        return Finding(part=ENCODERS, what=what, error=error, tolerance=tolerance)
    with _plain():
        plain, _ = _measured(encoder, dtype, wanted)
    is_right = plain <= tolerance
    kernels = "the fused kernels differ from float64"
    said = said or (kernels if is_right else f"{kernels}, and plain torch is wrong as well")
    return Finding(
        part=ENCODERS,
        what=what,
        error=error,
        tolerance=tolerance,
        failure=said,
        plain_is_right=is_right,
    )


def _against_twins(
    encoder: Encoder, dtype: torch.dtype, device: torch.device, what: str
) -> Finding:
    encoder = copy.deepcopy(encoder).to(device).train()
    # Whether a balancer pushes up or down is a question of rounding near its limits.
    with mock.patch.object(Clock, "uniform", return_value=_NEVER):
        with _plain():
            wanted = _passed(copy.deepcopy(encoder), dtype)
        error, said = _measured(encoder, dtype, wanted)
    tolerance = _TOLERANCES[dtype]
    is_wrong = not error <= tolerance
    said = said or "the fused kernels of training differ from plain torch"
    failure = said if is_wrong else ""
    return Finding(
        part=ENCODERS,
        what=what,
        error=error,
        tolerance=tolerance,
        failure=failure,
        plain_is_right=is_wrong,
    )


def _training_graph(encoder: Encoder, what: str) -> Finding:
    eager, captured = copy.deepcopy(encoder).train(), copy.deepcopy(encoder).train()
    graphs = encoder_graphs.EncoderGraphs(captured)
    # Dropout masks have the sizes of the padded batch, so none must be drawn.
    for each in (eager, captured):
        _without_dropout(each)
    with mock.patch.object(Clock, "uniform", return_value=_NEVER):
        for _ in range(2):  # captured, then replayed
            found = _passed(captured, torch.float32, graphs, _FRAMES_OF_GRAPHS)
        wanted = _passed(eager, torch.float32, frames=_FRAMES_OF_GRAPHS)
    return _graph_finding(found, wanted, what)


def _inference_graph(encoder: Encoder, what: str) -> Finding:
    graphs = inference_graphs.InferenceGraphs()
    features_NTF, lengths_N = _features(next(encoder.parameters()).device)
    with torch.inference_mode():
        for _ in range(4):  # the third pass is captured
            replayed_NTE, counts = graphs(encoder, features_NTF, lengths_N)
        eager_NTE, _ = encoder(features_NTF, lengths_N)
    real = [(replayed_NTE[n, :count], eager_NTE[n, :count]) for n, count in enumerate(counts)]
    found, wanted = (torch.cat(each).double().cpu() for each in zip(*real, strict=True))
    return _graph_finding([found], [wanted], what)


def _graph_finding(found: Sequence[Tensor], wanted: Sequence[Tensor], what: str) -> Finding:
    error, tolerance = _error(found, wanted), _TOLERANCES[torch.float32]
    is_wrong = not error <= tolerance
    return Finding(
        part=GRAPHS,
        what=what,
        error=error,
        tolerance=tolerance,
        failure="the graph differs from the same pass without a graph" if is_wrong else "",
        plain_is_right=is_wrong,
    )


def _without_dropout(encoder: Encoder) -> None:
    if encoder.clock is not None:
        encoder.clock.dropout_scale = 0.0
    for module in encoder.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0


@contextlib.contextmanager
def _plain() -> Iterator[None]:
    """Within the context, no fused kernel runs."""
    before = available._mode
    available.set_mode("off")
    try:
        yield
    finally:
        available.set_mode(before)


def _error(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    errors = [
        float((x - y).norm() / y.norm()) if x.shape == y.shape else float("inf")
        for x, y in zip(found, wanted, strict=True)
    ]
    return max((x if x == x else float("inf")) for x in errors)
