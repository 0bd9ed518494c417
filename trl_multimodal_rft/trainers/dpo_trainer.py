# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Direct preference optimization with media."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from torch import nn
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import BitsAndBytesConfig, EvalPrediction, PreTrainedModel, ProcessorMixin, TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput
from trl import DPOTrainer

from ..algorithms.metrics import log_metrics, scored_mean
from ..algorithms.preferences import anchored_preference, conditional_preference
from ..checks.measure import Measure
from ..checks.media_contribution import is_due, media_contribution
from ..data.rows.unread import lists_columns
from ..encoding.processors import tokenizer_of
from ..forward.scores import Scores
from ..models.modes import evaluation_mode
from ..models.parts import same_weights_trained
from ..models.wrapped import is_unsharded, replaced, unwrapped
from ..reporting.model_card import common_lines
from .dpo_config import MultimodalDPOConfig
from .preference_data import COLUMNS, REFERENCE, PreferenceCollator, completions_to_score
from .reading import Batch, CompletionTrainer, NumItems, load_for_reading
from .setup import IN_CONSTRUCTOR, load_reference, loading_in_trl, resolve_config
from .signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of


# Outputs of a model that TRL's loss reads
_OUTPUTS = ("log_probs", "entropy", "is_top1", "mean_logits")


class MultimodalDPOTrainer(CompletionTrainer, DPOTrainer):
    """
    Trainer for Direct Preference Optimization (DPO) of models that see and hear, see
    [Direct Preference Optimization](https://huggingface.co/papers/2305.18290).

    [`~trl.DPOTrainer`] with audio, video and images in prompts: losses, metrics and options are TRL's. A prompt and
    its media are encoded once, and forwarded once for both completions.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train, as for [`~trl.DPOTrainer`].
        ref_model ([`~transformers.PreTrainedModel`], *optional*):
            Reference model. If `None`, it is loaded from the path that the model was loaded from; with PEFT, it is
            the model without its adapter.
        args ([`MultimodalDPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with `prompt`, `chosen` and `rejected`, each text or messages, and with the media columns that
            [`MultimodalGRPOTrainer`] takes, with media of the prompt. Without `prompt`, the common start of both
            completions is the prompt.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a model given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the model.
        compute_metrics (`Callable`, *optional*):
            See [`~trl.DPOTrainer`]: predictions are logits of the rows with the chosen completions, then of the rows
            with the rejected ones, from a further forward pass of each row; labels are the tokens of these rows.

    Raises:
        `TypeError`: If `args` is a config of TRL's own, or if `ref_model` isn't a model.
        `ValueError`: If the model can't be trained, if ranks are to share rows (tensor, context or sequence
            parallelism), or if a dataset has no preferences, or media that a tokenizer can't encode.
    """

    _tag_names = ["trl", "dpo", "trl-multimodal-rft"]
    _keeps_outputs = True

    def __init__(
        self,
        model: Model,
        ref_model: PreTrainedModel | None = None,
        args: MultimodalDPOConfig | None = None,
        train_dataset: Rows = None,
        eval_dataset: EvalRows = None,
        processing_class: Processor | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: Adapter = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
    ):
        args = resolve_config(MultimodalDPOConfig, args, model)
        arguments = arguments_of(locals())
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        loaded = load_for_reading(arguments, datasets)
        model, processing_class = loaded.model, loaded.processing_class
        self._starts_as_reference = ref_model is None
        if ref_model is None:
            ref_model = load_reference(model, args, peft_config, quantization_config)
        self._rejected, self._measured_step = args.rejected_view_settings, -1
        collator = PreferenceCollator(unwrapped(None, model), processing_class, args, view=self._rejected.view)
        collator.prepare({"train": train_dataset, "eval": eval_dataset}, "")
        with (
            loading_in_trl(loaded.by_name),
            # TRL's constructor would score padded rows, and have DDP look for parameters without a gradient
            replaced(args, precompute_ref_log_probs=False, ddp_find_unused_parameters=False, **IN_CONSTRUCTOR),
        ):
            arguments |= {"model": model, "ref_model": ref_model}
            arguments |= {"processing_class": processing_class, "data_collator": collator}
            if train_dataset is not None:  # else TRL raises
                arguments["train_dataset"] = _without_rows(train_dataset, processing_class)
            arguments["eval_dataset"] = None if eval_dataset is None else _without_rows(None, processing_class)
            super().__init__(**arguments)
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self._is_vision_dataset = True  # so that TRL doesn't tokenize the rows of `evaluate`
        self._start_reading(
            datasets,
            columns=COLUMNS if args.remove_unused_columns else None,
            packs=args.packing == "prefix",
            outputs=(*_OUTPUTS, "log_sum_sq_probs") if args.use_weighting else _OUTPUTS,
            load_processor=loaded.load_processor,
        )
        self._reference = REFERENCE[: 2 if self._rejected.view is None else 3]
        # TRL's loss reads the reference's log-probabilities from its inputs
        self.precompute_ref_logps = True
        if args.precompute_ref_log_probs:
            self._precompute_reference()
        self._complete_parts()

    # Reference

    def _precompute_reference(self) -> None:
        """Adds columns of the reference's log-probabilities to the datasets, and then frees the reference."""
        if self.ref_model is None and not is_unsharded(self.accelerator):
            raise ValueError(
                "`precompute_ref_log_probs=True` would score with an adapter's model, which the engine shards only "
                "when training begins; drop the option."
            )
        self.train_dataset = self._with_reference(self.train_dataset)
        if isinstance(self.eval_dataset, dict):
            self.eval_dataset = {name: self._with_reference(split) for name, split in self.eval_dataset.items()}
        elif self.eval_dataset is not None:
            self.eval_dataset = self._with_reference(self.eval_dataset)
        self.ref_model = None

    def _with_reference(self, dataset: Any) -> Dataset:
        if not isinstance(dataset, Dataset):
            raise ValueError("`precompute_ref_log_probs=True` needs datasets whose rows have an index, not streams.")
        batches = []
        with evaluation_mode(self.model):
            for batch in self.get_eval_dataloader(dataset):
                pair = self.compute_ref_log_probs(self.ref_model or self.model, self._prepare_inputs(batch))
                batches.append(self.accelerator.gather_for_metrics(torch.stack(pair, dim=1)).cpu())
        indices = [i for i in range(len(dataset)) if i not in self._stream.left_out(dataset)]
        logps, scores = torch.full((len(dataset), len(self._reference)), torch.nan), torch.cat(batches)
        if len(scores) != len(indices):
            raise ValueError(
                f"The reference scored {len(scores)} of {len(indices)} rows; with `precompute_ref_log_probs=True`, "
                "don't set `dataloader_drop_last`."
            )
        logps[indices] = scores
        for name, values in zip(self._reference, logps.T.tolist(), strict=True):
            dataset = dataset.add_column(name, values)
        if not lists_columns(dataset) and self._reference[0] not in dataset[0]:
            raise ValueError(
                "`precompute_ref_log_probs=True` adds columns, which the dataset's transform leaves out; let it keep "
                "the columns that it gets, or use `map` in its place."
            )
        return dataset

    def compute_ref_log_probs(self, model: nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """
        Computes the reference's log-probabilities of a micro-batch.

        Args:
            model ([`~torch.nn.Module`]):
                The reference, or, with PEFT, the policy, with its adapter off meanwhile.
            inputs (`dict`):
                Micro-batch of the collator.

        Returns:
            `tuple` of `torch.Tensor`: Sums over the tokens of the chosen and of the rejected completions, `(B,)`; with
            `rejected_view` also of the chosen completions after the view, NaN for rows without a view.
        """

        n, after_view = 2 * len(inputs["sequences"]), []

        def score(**kwargs: Any) -> SimpleNamespace:
            logps = self._score(model, inputs).logps
            after_view.append(logps[n:].sum(1))
            return SimpleNamespace(log_probs=logps[:n])

        with same_weights_trained(self._unwrapped(self.model)):
            chosen, rejected = super().compute_ref_log_probs(score, _as_rows(inputs))
        if len(self._reference) == 2:
            return chosen, rejected
        view = torch.full_like(chosen, torch.nan)
        view[inputs["viewed"]] = after_view[0]
        return chosen, rejected, view

    # Update

    def _score(self, model: nn.Module, inputs: dict[str, Any], compute_aux_loss: bool = False) -> Scores:
        """Returns scores of all chosen completions, of the rejected ones, and of the chosen ones after a view."""
        completions, packed = completions_to_score(self._policy, inputs, self.args)
        return self._policy.score(model, *completions, packed=packed, compute_aux_loss=compute_aux_loss)

    def _loss(self, model: nn.Module, inputs: Batch, num_items_in_batch: NumItems) -> tuple[torch.Tensor, Scores]:
        self._measure_contribution(model, inputs)
        if not all(name in inputs for name in self._reference):
            is_reference = is_peft_model(self.model) or (self._starts_as_reference and self.state.global_step == 0)
            if self.args.precompute_ref_log_probs and self.ref_model is None and not is_reference:
                raise ValueError(
                    "`precompute_ref_log_probs=True` keeps no reference for a dataset that is passed to `evaluate` "
                    "after an update, or that was another model; pass it as `eval_dataset` to the trainer."
                )
            logps = self.compute_ref_log_probs(self.ref_model or self.model, inputs)
            inputs = inputs | dict(zip(self._reference, logps, strict=True))
        scores = self._score(model, inputs, self.aux_loss_enabled)
        pair_scores = scores.rows(slice(2 * len(inputs["sequences"])))
        outputs = SimpleNamespace(
            log_probs=pair_scores.logps,
            entropy=pair_scores.entropies,
            is_top1=pair_scores.top1 > 0,
            mean_logits=pair_scores.mean_logits,
            log_sum_sq_probs=pair_scores.log_sum_sq_probs,
            aux_loss=pair_scores.aux_loss,
        )
        loss = self._loss_of_trl(_as_rows(inputs), outputs)
        if self._rejected.view is not None:
            loss = loss + self._view_loss(scores.logps.sum(1), inputs)
        return loss, scores

    def _outputs(self, model: nn.Module, inputs: Batch, scores: Scores) -> SequenceClassifierOutput:
        measure, pairs = Measure(self._policy, model, engine_positions=False), inputs["sequences"]
        rows = [row for side in zip(*(pair.sequences(measure.model) for pair in pairs), strict=True) for row in side]
        ids, pad_id = [row.input_ids for row in rows], tokenizer_of(self.processing_class).pad_token_id
        inputs["input_ids"] = pad_sequence(ids, True, pad_id).to(scores.logps.device)  # labels of `prediction_step`
        return SequenceClassifierOutput(logits=pad_sequence([measure.row_logits(row)[0] for row in rows], True))

    def _view_loss(self, logps: torch.Tensor, inputs: dict[str, Any]) -> torch.Tensor:
        """
        Computes the loss of the view, a mean over all pairs as TRL's loss is, to which pairs without a view add 0.
        `logps` are the log-probabilities of completions, `(2 * B + V,)`.
        """
        settings, n, viewed = self._rejected, len(inputs["sequences"]), inputs["viewed"]
        chosen = logps[viewed] - inputs["ref_chosen_logps"][viewed]
        view = logps[2 * n :] - inputs["ref_view_logps"][viewed]
        rewards = self.beta * chosen.detach(), self.beta * view.detach()
        values = {
            "rewards/view": rewards[1],
            "rewards/view_accuracies": (rewards[0] > rewards[1]).float(),
            "rewards/view_margins": rewards[0] - rewards[1],
            "rewards/above_anchor": (rewards[0] > settings.anchor).float(),
            "logps/view": logps[2 * n :].detach(),
        }
        metrics = {name: scored_mean(value, torch.ones_like(value)) for name, value in values.items()}
        log_metrics(metrics, self.accelerator.gather, self._metrics["train" if self.model.training else "eval"])
        conditional = settings.conditional_coef * conditional_preference(chosen, view, self.beta)
        anchored = settings.anchor_coef * anchored_preference(chosen, self.beta, settings.anchor)
        return (conditional + anchored).sum() / n

    def _measure_contribution(self, model: nn.Module, inputs: dict[str, Any]) -> None:
        """
        Logs how far media move the log-probabilities of some chosen completions: on the first micro-batch of an update
        that is due for it, and on the first micro-batch with media of an evaluation.
        """
        step, interval, training = self.state.global_step, self.args.media_contribution_steps, self.model.training
        metrics, n = self._metrics["train" if training else "eval"], len(inputs["sequences"])
        is_first = step != self._measured_step if training else "media/contribution" not in metrics
        if not interval or not is_first or (training and not is_due(interval, step, 1)):
            return
        self._measured_step = step if training else self._measured_step
        ids, mask = inputs["completion_ids"][:n], inputs["completion_mask"][:n]
        completions = inputs["sequences"], ids, mask
        for name, value in media_contribution(self._policy, model, completions, mask, inputs["encode_view"]).items():
            metrics[name].append(value)

    # Card

    def _training_lines(self) -> list[tuple[str, str]]:
        losses = " + ".join(
            f"{weight} {name}" for name, weight in zip(self.loss_types, self.loss_weights, strict=True)
        )
        lines = [("Loss", f"`{losses}`"), ("`beta`", f"`{self.beta}`")]
        lines += [("`rejected_view`", f"`{self.args.rejected_view}`")] if self.args.rejected_view else []
        lines += [("`learning_rate`", f"`{self.args.learning_rate}`")]
        return [*lines, *common_lines(self.args.to_dict())]


def _without_rows(dataset: Rows, processing_class: Processor) -> Rows:
    """Returns a dataset of one dummy row for TRL's constructor, which tokenizes the row unless it has media."""
    row = {"prompt": ["-"], "chosen": ["-"], "rejected": ["-"]}
    rows = Dataset.from_dict(row | {"image": [None]} if isinstance(processing_class, ProcessorMixin) else row)
    return rows.to_iterable_dataset() if isinstance(dataset, IterableDataset) else rows


def _as_rows(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns a micro-batch as TRL's loss reads it: completions after a first token, which the loss doesn't score."""
    n = 2 * len(inputs["sequences"])
    return {
        "input_ids": pad(inputs["completion_ids"][:n], (1, 0)),
        "completion_mask": pad(inputs["completion_mask"][:n], (1, 0)),
        **{name: inputs[name] for name in ("attention_mask", *REFERENCE[:2]) if name in inputs},
    }
