"""Models in buckets of an S3 store: fetched by content, and uploaded so that no reader takes a part for the whole.

    <cache>/s3/<bucket>/<path>/<content>/

``content`` is a hash of the names, sizes and ETags that the store lists. Other objects under the same URI therefore get
another folder, and a folder appears by one rename when all of its files are there. Where the cache cannot be written,
as in a container that serves, models go to a folder for temporary files, which holds at most TEMPORARY_BYTES.

Endpoint, region and credentials are those of AWS's own tools: AWS_ENDPOINT_URL_S3, AWS_REGION, AWS_ACCESS_KEY_ID,
AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE and so on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import S3Store

from specdecode_worker.models.download_folder import MANIFEST, check_room, disk_full_errors, locked
from specdecode_worker.models.errors import (
    AccessDenied,
    BadUri,
    DiskFull,
    HashMismatch,
    HubUnreachable,
    NotOnHub,
    PullFailed,
)
from specdecode_worker.models.fetch import CONFIGS, is_writable
from specdecode_worker.models.fields import TEMPLATE_FOLDER
from specdecode_worker.models.pickled_weights import convert, weights_of

TEMPORARY_BYTES = 1 << 30
"""Most bytes of models in the folder for temporary files: half of what a worker's pod has for them."""
_CHUNK_BYTES = 1 << 20
_RETRIES = 4
_URI = re.compile(r"s3://(?P<bucket>[a-z0-9][a-z0-9.-]{1,61}[a-z0-9])/(?P<path>[^/].*)", re.ASCII)
_FETCHED_SUFFIXES = (".json", ".jinja")

Progress = Callable[[str, int, int], None]
"""Callback with a file's name, the bytes present and the total bytes."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """Object directly below the path of a model, or below its folder of chat templates."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class StoredModel:
    """Place of a model in a bucket."""

    bucket: str
    path: str

    @property
    def uri(self) -> str:
        """The s3:// URI."""
        return f"s3://{self.bucket}/{self.path}"

    def folder(self, cache: Path) -> Path:
        """Return the folder in ``cache`` that has a folder for each content of this model."""
        return cache / "s3" / self.bucket / quote(self.path, safe="")

    def store(self) -> S3Store:
        """Create the client. The server's certificate is checked; plain HTTP needs an endpoint that says so."""
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
        # A request may take as long as its data keep coming: heads are gigabytes where targets are large.
        options = {"allow_http": endpoint.startswith("http://"), "timeout": "1d", "read_timeout": "60s"}
        return S3Store(self.bucket, prefix=self.path, client_options=options, retry_config={"max_retries": _RETRIES})  # type: ignore[arg-type]


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


def stored_model(uri: str) -> StoredModel:
    """Parse s3://bucket/path. Raise BadUri if it has another form."""
    match = _URI.fullmatch(uri.rstrip("/"))
    if match is None or any(part in ("", ".", "..") for part in match["path"].split("/")):
        raise BadUri(f"{uri!r} names no folder in a bucket; write s3://bucket/path")
    return StoredModel(match["bucket"], match["path"])


def fetch(uri: str, cache: Path, progress: Progress = lambda name, received, size: None) -> Path:
    """Return the folder with the present content of a model, after fetching it if it is not in the cache.

    If the store does not answer, the content that was fetched last is returned.

    Raises:
        PullFailed: The model cannot be fetched.
        BadUri: ``uri`` has another form.
    """
    model = stored_model(uri)
    places = [cache, Path(tempfile.gettempdir()) / "specdecode-models"]
    store = model.store()
    try:
        files = _list(model, store)
    except HubUnreachable as error:
        known = _last_fetched(model, places)
        if known is None:
            raise
        _note(f"{uri}: {error}; the content that was fetched last is used")
        return known
    content = _content(files)
    for place in places:
        if (model.folder(place) / content / MANIFEST).is_file():
            return model.folder(place) / content
    place = cache if is_writable(cache) else places[1]
    base = model.folder(place)
    with disk_full_errors(base):
        base.mkdir(parents=True, exist_ok=True)
        with locked(base.with_name(f"{base.name}.lock"), _note):
            if not (base / content / MANIFEST).is_file():
                if place != cache:
                    _make_room(place, sum(file.size for file in files))
                _fetch_all(model, store, files, base / content, progress)
    return base / content


def check_bucket(uri: str) -> None:
    """Raise PullFailed if the store does not answer, denies access or has no such bucket."""
    model = stored_model(uri)
    with _store_errors(model):
        obstore.list_with_delimiter(model.store())


def upload(folder: Path, uri: str) -> None:
    """Upload the files of a model. config.json comes last, and without it there is no model to read.

    Raises:
        PullFailed: The store does not answer or denies access.
        BadUri: ``uri`` has another form.
    """
    model = stored_model(uri)
    store = model.store()
    files = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.name == "config.json")
    with _store_errors(model):
        for path in files:
            obstore.put(store, path.name, path)


def _list(model: StoredModel, store: S3Store) -> list[StoredFile]:
    """Return the files of a model that are fetched, in the order of their names."""
    with _store_errors(model):
        listed = [
            *obstore.list_with_delimiter(store)["objects"],
            *obstore.list_with_delimiter(store, TEMPLATE_FOLDER)["objects"],
        ]
    files = [StoredFile(str(entry["path"]), int(entry["size"]), str(entry["e_tag"] or "")) for entry in listed]
    weights = weights_of(file.name for file in files)
    wanted = [
        file
        for file in files
        if file.name.endswith(_FETCHED_SUFFIXES) or file.name == "tokenizer.model" or file.name in weights
    ]
    if not weights or all(file.name not in CONFIGS for file in wanted):
        raise NotOnHub(f"{model.uri} holds no config.json with *.safetensors or pytorch_model*.bin; check its path")
    return sorted(wanted, key=lambda file: file.name)


def _content(files: Sequence[StoredFile]) -> str:
    """Return the name of the folder for these files."""
    lines = "".join(f"{file.name}\t{file.size}\t{file.etag}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]


def _fetch_all(
    model: StoredModel, store: S3Store, files: Sequence[StoredFile], folder: Path, progress: Progress
) -> None:
    """Fetch the files into a hidden folder and rename it to ``folder``."""
    check_room(folder.parent, sum(file.size for file in files))
    for leftover in folder.parent.glob(".*"):  # of a download that was ended; the lock excludes others
        shutil.rmtree(leftover, ignore_errors=True)
    partial = folder.with_name(f".{folder.name}")
    partial.mkdir()
    try:
        for file in files:
            with _store_errors(model):
                _fetch_file(store, file, partial, progress)
        for path in convert(partial, [file.name for file in files], partial):
            path.unlink()
        (partial / MANIFEST).write_text(json.dumps({"uri": model.uri, "files": [file.name for file in files]}) + "\n")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _fetch_file(store: S3Store, file: StoredFile, folder: Path, progress: Progress) -> None:
    """Fetch the object that was listed, and no other one that has replaced it meanwhile."""
    received = 0
    (folder / file.name).parent.mkdir(exist_ok=True)
    response = obstore.get(store, file.name, options={"if_match": file.etag} if file.etag else {})
    with (folder / file.name).open("wb") as out:
        for chunk in response.stream(min_chunk_size=_CHUNK_BYTES):
            out.write(chunk)
            received += len(chunk)
            progress(file.name, received, file.size)
    if received != file.size:
        raise HashMismatch(f"{file.name} has {received} bytes, the store listed {file.size}; pull again")


def _last_fetched(model: StoredModel, places: Sequence[Path]) -> Path | None:
    manifests = [path for place in places for path in model.folder(place).glob(f"*/{MANIFEST}")]
    newest = max(manifests, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else newest.parent


def _make_room(place: Path, needed: int) -> None:
    """Delete the oldest models of the folder for temporary files until ``needed`` bytes fit."""
    if needed > TEMPORARY_BYTES:
        raise DiskFull(
            f"the model cache cannot be written, and {place} holds {TEMPORARY_BYTES / 1e9:.1f} GB at most: name the "
            "model in the configuration, so that `pull` fetches it"
        )
    models = sorted(place.glob(f"s3/*/*/*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
    sizes = {path.parent: sum(file.stat().st_size for file in path.parent.iterdir()) for path in models}
    for folder, _ in list(sizes.items()):
        if sum(sizes.values()) + needed <= TEMPORARY_BYTES:
            return
        del sizes[folder]
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _store_errors(model: StoredModel) -> Iterator[None]:
    """Turn the errors of the client into those of a pull. Its messages go on with pages of debug output."""
    try:
        yield
    except PreconditionError:
        raise HashMismatch(f"{model.uri} changed while it was fetched; pull again") from None
    except (BaseError, FileNotFoundError, ValueError) as error:
        raise _pull_error(model, error) from None


def _pull_error(model: StoredModel, error: Exception) -> PullFailed:
    words = str(error).partition("\n")[0][:300]
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or "403 Forbidden" in words or " 401 " in words:
        return AccessDenied(f"{model.uri}: the store denies access; check AWS_ACCESS_KEY_ID and the policy: {words}")
    if isinstance(error, FileNotFoundError) or "404 Not Found" in words:
        return NotOnHub(f"{model.uri} does not exist; check bucket and path")
    return HubUnreachable(f"{model.uri}: the store does not answer; check AWS_ENDPOINT_URL_S3: {words}")


def _note(text: str) -> None:
    print(f"specdecode-worker: {text}", file=sys.stderr, flush=True)
