"""Inspect a lattice: the probability that pruning keeps, the delay of symbols, pictures.

| question | function |
| --- | --- |
| How much probability does the band keep? | `retained_mass` |
| Is s_range too small? | `band_edge_mass` |
| How late are the symbols? | `mean_symbol_delay` |
| In which frame is each symbol emitted? | `viterbi_alignment` of `log_prob_rows` |
| How probable is each arc? | `occupancy_of_rows` of `log_prob_rows` |
| What does it look like? | `lattice_figure`, `utterance_figure` |

For lattices with durations there are `tdt_log_prob_rows`, `tdt_viterbi_alignment` and
`occupancy_of_tdt_rows`; `lattice_occupancy` takes the rows of either.
"""

from pruned_rnnt.diagnostics.emission_times import (
    Alignment,
    SymbolDelay,
    TdtAlignment,
    mean_symbol_delay,
    tdt_viterbi_alignment,
    viterbi_alignment,
)
from pruned_rnnt.diagnostics.figure import lattice_figure
from pruned_rnnt.diagnostics.log_prob_rows import (
    LogProbRows,
    TdtLogProbRows,
    lattice_occupancy,
    log_prob_rows,
    occupancy_of_rows,
    occupancy_of_tdt_rows,
    tdt_log_prob_rows,
)
from pruned_rnnt.diagnostics.mass import BandEdgeMass, RetainedMass, band_edge_mass, retained_mass
from pruned_rnnt.diagnostics.utterance_figure import Track, utterance_figure

__all__ = [
    "Alignment",
    "BandEdgeMass",
    "LogProbRows",
    "RetainedMass",
    "SymbolDelay",
    "TdtAlignment",
    "TdtLogProbRows",
    "Track",
    "band_edge_mass",
    "lattice_figure",
    "lattice_occupancy",
    "log_prob_rows",
    "mean_symbol_delay",
    "occupancy_of_rows",
    "occupancy_of_tdt_rows",
    "retained_mass",
    "tdt_log_prob_rows",
    "tdt_viterbi_alignment",
    "utterance_figure",
    "viterbi_alignment",
]
