# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Computation of rewards by reward models, servers and functions, and their combination."""

import inspect
import logging
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl import is_conversational
from trl.trainer.utils import get_callable_name

from ...data.reading.rules import DEFAULT_RULES, MediaRules
from ...encoding.processors import completion_texts
from ...extras.remote import RemoteReward
from ...models.modes import evaluation_mode
from ...rewards.calls import reward_arguments, reward_tensor
from ...rewards.ready.recipe import add_rewards, combine_rewards
from .experience import Samples


logger = logging.getLogger(__name__)


class RewardSources:
    """Reward models, servers and functions, and the combination of their rewards, see [`NaiveExperienceMaker`]."""

    def __init__(
        self,
        reward_model: nn.Module | list[nn.Module] | None = None,
        remote_rm_url: str | list[str] | None = None,
        reward_fn: Callable | None = None,
        label_map: dict[str, int] | None = None,
        recipe: dict | None = None,
        label_column: str = "labels",
        media_rules: MediaRules = DEFAULT_RULES,
    ):
        models = reward_model if isinstance(reward_model, list) else [reward_model] if reward_model else []
        urls = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or [])
        # Of `remote_rm_url`: requests to servers, and functions of local files
        self.url_funcs: list[Callable] = []
        self.custom_reward_func: Callable | None = None  # the function of the first local file
        for url in urls:
            if url.endswith(".py"):
                function = _load_reward_func(url)
                self.custom_reward_func = self.custom_reward_func or function
            else:
                function = RemoteReward(url, label_column=label_column)
            self.url_funcs.append(function)
        self.reward_fn = reward_fn
        self.label_map = label_map or {}
        self.recipe = recipe
        self.media_rules = media_rules
        # A server replaces the models, unless `reward_fn` or a recipe combines all sources
        is_replaced = bool(models and self.url_funcs and reward_fn is None and recipe is None)
        if is_replaced:
            logger.warning(
                "`remote_rm_url` replaces `reward_model`, which isn't called; `reward_fn` can combine both."
            )
        self.models = [] if is_replaced else models
        if not (self.models or self.url_funcs or reward_fn):
            raise ValueError("There is no source of reward; pass `reward_model`, `remote_rm_url` or `reward_fn`.")

    def __call__(
        self, samples: Samples, tokenizer: PreTrainedTokenizerBase, media: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Returns rewards on the CPU, shape `(B,)`, `NaN` where no source applies, and metrics of `reward_fn`."""
        n = len(samples.sequences)
        arguments = self._arguments(samples, tokenizer)
        rewards = []
        for model in self.models:
            with evaluation_mode(model):
                reward = model(samples.sequences, samples.attention_mask, **media)
            rewards.append(reward.float().view(n).cpu())
        rewards += [
            reward_tensor(_call_reward_func(function, arguments), n, get_callable_name(function))
            for function in self.url_funcs
        ]
        if self.reward_fn is not None:
            rewards_name = "model_reward_list" if rewards else None
            if rewards_name is not None:
                arguments[rewards_name] = rewards
            # If the only parameter of `reward_fn` has none of the arguments' names, it gets the other sources' rewards
            result = _call_reward_func(self.reward_fn, arguments, rewards_name)
            # With other sources, a tuple is `(rewards, metrics)`. Without them, it is rewards, as in TRL
            metrics = {}
            if isinstance(result, tuple) and rewards:
                result, metrics = result
            return reward_tensor(result, n, get_callable_name(self.reward_fn)), metrics
        if self.recipe is not None:
            labels: Any = samples.labels or [None] * n
            return combine_rewards(rewards, labels, self.recipe, self.label_map), {}
        return add_rewards(torch.stack(rewards)), {}

    def _arguments(self, samples: Samples, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        actions = samples.sequences[:, -samples.num_actions :]
        completion_ids = [ids[mask].tolist() for ids, mask in zip(actions, samples.action_mask, strict=True)]
        completions: list[Any] = completion_texts(completion_ids, tokenizer)
        rows = samples.rows or [{"prompt": prompt} for prompt in samples.prompts]
        if is_conversational({"prompt": rows[0]["prompt"]}):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        arguments = reward_arguments([row["prompt"] for row in rows], completions, completion_ids, rows)
        return {
            **arguments,
            "queries": tokenizer.batch_decode(samples.sequences, skip_special_tokens=False),
            "labels": samples.labels,
            "refs": [row.get("references") for row in rows] if "references" in arguments else samples.labels,
            "label_map": self.label_map,
            "media_rules": self.media_rules,
        }


def _load_reward_func(path: str) -> Callable:
    if not Path(path).is_file():
        raise ValueError(f"There is no file {path} to load `reward_func` from.")
    names = runpy.run_path(path, run_name="reward_func")
    if "reward_func" not in names:
        raise ValueError(f"{path} has no function `reward_func`.")
    return names["reward_func"]


def _call_reward_func(function: Callable, arguments: dict[str, Any], sole_argument: str | None = None) -> Any:
    """
    Calls a function with the arguments that its parameters name. If the function has a single parameter that names no
    argument, the parameter gets `arguments[sole_argument]`, unless `sole_argument` is `None`.
    """
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return function(**arguments)
    if sole_argument is not None and len(parameters) == 1 and not parameters.keys() & arguments.keys():
        return function(arguments[sole_argument])
    missing = [
        name for name, p in parameters.items() if name not in arguments and p.default is inspect.Parameter.empty
    ]
    if missing:
        raise ValueError(
            f"The reward function '{get_callable_name(function)}' requires `{missing[0]}`, but there are only "
            f"{sorted(arguments)}; rename the parameter, or give it a default."
        )
    return function(**{name: arguments[name] for name in parameters if name in arguments})
