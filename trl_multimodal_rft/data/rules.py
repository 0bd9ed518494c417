# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What rows may name, and how much of it is read."""

import os
from dataclasses import dataclass, fields


# Files, web servers, the Hub, stores of objects, and archives within them
PROTOCOLS = (
    "file",
    "http",
    "https",
    "hf",
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "zip",
    "tar",
    "gzip",
)


@dataclass(frozen=True)
class MediaRules:
    """
    From where media may come, and how large they may be.

    Args:
        allowed_media_protocols (`Sequence[str]`, *optional*):
            Protocols of URLs in rows, those of links in a chained URL (`zip://a.png::https://...`) included.
        allowed_media_folders (`Sequence[str]`, *optional*):
            Folders in which local files must be, links followed; `None` allows all.
        allowed_media_domains (`Sequence[str]`, *optional*):
            Hosts of `http`, `https`, `hdfs` and `webhdfs` URLs, and of those that web servers redirect to; `None`
            allows all.
        max_media_bytes (`int`, *optional*, defaults to `2**31`):
            Size of a medium's file.
        max_image_pixels (`int`, *optional*, defaults to `100_000_000`):
            Pixels of an image, and of a frame of a video.
        max_audio_seconds (`float`, *optional*, defaults to `3600.0`):
            Length of a sound that is decoded.
        max_video_seconds (`float`, *optional*, defaults to `14400.0`):
            Length of a video of which frames are decoded.
        max_video_pixels (`int`, *optional*, defaults to `2**29`):
            Pixels of all frames of a video together, as the processor gets them.
        media_timeout (`float`, *optional*, defaults to `60.0`):
            Seconds in which a download must be complete, all attempts together, and as many for unpacking it from an
            archive, and for decoding an image.
        media_dir (`str`, *optional*):
            Folder that relative paths in rows start from, `~` for the home folder. By default the working directory.
            It widens nothing: files must be in `allowed_media_folders` all the same.

    Raises:
        `ValueError`: If a list is a text, a limit isn't positive, or `media_dir` is no folder.
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

    def __post_init__(self):
        if self.media_dir is not None:
            # Absolute, as other processes may have another working directory
            object.__setattr__(self, "media_dir", os.path.abspath(os.path.expanduser(self.media_dir)))
            if not os.path.isdir(self.media_dir):
                raise ValueError(f"`media_dir` is {self.media_dir!r}, which is no folder; correct it.")
        for name, value in vars(self).items():
            if name == "media_dir":
                continue
            if isinstance(value, str):
                raise ValueError(f"`{name}` must be a list, got {value!r}; write [{value!r}].")
            if name.startswith("allowed") and value is not None:
                object.__setattr__(self, name, tuple(value))
            elif value is not None and not value > 0:
                raise ValueError(f"`{name}` must be positive, got {value}.")
        odd = [name for name in self.allowed_media_protocols if not name or ":" in name or "/" in name]
        if odd:
            raise ValueError(f"`allowed_media_protocols` has {odd[0]!r}; write names alone, such as 'https'.")
        odd = [name for name in self.allowed_media_domains or () if not name or ":" in name or "/" in name]
        if odd:
            raise ValueError(f"`allowed_media_domains` has {odd[0]!r}; write hosts alone, such as 'example.com'.")


DEFAULT_RULES = MediaRules()

RULE_NAMES = tuple(each.name for each in fields(MediaRules))
