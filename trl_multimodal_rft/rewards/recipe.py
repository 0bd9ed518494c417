# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Which rewards count for which kind of completion."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import get_callable_name, is_async_callable

from .checks import RowError, check_signature


def combine_rewards(
    rewards: Sequence[torch.Tensor],
    labels: Sequence[str],
    recipe: dict[str, list[tuple[str, str, float]]],
    label_map: dict[str, int],
) -> torch.Tensor:
    """
    Adds up rewards as the label of each completion says, see [`add_rewards`].

    Args:
        rewards (`Sequence[torch.Tensor]`):
            Rewards of each source, shape `(B,)`.
        labels (`Sequence[str]`):
            Label of each completion, such as its task.
        recipe (`dict[str, list[tuple[str, str, float]]]`):
            For each label the rewards that count, as (kind, name, weight); the kind is for the reader.
        label_map (`dict[str, int]`):
            Which source has which name.

    Returns:
        `torch.Tensor`: Rewards, shape `(B,)`; `NaN` if the recipe of a label is empty.

    Raises:
        `ValueError`: If a label isn't in the recipe, or a name isn't in the map.
    """
    for i, label in enumerate(labels):
        if label not in recipe:
            raise ValueError(
                f"Sample {i} has the label {label!r}, which `reward_recipe` doesn't know: {sorted(recipe)}."
            )
    own = {label: recipe[label] for label in labels}
    parts = [torch.full_like(rewards[0], torch.nan)]
    for name, weights in _weights(own).items():
        if name not in label_map:
            raise ValueError(f"`reward_recipe` asks for {name!r}, which `reward_fn_label_map` doesn't know.")
        parts.append(
            rewards[label_map[name]] * parts[0].new_tensor([weights.get(label, torch.nan) for label in labels])
        )
    return add_rewards(torch.stack(parts))


def _weights(recipe: dict[str, list[tuple[str, str, float]]]) -> dict[str, dict[str, float]]:
    """For each reward its weights by label."""
    weights: dict[str, dict[str, float]] = {}
    for label, parts in recipe.items():
        for _, name, weight in parts:
            own = weights.setdefault(name, {})
            own[label] = own.get(label, 0.0) + weight
    return weights


def add_rewards(rewards: torch.Tensor) -> torch.Tensor:
    """Adds up rewards over the first dimension, `NaN` where none applies: `(n_rewards, ...)` to `(...)`."""
    return torch.where(rewards.isnan().all(0), torch.nan, rewards.nansum(0))


def apply_recipe(
    reward_funcs: dict[str, Callable],
    recipe: dict[str, list[tuple[str, str, float]]],
    label_column: str = "label",
) -> list[Callable]:
    """
    Makes reward functions count as the label of each row says, for any trainer with TRL's reward functions.

    Each function is called with the rows whose label asks for it, and not at all if there are none. Everything in
    lists is cut to these rows; what it logs with `log_extra` is `None` on the others.

    Args:
        reward_funcs (`dict[str, Callable]`):
            Reward functions with TRL's signature, plain or async, by the names that the recipe uses.
        recipe (`dict[str, list[tuple[str, str, float]]]`):
            For each label the rewards that count, as (kind, name, weight); the kind is for the reader.
        label_column (`str`, *optional*, defaults to `"label"`):
            Column of the dataset with the label of each row.

    Returns:
        `list[Callable]`: One function per name, in order, with the `__name__` of the function. Its rewards are
        weighted, and `None` where the label doesn't ask for it.

    Raises:
        `ValueError`: If the recipe asks for a name that has no function; when called, if there is no such column or
            the recipe doesn't know a label.

    Example:
    ```python
    recipe = {
        "counting": [("rule", "accuracy", 1.0), ("rule", "format", 0.2)],
        "captions": [("model", "preference", 1.0)],
    }
    functions = {"accuracy": accuracy_reward, "format": format_reward, "preference": RewardModel(model, processor)}
    trainer = MultimodalGRPOTrainer(reward_funcs=apply_recipe(functions, recipe, label_column="task"), ...)
    ```
    """
    weights = _weights(recipe)
    missing = weights.keys() - reward_funcs.keys()
    if missing:
        raise ValueError(
            f"The recipe asks for {sorted(missing)}, which `reward_funcs` doesn't have, only {sorted(reward_funcs)}; "
            "add the function, or correct the name."
        )
    for name, reward_func in reward_funcs.items():
        if isinstance(reward_func, (str, nn.Module)):
            raise ValueError(f"The reward {name!r} is a model; make a reward function of it, such as `RewardModel`.")
        check_signature(reward_func, name)
    return [
        _for_its_rows(name, func, weights.get(name, {}), recipe.keys(), label_column)
        for name, func in reward_funcs.items()
    ]


def _for_its_rows(
    name: str, reward_func: Callable, weights: dict[str, float], labels: Iterable[str], label_column: str
) -> Callable:
    extra_columns: set[str] = set()

    def cut(columns: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
        """The rows of this function, and its arguments."""
        if label_column not in columns:
            raise ValueError(
                f"The recipe of rewards goes by the column '{label_column}', which the dataset doesn't have, only "
                f"{sorted(columns)}; add it, or name another as `label_column`."
            )
        for row, label in enumerate(columns[label_column]):
            if label not in labels:
                raise ValueError(
                    f"row {row} has the label {label!r}, which the recipe doesn't know: {sorted(labels)}."
                )
        rows = [row for row, label in enumerate(columns[label_column]) if label in weights]
        arguments = {
            key: [value[row] for row in rows] if isinstance(value, list) else value for key, value in columns.items()
        }
        if "log_extra" in columns:
            n_rows = len(columns[label_column])

            def log_extra(column: str, values: list) -> None:
                by_row = dict(zip(rows, values, strict=True))
                extra_columns.add(column)
                columns["log_extra"](column, [by_row.get(row) for row in range(n_rows)])

            arguments["log_extra"] = log_extra
            if not rows:
                # TRL's table would repeat the values of an earlier batch
                for column in sorted(extra_columns):
                    log_extra(column, [])
        return rows, arguments

    def spread(rewards: list, rows: list[int], row_labels: list[str]) -> list[float | None]:
        if len(rewards) != len(rows):
            raise ValueError(
                f"The reward function {name!r} returned {len(rewards)} rewards for {len(rows)} completions; return "
                "one per completion."
            )
        result: list[float | None] = [None] * len(row_labels)
        for row, reward in zip(rows, rewards, strict=True):
            result[row] = None if reward is None else weights[row_labels[row]] * reward
        return result

    if is_async_callable(reward_func):

        async def wrapper(prompts, completions, **columns):
            rows, arguments = cut({"prompts": prompts, "completions": completions, **columns})
            with _telling(name, rows):
                rewards = await reward_func(**arguments) if rows else []
            return spread(rewards, rows, columns[label_column])

    else:

        def wrapper(prompts, completions, **columns):
            rows, arguments = cut({"prompts": prompts, "completions": completions, **columns})
            with _telling(name, rows):
                rewards = reward_func(**arguments) if rows else []
            return spread(rewards, rows, columns[label_column])

    wrapper.__name__ = get_callable_name(reward_func)
    vars(wrapper)["required_in_prompt"] = getattr(reward_func, "required_in_prompt", None)
    return wrapper


@contextmanager
def _telling(name: str, rows: list[int]):
    try:
        yield
    except RowError as error:
        raise RowError(rows[error.place], error.problem) from None
    except Exception as error:
        error.add_note(
            f"The recipe gave {name!r} the rows {rows} of the batch; what it calls row 0 is the first of these."
        )
        raise
