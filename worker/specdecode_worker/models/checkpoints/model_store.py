"""Resolution of model URIs to local folders. `checkpoints.hub` does the downloads.

hf://org/name[@revision]   <cache>/hf/org/name/<revision>, after `pull` has completed it
pvc://claim/path           /mnt/pvc/claim/path, where the operator mounts claims
file:///path               the folder itself
embedded://name            a model that comes with the package
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from specdecode_worker import embedded
from specdecode_worker.embedded.errors import EmbeddedModelError
from specdecode_worker.models.errors import BadUri, NotPresent

MANIFEST = "specdecode-manifest.json"
"""File that `pull` writes last. It exists only if every file is present and passed its hash check."""
CLAIMS = Path("/mnt/pvc")
FORMS = "hf://org/name[@revision], pvc://claim/path, file:///path or embedded://name"

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
    """
    cache = cache_dir or default_cache_dir()
    scheme, _, rest = uri.partition("://")
    match scheme:
        case "hf":
            return _pulled(hub_model(uri), cache)
        case "pvc":
            return _existing(uri, CLAIMS / _inside(uri, rest))
        case "file" if rest.startswith("/"):
            return _existing(uri, Path(rest))
        case "embedded":
            return _embedded(rest, cache)
        case _:
            raise BadUri(f"{uri!r} names no model; write {FORMS}")


def hub_model(uri: str) -> HubModel:
    """Parse hf://org/name[@revision]. Raise BadUri if it has another form."""
    name_match = _HUB_NAME.fullmatch(uri.removeprefix("hf://"))
    parts = [] if name_match is None else [part for part in name_match.group("org", "name", "revision") if part]
    if name_match is None or any(part.startswith(".") or ".." in part for part in parts):
        raise BadUri(f"{uri!r} names no repository; write hf://org/name or hf://org/name@revision")
    return HubModel(name_match["org"], name_match["name"], name_match["revision"] or "main")


def _pulled(model: HubModel, cache: Path) -> Path:
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
