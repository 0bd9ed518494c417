# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Decoding of media references to images, waveforms and frames."""

import importlib
import itertools
import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import numpy as np
import PIL.Image
import torch
from PIL import ImageOps
from transformers import image_utils
from transformers.video_utils import VideoMetadata, default_sample_indices_fn

from ...versions import is_torchcodec_usable
from .containers import best_stream, check_complete, check_container, has_idr_picture, is_indexed
from .decoders import decoder_samples
from .images import check_exif, check_pil_image, check_pixels, load_pixels, open_image
from .rates import TimedMetadata, proven_metadata, timed_span, times_in_frames, with_times
from .refs import MediaError, MediaRef
from .sources import encoded_source, fetch_file, open_file


if TYPE_CHECKING:
    from av import VideoFrame
    from torchcodec.decoders import VideoDecoder

_LOUDEST_FLOAT = 16.0  # larger samples weren't scaled to -1 to 1
_LOUDEST_24_BITS = 2**23  # 32-bit integers up to this value hold 16 or 24 bits that weren't scaled to 32 bits
_RATE_RANGE = 1000, 1_000_000  # valid sampling rates in Hz
_SHORTEST_SECONDS = 0.025  # seconds, one window of a spectrogram
_CANCELLATION_RATIO = 1e-3  # channels whose average has a smaller relative amplitude cancel each other out
_HIGHEST_FPS = 1000.0  # frames per second

_PIXELS_AT_ONCE = 2**22  # maximum number of pixels in a chunk of frames; a larger frame is a chunk of its own

# FFmpeg's names of formats whose header states the number of samples. In the formats of `_FORMATS_CHECKED_BY_COUNT`,
# nothing but this number reveals a truncated file.
_FORMATS_CHECKED_BY_COUNT = ("flac", "ape", "tta", "wv")
_FORMATS_WITH_COUNT = (*_FORMATS_CHECKED_BY_COUNT, "wav", "aiff")

# Options that select frames of a file
_FRAME_OPTIONS = {"nframes", "min_frames", "max_frames", "video_start", "video_end"}

# Chunks of samples, of shape (N,) or (N, channels), and their rate in Hz (`None` if unknown)
_AudioChunks = Generator[tuple[np.ndarray, float | None], None, None]
# Function that reads frames of a video by their indices, in chunks of shape (N, H, W, 3)
_FrameReader = Callable[[list[int]], Iterator[np.ndarray]]


def load_image(ref: MediaRef) -> PIL.Image.Image:
    """
    Decodes an image and applies its EXIF orientation.

    Transparent pixels become white, as in qwen-vl-utils. Images with palettes, grey images and CMYK images become RGB,
    as in `transformers.image_utils.load_image`.

    Args:
        ref ([`MediaRef`]):
            Its source is a PIL image; an array, tensor or nested list of shape (H, W), (H, W, C) or (C, H, W) with 1,
            3 or 4 channels (integers in 0 to 255 or floats in 0 to 1); a path; a `file://`, `http(s)://` or other
            fsspec URL; a base64 `data:` URI; the encoded bytes; or a dictionary with `"bytes"`, `"path"` or `"url"`.

    Returns:
        `PIL.Image.Image`: RGB image.

    Raises:
        MediaError: If the image is missing, unreadable or empty, or its pixel values have no known scale.
    """
    with decoding(ref):
        # the source is pixels, a PIL image, or a file
        image = encoded_source(ref)
        stream = None
        if isinstance(image, (np.ndarray, torch.Tensor, list)):
            image = PIL.Image.fromarray(_pixels(ref, image))
        elif not isinstance(image, PIL.Image.Image):
            stream = open_source(ref)
            image = open_image(ref, stream)
        check_pil_image(ref, image)
        if 0 in image.size:
            raise ref.error("the image is empty; remove the row")
        check_pixels(ref, image.size)
        image = load_pixels(ref, image, stream)
        check_pixels(ref, image.size)  # the header of an icon may be wrong
        check_exif(ref, image)
        if image.mode[0] in "IF":
            raise ref.error(f"pixels of mode '{image.mode}' have no known scale; convert the image to 8 bits")
        if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
            image = ImageOps.exif_transpose(image).convert("RGBA")
            background = PIL.Image.new("RGB", image.size, "white")
            background.paste(image, mask=image.getchannel("A"))
            image = background
        return image_utils.load_image(image)


def load_audio(
    ref: MediaRef,
    sampling_rate: int,
    max_seconds: float | None = None,
    overlong: Literal["raise", "truncate"] = "raise",
) -> np.ndarray:
    """
    Decodes audio, averages its channels and resamples it.

    PyAV reads files in chunks. Audio beyond the limits is never decoded, and memory holds no more than the samples at
    the target rate.

    Args:
        ref ([`MediaRef`]):
            Its source is a dictionary with `"array"` and `"sampling_rate"`; an `(array, sampling_rate)` tuple; a bare
            array or list, if `ref.options` has its `sampling_rate`; a torchcodec `AudioDecoder`; or a path, URL, bytes
            or dictionary as in [`load_image`]. Integer samples of 8, 16 or 32 bits are scaled to -1 to 1. The shorter
            axis of a two-dimensional array holds the channels.
        sampling_rate (`int`):
            Sampling rate of the result, in Hz.
        max_seconds (`float`, *optional*):
            Maximum duration in seconds.
        overlong (`str`, *optional*, defaults to `"raise"`):
            Handling of longer audio: `"raise"`, or `"truncate"` to decode only the first `max_seconds`.

    Returns:
        `np.ndarray`: Waveform of shape (N,), float32.

    Raises:
        MediaError: If the audio is missing, unreadable, cut off, empty, overlong or not finite, or if its rate is
            unknown or invalid.
        ImportError: If PyAV or soxr is needed and not installed.
    """
    should_truncate = overlong == "truncate" and max_seconds is not None

    def check_length(count: float, rate: float) -> None:
        if max_seconds is not None and count > max_seconds * rate:
            if not should_truncate:
                raise ref.error(
                    f"the audio of {count / rate:.2f} s is longer than the model's window of {max_seconds:g} s; cut "
                    "it, or set `audio_overlong='truncate'` to keep its beginning"
                )
            count = max_seconds * rate  # after truncation, because the rest is never decoded
        _check_seconds(ref, count / rate, "max_audio_seconds")

    with decoding(ref):
        count = 0
        rate = None
        chunks = []
        resampler = None
        with closing(read_audio_chunks(ref, max_seconds if should_truncate else None, check_length)) as decoded_chunks:
            for chunk, rate in decoded_chunks:
                if rate is None:
                    if isinstance(ref.source, dict) and "sample_rate" in ref.source:
                        raise ref.error(
                            "the array has no sampling rate; rename the key 'sample_rate' to 'sampling_rate'"
                        )
                    raise ref.error(
                        "the array has no sampling rate; give {'array': ..., 'sampling_rate': ...} or a file"
                    )
                count += len(chunk)
                if not np.isfinite(chunk).all():
                    raise ref.error("the audio has NaN or infinite samples; repair it or remove the row")
                loudest = np.abs(chunk).max(initial=0)
                if loudest > _LOUDEST_FLOAT:
                    raise ref.error(f"float samples up to {loudest:g}; scale them to -1 to 1, or give 16-bit integers")
                if rate != sampling_rate:
                    # Resampling by chunks is bitwise equal to `soxr.resample` of the whole audio
                    resampler = resampler or require_module("soxr", "audio").ResampleStream(rate, sampling_rate, 1)
                    chunk = resampler.resample_chunk(chunk)
                chunks.append(chunk)
        if rate is None or count == 0:
            raise ref.error("the audio is empty; remove the row")
        if count < _SHORTEST_SECONDS * rate:
            raise ref.error(f"{count} samples are too short for a spectrogram; remove the row")
        if resampler is not None:
            chunks.append(resampler.resample_chunk(np.empty(0, np.float32), last=True))
        return np.ascontiguousarray(chunks[0] if len(chunks) == 1 else np.concatenate(chunks), dtype=np.float32)


def load_sound_of_video(
    ref: MediaRef, sampling_rate: int, max_seconds: float | None, overlong: Literal["raise", "truncate"]
) -> np.ndarray | None:
    """Returns the sound of a video's selected span as [`load_audio`] decodes it, `None` if the video has no sound."""
    if holds_frames(ref) or hasattr(ref.source, "get_frames_at"):
        return None
    with decoding(ref), open_source(ref) as stream:
        check_container(ref, stream)
        with require_module("av", "video").open(stream) as container:
            if not container.streams.audio:
                return None
    start = ref.options.get("video_start", 0.0)
    end = ref.options.get("video_end", math.inf)
    sound_ref = replace(ref, options={})
    if start or end < math.inf:
        waveform = load_audio(sound_ref, sampling_rate)
        span = waveform[round(start * sampling_rate) : None if end == math.inf else round(end * sampling_rate)]
        sound_ref = replace(sound_ref, source={"array": span, "sampling_rate": sampling_rate})
    return load_audio(sound_ref, sampling_rate, max_seconds, overlong)


def load_video(
    ref: MediaRef,
    sample_indices_fn: Callable[..., Sequence[int]] | None = None,
    resize_fn: Callable[[np.ndarray, int], np.ndarray] | None = None,
) -> tuple[np.ndarray, dict[str, Any]]:
    """
    Decodes selected frames of a video, equal to the frames that the program `ffmpeg` decodes.

    If torchcodec is usable, it decodes files with an index of frames (MP4, MOV, Matroska, WebM, unless trimmed without
    re-encoding). PyAV decodes other files, from the first frame to the last selected frame.

    Args:
        ref ([`MediaRef`]):
            Its source is a path, URL, bytes or dictionary as in [`load_image`]; a torchcodec `VideoDecoder`; or
            frames: a list of sources of [`load_image`], or an array or tensor of shape (T, H, W, C) or (T, C, H, W).
            The options `video_start` and `video_end` (seconds) select a span of a video, and `fps` or `nframes` the
            number of decoded frames (default: all). A list or an array of frames is returned whole, or thinned evenly
            to `ref.rules.max_frames`; there, `sample_fps` or `fps` is the rate at which the frames were sampled.
        sample_indices_fn (`Callable`, *optional*):
            Function that selects frames in place of the options, except from a list or an array of frames. It gets
            `metadata` (`VideoMetadata` of the video) and returns the increasing indices of the frames to decode. An
            example is `processor.video_processor.sample_frames`.
        resize_fn (`Callable`, *optional*):
            Function that resizes a chunk of frames, of shape (N, H, W, 3). Its second argument is the number of all
            selected frames.

    Returns:
        `tuple[np.ndarray, dict]`: Frames of shape (T, H, W, 3), uint8, and `video_metadata` for the processor:
        `total_num_frames` of the selected span, `fps` and `duration` (seconds) of the whole video (`None` if unknown),
        and `frames_indices` of the returned frames; if the rate varies, the mean rate of the span, and the times of
        frames times this rate. A processor can sample further (`do_sample_frames=True`) if all frames are decoded.

    Raises:
        MediaError: If the video is missing, unreadable or cut off, or has no frames or frames of different sizes.
        ImportError: If PyAV isn't installed.
    """
    with decoding(ref), open_video(ref) as (metadata, read_frames):
        if metadata.frames_indices is None:  # a list or an array of frames has its indices already
            _check_video(ref, metadata)
            select_frames = sample_indices_fn or partial(sample_indices, ref)
            metadata.frames_indices = [int(index) for index in select_frames(metadata=metadata)]
        indices = list(metadata.frames_indices)
        frames = None
        n_decoded = 0
        frame_shape = None
        for chunk in read_frames(indices):
            if frame_shape is None:
                check_pixels(ref, (chunk.shape[2], chunk.shape[1]))
                frame_shape = chunk.shape[1:]
            if chunk.shape[1:] != frame_shape:
                raise ref.error("the frames have different sizes; resize them to one size")
            chunk = chunk if resize_fn is None else resize_fn(chunk, len(indices))
            if frames is None:
                _, height, width, _ = chunk.shape
                if len(indices) * height * width > ref.rules.max_video_pixels:
                    raise ref.error(
                        f"{len(indices)} frames of {width} x {height} are more than {ref.rules.max_video_pixels:,} "
                        "pixels; choose fewer by 'nframes' or 'fps', or raise `max_video_pixels`"
                    )
                frames = np.empty((len(indices), *chunk.shape[1:]), np.uint8)
            frames[n_decoded : n_decoded + len(chunk)] = chunk
            n_decoded += len(chunk)
        if frames is None or n_decoded != len(indices):
            raise ref.error(
                f"{n_decoded} of {len(indices)} selected frames can be decoded; repair the video or remove the row"
            )
        video_metadata = {key: metadata[key] for key in ("total_num_frames", "fps", "duration")}
        return frames, {**video_metadata, "frames_indices": times_in_frames(ref, metadata, indices)}


def check_file(ref: MediaRef, stream: BinaryIO) -> None:
    """Raises a [`MediaError`] for files that are unsafe for other decoders: documents, playlists and huge images."""
    if ref.modality == "image":
        check_pixels(ref, open_image(ref, stream).size)
    else:
        check_container(ref, stream)


@contextmanager
def decoding(ref: MediaRef) -> Iterator[None]:
    """Turns errors of decoders within the context into [`MediaError`]s, which name the row and the column."""
    try:
        yield
    except (MediaError, ImportError):
        raise
    except Exception as error:
        source = ref.stored
        if isinstance(source, dict) and source.get("bytes") is None:
            source = source.get("path") or source.get("url")
        # Shortened after secrets are removed, because half a secret wouldn't be recognized
        name = f" '{ref.message_text(os.fspath(source))[:200]}'" if isinstance(source, (str, os.PathLike)) else ""
        reason = ref.message_text(str(error))[:500]
        raise ref.error(
            f"cannot read this {ref.modality}{name} ({type(error).__name__}: {reason}); repair it or remove the row"
        ) from error


def require_module(module: str, extra: str) -> ModuleType:
    """Imports a module of an optional dependency."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.split(".")[0]
        raise ImportError(f"{package} is missing or broken; install it with `{install(extra)}`") from error


def install(extra: str) -> str:
    """Returns the command that installs an optional dependency."""
    return f'pip install "trl-multimodal-rft[{extra}]"'


def open_source(ref: MediaRef) -> BinaryIO:
    """Opens the file of a medium as a stream of bytes, within the rules."""
    return open_file(ref, fetch_file(ref, encoded_source(ref)))


def _as_numpy(values: np.ndarray | torch.Tensor | list) -> np.ndarray:
    if isinstance(values, torch.Tensor):  # Accelerate may have moved the tensor to a device
        values = values.detach().cpu()
        return (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return np.asarray(values)


def _pixels(ref: MediaRef, image: np.ndarray | torch.Tensor | list) -> np.ndarray:
    """The pixels are uint8 of shape (H, W) or (H, W, C)."""
    array = _as_numpy(image)
    channel_counts = (1, 3, 4)
    # If the shape is ambiguous, tensors are channels-first, and arrays are channels-last
    is_channels_last = array.ndim == 3 and array.shape[2] in channel_counts and not isinstance(image, torch.Tensor)
    if array.ndim == 3 and array.shape[0] in channel_counts and not is_channels_last:
        array = array.transpose(1, 2, 0)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in channel_counts)):
        raise ref.error(f"an image of shape {array.shape}; give (H, W, C) or (C, H, W) with 1, 3 or 4 channels")
    if array.size == 0:
        raise ref.error("the image is empty; remove the row")
    max_value = 1 if array.dtype.kind == "f" else 255
    if array.dtype.kind not in "iuf" or not (array.min() >= 0 and array.max() <= max_value):
        raise ref.error(f"{array.dtype} pixels from {array.min()} to {array.max()}; scale them to 0 to {max_value}")
    return (array * 255).round().astype(np.uint8) if max_value == 1 else array.astype(np.uint8)


def read_audio(ref: MediaRef) -> tuple[np.ndarray, float | None]:
    """Decodes audio without resampling. Returns float32 samples `(N,)` and their rate in Hz (`None` if unknown)."""

    def check_length(count: float, rate: float) -> None:
        _check_seconds(ref, count / rate, "max_audio_seconds")

    with closing(read_audio_chunks(ref, None, check_length)) as decoded_chunks:
        chunks = list(decoded_chunks)
    if not chunks:
        raise ref.error("the audio is empty; remove the row")
    return np.concatenate([chunk for chunk, _ in chunks]), chunks[0][1]


def read_audio_chunks(
    ref: MediaRef, max_seconds: float | None, check_length: Callable[[float, float], None]
) -> _AudioChunks:
    """
    Yields chunks of audio `(N,)`, with averaged channels, and their rate, up to `max_seconds`. Calls
    `check_length(count, rate)` with the number of samples that the header states, if any, and after each chunk with
    those so far.
    """
    count = 0
    previous_rate = None
    loudest = 0.0
    loudest_average = 0.0

    def check(count: float, rate: float) -> None:
        if not _RATE_RANGE[0] <= rate <= _RATE_RANGE[1]:
            raise ref.error(f"the sampling rate is {rate:g}; set it to the true rate in Hz, such as 16000")
        if rate != previous_rate and previous_rate is not None:
            raise ref.error(
                f"its sampling rate changes from {previous_rate:g} to {rate:g}; convert it or remove the row"
            )
        check_length(count, rate)

    with closing(_decode_audio_chunks(ref, max_seconds, check)) as chunks:
        for chunk, rate in chunks:
            # Samples up to the limit. Without a limit, one more than the chunk has, so that reading goes on.
            n_left = len(chunk) + 1 if max_seconds is None or rate is None else int(max_seconds * rate) - count
            chunk = chunk[:n_left]
            count += len(chunk)
            if rate is not None:
                check(count, rate)
                previous_rate = rate
            mono = chunk.mean(axis=1, dtype=np.float32)
            loudest = max(loudest, np.abs(chunk).max(initial=0))
            loudest_average = max(loudest_average, np.abs(mono).max(initial=0))
            yield mono, rate
            if len(chunk) >= n_left:
                break
    if 0 < loudest < math.inf and loudest_average < _CANCELLATION_RATIO * loudest:
        raise ref.error("its channels cancel each other out; give one channel")


def _decode_audio_chunks(
    ref: MediaRef, max_seconds: float | None, check: Callable[[float, float], None]
) -> _AudioChunks:
    """
    Yields chunks of shape (N, channels) and their rate. Together, chunks may be longer than `max_seconds`, because
    [`read_audio_chunks`] cuts them.
    """
    source = ref.source
    if hasattr(source, "get_all_samples"):
        # One second more, because the decoder's timestamps aren't exact. `read_audio_chunks` cuts exactly.
        seconds = (ref.rules.max_audio_seconds if max_seconds is None else max_seconds) + 1
        yield decoder_samples(source, seconds)
        return
    array = source
    rate = ref.options.get("sampling_rate")
    if isinstance(source, dict) and source.get("array") is not None:
        array = source["array"]
        rate = source.get("sampling_rate", rate)
    elif isinstance(source, tuple):
        array, rate = source
    elif not isinstance(source, (np.ndarray, torch.Tensor, list)):
        with open_source(ref) as stream:
            yield from _decode_audio_file(ref, stream, check)
        return
    yield _array_samples(ref, array), None if rate is None else float(rate)


def _decode_audio_file(ref: MediaRef, stream: BinaryIO, check: Callable[[float, float], None]) -> _AudioChunks:
    """Calls `check` with the number of samples that the header states, if any."""
    av = require_module("av", "audio")
    check_container(ref, stream)
    check_complete(ref, stream)
    with av.open(stream) as container:
        sound = best_stream(container.streams.audio)
        if sound is None:
            raise ref.error("the file has no audio; remove the row")
        header_count = round((sound.duration or 0) * sound.time_base * sound.rate)
        if header_count and container.format.name in _FORMATS_WITH_COUNT:
            check(header_count, sound.rate)
        # not planar, as PyAV reads at most seven planes
        resampler = av.AudioResampler(format="flt")
        count = 0
        for packet in container.demux(sound):
            if container.format.name == "mp3" and packet.size and bytes(packet)[0] != 0xFF:
                continue  # a tag, such as the tag of an appended MP3
            for frame in itertools.chain.from_iterable(map(resampler.resample, packet.decode())):
                count += frame.samples
                yield frame.to_ndarray().reshape(frame.samples, -1), frame.sample_rate
        if header_count and container.format.name in _FORMATS_CHECKED_BY_COUNT and count != header_count:
            raise ref.error(
                f"the file is damaged or cut off: {count} of {header_count} samples; fetch it again or remove the row"
            )


def _check_seconds(ref: MediaRef, seconds: float, option: str) -> None:
    limit = getattr(ref.rules, option)
    if seconds > limit:
        raise ref.error(f"{seconds:.0f} s exceed the limit of {limit:g} s; cut it, or raise `{option}`")


def _array_samples(ref: MediaRef, array: np.ndarray | torch.Tensor | list) -> np.ndarray:
    """Returns the samples of an array, float32 of shape (N, channels). The array's shorter axis is the channels."""
    samples = _as_numpy(array)
    kind = samples.dtype.kind
    if samples.ndim not in (1, 2) or not (kind == "f" or kind in "iu" and samples.itemsize <= 4):
        raise ref.error(
            f"{samples.dtype} samples of shape {samples.shape}; give floats in -1 to 1, or integers of 8, 16 or 32 "
            "bits, of shape (samples,) or (channels, samples)"
        )
    if kind != "f":
        loudest = np.abs(samples.astype(np.int64)).max(initial=0)
        if samples.itemsize == 4 and 0 < loudest <= _LOUDEST_24_BITS:
            raise ref.error(
                f"{samples.dtype} samples up to {loudest} use no more than 24 of 32 bits, so their scale is "
                "unknown; give 16-bit samples as int16, and others as floats in -1 to 1"
            )
        samples = samples / 2.0 ** (8 * samples.itemsize - 1) - (kind == "u")  # 128 is silence in unsigned 8 bits
    samples = samples.astype(np.float32)
    if samples.ndim == 1 or samples.size == 0:
        return samples.reshape(-1, 1)
    return samples.T if samples.shape[0] <= samples.shape[1] else samples


def sample_indices(ref: MediaRef, metadata: VideoMetadata) -> np.ndarray:
    """
    Returns the frame indices that the options of `ref` select. Sets `metadata.total_num_frames` to the number of
    frames from `video_start` to `video_end`.
    """
    start = ref.options.get("video_start", 0)
    end = ref.options.get("video_end", math.inf)
    count = ref.options.get("nframes")
    fps = ref.options.get("fps")
    if count is not None and fps is not None:
        raise ref.error("has both 'fps' and 'nframes'; set one of them")
    bounds = math.ceil(start * metadata.fps), math.floor(min(end * metadata.fps, metadata.total_num_frames - 1))
    first_index, last_index = timed_span(ref.options, metadata) or bounds
    if first_index > last_index:
        raise ref.error(
            f"no frame lies between {start} s and {end} s: the video has {metadata.total_num_frames} frames at "
            f"{metadata.fps} per second; "
            "correct 'video_start' and 'video_end', or encode the video as MP4, which stores its number of frames"
        )
    metadata.total_num_frames = last_index - first_index + 1
    return first_index + default_sample_indices_fn(metadata, count, fps)


def _check_video(ref: MediaRef, metadata: VideoMetadata) -> None:
    fps = metadata.fps or 0.0
    if not 0 < fps <= _HIGHEST_FPS:
        raise ref.error(f"the video has an invalid rate of {fps:g} frames per second; encode it again, as MP4")
    _check_seconds(ref, metadata.total_num_frames / fps, "max_video_seconds")
    check_pixels(ref, (metadata.width or 0, metadata.height or 0))


@contextmanager
def open_video(ref: MediaRef) -> Iterator[tuple[VideoMetadata, _FrameReader]]:
    """Opens a video, and yields its metadata and a function that reads frames by their indices."""
    source = encoded_source(ref)
    if holds_frames(ref):
        yield _listed_frames(ref, source)
    elif hasattr(source, "get_frames_at"):
        yield _torchcodec_frames(ref, source)
    else:
        with open_source(ref) as stream:
            check_container(ref, stream)
            check_complete(ref, stream)
            if "sample_fps" in ref.options:
                raise ref.error("'sample_fps' is the rate of a list of frames; give 'fps' for a file")
            metadata, stream_index = _scan_video(ref, stream)
            if stream_index is not None and is_indexed(stream) and is_torchcodec_usable():
                decoders = importlib.import_module("torchcodec.decoders")
                decoder = decoders.VideoDecoder(stream, stream_index=stream_index, num_ffmpeg_threads=0)
                header, read_frames = _torchcodec_frames(ref, decoder)
                yield proven_metadata(header, metadata), read_frames
            else:
                yield metadata, partial(_decode_frames, stream)


def evenly_spaced_indices(count: int, max_count: int) -> list[int]:
    """Returns at most `max_count` evenly spaced indices below `count`, including the first and the last."""
    return np.linspace(0, count - 1, min(count, max_count)).round().astype(int).tolist()


def holds_frames(ref: MediaRef) -> bool:
    """Returns whether the source of a video is a list or an array of frames, rather than a file or a decoder."""
    return isinstance(encoded_source(ref), (np.ndarray, torch.Tensor, list))


def _listed_frames(ref: MediaRef, source: np.ndarray | torch.Tensor | list) -> tuple[VideoMetadata, _FrameReader]:
    """Returns the metadata of a list of frames, with indices of at most `max_frames` frames, and a frame reader."""
    fps = ref.options.get("sample_fps", ref.options.get("fps"))
    if fps is not None and not fps > 0:
        raise ref.error(f"'fps' is {fps}; set the frames per second, or leave it out")
    options_without_effect = sorted(_FRAME_OPTIONS & ref.options.keys())
    if options_without_effect:
        raise ref.error(f"{', '.join(options_without_effect)} has no effect on a list of frames; remove it")
    count = len(source)
    metadata = VideoMetadata(count, fps, duration=count / fps if fps else None)
    max_frames = count if ref.rules.max_frames is None else ref.rules.max_frames
    metadata.frames_indices = evenly_spaced_indices(count, max_frames)

    def read_frames(indices: list[int]) -> Iterator[np.ndarray]:
        for i in indices:
            image = replace(ref, modality="image", source=source[i], options={}, column=f"{ref.column}[{i}]")
            yield np.array(load_image(image))[None]

    return metadata, read_frames


def _torchcodec_frames(ref: MediaRef, decoder: "VideoDecoder") -> tuple[TimedMetadata, _FrameReader]:
    header = decoder.metadata
    height = header.height or 0
    width = header.width or 0
    metadata = TimedMetadata(header.num_frames or 0, header.average_fps, width, height, header.duration_seconds)
    first_seconds = header.begin_stream_seconds or 0.0

    def read_frames(indices: list[int]) -> Iterator[np.ndarray]:
        chunk_size = max(1, _PIXELS_AT_ONCE // max(1, height * width))
        for i in range(0, len(indices), chunk_size):
            batch = decoder.get_frames_at(indices[i : i + chunk_size])
            if (batch.pts_seconds.diff() <= 0).any():
                raise ref.error("its decoder returns frames whose times don't increase; give the file itself")
            metadata.read_times += (batch.pts_seconds - first_seconds).tolist()
            frames = batch.data.cpu().numpy()
            yield frames if frames.shape[-1] == 3 else frames.transpose(0, 2, 3, 1)  # (N, C, H, W) by default

    return metadata, read_frames


def _is_mirrored(frame: "VideoFrame") -> bool:
    """Returns whether the display matrix of a frame mirrors the frame. A rotation doesn't mirror."""
    matrix = cast("memoryview | None", frame.side_data.get("DISPLAYMATRIX"))
    return matrix is not None and np.linalg.det(np.frombuffer(matrix, np.int32).reshape(3, 3)[:2, :2]) < 0


def _scan_video(ref: MediaRef, stream: BinaryIO) -> tuple[TimedMetadata, int | None]:
    """
    Returns a video's metadata, and the index of its stream, or `None` if torchcodec could decode other frames than
    PyAV: if a packet isn't a frame, as in clips that were cut without re-encoding, not every keyframe can start, or
    frames are mirrored.
    """
    with require_module("av", "video").open(stream) as container:
        video = best_stream(container.streams.video)
        if video is None:
            raise ref.error("the file has no video; remove the row")
        average_rate = video.average_rate if container.duration else None  # without a duration, FFmpeg sets a default
        fps = float(average_rate or video.codec_context.framerate or video.guessed_rate or 0)
        # `count` is the number of packets, and if every packet is a frame, the number of frames, too
        count = 0
        first_pts = None
        count_is_exact = True
        suits_torchcodec = True
        times: list[float | None] = []
        for packet in container.demux(video):
            if packet.size:
                count += 1
                first_pts = packet.pts if count == 1 else first_pts
                times.append(None if packet.pts is None else float(packet.pts * video.time_base))
                # Frames shown before the first keyframe may be lost, as they may depend on frames that were cut off
                count_is_exact = (
                    count_is_exact and not packet.is_discard and packet.pts is not None and packet.pts >= first_pts
                )
                # Decoders may drop frames before the first keyframe, so the first packet must be a keyframe
                count_is_exact = count_is_exact and (packet.is_keyframe or count > 1)
                if suits_torchcodec and packet.is_keyframe and video.codec_context.name == "h264":
                    suits_torchcodec = has_idr_picture(bytes(packet), video.codec_context.extradata)
        size = (video.width, video.height)
        stream_index = video.index
    _check_video(ref, VideoMetadata(count, fps, *size))
    if not count_is_exact:
        # One frame more than the limit, so that a longer video is recognized. `media_size` sets no limit.
        max_seconds = ref.rules.max_video_seconds
        max_count = None if math.isinf(max_seconds) else int(max_seconds * fps) + 1
        with closing(_iter_frames(stream)) as frames:
            times = [frame.time for frame in itertools.islice(frames, max_count)]
        count = len(times)
        known_times = [time for time in times if time is not None]
        if count > 1 and len(known_times) == count and known_times[-1] > known_times[0]:
            fps = (count - 1) / (known_times[-1] - known_times[0])
    elif suits_torchcodec:
        with closing(_iter_frames(stream)) as frames:
            suits_torchcodec = not any(map(_is_mirrored, itertools.islice(frames, 1)))
    metadata = with_times(VideoMetadata(count, fps, *size), times)
    return metadata, stream_index if count_is_exact and suits_torchcodec else None


def _iter_frames(stream: BinaryIO) -> "Generator[VideoFrame]":
    stream.seek(0)
    with require_module("av", "video").open(stream) as container:
        yield from container.decode(best_stream(container.streams.video))


def _decode_frames(stream: BinaryIO, indices: list[int]) -> Iterator[np.ndarray]:
    """Frames are of shape (1, H, W, 3) and upright. Decodes all frames up to the last index."""
    selected_indices = set(indices)
    last_index = max(indices, default=-1)
    with closing(_iter_frames(stream)) as frames:
        for i, frame in zip(range(last_index + 1), frames, strict=False):
            if i in selected_indices:
                # Phones may store videos rotated, and mirrored before the rotation
                pixels = frame.to_ndarray(format="rgb24")[:: -1 if _is_mirrored(frame) else 1]
                yield np.ascontiguousarray(np.rot90(pixels, round(frame.rotation / 90)))[None]
