# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encodes rows of a supervised dataset, as prompts and completions for a policy, and as whole sequences."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..data.reading.refs import MediaError, iter_refs
from ..data.reading.rules import DEFAULT_RULES, MediaRules
from ..data.rows.columns import check_decoded, rows_to_messages
from ..data.rows.row import Row
from ..families import family_of, family_of_processor
from .control_tokens import checked_prompt
from .join import continued_field
from .messages import write_chat
from .processors import Processor
from .prompts import EncodedPrompt, all_placeholder_ids, encode_messages, encode_prompt


@dataclass(eq=False)
class SupervisedSequence(EncodedPrompt):
    """A whole row of a supervised dataset."""

    learned: torch.Tensor = field(kw_only=True)  # whether a token is in the loss, `(P,)`

    def first(self, n: int, *, from_end: bool = False) -> "SupervisedSequence":
        """The first or last tokens of a sequence without media, at the first positions."""
        part = slice(-n, None) if from_end else slice(n)
        return replace(
            self,
            input_ids=self.input_ids[part],
            token_fields={name: value[part] for name, value in self.token_fields.items()},
            position_ids=self.position_ids[..., :n],
            learned=self.learned[part],
            mask_cache={},
        )


def encode_sequence(
    row: Mapping[str, Any],
    processing_class: Processor,
    model: PreTrainedModel,
    *,
    completion_only: bool | None = None,
    assistant_only: bool = False,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: Literal["raise", "truncate"] = "raise",
    ignored_media_columns: Collection[str] = (),
    placeholders: Collection[str] = (),
    media_rules: MediaRules = DEFAULT_RULES,
    special_tokens_in_text: Literal["allow", "raise", "strip"] | None = None,
) -> SupervisedSequence:
    """
    Encodes a row with its media and the mask of its learned tokens.

    Args:
        row (`Mapping[str, Any]`):
            Row with `prompt` and `completion`, or with `messages`; and media columns. A text prompt and completion
            without media stay unchanged, except for the end of the completion, which is added. The chat template
            renders all others. Errors name the `number` of a [`~data.rows.row.Row`].
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            The model's processor.
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.
        completion_only (`bool`, *optional*):
            Whether to learn only the completion, by default of rows that have one.
        assistant_only (`bool`, *optional*, defaults to `False`):
            Whether to learn only the assistant's turns, each without the generation prompt.
        template_kwargs (`dict`, *optional*):
            Arguments for `apply_chat_template`.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            See [`encode_prompt`].
        ignored_media_columns (`Collection[str]`, *optional*, defaults to `()`):
            Media columns that aren't for the messages.
        placeholders (`Collection[str]`, *optional*, defaults to `()`):
            The model's placeholder tokens.
        media_rules ([`~data.reading.rules.MediaRules`], *optional*):
            Allowed sources and sizes of media.
        special_tokens_in_text (`str`, *optional*):
            `"allow"`, `"raise"` or `"strip"` control tokens in texts of messages. By default, they warn.

    Returns:
        [`SupervisedSequence`]: The sequence.

    Raises:
        `ValueError`: If a row has nothing to learn, if an assistant message has media, or if the chat template renders
            a turn differently when others follow.
        [`MediaError`]: If a medium can't be decoded or doesn't match its placeholder.
    """
    row_index, template_kwargs = getattr(row, "row_index", 0), dict(template_kwargs or {})
    whole = bool(row.get("messages"))
    if whole and completion_only:
        raise ValueError(
            f"row {row_index}, column 'messages': `completion_only_loss=True` needs `prompt` and `completion`; use "
            "`assistant_only_loss=True` to learn the assistant's turns."
        )
    for column in ("prompt", "completion", "messages"):
        check_decoded(row.get(column), column, row_index)
    if whole:
        chat, answer = list(row["messages"]), []
    else:
        chat, answer = _chat(row, f"row {row_index}", f"row {row_index}")
    try:
        whole_row = Row(row_index, {**row, "prompt": [*chat, *answer]})
        (placed_row,) = rows_to_messages([whole_row], ignored_media_columns, placeholders, rules=media_rules)
        messages = _checked(row, placed_row["prompt"], len(chat), processing_class, special_tokens_in_text, row_index)
        turns = [message for message in messages if message["role"] == "assistant"]
        if (medium := next(iter_refs(turns), None)) is not None:
            raise medium.error("assistant messages are text; move media into the messages before them")
        options: dict[str, Any] = {"audio_overlong": audio_overlong, "row": row_index}
        if whole:
            no_answer = {**template_kwargs, "add_generation_prompt": False}
            before = encode_prompt(messages, processing_class, model, template_kwargs=no_answer, **options)
            ids = []
        else:
            name, end = f"row {row_index}", _tokenizer(processing_class).eos_token or ""  # which TRL adds to text
            halves = messages[: len(chat)], messages[len(chat) :]
            before, ids = _encode_pair(row, *halves, name, processing_class, model, template_kwargs, end, **options)
    except MediaError as error:
        if not whole:
            raise
        raise MediaError(str(error).replace("column 'prompt", "column 'messages")) from error
    _check_text_only(ids, processing_class, model, f"row {row_index}")
    sequence = _followed(before, ids, model)
    sequence.learned[:] = whole or completion_only is False
    sequence.learned[len(before) :] = True
    if assistant_only:
        if _is_text(row) and not before.modalities:
            raise ValueError(f"row {row_index}: `assistant_only_loss=True` needs messages, got text.")
        sequence.learned &= _assistant_mask(messages, sequence, processing_class, model, template_kwargs, options)
    if not sequence.learned[1:].any():
        raise ValueError(f"row {row_index} has nothing to learn: no token counts in the loss.")
    if family_of(model).token_field_fill and sequence.learned[: len(before)].any():
        raise ValueError(
            f"row {row_index}: {model.config.model_type} has bidirectional attention before an answer, so these "
            "tokens can't be learned; give the row as `prompt` and `completion`, and don't set `completion_only_loss`."
        )
    return sequence


def check_answers(processing_class: Processor) -> None:
    """Refuses processors that can't encode supervised rows."""
    if (obstacle := family_of_processor(processing_class).without_answers) is not None:
        name = type(processing_class).__name__
        raise ValueError(f"{name} can't encode supervised rows: {obstacle}; train the model with GRPO, RLOO or PPO.")


def row_labels(row: Mapping[str, Any], completion_only: bool | None = None) -> list[int]:
    """The labels of a tokenized row, -100 on tokens that aren't learned: its `labels`, by its masks, or all tokens."""
    if row.get("labels") is not None:
        return row["labels"]
    names = ["assistant_masks", *(["completion_mask"] if completion_only else [])]
    masks = [row[name] for name in names if row.get(name) is not None]
    return [token if all(bits) else -100 for token, *bits in zip(row["input_ids"], *masks, strict=False)]


def tokenized_sequence(
    row: Mapping[str, Any],
    processing_class: Processor,
    model: PreTrainedModel,
    completion_only: bool | None = None,
) -> SupervisedSequence:
    """
    Encodes a tokenized row of text: its `input_ids`, of which [`row_labels`] are learned.

    Raises:
        `ValueError`: If ids are placeholders of media, if labels differ from the ids, or if all labels are -100.
    """
    name, ids = f"row {getattr(row, 'row_index', 0)}", torch.tensor(row["input_ids"])
    labels = torch.tensor(row_labels(row, completion_only))
    if labels.shape != ids.shape or not ((labels == ids) | (labels == -100)).all():
        raise ValueError(f"{name}, column 'labels': a label must be the token of `input_ids` at its place, or -100.")
    placeholders = all_placeholder_ids(model, processing_class)
    if not placeholders.isdisjoint(row["input_ids"]):
        raise ValueError(f"{name}, column 'input_ids': placeholders of media have no media; give `messages`.")
    # Fields and positions are the same for all texts
    text = encode_prompt("-", processing_class, model)
    first = {field: value[:1] for field, value in text.token_fields.items()}
    start = replace(
        text, input_ids=ids[:1], token_fields=first, position_ids=text.position_ids[..., :1], mask_cache={}
    )
    sequence = _followed(start, row["input_ids"][1:], model)
    sequence.row, sequence.learned = getattr(row, "row_index", 0), labels != -100
    if not sequence.learned[1:].any():
        raise ValueError(f"{name} has nothing to learn: no token counts in the loss.")
    return sequence


def encode_text(text: str, row_index: int, processing_class: Processor, model: PreTrainedModel) -> SupervisedSequence:
    """Encodes a text with its end, tokenized as by TRL; all of it is learned."""
    end = _tokenizer(processing_class).eos_token or ""
    ids = processing_class(text=_ended(text, end))["input_ids"]
    ids = ids[0] if isinstance(processing_class, ProcessorMixin) else ids
    return tokenized_sequence(Row(row_index, {"input_ids": ids}), processing_class, model)


def _followed(prompt: EncodedPrompt, ids: list[int], model: PreTrainedModel) -> SupervisedSequence:
    """A prompt followed by text, without learned tokens yet."""
    n = len(ids)
    return SupervisedSequence(
        input_ids=torch.cat([prompt.input_ids, torch.tensor(ids, dtype=torch.long)]),
        token_fields={
            name: continued_field(model, name, value[None], n)[0] for name, value in prompt.token_fields.items()
        },
        media=prompt.media,
        position_ids=torch.cat([prompt.position_ids, prompt.positions_after(n)], dim=-1),
        modalities=prompt.modalities,
        row=prompt.row,
        learned=torch.zeros(len(prompt) + n, dtype=torch.bool),
    )


def _assistant_mask(
    messages: list,
    sequence: SupervisedSequence,
    processing_class: Processor,
    model: PreTrainedModel,
    template_kwargs: dict,
    options: dict,
) -> torch.Tensor:
    """
    The mask of the assistant's tokens. The template renders the conversation up to each turn. The tokens that media
    add to it depend only on the number of media so far.
    """
    row, n_media = options["row"], len(list(iter_refs(messages)))
    tokenizer, ids = _tokenizer(processing_class), sequence.input_ids.tolist()

    def rendered(n: int, **kwargs: bool) -> list[int]:
        text = write_chat(messages[:n], processing_class, f"row {row}", **{**template_kwargs, **kwargs})
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    added = {n_media: len(ids) - len(rendered(len(messages)))}
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, through = rendered(turn, add_generation_prompt=True), rendered(turn + 1)
        seen = len(list(iter_refs(messages[:turn])))
        if seen not in added:
            answered = {**template_kwargs, "add_generation_prompt": True}
            prefix = encode_messages(messages[:turn], processing_class, model, template_kwargs=answered, **options)
            added[seen] = len(prefix.input_ids) - len(before)
        start, end = len(before) + added[seen], len(through) + added[seen]
        if through[: len(before)] != before or ids[start:end] != through[len(before) :]:
            raise ValueError(
                f"row {row}: the chat template renders message {turn} differently when others follow, so the "
                "assistant's tokens can't be found; pass a `chat_template` that doesn't."
            )
        mask[start:end] = True
    return mask


def encode_supervised(
    rows: Sequence[Mapping[str, Any]],
    processing_class: Processor,
    model: PreTrainedModel,
    end_ids: list[int],
    *,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: Literal["raise", "truncate"] = "raise",
    ignored_media_columns: Collection[str] = (),
    media_rules: MediaRules = DEFAULT_RULES,
    special_tokens_in_text: Literal["allow", "raise", "strip"] | None = None,
) -> tuple[list[EncodedPrompt], torch.Tensor, torch.Tensor]:
    """
    Encodes prompts with their media, and the completions to learn.

    See [`encode_sequence`] for the other arguments.

    Args:
        rows (`list[dict]`):
            Rows with `prompt` and `completion`, or with `messages`, of which the last one, the assistant's, is the
            completion; and media columns. A text prompt and completion without media stay unchanged. The chat template
            renders all others.
        end_ids (`list[int]`):
            Tokens that end a completion. It is cut after the first of them, or the first of this list is appended.

    Returns:
        `tuple`: The prompts, length `B`, the right-padded ids of the completions, `(B, C)`, and their mask.

    Raises:
        `ValueError`: If a row has no completion, if it isn't the assistant's or has media, or if the chat template
            can't render it after the prompt.
        [`MediaError`]: If a medium can't be decoded or doesn't match its placeholder.
    """
    check_answers(processing_class)
    chats = [_chat(row, f"row {index} of `ptx_dataset`", f"row {index}") for index, row in enumerate(rows)]
    placed = rows_to_messages(
        [{**row, "prompt": [*chat, *completion]} for row, (chat, completion) in zip(rows, chats, strict=True)],
        ignored_media_columns,
        rules=media_rules,
    )
    encoded, completions = [], []
    for index, (row, (chat, completion)) in enumerate(zip(rows, chats, strict=True)):
        messages = _checked(row, placed[index]["prompt"], len(chat), processing_class, special_tokens_in_text, index)
        prompt, completion = messages[: len(chat)], messages[len(chat) :]
        medium = next(iter_refs(completion), None)
        if medium is not None:
            raise medium.error("a completion is text; move media into the messages before it")
        name, template = f"row {index} of `ptx_dataset`", dict(template_kwargs or {})
        options: dict[str, Any] = {"audio_overlong": audio_overlong, "row": index}
        before, ids = _encode_pair(row, prompt, completion, name, processing_class, model, template, **options)
        encoded.append(before)
        _check_text_only(ids, processing_class, model, name)
        ends = [i for i, token in enumerate(ids) if token in end_ids]
        completions.append(torch.tensor(ids[: ends[0] + 1] if ends else [*ids, end_ids[0]]))
    padded = pad_sequence(completions, batch_first=True)
    mask = pad_sequence([torch.ones_like(each) for each in completions], batch_first=True)
    return encoded, padded, mask


def _tokenizer(processing_class: Processor) -> PreTrainedTokenizerBase:
    return processing_class.tokenizer if isinstance(processing_class, ProcessorMixin) else processing_class


def _encode_pair(
    columns: Mapping[str, Any],
    prompt: list,
    completion: list,
    name: str,
    processing_class: Processor,
    model: PreTrainedModel,
    template_kwargs: dict[str, Any],
    end: str = "",
    **options: Any,
) -> tuple[EncodedPrompt, list[int]]:
    """Encodes a prompt and its completion: without media, a pair of texts gets its end and no template."""
    if _is_text(columns) and next(iter_refs(prompt), None) is None:
        prompt = before = columns["prompt"]
        whole = before + _ended(columns["completion"], end)
    else:
        before, whole = _rendered(prompt, completion, processing_class, template_kwargs, name)
    encoded = encode_prompt(prompt, processing_class, model, template_kwargs=template_kwargs, **options)
    tokenizer = _tokenizer(processing_class)
    first, both = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (before, whole))
    if both[: len(first)] == first:
        return encoded, both[len(first) :]  # some tokenizers mark the start of a text, which this isn't
    # A token would cross the boundary, unlike in sampled completions
    return encoded, tokenizer(whole.removeprefix(before), add_special_tokens=False)["input_ids"]


def _ended(text: str, end: str) -> str:
    return text if text.endswith(end) else text + end


def _check_text_only(ids: list[int], processing_class: Processor, model: PreTrainedModel, row: str) -> None:
    placeholders = all_placeholder_ids(model, processing_class)
    if not placeholders.isdisjoint(ids):
        found = _tokenizer(processing_class).convert_ids_to_tokens(next(i for i in ids if i in placeholders))
        raise ValueError(f"{row}: the completion contains {found!r}, a placeholder of media; remove it.")


def _checked(
    row: Mapping[str, Any],
    messages: list,
    n: int,
    processing_class: Processor,
    mode: Literal["allow", "raise", "strip"] | None,
    row_index: int,
) -> list:
    """Checks control tokens in the messages of a row, of which the first `n` are its prompt, or in its texts."""
    if _is_text(row) and next(iter_refs(messages), None) is None:
        for column in ("prompt", "completion"):
            checked_prompt(row[column], processing_class, mode, row_index, column)
        return messages
    prompt, completion = messages[:n], messages[n:]
    return [
        *checked_prompt(prompt, processing_class, mode, row_index),
        *checked_prompt(completion, processing_class, mode, row_index, "completion"),
    ]


def _is_text(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)


def _chat(row: Mapping[str, Any], name: str, short: str) -> tuple[list, list]:
    """The messages of the prompt, and those of the completion."""
    prompt, completion, column = row.get("prompt"), row.get("completion"), "completion"
    if row.get("messages"):
        (*prompt, last), column = row["messages"], "messages"
        completion = [last]
    if not prompt or not completion:
        raise ValueError(
            f"{name} has {sorted(key for key in row if row[key] is not None)}; it needs `prompt` and `completion`, or "
            "`messages` with the assistant's answer at the end."
        )
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completion = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    if isinstance(completion[0], dict) and completion[0].get("role") != "assistant":
        raise ValueError(
            f"{short}, column '{column}': the answer to learn must be the assistant's, got one of "
            f"{completion[0].get('role')!r}."
        )
    return prompt, completion


def _rendered(
    prompt: list, completion: list, processing_class: Processor, template_kwargs: dict, row: str
) -> tuple[str, str]:
    """Renders the chat template without and with the completion."""
    if processing_class.chat_template is None and template_kwargs.get("chat_template") is None:
        raise ValueError(
            f"{row}: {type(processing_class).__name__} has no chat template that could write an answer; set "
            "`processing_class.chat_template`."
        )
    before = write_chat(prompt, processing_class, row, add_generation_prompt=True, **template_kwargs)
    whole = write_chat([*prompt, *completion], processing_class, row, **template_kwargs)
    if not whole.startswith(before):
        raise ValueError(
            f"{row}: the chat template renders the prompt differently when an answer follows, so the answer can't be "
            "found; pass a `chat_template` that doesn't."
        )
    return before, whole
