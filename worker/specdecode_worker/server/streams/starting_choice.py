"""Choices of a request that are ready to start: new ones, and ones that continue an earlier attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdecode_worker.engine.finish_rule import FinishRule
from specdecode_worker.engine.ipc.messages import Sampling
from specdecode_worker.server.request_sampling import logprobs_of, sampling_of, seeds_of, token_limits
from specdecode_worker.server.requests import CompletionRequest, GenerationRequest
from specdecode_worker.server.responses import ChoicePiece
from specdecode_worker.server.served_model import Model
from specdecode_worker.server.streams.choice_output import ChoiceOutput, OutputOptions
from specdecode_worker.server.streams.earlier_attempt import EarlierChoice, sampling_of_rest
from specdecode_worker.server.text.detokenizer import TextOptions
from specdecode_worker.server.text.prompts import Prompt


@dataclass(frozen=True, slots=True)
class StartingChoice:
    """Choice that is ready to start."""

    prompt: Prompt
    sampling: Sampling
    output: ChoiceOutput
    generates: bool
    """False if only the echo of the prompt is returned."""
    emitted: tuple[int, ...] | None = None
    """Output tokens of an earlier attempt; None for a new choice."""
    replayed: Sequence[ChoicePiece] = ()
    """Pieces of an earlier attempt."""

    @property
    def engine_sampling(self) -> Sampling:
        """Sampling parameters for the engine."""
        return sampling_of_rest(self.sampling, self.emitted or ())


def new_choices(model: Model, request: GenerationRequest, prompts: Sequence[Prompt]) -> list[StartingChoice]:
    """Return the choices of a new request, grouped by prompt.

    Raises:
        BadRequest: A prompt does not fit the model.
    """
    limits = model.limits
    most_tokens = token_limits(request, [prompt.ids for prompt in prompts], limits)
    choices = []
    for prompt, limit in zip(prompts, most_tokens, strict=True):
        for index, seed in enumerate(seeds_of(request.seed, request.generated_choices)):
            options = _output_options(request, index)
            output = ChoiceOutput(model.tokenizer, prompt, options)
            sampling = sampling_of(request, limit, seed, limits, prompt.grammar)
            choices.append(StartingChoice(prompt, sampling, output, options.generates))
    return choices


def continued_choices(
    model: Model, request: GenerationRequest, prompts: Sequence[Prompt], earlier: Sequence[EarlierChoice]
) -> list[StartingChoice]:
    """Return the choices that continue an earlier attempt, whose output is replayed.

    Run it outside the event loop, because a long output takes longer than a millisecond.

    Raises:
        BadRequest: The progress is no output of the request.
    """
    made = request.generated_choices
    choices = []
    for index, one in enumerate(earlier):
        prompt, progress, options = prompts[index // made], one.progress, _output_options(request, index % made)
        output = ChoiceOutput(model.tokenizer, prompt, options, progress.counters)
        replayed = output.replay(progress, FinishRule.of(one.sampling, model.loaded.eos_token_ids))
        choices.append(StartingChoice(prompt, one.sampling, output, options.generates, progress.ids, replayed))
    return choices


def _output_options(request: GenerationRequest, choice: int) -> OutputOptions:
    text_options = TextOptions(
        stops=tuple(request.stop),
        include_stop=request.include_stop_str_in_output,
        skip_special_tokens=request.skip_special_tokens,
        min_tokens=request.min_tokens,
        logprobs=request.top_logprobs_count is not None,
    )
    generates = not isinstance(request, CompletionRequest) or request.max_tokens != 0
    return OutputOptions(
        text_options, has_logprobs=logprobs_of(request) is not None, generates=generates, counts_prompt=choice == 0
    )
