# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts with media for tiny models: random tensors in the shapes that processors return."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from operator import attrgetter
from typing import Any

import torch
from transformers import PreTrainedModel

from trl_multimodal_rft.encoding.prompts import EncodedPrompt, placeholder_token_ids, prompt_position_ids
from trl_multimodal_rft.families import TOKEN_FIELDS, family_of
from trl_multimodal_rft.modalities import MODALITIES

from .tiny_models import VOCABULARY, meant_ids


Tensors = dict[str, torch.Tensor]

# A medium by kind and by size, from 0
Medium = tuple[str, int]

# Sizes of a video, after those that a patch spans
_FRAMES = 2

_FIELD_VALUES = {"image": 1, "video": 2, "audio": 3}


class NotBuilt(Exception):
    """The report can't build a model's media."""


def arguments(model: PreTrainedModel) -> set[str]:
    """Returns the arguments of a model's forward pass."""
    return {*inspect.signature(type(model).forward).parameters}


def kinds_of(model: PreTrainedModel) -> list[str]:
    """Returns the kinds of media that a model accepts."""
    return [kind for kind in MODALITIES if kind in model.input_modalities]


def chats_of(kinds: Sequence[str]) -> list[list[Medium]]:
    """Returns the media of the prompts to measure: one, several of other sizes, all kinds, none."""
    chats: list[list[Medium]] = [[]]
    for kind in kinds:
        chats += [[(kind, 0)], [(kind, 1), (kind, 0)]]
    if len(kinds) > 1:
        chats.append([(kind, 1) for kind in kinds])
    return chats


def encode(
    model: PreTrainedModel, media: Sequence[Medium], seed: int = 0, split_frames: bool = False
) -> EncodedPrompt:
    """Builds a prompt."""
    if model.config.model_type in _PROMPTS:
        return _PROMPTS[model.config.model_type](model, media, seed)
    generator = torch.Generator().manual_seed(seed)
    kinds = list(dict.fromkeys(kind for kind, _ in media))
    tensors: Tensors = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for kind in kinds:
            sizes = [size for own, size in media if own == kind]
            tensors |= recipe(model, kind)(model, sizes)
        counts = {each: n_tokens(model, *each) for each in dict.fromkeys(media)}
    ids = _text(model, 6, generator)
    kinds_of_tokens = [0] * 6
    for kind, size in media:
        shares_token = kind == "video" and model.config.model_type in _VIDEOS_AS_IMAGES
        placeholder = placeholder_of(model, "image" if shares_token else kind)
        before, after = _around(model, kind)
        n = counts[kind, size]
        frames = _FRAMES if kind == "video" and split_frames else 1
        for _ in range(frames):
            ids += [*before, *[placeholder] * (n // frames), *after, *_text(model, 2, generator)]
            kinds_of_tokens += [0] * len(before) + [_FIELD_VALUES[kind]] * (n // frames) + [0] * (len(after) + 2)
    more = 3 + seed % 4
    ids += _text(model, more, generator)
    kinds_of_tokens += [0] * more
    input_ids = torch.tensor(ids)
    marks = torch.tensor(kinds_of_tokens)
    fields: Tensors = {}
    for name in arguments(model) & {*TOKEN_FIELDS}:
        marked = name != "token_type_ids" or family_of(model).token_fields_mark_media
        fields[name] = marks if marked else torch.zeros_like(marks)
    return _prompt(model, input_ids, tensors, fields, kinds)


def _prompt(model, input_ids, tensors: Tensors, fields: Tensors, kinds: Sequence[str]) -> EncodedPrompt:
    positions = prompt_position_ids(model, input_ids, tensors, fields)
    return EncodedPrompt(input_ids, fields, tensors, positions, modalities=frozenset(kinds))


def ordinary_ids(model: PreTrainedModel) -> torch.Tensor:
    """Returns ids to which no config gives a meaning."""
    named = meant_ids(model.config.to_dict())
    size = model.config.get_text_config(decoder=True).vocab_size
    return torch.tensor([i for i in range(50, min(VOCABULARY - 100, 2 * size // 3)) if i not in named])


def has_placeholders(model: PreTrainedModel) -> bool:
    """Returns whether the config, or a table here, names the tokens of media."""
    known = model.config.model_type in (*_PROMPTS, "molmo2")
    return known or any(placeholder_token_ids(model, None).values())


def placeholder_of(model: PreTrainedModel, kind: str) -> int:
    """Returns the id of the placeholder token of a media kind."""
    ids = placeholder_token_ids(model, None)
    if model.config.model_type == "molmo2":
        return model.config.image_patch_id
    found = ids[kind] or (ids["image"] if kind == "video" else set())
    if not found:
        raise NotBuilt(f"the config names no token for {kind}")
    return min(found)


def _text(model, n: int, generator) -> list[int]:
    ids = ordinary_ids(model)
    return ids[torch.randint(len(ids), (n,), generator=generator)].tolist()


def _around(model, kind: str) -> tuple[list[int], list[int]]:
    """Returns the tokens before and after a medium."""

    def named(end: str) -> list[int]:
        names = (f"{each}_{end}_token_id" for each in (kind, *(["vision"] if kind != "audio" else [])))
        found = [getattr(model.config, name, None) for name in names]
        return [each for each in found if isinstance(each, int)][:1]

    return named("start"), named("end")


def n_tokens(model: PreTrainedModel, kind: str, size: int) -> int:
    """Returns the number of a medium's tokens, from the model's features."""
    tensors = recipe(model, kind)(model, [size])
    counted = _COUNTS.get(model.config.model_type, {}).get(kind)
    if counted is not None:
        return counted(model, tensors)
    name = f"get_{kind}_features"
    function = getattr(model.base_model, name, None) or getattr(model, name, None)
    if function is None:
        raise NotBuilt(f"it has no {name}")
    accepted = inspect.signature(inspect.unwrap(function)).parameters
    with torch.no_grad():
        features = function(**{key: value for key, value in tensors.items() if key in accepted or "args" in accepted})
    if features.pooler_output is not None:
        features = features.pooler_output
    elif features.get("deepstack_features") is not None:
        features = features.deepstack_features[0][1]
    else:
        features = features.last_hidden_state
    parts = [*features] if isinstance(features, (list, tuple)) else [features]
    return sum(part.numel() // part.size(-1) for part in parts)


# Recipes: from a model and sizes to the tensors of media of these sizes


def recipe(model: PreTrainedModel, kind: str) -> Callable[[PreTrainedModel, Sequence[int]], Tensors]:
    """Registers a function that makes tensors of a media kind."""
    own = _OWN.get(model.config.model_type, {}).get(kind)
    if own is not None:
        return own
    names = arguments(model) | {*inspect.signature(type(model.base_model).forward).parameters}
    for kind_of_recipe, marker, function in _RECIPES:
        if kind_of_recipe == kind and marker in names:
            return function
    raise NotBuilt(f"no recipe for {kind}")


def _tower(model: PreTrainedModel, kind: str = "image") -> Any:
    config = model.config
    names = ("audio_config", "encoder_config") if kind == "audio" else ("vision_config", "vq_config")
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), config)


def _first(config: Any, *names: str, default: Any = None) -> Any:
    found = next((getattr(config, name) for name in names if getattr(config, name, None) is not None), default)
    return found[0] if isinstance(found, (list, tuple)) else found


def _grids(model, sizes, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Flattened patches and grids."""
    config = _tower(model)
    patch = _first(config, "patch_size", default=14)
    temporal = _first(config, "temporal_patch_size", "patch_temporal", default=1)
    channels = _first(config, "in_channels", "in_chans", "num_channels", default=3)
    merge = _first(config, "spatial_merge_size", "merge_size", "merge_kernel_size", "downsample_factor", default=2)
    grids = torch.tensor([[frames, merge * 2, merge * (2 + size)] for size in sizes])
    return torch.randn(int(grids.prod(1).sum()), channels * temporal * patch * patch), grids


def _image_grids(model, sizes) -> Tensors:
    patches, grids = _grids(model, sizes, 1)
    return {"pixel_values": patches, "image_grid_thw": grids}


def _video_grids(model, sizes) -> Tensors:
    patches, grids = _grids(model, sizes, _FRAMES)
    seconds = arguments(model) & {"second_per_grid_ts", "video_second_per_grid"}
    return {"pixel_values_videos": patches, "video_grid_thw": grids, **dict.fromkeys(seconds, torch.ones(len(sizes)))}


def _pictures(model, sizes) -> Tensors:
    """Images of the tower's fixed size."""
    side = _first(_tower(model), "image_size", default=56)
    channels = _first(_tower(model), "num_channels", "in_channels", default=3)
    return {"pixel_values": torch.randn(len(sizes), channels, side, side)}


def _tiles(model, sizes) -> Tensors:
    """Images in one row per prompt, with a mask of their pixels."""
    pixels = _pictures(model, sizes)["pixel_values"][None]
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones_like(pixels[:, :, 0], dtype=torch.long)}


def _frames(model, sizes) -> Tensors:
    """Videos of two frames."""
    side = _first(_tower(model), "image_size", default=56)
    return {"pixel_values_videos": torch.randn(len(sizes), 2, 3, side, side)}


def _mels(model, sizes, mask: str | None = None, unit: int = 40, by_frame: bool = False) -> Tensors:
    """Audio features, padded to the longest clip."""
    config = _tower(model, "audio")
    names = ("num_mel_bins", "n_mels", "input_feat_size", "input_dim", "feature_size", "audio_embed_dim")
    mels = _first(config, *names, default=128)
    mels *= getattr(config, "num_stacked_frames", 1)
    window = getattr(config, "max_source_positions", None)
    lengths = torch.tensor([unit * (1 + size) for size in sizes])
    longest = int(lengths.max()) if window is None else 2 * window
    own = torch.arange(longest) < lengths[:, None]
    features = torch.randn(len(sizes), longest, mels) * own[..., None]
    tensors = {"input_features": features if by_frame else features.transpose(1, 2).contiguous()}
    return tensors if mask is None else {**tensors, mask: own.long()}


def _padded_images(shapes: torch.Tensor) -> Tensors:
    """Images of several heights and widths, padded to the largest."""
    pixels = torch.zeros(len(shapes), 3, *shapes.amax(0).tolist())
    for image, (height, width) in zip(pixels, shapes.tolist(), strict=True):
        image[:, :height, :width] = torch.randn(3, height, width)
    return {"pixel_values": pixels, "image_sizes": shapes}


def _sized(model, sizes) -> Tensors:
    unit = _first(_tower(model), "patch_size") * getattr(model.config, "spatial_merge_size", 1)
    return _padded_images(torch.tensor([[2 * unit, (2 + size) * unit] for size in sizes]))


def _crops(model, sizes) -> Tensors:
    """Images as tiles after a thumbnail, of two shapes."""
    side = _first(_tower(model), "image_size")
    shapes = torch.tensor([[side, 2 * side] if size % 2 else [2 * side, side - 6] for size in sizes])
    return {"pixel_values": torch.randn(len(sizes), 3, 3, side, side), "image_sizes": shapes}


def _square_patches(tensors: Tensors, model) -> Tensors:
    """Patches with two spatial dimensions."""
    patch = _first(_tower(model), "patch_size")
    return {
        name: value.view(len(value), -1, patch, patch) if name.startswith("pixel") else value
        for name, value in tensors.items()
    }


def _crops_of_molmo(model, sizes, suffix: str = "") -> Tensors:
    """Crops of 4 x 4 patches, and which 2 x 2 of them form a token."""
    config = _tower(model)
    n = [1 + size if suffix else 2 + size for size in sizes]
    side = _first(config, "image_size") // config.patch_size
    windows = torch.arange(side * side).view(side // 2, 2, side // 2, 2).permute(0, 2, 1, 3).reshape(-1, 4)
    pixels = torch.randn(sum(n), side * side, 3 * config.patch_size**2)
    places = torch.cat([windows + side * side * i for i in range(sum(n))])
    places[-1, 0] = -1  # a padding patch
    half = side // 2
    if suffix:
        grids = torch.tensor([[each, half, half] for each in n])
        return {"pixel_values_videos": pixels, "video_token_pooling": places, "video_grids": grids}
    grids = torch.tensor([[half, half, half * (each - 1), half] for each in n])
    tensors = {"pixel_values": pixels, "image_token_pooling": places, "image_grids": grids}
    return {**tensors, "image_num_crops": torch.tensor(n)}


def _with_questions(model, sizes, frames: int | None = None) -> Tensors:
    """Images or frames with the text for a query transformer."""
    pixels = _pictures(model, sizes)["pixel_values"]
    if frames is not None:
        pixels = torch.stack([pixels + 0.1 * i for i in range(frames)], dim=1)
    if "qformer_input_ids" not in arguments(model):
        return {"pixel_values": pixels}
    ids = torch.randint(20, 100, (len(sizes), 5))
    return {"pixel_values": pixels, "qformer_input_ids": ids, "qformer_attention_mask": torch.ones_like(ids)}


def _waves(model, sizes, mask: str, unit: int) -> Tensors:
    """Raw waveforms."""
    lengths = torch.tensor([unit * (3 + 2 * size) for size in sizes])
    own = torch.arange(int(lengths.max())) < lengths[:, None]
    values = torch.randn(*own.shape) * own
    return {"input_values": values[:, None] if mask == "padding_mask" else values, mask: own}


def _tile_rows(model, sizes) -> Tensors:
    """Images in tiles, in one row per prompt, with a mask of the tiles."""
    pixels = _pictures(model, [0] * sum(1 + size for size in sizes))["pixel_values"][None]
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(pixels.shape[:2], dtype=torch.bool)}


def _flat_grids(model, sizes) -> Tensors:
    patch = _first(_tower(model), "patch_size")
    grids = torch.tensor([[2, 2 + 2 * size] for size in sizes])
    return {"pixel_values": torch.randn(int(grids.prod(1).sum()), 3 * patch * patch), "image_grid_hw": grids}


def _folded(model, sizes) -> Tensors:
    config = _tower(model)
    side = _first(config, "patch_size", default=40)
    return {"pixel_values": torch.randn(sum(2 + size for size in sizes), config.temporal_patch_size, side, side, 3)}


def _looked_at(model, media, seed: int) -> EncodedPrompt:
    """Images for cross-attention layers, and a mask with the first token that attends to each."""
    generator = torch.Generator().manual_seed(seed)
    n = len(media)
    before = 3 + seed % 3
    behind = 6
    ids = torch.tensor([*_text(model, before, generator), *[model.config.image_token_index] * n])
    ids = torch.cat([ids, torch.tensor(_text(model, behind, generator))])
    if not n:
        return _prompt(model, ids, {}, {}, ())
    config = model.config.vision_config
    shown = torch.arange(config.max_num_tiles) < torch.tensor([1 + size for _, size in media])[:, None]
    side = config.image_size
    pixels = torch.randn(1, n, config.max_num_tiles, 3, side, side, generator=generator)
    looks = torch.arange(len(ids))[:, None] >= before + torch.arange(n)
    tensors = {
        "pixel_values": pixels * shown[None, :, :, None, None, None],
        "aspect_ratio_ids": torch.tensor([[1 + size for _, size in media]]),
        "aspect_ratio_mask": shown[None].long(),
    }
    return _prompt(model, ids, tensors, {"cross_attention_mask": (looks[:, :, None] & shown).long()}, ("image",))


def _looked_at_last(model, media, seed: int) -> EncodedPrompt:
    """Images for cross-attention layers, where each token attends to the last image before it."""
    generator = torch.Generator().manual_seed(seed)
    n = len(media)
    side = model.config.vision_config.image_size
    token = VOCABULARY  # after the vocabulary
    ids = torch.tensor([*_text(model, 3, generator), *[token] * n, *_text(model, 4 + seed % 3, generator)])
    looks = (ids == token).cumsum(0)[:, None] == 1 + torch.arange(max(n, 1))
    pixels = torch.randn(1, n, 3, side, side, generator=generator) if n else torch.zeros(1, 1, 3, side, side)
    kinds = ("image",) if n else ()
    return _prompt(model, ids, {"pixel_values": pixels}, {"image_attention_mask": looks.long()}, kinds)


def _merge_sizes(tensors: Tensors, name: str, size: int) -> Tensors:
    grids = next(value for key, value in tensors.items() if key.endswith("grid_thw"))
    return {**tensors, name: torch.full((len(grids),), size)}


def _positioned(model, sizes, frames: int = 1, kind: str = "image") -> Tensors:
    """Patches with their positions, padded with `-1`."""
    config = _tower(model)
    pool = getattr(config, "pooling_kernel_size", 1)
    patch = _first(config, "model_patch_size", "patch_size")
    grids = [(2 * pool, (2 + size) * pool) for size, _ in product(sizes, range(frames))]
    longest = 2 * 4 * pool * pool  # maximum over all prompts
    patches = torch.rand(len(grids), longest, 3 * patch * patch)
    places = torch.full((len(grids), longest, 2), -1)
    for own, (height, width) in zip(places, grids, strict=True):
        own[: height * width] = (
            torch.cartesian_prod(torch.arange(width), torch.arange(height))
            .view(width, height, 2)
            .transpose(0, 1)
            .reshape(-1, 2)
        )
    suffix = "" if kind == "image" else "_videos"
    return {f"pixel_values{suffix}": patches * (places[..., :1] >= 0), f"{kind}_position_ids": places}


def _positioned_videos(model, sizes) -> Tensors:
    counts = torch.full((len(sizes),), _FRAMES)
    return {**_positioned(model, sizes, _FRAMES, "video"), "num_frames_per_video": counts}


def _shaped(model, sizes) -> Tensors:
    """Padded patches of images, with their number along each side."""
    patch = _first(_tower(model), "patch_size")
    shapes = torch.tensor([[4, 4 + 2 * size] for size in sizes])
    counts = shapes.prod(1)
    mask = (torch.arange(int(counts.max())) < counts[:, None]).long()
    pixels = torch.randn(*mask.shape, 3 * patch * patch) * mask[..., None]
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def _row_of_patches(model, sizes, suffix: str = "") -> Tensors:
    """Patches in a row in one image."""
    patch = _first(_tower(model), "patch_size")
    shapes = torch.tensor([[4, 4 + 4 * size] for size in sizes], dtype=torch.int32)
    pixels = torch.randn(1, 3, patch, patch * int(shapes.prod(1).sum()))
    return {f"pixel_values{suffix}": pixels, f"target_sizes{suffix}": shapes}


def _squares(part: str | None = None, name: str = "pixel_values") -> Callable:
    """Images of the fixed size of a part of the model, or of 64 pixels."""

    def pictures(model, sizes) -> Tensors:
        side = 64 if part is None else attrgetter(part)(model.config).image_size
        return {name: torch.randn(len(sizes), 3, side, side)}

    return pictures


def _with_high_resolution(model, sizes) -> Tensors:
    high = _squares("high_res_vision_config", "high_res_pixel_values")
    return {**_pictures(model, sizes), **high(model, sizes)}


def _codes(model, sizes) -> Tensors:
    """Audio codes."""
    config = model.config.audio_config
    tensors = _mels(model, sizes, "audio_input_ids_mask", unit=6, by_frame=True)
    features = tensors.pop("input_features")
    codes = torch.randint(config.mel_vocab_size, (*features.shape[:2], config.n_mel_bins))
    return {"audio_input_ids": codes, **tensors}


def _stacked_patches(model, sizes) -> Tensors:
    config = _tower(model)
    side = config.spatial_merge_size * config.patch_size
    grids = torch.tensor([[1, 2, 2 + size] for size in sizes])
    return {"pixel_values": torch.randn(int(grids.prod(1).sum()), side, side, 3), "image_grid_thw": grids}


def _whisper_tokens(model, tensors: Tensors) -> int:
    frames = tensors["feature_attention_mask"].sum(-1)
    return int((((frames - 1) // 2 + 1 - 2) // 2 + 1).sum())


def _projected(model, sizes) -> Tensors:
    """Audio features with a mask of their tokens."""
    features = _mels(model, sizes, by_frame=True)["input_features"]
    model_config = model.config
    blocks = [-(-40 * (1 + size) // model_config.window_size) for size in sizes]
    tokens = torch.tensor(blocks) * (model_config.window_size // model_config.downsample_rate)
    mask = torch.arange(int(tokens.max())) < tokens[:, None]
    return {"input_features": features, "input_features_mask": mask}


_mels_with_mask = partial(_mels, mask="input_features_mask")
_mels_by_frame = partial(_mels_with_mask, by_frame=True)

_RECIPES: tuple[tuple[str, str, Callable], ...] = (
    ("image", "image_grid_thw", _image_grids),
    ("image", "image_position_ids", _positioned),
    ("image", "spatial_shapes", _shaped),
    ("image", "target_sizes", _row_of_patches),
    ("image", "high_res_pixel_values", _with_high_resolution),
    ("image", "pixel_attention_mask", _tiles),
    ("image", "pixel_values", _pictures),
    ("video", "video_grid_thw", _video_grids),
    ("video", "video_position_ids", _positioned_videos),
    ("video", "target_sizes_videos", partial(_row_of_patches, suffix="_videos")),
    ("video", "pixel_values_videos", _frames),
    ("video", "pixel_values", _pictures),
    ("audio", "feature_attention_mask", partial(_mels, mask="feature_attention_mask")),
    ("audio", "input_features_mask", _mels_with_mask),
    ("audio", "input_features", _mels),
    ("audio", "audio_input_ids", _codes),
)

# Recipes for single models, by `model_type` and kind
_OWN: dict[str, dict[str, Callable]] = {
    "blip-2": {"image": _with_questions},
    "chameleon": {"image": _squares()},
    "deepseek_ocr2": {"image": _squares("vision_config.sam_config")},
    "emu3": {"image": lambda model, sizes: _padded_images(torch.tensor([[16, 16 + 8 * size] for size in sizes]))},
    "fast_vlm": {"image": _squares()},
    "fun_asr_nano": {"audio": partial(_mels_by_frame, unit=9)},
    "fuyu": {
        "image": lambda model, sizes: {"pixel_values": torch.randn(len(sizes), 4, 3 * model.config.patch_size**2)}
    },
    "gemma4": {"audio": _mels_by_frame},
    "gemma4_unified": {"audio": _mels_by_frame},
    "gemma3n": {"audio": _mels_by_frame},
    "nemo_speechlm": {"audio": partial(_mels_by_frame, unit=64)},
    "granite4_vision": {"image": _crops},
    "granite_docling": {"image": _tile_rows},
    "inkling_mm_model": {"image": _folded},
    "instructblip": {"image": _with_questions},
    "instructblipvideo": {"video": partial(_with_questions, frames=4)},
    "granite_speech": {"audio": _projected},
    "granite_speech_plus": {"audio": _projected},
    **dict.fromkeys(("inkling2", "inkling2_loop"), {"image": _stacked_patches}),
    "kimi_k25": {
        "image": lambda model, sizes: _square_patches(_image_grids(model, sizes), model),
        "video": lambda model, sizes: _square_patches(_video_grids(model, sizes), model),
    },
    "lighton_ocr": {"image": _sized},
    "llava_next": {"image": _crops},
    "llava_next_video": {"image": _crops},
    "llava_onevision": {"image": _crops},
    "mistral3": {"image": _sized},
    "mistral_large4": {"image": _sized},
    "molmo2": {"image": _crops_of_molmo, "video": partial(_crops_of_molmo, suffix="videos")},
    "moss_transcribe_diarize": {
        "audio": lambda model, sizes: {
            **_mels(model, sizes, "input_features_mask"),
            "padding_mask": _mels(model, sizes, "padding_mask")["padding_mask"],
        }
    },
    "muse_spark": {"audio": partial(_waves, mask="input_values_mask", unit=640)},
    "nemotron_h_omni": {"image": _flat_grids},
    "perception_lm": {  # the tiles of all images, as those of one
        "image": lambda model, sizes: {"pixel_values": torch.randn(1, sum(1 + size for size in sizes), 3, 64, 64)}
    },
    "unlimited_ocr": {"image": _squares("vision_config.sam_config")},
    "vibevoice_asr": {"audio": partial(_waves, mask="padding_mask", unit=16)},
    "paddleocr_vl": {"image": lambda model, sizes: _square_patches(_image_grids(model, sizes), model)},
    "qwen3_asr": {"audio": partial(_mels_with_mask, unit=100)},
    "video_llama_3": {
        "image": lambda model, sizes: _merge_sizes(_image_grids(model, sizes), "image_merge_sizes", 1),
        "video": lambda model, sizes: _merge_sizes(_video_grids(model, sizes), "video_merge_sizes", 2),
    },
}

# From a model and a medium's tensors to its tokens, for models without such a function
_COUNTS: dict[str, dict[str, Callable]] = {
    **dict.fromkeys(("blip-2", "instructblip"), {"image": lambda model, tensors: model.config.num_query_tokens}),
    "instructblipvideo": {"video": lambda model, tensors: 4 * model.config.num_query_tokens},
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus"),
        {"audio": lambda model, tensors: int(tensors["input_features_mask"].sum())},
    ),
    "qwen2_audio": {"audio": _whisper_tokens},
}

# Prompts other than text with placeholders
_PROMPTS: dict[str, Callable] = {"idefics": _looked_at_last, "mllama": _looked_at}

# Families that write a video as image tokens between special tokens
_VIDEOS_AS_IMAGES = ("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "glm5_next")
