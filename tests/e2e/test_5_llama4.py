"""A small random Llama 4 from `kubectl apply` to its answer, which is the greedy text of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.e2e.draft_files import bound_claim
from support.e2e.endpoint import MODEL, Endpoint
from support.e2e.kube import Namespace
from support.e2e.loop import deployed
from support.e2e.traffic import chat_body
from support.kube import Cluster
from support.small_llama4 import Served, write_served_llama4

pytestmark = [pytest.mark.timeout(600), pytest.mark.proof("examples")]
CLAIM = "llama4"


@pytest.fixture
def model(local_cluster: Cluster, tmp_path: Path) -> Served:
    return write_served_llama4(tmp_path / CLAIM)


@pytest.fixture
def endpoint(watched: Namespace, model: Served) -> Iterator[Endpoint]:
    draft = {"method": "eagle3", "draft": {"uri": f"pvc://{CLAIM}/head"}}
    spec = {
        "model": {"uri": f"pvc://{CLAIM}/target", "servedName": MODEL},
        "engine": {"dtype": "float32", "maxModelLen": 256},
    }
    with bound_claim(watched, CLAIM, model.folder), deployed(watched, "llama4", draft, {}, **spec) as endpoint:
        yield endpoint


def test_llama4_is_served_from_apply_to_an_answer(endpoint: Endpoint, model: Served) -> None:
    """The text crosses chunks of attention, and is the same with the drafts of a random head."""
    endpoint.wait_condition("DraftCompatible", "True")
    with endpoint.namespace.reach("service", endpoint.name, 80) as url:
        body: dict[str, Any] = {"model": MODEL, "prompt": model.prompt, "max_tokens": model.tokens}
        body |= {"temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == model.text
        chat = httpx.post(f"{url}/v1/chat/completions", json=chat_body(MODEL, "Hi", 8), timeout=120, trust_env=False)
        assert chat.status_code == 200, chat.text
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": [image]}]}
        refused = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert refused.status_code == 400, refused.text
    assert endpoint.report().draft_tokens > 0
