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
from typing import Any, get_args

import uvloop
from pydantic import ValidationError

from specdecode_worker.commands.flags import (
    add_merge_flag,
    add_model_flags,
    add_placement_flag,
    add_shape_flags,
    default_by_device,
    merged_drafts,
    method_and_draft,
    take_speculative_config,
)
from specdecode_worker.contract import (
    OTHER_TASK,
    CaptureConfig,
    DraftConfig,
    EngineConfig,
    Env,
    MergedDraft,
    ModelConfig,
    Plan,
    Port,
    ReasoningFormat,
    Sampler,
    ServerConfig,
    TaskMatch,
    ToolFormat,
    TreeShape,
    WorkerConfig,
    default_served_name,
)
from specdecode_worker.models.fetch import default_cache_dir
from specdecode_worker.server.errors import CannotStart
from specdecode_worker.server.server_process import serve
from specdecode_worker.termination import write_termination_message

_DEFAULT_SHAPE = TreeShape.chain(3)
_EXPLORE = 0.01
_ENGINE = EngineConfig()
_SERVER = ServerConfig()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of this command to ``parser``."""
    parser.epilog = (
        f"Flags that vLLM has too are named as there. With ${Env.config} set, as the operator sets it in a pod, flags "
        f"of server, engine and capture replace values of it; others are refused. ${Env.api_keys} may hold keys."
    )
    # The operator refuses flags that it sets itself by their whole names.
    parser.allow_abbrev = False
    add_model_flags(parser)
    add_placement_flag(parser)
    add_shape_flags(parser)
    add_merge_flag(parser)
    parser.add_argument("--speculative-config", metavar="JSON", help="vLLM's form of --method, --draft and --depth")
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the last part of --model")
    _add_server_flags(parser)
    _add_engine_flags(parser)
    _add_capture_flags(parser)
    parser.set_defaults(flag_defaults={action.dest: action.default for action in parser._actions})


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=Port.http, help="0 takes a free one (default: %(default)s)")
    parser.add_argument("--admin-port", type=int, default=Port.admin, help="default: %(default)s")
    parser.add_argument("--api-key", nargs="+", default=[], metavar="KEY", help="clients must send one of them")
    parser.add_argument("--api-keys-path", metavar="PATH",
                        help="folder of keys, or file with one a line; read again when it changes")  # fmt: skip
    parser.add_argument("--admin-tokens-path", metavar="DIR",
                        help="folder with files operator, router and capture; read again when they change")  # fmt: skip
    parser.add_argument("--shared-prefix-cache", action="store_true", help="share cached prefixes between API keys")
    parser.add_argument("--chat-template", metavar="FILE", help="file or text of another template than the model's")
    parser.add_argument("--generation-config", choices=("auto", "vllm"), default="auto",
                        help="auto: sampling defaults of generation_config.json; vllm: of the API")  # fmt: skip
    parser.add_argument("--tool-call-parser", choices=get_args(ToolFormat), help="default: what the template says")
    parser.add_argument("--reasoning-parser", choices=get_args(ReasoningFormat),
                        help="send thinking as reasoning_content (default: as content)")  # fmt: skip
    parser.add_argument("--max-waiting", type=int, default=256, metavar="N", help="beyond it the answer is 429")
    parser.add_argument("--request-timeout-seconds", type=float, default=_SERVER.request_timeout_seconds, metavar="S",
                        help="default deadline; X-Request-Timeout lowers it (default: %(default)s)")  # fmt: skip
    parser.add_argument("--queue-timeout-seconds", type=float, default=_SERVER.queue_timeout_seconds, metavar="S",
                        help="longest time in the queue; then the answer is 503 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--api-key-metrics", action=argparse.BooleanOptionalAction, default=_SERVER.api_key_metrics,
                        help="request metrics by the name of the API key (default: no)")  # fmt: skip
    parser.add_argument("--vllm-metrics", action=argparse.BooleanOptionalAction, default=_SERVER.vllm_metrics,
                        help="metrics under vLLM's names too (default: yes)")  # fmt: skip
    parser.add_argument("--endpoint-delay-seconds", type=float, default=0.0, metavar="S")
    parser.add_argument("--grace-period-seconds", type=float, default=60.0, metavar="S")
    parser.add_argument("--step-timeout-seconds", type=float, default=_SERVER.step_timeout_seconds, metavar="S",
                        help="an engine without progress for longer is hung (default: %(default)s)")  # fmt: skip
    _add_connection_flags(parser)


def _add_connection_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--header-timeout-seconds", type=float, default=_SERVER.header_timeout_seconds, metavar="S",
                        help="for the headers of a request (default: %(default)s)")  # fmt: skip
    parser.add_argument("--body-timeout-seconds", type=float, default=_SERVER.body_timeout_seconds, metavar="S",
                        help="for a whole request with its body (default: %(default)s)")  # fmt: skip
    parser.add_argument("--write-timeout-seconds", type=float, default=_SERVER.write_timeout_seconds, metavar="S",
                        help="for a client to read output that is ready (default: %(default)s)")  # fmt: skip
    parser.add_argument("--max-connections", type=int, default=_SERVER.max_connections, metavar="N",
                        help="of the public port (default: %(default)s)")  # fmt: skip
    parser.add_argument("--max-unfinished-body-bytes", type=int, default=_SERVER.max_unfinished_body_bytes, metavar="N",
                        help="of all bodies that are still arriving (default: 64 MiB)")  # fmt: skip
    parser.add_argument("--tls-cert-file", metavar="FILE", help="certificate chain for both ports, as PEM")
    parser.add_argument("--tls-key-file", metavar="FILE", help="its key, without a password")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help=f"requests in one batch ({default_by_device('max_num_seqs')})"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N",
                        help=f"tokens of one step ({default_by_device('max_num_batched_tokens')})")  # fmt: skip
    parser.add_argument("--kv-cache-tokens", type=int, metavar="N", help="default: what the free memory allows")
    parser.add_argument("--gpu-memory-utilization", type=float, metavar="X",
                        help=f"share of the memory to use ({default_by_device('gpu_memory_utilization')})")  # fmt: skip
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N")
    parser.add_argument("--enable-prefix-caching", action=switch, default=True)
    parser.add_argument("--enable-chunked-prefill", action=switch, default=True)
    parser.add_argument("--sampler", choices=get_args(Sampler), default=_ENGINE.sampler, help="default: %(default)s")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--cuda-graph-sizes", type=int, nargs="+", default=(), metavar="N",
                        help="batches to capture graphs for (default: 1, 2, 4, 8, 16, ...)")  # fmt: skip
    parser.add_argument("--kernel-timings", metavar="FILE", help="times of this GPU, which hack/gpu wrote")


def _add_capture_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--capture", metavar="DIR", help="keep served requests there, as token ids, to distill from")
    parser.add_argument("--capture-max-bytes", type=int, metavar="N", help="of all in DIR (default: 1 GiB)")
    parser.add_argument("--capture-max-age", type=float, metavar="S", help="seconds (default: 14 days)")
    parser.add_argument("--capture-share", nargs="+", metavar="[TASK=]SHARE", default=[],
                        help="of requests, or of those of a task (default: all)")  # fmt: skip
    parser.add_argument("--capture-redact", metavar="MODULE:FUNCTION", help="sees every record first, may drop it")


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
    except CannotStart as error:
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
    method, draft = method_and_draft(args)
    drafts, merge = merged_drafts(args.merge, method, args.sampler, args.draft_placement)
    served_name = args.served_model_name or default_served_name(args.model)
    try:
        config = WorkerConfig(
            model=ModelConfig(
                uri=args.model,
                adapter=args.adapter,
                served_name=served_name,
                dtype=args.dtype,
                quantization=args.quantization,
                max_model_len=args.max_model_len,
            ),
            draft=DraftConfig.model_validate(
                {
                    "method": method,
                    "uri": draft,
                    "quantization": args.draft_quantization,
                    "placement": args.draft_placement,
                    **lookup,
                }
            ),
            drafts=drafts,
            engine=EngineConfig(**_named(args, EngineConfig)),
            server=ServerConfig(**_named(args, ServerConfig)),
            capture=_capture(args),
            cache_dir=args.cache_dir or str(default_cache_dir()),
        )
    except ValidationError as error:
        raise ValueError(_fields(error)) from None
    return config, _standalone_plan(args.shape, method, merge)


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


def _named(args: argparse.Namespace, kind: type[EngineConfig | ServerConfig]) -> dict[str, Any]:
    """Return the values of the flags that have the name of a field of ``kind``; None leaves a field at its default."""
    return {name: value for name in kind.model_fields if (value := getattr(args, name, None)) is not None}


def _standalone_plan(shape: TreeShape | None, method: str, merge: tuple[MergedDraft, ...] = ()) -> Plan:
    """Build a plan that runs one shape at every load, with the drafts that are merged for all requests.

    It explores a little, so that the report shows the measurements of other depths.
    """
    if method == "none":
        return Plan()
    initial = shape if shape is not None else _DEFAULT_SHAPE
    top_k = 1 + max(initial.ranks)
    tasks = (TaskMatch(name=OTHER_TASK, merge=merge),) if merge else ()
    return Plan(initial=initial, max_depth=max(initial.depth, 1), top_k=top_k, explore=_EXPLORE, tasks=tasks)


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
