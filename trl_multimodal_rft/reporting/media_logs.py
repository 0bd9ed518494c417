# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The table of completions with media: as a parquet file, and for trackio, wandb and TensorBoard."""

import html
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list, gather_object
from datasets import Audio, Features, Image, List, Video
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations import TensorBoardCallback
from transformers.trainer_callback import CallbackHandler
from transformers.utils import is_rich_available
from trl.trainer.utils import print_prompt_completions_sample

from ..data.reading.decoding import load_image, read_audio, require_module
from ..data.reading.media_files import MediaFile, evenly_spaced_frames, media_file
from ..data.reading.refs import MediaError, iter_refs
from ..data.rows.columns import TOOL_PREFIX, as_text
from ..data.rows.names import MEDIA_COLUMNS
from ..models.modes import kept_random_state
from ..printable import printable_cells
from .events import EventPart
from .hub import PRIVATE


if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter
    from trl import GRPOConfig, RLOOConfig


logger = get_logger(__name__)

_DATASET_FEATURES = {"image": Image(), "audio": Audio(), "video": Video()}

TABLES = "completions"  # folder of the tables
_FRAMES_SHOWN = 8  # of a video, in trackers that show only images

# Columns of media that tools returned
_TOOL_COLUMNS = {f"tool_{modality}s": modality for modality in _DATASET_FEATURES}

COMPLETION_AUDIO = "completion_audio"  # column of completions that are speech

_COLUMNS = {**MEDIA_COLUMNS, **_TOOL_COLUMNS, COMPLETION_AUDIO: "audio"}

MAX_PROMPTS = 8  # maximum number of prompts in a table whose media are shown: the first prompts that have media
MAX_BYTES = 32e6  # maximum size of a prompt's media in bytes; the media of a prompt with more aren't shown

# The media of a prompt and a completion, by column
PromptMedia = dict[str, list[MediaFile]]
# Media with their names in a tracker
LabelledMedia = list[tuple[MediaFile, str]]


class MediaLog:
    """
    A store of the media of logged rows, numbered since the start of the run in TRL's order, by batch, then by process.
    Media stay undecoded until [`gather`], and stay as long as TRL's texts. The first row of a prompt has its media.
    """

    def __init__(self, max_rows: int, with_media: bool, accelerator: Accelerator):
        self.max_rows = max_rows  # number of rows that TRL's logs keep
        self.max_prompts = MAX_PROMPTS if with_media else 0
        self.max_bytes = MAX_BYTES
        self.process_index = accelerator.process_index
        self.num_processes = accelerator.num_processes
        self.n_total = 0  # rows of all processes since the start of the run
        self._refs: dict[int, Any] = {}  # this process's lists of `MediaRef` by row; `None` beyond `max_prompts`
        self._groups: deque[int] = deque(maxlen=max_rows)  # for each row, the first row of its prompt
        self._gathered_total: int | None = None  # `n_total` of the last `gather`
        self._rows_with_media: set[int] = set()  # of all processes, also beyond `max_prompts`
        self._media: dict[int, PromptMedia] = {}  # encoded media by row, on the main process
        self._warned_topics: set[str] = set()

    def add(self, prompts: list, group_size: int, completions: list | None = None) -> None:
        """Adds the media of this process's rows in a batch. A group of `group_size` rows has one prompt."""
        start = self.n_total
        total = len(prompts) * self.num_processes
        self.n_total += total
        first_kept_row = self.n_total - self.max_rows
        self._refs = {row: refs for row, refs in self._refs.items() if row >= first_kept_row}
        self._groups.extend(start + i - i % group_size for i in range(total))
        n_kept = 0
        rows = zip(prompts, completions or [None] * len(prompts), strict=True)
        for i, (prompt, completion) in enumerate(rows, self.process_index * len(prompts)):
            refs = [*(iter_refs(prompt) if i % group_size == 0 else ()), *iter_refs(completion)]
            if refs and start + i >= first_kept_row:
                self._refs[start + i] = refs if n_kept < self.max_prompts else None
                n_kept += 1

    def gather(self) -> None:
        """Encodes the media of the first prompts and sends them to the main process. A collective call."""
        if self._gathered_total == self.n_total:  # no row is new
            return
        self._gathered_total = self.n_total
        local_entries = [(row, self.process_index, refs is not None) for row, refs in self._refs.items()]
        entries = sorted(gather_object(local_entries))
        shown_rows = [(row, process) for row, process, is_kept in entries if is_kept][: self.max_prompts]
        encoded = [(row, self._encode_media(row)) for row, process in shown_rows if process == self.process_index]
        # One process sends at a time, to bound the memory of messages
        results = list(encoded) if self.process_index == 0 else []
        for process in sorted({process for _, process in shown_rows} - {0}):
            (received,) = broadcast_object_list([encoded if process == self.process_index else None], process)
            results += received if self.process_index == 0 else []
        # A text in place of media is the reason why encoding failed
        if self.process_index == 0:
            self._rows_with_media = {row for row, *_ in entries}
            self._media = {row: media for row, media in results if not isinstance(media, str)}
            if 0 < self.max_prompts and len(shown_rows) < len(entries):
                self._warn_once(
                    "prompts",
                    f"Of {len(entries)} prompts with media in the table of completions, only the first "
                    f"{len(shown_rows)} are logged with their media.",
                )
            for _, media in results:
                if isinstance(media, str):
                    self._warn_once("failed", f"The table of completions lacks the media of a prompt: {media}.")

    def _encode_media(self, row: int) -> PromptMedia | str:
        """Returns a text with the reason if the media can't be logged."""
        media = PromptMedia()
        bytes_left = self.max_bytes
        try:
            for ref in self._refs[row]:
                name = ref.column.split("[")[0]
                if name not in (*MEDIA_COLUMNS, COMPLETION_AUDIO):  # the medium is in a message
                    name = f"tool_{ref.modality}s" if name.startswith(TOOL_PREFIX) else f"{ref.modality}s"
                file = media_file(ref, bytes_left)
                bytes_left -= len(file.data)
                media.setdefault(name, []).append(file)
        except (MediaError, ImportError) as error:
            return str(error)
        return media

    def _warn_once(self, topic: str, message: str) -> None:
        if topic not in self._warned_topics:
            self._warned_topics.add(topic)
            logger.warning(f"{message} This warning is shown once.")

    def rows(self) -> list[PromptMedia]:
        """Returns the media of each row of TRL's logs. Only the first row of a prompt has the media of the prompt."""
        first_row = self.n_total - len(self._groups)
        return [self._media.get(first_row + i, {}) for i in range(len(self._groups))]

    def groups(self) -> list[int | None]:
        """Returns the first row of the prompt for each row of TRL's logs, or `None` if the prompt has no media."""
        return [group if group in self._rows_with_media else None for group in self._groups]


# Tables


def media_columns(frame: pd.DataFrame, media: list[PromptMedia], columns: Iterable[str] = ()) -> dict[str, str]:
    """
    Returns the names of the media columns in a table: of `columns`, also if they are empty, and of columns with
    `media`. Names that the table has already get the prefix `prompt_`.
    """
    present = set(columns).union(*media)
    return {
        column: f"prompt_{column}" if column in frame.columns else column for column in _COLUMNS if column in present
    }


def write_parquet(frame: pd.DataFrame, media: list[PromptMedia], path: Path, columns: Iterable[str] = ()) -> None:
    """Writes a table as a parquet file for `datasets`, with embedded media and their features."""
    table = pa.Table.from_pandas(frame)
    features = Features.from_arrow_schema(table.schema)
    for column, name in media_columns(frame, media, columns).items():
        modality = _COLUMNS[column]
        feature = _DATASET_FEATURES[modality] if _has_one(column) else List(_DATASET_FEATURES[modality])
        features[name] = feature
        cells = []
        for index, row in enumerate(media):
            files = [
                {"bytes": file.data, "path": f"{column}-{index}-{i}.{file.suffix}"}
                for i, file in enumerate(row.get(column, ()))
            ]
            cells.append((files[0] if _has_one(column) else files) if files else None)
        storage = Features({name: feature}).arrow_schema.field(name).type
        # A chunk per row, since a chunk holds at most 2 GB
        table = table.append_column(name, pa.chunked_array([pa.array([value], storage) for value in cells]))
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), **features.arrow_schema.metadata})
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")  # until the file is complete
    pq.write_table(table, partial)
    partial.replace(path)


def _has_one(column: str) -> bool:
    """Returns whether a column, such as `image`, has one medium per row. Others, such as `images`, have lists."""
    return column in (_COLUMNS[column], COMPLETION_AUDIO)


def _write_file(file: MediaFile, label: str, folder: Path) -> str:
    path = folder / f"{label.replace('/', '-')}.{file.suffix}"
    path.write_bytes(file.data)
    return str(path)


def _labels(files: LabelledMedia) -> str:
    return ", ".join(label for _, label in files)


def _with_cells(
    frame: pd.DataFrame, media: list[PromptMedia], make_cell: Callable[[LabelledMedia], Any]
) -> pd.DataFrame:
    """
    Adds the columns of media to a table. `make_cell` makes a cell from media and their labels, such as
    `completions/images/0.1` for the second image of the first row with media.
    """
    # Rows with media are counted from 0: if rows 1 and 4 have media, these are `{1: 0, 4: 1}`
    prompt_numbers = {i: number for number, i in enumerate(i for i, row_media in enumerate(media) if row_media)}
    columns = {}
    for column, name in media_columns(frame, media).items():
        cells: list[Any] = [None] * len(media)
        for i, row_media in enumerate(media):
            files = row_media.get(column, ())
            if files:
                label = f"completions/{name}/{prompt_numbers[i]}"
                cells[i] = make_cell(
                    [(file, f"{label}.{j}" if len(files) > 1 else label) for j, file in enumerate(files)]
                )
        columns[name] = pd.Series(cells, index=frame.index, dtype=object)
    return frame.assign(**columns)


def wandb_table(frame: pd.DataFrame, media: list[PromptMedia], folder: Path) -> dict[str, Any]:
    """Returns the table for wandb. A cell holds one medium, so `images` becomes the columns `images_0`, `images_1`."""
    wandb = require_module("wandb", "logging")
    types = {"image": wandb.Image, "audio": wandb.Audio, "video": wandb.Video}

    def cell(files: LabelledMedia) -> list:
        return [types[file.modality](_write_file(file, label, folder)) for file, label in files]

    table = _with_cells(frame, media, cell)
    for column, name in media_columns(frame, media).items():
        media_lists = [[] if value is None else value for value in table.pop(name)]
        for i in range(max(map(len, media_lists))):
            cells = [value[i] if i < len(value) else None for value in media_lists]
            table[name if _has_one(column) else f"{name}_{i}"] = pd.Series(cells, dtype=object)
    return {"completions": wandb.Table(dataframe=table)}


def trackio_table(frame: pd.DataFrame, media: list[PromptMedia], folder: Path) -> dict[str, Any]:
    """
    Returns the table for trackio, and audio and videos to log next to the table, since cells don't play media. A cell
    shows images and some frames of videos, or else the names of its media.
    """
    trackio = require_module("trackio", "logging")
    players = {}

    def cell(files: LabelledMedia) -> str | list:
        pictures = []
        for file, label in files:
            path = _write_file(file, label, folder)
            if file.modality == "image":
                pictures.append(trackio.Image(path))
            elif file.modality == "audio":
                players[label] = trackio.Audio(path)
            else:
                players[label] = trackio.Video(path)
                pictures += [trackio.Image(frame) for frame in evenly_spaced_frames(file.ref(), _FRAMES_SHOWN)[0]]
        return pictures or _labels(files)

    return {"completions": trackio.Table(dataframe=_with_cells(frame, media, cell)), **players}


def write_tensorboard(writer: "SummaryWriter", frame: pd.DataFrame, media: list[PromptMedia], step: int) -> None:
    """Writes the table as text, and images, audio and frames of videos under the names in its cells."""

    def cell(files: LabelledMedia) -> str:
        for file, label in files:
            if file.modality == "audio":
                samples, rate = read_audio(file.ref())
                writer.add_audio(label, samples[None], step, sample_rate=round(rate or 0))
            elif file.modality == "image":
                writer.add_image(label, np.asarray(load_image(file.ref())), step, dataformats="HWC")
            else:
                writer.add_images(label, evenly_spaced_frames(file.ref(), _FRAMES_SHOWN)[0], step, dataformats="NHWC")
        return _labels(files)

    table = _with_cells(frame, media, cell)
    rows = [list(table), ["---"] * len(table.columns), *table.itertuples(index=False)]
    writer.add_text("completions", "\n".join(f"| {' | '.join(map(_markdown, row))} |" for row in rows), step)
    writer.flush()


def _markdown(value: str | float | None) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return "<br>".join(html.escape(text, quote=False).replace("|", "\\|").splitlines())


class MediaLogCallback(TrainerCallback):
    """
    A callback that logs completions with their media, in place of TRL's tables, which lack audio and video.

    `MediaLog.gather` is a collective call, so only events that all processes reach call it. `on_log` is no such event.
    """

    def __init__(
        self,
        log: MediaLog,
        args: "GRPOConfig | RLOOConfig",
        handler: CallbackHandler,
        tables: Mapping[str, Any],
        columns: Collection[str],
        has_tools: bool,
    ):
        self.log = log
        self.args = args
        self.handler = handler
        self.tables = tables  # TRL's
        self.columns = columns  # the dataset's
        self.has_tools = has_tools
        self.folder = Path(str(args.output_dir), PRIVATE)
        self._writer: SummaryWriter | None = None  # TensorBoard's, for logs that aren't published
        self._last_table: tuple[int, int] | None = None  # step and `n_total` of the last table
        self._is_evaluating = False
        if log.process_index == 0:
            (self.folder / TABLES).mkdir(parents=True, exist_ok=True)
            with suppress(OSError):
                Path(str(args.output_dir), TABLES).rmdir()  # TRL's folder, which is empty

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        if control.should_log or control.should_training_stop:
            self.log.gather()

    on_epoch_end = on_step_end

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        if not self._is_evaluating:  # an evaluation logs metrics before `on_evaluate` gathers media
            self._log_table(state.global_step)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: EventPart
    ):
        self._is_evaluating = True

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        self._is_evaluating = False
        self.log.gather()
        self._log_table(state.global_step)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: EventPart):
        if self._writer is not None:
            self._writer.close()
        self._writer = None

    def _log_table(self, step: int) -> None:
        log = self.log
        tables = self.tables
        is_repeated = self._last_table == (step, log.n_total)  # the final log of training repeats the last table
        if log.process_index != 0 or not tables["prompt"] or is_repeated:
            return
        self._last_table = step, log.n_total
        if is_rich_available():
            with kept_random_state():  # TRL draws the completions to print
                print_prompt_completions_sample(
                    printable_cells(tables["prompt"]),
                    printable_cells(tables["completion"]),
                    tables.get("rewards", {}),
                    tables.get("advantages"),
                    step,
                    self.args.num_completions_to_print,  # pyrefly: ignore[bad-argument-type]
                    extra=printable_cells(dict(tables.get("extra", {}))),
                )
        table = {
            "step": [step] * len(tables["prompt"]),
            "prompt": tables["prompt"],
            "completion": tables["completion"],
        }
        if "rewards" in tables:
            table |= {**tables["rewards"], **tables["extra"], "advantage": tables["advantages"]}
        frame = pd.DataFrame(table)
        media = log.rows()
        columns = [*self.columns, *(_TOOL_COLUMNS if self.has_tools else ())]
        path = self.folder / TABLES / f"completions_{step:05d}.parquet"
        write_parquet(frame, media, path, columns if self.args.log_multimodal else ())
        self._send_table(*self._prepare_for_trackers(frame, media), step)

    def _prepare_for_trackers(
        self, frame: pd.DataFrame, media: list[PromptMedia]
    ) -> tuple[pd.DataFrame, list[PromptMedia]]:
        """Returns the table and its media with the prompts as text, rounded numbers, and a row per prompt if set."""
        if self.args.log_unique_prompts:
            # Prompts with the same text may differ in their media, so the group counts, too
            mask = ~pd.Series(list(zip(frame["prompt"].astype(str), self.log.groups(), strict=True))).duplicated()
            frame = frame[mask].reset_index(drop=True)
            media = [row for row, keep in zip(media, mask, strict=True) if keep]
        numbers = frame.select_dtypes("float")
        rounded = {name: numbers[name].map(lambda value: float(f"{value:.6g}")) for name in numbers}
        return frame.assign(**rounded, **{name: frame[name].map(as_text) for name in ("prompt", "completion")}), media

    def _send_table(self, frame: pd.DataFrame, media: list[PromptMedia], step: int) -> None:
        trackers = self.args.report_to or ()
        with TemporaryDirectory() as folder:
            if "wandb" in trackers:
                wandb = require_module("wandb", "logging")
                if wandb.run is not None:
                    wandb.log(wandb_table(frame, media, Path(folder)))
            if "trackio" in trackers:
                require_module("trackio", "logging").log(trackio_table(frame, media, Path(folder)))
        for callback in self.handler.callbacks:
            writer = callback.tb_writer if isinstance(callback, TensorBoardCallback) else None
            if writer is not None:
                folder = Path(callback.logging_dir or "runs").absolute()
                # `Trainer` publishes the output folder except its folder `PRIVATE`, which gets the table
                if folder.is_relative_to(Path(str(self.args.output_dir)).absolute()):
                    self._writer = self._writer or type(writer)(str(self.folder / "runs" / folder.name))
                    writer = self._writer
                write_tensorboard(writer, frame, media, step)
