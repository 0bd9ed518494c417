# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From media references to decoded images, waveforms and frames."""

import importlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any, BinaryIO, Literal

import numpy as np
import PIL.Image
import torch
from PIL import ImageOps
from transformers import image_utils
from transformers.utils import is_torchcodec_usable
from transformers.video_utils import VideoMetadata, default_sample_indices_fn, read_video_pyav

from .columns import Encoded, MediaError, MediaRef
from .sources import check_container, fetch_file, open_file


# What is opened as an image: no documents, which other programs would have to draw
_IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")

# Floats beyond this were never scaled to -1 to 1
_LOUDEST = 16.0

# Sampling rates of sounds, in Hz
_RATES = 1000, 1_000_000

# What is shorter holds not one window of a spectrogram, in seconds
_SHORTEST = 0.025

# Channels whose average keeps less of their amplitude than this cancel each other out
_CANCELLED = 1e-3


def load_image(ref: MediaRef) -> PIL.Image.Image:
    """
    Decodes an image, turned as its EXIF orientation says.

    What is transparent becomes white, as in qwen-vl-utils; palettes, grey and CMYK are converted, as
    `transformers.image_utils.load_image` does.

    Args:
        ref ([`MediaRef`]):
            Its source is a PIL image; an array, tensor or nested list of shape (H, W), (H, W, C) or (C, H, W) with C
            in 1, 3, 4 (integers in 0 to 255 or floats in 0 to 1); a path; a `file://`, `http(s)://` or other fsspec
            URL; a base64 `data:` URI; the encoded bytes; or a dictionary with `"bytes"`, `"path"` or `"url"`.

    Returns:
        `PIL.Image.Image`: RGB image.

    Raises:
        MediaError: If the image is missing, unreadable or empty, or its pixel values have no known scale.
    """
    with decoding(ref):
        image = encoded_source(ref)
        if isinstance(image, (np.ndarray, torch.Tensor, list)):
            image = PIL.Image.fromarray(_pixels(ref, image))
        elif not isinstance(image, PIL.Image.Image):
            image = _open_image(open_file(fetch_file(ref, image)))
        if 0 in image.size:
            raise ref.error("the image is empty; remove the row")
        _check_pixels(ref, image.size)
        if image.mode[0] in "IF":
            raise ref.error(f"pixels of mode '{image.mode}' have no known scale; convert the image to 8 bits")
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            image = ImageOps.exif_transpose(image).convert("RGBA")
            ground = PIL.Image.new("RGBA", image.size, "white")
            image = PIL.Image.alpha_composite(ground, image)
        return image_utils.load_image(image)


def load_audio(
    ref: MediaRef,
    sampling_rate: int,
    max_seconds: float | None = None,
    overlong: Literal["raise", "truncate"] = "raise",
) -> np.ndarray:
    """
    Decodes a sound, averages its channels and resamples it.

    Files are read with soundfile and, where it does not know the format, with torchcodec if that is usable.

    Args:
        ref ([`MediaRef`]):
            Its source is a dictionary with `"array"` and `"sampling_rate"`; an `(array, sampling_rate)` tuple; a bare
            array or list, if the option `sampling_rate` is set; a torchcodec `AudioDecoder`; or a path, URL, bytes or
            dictionary as in [`load_image`]. Integer samples of 8, 16 or 32 bits are scaled to -1 to 1. The shorter
            axis of a two-dimensional array is its channels.
        sampling_rate (`int`):
            Sampling rate of the result, in Hz.
        max_seconds (`float`, *optional*):
            Longest sound to accept, in seconds.
        overlong (`str`, *optional*, defaults to `"raise"`):
            What to do with a longer one: `"raise"`, or `"truncate"` to keep its first `max_seconds`.

    Returns:
        `np.ndarray`: Waveform of shape (N,), float32.

    Raises:
        MediaError: If the sound is missing, unreadable, empty, overlong or not finite, or its rate unknown or invalid.
        ImportError: If soundfile or soxr is needed and not installed.
    """
    with decoding(ref):
        samples, rate = read_audio(ref)
        if rate is None:
            raise ref.error("array without a rate; give {'array': ..., 'sampling_rate': ...} or a file")
        rate = float(rate)
        if not _RATES[0] <= rate <= _RATES[1]:
            raise ref.error(f"the sampling rate is {rate:g}; set it to the true rate in Hz, such as 16000")
        if samples.size == 0:
            raise ref.error("the audio is empty; remove the row")
        samples = _one_channel(ref, samples)
        if len(samples) < _SHORTEST * rate:
            raise ref.error(f"{len(samples)} samples are too short to hear anything; remove the row")
        if not np.isfinite(samples).all():
            raise ref.error("the audio has NaN or infinite samples; repair it or remove the row")
        if (loudest := np.abs(samples).max()) > _LOUDEST:
            raise ref.error(f"float samples up to {loudest:g}; scale them to -1 to 1, or give 16-bit integers")
        if max_seconds is not None and len(samples) > max_seconds * rate:
            if overlong != "truncate":
                raise ref.error(
                    f"{len(samples) / rate:.2f} s of audio where {max_seconds:g} s are allowed; cut the clip, raise "
                    "the limit, or let overlong audio be truncated"
                )
            samples = samples[: int(max_seconds * rate)]
        if rate != sampling_rate:
            samples = require_module("soxr", "audio").resample(samples, rate, sampling_rate)
        return np.ascontiguousarray(samples, dtype=np.float32)


def load_video(
    ref: MediaRef, sample_indices_fn: Callable[..., Sequence[int]] | None = None
) -> tuple[np.ndarray, dict[str, Any]]:
    """
    Decodes the frames of a video, with torchcodec if that is usable, else with PyAV.

    Args:
        ref ([`MediaRef`]):
            Its source is a path, URL, bytes or dictionary as in [`load_image`]; a torchcodec `VideoDecoder`; or
            frames: a list of what [`load_image`] takes, or an array or tensor of shape (T, H, W, C) or (T, C, H, W).
            Of a video, the options `video_start` and `video_end` (seconds) select a span, and `fps` or `nframes` how
            many of its frames are decoded (default: all). Frames are returned whole; their option `sample_fps` or
            `fps` tells at what rate they were taken.
        sample_indices_fn (`Callable`, *optional*):
            Replaces these options: a function of `metadata` (`VideoMetadata` of the video) that returns the increasing
            indices of the frames to decode, such as `processor.video_processor.sample_frames`.

    Returns:
        `tuple[np.ndarray, dict]`: Frames of shape (T, H, W, 3), uint8, and metadata to be passed to the processor as
        `video_metadata`: `total_num_frames` of the selected span, `fps` of the whole video, `duration` (seconds; this
        and `fps` are `None` if not known), `frames_indices` of the returned frames. A processor can sample further
        (`do_sample_frames=True`) only if all frames were decoded.

    Raises:
        MediaError: If the video is missing, unreadable, has no frames, or frames of different sizes.
        ImportError: If neither torchcodec nor PyAV is usable.
    """
    with decoding(ref):
        source = encoded_source(ref)
        if isinstance(source, (np.ndarray, torch.Tensor, list)):
            images = [
                replace(ref, kind="image", source=frame, options={}, column=f"{ref.column}[{i}]")
                for i, frame in enumerate(source)
            ]
            frames = [np.asarray(load_image(image)) for image in images]
            if len({frame.shape for frame in frames}) > 1:
                raise ref.error("the frames have different sizes; resize them to one size")
            fps = ref.options.get("sample_fps", ref.options.get("fps"))
            if fps is not None and not fps > 0:
                raise ref.error(f"'fps' is {fps}; set the frames per second, or leave it out")
            metadata = VideoMetadata(len(frames), fps, duration=len(frames) / fps if fps else None)
            metadata.frames_indices = list(range(len(frames)))
        else:
            frames, metadata = _decode_frames(ref, source, sample_indices_fn or partial(_sample_indices, ref))
        chosen = metadata.frames_indices
        indices = [] if chosen is None else [int(index) for index in chosen]
        if len(frames) == 0 or len(frames) != len(indices):
            raise ref.error(f"the video has {len(frames)} of {len(indices)} frames; repair it or remove the row")
        known = {key: metadata[key] for key in ("total_num_frames", "fps", "duration")}
        return np.asarray(frames), {**known, "frames_indices": indices}


def load_with_qwen_vl_utils(
    ref: MediaRef, image_patch_size: int
) -> PIL.Image.Image | tuple[torch.Tensor, dict[str, Any]]:
    """
    Decodes an image or a video, sampled and resized as qwen-vl-utils does.

    Honours the options of [qwen-vl-utils](https://github.com/QwenLM/Qwen3-VL/tree/main/qwen-vl-utils): `min_pixels`,
    `max_pixels`, `total_pixels`, `resized_height`, `resized_width`, `fps`, `nframes`, `min_frames`, `max_frames`,
    `video_start`, `video_end`, `sample_fps`. The processor must neither resize nor sample a second time, and needs the
    metadata, from which it computes the timestamps (Qwen3-VL) or the seconds per grid step (Qwen2.5-VL):

    ```python
    processor(
        text=text, images=images, videos=videos, video_metadata=metadata, do_resize=False, do_sample_frames=False
    )
    ```

    A video file gives exactly what `qwen_vl_utils.fetch_video` gives, which however reads no bytes, needs torchcodec,
    and resizes lists of frames twice, first to multiples of twice the patch.

    Args:
        ref ([`MediaRef`]):
            An image or a video, with a source as in [`load_image`] or [`load_video`].
        image_patch_size (`int`):
            `patch_size` of the model's image processor: 14 for Qwen2-VL and Qwen2.5-VL, 16 for Qwen3-VL.

    Returns:
        `PIL.Image.Image`, or `tuple[torch.Tensor, dict]`: The image; or the frames of shape (T, 3, H, W), uint8, and
        their metadata as [`load_video`] returns it, with `fps` 2 for frames of unknown rate.

    Raises:
        MediaError: As [`load_image`] and [`load_video`], and if the options contradict each other or the medium.
        ImportError: If qwen-vl-utils is not installed.
    """
    vision = require_module("qwen_vl_utils.vision_process", "video")
    options = ref.options

    def sample_indices(metadata: VideoMetadata) -> list[int]:
        first, last, total = vision.calculate_video_frame_range(options, metadata.total_num_frames, metadata.fps)
        metadata.total_num_frames = total
        return torch.linspace(first, last, vision.smart_nframes(options, total, metadata.fps)).round().long().tolist()

    with decoding(ref):
        if ref.kind == "image":
            return vision.fetch_image({**options, "image": load_image(ref)}, image_patch_size)
        frames, metadata = load_video(ref, sample_indices)
        metadata["fps"] = metadata["fps"] or vision.FPS
        factor = image_patch_size * vision.SPATIAL_MERGE_SIZE
        min_pixels = options.get("min_pixels", vision.VIDEO_MIN_TOKEN_NUM * factor**2)
        total_pixels = options.get("total_pixels", vision.MODEL_SEQ_LEN * factor**2 * 0.9)
        share = total_pixels / len(frames) * vision.FRAME_FACTOR
        ceiling = max(min(vision.VIDEO_MAX_TOKEN_NUM * factor**2, share), int(min_pixels * 1.05))
        if "resized_height" in options and "resized_width" in options:
            size = vision.smart_resize(options["resized_height"], options["resized_width"], factor)
        else:
            max_pixels = min(options.get("max_pixels", ceiling), ceiling)
            size = vision.smart_resize(*frames.shape[1:3], factor, min_pixels, max_pixels)
        frames = torch.from_numpy(frames).permute(0, 3, 1, 2)
        resize = vision.transforms.functional.resize
        return resize(frames, list(size), vision.InterpolationMode.BICUBIC, antialias=True), metadata


def _open_image(stream: BinaryIO) -> PIL.Image.Image:
    PIL.Image.init()  # formats can be named only once they are known
    return PIL.Image.open(stream, formats=_IMAGE_FORMATS)


def check_file(ref: MediaRef, stream: BinaryIO) -> None:
    """
    Refuses a file that isn't safe to open by others, without decoding it: documents, lists of other files, images of
    too many pixels.

    Args:
        ref ([`MediaRef`]):
            The medium.
        stream (`BinaryIO`):
            Its file, at the start.

    Raises:
        MediaError: If it isn't.
    """
    if ref.kind == "image":
        _check_pixels(ref, _open_image(stream).size)
    else:
        check_container(ref, stream)


@contextmanager
def decoding(ref: MediaRef) -> Iterator[None]:
    """
    Turns whatever a decoder raises within the context into an error that names the row and the column.

    Args:
        ref ([`MediaRef`]):
            The medium that is decoded.

    Raises:
        MediaError: Of errors of any type, as decoders raise on corrupt data, but a library that is missing.
    """
    try:
        yield
    except (MediaError, ImportError):
        raise
    except Exception as error:
        source = ref.source.value if isinstance(ref.source, Encoded) else ref.source
        if isinstance(source, dict) and source.get("bytes") is None:
            source = source.get("path") or source.get("url")
        name = f" '{str(source)[:200]}'" if isinstance(source, (str, os.PathLike)) else ""
        raise ref.error(
            f"cannot read this {ref.kind}{name} ({type(error).__name__}: {str(error)[:500]}); repair it or remove "
            "the row"
        ) from error


def require_module(module: str, extra: str) -> ModuleType:
    """
    Imports a module of an optional dependency.

    Args:
        module (`str`):
            Name of the module.
        extra (`str`):
            Extra of this package that installs it.

    Returns:
        `ModuleType`: The module.

    Raises:
        ImportError: If it can't be imported. The message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f"{package} is missing or broken: `pip install trl-multimodal-rft[{extra}]`") from error


def encoded_source(ref: MediaRef) -> Any:
    """
    Where an encoded medium is.

    Args:
        ref ([`MediaRef`]):
            The medium.

    Returns:
        `Any`: Its source, or the part of a dictionary that holds it: bytes, a path or a URL.

    Raises:
        MediaError: If a dictionary has none of them.
    """
    source = ref.source.value if isinstance(ref.source, Encoded) else ref.source
    if not isinstance(source, dict):
        return source
    for key in ("bytes", "path", "url"):
        if source.get(key) is not None:
            return source[key]
    raise ref.error(f"a dictionary of {sorted(source)}; give 'bytes', 'path' or 'url'")


def _as_numpy(values: np.ndarray | torch.Tensor | list) -> np.ndarray:
    if isinstance(values, torch.Tensor):  # Accelerate moves the tensors of a row to its device
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def _pixels(ref: MediaRef, image: np.ndarray | torch.Tensor | list) -> np.ndarray:
    """Pixels of shape (H, W) or (H, W, C), uint8."""
    array, channels = _as_numpy(image), (1, 3, 4)
    # where the shape allows both orders, tensors have their channels first and arrays last
    ambiguous = array.ndim == 3 and array.shape[2] in channels and not isinstance(image, torch.Tensor)
    if array.ndim == 3 and array.shape[0] in channels and not ambiguous:
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in channels)):
        raise ref.error(f"an image of shape {array.shape}; give (H, W, C) or (C, H, W) with 1, 3 or 4 channels")
    if array.size == 0:
        raise ref.error("the image is empty; remove the row")
    top = 1 if array.dtype.kind == "f" else 255
    if array.dtype.kind not in "iuf" or not (array.min() >= 0 and array.max() <= top):
        raise ref.error(f"{array.dtype} pixels from {array.min()} to {array.max()}; scale them to 0 to {top}")
    return (array * 255).round().astype(np.uint8) if top == 1 else array.astype(np.uint8)


def read_audio(ref: MediaRef) -> tuple[np.ndarray, float | None]:
    """
    Decodes a sound as it is, without resampling.

    Args:
        ref ([`MediaRef`]):
            The sound, see [`load_audio`].

    Returns:
        `tuple`: Samples of shape `(N,)`, or `(C, N)` or `(N, C)` where they are given so, float32, and their rate in
        Hz, `None` if unknown.

    Raises:
        MediaError: If the format is unknown, or there is no such file.
    """
    source = ref.source
    if hasattr(source, "get_all_samples"):
        decoded = source.get_all_samples()
        return _one_channel(ref, decoded.data.cpu().numpy()), decoded.sample_rate
    if isinstance(source, dict) and source.get("array") is not None:
        return _scaled(ref, source["array"]), source.get("sampling_rate", ref.options.get("sampling_rate"))
    if isinstance(source, tuple):
        array, rate = source
        return _scaled(ref, array), rate
    if isinstance(source, (np.ndarray, torch.Tensor, list)):
        return _scaled(ref, source), ref.options.get("sampling_rate")
    soundfile = require_module("soundfile", "audio")
    with open_file(fetch_file(ref, encoded_source(ref))) as stream:
        _check_length(ref, stream)
        try:
            with soundfile.SoundFile(stream) as sound:
                _check_seconds(ref, sound.frames / sound.samplerate, "max_audio_seconds")
                return _one_channel(ref, sound.read(dtype="float32", always_2d=True)), sound.samplerate
        except soundfile.LibsndfileError as error:
            if not is_torchcodec_usable(decode="audio"):
                raise ref.error(f"{error}; convert it to WAV, FLAC, OGG or MP3, or install torchcodec") from error
        stream.seek(0)
        check_container(ref, stream)
        decoder = importlib.import_module("torchcodec.decoders").AudioDecoder(stream)
        _check_seconds(ref, decoder.metadata.duration_seconds or 0, "max_audio_seconds")
        decoded = decoder.get_all_samples()
        return _one_channel(ref, decoded.data.numpy()), decoded.sample_rate


def _check_length(ref: MediaRef, stream: BinaryIO) -> None:
    """A WAV file that was cut off says how long it was, which its reader passes over."""
    head = stream.read(12)
    if head[:4] == b"RIFF" and head[8:] == b"WAVE":
        end = stream.seek(0, 2)
        stream.seek(12)
        while len(chunk := stream.read(8)) == 8:
            size = int.from_bytes(chunk[4:], "little")
            if chunk[:4] == b"data":
                # What is written while it is recorded says 0 or the largest number
                if size < 2**32 - 2**16 and stream.tell() + size > end:
                    raise ref.error(
                        f"the file is cut off: {end - stream.tell()} of {size} bytes of samples; fetch it again or "
                        "remove the row"
                    )
                break
            stream.seek(size + size % 2, 1)
    stream.seek(0)


def _check_seconds(ref: MediaRef, seconds: float, option: str) -> None:
    limit = getattr(ref.rules, option)
    if seconds > limit:
        raise ref.error(f"{seconds:.0f} s where {limit:g} s are allowed; cut it, or raise `{option}`")


def _check_pixels(ref: MediaRef, size: tuple[int, int]) -> None:
    if size[0] * size[1] > ref.rules.max_image_pixels:
        raise ref.error(
            f"{size[0]} x {size[1]} pixels where {ref.rules.max_image_pixels:,} are allowed; make it smaller, or "
            "raise `max_image_pixels`"
        )


def _one_channel(ref: MediaRef, samples: np.ndarray) -> np.ndarray:
    """The average of channels."""
    if samples.ndim == 1 or samples.size == 0:
        return samples.reshape(-1)
    averaged = samples.mean(axis=np.argmin(samples.shape))
    if 0 < np.abs(samples).max() < np.inf and np.abs(averaged).max() < _CANCELLED * np.abs(samples).max():
        raise ref.error("its channels cancel each other out; give one of them")
    return averaged


def _scaled(ref: MediaRef, samples: np.ndarray | torch.Tensor | list) -> np.ndarray:
    samples = _as_numpy(samples)
    if samples.ndim in (1, 2):
        if samples.dtype.kind == "f":
            return samples.astype(np.float32)
        if samples.dtype.kind in "iu" and samples.itemsize <= 4:
            full = 2.0 ** (8 * samples.itemsize - 1)
            return (samples / full - (samples.dtype.kind == "u")).astype(np.float32)
    raise ref.error(
        f"{samples.dtype} samples of shape {samples.shape}; give floats in -1 to 1, or integers of 8, 16 or 32 bits, "
        "of shape (samples,) or (channels, samples)"
    )


def _sample_indices(ref: MediaRef, metadata: VideoMetadata) -> np.ndarray:
    start, end = ref.options.get("video_start", 0), ref.options.get("video_end", math.inf)
    count, fps = ref.options.get("nframes"), ref.options.get("fps")
    if count is not None and fps is not None:
        raise ref.error("has both 'fps' and 'nframes'; set one of them")
    first = math.ceil(start * metadata.fps)
    last = math.floor(min(end * metadata.fps, metadata.total_num_frames - 1))
    if first > last:
        raise ref.error(
            f"no frames from {start} s to {end} s of {metadata.total_num_frames} at {metadata.fps} per second; "
            "correct 'video_start' and 'video_end', or encode the video as MP4, which tells its number of frames"
        )
    metadata.total_num_frames = last - first + 1
    return first + default_sample_indices_fn(metadata, count, fps)


def _decode_frames(ref: MediaRef, source: Any, sample_indices_fn: Callable) -> tuple[np.ndarray, VideoMetadata]:
    def indices(metadata: VideoMetadata) -> Sequence[int]:
        fps = metadata.fps or 0.0
        if not fps > 0:
            raise ref.error("the video doesn't say how fast it is; encode it anew, as MP4")
        _check_seconds(ref, metadata.total_num_frames / fps, "max_video_seconds")
        _check_pixels(ref, (metadata.width or 0, metadata.height or 0))
        return sample_indices_fn(metadata=metadata)

    if hasattr(source, "get_frames_at"):
        return _torchcodec_frames(ref, source, indices)
    with open_file(fetch_file(ref, source)) as stream:
        check_container(ref, stream)
        if is_torchcodec_usable(decode="video"):
            decoder = importlib.import_module("torchcodec.decoders").VideoDecoder(stream, num_ffmpeg_threads=0)
            return _torchcodec_frames(ref, decoder, indices)
        require_module("av", "video")
        return read_video_pyav(stream, indices)  # pyrefly: ignore[bad-argument-type]


def _torchcodec_frames(ref, decoder, indices: Callable) -> tuple[np.ndarray, VideoMetadata]:
    header = decoder.metadata
    metadata = VideoMetadata(
        header.num_frames, header.average_fps, header.width, header.height, header.duration_seconds
    )
    metadata.frames_indices = [int(index) for index in indices(metadata=metadata)]
    frames = decoder.get_frames_at(metadata.frames_indices).data.cpu().numpy()
    return frames if frames.shape[-1] == 3 else frames.transpose(0, 2, 3, 1), metadata
