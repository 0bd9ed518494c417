# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Options of GRPO that contradict each other or have no effect: tables of conditions and messages."""

from typing import Any

from ...algorithms.advantages import is_constant
from ...rollout.engine_ratios import level_conflict
from ..base.conflicts import Conflicts


def conflicts_of_rewards(args: Any) -> Conflicts:
    """Returns conflicts of the options that turn rewards into advantages."""
    estimator = args.estimator
    option = f"`advantage_estimator={args.advantage_estimator!r}`"
    cache = args.soft_overlong_cache
    shapes_rewards = args.reward_running_scale or args.reward_clip_range is not None or args.kl_in_reward
    n_compared = None if callable(args.advantage_estimator) else estimator.setting("k")
    normalizes_each = args.multi_objective_aggregation == "normalize_then_sum"
    changes_sum = shapes_rewards or args.contrast_view is not None
    return [
        (
            cache is not None and not 0 < cache <= args.max_completion_length,
            f"`soft_overlong_cache` ({cache}) must be above 0 and at most `max_completion_length` "
            f"({args.max_completion_length}); `None` switches the penalty off.",
        ),
        (
            estimator.step_input is not None and shapes_rewards,
            f"{option} reads rewards of steps. `reward_running_scale`, `reward_clip_range` and `kl_estimator='k1'` "
            "have no effect on them; remove these options.",
        ),
        (
            n_compared is not None and n_compared > args.num_generations,
            f"{option} compares sets of {n_compared} completions of a prompt, so `num_generations` "
            f"({args.num_generations}) must be at least {n_compared}. Raise it, or set a smaller `k`.",
        ),
        (
            not callable(args.advantage_estimator) and is_constant(estimator, args.num_generations),
            f"{option} gives each of {args.num_generations} completions of a prompt the advantage 0, whatever their "
            "rewards, so that nothing would be learned. Raise `num_generations`, or set a smaller `k`.",
        ),
        (
            args.scale_rewards != "group" and estimator.name != "group_norm",
            f"`scale_rewards={args.scale_rewards!r}` applies to `advantage_estimator='group_norm'` only; remove it.",
        ),
        (
            normalizes_each and (estimator.name != "group_norm" or changes_sum),
            "`multi_objective_aggregation='normalize_then_sum'` normalizes the rewards of each function separately, "
            "before their sum. Use `advantage_estimator='group_norm'` with it, and remove `reward_running_scale`, "
            "`reward_clip_range`, `kl_estimator='k1'` and `contrast_view`, which change the sum.",
        ),
    ]


def conflicts_of_kl(args: Any) -> Conflicts:
    """Returns the conflict of a KL divergence in the reward with advantages of a user's own."""
    return [
        (
            args.beta != 0 and args.kl_in_reward and callable(args.advantage_estimator),
            "A function as `advantage_estimator` gets `old_logps` and `ref_logps` to subtract the KL divergence "
            "itself; remove `kl_estimator='k1'`.",
        )
    ]


def conflicts_of_entropy(args: Any) -> Conflicts:
    """Returns the conflict of tokens that compete within an optimizer step with its rollouts. Raises if invalid."""
    settings = args.entropy_settings
    holds_whole_steps = args.steps_per_generation % args.gradient_accumulation_steps == 0
    return [
        (
            args.top_entropy_quantile < 1 and settings.scope == "batch" and not holds_whole_steps,
            "The scope 'batch' of `entropy_source` needs the whole batch of an optimizer step at once, so "
            f"`steps_per_generation` ({args.steps_per_generation}) must be a multiple of "
            f"`gradient_accumulation_steps` ({args.gradient_accumulation_steps}). Change one of them, or use "
            "`entropy_source=\"rollout(scope='micro_batch')\"`.",
        )
    ]


def conflicts_of_loss(args: Any) -> Conflicts:
    """Returns conflicts of the policy loss with the advantages, the ratios and their bounds."""
    loss = args.loss
    estimator = args.estimator
    option = f"`loss_type={args.loss_type!r}`"
    chosen_estimator = f"`advantage_estimator={args.advantage_estimator!r}`"
    sequence_level = args.importance_sampling_level == "sequence"
    # Without a critic, steps or a baseline per token, only the KL penalty differs between a completion's tokens
    tokens_differ = estimator.needs == "critic" or estimator.step_input is not None or estimator.reads_logps
    by_kl = "" if tokens_differ else " with the KL divergence in the reward"
    level_problem = level_conflict(args.ratio_level, args.vllm_importance_sampling_mode, args.loss_type)
    clip_bound = 1 + args.loss_options().epsilon_high
    reads_delta = loss.name in ("dual_clip", "fipo") or loss.sequence_level  # TRL's other losses ignore it
    return [
        (
            estimator.per_token and loss.per_completion,
            f"{option} takes one advantage per completion, but {chosen_estimator} gives one per token. Use another "
            "estimator, such as 'reinforce_baseline'.",
        ),
        (
            sequence_level and estimator.per_token and (tokens_differ or args.kl_in_reward),
            "`importance_sampling_level='sequence'` takes one advantage per completion, but "
            f"{chosen_estimator}{by_kl} gives one per token. Use another estimator"
            + (", or `kl_estimator='k3'`." if by_kl else "."),
        ),
        # TRL checks the mode only when its constructor starts the engine. Other samplers are asked at their rollouts
        (args.corrects_for_vllm and bool(level_problem), level_problem),
        (
            sequence_level and not loss.sequence_level,
            f"{option} clips the ratios of tokens, not of completions; remove `importance_sampling_level='sequence'`.",
        ),
        (
            loss.per_completion and args.entropy_settings.renormalize,
            f"`renormalize` of `entropy_source` has no effect with {option}, whose geometric mean is over the tokens "
            "that are trained on anyway; remove it.",
        ),
        (
            estimator.name == "online_dpo" and (loss.mode != "seq-mean-token-sum" or not args.kl_in_reward),
            f"{chosen_estimator} is DPO only with `beta` above 0, the default `kl_estimator`, and a loss that sums "
            "over the tokens of a completion. Set `beta`, such as to 0.1, `loss_type='luspo'` and "
            "`importance_sampling_level='sequence'`, and remove `kl_estimator`.",
        ),
        (
            loss.name == "cpgd" and args.epsilon >= 1,
            f"`loss_type='cpgd'` clips at log(1 - epsilon), so `epsilon` ({args.epsilon}) must be below 1.",
        ),
        (
            loss.name == "dual_clip" and args.delta <= clip_bound,
            f"`delta` ({args.delta}) bounds the ratio beyond the clip range, so it must be above {clip_bound}.",
        ),
        (
            args.delta is not None and not reads_delta,
            f"`delta` has no effect with {option}; remove it.",
        ),
    ]


def conflicts_of_view(args: Any) -> Conflicts:
    """Returns conflicts of the settings of `loss_view`."""
    view = args.loss_view_settings
    coefs = view.entropy_coefs
    if view.view is None:
        return []
    return [
        (
            not view.has_term and not view.measures_dependency,
            f"`loss_view={args.loss_view!r}` has no effect by itself; set one of `kl_coef`, `entropy_coefs`, "
            "`advantage_min`, `token_quantile` and `temperature` in it, such as 'blank(kl_coef=0.01)'.",
        ),
        (
            coefs is not None and len(coefs) != 2,
            "`entropy_coefs` of `loss_view` must be two numbers, for the entropies of the policy without and with the "
            f"view, got {coefs}.",
        ),
        (
            view.temperature is not None and args.beta == 0,
            "`temperature` of `loss_view` compares the policy with a reference under the view, and `beta=0` loads no "
            "reference; set `beta` above 0.",
        ),
        (
            view.temperature is not None and view.measures_divergence,
            "`temperature` of `loss_view` measures the dependency on media by entropies, but `advantage_min` and "
            "`token_quantile` by a divergence. Remove `temperature`, or the other two.",
        ),
        (
            args.top_entropy_quantile < 1 and (view.token_quantile < 1 or view.temperature is not None),
            "`top_entropy_quantile` and the dependency on media both weigh tokens; set `top_entropy_quantile=1`, or "
            "remove `token_quantile` and `temperature` from `loss_view`.",
        ),
    ]
