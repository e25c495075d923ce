"""Class of the numeric kernels: two workers of one class round in the same way, so they choose the same tokens."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from specdecode_kernels import timings
from specdecode_kernels.cpu import native
from specdecode_kernels.noise.reference import NOISE_VERSION

_ROUNDING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "avx512_vnni", "amx_tile", "amx_bf16", "fma")
"""Processor features by which math libraries choose kernels."""


def kernel_class(device: torch.device) -> str:
    """Return the class of the kernels on ``device``: its kind, instruction sets, and the versions of libraries."""
    kind = _gpu_class(device) if device.type == "cuda" else _cpu_class()
    return f"{kind} torch-{torch.__version__} noise-{NOISE_VERSION}"


def _gpu_class(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    name = properties.name.replace(" ", "-")
    chosen = f" timings-{digest}" if (digest := timings.current().digest) else ""
    return f"cuda sm_{properties.major}{properties.minor} {name} cuda-{torch.version.cuda}{chosen}"


def _cpu_class() -> str:
    """Return the class of this processor. The number of threads counts, because sums are split between them."""
    facts = _cpu_facts()
    flags = [flag for flag in _ROUNDING_FLAGS if flag in facts.get("flags", "").split()]
    compiled = "compiled" if native.library() is not None else "eager"
    return " ".join(
        ("cpu", platform.machine(), facts.get("vendor_id", ""), *flags, torch.backends.cpu.get_cpu_capability(),
         compiled, f"threads-{torch.get_num_threads()}")
    )  # fmt: skip


def _cpu_facts() -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; empty if they cannot be read."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
