"""Fuzz test of the CRD: the API server admits a generated spec or says why not, and the operator takes what it admits.

150 specs; a nightly run has 10,000, new ones each time. The proof ``crd-fuzz`` shows that the fuzz can fail: each
maximum of the schema is raised once. Rules across fields have examples: tests/unit/operator/api/test_api_rules.py.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from pydantic import ValidationError

from specdecode_operator import manifests
from specdecode_operator.api import crd
from specdecode_operator.api.v1alpha1 import PLURAL, VERSION, Spec, Status
from specdecode_operator.errors import SpecError
from specdecode_operator.types import Deployment
from specdecode_worker.contract import Plan
from support.kind_copy import KindCopy, served_copy
from support.kube import Cluster
from support.operators.fleet import DEFAULTS, decided
from support.operators.spec_strategies import Json, Schema, specs
from support.tiers import by_effort

FEW = 150
JUDGED_BY_THE_OPERATOR = ("workers.", "distillation.", "router.template.", "prefetchNodeSelector:")
"""Beginnings of fields that only the operator judges: templates of pods, and what depends on other resources."""
CASES = by_effort(quick=FEW, full=FEW, nightly=10_000)


@contextmanager
def proxy(api: KindCopy) -> Iterator[httpx.Client]:
    """Yield a client of the API server; kubectl authenticates it."""
    words = [api.cluster.program, "proxy", "--port=0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=dict(api.cluster.environment))
    try:
        address = process.stdout.readline().split()[-1]
        with httpx.Client(base_url=f"http://{address}", trust_env=False, timeout=30) as client:
            yield client
    finally:
        process.terminate()
        process.wait(10)


def admitted(client: httpx.Client, api: KindCopy, spec: Any) -> dict[str, Any] | None:
    """Return the spec with defaults, as the API server would store it. None if it was refused with a reason."""
    path = f"/apis/{api.group}/{VERSION}/namespaces/default/{PLURAL}"
    answer = client.post(
        path, params={"dryRun": "All", "fieldValidation": "Strict"}, json=api.manifest(spec) | {"spec": spec}
    )
    assert answer.status_code in (201, 400, 422), f"{answer.status_code}: {answer.text}"
    body = answer.json()
    if answer.status_code != 201:
        assert len(body["message"]) > 20, body
        return None
    stored: dict[str, Any] = body["spec"]
    return stored


def run_operator(spec: Spec) -> str:
    """Make all children and a decision.

    Returns:
        ``served``, or the reason for which the operator refuses the spec.
    """
    deployment = Deployment(namespace="ns", name="fuzz", uid="u", generation=1, spec=spec, status=Status())
    try:
        template = manifests.pod_template(deployment, DEFAULTS)
        decision, _ = decided(deployment, workload=None)
    except SpecError as error:
        return str(error)
    children = [
        *decision.children,
        manifests.workload(deployment, template, manifests.rolling_hash(spec), 1),
        manifests.service(deployment),
        manifests.headless_service(deployment),
        manifests.budget(deployment),
        manifests.plan_config_map(deployment, Plan()),
        manifests.state_config_map(deployment, {}),
        manifests.tokens_secret(deployment, {scope: ["t"] for scope in manifests.TokenScope}),
    ]
    json.dumps(children, allow_nan=False)
    manifests.resolved_image(template)
    return "served"


def fuzz(api: KindCopy, schema: Schema, cases: int, *, derandomize: bool, shrink: bool = True) -> Counter[str]:
    """Judge generated specs, and count the outcomes.

    Args:
        api: The served kind.
        schema: Schema of the spec that specs are made of.
        cases: Number of specs.
        derandomize: Judge the same specs each time.
        shrink: Look for the smallest spec that fails.

    Raises:
        AssertionError: A refusal has no reason, or the operator's does not name the field.
        ValidationError: The operator cannot read a spec that was admitted.
    """
    outcomes: Counter[str] = Counter()

    with proxy(api) as client:

        @settings(
            max_examples=cases,
            deadline=None,
            derandomize=derandomize,
            phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(specs(schema))
        def judge(spec: Any) -> None:
            if outcomes and outcomes.total() % 500 == 0:
                print(dict(outcomes), flush=True)
            stored = admitted(client, api, spec)
            if stored is None:
                outcomes["refused at admission"] += 1
                return
            outcome = run_operator(Spec.model_validate(stored))
            assert outcome == "served" or outcome.startswith(JUDGED_BY_THE_OPERATOR), (
                f"the API server should have refused it, or the refusal names no field: {outcome}"
            )
            outcomes[outcome if outcome == "served" else "refused by the operator"] += 1

        judge()
    return outcomes


@pytest.mark.timeout(0 if CASES > FEW else 300)
def test_every_spec_is_admitted_or_refused_and_never_makes_the_operator_raise(api: KindCopy) -> None:
    outcomes = fuzz(api, crd.root_schema()["properties"]["spec"], CASES, derandomize=CASES == FEW)
    print(dict(outcomes))
    assert outcomes["served"] >= CASES // 10, outcomes
    assert outcomes["refused by the operator"] >= CASES // 100, outcomes
    assert outcomes["refused at admission"] >= CASES // 50, outcomes


PLANTED_CASES = 1500
RAISE = 1000


def nodes(schema: Json, path: str = "") -> Iterator[tuple[str, Json]]:
    """Yield every object of a schema with its path."""
    if isinstance(schema, dict):
        yield path, schema
    for key, node in schema.items() if isinstance(schema, dict) else ():
        yield from nodes(node, f"{path}.{key}" if path else key)


PLANTED = {
    path.replace("properties.", "").replace(".items", "[]"): path
    for path, node in nodes(crd.root_schema())
    if path.startswith("properties.spec.") and isinstance(node.get("maximum"), int | float)
}
"""Paths of the maxima of the schema, by what they bound."""


@pytest.mark.proof("crd-fuzz")
@pytest.mark.parametrize("fault", PLANTED)
def test_a_raised_maximum_is_caught(cluster: Cluster, fault: str) -> None:
    """The models have every maximum too, so the operator cannot read what the faulty schema admits."""
    definition = copy.deepcopy(crd.crd())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    dict(nodes(schema))[PLANTED[fault]]["maximum"] *= RAISE
    with served_copy(cluster, definition) as faulty, pytest.raises(ValidationError):
        fuzz(faulty, schema["properties"]["spec"], PLANTED_CASES, derandomize=False, shrink=False)
