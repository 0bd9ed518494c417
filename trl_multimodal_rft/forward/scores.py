# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a forward gives for completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch


def _aligned() -> Any:
    """A field with one row per completion."""
    return field(default=None, metadata={"aligned": True})


@dataclass
class Scores:
    """
    Scores of completions. Choosing and joining rows acts on all fields that have one per completion, and on no other.

    Args:
        logps (`torch.Tensor`, *optional*):
            Log-probabilities of the tokens, `(B, C)`.
        entropies (`torch.Tensor`, *optional*):
            Entropies of their distributions, `(B, C)`, where the head computes them.
        values (`torch.Tensor`, *optional*):
            Values of the states before each token, `(B, C)`, where there is a critic.
        top1 (`torch.Tensor`, *optional*):
            1 where a token is the most likely one, `(B, C)`, where the head computes that.
        aux_loss (`torch.Tensor`, *optional*):
            Load-balancing loss of a mixture of experts, a scalar of all completions.
        router (`torch.Tensor`, *optional*):
            What that loss is computed from, see [`load_balancing_loss`], `(2, E)`. Parts of a batch add up.
        supervised (`torch.Tensor`, *optional*):
            Log-probabilities of supervised completions, which are others than those scored.
        deferred ([`~forward.token_budget.DeferredParts`], *optional*):
            The parts that these scores were computed in, whose gradients are still to come.

    Raises:
        `ValueError`: If fields with one row per completion have different shapes.
    """

    # Callers know which ones they have asked for
    logps: Any = _aligned()
    entropies: Any = _aligned()
    values: Any = _aligned()
    top1: Any = _aligned()
    aux_loss: Any = None
    router: Any = None
    supervised: Any = None
    deferred: Any = None

    def __post_init__(self):
        shapes = {name: tuple(value.shape) for name, value in self._chosen(aligned=True).items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"scores of the same completions have different shapes: {shapes}")

    def _chosen(self, aligned: bool) -> dict[str, Any]:
        tensors = [each for each in fields(self) if each.name != "deferred"]
        names = [each.name for each in tensors if ("aligned" in each.metadata) == aligned]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def tensors(self) -> dict[str, Any]:
        """
        What there is, by the names of the fields.

        Returns:
            `dict[str, torch.Tensor]`: The tensors.
        """
        return {**self._chosen(aligned=True), **self._chosen(aligned=False)}

    def map(self, function: Callable) -> "Scores":
        """
        Applies a function to each tensor.

        Args:
            function (`Callable`):
                From a tensor to a tensor.

        Returns:
            [`Scores`]: What it returned.
        """
        return Scores(**{name: function(value) for name, value in self.tensors().items()})

    def rows(self, index: slice | Sequence[int] | torch.Tensor) -> "Scores":
        """
        Scores of some of the completions.

        Args:
            index (`slice` or `Sequence[int]` or `torch.Tensor`):
                Which ones, in which order.

        Returns:
            [`Scores`]: Theirs. What has no row per completion stays.
        """
        chosen = {name: value[index] for name, value in self._chosen(aligned=True).items()}
        return Scores(**chosen, **self._chosen(aligned=False))

    @classmethod
    def join(cls, parts: Sequence["Scores"], places: Sequence[Sequence[int]]) -> "Scores":
        """
        Puts parts of a batch together.

        Args:
            parts (`Sequence[Scores]`):
                Scores of the parts.
            places (`Sequence[Sequence[int]]`):
                Places in the batch of each part's rows.

        Returns:
            [`Scores`]: Scores of the batch in its order, with the sum of the parts' router statistics and the
            supervised rows of the part that has them.

        Raises:
            `ValueError`: If a part has other fields than the first or another number of rows than places, or if
                several have supervised rows.
        """
        aligned = [part._chosen(aligned=True) for part in parts]
        for part, own in zip(aligned, places, strict=True):
            if part.keys() != aligned[0].keys() or any(len(value) != len(own) for value in part.values()):
                shapes = [{name: tuple(value.shape) for name, value in each.items()} for each in aligned]
                raise ValueError(f"parts with {shapes} don't fit rows {[list(each) for each in places]}")
        order = [place for own in places for place in own]
        tensors: dict[str, Any] = {name: torch.cat([part[name] for part in aligned]) for name in aligned[0]}
        joined = cls(**tensors)
        if order != sorted(order):
            joined = joined.rows(torch.tensor(order).argsort())
        routers = [part.router for part in parts if part.router is not None]
        supervised = [part.supervised for part in parts if part.supervised is not None]
        if len(supervised) > 1:
            raise ValueError(f"{len(supervised)} of {len(parts)} parts have supervised rows; one can")
        joined.router = torch.stack(routers).sum(0) if routers else None
        joined.supervised = supervised[0] if supervised else None
        return joined


def router_statistics(router_logits: Sequence[torch.Tensor], top_k: int, weights: torch.Tensor) -> torch.Tensor:
    """
    What the load-balancing loss of a mixture of experts is computed from.

    Args:
        router_logits (`Sequence[torch.Tensor]`):
            Logits of each layer's router, each of `N` tokens, shape `(N, E)`.
        top_k (`int`):
            Number of experts of a token.
        weights (`torch.Tensor`):
            How often each token counts, `N` numbers.

    Returns:
        `torch.Tensor`: For each expert how often it was chosen and the sum of its probabilities, over all layers,
        shape `(2, E)`. Statistics of parts of a batch add up.
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
    Load-balancing loss of the [Switch Transformer](https://huggingface.co/papers/2101.03961), as transformers has it.

    Args:
        router (`torch.Tensor`):
            [`router_statistics`] of a batch, shape `(2, E)`.

    Returns:
        `torch.Tensor`: The loss, a scalar.
    """
    chosen, probabilities = router
    n_tokens = probabilities.detach().sum()  # those of a token sum to 1
    return len(chosen) * (chosen * probabilities).sum() / n_tokens**2
