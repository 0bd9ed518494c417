# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Kahneman-Tversky optimization with media, from completions that are labelled as good or bad."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import BitsAndBytesConfig, DataCollator, EvalPrediction, PreTrainedModel, TrainerCallback
from trl import KTOTrainer

from ...algorithms.metrics import Metric, latest, scored_mean, token_mean, weighted_mean
from ...forward.scores import Scores
from ...models.wrapped import unwrapped
from ...reporting.model_card import common_lines
from ..base.setup import resolve_config
from ..base.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from ..reading.trainer import Batch, NumItems, load_for_scoring
from .base import PreferenceTrainer
from .kto_config import MultimodalKTOConfig
from .kto_data import COLUMNS, KL_ROW, LabelledCollator


class MultimodalKTOTrainer(PreferenceTrainer, KTOTrainer):
    """
    Trainer for Kahneman-Tversky Optimization (KTO) of models that see and hear, see
    [KTO](https://huggingface.co/papers/2402.01306).

    Extends [`~trl.KTOTrainer`] by audio, video and images in prompts. Losses, metrics and options are TRL's. A prompt
    and its media are encoded once, and forwarded once for two completions: its own, and the completion of the row
    before it in the micro-batch, for the KL estimate.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train, as for [`~trl.KTOTrainer`].
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference model. If `None`, it is loaded from the path that the model was loaded from. With PEFT, it is the
            model without its adapter.
        args ([`MultimodalKTOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        data_collator (`None`, *optional*):
            Has its place as in TRL, and takes only `None`, since the trainer encodes and joins rows itself.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with `prompt` and `completion`, as text or messages, and `label`, which is `True` if the completion
            is desirable. Pairs (`prompt`, `chosen`, `rejected`) give two rows each. Media of the prompt are in the
            columns that [`MultimodalGRPOTrainer`] takes.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        compute_metrics (`Callable`, *optional*):
            See [`~trl.KTOTrainer`]. Predictions are logits of the rows, from a further forward pass, and labels are
            the tokens of the rows.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a model given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the model.

    Raises:
        `TypeError`: If `args` is a config of TRL's own, or if `ref_model` isn't a model.
        `ValueError`: If the model can't be trained, if ranks are to share rows (tensor, context or sequence
            parallelism), if a micro-batch of the `"kto"` loss has one row, or if a dataset lacks columns.
    """

    _tag_names = ["trl", "kto", "trl-multimodal-rft"]

    def __init__(
        self,
        model: Model,
        ref_model: PreTrainedModel | None = None,
        args: MultimodalKTOConfig | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Rows = None,
        eval_dataset: EvalRows = None,
        processing_class: Processor | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: Adapter = None,
    ):
        args = resolve_config(MultimodalKTOConfig, args, model)
        arguments = arguments_of(locals())
        loaded = load_for_scoring(arguments, {"train_dataset": train_dataset, "eval_dataset": eval_dataset})
        calculate_kl = args.loss_type == "kto"
        collator = LabelledCollator(
            unwrapped(None, loaded.model), loaded.processing_class, args, calculate_kl=calculate_kl
        )
        datasets = {
            "train_dataset": collator.prepare(train_dataset, "train"),
            "eval_dataset": collator.prepare(eval_dataset, "eval"),
        }
        arguments |= {**datasets, "data_collator": collator}
        stand_in_columns = {"prompt": ["-"] * 2, "completion": ["-"] * 2, "label": [True, False]}
        self._call_trl_constructor(super().__init__, arguments, loaded, stand_in_columns)
        self._set_up_scoring(
            datasets,
            columns=COLUMNS if args.remove_unused_columns else None,
            packs=args.packing == "prefix",
            outputs=("log_probs", "entropy", "mean_logits"),
            load_processor=loaded.load_processor,
        )
        if args.precompute_ref_log_probs:
            # The KL estimate depends on the micro-batch, so the reference scores the micro-batches of training
            self._precompute_reference(args.per_device_train_batch_size)
        self._show_tokens()
        self._finish_setup()

    def _score_reference(self, inputs: Batch) -> dict[str, torch.Tensor]:
        logps_by_column = super()._score_reference(inputs)
        return {**logps_by_column, KL_ROW: inputs[KL_ROW]} if self.calculate_KL else logps_by_column

    def _loss(self, model: nn.Module, inputs: Batch, num_items_in_batch: NumItems) -> tuple[torch.Tensor, Scores]:
        self._log_media_contribution(model, inputs)
        n = len(inputs["sequences"])
        inputs = self._with_reference_logps(inputs)
        scores, kl_logps = self._score_with_kl(model, inputs, n)
        row_scores = scores.rows(slice(n))
        outputs = SimpleNamespace(
            log_probs=row_scores.logps,
            entropy=row_scores.entropies,
            mean_logits=row_scores.mean_logits,
            aux_loss=row_scores.aux_loss,
        )
        # TRL's loss calls the model for the KL estimate first, if there is one, and then for the rows' completions
        kl_outputs = [SimpleNamespace(log_probs=kl_logps.detach())] if self.calculate_KL else []
        trl_batch = self._as_trl_batch(inputs)
        loss, means = self._loss_of_trl(trl_batch, *kl_outputs, outputs)
        self._log_by_label(row_scores, inputs, means["kl"])
        return loss, scores

    def _log_by_label(self, scores: Scores, inputs: Batch, kl: float) -> None:
        """Logs TRL's metrics of a micro-batch. Scores are of the rows' completions, and `kl` of all ranks."""
        n_counted = inputs["n_counted"]
        learned = inputs["learned"][:n_counted]
        is_chosen = torch.as_tensor(inputs["label"][:n_counted], dtype=torch.bool, device=learned.device)
        logps = scores.logps.detach()[:n_counted].sum(1)
        rewards = self.beta * (logps - inputs["ref_logps"][:n_counted])
        metrics = {
            "kl": weighted_mean(kl, n_counted),
            "entropy": token_mean(scores.entropies[:n_counted], learned),
            "num_tokens": latest(self._total_train_tokens),
        }
        means = []
        for side, is_counted in (("chosen", is_chosen), ("rejected", ~is_chosen)):
            means.append(scored_mean(rewards, is_counted))
            metrics |= {
                f"logits/{side}": scored_mean(scores.mean_logits[:n_counted], learned * is_counted[:, None]),
                f"rewards/{side}": means[-1],
                f"logps/{side}": scored_mean(logps, is_counted),
            }
        metrics["rewards/margins"] = Metric(torch.cat([mean.numbers for mean in means]), "difference", skips_nan=True)
        if self.aux_loss_enabled:
            metrics["aux_loss"] = weighted_mean(scores.aux_loss, n_counted)
        self._metric_log.add(metrics)

    def _score_with_kl(self, model: nn.Module, inputs: Batch, n: int) -> tuple[Scores, torch.Tensor]:
        """
        Returns scores, of which the first `n` are those of the rows' completions, and the log-probabilities of the
        completions in the KL estimate.
        """
        if not (self.aux_loss_enabled and self.calculate_KL):
            scores = self._score(model, inputs, self.aux_loss_enabled)
            return scores, scores.logps[n:]
        # As in TRL, the load-balancing loss is that of the rows' completions alone
        names = ("prompts", "lengths", "completion_ids", "completion_mask", "learned")
        with torch.no_grad():
            kl_scores = self._score(model, inputs | {name: inputs[name][n:] for name in names})
        return self._score(model, inputs | {name: inputs[name][:n] for name in names}, True), kl_scores.logps

    def _as_trl_batch(self, inputs: Batch) -> Batch:
        """Also returns the completions of the KL estimate, if the loss has one."""
        n = len(inputs["sequences"])
        if not self.calculate_KL:
            return super()._as_trl_batch(inputs)
        kl_ids = pad(inputs["completion_ids"][n:], (1, 0))
        kl_mask = pad(inputs["completion_mask"][n:], (1, 0))
        kl_batch = {"KL_input_ids": kl_ids, "KL_completion_mask": kl_mask, "KL_attention_mask": kl_mask}
        return super()._as_trl_batch(inputs) | kl_batch

    # Card

    def _training_lines(self) -> list[tuple[str, str]]:
        weights = f"{self.desirable_weight} desirable, {self.undesirable_weight} undesirable"
        lines = [("Loss", f"`{self.loss_type}`"), ("Weights", weights), ("`beta`", f"`{self.beta}`")]
        return [*lines, ("`learning_rate`", f"`{self.args.learning_rate}`"), *common_lines(self.args.to_dict())]
