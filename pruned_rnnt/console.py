"""Where log lines and progress bars of the commands go: stderr."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class _PipedFormatter(logging.Formatter):
    """Time and message, and the level of what is no information: 71 of 80 columns for messages."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno > logging.INFO:
            record.message = f"{record.levelname} {record.message}"
        return super().formatMessage(record)


def start_logging() -> Console:
    """Log lines of this package go through the console that also draws the progress bar."""
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console(stderr=True)
    handler: logging.Handler = logging.StreamHandler()
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
    else:
        handler.setFormatter(_PipedFormatter())
    logger = logging.getLogger("pruned_rnnt")
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    return console
