"""Errors in a user's request, which commands print as one line without a traceback."""

from __future__ import annotations


class UsageError(ValueError):
    """Options that exclude each other, or name something that does not exist."""


class ExportError(ValueError):
    """A model that cannot be exported or loaded; the message names it and the reason."""
