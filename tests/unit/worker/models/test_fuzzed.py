"""Fuzz tests of model folders: a folder either loads and runs, or raises a ModelError that names the problem."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specdecode_worker.models.arch import causal_lm_config
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.config import dflash_config, eagle3_config, eagle_config, medusa_config, peagle_config
from specdecode_worker.models.dflash import DFlashHead
from specdecode_worker.models.drafts import WeightMethod, load_draft
from specdecode_worker.models.errors import ModelError
from specdecode_worker.models.headers import INDEX
from specdecode_worker.models.medusa import MedusaHeads
from specdecode_worker.models.weights import load_causal_lm
from support.tiers import by_effort
from support.worker import small_folders
from support.worker.checkpoints import CPU, check_draft, write, write_heads
from support.worker.tokens import saved, tokenizer

few = settings(max_examples=by_effort(quick=15, full=15, nightly=200), deadline=None)
KINDS = ("eagle3", "peagle", "dflash", "eagle", "medusa", "draft-model", "target")
FIELDS = re.findall(
    r"\w+",
    """
architectures attention_bias bias block_size dflash_config bos_token_id draft_vocab_size
eagle_aux_hidden_state_layer_ids eagle_config eos_token_id fc_norm head_dim hidden_act hidden_size intermediate_size
layer_types mask_token_id max_position_embeddings medusa_num_heads medusa_num_layers mlp_bias model_type
norm_before_fc norm_before_residual norm_output num_attention_heads num_aux_hidden_states num_hidden_layers
num_key_value_heads pard_token parallel_drafting partial_rotary_factor qkv_bias quantization_config rms_norm_eps
rope_parameters rope_scaling rope_theta sliding_window speculators_model_type target_hidden_size tie_word_embeddings
transformer_layer_config truncated_vocab_size vocab_size
""",
)
SCALES = ("attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mscale",
          "mscale_all_dim", "original_max_position_embeddings", "rope_theta")  # fmt: skip
NUMBERS = st.one_of(
    st.integers(-3, 300), st.sampled_from([2**24, 2**24 + 1, 2**31, 2**63, -(2**70), 10**400]), st.floats(width=32)
)
ROPES = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["default", "linear", "llama3", "yarn", "dynamic", "su"])},
    optional=dict.fromkeys(SCALES, NUMBERS),
)
LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8), ROPES)
JUNK = st.recursive(
    LEAVES, lambda part: st.lists(part, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), part, max_size=3)
)
CHANGES = st.dictionaries(st.sampled_from(FIELDS), JUNK, min_size=1, max_size=4)


SHAPE: dict[str, Any] = small_folders.SHAPE | {
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one valid folder of each kind. Examples break copies of them."""
    base = tmp_path_factory.mktemp("whole")
    model = CausalLM(causal_lm_config(SHAPE)).requires_grad_(False)
    for name in ("target", "draft-model"):
        saved(write(base / name, SHAPE, model.state_dict()), tokenizer())
    write_heads(base, SHAPE)
    return base


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(shutil.copytree(folder, Path(name) / "copy"))


def loads(kind: str, folder: Path, whole: Path) -> bool:
    """Return whether the folder loads.

    Assert that a folder that loads also runs and passes `check_draft`, and that an error names a field or file.
    """
    target = load_causal_lm(whole / "target", dtype=torch.float32, device=CPU)
    try:
        if kind == "target":
            network: nn.Module = load_causal_lm(folder, dtype=torch.float32, device=CPU)
        else:
            method: WeightMethod = kind  # type: ignore[assignment]
            network = load_draft(
                method, folder, target, target_folder=whole / "target", dtype=torch.float32, device=CPU
            )
    except ModelError as error:
        problem = str(error)
    else:
        problem = ""
    if problem:
        named = [str(folder), "config.json", *FIELDS, *SCALES, "rope scaling"]
        assert any(word in problem for word in named), problem
        return False
    if kind != "target":
        check_draft(method, folder, whole / "target")
    run(network, target)
    return True


def run(network: Any, target: CausalLM) -> None:
    tokens, positions = torch.tensor([1, 2, 3]), torch.arange(3)

    def attend(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return v_TKD.repeat_interleave(q_THD.shape[1] // k_TKD.shape[1], dim=1)

    if isinstance(network, CausalLM):
        assert (
            network.logits(network(tokens % network.config.vocab_size, positions * 0, attend).hidden_TE).shape[0] == 3
        )
        return
    aux = target(tokens, positions, attend, network.reads).aux_TA
    if isinstance(network, DFlashHead):
        assert len(network.context(aux, positions)) == len(network.layers)
        assert network.logits(network(tokens, positions, attend)).shape[0] == 3
    elif isinstance(network, MedusaHeads):
        assert network.logits(aux).shape[1] == 3
    else:
        assert network.logits(network(network.fuse(aux), tokens, positions, attend)).shape[0] == 3


@pytest.mark.parametrize("kind", KINDS)
def test_whole_folders_load(kind: str, whole: Path) -> None:
    assert loads(kind, whole / kind, whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@few
@given(changes=CHANGES, dropped=st.sets(st.sampled_from(FIELDS), max_size=2))
def test_junk_in_config_raises_only_model_errors(
    kind: str, changes: dict[str, Any], dropped: set[str], whole: Path
) -> None:
    with copied(whole / kind) as folder:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in dropped}))
        loads(kind, folder, whole)


WRONG: list[Any] = [None, True, 0, -1, 1, 2, 0.5, 10**400, float("nan"), "", "x", [], ["x"], [10**9], [None], {},
                    {"x": {}}]  # fmt: skip


@pytest.mark.parametrize("field", [*FIELDS, *(f"rope_scaling.{name}" for name in SCALES)])
def test_wrong_values_are_accepted_or_raise_model_errors(field: str) -> None:
    """Every wrong value of a field is either accepted or raises a ModelError, for each kind of network."""
    target = causal_lm_config(SHAPE)
    for value in WRONG:
        for kind in ("linear", "llama3", "yarn"):
            scaling = dict.fromkeys(SCALES, 8.0) | {"rope_type": kind, "low_freq_factor": 1.0}
            scaling["original_max_position_embeddings"] = 8
            if "." in field:
                raw = SHAPE | {"rope_scaling": scaling | {field.split(".")[1]: value}}
            else:
                raw = SHAPE | {"medusa_num_heads": 2, "rope_scaling": scaling, field: value}
            for read in (causal_lm_config, eagle3_config, peagle_config, dflash_config, eagle_config, medusa_config):
                with suppress(ModelError):
                    read(raw, *([] if read is causal_lm_config else [target]))  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
@few
@given(text=st.one_of(st.binary(max_size=30), JUNK.map(lambda value: json.dumps(value).encode())))
def test_invalid_config_is_refused(kind: str, text: bytes, whole: Path) -> None:
    with copied(whole / kind) as folder:
        (folder / "config.json").write_bytes(text)
        loads(kind, folder, whole)


def deleted(tensors: dict[str, Tensor], name: str, data: st.DataObject) -> None:
    del tensors[name]


def renamed(tensors: dict[str, Tensor], name: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(name)))
    tensors[name[:cut] + data.draw(st.sampled_from(["", "x", ".", "model.", "0.", "layers.0."])) + name[cut + 1 :]] = (
        tensors.pop(name)
    )


def reshaped(tensors: dict[str, Tensor], name: str, data: st.DataObject) -> None:
    how: Callable[[Tensor], Tensor] = data.draw(
        st.sampled_from([lambda t: t[:-1], lambda t: t.flatten()[None], lambda t: t[..., :0], lambda t: t[None]])
    )
    tensors[name] = how(tensors[name]).contiguous()


def retyped(tensors: dict[str, Tensor], name: str, data: st.DataObject) -> None:
    kinds = [torch.float8_e4m3fn, torch.int8, torch.int64, torch.bool, torch.float16, torch.float64, torch.uint16]
    tensors[name] = tensors[name].to(data.draw(st.sampled_from(kinds)))


def spoiled(tensors: dict[str, Tensor], name: str, data: st.DataObject) -> None:
    if tensors[name].is_floating_point() and tensors[name].numel():
        tensors[name].flatten()[0] = data.draw(st.sampled_from([torch.nan, torch.inf, 1e38]))
    else:
        tensors[name] = tensors[name] + data.draw(st.integers(-200, 200))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("harm", [deleted, renamed, reshaped, retyped, spoiled])
@few
@given(data=st.data())
def test_corrupt_tensors_are_refused(
    kind: str, harm: Callable[[dict[str, Tensor], str, st.DataObject], None], data: st.DataObject, whole: Path
) -> None:
    with copied(whole / kind) as folder:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        name = data.draw(st.sampled_from(sorted(tensors)))
        before = tensors[name]
        harm(tensors, name, data)
        save_file(tensors, path)
        loaded = loads(kind, folder, whole)
        # An absent bias and a flat mask state are valid.
        valid = (kind, name) in (("eagle", "fc.bias"), ("peagle", "mask_hidden"))
        if harm in (deleted, reshaped) and before.numel() and not valid:
            assert not loaded


@pytest.mark.parametrize("kind", KINDS)
@few
@given(data=st.data())
def test_corrupt_files_are_refused(kind: str, data: st.DataObject, whole: Path) -> None:
    """Truncated files and changed bytes in the header raise a ModelError or load a network that runs."""
    with copied(whole / kind) as folder:
        path = folder / "model.safetensors"
        content = bytearray(path.read_bytes())
        if data.draw(st.booleans()):
            path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
            assert not loads(kind, folder, whole)
            return
        for place in data.draw(st.lists(st.integers(0, 600), min_size=1, max_size=4)):
            content[place] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        loads(kind, folder, whole)


@few
@given(index=JUNK | st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=4), JUNK, max_size=3)}))
def test_junk_in_the_index_is_refused(index: Any, whole: Path) -> None:
    with copied(whole / "target") as folder:
        (folder / INDEX).write_text(json.dumps(index))
        assert not loads("target", folder, whole)
