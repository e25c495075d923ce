"""Plain decoding at batch 1, bf16, beside transformers' generate and llama.cpp: the same weights, threads and prompts.

Each round runs ours, transformers', llama.cpp's, ours; its ratios are of that round alone, since machines drift. What
is compared is decoding: prompts are not counted. llama.cpp's `llama-bench` times forward passes alone, without
sampling; ours is the whole engine. Without `--llama-bench` that column is left out. To build it and convert the
weights, from the sources that `pip download --no-deps --no-binary llama-cpp-python llama-cpp-python` brings:

    cd llama_cpp_python-*/vendor/llama.cpp && cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON
    cmake --build build --target llama-bench
    python convert_hf_to_gguf.py FOLDER_OF_THE_MODEL --outtype bf16 --outfile model.gguf

    .venv/bin/python benchmarks/cpu_peers.py --llama-bench build/bin/llama-bench --gguf model.gguf --out STEM
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from machine import described

from specdecode_worker.commands.bench import QUESTIONS
from specdecode_worker.commands.flags import add_model_flags
from specdecode_worker.commands.local_engine import LocalEngine, TokenizedPrompt, local_engine
from specdecode_worker.contract import TreeShape
from specdecode_worker.sampling.params import Sampling


def main() -> int:
    args = _arguments()
    engine = local_engine(args, max_num_seqs=1)
    engine.run_shape(TreeShape(()))
    prompts = [engine.prompt({"messages": [{"role": "user", "content": text}]}) for text in QUESTIONS[:4]]
    _ours(engine, prompts, 16)
    rounds = [_round(engine, prompts, args) for _ in range(args.rounds)]
    names = [name for name in rounds[0] if name != "ours"]
    ratios = {name: median(found["ours"] / found[name] for found in rounds) for name in names}
    document = {**described(), "dtype": args.dtype, "model": args.model, "rounds": rounds, "ours_over": ratios}
    print(json.dumps(document, indent=1))
    if args.out:
        Path(args.out).with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--out", metavar="STEM")
    add_model_flags(parser)
    args = parser.parse_args()
    if (args.llama_bench is None) != (args.gguf is None):
        parser.error("--llama-bench needs --gguf, and the other way round")
    return args


def _round(engine: LocalEngine, prompts: list[TokenizedPrompt], args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second of everybody."""
    before = _ours(engine, prompts, args.max_tokens)
    tokens = [prompt.tokens for prompt in prompts]
    found = {"transformers": transformers_tokens_per_second(engine.folder, args.dtype, tokens, args.max_tokens)}
    if args.llama_bench:
        found["llama.cpp"] = _llama(args)
    found["ours"] = (before + _ours(engine, prompts, args.max_tokens)) / 2
    print(json.dumps({name: round(pace, 1) for name, pace in found.items()}), file=sys.stderr)
    return found


def transformers_tokens_per_second(
    folder: Path, dtype: str, prompts: Sequence[Sequence[int]], max_tokens: int
) -> float:
    """Return the tokens per second after the first token of each prompt.

    Raises:
        ValueError: transformers is not installed.
    """
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise ValueError("--transformers needs the package transformers; pip install transformers") from None
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    _seconds(model, prompts[0], 4)
    seconds = tokens = 0.0
    for prompt in prompts:
        first, _ = _seconds(model, prompt, 1)
        all_of_them, count = _seconds(model, prompt, max_tokens)
        seconds, tokens = seconds + all_of_them - first, tokens + count - 1
    return tokens / seconds


def _seconds(model: Any, prompt: Sequence[int], max_tokens: int) -> tuple[float, int]:
    """Return the duration in seconds and the number of generated tokens."""
    ids = torch.tensor([list(prompt)])
    began = time.monotonic()
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return time.monotonic() - began, out.shape[1] - len(prompt)


def _ours(engine: LocalEngine, prompts: list[TokenizedPrompt], max_tokens: int) -> float:
    tokens = seconds = 0.0
    for prompt in prompts:
        how = Sampling(max_tokens=max_tokens, temperature=0.0, seed=0, ignore_eos=True)
        _, pace = engine.answer([prompt], [how])
        tokens, seconds = tokens + pace.tokens, seconds + pace.seconds
    return tokens / seconds


def _llama(args: argparse.Namespace) -> float:
    command = [str(args.llama_bench), "-m", str(args.gguf), "-t", str(torch.get_num_threads())]
    command += ["-p", "0", "-n", str(args.max_tokens), "-r", "3", "-o", "json"]
    done: list[dict[str, Any]] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return float(done[0]["avg_ts"])


if __name__ == "__main__":
    sys.exit(main())
