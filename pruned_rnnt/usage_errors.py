"""Errors of a user's request that a command prints in one line, without a traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """Options that do not go together, or name something that does not exist."""


class ExportError(ValueError):
    """A model that cannot be exported or loaded; the message says which and why."""
