"""The console of the commands: log lines and progress bars on stderr."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


# Identifies the handler, so that a second call of `main` replaces it.
_HANDLER_NAME = "pruned-rnnt console"


class _PipedFormatter(logging.Formatter):
    """Time and message, and the level above INFO; of 80 columns, 71 are left for the message."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno > logging.INFO:
            record.message = f"{record.levelname} {record.message}"
        return super().formatMessage(record)


def start_logging() -> Console:
    """Send log lines to the console that also draws the progress bar; returns the console.

    The handler belongs to the root logger. Without one, other packages that log (lhotse) would
    add their own to it, and each of our lines would be printed twice.
    """
    from rich.console import Console
    from rich.logging import RichHandler

    console = Console(stderr=True)
    handler: logging.Handler = logging.StreamHandler()
    if console.is_terminal:
        handler = RichHandler(console=console, show_path=False, omit_repeated_times=False)
    else:
        handler.setFormatter(_PipedFormatter())
    handler.set_name(_HANDLER_NAME)
    root = logging.getLogger()
    root.handlers = [h for h in root.handlers if h.get_name() != _HANDLER_NAME] + [handler]
    logging.getLogger("pruned_rnnt").setLevel(logging.INFO)
    return console
