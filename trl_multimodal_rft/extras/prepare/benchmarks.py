# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loaders of published benchmarks of audio, which return rows for the trainers and for `evaluate`."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Audio, Dataset, concatenate_datasets

from ...data.reading.refs import shortened
from ...data.rows.labels import with_class_names
from ...data.rows.load import json_file, load_rows, read_json, required
from ...rewards.letters import without_letters


logger = logging.getLogger(__name__)

# The prompts on which the models of R1-AQA (https://huggingface.co/papers/2503.11197) were trained
CHOICE_TEMPLATE = (
    "{question} Please choose the answer from the following options: {choices}. Output the final answer in <answer> "
    "</answer>."
)
PROBLEM_TEMPLATE = "{problem} Output the final answer in <answer> </answer>."

_AUDIO_PATH_KEYS = ("audio_path", "audio", "audio_id")


def load_mmau(
    path: str | Path,
    split: str = "test",
    *,
    audio_dir: str | Path | None = None,
    template: str = CHOICE_TEMPLATE,
    skip_missing: bool = False,
) -> Dataset:
    """
    Reads [MMAU](https://huggingface.co/papers/2410.19168), multiple-choice questions about speech, sounds and music.

    The layout of https://github.com/Sakshi113/MMAU is a list in JSON whose entries have `id`, `audio_id` (a path such
    as `"./test-mini-audios/<id>.wav"`), `question`, `choices`, `answer` (the text of a choice), `task`, `category`,
    `sub-category`, `difficulty` and `dataset`. The layout of
    https://huggingface.co/datasets/gamma-lab-umd/MMAU-test-mini is a dataset with `context` (audio), `instruction`,
    `choices` and `answer` (with letters, as in `"(A) Man"`) and `other_attributes` (JSON).

    Args:
        path (`str` or `Path`):
            The JSON file, a folder that holds one, or a dataset in a folder or on the Hub, such as
            `"gamma-lab-umd/MMAU-test-mini"`.
        split (`str`, *optional*, defaults to `"test"`):
            Split of a dataset. A JSON file has no splits.
        audio_dir (`str` or `Path`, *optional*):
            Folder in which audio files are looked up by name. By default, paths start from the folder of the JSON
            file.
        template (`str`, *optional*):
            Prompt with `{question}` and `{choices}`, by default the prompt of
            [R1-AQA](https://huggingface.co/papers/2503.11197).
        skip_missing (`bool`, *optional*, defaults to `False`):
            Whether to skip rows whose audio file doesn't exist, with a warning that counts them, instead of raising.

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt` (messages), `audio`, `solution` (the text of the right choice, `None`
        in the test split, which has no answers), `choices`, `id`, `task`, `category`, `sub_category`, `difficulty` and
        `dataset`.

    Raises:
        `FileNotFoundError`: If an audio file doesn't exist. The message names the row.
        `ValueError`: If a row lacks a question, choices or an audio path, or if its answer isn't one of the choices.

    Example:
    ```python
    dataset = load_mmau("MMAU/mmau-test-mini.json")
    result = evaluate(model, processor, dataset, choice_reward, EvaluationConfig(group_by="task"))
    ```
    """
    rows, audio = _read_rows_and_audio(path, split, "mmau-*.json", ("context", "audio"), audio_dir, skip_missing)
    # `other_attributes`, a dictionary or its JSON, holds further columns
    for i, row in enumerate(rows):
        extra = row.get("other_attributes")
        if isinstance(extra, str):
            extra = json.loads(extra)
        rows[i] = {**row, **(extra or {})}

    kept_columns = ("id", "task", "category", "sub-category", "difficulty", "dataset")
    return _assemble_dataset(rows, audio, template, kept_columns, ("question", "instruction"))


def load_avqa(
    path: str | Path,
    split: str = "train",
    *,
    audio_dir: str | Path | None = None,
    template: str = CHOICE_TEMPLATE,
    skip_missing: bool = False,
) -> Dataset:
    """
    Reads AVQA (https://mn.cs.tsinghua.edu.cn/avqa/), multiple-choice questions about the audio of videos, in the
    layout of [R1-AQA](https://huggingface.co/papers/2503.11197).

    The layout of https://github.com/xiaomi-research/r1-aqa is JSON Lines whose entries have `id`, `question_text`,
    `multi_choice`, `answer` (the index of the right choice), `audio_path`, and also `video_name`, `question_relation`,
    `question_type` and `dataset_name`. As in R1-AQA, "video" becomes "audio" in questions.

    See [`load_mmau`] for the arguments and errors. The file may also be a JSON list, and a dataset may have a column
    `audio`.

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt` (messages), `audio`, `solution` (the text of the right choice),
        `choices`, `id`, `video_name`, `question_relation`, `question_type` and `dataset_name`.

    Example:
    ```python
    dataset = load_avqa("AVQA/train_r1aqa_line.json", audio_dir="AVQA/all_audios", skip_missing=True)
    trainer = MultimodalGRPOTrainer(model, [choice_reward, format_reward], args, dataset)
    ```
    """
    rows, audio = _read_rows_and_audio(path, split, "*.json*", ("audio",), audio_dir, skip_missing)
    for index, row in enumerate(rows):
        row["question_text"] = required(row, index, "question_text").replace("video", "audio")
    kept_columns = ("id", "video_name", "question_relation", "question_type", "dataset_name")
    return _assemble_dataset(rows, audio, template, kept_columns, ("question_text",), "multi_choice")


def _read_rows_and_audio(
    path: str | Path,
    split: str,
    pattern: str,
    columns: Sequence[str],
    audio_dir: str | Path | None,
    skip_missing: bool,
) -> tuple[list[dict[str, Any]], Dataset]:
    """Returns rows, and a dataset of their audio, from a column in `columns` or from the files that rows name."""
    file = json_file(path, pattern)
    if file is not None:
        rows = read_json(file)
    else:
        dataset = with_class_names(load_rows(str(path), None, split, streaming=False))
        audio_column = next((name for name in columns if name in dataset.column_names), None)
        if audio_column is not None:
            return list(dataset.remove_columns(audio_column)), dataset.select_columns([audio_column]).rename_columns(
                {audio_column: "audio"}
            )
        rows = list(dataset)
    folder = Path(path) if file is None else file.parent
    audio_files = {}
    for index, row in enumerate(rows):
        path_in_row = required(row, index, *_AUDIO_PATH_KEYS)
        audio_file = folder / path_in_row if audio_dir is None else Path(audio_dir, Path(path_in_row).name)
        if audio_file.is_file():
            audio_files[index] = str(audio_file.absolute())
        elif not skip_missing:
            raise FileNotFoundError(
                f"row {index}: the audio file {audio_file} doesn't exist; pass the folder of the files as "
                "`audio_dir`, or skip such rows with `skip_missing=True`."
            )
    if len(audio_files) < len(rows):
        logger.warning(
            f"{len(rows) - len(audio_files)} of {len(rows)} rows are skipped, as their audio files don't exist."
        )
    if not audio_files:
        raise FileNotFoundError(f"None of the {len(rows)} audio files exists; pass their folder as `audio_dir`.")
    return [rows[index] for index in audio_files], Dataset.from_dict({"audio": list(audio_files.values())})


def _assemble_dataset(
    rows: list[dict[str, Any]],
    audio: Dataset,
    template: str,
    names: Sequence[str],
    question_columns: Sequence[str],
    choice_column: str = "choices",
) -> Dataset:
    columns: dict[str, list[Any]] = {"prompt": [], "solution": [], "choices": []}
    for index, row in enumerate(rows):
        row_choices = required(row, index, choice_column)
        answer = row.get("answer")
        if isinstance(answer, str) and answer:
            # `answer` becomes the index of the right choice, or -1, for which the next check raises
            answer = row_choices.index(answer) if answer in row_choices else -1
        if isinstance(answer, int) and not 0 <= answer < len(row_choices):
            raise ValueError(
                f"row {index}: the answer {shortened(repr(row['answer']))} is none of the choices "
                f"{shortened(row_choices)}; correct the answer or the choices."
            )
        choice_texts = without_letters(row_choices)
        text = template.format(question=required(row, index, *question_columns), choices=choice_texts)
        columns["prompt"].append([{"role": "user", "content": text}])
        columns["solution"].append(choice_texts[answer] if isinstance(answer, int) else None)
        columns["choices"].append(choice_texts)
    prompts = Dataset.from_dict({"prompt": columns.pop("prompt")})
    for name in names:
        if any(name in row for row in rows):
            columns[name.replace("-", "_")] = [row.get(name) for row in rows]
    # Not decoded, since the trainers decode each medium once, at the model's rate
    return concatenate_datasets([prompts, audio, Dataset.from_dict(columns)], axis=1).cast_column(
        "audio", Audio(decode=False)
    )
