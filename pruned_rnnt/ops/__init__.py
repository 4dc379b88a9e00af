"""The ops: one file each with its schema, plain-torch fallback and autograd.

Importing this package defines all schemas first and then loads the compiled libraries, which
implement them for a device. Raw ops write into tensors made by the caller (common/library.py).
"""

from pruned_rnnt.ops.common import column_sums
from pruned_rnnt.ops.common.native import backend_report, backend_summary, load_native
from pruned_rnnt.ops.joiner import fused_log_probs, joiner_rows, log_probs
from pruned_rnnt.ops.lattice import band_lattice, ctc, lattice
from pruned_rnnt.ops.pruning import band_gather, prune_bounds
from pruned_rnnt.ops.simple import simple_log_probs

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
