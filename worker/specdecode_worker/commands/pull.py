"""``pull``: fetch models into the cache and check them. Also the init container of a worker pod, which names none:
it takes target and draft from the pod's config."""

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
    parser.add_argument("uris", nargs="*", metavar="URI", help=f"{model_store.FORMS}; default: those of ${Env.config}")
    parser.add_argument("--cache-dir", metavar="DIR", help="where models are kept (default: the user's cache)")


def run(args: argparse.Namespace) -> int:
    """0 when all are there, 1 when one cannot be had, 2 for wrong usage."""
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
    text = os.environ.get(Env.config)
    if text is None:
        raise ValueError(f"name a model: {model_store.FORMS}")
    try:
        return WorkerConfig.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(f"${Env.config}: {error}") from None


def _pull_for_pod(config: WorkerConfig, cache: Path) -> int:
    code = _pull(config.model.uri, cache)
    if config.draft.uri is not None and _pull(config.draft.uri, cache) != 0:
        if config.draft.required:
            return 1
        _say("the draft is not required: the worker will serve without it")
    return code


def _pull(uri: str, cache: Path) -> int:
    try:
        folder = _hub_pull(uri, cache) if uri.startswith("hf://") else model_store.resolve(uri, cache)
    except ModelError as error:
        _say(f"{uri}: {error}")
        return 1
    _say(f"{uri} is in {folder}")
    return 0


def _hub_pull(uri: str, cache: Path) -> Path:
    model = model_store.hub_model(uri)
    server = hub.Hub.from_environment()
    try:
        return server.pull(model, cache, ProgressLines(), _say)
    finally:
        server.close()


class ProgressLines:
    """A line every two seconds and one at the end of each file: percent, rate, time left."""

    def __init__(self) -> None:
        self._file = ""
        self._began = (0.0, 0)
        self._last_seconds = 0.0

    def __call__(self, name: str, there: int, size: int) -> None:
        now = time.monotonic()
        if name != self._file:
            self._file, self._began, self._last_seconds = name, (now, there), now
        if there < size and now - self._last_seconds < _SECONDS_BETWEEN_LINES:
            return
        self._last_seconds = now
        began_seconds, began_bytes = self._began
        rate = (there - began_bytes) / max(now - began_seconds, 1e-3)
        left = f", {(size - there) / rate:.0f} s left" if there < size and rate else ""
        percent = 100 * there // size if size else 100
        _say(f"{name}  {percent} %  of {size / 1e6:.1f} MB  {rate / 1e6:.1f} MB/s{left}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
