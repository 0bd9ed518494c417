# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Choice and sizes of frames as in qwen-vl-utils."""

from typing import Any

import numpy as np
import torch
from transformers.video_utils import VideoMetadata

from .decoding import require_module
from .rates import timed_span


def qwen_frame_indices(options: dict[str, Any], metadata: VideoMetadata) -> list[int]:
    """
    Returns the frame indices that qwen-vl-utils samples from the span that `options` select. Sets
    `metadata.total_num_frames` to the number of frames in the span.
    """
    vision = require_module("qwen_vl_utils.vision_process", "video")
    span = timed_span(options, metadata)
    first, last = span or vision.calculate_video_frame_range(options, metadata.total_num_frames, metadata.fps)[:2]
    metadata.total_num_frames = total = last - first + 1
    return torch.linspace(first, last, vision.smart_nframes(options, total, metadata.fps)).round().long().tolist()


def qwen_frame_size(
    options: dict[str, Any], image_patch_size: int, count: int, height: int, width: int
) -> tuple[int, int]:
    """Returns the height and width to which qwen-vl-utils resizes a video of `count` frames, `height` x `width`."""
    vision = require_module("qwen_vl_utils.vision_process", "video")
    factor = image_patch_size * vision.SPATIAL_MERGE_SIZE
    if "resized_height" in options and "resized_width" in options:
        return vision.smart_resize(options["resized_height"], options["resized_width"], factor)
    # The same formulas as in `qwen_vl_utils.fetch_video`, 0.9 and 1.05 included
    min_pixels = options.get("min_pixels", vision.VIDEO_MIN_TOKEN_NUM * factor**2)
    total_pixels = options.get("total_pixels", vision.MODEL_SEQ_LEN * factor**2 * 0.9)
    pixels_per_frame = total_pixels / count * vision.FRAME_FACTOR
    ceiling = max(min(vision.VIDEO_MAX_TOKEN_NUM * factor**2, pixels_per_frame), int(min_pixels * 1.05))
    return vision.smart_resize(height, width, factor, min_pixels, min(options.get("max_pixels", ceiling), ceiling))


def qwen_resized(options: dict[str, Any], image_patch_size: int, frames: np.ndarray, count: int) -> np.ndarray:
    """
    Resizes a chunk of frames `(N, H, W, 3)` of a video with `count` selected frames as `qwen_vl_utils.fetch_video`
    does, which can't read bytes, needs torchcodec, misses frames of many formats, and resizes lists of frames twice.
    """
    vision = require_module("qwen_vl_utils.vision_process", "video")
    size = list(qwen_frame_size(options, image_patch_size, count, *frames.shape[1:3]))
    tensor = torch.from_numpy(frames).permute(0, 3, 1, 2)
    tensor = vision.transforms.functional.resize(tensor, size, vision.InterpolationMode.BICUBIC, antialias=True)
    return tensor.permute(0, 2, 3, 1).numpy()
