# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Base of the trainers on datasets with completions (SFT, DPO, KTO and reward models)."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Literal

import torch
from accelerate.logging import get_logger
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from torch import nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import ModelOutput

from ...algorithms.metrics import latest, weighted_mean
from ...checks.run_checks import Checks
from ...checks.sequence_check import check_pairs
from ...data.reading.refs import MediaError, OverlongRow
from ...data.rows.batches import BatchShape, DatasetRows, Row, seeded_order
from ...data.rows.features import holds_files
from ...data.rows.unread import lists_columns
from ...encoding.concatenated import PART_LENGTHS
from ...encoding.processors import tokenizer_of
from ...encoding.sequences import PreferencePair, SupervisedSequence
from ...families import family_of
from ...forward.attention import install_prefix_attention
from ...forward.encoders import install_encoder_attention
from ...forward.head import add_fused_head
from ...forward.masks import sharing_obstacle
from ...forward.scores import Scores
from ...models.parts import check_adapter
from ...models.pretrained import load_model
from ...models.wrapped import replaced
from ...policy import Fallbacks, PolicyForward
from ...reporting.card_notes import CardNotes
from ...reporting.console import console_of
from ...rollout.row_pass import ReadRow
from ...rollout.stream import NONE_LEFT, EncodedRow, RowStream, warn_of_positions
from ..base.argument_checks import check_arguments
from ..base.dataset_checks import check_held_out, modalities, unchecked_datasets, warn_of_unread_media
from ..base.loading import Models, load_parts
from ..base.logs import ReadMetrics
from ..base.optimizer import freeze_and_check
from ..base.preparation import compile_models, disable_dropout
from ..base.setup import check_launch
from ..base.signatures import EvalRows, Processor, Rows
from ..base.trainer import BaseTrainer
from .token_columns import TokenColumns


logger = get_logger(__name__)

Batch = dict[str, Any]
NumItems = torch.Tensor | int | None


class CompletionTrainer(BaseTrainer):
    """
    Base of the trainers on datasets with completions. A subclass sets TRL's `data_collator` to a
    [`~trainers.reading.collator.RowCollator`].
    """

    data_collator: Any
    # Returns loss and scores from the model, a micro-batch, and the number of learned tokens in the update
    _loss: Callable[[nn.Module, Batch, NumItems], tuple[torch.Tensor, Scores]]
    _unchecked_datasets: set[str]  # dataset arguments whose columns are checked in the first batch
    _warned_of_positions = False
    _n_cut = 0  # rows of text that `max_length` has cut
    _n_longer = 0  # rows with media that were longer
    _needs_plain_rows = False  # whether TRL's own forward computes the loss, from unpacked rows
    _keeps_outputs = False  # whether `_outputs` returns predictions for `compute_metrics`
    # The evaluator and the model card read these
    environment_factories = tools = None
    use_vllm = False
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_length = 256

    def _set_up_scoring(
        self,
        datasets: Mapping[str, EvalRows],
        columns: Sequence[str] | None,
        packs: bool,
        outputs: tuple[str, ...],
        load_processor: Callable[[], Processor],
        check: Callable[..., Any] = check_pairs,
    ) -> None:
        """
        Freezes parts of the model, and sets up the stream of rows, with `columns` (`None`: all), and the forward that
        scores them, packed with `packs` if the models allow it. `check` compares the first rows with the processor's
        outputs.
        """
        self._load_processor = load_processor
        self.add_callback(ReadMetrics(self._metric_log))
        freeze_and_check(self.model, self.args, self.optimizer)
        disable_dropout(self.args, self.model, self.ref_model)
        self.card_notes = CardNotes()
        self._token_columns = TokenColumns(self.data_collator.token_columns, self.data_collator.token_names)
        self._stream = RowStream(
            self.args,
            self.accelerator,
            encode=self.data_collator.encode,
            columns=columns,
            may_drop=None if self.args.max_length is None else self.data_collator.may_drop,
            metrics=self._metric_log,
            state=lambda: self.state,
        )
        self.train_dataset = self._concatenated(self._without_overlong(self.train_dataset, "train"), "train")
        self.eval_dataset = map_splits(self.eval_dataset, partial(self._without_overlong, split="eval"))
        self.eval_dataset = map_splits(self.eval_dataset, partial(self._concatenated, split="eval"))
        self._unchecked_datasets = unchecked_datasets(datasets)
        models = [self._unwrapped(module) for module in (self.model, self.ref_model) if module is not None]
        obstacle = next(filter(None, map(sharing_obstacle, models)), None)
        if obstacle and packs:
            logger.warning(f"Rows are padded (see `packing`): {obstacle}.")
        # Reward models need no fused head, and have no `outputs`
        has_heads = [not outputs or add_fused_head(model, outputs=outputs) for model in models]
        if not all(has_heads):
            logger.warning(
                f"{models[0].config.model_type}: TRL's fused head doesn't support what the model does around its "
                "LM head, so log-probabilities are computed from whole logits, which need more memory."
            )
        for model in models:
            install_encoder_attention(model)
            if not obstacle:  # also for padded rows, which need this attention's corrections
                install_prefix_attention(model)
        compile_models(self.accelerator, self.args, self.model, self.ref_model)
        # `outputs` begin with log-probabilities and entropies, which every request returns
        packing = packs and not obstacle
        fallbacks = Fallbacks(packing, family_of(models[0]).isolate, logits_from_model=not all(has_heads))
        options = {"max_tokens": self.args.max_tokens_per_microbatch, "extra_outputs": outputs[2:]}
        self._policy = PolicyForward(self.accelerator, self.processing_class, fallbacks, **options)
        self.checks = Checks(self._policy, self.accelerator)
        self._check_rows = check
        self._stream.is_new(self.train_dataset)
        self._check_held_out(self.eval_dataset)

    def _show_tokens(self) -> None:
        """Lets the rows of the trainer's datasets have TRL's columns of tokens. Runs at the end of a constructor."""
        self.train_dataset = self._token_columns.shown(self.train_dataset)
        self.eval_dataset = map_splits(self.eval_dataset, self._token_columns.shown)

    def _fingerprints(self) -> dict[str, dict[str, Any]]:
        with replaced(self, train_dataset=self._token_columns.source(self.train_dataset)):
            return super()._fingerprints()

    def _concatenates(self, dataset: Rows, split: str) -> bool:
        return False

    def _concatenated(self, dataset: Rows, split: str) -> Rows:
        return dataset

    def _without_overlong(self, dataset: Rows, split: str) -> Rows:
        """
        Returns a dataset without the rows of text that raise an `OverlongRow`, and writes them into the file of
        skipped rows. Such rows of streams, of datasets with a transform and among rows with media are skipped when
        they are read. Raises `MediaError` if no row is left.
        """
        if self.args.max_length is None or not isinstance(dataset, Dataset) or not lists_columns(dataset):
            return dataset
        if holds_files(dataset):
            return dataset
        collator = self.data_collator
        errors = dict[int, str]()
        rows = DatasetRows(dataset)
        for index in range(self.accelerator.process_index, len(rows), self.accelerator.num_processes):
            if collator.may_drop(rows[index]):
                try:
                    collator.encode(rows[index])
                except OverlongRow as error:
                    errors[index] = str(error)
                except ValueError:
                    pass  # raised again when the run reads the row
        errors = dict(sorted(gather_object(list(errors.items()))))
        if not errors:
            return dataset
        if len(errors) == len(dataset):
            raise MediaError(NONE_LEFT + [*errors.values()][-1])
        file = self._stream.write_errors(errors, split)
        logger.warning(
            f"{len(errors)} of the {len(dataset)} rows of the {split} dataset are left out, because they don't fit "
            f"into `max_length` ({self.args.max_length}); they are listed in {file}."
        )
        return dataset.select([index for index in range(len(dataset)) if index not in errors])

    def _row_readers(self) -> dict[str, tuple[Any, ReadRow]]:
        source = self._token_columns.source
        eval_rows = map_splits(self.eval_dataset, source)
        return {
            "train_dataset": (source(self.train_dataset), self._read_row),
            "eval_dataset": (eval_rows, self._read_row),
        }

    def _read_row(self, row: Row) -> list:
        is_tokenized = row.get("input_ids") or row.get("chosen_ids") or row.get(PART_LENGTHS)
        return [] if is_tokenized else self.data_collator.read(row)

    def _train_loader(self) -> DataLoader:
        args = self.args
        ranks = (self.accelerator.num_processes, self.accelerator.process_index)
        order = partial(seeded_order, seed=args.order_seed)
        return self._stream.train_loader(
            self._token_columns.source(self.train_dataset),
            # One sequence per row, and one micro-batch per batch
            BatchShape(args.per_device_train_batch_size, 1, 1, *ranks, drop_last=args.dataloader_drop_last),
            # An update first reads all its micro-batches, to count their labels. So the prefetch covers whole updates
            args.media_prefetch * args.gradient_accumulation_steps,
            order if args.train_sampling_strategy == "random" else None,
            collate_fn=partial(self._collate, split="train"),
        )

    def _eval_loader(self, dataset: Any, is_argument: bool, whole: bool = False) -> DataLoader:
        dataset = self._token_columns.source(dataset)
        if is_argument:  # passed to `evaluate`, so the constructor hasn't prepared it
            is_new = self._stream.is_new(dataset)
            if is_new:
                takes = modalities(self.data_collator.model, self.args)
                warn_of_unread_media(self.args, {"eval_dataset": dataset}, takes, supervised=True)
            dataset = self.data_collator.prepare(dataset, "eval")
            if self._concatenates(dataset, "eval"):
                dataset = self._concatenated(self._without_overlong(dataset, "eval"), "eval")
            if is_new:
                self._check_held_out(dataset)
        collate = partial(self._collate, split="eval")
        return self._stream.eval_loader(dataset, 1, self._get_eval_sampler, whole=whole, collate_fn=collate)

    def _check_held_out(self, dataset: EvalRows) -> None:
        datasets = {"eval_dataset": dataset}
        takes = modalities(self.data_collator.model, self.args)
        self._unchecked_datasets |= unchecked_datasets(datasets)
        check_held_out(self.args, datasets, self._stream, takes, supervised=True)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: NumItems = None
    ) -> Any:
        if self._needs_plain_rows or (return_outputs and not self._keeps_outputs):
            rows = self._plain_rows(inputs)
            n_counted = inputs["n_counted"]
            n_learned = (rows["labels"][:n_counted, 1:] != -100).sum()
            self._loss_weight = n_learned if self.compute_loss_func is None else n_counted
            with self._metrics_of_trl() as means:
                loss = super().compute_loss(model, rows, return_outputs, num_items_in_batch)
            weights = dict.fromkeys(("entropy", "mean_token_accuracy"), n_learned)
            n_tokens = latest(means.pop("num_tokens"))
            metrics = {name: weighted_mean(mean, weights.get(name, n_counted)) for name, mean in means.items()}
            self._metric_log.add({"num_tokens": n_tokens, **metrics})
            return loss
        if self.args.self_check and self.model.training:
            processor_outputs = partial(inputs["plain"], cache(self._load_processor))
            self.checks.on_rows(
                partial(self._check_rows, processor_outputs=processor_outputs),
                model,
                inputs["sequences"],
            )
        self._loss_weight = None if self.model.training else self._weight(inputs)
        loss, scores = self._loss(model, inputs, num_items_in_batch)
        if scores.deferred is not None:
            # `Trainer` divides the loss by the accumulation steps if it doesn't count tokens
            divisor = self.current_gradient_accumulation_steps if num_items_in_batch is None else 1
            loss = self._backward_by_parts(model, loss, scores.deferred, divisor)
        return (loss, self._outputs(model, inputs, scores)) if return_outputs else loss

    def _weight(self, inputs: Batch) -> torch.Tensor | int:
        """Returns the number of rows, or of tokens, over which the loss of a micro-batch is a mean."""
        return inputs["n_counted"]

    def _outputs(self, model: nn.Module, inputs: Batch, scores: Scores) -> SequenceClassifierOutput:
        return SequenceClassifierOutput(logits=scores.values)

    def _loss_of_trl(
        self, rows: Batch, *outputs: SimpleNamespace | ModelOutput
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """
        Returns TRL's loss for padded rows, and its metrics of this micro-batch on all ranks. Each call of the model
        gets the next output.
        """
        remaining_outputs = iter(outputs)
        with self._metrics_of_trl() as means:
            loss = super().compute_loss(lambda **kwargs: next(remaining_outputs), rows)
        return loss, means

    @contextmanager
    def _metrics_of_trl(self) -> Iterator[dict[str, float]]:
        """Yields a dictionary, which gets the metrics that TRL's code within the context writes."""
        means: dict[str, float] = {}
        written = {mode: defaultdict(list) for mode in ("train", "eval")}
        with replaced(self, _metrics=written):
            yield means
        means.update({name: values[-1] for name, values in written[self._metric_log.mode].items()})

    def _plain_rows(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Returns a micro-batch for TRL's own forward, which keeps logits. By default, raises `ValueError`."""
        raise ValueError("This trainer keeps no logits for `compute_metrics`; drop `compute_metrics`.")

    def _collate(self, rows: Sequence[EncodedRow], split: Literal["train", "eval"]) -> dict[str, Any]:
        batch = self.data_collator(rows)
        name = f"{split}_dataset"
        model = self.data_collator.model
        stored = [encoded.stored for encoded in rows]
        sequences = batch["sequences"]
        if name in self._unchecked_datasets:
            self._unchecked_datasets.remove(name)
            first_rows = {name: [dict(row) for row in stored]}
            warn_of_unread_media(
                self.args, first_rows, modalities(model, self.args), dataset_part="first", supervised=True
            )
        if not self._warned_of_positions:
            self._warned_of_positions = warn_of_positions(sequences, [sequence.row for sequence in sequences], model)
        prompts = [row.get("prompt") or (row.get("messages") or [])[:-1] for row in stored]  # without the answer
        # `prompts` of preferences also have the media of their completions
        row_modalities = (encoded.modalities for encoded in batch.get("prompts", sequences))
        self.card_notes.add(set().union(*stored), filter(None, prompts), row_modalities)
        if split == "train":
            self._show_example(stored[0], sequences[0])
            self._count_lengths(sequences)
        return batch

    def _count_lengths(self, sequences: Sequence[SupervisedSequence | PreferencePair]) -> None:
        """Counts rows of text that `max_length` cuts, and longer rows with media, which it leaves whole."""
        max_length = self.args.max_length
        if max_length is None:
            return
        n_cut = sum(sequence.is_cut for sequence in sequences)
        n_longer = sum(not sequence.is_cut and longest_of(sequence) > max_length for sequence in sequences)
        counts = self.accelerator.gather(torch.tensor([[n_cut, n_longer]], device=self.args.device)).sum(0).tolist()
        self._n_cut += counts[0]
        self._n_longer += counts[1]
        numbers = {"rows/cut": self._n_cut, "rows/longer_with_media": self._n_longer}
        self._metric_log.add({name: latest(number) for name, number in numbers.items() if number}, mode="train")

    def _show_example(self, row: Row, sequence: SupervisedSequence | PreferencePair) -> None:
        display = console_of(self.callback_handler.callbacks) if self.is_world_process_zero() else None
        if display is not None and display.needs_example:
            prompt, target, rejected = sequence.example()
            collator = self.data_collator
            messages = collator.conversation(row) if sequence.modalities else None
            display.show_example(
                collator.model, self.processing_class, prompt, messages, target, rejected_ids=rejected
            )

    def _rollout_state(self) -> dict[str, Any]:
        return {**super()._rollout_state(), "num_tokens": self._total_train_tokens}

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        super()._load_rollout_state(state)
        self._total_train_tokens = state["num_tokens"]


def load_for_scoring(
    arguments: dict[str, Any], datasets: dict[str, Any], load: Callable[..., PreTrainedModel] = load_model
) -> Models:
    """Checks the `arguments` of a trainer that reads completions, and returns the parts that [`load_parts`] loads."""
    check_arguments(**arguments)
    model = arguments["model"]
    args = arguments["args"]
    check_launch(args, model)
    warn_of_unread_media(args, datasets, modalities(model, args), supervised=True)
    set_seed(args.seed)  # as TRL does before it loads a model
    loaded = load_parts(model, args, arguments["processing_class"], arguments["quantization_config"], 0, load)
    check_adapter(loaded.model, arguments["peft_config"], args.takes_prompt_learning)
    if getattr(args, "pad_token", None) is not None:  # KTO has no such option
        set_pad_token(loaded.model, loaded.processing_class, args.pad_token)
    return loaded


def set_pad_token(model: PreTrainedModel, processing_class: Processor, token: str) -> None:
    """Sets the padding token of a tokenizer and a model, as in TRL. Raises `ValueError` for an unknown token."""
    tokenizer = tokenizer_of(processing_class)
    if token not in tokenizer.get_vocab():
        raise ValueError(
            f"The specified `pad_token` ('{token}') is not found in the vocabulary of the given `processing_class` "
            f"({type(processing_class).__name__}); name one of its tokens, or leave it out."
        )
    tokenizer.pad_token = token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if getattr(model, "generation_config", None) is not None:  # a reward model has none
        model.generation_config.pad_token_id = tokenizer.pad_token_id


def longest_of(sequence: SupervisedSequence | PreferencePair) -> int:
    """Returns the number of tokens of a row, for a pair with the longer completion."""
    sides = sequence.sides if isinstance(sequence, PreferencePair) else []
    return len(sequence) + max((len(side.ids) for side in sides), default=0)


def map_splits(dataset: EvalRows, function: Callable[[Rows], Rows]) -> EvalRows:
    """Applies a function to a dataset or to each of a dictionary of datasets. Returns `None` for `None`."""
    if isinstance(dataset, dict):
        return {name: function(split) for name, split in dataset.items()}
    return None if dataset is None else function(dataset)
