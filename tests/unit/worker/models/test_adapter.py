"""Tests of merged adapters: against peft's merge, and refusals of what cannot be merged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from specdecode_worker.commands import check
from specdecode_worker.commands.arguments import new_parser
from specdecode_worker.contract import adapted_uri
from specdecode_worker.models.errors import BadUri, ModelError
from specdecode_worker.models.fetch import model_hash, resolve
from specdecode_worker.models.linear import Shard, Split
from specdecode_worker.models.tensor_parallel import load_shard
from specdecode_worker.models.weights import load_causal_lm, prepare_causal_lm
from support.worker.dense_attention import dense
from support.worker.small_folders import randomise, write_random_target

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 97, (60,), generator=torch.Generator().manual_seed(4))
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PATTERNS = {
    "r": 4, "lora_alpha": 7, "target_modules": LINEAR, "use_rslora": True,
    "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 5, "model.layers.3.self_attn.k_proj": 6},
    "alpha_pattern": {".*gate_proj": 11, "q_proj": 5}, "layers_to_transform": [0, 1, 3],
}  # fmt: skip
QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "patterns-and-rslora": PATTERNS,
    "fan-in-fan-out": {"r": 2, "lora_alpha": 3, "target_modules": LINEAR, "fan_in_fan_out": True},
    "embeddings": {"r": 3, "lora_alpha": 4, "target_modules": ["embed_tokens", "lm_head", "up_proj"]},
}


@pytest.fixture
def base(shape: dict[str, Any], tmp_path: Path) -> Path:
    """Return the folder of a small target."""
    return write_random_target(tmp_path / "base", shape)


def save_adapter(folder: Path, module: str, size: tuple[int, int] = (32, 32), **config: Any) -> Path:
    """Save an adapter of rank 2 for one module of a target."""
    folder.mkdir()
    prefix, (outputs, inputs) = f"base_model.model.{module}.lora", size
    generator = torch.Generator().manual_seed(3)
    tensors = {f"{prefix}_A.weight": torch.randn(2, inputs, generator=generator),
               f"{prefix}_B.weight": torch.randn(outputs, 2, generator=generator)}  # fmt: skip
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}))
    return folder


def joined(base: Path, adapter: Path, cache: Path) -> Path:
    """Return the folder of the target with the adapter, as a worker resolves it."""
    return resolve(adapted_uri(f"file://{base}", f"file://{adapter}"), cache)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_pefts_merge(variant: str, shape: dict[str, Any], tmp_path: Path) -> None:
    import peft
    import transformers

    fields = {key: value for key, value in shape.items() if key != "architectures"}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, tie_word_embeddings=False)).eval()
    randomise(model, 1)
    model.save_pretrained(tmp_path / "base")
    torch.manual_seed(7)
    config = peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **VARIANTS[variant])
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)

    folder = joined(tmp_path / "base", tmp_path / "adapter", tmp_path / "cache")
    ours = load_causal_lm(folder, dtype=torch.float32, device=CPU)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base").eval()
    with torch.inference_mode():
        before = plain(TOKENS[None]).logits[0]
        merged: Any = peft.PeftModel.from_pretrained(plain, tmp_path / "adapter").merge_and_unload()
        wanted = merged(TOKENS[None]).logits[0]
        logits = ours.logits(ours(TOKENS, torch.arange(len(TOKENS)), dense).hidden_TE)
    assert (wanted - before).abs().mean() > 0.1, "the adapter must matter"
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)
    weights = merged.state_dict()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, weights[name], atol=0, rtol=0, msg=name)


def test_weights_are_rounded_once(base: Path, tmp_path: Path) -> None:
    folder = joined(base, save_adapter(tmp_path / "adapter", "model.layers.2.self_attn.o_proj"), tmp_path / "cache")
    name = "model.layers.2.self_attn.o_proj.weight"
    exact = load_causal_lm(folder, dtype=torch.float32, device=CPU).state_dict()[name]
    rounded = load_causal_lm(folder, dtype=torch.bfloat16, device=CPU).state_dict()[name]
    assert torch.equal(rounded, exact.bfloat16())


def test_parts_of_two_devices_are_those_of_the_merged_target(base: Path, tmp_path: Path) -> None:
    modules = {"self_attn.o_proj": (32, 32), "mlp.up_proj": (48, 32), "mlp.down_proj": (32, 48)}
    for module, size in modules.items():
        adapter = save_adapter(tmp_path / module, f"model.layers.1.{module}", size)
        folder = joined(base, adapter, tmp_path / "cache")
        name = f"model.layers.1.{module}.weight"
        whole = load_causal_lm(folder, dtype=torch.float32, device=CPU).state_dict()[name]
        parts = [load_shard(folder, Shard(rank, 2), dtype=torch.float32, device=CPU) for rank in range(2)]
        dimension = 1 if parts[0].get_submodule(name.removesuffix(".weight")).split is Split.INPUTS else 0
        both = torch.cat([part.state_dict()[name] for part in parts], dim=dimension)
        torch.testing.assert_close(both, whole, atol=1e-6, rtol=0)
        assert not torch.equal(whole, load_causal_lm(base, dtype=torch.float32, device=CPU).state_dict()[name])


def test_hash_covers_the_adapter(base: Path, tmp_path: Path) -> None:
    """Cache salts, the compatibility key and the loop of drafts know a target by this hash."""
    adapter = save_adapter(tmp_path / "adapter", "model.layers.0.self_attn.q_proj")
    hashes = [model_hash(base), model_hash(joined(base, adapter, tmp_path / "cache"))]
    config = adapter / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": 4', '"lora_alpha": 5'))
    hashes.append(model_hash(joined(base, adapter, tmp_path / "cache")))
    save_file({"a": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    hashes.append(model_hash(joined(base, adapter, tmp_path / "cache")))
    assert len(set(hashes)) == 4


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "lora_only"}, "bias"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"peft_type": "LOHA"}, "peft_type LOHA"),
        ({"r": 3}, "rank 2"),
        ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
    ],
    ids=str,
)
def test_other_kinds_are_refused(config: dict[str, Any], reason: str, base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", "model.layers.0.self_attn.q_proj", **config)
    with pytest.raises(ModelError, match=reason):
        prepare_causal_lm(joined(base, adapter, tmp_path / "cache"))


@pytest.mark.parametrize(
    ("module", "size", "changed", "reason"),
    [
        ("model.layers.9.self_attn.q_proj", (32, 32), {}, "the target has no model.layers.9.self_attn.q_proj"),
        ("model.layers.0.self_attn.q_proj", (32, 48), {}, r"adapts a matrix \[32, 48\]"),
        ("lm_head", (97, 32), {"tie_word_embeddings": True}, "lm_head is tied"),
        ("model.layers.0.mlp.up_proj", (48, 32), QUANTIZED, "quantized?|quantization_config"),
    ],
)
def test_targets_that_do_not_fit_are_refused(
    module: str, size: Any, changed: Any, reason: str, shape: dict[str, Any], tmp_path: Path
) -> None:
    base = write_random_target(tmp_path / "base", shape | {k: v for k, v in changed.items() if k[0] == "t"})
    (base / "config.json").write_text(json.dumps(shape | changed))
    folder = joined(base, save_adapter(tmp_path / "adapter", module, size), tmp_path / "cache")
    with pytest.raises(ModelError, match=reason):
        prepare_causal_lm(folder)


def test_a_target_that_names_no_quantization_is_adapted(shape: dict[str, Any], tmp_path: Path) -> None:
    base = write_random_target(tmp_path / "base", shape | {"quantization_config": None})
    adapter = save_adapter(tmp_path / "adapter", "model.layers.0.self_attn.q_proj")
    prepare_causal_lm(joined(base, adapter, tmp_path / "cache"))


def test_tensors_of_other_kinds_are_refused(base: Path, tmp_path: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", "model.layers.0.self_attn.q_proj")
    file, prefix = adapter / "adapter_model.safetensors", "base_model.model.model.layers.0.self_attn.q_proj"
    wrong: dict[str, dict[str, Tensor]] = {
        "lora_magnitude_vector": {f"{prefix}.lora_magnitude_vector": torch.zeros(32)},
        "only one of lora_A and lora_B": {f"{prefix}.lora_A.weight": torch.zeros(2, 32)},
        "holds no tensors": {},
    }
    for reason, tensors in wrong.items():
        save_file(tensors, file)
        with pytest.raises(ModelError, match=reason):
            prepare_causal_lm(joined(base, adapter, tmp_path / "cache"))
    file.unlink()
    with pytest.raises(ModelError, match="safe_serialization"):
        prepare_causal_lm(joined(base, adapter, tmp_path / "cache"))


def test_check_names_the_problem_and_one_adapter_is_all(base: Path, tmp_path: Path, capsys: Any) -> None:
    parser = new_parser("check")
    for module, code in (("model.layers.0.self_attn.q_proj", 0), ("model.layers.9.self_attn.q_proj", 1)):
        adapter = save_adapter(tmp_path / module, module)
        flags = ["--model", f"file://{base}", "--adapter", f"file://{adapter}", "--cache-dir", str(tmp_path / "cache")]
        assert check.run(parser.parse_args(flags)) == code
    assert "the target has no model.layers.9.self_attn.q_proj" in capsys.readouterr().err
    with pytest.raises(BadUri, match="2 adapters"):
        resolve(f"file://{base}+file:///a+file:///b", tmp_path)


def test_a_cache_that_cannot_be_written_is_no_obstacle(base: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "file").write_text("no folder")
    adapter = save_adapter(tmp_path / "adapter", "model.layers.0.self_attn.q_proj")
    folders = [joined(base, adapter, cache) for cache in (tmp_path / "file", tmp_path / "file", tmp_path / "cache")]
    assert folders[0] == folders[1]
    assert folders[0].is_relative_to(tmp_path / "tmp")
    assert len({model_hash(folder) for folder in folders}) == 1
