# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Last stage of a rollout: owns its micro-batches until the last update on them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...models.wrapped import is_unsharded
from ...rollout.engine_ratios import engine_metrics, rollout_ratios
from ...rollout.groups import GroupExchange
from ...rollout.ranks import arrange_rollout, rank_metrics
from ...rollout.rollout import Rollout
from ...rollout.skipped_forwards import n_on_policy, packing_metrics
from .context import Context
from .sampling import Sampling


@dataclass
class Batches:
    """
    Stage that exchanges groups of a rollout, splits it into micro-batches, and keeps these until the last update.

    [`MultimodalTrainer`] has the calls of an update. `_roll_out` of a trainer calls [`~Batches.exchanged`] on the
    rollout of its stages, and its `_on_rollout` calls [`~Batches.with_off_policy_scores`]. After a micro-batch's first
    forward pass, [`~Batches.settle`] keeps what it shows.

    The field `old_per_token_logps` of a micro-batch is `None` until the first of these sets it: GRPO's
    `_with_old_scores`, for the whole rollout if advantages, dynamic sampling, replay or a view's dependency need it,
    or for micro-batches, if the entropies of the rollout choose tokens; `with_off_policy_scores`, for micro-batches
    after the first update; `settle`, for the others. RLOO's `_score_rollout` sets it if rewards or replay need it.
    After `on_rollout`, only `settle` sets old log-probabilities and ratios to the engine, and only
    [`~rollout.token_filter.TokenFilter.keep`] weights of tokens, unless a user's `_compute_loss` sets them.
    """

    sampling: Sampling
    new_rollout: Callable[[Any], Rollout]  # the trainer's `_new_rollout`
    on_rollout: Callable[[list[Rollout]], list[Rollout]]  # scores the micro-batches of a new rollout
    groups: GroupExchange | None  # set with dynamic sampling or replay
    loss_reads_reference: bool
    n_iterations: int  # over the micro-batches of a rollout
    shuffles: bool  # completions, as in TRL; otherwise micro-batches have whole groups
    reorders: bool  # whether later iterations have another order
    n_trained: int = 0  # micro-batches of the run that were trained on; TRL counts them, as `_step`
    parts: list[Rollout] | None = None  # the micro-batches of the last rollout

    @property
    def context(self) -> Context:
        return self.sampling.context

    @property
    def n_calls(self) -> int:
        """Number of micro-batches of a rollout, over all iterations."""
        return self.context.args.steps_per_generation * self.n_iterations

    @property
    def n_on_policy(self) -> int:
        """Number of micro-batches of a rollout before the first update on it."""
        return n_on_policy(self.context.args, self.n_calls)

    @property
    def index(self) -> int:
        """Index of the current micro-batch of the rollout, over all iterations."""
        return self.n_trained % self.n_calls

    @property
    def is_first_iteration(self) -> bool:
        return self.index < self.context.args.steps_per_generation

    def next(self, inputs: Any) -> Rollout:
        """
        Returns the next micro-batch, from a new rollout of the rows `inputs` if the last one is used up. With
        `steps_per_generation=4` and `num_iterations=2`, that is the ninth call: 0, 1, 2, 3, 0, 1, 2, 3 came before.
        All ranks must call this.
        """
        args = self.context.args
        index = self.index
        parts = self.parts
        if index == 0 or parts is None:
            for part in parts or ():
                part.release_media()
            parts = self.on_rollout(self._split(self.new_rollout(inputs)))
        if self.reorders and index > 0 and index % args.steps_per_generation == 0:
            generator = torch.Generator().manual_seed(args.seed + self.n_trained)  # the same order on all ranks
            parts = [parts[i] for i in torch.randperm(len(parts), generator=generator).tolist()]
        self.parts = parts
        return parts[index % args.steps_per_generation]

    def exchanged(self, rollout: Rollout, roll_out_extra: Callable[[int], Rollout]) -> Rollout:
        """
        Returns a rollout with signal in more groups, in training with dynamic sampling or replay.
        `roll_out_extra(n)` returns the rollout of `n` further completions' prompts.
        """
        if self.groups is None or not self.context.is_training:
            return rollout
        rollout, has_old_groups, metrics = self.groups.exchange(rollout, roll_out_extra)
        self.context.metrics.add(metrics)
        if has_old_groups and self.loss_reads_reference and rollout.ref_per_token_logps is not None:
            # The reference scored some groups at an earlier step, and `sync_ref_model` may have changed it since
            return replace(rollout, ref_per_token_logps=self.sampling.scoring.by_reference(rollout).logps)
        return rollout

    def _split(self, rollout: Rollout) -> list[Rollout]:
        context = self.context
        policy = self.sampling.scoring.policy
        if self.shuffles:
            rollout = rollout.select(torch.randperm(len(rollout)).tolist())
        else:  # about equal packed lengths
            # With separate forwards of prompts (`isolate`), ranks with sharded weights need micro-batches of the same
            # modalities, so each rank keeps its groups
            may_move_groups = policy.fallbacks.isolate is None or is_unsharded(context.accelerator)
            rollout, metrics = arrange_rollout(rollout, context.args, context.accelerator, may_move_groups)
            context.metrics.add(metrics)
        parts = rollout.micro_batches(context.args.steps_per_generation)
        context.metrics.add(rank_metrics(parts, context.accelerator))
        context.metrics.add(packing_metrics(policy, self.sampling.prompting.encoder.model, parts))
        return parts

    # Log-probabilities of the sampling policy

    def with_off_policy_scores(self, parts: Sequence[Rollout]) -> list[Rollout]:
        """Returns all micro-batches of a new rollout. Those after its first update are scored now."""
        scored = [*parts[: self.n_on_policy]]
        for part in parts[self.n_on_policy :]:
            if part.old_per_token_logps is None:
                scores = self.sampling.scoring.score(self.context.model, part)
                part = replace(part, old_per_token_logps=scores.logps)
            scored.append(part)
        if self.n_on_policy == 0 and self.sampling.corrects_for_engine(parts[0]):
            self.context.metrics.add(engine_metrics(scored, self.context.args))
        return scored

    def settle(self, part: Rollout, logps: torch.Tensor) -> None:
        """
        Sets what the first forward of a micro-batch computes, by its log-probabilities, `(N, C)`: on-policy, they are
        the old ones, of which the ratios of the policy to the engine follow.
        """
        if part.old_per_token_logps is None:
            part.old_per_token_logps = logps.detach()
        if not self.sampling.corrects_for_engine(part) or part.importance_sampling_ratio is not None:
            return
        part.importance_sampling_ratio = rollout_ratios(part, self.context.args)
        if not self.context.is_training:
            self.context.metrics.add(engine_metrics([part], self.context.args))
        elif self.index == self.n_on_policy - 1:  # the last on-policy micro-batch, after which all have old ones
            self.context.metrics.add(engine_metrics(self.parts or (), self.context.args))

    # Checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.n_trained,
            "buffered_inputs": self.parts if self.index else None,
            "groups": self.groups and self.groups.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.n_trained = state["step"]
        if state["buffered_inputs"] is not None:
            device = self.context.accelerator.device
            self.parts = [part.to(device) for part in state["buffered_inputs"]]
        if self.groups is not None and state["groups"] is not None:
            self.groups.load_state_dict(state["groups"])
