"""``serve``: the OpenAI-compatible server. In a pod its config comes from the environment, else from flags."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from typing import Any

from pydantic import ValidationError

from specdecode_worker.commands.flags import add_model_flags, add_shape_flags, method_and_draft
from specdecode_worker.contract import (
    DraftConfig,
    EngineConfig,
    Env,
    ModelConfig,
    Plan,
    Port,
    ServerConfig,
    TreeShape,
    WorkerConfig,
)
from specdecode_worker.models.store import default_cache_dir
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.run import serve

_DEFAULT_SHAPE = TreeShape.chain(3)
_EXPLORE = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"With ${Env.config} set, as the operator sets it in a pod, no flag is read."
    add_model_flags(parser)
    add_shape_flags(parser)
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the last part of --model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=Port.http, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--admin-port", type=int, default=Port.admin, help="default: %(default)s")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    parser.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="requests in one batch")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, metavar="N")
    parser.add_argument("--kv-cache-tokens", type=int, metavar="N", help="default: what the free memory allows")
    parser.add_argument("--max-waiting", type=int, default=256, metavar="N", help="beyond it the answer is 429")
    parser.add_argument("--endpoint-delay-seconds", type=float, default=0.0, metavar="S")
    parser.add_argument("--grace-period-seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--speculative-config", metavar="JSON", help="vLLM's form of --method, --draft and --depth")


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 after a clean way out, 1 when the engine or requests were lost, 2 for a wrong config."""
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config, plan = _pod_config(os.environ[Env.config]) if Env.config in os.environ else config_from_flags(args)
    except ValueError as error:
        print(f"specdecode-worker serve: {error}", file=sys.stderr)
        return 2
    try:
        return asyncio.run(serve(config, plan))
    except CannotStart as error:
        print(f"specdecode-worker serve: {error}", file=sys.stderr)
        return 1


def config_from_flags(args: argparse.Namespace) -> tuple[WorkerConfig, Plan]:
    """Raises ValueError that names the flag or field."""
    if args.speculative_config is not None:
        _take_speculative_config(args)
    method, draft = method_and_draft(args)
    with_draft = {"method": method, "uri": draft}
    try:
        config = WorkerConfig(
            model=ModelConfig(
                uri=args.model,
                served_name=args.served_model_name or args.model.rstrip("/").rpartition("/")[2],
                dtype=args.dtype,
                max_model_len=args.max_model_len,
            ),
            draft=DraftConfig.model_validate(with_draft),
            engine=EngineConfig(
                max_num_seqs=args.max_num_seqs,
                max_num_batched_tokens=args.max_num_batched_tokens,
                kv_cache_tokens=args.kv_cache_tokens,
                threads=args.threads,
                device=args.device,
            ),
            server=ServerConfig(
                host=args.host,
                port=args.port,
                admin_port=args.admin_port,
                max_waiting=args.max_waiting,
                endpoint_delay_seconds=args.endpoint_delay_seconds,
                grace_period_seconds=args.grace_period_seconds,
            ),
            cache_dir=args.cache_dir or str(default_cache_dir()),
        )
    except ValidationError as error:
        raise ValueError(_fields(error)) from None
    return config, _standalone_plan(args.shape, method)


def _standalone_plan(shape: TreeShape | None, method: str) -> Plan:
    """One shape at every load, with a little exploration, so that the report shows what other depths would bring."""
    if method == "none":
        return Plan()
    initial = shape if shape is not None else _DEFAULT_SHAPE
    top_k = 1 + max(initial.ranks)
    return Plan(initial=initial, max_depth=max(initial.depth, 1), top_k=top_k, explore=_EXPLORE)


def _pod_config(text: str) -> tuple[WorkerConfig, None]:
    try:
        return WorkerConfig.model_validate_json(text), None
    except ValidationError as error:
        raise ValueError(f"${Env.config}: {_fields(error)}") from None


def _take_speculative_config(args: argparse.Namespace) -> None:
    """vLLM's {"method", "model", "num_speculative_tokens"} as our flags."""
    try:
        found: dict[str, Any] = json.loads(args.speculative_config)
        unknown = found.keys() - {"method", "model", "num_speculative_tokens"}
    except (ValueError, AttributeError):
        raise ValueError("--speculative-config must be a JSON object") from None
    if unknown:
        raise ValueError(f"--speculative-config: {sorted(unknown)[0]} is not supported")
    if args.draft is not None or args.method is not None or args.shape is not None:
        raise ValueError("--speculative-config says what --method, --draft and --depth say; give one or the other")
    args.method, args.draft = found.get("method"), found.get("model")
    if "num_speculative_tokens" in found:
        args.shape = TreeShape.chain(int(found["num_speculative_tokens"]))


def _fields(error: ValidationError) -> str:
    """Every complaint with the field that it is about."""
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'config'}: {one['msg']}"
        for one in error.errors(include_url=False, include_context=False)
    )
