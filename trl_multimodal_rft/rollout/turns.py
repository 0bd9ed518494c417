# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Completions of several turns with tool calls. The results of tools, media included, are appended to the completion. For
example, a call of 3 tokens, its result of 2 and an answer of 1 make a completion with the mask [1, 1, 1, 0, 0, 1].

An environment or `max_context_media` may rewrite the context instead. The new context contains the results, and
replaces all tokens that the model has read so far.
"""

import asyncio
import functools
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from accelerate.logging import get_logger
from torch.utils._pytree import tree_map
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from trl import is_conversational
from trl.chat_template_utils import parse_response

from ..data.reading.refs import MediaError, iter_refs, shortened
from ..data.reading.rules import MediaRules
from ..data.rows.columns import TOOL_PREFIX
from ..data.rows.thoughts import without_thoughts
from ..encoding.conversations import Contexts, check_joins, encode_prefix, encode_results, stand_in_turn
from ..encoding.messages import opened_thoughts
from ..encoding.processors import Processor, checked_texts, completion_texts, tokenizer_of
from ..encoding.prompt_encoder import PromptEncoder
from ..encoding.prompts import EncodedPrompt, placeholder_tokens
from ..engines.samplers import Samples
from ..engines.transformers import Branches
from ..forward.scores import with_media
from .environments import EnvironmentFailure, as_content, as_error, is_error_of_mcp
from .rollout import Drawn, Prompted, Turn


logger = get_logger(__name__)

# Limits on tokens, turns and media that end a completion after a call, as keys of `Trajectory.counts`
LIMITS = ("length", "turns", "media")

_DEEPEST = 100  # limit on the nested levels of a call's arguments


@dataclass
class Trajectory:
    """State of a completion while tools are called."""

    prompt: EncodedPrompt  # the prompt, or the latest context that replaced it
    ids: list[int]  # ids of the completion
    messages: list[dict[str, Any]]  # the assistant's messages, calls included, and the tools' results
    history: list[dict[str, Any]]  # the conversation as input of the chat template
    logps: list[float | None] | None  # log-probabilities, if an engine samples
    mask: list[int]  # 0 on tokens of tool results
    # Encoded tool results that follow the current context, each with the number of tokens between context and result
    encoded_results: list[tuple[int, EncodedPrompt]] = field(default_factory=list)
    whole: EncodedPrompt | None = None  # the context and all tokens behind it, up to the last result
    # Messages of the contexts, each with the number of `messages` that the context replaces
    contexts: list[tuple[list[dict[str, Any]], int]] = field(default_factory=list)
    # Earlier contexts, for scoring the tokens behind them
    closed_contexts: list[EncodedPrompt] = field(default_factory=list)
    # For each earlier context, the index in `ids` where the tokens after that context end
    context_ends: list[int] = field(default_factory=list)
    sampled_turns: list[Turn] = field(default_factory=list)
    # Numbers of `calls`, `failures` and turns with `unparsed` calls, and 1 for `length`, `turns` or `media` if that
    # limit ended the completion
    counts: Counter[str] = field(default_factory=Counter)
    failure: Exception | None = None  # error after which the environment couldn't go on
    # Failed calls for which the model's arguments aren't the cause, as texts with the tool's name
    faults: list[str] = field(default_factory=list)
    environment: Any = None  # may rewrite contexts
    tools: dict[str, Callable] = field(default_factory=dict)  # by name
    index: int = 0  # batch index in the rollout
    row: int = 0  # row index in the dataset

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls at the end of the last turn."""
        return self.messages[-1].get("tool_calls") or []

    @property
    def results_with_media(self) -> list[EncodedPrompt]:
        return [result for _, result in self.encoded_results if result.media]

    @property
    def start(self) -> int:
        """Index of the first token that follows the context."""
        return self.context_ends[-1] if self.context_ends else 0

    def replace_context(self, messages: list[dict[str, Any]], encoded: EncodedPrompt, model: PreTrainedModel) -> None:
        """Replaces the context by `messages`, which stand for all messages so far and precede all later tokens."""
        self.closed_contexts.append(scored_prompt(model, self))
        self.context_ends.append(len(self.ids))
        self.contexts.append((messages, len(self.messages)))
        self.prompt = encoded
        self.history = [*messages]
        self.encoded_results = []
        self.whole = None

    def append(self, ids: list[int], logps: list[float | None] | None, sampled: bool) -> None:
        """Appends tokens to the completion, from the policy if `sampled`, else from tool results."""
        self.ids = self.ids + ids
        self.mask = self.mask + [int(sampled)] * len(ids)
        if self.logps is not None:
            self.logps = self.logps + (logps or [0.0] * len(ids))  # the mask excludes tool results


@dataclass(frozen=True)
class ToolLoop:
    """Loop that calls tools and samples the next turn, until a limit is reached, or no completion ends with a call."""

    # Encoder of prompts and results. Control tokens in results are errors, unless the encoder's
    # `special_tokens_in_text` allows or strips them.
    encoder: PromptEncoder
    # Function that samples a completion of each prompt. The second list has the completions' maximum lengths.
    complete: Callable[[list[EncodedPrompt], list[int]], Samples]
    branches: Branches  # holder of the completions' KV cache, for later turns
    max_length: int  # maximum number of tokens of a completion, tool results included
    max_turns: float  # maximum number of turns with tool results
    max_media: int | None  # maximum number of media that tools return in a completion
    end_ids: Collection[int]  # ids that end a turn
    isolate: str | None = None  # which prompts get separate forwards: `isolate` of [`~policy.Fallbacks`]
    max_context_media: int | None = None  # maximum number of media in a context; only the last ones are kept
    # Maximum number of tokens of a prompt with its completion in vLLM, `None` if transformers samples. vLLM takes
    # decoded media and computes positions itself.
    engine_length: int | None = None
    # Function that returns whether a condition holds on any rank. The default, `bool`, looks at this rank alone, for
    # samplers that ranks call independently.
    any_rank: Callable[[bool], bool] = bool
    loop: Any = None  # event loop of async tools

    def run(self, trajectories: list[Trajectory]) -> None:
        """Continues trajectories in place. If ranks must sample equally often, all ranks must call this."""
        calling = [trajectory for trajectory in trajectories if trajectory.calls and trajectory.failure is None]
        n_turns = 0
        while self.any_rank(bool(calling)) and n_turns < self.max_turns:
            continuing = [trajectory for trajectory in calling if self._add_results(trajectory)]
            if not self.any_rank(bool(continuing)):
                return
            self._sample_turns(continuing, trajectories[0].prompt)
            calling = [trajectory for trajectory in continuing if trajectory.calls]
            n_turns += 1
        for unfinished in calling:
            unfinished.counts["turns"] += 1

    def _add_results(self, trajectory: Trajectory) -> bool:
        """Calls tools and adds their results. Returns whether the results fit and the environment goes on."""
        encoder = self.encoder
        faults_before = [*trajectory.faults]
        try:
            results = self._call_tools(trajectory)
            # A text that can't fit isn't encoded, since that can take minutes and gigabytes
            if sum(map(len, _texts(results))) > self.max_length * self._longest_token:
                trajectory.counts["length"] += 1
                return False
            try:
                messages, encoded = self._encode_results(trajectory, results)
            except MediaError as error:
                results = self._replace_failed_results(trajectory, results, error)
                messages, encoded = self._encode_results(trajectory, results)
        except (EnvironmentFailure, MediaError) as error:
            if isinstance(error, MediaError):
                trajectory.faults = [*faults_before, *[str(error)] * len(trajectory.calls)]
            trajectory.failure = error if isinstance(error, EnvironmentFailure) else EnvironmentFailure(str(error))
            return False
        # Limits. `n_before` tokens precede the results, and the completion grows by `n_added` tokens. A new context
        # replaces the tokens before it, and adds no tokens to the completion
        n_before = n_added = 0
        if messages is None:
            n_before = len(trajectory.prompt) + len(trajectory.ids) - trajectory.start
            n_added = len(encoded)
        config = encoder.model.config.get_text_config(decoder=True)
        length_limits = [getattr(config, "max_position_embeddings", None), self.engine_length]
        fits = len(trajectory.ids) + max(n_added, 1) <= self.max_length
        if not fits or any(limit is not None and n_before + len(encoded) >= limit for limit in length_limits):
            trajectory.counts["length"] += 1
            return False
        n_media = sum(1 for _ in iter_refs([*trajectory.messages, *results]))
        if self.max_media is not None and n_media > self.max_media:
            trajectory.counts["media"] += 1
            return False
        trajectory.messages += results
        if messages is not None:
            trajectory.replace_context(messages, encoded, encoder.model)
            return True
        trajectory.encoded_results.append((len(trajectory.ids) - trajectory.start, encoded))
        trajectory.history += [stand_in_turn(results), *results]
        trajectory.append(encoded.input_ids.tolist(), None, sampled=False)
        processor = None if self.engine_length is None else encoder.processor  # with it, positions are the engine's
        ids = trajectory.ids[trajectory.start :]
        trajectory.whole = encode_prefix(trajectory.prompt, ids, trajectory.encoded_results, encoder.model, processor)
        return True

    @functools.cached_property
    def _longest_token(self) -> int:
        return max(map(len, tokenizer_of(self.encoder.processor).get_vocab()))

    def _new_context(self, trajectory: Trajectory, results: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Returns the messages of a rewritten context, or `None` if the context stays and the results are appended."""
        rewrite = getattr(trajectory.environment, "get_context", None)
        limit = self.max_context_media
        if rewrite is None and limit is None:
            return None
        messages = [*self._conversation(trajectory), *results]
        try:
            # `tree_map` copies lists and dictionaries, which the environment may change
            custom_messages = None if rewrite is None else rewrite(tree_map(lambda value: value, messages))
        except Exception as error:
            raise EnvironmentFailure(f"`get_context` raised {type(error).__name__}: {error}") from error
        if custom_messages is not None:
            mode = self.encoder.special_tokens_in_text or "strip"
            label = f"row {trajectory.row}, `get_context`"
            context_texts = {*_texts([message for message in messages if message.get("content")])}
            messages = _read_messages(custom_messages, trajectory.row, self.encoder.media_rules, context_texts)
            messages = checked_texts(messages, self.encoder.processor, mode, label)
        n_surplus = 0 if limit is None else sum(1 for _ in iter_refs(messages)) - limit
        if n_surplus > 0:
            return _without_first_media(messages, n_surplus)
        return None if custom_messages is None else messages

    def _conversation(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        """Returns the messages of the context and all later ones, without control tokens that the policy sampled."""
        context, n_replaced = trajectory.contexts[-1]
        return context + [
            checked_texts(message, self.encoder.processor, "strip", "") if message["role"] == "assistant" else message
            for message in trajectory.messages[n_replaced:]
        ]

    def _encode_results(
        self, trajectory: Trajectory, results: list[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]] | None, EncodedPrompt]:
        """Returns the messages and the encoding of a new context, or `None` and the encoding of appended results."""
        messages = self._new_context(trajectory, results)
        if messages is not None:
            tools = [*trajectory.tools.values()] or None
            return messages, self.encoder.encode(messages, trajectory.row, sampled=True, tools=tools)
        tokenizer = tokenizer_of(self.encoder.processor)
        ends = tokenizer.convert_ids_to_tokens(sorted({*self.end_ids, tokenizer.eos_token_id}))
        encoded_results = encode_results(
            trajectory.history,
            results,
            self.encoder.processor,
            self.encoder.model,
            ends=[end for end in ends if end is not None],
            template_kwargs={k: v for k, v in self.encoder.template_kwargs.items() if k != "tools"},
            audio_overlong=self.encoder.audio_overlong,
            keep_decoded=self.engine_length is not None,
            row=trajectory.row,
        )
        parts = [trajectory.prompt, *trajectory.results_with_media]
        check_joins(parts, encoded_results, self.encoder.model, self.isolate)
        return None, encoded_results

    def _call_tools(self, trajectory: Trajectory) -> list[dict[str, Any]]:
        results: list[Any] = []  # pairs of a tool's name, and its result, error or coroutine
        for call in trajectory.calls:
            trajectory.counts["calls"] += 1
            function = call.get("function", {})
            name = function.get("name", call.get("name", "unknown"))
            try:
                if call["type"] != "function":
                    raise ValueError(f"Unsupported tool call type: {call['type']}")
                if name not in trajectory.tools:
                    raise ValueError(f"Tool {name} not found.")
                results.append((name, trajectory.tools[name](**function["arguments"])))
            except Exception as error:
                results.append((name, error))
            except SystemExit as error:
                results.append((name, as_error(error)))
        coroutines = [_settle(result) for _, result in results if inspect.iscoroutine(result)]
        if coroutines:
            awaited_results = iter(asyncio.run_coroutine_threadsafe(_gather(coroutines), self.loop).result())
            results = [
                (name, next(awaited_results) if inspect.iscoroutine(result) else result) for name, result in results
            ]
        row = trajectory.row
        messages = []
        for name, result in results:
            if isinstance(result, EnvironmentFailure):
                raise result
            is_failure = isinstance(result, Exception) or is_error_of_mcp(result)
            if isinstance(result, Exception) and _is_fault(result, trajectory.tools.get(name)):
                trajectory.faults.append(f"the tool {name!r} raised {_described(result)}")
            try:
                content = _content(name, result, row, self.encoder.media_rules)
            except MediaError:
                raise
            except Exception as error:  # the `str` of a result may fail
                is_failure = True
                content = str({"error": f"the result has no text ({type(error).__name__})"})
                if not isinstance(result, Exception):
                    trajectory.faults.append(f"the result of the tool {name!r} has no text ({type(error).__name__})")
            try:
                label = f"row {row}, column '{TOOL_PREFIX}{name!r}'"
                content = checked_texts(
                    content, self.encoder.processor, self.encoder.special_tokens_in_text or "raise", label
                )
            except MediaError as error:
                is_failure = True
                content = self._error_message(error)
                trajectory.faults.append(str(error))
            trajectory.counts["failures"] += is_failure
            messages.append({"role": "tool", "name": name, "content": content})
        return messages

    def _error_message(self, error: MediaError) -> str:
        """Returns the error message for a result that can't be encoded, without the result's control tokens."""
        logger.warning_once(f"Tool result could not be encoded; the model received an error message instead: {error}")
        reason = str(error).encode(errors="replace").decode()
        for token in placeholder_tokens(self.encoder.model, self.encoder.processor):
            reason = reason.replace(token, "")
        return str({"error": checked_texts(reason, self.encoder.processor, "strip", "")})

    def _replace_failed_results(
        self, trajectory: Trajectory, results: list[dict[str, Any]], error: MediaError
    ) -> list[dict[str, Any]]:
        """Replaces the results that have media by an error message, or all results if none has media."""
        with_media = [message for message in results if next(iter_refs(message), None) is not None]
        # The error doesn't tell which result can't be encoded. Without media, the cause is a placeholder in a text
        failed = with_media or results
        trajectory.counts["failures"] += len(failed)
        trajectory.faults += [str(error)] * len(failed)
        content = self._error_message(error)
        return [{**message, "content": content} if message in failed else message for message in results]

    def _sample_turns(self, trajectories: list[Trajectory], idle_prompt: EncodedPrompt) -> None:
        """A rank without results samples `idle_prompt`, to join collectives."""
        prompts = [item.whole or item.prompt for item in trajectories] or [idle_prompt]
        # For each turn: the batch index of its completion, and the results before it (`None` after a new context)
        continuations = [
            (item.index, item.encoded_results[-1][1] if item.encoded_results else None) for item in trajectories
        ]
        self.branches.continuations = continuations
        n_left = [self.max_length - len(item.ids) for item in trajectories]
        tokenizer = tokenizer_of(self.encoder.processor)
        ids, logps = self.complete(prompts, [max(limit, 1) for limit in n_left] or [1])
        for i, trajectory in enumerate(trajectories):
            new_ids = ids[i][: n_left[i]]
            ids_before = trajectory.prompt.input_ids.tolist() + trajectory.ids[trajectory.start :]
            # Messages of tools since the last turn, the newest first
            results = itertools.takewhile(lambda message: message["role"] == "tool", reversed(trajectory.messages))
            start = len(trajectory.ids)
            trajectory.append(new_ids, None if logps is None else logps[i][: n_left[i]], sampled=True)
            if new_ids:
                trajectory.sampled_turns.append(Turn(start, start + len(new_ids), [*results][::-1]))
                trajectory.messages.append(parse_assistant_turn(tokenizer, new_ids, ids_before, trajectory.tools))
                trajectory.counts["unparsed"] += has_unparsed_call(tokenizer, new_ids, trajectory.messages[-1])


def parse_assistant_turn(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], ids_before: list[int], tools: dict[str, Callable]
) -> dict[str, Any]:
    """Returns a sampled turn as a message. Its calls stay text if their arguments are nested too deeply."""
    callables: Any = list(tools.values())
    try:
        message = parse_response(tokenizer, ids, prefix=ids_before, tools=callables)
        # Each round replaces lists and dictionaries by their items, which removes one level of nesting
        nested_values = [message.get("tool_calls")]
        for _ in range(_DEEPEST):
            nested_values = [[*value.values()] if isinstance(value, dict) else value for value in nested_values]
            nested_lists = [value for value in nested_values if isinstance(value, list)]
            nested_values = list(itertools.chain.from_iterable(nested_lists))
        if not nested_values:
            return _with_open_thought(message, tokenizer, ids, ids_before)
    except RecursionError:
        pass
    logger.warning_once(f"A tool call whose arguments are nested more than {_DEEPEST} deep was taken as text.")
    return {"role": "assistant", "content": completion_texts([ids], tokenizer)[0]}


def _with_open_thought(
    message: dict[str, Any], tokenizer: PreTrainedTokenizerBase, ids: list[int], ids_before: list[int]
) -> dict[str, Any]:
    """Adds the thinking tag to a turn whose prompt has opened it, if TRL took a thought that isn't closed as text."""
    if not message["content"] or message.get("tool_calls"):
        return message
    tag = opened_thoughts(torch.tensor(ids_before), tokenizer)
    is_thought = tag != "" and not without_thoughts(tag + completion_texts([ids], tokenizer)[0])
    return {**message, "content": tag + message["content"]} if is_thought else message


def has_unparsed_call(tokenizer: PreTrainedTokenizerBase, ids: list[int], message: dict[str, Any]) -> bool:
    """Returns whether a turn begins a tool call that TRL couldn't parse, and left as text in the message."""
    template = getattr(tokenizer, "response_template", None) or {}
    calls = template.get("fields", {}).get("tool_calls", {})
    pattern = re.escape(calls.get("open", "")) or calls.get("open_pattern", "")
    # The literal characters with which the pattern begins, such as `<tool_call>`
    begin = re.sub(r"^(\(\?:)?((?:\\\W|[^\\()\[\]{}*+?|.^$])*).*", r"\2", pattern, flags=re.DOTALL)
    return begin != "" and not message.get("tool_calls") and re.search(begin, str(tokenizer.decode(ids))) is not None


def first_turns(rollout: Prompted, ids: list[list[int]], processing_class: Processor) -> list[dict[str, Any]]:
    """Returns the first turns of completions as messages, with tool calls if the tokenizer can parse them."""
    tokenizer = tokenizer_of(processing_class)
    if all(getattr(tokenizer, name, None) is None for name in ("response_template", "response_schema")):
        return [{"role": "assistant", "content": text} for text in texts_of(rollout, ids, tokenizer)]
    rows = zip(ids, rollout.prompts, rollout.source.tools, strict=True)
    return [
        parse_assistant_turn(tokenizer, turn_ids, prompt.input_ids.tolist(), tools) for turn_ids, prompt, tools in rows
    ]


def with_one_turn(prompted: Prompted, ids: list[list[int]], processing_class: Processor) -> Prompted:
    """Returns prompts with completions of one turn each: as texts, or as messages if the prompts are messages."""
    source = prompted.source
    completions: list[Any] = []
    if is_conversational({"prompt": source.messages[0]}):
        completions = [[message] for message in first_turns(prompted, ids, processing_class)]
    else:
        completions = texts_of(prompted, ids, tokenizer_of(processing_class))
    return replace(prompted, source=replace(source, ids=ids, completions=completions))


def texts_of(rollout: Prompted, ids: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns completions as texts, which begin with the thinking tag if the prompt has opened it."""
    texts = completion_texts(ids, tokenizer)
    opening_tags = {id(prompt): opened_thoughts(prompt.input_ids, tokenizer) for prompt in rollout.prompts}
    return [opening_tags[id(prompt)] + text for prompt, text in zip(rollout.prompts, texts, strict=True)]


def run_turns(
    rollout: Prompted, ids: list[list[int]], logps: list[list[float | None]] | None, loop: ToolLoop
) -> list[Trajectory]:
    """Continues completions after their first turns, `ids`, until none ends with a tool call."""
    source = rollout.source
    trajectories = [
        Trajectory(
            rollout.prompts[i],
            ids[i],
            [message],
            [*source.messages[i]],
            None if logps is None else logps[i],
            [1] * len(ids[i]),
            contexts=[(source.messages[i], 0)],
            sampled_turns=[Turn(0, len(ids[i]), source.messages[i])],
            failure=source.failures[i],
            environment=source.environments and source.environments[i],
            tools=source.tools[i],
            index=i,
            row=source.row_indices[i],
        )
        for i, message in enumerate(first_turns(rollout, ids, loop.encoder.processor))
    ]
    for trajectory in trajectories:
        trajectory.counts["unparsed"] += has_unparsed_call(
            tokenizer_of(loop.encoder.processor), trajectory.ids, trajectory.messages[0]
        )
    loop.run(trajectories)
    return trajectories


def with_turns(prompted: Prompted, trajectories: Sequence[Trajectory]) -> Prompted:
    """Returns prompts with the completions of trajectories on which [`ToolLoop.run`] has ended."""
    source = replace(
        prompted.source,
        ids=[trajectory.ids for trajectory in trajectories],
        completions=[trajectory.messages for trajectory in trajectories],
        turns=[trajectory.sampled_turns for trajectory in trajectories],
        # The first context is the prompt
        contexts=[[messages for messages, _ in trajectory.contexts[1:]] for trajectory in trajectories],
        failures=[trajectory.failure for trajectory in trajectories],
    )
    return replace(prompted, source=source)


def drawn_turns(prompted: Prompted, drawn: Drawn, trajectories: Sequence[Trajectory]) -> Drawn:
    """Returns the completions of trajectories, where `drawn` has their first turns."""
    masks = [trajectory.mask for trajectory in trajectories]
    # The newest weights, whose version is the batch index, sampled the last token after results
    if drawn.flight is not None:
        has_results = torch.tensor([0 in row for row in masks], device=drawn.flight.versions.device)
        latest: Any = prompted.source.batch_index  # asynchronous sampling numbers its batches
        drawn.flight.versions[has_results, 1] = latest
    has_logps = all(trajectory.logps is not None for trajectory in trajectories)
    logps = [trajectory.logps or [] for trajectory in trajectories] if has_logps else None
    return drawn._replace(ids=[trajectory.ids for trajectory in trajectories], logps=logps, mask=masks)


def prompts_with_results(model: PreTrainedModel, trajectories: Sequence[Trajectory]) -> list[EncodedPrompt]:
    """
    Returns prompts to score trajectories with. If tools returned media, the prompt holds these media as well; if the
    context was rewritten, the prompt holds all contexts.
    """
    return [
        Contexts.of(
            [*trajectory.closed_contexts, scored_prompt(model, trajectory)],
            [*trajectory.context_ends, len(trajectory.ids)],
        )
        for trajectory in trajectories
    ]


def scored_prompt(model: PreTrainedModel, trajectory: Trajectory) -> EncodedPrompt:
    """Returns the prompt for scoring the tokens behind a trajectory's current context."""
    prompt = trajectory.prompt
    whole = trajectory.whole
    return prompt if whole is None else with_media(model, prompt, trajectory.results_with_media, whole)


def _read_messages(
    messages: list[dict[str, Any]], row: int, rules: MediaRules, context_texts: Collection[str]
) -> list[dict[str, Any]]:
    """
    Checks messages that `get_context` returned, and returns them with references in place of new media.
    `context_texts` holds the texts of the conversation.
    """
    are_messages = isinstance(messages, list) and all(
        isinstance(message, dict) and (message.get("content") is not None or message.get("role") == "assistant")
        for message in messages
    )
    if not are_messages or not messages or messages[-1].get("role") in (None, "assistant"):
        raise ValueError(
            f"row {row}: `get_context` returned {shortened(messages)}, which the assistant can't answer; return "
            "messages with `content`, the last one of the user or a tool, or `None` to keep the context."
        )
    # Paths of an environment aren't relative to the folder of rows' media
    rules = replace(rules, media_dir=None)
    path = f"{TOOL_PREFIX}'get_context'"

    def read_content(content: str | list) -> str | list[dict[str, Any]]:
        return as_content(content, "`get_context`", path, row, rules, context_texts, are_lists_blocks=True) or ""

    return [
        message if message.get("content") is None else {**message, "content": read_content(message["content"])}
        for message in messages
    ]


def _without_first_media(messages: list[dict[str, Any]], n: int) -> list[dict[str, Any]]:
    dropped = {id(ref) for ref in itertools.islice(iter_refs(messages), n)}
    return _with_blocks(messages, lambda block: [] if any(id(ref) in dropped for ref in iter_refs(block)) else [block])


def _with_blocks(messages: list[dict[str, Any]], change: Callable[[Any], list]) -> list[dict[str, Any]]:
    new_messages = []
    for message in messages:
        if isinstance(message.get("content"), list):
            message = {**message, "content": sum(map(change, message["content"]), []) or ""}
        new_messages.append(message)
    return new_messages


async def _gather(coroutines: list) -> list[Any]:
    return await asyncio.gather(*coroutines, return_exceptions=True)


async def _settle(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Returns the result of an async tool. An exit, which would end the event loop, becomes an error."""
    try:
        return await coroutine
    except SystemExit as error:
        return as_error(error)


def _texts(messages: list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        content = message["content"]
        blocks = [{"text": content}] if isinstance(content, str) else content
        yield from (block["text"] for block in blocks if isinstance(block.get("text"), str))


def _content(name: str, result: Any, row: int, rules: MediaRules) -> str | list[dict[str, Any]]:
    if isinstance(result, Exception):
        return str({"error": str(result)})
    # The paths of a tool aren't relative to the folder of rows' media
    return as_content(result, f"the tool {name!r}", f"{TOOL_PREFIX}'{name}'", row, replace(rules, media_dir=None))


def _is_fault(error: Exception, tool: Callable | None) -> bool:
    """
    Returns whether an error is the tool's rather than the model's. A `ValueError` is about the model's arguments, as
    is a `TypeError` of the call itself.
    """
    if tool is None or (isinstance(error, ValueError) and not isinstance(error, MediaError)):
        return False
    # The traceback of an error in the call alone ends with the caller
    raised_inside = error.__traceback__ is None or error.__traceback__.tb_next is not None
    return raised_inside or not isinstance(error, TypeError)


def _described(error: Exception) -> str:
    """Returns the type and the text of an error, whose text may fail."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__
