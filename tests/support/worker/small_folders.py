"""Small random model folders in the usual layout: a target of three layers and a head for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn

from specdecode_worker.contract import DraftConfig, EngineConfig, Method, ModelConfig, WorkerConfig
from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import eagle3_config
from specdecode_worker.models.drafts import HEADS
from specdecode_worker.models.eagle import Eagle3Head
from specdecode_worker.models.weights import load_head

SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def write(folder: Path, config: dict[str, Any], model: nn.Module) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = dict(model.state_dict())
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def change(folder: Path, config: dict[str, Any] | None = None, /, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of a folder, of which None removes one, and fields of its config.json."""
    state = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / "model.safetensors")
    if config is not None:
        document = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(document | config))


def write_random_target(folder: Path, config: dict[str, Any], seed: int = 5, spread: float = 0.2) -> Path:
    model = CausalLM(causal_lm_config(config))
    randomise(model, seed, spread)
    return write(folder, config, model)


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with one token per word. A draft model must have the same tokenizer as its target."""
    words = {f"w{i}": i for i in range(SHAPE["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def write_target(folder: Path, **changed: Any) -> Path:
    return write_random_target(folder, SHAPE | changed, 1, 0.3)


def write_head(
    folder: Path, *, target: dict[str, Any] | None = None, own_embedding: bool = False, **changed: Any
) -> Path:
    """Write a head for the target with the changes in ``target``.

    The draft vocabulary has 40 tokens unless ``changed`` sets it.
    """
    of_target = causal_lm_config(SHAPE | (target or {}))
    config = SHAPE | {"num_hidden_layers": 1, "draft_vocab_size": 40} | changed
    shape = eagle3_config(config, of_target)
    embedding = nn.Embedding(shape.vocab_size, shape.hidden_size)
    head = Eagle3Head(shape, embedding, own_embedding=own_embedding)
    randomise(head, 2, 0.3)
    if shape.draft_vocab_size < shape.vocab_size:
        head.d2t += torch.arange(shape.draft_vocab_size)
    return write(folder, config, head)


def loaded_head(method: Method, folder: Path, target: CausalLM) -> Any:
    """Return the head of this method in ``folder``, loaded in fp32."""
    prepared = HEADS[method].prepare(folder, target)
    return load_head(prepared, target, dtype=torch.float32, device=torch.device("cpu"))


def config_of(
    target: Path, head: Path | None = None, *, model: dict[str, Any] | None = None, **engine: Any
) -> WorkerConfig:
    """Return the config of a worker for such folders. Its ``resolve`` is ``Path``."""
    draft = DraftConfig(method="none") if head is None else DraftConfig(method="eagle3", uri=str(head))
    return WorkerConfig(
        model=ModelConfig(**{"uri": str(target), "served_name": "small", "dtype": "float32", **(model or {})}),
        draft=draft,
        engine=EngineConfig(**{"device": "cpu", "threads": 1, "max_num_seqs": 4, **engine}),
    )


def exact_config_of(target: Path, head: Path | None, ranks: int, **engine: Any) -> WorkerConfig:
    """Return a config of ``ranks`` ranks in float64, which users cannot select.

    Without rounding differences, different tokens prove an error in the code.
    """
    engine = {"max_num_seqs": 8, "max_num_batched_tokens": 48, **engine}
    config = config_of(target, head, tensor_parallel_size=ranks, **engine)
    model = ModelConfig.model_construct(**dict(config.model) | {"dtype": "float64"})
    return config.model_copy(update={"model": model})


def randomise(module: nn.Module, seed: int, spread: float = 0.2) -> None:
    """Fill the parameters with values at which every part of the network matters; norms differ from one."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data.copy_(spread * noise if parameter.dim() > 1 else 1 + 0.1 * noise)
