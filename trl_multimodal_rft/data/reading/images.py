# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Decoding of images with Pillow, in formats that need no external program, with limits of time and header size."""

import math
import struct
import time
import zlib
from io import BytesIO
from typing import IO, BinaryIO, cast

import numpy as np
import PIL.Image
from PIL import ImageFile
from PIL.GifImagePlugin import GifImageFile

from .refs import MediaRef
from .sources import Bounded


# Formats that Pillow decodes itself. Documents are left out, as external programs would render them.
_IMAGE_FORMATS = ("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")

_LONGEST_EDGE = 1_000_000  # pixels; decoders also need memory for each row of an image
_MOST_GIF_HEADER = 2**21  # bytes; Pillow joins comments in quadratic time
_MOST_CHUNKS = 1_000_000  # limit on the number of chunks that are read from a PNG
_MOST_EXIF = 2**16  # bytes of EXIF data in a JPEG, the size of one segment
_SPARE_BYTES = 2**20  # bytes that Pillow may read beyond twice the data (it reads some headers twice)
# markers in a JPEG
_SCAN_MARKER = b"\xff\xda"
_END_MARKER = b"\xff\xd9"
# Limit on the product of a JPEG's pixels and the bytes of one decoding step. A scan of 30 bytes may encode all pixels,
# so one step could decode many scans, and the time is checked only between steps.
_JPEG_WORK = 2**36


class _ImageFile(Bounded):
    """File of an image. Raises an error for more than `_MOST_EXIF` bytes of EXIF data in its headers."""

    exif_bytes = 0  # so far

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        # After the header, `open_image` sets `max_bytes` to infinity
        if self.max_bytes < math.inf and data.startswith(b"Exif\0\0"):
            self.exif_bytes += len(data)
            if self.exif_bytes > _MOST_EXIF:  # Pillow joins all segments before it parses them
                raise self._ref.error(
                    "its EXIF data exceeds 65,536 bytes; save it without EXIF data, or remove the row"
                )
        return data


def open_image(ref: MediaRef, stream: BinaryIO) -> PIL.Image.Image:
    """Opens an image without decoding its pixels. Limits the bytes that Pillow reads for the header, and the time."""
    size = stream.seek(0, 2)
    stream.seek(0)
    max_bytes = _MOST_GIF_HEADER if stream.read(4) == b"GIF8" else 2 * size + _SPARE_BYTES
    stream.seek(0)
    file = _ImageFile(ref, stream, time.monotonic() + ref.rules.media_timeout, max_bytes)
    PIL.Image.init()  # registers the formats
    try:
        image = PIL.Image.open(cast("IO[bytes]", file), formats=_IMAGE_FORMATS)
    except PIL.UnidentifiedImageError:
        stream.seek(0)
        start = stream.read(2**12)
        is_svg = b"<svg" in start and b"<html" not in start.lower()
        is_heic = start[4:8] == b"ftyp" and any(brand in start[8:32] for brand in (b"heic", b"heix", b"mif1"))
        format_name = "SVG" if is_svg else "HEIC" if is_heic else None
        reason = f"{format_name}; convert it to PNG" if format_name else f"none of {', '.join(_IMAGE_FORMATS)}"
        raise PIL.UnidentifiedImageError(reason) from None
    file.max_bytes = math.inf  # the header is read
    if image.format in ("JPEG", "MPO"):
        block_size = max(2**10, _JPEG_WORK // max(1, image.width * image.height))
        image.decodermaxblock = min(image.decodermaxblock, block_size)
    return image


def check_pixels(ref: MediaRef, size: tuple[int, int]) -> None:
    """Raises a [`MediaError`] for a `size` (width and height in pixels) beyond the limits."""
    if max(size) > _LONGEST_EDGE:
        raise ref.error(f"{size[0]} x {size[1]} pixels exceed {_LONGEST_EDGE:,} on an edge; crop it or remove the row")
    if size[0] * size[1] > ref.rules.max_image_pixels:
        raise ref.error(
            f"{size[0]} x {size[1]} pixels exceed the limit of {ref.rules.max_image_pixels:,}; make it smaller, or "
            "raise `max_image_pixels`"
        )


def load_pixels(ref: MediaRef, image: PIL.Image.Image, stream: BinaryIO | None) -> PIL.Image.Image:
    """Decodes an image. Raises a [`MediaError`] for a PNG or a JPEG that is cut off."""
    if stream is not None and image.format == "PNG":
        _check_png(ref, stream)
    if isinstance(image, GifImageFile) and image.tile and "transparency" not in image.info:
        return _gif_on_background(image)
    image.load()
    if stream is not None and image.format in ("JPEG", "MPO"):
        _check_jpeg(ref, image, stream)
    return image


def _gif_on_background(image: GifImageFile) -> PIL.Image.Image:
    """Returns a GIF's first frame on its background color, where Pillow would use the first color of the palette."""
    box = image.tile[0][1]
    color_index = image.info.get("background")
    image.load()
    if box == (0, 0, *image.size):
        return image
    # Without a global palette, the index of a color stands for a level of grey
    palette = bytes(image.global_palette.palette) if image.global_palette else bytes(i // 3 for i in range(768))
    background = "white" if color_index is None else tuple(palette[3 * color_index : 3 * color_index + 3])
    screen = PIL.Image.new("RGB", image.size, background)
    screen.paste(image.crop(box).convert("RGB"), box)
    return screen


def _check_jpeg(ref: MediaRef, image: PIL.Image.Image, stream: BinaryIO) -> None:
    """Raises a [`MediaError`] for a JPEG whose scan ends early. Decoders leave missing blocks grey (128) or coarse."""
    stream.seek(0)
    data = stream.read()
    scan_start = 2
    while data[scan_start : scan_start + 1] == b"\xff" and data[scan_start + 1] != 0xDA:
        scan_start += 2 + int.from_bytes(data[scan_start + 2 : scan_start + 4], "big")  # skips a segment of the header
    last_pixel = np.asarray(image.crop((image.width - 1, image.height - 1, *image.size)), float)
    # A single scan is complete if the last pixel isn't grey. Other images are decoded again, with more bytes.
    if "progressive" in image.info or _SCAN_MARKER in data[scan_start + 2 :] or (abs(last_pixel - 128) < 2).all():
        # Decoders don't read bytes after a complete scan, so the scan is complete if more bytes change no pixel
        longer_file = BytesIO(data[: data.find(_END_MARKER, scan_start)] + bytes(range(1, 255)) * 8 + _END_MARKER)
        try:
            longer_image = open_image(ref, longer_file)
            longer_image.load()
            is_complete = longer_image.tobytes() == image.tobytes()
        except OSError:
            is_complete = False
        if not is_complete:
            raise ref.error("the image is cut off, its scan ends early; repair it or remove the row")


def _check_png(ref: MediaRef, stream: BinaryIO) -> None:
    """Raises a [`MediaError`] for a PNG whose pixel stream ends early. Decoders leave missing pixels black."""
    offset = stream.tell()
    stream.seek(8)
    n_expected = 0
    n_bytes = 0
    decompressor = zlib.decompressobj()
    for _ in range(_MOST_CHUNKS):
        head = stream.read(8)  # of a chunk, which has its length, its type, the data, and a checksum of 4 bytes
        length = int.from_bytes(head[:4], "big")
        chunk_type = head[4:]
        next_offset = stream.tell() + length + 4
        if chunk_type == b"IHDR":
            n_expected = _png_pixel_bytes(stream.read(13))
        elif chunk_type == b"IDAT":
            data = stream.read(length)
            while data and n_bytes < n_expected and not decompressor.eof:
                try:
                    n_bytes += len(decompressor.decompress(data, 2**20))
                except zlib.error:  # Pillow will raise the error
                    n_bytes = n_expected
                data = decompressor.unconsumed_tail
        if len(head) < 8 or chunk_type == b"IEND" or n_bytes >= n_expected > 0 or decompressor.eof:
            break
        stream.seek(next_offset)
    stream.seek(offset)
    if decompressor.eof and n_bytes < n_expected:
        raise ref.error(
            f"the image is cut off: {n_bytes} of {n_expected} bytes of pixels; repair it or remove the row"
        )


def _png_pixel_bytes(header: bytes) -> int:
    """Returns the number of bytes of a PNG's pixels, and of one filter per row, from its `IHDR` chunk."""
    width, height, depth, color_type, _, _, interlaced = struct.unpack(">IIBBBBB", header)
    # Channels by color type: grey, RGB, palette, grey with alpha, RGB with alpha
    bits_per_pixel = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color_type]
    # Passes of Adam7 interlacing: first column, first row, steps across and down, in pixels
    passes = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
    n_bytes = 0
    if not interlaced:
        passes = ((0, 0, 1, 1),)
    for x, y, across, down in passes:
        # rounded up
        n_columns = -((x - width) // across)
        n_rows = -((y - height) // down)
        # A row has one byte for its filter, then its pixels in whole bytes
        n_bytes += n_rows * (1 + (n_columns * bits_per_pixel + 7) // 8) if n_columns > 0 else 0
    return n_bytes


def check_pil_image(ref: MediaRef, image: PIL.Image.Image) -> None:
    """Raises a [`MediaError`] for a PIL image that an external program would render."""
    if getattr(image, "tile", None) and (image.format == "EPS" or isinstance(image, ImageFile.StubImageFile)):
        raise ref.error(f"this is a document of format {image.format}; render it, and give the pixels")


def check_exif(ref: MediaRef, image: PIL.Image.Image) -> None:
    """Raises a [`MediaError`] for EXIF data whose entries share bytes, because Pillow copies the bytes per entry."""
    data = image.info.get("exif")
    if data is None and "Raw profile type exif" in image.info:  # ImageMagick writes EXIF data as hexadecimal text
        data = bytes.fromhex("".join(image.info["Raw profile type exif"].split("\n")[3:]))
    while data and data.startswith(b"Exif\0\0"):
        data = data[6:]
    if data:
        # If entries share bytes, Pillow reads more bytes than the data have, and could exhaust the memory
        stream = Bounded(ref, BytesIO(data), time.monotonic() + ref.rules.media_timeout, 2 * len(data) + _SPARE_BYTES)
        PIL.Image.Exif().load_from_fp(cast("IO[bytes]", stream))
