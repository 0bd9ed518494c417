# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Trainer of reward models that see and hear, from comparisons of completions."""

import textwrap
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from torch import nn
from torch.nn.functional import logsigmoid
from transformers import BitsAndBytesConfig, DataCollator, EvalPrediction, TrainerCallback
from transformers.modeling_outputs import SequenceClassifierOutput
from trl import RewardTrainer
from trl.data_utils import get_dataset_column_names

from ...algorithms.metrics import largest, latest, scored_mean, smallest, weighted_mean
from ...checks.sequence_check import check_pairs
from ...encoding.processors import tokenizer_of
from ...forward.scores import Scores
from ...models.reward_model import as_reward_model, load_reward_model
from ...models.wrapped import replaced, unwrapped
from ...reporting.model_card import common_lines
from ..base.loading import CONSTRUCTOR_OPTIONS, loading_in_trl
from ..base.setup import resolve_config
from ..base.signatures import Adapter, EvalRows, Model, Optimizers, Processor, Rows, arguments_of
from ..reading.trainer import Batch, CompletionTrainer, NumItems, load_for_scoring
from .data import COLUMNS, COMPARISON_COLUMNS, ComparisonCollator, completions_to_score
from .reward_config import MultimodalRewardConfig


logger = get_logger(__name__)


class MultimodalRewardTrainer(CompletionTrainer, RewardTrainer):
    """
    Trainer for reward models that see and hear, which learn scores from comparisons of two completions, see
    [Learning to summarize from human feedback](https://huggingface.co/papers/2009.01325).

    Extends [`~trl.RewardTrainer`] by audio, video and images in prompts and completions. Loss, metrics and options are
    TRL's. A prompt and its media are encoded once, and forwarded once for both completions. The trained model can
    reward completions in [`MultimodalGRPOTrainer`] (`reward_funcs="path"`) and initialize the critic of
    [`MultimodalPPOTrainer`]. If transformers has a sequence classifier for the model's family, the trained model is of
    this class.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train: a reward model, a sequence classifier with one label, or a policy, whose LM head is
            replaced by a new `score`.
        args ([`MultimodalRewardConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        data_collator (`None`, *optional*):
            Has its place as in TRL, and takes only `None`, since the trainer encodes and joins rows itself.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with `prompt`, `chosen` and `rejected`, as text or messages, and with the media columns that
            [`MultimodalGRPOTrainer`] takes. Media are in blocks of the messages, or in these columns. Media in columns
            belong to the prompt, or to placeholders of `prompt`, `chosen` and `rejected`, in this order. Optional
            columns are `margin`, the least difference between both scores, and `tie`, `True` if neither completion is
            better. Without `prompt`, the common start of both completions is the prompt.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        compute_metrics (`Callable`, *optional*):
            See [`~trl.RewardTrainer`].
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use.
        optimizer_cls_and_kwargs (`tuple`, *optional*):
            Optimizer class and its arguments, as for [`~trl.RewardTrainer`].
        preprocess_logits_for_metrics (`Callable`, *optional*):
            See [`~trl.RewardTrainer`].
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a model given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the model. With `task_type="SEQ_CLS"` or `modules_to_save=["score"]` the
            `score` is trained, too.

    Raises:
        `TypeError`: If `args` is a config of TRL's own.
        `ValueError`: If the model can't be trained or has several labels, if ranks are to share rows (tensor, context
            or sequence parallelism), or if a dataset has no comparisons, or media that a tokenizer can't encode.
    """

    _tag_names = ["trl", "reward-trainer", "trl-multimodal-rft"]
    _name = "Reward"
    _paper = {
        "title": "Learning to summarize from human feedback",
        "id": "2009.01325",
        "citation": textwrap.dedent("""\
            @inproceedings{stiennon2020learning,
                title     = {{Learning to summarize from human feedback}},
                author    = {Nisan Stiennon and Long Ouyang and Jeffrey Wu and Daniel M. Ziegler and others},
                year      = 2020,
                booktitle = {Advances in Neural Information Processing Systems 33},
            }"""),
    }

    _keeps_outputs = True

    def __init__(
        self,
        model: Model,
        args: MultimodalRewardConfig | None = None,
        data_collator: DataCollator | None = None,
        train_dataset: Rows = None,
        eval_dataset: EvalRows = None,
        processing_class: Processor | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: Optimizers = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
        quantization_config: BitsAndBytesConfig | None = None,
        peft_config: Adapter = None,
    ):
        args = resolve_config(MultimodalRewardConfig, args, model)
        arguments = arguments_of(locals())
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        loaded = load_for_scoring(arguments, datasets, load=load_reward_model)
        model = as_reward_model(loaded.model)
        loaded_processor: Any = loaded.processing_class
        tokenizer = tokenizer_of(loaded_processor)
        self.data_collator = ComparisonCollator(unwrapped(None, model), loaded_processor, args)
        with loading_in_trl(args, loaded.by_name), replaced(args, **CONSTRUCTOR_OPTIONS):
            arguments |= {"model": model, "data_collator": self.data_collator}
            arguments["processing_class"] = tokenizer  # since TRL reads and sets special tokens
            super().__init__(**arguments)
        if args.chat_template_path is not None:
            loaded_processor.chat_template = tokenizer.chat_template
        self.processing_class = self.callback_handler.processing_class = loaded_processor
        columns = [*COLUMNS, *COMPARISON_COLUMNS] if args.remove_unused_columns else None
        check = partial(check_pairs, rewards=True)
        packs = args.packing == "prefix"
        load = loaded.load_processor
        self._set_up_scoring(datasets, columns, packs=packs, outputs=(), load_processor=load, check=check)
        self._check_adapter()
        self._show_tokens()
        self._finish_setup()

    def _check_adapter(self) -> None:
        configs = self.model.peft_config.values() if is_peft_model(self.model) else ()
        if configs and not any(
            parameter.requires_grad for parameter in self._unwrapped(self.model).get_submodule("score").parameters()
        ):
            logger.warning(
                "The adapter doesn't train `score`, which is random unless the model is a reward model; set "
                "`task_type='SEQ_CLS'` or `modules_to_save=['score']` in the PEFT config."
            )

    # Rows

    def _prepare_dataset(
        self,
        dataset: Dataset | IterableDataset,
        processing_class: Processor,
        args: MultimodalRewardConfig,
        dataset_name: str,
    ) -> Dataset | IterableDataset:
        if {"chosen_ids", "chosen_input_ids"} & {*(get_dataset_column_names(dataset) or ())}:
            return super()._prepare_dataset(dataset, tokenizer_of(processing_class), args, dataset_name)
        return self.data_collator.prepare(dataset, dataset_name)  # the collator encodes rows as they are read

    # Update

    def _loss(self, model: nn.Module, inputs: Batch, num_items_in_batch: NumItems) -> tuple[torch.Tensor, Scores]:
        completions, packed = completions_to_score(self._policy, inputs)
        scores = self._policy.rewards(model, completions, packed=packed)
        margin = inputs["margin"]
        tie = inputs["tie"]
        trl_batch = {name: inputs[name] for name in ("attention_mask", "margin")}
        loss, _ = self._loss_of_trl(trl_batch, SequenceClassifierOutput(logits=scores.values))
        chosen, rejected = scores.values[:, 0].chunk(2)
        # Together with TRL's term, this is the negative log-likelihood of a tie within the margin, up to a constant
        # (equation 10 of https://huggingface.co/papers/2409.17431)
        loss = loss - (logsigmoid(rejected - chosen - margin) * tie).mean()
        n_counted = inputs["n_counted"]
        differences = (chosen - rejected).detach()[:n_counted]
        is_decided = ~tie[:n_counted]
        own_rewards = torch.cat([chosen[:n_counted], rejected[:n_counted]])
        metrics = {
            "num_tokens": latest(self._total_train_tokens),
            "min_reward": smallest(own_rewards),
            "mean_reward": weighted_mean(own_rewards.mean(), n_counted),
            "max_reward": largest(own_rewards),
            # Without ties
            "accuracy": scored_mean((differences > 0).float(), is_decided),
            "margin": scored_mean(differences, is_decided),
        }
        self._metric_log.add(metrics)
        return loss, scores

    # Card

    def _training_lines(self) -> list[tuple[str, str]]:
        coefficient = self.args.center_rewards_coefficient
        lines = [("`center_rewards_coefficient`", f"`{coefficient}`")] if coefficient else []
        lines = [("Loss", "Bradley-Terry"), *lines, ("`learning_rate`", f"`{self.args.learning_rate}`")]
        return [*lines, *common_lines(self.args.to_dict())]
