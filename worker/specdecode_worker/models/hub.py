"""Download of a model repository from a hub into the cache.

Only the files in use are downloaded. Downloads are resumable, every hash is checked, and a folder counts as present
only when it is complete.

The API is that of the Hugging Face hub: ``/api/models/{id}/revision/{revision}`` lists the files of a commit.
``/{id}/resolve/{commit}/{file}`` announces hash and size in headers, then redirects to the content. The hash of a
large file is its sha256; that of a small file is its git blob hash (sha1 over a header and the content).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from specdecode_worker.models.download_folder import MANIFEST, check_room, disk_full_errors, locked
from specdecode_worker.models.errors import AccessDenied, HashMismatch, HubUnreachable, NotOnHub
from specdecode_worker.models.fetch import HubModel
from specdecode_worker.models.fields import TEMPLATE_FOLDER
from specdecode_worker.models.pickled_weights import convert, weights_of

DEFAULT_ENDPOINT = "https://huggingface.co"
_ATTEMPTS = 5
_CHUNK_BYTES = 1 << 20
_TIMEOUT = httpx.Timeout(30.0)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """File with the size and hash that the hub announces.

    ``digest`` is a sha256 (64 hex digits) or a git blob hash (40 hex digits).
    """

    name: str
    size: int
    digest: str


Progress = Callable[[str, int, int], None]
"""Callback with a file's name, the bytes present and the total bytes."""


class Hub:
    """Client of one hub. ``token`` gives access to gated and private repositories."""

    def __init__(self, endpoint: str, token: str | None, *, retry_seconds: float = 1.0) -> None:
        # No compression: sizes, hashes and ranges refer to the stored bytes.
        headers = {"User-Agent": "specdecode-worker", "Accept-Encoding": "identity"} | (
            {"Authorization": f"Bearer {token}"} if token else {}
        )
        self._client = httpx.Client(base_url=endpoint, headers=headers, timeout=_TIMEOUT)
        self._has_token = token is not None
        self._retry_seconds = retry_seconds

    @classmethod
    def from_environment(cls) -> Hub:
        """Create a client from HF_ENDPOINT and HF_TOKEN, the variables of Hugging Face's own tools."""
        return cls(os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT, os.environ.get("HF_TOKEN") or None)

    def close(self) -> None:
        """Close the HTTP connections."""
        self._client.close()

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
            with locked(folder.with_name(f"{folder.name}.lock"), note):
                if not (folder / MANIFEST).is_file():
                    self._fetch_all(model, folder, progress)
        return folder

    def _fetch_all(self, model: HubModel, folder: Path, progress: Progress) -> None:
        commit, names = self._list(model)
        files = [self._head(model, commit, name) for name in wanted_files(model, names)]
        check_room(folder, _missing_bytes(folder, files))
        for file in files:
            self._fetch(f"/{model.id}/resolve/{commit}/{file.name}", file, folder, progress)
        pickles = convert(folder, [file.name for file in files], folder)
        manifest = {"uri": model.uri, "commit": commit, "files": [asdict(file) for file in files]}
        partial = folder / f"{MANIFEST}.partial"
        partial.write_text(json.dumps(manifest, indent=1))
        os.replace(partial, folder / MANIFEST)
        for path in pickles:
            path.unlink()

    def _list(self, model: HubModel) -> tuple[str, list[str]]:
        answer = self._get(model, "GET", f"/api/models/{model.id}/revision/{model.revision.replace('/', '%2F')}")
        try:
            body: Any = answer.json()
            return str(body["sha"]), [str(entry["rfilename"]) for entry in body["siblings"]]
        except (ValueError, KeyError, TypeError):
            raise HubUnreachable(f"{self._client.base_url} does not answer as a hub does; check HF_ENDPOINT") from None

    def _head(self, model: HubModel, commit: str, name: str) -> RemoteFile:
        path = f"/{model.id}/resolve/{commit}/{name}"
        answer = self._get(model, "HEAD", path)
        headers = answer.headers
        digest = (headers.get("X-Linked-Etag") or headers.get("ETag") or "").removeprefix("W/").strip('"')
        size = headers.get("X-Linked-Size") or headers.get("Content-Length") or ""
        if len(digest) not in (40, 64) or not size.isdigit():
            raise HubUnreachable(f"{path}: the hub announces neither hash nor size; check HF_ENDPOINT")
        return RemoteFile(name, int(size), digest)

    def _get(self, model: HubModel, method: str, path: str) -> httpx.Response:
        """Send a request to the hub and return its response.

        Redirects within the hub (renamed repositories) are followed; redirects to other hosts are not.
        """
        for _ in range(3):
            answer = self._retried(lambda path=path: self._client.request(method, path))  # type: ignore[misc]
            target = httpx.URL(answer.headers.get("Location", ""))
            if not answer.is_redirect or target.is_absolute_url:
                break
            path = str(target)
        self._check(model, answer)
        return answer

    def _check(self, model: HubModel, answer: httpx.Response) -> None:
        if answer.status_code in (401, 403):
            raise AccessDenied(self._denied(model))
        if answer.status_code == 404:
            raise NotOnHub(f"{answer.request.url} does not exist; check the name and revision of {model.uri}")
        if answer.is_error:
            raise HubUnreachable(f"{answer.request.url} answers {answer.status_code}")

    def _denied(self, model: HubModel) -> str:
        if self._has_token:
            return f"{model.id}: the token in HF_TOKEN has no access; accept the model's terms with its account first"
        return (
            f"{model.id} is gated, private or does not exist, and there is no token: set HF_TOKEN (in a "
            "SpecDecodeDeployment, spec.model.tokenSecretRef names the Secret that holds it)"
        )

    def _retried(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                answer = send()
                if answer.status_code not in (429, 500, 502, 503, 504) or attempt == _ATTEMPTS:
                    return answer
            except httpx.TransportError as error:
                if attempt == _ATTEMPTS:
                    raise HubUnreachable(f"{self._client.base_url} cannot be reached: {error}") from None
            time.sleep(self._retry_seconds * attempt)
        raise AssertionError("the last attempt returns or raises")

    def _fetch(self, path: str, file: RemoteFile, folder: Path, progress: Progress) -> None:
        """Download one file, resuming an earlier attempt.

        Only attempts that add no bytes count as failures.
        """
        done, partial = folder / file.name, folder / f"{file.name}.partial"
        if done.is_file() and done.stat().st_size == file.size:
            return  # a file is renamed only after its hash check
        partial.parent.mkdir(exist_ok=True)
        failures = 0
        while (before := _size(partial)) < file.size or not partial.exists():
            try:
                self._append(path, file, partial, progress)
            except httpx.HTTPError as error:
                failures = 1 if _size(partial) > before else failures + 1
                if failures == _ATTEMPTS:
                    raise HubUnreachable(f"{file.name} breaks off at {_size(partial)} bytes: {error}") from None
                time.sleep(self._retry_seconds * failures)
        _check_hash(file, partial)
        os.replace(partial, done)

    def _append(self, path: str, file: RemoteFile, partial: Path, progress: Progress) -> None:
        start = _size(partial)
        headers = {"Range": f"bytes={start}-"} if start else {}
        with self._client.stream("GET", path, headers=headers, follow_redirects=True) as answer:
            answer.raise_for_status()
            # A server that ignores Range sends the file from its first byte.
            resumed = answer.status_code == httpx.codes.PARTIAL_CONTENT
            received = start if resumed else 0
            with partial.open("ab" if resumed else "wb") as out:
                for chunk in answer.iter_raw():  # unbuffered, so that the bytes before a disconnect are kept
                    out.write(chunk)
                    received += len(chunk)
                    progress(file.name, received, file.size)
        if _size(partial) > file.size:
            partial.unlink()
            raise HashMismatch(f"{file.name} is longer than the {file.size} bytes that the hub announced; pull again")


def wanted_files(model: HubModel, names: Sequence[str]) -> list[str]:
    """Return the files of a repository to download: weights, JSON, tokenizer and chat template.

    Weights are safetensors, or pickles (`pickled_weights`) if there are none; they come last. Of files in subfolders,
    only further chat templates are needed.

    Raises:
        NotOnHub: the repository holds no weights that can be read.
    """
    top = [name for name in names if "/" not in name and not name.startswith(".")]
    weights = weights_of(top)
    if not weights:
        others = sorted(name for name in top if name.endswith((".bin", ".pt", ".pth", ".gguf")))
        held = f"; {', '.join(others)} cannot be read" if others else ""
        raise NotOnHub(f"{model.id} holds neither *.safetensors nor pytorch_model*.bin{held}")
    wanted = {name for name in top if name.endswith((".json", ".jinja")) or name == "tokenizer.model"} - set(weights)
    wanted |= {name for name in names if re.fullmatch(rf"{TEMPLATE_FOLDER}/[\w-]+\.jinja", name)}
    return sorted(wanted) + sorted(weights)


def _missing_bytes(folder: Path, files: Sequence[RemoteFile]) -> int:
    return sum(f.size - _size(folder / f.name) - _size(folder / f"{f.name}.partial") for f in files)


def _check_hash(file: RemoteFile, partial: Path) -> None:
    with partial.open("rb") as content:
        if len(file.digest) == 64:
            actual_digest = hashlib.file_digest(content, "sha256").hexdigest()
        else:
            hasher = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
            while chunk := content.read(_CHUNK_BYTES):
                hasher.update(chunk)
            actual_digest = hasher.hexdigest()
    if actual_digest != file.digest:
        partial.unlink()
        raise HashMismatch(
            f"{file.name} has hash {actual_digest}, the hub announced {file.digest}; it was removed, pull again"
        )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
