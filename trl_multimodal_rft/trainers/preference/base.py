# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The base of trainers that compare completions with a reference model: DPO and KTO."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import ProcessorMixin
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils import ModelOutput

from ...algorithms.metrics import average
from ...checks.measure import Measure
from ...checks.media_contribution import media_contribution
from ...data.rows.unread import lists_columns
from ...encoding.processors import tokenizer_of
from ...forward.scores import ScoreRequest, Scores
from ...models.modes import evaluation_mode
from ...models.parts import check_base_is_kept, kept_requires_grad
from ...models.wrapped import is_unsharded, replaced
from ..base.loading import CONSTRUCTOR_OPTIONS, Models, load_reference, loading_in_trl
from ..base.logs import is_due
from ..base.signatures import Processor, Rows
from ..reading.trainer import Batch, CompletionTrainer, map_splits
from .data import completions_to_score


def _check_no_stream(dataset: Rows) -> None:
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "`precompute_ref_log_probs=True` is not supported with IterableDataset, whose rows are read only once; "
            "pass a `Dataset`, or drop the option."
        )


class PreferenceTrainer(CompletionTrainer):
    """
    Base of trainers with a loss that compares log-probabilities of completions under policy and reference.

    TRL's loss reads the reference's log-probabilities from a micro-batch, under the names in the collator's
    `reference_columns`. The dataset has these columns, or the log-probabilities are computed for the micro-batch.
    """

    _keeps_outputs = True
    _contribution_step = -1  # latest step at which the contribution of media was measured

    def _call_trl_constructor(
        self,
        constructor: Callable[..., None],
        arguments: dict[str, Any],
        loaded: Models,
        stand_in_columns: dict[str, list],
    ) -> None:
        """Runs TRL's constructor on a few stand-in rows, since it would tokenize the real datasets."""
        args = arguments["args"]
        datasets = {name: arguments[name] for name in ("train_dataset", "eval_dataset")}
        self._reference_is_initial_policy = arguments["ref_model"] is None
        if self._reference_is_initial_policy:
            remedy = "pass `ref_model`"
            check_base_is_kept(loaded.model, arguments["peft_config"], "the reference", remedy, args.freeze or ())
            arguments["ref_model"] = load_reference(
                loaded.model, args, arguments["peft_config"], arguments["quantization_config"]
            )
        with (
            loading_in_trl(args, loaded.by_name),
            # TRL's constructor would score padded rows, have DDP look for parameters without a gradient, and refuse
            # to cut the beginning of rows with images
            replaced(args, precompute_ref_log_probs=False, ddp_find_unused_parameters=False, **CONSTRUCTOR_OPTIONS),
            replaced(args, max_length=None),
        ):
            arguments |= {"model": loaded.model, "processing_class": loaded.processing_class}
            if datasets["train_dataset"] is not None:  # without a dataset, TRL raises an error
                arguments["train_dataset"] = _stand_in_rows(
                    datasets["train_dataset"], loaded.processing_class, stand_in_columns
                )
            if datasets["eval_dataset"] is not None:
                arguments["eval_dataset"] = _stand_in_rows(None, loaded.processing_class, stand_in_columns)
            constructor(**arguments)
        self.train_dataset, self.eval_dataset = datasets.values()
        self._is_vision_dataset = True  # so that TRL doesn't tokenize the rows of `evaluate`
        self.precompute_ref_logps = args.precompute_ref_log_probs

    # Reference

    def _precompute_reference(self, batch_size: int, eval_batch_size: int | None = None) -> None:
        """
        Adds columns with the reference's log-probabilities to the datasets, and drops the reference. `batch_size` is
        the batch size for the training dataset, and `eval_batch_size` for others, by default that of evaluations.
        """
        if self.ref_model is None and not is_unsharded(self.accelerator):
            raise ValueError(
                "With an adapter, `precompute_ref_log_probs=True` scores with the model before training begins, "
                "when FSDP or DeepSpeed hasn't sharded it yet; drop the option."
            )
        with replaced(self.args, per_device_eval_batch_size=batch_size):
            self.train_dataset = self._with_reference_columns(self.train_dataset, whole=True)
        with replaced(self.args, per_device_eval_batch_size=eval_batch_size or self.args.per_device_eval_batch_size):
            self.eval_dataset = map_splits(self.eval_dataset, self._with_reference_columns)
        self.ref_model = None

    def compute_ref_log_probs(self, model: nn.Module, inputs: Batch) -> tuple[Any, ...]:
        """
        Computes the reference's log-probabilities of a micro-batch.

        Args:
            model ([`~torch.nn.Module`]):
                The reference, or with PEFT the policy, whose adapter is disabled meanwhile.
            inputs (`dict`):
                Micro-batch of the collator.

        Returns:
            `tuple` of `torch.Tensor`: For each side of the `B` rows, the sums over the tokens of its completions,
            `(B,)`. In DPO, the sides are the chosen completion, the rejected one and, with `rejected_view`, the chosen
            one under the view, which is NaN for pairs without a view. In KTO, they are the row's completion and the
            one in the KL estimate, `None` if the loss has no KL estimate.
        """
        unread: list[torch.Tensor] = []  # log-probabilities of the completions that TRL hasn't read yet

        def score(input_ids: torch.Tensor, **kwargs: torch.Tensor) -> SimpleNamespace:
            # In place of a model, which TRL's method calls once or twice. The first call scores all completions
            logps = unread.pop() if unread else self._score(model, inputs).logps
            unread.append(logps[len(input_ids) :])
            return SimpleNamespace(log_probs=logps[: len(input_ids)])

        trl: Any = super()
        with kept_requires_grad(self._unwrapped(self.model)):
            logps = trl.compute_ref_log_probs(score, self._as_trl_batch(inputs))
        if len(logps) >= len(self.data_collator.reference_columns):
            return logps
        # TRL's method knows no completions under a view
        under_view = torch.full_like(logps[0], torch.nan)
        under_view[inputs["viewed"]] = unread[0].sum(1)
        return *logps, under_view

    def _score_reference(self, inputs: Batch) -> dict[str, torch.Tensor]:
        logps = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
        return dict(zip(self.data_collator.reference_columns, logps, strict=False))

    def _with_reference_columns(self, dataset: Rows, whole: bool = False) -> Dataset:
        """Skipped rows get NaN, and -1 as an index. With `whole`, batches are those of training."""
        _check_no_stream(dataset)
        assert isinstance(dataset, Dataset)
        batch_columns: list[dict[str, torch.Tensor]] = []
        with evaluation_mode(self.model):
            for batch in self._eval_loader(dataset, is_argument=True, whole=whole):
                columns = self._score_reference(self._prepare_inputs(batch))
                batch_columns.append(
                    {name: self.accelerator.gather_for_metrics(columns[name]).cpu() for name in columns}
                )
        kept_indices = [i for i in range(len(dataset)) if i not in self._stream.left_out(dataset)]
        for name in batch_columns[0]:
            column = torch.cat([columns[name] for columns in batch_columns])
            if len(column) != len(kept_indices):
                raise ValueError(
                    f"The reference scored {len(column)} of {len(kept_indices)} rows; with "
                    "`precompute_ref_log_probs=True`, don't set `dataloader_drop_last`."
                )
            fill_value = torch.nan if column.is_floating_point() else -1
            whole_column = torch.full((len(dataset),), fill_value, dtype=column.dtype)
            whole_column[kept_indices] = column
            dataset = dataset.add_column(name, whole_column.tolist())
        if not lists_columns(dataset) and self.data_collator.reference_columns[0] not in dataset[0]:
            raise ValueError(
                "`precompute_ref_log_probs=True` adds columns, which the dataset's transform leaves out; let the "
                "transform keep all columns, or use `map` in its place."
            )
        return dataset

    def _with_reference_logps(self, inputs: Batch) -> Batch:
        if all(name in inputs for name in self.data_collator.reference_columns):
            return inputs
        # Without its adapter, or before the first update, the policy can score as the reference
        policy_is_reference = is_peft_model(self.model) or (
            self._reference_is_initial_policy and self.state.global_step == 0
        )
        if self.args.precompute_ref_log_probs and self.ref_model is None and not policy_is_reference:
            raise ValueError(
                "Cannot compute reference log-probs for a dataset passed to `evaluate()`, because "
                "`precompute_ref_log_probs=True` keeps no reference; pass it to the trainer as `eval_dataset`."
            )
        return inputs | self._score_reference(inputs)

    def _eval_loader(self, dataset: Dataset | IterableDataset, is_argument: bool, whole: bool = False) -> DataLoader:
        if self.precompute_ref_logps:
            _check_no_stream(dataset)
        return super()._eval_loader(dataset, is_argument, whole)

    # Update

    def _loss_of_trl(
        self, rows: Batch, *outputs: SimpleNamespace | ModelOutput
    ) -> tuple[torch.Tensor, dict[str, float]]:
        with replaced(self, precompute_ref_logps=True):  # TRL's loss then reads them from its inputs
            return super()._loss_of_trl(rows, *outputs)

    def _score(self, model: nn.Module, inputs: Batch, compute_aux_loss: bool = False) -> Scores:
        """
        Returns scores in the order of `completion_ids`. Tokens that aren't learned score 0, since TRL's loss has no
        mask.
        """
        completions, packed = completions_to_score(self._policy, inputs)
        request = ScoreRequest(*completions, packed=packed, compute_aux_loss=compute_aux_loss)
        learned = inputs["learned"].bool()
        return self._policy.score(model, request).map_rows(lambda values: torch.where(learned, values, 0.0))

    def _as_trl_batch(self, inputs: Batch) -> Batch:
        """
        Returns a micro-batch in the format of TRL's loss. A padding token stands before each completion, because the
        loss doesn't score the first token. The mask marks learned tokens. A completion of the learned tokens 7 and 8
        becomes the row 0, 7, 8 with the mask 0, 1, 1.
        """
        n = sum(len(pair.counted_sides) for pair in inputs["sequences"])
        batch = {"input_ids": pad(inputs["completion_ids"][:n], (1, 0))}
        batch["completion_mask"] = pad(inputs["learned"][:n], (1, 0))
        names = ("attention_mask", "label", *self.data_collator.reference_columns)
        return batch | {name: inputs[name] for name in names if name in inputs}

    def _outputs(self, model: nn.Module, inputs: Batch, scores: Scores) -> SequenceClassifierOutput:
        measure = Measure(self._policy, model, has_engine_positions=False)
        sequences = (
            [pair.sequence(side, measure.model) for side in pair.counted_sides] for pair in inputs["sequences"]
        )
        # In the order of `completion_ids`: the first completions of all pairs, then the second ones
        rows = [*itertools.chain.from_iterable(zip(*sequences, strict=True))]
        ids = [row.input_ids for row in rows]
        pad_id = tokenizer_of(self.processing_class).pad_token_id
        # TRL's `prediction_step` returns `input_ids` as labels
        inputs["input_ids"] = pad_sequence(ids, True, pad_id).to(scores.logps.device)
        return SequenceClassifierOutput(logits=pad_sequence([measure.row_logits(row)[0] for row in rows], True))

    def _log_media_contribution(self, model: nn.Module, inputs: Batch) -> None:
        """
        Logs how far media move the log-probabilities of some completions: in training, of the first micro-batch of an
        update every `media_contribution_steps`; in evaluation, of the first micro-batch with media.
        """
        step = self.state.global_step
        interval = self.args.media_contribution_steps
        is_training = self.model.training
        n = len(inputs["sequences"])
        has_measured = not is_training and interval and self._metric_log.has("media/contribution")
        is_unmeasured = step != self._contribution_step if is_training else not has_measured
        if not interval or not is_unmeasured or (is_training and not is_due(interval, step, 1)):
            return
        self._contribution_step = step if is_training else self._contribution_step
        ids = inputs["completion_ids"][:n]
        mask = inputs["completion_mask"][:n]
        completions = inputs["prompts"][:n], ids, mask
        measured = media_contribution(self._policy, model, completions, mask, inputs["encode_view"])
        measured = self.checks.smoothed(measured) if is_training else measured
        self._metric_log.add({name: average(mean) for name, mean in measured.items()})


def _stand_in_rows(
    dataset: Rows, processing_class: Processor, stand_in_columns: dict[str, list]
) -> Dataset | IterableDataset:
    """
    Returns rows for TRL's constructor, as a stream if the dataset is one. With a processor, rows have an empty column
    of images, so that TRL doesn't tokenize them.
    """
    image_column = (
        {"image": [None] * len(stand_in_columns["prompt"])} if isinstance(processing_class, ProcessorMixin) else {}
    )
    rows = Dataset.from_dict(stand_in_columns | image_column)
    return rows.to_iterable_dataset() if isinstance(dataset, IterableDataset) else rows
