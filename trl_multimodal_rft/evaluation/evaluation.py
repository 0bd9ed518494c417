# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The loop of an evaluation over batches: it encodes prompts, samples completions, scores them and records rows."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from torch import nn
from transformers import GenerationConfig, TrainerState

from ..data.reading.refs import MediaError, MediaRef, checksum, iter_refs
from ..data.reading.rules import budgets_of
from ..data.rows.batches import DatasetRows, Row
from ..data.rows.columns import as_text, strip_media
from ..data.rows.features import restore_rows
from ..data.rows.labels import class_names
from ..data.rows.names import MEDIA_COLUMNS, check_has_prompt
from ..data.rows.rendered import RenderedPrompt
from ..data.rows.unread import check_columns, lists_columns
from ..encoding.join import same_prompt
from ..encoding.processors import tokenizer_of
from ..encoding.prompt_encoder import PromptEncoder
from ..encoding.prompts import EncodedPrompt, all_placeholder_ids
from ..engines.samplers import Samples
from ..engines.transformers import Branches
from ..families import input_modalities
from ..models.modes import evaluation_mode, kept_random_state
from ..progress import progress_bar
from ..rewards.calls import dropped_tags, reward_loop
from ..rewards.ready.choices import extracted_answer
from ..rollout.collect import collect
from ..rollout.completion_columns import Ends
from ..rollout.environments import Environments
from ..rollout.reward_functions import RewardFunctions
from ..rollout.rollout import Prompted
from ..rollout.row_pass import RowPass
from ..rollout.speech import decoder_of, seconds_of
from ..rollout.stream import EncodedRow
from ..rollout.turns import LIMITS, ToolLoop, Trajectory, run_turns, texts_of, with_one_turn, with_turns
from ..spelling import spelling_of
from ..views.views import View, as_view
from .config import EvaluationConfig
from .result import GROUP, EvaluationResult, aggregate, flat, mean


logger = get_logger(__name__)


@dataclass
class Policy:
    """A policy, and the objects that sample its completions."""

    model: nn.Module  # its mode is evaluation while it samples, and restored afterwards
    encoder: PromptEncoder
    config: GenerationConfig
    # Samples a completion per prompt by `config`: a [`~engines.samplers.Sampler`] with its other arguments
    sample: Callable[..., Samples]
    toolbox: Environments
    tool_loop: Callable[..., ToolLoop] | None = None  # `None` without tools
    on_media_error: str = "raise"
    is_collective: bool = False  # whether all ranks must make the same number of calls of `sample`
    trainer_state: TrainerState = field(default_factory=TrainerState)
    disable_tqdm: bool | None = False


class Evaluation:
    """
    An evaluation of a policy on the batches of a dataset, which are distributed over the ranks.

    With 5 batches and 2 ranks, rank 0 evaluates batches 0, 2 and 4, and rank 1 batches 1 and 3. If sampling is
    collective, rank 1 then repeats batch 0 and drops its records.
    """

    def __init__(
        self,
        policy: Policy,
        dataset: Dataset | Sequence[dict[str, Any]],
        reward_functions: RewardFunctions,
        args: EvaluationConfig,
        accelerator: Accelerator,
    ):
        if not isinstance(dataset, (Dataset, Sequence)) or len(dataset) == 0:
            raise ValueError(
                f"The dataset ({type(dataset).__name__}) has no rows to count; pass a `Dataset` or a list with rows, "
                "such as one split of a `DatasetDict`, or `list(stream.take(100))` for a stream."
            )
        self.policy = policy
        self.toolbox = policy.toolbox
        self.encoder = policy.encoder
        if args.ignored_media_columns is not None:
            self.encoder = replace(self.encoder, ignored_media_columns=args.ignored_media_columns)
        rules = replace(self.encoder.media_rules, **budgets_of(args))
        self.encoder = replace(self.encoder, media_rules=rules)
        self.toolbox.media_rules = rules
        self.tokenizer = tokenizer_of(self.encoder.processor)
        self.ends = Ends(policy.config.eos_token_id)
        if args.speech_decoder is not None:
            decoder = decoder_of(args, self.ends, self.tokenizer, accelerator.device)
            reward_functions = replace(reward_functions, speech_decoder=decoder)
        self.dataset = dataset
        self.reward_functions = reward_functions
        self.args = args
        self.accelerator = accelerator
        self.skips_unreadable = (args.on_media_error or policy.on_media_error) == "skip"
        for warning in dropped_tags(reward_functions.functions, self.tokenizer):
            logger.warning_once(warning)
        self._check_columns(dataset, "all")
        dataset_rows = DatasetRows(dataset) if isinstance(dataset, Dataset) else None
        self.read_row: Callable[[int], Row] = lambda i: Row(i, dataset[i]) if dataset_rows is None else dataset_rows[i]
        if args.group_by is not None and args.group_by not in self.read_row(0):
            raise ValueError(
                f"`group_by` is {args.group_by!r}, which isn't a column of the rows; name one of their columns."
            )
        if args.group_by in MEDIA_COLUMNS:
            raise ValueError(f"`group_by` is {args.group_by!r}, a column of media; name a column of text or numbers.")
        self.loop: asyncio.AbstractEventLoop | None = None  # for async functions
        self.unstorable_columns: set[str] = set()  # columns with values that a parquet file can't hold
        self.logged_metrics: list[tuple[str, float]] = []  # metrics of reward functions
        self.skipped: dict[int, str] = {}  # errors of unreadable rows, by row index

    @torch.no_grad()
    def run(self) -> EvaluationResult:
        """Evaluates this rank's batches, and returns the result of all ranks."""
        args = self.args
        n_ranks = self.accelerator.num_processes
        n = len(self.dataset)
        rows_per_batch = max(args.batch_size // args.num_samples, 1)
        batches = [range(start, min(start + rows_per_batch, n)) for start in range(0, n, rows_per_batch)]
        records: list[dict[str, Any]] = []
        functions = [*self.reward_functions.functions, *self.toolbox.tools]
        n_answers = 0
        n_correct = 0
        bar = progress_bar(n, "evaluate", disable=self.policy.disable_tqdm)
        row_pass = RowPass(self.accelerator, lambda: {"dataset": (self.dataset, self._read_prompt)})
        row_pass.begin(self.skips_unreadable, n)
        with (
            closing(row_pass),
            kept_random_state(),
            evaluation_mode(self.policy.model),
            reward_loop(functions) as self.loop,
            bar,
        ):
            for first_index in range(0, len(batches), n_ranks):  # index of rank 0's batch
                row_pass.go_on()
                batch_index = first_index + self.accelerator.process_index
                if batch_index < len(batches):
                    new_records = self._answer_batch(batch_index, batches[batch_index])
                    records += new_records
                    verdicts = flat(record["correct"] for record in new_records)
                    n_answers += len(verdicts)
                    n_correct += sum(verdicts)
                    accuracy = f"accuracy {100 * n_correct / n_answers:.1f} %" if n_answers else ""
                    bar.set_postfix_str(accuracy, refresh=False)
                elif self.policy.is_collective:  # other ranks' calls of `sample` wait for a call of this rank
                    n_logged = len(self.logged_metrics)
                    self._answer_batch(batch_index, batches[0])
                    del self.logged_metrics[n_logged:]
                bar.update(sum(map(len, batches[first_index : first_index + n_ranks])))
        return self._result(records)

    def _result(self, records: list[dict[str, Any]]) -> EvaluationResult:
        args = self.args
        unstorable_columns = set(gather_object(list(self.unstorable_columns)))
        records = gather_object(
            [{name: value for name, value in record.items() if name not in unstorable_columns} for record in records]
        )
        logged_metrics = gather_object(self.logged_metrics)
        skipped = dict(gather_object([*self.skipped.items()]))
        # All records get the same entries, and are sorted by row
        names = dict.fromkeys(chain.from_iterable(records))
        records = [{name: record.get(name) for name in names} for record in sorted(records, key=lambda r: r["index"])]
        if args.ablate is not None and not any(record.get("correct_without") for record in records):
            raise ValueError(
                f"No row has media of the modality {args.ablate!r}; leave out `ablate`, or name another modality."
            )
        metrics = aggregate(records, self.reward_functions.names, args)
        if self.skips_unreadable:
            metrics["skipped_rows"] = len(skipped)
        for name in sorted({name for name, _ in logged_metrics}):
            metrics[f"metric/{name}"] = mean([value for metric, value in logged_metrics if metric == name])
        for record in records:
            record.pop(GROUP, None)
        model = self.encoder.model.config._name_or_path
        options = asdict(replace(args, speech_decoder=spelling_of(args.speech_decoder)))
        settings = {**options, "model": model, "reward_funcs": self.reward_functions.names}
        return EvaluationResult(metrics, records, settings, skipped)

    def _read_prompt(self, row: Row) -> str | list | RenderedPrompt | None:
        if self.toolbox.factories:
            self.toolbox.check_row(row)
            return []
        return self.encoder.read_row(row)

    def _check_columns(self, rows: Dataset | Sequence[dict[str, Any]], dataset_part: Literal["all", "first"]) -> None:
        """
        Checks the columns of `rows`: the whole dataset (`dataset_part="all"`) or, if the dataset doesn't list its
        columns, the first batch (`"first"`).
        """
        if self.toolbox.factories:  # environments may read any column
            return
        model_modalities = input_modalities(self.policy.model)
        needs_prompt = isinstance(self.dataset, Dataset) and dataset_part == "all"
        ignored = self.encoder.ignored_media_columns
        warning = check_columns(
            rows,
            "The dataset",
            ignored,
            needs_prompt=needs_prompt,
            dataset_part=dataset_part,
            model_modalities=model_modalities,
        )
        if warning is not None:
            logger.warning_once(warning)  # once for all evaluations of a run

    def _answer_batch(self, batch_index: int, indices: Sequence[int]) -> list[dict[str, Any]]:
        seed = int(np.random.SeedSequence([self.args.seed, batch_index]).generate_state(1)[0])
        set_seed(seed)
        batch = list(map(self.read_row, indices))
        # Each rank checks only its first batch
        if batch_index < self.accelerator.num_processes and not lists_columns(self.dataset):
            self._check_columns(batch, "first")
        rollout, skipped = self._read_rollout(batch)
        rows = [row for row in batch if row.row_index not in skipped]
        self.skipped |= skipped
        records = [
            {"index": row.row_index, **entries}
            for row, entries in zip(rows, self._answer_rollout(rollout), strict=True)
        ]
        if self.args.ablate is not None:
            prompts = [] if rollout is None else rollout.prompts[:: self.args.num_samples]
            ablated_rows = [
                row for row, prompt in zip(rows, prompts, strict=True) if self.args.ablate in prompt.modalities
            ]
            if ablated_rows:
                new_entries = self._answer_without_media(ablated_rows, seed)
                for record in records:
                    record |= new_entries.get(record["index"], {})
            elif self.policy.is_collective and rows:  # other ranks may have ablated rows, and would wait for this call
                self._answer_without_media(rows, seed)
        for row, record in zip(rows, records, strict=True):
            row = class_names(dict(row))
            columns = {name: row[name] for name in row if name not in record and name not in MEDIA_COLUMNS}
            self.unstorable_columns.update(name for name, value in columns.items() if not _is_plain(value))
            if self.args.group_by is not None:
                # A separate entry, because `_result` drops a column that parquet can't hold, and an entry of the
                # record with the column's name hides the column
                columns[GROUP] = str((record if self.args.group_by == "prompt" else row).get(self.args.group_by))
            record |= columns
        return records

    # Prompts

    def _read_rollout(self, rows: Sequence[Row], ablates: bool = False) -> tuple[Prompted | None, dict[int, str]]:
        """
        Returns the rollout of readable rows, and the errors of unreadable rows by row index. The rollout is `None` if
        no row is readable. With `ablates`, a view replaces media of the ablated modality.
        """
        if not self.toolbox.factories:
            for row in rows:
                check_has_prompt(row)
        try:
            return self._collect(rows, ablates), {}
        except MediaError:
            if not self.skips_unreadable:
                raise
        errors: dict[int, str] = {}
        for row in rows:
            try:
                self._collect([row], ablates)
            except MediaError as error:
                errors[row.row_index] = str(error)
        readable_rows = [row for row in rows if row.row_index not in errors]
        if not readable_rows and self.policy.is_collective:
            raise MediaError(
                "No row of a batch can be read, and other ranks wait for its completions; make `batch_size` "
                f"larger. Error of the last row: {errors[rows[-1].row_index]}"
            )
        return self._collect(readable_rows, ablates) if readable_rows else None, errors

    def _collect(self, rows: Sequence[Row], ablates: bool) -> Prompted:
        """A row has `num_samples` entries, next to one another."""
        n = self.args.num_samples
        messages = self.encoder.messages(rows)
        for row, prompt in zip(rows, messages, strict=True):
            if self.policy.tool_loop is not None and isinstance(prompt, str) and not self.toolbox.factories:
                raise ValueError(f"The prompt of row {row.row_index} is a text, but tools need a list of messages.")
        encoded_rows = []
        for row, restored, prompt in zip(rows, restore_rows(rows, self.encoder.media_rules), messages, strict=True):
            encoded_rows += [EncodedRow(row.row_index, restored, row, prompt)] * n
        return collect(
            encoded_rows,
            self.encoder,
            self.toolbox,
            encodes_text=True,
            group_size=n,
            pad_token_id=self.policy.config.pad_token_id,
            accelerator=self.accelerator,
            views={row.row_index: self._view(row) for row in rows} if ablates else None,
        )

    def _view(self, row: Row) -> View:
        """
        Returns the view that replaces a row's ablated media. A view that needs other media, such as `"other_row"`,
        gets the media of another row: the first with different media, from a random row index on.
        """
        modality = str(self.args.ablate)
        view = as_view(self.args.ablate_with).for_modality(modality).seeded(self.args.seed, row.row_index)
        if not view.type.needs_other:
            return view
        if self.toolbox.factories:
            raise ValueError(
                f"`ablate_with={self.args.ablate_with!r}` needs media of other rows, but environments show media "
                "that no row has; set `ablate_with='blank'`."
            )
        media = self._media_of(row, modality)
        if not media:
            return view
        n = len(self.dataset)
        start = int(np.random.default_rng([self.args.seed, row.row_index]).integers(n))
        for index in range(start, start + n):
            try:
                other_media = self._media_of(self.read_row(index % n), modality)
            except MediaError:  # the batch of that row reports the error
                continue
            if other_media and not same_prompt(other_media, media):
                return view.with_others(other_media)
        raise media[0].error(f"no other row has a different {modality} to replace it with; set `ablate_with='blank'`")

    def _media_of(self, row: Row, modality: str) -> list[MediaRef]:
        check_has_prompt(row)
        return [ref for ref in iter_refs(self.encoder.messages([row])) if ref.modality == modality]

    # Answers

    def _answer_without_media(self, rows: Sequence[Row], seed: int) -> dict[int, dict[str, Any]]:
        """
        Samples completions without the ablated media. Returns `completions_without` and `correct_without`, further
        entries of records, by row index. Metrics that reward functions log are dropped.
        """
        rollout, _ = self._read_rollout(rows, ablates=True)
        set_seed(seed)  # the seed of the answers with media, so that only the media differ
        n_logged = len(self.logged_metrics)
        row_entries = self._answer_rollout(rollout)
        del self.logged_metrics[n_logged:]
        row_indices = [] if rollout is None else rollout.source.row_indices[:: self.args.num_samples]
        names = ("completions", "correct")
        return {
            row_index: {f"{name}_without": entries[name] for name in names}
            for row_index, entries in zip(row_indices, row_entries, strict=True)
        }

    def _answer_rollout(self, rollout: Prompted | None) -> list[dict[str, Any]]:
        if rollout is None:
            return []
        parts = map(rollout.select, rollout.parts(self.args.batch_size))
        trajectories: list[Trajectory] = []
        if self.policy.tool_loop is None:
            ids = [*chain.from_iterable(self.policy.sample(part.prompts)[0] for part in parts)]
            rollout = with_one_turn(rollout, ids, self.encoder.processor)
            texts = texts_of(rollout, ids, self.tokenizer)
            final_texts = texts
        else:
            trajectories += chain.from_iterable(map(self._sample_turns, parts))
            rollout = with_turns(rollout, trajectories)
            # Texts of all messages, and of the last message alone, which has the answer
            texts = [as_text(strip_media(messages)) for messages in rollout.source.completions]
            final_texts = [str(strip_media(messages[-1])["content"]) for messages in rollout.source.completions]
        rollout = self.reward_functions.with_sounds(rollout)
        rewards, extras = self._reward_completions(rollout)
        first_rewards = next(iter(rewards.values()))
        columns: dict[str, list] = {
            "completions": texts,
            "extracted_answers": [
                extracted_answer(text, class_names(row.get("choices")))
                for text, row in zip(final_texts, rollout.source.rows, strict=True)
            ],
            "correct": [None if reward is None else reward >= self.args.correct_threshold for reward in first_rewards],
            "completion_lengths": [
                sum(turn.stop - turn.start for turn in turns) for turns in rollout.source.sampled_turns
            ],
            "truncated": [not self.ends.end(ids, self.tokenizer) for ids in rollout.source.ids],
            **{f"reward/{name}": values for name, values in rewards.items()},
            **{f"extra/{name}": values for name, values in extras.items()},
        }
        if rollout.source.sounds is not None:
            columns["speech_seconds"] = [
                None if sound is None else seconds_of(sound) for sound in rollout.source.sounds
            ]
        if self.policy.tool_loop is not None:
            counts = [trajectory.counts for trajectory in trajectories]
            columns["tool_calls"] = [count["calls"] for count in counts]
            columns["tool_failures"] = [count["failures"] for count in counts]
            columns["unparsed_calls"] = [count["unparsed"] for count in counts]
            columns["environment_failures"] = [
                None if error is None else str(error) for error in rollout.source.failures
            ]
            columns["ended_by"] = [next((limit for limit in LIMITS if count[limit]), None) for count in counts]
        n = self.args.num_samples
        return [
            {
                "prompt": as_text(strip_media(rollout.source.messages[i])),
                # An environment may show other media in each run
                "fingerprint": None if self.toolbox.factories else checksum(rollout.source.messages[i]),
                **{name: values[i : i + n] for name, values in columns.items()},
            }
            for i in range(0, len(rollout), n)
        ]

    def _sample_turns(self, rollout: Prompted) -> list[Trajectory]:
        """Samples a trajectory per prompt: all turns within the limits of `args`."""
        policy = self.policy
        args = self.args
        branches = Branches()

        def sample(prompts: list[EncodedPrompt], max_lengths: list[int]) -> Samples:
            return policy.sample(prompts, room=max_lengths, branches=branches)[0], None

        ids, _ = policy.sample(rollout.prompts, branches=branches)
        limits: dict[str, Any] = {"max_turns": args.max_tool_calling_iterations, "max_media": args.max_tool_media}
        limits["max_context_media"] = args.max_context_media
        assert policy.tool_loop is not None
        loop = policy.tool_loop(
            encoder=self.encoder,
            complete=sample,
            branches=branches,
            max_length=args.max_completion_length,
            end_ids=policy.config.eos_token_id,
            loop=self.loop,
            **{name: limit for name, limit in limits.items() if limit is not None},
        )
        return run_turns(rollout, ids, None, loop)

    def _reward_completions(self, rollout: Prompted) -> tuple[dict[str, list[float | None]], dict[str, list]]:
        """Also returns the columns that functions passed to `log_extra`."""
        extras: dict[str, list] = {}
        logs: dict[str, Callable[..., None] | None] = {
            "log_extra": lambda column, values: extras.__setitem__(column, list(values)),
            "log_metric": lambda name, value: self.logged_metrics.append((name, float(value))),
        }
        reward_functions = replace(self.reward_functions, logs=logs, loop=self.loop)
        rewards = reward_functions(rollout, self.policy.trainer_state, self.encoder.media_rules)
        for column, values in extras.items():
            if len(values) != len(rollout):
                raise ValueError(
                    f"`log_extra` got {len(values)} values of {column!r} for {len(rollout)} completions; pass one "
                    "value per completion."
                )
        return rewards, extras


def generation_config(encoder: PromptEncoder, args: EvaluationConfig) -> GenerationConfig:
    """Of the model's own config, only the EOS and suppressed tokens apply."""
    tokenizer = tokenizer_of(encoder.processor)
    default = encoder.model.generation_config
    eos_token_ids = default.eos_token_id if isinstance(default.eos_token_id, list) else [default.eos_token_id]
    eos_token_ids = [
        token_id for token_id in dict.fromkeys([tokenizer.eos_token_id, *eos_token_ids]) if token_id is not None
    ]
    # A sampled placeholder would stand for media that don't exist
    suppressed = all_placeholder_ids(encoder.model, encoder.processor) | set(default.suppress_tokens or [])
    sampling = {"do_sample": False}
    if args.temperature > 0:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    return GenerationConfig(
        max_new_tokens=args.max_completion_length,
        eos_token_id=eos_token_ids,
        pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        suppress_tokens=sorted(suppressed) or None,
        disable_compile=True,
        **sampling,
    )


def _is_plain(value: Any) -> bool:
    """Returns whether parquet can hold a value: text, a number, `None`, or lists and dictionaries of these."""
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (str, bool, int, float))
