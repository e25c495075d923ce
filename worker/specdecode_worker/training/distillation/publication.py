"""The clock of a run, and the upload of what it made."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from specdecode_worker.contract import Artifact
from specdecode_worker.files import flush, write_json
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.fetch import model_hash
from specdecode_worker.training.errors import PublishFailed

# Clock of a run over all its restarts, stored in the run's folder every few seconds.

SAVE_SECONDS = 5.0
"""Interval of saves: the most that a kill without warning takes off the run's time."""


class RunClock:
    """Time of a run in seconds, of this process and of those before it.

    ``limit_seconds`` is the longest time of the run; None for no limit.
    """

    def __init__(
        self, path: Path, limit_seconds: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path, self._limit, self._clock = path, limit_seconds, clock
        self._earlier, self._started = _stored_seconds(path), clock()

    @property
    def seconds(self) -> float:
        """Time of the run so far."""
        return self._earlier + self._clock() - self._started

    @property
    def is_over(self) -> bool:
        """True when the limit is reached."""
        return self._limit is not None and self.seconds >= self._limit

    def save(self) -> None:
        """Store the time. A disk that refuses it ends no run: its own writes fail too and say why."""
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, {"seconds": round(self.seconds, 3)})

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Save the time every SAVE_SECONDS while the block runs, and at its end."""
        stop = threading.Event()

        def save_often() -> None:
            while not stop.wait(SAVE_SECONDS):
                self.save()

        thread = threading.Thread(target=save_often, name="run-clock", daemon=True)
        self.save()
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self.save()


def _stored_seconds(path: Path) -> float:
    """Return the time that earlier processes stored, 0 without a readable file."""
    try:
        return max(0.0, float(json.loads(path.read_bytes())["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


# Publication of a candidate: a copy of it where workers read it, in a folder named by its hash.
#
# The copy appears at once and complete, so a worker never loads a part of it. A candidate that was published before is
# not copied again, so a Job that is repeated publishes the same draft at the same place.

PREFIX_FORMS = "pvc://claim/path, s3://bucket/path or file:///path"


def check_place(prefix: str) -> None:
    """Check that drafts can be published below the URI ``prefix``, before a run spends time on one.

    Raises:
        PublishFailed: The place does not exist or cannot be written.
    """
    parent = local_place(prefix)
    if parent is None:
        from specdecode_worker.models import download  # a large library, for these URIs alone

        with _publish_errors():
            download.Bucket(prefix).check()
        return
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise PublishFailed(f"{parent} cannot be written: {error}; mount the claim writable") from error


def local_place(prefix: str) -> Path | None:
    """Return the folder that drafts are published in; None if it is in a bucket.

    Raises:
        PublishFailed: The place does not exist.
    """
    return None if prefix.startswith("s3://") else _folder(prefix, "0").parent


def publish(head: Path, prefix: str) -> Artifact:
    """Copy the draft in ``head`` to ``prefix``/HASH and return its URI and hash.

    Raises:
        PublishFailed: The draft cannot be written there.
    """
    artifact = Artifact(uri=_uri(prefix, draft_hash := model_hash(head)), hash=draft_hash)
    if prefix.startswith("s3://"):
        from specdecode_worker.models import download  # a large library, for these URIs alone

        with _publish_errors():
            download.upload(head, artifact.uri)
        return artifact
    folder = _folder(prefix, artifact.hash)
    try:
        _publish_folder(head, folder, artifact.hash)
    except OSError as error:
        raise PublishFailed(f"the draft cannot be written to {folder}: {error}") from error
    return artifact


@contextlib.contextmanager
def _publish_errors() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise PublishFailed(str(error)) from error


def _uri(prefix: str, draft_hash: str) -> str:
    scheme, _, path = prefix.partition("://")
    return f"{scheme}://{path.rstrip('/')}/{draft_hash}"


def _folder(prefix: str, draft_hash: str) -> Path:
    """Return the local folder of a published draft."""
    with _publish_errors():
        folder = model_store.local_folder(_uri(prefix, draft_hash))
    if folder is None:
        raise PublishFailed(f"drafts cannot be published to {prefix!r}; write {PREFIX_FORMS}")
    claim = folder.relative_to(model_store.CLAIMS).parts[0] if prefix.startswith("pvc://") else None
    if claim is not None and not (model_store.CLAIMS / claim).is_dir():
        raise PublishFailed(f"the claim {claim} is not mounted at {model_store.CLAIMS / claim}")
    return folder


def _publish_folder(head: Path, folder: Path, draft_hash: str) -> None:
    """Copy ``head`` to ``folder`` through a hidden folder and one rename."""
    if _has_hash(folder, draft_hash):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    for leftover in folder.parent.glob(f".{folder.name}.*"):  # of a run that was killed while it copied
        shutil.rmtree(leftover, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for file in sorted(path for path in head.iterdir() if path.is_file()):
            shutil.copyfile(file, partial / file.name)
            flush(partial / file.name)
        if not _has_hash(partial, draft_hash):
            raise PublishFailed(f"the copy in {folder.parent} has other contents than {head}: check the volume")
        partial.chmod(0o755)  # workers read it with another user
        if folder.exists():
            shutil.rmtree(folder)  # it has other contents than its name says
        partial.rename(folder)
        flush(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _has_hash(folder: Path, draft_hash: str) -> bool:
    try:
        return model_hash(folder) == draft_hash
    except OSError:
        return False
