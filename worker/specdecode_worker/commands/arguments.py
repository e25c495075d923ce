"""Flags of all commands of ``specdecode-worker``. Nothing here imports torch, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, get_args

from specdecode_worker.commands.flags import (
    EMBEDDED_DRAFT,
    EMBEDDED_TARGET,
    add_adapter_flag,
    add_device_flag,
    add_kv_cache_dtype_flag,
    add_merge_flag,
    add_model_flags,
    add_output_flags,
    add_placement_flag,
    add_quantization_flag,
    add_sampling_flags,
    add_shape_flags,
    add_tensor_parallel_flag,
    default_by_device,
)
from specdecode_worker.contract import (
    DRAFT_FREE,
    EngineConfig,
    Env,
    MergedDraft,
    Method,
    Port,
    ReasoningFormat,
    Sampler,
    ServerConfig,
    ToolFormat,
    TreeShape,
)
from specdecode_worker.models.fetch import FORMS

if TYPE_CHECKING:
    from specdecode_worker.commands.comparison import Variant

TRAINED_METHODS = tuple(name for name in get_args(Method) if name not in DRAFT_FREE)
NGRAM = "ngram"
DISTILL_USAGE = 64
"""Exit code of ``distill`` for wrong usage."""
_ENGINE, _SERVER = EngineConfig(), ServerConfig()


def new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of one of COMMANDS."""
    description, add = COMMANDS[command]
    parser = argparse.ArgumentParser(f"specdecode-worker {command}", description=description)
    add(parser)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``serve``."""
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
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="name of the model in the API (default: the last part of --model)"
    )
    _add_server_flags(parser)
    _add_engine_flags(parser)
    _add_capture_flags(parser)
    parser.set_defaults(flag_defaults={action.dest: action.default for action in parser._actions})


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=Port.http, help="0 takes a free one (default: %(default)s)")
    parser.add_argument(
        "--admin-port", type=int, default=Port.admin, help="port of the operator (default: %(default)s)"
    )
    parser.add_argument("--api-key", nargs="+", default=[], metavar="KEY", help="API keys accepted on the public port")
    parser.add_argument("--api-keys-path", metavar="PATH",
                        help="folder of API keys, or file with one a line; read again when it changes")  # fmt: skip
    parser.add_argument("--admin-tokens-path", metavar="DIR",
                        help="folder of admin tokens: operator, router and capture; read again on change")  # fmt: skip
    parser.add_argument("--shared-prefix-cache", action="store_true", help="share cached prefixes between API keys")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="file or text of a chat template that replaces the model's"
    )
    parser.add_argument("--generation-config", choices=("auto", "vllm"), default="auto",
                        help="auto: sampling defaults of generation_config.json; vllm: of the API")  # fmt: skip
    parser.add_argument(
        "--tool-call-parser",
        choices=get_args(ToolFormat),
        help="format of tool calls (default: that of the chat template)",
    )
    parser.add_argument("--reasoning-parser", choices=get_args(ReasoningFormat),
                        help="send thinking as reasoning_content (default: as content)")  # fmt: skip
    parser.add_argument(
        "--max-waiting",
        type=int,
        default=256,
        metavar="N",
        help="waiting requests beyond which the answer is 429 (default: %(default)s)",
    )
    parser.add_argument("--request-timeout-seconds", type=float, default=_SERVER.request_timeout_seconds, metavar="S",
                        help="default deadline; X-Request-Timeout lowers it (default: %(default)s)")  # fmt: skip
    parser.add_argument("--queue-timeout-seconds", type=float, default=_SERVER.queue_timeout_seconds, metavar="S",
                        help="longest time in the queue; then the answer is 503 (default: %(default)s)")  # fmt: skip
    parser.add_argument("--api-key-metrics", action=argparse.BooleanOptionalAction, default=_SERVER.api_key_metrics,
                        help="request metrics by the name of the API key (default: no)")  # fmt: skip
    parser.add_argument("--vllm-metrics", action=argparse.BooleanOptionalAction, default=_SERVER.vllm_metrics,
                        help="metrics under vLLM's names too (default: yes)")  # fmt: skip
    parser.add_argument("--endpoint-delay-seconds", type=float, default=0.0, metavar="S",
                        help="time after SIGTERM for new requests to come in (default: %(default)s)")  # fmt: skip
    parser.add_argument("--grace-period-seconds", type=float, default=60.0, metavar="S",
                        help="time after that for running requests to finish (default: %(default)s)")  # fmt: skip
    parser.add_argument("--step-timeout-seconds", type=float, default=_SERVER.step_timeout_seconds, metavar="S",
                        help="an engine without progress for longer is hung (default: %(default)s)")  # fmt: skip
    _add_connection_flags(parser)


def _add_connection_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--header-timeout-seconds", type=float, default=_SERVER.header_timeout_seconds, metavar="S",
                        help="longest time for the headers of a request (default: %(default)s)")  # fmt: skip
    parser.add_argument("--body-timeout-seconds", type=float, default=_SERVER.body_timeout_seconds, metavar="S",
                        help="longest time for a whole request with its body (default: %(default)s)")  # fmt: skip
    parser.add_argument("--write-timeout-seconds", type=float, default=_SERVER.write_timeout_seconds, metavar="S",
                        help="longest time for a client to read output (default: %(default)s)")  # fmt: skip
    parser.add_argument("--max-connections", type=int, default=_SERVER.max_connections, metavar="N",
                        help="most connections of the public port (default: %(default)s)")  # fmt: skip
    parser.add_argument("--max-unfinished-body-bytes", type=int, default=_SERVER.max_unfinished_body_bytes, metavar="N",
                        help="most bytes of bodies that are still arriving (default: 64 MiB)")  # fmt: skip
    parser.add_argument(
        "--tls-cert-file", metavar="FILE", help="PEM certificate chain for both ports; read again when it changes"
    )
    parser.add_argument("--tls-key-file", metavar="FILE", help="PEM key of the certificate, without a password")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help=f"requests in one batch ({default_by_device('max_num_seqs')})"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, metavar="N",
                        help=f"tokens of one step ({default_by_device('max_num_batched_tokens')})")  # fmt: skip
    parser.add_argument(
        "--kv-cache-tokens", type=int, metavar="N", help="size of the KV cache (default: what the free memory allows)"
    )
    add_kv_cache_dtype_flag(parser)
    parser.add_argument("--gpu-memory-utilization", type=float, metavar="X",
                        help=f"share of the memory to use ({default_by_device('gpu_memory_utilization')})")  # fmt: skip
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1, metavar="N",
                        help="devices that share the target (default: %(default)s)")  # fmt: skip
    parser.add_argument("--enable-prefix-caching", action=switch, default=True,
                        help="reuse cached prefixes of earlier prompts (default: yes)")  # fmt: skip
    parser.add_argument("--enable-chunked-prefill", action=switch, default=True,
                        help="read long prompts in parts, beside decoding requests (default: yes)")  # fmt: skip
    parser.add_argument("--sampler", choices=get_args(Sampler), default=_ENGINE.sampler,
                        help="coupled: same text; mss: same distribution (default: %(default)s)")  # fmt: skip
    parser.add_argument("--enforce-eager", action="store_true", help="use no CUDA graphs")
    parser.add_argument("--cuda-graph-sizes", type=int, nargs="+", default=(), metavar="N",
                        help="batches to capture graphs for (default: 1, 2, 4, 8, 16, ...)")  # fmt: skip
    parser.add_argument("--kernel-timings", metavar="FILE", help="kernel times of this GPU, written by hack/gpu")
    parser.add_argument("--role", choices=("worker", "prefill"), default=_ENGINE.role,
                        help="prefill: compute prompts for other workers (default: %(default)s)")  # fmt: skip
    parser.add_argument("--block-port", type=int, metavar="PORT", help="port from which other workers get cache blocks")
    parser.add_argument("--prefill", nargs="+", default=(), metavar="HOST:PORT",
                        help="block ports of prefill workers, to be asked for long prompts")  # fmt: skip


def _add_capture_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--capture", metavar="DIR", help="record served requests in this folder, as token ids, to distill from"
    )
    parser.add_argument("--capture-max-bytes", type=int, metavar="N", help="maximum total size of DIR (default: 1 GiB)")
    parser.add_argument(
        "--capture-max-age", type=float, metavar="S", help="maximum age of a record in seconds (default: 14 days)"
    )
    parser.add_argument("--capture-share", nargs="+", metavar="[TASK=]SHARE", default=[],
                        help="share of requests, or of the requests of a task, to record (default: all)")  # fmt: skip
    parser.add_argument(
        "--capture-redact",
        metavar="MODULE:FUNCTION",
        help="function that may change or drop each record before it is written",
    )


def _add_generate(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``generate``."""
    parser.add_argument("--prompt", help="one user message, or plain text with --raw")
    parser.add_argument("--raw", action="store_true", help="use --prompt without the chat template")
    parser.add_argument("--concurrency", type=int, default=8, help="prompts of a file run together (default: 8)")
    add_model_flags(parser)
    add_placement_flag(parser)
    add_shape_flags(parser)
    add_sampling_flags(parser, max_tokens=256)
    add_output_flags(parser)
    parser.add_argument(
        "--sampler",
        choices=("coupled", "mss"),
        default="coupled",
        help="coupled: same text for the same seed; mss: same distribution (default: %(default)s)",
    )


def _add_pull(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``pull``."""
    parser.add_argument("uris", nargs="*", metavar="URI", help=f"{FORMS} (default: those of ${Env.config})")
    parser.add_argument("--cache-dir", metavar="DIR", help="folder of downloaded models (default: the user's cache)")


def _add_check(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``check``."""
    parser.epilog = f"With ${Env.config} set, as the operator sets it in a pod, flags of the model are not read."
    add_model_flags(parser)
    add_placement_flag(parser)
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    parser.add_argument(
        "--max-num-seqs", type=int, metavar="N", help=f"requests in one batch ({default_by_device('max_num_seqs')})"
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        metavar="N",
        help=f"tokens of one step ({default_by_device('max_num_batched_tokens')})",
    )
    parser.add_argument(
        "--kv-cache-tokens", type=int, metavar="N", help="size of the KV cache (default: what is left of the memory)"
    )
    add_kv_cache_dtype_flag(parser)
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help=f"share of the memory to use, on a CPU too ({default_by_device('gpu_memory_utilization')})",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="devices that share the target (default: %(default)s)",
    )
    parser.add_argument("--enforce-eager", action="store_true", help="use no CUDA graphs")
    parser.add_argument("--memory", type=float, metavar="GIB", help="memory of another device than this machine's")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``bench``."""
    parser.add_argument(
        "--concurrency",
        type=_counts,
        default=(1,),
        metavar="1,2,4",
        help="batch sizes, one row of the table each (default: 1)",
    )
    parser.add_argument(
        "--variant",
        type=_variant,
        action="append",
        metavar="[ngram/|+ngram[:DEPTH]/]SHAPE",
        help="shape to compare; repeat it for more: chain:3, tree:4,2,1, ngram/chain:4, or merged with prompt lookup: "
        "+ngram/tree:4,2,1, +ngram:8/chain:3 (default: --depth or --tree)",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="repetitions of plain, speculative, speculative, plain (default: %(default)s)",
    )
    add_model_flags(parser)
    add_placement_flag(parser)
    add_shape_flags(parser)
    add_sampling_flags(parser, max_tokens=128)
    add_output_flags(parser)


def _variant(text: str) -> Variant:
    """Parse ``SHAPE``, ``ngram/SHAPE``, ``+ngram/SHAPE`` or ``+ngram:DEPTH/SHAPE``.

    Raises:
        ArgumentTypeError: It is other text.
    """
    # Imported here, because it needs torch, which the help does not.
    from specdecode_worker.commands.comparison import Variant

    named, _, shape = text.rpartition("/")
    draft, colon, depth = named.partition(":")
    merged = draft == f"+{NGRAM}"
    if (draft not in ("", NGRAM) and not merged) or (colon and not (merged and depth.isdecimal())):
        raise argparse.ArgumentTypeError(
            f"{text!r}: the draft is {NGRAM}, +{NGRAM} or +{NGRAM}:DEPTH, or none is named"
        )
    try:
        merge = (MergedDraft(draft=NGRAM, depth=int(depth or 0)),) if merged else ()
        return Variant(TreeShape.parse(shape), "" if merged else draft, merge, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _counts(text: str) -> tuple[int, ...]:
    """Parse positive counts separated by commas. Raise ArgumentTypeError for other text."""
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} should be counts like 1,2,4")
    return counts


def _add_eval(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``eval``."""
    add_model_flags(parser)
    add_shape_flags(parser)
    add_output_flags(parser)
    parser.add_argument("--max-tokens", type=int, default=256, help="length of an answer (default: %(default)s)")
    parser.add_argument(
        "--against",
        metavar="URI",
        help="target in another format, usually bf16, to measure the draft on too",
    )
    parser.add_argument(
        "--temperature",
        type=_temperatures,
        metavar="T,T",
        default=(0.0,),
        help="of the answers (default: greedy)",
    )
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="batch size (default: %(default)s)")
    add_tensor_parallel_flag(parser)


def _temperatures(text: str) -> tuple[float, ...]:
    """Parse temperatures such as ``0.3,0.6,1``. Raise ArgumentTypeError for other text."""
    try:
        return tuple(float(value) for value in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of temperatures; write 0.3,0.6,1.0") from None


def _add_train(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``train``."""
    parser.add_argument("--model", default=EMBEDDED_TARGET, metavar="URI", help="target (default: %(default)s)")
    add_adapter_flag(parser)
    parser.add_argument("--draft", metavar="URI", help="draft to continue (default: start from the target's layers)")
    parser.add_argument(
        "--method", choices=TRAINED_METHODS, default="eagle3", help="kind of draft (default: %(default)s)"
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=1,
        help="dense layers; one that --draft lacks is put behind its own (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of all files; the draft is in DIR/head"
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts", type=Path, metavar="FILE.jsonl", help="prompts that the target answers (default: built-in ones)"
    )
    source.add_argument("--text", type=Path, metavar="FILE", help="train on this text instead of the target's answers")
    parser.add_argument("--held-out", type=Path, metavar="FILE.jsonl", help="prompts that training must not see")
    parser.add_argument("--tokens", type=int, default=400_000, help="answer tokens to record (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=320, help="length of an answer (default: %(default)s)")
    parser.add_argument(
        "--rows", type=int, default=96, help="answers that are generated together (default: %(default)s)"
    )
    parser.add_argument("--draft-vocab", type=int, default=8192, help="size of the draft's vocabulary (default: 8192)")
    parser.add_argument(
        "--no-normalisers", action="store_true", help="take probabilities over the draft's vocabulary alone: cheaper"
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", type=int, default=0, help="stop after so many optimizer steps (default: by time)")
    length.add_argument("--minutes", type=float, default=65.0, help="stop after this time (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="default: %(default)s")
    parser.add_argument("--batch-tokens", type=int, default=1024, metavar="N",
                        help="tokens of one pass, with padding (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--accumulate", type=int, default=1, metavar="N", help="passes of an optimizer step (default: %(default)s)"
    )
    parser.add_argument("--depth", type=int, default=7, help="depth that training unrolls (default: %(default)s)")
    parser.add_argument(
        "--patience", type=int, default=0, help="stop after so many validations without a better one (default: never)"
    )
    parser.add_argument(
        "--names",
        choices=("safeailab", "speculators", "nemo"),
        default="safeailab",
        help="tensor names of an EAGLE-3 or P-EAGLE head (default: %(default)s)",
    )
    parser.add_argument(
        "--validate-every",
        type=float,
        default=240.0,
        help="seconds between validations and checkpoints (default: %(default)s)",
    )
    parser.add_argument(
        "--validate-steps",
        type=int,
        default=0,
        metavar="N",
        help="validate every N steps instead, independent of the clock",
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16",
                        help="number format of the target (default: %(default)s)")  # fmt: skip
    add_device_flag(parser)
    add_tensor_parallel_flag(parser)
    parser.add_argument("--threads", type=int, help="torch threads (default: all)")
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="folder of downloaded models (default: the user's cache)"
    )


def _add_capture(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``capture``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="sweep|delete|prune")
    sweep = commands.add_parser("sweep", help="delete the segments whose records exceed their maximum age")
    sweep.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="folders of `serve --capture` or `distill --out`"
    )
    sweep.add_argument(
        "--max-age", type=float, metavar="S", help="maximum age in seconds (default: that of the last worker)"
    )
    delete = commands.add_parser(
        "delete",
        help="delete the records of one user; workers may run",
        epilog="Requests that are still running are recorded afterwards: run it when the user's requests have ended. "
        "Name the --out of the runs of `distill` as well: they hold copies of records. Backups are not changed.",
    )
    delete.add_argument(
        "folders", nargs="+", type=Path, metavar="DIR", help="folders of `serve --capture` or `distill --out`"
    )
    delete.add_argument("--user", required=True, metavar="ID", help="value of the field `user` of the requests")
    delete.add_argument("--token-file", type=Path, metavar="FILE",
                        help="admin tokens with the scope operator, one a line, for folders without keys")  # fmt: skip
    prune = commands.add_parser("prune", help="delete an abandoned run of `distill`, and the runs before it")
    prune.add_argument("folders", nargs="+", type=Path, metavar="DIR",
                       help="folder of a run, named by its time in hexadecimal digits")  # fmt: skip


def _add_distill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``distill``."""
    parser.epilog = (
        "Exit codes: 0 the draft is better, 2 worse, 3 inconclusive; 1 an error, 64 wrong usage, 143 stopped by a "
        "signal with all kept: the same command goes on. The verdict is printed and lies in OUT/verdict.json. With "
        "--job the exit code is 0 for every verdict and every error."
    )
    parser.add_argument("--model", default=EMBEDDED_TARGET, metavar="URI", help="target (default: %(default)s)")
    add_adapter_flag(parser)
    add_quantization_flag(parser)
    parser.add_argument("--draft", default=EMBEDDED_DRAFT, metavar="URI",
                        help="deployed head to go on from: eagle3, peagle or dflash")  # fmt: skip
    _add_source_flags(parser)
    parser.add_argument("--golden", type=Path, metavar="FILE.jsonl",
                        help="frozen prompts by domain on which no draft may lose; optional with --job")  # fmt: skip
    parser.add_argument("--replay", type=Path, nargs="+", default=[], metavar="DIR",
                        help="--out of the runs of `train` or `distill` that made the deployed head")  # fmt: skip
    parser.add_argument("--replay-prompts", type=Path, metavar="FILE.jsonl",
                        help="prompts by domain whose answers are replayed, for a head made elsewhere")  # fmt: skip
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of all files; the draft is in DIR/head"
    )
    _add_study_flags(parser)
    parser.add_argument(
        "--min-gain", type=float, default=0.02, help="gain on the mix that is required (default: %(default)s)"
    )
    parser.add_argument("--max-age", type=float, metavar="S", help="age in seconds beyond which records are left out")
    parser.add_argument("--capture-tokens", type=int, default=400_000, metavar="N",
                        help="most tokens of training text, the newest (default: %(default)s)")  # fmt: skip
    parser.add_argument("--max-tokens", type=int, default=128, help="length of a golden answer (default: %(default)s)")
    _add_job_flags(parser)
    add_shape_flags(parser)
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="number format that the worker serves (default: %(default)s)",
    )
    add_device_flag(parser)
    add_tensor_parallel_flag(parser)
    parser.add_argument("--threads", type=int, help="torch threads (default: all)")
    parser.add_argument(
        "--cache-dir", type=Path, metavar="DIR", help="folder of downloaded models (default: the user's cache)"
    )
    _exit_apart(parser)


def _add_study_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the training itself."""
    parser.add_argument("--steps", type=int, default=2000, help="most optimizer steps (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=60.0, help="longest time of training (default: 60)")
    parser.add_argument("--replay-share", type=float, default=0.5, metavar="X",
                        help="share of replayed text in the first round (default: 0.5)")  # fmt: skip
    parser.add_argument("--learning-rate", type=float, default=2e-4, metavar="X", help="default: %(default)s")
    parser.add_argument("--batch-tokens", type=int, default=1024, metavar="N",
                        help="tokens of one pass (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--round-steps", type=int, default=50, help="optimizer steps between validations (default: %(default)s)"
    )
    parser.add_argument("--patience", type=int, default=3,
                        help="rounds without progress after which training stops (default: %(default)s)")  # fmt: skip
    parser.add_argument("--unroll", type=int, default=3, help="depth that is trained (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")


def _add_source_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser``. One of --capture and --capture-from is needed, see `check_capture_flags`."""
    parser.add_argument(
        "--capture", type=Path, nargs="+", default=[], metavar="DIR", help="folders of `serve --capture`"
    )
    parser.add_argument("--capture-from", metavar="[https://]HOST:PORT",
                        help="admin ports of workers to fetch captured segments from: all addresses of HOST, with the "
                        f"token in ${Env.capture_token}")  # fmt: skip
    parser.add_argument("--capture-ca", metavar="FILE", help="PEM certificates that sign those of the admin ports")
    parser.add_argument("--capture-from-bytes", type=int, default=4 * 2**30, metavar="N",
                        help="most bytes of fetched segments, the newest (default: 4 GiB)")  # fmt: skip


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags to ``parser``."""
    parser.add_argument(
        "--job", action="store_true", help="exit with 0 for every verdict and error; write it as termination message"
    )
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="longest time of the run in seconds, over its restarts"
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--head-uri", metavar="URI", help="where workers find OUT/head (default: file://OUT/head)")
    place.add_argument("--publish", metavar="URI",
                       help="with --job: copy OUT/head to URI/HASH; URI is pvc://, s3:// or file://")  # fmt: skip
    parser.add_argument(
        "--keep-data", action="store_true",
        help="with --job: keep the captured text in OUT/data after the verdict, for --replay of the next run",
    )  # fmt: skip
    parser.add_argument(
        "--prune", action="store_true",
        help="with --job: delete the folders of earlier runs next to OUT, whose name is the run's time in hex digits",
    )  # fmt: skip
    parser.add_argument(
        "--keep-drafts", metavar="HASH[,HASH]",
        help="with --prune: delete the drafts below --publish that are older than the run and have other hashes",
    )  # fmt: skip


def _exit_apart(parser: argparse.ArgumentParser) -> None:
    """Make wrong usage exit with 64, because argparse uses 2, which is the code of the verdict `worse`."""

    def error(message: str) -> NoReturn:
        parser.print_usage(sys.stderr)
        parser.exit(DISTILL_USAGE, f"{parser.prog}: error: {message}\n")

    parser.error = error  # type: ignore[method-assign]
    parser.set_defaults(usage_error=error)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "serve": ("Serve a model with OpenAI's API.", _add_serve),
    "generate": ("Generate text for prompts, with the engine alone.", _add_generate),
    "pull": ("Fetch models into the cache and verify them.", _add_pull),
    "check": ("Check whether target and draft fit each other and the memory, without loading weights.", _add_check),
    "bench": ("Compare speculation with decoding without it, interleaved in one run.", _add_bench),
    "eval": ("Measure the acceptance of a draft by domain, depth and context length.", _add_eval),
    "train": ("Train a draft (EAGLE-1/3, P-EAGLE, DFlash, Medusa, draft model) from the target's answers.", _add_train),
    "capture": ("Delete captured requests by age or by user, and abandoned runs of distill.", _add_capture),
    "distill": ("Continue training the deployed draft on captured traffic, and compare the two.", _add_distill),
}
"""Description of each command, and the function that adds its flags."""
