"""Logs as lines of JSON, for programs that collect them, if the environment says so."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

VARIABLE = "CONSILIENCE_LOG"  # an environment variable, which processes hand on to those that they start
TOLD = logging.getLogger("consilience.told")  # what is printed if logs are text
OTHERS = ("flwr",)  # loggers with handlers of their own


class JsonLines(logging.Formatter):
    """A log record as one line: time, level, logger and message, the facts that come with it, and the traceback of an
    error."""

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            **getattr(record, "facts", {}),
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class OwnHandler(logging.StreamHandler[Any]):
    """A handler that writes every record as the formatter says."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonLines())


def in_json() -> bool:
    """Whether the environment asks for lines of JSON."""
    return os.environ.get(VARIABLE) == "json"


def set_up_logs(*handlers: logging.Handler) -> None:
    """Send the logs of this process to standard error: warnings and errors, as lines of JSON if the environment asks
    for them, else as text by these handlers."""
    if not in_json():
        logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=handlers or None)
        return
    logging.basicConfig(level=logging.WARNING, handlers=[OwnHandler()], force=True)
    TOLD.setLevel(logging.INFO)
    for name in OTHERS:
        logger, handler = logging.getLogger(name), OwnHandler()
        handler.setLevel(logging.INFO)
        logger.handlers, logger.propagate = [handler], False


def tell(text: str, **facts: Any) -> None:
    """Print a text, or log it with these facts if logs are lines of JSON."""
    if in_json():
        if not TOLD.isEnabledFor(logging.INFO):
            set_up_logs()
        TOLD.info(text, extra={"facts": facts})
    else:
        print(text, flush=True)
