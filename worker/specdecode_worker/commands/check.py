"""Command ``check``: report whether a target and a draft fit each other and the device, without loading weights."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Literal

import torch

from specdecode_worker.commands.flags import (
    draft_config,
    model_config,
    named,
)
from specdecode_worker.contract import (
    CheckVerdict,
    EngineConfig,
    Env,
    WorkerConfig,
)
from specdecode_worker.engine.factory import device_of
from specdecode_worker.engine.memory import Device, Inventory, make_verdict, take_inventory
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.fetch import default_cache_dir, resolve


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if the model fits, 1 if it does not fit or cannot be read, 2 for wrong usage."""
    try:
        config = _config(args)
    except ValueError as error:
        print(f"specdecode-worker check: {error}", file=sys.stderr)
        return 2
    try:
        verdict = make_verdict(_inventory(args, config))
    except ModelError as error:
        print(f"specdecode-worker check: {error}", file=sys.stderr)
        return 1
    print(verdict.model_dump_json(indent=2) if args.json else _format_verdict(verdict))
    return 0 if verdict.serves else 1


def _config(args: argparse.Namespace) -> WorkerConfig:
    """Build the worker configuration from the environment or from flags.

    Raises:
        ValueError: The flags or the configuration are invalid.
    """
    if Env.config in os.environ:
        return WorkerConfig.model_validate_json(os.environ[Env.config])
    return WorkerConfig(
        model=model_config(args, args.model),
        draft=draft_config(args),
        engine=EngineConfig(**named(args, EngineConfig)),
        cache_dir=args.cache_dir or str(default_cache_dir()),
    )


def _inventory(args: argparse.Namespace, config: WorkerConfig) -> Inventory:
    """Read the checkpoint headers and the device memory that the memory check needs."""
    cache, memory = Path(config.cache_dir), None
    if args.memory:
        memory = _another(args.memory, config.engine)
    device = torch.device(memory.kind) if memory else device_of(config.engine.device)
    return take_inventory(config, lambda uri: resolve(uri, cache), device, memory)


def _another(gib: float, engine: EngineConfig) -> Device:
    """Return a device with ``gib`` GiB of free memory, in place of the local device."""
    size = int(gib * 2**30)
    kind: Literal["cpu", "cuda"] = "cuda" if engine.device == "cuda" else "cpu"
    source = "GPU memory" if kind == "cuda" else "memory"
    return Device(kind=kind, limit=size, free=size, source=source, count=engine.tensor_parallel_size)


def _format_verdict(verdict: CheckVerdict) -> str:
    """Format the result as text."""
    lines = [*verdict.arithmetic, ""]
    if verdict.draft_problem:
        lines.append(f"the draft cannot be used: {verdict.draft_problem}")
    if not verdict.fits:
        lines.append(f"does not fit: {verdict.problem}")
    if verdict.serves:
        lines.append(
            f"fits: {verdict.kv_tokens:,} tokens of keys and values, {verdict.sequences} sequences of"
            f" {verdict.max_model_len:,} tokens at once"
        )
    return "\n".join(lines + [f"warning: {warning}" for warning in verdict.warnings])
