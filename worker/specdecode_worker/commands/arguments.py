"""Flags of all commands of ``specdecode-worker``. Nothing here imports torch, so that ``--help`` is quick."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, get_args

from pydantic import BaseModel

from specdecode_worker.commands.flags import (
    EMBEDDED_DRAFT,
    EMBEDDED_TARGET,
    add_adapter_flag,
    add_device_flag,
    add_flag,
    add_model_flags,
    add_output_flags,
    add_placement_flag,
    add_quantization_flag,
    add_sampling_flags,
    add_shape_flags,
    add_tensor_parallel_flag,
    default_by_device,
    positive,
)
from specdecode_worker.contract import (
    DRAFT_FREE,
    GPU_DEFAULTS,
    EngineConfig,
    Env,
    Method,
    ServerConfig,
)
from specdecode_worker.models.fetch import FORMS

TRAINED_METHODS = tuple(name for name in get_args(Method) if name not in DRAFT_FREE)
DISTILL_USAGE = 64
"""Exit code of ``distill`` for wrong usage."""


def new_parser(command: str) -> argparse.ArgumentParser:
    """Return the parser of one of COMMANDS."""
    description, add = COMMANDS[command]
    parser = argparse.ArgumentParser(f"specdecode-worker {command}", description=description)
    add(parser)
    return parser


def _add_fields(parser: argparse.ArgumentParser, defaults: BaseModel, texts: Mapping[str, str], **other: Any) -> None:
    """Add a flag for each named field of a configuration, with a metavar before the text of numbers and names.

    Args:
        parser: Parser to add to.
        defaults: Configuration with the default values.
        texts: Help by field: the metavar, a colon and the text, or the text alone.
        other: Defaults that differ from those of the configuration.
    """
    for name, text in texts.items():
        kind = type(defaults).model_fields[name].annotation
        how: dict[str, Any] = {}
        if choices := [choice for part in (kind, *get_args(kind)) for choice in get_args(part) if type(choice) is str]:
            how = {"choices": choices}
        elif kind is not bool:
            how["metavar"], _, text = text.partition(": ")
            numbers = [part for part in (kind, *get_args(kind)) if part in (int, float)]
            how |= {"type": numbers[0]} if numbers else {}
        add_flag(parser, f"--{name.replace('_', '-')}", text, other.get(name, getattr(defaults, name)), **how)


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
    add_flag(parser, "--speculative-config", "vLLM's form of --method, --draft and --depth", metavar="JSON")
    text = "name of the model in the API (default: the last part of --model)"
    add_flag(parser, "--served-model-name", text, metavar="NAME")
    add_flag(parser, "--api-key", "API keys accepted on the public port", [], type=str, nargs="+", metavar="KEY")
    _add_fields(parser, ServerConfig(), _SERVER_FLAGS, host="127.0.0.1", endpoint_delay_seconds=0.0)
    add_flag(parser, "--max-model-len", "tokens of prompt and answer together", type=int, metavar="N")
    add_tensor_parallel_flag(parser)
    _add_fields(parser, EngineConfig(), _ENGINE_FLAGS, **dict.fromkeys(GPU_DEFAULTS))
    text = "batches to capture graphs for (default: 1, 2, 4, 8, 16, ...)"
    add_flag(parser, "--cuda-graph-sizes", text, (), type=int, nargs="+", metavar="N")
    text = "block ports of prefill workers, to be asked for long prompts"
    add_flag(parser, "--prefill", text, (), nargs="+", metavar="HOST:PORT")
    add_flag(parser, "--capture", "record served requests in this folder, as token ids, to distill from", metavar="DIR")
    add_flag(parser, "--capture-max-bytes", "maximum total size of DIR (default: 1 GiB)", type=int, metavar="N")
    text = "maximum age of a record in seconds (default: 14 days)"
    add_flag(parser, "--capture-max-age", text, type=float, metavar="S")
    text = "share of requests, or of the requests of a task, to record (default: all)"
    add_flag(parser, "--capture-share", text, [], type=str, nargs="+", metavar="[TASK=]SHARE")
    text = "function that may change or drop each record before it is written"
    add_flag(parser, "--capture-redact", text, metavar="MODULE:FUNCTION")
    parser.set_defaults(flag_defaults={action.dest: action.default for action in parser._actions})


_SERVER_FLAGS = {
    "host": "ADDRESS: address to listen on",
    "port": "PORT: 0 takes a free one",
    "admin_port": "PORT: port of the operator",
    "api_keys_path": "PATH: folder of API keys, or file with one a line; read again when it changes",
    "admin_tokens_path": "DIR: folder of admin tokens: operator, router and capture; read again on change",
    "shared_prefix_cache": "share cached prefixes between API keys",
    "chat_template": "FILE: file or text of a chat template that replaces the model's",
    "generation_config": "auto: sampling defaults of generation_config.json; vllm: of the API",
    "tool_call_parser": "format of tool calls (default: that of the chat template)",
    "reasoning_parser": "send thinking as reasoning_content (default: as content)",
    "max_waiting": "N: waiting requests beyond which the answer is 429",
    "request_timeout_seconds": "S: default deadline; X-Request-Timeout lowers it",
    "queue_timeout_seconds": "S: longest time in the queue; then the answer is 503",
    "api_key_metrics": "request metrics by the name of the API key",
    "vllm_metrics": "metrics under vLLM's names too",
    "endpoint_delay_seconds": "S: time after SIGTERM for new requests to come in",
    "grace_period_seconds": "S: time after that for running requests to finish",
    "step_timeout_seconds": "S: an engine without progress for longer is hung",
    "header_timeout_seconds": "S: longest time for the headers of a request",
    "body_timeout_seconds": "S: longest time for a whole request with its body",
    "write_timeout_seconds": "S: longest time for a client to read output",
    "max_connections": "N: most connections of the public port",
    "max_unfinished_body_bytes": "N: most bytes of bodies that are still arriving",
    "tls_cert_file": "FILE: PEM certificate chain for both ports; read again when it changes",
    "tls_key_file": "FILE: PEM key of the certificate, without a password",
}
_MEMORY_FLAGS = {
    "max_num_seqs": f"N: requests in one batch ({default_by_device('max_num_seqs')})",
    "max_num_batched_tokens": f"N: tokens of one step ({default_by_device('max_num_batched_tokens')})",
    "kv_cache_tokens": "N: size of the KV cache (default: what the free memory allows)",
    "kv_cache_dtype": "format of the target's keys and values (default: that of activations)",
    "gpu_memory_utilization": f"X: share of the memory to use ({default_by_device('gpu_memory_utilization')})",
    "enforce_eager": "use no CUDA graphs",
}
_ENGINE_FLAGS = _MEMORY_FLAGS | {
    "enable_prefix_caching": "reuse cached prefixes of earlier prompts",
    "enable_chunked_prefill": "read long prompts in parts, beside decoding requests",
    "sampler": "coupled: same text for one seed, in limits (losslessness.md); mss: same distribution",
    "kernel_timings": "FILE: kernel times of this GPU, written by hack/gpu",
    "role": "prefill: compute prompts for other workers",
    "block_port": "PORT: port from which other workers get cache blocks",
}


def _add_pull(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``pull``."""
    parser.add_argument("uris", nargs="*", metavar="URI", help=f"{FORMS} (default: those of ${Env.config})")
    add_flag(parser, "--cache-dir", "folder of downloaded models (default: the user's cache)", metavar="DIR")


def _add_check(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``check``."""
    parser.epilog = f"With ${Env.config} set, as the operator sets it in a pod, flags of the model are not read."
    add_model_flags(parser)
    add_placement_flag(parser)
    add_flag(parser, "--max-model-len", "tokens of prompt and answer together", type=int, metavar="N")
    add_tensor_parallel_flag(parser)
    _add_fields(parser, EngineConfig(), _MEMORY_FLAGS, **dict.fromkeys(GPU_DEFAULTS))
    add_flag(parser, "--memory", "memory of another device than this machine's", type=float, metavar="GIB")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``bench``."""
    text = "batch sizes, one row of the table each (default: 1)"
    add_flag(parser, "--concurrency", text, (1,), type=_counts, metavar="1,2,4")
    add_flag(parser, "--rounds", "repetitions of plain, speculative, speculative, plain", 1, type=positive)
    add_model_flags(parser)
    add_placement_flag(parser)
    add_shape_flags(parser)
    add_sampling_flags(parser, max_tokens=128)
    add_output_flags(parser)


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
    add_flag(parser, "--max-tokens", "length of an answer", 256)
    add_flag(parser, "--against", "target in another format, usually bf16, to measure the draft on too", metavar="URI")
    add_flag(parser, "--temperature", "of the answers (default: greedy)", (0.0,), type=_temperatures, metavar="T,T")
    add_flag(parser, "--concurrency", "batch size", 8, type=positive, metavar="N")
    add_tensor_parallel_flag(parser)


def _temperatures(text: str) -> tuple[float, ...]:
    """Parse temperatures such as ``0.3,0.6,1``. Raise ArgumentTypeError for other text."""
    try:
        return tuple(float(value) for value in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of temperatures; write 0.3,0.6,1.0") from None


def _add_train(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``train``."""
    add_flag(parser, "--model", "target", EMBEDDED_TARGET, metavar="URI")
    add_adapter_flag(parser)
    add_flag(parser, "--draft", "draft to continue (default: start from the target's layers)", metavar="URI")
    add_flag(parser, "--method", "kind of draft", "eagle3", choices=TRAINED_METHODS)
    add_flag(parser, "--layers", "dense layers; one that --draft lacks is put behind its own", 1)
    _add_out(parser)
    source = parser.add_mutually_exclusive_group()
    text = "prompts that the target answers (default: built-in ones)"
    add_flag(source, "--prompts", text, type=Path, metavar="FILE.jsonl")
    add_flag(source, "--text", "train on this text instead of the target's answers", type=Path, metavar="FILE")
    add_flag(parser, "--held-out", "prompts that training must not see", type=Path, metavar="FILE.jsonl")
    add_flag(parser, "--tokens", "answer tokens to record", 400_000)
    add_flag(parser, "--max-tokens", "length of an answer", 320)
    add_flag(parser, "--rows", "answers that are generated together", 96)
    add_flag(parser, "--draft-vocab", "size of the draft's vocabulary", 8192)
    text = "take probabilities over the draft's vocabulary alone: cheaper"
    parser.add_argument("--no-normalisers", action="store_true", help=text)
    length = parser.add_mutually_exclusive_group()
    add_flag(length, "--steps", "stop after so many optimizer steps (default: by time)", 0)
    add_flag(length, "--minutes", "stop after this time", 65.0)
    add_flag(parser, "--learning-rate", "default: %(default)s", 1e-3, metavar="X")
    add_flag(parser, "--batch-tokens", "tokens of one pass, with padding", 1024, metavar="N")
    add_flag(parser, "--accumulate", "passes of an optimizer step", 1, metavar="N")
    add_flag(parser, "--depth", "depth that training unrolls", 7)
    text = "tensor names of an EAGLE-3 or P-EAGLE head"
    add_flag(parser, "--names", text, "safeailab", choices=("safeailab", "speculators", "nemo"))
    add_flag(parser, "--validate-every", "seconds between validations and checkpoints", 240.0)
    text = "validate every N steps instead, independent of the clock (default: by time)"
    add_flag(parser, "--validate-steps", text, 0, metavar="N")
    add_flag(parser, "--seed", "random seed", 0)
    _add_run_flags(parser, "number format of the target")


def _add_out(parser: argparse.ArgumentParser) -> None:
    text = "folder of all files; the draft is in DIR/head"
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help=text)


def _add_run_flags(parser: argparse.ArgumentParser, dtype_text: str) -> None:
    """Add the flags that say on what a draft is trained."""
    add_flag(parser, "--dtype", dtype_text, "bfloat16", choices=("float32", "bfloat16"))
    add_device_flag(parser)
    add_tensor_parallel_flag(parser)
    add_flag(parser, "--threads", "torch threads (default: all)", type=int)
    add_flag(parser, "--cache-dir", "folder of downloaded models (default: the user's cache)", type=Path, metavar="DIR")


def _add_capture(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands of ``capture``."""
    commands = parser.add_subparsers(dest="action", required=True, metavar="sweep|delete|prune")
    folders: dict[str, Any] = {
        "nargs": "+",
        "type": Path,
        "metavar": "DIR",
        "help": "folders of `serve --capture` or `distill --out`",
    }
    sweep = commands.add_parser("sweep", help="delete the segments whose records exceed their maximum age")
    sweep.add_argument("folders", **folders)
    add_flag(sweep, "--max-age", "maximum age in seconds (default: that of the last worker)", type=float, metavar="S")
    delete = commands.add_parser(
        "delete",
        help="delete the records of one user; workers may run",
        epilog="Requests that are still running are recorded afterwards: run it when the user's requests have ended. "
        "Name the --out of the runs of `distill` as well: they hold copies of records. Backups are not changed.",
    )
    delete.add_argument("folders", **folders)
    delete.add_argument("--user", required=True, metavar="ID", help="value of the field `user` of the requests")
    text = "admin tokens with the scope operator, one a line, for folders without keys"
    add_flag(delete, "--token-file", text, type=Path, metavar="FILE")
    prune = commands.add_parser("prune", help="delete an abandoned run of `distill`, and the runs before it")
    prune.add_argument("folders", **folders | {"help": "folder of a run, named by its time in hexadecimal digits"})


def _add_distill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``distill``. One of --capture and --capture-from is needed, see `check_capture_flags`."""
    parser.epilog = (
        "Exit codes: 0 the draft is better, 2 worse, 3 inconclusive; 1 an error, 64 wrong usage, 143 stopped by a "
        "signal with all kept: the same command goes on. The verdict is printed and lies in OUT/verdict.json. With "
        "--job the exit code is 0 for every verdict and every error."
    )
    add_flag(parser, "--model", "target", EMBEDDED_TARGET, metavar="URI")
    add_adapter_flag(parser)
    add_quantization_flag(parser)
    add_flag(parser, "--draft", "deployed head to go on from: eagle3, peagle or dflash", EMBEDDED_DRAFT, metavar="URI")
    add_flag(parser, "--capture", "folders of `serve --capture`", [], type=Path, nargs="+", metavar="DIR")
    text = "admin ports of workers to fetch captured segments from: all addresses of HOST, with the token in "
    add_flag(parser, "--capture-from", text + f"${Env.capture_token}", metavar="[https://]HOST:PORT")
    add_flag(parser, "--capture-ca", "PEM certificates that sign those of the admin ports", metavar="FILE")
    text = "frozen prompts by domain on which no draft may lose; optional with --job"
    add_flag(parser, "--golden", text, type=Path, metavar="FILE.jsonl")
    text = "--out of the runs of `train` or `distill` that made the deployed head"
    add_flag(parser, "--replay", text, [], type=Path, nargs="+", metavar="DIR")
    text = "prompts by domain whose answers are replayed, for a head made elsewhere"
    add_flag(parser, "--replay-prompts", text, type=Path, metavar="FILE.jsonl")
    _add_out(parser)
    add_flag(parser, "--steps", "most optimizer steps", 2000)
    add_flag(parser, "--minutes", "longest time of training", 60.0)
    add_flag(parser, "--replay-share", "share of replayed text in the first round", 0.5, metavar="X")
    add_flag(parser, "--learning-rate", "default: %(default)s", 2e-4, metavar="X")
    add_flag(parser, "--batch-tokens", "tokens of one pass", 1024, metavar="N")
    add_flag(parser, "--round-steps", "optimizer steps between validations", 50)
    add_flag(parser, "--patience", "rounds without progress after which training stops", 3)
    add_flag(parser, "--unroll", "depth that is trained", 3)
    add_flag(parser, "--seed", "random seed", 0)
    add_flag(parser, "--min-gain", "gain on the mix that is required", 0.02)
    add_flag(parser, "--max-age", "age in seconds beyond which records are left out", type=float, metavar="S")
    add_flag(parser, "--capture-tokens", "most tokens of training text, the newest", 400_000, metavar="N")
    add_flag(parser, "--max-tokens", "length of a golden answer", 128)
    _add_job_flags(parser)
    add_shape_flags(parser)
    _add_run_flags(parser, "number format that the worker serves")
    _exit_apart(parser)


def _add_job_flags(parser: argparse.ArgumentParser) -> None:
    text = "exit with 0 for every verdict and error; write it as termination message"
    parser.add_argument("--job", action="store_true", help=text)
    add_flag(parser, "--time-limit", "longest time of the run in seconds, over its restarts", type=float, metavar="S")
    text = "with --job: copy OUT/head to URI/HASH; URI is pvc://, s3:// or file://"
    add_flag(parser, "--publish", text, metavar="URI")
    text = "with --job: keep the captured text in OUT/data after the verdict, for --replay of the next run"
    parser.add_argument("--keep-data", action="store_true", help=text)
    text = "with --job: delete the folders of earlier runs next to OUT, whose name is the run's time in hex digits"
    parser.add_argument("--prune", action="store_true", help=text)
    text = "with --prune: delete the drafts below --publish that are older than the run and have other hashes"
    add_flag(parser, "--keep-drafts", text, metavar="HASH[,HASH]")


def _exit_apart(parser: argparse.ArgumentParser) -> None:
    """Make wrong usage exit with 64, because argparse uses 2, which is the code of the verdict `worse`."""

    def error(message: str) -> NoReturn:
        parser.print_usage(sys.stderr)
        parser.exit(DISTILL_USAGE, f"{parser.prog}: error: {message}\n")

    parser.error = error  # type: ignore[method-assign]
    parser.set_defaults(usage_error=error)


COMMANDS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "serve": ("Serve a model with OpenAI's API.", _add_serve),
    "pull": ("Fetch models into the cache and verify them.", _add_pull),
    "check": ("Check whether target and draft fit each other and the memory, without loading weights.", _add_check),
    "bench": ("Compare speculation with decoding without it, interleaved in one run.", _add_bench),
    "eval": ("Measure the acceptance of a draft by domain, depth and context length.", _add_eval),
    "train": ("Train a draft (EAGLE-1/3, P-EAGLE, DFlash, Medusa, draft model) from the target's answers.", _add_train),
    "capture": ("Delete captured requests by age or by user, and abandoned runs of distill.", _add_capture),
    "distill": ("Continue training the deployed draft on captured traffic, and compare the two.", _add_distill),
}
"""Description of each command, and the function that adds its flags."""
