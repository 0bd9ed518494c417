# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Computation of rewards by reward models, servers and functions, and their combination."""

import asyncio
import inspect
import logging
import runpy
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl import is_conversational
from trl.trainer.utils import get_callable_name

from ...data.reading.decoding import load_image
from ...data.reading.refs import iter_refs
from ...data.reading.rules import DEFAULT_RULES, MediaRules
from ...data.rows.cells import cell_value
from ...data.rows.columns import as_text, read_messages, read_rendered
from ...data.rows.features import as_encoded
from ...encoding.processors import completion_texts
from ...extras.remote import base64_encoder
from ...modalities import MODALITIES
from ...models.modes import evaluation_mode
from ...rewards.calls import reward_arguments, reward_tensor
from ...rewards.ready.recipe import add_rewards, combine_rewards
from ..utils import remote_rm_fn
from .experience import Samples, to


logger = logging.getLogger(__name__)

Rewards = TypeVar("Rewards")

# Kinds of parameters that stand for a single argument
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_SAMPLING_RATE = 16000  # of the audio that servers get, in Hz


class RewardSources:
    """Reward models, servers and functions, and the combination of their rewards, see [`NaiveExperienceMaker`]."""

    def __init__(
        self,
        reward_model: nn.Module | list[nn.Module] | None = None,
        remote_rm_url: str | list[str] | None = None,
        reward_fn: Callable | None = None,
        label_map: dict[str, int] | None = None,
        recipe: dict | None = None,
        media_rules: MediaRules = DEFAULT_RULES,
        ignored_media_columns: Sequence[str] = (),
    ):
        models = reward_model if isinstance(reward_model, list) else [reward_model] if reward_model else []
        urls = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or [])
        # Of `remote_rm_url`: addresses of servers, and functions of local files
        self.remote: list[str | Callable] = [_load_reward_func(url) if url.endswith(".py") else url for url in urls]
        # The function of the first local file
        self.custom_reward_func: Callable | None = next((source for source in self.remote if callable(source)), None)
        self.reward_fn = reward_fn
        self.label_map = label_map or {}
        self.recipe = recipe
        self.media_rules = media_rules
        self.ignored_media_columns = ignored_media_columns
        # A server replaces the models, unless `reward_fn` or a recipe combines all sources
        is_replaced = bool(models and self.remote and reward_fn is None and recipe is None)
        if is_replaced:
            logger.warning(
                "`remote_rm_url` replaces `reward_model`, which isn't called; `reward_fn` can combine both."
            )
        self.models = [] if is_replaced else models
        if not (self.models or self.remote or reward_fn):
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
        if self.remote:
            prompts = _prompt_texts(samples, tokenizer)
            further = self._media_of(samples) if any(isinstance(source, str) for source in self.remote) else {}
            for source in self.remote:
                if isinstance(source, str):
                    rewards.append(_ask_server(source, arguments, prompts, further))
                else:
                    result, _ = _rewards_and_metrics(_call_reward_file(source, arguments, prompts))
                    rewards.append(reward_tensor(result, n, get_callable_name(source)))
        if self.reward_fn is not None:
            # If the only parameter of `reward_fn` has none of the arguments' names, it gets the other sources' rewards
            sole_argument = "model_reward_list" if rewards else None
            result = _call_reward_func(self.reward_fn, {**arguments, "model_reward_list": rewards}, sole_argument)
            result, metrics = _rewards_and_metrics(result)
            return reward_tensor(result, n, get_callable_name(self.reward_fn)), metrics
        if self.recipe is not None:
            labels: Any = samples.labels or [None] * n
            return combine_rewards(rewards, labels, self.recipe, self.label_map), {}
        return add_rewards(torch.stack(rewards)), {}

    def _arguments(self, samples: Samples, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        actions = samples.sequences[:, -samples.num_actions :]
        completion_ids = [ids[mask].tolist() for ids, mask in zip(actions, samples.action_mask, strict=True)]
        completions: list[Any] = completion_texts(completion_ids, tokenizer)
        rows = _rows_of(samples)
        completions = [
            [{"role": "assistant", "content": text}] if is_conversational({"prompt": row["prompt"]}) else text
            for row, text in zip(rows, completions, strict=True)
        ]
        labels = samples.labels or [None] * len(rows)
        arguments = reward_arguments([row["prompt"] for row in rows], completions, completion_ids, rows)
        return {
            **arguments,
            "queries": tokenizer.batch_decode(samples.sequences, skip_special_tokens=False),
            "labels": labels,
            "refs": [row.get("references") for row in rows] if "references" in arguments else labels,
            "label_map": self.label_map,
            "media_rules": self.media_rules,
        }

    def _media_of(self, samples: Samples) -> dict[str, list]:
        """Returns the media of samples by the names of a request: images, and audio and video in base64."""
        rules = self.media_rules.without_budgets()
        refs_of_samples = []
        for index, row in enumerate(as_encoded(_rows_of(samples))):
            if isinstance(row["prompt"], str):  # its media are in columns
                refs_of_samples.append(read_rendered(row, index, self.ignored_media_columns, rules).refs)
            else:
                refs_of_samples.append([*iter_refs(read_messages(row["prompt"], "prompt", index, rules))])
        # By the `id` of a file or an object, which the samples of a prompt share, and the options of its block
        images: dict[tuple[int, str], Any] = {}
        encode = base64_encoder(_SAMPLING_RATE)
        media: dict[str, list] = {}
        for modality in MODALITIES:
            lists: list[list | None] = []
            for refs in refs_of_samples:
                refs_of_modality = [ref for ref in refs if ref.modality == modality]
                if modality == "image":
                    keys = [(id(ref.source), str(ref.options)) for ref in refs_of_modality]
                    for key, ref in zip(keys, refs_of_modality, strict=True):
                        if key not in images:
                            images[key] = load_image(ref)
                    lists.append([images[key] for key in keys] or None)
                else:
                    lists.append([encode(ref) for ref in refs_of_modality])
            if any(lists):
                media[f"{modality}s"] = lists
        return media


def _rows_of(samples: Samples) -> list[dict[str, Any]]:
    rows = [] if samples.prompted is None else samples.prompted.source.rows
    return rows or [{"prompt": prompt} for prompt in samples.prompts]


def _prompt_texts(samples: Samples, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Returns prompts as texts: texts as they were given, and messages as the model got them, with control tokens."""
    n = samples.num_actions
    is_prompt = samples.attention_mask[:, :-n].bool()
    ids = [row[mask].tolist() for row, mask in zip(samples.sequences[:, :-n], is_prompt, strict=True)]
    decoded = tokenizer.batch_decode(ids, skip_special_tokens=False)
    return [prompt if isinstance(prompt, str) else text for prompt, text in zip(samples.prompts, decoded, strict=True)]


def _ask_server(url: str, arguments: dict[str, Any], prompts: list[str], media: dict[str, list]) -> torch.Tensor:
    others = {name: values for name, values in media.items() if name != "images"}
    texts = [as_text(completion, with_roles=False) for completion in arguments["completions"]]
    return remote_rm_fn(
        url,
        arguments["queries"],
        prompts,
        _json_list(arguments["labels"]),
        _json_list(arguments.get("references")),
        media.get("images"),
        further={"completions": texts, **others},
    )


def _json_list(values: list | None) -> list | None:
    """Returns numbers of arrays as those of Python, and `None` for a column that is missing or empty."""
    cells = [cell_value(value) for value in values or ()]
    return cells if any(cell is not None for cell in cells) else None


def _call_reward_file(function: Callable, arguments: dict[str, Any], prompts: list[str]) -> Any:
    """
    Calls the `reward_func` of a file with queries, prompts and, if it takes more, references, by position. A function
    whose parameters name other arguments, such as `completions`, is called by name.
    """
    arguments = {**arguments, "prompts": prompts}
    parameters = inspect.signature(function).parameters.values()
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    has_rest = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    by_name = arguments.keys() - {"queries", "prompts", "references"}
    required = {p.name for p in places if p.default is p.empty}
    names_others = any(p.name in by_name for p in parameters) and required <= arguments.keys()
    if names_others or not (places or has_rest):
        return _call_reward_func(function, arguments)
    values = [arguments["queries"], prompts, arguments["refs"]]
    n = 2 if has_rest and len(places) < 2 else min(len(places), len(values))
    passed = {p.name for p in places[:n]}
    missing = [p.name for p in parameters if p.default is p.empty and p.kind in _NAMED and p.name not in passed]
    if missing:
        raise ValueError(
            f"The reward function '{get_callable_name(function)}' requires `{missing[0]}`, but is called with "
            "queries, prompts and references; give it a default."
        )
    others = {}
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        others = {name: value for name, value in arguments.items() if name in by_name and name not in passed}
    return _settled(function(*values[:n], **others))


def _rewards_and_metrics(result: Any) -> tuple[Any, dict[str, Any]]:
    """
    Returns rewards and metrics of what a reward function returned: `(rewards, metrics)`, or rewards alone, which may
    be a tuple of numbers.
    """
    if isinstance(result, tuple) and len(result) == 2:
        rewards, metrics = result
        if isinstance(metrics, Mapping):
            return rewards, {name: to(value, "cpu") for name, value in metrics.items()}
        if metrics is None and isinstance(rewards, (list, tuple, np.ndarray, torch.Tensor)) and np.ndim(rewards):
            return rewards, {}
    return result, {}


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
    takes_all = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if (
        sole_argument is not None
        and len(parameters) == 1
        and not takes_all
        and not parameters.keys() & arguments.keys()
    ):
        return _settled(function(arguments[sole_argument]))
    missing = [
        name for name, p in parameters.items() if name not in arguments and p.default is p.empty and p.kind in _NAMED
    ]
    if missing:
        raise ValueError(
            f"The reward function '{get_callable_name(function)}' requires `{missing[0]}`, but there are only "
            f"{sorted(arguments)}; rename the parameter, or give it a default."
        )
    passed = {name: value for name, value in arguments.items() if takes_all or name in parameters}
    return _settled(function(**passed))


def _settled(result: Rewards | Coroutine[None, None, Rewards]) -> Rewards:
    """Returns what a function returned, or what its coroutine returns."""
    if not isinstance(result, Coroutine):
        return result
    with ThreadPoolExecutor(1) as thread:  # in which no loop is running, as it is in a notebook
        return thread.submit(asyncio.run, result).result()
