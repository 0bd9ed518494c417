# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Allowed sources and sizes of media, and budgets to which media are resized or sampled."""

import os
from dataclasses import dataclass, fields, replace
from typing import Any

from ...spelling import did_you_mean


_MOST_PIXELS = 89_478_485  # of an image that PIL reads without a warning


# Files, web servers, the Hub, object stores, and zip archives in them
PROTOCOLS = ("file", "http", "https", "hf", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "zip")


@dataclass(frozen=True)
class MediaRules:
    """
    Allowed sources and sizes of media, enforced by errors, and budgets, to which media are resized or sampled.

    Args:
        allowed_media_protocols (`Sequence[str]`, *optional*):
            Protocols of URLs in rows, including each link of a chained URL (`zip://a.png::https://...`).
        allowed_media_folders (`Sequence[str]`, *optional*):
            Folders that must contain local files, after symbolic links are resolved; `None` allows all.
        allowed_media_domains (`Sequence[str]`, *optional*):
            Hosts of `http`, `https`, `hdfs` and `webhdfs` URLs (the last two only if `allowed_media_protocols` has
            them), also after redirects; `None` allows all.
        max_media_bytes (`int`, *optional*, defaults to `2**31`):
            Largest size of a medium's file, in bytes.
        max_image_pixels (`int`, *optional*, defaults to `100_000_000`):
            Most pixels of an image, or of a frame of a video.
        max_audio_seconds (`float`, *optional*, defaults to `3600.0`):
            Longest duration of audio.
        max_video_seconds (`float`, *optional*, defaults to `14400.0`):
            Longest duration of a video.
        max_video_pixels (`int`, *optional*, defaults to `2**29`):
            Most pixels in all of a video's frames together, as the processor gets them.
        media_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds for all attempts of a download together, for extracting a file from an archive, and for decoding
            an image.
        media_dir (`str`, *optional*):
            Folder that relative paths in rows start from, by default the working directory; `~` is the home folder.
            Files must still be in `allowed_media_folders`.
        min_pixels (`int`, *optional*):
            Budget: images and frames with fewer pixels are enlarged to this many, unless the content block of the
            image or video sets `min_pixels`.
        max_pixels (`int`, *optional*):
            Budget: images and frames with more pixels are shrunk to this many, unless the content block of the image
            or video sets `max_pixels`.
        video_fps (`float`, *optional*):
            Budget: frames per second that are sampled from a video, unless the content block of the video sets `fps`
            or `nframes`.
        max_frames (`int`, *optional*):
            Budget: most frames of a video, evenly spaced, unless the content block of the video sets `max_frames` or
            `nframes`.
        use_audio_in_video (`bool`, *optional*, defaults to `False`):
            Whether the model hears the sound of a video with its frames.

    Raises:
        `ValueError`: If a list is a string, a limit isn't positive, `media_dir` isn't a folder, or `min_pixels` is
            above `max_pixels`.
    """

    allowed_media_protocols: tuple[str, ...] = PROTOCOLS
    allowed_media_folders: tuple[str, ...] | None = None
    allowed_media_domains: tuple[str, ...] | None = None
    max_media_bytes: int = 2**31
    max_image_pixels: int = 100_000_000
    max_audio_seconds: float = 3600.0
    max_video_seconds: float = 14400.0
    max_video_pixels: int = 2**29
    media_timeout: float = 60.0
    media_dir: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_fps: float | None = None
    max_frames: int | None = None
    use_audio_in_video: bool = False

    def __post_init__(self):
        if self.media_dir is not None:
            # Absolute, as other processes may have another working directory
            object.__setattr__(self, "media_dir", os.path.abspath(os.path.expanduser(self.media_dir)))
            if not os.path.isdir(self.media_dir):
                raise ValueError(f"`media_dir` is {self.media_dir!r}, which isn't a folder; correct it.")
        for name, value in vars(self).items():
            if name in ("media_dir", "use_audio_in_video"):
                continue
            if isinstance(value, str):
                remedy = f"must be a list, got {value!r}; write [{value!r}]"
                if not name.startswith("allowed"):
                    remedy = f"must be a number, got the text {value!r}; write it without quotes"
                raise ValueError(f"`{name}` {remedy}.")
            if name.startswith("allowed") and value is not None:
                if not isinstance(value, (list, tuple, set)):
                    raise ValueError(f"`{name}` must be a list, got {value!r}.")
                object.__setattr__(self, name, tuple(value))
            elif value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise ValueError(f"`{name}` must be a number, got {value!r}.")
            elif value is not None and not value > 0:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        if self.min_pixels and self.max_pixels and self.min_pixels > self.max_pixels:
            raise ValueError(
                f"`min_pixels` of {self.min_pixels} is above `max_pixels` of {self.max_pixels}; correct them."
            )
        if self.min_pixels and self.min_pixels > _MOST_PIXELS:
            raise ValueError(
                f"`min_pixels` of {self.min_pixels:,} enlarges each image to more pixels than the largest that is "
                f"read has ({_MOST_PIXELS:,}); lower it."
            )
        entry_forms = {"protocols": "names alone, such as 'https'", "domains": "hosts alone, such as 'example.com'"}
        for name, entry_form in entry_forms.items():
            for entry in getattr(self, f"allowed_media_{name}") or ():
                if not entry or ":" in entry or "/" in entry:
                    raise ValueError(f"`allowed_media_{name}` has {entry!r}; write {entry_form}.")

    def without_budgets(self) -> "MediaRules":
        """Returns the rules without budgets, for models besides the policy: their processors set sizes of media."""
        return replace(self, **{name: getattr(DEFAULT_RULES, name) for name in BUDGET_NAMES})


DEFAULT_RULES = MediaRules()

# Budgets, and `use_audio_in_video`, which is likewise for the policy's processor only
BUDGET_NAMES = ("min_pixels", "max_pixels", "video_fps", "max_frames", "use_audio_in_video")
# Names of the rules that are options of a trainer
OPTION_NAMES = ("media_dir", *BUDGET_NAMES)
# Names of the other rules, which are keys of a trainer's option `media_rules`
LIMIT_NAMES = tuple(spec.name for spec in fields(MediaRules) if spec.name not in OPTION_NAMES)


def rules_of(limits: dict[str, Any] | str | None, **options) -> MediaRules:
    """Returns the rules of a run from its option `media_rules` and its other options about media."""
    limits = limits or {}
    if isinstance(limits, str):
        raise ValueError(f"`media_rules` must be a dictionary such as {{'max_audio_seconds': 60}}, got {limits!r}.")
    for name in limits:
        if name not in LIMIT_NAMES:
            remedy = f"Set the trainer's option `{name}` instead." if name in OPTION_NAMES else ""
            remedy = remedy or did_you_mean(name, LIMIT_NAMES).strip() or f"Its keys are {', '.join(LIMIT_NAMES)}."
            raise ValueError(f"`media_rules` has no key {name!r}. {remedy}")
    return MediaRules(**limits, **options)


def budgets_of(config: Any) -> dict[str, Any]:
    """Returns the budgets of a trainer's config, by name, without those that are `None`."""
    budgets = {name: getattr(config, name) for name in BUDGET_NAMES}
    return {name: value for name, value in budgets.items() if value is not None}
