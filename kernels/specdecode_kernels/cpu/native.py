"""Build and load of the compiled CPU operations: built from ``source`` on first use, loaded once per process.

Pointers are passed through ctypes, without PyTorch's headers or pybind, so a build takes two seconds with any C++17
compiler. ``SPECDECODE_NATIVE`` names the folder of builds (default: the user's cache). It must belong to this user or
to root, and must not be shared with others. The value ``off`` disables the compiled operations; callers then run plain
PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).parent / "source"
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma", "bmi2")
"""Processor features that the compiled operations need."""
_FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-math-errno"),
    *(f"-m{name.replace('_', '')}" for name in _NEEDED),
)
_BUILD_SECONDS = 300
"""Timeout of one compiler call in seconds."""
_P, _I, _F, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "sd_pack": (_P, _I, _I, _P),
    "sd_linear": (_P, _P, _I, _I, _P, _INT),
    "sd_norm": (_P, _P, _I, _I, _P, _INT),
    "sd_entry": (_P, _P, _I, _P, _P, _P, _P, _INT),
    "sd_attend": (_P, _P, _P, _P, _P, _I, _P, _I, _F, _P, _INT),
    "sd_tail": (_P, _P, _P, _I, _P, _P, _P, _P, _INT),
}
"""Argument types of the functions of exports.cpp."""
logger = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """The compiled operations cannot be used on this machine; the message gives the reason."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the compiled functions, or None if they are unavailable; the reason is logged once."""
    try:
        _check_processor()
        return _load(built())
    except NativeUnavailable as reason:
        logger.info("no compiled CPU operations: %s", reason)
        return None


def _check_processor() -> None:
    """Raise NativeUnavailable if the processor lacks a needed feature."""
    if missing := [name for name in _NEEDED if name not in cpu_flags()]:
        raise NativeUnavailable(f"this processor has no {missing[0]}")


def built() -> Path:
    """Return the shared object for these sources and flags, built if necessary.

    The build does not check the features of this processor, so an image can be built on any machine.

    Raises:
        NativeUnavailable: If builds are switched off, no compiler is found, compilation fails, the folder cannot be
            read, or other users can write it.
    """
    place = os.environ.get("SPECDECODE_NATIVE", "")
    if place == "off":
        raise NativeUnavailable("SPECDECODE_NATIVE=off")
    folder = Path(place) if place else _default_folder()
    path = folder / f"cpu-{_identity()}.so"
    try:
        if not path.exists():
            _compile(path)
        _check_owner(path)
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be read: {error.strerror or error}") from error
    return path


def _check_owner(path: Path) -> None:
    """Raise NativeUnavailable if another user could have replaced a build: its code is loaded without further checks.

    The name of a build is a hash of its sources; nothing can tell whether the object was made of them.
    """
    for place in (path.parent, path):
        status = place.stat()
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
            raise NativeUnavailable(
                f"other users can write {place}; set SPECDECODE_NATIVE to a folder that only this user can write"
            )


def _default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdecode" / "native"


def _identity() -> str:
    """Return a hash of the flags and sources, which names the build."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(_SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(path: Path) -> None:
    """Compile the sources to ``path``.

    Two processes may do this at the same time: each renames a complete file of its own into place.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeUnavailable("no C++ compiler found; install g++")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # an image builds as root, and another user loads
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made, linked = Path(work) / "cpu.o", Path(work) / "cpu.so"
            # The object is linked without an OpenMP library so that it uses PyTorch's threads, see _load.
            _run([compiler, *_FLAGS, "-fopenmp", "-c", str(_SOURCE / "exports.cpp"), "-o", str(made)])
            _run([compiler, "-shared", str(made), "-o", str(linked)])
            linked.rename(path)
    except OSError as error:
        raise NativeUnavailable(f"{path.parent} cannot be written: {error}") from error


def _run(command: list[str]) -> None:
    """Run a compiler command; raise NativeUnavailable if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took longer than {_BUILD_SECONDS} s") from error
    except OSError as error:
        raise NativeUnavailable(f"{command[0]} does not start: {error.strerror or error}") from error
    if done.returncode:
        raise NativeUnavailable(f"{command[0]} failed: {done.stderr.strip()[-400:]}")


def _load(path: Path) -> ctypes.CDLL:
    """Load a build after PyTorch's OpenMP library, so that both share its threads."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    try:
        ctypes.CDLL(str(bundled[0]) if bundled else "libgomp.so.1", mode=ctypes.RTLD_GLOBAL)
        native = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"{path} does not load: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(native, name)
        function.argtypes, function.restype = arguments, None
    return native


@functools.cache
def cpu_facts() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; empty if they cannot be read."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the features of the processor, or an empty set if they cannot be read."""
    return frozenset(cpu_facts().get("flags", "").split())


def cpu_name() -> str:
    """Return the name of the processor."""
    return cpu_facts().get("model name", "unknown CPU")


if __name__ == "__main__":  # image builds compile ahead of time, on any processor; a failed build raises
    print(built())
