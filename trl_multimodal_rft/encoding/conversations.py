# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Conversations with tools. Results continue a completion, in the text that the chat template renders for them."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from transformers import PreTrainedModel, ProcessorMixin
from trl.data_utils import prepare_multimodal_messages

from ..data.reading.refs import MediaError, iter_refs
from ..families import family_of
from .join import continued_field, join_media
from .messages import VERBATIM, check_written, without_none
from .processors import Processor
from .prompts import EncodedPrompt, all_placeholder_ids, encode_messages, engine_position_ids, prompt_position_ids


@dataclass(eq=False, kw_only=True)
class Conversation(EncodedPrompt):
    """
    A prompt with the tool results of one completion, for scoring, if a result or a completion of a pair has media; its
    `modalities` include theirs. For 2 sampled tokens, a result of 4 and 3 sampled ones, `later` holds the first 6.
    """

    prompt: EncodedPrompt  # one object for all completions of the prompt
    # Token ids, fields, media and positions of the tokens after the prompt, up to the end of the last result
    later: EncodedPrompt
    # Whether attention is causal, so that the prompt is independent of the tokens after it
    is_causal: bool

    @property
    def shared(self) -> EncodedPrompt:
        return self.prompt if self.is_causal else self

    @property
    def parts(self) -> list[EncodedPrompt]:
        return [self.prompt, self.later]

    def positions_after(self, n: int) -> torch.Tensor:
        positions = self.later.position_ids[..., :n]
        return torch.cat([positions, self.later.positions_after(n - positions.size(-1))], dim=-1)

    def field_after(self, name: str, n: int, fill: int) -> torch.Tensor:
        values = self.later.token_fields.get(name, torch.zeros_like(self.later.input_ids))[:n]
        return torch.cat([values, values.new_full((n - len(values),), fill)])


@dataclass(eq=False, kw_only=True)
class Contexts(EncodedPrompt):
    """
    A prompt and the contexts that replaced it within one completion, such as those with only the last few screenshots,
    with the `modalities` of all. With `ends=[3, 8]`, the first 3 tokens follow the first prompt, and the next 5 the
    second.
    """

    prompts: list[EncodedPrompt]  # the first prompt, then the contexts that replaced it
    ends: list[int]  # for each prompt, the index in the completion where the tokens after the prompt end

    @classmethod
    def of(cls, prompts: list[EncodedPrompt], ends: list[int]) -> EncodedPrompt:
        """Returns the contexts, or the prompt itself if no context has replaced it."""
        if len(prompts) == 1:
            return prompts[0]
        inherited: dict[str, Any] = {spec.name: getattr(prompts[0], spec.name) for spec in fields(EncodedPrompt)}
        inherited["modalities"] = frozenset[str]().union(*(prompt.modalities for prompt in prompts))
        return cls(**inherited, prompts=prompts, ends=ends)

    @property
    def shared(self) -> EncodedPrompt:
        return self.prompts[0].shared

    @property
    def parts(self) -> list[EncodedPrompt]:
        return list(itertools.chain.from_iterable(context.parts for context in self.prompts))

    @property
    def contexts(self) -> list[EncodedPrompt]:
        return self.prompts

    def lengths_by_context(self, n: int) -> list[int]:
        ends = [min(end, n) for end in self.ends]
        return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def encode_results(
    history: Sequence[dict[str, Any]],
    results: Sequence[dict[str, Any]],
    processor: Processor,
    model: PreTrainedModel,
    *,
    ends: Collection[str],
    template_kwargs: dict[str, Any],
    audio_overlong: Literal["raise", "truncate"] = "raise",
    keep_decoded: bool = False,
    row: int | None = None,
) -> EncodedPrompt:
    """
    Encodes tool results as the chat template renders them after the assistant's turn. `ends` are the tokens, as text,
    that can close the turn. Raises a `ValueError` if the template renders earlier messages differently once the
    results follow.
    """
    earlier_messages = [*history, stand_in_turn(results)]
    messages = list(results)
    earlier_text = _render(earlier_messages, processor, template_kwargs, False)
    whole_text = _render([*earlier_messages, *messages], processor, template_kwargs, True)
    # Length of the earlier text up to the last token that ends a turn. Many templates write a line break after this
    # token. The model doesn't sample the break, so the results begin with the break.
    stops = [earlier_text.rfind(end) + len(end) for end in ends if end in earlier_text]
    n_kept = max(stops, default=len(earlier_text))
    if whole_text[:n_kept] != earlier_text[:n_kept]:
        raise ValueError(
            "The chat template renders the messages before a tool's result differently once the result follows, so "
            "the sampled completion can't be continued. Use a chat template that renders earlier messages unchanged."
        )
    check_written([*earlier_messages, *messages], processor, template_kwargs, row, first_index=len(earlier_messages))
    options: dict[str, Any] = {"template_kwargs": template_kwargs, "audio_overlong": audio_overlong, "row": row}
    return encode_continuation(whole_text[n_kept:], messages, processor, model, keep_decoded=keep_decoded, **options)


def encode_continuation(
    text: str,
    messages: list[dict[str, Any]],
    processor: Processor,
    model: PreTrainedModel,
    *,
    template_kwargs: dict[str, Any],
    audio_overlong: Literal["raise", "truncate"] = "raise",
    keep_decoded: bool = False,
    row: int | None = None,
) -> EncodedPrompt:
    """Encodes `text`, which the chat template writes for messages after a prompt, with the media of the messages."""
    if not isinstance(processor, ProcessorMixin) and next(iter_refs(messages), None) is None:
        ids = torch.tensor(processor(text, add_special_tokens=False)["input_ids"], dtype=torch.long)
        return EncodedPrompt(ids, {}, {}, ids.new_empty(1, 0), row=row)
    encoded_messages = encode_messages(
        messages,
        processor,
        model,
        template_kwargs={**template_kwargs, **VERBATIM, "continuation": text},
        audio_overlong=audio_overlong,
        keep_decoded=keep_decoded,
        row=row,
        add_special_tokens=False,
    )
    if not encoded_messages.modalities:
        return replace(encoded_messages, media={}, on_device={})  # without blank media of the processor
    family = family_of(model)
    fields_per_token = [*family.token_masks, *family.token_field_fill]
    if fields_per_token:
        raise next(iter_refs(messages)).error(
            f"{model.config.model_type} attends to media through token fields ({', '.join(fields_per_token)}), so "
            "only its prompts can hold media; move the media to the prompt, or remove the row"
        )
    return encoded_messages


def check_joins(
    parts: Sequence[EncodedPrompt], results: EncodedPrompt, model: PreTrainedModel, isolate: str | None = None
) -> None:
    """
    Raises a [`MediaError`] if media of tool results change the padding, and so the features, of earlier media. Checks
    only families whose features depend on padding, or any family if `isolate` is set.
    """
    if (isolate or family_of(model).isolate) is None or not results.media:
        return
    for part in parts:
        for name in part.media.keys() & results.media.keys():
            if part.media[name].shape[1:] != results.media[name].shape[1:]:
                raise MediaError(
                    f"{model.config.model_type} pads media of one conversation to one size, which changes their "
                    "features; give all media of a conversation one size"
                )


def stand_in_turn(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns an assistant message with a call for each tool result, as a stand-in for the sampled turn."""
    calls = [{"type": "function", "function": {"name": result["name"], "arguments": {}}} for result in results]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def keeps_earlier_turns(processor: Processor) -> bool:
    """Returns whether a chat template renders earlier turns unchanged if a tool result of text follows."""
    call = stand_in_turn([{"name": "dummy"}])
    chat = [{"role": "user", "content": "dummy"}, call, {"role": "tool", "name": "dummy", "content": "dummy"}]
    try:
        earlier_text = _render(chat[:2], processor, {}, False)
        whole_text = _render(chat, processor, {}, True)
    except TypeError:  # some templates want arguments as text
        call["tool_calls"][0]["function"]["arguments"] = "{}"
        earlier_text = _render(chat[:2], processor, {}, False)
        whole_text = _render(chat, processor, {}, True)
    return whole_text.startswith(earlier_text)


def _render(
    messages: list[dict[str, Any]], processor: Processor, template_kwargs: dict[str, Any], add_generation_prompt: bool
) -> str:
    messages = without_none(messages)
    if isinstance(processor, ProcessorMixin):
        messages = prepare_multimodal_messages(messages)
    options: dict[str, Any] = {**template_kwargs, "add_generation_prompt": add_generation_prompt}
    return str(processor.apply_chat_template(messages, tokenize=False, **options))


def encode_prefix(
    prompt: EncodedPrompt,
    completion_ids: list[int],
    encoded_results: Sequence[tuple[int, EncodedPrompt]],
    model: PreTrainedModel,
    processor: Processor | None = None,
) -> EncodedPrompt:
    """
    Encodes a prompt, and its completion up to the last tool result, as the prompt of the next turn. `encoded_results`
    holds results with their start in the completion, `[(0, completion)]` for one with media itself. With a
    `processor`, positions after media are those of [`engine_position_ids`].
    """
    completion_length = len(completion_ids)
    ids = torch.cat([prompt.input_ids, torch.tensor(completion_ids, dtype=torch.long)])
    prompt_length = len(prompt)
    starts = [(prompt_length + start, result) for start, result in encoded_results]
    spans = [(slice(start, start + len(result)), result) for start, result in starts]
    media_spans = [(span, result) for span, result in spans if result.media]
    fields = {}
    names = set(prompt.token_fields).union(*(result.token_fields for _, result in spans))
    for name in sorted(names):
        prompt_field = prompt.token_fields.get(name, torch.zeros_like(prompt.input_ids))
        fields[name] = continued_field(model, name, prompt_field[None], completion_length)[0]
        for span, result in media_spans:
            fields[name][span] = result.token_fields.get(name, torch.zeros_like(result.input_ids))
    if not media_spans:
        positions = torch.cat([prompt.position_ids, prompt.positions_after(completion_length)], dim=-1)
        return replace(prompt, input_ids=ids, token_fields=fields, position_ids=positions, mask_cache={})
    media = join_media([prompt, *(result for _, result in media_spans)])
    # Sampled tokens are replaced by the prompt's last token. If the policy sampled a token that begins media, the
    # position rules of some families would expect media after it.
    rule_ids = ids.clone()
    rule_ids[prompt_length:] = prompt.input_ids[-1]
    for span, result in spans:
        rule_ids[span] = result.input_ids
    positions = prompt_position_ids(model, rule_ids, media, fields)
    if processor is not None:
        placeholder_ids = torch.tensor(sorted(all_placeholder_ids(model, processor)))
        positions = engine_position_ids(positions, torch.isin(rule_ids, placeholder_ids))
    return EncodedPrompt(
        ids,
        fields,
        media,
        positions,
        decoded=_decoded_spans([(0, prompt), *starts]),
        modalities=prompt.modalities.union(*(result.modalities for _, result in media_spans)),
        row=prompt.row,
    )


def _decoded_spans(parts: Sequence[tuple[int, EncodedPrompt]]) -> tuple:
    """
    Returns spans and decoded media of a conversation, or `()` if some media weren't kept. An item of `parts` is the
    index of a part's first token, and the encoded part.
    """
    if any(part.modalities and not part.decoded for _, part in parts):
        return ()
    moved = []
    for start, part in parts:
        moved += [(slice(start + span.start, start + span.stop), decoded) for span, decoded in part.decoded]
    return tuple(moved)


def conversation(
    prompt: EncodedPrompt,
    media_results: Sequence[EncodedPrompt],
    prompt_and_completion: EncodedPrompt,
    is_causal: bool,
) -> Conversation:
    """
    Returns the prompt for scoring a completion with media in tool results.

    `media_results` are the results with media. `prompt_and_completion` is encoded by [`encode_prefix`].
    """
    prompt_length = len(prompt)
    later = prompt_and_completion.part(slice(prompt_length, None))
    return Conversation(
        input_ids=prompt.input_ids,
        # A tool result may have fields that the prompt lacks
        token_fields={name: value[:prompt_length] for name, value in prompt_and_completion.token_fields.items()},
        media=prompt.media,
        position_ids=prompt_and_completion.position_ids[..., :prompt_length],
        modalities=prompt_and_completion.modalities,
        row=prompt.row,
        prompt=prompt,
        later=EncodedPrompt(later.input_ids, later.token_fields, join_media(media_results), later.position_ids),
        is_causal=is_causal,
    )
