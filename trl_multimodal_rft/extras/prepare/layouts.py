# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loaders that convert datasets in the layouts of other tools to rows for the trainers."""

import json
import os
import random
import re
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Audio, Dataset, Features, Image, List, Value, Video, concatenate_datasets

from ...data.reading.refs import MediaRef, rival_keys, shortened
from ...data.rows.batches import Row
from ...data.rows.blocks import FRACTIONAL_OPTIONS, OPTIONS
from ...data.rows.cells import truth_value
from ...data.rows.columns import rows_to_messages
from ...data.rows.features import is_media_feature
from ...data.rows.labels import with_class_names
from ...data.rows.load import json_file, load_rows, read_json, required
from ...data.rows.names import MEDIA_COLUMNS, TEACHER
from ...data.rows.pairs import COMPLETIONS, JUDGE_TEMPLATE, MARK, judge_rows
from ...data.rows.values import file_modality
from ...modalities import MODALITIES
from ...rewards.letters import without_letters
from .benchmarks import PROBLEM_TEMPLATE
from .foreign_rows import conversation, preference_pair, source_of


# The prompt of [`load_avqa_r1`]
OPTIONS_TEMPLATE = "{problem}\n{options}\nOutput the final answer in <answer> </answer>."

# Columns of ms-swift and of LLaMA-Factory that tell whether an answer is desirable
LABELS = ("label", "kto_tag")
# Columns of a conversation in texts, by the column of its question
_TEXT_COLUMNS = {
    "query": ("query", "response", "history"),
    "instruction": ("instruction", "input", "output", "history"),
}

_FEATURES = {"image": Image(), "audio": Audio(decode=False), "video": Video(decode=False)}

# Function of a row and its index that returns columns. The first column has messages, in which `<image>` marks media.
_RowConverter = Callable[[dict[str, Any], int], dict[str, Any]]


def load_conversations(
    path: str | Path,
    split: str = "train",
    *,
    task: Literal["sft", "rl", "dpo", "kto"] = "sft",
    media_dir: str | Path | None = None,
) -> Dataset:
    """
    Reads conversations about media in the layouts of ShareGPT, LLaVA, LLaMA-Factory and ms-swift.

    A row has messages, media, and other columns, which are kept:

    - ShareGPT, as LLaMA-Factory reads it (https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md):
      `conversations` of `from` (`"human"`, `"gpt"`, `"system"`) and `value`, or `messages` of `role` and `content`;
      `images`, `videos` and `audios`, lists; `system`, a text.
    - LLaVA (https://github.com/haotian-liu/LLaVA/blob/main/docs/Finetune_Custom_Data.md): `conversations` as above,
      and `image` (or `video`), one path or a list.
    - ms-swift (https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html): `messages` and media lists
      as above; or `query`, `response` and `history` (pairs), Alpaca's `instruction`, `input` and `output`, or
      `conversation`, a list of `human` and `assistant` texts.
    - Pairs of LLaMA-Factory have `chosen` and `rejected`, messages or texts; pairs of ms-swift have
      `rejected_response` or `rejected_messages`, the alternative to the last message.

    In user and system messages, `<image>`, `<video>` and `<audio>` mark the places of media. Media of a modality
    without any mark go to the start of the first user message. Marks in answers of pairs are places of media, too, if
    the row has one medium for each mark in the prompt, the chosen and the rejected answer, in this order.

    Args:
        path (`str` or `Path`):
            A file (JSON or JSON Lines), a folder that holds one, or a dataset in a folder or on the Hub; or
            `folder/NAME` for an entry `NAME` in the folder's `dataset_info.json` (LLaMA-Factory's or ms-swift's).
        split (`str`, *optional*, defaults to `"train"`):
            Split of a dataset. A file has only one.
        task (`str`, *optional*, defaults to `"sft"`):
            `"sft"` gives whole conversations as `messages`. `"rl"` gives the messages before the last answer as
            `prompt`, and the row's `solution` or else the last answer as `solution`. `"dpo"` gives pairs. `"kto"`
            gives the last answer as `completion`, and the row's `kto_tag` or `label` as `label`.
        media_dir (`str` or `Path`, *optional*):
            Folder that relative paths start from, by default the file's folder.

    Returns:
        [`~datasets.Dataset`]: Rows of `messages`, of `prompt` and `solution`, of `prompt`, `chosen` and `rejected`, or
        of `prompt`, `completion` and `label`, with media columns (`images` and so on) and the other columns.

    Raises:
        `ValueError`: If a row has no conversation in these layouts, if its marks don't match its media, or if a file
            doesn't exist. The message names the row and the column.

    Example:
    ```python
    dataset = load_conversations("llava_v1_5_mix665k.json", media_dir="playground/data")
    ```
    """

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        chat, column = conversation(row, index)
        # These columns are the conversation only in rows without messages. Otherwise they are kept.
        converted_columns.update(_TEXT_COLUMNS.get(column, ()))
        if task == "dpo":
            is_pair = any(row.get(name) for name in ("rejected", "rejected_response", "rejected_messages"))
            label_column = None if is_pair else next((name for name in LABELS if row.get(name) is not None), None)
            if label_column is not None:
                raise ValueError(
                    f"row {index} has one answer and a '{label_column}', so it isn't a pair; convert with 'kto' as "
                    "the task."
                )
            return preference_pair(chat, row, index)
        has_answer = chat[-1]["role"] == "assistant"
        if task in ("sft", "kto") and not has_answer:
            other_task = "dpo" if row.get("chosen") and row.get("rejected") else "rl"
            raise ValueError(
                f"row {index}, column '{column}': the last message is the {chat[-1]['role']}'s, but rows of "
                f"`task='{task}'` end with the assistant's; remove the row, or convert with '{other_task}' as the "
                "task."
            )
        if task == "sft":
            return {"messages": chat}
        if task == "kto":
            return {"prompt": chat[:-1], "completion": chat[-1:], "label": _label_of(row, index)}
        if has_answer and len(chat) == 1:
            raise ValueError(f"row {index}, column '{column}': the conversation has no user turn; remove the row.")
        answer = chat.pop()["content"] if has_answer else None
        solution = row.get("solution")
        return {"prompt": chat, "solution": answer if solution is None else solution}

    # Columns that the result replaces, so they aren't kept
    converted_columns = {"messages", "conversations", "conversation", "system"}
    converted_columns |= (
        {"rejected_response", "rejected_messages"} if task == "dpo" else {*LABELS} if task == "kto" else set()
    )
    path, rename = source_of(path)
    dataset = _load_converted(
        path, split, media_dir, convert, converted_columns, rename, allow_answer_media=task == "dpo"
    )
    if task == "rl" and dataset.features["solution"] == Value("null"):  # no row has an answer
        return dataset.remove_columns("solution")
    return dataset


def _label_of(row: dict[str, Any], index: int) -> bool:
    required(row, index, *LABELS)
    names = [name for name in LABELS if row.get(name) is not None]
    labels = [truth_value(row[name], name, index, is_required=True) for name in names]
    if len({*labels}) > 1:
        raise ValueError(f"row {index}: {' and '.join(map(repr, names))} differ; remove one of them.")
    return labels[0]


def load_verl(path: str | Path, split: str = "train", *, media_dir: str | Path | None = None) -> Dataset:
    """
    Reads prompts with their answers in the layout of
    [verl](https://verl.readthedocs.io/en/latest/preparation/prepare_data.html).

    A row has `prompt`, messages in whose texts `<image>` and `<video>` mark the places of media, `reward_model` with
    the answer as `ground_truth`, and `images` or `videos`, lists in the format of qwen-vl-utils: `{"bytes": ...}`, or
    `{"image": path}` and `{"video": path}` with options such as `max_pixels` or `fps`. Other columns, such as
    `data_source`, are kept.

    See [`load_conversations`] for the arguments and errors. Files may also be Parquet.

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt` (messages with placeholders), `solution`, media columns and the other
        columns.
    """

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        chat, _ = conversation(row, index, ("prompt",))
        return {"prompt": chat, "solution": _ground_truth(row, index)}

    return _load_converted(path, split, media_dir, convert, {"prompt", "reward_model"})


def load_easyr1(
    path: str | Path,
    split: str = "train",
    *,
    prompt_key: str = "problem",
    answer_key: str = "answer",
    template: str = PROBLEM_TEMPLATE,
    media_dir: str | Path | None = None,
) -> Dataset:
    """
    Reads problems with their answers in the layout of [EasyR1](https://github.com/hiyouga/EasyR1#custom-dataset).

    A row has `problem`, in which `<image>` and `<video>` mark the places of media, `answer`, and `images` or `videos`,
    lists of files. Other columns are kept.

    See [`load_conversations`] for the other arguments and the errors. Files may also be Parquet. The returned rows
    have the columns of [`load_verl`]'s rows.

    Args:
        prompt_key (`str`, *optional*, defaults to `"problem"`):
            Column of the problem.
        answer_key (`str`, *optional*, defaults to `"answer"`):
            Column of the answer.
        template (`str`, *optional*):
            Prompt, with `{problem}`.
    """

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        text = template.format(problem=required(row, index, prompt_key))
        return {"prompt": [{"role": "user", "content": text}], "solution": required(row, index, answer_key)}

    return _load_converted(path, split, media_dir, convert, {prompt_key, answer_key})


def load_geo3k(
    path: str | Path = "hiyouga/geometry3k", split: str = "test", *, template: str = PROBLEM_TEMPLATE
) -> Dataset:
    """
    Reads [Geometry3K](https://huggingface.co/papers/2105.04165), geometry problems with figures.

    The layout of https://huggingface.co/datasets/hiyouga/geometry3k is EasyR1's, see [`load_easyr1`]: `images`,
    `problem`, `answer` (a number or an expression in LaTeX), and in the dataset's later version `id`, `choices` and
    `ground_truth` (the letter of the answer). The prompt doesn't contain the choices. The splits are `"train"`,
    `"validation"` and `"test"`. See [`load_conversations`] for the other arguments and the errors.

    Example:
    ```python
    dataset = load_geo3k(split="train")
    trainer = MultimodalGRPOTrainer(model, [accuracy_reward, format_reward], args, dataset)
    ```
    """
    return load_easyr1(path, split, template=template)


def load_avqa_r1(
    path: str | Path,
    split: str = "train",
    *,
    template: str = OPTIONS_TEMPLATE,
    max_pixels: int | None = None,
    media_dir: str | Path | None = None,
) -> Dataset:
    """
    Reads AVQA-R1-6K, the questions about images and their sounds of
    [EchoInk-R1](https://huggingface.co/papers/2505.04623).

    The layout is that of https://huggingface.co/datasets/harryhsing/OmniInstruct_V1_AVQA_R1: a list in JSON whose
    entries have `problem`, `options` (with letters), `solution` (the letter of the answer, in answer tags), `path`
    (`{"image": path, "audio": path}`), `problem_type`, `problem_id` and `data_source`. See [`load_conversations`] for
    the other arguments and the errors.

    Args:
        template (`str`, *optional*):
            Prompt with `{problem}` and `{options}`, one option per line.
        max_pixels (`int`, *optional*):
            Maximum number of pixels of an image, by default the processor's choice.

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt` (messages that begin with the media), `images`, `audios`, `solution`,
        `choices` (without letters, `None` if there are none), `problem_type`, `problem_id` and `data_source`.

    Example:
    ```python
    dataset = load_avqa_r1("AVQA_R1/train/omni_rl_format_train.json")
    trainer = MultimodalGRPOTrainer(model, choice_reward, args, dataset)
    ```
    """
    image_options = {} if max_pixels is None else {"max_pixels": max_pixels}

    def with_media(row: dict[str, Any], index: int) -> dict[str, Any]:
        paths = required(row, index, "path")
        if not isinstance(paths, dict) or {*paths} != {"image", "audio"}:
            raise ValueError(
                f"row {index}, column 'path': {shortened(repr(paths))} doesn't name an image and its sound; write "
                '`{"image": path, "audio": path}`.'
            )
        return {**row, "images": [{"image": paths["image"], **image_options}], "audios": [{"audio": paths["audio"]}]}

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        options = row.get("options") or []
        text = template.format(problem=required(row, index, "problem"), options="\n".join(options))
        return {
            "prompt": [{"role": "user", "content": text}],
            "solution": required(row, index, "solution"),
            "choices": without_letters(options) if options else None,
            **{name: row.get(name) for name in ("problem_type", "problem_id", "data_source")},
        }

    return _load_converted(path, split, media_dir, convert, None, with_media)


def load_preferences(
    path: str | Path,
    split: str = "train",
    *,
    task: Literal["dpo", "judge"] = "dpo",
    template: str | None = None,
    media_dir: str | Path | None = None,
) -> Dataset:
    """
    Reads pairs of answers to questions about images, in the layouts of
    [RLAIF-V](https://huggingface.co/papers/2405.17220) and [MMPR](https://huggingface.co/papers/2411.10442).

    A row has `question`, `chosen`, `rejected` and `image`. https://huggingface.co/datasets/openbmb/RLAIF-V-Dataset
    stores images in its rows; in https://huggingface.co/datasets/OpenGVLab/MMPR-v1.2, `image` is a path, a list of
    paths, or missing. MMPR's `meta.json` names the file of each part, and which share of its rows to use or how often
    to repeat them. Paths such as `MMPR-v1.2/images` start from `media_dir`, the parent of MMPR's folder.

    See [`load_conversations`] for the other arguments and the errors.

    Args:
        task (`str`, *optional*, defaults to `"dpo"`):
            `"dpo"` gives pairs, and `"judge"` gives the rows of [`judge_rows`] for a judge.
        template (`str`, *optional*):
            Prompt of a judge, see [`judge_rows`].

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt`, `chosen` and `rejected` (messages), `image` or `images`, and the other
        columns; for a judge, `prompt` and `solution` in place of the pair.

    Example:
    ```python
    dataset = load_preferences("openbmb/RLAIF-V-Dataset")
    trainer = MultimodalDPOTrainer(model, args=args, train_dataset=dataset)
    ```
    """

    def convert(row: dict[str, Any], index: int) -> dict[str, Any]:
        return _pair(index, *(required(row, index, name) for name in ("question", "chosen", "rejected")))

    # For a row without images, `_read_sampled_rows` gives an empty list, which `with_media` turns into `None`
    read = partial(_read_sampled_rows, folder=Path(media_dir or Path(path).parent))
    dataset = _load_converted(
        path, split, media_dir, convert, {"question"}, lambda row, _: {**row, "image": row.get("image") or None}, read
    )
    return _convert_for_task(dataset, task, template)


def _pair(index: int, question: str, chosen: str, rejected: str) -> dict[str, Any]:
    for value in (question, chosen, rejected):
        if not isinstance(value, str):
            raise ValueError(f"row {index}: {shortened(repr(value))} stands in place of a text; write it as one.")
    answers = {"chosen": chosen, "rejected": rejected}
    completions = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    return {"prompt": [{"role": "user", "content": question}], **completions}


def _convert_for_task(dataset: Dataset, task: Literal["dpo", "judge"], template: str | None) -> Dataset:
    if task == "judge":
        return judge_rows(dataset, template or JUDGE_TEMPLATE)
    if template is not None:
        raise ValueError("`template` is the prompt of a judge; set `task` to 'judge', or leave it out.")
    return dataset


def _read_sampled_rows(file: Path, folder: Path) -> list[dict[str, Any]]:
    """Reads the rows of a file, or of the parts that MMPR's `meta.json` names, sampled or repeated."""
    if file.name != "meta.json":
        return read_json(file)
    rows: list[dict[str, Any]] = []
    for part in json.loads(file.read_text(encoding="utf-8-sig")).values():
        # `repeat_time` below 1 is the share of rows to sample, otherwise the number of copies of each row
        entries = read_json(folder / part["annotation"])
        times = part.get("repeat_time", 1)
        entries = random.Random(0).sample(entries, int(len(entries) * times)) if times < 1 else entries * int(times)
        for row in entries:
            images = row.get("image") or []
            if isinstance(images, str):
                images = [images]
            rows.append({**row, "image": [os.path.join(part["root"], image) for image in images]})
    return rows


def _load_converted(
    path: str | Path,
    split: str,
    media_dir: str | Path | None,
    convert: _RowConverter,
    converted_columns: set[str] | None,
    with_media: Callable[[dict[str, Any], int], dict[str, Any]] = lambda row, index: row,
    read: Callable[[Path], list[dict[str, Any]]] = read_json,
    allow_answer_media: bool = False,
) -> Dataset:
    """
    Returns a dataset of the columns that `convert` returns, the media that `with_media` puts in columns such as
    `images`, and the file's others but for `converted_columns` (`None`: none). With `allow_answer_media`, marks in
    answers of pairs can stand for media.
    """
    rows, media = _read_rows_and_media(path, split, media_dir, with_media, read)
    converted_rows = [convert(row, index) for index, row in enumerate(rows)]
    columns = {name: [row[name] for row in converted_rows] for name in converted_rows[0]}
    chat_column = next(iter(columns))
    have_answer_media = [  # by row
        allow_answer_media and _answers_hold_media(pair, row) for pair, row in zip(converted_rows, rows, strict=True)
    ]
    # Columns of messages, in which marks become blocks
    chat_columns = (chat_column, *COMPLETIONS) if any(have_answer_media) else (chat_column,)
    for index, row in enumerate(rows):
        row_chats = {name: columns[name][index] for name in chat_columns}
        for name, messages in _chats_with_placeholders(row_chats, row, index, have_answer_media[index]).items():
            columns[name][index] = messages
    if converted_columns is not None:
        # A dictionary in place of a set, to keep the order
        other_columns = dict.fromkeys(chain.from_iterable(rows))
        kept_columns = [
            key for key in other_columns if key not in converted_columns | columns.keys() and not _is_media_column(key)
        ]
        columns |= {key: [row.get(key) for row in rows] for key in kept_columns}
    chats = chain.from_iterable(columns[name] for name in chat_columns)
    blocks = chain.from_iterable(message["content"] for message in chain.from_iterable(chats))
    # All blocks get the same keys, because a column of Arrow has one type of struct
    option_names = sorted(set().union(*blocks) - {"type", "text"})
    option_features = {name: Value("float64" if name in FRACTIONAL_OPTIONS else "int64") for name in option_names}
    block_feature = {"type": Value("string"), "text": Value("string"), **option_features}
    datasets = []
    for name, values in columns.items():
        features = (
            Features({name: List({"role": Value("string"), "content": List(block_feature)})})
            if name in chat_columns
            else None
        )
        try:
            datasets.append(Dataset.from_dict({name: values}, features))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(
                f"column '{name}': its values are of several types ({error}); convert them to one type."
            ) from error
    return concatenate_datasets([datasets[0], *media, *datasets[1:]], axis=1)


def _read_rows_and_media(
    path: str | Path, split: str, media_dir: str | Path | None, with_media: Callable, read: Callable
) -> tuple[list[dict[str, Any]], list[Dataset]]:
    """
    Returns rows, and one dataset per column of media. In the rows, these columns hold the file's entries, or the text
    `"stored"` for each medium that is stored in a dataset.
    """
    file = json_file(path, "*.json*")
    source = file or Path(path).expanduser()
    folder = Path(media_dir) if media_dir is not None else source.parent if source.is_file() else source
    media: list[Dataset] = []
    if file is not None:
        rows = read(file)
    else:
        dataset = with_class_names(load_rows(str(path), None, split, streaming=False))
        stored_columns = [_stored_media(dataset, name) for name in dataset.column_names]
        media = [stored for stored in stored_columns if stored is not None]
        rows = list(dataset.remove_columns([*chain.from_iterable(stored.column_names for stored in media)]))
    n_stored = len(media)
    if not rows:
        raise ValueError(f"{path} has no rows; name the file that holds them.")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            type_name = type(row).__name__
            raise ValueError(
                f"row {index} is a {type_name}, not an object with columns; correct the row, or choose another layout."
            )
        if row.get("objects"):
            raise ValueError(
                f"row {index}, column 'objects': boxes depend on the model and aren't converted; write them into the "
                "messages and remove the column."
            )
    rows = [with_media(row, index) for index, row in enumerate(rows)]
    for modality, feature in _FEATURES.items():
        for name in (modality, f"{TEACHER}{modality}"):
            files = [_pop_files(row, name, index, folder) for index, row in enumerate(rows)]
            if any(files):
                media.append(Dataset.from_dict({f"{name}s": files}, Features({f"{name}s": List(feature)})))
    # One text per stored medium, because marks are compared with the number of media
    for stored in media[:n_stored]:
        (name,) = stored.column_names
        cells = stored.data.column(name)
        lengths = pc.list_value_length(cells) if name.endswith("s") else pc.cast(pc.is_valid(cells), pa.int32())
        for row, length in zip(rows, pc.fill_null(lengths, 0).to_pylist(), strict=True):
            row[name] = ["stored"] * length if name.endswith("s") else "stored" if length else None
    return rows, media


def _is_media_column(column: str) -> bool:
    return column.removeprefix(TEACHER) in MEDIA_COLUMNS


def _stored_media(dataset: Dataset, name: str) -> Dataset | None:
    """Returns a column of stored media with the feature of its modality, `None` for other columns and for paths."""
    if not _is_media_column(name):
        return None
    column = dataset.select_columns([name])
    feature = dataset.features[name]
    item_feature = feature.feature if isinstance(feature, List) else feature
    if is_media_feature(item_feature):
        return column
    if not (isinstance(item_feature, dict) and "bytes" in item_feature and item_feature.keys() <= {"bytes", "path"}):
        return None
    media_feature = _FEATURES[MEDIA_COLUMNS[name.removeprefix(TEACHER)]]
    return column.cast_column(name, List(media_feature) if isinstance(feature, List) else media_feature)


def _pop_files(row: dict[str, Any], name: str, index: int, folder: Path) -> list[Any]:
    """Returns media of the columns `name` and `{name}s`, with absolute paths. Moves their entries to `{name}s`."""
    items: list[Any] = []
    files: list[Any] = []
    modality = name.removeprefix(TEACHER)
    for column in (name, f"{name}s"):
        value = row.pop(column, None)
        if not isinstance(value, list):
            value = [] if value is None else [value]
        for item in value:
            items.append(item)
            rivals = rival_keys(item, ("bytes", "path", modality)) if isinstance(item, dict) else None
            if rivals:
                raise ValueError(
                    f"row {index}, column '{column}': has media in both '{rivals[0]}' and '{rivals[1]}'; leave one of "
                    "them."
                )
            path = item.get("path") or item.get(modality) if isinstance(item, dict) else item
            if isinstance(item, dict) and item.get("bytes") is not None:
                files.append(item)
            elif not isinstance(path, str):
                raise ValueError(
                    f"row {index}, column '{column}': {shortened(item)} is no path; give the path of the {modality}, "
                    "or a list of paths."
                )
            elif "://" in path or path.startswith("data:"):
                files.append(path)
            elif not os.path.isfile(folder / path):
                raise ValueError(
                    f"row {index}, column '{column}': the file '{shortened(str(folder / path))}' doesn't exist; pass "
                    "the folder that paths start from as `media_dir`, or remove the row."
                )
            else:
                files.append(str((folder / path).absolute()))
    if items:
        row[f"{name}s"] = items
    return files


def _ground_truth(row: dict[str, Any], index: int) -> Any:
    reward_model = required(row, index, "reward_model")
    return required(reward_model if isinstance(reward_model, dict) else {}, index, "ground_truth")


def _answers_hold_media(pair: dict[str, Any], row: dict[str, Any]) -> bool:
    """Returns whether marks in answers stand for media: the row has one medium of a modality per mark of the pair."""
    chat_texts = [" ".join(message["content"] for message in pair[name]) for name in ("prompt", *COMPLETIONS)]
    # By modality, the counts in the prompt, the chosen and the rejected answer
    mark_counts = {modality: [text.count(f"<{modality}>") for text in chat_texts] for modality in MODALITIES}
    return any(
        any(counts[1:]) and sum(counts) == len(row.get(f"{modality}s") or ())
        for modality, counts in mark_counts.items()
    )


def _chats_with_placeholders(
    chats: dict[str, list[dict[str, str]]], row: dict[str, Any], index: int, answers_hold_media: bool
) -> dict[str, list[dict[str, Any]]]:
    """Returns a row's chats as messages of blocks, with placeholders in the prompt, and in answers that hold media."""

    def split_into_blocks(chat: list[dict[str, str]], mark_pattern: re.Pattern) -> list[dict[str, Any]]:
        # Texts and the modalities of marks alternate
        pieces_by_message = [[*enumerate(mark_pattern.split(message["content"]))] for message in chat]
        contents = [
            [{"type": piece} if i % 2 else {"type": "text", "text": piece} for i, piece in pieces if piece]
            for pieces in pieces_by_message
        ]
        return [{**message, "content": content} for message, content in zip(chat, contents, strict=True)]

    if not answers_hold_media:
        prompt_name, *answer_names = chats
        # The pattern matches nothing, so that a text becomes one block
        answer_chats = {name: split_into_blocks(chats[name], re.compile("(?!)")) for name in answer_names}
        return {prompt_name: _with_placeholders(chats[prompt_name], row, index), **answer_chats}
    placed_messages = iter(_with_placeholders(split_into_blocks(sum(chats.values(), []), MARK), row, index))
    return {name: [*islice(placed_messages, len(chat))] for name, chat in chats.items()}


def _with_placeholders(chat: list[dict[str, Any]], row: dict[str, Any], index: int) -> list[dict[str, Any]]:
    texts = [message["content"] for message in chat if message["role"] != "assistant"]
    joined_text = " ".join(text for text in texts if isinstance(text, str))
    for modality in MODALITIES:
        if f"<{modality}>" in joined_text and not (row.get(modality) or row.get(f"{modality}s")):
            # The medium may be in a column of another name
            first_values = {
                key: value[0] if isinstance(value, list) and value else value for key, value in row.items()
            }
            text_columns = {
                key: text for key, text in first_values.items() if isinstance(text, str) and not _is_media_column(key)
            }
            media_column = next((key for key, text in text_columns.items() if file_modality(text) == modality), None)
            remedy = (
                "add it, or remove the tag from the text"
                if media_column is None
                else f"rename the column '{media_column}'"
            )
            raise ValueError(
                f"row {index}, column '{modality}s': has no {modality} for '<{modality}>' in the text; {remedy}."
            )
    media = {column: row[column] for column in MEDIA_COLUMNS if row.get(column)}
    (placed_row,) = rows_to_messages([Row(index, {"prompt": chat, **media})])
    messages = []
    for message in placed_row["prompt"]:
        content = message["content"]
        blocks = []
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for block in content:
            medium = block.get(block["type"])
            options = _source_options(medium) if isinstance(medium, MediaRef) else {}
            blocks.append({"type": block["type"], "text": block.get("text"), **options})
        messages.append({"role": message["role"], "content": blocks})
    return messages


def _source_options(ref: MediaRef) -> dict[str, Any]:
    """Returns the options in the dictionary of a medium, such as verl's `{"video": path, "fps": 2}`."""
    item = ref.source if isinstance(ref.source, dict) else {}
    options = {k: v for k, v in item.items() if v is not None and k not in ("type", "bytes", "path", ref.modality)}
    unknown = options.keys() - OPTIONS[ref.modality]
    if unknown:
        raise ref.error(
            f"{sorted(unknown)} are no options of a block of {ref.modality}; remove them, or write some of "
            f"{OPTIONS[ref.modality]}."
        )
    return options
