"""Divides speakers into train, dev and test, and into adults and children."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from pruned_rnnt.data.input.augmentation import derived_seed

Group = Literal["adults", "children"]
# Years. Nobody in the corpus's training half is between 15 and 19.
ADULT_AGE = 16


def read_ages(path: Path) -> dict[str, int]:
    """The age in years of each speaker, from a file with a line `SPEAKER AGE` each.

    Raises ValueError naming the file and the line if a line has another form.
    """
    ages: dict[str, int] = {}
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            fields = line.split()
            if not fields:
                continue
            if len(fields) != 2 or not fields[1].isascii() or not fields[1].isdigit():
                raise ValueError(
                    f"{path}:{number} needs a speaker and an age in whole years, such as "
                    f"`0001 6`, got {line.strip()[:100]!r}"
                )
            ages[fields[0]] = int(fields[1])
    return ages


def group_of(age: int) -> Group:
    """Adults are 16 years or older."""
    return "adults" if age >= ADULT_AGE else "children"


def hold_out_speakers(
    speakers: Iterable[str], ages: Mapping[str, int], counts: Mapping[str, int], seed: int
) -> dict[str, str]:
    """Draws speakers for other splits than train; returns the split of each speaker drawn.

    Adults and children are drawn in proportion to their numbers; speakers of unknown age are a
    third group. The draw depends on nothing but the arguments.

    counts: speakers wanted for each split.

    Raises:
        ValueError: a count is below 0, or no speaker would be left for training.
    """
    order = sorted(speakers, key=lambda name: (derived_seed("hold out", seed, name), name))
    for split, count in counts.items():
        if count < 0:
            raise ValueError(f"--{split}-speakers must be at least 0, got {count}")
    if sum(counts.values()) >= len(order):
        wanted = " and ".join(f"{count} for {split}" for split, count in counts.items())
        raise ValueError(
            f"there are {len(order)} speakers, too few to hold out {wanted} and train on others; "
            "lower --test-speakers or --dev-speakers"
        )
    groups: dict[str, list[str]] = {}
    for name in order:
        group = group_of(ages[name]) if name in ages else "unknown"
        groups.setdefault(group, []).append(name)
    # Any first N of this order hold the groups in proportion: the members of a group lie evenly
    # spaced between 0 and 1.
    mixed = sorted(
        ((index + 0.5) / len(members), group, name)
        for group, members in groups.items()
        for index, name in enumerate(members)
    )
    names = iter([name for _, _, name in mixed])
    return {next(names): split for split, count in counts.items() for _ in range(count)}
