# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Policies and critics: the names of `lightrft.models`."""

from typing import TYPE_CHECKING

from ...lazy import lazy_names


if TYPE_CHECKING:  # for type checkers; `lazy_names` gets the same names below
    from .actor import Actor, ActorAL, ActorOmni, ActorVL
    from .actor import Actor as ActorLanguage
    from .critic import Critic
    from .critic import Critic as CriticVL
    from .utils import compute_approx_kl, compute_reward, masked_mean

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".actor": ["Actor", "ActorAL", "ActorOmni", "ActorVL", "Actor as ActorLanguage"],
        ".critic": ["Critic", "Critic as CriticVL"],
        ".utils": ["compute_approx_kl", "compute_reward", "masked_mean"],
    },
)
