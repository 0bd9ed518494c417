# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The modalities of media, and the endings and first bytes of their files."""

from typing import Literal, get_args


Modality = Literal["image", "video", "audio"]
# All modalities, in the order in which media without a placeholder precede the text
MODALITIES = get_args(Modality)
# Modalities by whose encoders media pass: videos pass that of images
ENCODER_OF = {"image": "image", "video": "image", "audio": "audio"}

# Endings of files' names
FILE_ENDINGS = {
    "image": "png|jpe?g|jfif|webp|gif|bmp|tiff?|heic|heif|avif",
    "video": "mp4|m4v|avi|mov|mkv|webm|mpe?g|3gp|ogv|wmv|flv",
    "audio": "wav|mp3|flac|ogg|oga|opus|m4a|aac|aiff?|wma|amr|caf",
}

# Patterns of first bytes by the ending. If a file matches several, the first one counts
FIRST_BYTES = {
    "image": {
        "png": rb"\x89PNG",
        "jpg": rb"\xff\xd8\xff",
        "gif": rb"GIF8",
        "webp": rb"RIFF.{4}WEBP",
        "bmp": rb"BM.{4}\0\0\0\0",
        "tiff": rb"II\*\0|MM\0\*",
        "avif": rb".{4}ftyp(?:avif|heic|mif1)",
    },
    "audio": {
        "wav": rb"RIFF.{4}WAVE",
        "flac": rb"fLaC",
        "ogg": rb"OggS",
        "mp3": rb"ID3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]",
        "m4a": rb".{4}ftypM4A",
        "aiff": rb"FORM.{4}AIFF",
    },
    "video": {
        "mp4": rb".{4}ftyp",
        "webm": rb"\x1a\x45\xdf\xa3.{,60}webm",
        "mkv": rb"\x1a\x45\xdf\xa3",
        "avi": rb"RIFF.{4}AVI ",
        "gif": rb"GIF8",
    },
}
