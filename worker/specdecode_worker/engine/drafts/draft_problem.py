"""Messages about drafts that cannot be loaded: one sentence that names the file or tensor and the remedy.

The server process imports this module, so it must not import torch.
"""

from __future__ import annotations

import errno
import logging

from pydantic import ValidationError

from specdecode_worker.engine.errors import is_sticky_device_error
from specdecode_worker.models.errors import ModelError

MAX_CHARACTERS = 500
"""Longest message. The report holds one for each draft and has a limit of its own."""
_NO_DRAFT_FAILURE = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""Exceptions that end the process or thread and say nothing about the draft."""
_OUT_OF_MEMORY = ("OutOfMemoryError", "MemoryError")
"""Names of torch's and Python's exceptions for too little memory."""

log = logging.getLogger(__name__)


def describe_failure(error: BaseException, draft: str) -> str:
    """Return the reason why a draft could not be loaded.

    The traceback of an unexpected error is logged. Rust libraries raise panics that are not an Exception, so the caller
    passes every BaseException.

    Args:
        error: Error of the attempt.
        draft: URI of the draft, or its method if it has none.

    Raises:
        BaseException: ``error`` itself, if it says nothing about the draft: the process is to end, or the device does
            not work any more.
    """
    if isinstance(error, _NO_DRAFT_FAILURE) or is_sticky_device_error(error):
        raise error
    return _one_line(_message(error, draft))


def _message(error: BaseException, draft: str) -> str:
    if isinstance(error, ModelError):
        return str(error)
    if isinstance(error, ValidationError):
        return "; ".join(str(one["msg"]) for one in error.errors(include_url=False, include_context=False))
    if _is_out_of_memory(error):
        return (
            f"{draft}: there is too little memory to load the draft; give the worker more memory, lower "
            f"kv_cache_tokens, or take a smaller or quantised draft ({_first_line(error)})"
        )
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return (
            f"{draft} is not complete in the model cache, which is read-only here ({error.filename}); fetch it with "
            "`specdecode-worker pull` where the cache can be written"
        )
    if isinstance(error, OSError):
        return (
            f"{error.filename or draft} cannot be read: {error.strerror or error}; put a file there that the worker's "
            "user may read, or name another draft"
        )
    log.warning("unexpected error while the draft %s was loaded", draft, exc_info=error)
    return (
        f"{draft} cannot be loaded ({type(error).__name__}: {_first_line(error)}); export the draft again, or report "
        "this with the traceback in the worker's log"
    )


def _is_out_of_memory(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}
    # The CPU allocator of torch raises a plain RuntimeError.
    return bool(names.intersection(_OUT_OF_MEMORY)) or "can't allocate memory" in str(error)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0]


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MAX_CHARACTERS else line[: MAX_CHARACTERS - 3] + "..."
