# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Checks of datasets for training and evaluation, in a constructor and whenever a run gets another one."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.trainer.utils import get_callable_name

from ...data.reading.refs import MediaError, iter_refs
from ...data.rows.batches import Row
from ...data.rows.columns import rows_to_messages
from ...data.rows.counts import describe_empty_cells, max_media_per_row
from ...data.rows.features import undecoded
from ...data.rows.names import MEDIA_COLUMNS
from ...data.rows.unread import check_columns, lists_columns
from ...encoding.prompts import check_encodes
from ...families import input_modalities
from ...modalities import MODALITIES
from ...models.modes import kept_random_state
from ...models.pretrained import read_config
from ...rewards.named import check_reward_columns
from ...rollout.row_pass import named_splits
from ...rollout.stream import RowStream
from ...views.view_options import changed_media
from .argument_checks import mapping
from .configs import SamplingConfig, TrainerConfig
from .signatures import EvalRows, Model, Rows


logger = get_logger(__name__)

# Number of rows of a dataset that are searched for media before training
_N_ROWS_TO_SEARCH = 16


def check_kept_columns(args: SamplingConfig, reward_funcs: Sequence[Callable] | None, dataset: Rows) -> None:
    """Raises a `ValueError` if `remove_unused_columns` removes a column that is a reward function's parameter."""
    if not args.remove_unused_columns or not isinstance(dataset, Dataset):
        return
    removed = {*dataset.column_names} - {"prompt", *args.teacher_columns, *MEDIA_COLUMNS}
    for func in reward_funcs or ():
        is_function = callable(func) and not isinstance(func, PreTrainedModel)
        names = removed.intersection(inspect.signature(func).parameters) if is_function else ()
        if names:
            raise ValueError(
                f"`remove_unused_columns=True` removes {min(names)!r}, which {get_callable_name(func)} reads; set it "
                "to False, the default."
            )


def check_takes_media(
    processing_class: ProcessorMixin | PreTrainedTokenizerBase, ignored: Collection[str] | None, *datasets: EvalRows
) -> None:
    """Raises an error if rows have media and the processing class is only a tokenizer."""
    if isinstance(processing_class, ProcessorMixin):
        return
    for _, dataset in named_splits(dict(enumerate(datasets))):
        if not isinstance(dataset, Dataset):
            continue  # streams can be read only once, so training checks their rows
        rows = undecoded(dataset).__getitems__(list(range(min(_N_ROWS_TO_SEARCH, len(dataset)))))
        for i, row in enumerate(rows):
            prompt = row.get("prompt") or row.get("messages") or row.get("chosen") or ""
            try:
                (row_with_messages,) = rows_to_messages([Row(i, {**row, "prompt": prompt})], ignored or ())
            except MediaError:  # training raises it when it reads the row
                continue
            check_encodes(list(iter_refs(row_with_messages)), processing_class)


def warn_of_unread_media(
    args,
    datasets: Mapping[str, Any],
    model_modalities: Collection[str] = (),
    *,
    dataset_part: Literal["all", "first"] = "all",
    supervised: bool = False,
    reward_funcs: Sequence[Any] = (),
) -> None:
    """
    Warns of media that no prompt contains and of cells that reward functions need, or raises an error, see
    [`check_columns`] and [`~rewards.named.check_reward_columns`]. The keys of `datasets` are the names of the
    trainer's arguments. With `dataset_part="first"`, datasets hold only their first rows.
    """
    ignored = args.ignored_media_columns or ()
    columns = ("completion", "messages", "chosen", "rejected") if supervised else args.teacher_columns
    message_columns = "prompt", *columns
    for name, dataset in named_splits(datasets):
        is_training = name == "`train_dataset`"
        if isinstance(dataset, IterableDataset) and is_training:
            _check_not_dispatched(args, name)
        if isinstance(dataset, IterableDataset) and is_training and args.max_steps <= 0:
            raise ValueError(f"{name} is a stream, whose end isn't known; set `max_steps`.")
        options: Any = {
            "needs_prompt": not supervised,
            "dataset_part": dataset_part,
            "model_modalities": model_modalities,
            "option_modalities": changed_media(vars(args)) if is_training else {},
        }
        warning = check_columns(dataset, name, ignored, message_columns=message_columns, **options)
        if warning is not None:
            logger.warning(warning)
        cells = describe_empty_cells(dataset, MEDIA_COLUMNS.keys() - {*ignored})
        if cells:
            logger.warning(f"{name}: {cells}. Their prompts have no such media.")
        try:
            hears = getattr(args, "speech_decoder", None) is not None
            for warning in check_reward_columns(reward_funcs, dataset, hears):
                logger.warning(f"{name}: {warning}")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def check_held_out(
    args: TrainerConfig,
    datasets: Mapping[str, Any],
    stream: RowStream,
    model_modalities: Collection[str],
    supervised: bool = False,
) -> list[Row]:
    """
    Reads the first row of each dataset as evaluation reads it, so that what fails there fails before training. If a
    dataset lists no columns, the row's are checked by [`warn_of_unread_media`], which takes `supervised`. Returns the
    rows.
    """
    first_rows = []
    for name, dataset in named_splits(datasets):
        stream.is_new(dataset)  # notes the dataset as checked
        if isinstance(dataset, IterableDataset):  # it may be readable only once
            continue
        try:
            with kept_random_state():
                row = stream.read_first(dataset)
        except ValueError as error:
            raise (MediaError if isinstance(error, MediaError) else ValueError)(f"{name}: {error}") from error
        if row is not None:
            first_rows.append(row)
            if not lists_columns(dataset):
                rows = {name.strip("`"): [dict(row)]}
                warn_of_unread_media(args, rows, model_modalities, dataset_part="first", supervised=supervised)
    return first_rows


def _check_not_dispatched(args: TrainerConfig, name: str) -> None:
    if getattr(args.accelerator_config, "dispatch_batches", None):
        raise ValueError(
            f"Iterable datasets require `dispatch_batches=False`, since each rank reads {name} itself; remove it from "
            "`accelerator_config`."
        )


def modalities(model: Model, args: TrainerConfig) -> Collection[str]:
    """Returns the modalities that a model takes. `model` is its name if it isn't loaded yet."""
    if isinstance(model, str):
        revision = mapping(args.model_init_kwargs).get("revision")
        try:
            model_class = read_config(model, revision=revision, trust_remote_code=args.trust_remote_code)[1]
        except ValueError:
            return ()  # loading the model raises a better error
        return input_modalities(model_class)
    model = model.model if hasattr(model, "model_for") else model  # an actor of `lightrft` holds a model
    return input_modalities(model)


def unchecked_datasets(datasets: Mapping[str, Any]) -> set[str]:
    """
    Returns the names of the arguments whose rows can't be checked before training or evaluation reads them: streams,
    and a training dataset with a transform. Of other datasets for evaluation, [`check_held_out`] reads a row.
    """
    unchecked = set()
    for argument, entry in datasets.items():
        for _, dataset in named_splits({argument: entry}):
            if isinstance(dataset, IterableDataset) or (argument == "train_dataset" and not lists_columns(dataset)):
                unchecked.add(argument)
    return unchecked


def media_limits(args: SamplingConfig, *datasets: EvalRows) -> dict[str, int]:
    """
    Returns the largest number of media in a prompt by modality, for which an engine reserves memory. Empty without
    datasets, or if the rows of one can't be counted.
    """
    # For each dataset: the largest count by modality, or `None` if its rows can't be counted
    results = [
        max_media_per_row(dataset, args.ignored_media_columns or ())
        for _, dataset in named_splits(dict(enumerate(datasets)))
    ]
    counts = [limits for limits in results if limits is not None]
    if len(counts) < len(results):
        return {}
    return {name: max((limits[name] for limits in counts), default=0) for name in MODALITIES} if counts else {}
