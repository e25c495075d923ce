"""Model folders in Hugging Face's layout: a tokenizer with one token per byte, and optionally a small random Llama."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ("<|start|>", "<|end|>")
VOCAB_SIZE = 258
END_ID = 257
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": END_ID,
}
TEMPLATE = (
    "{% if tools %}<|start|>system\n{{ tools | tojson }} <tool_call><|end|>\n{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


_NOTHING: Mapping[str, Any] = MappingProxyType({})


def byte_tokenizer(added: Sequence[str] = (), words: Sequence[str] = ()) -> Tokenizer:
    """Return a tokenizer with one token per byte.

    Every character beyond ASCII spans several tokens; 256 and 257 are special tokens. ``added`` are further special
    tokens, which get the ids from 258 on, and ``words`` added tokens behind them that are text.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (*SPECIAL, *added)])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in words])
    return tokenizer


def write_tokenizer(
    folder: Path,
    *,
    config: Mapping[str, Any] = _NOTHING,
    template: str = TEMPLATE,
    added: Sequence[str] = (),
) -> None:
    """Write a tokenizer and a config.

    Args:
        folder: Folder of the model.
        config: Fields of config.json that differ from ``CONFIG``.
        template: Chat template.
        added: Special tokens in addition to ``SPECIAL``.
    """
    byte_tokenizer(added).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": SPECIAL[1]}))
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))


def write_target(
    folder: Path,
    *,
    config: Mapping[str, Any] = _NOTHING,
    template: str = TEMPLATE,
    added: Sequence[str] = (),
) -> None:
    """Write a tokenizer, a config and random weights, with the options of ``write_tokenizer``.

    The embedding is tied, so the model mostly repeats the last token.
    """
    import torch
    from safetensors.torch import save_file

    from specdecode_worker.models.arch import causal_lm_config
    from specdecode_worker.models.causal_lm import CausalLM

    write_tokenizer(folder, config=config, template=template, added=added)
    torch.manual_seed(0)
    model = CausalLM(causal_lm_config({**CONFIG, **config}))
    state = {name: value.contiguous() for name, value in model.state_dict().items() if "lm_head" not in name}
    save_file(state, folder / "model.safetensors")


def write_pair(folder: Path, config: Mapping[str, Any] = _NOTHING) -> tuple[Path, Path]:
    """Write a target with these other fields in its config, and a draft for it. Return their folders."""
    target, draft = folder / "target", folder / "draft"
    for made in (target, draft):
        made.mkdir()
    write_target(target, config=config)
    write_draft(draft)
    return target, draft


def flags(target: Path, draft: Path | None = None) -> list[str]:
    """Return the flags of a worker that serves a target as "small", in fp32 on one thread of a CPU."""
    words = ["--model", f"file://{target}", "--served-model-name", "small", "--dtype", "float32", "--device", "cpu"]
    words += ["--draft", f"file://{draft}"] if draft else []
    return [*words, "--threads", "1", "--max-num-seqs", "4"]


def write_varied_target(folder: Path, context: int) -> None:
    """Write a target of ``context`` positions with an output layer of its own, whose answers vary."""
    from support.worker import small_folders

    config = {"tie_word_embeddings": False, "num_hidden_layers": 2, "max_position_embeddings": context}
    write_tokenizer(folder, config=config)
    small_folders.write_target(folder, **CONFIG | config)


def write_draft(folder: Path, seed: int = 1, config: Mapping[str, Any] = _NOTHING) -> None:
    """Write a random EAGLE-3 head for that target, whose config has these other fields."""
    import torch
    from safetensors.torch import save_file

    from specdecode_worker.models.arch import causal_lm_config
    from specdecode_worker.models.config import eagle3_config
    from specdecode_worker.models.eagle import Eagle3Head

    target = causal_lm_config({**CONFIG, **config})
    config = {**CONFIG, **config, "num_hidden_layers": 1, "draft_vocab_size": target.vocab_size}
    torch.manual_seed(seed)
    head = Eagle3Head(eagle3_config(config, target), torch.nn.Embedding(target.vocab_size, CONFIG["hidden_size"]))
    save_file({name: value.contiguous() for name, value in head.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
