# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Trainer for supervised fine-tuning (SFT) with media."""

import textwrap
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from transformers import BitsAndBytesConfig, DataCollator, EvalPrediction, TrainerCallback, TrainingArguments
from trl import SFTTrainer
from trl.data_utils import get_dataset_column_names

from ...algorithms.metrics import latest, share, weighted_mean
from ...checks.sequence_check import check_sequences
from ...data.rows.features import undecoded
from ...data.rows.names import MEDIA_COLUMNS
from ...encoding.concatenated import PART_LENGTHS
from ...forward.scores import ScoreRequest, Scores
from ...models.wrapped import replaced, unwrapped
from ...reporting.model_card import common_lines
from ...rollout.ranks import sum_over_ranks
from ..base.loading import CONSTRUCTOR_OPTIONS, loading_in_trl
from ..base.setup import resolve_config
from ..base.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from ..reading.trainer import Batch, CompletionTrainer, NumItems, load_for_scoring, map_splits
from .concatenated_rows import Concatenator
from .config import MultimodalSFTConfig
from .data import SupervisedCollator, packs, splits_rows


# Columns that `remove_unused_columns` keeps, in addition to `dataset_text_field`
_COLUMNS = ("prompt", "completion", "messages", "tools", "chat_template_kwargs", *MEDIA_COLUMNS)
_COLUMNS += ("input_ids", "labels", "completion_mask", "assistant_masks", PART_LENGTHS)

# TRL's constructor prepares datasets, allows no collator with `packing`, and needs a chat template with generation
# markers for `assistant_only_loss`. The collator and the trainer do all of this themselves
_OPTIONS_IN_TRL = {
    "packing": False,
    "assistant_only_loss": False,
    "dataset_kwargs": {"skip_prepare_dataset": True},
}


class MultimodalSFTTrainer(CompletionTrainer, SFTTrainer):
    """
    Trainer for supervised fine-tuning (SFT) of models that see and hear.

    Extends [`~trl.SFTTrainer`] by audio and video. Loss, metrics and options are TRL's. Rows have the columns of
    reinforcement training, and are encoded in the same way, so that the trained model continues in
    [`MultimodalGRPOTrainer`] and [`MultimodalPPOTrainer`] with the same tokens and features.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train, as for [`~trl.SFTTrainer`].
        args ([`MultimodalSFTConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        data_collator (`None`, *optional*):
            Has its place as in TRL, and takes only `None`, since the trainer encodes and joins rows itself.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with `prompt` and `completion`, as text or messages, or with `messages`, and with the media columns
            that [`MultimodalGRPOTrainer`] takes. The loss is over all tokens of a completion or of `messages`, or with
            `assistant_only_loss` over the assistant's turns. A dataset without media may have `text`, or be
            tokenized, with `input_ids` and optionally `labels`.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        compute_loss_func (`Callable`, *optional*):
            See [`~trl.SFTTrainer`], for rows without media.
        compute_metrics (`Callable`, *optional*):
            See [`~trl.SFTTrainer`], for rows without media.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use.
        optimizer_cls_and_kwargs (`tuple`, *optional*):
            Optimizer class and its arguments, as for [`~trl.SFTTrainer`].
        preprocess_logits_for_metrics (`Callable`, *optional*):
            See [`~trl.SFTTrainer`], for rows without media.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a model given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the model.
        formatting_func (`Callable`, *optional*):
            Function that returns the text of a row without media, as for [`~trl.SFTTrainer`].

    Raises:
        `TypeError`: If `args` is a config of TRL's own.
        `ValueError`: If the model can't be trained, if ranks are to share rows (tensor, context or sequence
            parallelism), if a processor must be loaded by the name of a model without a name, or if a dataset has no
            columns to learn from, or media that a tokenizer can't encode.
    """

    _tag_names = ["trl", "sft", "trl-multimodal-rft"]
    _name = "SFT"
    _paper = {
        "title": "Training language models to follow instructions with human feedback",
        "id": "2203.02155",
        "citation": textwrap.dedent("""\
            @inproceedings{ouyang2022training,
                title     = {{Training language models to follow instructions with human feedback}},
                author    = {Long Ouyang and Jeff Wu and Xu Jiang and Diogo Almeida and others},
                year      = 2022,
                booktitle = {Advances in Neural Information Processing Systems 35},
            }"""),
    }

    def __init__(
        self,
        model: Model,
        args: MultimodalSFTConfig | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Rows = None,
        eval_dataset: EvalRows = None,
        processing_class: Processor | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: Adapter = None,
        formatting_func: Callable[[dict], str] | None = None,
    ):
        if type(args) is TrainingArguments:  # TRL accepts this class, too. `to_dict` hides the token
            options: dict[str, Any] = {**args.to_dict(), "hub_token": args.hub_token}
            args = MultimodalSFTConfig(**options)
        args = resolve_config(MultimodalSFTConfig, args, model)
        arguments = arguments_of(locals(), "formatting_func", "options")
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        loaded = load_for_scoring(arguments, datasets)
        model = loaded.model
        processing_class = loaded.processing_class

        collator = SupervisedCollator(unwrapped(None, model), processing_class, args, formatting_func)
        train_dataset = collator.prepare(train_dataset, "train")
        eval_dataset = collator.prepare(eval_dataset, "eval")
        with (
            loading_in_trl(args, loaded.by_name),
            replaced(args, **_OPTIONS_IN_TRL, **CONSTRUCTOR_OPTIONS),
        ):
            arguments |= {"model": model, "processing_class": processing_class, "data_collator": collator}
            arguments["eval_dataset"] = eval_dataset
            # The constructor reads the first row, whose media stay undecoded in Arrow's format
            is_dataset = isinstance(train_dataset, Dataset)
            arguments["train_dataset"] = train_dataset.with_format("arrow") if is_dataset else undecoded(train_dataset)
            super().__init__(**arguments)
        self.train_dataset: Any = train_dataset
        if args.completion_only_loss is None:  # TRL looks into a row, which has Arrow's format
            columns = get_dataset_column_names(train_dataset) or ()
            self.completion_only_loss = {"prompt", "completion"} <= {*columns}
        if self._needs_plain_rows and (args.packing or args.eval_packing or args.max_tokens_per_microbatch):
            raise ValueError(
                "Prompt learning and `compute_loss_func` forward padded rows whole; set `packing` and "
                "`eval_packing` to False, and drop `max_tokens_per_microbatch`."
            )
        # The loss is a mean over the learned tokens of an update, whatever the model's own forward does
        self.model_accepts_loss_kwargs = self._loss_shifts_labels = True
        self.chat_template = collator.chat_template
        self._concatenator = Concatenator(collator)
        keeps_all_columns = not args.remove_unused_columns or formatting_func is not None
        self._set_up_scoring(
            datasets,
            columns=None if keeps_all_columns else [*_COLUMNS, args.dataset_text_field],
            packs=bool(args.packing or args.eval_packing),
            outputs=("log_probs", "entropy", "is_top1"),
            load_processor=loaded.load_processor,
            check=check_sequences,
        )
        if args.shuffle_dataset:
            self.train_dataset = self.train_dataset.shuffle(seed=args.seed)
            self.eval_dataset = map_splits(self.eval_dataset, lambda dataset: dataset.shuffle(seed=args.seed))
        self._show_tokens()
        self._finish_setup()

    # Datasets

    def _concatenates(self, dataset: Rows, split: str) -> bool:
        return self._concatenator.takes(dataset, split)

    def _concatenated(self, dataset: Rows, split: str) -> Rows:
        return self._concatenator.concatenated(dataset, split) if self._concatenates(dataset, split) else dataset

    def _without_overlong(self, dataset: Rows, split: str) -> Rows:
        is_whole = splits_rows(self.args, split) and self._concatenates(dataset, split)
        return dataset if is_whole else super()._without_overlong(dataset, split)

    # Update

    def _loss(self, model: nn.Module, inputs: Batch, num_items_in_batch: NumItems) -> tuple[torch.Tensor, Scores]:
        args = self.args
        sequences = inputs["sequences"]
        targets = inputs["labels"][:, 1:]
        mask = targets != -100
        # Sequences hold their completions, so the lengths of further completions are 0
        packed = packs(args, "train" if self.model.training else "eval") and self._policy.worth_packing(
            sequences, [0] * len(sequences), len(sequences)
        )
        options = {"packed": packed, "compute_aux_loss": self.aux_loss_enabled, "whole": True}
        scores = self._policy.score(model, ScoreRequest(sequences, targets.clamp(min=0), mask.long(), **options))
        logps = scores.logps  # 0 on tokens that aren't learned
        per_token_loss = -logps * logps.exp().detach() if args.loss_type == "dft" else -logps
        n_tokens = mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = per_token_loss.sum() / torch.as_tensor(n_tokens).clamp(min=1)
        if args.average_tokens_across_devices and num_items_in_batch is not None:
            # `num_items_in_batch` counts the tokens of all ranks, and DDP averages gradients over ranks. The factor
            # turns the average into a sum
            loss = loss * self.accelerator.num_processes
        if self.aux_loss_enabled:  # a mean over the micro-batch, which an update averages over its micro-batches
            n_steps = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * scores.aux_loss / n_steps
        self._log_scores(scores, mask, sum(map(len, sequences)), inputs["n_counted"])
        return loss, scores

    def _weight(self, inputs: Batch) -> torch.Tensor | int:
        return (inputs["labels"][: inputs["n_counted"], 1:] != -100).sum()

    def _log_scores(self, scores: Scores, mask: torch.Tensor, n_tokens: int, n_counted: int) -> None:
        """
        Logs TRL's metrics of a micro-batch, whose first `n_counted` rows count. `mask`, `(B, P - 1)`, is true on
        learned targets.
        """
        if self.model.training:
            self._total_train_tokens += int(sum_over_ranks(self.accelerator, [n_tokens])[0])
        n_learned = mask[:n_counted].sum()
        metrics = {
            "entropy": share(scores.entropies[:n_counted].sum(), n_learned),
            "mean_token_accuracy": share(scores.top1[:n_counted].sum(), n_learned),
            "num_tokens": latest(self._total_train_tokens),
        }
        if self.aux_loss_enabled:
            metrics["aux_loss"] = weighted_mean(scores.aux_loss, n_counted)
        self._metric_log.add(metrics)

    @property
    def _needs_plain_rows(self) -> bool:
        """`True` if TRL computes the loss: with PEFT's prompt learning, or with `compute_loss_func`."""
        configs = self.model.peft_config.values() if is_peft_model(self.model) else ()
        return self.compute_loss_func is not None or any(config.is_prompt_learning for config in configs)

    def _plain_rows(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        sequences = inputs["sequences"]
        labels = inputs["labels"]
        for sequence in sequences:
            if sequence.modalities:
                raise ValueError(
                    f"row {sequence.row} has media, but `compute_metrics`, `compute_loss_func` and prompt learning "
                    "take only text. Without them, `evaluate()` returns the loss and the metrics, and "
                    "`trl_multimodal_rft.evaluation.evaluate` samples answers."
                )
        rows = [
            {
                "input_ids": sequence.input_ids,
                "attention_mask": torch.ones_like(sequence.input_ids),
                **sequence.token_fields,
            }
            for sequence in sequences
        ]
        padded = {name: pad_sequence([row[name] for row in rows], batch_first=True) for name in rows[0]}
        return {**{name: values.to(labels.device) for name, values in padded.items()}, "labels": labels}

    # Checkpoints and card

    def _training_lines(self) -> list[tuple[str, str]]:
        args = self.args
        learned = "the assistant's turns" if args.assistant_only_loss else "completions, or whole conversations"
        if args.completion_only_loss is False and not args.assistant_only_loss:
            learned = "whole rows"
        lines = [("Loss", f"`{args.loss_type}` of {learned}"), ("`learning_rate`", f"`{args.learning_rate}`")]
        return [*lines, *common_lines(args.to_dict())]
