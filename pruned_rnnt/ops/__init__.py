"""The ops: one file each with its plain-torch fallback, from which its schema is made.

Importing this package defines all ops first and then loads the compiled libraries, which implement
them for a device. Raw ops write into tensors made by the caller (common/library.py).
"""

from pruned_rnnt.ops.common import column_sums, scale  # noqa: F401
from pruned_rnnt.ops.common.native import backend_report, backend_summary, load_native
from pruned_rnnt.ops.joiner import duration_gradient, fused_log_probs  # noqa: F401
from pruned_rnnt.ops.lattice import band_lattice, ctc, lattice, tdt_lattice  # noqa: F401
from pruned_rnnt.ops.pruning import band_gather, prune_bounds  # noqa: F401
from pruned_rnnt.ops.simple import simple_log_probs, simple_products  # noqa: F401

load_native()

__all__ = ["backend_report", "backend_summary"]
