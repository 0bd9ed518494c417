# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Direct preference optimization with media."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import BitsAndBytesConfig, DataCollator, EvalPrediction, PreTrainedModel, TrainerCallback
from trl import DPOTrainer

from ...algorithms.metrics import latest, scored_mean, token_mean, weighted_mean
from ...algorithms.preferences import anchored_preference, conditional_preference
from ...forward.scores import Scores
from ...models.wrapped import unwrapped
from ...reporting.model_card import common_lines
from ..base.setup import resolve_config
from ..base.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from ..reading.trainer import Batch, NumItems, load_for_scoring
from .base import PreferenceTrainer
from .data import COLUMNS, PreferenceCollator
from .dpo_config import MultimodalDPOConfig


# Outputs of a model that TRL's loss reads
_OUTPUTS = ("log_probs", "entropy", "is_top1", "mean_logits")


class MultimodalDPOTrainer(PreferenceTrainer, DPOTrainer):
    """
    Trainer for Direct Preference Optimization (DPO) of models that see and hear, see
    [Direct Preference Optimization](https://huggingface.co/papers/2305.18290).

    Extends [`~trl.DPOTrainer`] by audio and video. Losses, metrics and options are TRL's. A prompt and its media are
    encoded once, and forwarded once for both completions. Completions may hold media, too. The model reads such media,
    but the loss takes only tokens of text. It leaves out placeholders and the tokens of the chat template around them.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train, as for [`~trl.DPOTrainer`].
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference model. If `None`, it is loaded from the path that the model was loaded from. With PEFT, it is the
            model without its adapter.
        args ([`MultimodalDPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        data_collator (`None`, *optional*):
            Has its place as in TRL, and takes only `None`, since the trainer encodes and joins rows itself.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with `prompt`, `chosen` and `rejected`, as text or messages, and with the media columns that
            [`MultimodalGRPOTrainer`] takes. Media are in blocks of the messages, or in these columns. Media in columns
            belong to the prompt, or to placeholders of `prompt`, `chosen` and `rejected`, in this order. Without
            `prompt`, the common start of both completions is the prompt.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        compute_metrics (`Callable`, *optional*):
            See [`~trl.DPOTrainer`]. Predictions are logits of the rows with the chosen completions, then of the rows
            with the rejected completions, from a further forward pass of each row. Labels are the tokens of the rows.
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
            parallelism), or if a dataset has no preferences, or media that a tokenizer can't encode.
    """

    _tag_names = ["trl", "dpo", "trl-multimodal-rft"]

    def __init__(
        self,
        model: Model,
        ref_model: PreTrainedModel | None = None,
        args: MultimodalDPOConfig | None = None,
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
        args = resolve_config(MultimodalDPOConfig, args, model)
        arguments = arguments_of(locals())
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        loaded = load_for_scoring(arguments, datasets)
        self._view_settings = args.rejected_view_settings
        collator = PreferenceCollator(
            unwrapped(None, loaded.model), loaded.processing_class, args, view=self._view_settings.view
        )
        # Only checks the datasets, which the collator encodes as they are
        collator.prepare({"train": train_dataset, "eval": eval_dataset}, "")
        stand_in_columns = {"prompt": ["-"], "chosen": ["-"], "rejected": ["-"]}
        self._call_trl_constructor(super().__init__, arguments | {"data_collator": collator}, loaded, stand_in_columns)
        self._set_up_scoring(
            datasets,
            columns=COLUMNS if args.remove_unused_columns else None,
            packs=args.packing == "prefix",
            outputs=(*_OUTPUTS, "log_sum_sq_probs") if args.use_weighting else _OUTPUTS,
            load_processor=loaded.load_processor,
        )
        if args.precompute_ref_log_probs:
            self._precompute_reference(
                args.precompute_ref_batch_size or args.per_device_eval_batch_size, args.precompute_ref_batch_size
            )
        self._show_tokens()
        self._finish_setup()

    # Update

    def _loss(self, model: nn.Module, inputs: Batch, num_items_in_batch: NumItems) -> tuple[torch.Tensor, Scores]:
        self._log_media_contribution(model, inputs)
        inputs = self._with_reference_logps(inputs)
        scores = self._score(model, inputs, self.aux_loss_enabled)
        trl_batch = self._as_trl_batch(inputs)
        pair_scores = scores.rows(slice(len(trl_batch["input_ids"])))
        outputs = SimpleNamespace(
            log_probs=pair_scores.logps,
            entropy=pair_scores.entropies,
            is_top1=pair_scores.top1 > 0,
            mean_logits=pair_scores.mean_logits,
            log_sum_sq_probs=pair_scores.log_sum_sq_probs,
            aux_loss=pair_scores.aux_loss,
        )
        loss, _ = self._loss_of_trl(trl_batch, outputs)
        self._log_pairs(pair_scores, inputs)
        if self._view_settings.view is not None:
            loss = loss + self._view_loss(scores.logps.sum(1), inputs)
        return loss, scores

    def _log_pairs(self, scores: Scores, inputs: Batch) -> None:
        """Logs TRL's metrics of a micro-batch. Scores are of all chosen, then of all rejected completions."""
        n = len(inputs["sequences"])
        n_counted = inputs["n_counted"]
        learned = inputs["learned"][: 2 * n]
        logps = scores.logps.detach()
        if self.ld_alpha is not None:  # weighs tokens behind the length of the shorter completion
            shorter = torch.minimum(*learned.sum(1).chunk(2)).repeat(2)
            logps = torch.where(learned.cumsum(1) > shorter[:, None], self.ld_alpha * logps, logps)
        is_own = (torch.arange(2 * n, device=learned.device) % n < n_counted)[:, None]
        rewards = []
        metrics = {
            "entropy": token_mean(scores.entropies, learned * is_own),
            "mean_token_accuracy": token_mean(scores.top1[:n_counted], learned[:n_counted]),
            "num_tokens": latest(self._total_train_tokens),
        }
        for start, side in ((0, "chosen"), (n, "rejected")):
            rows = slice(start, start + n_counted)
            sums = logps[rows].sum(1)
            rewards.append(self.beta * (sums - inputs[f"ref_{side}_logps"][:n_counted]))
            metrics |= {
                f"logits/{side}": token_mean(scores.mean_logits[rows], learned[rows]),
                f"rewards/{side}": weighted_mean(rewards[-1].mean(), n_counted),
                f"logps/{side}": weighted_mean(sums.mean(), n_counted),
            }
        chosen, rejected = rewards
        metrics["rewards/accuracies"] = weighted_mean((chosen > rejected).float().mean(), n_counted)
        metrics["rewards/margins"] = weighted_mean((chosen - rejected).mean(), n_counted)
        if self.aux_loss_enabled:
            metrics["aux_loss"] = weighted_mean(scores.aux_loss, n_counted)
        self._metric_log.add(metrics)

    def _view_loss(self, logps: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """
        Computes the loss of `rejected_view`, a mean over all pairs like TRL's loss. Pairs without a view count as 0.
        `logps`, `(2 * B + V,)`, are of `B` chosen, `B` rejected, and `V` chosen completions under the view.
        """
        # `n` is the number of pairs, and `viewed` has the indices of those with a view
        settings = self._view_settings
        n = len(inputs["sequences"])
        viewed = inputs["viewed"]
        chosen_logratios = logps[viewed] - inputs["ref_chosen_logps"][viewed]
        view_logratios = logps[2 * n :] - inputs["ref_view_logps"][viewed]
        # DPO's rewards of the chosen completions, without and under the view
        rewards = self.beta * chosen_logratios.detach(), self.beta * view_logratios.detach()
        values = {
            "rewards/view": rewards[1],
            "rewards/view_accuracies": (rewards[0] > rewards[1]).float(),
            "rewards/view_margins": rewards[0] - rewards[1],
            "rewards/above_anchor": (rewards[0] > settings.anchor).float(),
            "logps/view": logps[2 * n :].detach(),
        }
        is_own = (torch.tensor(viewed, device=logps.device) < inputs["n_counted"]).float()
        self._metric_log.add({name: scored_mean(value, is_own) for name, value in values.items()})
        conditional = settings.conditional_coef * conditional_preference(chosen_logratios, view_logratios, self.beta)
        anchored = settings.anchor_coef * anchored_preference(chosen_logratios, self.beta, settings.anchor)
        return (conditional + anchored).sum() / n

    # Card

    def _training_lines(self) -> list[tuple[str, str]]:
        losses = " + ".join(
            f"{weight} {name}" for name, weight in zip(self.loss_types, self.loss_weights, strict=True)
        )
        lines = [("Loss", f"`{losses}`"), ("`beta`", f"`{self.beta}`")]
        lines += [("`rejected_view`", f"`{self.args.rejected_view}`")] if self.args.rejected_view else []
        lines += [("`learning_rate`", f"`{self.args.learning_rate}`")]
        return [*lines, *common_lines(self.args.to_dict())]
