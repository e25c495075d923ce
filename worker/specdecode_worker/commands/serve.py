"""Command ``serve``: run the OpenAI-compatible server.

In a pod the configuration comes from the environment, and flags replace single values of it. Elsewhere all of it comes
from flags.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

import uvloop
from pydantic import ValidationError

from specdecode_worker.commands.flags import (
    draft_config,
    model_config,
    named,
    take_speculative_config,
)
from specdecode_worker.contract import (
    CaptureConfig,
    EngineConfig,
    Env,
    Plan,
    ServerConfig,
    TreeShape,
    WorkerConfig,
    default_served_name,
)
from specdecode_worker.http_edge import UnusableFiles
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.server_process import serve
from specdecode_worker.termination import write_termination_message

_DEFAULT_SHAPE = TreeShape.chain(3)
_EXPLORE = 0.01


def run(args: argparse.Namespace) -> int:
    """Return the exit code: 0 after a clean shutdown, 1 if the engine or requests were lost, 2 for a wrong config."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        in_pod = Env.config in os.environ
        config, plan = _pod_config(os.environ[Env.config], args) if in_pod else config_from_flags(args)
    except ValueError as error:
        return _refuse(error, 2)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(serve(config, plan, api_keys=args.api_key))
    except (CannotStart, UnusableFiles) as error:
        return _refuse(error, 1)


def _refuse(error: Exception, code: int) -> int:
    """Print the error, write it as termination message of the pod, and return ``code``."""
    print(f"specdecode-worker serve: {error}", file=sys.stderr)
    write_termination_message(str(error))
    return code


def config_from_flags(args: argparse.Namespace) -> tuple[WorkerConfig, Plan]:
    """Build the worker configuration and the plan of a worker without an operator.

    Raises:
        ValueError: A flag or a field is invalid; the message names it.
    """
    lookup = take_speculative_config(args) if args.speculative_config is not None else {}
    served_name = args.served_model_name or default_served_name(args.model)
    try:
        config = WorkerConfig(
            model=model_config(args, served_name),
            draft=draft_config(args, required=False, **lookup),
            engine=EngineConfig(**named(args, EngineConfig)),
            server=ServerConfig(**named(args, ServerConfig)),
            capture=_capture(args),
            cache_dir=args.cache_dir or str(default_cache_dir()),
        )
    except ValidationError as error:
        raise ValueError(_fields(error)) from None
    plan = _standalone_plan(args.shape, config.draft.method)
    return config, plan.model_copy(update={"prefill": tuple(args.prefill)})


def _capture(args: argparse.Namespace) -> CaptureConfig | None:
    """Build the capture configuration, or return None without --capture.

    Raises:
        ValueError: Capture flags are given without --capture, or a share is invalid.
    """
    flags = {
        "max_bytes": args.capture_max_bytes,
        "max_age_seconds": args.capture_max_age,
        "redact": args.capture_redact,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if args.capture is None:
        if given or args.capture_share:
            raise ValueError("the --capture-... flags need --capture DIR")
        return None
    shares = dict(_share(word) for word in args.capture_share)
    given |= {"share": shares.pop("")} if "" in shares else {}
    return CaptureConfig(dir=args.capture, task_shares=shares, **given)


def _share(word: str) -> tuple[str, float]:
    """Parse ``0.1`` or ``code=0.1`` into task and share. The task is empty if the share applies to all tasks."""
    task, _, share = word.rpartition("=")
    try:
        return task, float(share)
    except ValueError:
        raise ValueError(f"--capture-share {word!r}: write 0.1 or task=0.1") from None


def _standalone_plan(shape: TreeShape | None, method: str) -> Plan:
    """Build a plan that runs one shape at every load.

    It explores a little, so that the report shows the measurements of other depths.
    """
    if method == "none":
        return Plan()
    initial = shape if shape is not None else _DEFAULT_SHAPE
    top_k = 1 + max(initial.ranks)
    return Plan(initial=initial, max_depth=max(initial.depth, 1), top_k=top_k, explore=_EXPLORE)


def _pod_config(text: str, args: argparse.Namespace) -> tuple[WorkerConfig, None]:
    """Read the configuration of a pod, with the flags of server, engine and capture applied; its plan is mounted.

    Raises:
        ValueError: The configuration is invalid, or a flag is one that only the configuration may set. The message
            names the fields or the flag.
    """
    given = {name for name, default in args.flag_defaults.items() if getattr(args, name, default) != default}
    engine, server = given & EngineConfig.model_fields.keys(), given & ServerConfig.model_fields.keys()
    capture = {name for name in given if name.startswith("capture")}
    if others := sorted(given - engine - server - capture - {"api_key"}):
        raise ValueError(f"--{others[0].replace('_', '-')}: with ${Env.config} set, it is set there and not by a flag")
    try:
        config = WorkerConfig.model_validate_json(text)
        values = config.model_dump()
        values["engine"] |= {name: getattr(args, name) for name in engine}
        values["server"] |= {name: getattr(args, name) for name in server}
        values |= {"capture": _capture(args)} if capture else {}
        return (WorkerConfig.model_validate(values) if given else config), None
    except ValidationError as error:
        raise ValueError(f"${Env.config}: {_fields(error)}") from None


def _fields(error: ValidationError) -> str:
    """Format all validation errors, each with the field it refers to."""
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'config'}: {one['msg']}"
        for one in error.errors(include_url=False, include_context=False)
    )
