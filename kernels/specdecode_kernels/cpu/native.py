"""The compiled half of the CPU's operations: built from ``source`` on first use, loaded once a process.

Neither torch's headers nor pybind: pointers go through ctypes, so that a build takes two seconds and any C++17 compiler
will do. ``SPECDECODE_NATIVE`` says where builds are kept (default: the user's cache); ``off`` does without, and the
callers then run plain torch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

_SOURCE = Path(__file__).parent / "source"
_NEEDED = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma", "bmi2")
_FLAGS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-w", "-fno-math-errno"),
    *(f"-m{name.replace('_', '')}" for name in _NEEDED),
)
_BUILD_SECONDS = 300
_P, _I, _F, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES = {
    "sd_pack": (_P, _I, _I, _P),
    "sd_linear": (_P, _P, _I, _I, _P, _INT),
    "sd_norm": (_P, _P, _I, _I, _P, _INT),
    "sd_entry": (_P, _P, _I, _P, _P, _P, _P, _INT),
    "sd_attend": (_P, _P, _P, _P, _P, _I, _P, _I, _F, _P, _INT),
    "sd_tail": (_P, _P, _P, _I, _P, _P, _P, _P, _INT),
}
"""Of exports.cpp."""
logger = logging.getLogger(__name__)


class NativeUnavailable(Exception):
    """Why this machine runs plain torch instead."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where there can be none; says why once."""
    try:
        _check_processor()
        return _load(built())
    except NativeUnavailable as reason:
        logger.info("no compiled CPU operations: %s", reason)
        return None


def _check_processor() -> None:
    if missing := [name for name in _NEEDED if name not in _cpu_flags()]:
        raise NativeUnavailable(f"this processor has no {missing[0]}")


def built() -> Path:
    """The shared object of these sources and flags, for any processor that has them. Raises NativeUnavailable."""
    place = os.environ.get("SPECDECODE_NATIVE", "")
    if place == "off":
        raise NativeUnavailable("SPECDECODE_NATIVE=off")
    folder = Path(place) if place else _default_folder()
    path = folder / f"cpu-{_identity()}.so"
    if not path.exists():
        _compile(path)
    return path


def _default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specdecode" / "native"


def _identity() -> str:
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(_SOURCE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(path: Path) -> None:
    """Two processes may do so at once: each renames a whole file of its own into place."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeUnavailable("no C++ compiler found; install g++")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as work:
            made, linked = Path(work) / "cpu.o", Path(work) / "cpu.so"
            # Linked without an OpenMP of its own: it shall share torch's threads, see _load.
            _run([compiler, *_FLAGS, "-fopenmp", "-c", str(_SOURCE / "exports.cpp"), "-o", str(made)])
            _run([compiler, "-shared", str(made), "-o", str(linked)])
            linked.rename(path)
    except OSError as error:
        raise NativeUnavailable(f"{path.parent} cannot be written: {error}") from error


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]} took longer than {_BUILD_SECONDS} s") from error
    if done.returncode:
        raise NativeUnavailable(f"{command[0]} failed: {done.stderr.strip()[-400:]}")


def _load(path: Path) -> ctypes.CDLL:
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
def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


if __name__ == "__main__":  # builds ahead of time, as images do, on whatever processor; fails where it cannot
    print(built())
