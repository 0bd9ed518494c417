# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft prepare`: converts datasets of other layouts to folders of rows."""

import argparse
import inspect
import shlex
from collections.abc import Callable
from typing import get_args

from datasets import Dataset, DatasetDict

from ... import data
from ...cli.parsers import LAYOUTS
from ...data.reading.rules import rules_of
from ...printable import printable
from .folders import check_empty, write_folder


# Options of `prepare` that only some layouts have. They are named like the loaders' arguments, but an argument
# `audio_dir` is set by `--media_dir`.
_OPTIONS = ("media_dir", "audio_dir", "template", "skip_missing", "task", "prompt_key", "answer_key")
_OPTIONS += ("max_pixels", "codec")


def convert(args: argparse.Namespace) -> DatasetDict:
    """Loads the splits of a dataset by its layout's loader, with the options that the loader has."""
    load: Callable[..., Dataset] = getattr(data, LAYOUTS[args.layout])
    parameters = inspect.signature(load).parameters
    options = {name: getattr(args, name, None) for name in _OPTIONS}  # `None` if an option isn't set
    if "audio_dir" in parameters:
        options["audio_dir"] = options.pop("media_dir")
    options = {name: value for name, value in options.items() if value is not None}
    for name in options:
        if name not in parameters:
            supported = [f"--{option}" for option in _OPTIONS if option in parameters and option != "audio_dir"]
            raise ValueError(f"the layout {args.layout!r} doesn't support `--{name}`, only {supported}; remove it.")
    if "codec" in parameters and "codec" not in options:
        raise ValueError(f"the layout {args.layout!r} needs a codec; name one, as in `--codec HKUSTAudio/xcodec2-hf`.")
    tasks = get_args(parameters["task"].annotation) if "task" in options else ()
    if "task" in options and options["task"] not in tasks:
        raise ValueError(f"the layout {args.layout!r} supports `--task {'` or `'.join(tasks)}`; set one of them.")
    splits = {}
    for split in args.splits or [parameters["split"].default]:
        try:
            splits[split] = load(args.path, split, **options)
        except (OSError, KeyError) as error:
            raise ValueError(f"{args.path!r} can't be read as {args.layout!r}: {error}") from error
    return DatasetDict(splits)


def run(args: argparse.Namespace) -> None:
    check_empty(args.output_dir)
    dataset = convert(args)
    write_folder(dataset, args.output_dir, rules_of(args.media_rules, media_dir=args.media_dir))
    for split, rows in dataset.items():
        print(printable(f"{split}: {len(rows)} rows of {', '.join(rows.column_names)}"))
    print(f"Written to {args.output_dir}. Find rows that would fail in training with:")
    folder = shlex.quote(args.output_dir)
    split = next(iter(dataset))
    print(f"trl-multimodal-rft check --dataset_name {folder} --dataset_split {split} --model_name_or_path MODEL")
