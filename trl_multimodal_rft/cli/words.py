# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Messages in the words of a shell. Trainers explain their errors in Python, as most users call them there; a command
shows the same message with its options in place of arguments, values and calls.
"""

import ast
import json
import logging
import re
import shlex
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any


# Columns of a dataset, whose names some options have, too
_COLUMNS = {"prompt", "completion", "solution", "datasets"}  # the last one is a package
# Options in place of arguments of Python
OPTIONS = {
    "model": "model_name_or_path",
    "teacher_model": "teacher_model_name_or_path",
    "value_model": "value_model_name_or_path",
    "train_dataset": "dataset_name",
    "eval_dataset": "dataset_test_split",
    "ptx_dataset": "ptx_dataset_name",
    "peft_config": "use_peft",
    "quantization_config": "load_in_4bit",
    "target_modules": "lora_target_modules",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
    "label_column": "reward_label_column",
    "processing_class": "model_name_or_path",
    "reward_processing_classes": "reward_model_name_or_path",
}
# Patterns of remedies in Python, also those of TRL, transformers and PEFT, and what a shell has instead
SENTENCES = (
    (r"rename the column of prompts to 'prompt'", 'write one with `--prompt "..."`'),
    (r"add the column, or (?=rename .* to 'solution')", ""),
    (r"rename '(\w+)' to '(prompt|solution)'", r"""pass `--\2 "{\1}"`"""),
    (
        r"(?<=column `solution`, which is missing: )add the column, or rename the column that holds these values",
        'make it with `--solution "{NAME}"` from the column NAME that holds these values',
    ),
    (
        r"it needs `prompt` and `completion`, or",
        'it needs `prompt` and `completion`, as `--prompt "..." --completion "{NAME}"` make them, or',
    ),
    (r"it needs `prompt`, (?=`c)", 'it needs `prompt` (`--prompt "..."` makes it), '),
    (r" of `peft_config` name no layer", " name no layer"),
    (r"Number of reward weights \((\d+)\) must match", r"The number of `--reward_weights` (\1) must match"),
    (
        r"Using fsdp only works in distributed training\.",
        "`--fsdp` alone does nothing; use `--accelerate_config fsdp2`.",
    ),
    (
        r"--load_best_model_at_end requires the save and eval strategy to match.*",
        "`--load_best_model_at_end` needs evaluations; set `--eval_strategy` to what `--save_strategy` is.",
    ),
    (
        r"At most one of fp16 and bf16 can be True, but not both",
        "`--fp16` and `--bf16` exclude each other; remove one",
    ),
    (
        r"You cannot perform fine-tuning on purely quantized models\..*",
        "Quantized weights can't be trained; add `--use_peft`, which trains an adapter.",
    ),
    (
        r"Set `processing_class\.chat_template` to a template that does, such as the template of a newer model of the "
        r"family, or one of `trl\.chat_template_utils`",
        "Name a template that does with `--chat_template_path`, such as that of a newer model of the family",
    ),
    (
        r"Set `response_template` of the tokenizer\. For calls like (`.*?`), set it to `trl\.[\w.]+`",
        r"Name a model whose calls TRL knows with `--chat_template_path`, such as one with calls like \1",
    ),
    (r"call `model\.requires_grad_\(True\)` first, or pass `peft_config`", "freeze fewer parts, or add `--use_peft`"),
    (
        r"Save the base model's processor there \(`AutoProcessor\.[^`]*`\), or pass `processing_class`",
        "Copy these files of the base model there",
    ),
    (r", wrapped by `PeftModel\.from_pretrained\([^`]*\)`", ""),
    (r"; decode it: `dataset\.map\([^`]*\)`", "; write the list itself, as JSON Lines can"),
    (r": `dataset\.map\(lambda[^`]*\)`", ""),
    (r"`dataset\.map\(trl\.extract_prompt\)`", "`trl.extract_prompt` in Python"),
    (r"call `dataset\.rename_column\([^`]*\)`", "give the column another name"),
    (r" (?:\(`rename_column\([^`]*\)`\)|`rename_column\([^`]*\)`)", ""),
    (r", or load it with `load_dataset\([^`]*\)`", ""),
    (r"For names, call `dataset\.features[^`]*`, or add a column of names to the dataset", "For names, add a column"),
    (r"repeat a stream \(`train_dataset\.repeat\(None\)`\)", "leave out `--dataset_streaming`"),
    (r" Measure completions by `trainer\.add_callback[^`]*`", " Measure completions by `trl-multimodal-rft evaluate`"),
    (r"`train\(resume_from_checkpoint='([^`]*)'\)`", r"`--resume_from_checkpoint \1`"),
    (r"`(cpu|single_gpu|multi_gpu|fsdp2|hsdp|deepspeed_zero\d)\.yaml`", r"`--accelerate_config \1`"),
    (r"pass functions as `reward_funcs`", "name functions by `--reward_funcs`"),
)
_OF_FILE = re.compile(r"\S+\.ya?ml: ")
_TRAINER = re.compile(r"`Multimodal([A-Z]\w*?)Trainer`")
_ASSIGNMENT = re.compile(r"`(\w+)=([^`]+)`")
_NAME = re.compile(r"(?<!column )`(\w+)(?=[`\[])")
_DICTIONARY = re.compile(r"(?<!['\w])\{'\w+': [^{}]*\}(?!')")


@contextmanager
def translated_logs(options: Collection[str]) -> Iterator[None]:
    """Context that translates what this package logs, see [`in_shell`]."""
    make = logging.getLogRecordFactory()

    def make_translated(name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make(name, *args, **kwargs)
        if name.partition(".")[0] == __name__.partition(".")[0]:
            with suppress(TypeError, ValueError):  # arguments that don't fit the message, which logging reports
                record.msg = in_shell(record.getMessage(), options)
                record.args = None
        return record

    logging.setLogRecordFactory(make_translated)
    try:
        yield
    finally:
        logging.setLogRecordFactory(make)


def in_shell(text: str, options: Collection[str]) -> str:
    """Returns a message for the user of a command that has these options. One in such words stays as it is."""
    if _OF_FILE.match(text):  # whose keys are the names of options
        return text
    for pattern, words in SENTENCES:
        text = re.sub(pattern, words, text)
    text = _TRAINER.sub(lambda match: f"`trl-multimodal-rft {match[1].lower()}`", text)
    text = _ASSIGNMENT.sub(lambda match: _assignment(match, options), text)
    text = _NAME.sub(lambda match: f"`{_flag(match[1], options)}", text)
    return _DICTIONARY.sub(lambda match: _json(match[0]), text)


def _flag(name: str, options: Collection[str]) -> str:
    option = OPTIONS.get(name, name)
    return name if option not in options or name in _COLUMNS else f"--{option}"


def _assignment(match: re.Match, options: Collection[str]) -> str:
    """Writes `packing='padded'` as `--packing padded`."""
    flag = _flag(match[1], options)
    if not flag.startswith("--"):
        return match[0]
    try:
        value = ast.literal_eval(match[2])
    except (ValueError, SyntaxError):  # `...`, a text without quotes, or a call
        if "(" in match[2]:
            return match[0]
        return f"`{flag} {match[2]}`"
    if value is True:
        return f"`{flag}`"
    if isinstance(value, dict):
        return f"`{flag} {_json(match[2])}`"
    words = value if isinstance(value, (list, tuple)) else [value]
    return f"`{' '.join([flag, *(shlex.quote(str(word)) for word in words)])}`"


def _json(text: str) -> str:
    try:
        return shlex.quote(json.dumps(ast.literal_eval(text)))
    except (ValueError, SyntaxError, TypeError):
        return text
