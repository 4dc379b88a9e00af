"""`warp_rnnt.rnnt_loss`, with its checks and their wording; it runs on the CPU as well.

Also `RNNTLoss.apply` and `RNNTLossCompact.apply`, the autograd functions below it.

Its names for the arguments in those messages: xs log_probs, ys labels, xn frames_lengths,
yn labels_lengths.

Axes: N batch, T frames, U symbols + 1, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pruned_rnnt.compat.package_names import named_as
from pruned_rnnt.loss.checks import check_flag, check_options, check_tensor
from pruned_rnnt.loss.logit_losses import check_logits, loss_of_logits
from pruned_rnnt.ops.lattice.recursion import Recursion


class WarpRnntError(ValueError, RuntimeError):
    """Bad input. A RuntimeError as in warp_rnnt, and a ValueError as everywhere in this package."""


@named_as(
    {
        "logits": "log_probs",
        "targets": "labels",
        "logit_lengths": "frames_lengths",
        "target_lengths": "labels_lengths",
    }
)
def rnnt_loss(
    log_probs: Tensor,
    labels: Tensor,
    frames_lengths: Tensor,
    labels_lengths: Tensor,
    average_frames: bool = False,
    reduction: str | None = None,
    blank: int = 0,
    gather: bool = False,
    fastemit_lambda: float = 0.0,
    compact: bool = False,
) -> Tensor:
    """Transducer loss on log-probabilities.

    Args:
        log_probs: float32. (N, T, U, V); or with compact (rows, V), rows = sum of
            frames_lengths * (labels_lengths + 1), of any floating type. With blank = -1 and
            V = 2 (not compact) they are gathered already: [..., 0] blank, [..., 1] label.
        labels: int32, (N, U - 1); with compact (sum of labels_lengths,).
        frames_lengths, labels_lengths: int32, (N,).
        average_frames: divide each loss by its number of frames.
        reduction: None or 'none', 'mean', 'sum'.
        blank: the blank symbol. With compact, -1 - b stands for blank b, as in warp_rnnt's
            gathering mode.
        gather: accepts log_probs that are not contiguous, as in warp_rnnt. It has no other effect:
            the loss never stores more than two values per node beside the gradient.
        fastemit_lambda: scales the gradient through labels by 1 + fastemit_lambda. As in
            warp_rnnt, it may be negative. 0 turns it off; -1 removes the gradient through labels.
        compact: log_probs and labels are packed.

    Returns:
        (N,) without reduction, else a scalar.

    Raises:
        WarpRnntError: wrong contiguity, type, device or shape, in warp_rnnt's words.
        TypeError: average_frames, gather or compact is neither True nor False.
        ValueError: an unknown reduction.
    """
    if reduction not in (None, "none", "mean", "sum"):
        raise ValueError(
            f"Unknown reduction method: {reduction}, expected to be one of ['mean', 'sum', 'none']"
        )
    tensors = {"log_probs": log_probs, "labels": labels}
    tensors |= {"frames_lengths": frames_lengths, "labels_lengths": labels_lengths}
    for name, x in tensors.items():
        check_tensor(name, x)
    flags = {"average_frames": average_frames, "gather": gather, "compact": compact}
    for name, value in flags.items():
        check_flag(name, value)
    if compact:
        log_probs = log_probs.float()
    if gather:
        log_probs = log_probs.contiguous()
    _check_tensors(log_probs, labels, frames_lengths, labels_lengths)
    if compact:
        _check_compact(log_probs, labels, frames_lengths, labels_lengths)
        labels = _padded_labels(labels, labels_lengths)
        blank = -1 - blank if blank < 0 else blank
    else:
        _check_padded(log_probs, labels, frames_lengths, labels_lengths)
        if blank == -1:
            _check(log_probs.shape[3] == 2, "xs must have values only for blank and label")
            labels = torch.ones_like(labels)
            blank = 0
    options = check_options(
        blank,
        check_logits(log_probs, None),
        from_log_probs=True,
        fastemit_lambda=fastemit_lambda,
        negative_fastemit=True,
    )
    batch = (labels, frames_lengths, labels_lengths)
    costs = loss_of_logits(log_probs, batch, None, Recursion(options))
    if average_frames:
        costs = costs / frames_lengths.to(costs)
    if reduction == "sum":
        return costs.sum()
    if reduction == "mean":
        return costs.mean()
    return costs


class RNNTLoss:
    """The function that warp_rnnt.rnnt_loss applies to padded log-probabilities."""

    @staticmethod
    def apply(
        log_probs: Tensor,
        labels: Tensor,
        frames_lengths: Tensor,
        labels_lengths: Tensor,
        blank: int = 0,
        fastemit_lambda: float = 0.0,
    ) -> Tensor:
        """Costs (N,); arguments and errors as in `rnnt_loss`."""
        return rnnt_loss(
            log_probs,
            labels,
            frames_lengths,
            labels_lengths,
            blank=blank,
            fastemit_lambda=fastemit_lambda,
        )


class RNNTLossCompact:
    """The function that warp_rnnt.rnnt_loss applies to packed log-probabilities."""

    @staticmethod
    def apply(
        log_probs: Tensor,
        labels: Tensor,
        frames_lengths: Tensor,
        labels_lengths: Tensor,
        blank: int = 0,
        fastemit_lambda: float = 0.0,
        enable_grad: bool = True,
    ) -> Tensor:
        """Costs (N,); arguments and errors as in `rnnt_loss` with compact. Without enable_grad they
        carry no gradient."""
        return rnnt_loss(
            log_probs if check_flag("enable_grad", enable_grad) else log_probs.detach(),
            labels,
            frames_lengths,
            labels_lengths,
            blank=blank,
            fastemit_lambda=fastemit_lambda,
            compact=True,
        )


def _padded_labels(labels: Tensor, labels_lengths: Tensor) -> Tensor:
    """(sum of labels_lengths,) -> (N, largest of labels_lengths), padded with 0."""
    columns = torch.arange(int(labels_lengths.max()), device=labels.device)
    inside = columns < labels_lengths[:, None]
    padded = torch.zeros(inside.shape, dtype=labels.dtype, device=labels.device)
    return padded.masked_scatter_(inside, labels)


def _check_tensors(xs: Tensor, ys: Tensor, xn: Tensor, yn: Tensor) -> None:
    """Contiguity, type and device, in warp_rnnt's order."""
    named = {"xs": xs, "ys": ys, "xn": xn, "yn": yn}
    for name, tensor in named.items():
        _check(tensor.is_contiguous(), f"{name} must be contiguous")
    _check(xs.dtype == torch.float32, "xs must be a Float tensor")
    for name in ("ys", "xn", "yn"):
        _check(named[name].dtype == torch.int32, f"{name} must be a Int tensor")
    # warp_rnnt refuses all CPU tensors; here only a mixture of devices raises its message.
    if any(tensor.device != xs.device for tensor in named.values()):
        for name, tensor in named.items():
            _check(tensor.is_cuda, f"{name} must be located in the CUDA")


def _check_padded(xs: Tensor, ys: Tensor, xn: Tensor, yn: Tensor) -> None:
    _check(xs.ndim == 4, "xs must have 4 dimensions")
    _check(xn.numel() == xs.shape[0], "xn shape must be equal (N,)")
    _check(yn.numel() == xs.shape[0], "yn shape must be equal (N,)")
    _check(
        ys.ndim == 2 and xs.shape[2] == ys.shape[1] + 1,
        "ys shape (N, U-1) mismatched with xs (N, T, U, V)",
    )


def _check_compact(xs: Tensor, ys: Tensor, xn: Tensor, yn: Tensor) -> None:
    _check(xs.ndim == 2, "xs must have 2 dimensions")
    _check(xn.shape == yn.shape, "xn and yn shape must be equal (N,)")
    _check(yn.numel() > 0 and int(yn.min()) >= 0, "yn must have one length or more, from 0 on")
    _check(ys.numel() == int(yn.sum()), "ys shape must be equal to (sum(yn), )")
    rows = int((xn.long() * (yn.long() + 1)).sum())
    _check(xs.shape[0] == rows, r"xs shape mismatch with (\sum{xn*(yn+1)}, )")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise WarpRnntError(message)
