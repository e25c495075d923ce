"""Kernel timings of a worker: times of this GPU from which operations choose their way, read once at startup."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from specdecode_kernels import timings
from specdecode_kernels.timings import Timings
from specdecode_kernels.tree_attention import prefill
from specdecode_worker.contract import EngineConfig
from specdecode_worker.models.configs.model_config import LlamaConfig

log = logging.getLogger(__name__)


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


def warm_up_prefill(target: LlamaConfig, dtype: torch.dtype, device: torch.device) -> None:
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
