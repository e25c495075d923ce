"""A draft that does not match its target: the endpoint serves without speculation and a condition names the tensor."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy

from support.e2e.endpoint import MODEL, Endpoint, resource
from support.e2e.kube import Namespace
from support.e2e.traffic import chat_body

HIDDEN, TARGET_HIDDEN, VOCAB = 8, 576, 49152
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "target_hidden_size": TARGET_HIDDEN,
    "intermediate_size": HIDDEN,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "draft_vocab_size": HIDDEN,
}
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
WRONG = "midlayer.mlp.down_proj.weight"


def head() -> bytes:
    """Return a draft head that is correct in every tensor but one, and small enough for a ConfigMap."""
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 3 * TARGET_HIDDEN),
        "lm_head.weight": (HIDDEN, HIDDEN),
        "norm.weight": (HIDDEN,),
        "midlayer.mlp.gate_proj.weight": (HIDDEN, HIDDEN),
        "midlayer.mlp.up_proj.weight": (HIDDEN, HIDDEN),
        WRONG: (HIDDEN, HIDDEN + 3),
        "midlayer.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        **{f"midlayer.self_attn.{name}_proj.weight": (HIDDEN, 2 * HIDDEN) for name in "qkv"},
        **{f"midlayer.{name}.weight": (HIDDEN,) for name in NORMS},
    }
    tensors: dict[str, Any] = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    return safetensors.numpy.save({**tensors, "d2t": np.zeros(HIDDEN, np.int64)})


@pytest.fixture
def misfit(watched: Namespace) -> Iterator[Endpoint]:
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "narrow-head"},
        "data": {"config.json": json.dumps(CONFIG)},
        "binaryData": {"model.safetensors": base64.b64encode(head()).decode()},
    }
    watched.kubectl("create", "--filename", "-", stdin=json.dumps(config_map))
    mount = {"volumeMounts": [{"name": "head", "mountPath": "/models/head"}]}
    template = {
        "spec": {
            "volumes": [{"name": "head", "configMap": {"name": "narrow-head"}}],
            "initContainers": [{"name": "pull", **mount}],
            "containers": [{"name": "worker", **mount}],
        }
    }
    watched.apply(resource("misfit", {"draft": {"uri": "file:///models/head"}}, {"template": template}))
    yield Endpoint(watched, "misfit")
    watched.kubectl("delete", "sdd", "misfit")
    watched.kubectl("delete", "configmap", "narrow-head")


def test_misfit_draft_serves_plainly_and_the_condition_names_the_tensor(misfit: Endpoint) -> None:
    misfit.wait_ready()
    condition = misfit.wait_condition("DraftCompatible", "False")
    assert WRONG in condition["message"]
    assert WRONG in misfit.status()["reason"], "the REASON column tells"
    assert misfit.wait_condition("SpeculationEffective", "False")["reason"] == "NoDraft"
    with misfit.namespace.reach("service", misfit.name, 80) as url:
        body = chat_body(MODEL, "What is the capital of France?", 16)
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"]
    report = misfit.report()
    assert (report.drafts, report.draft_tokens) == (0, 0)
