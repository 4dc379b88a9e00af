"""Divides the recordings into train, dev and test."""

from __future__ import annotations

from collections.abc import Sequence

from pruned_rnnt.recipes.fsdd.recordings import Recording

TEST_INDICES = range(5)
DEV_INDICES = range(5, 8)


def split_recordings(
    recordings: Sequence[Recording], test_speakers: Sequence[str]
) -> dict[str, list[Recording]]:
    """The recordings of each split; no recording is in two splits.

    Without `test_speakers`, test has the indices 0-4 of every speaker, dev 5-7 and train 8-49.
    Otherwise test has all recordings of `test_speakers`; of the other speakers, dev has 5-7 and
    train the rest. Raises ValueError for an unknown speaker, or if a split is empty.
    """
    speakers = sorted({r.speaker for r in recordings})
    for name in test_speakers:
        if name not in speakers:
            raise ValueError(f"--test-speakers: no recordings of {name!r}; there are {speakers}")
    splits: dict[str, list[Recording]] = {"train": [], "dev": [], "test": []}
    for recording in recordings:
        if recording.speaker in test_speakers:
            splits["test"].append(recording)
        elif recording.index in DEV_INDICES:
            splits["dev"].append(recording)
        elif recording.index in TEST_INDICES and not test_speakers:
            splits["test"].append(recording)
        else:
            splits["train"].append(recording)
    for split, members in splits.items():
        if not members:
            raise ValueError(f"no recordings are left for the {split} split; there are {speakers}")
    return splits
