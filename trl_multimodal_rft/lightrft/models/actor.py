# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Actors, LightRFT's policies: loading, LoRA, log-probabilities of actions, and sampling."""

import inspect
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import BitsAndBytesConfig, GenerationConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig, is_deepspeed_zero3_enabled
from transformers.utils import ModelOutput

from ...data.reading.decoding import require_module
from ...encoding.prompts import EncodedPrompt, all_placeholder_ids
from ...engines.transformers import sample_completions
from ...families import TOKEN_FIELDS, family_of, modality_of
from ...forward.attention import install_prefix_attention
from ...forward.encoders import to_model
from ...forward.head import add_fused_head, scores_of_logits
from ...forward.masks import sharing_obstacle
from ...forward.prompt_groups import split_samples
from ...models.modes import checkpoint_activations, evaluation_mode
from ...models.parts import TOWERS, count_parts, find_tower, freeze_as_built
from ...models.pretrained import load_model
from ...models.quantization import keep_differentiable
from ...models.wrapped import unwrapped
from ...policy import Fallbacks, PolicyForward, modalities_of
from ...versions import CACHE_NAMES
from .bare_inputs import audio_inputs, on_action_columns, padded_completions, token_fields, unpadded_completions
from .completions import mask_completions


if TYPE_CHECKING:
    from ...trainers.grpo.config import MultimodalGRPOConfig
    from ...trainers.rloo.config import MultimodalRLOOConfig

logger = logging.getLogger(__name__)  # accelerate's logger would raise an error without accelerate's state

# Arguments of a model's forward that hold no media
_NOT_MEDIA = {"input_ids", "attention_mask", "position_ids", "inputs_embeds", *CACHE_NAMES, "labels"}

_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
_VISION_NAMES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")

# If a model's forward doesn't take a grid, the grid is dropped. Any other unknown tensor raises an error.
_GRIDS = {"image_grid_thw", "video_grid_thw"}


class Actor(nn.Module):
    """
    A policy that samples completions and returns log-probabilities of their tokens. The tokens of a completion are the
    actions. Methods take media by the argument names of the model's forward.

    Args:
        pretrain_or_model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Name or path of a model, or the model itself.
        use_flash_attention_2 (`bool`, *optional*, defaults to `False`):
            Whether to load with FlashAttention 2 instead of transformers' default attention.
        bf16 (`bool`, *optional*, defaults to `True`):
            Whether the weights are bfloat16. `False` keeps the dtype of the checkpoint, or of the instance.
        lora_rank, lora_alpha, lora_dropout (`int`, *optional*, default to `0`, `16` and `0`):
            Rank (0 trains all weights), scale and dropout of a LoRA adapter.
        target_modules (`str` or `list[str]`, *optional*):
            Suffixes of the names of layers for LoRA. By default and with `"all-linear"`, all linear layers except the
            LM head, and those of frozen encoders.
        ds_config, device_map (`dict`, *optional*):
            DeepSpeed configuration, and device of each module. ZeRO-3 shards the weights as they are loaded; all ranks
            must then pass media of the same modalities.
        packing_samples (`bool`, *optional*, defaults to `False`):
            Whether `forward` scores completions in packed rows, and also takes packed sequences.
        high_entropy_token_ratio (`float`, *optional*, defaults to `0.0`):
            Share of tokens with the highest entropy to train on. Above 0, outputs hold `action_entropy`.
        load_in_4bit (`bool`, *optional*, defaults to `False`):
            Whether to load 4-bit weights (NF4), which only LoRA can train.
        freeze_vision_tower, freeze_audio_tower (`bool`, *optional*, default to `False`):
            Whether to freeze the encoder of images and videos, and the encoder of audio.
        temperature (`float`, *optional*, defaults to `1.0`):
            Temperature of the log-probabilities. Sample at the same temperature.
        fused_linear_logprob, disable_logprobs_flashattn, chunk_size (*optional*):
            Arguments of LightRFT's scripts without an effect: log-probabilities never need the logits of all tokens.

    Raises:
        `ValueError`: If a number is out of range, if an argument of loading is passed with an instance, if there is no
            encoder to freeze or no layer for LoRA, if an instance for LoRA already has an adapter, if the model
            doesn't support packing, or if some of the model's media tensors index other ones.
    """

    modality = "text"
    _uses_vision = True  # `False` makes `forward` ignore images and videos

    def __init__(
        self,
        pretrain_or_model: str | nn.Module,
        use_flash_attention_2: bool = False,
        bf16: bool = True,
        lora_rank: int = 0,
        lora_alpha: int = 16,
        lora_dropout: float = 0,
        target_modules: str | list[str] | None = None,
        ds_config: dict | None = None,
        device_map: dict | str | None = None,
        packing_samples: bool = False,
        high_entropy_token_ratio: float = 0.0,
        *,
        load_in_4bit: bool = False,
        freeze_vision_tower: bool = False,
        freeze_audio_tower: bool = False,
        temperature: float = 1.0,
        fused_linear_logprob: bool = False,
        disable_logprobs_flashattn: bool = False,
        chunk_size: int | None = None,
    ):
        arguments = locals()
        super().__init__()
        if not 0 <= high_entropy_token_ratio <= 1:
            raise ValueError(f"`high_entropy_token_ratio` must be between 0 and 1, got {high_entropy_token_ratio}.")
        self.packing_samples = packing_samples
        self.high_entropy_token_ratio = high_entropy_token_ratio
        self.temperature = temperature
        if isinstance(pretrain_or_model, (str, Path)):
            # The attribute keeps the DeepSpeed config alive, since transformers has only a weak reference to it
            uses_zero3 = ds_config is not None and ds_config.get("zero_optimization", {}).get("stage") == 3
            self._ds_config = HfDeepSpeedConfig(ds_config) if uses_zero3 else None
            options: dict[str, Any] = {"dtype": torch.bfloat16 if bf16 else "auto", "device_map": device_map}
            if use_flash_attention_2:
                options["attn_implementation"] = "flash_attention_2"
            if load_in_4bit:
                compute_dtype = {"bnb_4bit_compute_dtype": torch.bfloat16 if bf16 else torch.float32}
                options["quantization_config"] = BitsAndBytesConfig(**_FOUR_BITS, **compute_dtype)
            model = load_model(str(pretrain_or_model), **options)
            freeze_as_built(model)
        else:
            loading_arguments = ("use_flash_attention_2", "ds_config", "device_map", "load_in_4bit")
            for name in loading_arguments:
                if arguments[name]:
                    raise ValueError(f"`{name}` says how to load a model, but an instance was passed; pass a path.")
            model = pretrain_or_model
            base = unwrapped(None, pretrain_or_model)
            if lora_rank > 0 and model is not base:
                raise ValueError("The instance already has an adapter; pass the base model, or set `lora_rank=0`.")
            if bf16 and not getattr(base, "is_quantized", False):
                _cast_parameters(model, base, torch.bfloat16)
        base = unwrapped(None, model)
        if family_of(base).indexed_media:
            raise ValueError(
                f"{base.config.model_type} has media tensors that index others, and a split of experiences would "
                "break the indices; train it with `MultimodalGRPOTrainer` or `MultimodalPPOTrainer`."
            )
        keep_differentiable(base)
        base.config.use_cache = False
        frozen_towers = []
        for modality, part in TOWERS.items():
            if arguments[f"freeze_{part}"]:
                try:
                    frozen_towers.append(find_tower(base, modality))
                except ValueError as error:
                    raise ValueError(f"{error} Remove `freeze_{part}`.") from error
        for name in frozen_towers:
            base.get_submodule(name).requires_grad_(False)
        if packing_samples:
            obstacle = sharing_obstacle(base)
            if obstacle:
                raise ValueError(f"`packing_samples=True` isn't exact for this model: {obstacle}.")
            install_prefix_attention(base)
        has_fused_head = add_fused_head(base, temperature=temperature, outputs=("log_probs", "entropy"))
        # No `accelerator` is passed, so ranks get no dummy prompts, which need a processor; see `_check_other_ranks`
        fallbacks = Fallbacks(isolate=family_of(base).isolate, logits_from_model=not has_fused_head)
        self.policy_forward = PolicyForward(fallbacks=fallbacks, temperature=temperature)
        if lora_rank > 0:
            lora_settings = {"r": lora_rank, "lora_alpha": lora_alpha, "lora_dropout": lora_dropout}
            model = _add_lora(base, lora_settings, target_modules, frozen_towers)
        self.model = model
        self.training = base.training

    @property
    def base_model(self) -> PreTrainedModel:
        """The model without its adapter."""
        return unwrapped(None, self.model)

    @property
    def config(self):
        """Config of the model."""
        return self.base_model.config

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.base_model.device

    # Log-probabilities

    def forward(
        self,
        sequences: torch.LongTensor,
        num_actions: int | list[int] | None = None,
        attention_mask: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        return_output: bool = False,
        packed_seq_lens: list[int] | None = None,
        audio_values: torch.Tensor | None = None,
        audio_attention_mask: torch.Tensor | None = None,
        **media: torch.Tensor | None,
    ) -> torch.Tensor | ModelOutput | tuple[torch.Tensor, ModelOutput]:
        """
        Returns log-probabilities of the actions, the last tokens of each sequence.

        For example, two padded sequences with `num_actions=2` give a result of shape `(2, 2)`. Packed, with
        `num_actions=[2, 1]`, they give shape `(1, 3)`: two actions of the first sequence, then one of the second.

        Args:
            sequences (`torch.LongTensor`):
                Prompts and completions, shape `(B, S)`. Packed sequences follow each other without padding, shape
                `(1, sum of S)`.
            num_actions (`int` or `list[int]`, *optional*):
                Number of action tokens `A`, at most `S - 1`. For packed sequences, one number per sample. `None`
                with `return_output` returns the output alone.
            attention_mask (`torch.Tensor`, *optional*):
                1 on tokens, shape `(B, S)`; all ones by default. Ignored for packed sequences.
            pixel_values, pixel_values_videos (`torch.Tensor`, *optional*):
                Images and videos of all sequences, as the family's processor returns them: for Qwen, patches of shape
                `(sum of patches, D)`.
            image_grid_thw, video_grid_thw (`torch.Tensor`, *optional*):
                Numbers of patches of each image or video along time, height and width, shape `(number, 3)`.
            return_output (`bool`, *optional*, defaults to `False`):
                Whether to return the model's output, too. For padded sequences, the output holds the logits of all
                tokens. For packed sequences, it holds no logits, only the `aux_loss` of a mixture of experts.
            packed_seq_lens (`list[int]`, *optional*):
                Length of each packed sample.
            audio_values, audio_attention_mask (`torch.Tensor`, *optional*):
                Features of all clips as the processor returns them, such as `(number of clips, mel bands, frames)`,
                and their mask, 0 on padding, shape `(number of clips, frames)`. Without a mask, all frames count, or
                as many as the placeholders say, if they fit only one number.
            media (`torch.Tensor`):
                Further media, and per-token fields, by the names of the model's forward, such as `image_sizes`.

        Returns:
            `torch.Tensor` or [`~transformers.utils.ModelOutput`] or both: Log-probabilities, float32, of shape
            `(B, A)`, or `(1, sum of A)` for packed sequences. If `high_entropy_token_ratio` is above 0, the output
            also holds `action_entropy`, of the shape of the log-probabilities.

        Raises:
            [`MediaError`]: If placeholders and media don't match.
            `TypeError`: If the model's forward has no argument for a tensor, or takes no audio.
            `ValueError`: If the number of actions is missing or doesn't match the sequences, if sequences are packed
                without `packing_samples`, or if ranks hold different modalities with ZeRO-3.
        """
        vision = (pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        base = self.base_model
        vision_media = dict(zip(_VISION_NAMES, vision, strict=True)) if self._uses_vision else {}
        audio_media = audio_inputs(base, sequences, audio_values, audio_attention_mask)
        tensors = _accepted_media(base, dict(**vision_media, **audio_media, **media))
        if packed_seq_lens is not None:
            if not self.packing_samples:
                raise ValueError("The actor takes packed sequences only if it was made with `packing_samples=True`.")
            request, is_action = unpadded_completions(base, sequences, num_actions, packed_seq_lens, tensors)
            request = replace(request, compute_aux_loss=_has_router(base))
        elif isinstance(num_actions, (list, tuple)):
            raise ValueError(
                "A list of `num_actions` belongs to packed sequences; pass `packed_seq_lens` or one number."
            )
        elif num_actions is None and not return_output:
            raise ValueError(
                "`num_actions=None` gives no log-probabilities; set `return_output=True` or `num_actions`."
            )
        else:
            request, is_action = padded_completions(base, sequences, attention_mask, num_actions or 0, tensors)
            if return_output:
                self._check_other_ranks(request.prompts)
                return self._logps_and_output(sequences, attention_mask, num_actions, tensors, is_action)
        self._check_other_ranks(request.prompts)
        scores = self.policy_forward.score(self.model, replace(request, packed=self.packing_samples))
        logps = on_action_columns(scores.logps.float(), request.mask, is_action)
        if not return_output:
            return logps
        output = ModelOutput(aux_loss=scores.aux_loss) if scores.aux_loss is not None else ModelOutput()
        if self.high_entropy_token_ratio > 0:
            output["action_entropy"] = on_action_columns(scores.entropies.detach(), request.mask, is_action)
        return logps, output

    def _check_other_ranks(self, prompts: Sequence[EncodedPrompt]) -> None:
        """
        Raises a `ValueError` on all ranks if ZeRO-3 shards the weights, and ranks hold different modalities. Their
        forwards would run different encoders, and wait forever for other ranks to gather the weights.
        """
        if not hasattr(next(self.model.parameters()), "ds_id") or not dist.is_initialized():
            return
        parts = split_samples(prompts, self.policy_forward.fallbacks.isolate)  # one per forward
        modalities = [sorted(modalities_of(prompts[i] for i in part)) for part in parts]
        modalities_by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(modalities_by_rank, modalities)
        for rank, others in enumerate(modalities_by_rank):
            if others != modalities_by_rank[0]:
                raise ValueError(
                    f"By forward, rank 0 holds the modalities {modalities_by_rank[0]}, but rank {rank} {others}. This "
                    "would deadlock the collectives of ZeRO-3; use ZeRO-2, or batches of the same modalities."
                )

    def _logps_and_output(
        self,
        sequences: torch.Tensor,
        attention_mask: torch.Tensor | None,
        num_actions: int | None,
        media: dict[str, torch.Tensor],
        is_action: torch.Tensor,
    ) -> ModelOutput | tuple[torch.Tensor, ModelOutput]:
        """
        Returns log-probabilities, `(B, A)`, and the output of the model's own forward, with the logits of all columns.
        Without `num_actions`, returns the output alone.
        """
        base = self.base_model
        n_actions = num_actions or 0
        length = sequences.size(1)
        mask = torch.ones_like(sequences) if attention_mask is None else attention_mask
        fields = {name: value for name, value in media.items() if name in TOKEN_FIELDS}
        if not fields:
            fields = token_fields(base, sequences)
            # Some families mark text after the prompt in a token field
            for name, fill in family_of(base).token_field_fill.items():
                fields[name] = fields[name].masked_fill(F.pad(is_action, (length - n_actions, 0)), fill)
        inputs: dict[str, Any] = {**to_model(media, base, sequences.device), **fields, "attention_mask": mask}
        if self.config.get_text_config() is self.config:
            # A model without encoders counts left padding as positions unless it gets position ids
            inputs["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
        if _has_router(base):
            inputs["output_router_logits"] = True
        output = self.model(input_ids=sequences, **inputs)
        if num_actions is None:
            return output
        # The logits before a token predict the token
        logits = output.logits[:, length - 1 - n_actions : length - 1]
        ids = sequences[:, length - n_actions :]
        logps, entropy = scores_of_logits(logits, ids, self.temperature, entropy_requires_grad=False)
        if self.high_entropy_token_ratio > 0:
            output["action_entropy"] = torch.where(is_action, entropy, 0)
        return torch.where(is_action, logps, 0), output

    # Sampling

    @torch.no_grad()
    def generate(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        pixel_values_videos: torch.Tensor | None = None,
        video_grid_thw: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Samples completions, which never contain media placeholders.

        Args:
            input_ids, attention_mask (`torch.Tensor`):
                Prompts, padded on the left, and their mask, all ones by default, shape `(B, P)`.
            pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw (`torch.Tensor`, *optional*):
                Images and videos, see [`Actor.forward`].
            kwargs:
                Further media by the argument names of the model's forward, and options of
                [`~transformers.GenerationMixin.generate`]. Options default to the model's generation config.
                An unset temperature is the actor's; unset `top_k` and `top_p` are off.

        Returns:
            `tuple`: Sequences `(B, P + N)`, their attention mask, and the action mask `(B, N)`, see
            [`process_sequences`].

        Raises:
            [`MediaError`]: If placeholders and media don't match.
            `ValueError`: If prompts are padded on the right, if an option is unknown, if several sequences per prompt
                are requested, if beam search is requested with audio, or if ranks hold different modalities with
                ZeRO-3.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if not attention_mask[:, -1].all():
            raise ValueError("Prompts must be padded on the left, so that completions follow directly.")
        vision = (pixel_values, image_grid_thw, pixel_values_videos, video_grid_thw)
        kwargs |= dict(zip(_VISION_NAMES, vision, strict=True))
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        base = self.base_model
        names = _media_names(self.base_model) | _GRIDS
        # Tensors of media; all other arguments are options of generation
        tensor_names = [name for name, value in kwargs.items() if isinstance(value, torch.Tensor) and name in names]
        media = _accepted_media(base, {name: kwargs.pop(name) for name in tensor_names})
        # In order of precedence: options of this call, this call's generation config, the model's generation config
        config = kwargs.pop("generation_config", GenerationConfig()).to_dict()
        config = {name: value for name, value in config.items() if value is not None}
        generation_config = GenerationConfig(**{**base.generation_config.to_dict(), **config})
        unused = generation_config.update(**kwargs)
        if unused:
            raise ValueError(f"`{min(unused)}` is no option of sampling here; correct or remove it.")
        if (generation_config.num_return_sequences or 1) > 1:
            raise ValueError("`num_return_sequences` isn't supported: repeat the prompts, and their media with them.")
        if (generation_config.num_beams or 1) > 1 and any(modality_of(name) == "audio" for name in media):
            raise ValueError("Beams aren't supported with audio: transformers gives them the clips in another order.")
        eos_ids = generation_config.eos_token_id
        pad_id = generation_config.pad_token_id
        if pad_id is None:
            pad_id = eos_ids if isinstance(eos_ids, int) else (eos_ids or [0])[0]
        suppressed = {*all_placeholder_ids(base, base), *(generation_config.suppress_tokens or [])}
        options = {"pad_token_id": pad_id, "use_cache": True, "suppress_tokens": sorted(suppressed) or None}
        if generation_config.do_sample:
            options |= sampling_options(self.temperature, generation_config.to_dict())
        generation_config.update(**options)
        prompts = padded_completions(base, input_ids, attention_mask, 0, media)[0].prompts
        self._check_other_ranks(prompts)
        # Under ZeRO-3, ranks must run equally many forwards, as they do in `generate`, which shares no prefill
        fallbacks = replace(
            self.policy_forward.fallbacks,
            shared_prefill=not is_deepspeed_zero3_enabled(),
            graph=not generation_config.disable_compile,
        )
        with evaluation_mode(self):
            ids = sample_completions(
                self.policy_forward, self.model, prompts, generation_config, pad_id, fallbacks=fallbacks
            )
        sequences = torch.cat([input_ids, ids], dim=1)
        return self.process_sequences(sequences, input_ids.size(1), eos_ids, pad_id, attention_mask)

    def process_sequences(
        self,
        sequences: torch.Tensor,
        input_len: int,
        eos_token_id: int | Sequence[int] | None,
        pad_token_id: int,
        prompt_attention_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Masks sampled sequences `(B, S)`, see [`~lightrft.models.completions.mask_completions`]. Tokens after the first
        EOS token of a completion become padding; all other tokens stay.

        Returns:
            `tuple`: The sequences, their attention mask `(B, S)`, and the action mask `(B, S - input_len)`.
        """
        return mask_completions(sequences, input_len, eos_token_id, pad_token_id, prompt_attention_mask)[:3]

    # Training

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict | None = None) -> None:
        """
        Makes the backward pass recompute activations, also in the encoders.

        Args:
            gradient_checkpointing_kwargs (`dict`, *optional*):
                Arguments of `torch.utils.checkpoint.checkpoint`, by default `{"use_reentrant": False}`.
        """
        kwargs = {"use_reentrant": False} if gradient_checkpointing_kwargs is None else gradient_checkpointing_kwargs
        # Enabling registers hooks that make inputs require gradients; a second call must not register them twice
        self.base_model.disable_input_require_grads()
        checkpoint_activations(self.base_model, kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Makes forwards store activations for the backward pass again."""
        checkpoint_activations(self.base_model, enable=False)
        self.base_model.disable_input_require_grads()

    def print_trainable_parameters(self) -> None:
        """Prints the numbers of trainable parameters and of all parameters."""
        total, trainable = (sum(counts) for counts in zip(*count_parts(self.model).values(), strict=True))
        share = 100 * trainable / total
        print(f"trainable params: {trainable:,} || all params: {total:,} || trainable%: {share:.4f}")  # noqa: T201

    def model_for(self, args: "MultimodalGRPOConfig | MultimodalRLOOConfig") -> nn.Module:
        """
        Returns the model for a trainer of this package, after checks of the trainer's config.

        Args:
            args ([`MultimodalGRPOConfig`] or [`MultimodalRLOOConfig`]):
                The trainer's config.

        Returns:
            `torch.nn.Module`: The model.

        Raises:
            `ValueError`: If the config has another temperature or `top_entropy_quantile` than the actor.
        """
        if self.temperature != args.temperature:
            raise ValueError(
                f"The actor was made for temperature {self.temperature}, but `temperature` is {args.temperature}; "
                "make them equal."
            )
        ratio = self.high_entropy_token_ratio
        if 0 < ratio < 1 and ratio != getattr(args, "top_entropy_quantile", None):
            raise ValueError(f"The actor has `high_entropy_token_ratio={ratio}`; set `top_entropy_quantile={ratio}`.")
        return self.model

    def save_pretrained(self, folder: str, **kwargs) -> None:
        """
        Saves the model, or, if the model has an adapter, the adapter alone. Other arguments go to the model's method.

        Args:
            folder (`str`):
                Target folder.
        """
        self.model.save_pretrained(folder, **kwargs)


class ActorVL(Actor):
    """A policy for prompts with images and videos, with the arguments and methods of [`Actor`]."""

    modality = "vision"


class ActorAL(Actor):
    """
    A policy for prompts with audio, with the arguments of [`Actor`]. Its `forward` ignores images and videos; only
    [`ActorOmni`] takes all three modalities.

    Example:

    ```python
    actor = ActorAL("Qwen/Qwen2-Audio-7B-Instruct", lora_rank=16, lora_alpha=32)
    sequences, attention_mask, action_mask = actor.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        audio_values=inputs["input_features"],
        audio_attention_mask=inputs["feature_attention_mask"],
        max_new_tokens=100,
    )
    ```
    """

    modality = "audio"
    _uses_vision = False

    def generate(
        self,
        input_ids: torch.Tensor,
        audio_values: torch.Tensor | None = None,
        audio_attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Samples completions of prompts with audio, see [`Actor.generate`]. Audio is passed as in [`Actor.forward`].
        """
        audio = audio_inputs(self.base_model, input_ids, audio_values, audio_attention_mask)
        return super().generate(input_ids, **audio, **kwargs)


class ActorOmni(ActorAL):
    """A policy for prompts with images, videos and audio, with the arguments of [`Actor`]."""

    modality = "multimodal"
    _uses_vision = True


def sampling_options(actor_temperature: float, options: dict[str, Any]) -> dict[str, Any]:
    """
    Returns `temperature`, `top_k` and `top_p` for sampling. By default, the temperature is the actor's, and `top_k`
    and `top_p` are off. Warns if completions are drawn from a distribution that `forward` doesn't score.
    """
    defaults = {"temperature": actor_temperature, "top_k": 0, "top_p": 1.0}
    chosen = {name: value if options.get(name) is None else options[name] for name, value in defaults.items()}
    if chosen["temperature"] != actor_temperature:
        logger.warning(
            f"Sampling at temperature {chosen['temperature']}, but log-probabilities are those at "
            f"{actor_temperature}; make the actor with `temperature={chosen['temperature']}`."
        )
    if chosen["top_p"] < 1.0 or chosen["top_k"] > 0:
        logger.warning(
            "`top_p` and `top_k` cut off tokens that log-probabilities count, so importance ratios are wrong; turn "
            "both off."
        )
    return chosen


def _cast_parameters(model: nn.Module, base: PreTrainedModel, dtype: torch.dtype) -> None:
    """
    Casts parameters as `from_pretrained` does: modules that `base` keeps in float32 stay. Buffers stay, too, since a
    cast would round the frequencies of RoPE.
    """
    fp32_modules = tuple(base._keep_in_fp32_modules or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not any(part in name.split(".") for part in fp32_modules):
            parameter.data = parameter.data.to(dtype)


def _add_lora(
    model: PreTrainedModel, lora_settings: dict[str, Any], target_modules: str | list[str] | None, frozen: list[str]
) -> nn.Module:
    """Keeps the model's training mode. Modules in `frozen` get no adapter."""
    peft = require_module("peft", "peft")

    if target_modules in (None, "all-linear", ["all-linear"]):
        # Full names instead of "all-linear", which PEFT turns into suffixes: the suffix "0" of a merger's layer would
        # match whole blocks.
        head = model.get_output_embeddings()
        layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        target_modules = [name for name, module in layers if module is not head]
    # Frozen modules by full names, too: many suffixes of names in encoders also match layers of the language model
    excluded = rf"({'|'.join(map(re.escape, frozen))})\..*" if frozen else None
    config = peft.LoraConfig(**lora_settings, target_modules=target_modules, exclude_modules=excluded, bias="none")
    base_modules = set(model.modules())
    try:
        peft_model = peft.get_peft_model(model, config)
    except peft.utils.error.NoMatchingPeftModuleError as error:
        raise ValueError(
            f"No layer of {type(model).__name__} outside {frozen} has a name that ends in one of {target_modules}; "
            "`target_modules=None` takes all layers."
        ) from error
    for module in peft_model.modules():
        if module not in base_modules:
            module.training = model.training  # loaded models are in evaluation mode, without dropout
    return peft_model


def _has_router(model: PreTrainedModel) -> bool:
    return hasattr(model.config.get_text_config(), "output_router_logits")


def _media_names(model: PreTrainedModel) -> set[str]:
    return set(inspect.signature(type(model).forward).parameters) - _NOT_MEDIA


def _accepted_media(model: PreTrainedModel, media: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Returns media without `None` and without unknown grids. Raises a `TypeError` for any other unknown media."""
    names = _media_names(model)
    accepted = {n: value for n, value in media.items() if value is not None and (n in names or n not in _GRIDS)}
    for name, value in accepted.items():
        if name not in names or not isinstance(value, torch.Tensor):
            raise TypeError(f"{type(model).__name__} takes no media tensor `{name}`.")
    return accepted
