# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What policies and critics say about samples."""

import torch
import torch.nn.functional as F
from torch import nn

from ..families import family_of
from ..forward.scoring import completion_scores, completion_values
from ..models.modes import evaluation_mode
from .actor import Actor
from .critic import Critic
from .experience import Samples


def action_log_probs(actor: Actor, samples: Samples) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of the actions and, where the policy gives them, entropies, in evaluation mode: `(B, A)`."""
    mask = samples.action_mask
    with evaluation_mode(actor):
        if samples.encoded_prompts is None:
            inputs = (samples.sequences, samples.num_actions, samples.attention_mask)
            if actor.high_entropy_token_ratio == 0:
                return torch.where(mask, actor(*inputs), 0), None
            logps, output = actor(*inputs, return_output=True)
            entropy = output["action_entropy"]
        else:
            scores = completion_scores(
                actor.model,
                actor.base_model,
                samples.encoded_prompts,
                samples.sequences[:, -samples.num_actions :],
                mask.long(),
                packed=actor.packing_samples,
                apart=family_of(actor).apart,
            )
            logps, entropy = scores.logps, scores.entropies
    entropy = None if entropy is None else torch.where(mask, entropy.float(), 0)
    return torch.where(mask, logps.float(), 0), entropy


def state_values(
    critic: nn.Module, actor: Actor, samples: Samples, media: dict[str, torch.Tensor], bootstrap: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """
    Values of the states before the actions, `(B, A)`, in evaluation mode, and with `bootstrap` those after completions
    that were cut off, `(B,)`, 0 after others.
    """
    sequences, n_actions = samples.sequences, samples.num_actions
    mask, attention_mask = samples.action_mask, samples.attention_mask
    if bootstrap:
        # The state before a further token, whatever that is; what was cut off fills all columns
        sequences, n_actions = F.pad(sequences, (0, 1)), n_actions + 1
        further = samples.truncated[:, None]
        mask, attention_mask = (torch.cat([m, further.to(m.dtype)], 1) for m in (mask, attention_mask))
    with evaluation_mode(critic):
        if isinstance(critic, Critic) and samples.encoded_prompts is not None:
            values = completion_values(
                critic,
                critic.model,
                samples.encoded_prompts,
                sequences[:, -n_actions:],
                mask.long(),
                packed=actor.packing_samples,
                apart=family_of(actor).apart,
            )
        else:
            values = torch.where(mask, critic(sequences, n_actions, attention_mask, **media), 0)
    return (values[:, :-1], values[:, -1]) if bootstrap else (values, None)
