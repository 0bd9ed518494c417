# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Published questions about sounds, as rows that the trainers and `evaluate` take."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Audio, Dataset, Features, List, Value, concatenate_datasets

from ..paths import local_path
from .choices import without_letters
from .columns import shortened
from .named import load_rows


logger = logging.getLogger(__name__)

# How R1-AQA asks (https://huggingface.co/papers/2503.11197), so that its models are asked as they were trained
CHOICE_TEMPLATE = (
    "{question} Please choose the answer from the following options: {choices}. Output the final answer in <answer> "
    "</answer>."
)
PROBLEM_TEMPLATE = "{problem} Output the final answer in <answer> </answer>."

# Where the layouts keep a row's audio
_PATHS = ("audio_path", "audio", "audio_id")


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

    Two layouts are read: that of https://github.com/Sakshi113/MMAU, a list in JSON whose entries have `id`, `audio_id`
    (a path such as `"./test-mini-audios/<id>.wav"`), `question`, `choices`, `answer` (the text of a choice), `task`,
    `category`, `sub-category`, `difficulty` and `dataset`; and that of
    https://huggingface.co/datasets/gamma-lab-umd/MMAU-test-mini, a dataset with `context` (audio), `instruction`,
    `choices` and `answer` (with letters, as in `"(A) Man"`) and `other_attributes` (JSON).

    Args:
        path (`str` or `Path`):
            The JSON file, a folder that holds one, or a dataset in a folder or on the Hub, such as
            `"gamma-lab-umd/MMAU-test-mini"`.
        split (`str`, *optional*, defaults to `"test"`):
            Split of a dataset; a JSON file has one.
        audio_dir (`str` or `Path`, *optional*):
            Folder with the audio files, looked up by name. By default paths are those of the JSON file, from its
            folder.
        template (`str`, *optional*):
            Prompt, with `{question}` and `{choices}`. By default that of
            [R1-AQA](https://huggingface.co/papers/2503.11197).
        skip_missing (`bool`, *optional*, defaults to `False`):
            Whether to leave out rows whose audio file isn't there, with a warning that counts them, instead of
            raising.

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt` (messages), `audio`, `solution` (the text of the right choice, `None`
        in the test split, whose answers are withheld), `choices`, `id`, `task`, `category`, `sub_category`,
        `difficulty` and `dataset`.

    Raises:
        `FileNotFoundError`: If an audio file isn't there. The message names the row.
        `ValueError`: If a row lacks a column, or its answer is none of the choices.

    Example:
    ```python
    dataset = load_mmau("MMAU/mmau-test-mini.json")
    result = evaluate(model, processor, dataset, choice_reward, EvaluationConfig(group_by="task"))
    ```
    """
    file = _json_file(path, "mmau-*.json")
    if file is not None:
        rows = _read_json(file)
        audio = [_required(row, index, *_PATHS) for index, row in enumerate(rows)]
        found = _find_files(audio, file.parent, audio_dir, skip_missing)
        rows, audio = [rows[index] for index in found], Dataset.from_dict({"audio": list(found.values())})
    else:
        audio, rows = _without_media(_read_dataset(path, split), "context", "audio")
        if audio is None:
            raise ValueError(
                f"{path} has no column 'context' or 'audio', only {sorted(rows[0])}; is it of another layout?"
            )
        rows = [{**row, **_attributes(row.get("other_attributes"))} for row in rows]
    columns: dict[str, list] = {name: [] for name in ("prompt", "solution", "choices")}
    for index, row in enumerate(rows):
        question = _required(row, index, "question", "instruction")
        given = _required(row, index, "choices")
        choices = without_letters(given)
        answer = row.get("answer") or None
        if answer is not None and answer not in given:
            raise ValueError(
                f"row {index}: the answer {shortened(repr(answer))} is none of the choices {shortened(given)}; "
                "correct either of them."
            )
        columns["prompt"].append(_ask(template.format(question=question, choices=choices)))
        columns["choices"].append(choices)
        columns["solution"].append(None if answer is None else choices[given.index(answer)])
    extras = {"id": "id", "task": "task", "category": "category", "sub-category": "sub_category"}
    extras |= {"difficulty": "difficulty", "dataset": "dataset"}
    return _assemble(columns, _extras(rows, extras), audio)


def load_avqa(
    path: str | Path,
    split: str = "train",
    *,
    audio_dir: str | Path | None = None,
    template: str = CHOICE_TEMPLATE,
    skip_missing: bool = False,
) -> Dataset:
    """
    Reads AVQA (https://mn.cs.tsinghua.edu.cn/avqa/) in the layout of
    [R1-AQA](https://huggingface.co/papers/2503.11197), multiple-choice questions about the sound of videos.

    It is that of https://github.com/xiaomi-research/r1-aqa: JSON Lines whose entries have `id`, `question_text`,
    `multi_choice`, `answer` (the index of the right choice), `audio_path`, and also `video_name`, `question_relation`,
    `question_type` and `dataset_name`. As there, a question about "the video" asks about the audio.

    See [`load_mmau`] for the arguments and errors. The file may also be a list in JSON, and a dataset may have its
    sound in a column `audio`.

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt` (messages), `audio`, `solution` (the text of the right choice),
        `choices`, `id`, `video_name`, `question_relation`, `question_type` and `dataset_name`.

    Example:
    ```python
    dataset = load_avqa("AVQA/train_r1aqa_line.json", audio_dir="AVQA/all_audios", skip_missing=True)
    trainer = MultimodalGRPOTrainer(model, [choice_reward, format_reward], args, dataset)
    ```
    """
    file = _json_file(path, "*.json*")
    if file is not None:
        rows = _read_json(file)
        audio = None
    else:
        audio, rows = _without_media(_read_dataset(path, split), "audio")
    if audio is None:
        paths = [_required(row, index, *_PATHS) for index, row in enumerate(rows)]
        folder = Path(path) if file is None else file.parent
        found = _find_files(paths, folder, audio_dir, skip_missing)
        rows, audio = [rows[index] for index in found], Dataset.from_dict({"audio": list(found.values())})
    columns: dict[str, list] = {name: [] for name in ("prompt", "solution", "choices")}
    for index, row in enumerate(rows):
        question = _required(row, index, "question_text").replace("video", "audio")
        choices = _required(row, index, "multi_choice")
        answer = _required(row, index, "answer")
        if not (isinstance(answer, int) and 0 <= answer < len(choices)):
            raise ValueError(
                f"row {index}: the answer {shortened(repr(answer))} is no index into the choices "
                f"{shortened(choices)}; correct it."
            )
        columns["prompt"].append(_ask(template.format(question=question, choices=choices)))
        columns["choices"].append(choices)
        columns["solution"].append(choices[answer])
    names = ("id", "video_name", "question_relation", "question_type", "dataset_name")
    return _assemble(columns, _extras(rows, {name: name for name in names}), audio)


def _json_file(path: str | Path, pattern: str) -> Path | None:
    """The file with the rows, `None` where `path` is a dataset."""
    path = local_path(str(path)) or Path(path)
    if path.is_file():
        return None if path.suffix == ".parquet" else path
    files = sorted(path.glob(pattern)) if path.is_dir() else []
    if len(files) > 1:
        names = [file.name for file in files]
        raise ValueError(f"{path} holds {names}; name one of them as `path`.")
    return files[0] if files else None


def _read_dataset(path: str | Path, split: str) -> Dataset:
    return load_rows(str(path), None, split, streaming=False)


def _read_json(file: Path) -> list[dict[str, Any]]:
    text = file.read_text(encoding="utf-8")
    if text.lstrip().startswith("["):
        return json.loads(text)
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def _required(row: dict[str, Any], index: int, *names: str) -> Any:
    for name in names:
        if row.get(name) is not None:
            return row[name]
    raise ValueError(
        f"row {index} has no {' or '.join(map(repr, names))}, only {sorted(row)}; is it of another layout?"
    )


def _find_files(
    paths: Sequence[str], folder: Path, audio_dir: str | Path | None, skip_missing: bool
) -> dict[int, str]:
    """Paths of the rows whose file is there, by row."""
    found = {}
    for index, path in enumerate(paths):
        file = folder / path if audio_dir is None else Path(audio_dir, Path(path).name)
        if file.is_file():
            found[index] = str(file.absolute())
        elif not skip_missing:
            raise FileNotFoundError(
                f"row {index}: there is no audio file {file}; pass the folder of the files as `audio_dir`, or leave "
                "out such rows with `skip_missing=True`."
            )
    if len(found) < len(paths):
        logger.warning(f"{len(paths) - len(found)} of {len(paths)} rows are left out, whose audio files aren't there.")
    if not found:
        raise FileNotFoundError(f"None of the {len(paths)} audio files is there; pass their folder as `audio_dir`.")
    return found


def _without_media(dataset: Dataset, *names: str) -> tuple[Dataset | None, list[dict[str, Any]]]:
    """The column of media under the name of ours, as it is stored, and rows of all other columns."""
    name = next((name for name in names if name in dataset.column_names), None)
    if name is None:
        return None, list(dataset)
    media = dataset.select_columns([name])
    return (media if name == names[-1] else media.rename_column(name, names[-1])), list(dataset.remove_columns(name))


def _attributes(value: str | dict | None) -> dict[str, Any]:
    return json.loads(value) if isinstance(value, str) else value or {}


def _ask(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def _extras(rows: list[dict[str, Any]], names: dict[str, str]) -> dict[str, list]:
    """Columns that any row has, under their new names."""
    return {new: [row.get(name) for row in rows] for name, new in names.items() if any(name in row for row in rows)}


def _assemble(columns: dict[str, list], extras: dict[str, list], audio: Dataset) -> Dataset:
    messages = List({"role": Value("string"), "content": Value("string")})
    prompts = Dataset.from_dict({"prompt": columns.pop("prompt")}, Features({"prompt": messages}))
    dataset = concatenate_datasets([prompts, audio, Dataset.from_dict({**columns, **extras})], axis=1)
    # Not decoded, since the trainers decode each medium once, at the model's rate
    return dataset.cast_column("audio", Audio(decode=False))
