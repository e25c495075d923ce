"""Fuzz tests: valid and invalid requests generated from the worker's OpenAPI document, sent to a real worker.

250 requests; 10,000 with ``make proofs P=fuzz``. The worker must answer as documented and keep running.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from specdecode_worker.server.requests import GRAMMAR, JSON_OBJECT, REGEX
from support import small_model
from support.tiers import by_effort
from support.worker_process import WorkerProcess, ready, real

CASES = by_effort(quick=250, full=250, nightly=10_000)
SHARES = {
    ("/v1/completions", "POST"): 0.4,
    ("/v1/chat/completions", "POST"): 0.4,
    ("/tokenize", "POST"): 0.08,
    ("/detokenize", "POST"): 0.08,
    ("/v1/models/{name}", "GET"): 0.04,
}
CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


# A string that is itself JSON, which the schema can only describe by the name of a format.
schemathesis.openapi.format(JSON_OBJECT, st.dictionaries(st.text(), st.integers() | st.text()).map(json.dumps))

schemathesis.openapi.format(REGEX, st.sampled_from(["[a-z]+", "(yes|no)", ".*", "[0-9]{2,4}"]))
schemathesis.openapi.format(GRAMMAR, st.sampled_from(['start: "a" | "(" start ")"', 'root ::= "a" root | "b"']))


@pytest.fixture(scope="module")
def worker(folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerProcess]:
    # Small limits keep answers short and make the requests reach the bounds.
    flags = [*small_model.flags(folders[0]), "--max-model-len", "96", "--max-waiting", "4"]
    with ready(real(flags, tmp_path_factory.mktemp("worker") / "log")) as started:
        yield started


@pytest.fixture(scope="module")
def schema(worker: WorkerProcess) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_dict(worker.get("/openapi.json").json())


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("path", "method"), SHARES, ids=lambda part: part)
def test_fuzzed_requests_get_documented_responses(
    worker: WorkerProcess, schema: schemathesis.BaseSchema, path: str, method: str, mode: GenerationMode
) -> None:
    operation = schema[path][method]

    statuses: Counter[int] = Counter()

    def ask(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.headers.pop("X-Request-Timeout", None)  # a deadline that is over at once is valid, and answered by 504
        response = case.call(base_url=worker.public, timeout=60)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        assert worker.process.poll() is None, worker.log

    quick = settings(
        max_examples=round(CASES * SHARES[path, method] / 2),
        deadline=None,
        database=None,
        derandomize=CASES <= 250,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    tested: Callable[[], None] = quick(given(case=operation.as_strategy(generation_mode=mode))(ask))
    tested()
    assert worker.get("/health").status_code == 200
    if mode is GenerationMode.POSITIVE:
        assert statuses[200] > statuses.total() / 4, f"the description promises too much: {statuses}"
    report = worker.report()
    assert (report.running, report.waiting, report.kv_tokens_used) == (0, 0, 0)
