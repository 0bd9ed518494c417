# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoding of rows of a supervised dataset, as prompts and completions for a policy, and as whole sequences."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from difflib import SequenceMatcher
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import torch
from trl.data_utils import common_prefix_length, extract_prompt

from ..data.reading.refs import MediaError, iter_refs
from ..data.reading.rules import DEFAULT_RULES, MediaRules
from ..data.rows.batches import Row
from ..data.rows.cells import cell_value
from ..data.rows.columns import read_messages, rows_to_messages
from ..data.rows.pairs import COMPLETIONS, check_text_only, put_answer_media, read_answer
from ..families import family_of, family_of_processor
from ..views.views import View
from .conversations import check_joins, encode_continuation
from .join import padded
from .messages import TemplateMarks, check_written, template_marks, write_chat
from .processors import Processor, checked_prompt, tokenizer_of
from .prompts import EncodedPrompt, all_placeholder_ids, encode_messages, encode_prompt
from .sequences import (
    PreferencePair,
    Side,
    SupervisedSequence,
    check_learned,
    divided,
    no_prompt,
    with_common_start,
    with_text,
)
from .tokenized import TextEncoder, with_end


@dataclass(eq=False)
class SupervisedEncoder(TextEncoder):
    """
    Encoder of the rows of a supervised dataset.

    Rows have media columns, and either `prompt` and `completion` or `messages`. If prompt and completion are texts
    without media, they stay unchanged. The chat template renders all other rows.

    Args:
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            The model's processor.
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model.
        template_kwargs (`dict`, *optional*):
            Arguments for `apply_chat_template`.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            See [`encode_prompt`].
        ignored_media_columns (`Collection[str]`, *optional*, defaults to `()`):
            Media columns to leave out of the messages.
        placeholders (`Collection[str]`, *optional*, defaults to `()`):
            The model's placeholder tokens.
        media_rules ([`~data.reading.rules.MediaRules`], *optional*):
            Allowed sources and sizes of media.
        special_tokens_in_text (`str`, *optional*):
            Treatment of control tokens in texts of messages: `"allow"`, `"raise"` or `"strip"`; by default, a warning.

    Raises:
        `ValueError`: If the processor can't encode answers.
    """

    _: KW_ONLY
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    audio_overlong: Literal["raise", "truncate"] = "raise"
    ignored_media_columns: Collection[str] = ()
    placeholders: Collection[str] = ()
    media_rules: MediaRules = DEFAULT_RULES
    special_tokens_in_text: Literal["allow", "raise", "strip"] | None = None

    def __post_init__(self):
        obstacle = family_of_processor(self.processing_class).answer_obstacle
        if obstacle is not None:
            name = type(self.processing_class).__name__
            raise ValueError(
                f"{name} can't encode supervised rows: {obstacle}; train the model with GRPO, RLOO or PPO."
            )
        super().__post_init__()

    @cached_property
    def _marks(self) -> TemplateMarks:
        return template_marks(self.processing_class, self.template_kwargs)

    def read(
        self, row: Row, kind: Literal["sequence", "split", "pair", "completion"], completion_only: bool | None = None
    ) -> list:
        """
        Reads a row as it is encoded, without decoding its media.

        Args:
            row ([`~data.rows.batches.Row`]):
                Row.
            kind (`str`):
                Method that encodes it: [`encode_sequence`] (`"sequence"`), [`encode_pairs`] (`"split"`),
                [`encode_preference`] (`"pair"`) or [`encode_completion`] (`"completion"`).
            completion_only (`bool`, *optional*):
                Argument of [`encode_sequence`].

        Returns:
            `list`: Messages whose media blocks hold [`MediaRef`]s, for a pair those of both completions.
        """
        if kind == "pair":
            return [messages for _, messages, _ in self._read_pair(row).values()]
        if kind == "completion":
            return self._read_completion(row)[1]
        if kind == "split":
            return self._read_split(row, f"row {row.row_index}")[0]
        return self._read_sequence(row, completion_only)[0]

    def encode_sequence(
        self, row: Mapping[str, Any], completion_only: bool | None = None, assistant_only: bool = False
    ) -> SupervisedSequence:
        """
        Encodes a row with its media and the mask of its learned tokens. A text completion gets the EOS token.

        Args:
            row (`Mapping[str, Any]`):
                Row. Errors name its index if it is a [`~data.rows.batches.Row`].
            completion_only (`bool`, *optional*):
                Whether to learn only the completion, by default `True` for rows with a completion.
            assistant_only (`bool`, *optional*, defaults to `False`):
                Whether to learn only the assistant's turns, each without the generation prompt.

        Returns:
            [`SupervisedSequence`]: The sequence.

        Raises:
            `ValueError`: If a row has nothing to learn, if an assistant message has media, or if the chat template
                renders a turn differently when further turns follow.
            [`MediaError`]: If media can't be decoded or don't match their placeholders.
        """
        row = row if isinstance(row, Row) else Row(0, dict(row))
        label = f"row {row.row_index}"
        is_conversation = bool(row.get("messages"))
        messages, n = self._read_sequence(row, completion_only)
        with _naming_column(row):
            if is_conversation:  # the whole conversation takes the place of the prompt
                prompt = self._encode(messages, row, add_generation_prompt=False)
                ids = []
            else:
                prompt = self._encode(_text_or_messages(row, messages[:n]), row)
                prompt, (ids,) = divided(prompt, self._tokenize(row, messages, n, label, self._end))
        sequence = with_text(prompt, ids, self.model)
        # `with_text` marks only the text after the prompt as learned
        sequence.learned[: len(prompt)] = is_conversation or completion_only is False
        if assistant_only:
            if _is_text(row) and not prompt.modalities:
                raise ValueError(
                    f"{label}: `assistant_only_loss=True` needs messages, got text; give messages, or leave the "
                    "option out."
                )
            sequence.learned &= _assistant_mask(self, messages, sequence)
        check_learned(sequence, label)
        if family_of(self.model).token_field_fill and sequence.learned[: len(prompt)].any():
            raise ValueError(
                f"{label}: {self.model.config.model_type} has bidirectional attention before an answer, so tokens "
                "before the answer can't be learned; give the row as `prompt` and `completion`, without "
                "`completion_only_loss=False`."
            )
        return sequence

    def _read_sequence(self, row: Row, completion_only: bool | None = None) -> tuple[list, int]:
        """Returns the messages that [`encode_sequence`] encodes, and the number of the prompt's. Decodes no media."""
        is_conversation = bool(row.get("messages"))
        if is_conversation and completion_only:
            raise ValueError(
                f"row {row.row_index}, column 'messages': `completion_only_loss=True` needs `prompt` and "
                "`completion`; use `assistant_only_loss=True` to learn the assistant's turns."
            )
        if is_conversation:
            read_messages(row["messages"], "messages", row.row_index)
        prompt_messages, completion = _whole_or_split(row, f"row {row.row_index}")
        with _naming_column(row):
            messages = self._messages(row, prompt_messages, completion)
            check_text_only([message for message in messages if message["role"] == "assistant"])
        return messages, len(prompt_messages)

    def encode_pairs(
        self, rows: Sequence[Mapping[str, Any]], end_ids: list[int]
    ) -> tuple[list[EncodedPrompt], torch.Tensor, torch.Tensor]:
        """
        Encodes rows of `ptx_dataset` as pairs of a prompt, with its media, and the completion to learn. For pairs of
        preferences, see [`encode_preference`]. The completion of `messages` is the last message, which must be the
        assistant's.

        Args:
            rows (`Sequence[Mapping]`):
                Rows.
            end_ids (`list[int]`):
                Stop tokens. A completion is cut after its first stop token, or gets `end_ids[0]` if it has none.

        Returns:
            `tuple`: The prompts, length `B`, the right-padded ids of the completions, `(B, C)`, and their mask.

        Raises:
            `ValueError`: If a row has no completion, if the completion isn't the assistant's or has media, or if the
                chat template can't render it after the prompt.
            [`MediaError`]: If media can't be decoded or don't match their placeholders.
        """
        prompts: list[EncodedPrompt] = []
        completions: list[torch.Tensor] = []
        for index, columns in enumerate(rows):
            row = columns if isinstance(columns, Row) else Row(index, dict(columns))
            label = f"row {row.row_index} of `ptx_dataset`"
            messages, n = self._read_split(row, label)
            prompt = self._encode(_text_or_messages(row, messages[:n]), row)
            prompt, (ids,) = divided(prompt, self._tokenize(row, messages, n, label))
            prompts.append(prompt)
            end_indices = [i for i, token in enumerate(ids) if token in end_ids]
            completions.append(torch.tensor(ids[: end_indices[0] + 1] if end_indices else [*ids, end_ids[0]]))
        return prompts, *padded(completions)

    def _read_split(self, row: Row, label: str) -> tuple[list, int]:
        """Returns the messages of a row of `ptx_dataset`, and the number of the prompt's. Decodes no media."""
        prompt_messages, completion = _split_messages(row, label)
        return self._messages(row, prompt_messages, completion), len(prompt_messages)

    def encode_preference(self, row: Row, whole: bool = False) -> PreferencePair:
        """
        Encodes a prompt once, with its media, and the completions `chosen` and `rejected`. Texts get the EOS token.
        In a row without `prompt`, the common start of both completions is the prompt. With `whole`, a row may hold
        tokenized texts instead, in the columns `chosen_ids` and `rejected_ids`.

        Args:
            row ([`~data.rows.batches.Row`]):
                Row.
            whole (`bool`, *optional*, defaults to `False`):
                Whether to tokenize a row without media as two texts, with their common first tokens as the prompt. A
                reward model scores the end of a text, so it needs no boundary between prompt and completion.

        Returns:
            [`PreferencePair`]: The prompt and the completions.

        Raises:
            `ValueError`: If a completion is missing, or isn't the assistant's, or if the chat template can't render it
                after the prompt.
            [`MediaError`]: If media can't be decoded or don't match their placeholders, if a completion has media
                that the model takes only in prompts, or if a completion has media and no text and `whole` is `False`.
        """
        if whole and row.get("chosen_ids") and row.get("rejected_ids"):
            tokenized = (Row(row.row_index, {"input_ids": row[f"{name}_ids"]}) for name in ("chosen", "rejected"))
            return with_common_start(*map(self.encode_tokens, tokenized))
        label = f"row {row.row_index}"
        selections = self._read_pair(row)
        has_media = next(iter_refs([messages for _, messages, _ in selections.values()]), None) is not None
        # Families with `token_field_fill` need the boundary, as token fields differ between prompt and completion
        if whole and not has_media and not family_of(self.model).token_field_fill:
            return with_common_start(
                *(self._encode_text(selected_row, messages) for selected_row, messages, _ in selections.values())
            )
        selected_row, messages, n = selections["chosen"]
        prompt = self._encode(_text_or_messages(selected_row, messages[:n]), selected_row)
        sides: dict[str, Side] = {}
        texts: dict[str, tuple[list[int], list[int]]] = {}
        for column, (selected_row, messages, n) in selections.items():
            if next(iter_refs(messages[n:]), None) is None:
                texts[column] = self._tokenize(selected_row, messages, n, label, self._end)
            else:
                answer = self._encode_answer(prompt, messages, n, column, learns_text_alone=not whole)
                sides[column] = Side(column, answer.input_ids.tolist(), answer)
        prompt, text_ids = divided(prompt, *texts.values())
        sides |= {column: Side(column, ids) for column, ids in zip(texts, text_ids, strict=True)}
        return PreferencePair(**vars(prompt), sides=[sides[column] for column in COMPLETIONS])

    def _read_pair(self, row: Row) -> dict[str, tuple[Row, list, int]]:
        """
        Returns what [`encode_preference`] encodes, by the column of a completion: the row with it, all messages, and
        the number of the prompt's. Decodes no media.
        """
        for column in COMPLETIONS:
            read_messages(row.get(column), column, row.row_index, role="assistant")
        columns = self._with_answer_media(row)
        return {column: self._select_completion(columns, column) for column in COMPLETIONS}

    def _read_completion(self, row: Row) -> tuple[Row, list, int]:
        """Reads a row as [`encode_completion`] does, without decoding its media. Returns as [`read_pair`] does."""
        check_text_only(read_messages(row.get("completion"), "completion", row.row_index, role="assistant"))
        return self._select_completion(row, "completion")

    def encode_completion(self, row: Row) -> PreferencePair:
        """
        Encodes a prompt once, with its media, and its completion. A text gets the EOS token.

        Args:
            row ([`~data.rows.batches.Row`]):
                Row with `prompt` and `completion`.

        Returns:
            [`PreferencePair`]: The prompt and the completion.

        Raises:
            `ValueError`: If the completion is missing, or isn't the assistant's, or if the chat template can't render
                it after the prompt.
            [`MediaError`]: If media can't be decoded or don't match their placeholders, or are in the completion.
        """
        selected_row, messages, n = self._read_completion(row)
        prompt = self._encode(_text_or_messages(selected_row, messages[:n]), selected_row)
        prompt, ids = divided(prompt, self._tokenize(selected_row, messages, n, f"row {row.row_index}", self._end))
        return PreferencePair(**vars(prompt), sides=[Side("completion", ids[0])])

    def n_answer_tokens(self, row: Row, column: str) -> int | None:
        """
        Counts the tokens of a completion without decoding media.

        Args:
            row ([`~data.rows.batches.Row`]):
                Row.
            column (`str`):
                Column of the completion.

        Returns:
            `int` or `None`: Number of tokens, `None` for a completion with media.
        """
        selected_row, messages, n = self._select_completion(row, column)
        if next(iter_refs(messages[n:]), None) is not None:
            return None
        prompt_ids, ids = self._tokenize(selected_row, messages, n, f"row {row.row_index}", self._end)
        return len(ids) - common_prefix_length(prompt_ids, ids)

    def conversation(self, row: Row, answer: str | None = None) -> str | list:
        """
        Returns the prompt of a row, or its whole `messages`, with its media.

        Args:
            row ([`~data.rows.batches.Row`]):
                Row.
            answer (`str`, *optional*):
                For a pair with media, the column of the completion to include after the prompt.

        Returns:
            `str` or `list[dict]`: Text, or messages whose media blocks hold [`MediaRef`]s.
        """
        if row.get("chosen") is not None:
            selected_row, messages, n = self._select_completion(self._with_answer_media(row), answer or "chosen")
            return _text_or_messages(selected_row, messages[: None if answer else n])
        prompt_messages, completion = _whole_or_split(row, f"row {row.row_index}")
        messages = self._messages(row, prompt_messages, completion)
        return _text_or_messages(row, messages[: len(prompt_messages)])

    def encode_view(self, row: Row, view: View) -> EncodedPrompt:
        """
        Encodes the prompt of a row with preferences under a view of its media.

        Args:
            row ([`~data.rows.batches.Row`]):
                Row.
            view ([`~views.View`]):
                The view.

        Returns:
            [`EncodedPrompt`]: The prompt, with the same tokens as without the view.
        """
        return self._encode(self.conversation(row), row, view)

    def _with_answer_media(self, row: Row) -> Row:
        """If a completion has media, all media of the row are in its messages."""
        columns = Row(row.row_index, _with_prompt(row))
        if not columns["prompt"]:
            raise no_prompt(f"row {row.row_index}")
        options = (self.ignored_media_columns, self.placeholders, self.media_rules, self._marks)
        return put_answer_media(columns, *options)

    def _select_completion(self, row: Row, column: str) -> tuple[Row, list, int]:
        columns = _with_prompt(row)
        if not columns["prompt"]:
            raise no_prompt(f"row {row.row_index}")
        selected_row = Row(row.row_index, {**columns, "completion": columns[column], "messages": None})
        prompt_messages, completion = _split_messages(selected_row, f"row {row.row_index}", column)
        messages = self._messages(selected_row, prompt_messages, completion, column)
        return selected_row, messages, len(prompt_messages)

    def _messages(self, row: Row, prompt_messages: list, completion: list, column: str = "completion") -> list:
        """First applies `special_tokens_in_text` to messages; plain text may hold control tokens."""
        n = len(prompt_messages)
        columns = Row(row.row_index, {**row, "prompt": [*prompt_messages, *completion]})
        rows = rows_to_messages([columns], self.ignored_media_columns, self.placeholders, self.media_rules)
        messages = rows[0]["prompt"]
        parts = {"prompt": messages[:n], "completion": messages[n:]}
        is_text = _is_text(row) and next(iter_refs(messages), None) is None
        self._marks.check_row(row, "prompt", row.row_index, self.ignored_media_columns, becomes_messages=not is_text)
        if is_text:
            parts = {name: row[name] for name in parts}
        options = self.processing_class, self.special_tokens_in_text, row.row_index
        source_columns = {"prompt": "prompt", "completion": column}
        parts = {name: checked_prompt(part, *options, source_columns[name]) for name, part in parts.items()}
        if is_text:  # `checked_prompt` leaves plain text unchanged, and no template renders it
            return messages
        messages = [*parts["prompt"], *parts["completion"]]
        template_arguments = self.processing_class, self.template_kwargs
        check_written(messages, *template_arguments, row.row_index, column, first_index=n)
        return messages

    def _encode(
        self, messages: str | list, row: Row, view: View | None = None, **template_kwargs: bool
    ) -> EncodedPrompt:
        return encode_prompt(
            messages,
            self.processing_class,
            self.model,
            template_kwargs={**self.template_kwargs, **template_kwargs},
            audio_overlong=self.audio_overlong,
            view=view,
            row=row.row_index,
        )

    def _encode_text(self, row: Row, messages: list) -> EncodedPrompt:
        if isinstance(_text_or_messages(row, messages), str):
            return self.encode_text(row["prompt"] + row["completion"], row.row_index)
        return self._encode(messages, row, add_generation_prompt=False)

    def _encode_answer(
        self, prompt: EncodedPrompt, messages: list, n: int, column: str, learns_text_alone: bool
    ) -> SupervisedSequence:
        """
        Encodes a completion with media after the prompt, which is the first `n` messages. With `learns_text_alone`,
        a token is learned only if the template also writes it for the completion without its media.
        """
        label = f"row {prompt.row}"
        template = label, self.processing_class, self.template_kwargs
        prompt_text, whole_text = _render(messages, n, *template)
        options: dict[str, Any] = {"template_kwargs": self.template_kwargs, "audio_overlong": self.audio_overlong}
        answer = encode_continuation(
            whole_text.removeprefix(prompt_text),
            messages[n:],
            self.processing_class,
            self.model,
            row=prompt.row,
            **options,
        )
        try:
            check_joins([prompt], answer, self.model)
        except MediaError as error:
            raise MediaError(f"{label}, column '{column}': {error}") from error
        ids = answer.input_ids.tolist()
        learned = torch.ones(len(answer), dtype=torch.bool)
        if learns_text_alone:
            text_blocks = [
                [block for block in message["content"] if block["type"] == "text"] for message in messages[n:]
            ]
            if not any(block["text"].strip() for block in chain.from_iterable(text_blocks)):
                raise MediaError(
                    f"{label}, column '{column}': the answer has media and no text, and DPO trains text alone; train "
                    "a reward model on such rows, or leave them out"
                )
            text_messages = [
                {**message, "content": blocks} for message, blocks in zip(messages[n:], text_blocks, strict=True)
            ]
            answer_text = _render([*messages[:n], *text_messages], n, *template)[1].removeprefix(prompt_text)
            text_ids = self._tokenizer(answer_text, add_special_tokens=False)["input_ids"]
            learned = torch.zeros_like(learned)
            # Text is what both renderings have, in the same order. Only `ids` have placeholders.
            for start, _, size in SequenceMatcher(None, ids, text_ids, autojunk=False).get_matching_blocks():
                learned[start : start + size] = True
        return SupervisedSequence(**vars(answer), learned=learned)

    def _tokenize(self, row: Row, messages: list, n: int, label: str, end: str = "") -> tuple[list[int], list[int]]:
        """
        Returns ids of the prompt, which is the first `n` messages, and of the prompt with its completion. If both are
        texts without media, they are joined without a template, and `end` is added to a completion that lacks it.
        """
        prompt_text = _text_or_messages(row, messages[:n])
        is_text = isinstance(prompt_text, str)
        if is_text:
            whole_text = prompt_text + with_end(row["completion"], end)
        else:
            prompt_text, whole_text = _render(messages, n, label, self.processing_class, self.template_kwargs)
        prompt_ids, ids = (
            self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt_text, whole_text)
        )
        n_common = common_prefix_length(prompt_ids, ids)
        if n_common < len(prompt_ids) and not (is_text and n_common):
            # A template's text ends at a token, into which the completion mustn't reach
            completion_text = whole_text.removeprefix(prompt_text)
            ids = [*prompt_ids, *self._tokenizer(completion_text, add_special_tokens=False)["input_ids"]]
            n_common = len(prompt_ids)
        placeholders = all_placeholder_ids(self.model, self.processing_class)
        token_id = next((i for i in ids[n_common:] if i in placeholders), None)
        if token_id is not None:
            token = self._tokenizer.convert_ids_to_tokens(token_id)
            raise ValueError(f"{label}: the completion contains {token!r}, a placeholder of media; remove it.")
        return prompt_ids, ids


def _assistant_mask(encoder: SupervisedEncoder, messages: list, sequence: SupervisedSequence) -> torch.Tensor:
    """
    Returns the mask of the assistant's tokens, which are those that its turns add to the rendered text. In the
    sequence, a turn starts later by the tokens that earlier media add, computed once for all turns after the same
    media.
    """
    label = f"row {sequence.row}"
    ids = sequence.input_ids.tolist()

    def render(n: int, **options: bool) -> list[int]:
        """Returns the ids of the first `n` messages, in which a medium is one placeholder."""
        text = write_chat(messages[:n], encoder.processing_class, label, **{**encoder.template_kwargs, **options})
        return tokenizer_of(encoder.processing_class)(text, add_special_tokens=False)["input_ids"]

    # Number of tokens that media add, by the number of media
    n_added = {len(list(iter_refs(messages))): len(ids) - len(render(len(messages)))}
    mask = torch.zeros(len(ids), dtype=torch.bool)
    for message_index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        ids_before = render(message_index, add_generation_prompt=True)
        ids_after = render(message_index + 1)
        n_media = len(list(iter_refs(messages[:message_index])))
        if n_media not in n_added:
            prefix = encode_messages(
                messages[:message_index],
                encoder.processing_class,
                encoder.model,
                template_kwargs={**encoder.template_kwargs, "add_generation_prompt": True},
                audio_overlong=encoder.audio_overlong,
                row=sequence.row,
            )
            n_added[n_media] = len(prefix.input_ids) - len(ids_before)
        start = len(ids_before) + n_added[n_media]
        end = len(ids_after) + n_added[n_media]
        if ids_after[: len(ids_before)] != ids_before or ids[start:end] != ids_after[len(ids_before) :]:
            raise ValueError(
                f"{label}: the chat template renders message {message_index} differently when others follow, so "
                "the assistant's tokens can't be found; set a chat template that renders it the same "
                "(`processing_class.chat_template`)."
            )
        mask[start:end] = True
    return mask


@contextmanager
def _naming_column(row: Row) -> Iterator[None]:
    """Names the column `messages` in errors about a prompt, if it stands for the whole conversation of a row."""
    try:
        yield
    except MediaError as error:
        if not row.get("messages"):
            raise
        raise MediaError(str(error).replace("column 'prompt", "column 'messages")) from error


def _with_prompt(row: Row) -> dict[str, Any]:
    """The completions' common start replaces a missing prompt."""
    return dict(row) if row.get("prompt") else extract_prompt(dict(row))


def _is_text(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("prompt"), str) and isinstance(row.get("completion"), str)


def _render(
    messages: list, n: int, label: str, processing_class: Processor, template_kwargs: dict[str, Any]
) -> tuple[str, str]:
    """Returns the first `n` messages, which are the prompt, and all messages, as the chat template writes them."""
    prompt_text = write_chat(messages[:n], processing_class, label, add_generation_prompt=True, **template_kwargs)
    whole_text = write_chat(messages, processing_class, label, **template_kwargs)
    if not whole_text.startswith(prompt_text):
        raise ValueError(
            f"{label}: the chat template renders the prompt differently when an answer follows, so the answer can't "
            "be found; set a chat template that renders it the same (`processing_class.chat_template`)."
        )
    return prompt_text, whole_text


def _text_or_messages(row: Mapping[str, Any], messages: list) -> str | list:
    return row["prompt"] if _is_text(row) and next(iter_refs(messages), None) is None else messages


def _whole_or_split(row: Row, label: str) -> tuple[list, Any]:
    if row.get("messages"):
        return list(row["messages"]), []
    return _split_messages(row, label)


def _split_messages(row: Row, label: str, column: str = "completion") -> tuple[list, Any]:
    prompt = row.get("prompt")
    completion = row.get("completion")
    if row.get("messages"):
        read_messages(row["messages"], "messages", row.row_index)
        *prompt, last_message = row["messages"]
        completion = [last_message]
        column = "messages"
    if not prompt or cell_value(completion) is None or completion == []:
        raise ValueError(
            f"{label} has {sorted(key for key in row if row[key] is not None)}; it needs `prompt` and `completion`, "
            "or `messages` with the assistant's answer at the end."
        )
    read_messages(prompt, "prompt", row.row_index)
    answer = read_answer(completion, column, row.row_index)
    if column not in COMPLETIONS:  # completions of preference pairs may have media
        check_text_only(answer)
    prompt = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    completion = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
    return prompt, completion
