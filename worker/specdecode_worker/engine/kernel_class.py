"""Class of the kernels that serve a model on a device, their measured times, and those that the image has."""

from __future__ import annotations

import logging
import os
import platform
import shutil
from pathlib import Path

import torch

from specdecode_kernels import timings
from specdecode_kernels.cpu import native
from specdecode_kernels.noise.reference import NOISE_VERSION
from specdecode_kernels.timings import Timings
from specdecode_kernels.tree_attention import prefill
from specdecode_worker.contract import EngineConfig
from specdecode_worker.models.config import CausalLMConfig

log = logging.getLogger(__name__)

# Class of the numeric kernels: two workers of one class round in the same way, so they choose the same tokens.

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
    vendor = native.cpu_facts().get("vendor_id", "")
    flags = [flag for flag in _ROUNDING_FLAGS if flag in native.cpu_flags()]
    compiled = "compiled" if native.library() is not None else "eager"
    return " ".join(
        ("cpu", platform.machine(), vendor, *flags, torch.backends.cpu.get_cpu_capability(), compiled,
         f"threads-{torch.get_num_threads()}")
    )  # fmt: skip


# Kernel timings of a worker: times of this GPU from which operations choose their way, read once at startup.


def use_kernel_timings(config: EngineConfig, device: torch.device) -> Timings:
    """Let operations choose by the file of ``--kernel-timings``, and log what was chosen.

    Without a file, with one of another GPU, or with one that cannot be read, operations choose by rules. Several
    devices choose by rules too, because the other ranks do not read the file.
    """
    measured = _read(config, device)
    timings.use(measured)
    if measured.digest:
        log.info("kernel timings %s of %s", measured.digest, measured.gpu)
        for line in timings.describe(measured):
            log.info("fastest way of %s", line)
    elif device.type == "cuda":
        log.info("no kernel timings: operations choose by rules")
    return measured


def use_compiled_kernels() -> None:
    """Let Triton find the kernels that were compiled when the image was built.

    They are in $SPECDECODE_KERNELS, which only the image's build writes. Triton's cache, which is this pod's own, has a
    file for each kernel that names its others; only these files are copied.
    """
    made, cache = os.environ.get("SPECDECODE_KERNELS"), os.environ.get("TRITON_CACHE_DIR")
    if not made or not cache:
        return
    for path in Path(made).glob("*/__grp__*.json"):
        folder = Path(cache) / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.name)


def warm_up_prefill(target: CausalLMConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Run the other ways of attention that prompts of ``target`` may take, so that no request waits for a compiler."""
    if device.type == "cuda":
        heads = (target.num_attention_heads, target.num_key_value_heads, target.head_dim)
        ways = prefill.warm_up(*heads, dtype, device)
        log.info("attention of long prompt chunks: %s", " or ".join(("our kernel", *ways)))


def _read(config: EngineConfig, device: torch.device) -> Timings:
    if config.kernel_timings is None or device.type != "cuda" or config.tensor_parallel_size > 1:
        return Timings()
    try:
        measured = timings.read(Path(config.kernel_timings))
    except (OSError, ValueError) as error:
        log.warning("kernel timings are not used: %s", error)
        return Timings()
    name = torch.cuda.get_device_name(device)
    if measured.gpu != name:
        log.warning("kernel timings are not used: they are of %s, and this GPU is %s", measured.gpu, name)
        return Timings()
    return measured
