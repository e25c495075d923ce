"""Admin token of a worker that was given none: made at start, and kept in a file that only its user can read."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from specdecode_worker.models.checkpoints.model_store import default_cache_dir
from specdecode_worker.server.errors import CannotStart

_TOKEN_BYTES = 32


def generate_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


@contextlib.contextmanager
def token_file(token: str, port: int, environ: Mapping[str, str]) -> Iterator[Path]:
    """Write the token to ``admin-PORT.token`` in a folder of the user, and delete the file when the block ends.

    The folder is ``specdecode`` below $XDG_RUNTIME_DIR or the user's cache, else a new temporary one.

    Args:
        token: The token.
        port: Admin port, of which a machine has only one.
        environ: Environment variables of the process.

    Raises:
        CannotStart: No folder can be written.
    """
    file = _write_first(_folders(environ), f"admin-{port}.token", token)
    try:
        yield file
    finally:
        # Another worker may have taken the port, and written its own token, since this one stopped to listen.
        with contextlib.suppress(OSError):
            if file.read_text().strip() == token:
                file.unlink()


def _folders(environ: Mapping[str, str]) -> Iterator[Path]:
    if environ.get("XDG_RUNTIME_DIR"):
        yield Path(environ["XDG_RUNTIME_DIR"]) / "specdecode"
    yield default_cache_dir().parent
    with contextlib.suppress(OSError):
        yield Path(tempfile.mkdtemp(prefix="specdecode-"))


def _write_first(folders: Iterator[Path], name: str, token: str) -> Path:
    """Write the token into the first folder that takes it."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # mkstemp creates a file that only its owner can read. The rename replaces what a crashed worker left.
            handle, temporary = tempfile.mkstemp(prefix=f".{name}-", dir=folder)
            with os.fdopen(handle, "w") as opened:
                opened.write(token + "\n")
            os.replace(temporary, folder / name)
            return folder / name
    raise CannotStart("cannot write the admin token to any folder; set SPECDECODE_ADMIN_TOKEN")
