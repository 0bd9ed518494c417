# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Ready-made tools, and loading of tools by name."""

import inspect
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import PIL.Image

from ..data.reading.decoding import load_image
from ..data.reading.refs import MediaRef, iter_refs
from ..spelling import check_settings, load_dotted, split_settings


_MIN_SIDE = 28  # smallest side of a box in pixels. In Qwen2.5-VL, a token stands for 28 x 28 pixels
# Largest ratio of a box's sides, well below 200, above which Qwen2.5-VL's processor raises an error
_MAX_ELONGATION = 100


class Zoom:
    """
    Environment with the tool `zoom`, which shows a part of an image of the prompt or of an earlier result, as in
    [DeepEyes](https://huggingface.co/papers/2505.14362).

    Boxes are cut at the border of the image. A box with a side shorter than 28 pixels is enlarged around its center.

    Args:
        scale (`float`, *optional*):
            Width and height of every image in the model's coordinates: 1000 for Qwen3-VL, or 1 if coordinates are
            shares of the sides. By default, coordinates are pixels of the image in the dataset. This is only right if
            the processor doesn't resize the image.
    """

    def __init__(self, scale: float | None = None):
        self.scale = scale
        self._images: list[MediaRef | PIL.Image.Image] = []

    def reset(self, prompt_messages: list[dict[str, Any]] | None, **row: Any) -> None:
        """Starts with the images of a prompt."""
        self._images = [ref for ref in iter_refs(prompt_messages) if ref.modality == "image"]

    def zoom(self, bbox_2d: list[float], label: str = "", image: int = 1) -> list:
        """
        Zooms in on a region of an image and shows it as a further image.

        Args:
            bbox_2d: The region, as [left, top, right, bottom].
            label: What is in the region.
            image: The number of the image, in the order of the conversation, from 1 on.

        Returns:
            The region.
        """
        if not 1 <= image <= len(self._images):
            raise ValueError(f"There is no image {image}; the conversation has {len(self._images)}.")
        source = self._images[image - 1]
        picture = load_image(source) if isinstance(source, MediaRef) else source
        region = picture.crop(self._region(bbox_2d, *picture.size))
        self._images.append(region)
        return [{"type": "image", "image": region}]

    def _region(self, bbox_2d: Any, width: int, height: int) -> tuple[int, int, int, int]:
        """Returns the left, top, right and bottom pixel of a box, cut and enlarged, or raises `ValueError`."""
        try:
            left, top, right, bottom = (float(coordinate) for coordinate in bbox_2d)
        except (TypeError, ValueError):
            raise ValueError(f"bbox_2d is {bbox_2d!r:.60}; give [left, top, right, bottom].") from None
        if not (left < right and top < bottom and all(map(math.isfinite, (left, top, right, bottom)))):
            raise ValueError(f"bbox_2d is {bbox_2d!r:.60}; left must be less than right, and top less than bottom.")
        if self.scale is not None:
            left, right = (coordinate * width / self.scale for coordinate in (left, right))
            top, bottom = (coordinate * height / self.scale for coordinate in (top, bottom))
        left, right = _enlarged(max(left, 0), min(right, width), width)
        top, bottom = _enlarged(max(top, 0), min(bottom, height), height)
        sides = right - left, bottom - top
        if min(sides) <= 0:
            size = self._size_in_words(width, height)
            raise ValueError(f"bbox_2d is {bbox_2d!r:.60}, outside of the image; {size}.")
        if max(sides) > _MAX_ELONGATION * min(sides):
            raise ValueError(f"bbox_2d is {bbox_2d!r:.60}; a side is over {_MAX_ELONGATION} times the other.")
        return left, top, right, bottom

    def _size_in_words(self, width: int, height: int) -> str:
        size = (width, height) if self.scale is None else (self.scale, self.scale)
        return f"its size is {size[0]:g} x {size[1]:g}"


def _enlarged(start: float, end: float, size: int) -> tuple[int, int]:
    """
    Returns start and end of a box's side in pixels. Enlarges short sides to `_MIN_SIDE` or the image's `size`. In an
    image of 100 pixels, the side from 40 to 50 becomes the side from 31 to 59.
    """
    if start >= end:  # outside of the image
        return 0, 0
    start = math.floor(start)
    end = math.ceil(end)
    n_missing = min(_MIN_SIDE, size) - (end - start)
    if n_missing > 0:
        start = min(max(start - n_missing // 2, 0), size - min(_MIN_SIDE, size))
        end = start + min(_MIN_SIDE, size)
    return start, end


TOOLS: dict[str, Callable] = {"zoom": Zoom}


def load_tools(names: Sequence[str]) -> dict[str, Any]:
    """
    Returns the arguments `tools` and `environment_factory` from names of ready-made tools or dotted paths, of which at
    most one is a class. A class may have settings, as in `zoom(scale=1000)`. Raises a `ValueError` for anything else.
    """
    tools = []
    factories: list[Any] = []
    for spelling in names:
        name, settings = split_settings(spelling)
        tool = TOOLS.get(name) or load_dotted(name, "tool", [*TOOLS], "my_tools.search")
        if settings:
            check_settings(tool, name, settings)
        if inspect.isclass(tool):
            factories.append(partial(tool, **settings) if settings else tool)
        elif settings is not None:
            raise ValueError(f"The tool {name!r} is a function and has no settings; leave them out.")
        else:
            tools.append(tool)
    if len(factories) > 1:
        raise ValueError(f"{[*names]} names several classes of environments; combine their tools in one class.")
    return {"tools": tools or None, "environment_factory": factories[0] if factories else None}
