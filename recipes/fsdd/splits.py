"""Which recordings are for training, for choosing, and for testing."""

from __future__ import annotations

from collections.abc import Sequence

from pruned_rnnt.recipes.fsdd.recordings import Recording

TEST_INDICES = range(5)
DEV_INDICES = range(5, 8)


def split_recordings(
    recordings: Sequence[Recording], test_speakers: Sequence[str]
) -> dict[str, list[Recording]]:
    """The recordings of each split; no recording is in two.

    Without `test_speakers`: test has indices 0-4, dev 5-7, train 8-49 of every speaker. With them:
    test has every recording of those speakers; of the others, dev has 5-7 and train the rest.
    Raises ValueError for a speaker who is not there, or when no one is left to train on.
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
