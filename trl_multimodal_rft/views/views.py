# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Views, which replace a prompt's media, for example by a masked image, silence or shuffled frames.

The decorator [`view`] registers a function as a view. The function takes pixels `(T, H, W, 3)` (an image has one
frame) or samples `(S,)`, and a random generator. It returns an array of the same shape, so that a prompt keeps its
tokens.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar, cast

import numpy as np
import PIL.Image
import torch

from ..algorithms.papers import Paper, paper_of
from ..data.reading.refs import MediaRef
from ..modalities import MODALITIES
from ..spelling import (
    check_choice,
    check_setting,
    check_settings,
    check_unused,
    join_settings,
    load_dotted,
    split_settings,
)


_GREY = 128  # pixel value
_DIFFUSION_STEPS = 1000

Share = Annotated[float, "(0, 1]"]
Count = Annotated[int, "[1, inf)"]
M = TypeVar("M", np.ndarray, torch.Tensor, PIL.Image.Image)  # decoded media: a sound or frames, frames, an image


@dataclass(frozen=True)
class ViewType:
    """A registered view, with its function and properties."""

    name: str
    paper: Paper | None
    function: Callable[..., np.ndarray]
    modalities: tuple[str, ...] = MODALITIES  # modalities that the view applies to
    strength: str | None = None  # name of the setting that a schedule scales
    needs_other: bool = False  # whether the replacement comes from media of another row


VIEWS: dict[str, ViewType] = {}


def view(
    name: str, modalities: tuple[str, ...] = MODALITIES, strength: str | None = None, needs_other: bool = False
) -> Callable:
    """
    Returns a decorator that registers a function as a view.

    Args:
        name (`str`):
            Name of the view in configs.
        modalities (`tuple[str, ...]`, *optional*):
            Modalities that the view applies to, by default all.
        strength (`str`, *optional*):
            Setting that a schedule scales.
        needs_other (`bool`, *optional*, defaults to `False`):
            Whether the replacement comes from media of another row, which the function gets as `other`.

    Returns:
        `Callable`: The decorator. The decorated function takes pixels `(T, H, W, 3)` or samples `(S,)`, a
        `numpy.random.Generator` and settings. It returns an array of the same shape.
    """

    def register(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        check_unused([name], VIEWS, "view")
        for modality in modalities:
            check_choice(f"`modalities` of {name!r}", modality, MODALITIES)
        check_setting(f"`needs_other` of {name!r}", needs_other, bool, False)
        if strength is not None:
            check_choice(f"`strength` of {name!r}", strength, inspect.signature(function).parameters)
        VIEWS[name] = ViewType(name, paper_of(function), function, modalities, strength, needs_other)
        return function

    return register


@dataclass(frozen=True)
class View:
    """A view with its settings, which replaces media of prompts."""

    type: ViewType
    settings: dict[str, Any] = field(default_factory=dict)
    modalities: tuple[str, ...] = MODALITIES  # modalities to replace, if the type applies to them
    # Media of another row. In each modality, the i-th replaces the prompt's i-th, starting over when they run out
    others: Sequence[MediaRef] = ()
    seed: tuple[int, ...] = (0,)  # seed of random numbers, together with the index of media in the prompt

    @property
    def spelling(self) -> str:
        """The text that [`as_view`] reads."""
        return join_settings(self.type.name, self.settings)

    def applies_to(self, modality: str) -> bool:
        """Returns whether the view replaces media of a modality."""
        return modality in self.modalities and modality in self.type.modalities

    def for_modality(self, modality: str) -> "View":
        """Returns the view limited to media of one modality."""
        return replace(self, modalities=(modality,))

    def seeded(self, *numbers: int) -> "View":
        """Returns the view with the seed `numbers`."""
        return replace(self, seed=numbers)

    def with_others(self, others: Sequence[MediaRef]) -> "View":
        """Returns the view with media of another row as replacements."""
        return replace(self, others=others)

    def scaled(self, factor: float) -> "View":
        """Returns the view with its strength times a factor. Raises `ValueError` if the view has no strength."""
        name = self.type.strength
        if name is None:
            raise ValueError(f"The view {self.type.name!r} has no strength that a schedule could scale.")
        full_strength = self.settings.get(name, inspect.signature(self.type.function).parameters[name].default)
        return replace(self, settings={**self.settings, name: type(full_strength)(full_strength * factor)})

    def __call__(self, media: M, index: int, other: M | None = None) -> M:
        """
        Returns the replacement of a PIL image, frames `(T, H, W, 3)` or `(T, 3, H, W)`, or samples `(S,)`, in the same
        form. Raises `ValueError` if its shape differs.
        """
        original = _as_array(media)
        rng = np.random.default_rng([*self.seed, index])
        settings = {**self.settings, "other": _as_array(other)} if other is not None else self.settings
        replacement = np.asarray(self.type.function(original, rng, **settings))
        if replacement.shape != original.shape:
            raise ValueError(
                f"The view {self.type.name!r} returned the shape {replacement.shape} for the shape {original.shape}; "
                "return the same shape, so that the prompt keeps its tokens."
            )
        replacement = np.ascontiguousarray(replacement, original.dtype)  # torch takes no array with negative strides
        if isinstance(media, PIL.Image.Image):
            return cast(M, PIL.Image.fromarray(replacement[0]))
        return cast(
            M, torch.from_numpy(replacement).permute(0, 3, 1, 2) if isinstance(media, torch.Tensor) else replacement
        )


def as_view(source: "str | Callable | View") -> View:
    """
    Returns a view by its name or its function.

    Args:
        source (`str` or `Callable` or [`View`]):
            Name of a view, with its settings (`"mask_patches(ratio=0.5)"`), a dotted path to a function
            (`"my_views.flip"`), or the function itself, with the arguments that [`view`] describes.

    Returns:
        [`View`]: The view, which maps decoded media and their index in the prompt to other media of the same size.

    Raises:
        `ValueError`: If there is no such view, or it has no such setting.
    """
    if isinstance(source, View):
        return source
    if not isinstance(source, str):
        return View(ViewType(getattr(source, "__name__", type(source).__name__), None, source))
    name, settings = split_settings(source)
    view_type = VIEWS.get(name) or ViewType(name, None, load_dotted(name, "view", [*VIEWS], "my_views.flip"))
    check_settings(view_type.function, name, settings or {}, setting_names(view_type.function))
    return View(view_type, settings or {})


def setting_names(function: Callable) -> list[str]:
    """Returns the settings of a view's function: its parameters without the media, the generator and `other` media."""
    parameters = [*inspect.signature(function).parameters.values()][2:]
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    return [name for name in names if name != "other"]


def _as_array(media: np.ndarray | torch.Tensor | PIL.Image.Image) -> np.ndarray:
    """Returns an image or video as pixels `(T, H, W, 3)`, and a sound as samples `(S,)`."""
    if isinstance(media, PIL.Image.Image):
        return np.array(media.convert("RGB"))[None]
    return media.permute(0, 2, 3, 1).numpy() if isinstance(media, torch.Tensor) else media


def _resized(frames: np.ndarray, height: int, width: int) -> np.ndarray:
    images = (PIL.Image.fromarray(frame.astype(np.uint8)).resize((width, height)) for frame in frames)
    return np.stack([np.asarray(image) for image in images])


@view("blank")
def blank(media: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Grey pixels, or silence."""
    return np.full_like(media, 0 if media.ndim == 1 else _GREY)


@view("other_row", needs_other=True)
def other_row(media: np.ndarray, rng: np.random.Generator, other: np.ndarray | None = None) -> np.ndarray:
    """Media of another row, fitted to the duration and size of the original, or `blank` without another row."""
    if other is None:
        return blank(media, rng)
    if media.ndim == 1:
        return np.resize(other, media.shape)
    indices = np.arange(len(media)) * len(other) // len(media)
    return _resized(other[indices], *media.shape[1:3])


@view("mask_patches", modalities=("image", "video"), strength="ratio")
def mask_patches(
    media: np.ndarray, rng: np.random.Generator, ratio: Share = 0.6, patch_size: Count = 14
) -> np.ndarray:
    """
    Black patches in place of a share of all patches, the same in each frame, as in
    [PAPO](https://huggingface.co/papers/2507.06448).
    """
    height, width = media.shape[1:3]
    # Division rounds up, since patches at the right and lower edge may be cut
    is_masked = rng.random((-(-height // patch_size), -(-width // patch_size))) < ratio
    is_masked = is_masked.repeat(patch_size, 0).repeat(patch_size, 1)[:height, :width]
    return np.where(is_masked[None, :, :, None], 0, media)


@view("diffusion_noise", modalities=("image", "video"), strength="step")
def diffusion_noise(media: np.ndarray, rng: np.random.Generator, step: Annotated[int, "[1, 999]"] = 500) -> np.ndarray:
    r"""
    Gaussian noise of a diffusion process after `step` of its 1,000 steps, as in
    [NoisyRollout](https://huggingface.co/papers/2504.13055).

    The view is $\sqrt{\bar\alpha_t} x + \sqrt{1 - \bar\alpha_t} \epsilon$ for pixels $x$ between 0 and 1.
    """
    # As in NoisyRollout, the noise per step grows from 1e-5 to 5e-3 along a sigmoid
    logits = np.linspace(-6, 6, _DIFFUSION_STEPS)
    signal = np.cumprod(1 - (1e-5 + (5e-3 - 1e-5) / (1 + np.exp(-logits))))[step]
    noisy = np.sqrt(signal) * media / 255 + np.sqrt(1 - signal) * rng.standard_normal(media.shape)
    return noisy.clip(0, 1) * 255


@view("crop", modalities=("image", "video"))
def crop(media: np.ndarray, rng: np.random.Generator, scale: Annotated[float, "(0, 1)"] = 0.5) -> np.ndarray:
    """A random window with a share (`scale`) of height and width, enlarged to the original size."""
    height, width = media.shape[1:3]
    window = [max(1, round(scale * length)) for length in (height, width)]
    top, left = (rng.integers(length - size + 1) for length, size in zip((height, width), window, strict=True))
    return _resized(media[:, top : top + window[0], left : left + window[1]], height, width)


@view("shuffle_frames", modalities=("video",))
def shuffle_frames(media: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Frames in a random order, as in the T-GRPO of [Video-R1](https://huggingface.co/papers/2503.21776)."""
    return rng.permutation(media)


@view("drop_frames", modalities=("video",), strength="ratio")
def drop_frames(media: np.ndarray, rng: np.random.Generator, ratio: Share = 0.5) -> np.ndarray:
    """Repeats of the previous kept frame in place of dropped frames. The first frame stays."""
    is_kept = rng.random(len(media)) >= ratio
    # Dropped frames have index 0 here. The running maximum then turns it into the index of the last kept frame
    indices = np.where(is_kept, np.arange(len(media)), 0)
    return media[np.maximum.accumulate(indices)]


@view("noise", modalities=("audio",), strength="level")
def noise(media: np.ndarray, rng: np.random.Generator, level: Annotated[float, "(0, inf)"] = 1.0) -> np.ndarray:
    """White noise on top of a sound, `level` times as loud by root mean square."""
    return media + level * np.sqrt(np.mean(np.square(media))) * rng.standard_normal(media.shape)


@view("mask_audio", modalities=("audio",), strength="ratio")
def mask_audio(media: np.ndarray, rng: np.random.Generator, ratio: Share = 0.6, segments: Count = 20) -> np.ndarray:
    """Silence in place of a share of a sound's segments of equal length."""
    # Sample `i` is in the segment `i * segments // len(media)`
    return np.where((rng.random(segments) < ratio)[np.arange(len(media)) * segments // len(media)], 0, media)
