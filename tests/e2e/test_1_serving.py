"""Serving from kubectl apply to tokens: readiness, the OpenAI client, printer columns, refusal of invalid resources."""

from __future__ import annotations

import copy
import json
from typing import Any

import openai
import pytest
from harness.endpoint import Endpoint
from harness.kube import Namespace
from harness.release import Release
from kube import ROOT, wait_for

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def client(url: str) -> Any:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_apply_makes_a_ready_endpoint(endpoint: Endpoint) -> None:
    status = endpoint.status()
    assert endpoint.condition("Ready")["status"] == "True"
    assert status["observedGeneration"] == endpoint.get()["metadata"]["generation"]
    assert status["ready"] == "1/1"
    assert wait_for("the draft is reported", lambda: endpoint.status().get("draft", {}).get("hash"), timeout_s=30)
    assert endpoint.condition("DraftCompatible")["status"] == "True"
    header = endpoint.namespace.kubectl("get", "sdd", endpoint.name).splitlines()[0].split()
    assert header == ["NAME", "READY", "REPLICAS", "MODEL", "MODE", "DEPTH", "ACCEPT", "SPEEDUP", "AGE"]


def test_a_chat_answer_streams_through_the_service(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=QUESTION, max_tokens=24, temperature=0)
    stream = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert len(text) > 10
    assert text == whole.choices[0].message.content
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 3, "not in one piece"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_an_unsupported_field_is_an_error_of_openais_form(client: openai.OpenAI, model: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.chat.completions.create(model=model, messages=QUESTION, modalities=["audio"])
    assert refusal.value.param == "modalities"
    assert client.models.list().data[0].id == model


BAD = {
    "depth out of order": ({"depth": {"min": 3, "initial": 1, "max": 4}}, "min <= initial <= max"),
    "no draft": ({"draft": None}, "draft.uri is needed"),
    "unknown method": ({"method": "medusa2"}, "Unsupported value"),
    "too deep": ({"depth": {"max": 99}}, "less than or equal to 16"),
    "a bad uri": ({"draft": {"uri": "ftp://host/x"}}, "should match"),
}


@pytest.mark.parametrize(("change", "words"), BAD.values(), ids=BAD)
def test_an_invalid_resource_is_refused_with_a_readable_reason(
    endpoint: Endpoint, change: dict[str, Any], words: str
) -> None:
    valid = endpoint.get()
    bad = {key: copy.deepcopy(valid[key]) for key in ("apiVersion", "kind", "spec")} | {"metadata": {"name": "bad"}}
    speculation = {**bad["spec"]["speculation"], **change}
    bad["spec"]["speculation"] = {key: value for key, value in speculation.items() if value is not None}
    said = endpoint.namespace.refusal("create", "--filename", "-", stdin=json.dumps(bad))
    assert words in said
    assert "spec.speculation" in said, "the reason names the field"


def test_an_unknown_field_is_refused_by_name(endpoint: Endpoint) -> None:
    valid = endpoint.get()
    bad = {"apiVersion": valid["apiVersion"], "kind": valid["kind"], "metadata": {"name": "bad"}}
    bad["spec"] = {**valid["spec"], "repicas": 2}
    said = endpoint.namespace.refusal("create", "--filename", "-", stdin=json.dumps(bad))
    assert 'unknown field "spec.repicas"' in said


def test_examples_pass_the_api_server(watched: Namespace, release: Release) -> None:
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        assert "dry run" in watched.kubectl("apply", "--dry-run=server", "--filename", str(path))


def test_helm_test_sees_a_bad_resource_refused(release: Release) -> None:
    said = release.test()
    assert "min 4, initial 3, max 2: 422" in said
    assert "min 0, initial 3, max 5: 201" in said
