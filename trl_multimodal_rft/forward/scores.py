# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scores of completions as tensors, and how those of parts of a batch are combined."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from .layout import rows_of, to_device


def _per_completion() -> Any:
    return field(default=None, metadata={"per_completion": True})


@dataclass
class Scores:
    """
    Scores of completions. Fields are `None` unless requested; their type is `Any` so that callers needn't assert.
    """

    logps: Any = _per_completion()  # log-probabilities of the tokens, `(B, C)`
    divergences: Any = _per_completion()  # of the tokens' distributions from a target, `(B, C)`
    entropies: Any = _per_completion()  # of the tokens' distributions, `(B, C)`
    values: Any = _per_completion()  # of the states before each token, `(B, C)`
    top1: Any = _per_completion()  # 1 where a token is the most likely one, `(B, C)`
    hidden: Any = _per_completion()  # last hidden states from which each token is predicted, `(B, C, H)`
    aux_loss: Any = None  # load-balancing loss of a mixture of experts, a scalar
    router: Any = None  # `router_statistics` for that loss, `(2, E)`; those of parts of a batch add up
    supervised: Any = None  # log-probabilities of supervised completions, which are others than those scored
    deferred: Any = None  # the `DeferredParts` that these scores come from, whose gradients are pending
    view: Any = None  # the `Scores` of the same completions after a view of their prompts

    def __post_init__(self):
        shapes = {name: tuple(value.shape[:2]) for name, value in self._chosen(per_completion=True).items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"scores of the same completions have different shapes: {shapes}")

    def _chosen(self, per_completion: bool) -> dict[str, Any]:
        tensors = [each for each in fields(self) if each.name not in ("deferred", "view")]
        names = [each.name for each in tensors if ("per_completion" in each.metadata) == per_completion]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def tensors(self) -> dict[str, Any]:
        """Tensors by field; none that is `None`."""
        return {**self._chosen(per_completion=True), **self._chosen(per_completion=False)}

    def map(self, function: Callable) -> "Scores":
        """Applies a function to each tensor."""
        return Scores(**{name: function(value) for name, value in self.tensors().items()})

    def rows(self, index: slice | Sequence[int]) -> "Scores":
        """Scores of some completions; fields without a row per completion stay."""
        chosen = {name: rows_of(value, index) for name, value in self._chosen(per_completion=True).items()}
        return Scores(**chosen, **self._chosen(per_completion=False))

    def spread(self, places: Sequence[int], n: int) -> "Scores":
        """The first scores at these places among `n` completions, and 0 at the others."""

        def spread(values: torch.Tensor) -> torch.Tensor:
            index = to_device(torch.tensor(places, dtype=torch.long), values.device)
            return values.new_zeros(n, *values.shape[1:]).index_copy(0, index, values[: len(places)])

        chosen = {name: spread(value) for name, value in self._chosen(per_completion=True).items()}
        return Scores(**chosen, **self._chosen(per_completion=False), deferred=self.deferred)

    @classmethod
    def join(cls, parts: Sequence["Scores"], places: Sequence[Sequence[int]]) -> "Scores":
        """
        Joins parts of a batch, whose rows come from these `places` in it, in its order, with the sum of their router
        statistics and the supervised rows of the part that has them. Raises a `ValueError` for parts of different
        fields.
        """
        chosen = [part._chosen(per_completion=True) for part in parts]
        for part, rows in zip(chosen, places, strict=True):
            if part.keys() != chosen[0].keys() or any(len(value) != len(rows) for value in part.values()):
                shapes = [{name: tuple(value.shape) for name, value in each.items()} for each in chosen]
                raise ValueError(f"parts with {shapes} don't fit rows {[list(each) for each in places]}")
        order = [place for rows in places for place in rows]
        tensors: dict[str, Any] = {name: torch.cat([part[name] for part in chosen]) for name in chosen[0]}
        joined = cls(**tensors)
        if order != sorted(order):
            joined = joined.rows(sorted(range(len(order)), key=order.__getitem__))
        routers = [part.router for part in parts if part.router is not None]
        supervised = [part.supervised for part in parts if part.supervised is not None]
        if len(supervised) > 1:
            raise ValueError(f"{len(supervised)} of {len(parts)} parts have supervised rows; one can")
        joined.router = torch.stack(routers).sum(0) if routers else None
        joined.supervised = supervised[0] if supervised else None
        return joined


def router_statistics(router_logits: Sequence[torch.Tensor], top_k: int, weights: torch.Tensor) -> torch.Tensor:
    """
    For each expert how often it was chosen and the sum of its probabilities, over all layers, `(2, E)`, from which the
    load-balancing loss is computed. Statistics of parts of a batch add up.

    Shapes: `router_logits` of each layer `(N, E)`; `weights`, how often each token counts, `N` numbers.
    """
    weights = weights.reshape(-1, 1).float()
    statistics = []
    for logits in router_logits:
        probabilities = logits.reshape(len(weights), -1).to(weights.device).softmax(-1)
        chosen = torch.zeros_like(probabilities, dtype=torch.float32)
        chosen.scatter_(1, probabilities.topk(top_k).indices, 1.0)
        statistics.append(torch.stack([(chosen * weights).sum(0), (probabilities.float() * weights).sum(0)]))
    return torch.stack(statistics).sum(0)


def load_balancing_loss(router: torch.Tensor) -> torch.Tensor:
    """
    Load-balancing loss of the [Switch Transformer](https://huggingface.co/papers/2101.03961), as transformers computes
    it, from [`router_statistics`] of a batch `(2, E)`.
    """
    chosen, probabilities = router
    n_tokens = probabilities.detach().sum()  # those of a token sum to 1
    return len(chosen) * (chosen * probabilities).sum() / n_tokens**2
