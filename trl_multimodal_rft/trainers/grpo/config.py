# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments of the GRPO trainer."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from trl import GRPOConfig

from ...algorithms.advantages import ALIASES, ESTIMATORS, Estimator, as_estimator, check_estimator, describe_estimators
from ...algorithms.losses import LOSSES, LossOptions, LossType, as_loss, describe_losses
from ...rollout.token_filter import EntropySource
from ...spelling import check_choice, read_settings, split_settings
from ...views.view_options import LossView, view_option
from ..base.batch_sizes import batch_options
from ..base.config_options import Needs, check_values, help_from_docstring
from ..base.conflicts import check_conflicts
from ..base.multimodal_config import MultimodalArguments
from .conflicts import (
    conflicts_of_entropy,
    conflicts_of_kl,
    conflicts_of_loss,
    conflicts_of_rewards,
    conflicts_of_view,
)


# Bound of the ratio in dual-clip PPO, as in its paper
_DUAL_CLIP_DELTA = 3.0

# Advice for names of losses from papers that this config expresses by other options
_OTHER_OPTIONS = {
    "gspo": "set `importance_sampling_level='sequence'` and `loss_type='grpo'`",
    "ppo": "set `loss_type='grpo'`, whose ratios are clipped as PPO's, and `num_iterations` above 1",
    **{name: f"set `advantage_estimator={name!r}`" for name in (*ESTIMATORS, *ALIASES) if name not in LOSSES},
}


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
        kl_target (`float`, *optional*):
            Divergence per token, in nats, that an adaptive controller holds by changing the coefficient, which starts
            at `beta`. `None` keeps the coefficient at `beta`.
        kl_horizon (`int`, *optional*, defaults to `10000`):
            Number of completions over which the controller of `kl_target` adapts. Further epochs on the same
            completions don't count.

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
            always is. The setting `rounding='down'` rounds the number of tokens to train on down, but not to 0.

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
        default="group_norm",
        metadata={
            "help": f"How rewards become advantages: {describe_estimators(None, 'group')}, or in Python a function."
        },
    )
    loss_type: str = field(default="dapo", metadata={"help": f"Policy loss: {describe_losses()}."})
    soft_overlong_cache: int | None = None
    reward_running_scale: bool = False
    reward_clip_range: list[float] | None = None
    kl_estimator: Annotated[Literal["k1", "k2", "k3"] | None, Needs("beta")] = None
    kl_target: Annotated[float | None, "(0, inf]", Needs("beta")] = None
    kl_horizon: Annotated[int, "(0, inf]", Needs("kl_target")] = 10000
    entropy_source: str = "rollout"
    loss_view: str | None = None

    _has_critic = False  # PPO's config has a critic
    _conflicts = (
        conflicts_of_rewards,
        conflicts_of_kl,
        conflicts_of_loss,
        conflicts_of_view,
        conflicts_of_entropy,
        *MultimodalArguments._conflicts,
    )

    if TYPE_CHECKING:  # TRL sets these where they are `None`
        num_generations: Any = None
        steps_per_generation: Any = None
        max_completion_length: Any = None
        vllm_importance_sampling_mode: Any = None

    def __post_init__(self):
        check_values(self)
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

        self._settle_kl()
        self._settle_loss()
        check_conflicts(self)

    @property
    def estimator(self) -> Estimator:
        """The estimator of the advantages, with its settings."""
        function = self.advantage_estimator
        if not callable(function):
            return as_estimator(function)
        return Estimator(getattr(function, "__name__", type(function).__name__), None, function)

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

    def _settle_kl(self) -> None:
        if self.beta != 0 and self.kl_estimator is None:
            self.kl_estimator = "k1" if self.estimator.kl_in_reward else self.estimator.default_kl_estimator

    def _settle_loss(self) -> None:
        # TRL checks `loss_type` only after sampling
        name = split_settings(self.loss_type, "loss_type")[0]
        if name not in LOSSES:
            option = _OTHER_OPTIONS.get(name.lower())
            if option is not None:
                raise ValueError(f"There is no `loss_type={name!r}`. Instead, {option}.")
            check_choice("`loss_type`", self.loss_type, LOSSES)
        if self.loss.name == "dual_clip" and self.delta is None:
            self.delta = _DUAL_CLIP_DELTA

    @property
    def loss_view_settings(self) -> LossView:
        """The view in the loss with its settings."""
        return view_option(LossView, "loss_view", self.loss_view)

    @property
    def _weighs_completions(self) -> bool:
        return split_settings(self.loss_type, "loss_type")[0] in LOSSES and self.loss.per_completion

    @property
    def ratio_level(self) -> str:
        """The level of the ratios to a sampler that the loss takes, with which modes begin; empty if it takes both."""
        if self.loss.per_completion:
            return "sequence"
        return "token" if self.loss.name == "vespo" else ""  # VESPO multiplies the ratios of tokens itself

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
    def corrects_for_vllm(self) -> bool:
        """`True` if importance ratios correct the loss for the difference between vLLM and the policy."""
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
        return {**super().to_dict(), "advantage_estimator": self.estimator.spelling}

    def __getstate__(self):
        # A function may not be picklable, and loading a name runs no code
        return {**super().__getstate__(), "advantage_estimator": self.estimator.spelling}
