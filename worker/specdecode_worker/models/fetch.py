"""Model URIs: where their folders are, and how they come there."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from specdecode_worker import embedded
from specdecode_worker.contract import Env, Revisions
from specdecode_worker.embedded.errors import EmbeddedModelError
from specdecode_worker.files import filled
from specdecode_worker.models.download_folder import CONFIGS, MANIFEST, HubModel, writable_place
from specdecode_worker.models.errors import BadUri, NotPresent
from specdecode_worker.models.pickled_weights import converted_folder

# Hash of a model's files. The server process imports this module, so it must not import torch.

_HASHING_THREADS = min(8, os.cpu_count() or 1)
CALIBRATION_FILE = "calibration.json"
ADAPTER_FOLDER = "specdecode-adapter"
"""Folder with the adapter, within that of a target that is served with one."""


def model_hash(folder: Path, *, with_tokenizer: bool = False) -> str:
    """Return the hash (16 hex digits) of config.json, every safetensors file, and calibration and adapter.

    It identifies a target or a draft in plans and reports. A draft's calibration is part of it, because two drafts with
    the same weights and other calibrations propose other tokens. ``with_tokenizer`` adds tokenizer.json for the same
    reason: it decides which tokens a draft model proposes. Raises OSError if a file cannot be read.
    """
    paths = [folder / "config.json", *folder.glob("*.safetensors"), *folder.glob(CALIBRATION_FILE)]
    paths += folder.glob(f"{ADAPTER_FOLDER}/adapter_*")
    if with_tokenizer:
        paths += folder.glob("tokenizer.json")
    paths.sort()
    digest = hashlib.sha256()
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        for path, content in zip(paths, threads.map(_sha256, paths), strict=True):
            digest.update(path.name.encode() + content)
    return digest.hexdigest()[:16]


def _sha256(path: Path) -> bytes:
    """Return the sha256 of a file: that of the download's manifest, if the file is older than it, else its hash."""
    status = path.stat()  # an error names the file as the user knows it, not the target of a link
    real = path.resolve()
    manifest = real.with_name(MANIFEST)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if status.st_mtime_ns <= manifest.stat().st_mtime_ns:
            files = json.loads(manifest.read_bytes())["files"]
            (known,) = (file for file in files if file["name"] == real.name and file["size"] == status.st_size)
            if len(known["digest"]) == 2 * hashlib.sha256().digest_size:
                return bytes.fromhex(known["digest"])
    with real.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


# Resolution of model URIs to local folders. `download` fetches them.
#
# hf://org/name[@revision]   <cache>/hf/org/name/<revision>, after `pull` has completed it. A revision that is no commit
#                            may be resolved already ($SPECDECODE_REVISIONS_PATH); then it is that commit
# s3://bucket/path           <cache>/s3/bucket/path/<content>, fetched when it is resolved; gs:// and az:// likewise
# pvc://claim/path           /mnt/pvc/claim/path, where the operator mounts claims
# file:///path               the folder itself
#                            (of both, if the weights are pickles, a copy in <cache>/converted with safetensors)
# embedded://name            a model that comes with the package
# MODEL+ADAPTER              links to the files of a target and to the folder of its adapter, two of the above

CLAIMS = Path("/mnt/pvc")
FORMS = "hf://org/name[@revision], s3://, gs:// or az://bucket/path, pvc://claim/path, file:///path or embedded://name"

_HUB_NAME = re.compile(r"(?P<org>[\w.-]+)/(?P<name>[\w.-]+)(?:@(?P<revision>[\w./-]+))?", re.ASCII)


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
    base, *adapters = parts_of(uri)
    if adapters:
        return _with_adapter(resolve(base, cache), resolve(adapters[0], cache), cache)
    scheme, _, rest = uri.partition("://")
    folder = local_folder(uri)
    if folder is not None:
        return converted_folder(_existing(uri, folder), cache)
    match scheme:
        case "hf":
            return _pulled(hub_model(uri), cache, resolved_commit(uri))
        case "s3" | "gs" | "az":
            from specdecode_worker.models import download  # large libraries, for these URIs alone

            return download.fetch(uri, cache)
        case "oci":
            raise BadUri(
                f"{uri!r}: images are not fetched; mount it as an image volume in workers.template, which needs "
                "Kubernetes 1.35 or its feature gate ImageVolume, and name the path as file:///path"
            )
        case "embedded":
            return _embedded(rest, cache)
        case _:
            raise BadUri(f"{uri!r} names no model; write {FORMS}")


def parts_of(uri: str) -> list[str]:
    """Return the URI of a target and, if ``uri`` is one of a target with an adapter, that of the adapter.

    Raises:
        BadUri: there are several adapters.
    """
    parts = re.split(r"\+(?=[a-z0-9]+://)", uri)
    if len(parts) > 2:
        raise BadUri(f"{uri!r} names {len(parts) - 1} adapters; one can be served, merge the others with peft")
    return parts


def _with_adapter(base: Path, adapter: Path, cache: Path) -> Path:
    """Return a folder with links to the files of a target and to the folder of its adapter."""
    names = sorted(path.name for path in base.iterdir())
    key = hashlib.sha256(json.dumps([str(base.resolve()), str(adapter.resolve()), names]).encode()).hexdigest()[:16]

    def link(partial: Path) -> None:
        for name in names:
            (partial / name).symlink_to((base / name).resolve())
        (partial / ADAPTER_FOLDER).symlink_to(adapter.resolve())

    return filled(writable_place(cache) / "adapted" / key, link)


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
    if not any((folder / name).is_file() for name in CONFIGS):
        raise NotPresent(f"{uri}: {folder} holds no config.json; it must be a folder in Hugging Face's layout")
    return folder


def _embedded(name: str, cache: Path) -> Path:
    try:
        folder = embedded.folder(name, cache)
    except EmbeddedModelError as error:
        raise NotPresent(str(error)) from error
    return _existing(f"embedded://{name}", folder)
