"""Write targets with compressed-tensors, and the weights that it reads from them and from packings of others.

    write_formats.py OUT

OUT/NAME/ is a two-layer Llama that the library compressed, with ``weights.safetensors``: its weights as the library
decompresses them, from scales in fp32, and ``logits``, those of transformers on these weights. OUT/awq and OUT/inverse
of others are there already; the library's converters read them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

INT4 = {"num_bits": 4, "type": "int"}
FP8 = {"num_bits": 8, "type": "float"}
SCHEMES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4-128": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 128, "symmetric": True}),
    "int4-32": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 32, "symmetric": True}),
    "int4-rows": ("pack-quantized", INT4 | {"strategy": "channel", "symmetric": True}),
    "int4-asymmetric": ("pack-quantized", INT4 | {"strategy": "group", "group_size": 64, "symmetric": False}),
    "int8-packed": ("pack-quantized", {"num_bits": 8, "strategy": "group", "group_size": 64, "symmetric": True}),
    "fp8-rows": ("float-quantized", FP8 | {"strategy": "channel"}),
    "fp8-tensor": ("float-quantized", FP8 | {"strategy": "tensor"}),
    "fp8-blocks": ("float-quantized", FP8 | {"strategy": "block", "block_structure": [128, 128]}),
    "int8-rows": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
}
SHAPE = {
    "vocab_size": 97,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
TOKENS = torch.arange(9) * 7 % 97


def main() -> None:
    out = Path(sys.argv[1])
    for name, (form, arguments) in SCHEMES.items():
        compress(out / name, form, QuantizationArgs(**arguments))
    compress(out / "nvfp4", "nvfp4-pack-quantized", NVFP4A16["weights"])
    for name in ("awq", "inverse"):
        convert(out / name)


def compress(folder: Path, form: str, arguments: QuantizationArgs) -> None:
    torch.manual_seed(5)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE)).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor, tensors = BaseCompressor.get_value_from_registry(form), dict(model.state_dict())
    weights = dict(tensors)
    for name in [name for name in tensors if "_proj.weight" in name]:
        module, weight = name.removesuffix(".weight"), tensors.pop(name)
        whole = generate_gparam(*weight.aminmax()) if arguments.strategy == "tensor_group" else None
        scale, zero = calculate_qparams(*extremes(weight, arguments), arguments, whole)
        # checkpoints have scales of 16 bits
        state = {"weight": weight, "weight_scale": scale.to(torch.bfloat16), "weight_zero_point": zero}
        state["weight"] = weight.to(torch.bfloat16)
        if whole is not None:
            state["weight_global_scale"] = whole
        packed = compressor.compress(state, scheme)
        tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
        wide = {suffix: t.float() if suffix == "weight_scale" else t for suffix, t in packed.items()}
        if whole is None:
            weights[name] = compressor.decompress(wide, scheme)["weight"].float().contiguous()
        else:  # the library's own decompression is in bf16
            levels = unpack_fp4_from_uint8(wide["weight_packed"], *weight.shape, dtype=torch.float32)
            weights[name] = dequantize(levels, wide["weight_scale"], args=arguments, global_scale=whole)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    quantization = QuantizationConfig(config_groups={"group_0": scheme}, format=form, ignore=["lm_head"])
    config = model.config.to_dict() | {"quantization_config": quantization.model_dump(mode="json")}
    (folder / "config.json").write_text(json.dumps(config))
    finish(folder, model, weights)


def extremes(weight: Tensor, arguments: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """Return the least and the largest number of each group, row, block, or of all."""
    rows, columns = weight.shape
    if arguments.strategy == "block":
        parts = weight.reshape(rows // 128, 128, columns // 128, 128).transpose(1, 2).flatten(2)
    elif arguments.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    else:
        parts = weight.reshape(rows, -1, arguments.group_size or columns)
    return parts.amin(-1), parts.amax(-1)


def convert(folder: Path) -> None:
    """Write the weights that the library reads from a folder in the format of others."""
    tensors = load_file(folder / "model.safetensors")
    if folder.name == "awq":
        converted = AutoAWQConverter(group_size=128).process(dict(tensors))
        arguments = QuantizationArgs(**INT4, strategy="group", group_size=128, symmetric=False)
        compressor = BaseCompressor.get_value_from_registry("pack-quantized")
        scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
        weights = {name: tensor for name, tensor in converted.items() if "_proj." not in name}
        for module in {name.rpartition(".")[0] for name in converted if "_proj." in name}:
            names = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
            state = {name: converted[f"{module}.{name}"] for name in names}
            state["weight_scale"] = state["weight_scale"].float()
            weights[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"].contiguous()
    else:
        targets = {name.removesuffix(".weight_scale_inv") for name in tensors if name.endswith("_inv")}
        weights = FP8BlockDequantizer(targets=targets, dtype=torch.float32).process(dict(tensors))
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    finish(folder, LlamaForCausalLM(LlamaConfig(**config)).eval(), weights)


def finish(folder: Path, model: LlamaForCausalLM, weights: dict[str, Tensor]) -> None:
    """Write the weights, and what transformers computes with them."""
    model.load_state_dict(weights)
    with torch.inference_mode():
        logits = model(TOKENS[None]).logits[0]
    save_file(
        {name: tensor.float().contiguous() for name, tensor in weights.items()}, folder / "weights.safetensors.of"
    )
    save_file({"logits": logits}, folder / "logits.of")


if __name__ == "__main__":
    main()
