"""Where log lines and progress bars of the commands go: stderr."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


# To replace it where `main` is called again.
_HANDLER_NAME = "pruned-rnnt console"


class _PipedFormatter(logging.Formatter):
    """Time and message, and the level of what is no information: 71 of 80 columns for messages."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno > logging.INFO:
            record.message = f"{record.levelname} {record.message}"
        return super().formatMessage(record)


def start_logging() -> Console:
    """Log lines go through the console that also draws the progress bar.

    The handler is that of the root logger: where that has none, other packages that log (lhotse)
    make it one, and every line of ours would be printed twice.
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
