"""Clients that others wrote, as they are published, against a real worker that speculates (`make proofs P=clients`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from support.clients import ClientRunner, Site
from support.worker_process import ServerProcess

pytestmark = [pytest.mark.proof("clients"), pytest.mark.embedded, pytest.mark.timeout(900)]

PROGRAMS = Path(__file__).parent / "programs"
MODEL = "smollm2-135m-instruct"


@pytest.mark.parametrize("through", ["worker", "router"])
def test_openai(site: Site, clients: ClientRunner, through: str) -> None:
    server: ServerProcess = getattr(site, through)
    clients.run("openai", "python", str(PROGRAMS / "openai_client.py"), f"{server.public}/v1")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_litellm(site: Site, clients: ClientRunner, provider: str) -> None:
    words = (str(PROGRAMS / "litellm_client.py"), f"{site.worker.public}/v1", provider)
    clients.run("litellm", "python", *words, LITELLM_LOCAL_MODEL_COST_MAP="True")


def test_langchain(site: Site, clients: ClientRunner) -> None:
    clients.run("langchain", "python", str(PROGRAMS / "langchain_client.py"), f"{site.worker.public}/v1")


def test_aiperf_reports_acceptance(site: Site, clients: ClientRunner, tokenizer: Path, tmp_path: Path) -> None:
    words = ["--model", MODEL, "--url", site.worker.public, "--endpoint-type", "chat", "--streaming"]
    words += ["--tokenizer", str(tokenizer), "--use-server-token-count", "--ui", "none", "--random-seed", "1"]
    words += ["--request-count", "8", "--concurrency", "2", "--artifact-dir", "out"]
    words += ["--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "24"]
    clients.run("aiperf", "aiperf", "profile", *words)
    report: Any = json.loads((tmp_path / "out/profile_export_aiperf.json").read_text())
    assert report["request_count"]["avg"] == 8
    assert "error_request_count" not in report
    assert 0 < report["time_to_first_token"]["avg"] < report["request_latency"]["avg"]
    steps, accepted = report["total_spec_decode_steps"]["avg"], report["total_accepted_draft_tokens"]["avg"]
    assert steps > 8
    assert accepted > 0
    assert report["spec_decode_token_weighted_acceptance_length"]["avg"] == pytest.approx(1 + accepted / steps)
    histogram = report["pooled_spec_decode_acceptance_histogram"]
    assert sum(histogram.values()) == steps, histogram
    served: Any = json.loads((tmp_path / "out/server_metrics_export.json").read_text())["metrics"]
    assert {"vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"} <= served.keys()


def test_guidellm_sweeps(site: Site, clients: ClientRunner, tokenizer: Path, tmp_path: Path) -> None:
    words = ["--backend", f"kind=openai_http,target={site.worker.public},model={MODEL}"]
    words += ["--profile", "kind=sweep,sweep_size=3,max_concurrency=4"]
    words += ["--constraint", "kind=max_requests,count=4", "--constraint", "kind=max_duration,seconds=60"]
    words += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
    words += ["--data", "kind=synthetic_text,prompt_tokens=40,output_tokens=12"]
    words += ["--output", "kind=json,path=report.json", "--disable-console-interactive"]
    clients.run("guidellm", "guidellm", "run", *words)
    runs: Any = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    assert [run["config"]["strategy"]["type_"] for run in runs] == ["synchronous", "throughput", "constant"]
    for run in runs:
        totals = run["metrics"]["request_totals"]
        assert (totals["successful"], totals["errored"]) == (4, 0), totals
        assert run["metrics"]["output_token_count"]["successful"]["mean"] == 12
        assert run["metrics"]["time_to_first_token_ms"]["successful"]["mean"] > 0


@pytest.mark.parametrize("tokenized", [True, False])
def test_lm_eval_scores_are_the_same_without_speculation(
    site: Site, clients: ClientRunner, tokenizer: Path, tmp_path: Path, tokenized: bool
) -> None:
    shutil.copytree(Path(__file__).parent / "lm_eval", tmp_path, dirs_exist_ok=True)

    def evaluate(name: str) -> tuple[Any, dict[str, Any]]:
        model = f"model={MODEL},base_url={site.worker.public}/v1/completions,tokenizer={tokenizer}"
        words = ["--model", "local-completions", "--tasks", "colors,continuations", "--include_path", "."]
        words += ["--model_args", f"{model},num_concurrent=2,max_retries=1,tokenized_requests={tokenized}"]
        words += ["--output_path", name, "--log_samples", "--seed", "1"]
        clients.run("lm-eval", "lm_eval", "run", *words, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        (results,) = (tmp_path / name / MODEL).glob("results_*.json")
        answers = {
            path.name.rpartition("_")[0]: [json.loads(line)["resps"] for line in path.read_text().splitlines()]
            for path in (tmp_path / name / MODEL).glob("samples_*.jsonl")
        }
        return json.loads(results.read_text())["results"], answers

    scores, answers = evaluate("speculative")
    drafts = site.drafts
    site.push("none")
    plain_scores, plain_answers = evaluate("plain")
    assert site.drafts == drafts, "the second run must not draft"
    site.push("chain:3")
    assert scores == plain_scores
    assert 0 < scores["colors"]["acc_norm,none"] < 1
    assert answers["samples_continuations"] == plain_answers["samples_continuations"]
    pairs = zip(_flat(answers["samples_colors"]), _flat(plain_answers["samples_colors"]), strict=True)
    assert all(float(one) == pytest.approx(float(other), abs=1e-3) for one, other in pairs)


def _flat(answers: list[Any]) -> list[str]:
    """Return the log-probability of every choice of every question."""
    return [choice[0][0] for answer in answers for choice in answer]
