"""Command ``pull``: fetch models into the cache and verify them.

The init container of a worker pod runs it without URIs. It then takes target and draft from the configuration of the
pod, and the drafts that the mounted plan assigns to it. In a pod, the commits of models whose URI names none become the
termination message, which the operator reads, and commits that the operator knows already are fetched instead of newer
ones.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from specdecode_worker.commands.flags import print_progress
from specdecode_worker.contract import Env, Revisions, WorkerConfig
from specdecode_worker.drafts.swap import assigned_uris, worker_name
from specdecode_worker.models import download
from specdecode_worker.models import fetch as model_store
from specdecode_worker.models.errors import ModelError
from specdecode_worker.server.service import read_plan
from specdecode_worker.termination import write_termination_message

_SECONDS_BETWEEN_LINES = 2.0
BUCKETS = ("s3://", "gs://", "az://")


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 if all models are available, 1 if one cannot be fetched, 2 for wrong usage."""
    try:
        config = None if args.uris else _pod_config()
    except ValueError as error:
        print(f"specdecode-worker pull: {error}", file=sys.stderr)
        return 2
    if config is None:
        cache = Path(args.cache_dir) if args.cache_dir else model_store.default_cache_dir()
        code = max([_pull(uri, cache) for uri in args.uris])
        uris = args.uris
    else:
        cache = Path(args.cache_dir or config.cache_dir)
        code = _pull_for_pod(config, cache)
        uris = [uri for uri in (config.model.uri, config.model.adapter, config.draft.uri) if uri is not None]
    if code == 0:
        _report_revisions(uris, cache)
    return code


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
    """Fetch target and draft of a pod. A draft that is not required may fail.

    The last line is the cause of a failure: the kubelet makes it the termination message.
    """
    code = max([_pull(uri, cache) for uri in (config.model.uri, config.model.adapter) if uri is not None])
    if code != 0:
        return code
    _pull_assigned(config, cache)
    if config.draft.uri is not None and _pull(config.draft.uri, cache) != 0:
        if config.draft.required:
            return 1
        print_progress("the draft is not required: the worker will serve without it")
    return code


def _pull_assigned(config: WorkerConfig, cache: Path) -> None:
    """Fetch the drafts that the mounted plan assigns to this pod. The worker can serve without them."""
    path = os.environ.get(Env.plan_path)
    plan = read_plan(Path(path), config.deployment_uid) if path else None
    for uri in assigned_uris(plan, config, worker_name()) if plan is not None else ():
        if uri.startswith(("hf://", *BUCKETS)) and _pull(uri, cache) != 0:
            print_progress("the draft is assigned by the plan: without it the worker serves with the draft of the spec")


def _pull(uri: str, cache: Path) -> int:
    """Fetch one model and return an exit code."""
    try:
        folder = _fetch(uri, cache)
    except ModelError as error:
        print_progress(f"{uri}: {error}")
        return 1
    print_progress(f"{uri} is in {folder}")
    return 0


def _fetch(uri: str, cache: Path) -> Path:
    """Return the folder of a model, after fetching it where its URI names a hub or a bucket."""
    if len(parts := model_store.parts_of(uri)) > 1:
        for part in parts:
            _fetch(part, cache)
        return model_store.resolve(uri, cache)
    if uri.startswith("hf://"):
        return _hub_pull(uri, cache)
    if uri.startswith(BUCKETS):
        return download.fetch(uri, cache, ProgressLines())
    return model_store.resolve(uri, cache)


def _hub_pull(uri: str, cache: Path) -> Path:
    """Fetch a model from the Hugging Face Hub and return its folder."""
    model = model_store.hub_model(uri)
    commit = model_store.resolved_commit(uri)
    if commit:
        folder = model_store.folder_with(model, commit, cache)
        if folder is not None:
            return folder
        model = model.at(commit)
    server = download.Hub.from_environment()
    try:
        return server.pull(model, cache, ProgressLines(), print_progress)
    finally:
        server.close()


def _report_revisions(uris: Sequence[str], cache: Path) -> None:
    """Write the commits of the models whose URI names none as the termination message of the container."""
    commits: dict[str, str] = {}
    for uri in uris:
        with contextlib.suppress(ModelError):  # a draft that is not required
            if uri.startswith("hf://") and not model_store.hub_model(uri).is_pinned:
                commits[uri] = model_store.commit_in(model_store.resolve(uri, cache))
    try:
        message = Revisions(revisions={uri: commit for uri, commit in commits.items() if commit})
    except ValidationError as error:
        print_progress(f"the hub names commits that are none: {error}")
        return
    if message.revisions:
        write_termination_message(message.model_dump_json())


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
        print_progress(f"{name}  {percent} %  of {size / 1e6:.1f} MB  {rate / 1e6:.1f} MB/s{left}")
