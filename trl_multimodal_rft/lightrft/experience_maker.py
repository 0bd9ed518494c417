# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From prompts to experience: sampling, scoring, rewarding, and advantages."""

import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin
from trl.rewards import get_soft_overlong_punishment

from ..algorithms.advantages import (
    ALIASES,
    ESTIMATORS,
    cumulative_returns,
    estimate_advantages,
    gae,
    place_rewards,
    whiten,
)
from ..algorithms.completions import mask_completions
from ..algorithms.kl import FixedKLController, approx_kl
from ..algorithms.shaping import RunningScale
from ..data.columns import restore_media, rows_to_messages
from ..data.unread import check_columns, check_ignored
from ..encoding.processors import check_processor
from ..encoding.prompts import EncodedPrompt, all_placeholder_ids, encode_prompt, join_media, placeholder_tokens
from ..families import family_of
from ..forward.layout import split_samples
from ..forward.scoring import completion_scores, completion_values
from ..generation.transformers import as_generation_config, generate_in_parts
from ..models.modes import evaluation_mode
from ..rewards.checks import check_rewards
from ..rewards.recipe import add_rewards, combine_rewards
from ..rewards.remote import RemoteReward
from .actor import Actor
from .bare_inputs import bare_prompt
from .critic import Critic
from .experience import Experience, ExperienceAL, ExperienceOmni, ExperienceVL, Samples


logger = logging.getLogger(__name__)  # accelerate's needs its state

# Names of media tensors of models in experiences, where they aren't the same
MEDIA_FIELDS = {
    "image_grid_thw": "image_grid_thws",
    "video_grid_thw": "video_grid_thws",
    "input_features": "audio_values",
    "audio_input_features": "audio_values",
    "feature_attention_mask": "audio_attention_mask",
    "input_features_mask": "audio_attention_mask",
}


@dataclass
class ExperienceConfig:
    """
    How experience is made.

    Args:
        advantage_estimator (`str`, *optional*, defaults to `"group_norm"`):
            `"group_norm"` (or `"grpo"`), `"rloo"`, `"reinforce"`, `"reinforce_baseline"`, `"cpgd"`, `"dr_grpo"` or `"gae"`.
        n_samples_per_prompt (`int`, *optional*, defaults to `8`):
            Completions to each prompt.
        micro_rollout_batch_size (`int`, *optional*, defaults to `8`):
            Samples that are generated and scored at once.
        norm_level (`str`, *optional*, defaults to `"token"`):
            See [`~algorithms.advantages.reinforce_baseline`].
        cpgd_weight (`str`, *optional*, defaults to `"clip_filter_like"`):
            See [`~algorithms.advantages.cpgd`].
        kl_estimator (`str`, *optional*, defaults to `"k1"`):
            Estimate of the KL divergence that experiences hold.
        kl_in_reward (`bool`, *optional*):
            Whether the KL divergence, k1, is subtracted from the rewards. Defaults to `True` for `"gae"`, `"reinforce"` and
            `"rloo"`.
        soft_overlong_cache (`int`, *optional*):
            Number of tokens below `max_new_tokens` from which on a completion is penalized for its length, up to -1.
        reward_running_scale (`bool`, *optional*, defaults to `False`):
            Whether to divide rewards by their standard deviation so far.
        reward_clip_range (`tuple[float, float]`, *optional*):
            Range to clip rewards to.
        bootstrap_truncated (`bool`, *optional*, defaults to `False`):
            For `"gae"`, whether the critic's value stands for what would have come after a completion that was cut off.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            What happens to audio that is longer than the model's window: `"raise"` or `"truncate"`.
        label_column (`str`, *optional*, defaults to `"labels"`):
            Column with the ground truth.
        progress (`bool`, *optional*, defaults to `True`):
            Whether to show a progress bar.
        accelerator ([`~accelerate.Accelerator`], *optional*):
            With several processes, statistics are those of all. Policies and critics score in its mixed precision.
        ignored_media_columns (`Sequence[str]`, *optional*, defaults to `()`):
            Columns with media that only reward functions read, `audio`, `image` and `video` included.

    Raises:
        `ValueError`: If an argument has no such value, or if the estimator needs several completions to a prompt.
    """

    advantage_estimator: str = "group_norm"
    n_samples_per_prompt: int = 8
    micro_rollout_batch_size: int = 8
    norm_level: str = "token"
    cpgd_weight: str = "clip_filter_like"
    kl_estimator: str = "k1"
    kl_in_reward: bool | None = None
    soft_overlong_cache: int | None = None
    reward_running_scale: bool = False
    reward_clip_range: tuple[float, float] | None = None
    bootstrap_truncated: bool = False
    audio_overlong: str = "raise"
    label_column: str = "labels"
    progress: bool = True
    accelerator: Accelerator | None = None
    ignored_media_columns: Sequence[str] = ()

    def __post_init__(self):
        self.advantage_estimator = ALIASES.get(self.advantage_estimator, self.advantage_estimator)
        choices = {
            "advantage_estimator": tuple(ESTIMATORS),
            "norm_level": ("token", "sequence"),
            "cpgd_weight": ("none", "std", "clip_filter_like"),
            "kl_estimator": ("k1", "k2", "k3"),
            "audio_overlong": ("raise", "truncate"),
        }
        for name, values in choices.items():
            if getattr(self, name) not in values:
                raise ValueError(
                    f"`{name}` must be one of {', '.join(map(repr, values))}, got {getattr(self, name)!r}."
                )
        for name in ("n_samples_per_prompt", "micro_rollout_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.n_samples_per_prompt < 2 and ESTIMATORS[self.advantage_estimator] == "group":
            raise ValueError(
                f"`advantage_estimator={self.advantage_estimator!r}` compares the completions to a prompt, so "
                f"`n_samples_per_prompt` must be at least 2, got {self.n_samples_per_prompt}."
            )
        if self.soft_overlong_cache is not None and self.soft_overlong_cache < 1:
            raise ValueError(f"`soft_overlong_cache` must be at least 1, got {self.soft_overlong_cache}.")
        if self.reward_clip_range is not None and self.reward_clip_range[0] >= self.reward_clip_range[1]:
            raise ValueError(f"`reward_clip_range` must be (min, max) with min < max, got {self.reward_clip_range}.")
        check_ignored(self.ignored_media_columns)
        if self.kl_in_reward is None:
            self.kl_in_reward = self.advantage_estimator in ("gae", "reinforce", "rloo")


class NaiveExperienceMaker:
    """
    Makes experience of prompts: text, or rows with images, videos and audio.

    Args:
        actor ([`Actor`]):
            Policy.
        critic (`torch.nn.Module`, *optional*):
            Value model, called as `critic(sequences, num_actions, attention_mask, **media)`, which returns the value of
            the state before each action, shape `(B, A)`. Needed by `"gae"`.
        reward_model (`torch.nn.Module` or `list`, *optional*):
            Reward models, called as `reward_model(sequences, attention_mask, **media)`, which return `(B,)`.
        initial_model ([`Actor`], *optional*):
            Reference. The policy itself, if it has an adapter, stands for the model without.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The policy's tokenizer.
        prompt_max_len (`int`):
            Most tokens of a prompt. Longer text loses its beginning; longer prompts with media are an error.
        kl_controller ([`~algorithms.kl.FixedKLController`], *optional*):
            Has the coefficient of the KL divergence as its `value`. 0 by default.
        strategy ([`ExperienceConfig`]):
            How experience is made.
        remote_rm_url (`str` or `list[str]`, *optional*):
            URLs of reward servers, see [`~rewards.RemoteReward`], or the path of a `.py` file whose `reward_func` is loaded
            and run.
        reward_fn (`Callable`, *optional*):
            With other sources of reward, a function that combines them, which are added up by default: it takes any of
            `model_reward_list` (a list of `(B,)`), `labels`, `queries`, `refs` and `label_map`, and returns `(B,)`, or
            that and a dictionary of metrics. Alone, a reward function with TRL's signature.
        reward_fn_label_map (`dict[str, int]`, *optional*):
            Names of the sources of reward: models first, then servers.
        reward_recipe (`dict`, *optional*):
            Without `reward_fn`, which sources count for which label, see [`~rewards.recipe.combine_rewards`].
        processor ([`~transformers.ProcessorMixin`], *optional*):
            The policy's processor, for prompts with media.

    Raises:
        `ValueError`: If there is no source of reward, no critic for `"gae"`, a critic for another estimator, or if the
            tokenizer can't pad or the processor pads audio on the wrong side.
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
        self.actor = actor
        self.critic = critic
        self.initial_model = initial_model
        self.tokenizer = tokenizer
        self.processor = processor
        self.prompt_max_len = prompt_max_len
        self.kl_ctl = kl_controller or FixedKLController(0.0)
        self.strategy = strategy
        self.reward_fn = reward_fn
        self.reward_fn_label_map = reward_fn_label_map or {}
        self.reward_recipe = reward_recipe
        self.reward_models = reward_model if isinstance(reward_model, list) else [reward_model] if reward_model else []
        urls = [remote_rm_url] if isinstance(remote_rm_url, str) else list(remote_rm_url or [])
        self.remote_rewards = [
            _load_reward_func(url) if url.endswith(".py") else RemoteReward(url, label_column=strategy.label_column)
            for url in urls
        ]
        self.reward_scale = RunningScale()
        self._looked_at_rows = False
        if initial_model is actor and actor.model is actor.base_model:
            raise ValueError("The policy can't be its own reference without an adapter; pass another actor or `None`.")
        if initial_model is not None and initial_model.temperature != actor.temperature:
            raise ValueError(
                f"The reference is an actor for temperature {initial_model.temperature}, the policy for {actor.temperature}, so "
                "that their KL divergence would mean nothing; make them equal."
            )
        needs_critic = strategy.advantage_estimator == "gae"
        if needs_critic != (critic is not None):
            have = "none was passed" if needs_critic else "one was passed, which would not be used"
            raise ValueError(f"`advantage_estimator={strategy.advantage_estimator!r}`: {have} as `critic`.")
        if not (self.reward_models or self.remote_rewards or reward_fn):
            raise ValueError("There is no source of reward; pass `reward_model`, `remote_rm_url` or `reward_fn`.")
        check_processor(processor)
        if tokenizer.pad_token_id is None:
            raise ValueError("The tokenizer has no token for padding; set its `pad_token`.")

    @property
    def device(self) -> torch.device:
        """Where the policy is."""
        return self.actor.device

    def tokenize_fn(
        self, texts: Sequence[str], max_length: int, padding: bool = True, device: torch.device | str | None = None
    ) -> dict[str, Any]:
        """
        Tokenizes prompts. Of longer ones the end is kept.

        Args:
            texts (`Sequence[str]`):
                Prompts with their template applied.
            max_length (`int`):
                Most tokens of a prompt.
            padding (`bool`, *optional*, defaults to `True`):
                Whether to pad on the left.
            device (`torch.device` or `str`, *optional*):
                Where the tensors go.

        Returns:
            `dict`: `input_ids` and `attention_mask`: tensors of shape `(B, P)`, or lists without padding.

        Raises:
            `ValueError`: If a prompt is longer and its placeholders for media would be cut.
        """
        ids = self.tokenizer(list(texts), add_special_tokens=False)["input_ids"]
        media = self._placeholder_ids
        for index, tokens in enumerate(ids):
            if media.intersection(tokens[: max(len(tokens) - max_length, 0)]):
                raise ValueError(
                    f"Prompt {index} has {len(tokens)} tokens, and cutting it to {max_length} would cut placeholders for "
                    "media; raise `prompt_max_len` or leave it out."
                )
        ids = [tokens[-max_length:] for tokens in ids]
        if not padding:
            return {"input_ids": ids, "attention_mask": [[1] * len(tokens) for tokens in ids]}
        batch = self.tokenizer.pad({"input_ids": ids}, padding=True, padding_side="left", return_tensors="pt")
        return {name: value.to(device) for name, value in batch.items()}

    @property
    def _placeholder_ids(self) -> set[int]:
        """Tokens that stand for media."""
        return all_placeholder_ids(self.actor.base_model, self.processor or self.tokenizer)

    # Experience

    @torch.no_grad()
    def make_experience_list(self, all_prompts: str | list, **generate_kwargs) -> list[Experience]:
        """
        Samples completions to prompts and makes experience of them, with advantages and returns.

        Args:
            all_prompts (`str` or `list`):
                Text, messages, or rows with a `prompt`, media columns and others, see [`generate_samples`].
            generate_kwargs:
                Options of generation, and `gamma` (defaults to 1) and `lambd` (to 0.95) for the advantages of `"gae"` and
                `"reinforce"`.

        Returns:
            `list[Experience]`: One for every `micro_rollout_batch_size` samples.

        Raises:
            `ValueError`: If an option isn't known, if there is a penalty for length but no `max_new_tokens`, or if a prompt
                or a reward is not as it should be.
        """
        gamma, lambd = generate_kwargs.pop("gamma", 1.0), generate_kwargs.pop("lambd", 0.95)
        length_penalty = self._length_penalty(generate_kwargs)
        samples = self.generate_samples(all_prompts, **generate_kwargs)
        bar = tqdm(samples, desc="make_experience", disable=not (self.strategy.progress and self._is_main))
        experiences = [self.make_experience(each) for each in bar]
        if length_penalty is not None:
            self._penalize_length(experiences, length_penalty)
        experiences, rewards = self.process_experiences(experiences)
        self._set_advantages(experiences, rewards, gamma, lambd)
        return experiences

    @torch.no_grad()
    def generate_samples(self, all_prompts: str | list, **generate_kwargs) -> list[Samples]:
        """
        Samples `n_samples_per_prompt` completions to each prompt. A prompt and its media are encoded and prefilled once.

        Args:
            all_prompts (`str` or `list`):
                Each prompt is text with its template applied, or messages, or a row: a dictionary with a `prompt` (text or
                messages), media columns as in the trainers' datasets, and columns for reward functions.
            generate_kwargs:
                Options of generation, such as `max_new_tokens`; sampling from the whole policy by default.

        Returns:
            `list[Samples]`: `micro_rollout_batch_size` samples each, the last one with the rest.

        Raises:
            `ValueError`: If an option isn't known, or if a prompt is too long or holds placeholders without media.
        """
        check_options(generate_kwargs)
        rows = [
            prompt if isinstance(prompt, dict) else {"prompt": prompt}
            for prompt in ([all_prompts] if isinstance(all_prompts, str) else all_prompts)
        ]
        ignored = self.strategy.ignored_media_columns
        if not self._looked_at_rows:
            self._looked_at_rows = True
            warning = check_columns(rows, "The rows", ignored, needs_prompt=False, whole=False)
            if warning is not None and self._is_main:
                logger.warning(warning)
        own_tokens = placeholder_tokens(self.actor.base_model, self.processor or self.tokenizer)
        prompts = [row["prompt"] for row in rows_to_messages(rows, ignored, own_tokens)]
        encoded = self._encode(prompts)
        # For reward functions, which get the prompts of all micro-batches alike
        rows = [{**row, "prompt": restore_media(prompt)} for row, prompt in zip(rows, prompts, strict=True)]
        n = self.strategy.n_samples_per_prompt
        repeated = [(row, prompt) for row, prompt in zip(rows, encoded, strict=True) for _ in range(n)]
        size = self.strategy.micro_rollout_batch_size
        return [self._sample(repeated[i : i + size], generate_kwargs) for i in range(0, len(repeated), size)]

    def _encode(self, prompts: list) -> list[EncodedPrompt]:
        """All are text, or all are messages."""
        model = self.actor.base_model
        encoded = []
        if isinstance(prompts[0], str):
            for index, tokens in enumerate(self.tokenize_fn(prompts, self.prompt_max_len, padding=False)["input_ids"]):
                if self._placeholder_ids.intersection(tokens):
                    raise ValueError(
                        f"Prompt {index} is text with placeholders for media, but there are none; pass messages, or a row "
                        "with the media in columns."
                    )
                encoded.append(bare_prompt(model, torch.tensor(tokens), {}))
            return encoded
        for index, prompt in enumerate(prompts):
            sample = encode_prompt(
                prompt,
                self.processor or self.tokenizer,
                model,
                audio_overlong=self.strategy.audio_overlong,
                keep_images=True,
                row=index,
            )
            if len(sample) > self.prompt_max_len:
                raise ValueError(
                    f"Prompt {index} has {len(sample)} tokens, more than `prompt_max_len` ({self.prompt_max_len}), and "
                    "messages aren't cut; raise it or leave the prompt out."
                )
            encoded.append(sample)
        return encoded

    def _sample(self, part: list[tuple[dict, EncodedPrompt]], options: dict[str, Any]) -> Samples:
        rows, prompts = zip(*part, strict=True)
        model = self.actor.base_model
        eos_ids = options.get("eos_token_id", model.generation_config.eos_token_id)
        eos_ids = self.tokenizer.eos_token_id if eos_ids is None else eos_ids
        pad_id = options.get("pad_token_id", self.tokenizer.pad_token_id)
        unwanted = options.get("suppress_tokens") or model.generation_config.suppress_tokens or []
        suppressed = sorted(self._placeholder_ids | set(unwanted))
        sampling = {}
        if options.get("do_sample", True):
            names = ("temperature", "top_k", "top_p")
            sampling = self.actor.sampling_options({name: options.get(name) for name in names})
        config = GenerationConfig(
            **{
                "do_sample": True,
                "max_new_tokens": model.generation_config.max_new_tokens,
                **options,
                **sampling,
                "eos_token_id": eos_ids,
                "pad_token_id": pad_id,
                "suppress_tokens": suppressed or None,
            },
            disable_compile=True,
        )
        completions = self._generate(prompts, config, pad_id)
        longest = max(map(len, prompts))
        padded = torch.stack([F.pad(p.input_ids, (longest - len(p), 0), value=pad_id) for p in prompts])
        prompt_mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
        sequences, attention_mask, action_mask, truncated = mask_completions(
            torch.cat([padded.to(self.device), completions], dim=1),
            longest,
            eos_ids,
            pad_id,
            prompt_mask.to(self.device),
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
            encoded_prompts=list(prompts),
            truncated=truncated,
            rows=list(rows),
        )

    def _generate(self, prompts: Sequence[EncodedPrompt], config: GenerationConfig, pad_id: int) -> torch.Tensor:
        parts = split_samples(prompts, family_of(self.actor).apart)
        with evaluation_mode(self.actor), as_generation_config(self.actor.base_model, config):
            return generate_in_parts(
                self.actor.model, self.actor.base_model, prompts, parts, config, pad_id, self.device
            )

    @torch.no_grad()
    def make_experience(self, samples: Samples) -> Experience:
        """
        Scores and rewards samples.

        Args:
            samples ([`Samples`]):
                What was sampled. Without `encoded_prompts`, the sequences are text.

        Returns:
            [`Experience`]: Log-probabilities, values and KL divergence, and in `info`: `reward`, `kl` (mean of a completion),
            `response_length`, `total_length`, `num_actions` and `truncated`, each of shape `(B,)` but the number, and
            metrics of `reward_fn` as `reward_metrics`. Models are left in the mode they were in.
        """
        mask = samples.action_mask
        logps, entropy = self._log_probs(self.actor, samples)
        base_logps = None
        if self.initial_model is not None:
            own = self.initial_model is self.actor
            with self.actor.model.disable_adapter() if own else nullcontext():
                base_logps = self._log_probs(self.initial_model, samples)[0]
        values = None if self.critic is None else self._values(samples)
        bootstrap = None
        if values is not None and self.strategy.bootstrap_truncated:
            values, bootstrap = values[:, :-1], values[:, -1]
        rewards, metrics = self._rewards(samples)
        kl = torch.zeros_like(logps) if base_logps is None else self._kl(logps, base_logps, mask)
        info = {
            "reward": rewards.to(self.device),
            "kl": (kl * mask).sum(1) / mask.sum(1).clamp(min=1),
            "response_length": samples.response_length,
            "total_length": samples.total_length,
            "num_actions": samples.num_actions,
        }
        if samples.truncated is not None:
            info["truncated"] = samples.truncated
        if bootstrap is not None:
            info["bootstrap"] = bootstrap
        if metrics:
            info["reward_metrics"] = metrics
        fields = {
            "sequences": samples.sequences,
            "action_log_probs": logps,
            "base_action_log_probs": base_logps,
            "values": values,
            "returns": None,
            "advantages": None,
            "attention_mask": samples.attention_mask,
            "action_mask": mask,
            "info": info,
            "kl": kl,
            "action_entropy": entropy if self.actor.high_entropy_token_ratio > 0 else None,
        }
        kinds = set().union(*(p.modalities for p in samples.encoded_prompts or []))
        if not kinds:
            return Experience(**fields)
        cls = ExperienceAL if kinds == {"audio"} else ExperienceOmni if "audio" in kinds else ExperienceVL
        return cls(**fields, **_media_fields(samples.encoded_prompts, cls))

    def _kl(self, logps, base_logps, mask) -> torch.Tensor:
        return approx_kl(logps, base_logps, mask, self.strategy.kl_estimator)

    def _values(self, samples: Samples) -> torch.Tensor:
        """Of the states before the actions, `(B, A)`; to bootstrap, with the one after a completion that was cut off, else 0."""
        sequences, n_actions = samples.sequences, samples.num_actions
        mask, attention_mask = samples.action_mask, samples.attention_mask
        if self.strategy.bootstrap_truncated:
            # The state before a further token, whatever that is; what was cut off fills all columns
            sequences, n_actions = F.pad(sequences, (0, 1)), n_actions + 1
            further = samples.truncated[:, None]
            mask, attention_mask = (torch.cat([m, further.to(m.dtype)], 1) for m in (mask, attention_mask))
        with evaluation_mode(self.critic), self._autocast():
            if isinstance(self.critic, Critic) and samples.encoded_prompts is not None:
                return completion_values(
                    self.critic,
                    self.critic.model,
                    samples.encoded_prompts,
                    sequences[:, -n_actions:],
                    mask.long(),
                    packed=self.actor.packing_samples,
                    apart=family_of(self.actor).apart,
                )
            values = self.critic(sequences, n_actions, attention_mask, **self._media(samples))
        return torch.where(mask, values, 0)

    def _media(self, samples: Samples) -> dict[str, torch.Tensor]:
        """Media of all rows, by the names of the model's forward."""
        media = join_media(samples.encoded_prompts or [])
        return {name: value.to(self.device) for name, value in media.items()}

    def _log_probs(self, actor: Actor, samples: Samples) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Log-probabilities and entropies of the actions, `(B, A)`, 0 outside the mask."""
        mask = samples.action_mask
        with evaluation_mode(actor), self._autocast():
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
        # A reference may have a head that gives no entropies
        entropy = None if entropy is None else torch.where(mask, entropy.float(), 0)
        return torch.where(mask, logps.float(), 0), entropy

    # Rewards

    def _rewards(self, samples: Samples) -> tuple[torch.Tensor, dict]:
        completions = [ids[keep].tolist() for ids, keep in zip(*self._responses(samples), strict=True)]
        texts = self.tokenizer.batch_decode(completions, skip_special_tokens=True)
        rows = samples.rows or [{"prompt": prompt} for prompt in samples.prompts]
        prompts = [row["prompt"] for row in rows]
        conversational = not isinstance(prompts[0], str)
        names = sorted({name for row in rows for name in row} - {"prompt"})
        known = {
            # Columns first: what the model made must not be replaced by a column of the same name
            **{name: [row.get(name) for row in rows] for name in names},
            "queries": self.tokenizer.batch_decode(samples.sequences, skip_special_tokens=False),
            "labels": samples.labels,
            "refs": [row.get("references") for row in rows] if "references" in names else samples.labels,
            "label_map": self.reward_fn_label_map,
            "prompts": prompts,
            "completions": [[{"role": "assistant", "content": t}] for t in texts] if conversational else texts,
            "completion_ids": completions,
        }
        sources = []
        media = self._media(samples) if self.reward_models else {}
        for model in self.reward_models:
            with evaluation_mode(model):
                reward = model(samples.sequences, samples.attention_mask, **media)
            sources.append(reward.float().view(len(texts)).cpu())
        sources += [_as_rewards(_call(source, known), len(texts), source) for source in self.remote_rewards]
        if not sources:
            return _as_rewards(_call(self.reward_fn, known), len(texts), self.reward_fn), {}
        if self.reward_fn is not None:
            combined = _call(self.reward_fn, {**known, "model_reward_list": sources}, first="model_reward_list")
            rewards, metrics = combined if isinstance(combined, tuple) else (combined, {})
            return _as_rewards(rewards, len(texts), self.reward_fn), metrics
        if self.reward_recipe is not None:
            labels = samples.labels or [None] * len(texts)
            return combine_rewards(sources, labels, self.reward_recipe, self.reward_fn_label_map), {}
        return add_rewards(torch.stack(sources)), {}

    @staticmethod
    def _responses(samples: Samples):
        return samples.sequences[:, -samples.num_actions :], samples.action_mask

    def _length_penalty(self, options: dict[str, Any]) -> Callable | None:
        if self.strategy.soft_overlong_cache is None:
            return None
        most = options.get("max_new_tokens", self.actor.base_model.generation_config.max_new_tokens)
        if most is None:
            raise ValueError("`soft_overlong_cache` counts from `max_new_tokens`; pass it.")
        return get_soft_overlong_punishment(most, self.strategy.soft_overlong_cache)

    def _penalize_length(self, experiences: list[Experience], penalty: Callable) -> None:
        for experience in experiences:
            lengths = experience.info["response_length"].long().tolist()
            penalties = torch.tensor(penalty([range(n) for n in lengths]), device=self.device)
            experience.info["soft_overlong_punishment"] = penalties
            experience.info["reward"] = experience.info["reward"] + penalties

    @torch.no_grad()
    def process_experiences(self, experiences: list[Experience]) -> tuple[list[Experience], list[torch.Tensor]]:
        """
        Shapes the rewards of a whole rollout: running scale, clip, and what the estimator does to the rewards of a group.

        Args:
            experiences (`list[Experience]`):
                All experiences of the rollout, in the order in which they were made.

        Returns:
            `tuple`: The experiences, whose `info["reward"]` is the reward after scale and clip (and `raw_reward` that
            before, if either changes it), and for each the shaped rewards, `(B,)`: advantages of the group estimators,
            rewards for `"gae"` and `"reinforce"`.

        Raises:
            ValueError: If an estimator that compares completions of a prompt doesn't get whole groups.
        """
        args = self.strategy
        sizes = [len(each.sequences) for each in experiences]
        in_groups = ESTIMATORS[args.advantage_estimator] == "group"
        if in_groups and sum(sizes) % args.n_samples_per_prompt != 0:
            raise ValueError(
                f"There are {sum(sizes)} samples, which are no whole groups of {args.n_samples_per_prompt}; pass all "
                "experiences of a rollout."
            )
        rewards = self._gather(torch.cat([each.info["reward"] for each in experiences]).float())
        if args.reward_running_scale:
            self.reward_scale.update(rewards)
            rewards = rewards / self.reward_scale.std
        if args.reward_clip_range is not None:
            rewards = rewards.clamp(*args.reward_clip_range)
        for experience, part in zip(experiences, self._local(rewards).split(sizes), strict=True):
            if args.reward_running_scale or args.reward_clip_range is not None:
                experience.info["raw_reward"] = experience.info["reward"]
            experience.info["reward"] = part
        if in_groups:
            masks = self._gather(_pad_right([each.action_mask for each in experiences]))
            kl_coef = self.kl_ctl.value if args.kl_in_reward and self.initial_model is not None else 0.0
            logps = {}
            if kl_coef:
                logps = {
                    name: self._gather(_pad_right([getattr(each, field) for each in experiences]))
                    for name, field in (("old_logps", "action_log_probs"), ("ref_logps", "base_action_log_probs"))
                }
            rewards = estimate_advantages(
                args.advantage_estimator,
                rewards=rewards,
                rewards_per_func=rewards[:, None],
                group_ids=torch.arange(len(rewards), device=rewards.device) // args.n_samples_per_prompt,
                mask=masks,
                kl_coef=kl_coef,
                norm_level=args.norm_level,
                weight=args.cpgd_weight,
                **logps,
            )
        return experiences, list(self._local(rewards).split(sizes))

    def _set_advantages(self, experiences, rewards, gamma: float, lambd: float) -> None:
        args = self.strategy
        kl_coef = self.kl_ctl.value if args.kl_in_reward and self.initial_model is not None else 0.0
        token_level = ESTIMATORS[args.advantage_estimator] != "group"
        for experience, reward in zip(experiences, rewards, strict=True):
            mask = experience.action_mask
            if not token_level:
                experience.advantages = experience.returns = torch.where(mask, reward[:, None], 0)
                experience.info["return"] = experience.info["reward"]
                continue
            # Unscorable completions aren't trained on
            token_rewards = place_rewards(reward.nan_to_num(), mask)
            if kl_coef:
                k1 = approx_kl(experience.action_log_probs, experience.base_action_log_probs, mask, "k1")
                token_rewards = token_rewards - kl_coef * k1
            experience.info["return"] = token_rewards.sum(1)
            if args.advantage_estimator == "gae":
                bootstrap = experience.info.get("bootstrap")
                experience.advantages, returns = gae(
                    token_rewards, experience.values, mask, gamma=gamma, lam=lambd, bootstrap=bootstrap
                )
                unscorable = mask & reward.isnan()[:, None]
                experience.returns = torch.where(unscorable, experience.values, returns)
            else:
                experience.returns = self.get_cumulative_returns(token_rewards, mask, gamma)
                experience.advantages = experience.returns
        if token_level:
            sizes = [each.action_mask.shape for each in experiences]
            scorable = torch.cat([~reward.isnan() for reward in rewards])[:, None]
            mask = self._gather(_pad_right([each.action_mask for each in experiences]) & scorable)
            advantages = self._gather(_pad_right([each.advantages for each in experiences]))
            whitened = self._local(whiten(advantages, mask)).split([rows for rows, _ in sizes])
            for experience, part, (_, width) in zip(experiences, whitened, sizes, strict=True):
                experience.advantages = part[:, :width]

    @torch.no_grad()
    def get_advantages_and_returns(
        self,
        values: torch.Tensor | list[torch.Tensor],
        rewards: torch.Tensor | list[torch.Tensor],
        action_mask: torch.Tensor | list[torch.Tensor] | None,
        gamma: float,
        lambd: float,
    ) -> tuple:
        r"""
        Generalized advantage estimation, see [`~algorithms.advantages.gae`].

        Args:
            values (`torch.Tensor` or `list[torch.Tensor]`):
                Value of the state before each action, shape `(B, A)`, or for each sample `(A,)`.
            rewards (`torch.Tensor` or `list[torch.Tensor]`):
                Rewards of the actions, likewise.
            action_mask (`torch.Tensor` or `list[torch.Tensor]`, *optional*):
                1 on actions, likewise; all ones by default.
            gamma (`float`):
                Discount $\gamma$.
            lambd (`float`):
                $\lambda$.

        Returns:
            `tuple`: Advantages, not whitened, and returns, in the shape of the values.
        """
        if isinstance(values, list):
            lengths = [len(each) for each in values]
            mask = _rows(action_mask or [torch.ones_like(each) for each in values])
            results = gae(_rows(rewards), _rows(values), mask, gamma=gamma, lam=lambd)
            return tuple([row[:n] for row, n in zip(each, lengths, strict=True)] for each in results)
        mask = torch.ones_like(values) if action_mask is None else action_mask
        return gae(rewards, values, mask, gamma=gamma, lam=lambd)

    @torch.no_grad()
    def get_cumulative_returns(
        self,
        rewards: torch.Tensor | list[torch.Tensor],
        action_mask: torch.Tensor | list[torch.Tensor] | None,
        gamma: float,
    ) -> torch.Tensor | list[torch.Tensor]:
        r"""
        Discounted sums of the rewards from each action on, see [`~algorithms.advantages.cumulative_returns`].

        Args:
            rewards (`torch.Tensor` or `list[torch.Tensor]`):
                Rewards of the actions, shape `(B, A)`, or for each sample `(A,)`.
            action_mask (`torch.Tensor` or `list[torch.Tensor]`, *optional*):
                1 on actions, likewise; all ones by default.
            gamma (`float`):
                Discount $\gamma$.

        Returns:
            `torch.Tensor` or `list[torch.Tensor]`: Returns, in the shape of the rewards.
        """
        if isinstance(rewards, list):
            mask = _rows(action_mask or [torch.ones_like(each) for each in rewards])
            results = cumulative_returns(_rows(rewards), mask, gamma)
            return [row[: len(each)] for row, each in zip(results, rewards, strict=True)]
        mask = torch.ones_like(rewards) if action_mask is None else action_mask
        return cumulative_returns(rewards, mask, gamma)

    # Processes

    def _autocast(self):
        """The precision of updates, where an accelerator has one."""
        accelerator = self.strategy.accelerator
        return nullcontext() if accelerator is None else accelerator.autocast()

    @property
    def _is_main(self) -> bool:
        accelerator = self.strategy.accelerator
        return accelerator is None or accelerator.is_main_process

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        """Rows of all processes, padded on the right."""
        accelerator = self.strategy.accelerator
        if accelerator is None or accelerator.num_processes == 1:
            return values
        counts = accelerator.gather(torch.tensor([len(values)], device=accelerator.device))
        if (counts != counts[0]).any():
            raise ValueError(f"Processes have {counts.tolist()} samples; give each as many prompts.")
        # Padding makes integers of booleans, and only where there is any
        padded = values.int() if values.dtype == torch.bool else values
        if values.dim() > 1:
            padded = accelerator.pad_across_processes(padded, dim=1)
        return accelerator.gather(padded.contiguous()).to(values.dtype)

    def _local(self, values: torch.Tensor) -> torch.Tensor:
        """This process's rows of what was gathered."""
        accelerator = self.strategy.accelerator
        if accelerator is None or accelerator.num_processes == 1:
            return values
        return values.chunk(accelerator.num_processes)[accelerator.process_index]


def check_options(options: dict[str, Any]) -> None:
    """
    Refuses options of generation that would have no effect.

    Args:
        options (`dict`):
            The options by name.

    Raises:
        `ValueError`: If there is no such option.
    """
    unknown = options.keys() - (vars(GenerationConfig()).keys() - {"num_return_sequences", "num_beams"})
    if unknown:
        raise ValueError(f"`{min(unknown)}` is no option of sampling here; correct or remove it.")


def _media_fields(prompts: list[EncodedPrompt], cls: type[Experience]) -> dict[str, Any]:
    """Media of all rows under the names of experiences, and how many of their entries belong to each row."""
    own = set(cls.__dataclass_fields__)
    result: dict[str, Any] = {"extra_media": {}, "media_rows": {}}
    for name, value in join_media(prompts).items():
        field = MEDIA_FIELDS.get(name, name)
        target = result if field in own else result["extra_media"]
        target[field if field in own else name] = value
        result["media_rows"][field if field in own else name] = [
            len(prompt.media[name]) if name in prompt.media else 0 for prompt in prompts
        ]
    if "raw_images" in own and any(prompt.images for prompt in prompts):
        result["raw_images"] = [prompt.images or None for prompt in prompts]
    result["extra_media"] = result["extra_media"] or None
    return result


def _pad_right(tensors: list[torch.Tensor]) -> torch.Tensor:
    width = max(each.size(1) for each in tensors)
    return torch.cat([F.pad(each, (0, width - each.size(1))) for each in tensors])


def _rows(tensors: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def _load_reward_func(path: str) -> Callable:
    """`reward_func` of a file that the user names, which is run for that."""
    if not Path(path).is_file():
        raise ValueError(f"There is no file {path} to load `reward_func` from.")
    spec = importlib.util.spec_from_file_location("reward_func", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "reward_func"):
        raise ValueError(f"{path} has no function `reward_func`.")
    return module.reward_func


def _call(function: Callable, known: dict[str, Any], first: str | None = None) -> Any:
    """Calls with what the function's parameters ask for by name; one unknown parameter alone gets `first`."""
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return function(**known)
    if first is not None and len(parameters) == 1 and not parameters.keys() & known.keys():
        return function(known[first])
    missing = [name for name, p in parameters.items() if name not in known and p.default is inspect.Parameter.empty]
    if missing:
        raise ValueError(
            f"The reward function '{_name(function)}' asks for `{missing[0]}`, but there are only {sorted(known)}."
        )
    return function(**{name: known[name] for name in parameters if name in known})


def _name(function: Callable) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _as_rewards(values: Any, n: int, source: Callable) -> torch.Tensor:
    if isinstance(values, torch.Tensor):
        values = values.float().cpu()
        if values.shape != (n,):
            raise ValueError(f"'{_name(source)}' returned rewards of shape {tuple(values.shape)} for {n} completions.")
        return values
    values = check_rewards(values, n, _name(source))
    return torch.tensor([float("nan") if value is None else float(value) for value in values])
