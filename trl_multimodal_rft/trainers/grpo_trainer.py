# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).

from typing import TYPE_CHECKING

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin, TrainerCallback
from trl import GRPOTrainer
from trl.trainer.grpo_trainer import EnvironmentFactory, RewardFunc, RolloutFunc
from trl.trainer.utils import get_config_model_id

from .grpo_config import MultimodalGRPOConfig
from .multimodal import MultimodalMixin


if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig


class MultimodalGRPOTrainer(MultimodalMixin, GRPOTrainer):
    """
    Trainer for Group Relative Policy Optimization (GRPO) of models that see and hear, see
    [DeepSeekMath](https://huggingface.co/papers/2402.03300).

    [`~trl.GRPOTrainer`] with audio and video beside images: losses, metrics and options are TRL's own. Each prompt's
    media is decoded, encoded, prefilled and forwarded once for all its completions.

    Example:

    ```python
    from datasets import load_dataset
    from trl_multimodal_rft import MultimodalGRPOTrainer
    from trl_multimodal_rft.rewards import accuracy_reward

    dataset = load_dataset("path/to/spoken-questions", split="train")  # columns: prompt, audio, solution

    trainer = MultimodalGRPOTrainer(
        model="Qwen/Qwen2-Audio-7B-Instruct",
        reward_funcs=accuracy_reward,
        train_dataset=dataset,
    )
    trainer.train()
    ```

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train, as for [`~trl.GRPOTrainer`].
        reward_funcs (`RewardFunc` or `list[RewardFunc]`, *optional*):
            Reward functions, as for [`~trl.GRPOTrainer`]. Functions receive the media columns of the dataset as they
            are. A reward of `NaN` raises; return `None` where a reward doesn't apply.
        args ([`MultimodalGRPOConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with a `prompt` column, conversational or text. Media come in the columns `image` or `images`,
            `audio` or `audios`, `video` or `videos`, or in the messages; `None` marks a row without. Every other column
            is passed to the reward functions.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, padding on the left. If `None`, it is loaded from the model's name.
        reward_processing_classes ([`~transformers.PreTrainedTokenizerBase`] or `list`, *optional*):
            Processing classes of reward models, as for [`~trl.GRPOTrainer`].
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use.
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a model given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the model.
        tools (`list[Callable]`, *optional*):
            Tools for text rows, as for [`~trl.GRPOTrainer`]. Rows with media raise.
        rollout_func (`RolloutFunc`, *optional*):
            Custom rollout for text rows, as for [`~trl.GRPOTrainer`]. Rows with media raise.
        environment_factory (`EnvironmentFactory` or `dict[str, EnvironmentFactory]`, *optional*):
            Environments for text rows, as for [`~trl.GRPOTrainer`]. Rows with media raise.

    Raises:
        `ValueError`: If the processing class pads on the right.
    """

    _tag_names = ["trl", "grpo", "trl-multimodal-rft"]

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: MultimodalGRPOConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        reward_processing_classes: PreTrainedTokenizerBase | list[PreTrainedTokenizerBase] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: "tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None]" = (None, None),
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "PeftConfig | None" = None,
        tools: "list[Callable] | None" = None,
        rollout_func: RolloutFunc | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
    ):
        if args is None:
            name = model if isinstance(model, str) else get_config_model_id(model.config)
            args = MultimodalGRPOConfig(f"{name.split('/')[-1]}-GRPO")
        super().__init__(
            model=model,
            reward_funcs=reward_funcs,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
