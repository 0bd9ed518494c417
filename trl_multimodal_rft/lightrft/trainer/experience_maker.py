# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The experience maker, which samples, scores and rewards completions, and computes their advantages."""

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from trl.rewards import get_soft_overlong_punishment

from ...algorithms.kl import FixedKLController, approx_kl
from ...data.rows.batches import Row
from ...data.rows.features import restore_media
from ...data.rows.rendered import RenderedPrompt
from ...encoding.join import join_media
from ...encoding.processors import check_processor
from ...encoding.prompt_encoder import PromptEncoder
from ...encoding.prompts import EncodedPrompt, all_placeholder_ids
from ...engines.transformers import sample_completions
from ...families import input_modalities
from ...forward.prompt_groups import left_pad
from ...models.critic import Critic
from ...models.modes import evaluation_mode
from ...rollout.completion_columns import right_pad
from ...rollout.rollout import Prompted, Rollout, Source
from ...rollout.score import score_in_batches, score_values
from ..models.actor import Actor, sampling_options
from ..models.bare_inputs import MEDIA_FIELDS, bare_prompt, bare_prompts
from ..models.completions import mask_completions
from .experience import (  # noqa: F401  LightRFT's users import some of these names from here
    Experience,
    ExperienceVL,
    Samples,
    clip_filter_like_weight_func,
    info_of,
    pin_memory,
    to,
)
from .experience_config import ExperienceConfig, check_discounts, check_generation_options
from .replay_buffer_utils import join_media_of
from .reward_sources import RewardSources
from .rollout_advantages import RolloutAdvantages, normalize_advantages_cross_batch
from .row_checks import RowChecks


logger = logging.getLogger(__name__)  # accelerate's logger would raise an error without accelerate's state


class NaiveExperienceMaker(RolloutAdvantages):
    """
    Maker of experience from prompts, which are text, messages, or rows with images, videos and audio.

    Args:
        actor ([`Actor`]):
            Policy.
        critic (`torch.nn.Module`, *optional*):
            Value model for `"gae"`, called as `critic(sequences, num_actions, attention_mask, **media)`, which returns
            the value of the state before each action, shape `(B, A)`.
        reward_model (`torch.nn.Module` or `list`, *optional*):
            Reward models, called as `reward_model(sequences, attention_mask, **media)`, which return rewards `(B,)`.
        initial_model ([`Actor`], *optional*):
            Reference. If it is `actor` itself, the reference is the policy without its adapter.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The policy's tokenizer.
        prompt_max_len (`int`):
            Largest number of tokens of a prompt. Longer text is cut at the tokenizer's `truncation_side`; longer
            messages raise an error.
        kl_controller ([`~algorithms.kl.FixedKLController`], *optional*):
            Controller whose `value` is the coefficient of the KL divergence; without one, the coefficient is 0.
        strategy ([`ExperienceConfig`]):
            Options.
        remote_rm_url (`str` or `list[str]`, *optional*):
            URLs of servers, see [`~lightrft.utils.remote_rm_fn`], or the path of a `.py` file with a function
            `reward_func(queries, prompts)`. They replace reward models, unless a `reward_fn` or recipe combines all.
        reward_fn (`Callable`, *optional*):
            Function that combines the rewards of the other sources, if any, instead of a sum. It takes any of
            `model_reward_list` (a list of `(B,)`, maybe empty), `labels`, `queries`, `refs`, `label_map` and arguments
            of TRL's reward functions, and returns rewards `(B,)`, or rewards and a dictionary of metrics.
        reward_fn_label_map (`dict[str, int]`, *optional*):
            Index of each source of reward by its name; models come before servers.
        reward_recipe (`dict`, *optional*):
            Without `reward_fn`, the sources that count for each label, see [`~rewards.ready.recipe.combine_rewards`].
        processor ([`~transformers.ProcessorMixin`], *optional*):
            The policy's processor, for prompts with media.

    Raises:
        `TypeError`: If `strategy` is no [`ExperienceConfig`].
        `ValueError`: If there is no source of reward, if critic or reference is unsuitable, or if tokenizer or
            processor can't pad.
    """

    def __init__(
        self,
        actor: Actor,
        critic: nn.Module | None,
        reward_model: nn.Module | list[nn.Module] | None,
        initial_model: Actor | None,
        tokenizer: PreTrainedTokenizerBase,
        prompt_max_len: int,
        kl_controller: FixedKLController | None,
        strategy: ExperienceConfig,
        remote_rm_url: str | list[str] | None = None,
        reward_fn: Callable | None = None,
        reward_fn_label_map: dict[str, int] | None = None,
        reward_recipe: dict | None = None,
        processor: ProcessorMixin | None = None,
    ):
        if not isinstance(strategy, ExperienceConfig):
            raise TypeError(
                f"`strategy` is a {type(strategy).__name__}; pass an `ExperienceConfig`, whose fields are those of "
                "LightRFT's `strategy.args`."
            )
        super().__init__(strategy, kl_controller)
        self.actor = actor
        self.critic = critic
        self.initial_model = initial_model
        self.tokenizer = tokenizer
        self.processor = processor
        self.prompt_max_len = prompt_max_len
        _check_models(strategy, actor, critic, initial_model)
        self._row_checks = RowChecks(strategy.ignored_media_columns, input_modalities(actor.base_model))
        self.advantage_estimator = strategy.advantage_estimator
        self.reward_model = reward_model
        self.remote_rm_url = remote_rm_url
        self.reward_fn = reward_fn
        self.reward_fn_label_map = reward_fn_label_map
        self.reward_recipe = reward_recipe
        self.perf_stats = None  # LightRFT's subclasses set it
        # Function of encoded prompts and a generation config, which returns the ids of each completion
        self.sample_with_engine: Callable[..., list[list[int]]] | None = None
        self.reward_sources = RewardSources(
            reward_model,
            remote_rm_url,
            reward_fn,
            reward_fn_label_map,
            reward_recipe,
            strategy.media_rules,
            strategy.ignored_media_columns,
        )
        self.custom_reward_func = self.reward_sources.custom_reward_func
        check_processor(processor)
        if tokenizer.pad_token_id is None:
            raise ValueError("The tokenizer has no token for padding; set its `pad_token`.")

    @property
    def reward_models(self) -> list[nn.Module]:
        """The reward models."""
        return self.reward_sources.models

    @property
    def device(self) -> torch.device:
        """Device of the policy."""
        return self.actor.device

    def tokenize_fn(
        self, texts: Sequence[str], max_length: int, padding: bool = True, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """
        Tokenizes prompts. Prompts of more than `max_length` tokens are cut at the tokenizer's `truncation_side`.

        Args:
            texts, max_length (`Sequence[str]` and `int`):
                Prompts with their template applied, and their largest number of tokens.
            padding, device (*optional*, default to `True` and `None`):
                Whether to pad on the left, and device of the tensors.

        Returns:
            `dict`: `input_ids` and `attention_mask`: tensors of shape `(B, P)`, or lists without padding.

        Raises:
            `ValueError`: If a prompt would lose placeholders of media.
        """
        ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        kept = slice(0, max_length) if self.tokenizer.truncation_side == "right" else slice(-max_length, None)
        placeholders = self._placeholder_ids
        for index, tokens in enumerate(ids):
            n_placeholders = sum(token in placeholders for token in tokens)
            if n_placeholders > sum(token in placeholders for token in tokens[kept]):
                raise ValueError(
                    f"Prompt {index} has {len(tokens)} tokens, and cutting it to {max_length} would cut placeholders "
                    "of media; raise `prompt_max_len` or drop the prompt."
                )
        ids = [tokens[kept] for tokens in ids]
        if not padding:
            return {"input_ids": ids, "attention_mask": [[1] * len(tokens) for tokens in ids]}
        batch = self.tokenizer.pad({"input_ids": ids}, padding=True, padding_side="left", return_tensors="pt")
        return {name: value.to(device) for name, value in batch.items()}

    @property
    def _placeholder_ids(self) -> set[int]:
        return all_placeholder_ids(self.actor.base_model, self.processor or self.tokenizer)

    # Experience

    @torch.no_grad()
    def make_experience_list(self, all_prompts: str | list, **generate_kwargs) -> list[Experience]:
        """
        Samples completions of prompts and makes experience of them, with advantages and returns.

        Rewards of completions are shaped by their group, see [`process_experiences`], then clipped to
        `reward_clip_range`. The reward of a token is the negative KL coefficient times its KL divergence, plus the
        shaped reward at the last action, see [`compute_reward`]. With `"gae"`, advantages and returns are those of
        [`get_advantages_and_returns`]; with other estimators, both are the discounted sums of
        [`get_cumulative_returns`]. Finally, [`normalize_advantages_cross_batch`] normalizes the advantages of
        `"gae"`, `"reinforce"` and `"reinforce_baseline"`.

        Example: a completion of three actions with the shaped reward 1, without KL divergence and with `gamma=0.9`,
        has the returns `[0.81, 0.9, 1.0]`, unless the estimator is `"gae"`.

        Args:
            all_prompts (`str` or `list`):
                See [`generate_samples`].
            generate_kwargs:
                Options of generation, `gamma`, the discount per action, and for `"gae"` also `lambd`. These two
                default to the settings of the estimator, or to 1 and 0.95.

        Returns:
            `list[Experience]`: One experience for every `micro_rollout_batch_size` samples. `info["return"]` is the
            sum of a completion's token rewards.

        Raises:
            `ValueError`: If an option is unknown or has no effect, if there is a length penalty but no
                `max_new_tokens`, or if a prompt or a reward is invalid.
        """
        check_discounts(generate_kwargs)
        discounts = {"gamma": 1.0, "lam": 0.95, **self.strategy.estimator.settings}
        gamma = generate_kwargs.pop("gamma", discounts["gamma"])
        lambd = generate_kwargs.pop("lambd", discounts["lam"])
        max_new_tokens = generate_kwargs.get("max_new_tokens", self.actor.base_model.generation_config.max_new_tokens)
        overlong_cache = self.strategy.soft_overlong_cache
        if overlong_cache is not None and max_new_tokens is None:
            raise ValueError("`soft_overlong_cache` counts from `max_new_tokens`; pass `max_new_tokens`.")
        samples = self.generate_samples(all_prompts, **generate_kwargs)
        bar = tqdm(samples, desc="make_experience", disable=not (self.strategy.progress and self._is_main))
        experiences = [self.make_experience(batch) for batch in bar]
        if overlong_cache is not None:
            length_penalty = get_soft_overlong_punishment(max_new_tokens, overlong_cache)
            for info in map(info_of, experiences):
                # The penalty reads only the lengths of completions
                completions = [range(n) for n in info["response_length"].long().tolist()]
                info["soft_overlong_punishment"] = info["reward"].new_tensor(length_penalty(completions))
                info["reward"] = info["reward"] + info["soft_overlong_punishment"]
        experiences, rewards = self.process_experiences(experiences)
        for experience, reward in zip(experiences, self._shaped(rewards), strict=True):
            self._set_advantages(experience, reward, gamma, lambd)
        return normalize_advantages_cross_batch(experiences, self.strategy.advantage_estimator, self.strategy)

    @torch.no_grad()
    def generate_samples(self, all_prompts: str | list, **generate_kwargs) -> list[Samples]:
        """
        Samples `n_samples_per_prompt` completions of each prompt. A prompt and its media are encoded once, and are
        prefilled once per returned batch.

        Args:
            all_prompts (`str` or `list`):
                Each prompt is text with its template and placeholders, or messages, or a row: a dictionary with a
                `prompt` (text or messages), media columns as in datasets, and columns for reward functions.
            generate_kwargs:
                Options of generation, such as `max_new_tokens`; by default without `top_k` and `top_p`.

        Returns:
            `list[Samples]`: Batches of `micro_rollout_batch_size` samples. The last batch may have fewer.

        Raises:
            `ValueError`: If an option is unknown, if a prompt is too long, or if placeholders and media don't match.
        """
        check_generation_options(generate_kwargs)
        if isinstance(all_prompts, str):
            all_prompts = [all_prompts]
        columns = [prompt if isinstance(prompt, dict) else {"prompt": prompt} for prompt in all_prompts]
        rows = [Row(getattr(row, "row_index", index), row) for index, row in enumerate(columns)]
        warnings = self._row_checks.check(rows)
        if warnings and self._is_main:
            logger.warning(" ".join(warnings))
        encoder = PromptEncoder(
            self.actor.base_model,
            self.processor or self.tokenizer,
            audio_overlong=self.strategy.audio_overlong,
            media_rules=self.strategy.media_rules,
            ignored_media_columns=self.strategy.ignored_media_columns,
            special_tokens_in_text="allow",
            keep_decoded=True,
            keeps_rendered=True,
            for_engine=self.sample_with_engine is not None,
        )
        prompts = encoder.messages(rows)
        encoded = self._encode(prompts, encoder)
        self._row_checks.note(encoded)
        # But for texts with their template, the encoder's prompts are all text or all messages. Reward functions get
        # these prompts instead of the caller's, so that all micro-batches have one format.
        shown = [prompt.text if isinstance(prompt, RenderedPrompt) else restore_media(prompt) for prompt in prompts]
        rows = [{**row, "prompt": prompt} for row, prompt in zip(rows, shown, strict=True)]
        config = _sampling_config(self.actor, self.tokenizer, self._placeholder_ids, generate_kwargs)
        n = self.strategy.n_samples_per_prompt
        group_ids = torch.arange(len(rows)).repeat_interleave(n)
        source = Source([rows[group] for group in group_ids.tolist()])
        pad_id: Any = config.pad_token_id
        prompted = Prompted([encoded[group] for group in group_ids.tolist()], group_ids, pad_id, source)
        parts = prompted.parts(self.strategy.micro_rollout_batch_size)
        return [self._sample(prompted.select(part), config) for part in parts]

    def _encode(self, prompts: list, encoder: PromptEncoder) -> list[EncodedPrompt]:
        return [
            self._encode_text(prompt, index) if isinstance(prompt, str) else self._encode_media(prompt, index, encoder)
            for index, prompt in enumerate(prompts)
        ]

    def _encode_text(self, prompt: str, index: int) -> EncodedPrompt:
        (tokens,) = self.tokenize_fn([prompt], self.prompt_max_len, padding=False)["input_ids"]
        if self._placeholder_ids.intersection(tokens):
            raise ValueError(
                f"Prompt {index} is text with placeholders of media, but no media; pass messages, or a row with the "
                "media in columns."
            )
        return bare_prompt(self.actor.base_model, torch.tensor(tokens), {})

    def _encode_media(self, prompt: list | RenderedPrompt, index: int, encoder: PromptEncoder) -> EncodedPrompt:
        encoded = encoder.encode(prompt, index)
        if len(encoded) > self.prompt_max_len:
            raise ValueError(
                f"Prompt {index} has {len(encoded)} tokens, more than `prompt_max_len` ({self.prompt_max_len}), and "
                "neither messages nor prompts with media are cut; raise this limit, or drop the prompt."
            )
        return encoded

    def _sample(self, prompted: Prompted, config: GenerationConfig) -> Samples:
        """Samples a completion of each prompt. Repeated prompts are those of a group."""
        prompts = prompted.prompts
        rows = prompted.source.rows
        pad_id = prompted.pad_token_id
        lengths = None
        if self.sample_with_engine is None:
            with evaluation_mode(self.actor):
                completions = sample_completions(self.actor.policy_forward, self.actor.model, prompts, config, pad_id)
        else:
            ids = self.sample_with_engine(prompts, config)
            lengths = list(map(len, ids))
            completions = right_pad(ids, pad_id).to(self.device)
        padded_prompts = left_pad(prompts, pad_id)
        prompt_ids, prompt_mask = (padded_prompts[name].to(self.device) for name in ("input_ids", "attention_mask"))
        sequences, attention_mask, action_mask, truncated = mask_completions(
            torch.cat([prompt_ids, completions], dim=1),
            prompt_ids.size(1),
            config.eos_token_id,
            pad_id,
            prompt_mask,
            lengths,
        )
        labels = [row.get(self.strategy.label_column) for row in rows]
        return Samples(
            sequences=sequences,
            attention_mask=attention_mask,
            action_mask=action_mask,
            num_actions=action_mask.size(1),
            packed_seq_lens=None,
            response_length=action_mask.sum(1).float(),
            total_length=attention_mask.sum(1).float(),
            prompts=[row["prompt"] for row in rows],
            labels=labels if any(label is not None for label in labels) else None,
            prompted=replace(prompted, source=replace(prompted.source, ended=(~truncated).tolist())),
        )

    @torch.no_grad()
    def make_experience(self, samples: Samples) -> Experience:
        """
        Scores and rewards samples. [`make_experience_list`] adds advantages and returns. Models keep their training
        or evaluation mode.

        Args:
            samples ([`Samples`]):
                Samples, padded or packed. Without `prompted`, prompts are the ids in `sequences`, without media.

        Returns:
            [`Experience`]: Log-probabilities, values, KL divergence and `info`, in padded form. `info` holds
            `num_actions` (a number), `reward_metrics` (metrics of `reward_fn`), and tensors of shape `(B,)`: `reward`,
            `kl` (mean of a completion), `response_length`, `total_length`, `truncated` and, for
            `bootstrap_truncated`, `bootstrap`.
        """
        samples = samples.padded(self.tokenizer.pad_token_id)
        mask = samples.action_mask
        rollout = self._rollout(samples)
        base_logps = None
        logps, entropy = self._action_log_probs(self.actor, rollout)
        if self.initial_model is not None:
            reference_is_actor = self.initial_model is self.actor  # the reference is the policy without its adapter
            with self.actor.model.disable_adapter() if reference_is_actor else nullcontext():
                base_logps, _ = self._action_log_probs(self.initial_model, rollout)
        values = None
        bootstrap = None
        if self.critic is not None:
            values, bootstrap = self._state_values(self.critic, samples, rollout)
        rewards, metrics = self.rewards(samples)
        kl = torch.zeros_like(logps)
        if base_logps is not None:
            kl = approx_kl(logps, base_logps, mask, self.strategy.kl_estimator)
        info: dict[str, Any] = {
            "reward": rewards.to(self.device),
            "kl": (kl * mask).sum(1) / mask.sum(1).clamp(min=1),
            "response_length": samples.response_length,
            "total_length": samples.total_length,
            "num_actions": samples.num_actions,
        }
        optional_info = {"truncated": _truncated(rollout), "bootstrap": bootstrap, "reward_metrics": metrics or None}
        info |= {name: value for name, value in optional_info.items() if value is not None}
        has_media = any(prompt.modalities for prompt in rollout.prompts)
        experience = (ExperienceVL if has_media else Experience)(
            sequences=samples.sequences,
            action_log_probs=logps,
            base_action_log_probs=base_logps,
            values=values,
            attention_mask=samples.attention_mask,
            action_mask=mask,
            info=info,
            kl=kl,
            action_entropy=entropy if self.actor.high_entropy_token_ratio > 0 else None,
        )
        if isinstance(experience, ExperienceVL):
            _set_media(experience, rollout.prompts)
        return experience

    def _action_log_probs(self, actor: Actor, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns log-probabilities, `(B, A)`, and entropies, if there are any. Both are 0 if masked."""
        rollout = replace(rollout, packed=actor.packing_samples)
        with self._autocast(), evaluation_mode(actor):
            scores = score_in_batches(actor.policy_forward, actor.model, rollout, len(rollout))
        mask = rollout.completion_mask.bool()
        entropy = scores.entropies
        entropy = None if entropy is None else torch.where(mask, entropy.float(), 0)
        return torch.where(mask, scores.logps.float(), 0), entropy

    def _rollout(self, samples: Samples) -> Rollout:
        prompted = samples.prompted
        if prompted is None:
            prompts = _prompts_of_ids(samples, self.actor.base_model, self._placeholder_ids)
            group_ids = torch.arange(len(prompts))  # which scoring doesn't use
            prompted = Prompted(prompts, group_ids, self.tokenizer.pad_token_id)
        return Rollout(
            prompted.prompts,
            prompted.group_ids,
            prompted.pad_token_id,
            prompted.source,
            completion_ids=samples.sequences[:, -samples.num_actions :],
            completion_mask=samples.action_mask.long(),
            packed=self.actor.packing_samples,
        )

    def _state_values(
        self, critic: nn.Module, samples: Samples, rollout: Rollout
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        Returns values of the states before the actions, shape `(B, A)`. With `bootstrap_truncated`, also returns
        values of the states after truncated completions, shape `(B,)`, and 0 for complete ones.
        """
        mask = samples.action_mask
        truncated = _truncated(rollout) if self.strategy.bootstrap_truncated else None
        with self._autocast(), evaluation_mode(critic):
            if isinstance(critic, Critic):
                values, bootstrap = score_values(
                    self.actor.policy_forward, critic, critic, rollout, len(rollout), truncated
                )
                return values, None if truncated is None else bootstrap
            # A caller's module, which takes padded sequences
            sequences = samples.sequences
            n_actions = samples.num_actions
            attention_mask = samples.attention_mask
            if truncated is not None:
                # A truncated completion reaches the last action column. With one more column, the critic also returns
                # the value of the state after the completion, which doesn't depend on the token in that column.
                sequences = F.pad(sequences, (0, 1))
                n_actions = n_actions + 1
                mask, attention_mask = (
                    torch.cat([tensor, truncated[:, None].to(tensor.dtype)], 1) for tensor in (mask, attention_mask)
                )
            values = torch.where(mask, critic(sequences, n_actions, attention_mask, **self._media(rollout.prompts)), 0)
        return (values, None) if truncated is None else (values[:, :-1], values[:, -1])

    def _media(self, prompts: Sequence[EncodedPrompt]) -> dict[str, torch.Tensor]:
        return {name: value.to(self.device) for name, value in join_media(prompts).items()}

    # Rewards and advantages

    @torch.no_grad()
    def rewards(self, samples: Samples) -> tuple[torch.Tensor, dict[str, Any]]:
        """
        Computes the rewards of samples.

        Args:
            samples ([`Samples`]):
                Sampled completions.

        Returns:
            `tuple`: Rewards on the CPU, shape `(B,)`, `NaN` where no source applies, and metrics of `reward_fn`.
        """
        media = self._media(samples.prompted.prompts) if self.reward_models and samples.prompted is not None else {}
        return self.reward_sources(samples, self.tokenizer, media)

    @property
    def _is_main(self) -> bool:
        accelerator = self.strategy.accelerator
        return accelerator is None or accelerator.is_main_process

    def _autocast(self):
        accelerator = self.strategy.accelerator
        return nullcontext() if accelerator is None else accelerator.autocast()


def _prompts_of_ids(samples: Samples, model: PreTrainedModel, placeholder_ids: set[int]) -> list[EncodedPrompt]:
    """Returns the prompts of padded samples from their ids."""
    n = samples.num_actions
    masks = samples.attention_mask[:, :-n].bool()
    ids = [row[mask] for row, mask in zip(samples.sequences[:, :-n], masks, strict=True)]
    for index, prompt_ids in enumerate(ids):
        if placeholder_ids.intersection(prompt_ids.tolist()):
            raise ValueError(
                f"Sample {index} has placeholders of media, but no media; pass the `prompted` of the samples, "
                "as `generate_samples` returns them."
            )
    return bare_prompts(model, ((prompt_ids, {}, None) for prompt_ids in ids))


def _set_media(experience: ExperienceVL, prompts: list[EncodedPrompt]) -> None:
    media = [{MEDIA_FIELDS.get(name, name): value for name, value in prompt.media.items()} for prompt in prompts]
    images = [next((decoded.media.get("image") for _, decoded in prompt.decoded), None) for prompt in prompts]
    join_media_of(media, images, experience)


def _truncated(rollout: Rollout) -> torch.Tensor | None:
    """Returns whether completions were cut off before their end, `(B,)`, or `None` if that isn't known."""
    ended = rollout.source.ended
    return ~torch.tensor(ended, device=rollout.completion_ids.device) if ended else None


def _check_models(strategy: ExperienceConfig, actor: Actor, critic: nn.Module | None, reference: Actor | None) -> None:
    needs_critic = strategy.estimator.name == "gae"
    if needs_critic != (critic is not None):
        problem = "needs a `critic`; pass one" if needs_critic else "doesn't use the `critic`; pass `None`"
        raise ValueError(f"`advantage_estimator={strategy.advantage_estimator!r}` {problem}.")
    if reference is actor and actor.model is actor.base_model:
        raise ValueError("The policy can't be its own reference without an adapter; pass another actor or `None`.")
    if reference is not None and reference.temperature != actor.temperature:
        raise ValueError(
            f"The reference is an actor for temperature {reference.temperature}, the policy for "
            f"{actor.temperature}, so their KL divergence has no meaning; make the temperatures equal."
        )


def _sampling_config(
    actor: Actor, tokenizer: PreTrainedTokenizerBase, placeholder_ids: Collection[int], options: dict[str, Any]
) -> GenerationConfig:
    model = actor.base_model
    options = {"do_sample": True, "max_new_tokens": model.generation_config.max_new_tokens, **options}
    if options["do_sample"]:
        options |= sampling_options(actor.temperature, options)
    eos_ids = options.get("eos_token_id", model.generation_config.eos_token_id)
    eos_ids = tokenizer.eos_token_id if eos_ids is None else eos_ids
    pad_id = options.get("pad_token_id", tokenizer.pad_token_id)
    suppressed = options.get("suppress_tokens") or model.generation_config.suppress_tokens or []
    options |= {"suppress_tokens": sorted({*placeholder_ids, *suppressed}) or None, "disable_compile": True}
    return GenerationConfig(**{**options, "eos_token_id": eos_ids, "pad_token_id": pad_id})
