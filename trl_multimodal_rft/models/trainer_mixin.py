# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What mixins over TRL's trainers may count on: for type checkers a trainer of TRL, at run time nothing."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from trl import GRPOTrainer

    class TrainerMixin(GRPOTrainer):
        # Transformers allows for `None` before they are set up, and knows nothing of configs of TRL and engines
        args: Any
        model: Any
        ref_model: Any
        optimizer: Any
        lr_scheduler: Any
        processing_class: Any
        accelerator: Any
        num_generations: Any
        num_generations_eval: Any
        chat_template_kwargs: Any
        reward_funcs: Any
        reward_processing_classes: Any
        eval_dataset: Any
        train_dataset: Any
        model_wrapped: Any
        max_completion_length: Any
        num_completions_to_print: Any

        # Of one mixin for another
        _policy: Any
        _self_check: Any
        _any_process: Any

else:
    TrainerMixin = object
