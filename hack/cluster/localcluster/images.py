"""The project's Dockerfiles built by BuildKit straight into the node's image store: no registry, no import.

The Dockerfiles' FROM line names debian:bookworm-slim. Where no registry can be reached that name is filled
from Debian's own archive (debootstrap), once, and kept in the cache.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from pathlib import Path

from localcluster import archive, binaries, daemons, lifecycle, templates
from localcluster.console import say, step, wait_for
from localcluster.errors import ClusterError
from localcluster.node import ctr
from localcluster.settings import DEBIAN_IMAGE, DEBIAN_SUITE, REPOSITORY, Layout
from localcluster.shell import run, stream, succeeds

COMPONENTS = ("operator", "worker")
_FREE_GIB = {"operator": 2, "worker": 24}  # content, snapshot and package cache of a first build
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def build(layout: Layout, components: list[str]) -> None:
    """Build images of some components; a change of code alone takes seconds."""
    unknown = sorted(set(components) - set(COMPONENTS))
    if unknown:
        raise ClusterError(f"no image {', '.join(unknown)}: there are {' and '.join(COMPONENTS)}.")
    lifecycle.require_up(layout)
    binaries.build_for_images(layout)
    _ensure_buildkit(layout)
    _ensure_debian(layout)
    for component in components:
        _check_space(layout, component)
        with step(f"Building image {name_of(component)}"):
            _build(layout, component)


def name_of(component: str) -> str:
    prefix = os.environ.get("IMAGE_PREFIX") or "localhost"
    return f"{prefix}/specdecode-{component}:dev"


def _ensure_buildkit(layout: Layout) -> None:
    config = templates.write(layout, "buildkitd.toml")
    daemons.start(layout, "buildkitd", ["buildkitd", "--config", str(config)])
    client = layout.buildkit / "buildctl"
    wait_for(
        "BuildKit",
        lambda: succeeds([client, "--addr", f"unix://{layout.buildkit_socket}", "debug", "workers"]),
        timeout_s=60,
        check=lambda: daemons.check_alive(layout, "buildkitd"),
    )


def _ensure_debian(layout: Layout) -> None:
    """The base image, made from Debian's archive the first time."""
    if DEBIAN_IMAGE in run(ctr(layout, "images", "list", "--quiet")).split():
        return
    binaries.once(layout, layout.debian, _bootstrap_debian)
    with step(f"Importing {DEBIAN_IMAGE}"):
        run(ctr(layout, "images", "import", layout.debian / "image.tar"))


def _bootstrap_debian(folder: Path) -> None:
    """A minimal Debian, packed as one layer."""
    root, layer = folder / "root", folder / "layer.tar"
    with step(f"Making {DEBIAN_IMAGE} with debootstrap (a minute or two)"):
        run(["debootstrap", "--variant=minbase", DEBIAN_SUITE, root], hint="Is the Debian mirror reachable?")
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists", "var/log", "dev"):
            shutil.rmtree(root / waste)
            (root / waste).mkdir()
        run(["tar", "--numeric-owner", "-C", root, "-cf", layer, "."])
        archive.from_layer(layer, DEBIAN_IMAGE, folder / "image.tar")
    shutil.rmtree(root)
    layer.unlink()


def _check_space(layout: Layout, component: str) -> None:
    """Only for a first build: later ones replace layers."""
    if name_of(component) in run(ctr(layout, "images", "list", "--quiet")).split():
        return
    free_gib = shutil.disk_usage(layout.state).free / 2**30
    if free_gib < _FREE_GIB[component]:
        raise ClusterError(
            f"the {component} image needs about {_FREE_GIB[component]} GiB below {layout.state}, "
            f"{free_gib:.0f} are free. Make room, or set SPECDECODE_CLUSTER_DIR to a bigger disk "
            "(hack/cluster/down first)."
        )


def _build(layout: Layout, component: str) -> None:
    metadata = layout.state / f"{component}-image.json"
    output = f"type=image,name={name_of(component)},compression=uncompressed,unpack=true"
    command: list[object] = [
        layout.buildkit / "buildctl",
        f"--addr=unix://{layout.buildkit_socket}",
        "build",
        "--frontend=dockerfile.v0",
        "--progress=plain",
        f"--local=context={REPOSITORY}",
        f"--local=dockerfile={REPOSITORY / component}",
        "--opt=image-resolve-mode=local",
        "--opt=force-network-mode=host",
        "--allow=network.host",
        f"--metadata-file={metadata}",
        f"--output={output}",
    ]
    if _CERTIFICATES.exists():  # a network may have an authority of its own
        command.append(f"--secret=id=ca,src={_CERTIFICATES}")
    stream(command, log=layout.logs / f"build-{component}.log", show=_Headlines())
    built = json.loads(metadata.read_text())
    say(f"    {name_of(component)} {built['containerimage.config.digest']}")


class _Headlines:
    """Of BuildKit's log the steps that really run, once each, and that the image leaves it; nothing of cached ones."""

    def __init__(self) -> None:
        self._announced: dict[str, str] = {}  # vertex -> its instruction, until it proves to be at work

    def __call__(self, line: str) -> str | None:
        found = re.match(r"#(\d+) (.*)", line)
        if found is None:
            return None
        vertex, said = found.groups()
        if instruction := re.match(r"\[[a-z0-9-]+ +\d+/\d+\] (.*)", said):
            self._announced[vertex] = instruction[1]
            return None
        if said == "exporting layers" or re.fullmatch(r"unpacking to \S+", said):
            return said
        instruction_at_work = self._announced.pop(vertex, None)
        if instruction_at_work is None or said == "CACHED" or said.startswith("DONE"):
            return None
        return textwrap.shorten(instruction_at_work, 100, placeholder=" ...")


def identity(layout: Layout, component: str) -> str:
    """The config digest of the image as built last, the same that a pod's status shows as imageID."""
    metadata = layout.state / f"{component}-image.json"
    if not metadata.exists():
        raise ClusterError(f"no {component} image was built: run hack/cluster/images {component}")
    return str(json.loads(metadata.read_text())["containerimage.config.digest"])
