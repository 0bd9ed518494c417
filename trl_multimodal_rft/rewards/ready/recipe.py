# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Combinations of rewards by the label of each row."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from trl.trainer.utils import get_callable_name

from ...data.rows.labels import class_names
from ..calls import PreparedCall, RowError, check_rewards, check_signature, is_finite, wrap_reward


def combine_rewards(
    rewards: Sequence[torch.Tensor],
    labels: Sequence[str],
    recipe: dict[str, list[tuple[str, str, float]]],
    label_map: dict[str, int],
) -> torch.Tensor:
    """
    Sums the rewards of each completion with the recipe's weights for its label, see [`add_rewards`].

    Args:
        rewards (`Sequence[torch.Tensor]`):
            Rewards of each source, shape `(B,)`.
        labels (`Sequence[str]`):
            Label of each completion, such as its task.
        recipe (`dict[str, list[tuple[str, str, float]]]`):
            The rewards of each label, as (kind, name, weight); the kind is only documentation.
        label_map (`dict[str, int]`):
            The index of each reward source by name.

    Returns:
        `torch.Tensor`: Rewards, shape `(B,)`. `NaN` for a completion whose label has an empty recipe.

    Raises:
        `ValueError`: If a label isn't in the recipe, or a name isn't in the map.
    """
    for i, label in enumerate(labels):
        if label not in recipe:
            raise ValueError(
                f"Completion {i} has the label {label!r}, but `reward_recipe` has only {sorted(recipe)}; add the "
                "label, or correct it."
            )
    # The first term, NaN, is the sum if a label has no rewards
    terms = [torch.full_like(rewards[0], torch.nan)]
    for name, label_weights in _weights_by_name({label: recipe[label] for label in labels}).items():
        if name not in label_map:
            raise ValueError(f"`reward_recipe` uses {name!r}, but `reward_fn_label_map` has only {sorted(label_map)}.")
        terms.append(
            rewards[label_map[name]] * terms[0].new_tensor([label_weights.get(label, torch.nan) for label in labels])
        )
    return add_rewards(torch.stack(terms))


def _weights_by_name(recipe: dict[str, list[tuple[str, str, float]]]) -> dict[str, dict[str, float]]:
    weights: dict[str, dict[str, float]] = {}
    for label, label_rewards in recipe.items():
        for _, name, weight in label_rewards:
            label_weights = weights.setdefault(name, {})
            if not is_finite(weight):
                raise ValueError(f"The recipe's weight of {name!r} for {label!r} is {weight!r:.40}; give a number.")
            label_weights[label] = label_weights.get(label, 0.0) + weight
    return weights


def add_rewards(rewards: torch.Tensor) -> torch.Tensor:
    """Sums rewards `(n_rewards, ...)` to `(...)`. `NaN` counts as 0, but a sum of `NaN` alone is `NaN`."""
    return torch.where(rewards.isnan().all(0), torch.nan, rewards.nansum(0))


def apply_recipe(
    reward_funcs: dict[str, Callable], recipe: dict[str, list[tuple[str, str, float]]], label_column: str = "label"
) -> list[Callable]:
    """
    Selects and weights reward functions by the label of each row, for any trainer with TRL's reward functions.

    A function is called with the rows whose label uses it, and isn't called if there are none. Its list arguments have
    entries of these rows only. Values that the function logs with `log_extra` are `None` on other rows.

    Args:
        reward_funcs (`dict[str, Callable]`):
            Reward functions with TRL's signature, sync or async, by their names in the recipe.
        recipe (`dict[str, list[tuple[str, str, float]]]`):
            The rewards of each label, as (kind, name, weight); the kind is only documentation.
        label_column (`str`, *optional*, defaults to `"label"`):
            Column of the dataset with the label of each row.

    Returns:
        `list[Callable]`: One wrapper per function, in order, with the function's `__name__`. It returns weighted
        rewards, and `None` for rows whose label doesn't use the function.

    Raises:
        `ValueError`: If the recipe uses a name without a function; when called, if the dataset doesn't have the column
            or the recipe doesn't have a label.

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
    weights = _weights_by_name(recipe)
    missing = weights.keys() - reward_funcs.keys()
    if missing:
        raise ValueError(
            f"The recipe uses {sorted(missing)}, but `reward_funcs` has only {sorted(reward_funcs)}; add the "
            "function, or correct the name."
        )
    for name, reward_func in reward_funcs.items():
        if isinstance(reward_func, (str, nn.Module)):
            raise ValueError(f"The reward {name!r} is a model; wrap it in a reward function, such as `RewardModel`.")
        check_signature(reward_func, name)
    return [
        _on_labelled_rows(name, func, weights.get(name, {}), recipe.keys(), label_column)
        for name, func in reward_funcs.items()
    ]


def _on_labelled_rows(
    name: str, reward_func: Callable, weights: dict[str, float], labels: Iterable[str], label_column: str
) -> Callable:
    """Only rows whose label has a weight get a reward from the function."""
    logged_columns: set[str] = set()

    def prepare(columns: dict[str, Any]) -> PreparedCall:
        if label_column not in columns:
            raise ValueError(
                f"The reward recipe needs the column '{label_column}', but there are only the columns "
                f"{sorted(columns)}; add the column, or name another one as `label_column`."
            )
        row_labels = class_names(columns[label_column])
        for position, label in enumerate(row_labels):
            if label not in labels:
                raise RowError(
                    position,
                    f"column '{label_column}': the recipe has no label {label!r}, only {sorted(labels)}; add or "
                    "correct the label.",
                )
        positions = [position for position, label in enumerate(row_labels) if label in weights]
        arguments = {
            key: [value[position] for position in positions] if isinstance(value, list) else value
            for key, value in columns.items()
        }
        if "log_extra" in columns:

            def log_extra(column: str, values: list) -> None:
                values_by_position = dict(zip(positions, values, strict=True))
                logged_columns.add(column)
                columns["log_extra"](column, [values_by_position.get(position) for position in range(len(row_labels))])

            arguments["log_extra"] = log_extra
            if not positions:
                # Without new values, TRL's table would repeat the values of an earlier batch
                for column in sorted(logged_columns):
                    log_extra(column, [])

        def to_all_rows(rewards: list) -> list[float | None]:
            result: list[float | None] = [None] * len(row_labels)
            for position, reward in zip(positions, check_rewards(rewards, len(positions), name), strict=True):
                result[position] = None if reward is None else weights[row_labels[position]] * reward
            return result

        return arguments if positions else None, _add_batch_indices(name, positions), to_all_rows

    return wrap_reward(reward_func, get_callable_name(reward_func), prepare)


@contextmanager
def _add_batch_indices(name: str, positions: list[int]):
    """Adds batch indices to the errors of a function that was called with only some `positions` of the batch."""
    try:
        yield
    except RowError as error:
        raise RowError(positions[error.position], error.problem) from None
    except Exception as error:
        error.add_note(
            f"The recipe called {name!r} with the rows {positions} of the batch; its row 0 is row {positions[0]}."
        )
        raise
