"""Command ``pull``: fetch models into the cache and verify them.

The init container of a worker pod runs it without URIs. It then takes target and draft from the configuration of the
pod.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from pydantic import ValidationError

from specdecode_worker.contract import Env, WorkerConfig
from specdecode_worker.models.checkpoints import hub, model_store
from specdecode_worker.models.errors import ModelError

_SECONDS_BETWEEN_LINES = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command to ``parser``."""
    parser.add_argument("uris", nargs="*", metavar="URI", help=f"{model_store.FORMS}; default: those of ${Env.config}")
    parser.add_argument("--cache-dir", metavar="DIR", help="where models are kept (default: the user's cache)")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if all models are available, 1 if one cannot be fetched, 2 for wrong usage."""
    try:
        config = None if args.uris else _pod_config()
    except ValueError as error:
        print(f"specdecode-worker pull: {error}", file=sys.stderr)
        return 2
    if config is None:
        cache = Path(args.cache_dir) if args.cache_dir else model_store.default_cache_dir()
        return max([_pull(uri, cache) for uri in args.uris])
    return _pull_for_pod(config, Path(args.cache_dir or config.cache_dir))


def _pod_config() -> WorkerConfig:
    """Read the worker configuration from the environment.

    Raises:
        ValueError: The variable is not set or invalid.
    """
    text = os.environ.get(Env.config)
    if text is None:
        raise ValueError(f"name a model: {model_store.FORMS}")
    try:
        return WorkerConfig.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"${Env.config}: {error}") from None


def _pull_for_pod(config: WorkerConfig, cache: Path) -> int:
    """Fetch target and draft of a pod. A draft that is not required may fail."""
    code = _pull(config.model.uri, cache)
    if config.draft.uri is not None and _pull(config.draft.uri, cache) != 0:
        if config.draft.required:
            return 1
        _print_progress("the draft is not required: the worker will serve without it")
    return code


def _pull(uri: str, cache: Path) -> int:
    """Fetch one model and return an exit code."""
    try:
        folder = _hub_pull(uri, cache) if uri.startswith("hf://") else model_store.resolve(uri, cache)
    except ModelError as error:
        _print_progress(f"{uri}: {error}")
        return 1
    _print_progress(f"{uri} is in {folder}")
    return 0


def _hub_pull(uri: str, cache: Path) -> Path:
    """Fetch a model from the Hugging Face Hub and return its folder."""
    model = model_store.hub_model(uri)
    server = hub.Hub.from_environment()
    try:
        return server.pull(model, cache, ProgressLines(), _print_progress)
    finally:
        server.close()


class ProgressLines:
    """Progress output: a line every two seconds and at the end of each file, with percentage, rate and time left."""

    def __init__(self) -> None:
        self._file = ""
        self._began = (0.0, 0)
        self._last_seconds = 0.0

    def __call__(self, name: str, received: int, size: int) -> None:
        """Print a line for file ``name`` if one is due; ``received`` and ``size`` are in bytes."""
        now = time.monotonic()
        if name != self._file:
            self._file, self._began, self._last_seconds = name, (now, received), now
        if received < size and now - self._last_seconds < _SECONDS_BETWEEN_LINES:
            return
        self._last_seconds = now
        began_seconds, began_bytes = self._began
        rate = (received - began_bytes) / max(now - began_seconds, 1e-3)
        left = f", {(size - received) / rate:.0f} s left" if received < size and rate else ""
        percent = 100 * received // size if size else 100
        _print_progress(f"{name}  {percent} %  of {size / 1e6:.1f} MB  {rate / 1e6:.1f} MB/s{left}")


def _print_progress(text: str) -> None:
    """Print a line to standard error."""
    print(text, file=sys.stderr, flush=True)
