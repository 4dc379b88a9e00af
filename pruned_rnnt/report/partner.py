"""Which results are compared with each other: those of the same data with equal settings."""

from __future__ import annotations

from collections.abc import Sequence

from pruned_rnnt.run.result_file import ResultFile


def has_equal(result: ResultFile, others: Sequence[ResultFile]) -> bool:
    """Whether one of the others has equal settings, and the same data or set."""
    found = partner(result, others)
    return found is not None and not unlike_settings(result, found)


def partner(result: ResultFile, others: Sequence[ResultFile]) -> ResultFile | None:
    """The result to compare with: of the same data or set, with equal settings if there is one.

    Args:
        others: newest first.
    """
    candidates = [other for other in others if _same_data(result, other)]
    candidates = candidates or [other for other in others if other.set_name == result.set_name]
    alike = [other for other in candidates if not unlike_settings(result, other)]
    return next(iter(alike or candidates), None)


def _same_data(first: ResultFile, second: ResultFile) -> bool:
    return (
        first.inputs is not None
        and second.inputs is not None
        and first.inputs.utterances == second.inputs.utterances
    )


def unlike_settings(first: ResultFile, second: ResultFile) -> list[str]:
    """The settings in which two results differ, or why they are unknown."""
    if first.inputs is None or second.inputs is None:
        old = first if first.inputs is None else second
        return [
            f"the settings of {old.stem} are unknown, because its scores file is missing, damaged "
            "or of version 0.1"
        ]
    return first.inputs.differing_settings(second.inputs)


def differences(first: ResultFile, second: ResultFile) -> list[str]:
    """Why a difference between two results says nothing about what they compare."""
    found = unlike_settings(first, second)
    if first.inputs and second.inputs and first.inputs.model == second.inputs.model:
        # The settings are compared; but words and characters are not.
        return [line for line in found if line.startswith("decode.metric:")]
    return found
