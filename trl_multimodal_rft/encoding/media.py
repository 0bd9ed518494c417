# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Media for a processor: pixel budgets, decoding, resizing by the processor's rules, and joined tensors."""

import base64
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from transformers import ProcessorMixin
from transformers.image_utils import SizeDict
from transformers.utils import logging
from transformers.video_utils import VideoMetadata

from ..data.reading.decoding import (
    decoding,
    evenly_spaced_indices,
    holds_frames,
    load_audio,
    load_image,
    load_sound_of_video,
    load_video,
    open_video,
    require_module,
    sample_indices,
)
from ..data.reading.qwen import qwen_frame_indices, qwen_resized
from ..data.reading.refs import MediaError, MediaRef
from ..data.reading.sources import encoded_source
from ..data.rows.blocks import QWEN_OPTIONS
from ..families import PATCH_ROWS, family_of_processor, indexed_media, media_padding
from ..modalities import MODALITIES
from ..views.views import View
from .processors import Processor, audio_rate


if TYPE_CHECKING:
    from transformers import BaseImageProcessor, Qwen2VLImageProcessor, Qwen2VLVideoProcessor
    from transformers.video_processing_utils import BaseVideoProcessor


logger = logging.get_logger(__name__)

# Key of `processor_kwargs` (see [`processor_outputs`]) for the sounds of videos, in the order of the videos
SOUNDS = "sounds_of_videos"

# Options of a block that apply to all models; other options of qwen-vl-utils apply to Qwen's models
_BUDGETS = {"min_pixels", "max_pixels", "max_frames"}

# Options of a block that select the frames of its video
_FRAME_OPTIONS = {"fps", "nframes", "min_frames", "max_frames", "video_start", "video_end"}
# Frame options of qwen-vl-utils. For other models, `max_frames` thins out the frames that the processor samples.
_QWEN_LIMITS = {"min_frames", "max_frames"}
# Options of a block that set the size of frames
_SIZE_OPTIONS = {"min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"}

# Settings that a video processor doesn't pass to `sample_frames`
_NOT_FOR_SAMPLING = {"input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"}

# Frame rates that differ by less than this factor count as equal, because rounding makes them differ
_RATE_FACTOR = 1.5

# Default frames per second of Qwen's models
_QWEN_FPS = 2.0

# Fewest tokens per image that Gemma 4's processor accepts
_FEWEST_SOFT_TOKENS = 70


def with_budgets(ref: MediaRef) -> MediaRef:
    """Returns a reference with the run's budgets of pixels and frames. Options of its block take precedence."""
    block_options = ref.options
    rules = ref.rules
    if ref.modality == "audio":
        return ref
    # A block's maximum also lowers the minimum of the run, and a block's minimum also raises the maximum of the run
    budgets: dict[str, Any] = {}
    if rules.min_pixels is not None:
        budgets["min_pixels"] = min(rules.min_pixels, block_options.get("max_pixels", math.inf))
    if rules.max_pixels is not None:
        budgets["max_pixels"] = max(rules.max_pixels, block_options.get("min_pixels", 0))
    if ref.modality == "video" and "nframes" not in block_options and not holds_frames(ref):
        if rules.video_fps is not None:
            budgets["fps"] = rules.video_fps
        if rules.max_frames is not None:
            budgets["max_frames"] = max(rules.max_frames, block_options.get("min_frames", 0))
    return replace(ref, options={**budgets, **block_options}) if budgets else ref


def budgeted_size(height: int, width: int, options: dict[str, Any], factor: int = 1) -> tuple[int, int]:
    """
    Returns an image's size within `min_pixels` and `max_pixels`, with the same aspect ratio. If it changes, its sides
    become multiples of `factor`, to which the processor rounds. If no such size is within both, `max_pixels` counts.
    """
    min_pixels = options.get("min_pixels", 0)
    max_pixels = options.get("max_pixels", math.inf)
    area = height * width
    rounded_area = round(height / factor) * round(width / factor) * factor**2
    if rounded_area > max_pixels:
        scale = math.sqrt(max_pixels / area)
        sides = [max(1, math.floor(side * scale / factor)) * factor for side in (height, width)]
        # If the shorter edge was rounded up to `factor`, the longer edge must shrink further
        longer = sides.index(max(sides))
        sides[longer] = min(sides[longer], max(1, math.floor(max_pixels / sides[1 - longer] / factor)) * factor)
        return sides[0], sides[1]
    if rounded_area < min_pixels:
        scale = math.sqrt(min_pixels / area)
        new_height, new_width = (math.ceil(side * scale / factor) * factor for side in (height, width))
        return (
            (new_height, new_width)
            if new_height * new_width <= max_pixels
            else budgeted_size(new_height, new_width, {"max_pixels": max_pixels}, factor)
        )
    return height, width


def size_factor(processor: "BaseImageProcessor | BaseVideoProcessor | None") -> int:
    """Returns the step, in pixels, by which a processor rounds the sides of images or frames; 1 without rounding."""
    patch_size, merge_size = (getattr(processor, name, None) for name in ("patch_size", "merge_size"))
    return patch_size * merge_size if isinstance(patch_size, int) and isinstance(merge_size, int) else 1


def budgeted_image(image: PIL.Image.Image, options: dict[str, Any], factor: int) -> PIL.Image.Image:
    """Returns an image within its budget, resized at most once."""
    height, width = budgeted_size(image.height, image.width, options, factor)
    return image if image.size == (width, height) else image.resize((width, height), PIL.Image.Resampling.BICUBIC)


def budgeted_frames(frames: np.ndarray, options: dict[str, Any], factor: int) -> np.ndarray:
    """Returns frames of shape (N, H, W, 3) within their budget."""
    height, width = frames.shape[1:3]
    if budgeted_size(height, width, options, factor) == (height, width):
        return frames
    return np.stack([np.asarray(budgeted_image(PIL.Image.fromarray(frame), options, factor)) for frame in frames])


def thinned_frames(select_frames: Callable[..., Any], max_frames: int, metadata: VideoMetadata) -> list[int]:
    """Returns the indices of the frames that `select_frames` selects, thinned out evenly to at most `max_frames`."""
    indices = [int(index) for index in select_frames(metadata=metadata)]
    return (
        indices
        if len(indices) <= max_frames
        else [indices[i] for i in evenly_spaced_indices(len(indices), max_frames)]
    )


def size_arguments(processor: "BaseImageProcessor | BaseVideoProcessor | None", max_pixels: float) -> dict[str, Any]:
    """
    Returns arguments that limit an image processor's tiles, longest edge or tokens, so that it uses at most
    `max_pixels`. Returns no arguments for a processor that doesn't enlarge images, because a smaller image suffices.
    """
    if processor is None or max_pixels == math.inf:
        return {}
    size = getattr(processor, "size", None) or {}
    max_tiles = getattr(processor, "max_patches", None)
    # Tiles of a fixed size, as of InternVL; then tokens, as of Gemma 4; then a longest edge in tiles, as of Idefics3
    if max_tiles is not None and getattr(processor, "min_patches", None) is not None:
        return {
            "max_patches": min(
                max_tiles, max(processor.min_patches, int(max_pixels // (size["height"] * size["width"])))
            )
        }
    max_tokens = getattr(processor, "max_soft_tokens", None)
    if max_tokens is not None:
        token_area = (getattr(processor, "patch_size", 0) * getattr(processor, "pooling_kernel_size", 0)) ** 2
        while max_tokens * token_area > max_pixels and max_tokens > _FEWEST_SOFT_TOKENS:
            max_tokens //= 2  # the processor accepts only 70, 140, 280 and so on
        return {"max_soft_tokens": max_tokens}
    tile_edge = (getattr(processor, "max_image_size", None) or {}).get("longest_edge")
    if tile_edge is not None and size.get("longest_edge") is not None and size.get("shortest_edge") is None:
        edge = max(1, math.isqrt(int(max_pixels)) // tile_edge) * tile_edge
        return {"size": {"longest_edge": min(size["longest_edge"], edge)}}
    return {}


def decode_media(
    refs: list[MediaRef], processor: Processor, audio_overlong: Literal["raise", "truncate"], view: View | None = None
) -> tuple[dict[int, Any], dict[str, Any]]:
    """Returns decoded media, by the `id` of their references, and the `processor_kwargs` for them."""
    decoded: dict[int, Any] = {}
    video_metadata: list[dict[str, Any]] = []
    kwargs: dict[str, Any] = {}
    family = family_of_processor(processor)
    budgeted_refs = [with_budgets(ref) for ref in refs]
    # Modalities to resize here. The processor can only resize all media of a modality, or none.
    resized_here = {
        ref.modality
        for ref in budgeted_refs
        if family.has_qwen_vl_utils
        and ref.modality != "audio"
        and (ref.options or isinstance(ref.source, (str, os.PathLike, dict)))
    }
    # Media of another row, which some views show
    other_media: dict[str, Any] = {modality: itertools.repeat(None) for modality in MODALITIES}
    other_refs = [] if view is None else [with_budgets(ref) for ref in view.others]
    for modality in dict.fromkeys(ref.modality for ref in other_refs):
        refs_of_modality = [ref for ref in other_refs if ref.modality == modality]
        other_media[modality] = itertools.cycle(
            [_decode(ref, processor, "truncate", resized_here)[0] for ref in refs_of_modality]
        )
    sounds: list[np.ndarray | None] = []
    for i, (original, ref) in enumerate(zip(refs, budgeted_refs, strict=True)):
        ignored_options = [] if ref.modality in resized_here else sorted(ref.options.keys() & QWEN_OPTIONS - _BUDGETS)
        if ignored_options:
            logger.warning_once(
                f"{type(processor).__name__} ignores the block options {', '.join(ignored_options)}; remove them, or "
                f"set {', '.join(sorted(_BUDGETS))} instead."
            )
        medium, metadata = _decode(ref, processor, audio_overlong, resized_here)
        if view is not None and view.applies_to(ref.modality):
            medium = view(medium, i, next(other_media[ref.modality]))
        if ref.modality == "audio" and family.takes_base64_audio:
            buffer = io.BytesIO()
            rate, _ = _audio_limits(ref, processor)
            require_module("soundfile", "audio").write(buffer, medium, rate, format="WAV", subtype="FLOAT")
            medium = base64.b64encode(buffer.getvalue()).decode()
        decoded[id(original)] = medium
        if metadata is not None:
            video_metadata.append(metadata)
        if ref.modality == "video" and ref.rules.use_audio_in_video:
            check_hears_videos(processor)
            sound = load_sound_of_video(ref, *_audio_limits(ref, processor), audio_overlong)
            if sound is not None and view is not None and view.applies_to("audio"):
                sound = view(sound, i, next(other_media["audio"]))
            sounds.append(sound)
    # Arguments of the processor's call, which apply to all media of a modality
    videos = [ref for ref in budgeted_refs if ref.modality == "video"]
    if video_metadata:
        # One list of metadata per prompt
        kwargs["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [video_metadata]}
    fps = _common_rate(videos, video_metadata) if family.hears_videos else None
    if fps is not None:
        kwargs["videos_kwargs"]["fps"] = fps
    if any(sound is not None for sound in sounds):
        for ref, sound in zip(videos, sounds, strict=True):
            if sound is None:
                raise ref.error(
                    "the video has no sound and another video of the prompt has one, which the model's positions "
                    "don't allow; add a silent sound track, or remove the row"
                )
        kwargs[SOUNDS] = sounds
    for modality in resized_here:
        kwargs.setdefault(f"{modality}s_kwargs", {})["do_resize"] = False
    for modality in {ref.modality for ref in budgeted_refs} - {"audio", *resized_here}:
        max_pixels = max(ref.options.get("max_pixels", math.inf) for ref in budgeted_refs if ref.modality == modality)
        arguments = size_arguments(getattr(processor, f"{modality}_processor", None), max_pixels)
        if arguments:
            kwargs.setdefault(f"{modality}s_kwargs", {}).update(arguments)
    return decoded, kwargs


def check_hears_videos(processor: Processor) -> None:
    """Raises a `ValueError` if a processor doesn't support `use_audio_in_video`."""
    if not family_of_processor(processor).hears_videos:
        raise ValueError(
            f"{type(processor).__name__} can't take the sound of videos with their frames; set "
            "`use_audio_in_video=False`, or use Qwen2.5-Omni or Qwen3-Omni."
        )


def _common_rate(videos: list[MediaRef], metadata: list[dict[str, Any]]) -> float | None:
    """
    Returns the frame rate of a prompt's videos, the highest if rates differ slightly, or `None` if no rate is known.
    Raises a [`MediaError`] if rates differ by more than `_RATE_FACTOR`.
    """
    rates = {}  # references to videos by their number of sampled frames per second
    for ref, video_metadata in zip(videos, metadata, strict=True):
        if not holds_frames(ref) or ref.options.keys() & {"fps", "sample_fps"}:
            rates[
                video_metadata["fps"] * len(video_metadata["frames_indices"]) / video_metadata["total_num_frames"]
            ] = ref
    if rates and max(rates) > _RATE_FACTOR * min(rates):
        raise rates[max(rates)].error(
            f"{max(rates):.3g} frames of it are sampled per second, and {min(rates):.3g} of another video in the "
            "prompt, but the processor takes one rate; set the same 'fps' in both blocks, or shorten the longer video"
        )
    return max(rates, default=None)


def _decode(
    ref: MediaRef, processor: Processor, audio_overlong: Literal["raise", "truncate"], resized_here: set[str]
) -> tuple[Any, dict[str, Any] | None]:
    """Returns the metadata of a video, too. A medium is resized if its modality is in `resized_here`."""
    if ref.modality == "audio":
        return load_audio(ref, *_audio_limits(ref, processor), audio_overlong), None
    if ref.modality == "image":
        if isinstance(processor, ProcessorMixin) and not hasattr(processor, "image_processor"):
            raise ref.error(f"{type(processor).__name__} takes no images; use a model that does, or drop the column")
        if "image" not in resized_here:
            return budgeted_image(
                load_image(ref), ref.options, size_factor(getattr(processor, "image_processor", None))
            ), None
        options = {**_pixel_limits(processor.image_processor.size, ref.options), **ref.options}
        _check_fits_a_token(ref, processor.image_processor)
        vision = require_module("qwen_vl_utils.vision_process", "image")
        with decoding(ref):
            image = {**options, "image": load_image(ref)}
            return vision.fetch_image(image, processor.image_processor.patch_size), None
    try:
        return _decode_video(ref, processor, is_resized="video" in resized_here)
    except MediaError as error:
        if error.__cause__ is not None:  # an error of a library
            check_has_frames(ref, processor)
        raise


def check_has_frames(ref: MediaRef, processor: Processor) -> None:
    """Raises a [`MediaError`] if a video, or its span, has fewer frames than a token of the model stands for."""
    n_needed = getattr(processor.video_processor, "temporal_patch_size", None) or 1
    span = {name: value for name, value in ref.options.items() if name in ("video_start", "video_end")}
    n_selected = ref.options.get("nframes", n_needed)
    if n_selected < n_needed:
        raise ref.error(f"'nframes' of {n_selected} is less than the {n_needed} frames of a token; raise it")
    if holds_frames(ref):
        count = len(encoded_source(ref))
    else:
        with decoding(ref), open_video(ref) as (metadata, _):
            count = len(sample_indices(replace(ref, options=span), metadata))
    if count < n_needed:
        remedy = "give a longer span, or an image" if span else "give an image"
        raise ref.error(
            f"the {'span' if span else 'video'} has {count} frame{'s' * (count != 1)}, and {type(processor).__name__} "
            f"needs {n_needed}; {remedy}"
        )


def _decode_video(ref: MediaRef, processor: Processor, is_resized: bool) -> tuple[Any, dict[str, Any]]:
    if is_resized:
        return _qwen_video(ref, processor)
    sampler = _frame_sampler(ref, processor)
    max_frames = ref.options.get("max_frames")
    if max_frames is not None and not holds_frames(ref):
        sampler = partial(thinned_frames, sampler or partial(sample_indices, ref), max_frames)
    factor = size_factor(processor.video_processor)
    return load_video(ref, sampler, lambda frames, count: budgeted_frames(frames, ref.options, factor))


def _qwen_video(ref: MediaRef, processor: Processor) -> tuple[torch.Tensor, dict[str, Any]]:
    """Options of the block replace the processor's sampling and resizing."""
    video_processor = processor.video_processor
    options = ref.options
    _check_fits_a_token(ref, video_processor)
    # Default arguments of the processor's call. Before transformers 5.23, only a class of these arguments holds them.
    defaults = getattr(processor, "videos_kwargs", None)
    if defaults is None:
        defaults = getattr(processor.valid_processor_kwargs, "_defaults", {}).get("videos_kwargs", {})
    size = defaults.get("size", video_processor.size)
    sampler = _frame_sampler(ref, processor)
    if sampler is None:
        names = _QWEN_LIMITS if "nframes" in options else {"fps", *_QWEN_LIMITS}
        limits = {name: getattr(video_processor, name, None) for name in names}
        frame_limits = {name: value for name, value in limits.items() if value is not None}
        sampler = partial(qwen_frame_indices, {**frame_limits, **options})

    def resize(frames: np.ndarray, count: int) -> np.ndarray:
        if not options.keys() & _SIZE_OPTIONS:
            return _resized_frames(video_processor, size, frames, count)
        limits = _pixel_limits(size, options, count if family_of_processor(processor).bounds_whole_videos else 1)
        return qwen_resized({**limits, **options}, video_processor.patch_size, frames, count)

    frames, metadata = load_video(ref, sampler, resize)
    return torch.from_numpy(frames).permute(0, 3, 1, 2), {**metadata, "fps": metadata["fps"] or _QWEN_FPS}


def _resized_frames(
    video_processor: "Qwen2VLVideoProcessor", limits: SizeDict | dict[str, int], frames: np.ndarray, count: int
) -> np.ndarray:
    """Resizes frames `(N, H, W, 3)` of a video to the size that the processor would choose for all `count` frames."""
    if not video_processor.do_resize:
        return frames
    # On the meta device, resizing computes nothing but the size
    whole_video = video_processor.resize(
        videos=torch.empty(1, count, 3, *frames.shape[1:3], dtype=torch.uint8, device="meta"),
        size=SizeDict(**limits) if isinstance(limits, dict) else limits,
        resample=video_processor.resample,
        factor=video_processor.patch_size * video_processor.merge_size,
        temporal_factor=video_processor.temporal_patch_size,
        cap_pixels_per_frame=getattr(video_processor, "cap_pixels_per_frame", None),
    )
    from transformers.video_processing_utils import BaseVideoProcessor  # needs torchvision

    size = SizeDict(height=whole_video.size(-2), width=whole_video.size(-1))
    tensor = torch.from_numpy(frames).permute(0, 3, 1, 2)
    resized = BaseVideoProcessor.resize(video_processor, tensor, size, video_processor.resample)
    return resized.permute(0, 2, 3, 1).numpy()


def _check_fits_a_token(ref: MediaRef, processor: "Qwen2VLImageProcessor | Qwen2VLVideoProcessor") -> None:
    side = processor.patch_size * processor.merge_size
    max_pixels = ref.options.get("max_pixels")
    if max_pixels is not None and max_pixels < side**2:
        raise ref.error(f"`max_pixels` of {max_pixels} is less than the {side} x {side} pixels of a token; raise it")
    if ref.options.get("max_frames") == 1:
        raise ref.error("`max_frames` of 1 is less than the two frames of a token; raise it")


def _pixel_limits(size: SizeDict | dict[str, int], options: dict[str, Any], count: int = 1) -> dict[str, float]:
    """
    Returns the pixel limits of an image, or of one frame if `size` limits all `count` frames of a video together. In
    Qwen's processors, `shortest_edge` and `longest_edge` of `size` are numbers of pixels, not edges. The option
    `max_pixels` also lowers the minimum, and `min_pixels` also raises the maximum.
    """
    return {
        "min_pixels": min(size["shortest_edge"] / count, options.get("max_pixels", math.inf)),
        "max_pixels": max(size["longest_edge"] / count, options.get("min_pixels", 0)),
    }


def _audio_limits(ref: MediaRef, processor: Processor) -> tuple[int, float | None]:
    """Returns the sampling rate in Hz, and the maximum duration in seconds."""
    rate = audio_rate(processor)
    if rate is None:
        raise ref.error(f"{type(processor).__name__} takes no audio; use a model that does, or drop the column")
    limit_function = family_of_processor(processor).audio_limit
    return rate, None if limit_function is None else limit_function(processor)


def _frame_sampler(ref: MediaRef, processor: Processor) -> Callable[..., Sequence[int]] | None:
    """Returns the processor's sampling of frames, or `None` if all frames or the block's options are used."""
    if not hasattr(processor, "video_processor"):
        raise ref.error(f"{type(processor).__name__} takes no video; use a model that does, or drop the column")
    frame_options = (
        _FRAME_OPTIONS if family_of_processor(processor).has_qwen_vl_utils else _FRAME_OPTIONS - _QWEN_LIMITS
    )
    sampling = None if frame_options & ref.options.keys() else frame_sampling(processor)
    if sampling is None:
        return None
    video_processor = processor.video_processor
    names = video_processor.valid_kwargs.__annotations__.keys() - _NOT_FOR_SAMPLING
    # As in the processor's call, since `sample_frames` may not look up the processor's settings itself
    settings = {name: getattr(video_processor, name, None) for name in names}
    return partial(video_processor.sample_frames, **{**settings, **sampling})


def frame_sampling(processor: Processor) -> dict[str, Any] | None:
    """Returns arguments by which a processor samples the frames of a video file, or `None` if it uses all frames."""
    video_processor = processor.video_processor
    family = family_of_processor(processor)
    has_rate = any(getattr(video_processor, name, None) is not None for name in ("fps", "num_frames"))
    if video_processor.do_sample_frames or (has_rate and (family.samples_frames or family.has_qwen_vl_utils)):
        return {}
    return {"fps": _QWEN_FPS} if family.has_qwen_vl_utils else None


def replace_refs(messages: list[dict], decoded: dict[int, Any]) -> list[dict]:
    """Returns messages with decoded media in place of their references."""

    def with_decoded(block: dict[str, Any]) -> dict[str, Any]:
        modality = block["type"]
        value = block.get(block["type"])
        if not isinstance(value, MediaRef):
            return block
        medium = decoded[id(value)]
        if isinstance(medium, Path):
            return {"type": modality, "path": str(medium)}
        return {"type": modality, "base64" if isinstance(medium, str) else modality: medium}

    return [
        {**message, "content": list(map(with_decoded, message["content"]))}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]


def join_tensors(media: Iterable[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """
    Joins tensors of media by name, on the first dimension, or on the last if all patches are in one row; others are
    right-padded. Indices into another tensor move by its length in earlier media. Negative ones are padding.
    """
    tensors_by_name: dict[str, list[torch.Tensor]] = {}
    lengths: Counter[str] = Counter()  # product of all dimensions except the last, summed over earlier media, by name
    for tensors in media:
        for name, value in tensors.items():
            indexed = indexed_media(name)  # name of the tensor that `value` has indices into, if any
            if indexed is not None:
                value = torch.where(value < 0, value, value + lengths[indexed])
            tensors_by_name.setdefault(name, []).append(value)
        lengths.update({name: value.shape[:-1].numel() for name, value in tensors.items()})
    # Names of tensors with all patches in one row
    row_names = {PATCH_ROWS[name] for name in tensors_by_name if name in PATCH_ROWS}
    return {
        name: cat_padded(values, media_padding(name), dim=-1 if name in row_names else 0)
        for name, values in tensors_by_name.items()
    }


def cat_padded(tensors: list[torch.Tensor], value: int, dim: int = 0) -> torch.Tensor:
    """Concatenates tensors on dimension `dim`, and right-pads the other dimensions to the largest size."""
    largest = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        pad_sizes = [max_size - size for max_size, size in zip(largest, tensor.shape, strict=True)]
        pad_sizes[dim] = 0
        # `F.pad` begins with the last dimension
        pairs = list(itertools.chain.from_iterable((0, n_right) for n_right in reversed(pad_sizes)))
        padded.append(F.pad(tensor, pairs, value=value) if any(pad_sizes) else tensor)
    return torch.cat(padded, dim)
