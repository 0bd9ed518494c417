# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Several turns: tools are called, and what they return is appended to the completion, media and all."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from accelerate.logging import get_logger
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.chat_template_utils import parse_response

from ..checks.self_check import check_conversation
from ..data.columns import FROM_TOOL, MediaError, blocks_to_refs, find_media, iter_refs
from ..data.features import restore_media
from ..data.rules import MediaRules
from ..encoding.control_tokens import checked_texts
from ..encoding.conversations import conversation, encode_prefix, encode_turn, normalize_tool_calls
from ..encoding.prompts import EncodedPrompt, all_placeholder_ids, placeholder_tokens
from ..families import family_of
from ..forward.masks import linear_masks
from ..models.trainer_mixin import TrainerMixin
from ..models.wrapped import unwrapped


logger = get_logger(__name__)

# Key of the row as the dataset has it, and of its number, in what TRL hands to environments
WHOLE_ROW = "_whole_row"

# What ends a conversation in the middle of a call
ENDS = ("length", "turns", "media")


@dataclass
class Trajectory:
    """One completion while tools are called in it."""

    prompt: EncodedPrompt  # its prompt
    ids: list[int]  # its ids
    messages: list[dict[str, Any]]  # what was said and returned in it
    history: list[dict[str, Any]]  # the conversation, as the chat template is to write it
    logps: list[float | None] | None  # log-probabilities of an engine
    mask: list[int]  # 0 on what tools returned
    # What tools returned, with its places in the completion
    turns: list[tuple[int, EncodedPrompt]] = field(default_factory=list)
    whole: EncodedPrompt | None = None  # all of it up to the last result
    # How many `calls` and `failures` it has, and 1 for `length`, `turns` or `media`, if that ended it
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def calls(self) -> list[dict[str, Any]]:
        """The calls that its last turn ends with."""
        return self.messages[-1].get("tool_calls") or []

    @property
    def media(self) -> list[EncodedPrompt]:
        """Results that hold media."""
        return [turn for _, turn in self.turns if turn.media]

    def append(self, ids: list[int], logps: list[float | None] | None, sampled: bool) -> None:
        """Goes on."""
        self.ids = self.ids + ids
        self.mask = self.mask + [int(sampled)] * len(ids)
        if self.logps is not None:
            self.logps = self.logps + (logps or [0.0] * len(ids))


@dataclass(frozen=True)
class Conversations:
    """Calls tools and samples what the model says to their results, until no completion ends with a call."""

    model: PreTrainedModel  # unwrapped model
    processor: ProcessorMixin | PreTrainedTokenizerBase  # what encodes prompts
    # Gives the ids of what follows prompts, and their log-probabilities if it has any: called with the prompts, for
    # each the place of its completion and what was returned last, and how many tokens each has room for
    complete: Callable[
        [list[EncodedPrompt], list[tuple[int, EncodedPrompt]], list[int]],
        tuple[list[list[int]], list[list[float | None]] | None],
    ]
    tools: Sequence[dict[str, Callable]]  # each completion's tools, by name
    max_length: int  # tokens of a completion at most, results included
    max_turns: float  # how often a completion's calls are answered at most
    max_media: int | None  # media in a completion at most
    ends: Collection[int]  # ids that end a turn
    template_kwargs: dict[str, Any]  # arguments for `apply_chat_template`
    audio_overlong: Literal["raise", "truncate"]  # what happens to audio longer than the model's window
    media_rules: MediaRules  # from where media may come, and how large they may be
    # What happens to control tokens in results: `"allow"`, `"raise"`, which makes the call fail, or `"strip"`
    special_tokens_in_text: Literal["allow", "raise", "strip"] = "raise"
    isolate: str | None = None  # which prompts get forwards of their own, see [`~policy.Fallbacks`]
    # Where vLLM samples, tokens of a prompt and its completion that it takes at most. It is given media as they are
    # decoded, and positions are its own
    engine_length: int | None = None
    # Whether something is so on any process, for those that must complete equally often
    anyone: Callable[[bool], bool] = bool
    loop: Any = None  # where async tools run

    def run(self, trajectories: list[Trajectory]) -> None:
        """Goes on with completions that end with calls."""
        calling = {i: trajectory for i, trajectory in enumerate(trajectories) if trajectory.calls}
        n_turns = 0
        while self.anyone(bool(calling)) and n_turns < self.max_turns:
            going_on = [i for i, trajectory in calling.items() if self._answer(i, trajectory)]
            if not self.anyone(bool(going_on)):
                return
            self._continue([trajectories[i] for i in going_on], trajectories[0].prompt, going_on)
            calling = {i: trajectories[i] for i in going_on if trajectories[i].calls}
            n_turns += 1
        for trajectory in calling.values():
            trajectory.counts["turns"] += 1

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The processor's tokenizer."""
        return self.processor.tokenizer if isinstance(self.processor, ProcessorMixin) else self.processor

    @property
    def _text_config(self):
        return self.model.config.get_text_config(decoder=True)

    def _answer(self, index: int, trajectory: Trajectory) -> bool:
        """Appends the results of a completion's calls, if they fit."""
        results = self._call_tools(index, trajectory)
        turn, results = self._encode_results(trajectory, results)
        limits = [getattr(self._text_config, "max_position_embeddings", None), self.engine_length]
        length = len(trajectory.ids) + len(turn)
        if length > self.max_length or any(n is not None and len(trajectory.prompt) + length >= n for n in limits):
            trajectory.counts["length"] += 1
            return False
        n_media = sum(1 for message in [*trajectory.messages, *results] for _ in iter_refs(message))
        if self.max_media is not None and n_media > self.max_media:
            trajectory.counts["media"] += 1
            return False
        trajectory.turns.append((len(trajectory.ids), turn))
        trajectory.history += [normalize_tool_calls(results), *results]
        trajectory.messages += results
        trajectory.append(turn.input_ids.tolist(), None, sampled=False)
        engine_positions = {} if self.engine_length is None else {"processor": self.processor}
        trajectory.whole = encode_prefix(
            trajectory.prompt, trajectory.ids, trajectory.turns, self.model, **engine_positions
        )
        return True

    def _call_tools(self, index: int, trajectory: Trajectory) -> list[dict[str, Any]]:
        """What the tools of a completion return, as messages in the order of the calls."""
        tools = self.tools[index]
        results: list[Any] = []
        for call in trajectory.calls:
            trajectory.counts["calls"] += 1
            function = call.get("function", {})
            name = function.get("name", call.get("name", "unknown"))
            try:
                if call["type"] != "function":
                    raise ValueError(f"Unsupported tool call type: {call['type']}")
                if name not in tools:
                    raise ValueError(f"Tool {name} not found.")
                results.append((name, tools[name](**function["arguments"])))
            except Exception as error:
                results.append((name, error))
        coroutines = [result for _, result in results if inspect.iscoroutine(result)]
        if coroutines:
            awaited = iter(asyncio.run_coroutine_threadsafe(_together(coroutines), self.loop).result())
            results = [(name, next(awaited) if inspect.iscoroutine(each) else each) for name, each in results]
        row = index if trajectory.prompt.row is None else trajectory.prompt.row
        messages = []
        for name, result in results:
            failed, content = isinstance(result, Exception), _content(name, result, row, self.media_rules)
            try:
                place = f"row {row}, column '{FROM_TOOL}{name!r}'"
                content = checked_texts(content, self.processor, self.special_tokens_in_text, place)
            except MediaError as error:
                failed, content = True, self._failure(error)
            trajectory.counts["failures"] += failed
            messages.append({"role": "tool", "name": name, "content": content})
        return messages

    def _failure(self, error: MediaError) -> str:
        """What the model is told of a result that it can't be shown, without the tokens that the result held."""
        logger.warning_once(f"What a tool returned can't be shown to the model, which is told so: {error}")
        reason = str(error).encode(errors="replace").decode()
        for token in placeholder_tokens(self.model, self.processor):
            reason = reason.replace(token, "")
        return str({"error": checked_texts(reason, self.processor, "strip", "")})

    def _encode_results(
        self, trajectory: Trajectory, results: list[dict[str, Any]]
    ) -> tuple[EncodedPrompt, list[dict[str, Any]]]:
        """Results as tokens, and as messages; an error stands for what can't be encoded."""
        ends = self.tokenizer.convert_ids_to_tokens(sorted({*self.ends, self.tokenizer.eos_token_id}))
        options = {
            "ends": [end for end in ends if end is not None],
            "template_kwargs": self.template_kwargs,
            "audio_overlong": self.audio_overlong,
            "keep_decoded": self.engine_length is not None,
            "row": trajectory.prompt.row,
        }
        try:
            turn = encode_turn(trajectory.history, results, self.processor, self.model, **options)
            self._check_joins(trajectory, turn)
        except MediaError as error:
            with_media = [message for message in results if next(iter_refs(message), None) is not None]
            failed = with_media or results  # texts that hold placeholders
            trajectory.counts["failures"] += len(failed)
            content = self._failure(error)
            results = [{**message, "content": content} if message in failed else message for message in results]
            turn = encode_turn(trajectory.history, results, self.processor, self.model, **options)
        return turn, results

    def _check_joins(self, trajectory: Trajectory, turn: EncodedPrompt) -> None:
        """Media whose features depend on what pads them can't be encoded one after the other, unless nothing does."""
        if (self.isolate or family_of(self.model).isolate) is None or not turn.media:
            return
        for before in (trajectory.prompt, *trajectory.media):
            for name in before.media.keys() & turn.media.keys():
                if before.media[name].shape[1:] != turn.media[name].shape[1:]:
                    raise MediaError(
                        f"{self._text_config.model_type} pads media of one conversation to one size, which changes "
                        "what it sees of them; return media of the size of those before"
                    )

    def _continue(self, trajectories: list[Trajectory], idle: EncodedPrompt, indices: list[int]) -> None:
        """Samples what follows the results; a process without any samples for the sake of the others."""
        wholes = [trajectory.whole or trajectory.prompt for trajectory in trajectories] or [idle]
        asked = [(place, trajectory.turns[-1][1]) for place, trajectory in zip(indices, trajectories, strict=True)]
        room = [self.max_length - len(trajectory.ids) for trajectory in trajectories]
        ids, logps = self.complete(wholes, asked, [max(n, 1) for n in room] or [1])
        for i, trajectory in enumerate(trajectories):
            new, before = ids[i][: room[i]], trajectory.prompt.input_ids.tolist() + trajectory.ids
            trajectory.append(new, None if logps is None else logps[i][: room[i]], sampled=True)
            if new:
                trajectory.messages.append(parse_assistant_turn(self.tokenizer, new, before, self.tools[indices[i]]))


def parse_assistant_turn(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], before: list[int], tools: dict[str, Callable]
) -> dict[str, Any]:
    """A turn of the model's as a message."""
    callables: Any = list(tools.values())
    return parse_response(tokenizer, ids, prefix=before, tools=callables)


class ToolsMixin(TrainerMixin):
    """Gives a trainer that samples completions tools that may return media."""

    _batch: Any
    _kinds_seen: set[str]
    _completes_in_step: bool
    _continuation_mode: str | None = None

    def _tool_call_loop(self, prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields):
        batch = self._batch
        if batch is None or batch.prompts is None:
            return super()._tool_call_loop(
                prompts, prompt_ids, completion_ids, completions, logprobs, images, multimodal_fields
            )
        logps = [None] * len(prompts) if logprobs is None else logprobs
        trajectories = [
            Trajectory(*each[:3], list(each[3]), each[4], [1] * len(each[1]))
            for each in zip(batch.prompts, completion_ids, completions, prompts, logps, strict=True)
        ]
        tools = [
            {**plain, **waiting} for plain, waiting in zip(self._sync_tool_dicts, self._async_tool_dicts, strict=True)
        ]
        self._conversations(tools).run(trajectories)
        if not self.use_vllm and any(trajectory.turns for trajectory in trajectories):
            self._log_continuation_mode(batch.branches.obstacle)
        batch.branches = None  # which holds a cache
        counts = sum((trajectory.counts for trajectory in trajectories), Counter())
        model = unwrapped(self.accelerator, self.model)
        batch.prompts = [
            conversation(
                trajectory.prompt,
                trajectory.turns,
                trajectory.whole,
                _is_causal(model, trajectory.prompt, trajectory.whole),
            )
            if trajectory.whole is not None and trajectory.media
            else trajectory.prompt
            for trajectory in trajectories
        ]
        for trajectory in trajectories:
            trajectory.prompt.decoded = ()  # an engine has seen its last turn
        batch.completions = [trajectory.messages for trajectory in trajectories]
        self._kinds_seen.update(*(each.modalities for each in batch.prompts))
        self._check_conversation(batch.prompts, [trajectory.ids for trajectory in trajectories])
        ended = torch.tensor([*(counts[name] for name in ENDS), len(trajectories)], device=self.accelerator.device)
        *ended, total = self.accelerator.reduce(ended, reduction="sum").tolist()
        for name, n in zip(ENDS, ended, strict=True):
            self._metrics["train" if self.model.training else "eval"][f"tools/ended_by_{name}"].append(n / total)
        return (
            [trajectory.mask for trajectory in trajectories],
            [trajectory.messages for trajectory in trajectories],
            [trajectory.ids for trajectory in trajectories],
            None if logprobs is None else [trajectory.logps for trajectory in trajectories],
            counts["calls"],
            counts["failures"],
            [[] for _ in trajectories],  # images, which TRL would encode again
        )

    def _log_continuation_mode(self, obstacle: str | None) -> None:
        """Logs how generation goes on behind results of tools, once."""
        how = "goes on from its cache" if obstacle is None else f"prefills the conversation again: {obstacle}"
        if how != self._continuation_mode:
            logger.info(f"Behind what tools returned, generation {how}.")
            self._continuation_mode = how

    def _check_conversation(self, prompts: list[EncodedPrompt], completion_ids: list[list[int]]) -> None:
        """Once, on the first media that a tool returned."""
        if self._self_check is None or self._self_check.conversation is not None or not self.model.training:
            return
        found = check_conversation(self._policy, self.model, prompts, completion_ids, self.use_vllm)
        if found is not None:
            self._self_check.conversation, self._policy.fallbacks = found
            self._self_check.fallbacks = self._policy.fallbacks
            logger.info(str(self._self_check))
            self.accelerator.print(self._self_check)

    def _conversations(self, tools: Sequence[dict[str, Callable]], **others) -> Conversations:
        """How completions go on behind calls, each with its tools, as in training unless told otherwise."""
        own: dict[str, Any] = {
            "complete": self._complete_continued,
            "max_length": self.max_completion_length,
            "max_turns": self.max_tool_calling_iterations,
            "max_media": self.args.max_tool_media,
            "ends": self.eos_token_ids,
            "loop": getattr(self, "async_loop", None),
        }
        engine: Any = self.vllm_generation if self.use_vllm else None
        return Conversations(
            model=unwrapped(self.accelerator, self.model),
            processor=self.processing_class,
            tools=tools,
            template_kwargs={"chat_template": self.chat_template, **self.chat_template_kwargs},
            audio_overlong=self.args.audio_overlong,
            media_rules=self.args.media_rules,
            special_tokens_in_text=self.args.special_tokens_in_text or "raise",
            isolate=self._policy.fallbacks.isolate,
            engine_length=None if engine is None else engine.max_length,
            anyone=self._any_process if self._completes_in_step else bool,
            **{**own, **others},
        )

    def _complete_continued(
        self, wholes: list[EncodedPrompt], asked: list[tuple[int, EncodedPrompt]], room: list[int]
    ):
        """What follows results of tools, by what samples in training."""
        batch = self._batch
        batch.continued, batch.room = wholes, room
        batch.branches.asked = asked
        try:
            return self._generate_single_turn(
                [whole.input_ids.tolist() for whole in wholes], None, {}, num_generations=1
            )
        finally:
            batch.continued = batch.room = None


def with_whole_rows(factory: Callable[[], Any], rules: MediaRules) -> Callable[[], Any]:
    """
    Environments that are reset with their row as the dataset has it, media and all, and may show media themselves.
    """

    def make():
        environment = factory()
        own = getattr(environment, "reset", None)
        if own is None:
            return environment  # which TRL refuses

        def reset(**row):
            number, whole = row.pop(WHOLE_ROW)
            dropped = {"environment"} - row.keys()  # which TRL keeps to itself where there are several
            observation = own(**{key: value for key, value in whole.items() if key not in dropped})
            if isinstance(observation, list):
                return blocks_to_refs(observation, f"{type(environment).__name__}.reset", number, rules)
            return observation

        environment.reset = reset
        return environment

    return make


def with_media(rollout_func: Callable) -> Callable:
    """A rollout of the user's for prompts with media, which are encoded as all others are."""

    def rollout(prompts, trainer):
        if next(iter_refs(prompts), None) is None:
            return rollout_func(prompts, trainer)
        output = rollout_func(restore_media(prompts), trainer)
        if not {"prompt_ids", "completion_ids"} <= output.keys():
            return output  # which TRL refuses
        expected, _, _ = trainer._tokenize_prompts(prompts)
        for prompt in trainer._batch.prompts:
            prompt.decoded = ()  # an engine has seen what it was asked
        placeholders = all_placeholder_ids(unwrapped(trainer.accelerator, trainer.model), trainer.processing_class)
        for i, (prompt, given, ids) in enumerate(
            zip(trainer._batch.prompts, output["prompt_ids"], output["completion_ids"], strict=True)
        ):
            if list(given) != expected[i]:
                raise ValueError(
                    f"`rollout_func` gave {len(given)} `prompt_ids` for completion {i}, not the {len(prompt)} "
                    "of its prompt as the processor encodes it, placeholders of media and all; return those of "
                    "`trainer.processing_class.apply_chat_template(..., tokenize=True, return_dict=True)`."
                )
            if not placeholders.isdisjoint(ids):
                raise ValueError(
                    f"`rollout_func` gave placeholders of media in `completion_ids` of completion {i}, whose media "
                    "nothing knows; use `tools` or `environment_factory` to show media to the model."
                )
        return output

    return rollout


async def _together(coroutines: list) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)


def _content(name: str, result: Any, row: int, rules: MediaRules) -> str | list[dict[str, Any]]:
    """What a tool returned, as the content of a message."""
    if isinstance(result, Exception):
        return str({"error": str(result)})
    if isinstance(result, list) and all(isinstance(block, dict) and "type" in block for block in result):
        # Its paths aren't those of rows
        return blocks_to_refs(result, f"{FROM_TOOL}'{name}'", row, replace(rules, media_dir=None))
    place = next((place for place, _, medium in find_media(result, "result") if not isinstance(medium, str)), None)
    if place is not None:
        raise MediaError(
            f"the tool {name!r} returned a medium ({place}) that the model would not get; return a list of content "
            "blocks, such as [{'type': 'image', 'image': ...}, {'type': 'text', 'text': ...}]"
        )
    return str(result)


def _is_causal(model, prompt: EncodedPrompt, whole: EncodedPrompt) -> bool:
    """Whether a prompt is to the model the same beside what tools returned as without it."""
    positions = whole.position_ids[..., : len(prompt)]
    same = torch.equal(positions, prompt.position_ids.expand_as(positions))
    return same and all(mask is None for mask in linear_masks(model, whole, 0).values())
