"""Downloads of models from a hub or a bucket, and uploads to a bucket.

A file is received in parts, several at a time, each at its place in ``NAME.KEY.partial``. ``NAME.KEY.parts`` marks the
parts that are there, so that a download that was killed goes on with the others. ``KEY`` stands for the content that
was announced. The sha256 is computed behind the parts as they arrive, compared with what the source announces, and
written to the manifest, which comes last. From then on the folder is complete.

A hub has the API of the Hugging Face hub, of which huggingface_hub reads listings and hashes: the sha256 of a large
file, the git blob hash of a small one. A bucket is one of S3, Google Cloud Storage or Azure Blob Storage. Endpoint and
credentials are in the variables of their own tools: AWS_ENDPOINT_URL_S3, AWS_ACCESS_KEY_ID and so on,
GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME. A bucket announces no hashes, unless `upload` wrote its
manifest there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import httpx

from specdecode_worker.files import locked, write_json
from specdecode_worker.models.download_folder import (
    CONFIGS,
    MANIFEST,
    HubModel,
    check_room,
    disk_full_errors,
    places_of,
    writable_place,
)
from specdecode_worker.models.errors import (
    AccessDenied,
    BadUri,
    DiskFull,
    HashMismatch,
    HubUnreachable,
    NotOnHub,
    PullFailed,
)
from specdecode_worker.models.fields import TEMPLATE_FOLDER
from specdecode_worker.models.pickled_weights import convert, weights_of

PART_BYTES = 64 << 20
"""Bytes of a part: some seconds of one connection, and what a kill can lose of each."""
_PARTS = 8
"""Parts that are received at a time. One connection to a store carries some hundred megabytes a second."""
_ATTEMPTS = 5
_OTHER_PULL = "another pull of this model is running; waiting for it"
_CHUNK_BYTES = 1 << 20
TEMPORARY_BYTES = 1 << 30
"""Most bytes of models in the folder for temporary files: half of what a worker's pod has for them."""
Progress = Callable[[str, int, int], None]
"""Callback with a file's name, the bytes present and the total bytes."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File as its source announces it."""

    name: str
    size: int
    digest: str = ""
    """sha256 (64 hex digits), git blob hash (40 hex digits), or "" where nothing is announced."""
    etag: str = ""
    """Version of an object in a bucket."""


class Source(Protocol):
    """Hub or bucket that files are read from."""

    retry_seconds: float

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a file from ``start`` to ``end``, or more of them.

        Raises:
            HubUnreachable: The connection failed; it may be tried again.
            PullFailed: The file cannot be read.
        """
        ...


def _fetch_all(source: Source, files: Sequence[RemoteFile], folder: Path, progress: Progress, **about: str) -> None:
    """Fetch the files into ``folder``, convert pickled weights, and write the manifest with ``about`` in it."""
    _remove_leftovers(files, folder)
    check_room(folder, sum(file.size - _present(folder, file) for file in files))
    with ThreadPoolExecutor(_PARTS) as threads:
        digests = {file.name: _fetch_file(source, file, folder, progress, threads) for file in files}
    pickles = convert(folder, [file.name for file in files], folder)
    for path in folder.glob("*.safetensors"):
        digests[path.name] = digests.get(path.name) or _file_hash(path)
    listed = [{"name": name, "size": (folder / name).stat().st_size, "digest": digests[name]} for name in digests]
    write_json(folder / MANIFEST, {**about, "files": listed})
    for path in [*pickles, *(path for end in ("partial", "parts", "sha256") for path in folder.rglob(f"*.{end}"))]:
        path.unlink()


def _remove_leftovers(files: Sequence[RemoteFile], folder: Path) -> None:
    """Delete what a pull of another commit left in ``folder``, files of the same names included."""
    states = {file.name: _states(folder, file) for file in files}
    kept = {path for paths in states.values() for path in paths}
    kept |= {folder / name for name, (_, _, known) in states.items() if known.is_file()}
    for path in {*folder.rglob("*")} - kept:
        if not path.is_dir():
            path.unlink()


def _fetch_file(source: Source, file: RemoteFile, folder: Path, progress: Progress, threads: ThreadPoolExecutor) -> str:
    """Fetch one file, or what is missing of it, and return its sha256."""
    done, (partial, journal, known) = folder / file.name, _states(folder, file)
    if done.is_file() and known.is_file():
        return known.read_text()
    done.parent.mkdir(exist_ok=True)
    hashes = [hashlib.sha256()]
    if len(file.digest) == 40:
        hashes.append(hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False))
    flags = os.O_RDWR | os.O_CREAT
    with open(os.open(partial, flags, 0o644), "r+b") as content, open(os.open(journal, flags, 0o644), "r+b") as marks:
        parts = _Parts(source, file, content.fileno(), marks.fileno(), progress)
        futures = {at: threads.submit(parts.receive, at) for at in parts.missing()}
        try:
            for at in range(parts.count):
                if at in futures:
                    futures[at].result()
                for chunk in parts.stored(at):
                    for one in hashes:
                        one.update(chunk)
        finally:
            parts.ended = True
            for future in futures.values():
                future.cancel()
            for future in futures.values():
                future.cancelled() or future.exception()  # a part that is received writes to these files
    digest = hashes[0].hexdigest()
    if file.digest and hashes[-1].hexdigest() != file.digest:
        partial.unlink()
        journal.unlink()
        raise HashMismatch(f"{file.name} has hash {hashes[-1].hexdigest()}, {file.digest} was announced; it was "
                           "removed, pull again, and upload it again if that does not help")  # fmt: skip
    known.write_text(digest)
    os.replace(partial, done)
    journal.unlink()
    return digest


class _Parts:
    """Parts of a file that is received."""

    def __init__(self, source: Source, file: RemoteFile, content: int, marks: int, progress: Progress) -> None:
        self._source, self._file, self._content, self._marks, self._progress = source, file, content, marks, progress
        self.count = -(-file.size // PART_BYTES)
        self._done = os.pread(marks, self.count, 0).ljust(self.count, b"\0")
        self._received = sum(end - start for at, (start, end) in enumerate(map(self._bounds, range(self.count)))
                             if self._done[at])  # fmt: skip
        self._lock = threading.Lock()
        self.ended = False
        """Set when the file is given up: parts end early."""

    def missing(self) -> list[int]:
        """Return the parts that are not there."""
        return [at for at in range(self.count) if not self._done[at]]

    def receive(self, at: int) -> None:
        """Receive a part and mark it. Only attempts that add no bytes count as failures."""
        start, end = self._bounds(at)
        failures = 0
        while start < end:
            before = start
            try:
                for chunk in self._source.read(self._file, start, end):
                    piece = chunk[: end - start]
                    written = os.pwrite(self._content, piece, start)  # fewer where the disk is nearly full
                    while written < len(piece):
                        written += os.pwrite(self._content, piece[written:], start + written)
                    start += len(piece)
                    with self._lock:
                        self._received += len(piece)
                        self._progress(self._file.name, self._received, self._file.size)
                    if start == end:
                        break
                    if self.ended:
                        return
                else:
                    raise HubUnreachable("the answer ends")
            except HubUnreachable as error:
                failures = 1 if start > before else failures + 1
                if failures == _ATTEMPTS:
                    raise HubUnreachable(f"{self._file.name} breaks off at {start} bytes: {error}") from None
                time.sleep(self._source.retry_seconds * failures)
        os.fsync(self._content)  # no mark, and no manifest, may outlive the bytes that it stands for
        os.pwrite(self._marks, b"\1", at)

    def stored(self, at: int) -> Iterator[bytes]:
        """Yield the bytes of a part as they are on the disk."""
        start, end = self._bounds(at)
        for place in range(start, end, _CHUNK_BYTES):
            yield os.pread(self._content, min(_CHUNK_BYTES, end - place), place)

    def _bounds(self, at: int) -> tuple[int, int]:
        return at * PART_BYTES, min((at + 1) * PART_BYTES, self._file.size)


def _states(folder: Path, file: RemoteFile) -> tuple[Path, Path, Path]:
    """Return the paths of a file that is not complete, of the marks of its parts, and of the hash once it is."""
    key = hashlib.sha256(f"{file.size} {file.digest} {file.etag} {PART_BYTES}".encode()).hexdigest()[:8]
    path = folder / file.name
    partial, journal, known = (path.with_name(f"{path.name}.{key}.{end}") for end in ("partial", "parts", "sha256"))
    return partial, journal, known


def _present(folder: Path, file: RemoteFile) -> int:
    """Return the bytes of a file that are on the disk."""
    partial, _, known = _states(folder, file)
    if known.exists():
        return file.size
    return min(partial.stat().st_blocks * 512, file.size) if partial.exists() else 0


def _file_hash(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# Hubs.

DEFAULT_ENDPOINT = "https://huggingface.co"


class Hub:
    """Client of one hub. ``token`` gives access to gated and private repositories."""

    def __init__(self, endpoint: str, token: str | None, *, retry_seconds: float = 1.0) -> None:
        from huggingface_hub import HfApi, constants  # takes a third of a second

        constants.HF_HUB_DISABLE_TELEMETRY = True  # a mirror is asked for models only
        self.retry_seconds = retry_seconds
        self._endpoint, self._token = endpoint.rstrip("/"), token
        self._api = HfApi(endpoint, token=token or False, library_name="specdecode-worker")
        # No compression: sizes, hashes and ranges refer to the stored bytes. httpx keeps the token from other hosts.
        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {token}"} if token else {})
        self._client = httpx.Client(headers=headers, timeout=30.0, follow_redirects=True)
        self._commit, self._model = "", HubModel("", "", "")

    @classmethod
    def from_environment(cls) -> Hub:
        """Create a client from HF_ENDPOINT and HF_TOKEN, the variables of Hugging Face's own tools."""
        return cls(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, os.environ.get("HF_TOKEN") or None)

    def close(self) -> None:
        """Close the HTTP connections."""
        from huggingface_hub import close_session

        self._client.close()
        close_session()

    def pull(self, model: HubModel, cache_dir: Path, progress: Progress, note: Callable[[str], None]) -> Path:
        """Download ``model`` if it is not complete, and return its folder.

        After a failure, the bytes received so far are kept for the next call. ``progress`` is called for each chunk
        received, ``note`` with a message if another pull of the same model holds the lock.

        Raises:
            PullFailed: the download failed, or the disk is full.
            WeightMismatch: pickled weights are refused.
        """
        folder = model.folder(cache_dir)
        with disk_full_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f"{folder.name}.lock"), lambda: note(_OTHER_PULL)):
                if not (folder / MANIFEST).is_file():
                    files = self._list(model)
                    _fetch_all(self, files, folder, progress, uri=model.uri, commit=self._commit)
        return folder

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes of a file from ``start`` to ``end``."""
        headers = {"Range": f"bytes={start}-{end - 1}"} if (start, end) != (0, file.size) else {}
        try:
            with self._client.stream("GET", self._url(file.name), headers=headers) as answer:
                if answer.is_error:
                    raise self._error(answer.status_code, self._url(file.name))
                # A server that ignores Range sends the file from its first byte.
                skip = start if answer.status_code != httpx.codes.PARTIAL_CONTENT else 0
                for chunk in answer.iter_raw():  # unbuffered, so that the bytes before a disconnect are kept
                    yield chunk[skip:]
                    skip = max(0, skip - len(chunk))
        except httpx.HTTPError as error:
            raise HubUnreachable(str(error)) from None

    def _list(self, model: HubModel) -> list[RemoteFile]:
        """Return the files of a repository that are wanted, at the commit that its revision has now."""
        self._model = model
        info = self._asked(lambda: self._api.model_info(model.id, revision=model.revision), model.uri)
        self._commit = str(info.sha)
        names = wanted_files(model.id, [entry.rfilename for entry in info.siblings or ()])
        return [self._head(name) for name in names]

    def _head(self, name: str) -> RemoteFile:
        url = self._url(name)
        answer = self._asked(lambda: self._api.get_hf_file_metadata(url=url), url)
        digest = answer.etag or ""
        if len(digest) not in (40, 64) or answer.size is None:
            raise HubUnreachable(f"{url}: the hub announces neither hash nor size; check HF_ENDPOINT")
        return RemoteFile(name, answer.size, digest)

    def _url(self, name: str) -> str:
        return f"{self._endpoint}/{self._model.id}/resolve/{self._commit}/{quote(name)}"

    def _asked(self, ask: Callable[[], Any], what: str) -> Any:
        """Return an answer of the hub, which is asked again while it cannot. Raise PullFailed if there is none."""
        from huggingface_hub.errors import HfHubHTTPError

        failures = 0
        while True:
            try:
                return ask()
            except HfHubHTTPError as error:
                problem = self._error(error.response.status_code, what)
            except (AttributeError, KeyError, TypeError, ValueError):
                raise NotOnHub(f"{self._endpoint} does not answer as a hub does; check HF_ENDPOINT") from None
            except Exception as error:  # of the transport, whose library huggingface_hub has changed before
                problem = HubUnreachable(f"{self._endpoint} cannot be reached: {error}")
            failures += 1
            if failures == _ATTEMPTS or not isinstance(problem, HubUnreachable):
                raise problem
            time.sleep(self.retry_seconds * failures)

    def _error(self, status: int, what: str) -> PullFailed:
        model = self._model
        if status in (401, 403) and self._token:
            known = "has no access" if status == 403 else "is not valid, or has no access"
            return AccessDenied(
                f"{model.id}: the token in HF_TOKEN {known}; check it, and accept the model's terms with its account"
            )
        if status in (401, 403):
            return AccessDenied(
                f"{model.id} is gated, private or does not exist, and there is no token: set HF_TOKEN (in a "
                "SpecDecodeDeployment, spec.model.tokenSecretRef names the Secret that holds it)"
            )
        if status == 404:
            return NotOnHub(f"{what} does not exist; check the name and revision of {model.uri}")
        return HubUnreachable(f"{what}: the hub answers {status}")


def wanted_files(model: str, names: Sequence[str]) -> list[str]:
    """Return the files of a repository to download: weights, JSON, tokenizer and chat template.

    Weights are safetensors, or pickles (`pickled_weights`) if there are none; they come last. Of files in subfolders,
    only further chat templates are needed.

    Raises:
        NotOnHub: the repository holds no weights that can be read.
    """
    top = [name for name in names if "/" not in name and not name.startswith(".") and name != MANIFEST]
    weights = weights_of(top)
    if not weights:
        others = sorted(name for name in top if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors")))
        held = f"; {', '.join(others)} cannot be read" if others else ""
        raise NotOnHub(f"{model} holds neither *.safetensors nor pytorch_model*.bin{held}")
    wanted = {name for name in top if name.endswith((".json", ".jinja")) or name == "tokenizer.model"} - set(weights)
    wanted |= {name for name in names if re.fullmatch(rf"{TEMPLATE_FOLDER}/[\w-]+\.jinja", name)}
    return sorted(wanted) + sorted(weights)


# Buckets.
#
#     <cache>/<scheme>/<bucket>/<path>/<content>/
#
# ``content`` is a hash of the names, sizes and ETags that the store lists. Other objects under the same URI therefore
# get another folder, and a folder appears by one rename when all of its files are there. Where the cache cannot be
# written, as in a container that serves, models go to a folder for temporary files of at most TEMPORARY_BYTES.

_URI = re.compile(r"(?P<scheme>s3|gs|az)://(?P<bucket>[a-z0-9][a-z0-9._-]{1,220}[a-z0-9])/(?P<path>[^/].*)", re.ASCII)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


class Bucket:
    """Place of a model in a bucket, and its client. Raises BadUri if the URI has another form."""

    retry_seconds = 1.0

    def __init__(self, uri: str) -> None:
        from obstore.store import AzureStore, GCSStore, S3Store

        match = _URI.fullmatch(uri.rstrip("/"))
        if match is None or any(part in ("", ".", "..") for part in match["path"].split("/")):
            raise BadUri(f"{uri!r} names no folder in a bucket; write s3://, gs:// or az://bucket/path")
        self.uri, self._place = uri, (match["scheme"], match["bucket"], quote(match["path"], safe=""))
        endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "")
        # A request may take as long as its data keep coming. The server's certificate is checked; plain HTTP needs an
        # endpoint that says so.
        options = {"allow_http": endpoint.startswith("http://"), "timeout": "1d", "read_timeout": "60s"}
        kind: Any = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}[match["scheme"]]
        with self._errors():
            self.store = kind(
                match["bucket"], prefix=match["path"], client_options=options, retry_config={"max_retries": 4}
            )

    def folder(self, cache: Path) -> Path:
        """Return the folder in ``cache`` that has a folder for each content of this model."""
        return cache.joinpath(*self._place)

    def check(self) -> None:
        """Raise PullFailed if the store does not answer, denies access or has no such bucket."""
        import obstore

        with self._errors():
            obstore.list_with_delimiter(self.store)

    def list(self) -> list[RemoteFile]:
        """Return the files of the model that are fetched. Raise PullFailed if there is no model."""
        import obstore

        with self._errors():
            listed = [*obstore.list_with_delimiter(self.store)["objects"],
                      *obstore.list_with_delimiter(self.store, TEMPLATE_FOLDER)["objects"]]  # fmt: skip
            written = any(entry["path"] == MANIFEST for entry in listed)
            manifest = bytes(obstore.get(self.store, MANIFEST).bytes()) if written else b'{"files": []}'
        try:
            digests = {file["name"]: bytes.fromhex(file["digest"]).hex() for file in json.loads(manifest)["files"]}
        except (ValueError, KeyError, TypeError, RecursionError):
            raise NotOnHub(f"{self.uri}: {MANIFEST} is no manifest; upload the model again, or delete it") from None
        files = {str(entry["path"]): entry for entry in listed}
        if not any(name in files for name in CONFIGS):
            raise NotOnHub(f"{self.uri} holds no config.json; check its path")
        return [
            RemoteFile(name, int(files[name]["size"]), digests.get(name, ""), str(files[name]["e_tag"] or ""))
            for name in wanted_files(self.uri, list(files))
        ]

    def read(self, file: RemoteFile, start: int, end: int) -> Iterator[bytes]:
        """Yield bytes of the object that was listed, and of no other one that has replaced it meanwhile."""
        import obstore

        options: Any = {"range": (start, end)} | ({"if_match": file.etag} if file.etag else {})
        with self._errors():
            for chunk in obstore.get(self.store, file.name, options=options).stream(min_chunk_size=_CHUNK_BYTES):
                yield bytes(chunk)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn the errors of the client into those of a pull. Its messages go on with pages of debug output."""
        from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

        try:
            yield
        except PreconditionError:
            raise HashMismatch(f"{self.uri} changed while it was fetched; pull again") from None
        except (BaseError, FileNotFoundError, ValueError, KeyError, TypeError) as error:
            words = str(error).partition("\n")[0][:300]
            denied = isinstance(error, PermissionDeniedError | UnauthenticatedError)
            if denied or "403 Forbidden" in words or " 401 " in words:
                raise AccessDenied(
                    f"{self.uri}: the store denies access; check the credentials, of S3 AWS_ACCESS_KEY_ID, and the "
                    f"policy: {words}"
                ) from None
            if isinstance(error, FileNotFoundError) or "404 Not Found" in words:
                raise NotOnHub(f"{self.uri} does not exist; check bucket and path") from None
            raise HubUnreachable(
                f"{self.uri}: the store does not answer; check its endpoint, of S3 AWS_ENDPOINT_URL_S3: {words}"
            ) from None


def fetch(uri: str, cache: Path, progress: Progress = lambda name, received, size: None) -> Path:
    """Return the folder with the present content of a model in a bucket, after fetching it if it is not in the cache.

    If the store does not answer, the content that was fetched last is returned.

    Raises:
        PullFailed: The model cannot be fetched.
        BadUri: ``uri`` has another form.
    """
    bucket = Bucket(uri)
    places = places_of(cache)
    try:
        files = bucket.list()
    except HubUnreachable as error:
        manifests = [path for place in places for path in bucket.folder(place).glob(f"[!.]*/{MANIFEST}")]
        if not manifests:
            raise
        _note(f"{uri}: {error}; the content that was fetched last is used")
        return max(manifests, key=lambda path: path.stat().st_mtime).parent
    lines = "".join(f"{file.name}\t{file.size}\t{file.etag}\n" for file in sorted(files, key=lambda file: file.name))
    content = hashlib.sha256(lines.encode()).hexdigest()[:16]
    for place in places:
        if (bucket.folder(place) / content / MANIFEST).is_file():
            return bucket.folder(place) / content
    place = writable_place(cache)
    base = bucket.folder(place)
    with disk_full_errors(base):
        base.mkdir(parents=True, exist_ok=True)
        with locked(base.with_name(f"{base.name}.lock"), lambda: _note(_OTHER_PULL)):
            if not (base / content / MANIFEST).is_file():
                if place != cache:
                    _make_room(place, sum(file.size for file in files))
                partial = base / f".{content}"
                for leftover in base.glob(".*"):  # of another content; the lock excludes other downloads
                    if leftover != partial:
                        shutil.rmtree(leftover, ignore_errors=True)
                partial.mkdir(exist_ok=True)
                _fetch_all(bucket, files, partial, progress, uri=uri)
                partial.rename(base / content)
    return base / content


def upload(folder: Path, uri: str) -> None:
    """Upload the files of a model with a manifest. config.json comes last, and without it there is no model to read.

    Raises:
        PullFailed: The store does not answer or denies access.
        BadUri: ``uri`` has another form.
    """
    import obstore

    bucket = Bucket(uri)
    paths = [path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST]
    listed = [{"name": path.name, "size": path.stat().st_size, "digest": _file_hash(path)} for path in paths]
    with bucket._errors():
        obstore.put(bucket.store, MANIFEST, json.dumps({"files": listed}).encode())
        for path in sorted(paths, key=lambda path: path.name == "config.json"):
            obstore.put(bucket.store, path.name, path)


def _make_room(place: Path, needed: int) -> None:
    """Delete the oldest models of the folder for temporary files until ``needed`` bytes fit."""
    if needed > TEMPORARY_BYTES:
        raise DiskFull(
            f"the model cache cannot be written, and {place} holds {TEMPORARY_BYTES / 1e9:.1f} GB at most: name the "
            "model in the configuration, so that `pull` fetches it"
        )
    models = sorted(place.glob(f"*/*/*/*/{MANIFEST}"), key=lambda path: path.stat().st_mtime)
    sizes = {path.parent: sum(file.stat().st_size for file in path.parent.iterdir()) for path in models}
    for folder, _ in list(sizes.items()):
        if sum(sizes.values()) + needed <= TEMPORARY_BYTES:
            return
        del sizes[folder]
        shutil.rmtree(folder, ignore_errors=True)


def _note(text: str) -> None:
    print(f"specdecode-worker: {text}", file=sys.stderr, flush=True)
