"""All cells of the table."""

from __future__ import annotations

from collections.abc import Iterator

from tests.cells import (
    axes_containers,
    axes_dtypes,
    axes_gradients,
    axes_layouts,
    axes_modes,
    axes_transforms,
    axes_values,
    axes_wrappers,
    compat_subjects,
    diagnostic_subjects,
    k2_subjects,
    layer_subjects,
    logit_subjects,
    module_subjects,
)
from tests.cells.cell import Cell
from tests.cells.subject import Subject

SUBJECTS: list[Subject] = [
    *logit_subjects.SUBJECTS,
    *layer_subjects.SUBJECTS,
    *module_subjects.SUBJECTS,
    *diagnostic_subjects.SUBJECTS,
    *compat_subjects.SUBJECTS,
    *k2_subjects.SUBJECTS,
]


def cells() -> Iterator[Cell]:
    yield from axes_dtypes.cells(SUBJECTS)
    yield from axes_layouts.cells(SUBJECTS)
    yield from axes_values.cells(SUBJECTS)
    yield from axes_values.options(SUBJECTS)
    yield from axes_gradients.cells(SUBJECTS)
    yield from axes_modes.cells(SUBJECTS)
    yield from axes_wrappers.cells()
    yield from axes_containers.cells()
    yield from axes_transforms.cells(SUBJECTS)
