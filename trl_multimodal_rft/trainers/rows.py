# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From a dataset's rows to encoded prompts: ahead of need, and others in the place of those that can't be read."""

import json
import math
import sys
from collections.abc import Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from accelerate.logging import get_logger
from accelerate.utils import gather_object
from datasets import Dataset, IterableDataset
from torch.utils.data import Subset

from ..data.ahead import ReadAhead
from ..data.columns import MEDIA_COLUMNS, MediaError, iter_refs, rows_to_messages
from ..data.counts import most_media
from ..data.features import undecoded
from ..data.fetch import NUMBER, FetchLater, FetchOnce, LookAhead, Row, as_rows, numbered
from ..data.skipping import other_row, skip_limit
from ..data.unread import check_has_prompt
from ..encoding.ablation import Ablation
from ..encoding.control_tokens import checked_prompt
from ..encoding.prompts import DecodedPrompt, EncodedPrompt, encode_prompt
from ..models.trainer_mixin import TrainerMixin
from ..models.wrapped import unwrapped
from .signals import spare_workers


logger = get_logger(__name__)

# In the output folder
SKIPPED_ROWS = "skipped_rows.jsonl"

# Rows of which a share may be skipped, where nobody knows how many there are
_STREAM = 1000


class _BatchLeftOutError(Exception):
    """A batch of an evaluation has rows that could be read before and can't any more, here or in another process."""


class RowsMixin(TrainerMixin):
    """Gives a trainer that samples completions its rows and their encoded prompts."""

    _own_tokens: list[str]
    _kinds_seen: set[str]
    _order: LookAhead  # of the training rows, where they are read ahead
    _ahead: ReadAhead | None = None
    _warned_of_positions = False

    def __init__(self, *args, **kwargs):
        self._train_rows: Any = None  # what the loader of training rows reads
        self._coming: list[int] = []  # training rows of the next generation batches
        self._skipped: dict[int, str] = {}  # training rows that can't be read, and why
        self._last_read: Row | None = None  # training row that could be read
        # Of datasets that were evaluated and of their loaders: rows that can't be read, and how many there are in all
        self._unreadable: WeakKeyDictionary[Any, tuple[dict[int, str], int]] = WeakKeyDictionary()
        self._left_out: tuple[dict[int, str], int] = {}, 0  # the same of the evaluation that runs
        self._beside_unreadable: set[int] = set()  # rows of batches that it leaves out
        given = {name: _undecoded_streams(kwargs.get(name)) for name in ("train_dataset", "eval_dataset")}
        super().__init__(*args, **{**kwargs, **given})

    def _inner_training_loop(self, *args, **kwargs):
        try:
            output = super()._inner_training_loop(*args, **kwargs)
        finally:
            self._stop_reading()
        if output.global_step == self._initial_global_step < self.state.max_steps:
            raise ValueError(
                f"`train_dataset` has fewer rows than a batch of {self._rows_per_block // self.num_generations}, so "
                "nothing was trained. Add rows, repeat a stream (`train_dataset.repeat(None)`), or lower "
                "`per_device_train_batch_size`" + ("." if self.num_generations == 1 else " or `steps_per_generation`.")
            )
        return output

    def _stop_reading(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    # Loaders

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, *MEDIA_COLUMNS, NUMBER]))

    def _get_dataloader(self, dataset, description, *args, is_training=False, **kwargs):
        if is_training:
            self._stop_reading()
        given, num_workers, collator = dataset, self.args.dataloader_num_workers, self.data_collator
        if isinstance(dataset, Dataset):
            dataset = FetchOnce(self._remove_unused_columns(dataset, description=description))
        elif isinstance(dataset, IterableDataset):
            batch, n, repeats = self.num_generations_eval, self.num_generations_eval, 1
            if is_training:
                batch, n, repeats = self._rows_per_block, self.num_generations, self._steps_per_rollout
                self._check_groups_are_whole()
            dataset = numbered(dataset, batch, n, repeats)
            self.data_collator = as_rows
            # Each process reads the stream: Accelerate can't send rows from one to the others
            self.accelerator.dataloader_config.dispatch_batches = False
        leaves_out = not is_training and self.args.on_media_error == "skip" and self._encodes_rows
        if is_training:
            self._train_rows = rows = dataset
            if isinstance(rows, FetchOnce) and self._reads_ahead and not self._is_text(given):
                self._ahead = ReadAhead(lambda number: self._read_row(rows[number]), max(1, num_workers))
                dataset, self.args.dataloader_num_workers = FetchLater(rows), 0
        elif leaves_out and isinstance(dataset, (FetchOnce, IterableDataset)):
            dataset = self._readable(given, dataset)
        try:
            loader = super()._get_dataloader(dataset, description, *args, is_training=is_training, **kwargs)
        finally:
            self.args.dataloader_num_workers, self.data_collator = num_workers, collator
        if leaves_out and given in self._unreadable:
            self._unreadable[loader] = self._unreadable[given]
        if self._end_on_signal is not None:
            spare_workers(loader)
        return loader

    def get_eval_dataloader(self, eval_dataset=None):
        return super().get_eval_dataloader(_undecoded_streams(eval_dataset))

    def _is_text(self, dataset: Any) -> bool:
        """Whether no prompt has media, so that TRL's loader and its workers do all that there is to do ahead."""
        counts = most_media(dataset, self.args.ignored_media_columns or ())
        return counts is not None and not any(counts.values())

    @property
    def _reads_ahead(self) -> bool:
        # Elsewhere processes can't be copied
        return self.args.media_prefetch > 0 and sys.platform == "linux" and self._encodes_rows

    @property
    def _encodes_rows(self) -> bool:
        """Whether a row by itself makes a prompt, to which no environment adds anything."""
        return self.environment_factories is None and self.rollout_func is None

    @property
    def _rows_per_block(self) -> int:
        """Rows of all processes that come together, repeats included."""
        return self.args.generation_batch_size

    @property
    def _blocks_ahead(self) -> int:
        """How many blocks of rows to read ahead at most."""
        return self.args.media_prefetch

    @property
    def _steps_per_rollout(self) -> int:
        """Micro-batches between one generation batch and the next."""
        return self.args.steps_per_generation * self.num_iterations

    def _looking_ahead(self, sampler):
        """The sampler of training rows, as one that tells which rows come next."""
        if self._ahead is None:
            return sampler
        self._order = LookAhead(sampler, self._rows_per_block, self._steps_per_rollout, self._blocks_ahead)
        return self._order

    def _check_groups_are_whole(self) -> None:
        per_process = self._rows_per_block // self.accelerator.num_processes
        if self.args.on_media_error == "skip" and per_process % self.num_generations != 0:
            raise ValueError(
                "With `on_media_error='skip'` and a stream, a process takes an earlier row of its own in the place of "
                f"one that can't be read, so it must have whole groups: make `per_device_train_batch_size` * "
                f"`steps_per_generation` ({per_process}) a multiple of `num_generations` ({self.num_generations})."
            )

    # Rows and prompts

    def _encode_rows(self, inputs: Sequence[Row]) -> tuple[list[Row], list[EncodedPrompt | None]]:
        """
        Rows and their prompts, one object for each group; `None` for those without media, which are encoded as the
        others of their batch are. Others are in the place of rows that can't be read, if the config says so.
        """
        training = self.model.training
        read: dict[int, tuple[Row, EncodedPrompt | None]] = {}  # by the place at which a group begins
        n_failed = 0
        while True:
            failed = self._read_groups(inputs, self._skipped if training else {}, read)
            if self.args.on_media_error == "raise":
                break
            if training:
                failed = self._skip(failed, self._skipped, self._n_train_rows, "train")
            elif self._skip(failed, *self._left_out, split="eval"):
                raise _BatchLeftOutError
            n_failed += len(failed)
            if not failed:
                if training:
                    self._metrics["train"]["media/skipped"].append(float(n_failed))
                break
        places = accumulate(range(len(inputs)), lambda first, i: i if i in read else first)
        rows, prompts = (list(each) for each in zip(*(read[place] for place in places), strict=True))
        if training and self._ahead is not None and (self._kinds_seen or any(prompts)):
            self._look_ahead(self._ahead, inputs)
        return rows, prompts

    def _read_groups(self, inputs: Sequence[Row], skipped: dict[int, str], read: dict[int, Any]) -> dict[int, str]:
        """Reads the rows that aren't read yet. Those that can't be, and why."""
        failed = {}
        for i, given in enumerate(inputs):
            if i > 0 and not self._begins_group(inputs, i):
                continue
            row = self._instead_of(given, skipped) if given.number in skipped else given
            if i in read and read[i][0].number == row.number:
                continue
            try:
                read[i] = self._read(row)
                if self.model.training:
                    self._last_read = row
            except MediaError as error:
                if self.args.on_media_error == "raise":
                    raise
                failed[row.number] = str(error)
        return failed

    def _begins_group(self, inputs: Sequence[Row], i: int) -> bool:
        n = self.num_generations if self.model.training else self.num_generations_eval
        place = self.accelerator.process_index * len(inputs) + i  # a group may straddle processes
        return place % n == 0 or inputs[i].number != inputs[i - 1].number

    def _read(self, row: Row) -> tuple[Row, EncodedPrompt | None]:
        if self.model.training and self._ahead is not None and self._kinds_seen:  # else there is nothing to do ahead
            row, prompt, decoded = self._ahead.take(row.number)
        else:
            row, prompt, decoded = self._read_row(row)
        if prompt is not None:
            prompt.decoded = decoded  # which isn't pickled with it
        return row, prompt

    def _read_row(self, row: Row) -> tuple[Row, EncodedPrompt | None, tuple[tuple[slice, DecodedPrompt], ...]]:
        check_has_prompt(row)
        ignored, rules = self.args.ignored_media_columns or (), self.args.media_rules
        (placed,) = rows_to_messages([row], ignored, self._own_tokens, rules)
        if next(iter_refs(placed["prompt"]), None) is None:
            self._checked_prompt(placed["prompt"], row.number)
            return row, None, ()
        prompt = self._encode(placed["prompt"], row.number)
        return row, prompt, prompt.decoded

    def _encode(self, prompt: Any, row: int, ablation: Ablation | None = None, **template_kwargs) -> EncodedPrompt:
        return encode_prompt(
            self._checked_prompt(prompt, row),
            self.processing_class,
            unwrapped(self.accelerator, self.model),
            template_kwargs={**self._template_kwargs(), **template_kwargs},
            audio_overlong=self.args.audio_overlong,
            keep_decoded=self.use_vllm,
            engine_positions=self.use_vllm,
            ablation=ablation,
            row=row,
        )

    def _warn_of_positions(self, prompts: Sequence[EncodedPrompt], numbers: Sequence[int]) -> None:
        """Warns once of a row that is longer than what the model was made for."""
        config = unwrapped(self.accelerator, self.model).config.get_text_config(decoder=True)
        most = getattr(config, "max_position_embeddings", None) or math.inf
        for prompt, number in () if self._warned_of_positions else zip(prompts, numbers, strict=True):
            taken = int(prompt.position_ids.max()) + 1
            if taken > most:
                self._warned_of_positions = True
                logger.warning(
                    f"Row {number} takes {taken} positions, more than the {most} of the model "
                    "(`max_position_embeddings`), beyond which it was never trained. Remove such rows, make their "
                    "media smaller, or scale its positions (`rope_scaling` of its config).",
                    main_process_only=False,
                )
                return

    def _checked_prompt(self, prompt: Any, row: int) -> Any:
        return checked_prompt(prompt, self.processing_class, self.args.special_tokens_in_text, row)

    def _template_kwargs(self) -> dict[str, Any]:
        return {"chat_template": self.chat_template, **self.chat_template_kwargs, "tools": self.tools or None}

    # Ahead

    def _look_ahead(self, ahead: ReadAhead, rows: Sequence[Row]) -> None:
        """Has the rows of the next generation batches read while completions of these are sampled and trained on."""
        block, first = rows[0].block, self.accelerator.process_index * len(rows)
        if block is not None:  # else these are rows of dynamic sampling
            n = max(0, min(self._blocks_ahead, self._blocks_left))
            self._coming = self._order.after(block, slice(first, first + len(rows)), n)
        ahead.want([*self._coming_extra_rows(), *self._coming])

    @property
    def _blocks_left(self) -> int:
        """Blocks of rows that are still to come in this run."""
        steps = self.state.max_steps * self.args.gradient_accumulation_steps - self._step
        return math.ceil(steps / self._steps_per_rollout) - 1

    def _coming_extra_rows(self) -> list[int]:
        """Training rows that may be needed out of order."""
        return []

    # Rows that can't be read

    @property
    def _n_train_rows(self) -> int:
        return len(self._train_rows) if isinstance(self._train_rows, FetchOnce) else _STREAM

    def _instead_of(self, row: Row, skipped: dict[int, str]) -> Row:
        dataset = self._train_rows
        if isinstance(dataset, FetchOnce):
            return FetchLater(dataset)[other_row(row.number, skipped, len(dataset), self.args.seed)]
        if self._last_read is None:
            raise MediaError(f"{skipped[row.number]} (and no row before it can take its place)")
        return self._last_read

    def _skip(self, failed: dict[int, str], skipped: dict[int, str], n_rows: int, split: str) -> dict[int, str]:
        """Notes rows that failed, of the so many of a split. All that did, in any process."""
        failures, file = dict(gather_object(list(failed.items()))), self._skipped_rows_file
        skipped.update(failures)
        if failures and self.accelerator.is_main_process:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a") as lines:
                for row, error in failures.items():
                    entry = {"step": self.state.global_step, "split": split, "row": row, "error": error}
                    lines.write(json.dumps(entry) + "\n")
        if len(skipped) > skip_limit(self.args.max_skipped_rows, n_rows):
            raise MediaError(
                f"{len(skipped)} rows can't be read, more than `max_skipped_rows` ({self.args.max_skipped_rows:g}) "
                f"allows; they are listed in {file}. The last one: {list(skipped.values())[-1]}"
            )
        return failures

    # Evaluation, which leaves them out

    def _readable(self, given: Any, dataset: Any) -> Any:
        """The rows to evaluate that can be read, of the dataset that was given."""
        if given not in self._unreadable:
            self._unreadable[given] = self._find_unreadable(dataset)
        unreadable, n_rows = self._unreadable[given]
        if isinstance(dataset, IterableDataset):
            return dataset.filter(lambda row, known=frozenset(unreadable): row[NUMBER] not in known)
        return Subset(dataset, [number for number in range(n_rows) if number not in unreadable])

    def _find_unreadable(self, dataset: Any) -> tuple[dict[int, str], int]:
        """Reads all rows, each in one process: those that can't be, and how many there are."""
        if isinstance(dataset, FetchOnce):
            rows = map(FetchLater(dataset).__getitem__, range(len(dataset)))
        else:
            repeated = (as_rows([row])[0] for row in dataset)
            rows = (next(group) for _, group in groupby(repeated, attrgetter("number")))
        failed: dict[int, str] = {}
        unreadable: dict[int, str] = {}
        n_rows = 0
        for n_rows, row in enumerate(rows, start=1):
            if n_rows % self.accelerator.num_processes == self.accelerator.process_index:
                try:
                    self._read_row(row)
                except MediaError as error:
                    failed[row.number] = str(error)
        self._skip(failed, unreadable, n_rows, "eval")
        if unreadable and len(unreadable) == n_rows:
            raise MediaError(f"No row to evaluate can be read. The last one: {list(unreadable.values())[-1]}")
        return unreadable, n_rows

    def evaluation_loop(self, dataloader, *args, **kwargs):
        if dataloader not in self._unreadable:
            return super().evaluation_loop(dataloader, *args, **kwargs)
        self._left_out, self._beside_unreadable = self._unreadable[dataloader], set()
        output = super().evaluation_loop(dataloader, *args, **kwargs)
        n_skipped = len(self._left_out[0].keys() | self._beside_unreadable)
        self._metrics["eval"]["media/skipped"] = [float(n_skipped)]
        return output

    def prediction_step(self, model, inputs, *args, **kwargs):
        try:
            return super().prediction_step(model, inputs, *args, **kwargs)
        except _BatchLeftOutError:
            self._beside_unreadable.update(gather_object([row.number for row in inputs]))
            return None, None, None

    @property
    def _skipped_rows_file(self) -> Path:
        return Path(self.args.output_dir, SKIPPED_ROWS)


def _undecoded_streams(datasets: Any) -> Any:
    """Streams of datasets or of one, before TRL repeats their rows; datasets with a length are read by `FetchOnce`."""
    if isinstance(datasets, dict):
        return type(datasets)({name: _undecoded_streams(each) for name, each in datasets.items()})
    return undecoded(datasets) if isinstance(datasets, IterableDataset) else datasets
