"""Judgment of a candidate against the draft in use, on golden and held-out conversations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdecode_worker.capture import Record, opening_hash
from specdecode_worker.contract import TreeShape
from specdecode_worker.contract.distillation import GainBounds
from specdecode_worker.files import write_bytes
from specdecode_worker.models.causal_lm import CausalLM
from specdecode_worker.models.weights import prepare_causal_lm
from specdecode_worker.sampling.params import Sampling
from specdecode_worker.training.conversations import Chat, Conversation, shard_paths
from specdecode_worker.training.distillation.records import (
    Interrupted,
    Runs,
    Stopped,
    Text,
    exclusive_runs,
    frames,
    read_samples,
    runs_of,
    shares_run,
    union_of_runs,
    write_samples,
)
from specdecode_worker.training.evaluation import (
    CalibratedDraft,
    Domain,
    PairedStepCosts,
    PooledDomains,
    Sample,
    Verdict,
    compute_verdict,
    count_steps,
    pool_small_domains,
    step_costs,
)
from specdecode_worker.training.prompts import Question, greedy, read_hashed_prompts
from specdecode_worker.training.rollout import GeneratedText, Rollout, RolloutSettings, conversation_of
from specdecode_worker.training.split_target import TargetPlacement, target_engine

# The golden set: fixed prompts by domain, answered by the target, on which no draft may lose speed.
#
# The hash of its file is part of a draft's lineage, so the next generation is evaluated on the same prompts.

PREFIX = "golden/"
"""Prefix of the names of golden domains, which keeps them apart from tasks of the traffic with the same name."""
_ROWS = 32


@dataclass(frozen=True, slots=True)
class Golden:
    """Samples of the golden set, with the hash of the file whose prompts were answered; None if there is no file.

    ``runs`` are the runs of tokens that no training text may share.
    """

    sha256: str | None
    samples: tuple[Sample, ...]
    runs: Runs


def answer_prompts(
    placement: TargetPlacement, chat: Chat, asked: Mapping[Path, Path], *, answer_tokens: int, stopped: Stopped
) -> dict[Path, list[GeneratedText]]:
    """Return the target's greedy answers for `golden_set`: those of each folder of samples that is not written yet.

    The hash of each file of prompts is written next to its folder.

    Args:
        placement: Target and its devices.
        chat: Its chat template.
        asked: File of prompts of each folder.
        answer_tokens: Most tokens of an answer.
        stopped: Function that is polled between answers.

    Raises:
        PromptFileError: A file of prompts cannot be used.
        ModelError: The target cannot be loaded.
        Interrupted: ``stopped`` returned True.
    """
    questions: dict[Path, list[Question]] = {}
    for folder, prompts in asked.items():
        if not shard_paths(folder):
            lines, sha256 = read_hashed_prompts(prompts)
            questions[folder] = list(greedy(lines, chat))
            write_bytes(folder.with_suffix(".sha256"), sha256.encode())
    if not questions:
        return {}
    most = max(len(one.ids or ()) for of_folder in questions.values() for one in of_folder) + answer_tokens
    rows = min(_ROWS, max(map(len, questions.values())))
    positions = prepare_causal_lm(placement.folder).network.config.max_position_embeddings
    settings = RolloutSettings(rows=rows, answer_tokens=answer_tokens, for_training=False)
    answers: dict[Path, list[GeneratedText]] = {folder: [] for folder in questions}
    with target_engine(placement, rows=rows, longest=min(most, positions)) as engine:
        for folder, of_folder in questions.items():
            for text in Rollout(engine, settings, iter(of_folder)).texts():
                if stopped():
                    raise Interrupted
                answers[folder].append(text)
    return answers


def golden_set(target: CausalLM, folder: Path, answers: Sequence[GeneratedText], stopped: Stopped) -> Golden:
    """Return the golden set with the target's ``answers``, which are read once and stored with states in ``folder``.

    Raises:
        Interrupted: ``stopped`` returned True.
    """
    if not shard_paths(folder):
        conversations = (conversation_of(target, text) for text in answers)
        write_samples(folder, _samples(target, conversations, stopped))
    samples = tuple(read_samples(folder))
    return Golden(folder.with_suffix(".sha256").read_text(), samples, runs_of_samples(samples))


def _samples(target: CausalLM, conversations: Iterable[Conversation], stopped: Stopped) -> Iterator[Sample]:
    """Yield the conversations as samples. Raise Interrupted when ``stopped`` returns True."""
    for conversation in conversations:
        if stopped():
            raise Interrupted
        yield Sample(_record(target, conversation), conversation)


@torch.inference_mode()
def _record(target: CausalLM, conversation: Conversation) -> Record:
    """Return the conversation in the form of a captured request.

    The record ends with the token that the target chooses after the conversation's last one.
    """
    last = int(target.logits(conversation.hidden_NE[-1:].to(target.lm_head.weight.device)).argmax())
    tokens = conversation.tokens_N.tolist()
    prompt = tokens[: conversation.answer_start]
    return Record(
        tokens=(*tokens, last),
        prompt_length=conversation.answer_start,
        sampling=Sampling(max_tokens=len(tokens) + 1 - len(prompt), seed=0, temperature=0.0),
        target="",
        task=PREFIX + conversation.domain,
        time_seconds=0.0,
        opening=opening_hash(" ".join(map(str, prompt))),
    )


def runs_of_samples(samples: Sequence[Sample]) -> Runs:
    """Return all runs of tokens of the samples except the frames of their domains."""
    texts = [text_of(sample.record.opening, sample.conversation) for sample in samples]
    frame = frames(texts)
    return union_of_runs([exclusive_runs(text, frame) for text in texts])


def exclude_overlapping(conversations: Sequence[Conversation], judged: Runs) -> list[Conversation]:
    """Return the conversations that share no run of tokens with ``judged``."""
    texts = [text_of(str(i), conversation) for i, conversation in enumerate(conversations)]
    frame = frames(texts)
    pairs = zip(conversations, texts, strict=True)
    return [conversation for conversation, text in pairs if not shares_run(exclusive_runs(text, frame), judged)]


def text_of(name: str, conversation: Conversation) -> Text:
    """Return a conversation in the form of the overlap check."""
    tokens = conversation.tokens_N.tolist()
    start = conversation.answer_start
    return Text(name, conversation.domain, tokens[:start], runs_of(tokens[start:]))


def by_conversation(samples: Sequence[Sample]) -> dict[str, dict[str, list[Sample]]]:
    """Group samples by domain and then by conversation: turns of one conversation share their opening."""
    groups: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        groups[sample.record.task][sample.record.opening].append(sample)
    return groups


# Evaluation of a candidate draft: step counts on all test texts, paired step times, and the verdict document.


@dataclass(frozen=True, slots=True)
class Comparison:
    """Drafts to compare and the texts to compare them on.

    ``weights`` are the traffic's shares by captured domain. Domains without a weight are golden ones.
    """

    deployed: CalibratedDraft
    candidate: CalibratedDraft
    samples: Sequence[Sample]
    weights: Mapping[str, float]
    shape: TreeShape
    wanted_gain: float


def compare_drafts(
    target: CausalLM, comparison: Comparison, log: Callable[[str], None], stopped: Stopped
) -> dict[str, Any]:
    """Compare the two drafts and return the document of the verdict.

    Raises:
        Interrupted: ``stopped`` returned True.
    """
    domains = _count_domain_steps(target, comparison, log, stopped)
    missing = [name for name in comparison.weights if name not in {domain.name for domain in domains}]
    nothing = np.empty(0)
    domains += [Domain(name, comparison.weights[name], nothing, nothing, nothing) for name in missing]
    costs = step_costs(target, comparison.deployed.head, comparison.candidate.head, comparison.shape)
    pooled = pool_small_domains(domains)
    verdict = compute_verdict(pooled.domains, costs, wanted_gain=comparison.wanted_gain)
    return _document(verdict, domains, pooled, costs, comparison)


def _count_domain_steps(
    target: CausalLM, comparison: Comparison, log: Callable[[str], None], stopped: Stopped
) -> list[Domain]:
    """Return the token and step counts of both drafts by domain."""
    domains = []
    drafts, shape = (comparison.deployed, comparison.candidate), comparison.shape
    for name, conversations in sorted(by_conversation(comparison.samples).items()):
        sums = []
        for samples in conversations.values():
            if stopped():
                raise Interrupted
            pairs = [count_steps(drafts, sample, shape, target.config) for sample in samples]
            sums.append([sum(a.tokens for a, _ in pairs), *(sum(pair[i].steps for pair in pairs) for i in (0, 1))])
        tokens_C, deployed_C, candidate_C = np.array(sums, np.float64).T
        domains.append(Domain(name, comparison.weights.get(name, 0.0), tokens_C, deployed_C, candidate_C))
        log(f"distill: {name}: {len(sums)} conversations walked with both drafts")
    return domains


def _document(
    verdict: Verdict, domains: Sequence[Domain], pooled: PooledDomains, costs: PairedStepCosts, comparison: Comparison
) -> dict[str, Any]:
    """Return the content of verdict.json. A pooled domain has counts of its own, and the gain of its pool only."""
    return {
        "verdict": verdict.finding,
        "exit_code": verdict.exit_code,
        "reasons": list(verdict.reasons),
        "wanted_gain": comparison.wanted_gain,
        "gain": _judged_gain(verdict.mix),
        "domains": {domain.name: _domain(domain, verdict.domains.get(domain.name)) for domain in domains},
        "pools": {
            name: {"domains": list(members), "gain": _judged_gain(verdict.domains.get(name))}
            for name, members in pooled.members.items()
        },
        "shape": str(comparison.shape),
        "step_milliseconds": {
            "deployed": round(float(np.median(costs.deployed_R)) * 1e3, 3),
            "candidate": round(float(np.median(costs.candidate_R)) * 1e3, 3),
            "rounds": len(costs.deployed_R),
        },
    }


def _domain(domain: Domain, gain: GainBounds | None) -> dict[str, Any]:
    tokens = domain.tokens_C.sum()
    steps_by_draft = {"deployed": domain.deployed_C, "candidate": domain.candidate_C}
    return {
        "kind": "captured" if domain.weight > 0 else "golden",
        "share_of_traffic": round(domain.weight, 4),
        "conversations": len(domain.tokens_C),
        "tokens": int(tokens),
        "tokens_per_step": {
            name: round(float(tokens / max(steps.sum(), 1)), 4) for name, steps in steps_by_draft.items()
        },
        "gain": _judged_gain(gain),
    }


def _judged_gain(gain: GainBounds | None) -> dict[str, float] | None:
    return None if gain is None else {name: round(value, 5) for name, value in gain}
