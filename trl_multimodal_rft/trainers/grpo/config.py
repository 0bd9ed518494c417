# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the GRPO trainer."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trl import GRPOConfig

from ...algorithms.advantages import ALIASES, ESTIMATORS, Estimator, as_estimator, check_estimator, describe_estimators
from ...algorithms.losses import LOSSES, LossOptions, LossType, as_loss, describe_losses
from ...rollout.token_filter import EntropySource
from ...spelling import as_number, check_choice, read_settings, split_settings
from ...views.options import LossView, view_option
from ..shared.arguments import Needs, check_values, help_from_docstring
from ..shared.batches import batch_options
from ..shared.multimodal_config import MultimodalArguments, check_range, check_sampling
from .method import GRPO


# Bound of the ratio in dual-clip PPO, as in its paper
_DUAL_CLIP_DELTA = 3.0

# Advice for names of losses from papers that this config expresses by other options
_OTHER_OPTIONS = {
    "gspo": "set `importance_sampling_level='sequence'` and `loss_type='grpo'`",
    "ppo": "set `loss_type='grpo'`, whose ratios are clipped as PPO's, and `num_iterations` above 1",
    **{name: f"set `advantage_estimator={name!r}`" for name in (*ESTIMATORS, *ALIASES) if name not in LOSSES},
}


@dataclass(frozen=True)
class KLTarget:
    """Value of the option `kl_target`, with its settings."""

    value: Annotated[float, "(0, inf]"]  # nats per token
    horizon: Annotated[int, "(0, inf]"] = 10000  # completions


@help_from_docstring
@dataclass
class MultimodalGRPOConfig(MultimodalArguments, GRPOConfig):  # pyrefly: ignore[inconsistent-inheritance]
    r"""
    Configuration class for the [`MultimodalGRPOTrainer`].

    Holds every argument of [`~trl.GRPOConfig`], and those below. `docs/algorithms.md` says when to use which option.

    Parameters:
        > Parameters that control the advantages

        advantage_estimator (`str` or `Callable`, *optional*, defaults to `"group_norm"`):
            How rewards become advantages: an estimator of [`~algorithms.advantages.ESTIMATORS`] by its name, with
            settings after it, such as `"cpgd(weight='std')"`. `docs/algorithms.md` has the formulas. A function is
            called on every process with the whole batch as keyword arguments: `rewards` of shape `(N,)`,
            `rewards_per_func` `(N, F)`, `group_ids` `(N,)`, `mask`, `old_logps` and `ref_logps` `(N, T)`. `ref_logps`
            is `None` if `beta` is 0. The function returns advantages of shape `(N,)` or `(N, T)`. Rewards are `NaN`
            where a completion can't be scored. A function can't be set on the command line; a checkpoint holds its
            name only.

        > Parameters that control the rewards

        soft_overlong_cache (`int`, *optional*):
            Number of tokens before `max_completion_length` over which a penalty for long completions falls from 0 to
            -1, see [DAPO](https://huggingface.co/papers/2503.14476). Logged as a separate reward function.
        reward_running_scale (`bool`, *optional*, defaults to `False`):
            Whether to divide rewards by their standard deviation over the run so far.
        reward_clip_range (`list[float]`, *optional*):
            Range (min, max) to clip rewards to, after scaling.

        > Parameters that control the KL divergence from the reference, whose coefficient is `beta`

        kl_estimator (`str`, *optional*):
            `"k1"` is subtracted from the rewards. `"k2"` and `"k3"` are added to the loss, since only there they have
            the gradient of the divergence. The default depends on `advantage_estimator`: `"k1"` for `"reinforce"`,
            `"rloo"`, `"online_dpo"` and PPO's `"gae"`, `"k2"` for `"reinforce_baseline"`, and `"k3"` for the others,
            in TRL's form (see `use_bias_correction_kl`).
        kl_target (`float` or `str`, *optional*):
            Divergence per token, in nats, that an adaptive controller holds by changing the coefficient, which starts
            at `beta`. `None` keeps the coefficient at `beta`. The setting `horizon` (10000), as in
            `"0.05(horizon=1000)"`, is the number of completions over which the controller adapts. Further epochs on
            the same completions don't count.

        > Parameters that control the loss

        loss_type (`str`, *optional*, defaults to `"dapo"`):
            Policy loss of [`~algorithms.losses.LOSSES`] by its name, with settings after it, such as
            `"cpgd(drift_coef=0.01, drift_clamp=2.0)"`. `"gmpo"` takes `epsilon` in log space (0.4 in its paper).
            `"dppo_tv"` and `"dppo_kl"` take `epsilon` as the largest divergence of a token from the policy that
            sampled (0.15 and 0.05 in the authors' script), and `"ipo"` and `"kl_cov"` don't read it. `"dual_clip"`
            takes `delta` (3 by default) as its bound.

        > Parameters that control which tokens are trained on, if `top_entropy_quantile` is below 1

        entropy_source (`str`, *optional*, defaults to `"rollout"`):
            Policy whose entropies choose tokens: the sampling policy (`"rollout"`) or the `"current"` policy.
            `"rollout"` scores a generation batch once more, unless TRL scores it anyway. `"current"` with the scope
            `'batch'` forwards everything twice. The metric `extra_scoring_time` has the seconds of these passes, per
            optimizer step. The setting `scope` says which tokens compete for the quantile: tokens of the whole
            `'batch'` of an optimizer step (the default) or of a `'micro_batch'`, both over all processes, or tokens of
            one `'sequence'`. TRL's choice is `"current(scope='micro_batch')"`. With the setting `renormalize=True`,
            the policy loss is averaged over the tokens that are trained on, instead of over all tokens. GMPO's loss
            always is.

        > Parameters that control a view of the media in the loss

        loss_view (`str`, *optional*):
            View of the media in a second forward of the same completions, a name of [`~views.VIEWS`] or the dotted
            path of a function of yours, with settings, such as `"mask_patches(ratio=0.6, kl_coef=0.01)"`. Prompts
            without media don't change under a view, and evaluation uses none. Further settings are uses of the view;
            set at least one. `kl_coef` is the coefficient of the divergence (k3) between the policy and the policy
            under the view. Training raises this divergence, with gradients of both, up to `kl_clip` (10) nats per
            token, see [PAPO](https://huggingface.co/papers/2507.06448). `entropy_coefs` are the
            coefficients of the entropies of the policy and of the policy under the view. Training lowers both, as in
            PAPO's Double Entropy Loss, which estimates entropies by minus the log-probabilities of the sampled tokens.
            `advantage_min` weights advantages by the dependency of completions on their media, see
            [VPPO](https://huggingface.co/papers/2510.09285), and is the weight of the least dependent completion.
            Weights are linear in the divergence between a completion's distributions with the media and under the
            view, with a mean of 1 over the generation batch. `token_quantile` is the share of each completion's tokens
            that are trained on, namely the tokens that depend most on the media, as in VPPO. `temperature` weights
            tokens as [MAPO](https://huggingface.co/papers/2605.27741) does, without MAPO's loss on attention: weights
            are a softmax, at this temperature, of the absolute difference between the reference's entropy under the
            view and the policy's entropy with the media.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    advantage_estimator: str = field(
        default=GRPO.defaults["advantage_estimator"],
        metadata={
            "help": f"How rewards become advantages: {describe_estimators(None, 'group')}, or in Python a function."
        },
    )
    loss_type: str = field(default=GRPO.defaults["loss_type"], metadata={"help": f"Policy loss: {describe_losses()}."})
    soft_overlong_cache: int | None = None
    reward_running_scale: bool = False
    reward_clip_range: list[float] | None = None
    kl_estimator: Annotated[Literal["k1", "k2", "k3"] | None, Needs("beta")] = None
    kl_target: Annotated[float | str | None, Needs("beta")] = None
    entropy_source: str = "rollout"
    loss_view: str | None = None

    _has_critic = False  # PPO's config has a critic

    if TYPE_CHECKING:  # TRL sets these where they are `None`
        num_generations: Any = None
        steps_per_generation: Any = None
        max_completion_length: Any = None
        vllm_importance_sampling_mode: Any = None

    def __post_init__(self):
        check_values(self)
        self.kl_target = as_number(self.kl_target)
        if callable(self.advantage_estimator):
            check_estimator(self.advantage_estimator)
        else:
            names = [name for name, estimator in ESTIMATORS.items() if self._has_critic or estimator.needs != "critic"]
            name = split_settings(self.advantage_estimator, "advantage_estimator")[0]
            if ALIASES.get(name, name) not in ESTIMATORS:
                check_choice("`advantage_estimator`", self.advantage_estimator, (*names, *ALIASES))
            self.advantage_estimator = as_estimator(self.advantage_estimator).spelling
            if self.estimator.name not in names:
                raise ValueError(
                    f"`advantage_estimator={self.advantage_estimator!r}` needs the values of a critic, and this "
                    f"trainer has none. Use `MultimodalPPOTrainer`, or choose one of {', '.join(map(repr, names))}."
                )
        self._post_init_trl()

        _ = self.entropy_settings  # raises if they are invalid
        self._check_rewards()
        self._check_kl()
        self._check_loss()
        self._check_view()
        holds_whole_steps = self.steps_per_generation % self.gradient_accumulation_steps == 0
        if self.top_entropy_quantile < 1 and self.entropy_settings.scope == "batch" and not holds_whole_steps:
            raise ValueError(
                "The scope 'batch' of `entropy_source` needs the whole batch of an optimizer step at once, so "
                f"`steps_per_generation` ({self.steps_per_generation}) must be a multiple of "
                f"`gradient_accumulation_steps` ({self.gradient_accumulation_steps}). Change one of them, or use "
                "`entropy_source=\"rollout(scope='micro_batch')\"`."
            )
        check_sampling(self)

    @property
    def estimator(self) -> Estimator:
        """The estimator of the advantages, with its settings."""
        function = self.advantage_estimator
        return Estimator(self._estimator_name(), None, function) if callable(function) else as_estimator(function)

    @property
    def loss(self) -> LossType:
        """The policy loss, with its settings."""
        return as_loss(self.loss_type)

    def _post_init_trl(self) -> None:
        """Runs the checks of the base classes, which require groups of at least two, also for groups of one."""
        group_size = self.num_generations or 0
        if group_size > 1:
            super().__post_init__()
            return
        if self.estimator.needs == "group":
            raise ValueError(
                f"`advantage_estimator={self.advantage_estimator!r}` compares the completions of a prompt, so "
                f"`num_generations` must be at least 2, got {self.num_generations}. Raise it, or use 'reinforce'."
            )
        if group_size < 1:
            raise ValueError(f"`num_generations` must be at least 1, got {self.num_generations}.")
        # TRL requires two completions per prompt for any estimator. So during TRL's checks, all completions of a
        # generation batch, or of a process if the size of the batch isn't set, are one group. If the other checks pass
        # for such a group, they would pass for groups of one completion, too.
        steps = self.steps_per_generation or self.gradient_accumulation_steps
        self.num_generations = self.generation_batch_size or self.per_device_train_batch_size * steps
        self.num_generations_eval = self.num_generations_eval or 1
        if self.num_generations == 1:
            options = " x ".join(f"`{name}={getattr(self, name)}`" for name in batch_options(self))
            raise ValueError(f"{options} is one completion at a time, and TRL needs two. Raise the number.")
        super().__post_init__()
        self.num_generations = 1

    def _check_rewards(self) -> None:
        if self.soft_overlong_cache is not None and not 0 < self.soft_overlong_cache <= self.max_completion_length:
            raise ValueError(
                f"`soft_overlong_cache` ({self.soft_overlong_cache}) must be above 0 and at most "
                f"`max_completion_length` ({self.max_completion_length}); `None` switches the penalty off."
            )
        check_range(self, "reward_clip_range")
        changes_rewards = self.reward_running_scale or self.reward_clip_range is not None or self.kl_in_reward
        if self.estimator.step_input and changes_rewards:
            raise ValueError(
                f"`advantage_estimator={self.advantage_estimator!r}` reads rewards of steps. `reward_running_scale`, "
                "`reward_clip_range` and `kl_estimator='k1'` have no effect on them; remove these options."
            )
        k = None if callable(self.advantage_estimator) else self.estimator.setting("k")
        if k is not None and k > self.num_generations:
            raise ValueError(
                f"`advantage_estimator={self.advantage_estimator!r}` compares sets of {k} completions of a prompt, so "
                f"`num_generations` ({self.num_generations}) must be at least {k}. Raise it, or set a smaller `k`."
            )
        if self.scale_rewards != "group" and self.estimator.name != "group_norm":
            raise ValueError(
                f"`scale_rewards={self.scale_rewards!r}` applies to `advantage_estimator='group_norm'` only; remove "
                "it."
            )
        if self.multi_objective_aggregation == "normalize_then_sum":
            changes_sum = self.reward_running_scale or self.kl_in_reward
            changes_sum = changes_sum or self.reward_clip_range is not None or self.contrast_view is not None
            if self.estimator.name != "group_norm" or changes_sum:
                raise ValueError(
                    "`multi_objective_aggregation='normalize_then_sum'` normalizes the rewards of each function "
                    "separately, before their sum. Use `advantage_estimator='group_norm'` with it, and remove "
                    "`reward_running_scale`, `reward_clip_range`, `kl_estimator='k1'` and `contrast_view`, which "
                    "change the sum."
                )

    def _check_kl(self) -> None:
        _ = self.kl_control  # raises if it is invalid
        if self.beta == 0:
            return
        if self.kl_in_reward and callable(self.advantage_estimator):
            raise ValueError(
                "A function as `advantage_estimator` gets `old_logps` and `ref_logps` to subtract the KL divergence "
                "itself; remove `kl_estimator='k1'`."
            )
        if self.kl_estimator is None:
            self.kl_estimator = "k1" if self.estimator.kl_in_reward else self.estimator.default_kl_estimator

    def _check_loss(self) -> None:
        # TRL checks `loss_type` and `importance_sampling_level` only after sampling
        if (name := split_settings(self.loss_type, "loss_type")[0]) not in LOSSES:
            if (option := _OTHER_OPTIONS.get(name.lower())) is not None:
                raise ValueError(f"There is no `loss_type={name!r}`. Instead, {option}.")
            check_choice("`loss_type`", self.loss_type, LOSSES)
        check_choice("`importance_sampling_level`", self.importance_sampling_level, ("token", "sequence"))
        # Advantages of tokens, or of completions
        loss = self.loss
        token_level = self.estimator.per_token
        sequence_level = self.importance_sampling_level == "sequence"
        if token_level and loss.per_completion:
            raise ValueError(
                f"`loss_type={self.loss_type!r}` takes one advantage per completion, but `advantage_estimator="
                f"{self.advantage_estimator!r}` gives one per token. Use another estimator, such as "
                "'reinforce_baseline'."
            )
        # Without a critic, steps or a baseline per token, only the KL penalty differs between a completion's tokens
        tokens_differ = self.estimator.needs == "critic" or self.estimator.step_input is not None
        tokens_differ = tokens_differ or self.estimator.reads_logps
        if sequence_level and token_level and (tokens_differ or self.kl_in_reward):
            condition = "" if tokens_differ else " with the KL divergence in the reward"
            raise ValueError(
                f"`importance_sampling_level='sequence'` takes one advantage per completion, but `advantage_estimator="
                f"{self.advantage_estimator!r}`{condition} gives one per token. Use another estimator"
                + (", or `kl_estimator='k3'`." if condition else ".")
            )
        # TRL checks the mode only when its constructor starts the engine. A mode's name begins with its level. VESPO
        # multiplies the ratios of a completion's tokens itself
        required_level = "sequence" if loss.per_completion else "token" if loss.name == "vespo" else ""
        if self._corrects_for_vllm and not self.vllm_importance_sampling_mode.startswith(required_level):
            level = "completions" if required_level == "sequence" else "tokens"
            raise ValueError(
                f"`loss_type={self.loss_type!r}` needs the importance ratios of {level}; set "
                f"`vllm_importance_sampling_mode` to '{required_level}_mask' or '{required_level}_truncate', got "
                f"{self.vllm_importance_sampling_mode!r}."
            )
        if sequence_level and not loss.sequence_level:
            raise ValueError(
                f"`loss_type={self.loss_type!r}` clips the ratios of tokens, not of completions; remove "
                "`importance_sampling_level='sequence'`."
            )
        if loss.per_completion and self.entropy_settings.renormalize:
            raise ValueError(
                f"`renormalize` of `entropy_source` has no effect with `loss_type={self.loss_type!r}`, whose "
                "geometric mean is over the tokens that are trained on anyway; remove it."
            )
        if self.estimator.name == "online_dpo" and (loss.mode != "seq-mean-token-sum" or not self.kl_in_reward):
            raise ValueError(
                f"`advantage_estimator={self.advantage_estimator!r}` is DPO only with `beta` above 0, the default "
                "`kl_estimator`, and a loss that sums over the tokens of a completion. Set `beta`, such as to 0.1, "
                "`loss_type='luspo'` and `importance_sampling_level='sequence'`, and remove `kl_estimator`."
            )
        # Bounds of ratios
        if loss.name == "cpgd" and self.epsilon >= 1:
            raise ValueError(
                f"`loss_type='cpgd'` clips at log(1 - epsilon), so `epsilon` ({self.epsilon}) must be below 1."
            )
        if loss.name == "dual_clip":
            self.delta = _DUAL_CLIP_DELTA if self.delta is None else self.delta
            clip_bound = 1 + self.loss_options().epsilon_high
            if self.delta <= clip_bound:
                raise ValueError(
                    f"`delta` ({self.delta}) bounds the ratio beyond the clip range, so it must be above {clip_bound}."
                )
        elif self.delta is not None and not loss.sequence_level and loss.name != "fipo":  # TRL's losses ignore it
            raise ValueError(f"`delta` has no effect with `loss_type={self.loss_type!r}`; remove it.")

    def _check_view(self) -> None:
        view = self.loss_view_settings
        if view.view is None:
            return
        if not view.has_term and not view.measures_dependency:
            raise ValueError(
                f"`loss_view={self.loss_view!r}` has no effect by itself; set one of `kl_coef`, `entropy_coefs`, "
                "`advantage_min`, `token_quantile` and `temperature` in it, such as 'blank(kl_coef=0.01)'."
            )
        if view.entropy_coefs is not None and len(view.entropy_coefs) != 2:
            raise ValueError(
                "`entropy_coefs` of `loss_view` must be two numbers, for the entropies of the policy without and with "
                f"the view, got {view.entropy_coefs}."
            )
        if view.temperature is not None:
            if self.beta == 0:
                raise ValueError(
                    "`temperature` of `loss_view` compares the policy with a reference under the view, and `beta=0` "
                    "loads no reference; set `beta` above 0."
                )
            if view.measures_divergence:
                raise ValueError(
                    "`temperature` of `loss_view` measures the dependency on media by entropies, but `advantage_min` "
                    "and `token_quantile` by a divergence. Remove `temperature`, or the other two."
                )
        if self.top_entropy_quantile < 1 and (view.token_quantile < 1 or view.temperature is not None):
            raise ValueError(
                "`top_entropy_quantile` and the dependency on media both weigh tokens; set `top_entropy_quantile=1`, "
                "or remove `token_quantile` and `temperature` from `loss_view`."
            )

    @property
    def kl_control(self) -> KLTarget | None:
        """The target of an adaptive KL controller, and the horizon over which it adapts; `None` without one."""
        return None if self.kl_target is None else read_settings(KLTarget, "kl_target", self.kl_target)

    @property
    def loss_view_settings(self) -> LossView:
        """The view in the loss with its settings."""
        return view_option(LossView, "loss_view", self.loss_view)

    @property
    def _weighs_completions(self) -> bool:
        return split_settings(self.loss_type, "loss_type")[0] in LOSSES and self.loss.per_completion

    @property
    def entropy_settings(self) -> EntropySource:
        """The source of the entropies that select tokens, and the scope within which tokens compete."""
        return read_settings(EntropySource, "entropy_source", self.entropy_source)

    @property
    def compares_groups(self) -> bool:
        return self.estimator.needs == "group"

    @property
    def reads_steps(self) -> bool:
        return self.estimator.step_input is not None

    @property
    def advantages_read_logps(self) -> bool:
        """`True` if advantages are computed from log-probabilities, too."""
        return callable(self.advantage_estimator) or self.kl_in_reward or self.estimator.reads_logps

    @property
    def kl_in_reward(self) -> bool:
        """`True` if the KL divergence is subtracted from the rewards, instead of added to the loss."""
        return self.kl_estimator == "k1"

    @property
    def _corrects_for_vllm(self) -> bool:
        return self.use_vllm and self.vllm_importance_sampling_correction

    def loss_options(self) -> LossOptions:
        """Options of the policy loss and of the KL term."""
        return LossOptions(
            epsilon_low=self.epsilon,
            epsilon_high=self.epsilon if self.epsilon_high is None else self.epsilon_high,
            delta=math.inf if self.delta is None else self.delta,
            importance_sampling_level=self.importance_sampling_level,
            off_policy_threshold=self.off_policy_mask_threshold,
            kl_estimator=self.kl_estimator or "k3",
            kl_bias_correction=self.use_bias_correction_kl,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos,
            vespo_lambda_pos=self.vespo_lambda_pos,
            vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
        )

    def to_dict(self):
        return {**super().to_dict(), "advantage_estimator": self._estimator_name()}

    def __getstate__(self):
        # A function may not be picklable, and loading a name runs no code
        return {**super().__getstate__(), "advantage_estimator": self._estimator_name()}

    def _estimator_name(self) -> str:
        estimator = self.advantage_estimator
        return getattr(estimator, "__name__", type(estimator).__name__) if callable(estimator) else estimator
