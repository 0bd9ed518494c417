# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Names of columns: of media, of prompts, and those that identify layouts of other tools, with checks."""

from collections.abc import Collection, Mapping
from typing import Any


# Modalities by dataset columns. A column with a singular name holds one medium, a column with a plural name a list.
MEDIA_COLUMNS = {
    "image": "image",
    "images": "image",
    "audio": "audio",
    "audios": "audio",
    "video": "video",
    "videos": "video",
}

# Prefix of the columns that a teacher reads in place of the columns without the prefix
TEACHER = "teacher_"
TEACHER_ID = f"{TEACHER}id"  # column that names the teacher of a row
TEACHER_COLUMNS = tuple(f"{TEACHER}{name}" for name in ("prompt", *MEDIA_COLUMNS))
# Columns whose cells are read as texts and names, also if they are class labels
TEXT_COLUMNS = ("prompt", "completion", "messages", "conversations", "chosen", "rejected", f"{TEACHER}prompt")
TEXT_COLUMNS += (TEACHER_ID, "environment")

# Names of prompt columns in other tools
_PROMPT_NAMES = ("prompt", "messages", "conversations", "conversation", "question", "problem", "query", "instruction")
# Names of the column of right answers in other tools
ANSWER_NAMES = ("label", "labels", "answer", "answers", "target", "response", "output", "reference", "ground_truth")
ANSWER_NAMES += ("text", "transcript", "transcription", "sentence", "caption", "class")

# Columns that identify the layouts of other tools, supersets first. If a tool has layouts for both conversations and
# pairs, the name for pairs ends with `--task dpo`, as in the arguments of `prepare`.
_LAYOUTS = (
    ("verl", {"prompt", "data_source", "reward_model"}),
    ("avqa-r1", {"problem", "data_type", "path"}),
    ("avqa", {"question_text", "multi_choice"}),
    ("mmau", {"audio_id", "choices"}),
    ("easyr1", {"problem", "answer"}),
    ("rlaif-v", {"question", "chosen", "rejected"}),
    *(("llama-factory --task dpo", {column, "chosen", "rejected"}) for column in ("conversations", "instruction")),
    *(("ms-swift --task dpo", {column}) for column in ("rejected_response", "rejected_messages")),
    ("ms-swift", {"query", "response"}),
    ("llama-factory", {"instruction", "output"}),
    ("sharegpt", {"conversations"}),
)


def check_reward_columns(row: Mapping[str, Any], index: int | None = None) -> None:
    """
    Raises a `ValueError` for a column `prompts` or `completions`. Under these names, reward functions get the prompts
    and completions of the batch.
    """
    for column in ("prompts", "completions"):
        if column in row:
            row_index = getattr(row, "row_index", index)
            raise ValueError(
                f"row {row_index} has a column {column!r}, the name under which reward functions "
                f"get the {column} of the batch; call `dataset.rename_column({column!r}, ...)`, or remove the column."
            )


def check_has_prompt(row: Mapping[str, Any]) -> None:
    """Raises a `ValueError` for a row without a prompt. The message has the remedy for the layout of the row."""
    check_names(f"row {getattr(row, 'row_index', None)}", row, row)


def other_layout(row: Mapping[str, Any]) -> str | None:
    """Returns the name of the other tool's layout that fits a row or its features, `None` if none does."""
    from .nested import feature_leaves  # imports datasets and torch, which this module doesn't need otherwise

    # By layout, a column that must hold dictionaries, and keys that they must have
    nested_keys = {"verl": ("reward_model", {"ground_truth"}), "sharegpt": ("conversations", {"from", "value"})}
    for layout, needed_columns in _LAYOUTS:
        column, keys = nested_keys.get(layout, ("", set()))
        if needed_columns <= row.keys() and keys <= {key for key, _ in feature_leaves(row.get(column))}:
            return layout
    return None


def prepare_remedy(layout: str, options: str = "") -> str:
    """Returns the remedy for rows of another layout."""
    return f"convert the {layout.split()[0]} rows with `trl-multimodal-rft prepare {layout}{options}`"


def check_names(name: str, columns: Collection[str], row: Mapping[str, Any], needs_prompt: bool = True) -> None:
    """Raises a `ValueError` if a needed prompt is missing, or if the solution is only in verl's `reward_model`."""
    if "prompt" in columns or not needs_prompt:
        if "solution" not in columns and other_layout(row) == "verl":
            raise ValueError(
                f"{name} has no column 'solution', and its answers are in 'reward_model'; {prepare_remedy('verl')}, "
                "or add 'solution' for reward functions."
            )
        return
    plain_names = {column.strip().lower(): column for column in reversed([*columns])}
    likely_prompt = next((plain_names[name] for name in _PROMPT_NAMES if name in plain_names), None)
    remedy = "rename the column of prompts to 'prompt'"
    if likely_prompt is not None:
        value = row.get(likely_prompt)  # or its feature
        is_text = isinstance(value, str) or getattr(value, "dtype", None) == "string"
        # A command makes the column from a text, see `cli.words`
        remedy = f"rename {'' if is_text else 'the column '}{likely_prompt!r} to 'prompt'"
    if likely_prompt == "messages":  # the last message may be the answer
        remedy = f"{prepare_remedy('ms-swift', ' --task rl')}; if they don't end with an answer, {remedy}"
    layout = other_layout(row)
    if layout is not None:
        # Options of `prepare` for rows with prompts, by layout
        options = dict.fromkeys(("ms-swift", "llama-factory", "sharegpt"), " --task rl") | {"rlaif-v": " --task judge"}
        alternative = "" if likely_prompt is None or layout == "sharegpt" or "dpo" in layout else f"{remedy}, or "
        remedy = alternative + prepare_remedy(layout, options.get(layout, ""))
    raise ValueError(f"{name} has no column 'prompt', only {sorted(columns)}; {remedy}.")
