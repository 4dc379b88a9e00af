"""The ops: one file each with its schema, plain-torch fallback and autograd.

Importing this package defines all schemas first and then loads the compiled libraries, which
implement them for a device. Raw ops write into tensors made by the caller (_library.py).
"""

from pruned_rnnt.ops import (
    band_gather,
    band_lattice,
    column_sums,
    ctc,
    fused_log_probs,
    joiner_rows,
    lattice,
    log_probs,
    prune_bounds,
    simple_log_probs,
)
from pruned_rnnt.ops._native import backend_report, backend_summary, load_native

load_native()

__all__ = [
    "backend_report",
    "backend_summary",
    "band_gather",
    "band_lattice",
    "column_sums",
    "ctc",
    "fused_log_probs",
    "joiner_rows",
    "lattice",
    "log_probs",
    "prune_bounds",
    "simple_log_probs",
]
