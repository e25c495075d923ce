"""Programs built from Go modules into the cache, one folder per tool and version.

Kubernetes, BuildKit and CoreDNS come as source through the Go module proxy, verified by Go's checksum
database; there is nothing to download that is already built. A folder in the cache is complete or absent.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from localcluster.console import say, step
from localcluster.errors import ClusterError
from localcluster.settings import (
    BUILDKIT_VERSION,
    COREDNS_VERSION,
    HERE,
    KUBE_ROUTER_VERSION,
    KUBERNETES_GO,
    KUBERNETES_VERSION,
    METRICS_SERVER_VERSION,
    Layout,
)
from localcluster.shell import run

_KUBERNETES_COMMANDS = (
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubelet",
    "kube-proxy",
    "kubectl",
)
_GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOFLAGS": "-mod=mod -trimpath"}
_BUILD_GIB = 12  # sources, Go's build cache and the binaries themselves


def build_for_boot(layout: Layout) -> None:
    """Everything that `up` needs."""
    once(layout, layout.kubernetes, _build_kubernetes)
    once(layout, layout.coredns, _build_coredns)
    once(layout, layout.pause, _build_pause)


def build_for_images(layout: Layout) -> None:
    """Everything that `images` needs."""
    once(layout, layout.buildkit, _build_buildkit)


def build_for_metrics(layout: Layout) -> None:
    """Everything that `metrics-server` needs."""
    once(layout, layout.metrics_server, _build_metrics_server)


def build_for_network_policies(layout: Layout) -> None:
    """Everything that `network-policies` needs."""
    once(layout, layout.kube_router, _build_kube_router)


def build_other_api_server(layout: Layout, version: str) -> Path:
    """API server and controller manager of another release, built by the Go that the release names; their folder."""
    folder = layout.cache / f"api-server-{version}"
    commands = ("kube-apiserver", "kube-controller-manager")
    once(layout, folder, lambda scratch: _build_kubernetes(scratch, version, commands))
    return folder


def once(layout: Layout, folder: Path, build: Callable[[Path], None]) -> None:
    """Build into a scratch folder, then rename: a folder that exists is whole."""
    if folder.is_dir():
        return
    with _build_lock(layout.cache):
        if folder.is_dir():
            return  # somebody else built it while we waited
        _check_go()
        _check_space(layout.cache)
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=layout.cache))
        try:
            build(scratch)
            scratch.chmod(0o755)
            scratch.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _build_lock(cache: Path) -> Iterator[None]:
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".build.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("==> Another build fills the cache; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _check_go() -> None:
    if shutil.which("go") is None:
        raise ClusterError(f"Go is not on PATH: install {KUBERNETES_GO} (any patch release) and run this again.")
    version = run(["go", "env", "GOVERSION"], env={"GOTOOLCHAIN": "local"}).strip()
    if not (version + ".").startswith(KUBERNETES_GO + "."):
        raise ClusterError(
            f"Kubernetes {KUBERNETES_VERSION} has to be built with {KUBERNETES_GO}, PATH has {version}: "
            "another minor version compiles it and serves an openapi document that kubectl refuses."
        )


def _check_space(folder: Path) -> None:
    free_gib = shutil.disk_usage(folder).free / 2**30
    if free_gib < _BUILD_GIB:
        raise ClusterError(
            f"building needs about {_BUILD_GIB} GiB of disk below {folder}, {free_gib:.0f} are free. "
            "Make room, or point XDG_CACHE_HOME at a bigger disk."
        )


def _build_kubernetes(
    scratch: Path, version: str = KUBERNETES_VERSION, commands: tuple[str, ...] = _KUBERNETES_COMMANDS
) -> None:
    """The release's commands; its staging modules are replaced by their published versions."""
    source = scratch / "source"
    source.mkdir()
    release = Path(json.loads(_go(source, "mod", "download", "-json", f"k8s.io/kubernetes@v{version}"))["Dir"])
    go = KUBERNETES_GO if version == KUBERNETES_VERSION else f"go{(release / '.go-version').read_text().strip()}"
    toolchain = "local" if version == KUBERNETES_VERSION else go
    _write_go_mod(source, release, version, go)
    _import_commands(source, [f"k8s.io/kubernetes/cmd/{name}" for name in commands])
    _go(source, "mod", "tidy", toolchain=toolchain)
    for position, name in enumerate(commands, start=1):
        with step(f"Building {name} {version} ({position} of {len(commands)}; some minutes when cold)"):
            package = f"k8s.io/kubernetes/cmd/{name}"
            flags = ("-ldflags", _version_flags(version), "-o", f"{scratch}/")
            _go(source, "build", *flags, package, toolchain=toolchain)
    shutil.rmtree(source)


def _write_go_mod(source: Path, release: Path, version: str, go: str) -> None:
    """k8s.io/X => ./staging/... in the release's go.mod becomes k8s.io/X => k8s.io/X v0.MINOR.PATCH."""
    _start_module(source, go)
    staged = sorted(set(re.findall(r"(k8s\.io/[a-z-]+) => \./staging", (release / "go.mod").read_text())))
    published = "v0." + version.removeprefix("1.")
    lines = [f"\t{module} => {module} {published}" for module in staged]
    with (source / "go.mod").open("a") as file:
        file.write(f"require k8s.io/kubernetes v{version}\n")
        file.write("replace (\n" + "\n".join(lines) + "\n)\n")


def _version_flags(version: str) -> str:
    major, minor, _ = version.split(".")
    base = "k8s.io/component-base/version"
    values = {
        f"{base}.gitVersion": f"v{version}",
        f"{base}.gitMajor": major,
        f"{base}.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": f"v{version}",
    }
    return "-s -w " + " ".join(f"-X {name}={value}" for name, value in values.items())


def _build_buildkit(scratch: Path) -> None:
    module = "github.com/moby/buildkit"
    commands = ["cmd/buildkitd", "cmd/buildctl"]
    _build_module(scratch, "BuildKit", module, BUILDKIT_VERSION, commands)


def _build_coredns(scratch: Path) -> None:
    _build_module(scratch, "CoreDNS", "github.com/coredns/coredns", COREDNS_VERSION, [""])


def _build_metrics_server(scratch: Path) -> None:
    module = "sigs.k8s.io/metrics-server"
    _build_module(scratch, "metrics-server", module, METRICS_SERVER_VERSION, ["cmd/metrics-server"])


def _build_kube_router(scratch: Path) -> None:
    module = "github.com/cloudnativelabs/kube-router/v2"
    _build_module(scratch, "kube-router", module, KUBE_ROUTER_VERSION, ["cmd/kube-router"])


def _build_module(scratch: Path, title: str, module: str, version: str, commands: list[str]) -> None:
    """Some commands of one module, in a throw-away module that requires it."""
    source = scratch / "source"
    packages = [f"{module}/{command}".rstrip("/") for command in commands]
    with step(f"Building {title} {version} (a minute or two when cold)"):
        _start_module(source)
        _go(source, "get", f"{module}@v{version}")
        _import_commands(source, packages)
        _go(source, "mod", "tidy")
        _go(source, "build", "-ldflags", "-s -w", "-o", f"{scratch}/", *packages)
    shutil.rmtree(source)


def _build_pause(scratch: Path) -> None:
    with step("Building the pause program"):
        _go(HERE / "pause", "build", "-ldflags", "-s -w", "-o", f"{scratch}/pause", ".")


def _start_module(source: Path, go: str = KUBERNETES_GO) -> None:
    source.mkdir(exist_ok=True)
    version = go.removeprefix("go")
    (source / "go.mod").write_text(f"module build\ngo {version if version.count('.') == 2 else version + '.0'}\n")


def _import_commands(source: Path, packages: list[str]) -> None:
    """`go mod tidy` keeps what something imports."""
    imports = "\n".join(f'\t_ "{package}"' for package in packages)
    (source / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\nimport (\n{imports}\n)\n")


def _go(source: Path, *words: str, toolchain: str = "local") -> str:
    flags = os.environ.get("GOFLAGS", "")
    environment = {
        **_GO_ENVIRONMENT,
        "GOTOOLCHAIN": toolchain,
        "GOFLAGS": f"{flags} {_GO_ENVIRONMENT['GOFLAGS']}".strip(),
    }
    return run(["go", *words], cwd=source, env=environment, hint="Is the Go module proxy reachable?")
