"""Damages of files: cut off, overwritten, repeated, and values of other types in JSON."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

_ODD = (None, True, -1, 10**30, 1e308, float("nan"), "", "x\n\x1b[31m", [], [[1]], {}, {"a": None})
_DEEP = b"[" * 100_000
_DIGITS = b"9" * 5000


def damaged_bytes(content: bytes, count: int) -> Iterator[bytes]:
    """`count` damages of any file, the same in every run."""
    rng = random.Random(len(content))
    yield b""
    for _ in range(count):
        changed = bytearray(content)
        begin = rng.randrange(len(content))
        end = min(len(content), begin + rng.choice((1, 4, 64)))
        kind = rng.randrange(6)
        if kind == 0:
            del changed[begin:]
        elif kind == 1:
            del changed[begin:end]
        elif kind == 2:
            changed[begin:end] = rng.choice((b"\0", b"\xff")) * (end - begin)
        elif kind == 3:
            changed[begin] ^= 1 << rng.randrange(8)
        elif kind == 4:
            changed[begin:begin] = rng.randbytes(rng.choice((1, 100)))
        else:
            changed[begin:begin] = content[:end]
        yield bytes(changed)


def damaged_json(content: bytes) -> Iterator[bytes]:
    """Each value replaced by each odd one, each key left out; impossible JSON."""
    yield from (_DEEP, _DIGITS, b'{"a": ' + _DIGITS + b"}", b"null", b"[]", b'"text"')
    values = json.loads(content)
    for path in _places(values):
        for odd in (*_ODD, _places):
            changed = copy.deepcopy(values)
            parent = changed
            for key in path[:-1]:
                parent = parent[key]
            if odd is _places:
                del parent[path[-1]]
            else:
                parent[path[-1]] = odd
            yield json.dumps(changed).encode()


def _places(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = values.items() if isinstance(values, dict) else enumerate(values)
    for key, value in items:
        yield (*path, key)
        if isinstance(value, dict | list) and value:
            yield from _places(value, (*path, key))
