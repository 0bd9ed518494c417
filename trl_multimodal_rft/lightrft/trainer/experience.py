# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Records of completions: [`Samples`], as they were sampled, and [`Experience`], with the fields that an update needs.

An experience is padded or packed. In a padded experience, `sequences` has the shape `(B, S)`, and fields of actions
have the shape `(B, A)`. The last `A` columns of `sequences` are the action columns. The action mask is 0 where an
action column holds no action. In a packed experience, these fields are lists of `B` tensors of shape `(S_i,)` or
`(A_i,)`. In both forms, a media tensor concatenates the rows of all samples, in order.

Example: prompts `[p, q]` and `[r]` have the completions `[a, b]` and `[c]`. Padded, `sequences` are `[[p, q, a, b],
[0, 0, r, c]]` with the action mask `[[1, 1], [0, 1]]`. Packed, they are `[[p, q, a, b], [r, c]]` with `[[1, 1], [1]]`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, Self, TypeVar

import torch
from accelerate.utils import recursively_apply
from torch.nn.utils.rnn import pad_sequence

from ...algorithms.advantages import clip_filter_like_weights, group_statistics
from ...rollout.rollout import Prompted
from ..models.completions import packed_rows


Tokens = torch.Tensor | list[torch.Tensor]  # padded, or packed as one tensor per sample
Fields = TypeVar("Fields", bound=Tokens)  # type of `sequences` and of fields of actions
Nested = TypeVar("Nested")


def to(tensor: Nested, device: torch.device | str) -> Nested:
    """
    Moves a tensor, or all tensors in nested containers, to a device.

    Args:
        tensor (`torch.Tensor`):
            A tensor, or lists, tuples and dicts that hold tensors.
        device (`torch.device` or `str`):
            Target device.

    Returns:
        `torch.Tensor`: The tensor on the device, or new containers of such tensors, with all other values unchanged.
    """
    return recursively_apply(lambda value: value.to(device), tensor)


def pin_memory(tensor: Nested) -> Nested:
    """
    Pins CPU tensors, also in nested containers, so that they move to a GPU faster, see [`to`].

    Returns:
        `torch.Tensor`: The pinned tensor, or new containers; without CUDA, the argument itself.
    """
    if not torch.cuda.is_available():
        return tensor
    return recursively_apply(lambda value: value.pin_memory() if value.device.type == "cpu" else value, tensor)


def clip_filter_like_weight_func(
    rewards: torch.Tensor, clip_filter_like_weight_clip_eps: float = 3.0, lamda: float = 1.0
) -> torch.Tensor:
    """
    Returns weights by which groups with signal make up for groups without signal, see [`clip_filter_like_weights`].

    Rewards and weights have the shape `(G, n)`: `G` groups of `n` completions. Rewards of unscorable completions are
    `NaN`. Groups with signal have weights of at most `clip_filter_like_weight_clip_eps`, groups without signal have
    the weight `lamda`. If no group has signal, all weights are 1.
    """
    n_groups, n_samples = rewards.shape
    ids = torch.arange(n_groups, device=rewards.device).repeat_interleave(n_samples)
    has_signal = group_statistics(rewards.flatten(), ids).has_signal
    weights = clip_filter_like_weights(has_signal, clip_filter_like_weight_clip_eps, lamda)
    dtype = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
    return weights.to(rewards.device, dtype)[:, None].repeat(1, n_samples)


def zero_pad_sequences(
    sequences: Sequence[torch.Tensor], side: Literal["left", "right"] = "left", value: float = 0
) -> torch.Tensor:
    """
    Pads tensors to the longest last dimension and stacks them.

    Args:
        sequences (`Sequence[torch.Tensor]`):
            Tensors of shape `(..., S_i)`. Only their last dimensions may differ.
        side, value (`str` and `float`, *optional*, default to `"left"` and `0`):
            Side (`"left"` or `"right"`) and value of the padding.

    Returns:
        `torch.Tensor`: The stack, shape `(B, ..., max S_i)`, of the same dtype.

    Raises:
        `AssertionError`: If `side` is another string.
        `ValueError`: If there are no sequences.
    """
    assert side in ("left", "right"), f"`side` must be 'left' or 'right', not {side!r}."
    if not sequences:
        raise ValueError("There are no sequences to pad.")
    rows = [sequence.movedim(-1, 0) for sequence in sequences]
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side).movedim(1, -1)


@dataclass(eq=False)
class Record(Generic[Fields]):
    """
    Completions with the fields that an update needs. The shapes below are those of a padded experience.

    Args:
        sequences (`torch.Tensor` or `list[torch.Tensor]`):
            Ids of prompt and completion, shape `(B, S)`.
        action_log_probs, base_action_log_probs (`torch.Tensor` or `list[torch.Tensor]`):
            Log-probabilities of the actions under the sampling policy and under the reference, shape `(B, A)`.
            `base_action_log_probs` are `None` without a reference.
        values, returns, advantages (`torch.Tensor` or `list[torch.Tensor]`):
            Values, returns and advantages of the actions, shape `(B, A)`; `values` are `None` without a critic.
        attention_mask, action_mask (`torch.Tensor` or `list[torch.Tensor]`):
            1 on tokens, shape `(B, S)`, and on actions, shape `(B, A)`.
        info (`dict`):
            Further values, such as rewards. Tensors `(B, ...)` and lists of length `B` have one entry per sample.
            Nested dicts hold further values of these types. Any other value belongs to the whole batch.
    """

    sequences: Fields
    action_log_probs: Fields | None = None
    base_action_log_probs: Fields | None = None
    values: Fields | None = None
    returns: Fields | None = None
    advantages: Fields | None = None
    attention_mask: Fields | None = None
    action_mask: Fields | None = None
    info: dict[str, Any] | None = None

    @torch.no_grad()
    def to_device(self, device: torch.device | str) -> Self:
        """
        Moves every tensor, in place, see [`to`].

        Returns:
            [`Record`]: Itself.
        """
        vars(self).update(to(vars(self), device))
        return self

    def pin_memory(self) -> Self:
        """Pins every tensor, in place, and returns itself."""
        vars(self).update(pin_memory(vars(self)))
        return self


def info_of(record: Record) -> dict[str, Any]:
    """Returns the `info` of a batch or of a sample, and sets it to an empty dict if it is `None`."""
    if record.info is None:
        record.info = {}
    return record.info


@dataclass(eq=False)
class Experience(Record[Tokens]):
    """
    A batch of completions, see [`Record`].

    Args:
        kl (`torch.Tensor` or `list[torch.Tensor]`, *optional*):
            KL divergence from the reference, shape `(B, A)`.
        action_entropy (`torch.Tensor` or `list[torch.Tensor]`, *optional*):
            Entropy of the policy at each action, to train on tokens of high entropy only, shape `(B, A)`. See
            [Beyond the 80/20 Rule](https://huggingface.co/papers/2506.01939).
    """

    kl: Tokens | None = None
    action_entropy: Tokens | None = None


# Media fields. A dataclass collects the fields of its bases from the last base to the first. So `ExperienceVL` has the
# fields of `VisionFields` first, then those of `Experience`, and then those of `MediaFields`.


@dataclass(eq=False)
class VisionFields(Generic[Fields]):
    """
    Fields of images and videos. They follow `sequences` directly.

    Args:
        pixel_values, pixel_values_videos (`torch.Tensor`, *optional*):
            Images and videos as the model takes them, such as flattened patches or `(N, 3, H, W)`.
        image_grid_thws, video_grid_thws (`torch.Tensor`, *optional*):
            If the pixels are patches, the number of patches along time, height and width, shape `(N, 3)`.
        raw_images (`list`, *optional*):
            Images before processing: a list of images for a sample; for a batch, one such list or `None` per sample.
    """

    sequences: Fields
    pixel_values: torch.Tensor | None = None
    image_grid_thws: torch.Tensor | None = None
    pixel_values_videos: torch.Tensor | None = None
    video_grid_thws: torch.Tensor | None = None
    raw_images: list | None = None


@dataclass(eq=False)
class MediaFields:
    """
    Fields of audio and other media. They follow the fields of [`Experience`].

    Args:
        audio_values (`torch.Tensor`, *optional*):
            Features of the clips, such as `(N, mel bins, frames)`.
        audio_attention_mask (`torch.Tensor`, *optional*):
            1 on frames of a clip, 0 on padding, shape `(N, frames)`.
        extra_media (`dict[str, torch.Tensor]`, *optional*):
            Other media tensors that the model takes, such as `image_sizes`.
    """

    audio_values: torch.Tensor | None = None
    audio_attention_mask: torch.Tensor | None = None
    extra_media: dict[str, torch.Tensor] | None = None


@dataclass(eq=False)
class ExperienceVL(MediaFields, Experience, VisionFields[Tokens]):
    """
    An experience with images, videos and audio, see [`Experience`], [`VisionFields`] and [`MediaFields`].

    Args:
        media_rows (`dict[str, list[int]]`, *optional*):
            For each media tensor, the number of its rows (first dimension) that belong to each sample.
    """

    media_rows: dict[str, list[int]] | None = None


@dataclass(eq=False)
class Samples:
    """
    Sampled completions, before scoring, in padded or packed form. [`NaiveExperienceMaker.generate_samples`] returns
    padded samples.

    Args:
        sequences, attention_mask (`torch.Tensor`):
            Ids of prompt and completion, and 1 on tokens, shape `(B, S)`; packed, shape `(1, total_length)`.
        action_mask (`torch.Tensor`):
            1 on actions, shape `(B, A)`. Packed samples may have `None`, if all their actions count.
        num_actions (`int` or `torch.Tensor`):
            Number of action columns, `A`; packed, the number of tokens of each completion, shape `(B,)`.
        packed_seq_lens (`torch.Tensor`, *optional*):
            Number of tokens of each packed sample, shape `(B,)`. `None` for padded samples.
        pad_len (`int`, *optional*):
            Number of tokens of padding at the end of packed samples.
        response_length, total_length (`torch.Tensor`):
            Numbers of actions and of tokens of each sample, shape `(B,)`.
        prompts, labels (`list`):
            Prompt and ground truth of each sample.
        prompted ([`~rollout.rollout.Prompted`], *optional*):
            Encoded prompts, dataset rows, and whether each completion ended and wasn't cut off.
    """

    sequences: torch.Tensor
    # Types of padded samples
    attention_mask: torch.Tensor
    action_mask: torch.Tensor
    num_actions: int
    packed_seq_lens: torch.Tensor | None
    response_length: torch.Tensor
    total_length: torch.Tensor
    prompts: list
    labels: list | None = None
    pad_len: int | None = None
    prompted: Prompted | None = None

    def padded(self, pad_token_id: int) -> "Samples":
        """
        Pads packed samples: prompts on the left, and completions on the right.

        Args:
            pad_token_id (`int`):
                Id of the padding.

        Returns:
            [`Samples`]: Padded samples; these samples themselves if they are padded.

        Example: the row `[p, q, a, b, r, c]` with `packed_seq_lens` `[4, 2]` and `num_actions` `[2, 1]` becomes
        `[p, q, a, b]` and `[0, r, c, 0]` with two action columns.

        Raises:
            `ValueError`: If lengths, numbers of actions or masks don't fit the sequences.
        """
        if self.packed_seq_lens is None:
            return self
        lengths = list(map(int, self.packed_seq_lens))
        rows, starts = packed_rows(self.sequences, self.num_actions, lengths, self.pad_len or 0)
        if self.attention_mask is not None and not self.attention_mask[0, : sum(map(len, rows))].all():
            raise ValueError("`attention_mask` hides tokens of packed samples; leave them out instead.")
        prompts = [row[:start] for row, start in zip(rows, starts, strict=True)]
        completions = [row[start:] for row, start in zip(rows, starts, strict=True)]
        is_action = zero_pad_sequences([torch.ones_like(row, dtype=torch.bool) for row in completions], "right")
        is_prompt = zero_pad_sequences([torch.ones_like(row) for row in prompts])
        if self.action_mask is not None and self.action_mask.shape != is_action.shape:
            raise ValueError(
                f"`action_mask` has the shape {tuple(self.action_mask.shape)}, but {tuple(is_action.shape)} fits the "
                "packed samples; pass one row per sample, padded on the right."
            )
        padded_completions = zero_pad_sequences(completions, "right", pad_token_id)
        return replace(
            self,
            sequences=torch.cat([zero_pad_sequences(prompts, value=pad_token_id), padded_completions], 1),
            attention_mask=torch.cat([is_prompt, is_action.long()], 1),
            action_mask=is_action if self.action_mask is None else is_action & self.action_mask.bool(),
            num_actions=is_action.size(1),
            packed_seq_lens=None,
            pad_len=None,
        )
