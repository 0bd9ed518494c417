# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets as other tools keep them, as rows that the trainers take."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Audio, Dataset, Features, Image, List, Value, Video, concatenate_datasets

from ..families import MODALITIES
from .benchmarks import PROBLEM_TEMPLATE, _json_file, _read_dataset, _read_json, _required
from .choices import without_letters
from .columns import FRACTIONAL_OPTIONS, MEDIA_COLUMNS, OPTIONS, rows_to_messages, shortened
from .rows import Row


# As [`load_geo3k`] asks, after the options
OPTIONS_TEMPLATE = "{problem}\n{options}\nOutput the final answer in <answer> </answer>."

_FEATURES = {"image": Image(), "audio": Audio(decode=False), "video": Video(decode=False)}

_ROLES = {"human": "user", "gpt": "assistant", **{role: role for role in ("user", "assistant", "system")}}


def load_conversations(
    path: str | Path,
    split: str = "train",
    *,
    task: Literal["sft", "rl"] = "sft",
    media_dir: str | Path | None = None,
) -> Dataset:
    """
    Reads conversations about media in the layouts of ShareGPT, LLaVA and ms-swift.

    A row holds messages, media, and other columns, which are kept:

    - ShareGPT, as LLaMA-Factory reads it (https://github.com/hiyouga/LLaMA-Factory/blob/main/data/README.md):
      `conversations` of `from` (`"human"`, `"gpt"`, `"system"`) and `value`, or `messages` of `role` and `content`;
      `images`, `videos` and `audios`, lists; `system`, a text.
    - LLaVA (https://github.com/haotian-liu/LLaVA/blob/main/docs/Finetune_Custom_Data.md): `conversations` as above,
      and `image` (or `video`), one path or a list.
    - ms-swift (https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html): `messages` and media lists
      as above; or `query`, `response` and `history` (pairs); or a `conversation` of `human` and `assistant`.

    In what users and systems say, `<image>`, `<video>` and `<audio>` mark the places of media. Media of a kind without
    any mark come first in the first user message.

    Args:
        path (`str` or `Path`):
            A file (JSON or JSON Lines), a folder that holds one, or a dataset in a folder or on the Hub.
        split (`str`, *optional*, defaults to `"train"`):
            Split of a dataset; a file has one.
        task (`str`, *optional*, defaults to `"sft"`):
            `"sft"` keeps whole conversations, as `messages`. `"rl"` takes what comes before the last answer as
            `prompt`, and the row's `solution`, by default that answer, as `solution`.
        media_dir (`str` or `Path`, *optional*):
            Folder that relative paths start from. By default that of the file.

    Returns:
        [`~datasets.Dataset`]: Rows of `messages`, or of `prompt` and `solution`, of media columns (`images` and so
        on) and the other columns.

    Raises:
        `ValueError`: If a row holds no such conversation, its marks don't match its media, or a file isn't there. The
            message names the row and the column.

    Example:
    ```python
    dataset = load_conversations("llava_v1_5_mix665k.json", media_dir="playground/data")
    ```
    """
    rows, media, counts = _read(path, split, media_dir)
    columns: dict[str, list] = {"messages": []} if task == "sft" else {"prompt": [], "solution": []}
    used = {"messages", "conversations", "conversation", "query", "response", "history", "system", "solution"}
    for number, row in enumerate(rows):
        chat, column = _conversation(row, number)
        answered = chat[-1]["role"] == "assistant"
        if task == "sft":
            if not answered:
                raise ValueError(
                    f"row {number}, column '{column}': the last message is the {chat[-1]['role']}'s, where supervised "
                    "rows end with the assistant's; remove the row, or convert for reinforcement with `task='rl'`."
                )
            columns["messages"].append(_placed(chat, counts[number], number))
            continue
        solution = row.get("solution")
        if answered and len(chat) == 1:
            raise ValueError(f"row {number}, column '{column}': the conversation has no user turn; remove the row.")
        columns["prompt"].append(_placed(chat[:-1] if answered else chat, counts[number], number))
        columns["solution"].append(chat[-1]["content"] if solution is None and answered else solution)
    if task == "sft":
        used.remove("solution")
    elif all(solution is None for solution in columns["solution"]):
        del columns["solution"]
    return _assemble(columns, rows, used, media)


def load_verl(path: str | Path, split: str = "train", *, media_dir: str | Path | None = None) -> Dataset:
    """
    Reads prompts with their answers in the layout of
    [verl](https://verl.readthedocs.io/en/latest/preparation/prepare_data.html).

    A row has `prompt`, messages in whose texts `<image>` and `<video>` mark the places of media, `reward_model` with
    the answer as `ground_truth`, and `images` or `videos`, lists of what qwen-vl-utils reads: `{"bytes": ...}`, or
    `{"image": path}` and `{"video": path}` with options such as `max_pixels` or `fps`. Other columns, such as
    `data_source`, are kept.

    See [`load_conversations`] for the arguments and errors. Files may also be Parquet.

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt` (messages in which media have their places), `solution`, media columns
        and the other columns.

    Example:
    ```python
    dataset = load_verl("geo3k/train.parquet")
    ```
    """
    options: list[dict[str, list[dict[str, Any]]]] = []  # of the media of each row, by kind

    def with_media(number: int, row: dict[str, Any]) -> dict[str, Any]:
        options.append({kind: _media_options(row, kind, number) for kind in MODALITIES})
        return row

    rows, media, counts = _read(path, split, media_dir, with_media)
    names = sorted({name for row in options for each in row.values() for given in each for name in given})
    columns: dict[str, list] = {"prompt": [], "solution": []}
    for number, row in enumerate(rows):
        chat, _ = _conversation(row, number, ("prompt",))
        placed = _placed(chat, counts[number], number)
        given = {kind: iter(each) for kind, each in options[number].items()}
        for block in (block for message in placed for block in message["content"]):
            block.update(dict.fromkeys(names) | next(given.get(block["type"], iter(())), {}))
        answer = _required(row, number, "reward_model")
        columns["prompt"].append(placed)
        columns["solution"].append(_required(answer if isinstance(answer, dict) else {}, number, "ground_truth"))
    return _assemble(columns, rows, {"prompt", "reward_model"}, media, names)


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

    See [`load_conversations`] for the other arguments and the errors. Files may also be Parquet.

    Args:
        prompt_key (`str`, *optional*, defaults to `"problem"`):
            Column of the problem.
        answer_key (`str`, *optional*, defaults to `"answer"`):
            Column of the answer.
        template (`str`, *optional*):
            Prompt, with `{problem}`.

    Returns:
        [`~datasets.Dataset`]: Rows as those of [`load_verl`].

    Example:
    ```python
    dataset = load_easyr1("hiyouga/geometry3k", split="train")
    ```
    """
    rows, media, counts = _read(path, split, media_dir)
    columns: dict[str, list] = {"prompt": [], "solution": []}
    for number, row in enumerate(rows):
        asked = template.format(problem=_required(row, number, prompt_key))
        columns["prompt"].append(_placed([{"role": "user", "content": asked}], counts[number], number))
        columns["solution"].append(_required(row, number, answer_key))
    return _assemble(columns, rows, {prompt_key, answer_key}, media)


def load_geo3k(
    path: str | Path = "hiyouga/geometry3k", split: str = "test", *, template: str = PROBLEM_TEMPLATE
) -> Dataset:
    """
    Reads [Geometry3K](https://huggingface.co/papers/2105.04165), geometry problems with figures.

    The layout is that of https://huggingface.co/datasets/hiyouga/geometry3k, which is EasyR1's, see [`load_easyr1`]:
    `images` (a list), `problem`, `answer` (a number or an expression in LaTeX), and in its later version `id`,
    `choices` and `ground_truth` (the letter of the answer). The prompt doesn't tell the choices.

    Args:
        path (`str` or `Path`, *optional*, defaults to `"hiyouga/geometry3k"`):
            The dataset, on the Hub or in a folder.
        split (`str`, *optional*, defaults to `"test"`):
            `"train"`, `"validation"` or `"test"`.
        template (`str`, *optional*):
            Prompt, with `{problem}`.

    Example:
    ```python
    dataset = load_geo3k(split="train")
    trainer = MultimodalGRPOTrainer(model, [accuracy_reward, format_reward], args, dataset)
    ```
    """
    return load_easyr1(path, split, template=template)


def load_video_r1(
    path: str | Path,
    split: str = "train",
    *,
    task: Literal["sft", "rl"] = "rl",
    template: str = OPTIONS_TEMPLATE,
    nframes: int | None = None,
    max_pixels: int | None = None,
    media_dir: str | Path | None = None,
) -> Dataset:
    """
    Reads [Video-R1](https://huggingface.co/papers/2503.21776), questions about videos and images.

    The layout is that of https://huggingface.co/datasets/Video-R1/Video-R1-data: a list in JSON whose entries have
    `problem`, `options` (with letters, empty where nothing is to be chosen), `solution` (the answer, or its letter, in
    answer tags), `path`, `data_type` (`"video"` or `"image"`), `problem_type`, `problem_id` and `data_source`; those
    for supervised training also `process`, the thoughts before the solution.

    See [`load_conversations`] for the other arguments and the errors.

    Args:
        task (`str`, *optional*, defaults to `"rl"`):
            `"rl"` gives `prompt` and `solution`, `"sft"` gives `messages` whose answer is `process` and `solution`.
        template (`str`, *optional*):
            Prompt, with `{problem}` and `{options}`, one in each line.
        nframes (`int`, *optional*):
            Frames of each video that the model gets. By default, its processor's choice.
        max_pixels (`int`, *optional*):
            Most pixels of an image, and of a frame. By default, the processor's.

    Returns:
        [`~datasets.Dataset`]: Rows of `prompt` (messages that begin with the medium), `videos`, `images`, `solution`,
        `choices` (without letters, `None` where there are none), `problem_type`, `problem_id` and `data_source`; or of
        `messages` instead of prompt, solution and choices.

    Example:
    ```python
    dataset = load_video_r1("Video-R1-data/Video-R1-260k.json")
    dataset = dataset.filter(lambda kind: kind == "multiple choice", input_columns="problem_type")
    ```
    """

    def with_media(number: int, row: dict[str, Any]) -> dict[str, Any]:
        kind = _required(row, number, "data_type")
        if kind not in ("image", "video"):
            raise ValueError(f"row {number}, column 'data_type': {kind!r} is neither 'video' nor 'image'; correct it.")
        return {**row, f"{kind}s": [_required(row, number, "path")]}

    rows, media, counts = _read(path, split, media_dir, with_media)
    names = ("prompt", "solution", "choices") if task == "rl" else ("messages",)
    columns: dict[str, list] = {name: [] for name in names}
    for number, row in enumerate(rows):
        options = row.get("options") or []
        asked = template.format(problem=_required(row, number, "problem"), options="\n".join(options))
        chat, solution = [{"role": "user", "content": asked}], _required(row, number, "solution")
        if task == "sft":
            chat.append({"role": "assistant", "content": f"{_required(row, number, 'process')}\n{solution}"})
        placed = _placed(chat, counts[number], number)
        for block in placed[0]["content"]:
            if nframes is not None:
                block["nframes"] = nframes if block["type"] == "video" else None
            if max_pixels is not None:
                block["max_pixels"] = max_pixels if block["type"] != "text" else None
        if task == "sft":
            columns["messages"].append(placed)
            continue
        columns["prompt"].append(placed)
        columns["solution"].append(solution)
        columns["choices"].append(without_letters(options) if options else None)
    rows = [{key: row.get(key) for key in ("problem_type", "problem_id", "data_source")} for row in rows]
    given = {"nframes": nframes, "max_pixels": max_pixels}
    return _assemble(columns, rows, set(), media, [name for name, value in given.items() if value is not None])


def _read(
    path: str | Path, split: str, media_dir: str | Path | None, with_media=lambda number, row: row
) -> tuple[list[dict[str, Any]], list[Dataset], list[dict[str, int]]]:
    """Rows without their media, columns of media, and how many media of which column each row has."""
    file = _json_file(path, "*.json*")
    place = file or Path(path).expanduser()
    folder = Path(media_dir) if media_dir is not None else place.parent if place.is_file() else place
    stored = []
    if file is not None:
        rows = _read_json(file)
    else:
        dataset = _read_dataset(path, split)
        names = [name for name in dataset.column_names if name in MEDIA_COLUMNS and _is_stored(dataset.features[name])]
        stored = [_cast(dataset, name) for name in names]
        rows = list(dataset.remove_columns(names))
    if not rows:
        raise ValueError(f"{path} has no rows; is it another file that holds them?")
    rows = [with_media(number, _checked(row, number)) for number, row in enumerate(rows)]
    counts: list[dict[str, int]] = [{} for _ in rows]
    for column in stored:
        (name,) = column.column_names
        array = column.data.column(name)
        numbers = pc.list_value_length(array) if name.endswith("s") else pc.cast(pc.is_valid(array), pa.int32())
        for count, number in zip(counts, pc.fill_null(numbers, 0).to_pylist(), strict=True):
            count[name] = number
    media = []
    for kind, feature in _FEATURES.items():
        values = [_files(row, kind, number, folder) for number, row in enumerate(rows)]
        if any(values):
            media.append(Dataset.from_dict({f"{kind}s": values}, Features({f"{kind}s": List(feature)})))
            for count, value in zip(counts, values, strict=True):
                count[f"{kind}s"] = len(value)
    return [{key: row[key] for key in row if key not in MEDIA_COLUMNS} for row in rows], stored + media, counts


def _checked(row: Any, number: int) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"row {number} is a {type(row).__name__}, not an object with columns; is it another layout?")
    if row.get("objects"):
        raise ValueError(
            f"row {number}, column 'objects': boxes depend on the model, and aren't converted; write them into the "
            "messages, and remove the column."
        )
    return row


def _is_stored(feature: Any) -> bool:
    """Whether a column holds media, not paths."""
    feature = feature.feature if isinstance(feature, List) else feature
    return isinstance(feature, (Audio, Image, Video)) or (
        isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}
    )


def _cast(dataset: Dataset, name: str) -> Dataset:
    """A column of media as it is stored, whose feature says so."""
    column = dataset.select_columns([name])
    feature = column.features[name]
    if isinstance(feature, dict) or (isinstance(feature, List) and isinstance(feature.feature, dict)):
        own = _FEATURES[MEDIA_COLUMNS[name]]
        return column.cast_column(name, List(own) if isinstance(feature, List) else own)
    return column


def _files(row: dict[str, Any], kind: str, number: int, folder: Path) -> list[Any]:
    """The media of a kind that a row names."""
    found: list[Any] = []
    for column in (kind, f"{kind}s"):
        value = row.get(column)
        for item in value if isinstance(value, list) else [] if value is None else [value]:
            path = item.get("path") or item.get(kind) if isinstance(item, dict) else item
            if isinstance(item, dict) and item.get("bytes") is not None:
                found.append(item)
            elif not isinstance(path, str):
                raise ValueError(
                    f"row {number}, column '{column}': {shortened(item)} is no path; give the path of the {kind}, or "
                    "a list of paths."
                )
            elif "://" in path or path.startswith("data:"):
                found.append(path)
            elif not os.path.isfile(folder / path):
                raise ValueError(
                    f"row {number}, column '{column}': there is no file '{shortened(str(folder / path))}'; name the "
                    "folder that paths start from as `media_dir`, or remove the row."
                )
            else:
                found.append(str((folder / path).absolute()))
    return found


def _media_options(row: dict[str, Any], kind: str, number: int) -> list[dict[str, Any]]:
    """The options of the media of a kind, which qwen-vl-utils reads from the same block."""
    found = []
    for i, item in enumerate(row.get(f"{kind}s") or ()):
        others = item.items() if isinstance(item, dict) else ()
        found.append({k: v for k, v in others if v is not None and k not in ("type", "bytes", "path", kind)})
        unknown = found[-1].keys() - OPTIONS[kind]
        if unknown:
            raise ValueError(
                f"row {number}, column '{kind}s[{i}]': {sorted(unknown)} are no options of a block of {kind}; remove "
                f"them, or write some of {OPTIONS[kind]}."
            )
    return found


def _conversation(
    row: dict[str, Any], number: int, columns: Sequence[str] = ("messages", "conversations", "conversation", "query")
) -> tuple[list[dict[str, str]], str]:
    """The messages of a row, and the column that they come from."""
    column = next((name for name in columns if row.get(name)), columns[-1])
    if column == "query":
        pairs = [*(row.get("history") or ()), [_required(row, number, "messages", "conversations", "query"), None]]
        pairs[-1][1] = row.get("response")
        turns: Iterable = [
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
            if text is not None
        ]
    else:
        turns = _required(row, number, column)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise ValueError(
                f"row {number}, column '{column}': {shortened(repr(turns))} is no list of messages; is it "
                "of another layout?"
            )
    chat = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for place, turn in enumerate(turns):
        turn = {key: value for key, value in turn.items() if value is not None}
        if "human" in turn:
            chat += [{"role": _ROLES.get(key, key), "content": text} for key, text in turn.items()]
        else:
            role = turn.get("from", turn.get("role"))
            chat.append({"role": _ROLES.get(role, role), "content": turn.get("value", turn.get("content"))})
        if chat[-1]["role"] not in _ROLES.values() or not isinstance(chat[-1]["content"], str):
            raise ValueError(
                f"row {number}, column '{column}[{place}]': {shortened(turn)} is no text of a user, an assistant "
                "or a system; write it as one (calls of tools and blocks aren't converted), or remove the row."
            )
    return chat, column


def _placed(chat: Sequence[Mapping[str, str]], counts: dict[str, int], number: int) -> list[dict[str, Any]]:
    """Messages of blocks, with one for each medium in its place."""
    row: dict[str, Any] = {"prompt": [dict(message) for message in chat]}
    for column, count in counts.items():  # only their number counts
        row[column] = ["it"] * count if column.endswith("s") else "it" if count else None
    words = " ".join(message["content"] for message in chat if message["role"] != "assistant")
    for kind in MODALITIES:
        if f"<{kind}>" in words and not (row.get(kind) or row.get(f"{kind}s")):
            raise ValueError(
                f"row {number}, column '{kind}s': there is none for '<{kind}>' in the text; add it, or write the text "
                "without it."
            )
    (placed,) = rows_to_messages([Row(number, row)])
    messages = []
    for message in placed["prompt"]:
        content = message["content"]
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        messages.append(
            {
                "role": message["role"],
                "content": [{"type": block["type"], "text": block.get("text")} for block in blocks],
            }
        )
    return messages


def _assemble(
    columns: dict[str, list],
    rows: list[dict[str, Any]],
    used: set[str],
    media: Sequence[Dataset],
    options: Sequence[str] = (),
) -> Dataset:
    """The columns of messages, with the options of their blocks, then media, then all others."""
    numbers = {name: Value("float64" if name in FRACTIONAL_OPTIONS else "int64") for name in options}
    block = {"type": Value("string"), "text": Value("string"), **numbers}
    messages = List({"role": Value("string"), "content": List(block)})
    parts = []
    for name in ("prompt", "messages"):
        if name in columns:
            parts.append(Dataset.from_dict({name: columns.pop(name)}, Features({name: messages})))
    extras = {key: None for row in rows for key in row if key not in used and key not in columns}
    for name, values in {**columns, **{key: [row.get(key) for row in rows] for key in extras}}.items():
        try:
            parts.append(Dataset.from_dict({name: values}))
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"column '{name}': its values are of several types ({error}); make them one.") from error
    return concatenate_datasets([parts[0], *media, *parts[1:]], axis=1)
