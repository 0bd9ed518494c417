# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Pairs of completions: their checks, media in their answers, and rows for a judge with each pair in both orders."""

import re
from collections.abc import Collection, Mapping
from itertools import groupby, islice
from typing import Any

import numpy as np
from datasets import Dataset, Features, Value, concatenate_datasets

from ...modalities import MODALITIES
from ..reading.refs import MediaError, iter_refs
from ..reading.rules import DEFAULT_RULES, MediaRules
from .batches import Row
from .cells import truth_value
from .columns import as_text, further_keys, has_media, read_messages, rows_to_messages, strip_media
from .labels import with_class_names
from .names import MEDIA_COLUMNS
from .rendered import NO_MARKS, TemplateMarks


JUDGE_TEMPLATE = """\
You compare two answers to a question about what you see or hear. The better answer is right, complete and clear, and \
says nothing that isn't there. Neither the order nor the length of the answers matters.

Question:
{question}

Answer A:
{answer_a}

Answer B:
{answer_b}

Think in <think> </think>, then write which answer is better in <answer> </answer>: A, B or tie."""
_SLOTS = re.compile(r"\{(question|answer_a|answer_b)\}")
# Marks of media in texts, such as `<image>`
MARK = re.compile(rf"<({'|'.join(MODALITIES)})>")
COMPLETIONS = ("chosen", "rejected")
_PAIR_COLUMNS = ("prompt", *COMPLETIONS)
# Column that is true for pairs of equally good completions
TIE = "tie"


def judge_rows(dataset: Dataset, template: str = JUDGE_TEMPLATE) -> Dataset:
    """
    Returns rows that ask a judge which completion of a pair is better, in both orders, for [`preference_reward`].

    Rows `2 * i` and `2 * i + 1` belong to pair `i`, so that a judge gains nothing by a preference for a position.

    Args:
        dataset ([`~datasets.Dataset`]):
            Rows of `prompt`, `chosen`, `rejected` (texts or messages) and media, as for [`MultimodalDPOTrainer`]. A
            column `tie` may say which pairs are equally good.
        template (`str`, *optional*):
            Text of the judge's prompt, in which `{question}` is the pair's prompt with its media, and `{answer_a}`
            and `{answer_b}` are the completions.

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt`, `solution` (`"A"`, `"B"` or `"tie"`), media and the other columns.

    Raises:
        `ValueError`: If the dataset has no pairs, if the template doesn't have each field once, if an answer has
            media, or if the judge would not get all of a message, such as its `reasoning`.

    Example:
    ```python
    dataset = judge_rows(load_preferences("openbmb/RLAIF-V-Dataset"))
    trainer = MultimodalGRPOTrainer(model, [preference_reward, think_format_reward], args, dataset)
    ```
    """
    check_pairs(dataset)
    dataset = with_class_names(dataset, [*_PAIR_COLUMNS, TIE])
    template_parts = _SLOTS.split(template)  # texts and names of slots alternate
    if sorted(template_parts[1::2]) != ["answer_a", "answer_b", "question"]:
        raise ValueError("`template` must contain {question}, {answer_a} and {answer_b}, once each; correct it.")
    columns: dict[str, list] = {"prompt": [], "solution": []}
    pairs = dataset.select_columns([name for name in (*_PAIR_COLUMNS, TIE) if name in dataset.column_names])
    for index, row in enumerate(pairs):
        chats = [read_answer(row[name], name, index) for name in COMPLETIONS]
        check_text_only(chats[0] + chats[1])
        check_all_is_read(read_messages(row["prompt"], "prompt", index), "prompt", index, allowed_keys=("content",))
        for messages, name in zip(chats, COMPLETIONS, strict=True):
            check_all_is_read(messages, name, index, allowed_keys=("tool_calls",))
        # Tags in answers are changed, because they stand for no media, but would be read as placeholders
        answers = [MARK.sub(r"< \1>", as_text(strip_media(chat))) for chat in chats]
        tie = row.get(TIE)
        for better, (first, second) in (("A", answers), ("B", answers[::-1])):
            slots = {
                "question": _prompt_blocks(row["prompt"]),
                "answer_a": [_text_block(first)],
                "answer_b": [_text_block(second)],
            }
            content = [slots[part] if i % 2 else [_text_block(part)] for i, part in enumerate(template_parts) if part]
            columns["prompt"].append([{"role": "user", "content": _join_text_blocks(sum(content, []))}])
            columns["solution"].append("tie" if truth_value(tie, TIE, index) else better)
    has_prompt_blocks = isinstance(pairs[0]["prompt"], list) and isinstance(pairs[0]["prompt"][0]["content"], list)
    features = (
        Features({"prompt": dataset.features["prompt"], "solution": Value("string")}) if has_prompt_blocks else None
    )
    judge_prompts = Dataset.from_dict(columns, features)
    other_columns = dataset.remove_columns([*pairs.column_names, *{"solution"} & {*dataset.column_names}])
    if not other_columns.column_names:
        return judge_prompts
    return concatenate_datasets([judge_prompts, other_columns.select(np.repeat(np.arange(len(dataset)), 2))], axis=1)


def check_pairs(dataset: Dataset) -> None:
    """Raises a `ValueError` for a dataset without pairs."""
    missing = [name for name in _PAIR_COLUMNS if name not in dataset.column_names]
    if missing:
        raise ValueError(
            f"Pairs need the columns `prompt`, `chosen` and `rejected`, but the dataset has {dataset.column_names}; "
            f"add {missing}, or, if both completions contain the prompt, call `dataset.map(trl.extract_prompt)`."
        )
    if len(dataset) == 0:
        raise ValueError("The dataset has no pairs; pass at least one row.")


def is_equal_pair(pair: Mapping[str, Any]) -> bool:
    """Returns whether both completions are the same. With media, they may be equal as text although media differ."""
    return pair["chosen"] == pair["rejected"] and not has_media(pair["chosen"] or "")


def read_answer(
    completion: str | list | None, column: str, row_index: int, rules: MediaRules = DEFAULT_RULES
) -> list[dict[str, Any]]:
    """Returns the messages of a completion. Raises a `ValueError` unless the first message is the assistant's."""
    messages = read_messages(completion, column, row_index, rules, role="assistant")
    role = messages[0]["role"]
    if role != "assistant":
        raise ValueError(
            f"row {row_index}, column '{column}': an answer must be the assistant's, but the role is {role!r}; "
            "correct the role, or remove the row."
        )
    return messages


def check_text_only(messages: list[dict[str, Any]]) -> None:
    """Raises a [`MediaError`] for media in answers."""
    medium = next(iter_refs(messages), None)
    if medium is not None:
        raise medium.error(
            "assistant messages must be text, as only DPO and reward models read media of answers; move it to an "
            "earlier message"
        )


def put_answer_media(
    row: Row,
    ignored: Collection[str] = (),
    placeholders: Collection[str] = (),
    rules: MediaRules = DEFAULT_RULES,
    marks: TemplateMarks = NO_MARKS,
) -> Row:
    """
    Moves the media of a pair's columns into its messages if an answer holds media or placeholders, else returns the
    row itself. Placeholders of `prompt`, `chosen` and `rejected` take them in this order. Other arguments are those of
    [`rows_to_messages`].
    """
    answers = [read_answer(row.get(name), name, row.row_index, rules) for name in COMPLETIONS]
    if next(iter_refs(answers), None) is None:
        return row
    marks.check_raw(row.get("prompt"), "prompt", row.row_index)
    chats = [read_messages(row.get("prompt"), "prompt", row.row_index, rules), *answers]
    [placed_row] = rows_to_messages(
        [Row(row.row_index, {**row, "prompt": sum(chats, [])})], ignored, placeholders, rules
    )
    messages = iter(placed_row["prompt"])
    columns = {name: list(islice(messages, len(chat))) for name, chat in zip(_PAIR_COLUMNS, chats, strict=True)}
    return Row(row.row_index, {name: value for name, value in row.items() if name not in MEDIA_COLUMNS} | columns)


def check_all_is_read(
    messages: list[dict[str, Any]], column: str, row_index: int, allowed_keys: Collection[str] | None = None
) -> None:
    """
    Raises a [`MediaError`] for a block of an answer that is neither text nor media. If `allowed_keys` is set, also
    raises it for a message with a filled key that isn't allowed, see [`~data.rows.columns.further_keys`].
    """
    for m, message in enumerate(messages):
        blocks = message["content"] if column in COMPLETIONS and isinstance(message["content"], list) else ()
        unread_parts = [block["type"] for block in blocks if block["type"] not in ("text", *MODALITIES)]
        # Without `allowed_keys`, `[key]` allows every key
        unread_parts += [key for key in further_keys(message) if key not in (allowed_keys or [key])]
        if unread_parts:
            problem = f"nobody would read {unread_parts[0]!r} of the message; write it as text, or remove it"
            raise MediaError(f"row {row_index}, column '{column}[{m}]': {problem}")


def _prompt_blocks(prompt: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
    blocks = []
    for message in messages:
        content = message["content"] or ""
        blocks += [_text_block(f"{message['role']}: ")] if len(messages) > 1 else []
        blocks += [_text_block(content)] if isinstance(content, str) else content
        blocks += [_text_block("\n")] if message is not messages[-1] else []
    return blocks


def _join_text_blocks(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Joins text blocks that follow each other, because some chat templates strip the text of each block."""
    joined: list[dict[str, Any]] = []
    for is_text, group in groupby(blocks, lambda block: block.get("text") is not None):
        members = [*group]
        joined += [_text_block("".join(block["text"] for block in members))] if is_text else members
    return joined


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
