# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The names and purposes of the commands, as `--help` prints them."""

# Run by `accelerate launch`
LAUNCHED = {
    "grpo": "train a model with GRPO",
    "rloo": "train a model with RLOO",
    "ppo": "train a model and its critic with PPO",
    "distillation": "train a model on its own completions to predict what a teacher does",
    "sft": "train a model on completions, such as before GRPO or PPO",
    "dpo": "train a model to prefer one of two completions",
    "kto": "train a model on completions that are labelled as good or bad",
    "reward": "train a reward model on comparisons of two completions",
    "evaluate": "measure accuracy, pass@k and majority@k on a dataset or benchmark",
    "filter": "keep the rows of a dataset of medium difficulty, or whose answers need their audio, image or video",
}
COMMANDS = {
    **LAUNCHED,
    "chat": "web UI to compare a trained model with its base",
    "check": "find the rows of a dataset that would not train, and the lengths of the others",
    "estimate": "estimate whether a training run fits into GPU memory, and what to change if not",
    "families": "list the models with vision or audio, and their family-specific rules",
    "prepare": "convert a published dataset, or one in another tool's layout, to a folder of rows",
}
EXTRAS = {"chat", "estimate", "prepare"}  # commands that no training needs
