"""The ops, each with its plain-torch fallback, from which its schema is made.

Importing this package defines all ops first and then loads the compiled libraries, which implement
them for a device. Raw ops write into tensors made by the caller (common/library.py).

Axes in all files: N batch, T frames, U symbols, S columns kept a frame (s_range), E encoder width,
P predictor width, D joiner width, V vocabulary, K durations of TDT, R rows of the whole geometry
(common/row_geometry.py), r rows of the chunk at hand. acc is the dtype of sums: float64 for float64
input, else float32.
"""

from pruned_rnnt.ops.common import autograd, matrix_products  # noqa: F401
from pruned_rnnt.ops.common.native import backend_report, backend_summary, load_native
from pruned_rnnt.ops.joiner import fused_log_probs, log_probs  # noqa: F401
from pruned_rnnt.ops.lattice import ctc, lattice, tdt_lattice  # noqa: F401
from pruned_rnnt.ops.pruning import band_gather, prune_bounds  # noqa: F401
from pruned_rnnt.ops.search import search_frames  # noqa: F401
from pruned_rnnt.ops.simple import simple_log_probs, simple_products  # noqa: F401

load_native()

__all__ = ["backend_report", "backend_summary"]
