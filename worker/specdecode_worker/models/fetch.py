"""Model URIs: where their folders are, and how they come there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import httpx
from pydantic import ValidationError

from specdecode_worker import embedded
from specdecode_worker.contract import Env, Revisions
from specdecode_worker.embedded.errors import EmbeddedModelError
from specdecode_worker.models.download_folder import MANIFEST, check_room, disk_full_errors, locked
from specdecode_worker.models.errors import AccessDenied, BadUri, HashMismatch, HubUnreachable, NotOnHub, NotPresent
from specdecode_worker.models.fields import TEMPLATE_FOLDER
from specdecode_worker.models.pickled_weights import convert, converted_folder, weights_of

# Hash of a model's files. The server process imports this module, so it must not import torch.

CALIBRATION_FILE = "calibration.json"


def model_hash(folder: Path, *, with_tokenizer: bool = False) -> str:
    """Return the hash (16 hex digits) of config.json, every safetensors file and, if there is one, calibration.json.

    It identifies a target or a draft in plans and reports. A draft's calibration is part of it, because two drafts with
    the same weights and other calibrations propose other tokens. ``with_tokenizer`` adds tokenizer.json for the same
    reason: it decides which tokens a draft model proposes. Raises OSError if a file cannot be read.
    """
    digest = hashlib.sha256()
    paths = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob(CALIBRATION_FILE)]
    if with_tokenizer:
        paths += folder.glob("tokenizer.json")
    for path in sorted(paths):
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:16]


# Resolution of model URIs to local folders. `checkpoints.hub` and `checkpoints.object_store` do the downloads.
#
# hf://org/name[@revision]   <cache>/hf/org/name/<revision>, after `pull` has completed it. A revision that is no commit
#                            may be resolved already ($SPECDECODE_REVISIONS_PATH); then it is that commit
# s3://bucket/path           <cache>/s3/bucket/path/<content>, fetched when it is resolved (object_store.py)
# pvc://claim/path           /mnt/pvc/claim/path, where the operator mounts claims
# file:///path               the folder itself
#                            (of both, if the weights are pickles, a copy in <cache>/converted with safetensors)
# embedded://name            a model that comes with the package

CLAIMS = Path("/mnt/pvc")
FORMS = "hf://org/name[@revision], s3://bucket/path, pvc://claim/path, file:///path or embedded://name"

_COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
_HUB_NAME = re.compile(r"(?P<org>[\w.-]+)/(?P<name>[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubModel:
    """Repository on a hub, at a branch, tag or commit."""

    org: str
    name: str
    revision: str

    @property
    def id(self) -> str:
        """Name of the repository, org/name."""
        return f"{self.org}/{self.name}"

    @property
    def uri(self) -> str:
        """The hf:// URI with the revision."""
        return f"hf://{self.id}@{self.revision}"

    @property
    def is_pinned(self) -> bool:
        """True if the revision is a commit. A branch or a tag may move."""
        return _COMMIT.fullmatch(self.revision) is not None

    def at(self, commit: str) -> HubModel:
        """Return the model at a commit."""
        return replace(self, revision=commit)

    def folder(self, cache_dir: Path) -> Path:
        """Return the folder of this model in the cache."""
        return cache_dir / "hf" / self.org / self.name / self.revision.replace("/", "--")


def default_cache_dir() -> Path:
    """Return the model cache in the user's cache directory ($XDG_CACHE_HOME or ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specdecode" / "models"


def resolve(uri: str, cache_dir: Path | None = None) -> Path:
    """Return the local folder of a model.

    Raises:
        BadUri: the URI has none of the valid forms.
        NotPresent: there is no complete model at its location.
        PullFailed: a model in a bucket cannot be fetched.
        WeightMismatch: pickled weights are refused.
    """
    cache = cache_dir or default_cache_dir()
    scheme, _, rest = uri.partition("://")
    folder = local_folder(uri)
    if folder is not None:
        return converted_folder(_existing(uri, folder), cache)
    match scheme:
        case "hf":
            return _pulled(hub_model(uri), cache, resolved_commit(uri))
        case "s3":
            from specdecode_worker.models import object_store  # a large library, for these URIs alone

            return object_store.fetch(uri, cache)
        case "embedded":
            return _embedded(rest, cache)
        case _:
            raise BadUri(f"{uri!r} names no model; write {FORMS}")


def local_folder(uri: str) -> Path | None:
    """Return the folder that a pvc:// or file:// URI names, whether it exists or not. Return None for other URIs.

    Raises:
        BadUri: the URI names no folder in a claim.
    """
    scheme, _, rest = uri.partition("://")
    if scheme == "pvc":
        return CLAIMS / _inside(uri, rest)
    return Path(rest) if scheme == "file" and rest.startswith("/") else None


def hub_model(uri: str) -> HubModel:
    """Parse hf://org/name[@revision]. Raise BadUri if it has another form."""
    name_match = _HUB_NAME.fullmatch(uri.removeprefix("hf://"))
    parts = [] if name_match is None else [part for part in name_match.group("org", "name", "revision") if part]
    if name_match is None or any(part.startswith(".") or ".." in part for part in parts):
        raise BadUri(f"{uri!r} names no repository; write hf://org/name or hf://org/name@revision")
    return HubModel(name_match["org"], name_match["name"], name_match["revision"] or "main")


def resolved_commit(uri: str) -> str:
    """Return the commit that an hf:// URI was resolved to in other pods, or "" if it was not resolved or is pinned."""
    path = os.environ.get(Env.revisions_path)
    if not path or hub_model(uri).is_pinned or not Path(path).is_file():
        return ""
    try:
        return Revisions.model_validate_json(Path(path).read_bytes()).revisions.get(uri, "")
    except (OSError, ValidationError) as error:
        print(f"specdecode-worker: {path} is ignored: {error}", file=sys.stderr)
        return ""


def commit_in(folder: Path) -> str:
    """Return the commit that `pull` put into a folder, or "" if the folder is not complete."""
    try:
        return str(json.loads((folder / MANIFEST).read_bytes())["commit"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def folder_with(model: HubModel, commit: str, cache: Path) -> Path | None:
    """Return the complete folder that has this commit, under the name of its branch or of the commit, or None."""
    folders = (model.folder(cache), model.at(commit).folder(cache))
    return next((folder for folder in folders if commit_in(folder) == commit), None)


def _pulled(model: HubModel, cache: Path, commit: str) -> Path:
    resolved = folder_with(model, commit, cache) if commit else None
    if resolved is not None:
        return resolved
    folder = model.folder(cache)
    if not (folder / MANIFEST).is_file():
        raise NotPresent(
            f"{model.uri} is not in {cache}; fetch it: specdecode-worker pull {model.uri} --cache-dir {cache}"
        )
    return folder


def _inside(uri: str, path: str) -> PurePosixPath:
    subpath = PurePosixPath(path)
    if not path or subpath.is_absolute() or ".." in subpath.parts:
        raise BadUri(f"{uri!r} names no folder in a claim; write pvc://claim/path")
    return subpath


def _existing(uri: str, folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise NotPresent(f"{uri}: {folder} holds no config.json; it must be a folder in Hugging Face's layout")
    return folder


def _embedded(name: str, cache: Path) -> Path:
    try:
        folder = embedded.folder(name, cache)
    except EmbeddedModelError as error:
        raise NotPresent(str(error)) from error
    return _existing(f"embedded://{name}", folder)


# Download of a model repository from a hub into the cache.
#
# Only the files in use are downloaded. Downloads are resumable, every hash is checked, and a folder counts as present
# only when it is complete.
#
# The API is that of the Hugging Face hub: ``/api/models/{id}/revision/{revision}`` lists the files of a commit.
# ``/{id}/resolve/{commit}/{file}`` announces hash and size in headers, then redirects to the content. The hash of a
# large file is its sha256; that of a small file is its git blob hash (sha1 over a header and the content).

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
