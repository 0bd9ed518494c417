# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""From chat messages to tensors: one [`EncodedPrompt`] per unique prompt, shared by all its completions."""

import base64
import copy
import inspect
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL.Image
import torch
import torch.nn.functional as F
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.image_utils import SizeDict
from transformers.utils import is_torchcodec_usable, logging
from trl import is_conversational
from trl.data_utils import prepare_multimodal_messages

from ..data.columns import KNOWN_TYPES, QWEN_OPTIONS, THOUGHT_TYPES, MediaError, MediaRef, block_kind, iter_refs
from ..data.loading import (
    encoded_source,
    load_audio,
    load_image,
    load_video,
    load_with_qwen_vl_utils,
    qwen_frame_indices,
    qwen_frame_size,
    require_module,
)
from ..data.sources import rooted
from ..families import (
    AUDIO_EXTRACTORS,
    AUDIO_NAMES,
    MODALITIES,
    PATCH_ROWS,
    TOKEN_FIELDS,
    family_of,
    family_of_processor,
    indexed_media,
    media_padding,
)
from .ablation import Ablation, blank, fitted


logger = logging.get_logger(__name__)

# Options by which a block chooses the frames of its video, and their size, and those that are qwen-vl-utils' alone
_FRAME_OPTIONS = {"fps", "nframes", "min_frames", "max_frames", "video_start", "video_end"}
_QWEN_ONLY = {"min_frames", "max_frames"}
_SIZE_OPTIONS = {"min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width"}

# Settings of a video processor that it doesn't hand to its rule of sampling
_NOT_FOR_SAMPLING = {"input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"}

# Frames per second that Qwen's models are given where nothing says more
_QWEN_FPS = 2.0


@dataclass(eq=False)
class DecodedPrompt:
    """
    A prompt before its processor has seen the media, for engines that run the processor themselves.

    Args:
        messages (`list[dict]`):
            Messages with decoded media.
        media (`dict[str, list]`):
            The media of each modality, in prompt order.
        processor_kwargs (`dict[str, Any]`):
            What the processor is told about them.
        template_kwargs (`dict[str, Any]`):
            Arguments for `apply_chat_template`.
        tokenizer_kwargs (`dict[str, Any]`, *optional*):
            Arguments for the tokenizer.
    """

    messages: list[dict[str, Any]]
    media: dict[str, list]
    processor_kwargs: dict[str, Any]
    template_kwargs: dict[str, Any]
    tokenizer_kwargs: dict[str, Any] = field(default_factory=dict)

    def token_ids(self, processor: ProcessorMixin) -> list[int]:
        """Tokenizes what the chat template writes, one placeholder per medium."""
        text = processor.apply_chat_template(
            self.messages, add_generation_prompt=True, tokenize=False, **self.template_kwargs
        )
        bos = processor.tokenizer.bos_token
        # As `apply_chat_template` does where the template writes it
        special = {"add_special_tokens": False} if bos is not None and text.startswith(bos) else {}
        return processor.tokenizer(text, **{**special, **self.tokenizer_kwargs})["input_ids"]


@dataclass(eq=False)
class EncodedPrompt:
    """
    A prompt as the model takes it, encoded once and shared by its completions, generation, scoring and the update.

    Args:
        input_ids (`torch.Tensor`):
            Token ids with expanded placeholders, shape `(P,)`, on the CPU.
        token_fields (`dict[str, torch.Tensor]`):
            Per-token processor outputs such as `mm_token_type_ids`, each of shape `(P,)`, and masks of cross-attention
            such as `cross_attention_mask`, each of shape `(P, ...)`.
        media (`dict[str, torch.Tensor]`):
            All other processor outputs, on the CPU. Empty for a text-only prompt, but where there is no forward
            without media.
        position_ids (`torch.Tensor`):
            Positions the model itself would use, or an engine that samples, shape `(1, P)` or, with multimodal rotary
            positions, `(R, 1, P)`.
        decoded (`tuple[tuple[slice, DecodedPrompt], ...]`, *optional*):
            Its parts that hold media, where they are in it, and what they were before the processor, where that is
            kept: the prompt, and in a conversation what tools returned.
        modalities (`frozenset[str]`, *optional*):
            Which of `"image"`, `"video"` and `"audio"` the prompt holds.
        row (`int`, *optional*):
            Index of the row in its batch, for errors.
        mask_cache (`dict`, *optional*):
            Attention masks of this prompt with text after it, by layer type, filled in when completions are packed.
    """

    input_ids: torch.Tensor
    token_fields: dict[str, torch.Tensor]
    media: dict[str, torch.Tensor]
    position_ids: torch.Tensor
    decoded: tuple[tuple[slice, DecodedPrompt], ...] = ()
    modalities: frozenset[str] = frozenset()
    row: int | None = None
    mask_cache: dict = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def shared(self) -> "EncodedPrompt":
        """What completions have in common that are forwarded together."""
        return self

    @property
    def parts(self) -> list["EncodedPrompt"]:
        """The prompt, and where tools returned media, what follows it up to the last of them."""
        return [self]

    def positions_after(self, n: int) -> torch.Tensor:
        """
        Positions of what follows the prompt.

        Args:
            n (`int`):
                Number of tokens.

        Returns:
            `torch.Tensor`: Shape `(1, n)` or `(R, 1, n)`.
        """
        return self.position_ids[..., -1:] + 1 + torch.arange(n)

    def field_after(self, name: str, n: int, fill: int) -> torch.Tensor:
        """
        What a token field holds on what follows the prompt.

        Args:
            name (`str`):
                Name of the field.
            n (`int`):
                Number of tokens.
            fill (`int`):
                What it holds on text.

        Returns:
            `torch.Tensor`: Shape `(n,)`.
        """
        return torch.full((n,), fill)

    def __getstate__(self) -> dict:
        # What is saved is for the update, which needs no decoded media and can build the masks again
        return {**self.__dict__, "decoded": (), "mask_cache": {}}


def placeholder_token_ids(model: PreTrainedModel, processor: Any) -> dict[str, set]:
    """
    Ids of the tokens that stand for media, by modality.

    Collects `<modality>_token_id`, `<modality>_token_index` and `<modality>_pad_token_id` from the model's config, its
    sub-configs and the processor, since each family keeps them elsewhere.
    """
    config = model.config
    holders = [config, processor, *(getattr(config, name) for name in config.sub_configs)]
    names = {kind: [f"{kind}_token_id", f"{kind}_token_index", f"{kind}_pad_token_id"] for kind in MODALITIES}
    values = {kind: {getattr(h, n, None) for h in holders for n in names[kind]} for kind in MODALITIES}
    return {kind: {v for v in ids if isinstance(v, int)} for kind, ids in values.items()}


def all_placeholder_ids(model: PreTrainedModel, processor: Any) -> set[int]:
    """The ids of [`placeholder_token_ids`], whatever they stand for."""
    return set().union(*placeholder_token_ids(model, processor).values())


def placeholder_tokens(model: PreTrainedModel, processor: ProcessorMixin | PreTrainedTokenizerBase) -> list[str]:
    """The tokens of [`placeholder_token_ids`] as text."""
    tokenizer = processor.tokenizer if isinstance(processor, ProcessorMixin) else processor
    tokens = tokenizer.convert_ids_to_tokens(sorted(all_placeholder_ids(model, processor)))
    return [token for token in tokens if token is not None]


def encode_prompt(
    messages: str | list[dict[str, Any]],
    processor: ProcessorMixin | PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: Literal["raise", "truncate"] = "raise",
    keep_decoded: bool = False,
    engine_positions: bool = False,
    ablation: Ablation | None = None,
    row: int | None = None,
) -> EncodedPrompt:
    """
    Decodes a prompt's media and runs the processor over it, once.

    Args:
        messages (`str` or `list[dict]`):
            Plain text, or messages whose media blocks hold [`MediaRef`]s.
        processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            Processing class with a chat template (for messages).
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model; gives the placeholder ids and the positions.
        template_kwargs (`dict[str, Any]`, *optional*):
            Arguments for `apply_chat_template`, such as `tools` or `chat_template`.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            What happens to audio longer than the model's window: `"raise"` or `"truncate"`.
        keep_decoded (`bool`, *optional*, defaults to `False`):
            Whether to keep the decoded media, for engines that process them themselves.
        engine_positions (`bool`, *optional*, defaults to `False`):
            Whether positions are those of vLLM, see [`engine_position_ids`], instead of the model's own.
        ablation ([`~encoding.ablation.Ablation`], *optional*):
            What takes the place of the media of a kind.
        row (`int`, *optional*):
            Index of the row in its batch, for errors.

    Returns:
        [`EncodedPrompt`]: The encoded prompt.

    Raises:
        [`MediaError`]: If a medium can't be decoded, if the processing class can't take it, if the prompt's
            placeholders don't agree with its media, or if the chat template leaves out a block. The message names the
            row and the column.
    """
    if isinstance(messages, list) and is_conversational({"prompt": messages}):
        check_blocks(messages, processor, template_kwargs or {}, row)
    if next(iter_refs(messages), None) is None and (needed := _needed_media(model)):
        raise MediaError(
            f"{_of_row(row)}column 'prompt': holds no media, and {type(model).__name__} has no forward without "
            f"{' and '.join(f'`{name}`' for name in needed)}; drop the row"
        )
    prompt = encode_messages(
        messages,
        processor,
        model,
        template_kwargs=template_kwargs,
        audio_overlong=audio_overlong,
        keep_decoded=keep_decoded,
        ablation=ablation,
        row=row,
    )
    input_ids = prompt.input_ids
    positions = prompt_position_ids(model, input_ids, prompt.media, prompt.token_fields)
    if engine_positions:
        placeholders = all_placeholder_ids(model, processor)
        own = positions
        positions = engine_position_ids(own, torch.isin(input_ids, torch.tensor(sorted(placeholders))))
        if not torch.equal(own, positions):
            logger.warning_once(
                f"{model.config.model_type}: a video has more steps in time than in space, after which vLLM goes on "
                "with other positions than transformers. Completions are scored at those of vLLM, which samples them."
            )
    prompt.position_ids = positions
    return prompt


def encode_messages(
    messages: str | list[dict[str, Any]],
    processor: ProcessorMixin | PreTrainedTokenizerBase,
    model: PreTrainedModel,
    *,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: Literal["raise", "truncate"] = "raise",
    keep_decoded: bool = False,
    ablation: Ablation | None = None,
    row: int | None = None,
    **processor_options,
) -> EncodedPrompt:
    """
    Decodes media and runs the processor over them, once. Positions depend on what comes before, and are left out.
    """
    refs = list(iter_refs(messages))
    placeholders = placeholder_token_ids(model, processor)
    if isinstance(processor, ProcessorMixin):
        _check_text(messages, refs, placeholder_tokens(model, processor), row)
    decoded, processor_kwargs = decode_media(refs, processor, audio_overlong, ablation)
    kept = None
    if keep_decoded and refs and isinstance(messages, list) and isinstance(processor, ProcessorMixin):
        by_kind = {kind: [decoded[id(ref)] for ref in refs if ref.kind == kind] for kind in MODALITIES}
        kept = DecodedPrompt(
            replace_refs(_prepared(messages, processor, row), decoded),
            {kind: found for kind, found in by_kind.items() if found},
            copy.deepcopy(processor_kwargs),  # processors write into it
            template_kwargs or {},
            processor_options,
        )
    processor_kwargs |= processor_options
    outputs = processor_outputs(messages, processor, decoded, processor_kwargs, template_kwargs, row)
    input_ids = outputs["input_ids"][0]
    family = family_of(model)
    token_fields = {name: outputs[name][0] for name in (*TOKEN_FIELDS, *family.token_masks) if name in outputs}
    media = {name: value for name, value in outputs.items() if name not in ("input_ids", *token_fields)}
    _check_placeholders(input_ids, refs, media, placeholders, row)
    return EncodedPrompt(
        input_ids=input_ids,
        token_fields=token_fields,
        media=media if refs or family.blank_media else {},
        position_ids=input_ids.new_empty(1, 0),
        decoded=() if kept is None else ((slice(0, len(input_ids)), kept),),
        modalities=frozenset(ref.kind for ref in refs),
        row=row,
    )


def _needed_media(model: PreTrainedModel) -> list[str]:
    """Media without which a model has no forward."""
    parameters = inspect.signature(type(model).forward).parameters
    needed = [name for name, each in parameters.items() if each.default is each.empty]
    return [name for name in needed if any(part in name for part in ("pixel", *MODALITIES, *AUDIO_NAMES))]


def processor_outputs(
    messages: str | list[dict[str, Any]],
    processor: ProcessorMixin | PreTrainedTokenizerBase,
    decoded: dict[int, Any],
    processor_kwargs: dict[str, Any],
    template_kwargs: dict[str, Any] | None = None,
    row: int | None = None,
) -> dict[str, torch.Tensor]:
    """Calls a processor on one prompt, as transformers documents it."""
    refs = list(iter_refs(messages))
    encoded: Any
    if isinstance(messages, str) or not is_conversational({"prompt": messages}):
        encoded = processor(text=[messages], return_tensors="pt")
    else:
        if refs and not isinstance(processor, ProcessorMixin):
            raise refs[0].error(
                f"{type(processor).__name__} is a tokenizer and can't encode {refs[0].kind}; pass "
                "`processing_class=AutoProcessor.from_pretrained(...)` with the model's processor"
            )
        messages = _prepared(messages, processor, row)
        options: dict[str, Any] = {"add_generation_prompt": True, **(template_kwargs or {})}
        if processor_kwargs:
            options["processor_kwargs"] = _flat(processor_kwargs)
        try:
            encoded = processor.apply_chat_template(
                [replace_refs(messages, decoded)],
                tokenize=True,
                return_dict=True,
                return_tensors="pt",
                **options,
            )
        except ImportError:
            raise
        except Exception as error:  # of any type, as templates and processors check little
            if not refs or isinstance(error, TemplateError) or _lacks_template(processor, options):
                raise _template_error(error, processor, options, f"{_of_row(row)}column 'prompt'") from error
            _check_each(refs, decoded, processor, processor_kwargs)
            raise refs[0].error(
                f"{type(processor).__name__} rejected the prompt and its media ({error}); check that the chat "
                "template writes one placeholder per medium and that the text holds none of its own"
            ) from error
    return {
        name: value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
        for name, value in encoded.items()
        if name not in ("attention_mask", "labels")
    }


def write_chat(messages: list[dict[str, Any]], processor, place: str, **template_kwargs) -> str:
    """What a chat template writes."""
    try:
        return processor.apply_chat_template(messages, tokenize=False, **template_kwargs)
    except Exception as error:  # of any type, as templates check little
        raise _template_error(error, processor, template_kwargs, place) from error


def _prepared(messages: list[dict[str, Any]], processor, row: int | None) -> list[dict[str, Any]]:
    """Messages as processors take them, which know fewer roles than tokenizers."""
    if not isinstance(processor, ProcessorMixin):
        return messages
    try:
        return prepare_multimodal_messages(messages)
    except ValueError as error:
        raise MediaError(f"{_of_row(row)}column 'prompt': {error} Rename the role, or remove the row.") from error


def _lacks_template(processor, template_kwargs: dict[str, Any]) -> bool:
    own = getattr(processor, "chat_template", None) or template_kwargs.get("chat_template")
    # Mistral's tokenizers have their rules elsewhere
    return not own and not family_of_processor(processor).takes_base64_audio


def _template_error(error: Exception, processor, template_kwargs: dict[str, Any], place: str) -> MediaError:
    name = type(processor).__name__
    if _lacks_template(processor, template_kwargs):
        return MediaError(
            f"{place}: {name} has no chat template that could write messages; set `processing_class.chat_template`"
        )
    return MediaError(
        f"{place}: the chat template of {name} rejected the messages ({error}); change them to what it takes"
    )


def _flat(processor_kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with those that some `apply_chat_template` looks for where it does."""
    videos_kwargs = dict(processor_kwargs.get("videos_kwargs", {}))
    if "do_sample_frames" not in videos_kwargs:
        return processor_kwargs
    sampling = {"do_sample_frames": videos_kwargs.pop("do_sample_frames")}
    return {**processor_kwargs, **sampling, "videos_kwargs": videos_kwargs}


def outputs_of_files(
    messages: list[dict[str, Any]],
    processor: ProcessorMixin,
    audio_overlong: Literal["raise", "truncate"],
    template_kwargs: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor] | None:
    """
    What a processor makes of a prompt whose videos it reads itself, as transformers documents it. `None` if not all
    videos are local files without options, or transformers can't read files.
    """
    refs = list(iter_refs(messages))
    videos = [ref for ref in refs if ref.kind == "video"]
    if not videos or not is_torchcodec_usable(decode="video") or any(ref.options for ref in videos):
        return None
    sources = [encoded_source(ref) for ref in videos]
    if not all(isinstance(source, (str, os.PathLike)) for source in sources):
        return None
    paths = [Path(rooted(ref, source)) for ref, source in zip(videos, sources, strict=True)]
    if not all(path.is_file() for path in paths):
        return None
    decoded, kwargs = decode_media([ref for ref in refs if ref.kind != "video"], processor, audio_overlong)
    decoded |= {id(ref): path for ref, path in zip(videos, paths, strict=True)}
    sampling = _sampling(processor)
    kwargs["videos_kwargs"] = {"do_sample_frames": sampling is not None, **(sampling or {})}
    return processor_outputs(messages, processor, decoded, kwargs, template_kwargs)


def _check_each(refs: list[MediaRef], decoded: dict[int, Any], processor, processor_kwargs: dict[str, Any]) -> None:
    """Names the image or the video that can't be processed by itself either."""
    videos = 0
    for ref in refs:
        medium: Any = decoded[id(ref)]
        size = ""
        try:
            if ref.kind == "image":
                size = "an image of {} x {} pixels".format(*medium.size)
                processor.image_processor(images=[medium], **processor_kwargs.get("images_kwargs", {}))
            elif ref.kind == "video":
                size = f"a video of shape {tuple(medium.shape)}"
                options = processor_kwargs["videos_kwargs"]
                metadata = [[options["video_metadata"][0][videos]]]
                videos += 1
                processor.video_processor(videos=[[medium]], **{**options, "video_metadata": metadata})
        except Exception as error:
            raise ref.error(
                f"{type(processor).__name__} can't take {size} ({error}); resize it or remove the row"
            ) from error


def prompt_position_ids(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    media: dict[str, torch.Tensor],
    token_fields: dict[str, torch.Tensor],
) -> torch.Tensor:
    """
    Positions of a prompt by the model's own rule, the one its `generate` uses: `(1, P)` or `(R, 1, P)`.

    Text after the prompt continues at `positions[..., -1:] + 1`. Ids and token fields have the shape `(P,)`.
    """
    ids = input_ids[None]
    model_kwargs = {**media, **{name: value[None] for name, value in token_fields.items()}}
    # The rule stores its offset on the backbone for the decoding steps of `generate`; we carry positions ourselves.
    holder: Any = next((m for m in (model, model.base_model) if hasattr(m, "rope_deltas")), None)
    before = holder.rope_deltas if holder is not None else None
    positions = model._prepare_position_ids_for_generation(
        ids, {**model_kwargs, "attention_mask": torch.ones_like(ids)}
    )
    if holder is not None:
        holder.rope_deltas = before
    return positions


def engine_position_ids(positions: torch.Tensor, is_media: torch.Tensor) -> torch.Tensor:
    """
    Positions by the rule of vLLM: what follows a medium continues behind its last position in time.

    Takes the model's own positions `(1, P)` or `(R, 1, P)` and the mask of media tokens `(P,)`, and returns positions
    of the same shape.
    """
    if positions.dim() < 3:
        return positions
    axes = positions[-3:, 0].clone()
    for end in ((is_media[:-1] & ~is_media[1:]).nonzero()[:, 0] + 1).tolist():
        axes[:, end:] += axes[:, :end].max() + 1 - axes[0, end]
    return torch.cat([positions[:-3], axes[:, None]])


def same_prompt(a: Any, b: Any) -> bool:
    """Whether two prompts have the same messages and media. Media are compared by value, decoders by type."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (np.ndarray, PIL.Image.Image)) and type(a) is type(b):
        return np.array_equal(np.asarray(a), np.asarray(b))
    if isinstance(a, MediaRef) and isinstance(b, MediaRef):
        return same_prompt(a.source, b.source) and a.options == b.options
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_prompt(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_prompt(x, y) for x, y in zip(a, b, strict=True))
    if type(a).__eq__ is object.__eq__:
        return type(a) is type(b)
    return type(a) is type(b) and a == b


def continued_field(model: PreTrainedModel, name: str, values: torch.Tensor, n_new: int) -> torch.Tensor:
    """
    A token field of prompts `(B, P, ...)` with that of text after them, as `generate` continues it: `(B, P + n_new,
    ...)`.
    """
    family = family_of(model)
    behind = values[:, -1:]
    if name not in family.token_masks:
        behind = torch.full_like(behind, family.token_field_fill.get(name, 0))
    return torch.cat([values, behind.expand(-1, n_new, *behind.shape[2:])], dim=1)


def join_media(prompts: Iterable[EncodedPrompt]) -> dict[str, torch.Tensor]:
    """
    Joins the media of several prompts into one forward's arguments.

    Tensors are concatenated on their first dimension, or the last if they are a row of patches, and padded on the
    right on the others. Indices into another tensor are shifted by what earlier prompts hold of it.
    """
    collected: dict[str, list[torch.Tensor]] = {}
    places: Counter[str] = Counter()  # in each tensor so far
    for prompt in prompts:
        for name, value in prompt.media.items():
            indexed = indexed_media(name)
            if indexed is not None:
                value = torch.where(value < 0, value, value + places[indexed])
            collected.setdefault(name, []).append(value)
        places.update({name: value.shape[:-1].numel() for name, value in prompt.media.items()})
    rows = {PATCH_ROWS[name] for name in collected if name in PATCH_ROWS}
    return {
        name: cat_padded(values, media_padding(name), dim=-1 if name in rows else 0)
        for name, values in collected.items()
    }


def cat_padded(tensors: list[torch.Tensor], value: int, dim: int = 0) -> torch.Tensor:
    """Concatenates tensors on one dimension, the others padded on the right to the largest."""
    largest = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        missing = [m - s for m, s in zip(largest, tensor.shape, strict=True)]
        missing[dim] = 0
        pairs = [p for m in reversed(missing) for p in (0, m)]
        padded.append(F.pad(tensor, pairs, value=value) if any(missing) else tensor)
    return torch.cat(padded, dim)


def decode_media(
    refs: list[MediaRef],
    processor: ProcessorMixin | PreTrainedTokenizerBase,
    audio_overlong: Literal["raise", "truncate"],
    ablation: Ablation | None = None,
) -> tuple[dict[int, Any], dict[str, Any]]:
    """
    Decodes media as a processor takes them, by the `id` of their reference, with `processor_kwargs` that describe
    them.
    """
    decoded: dict[int, Any] = {}
    video_metadata: list[dict[str, Any]] = []
    kwargs: dict[str, Any] = {}
    family = family_of_processor(processor)
    # One call of the processor resizes all images or none
    resized = {ref.kind for ref in refs if family.has_qwen_vl_utils and ref.kind != "audio" and _chooses_its_size(ref)}
    others = [_decode(ref, processor, "truncate", resized)[0] for ref in (ablation.others if ablation else ())]
    turns = itertools.cycle(others)
    for ref in refs:
        unused = [] if ref.kind in resized else sorted(ref.options.keys() & QWEN_OPTIONS)
        if unused:
            logger.warning_once(
                f"{type(processor).__name__} doesn't read {', '.join(unused)} of blocks, which have no effect; set "
                "them in the configuration of its processor."
            )
        medium, metadata = _decode(ref, processor, audio_overlong, resized)
        if ablation is not None and ref.kind == ablation.kind:
            medium = fitted(next(turns), medium) if others else blank(medium)
        if ref.kind == "audio" and family.takes_base64_audio:
            medium = _base64_wav(medium, _audio_limits(ref, processor)[0])
        decoded[id(ref)] = medium
        if metadata is not None:
            video_metadata.append(metadata)
    if video_metadata:
        kwargs["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": [video_metadata]}
    for kind in resized:
        kwargs.setdefault(f"{kind}s_kwargs", {})["do_resize"] = False
    return decoded, kwargs


def _decode(
    ref: MediaRef, processor, audio_overlong: Literal["raise", "truncate"], resized: set[str]
) -> tuple[Any, dict[str, Any] | None]:
    """A medium, of a kind that is resized here or by the processor, and the metadata of a video."""
    if ref.kind == "audio":
        return load_audio(ref, *_audio_limits(ref, processor), audio_overlong), None
    if ref.kind == "image":
        if isinstance(processor, ProcessorMixin) and not hasattr(processor, "image_processor"):
            raise ref.error(f"{type(processor).__name__} takes no images; use a model that does, or drop the column")
        if "image" not in resized:
            return load_image(ref), None
        ref_with_limits = replace(
            ref, options={**_pixel_limits(processor.image_processor.size, ref.options), **ref.options}
        )
        return load_with_qwen_vl_utils(ref_with_limits, processor.image_processor.patch_size), None
    if "video" in resized:
        return _qwen_video(ref, processor)
    return load_video(ref, _frame_sampler(ref, processor))


def _qwen_video(ref: MediaRef, processor) -> tuple[torch.Tensor, dict[str, Any]]:
    """A video sampled and resized by the options of its block, within the processor's limits, or by the processor."""
    video_processor, options = processor.video_processor, ref.options
    size = getattr(processor, "videos_kwargs", {}).get("size", video_processor.size)  # what its call goes by
    sampler = _frame_sampler(ref, processor)
    if sampler is None:
        names = _QWEN_ONLY if "nframes" in options else {"fps", *_QWEN_ONLY}
        limits = {name: getattr(video_processor, name, None) for name in names}
        known = {name: value for name, value in limits.items() if value is not None}
        sampler = partial(qwen_frame_indices, {**known, **options})
    if options.keys() & _SIZE_OPTIONS:
        whole = family_of_processor(processor).bounds_whole_videos

        def frame_size(count: int, height: int, width: int) -> tuple[int, int]:
            limits = _pixel_limits(size, options, count if whole else 1)
            return qwen_frame_size({**limits, **options}, video_processor.patch_size, count, height, width)

        loaded: Any = load_with_qwen_vl_utils(ref, video_processor.patch_size, sampler, frame_size)
        frames, metadata = loaded
    else:
        array, metadata = load_video(ref, sampler, partial(_resized_frames, video_processor, size))
        frames = torch.from_numpy(array).permute(0, 3, 1, 2)
    return frames, {**metadata, "fps": metadata["fps"] or _QWEN_FPS}


def _resized_frames(video_processor, limits, frames: np.ndarray, count: int) -> np.ndarray:
    """Some of `count` frames, of shape (N, H, W, 3), resized as the processor resizes all of them together."""
    if not video_processor.do_resize:
        return frames
    whole = video_processor.resize(
        videos=torch.empty(1, count, 3, *frames.shape[1:3], dtype=torch.uint8, device="meta"),
        size=SizeDict(**limits) if isinstance(limits, dict) else limits,
        resample=video_processor.resample,
        factor=video_processor.patch_size * video_processor.merge_size,
        temporal_factor=video_processor.temporal_patch_size,
        cap_pixels_per_frame=getattr(video_processor, "cap_pixels_per_frame", None),
    )
    from transformers.video_processing_utils import BaseVideoProcessor  # which takes torchvision

    size = SizeDict(height=whole.size(-2), width=whole.size(-1))
    tensor = torch.from_numpy(frames).permute(0, 3, 1, 2)
    resized = BaseVideoProcessor.resize(video_processor, tensor, size, video_processor.resample)
    return resized.permute(0, 2, 3, 1).numpy()


def _chooses_its_size(ref: MediaRef) -> bool:
    return bool(ref.options) or isinstance(ref.source, (str, os.PathLike, dict))


def _pixel_limits(size, options: dict[str, Any], count: int = 1) -> dict[str, float]:
    """Limits of an image or a frame, where `size` bounds `count` of them. An option for one moves the other."""
    return {
        "min_pixels": min(size["shortest_edge"] / count, options.get("max_pixels", math.inf)),
        "max_pixels": max(size["longest_edge"] / count, options.get("min_pixels", 0)),
    }


def _base64_wav(waveform: np.ndarray, rate: int) -> str:
    buffer = io.BytesIO()
    require_module("soundfile", "audio").write(buffer, waveform, rate, format="WAV", subtype="FLOAT")
    return base64.b64encode(buffer.getvalue()).decode()


def _audio_limits(ref: MediaRef, processor) -> tuple[int, float | None]:
    """Sampling rate the processor wants, in Hz, and the longest audio its encoder sees whole, in seconds."""
    extractor = next((getattr(processor, name) for name in AUDIO_EXTRACTORS if hasattr(processor, name)), None)
    if extractor is None:
        raise ref.error(f"{type(processor).__name__} takes no audio; use a model that does, or drop the column")
    limit = family_of_processor(processor).audio_limit
    return extractor.sampling_rate, None if limit is None else limit(processor)


def _frame_sampler(ref: MediaRef, processor):
    """The processor's own choice of frames, where the block doesn't choose."""
    if not hasattr(processor, "video_processor"):
        raise ref.error(f"{type(processor).__name__} takes no video; use a model that does, or drop the column")
    known = _FRAME_OPTIONS if family_of_processor(processor).has_qwen_vl_utils else _FRAME_OPTIONS - _QWEN_ONLY
    sampling = None if known & ref.options.keys() else _sampling(processor)
    if sampling is None:
        return None
    video_processor = processor.video_processor
    names = video_processor.valid_kwargs.__annotations__.keys() - _NOT_FOR_SAMPLING
    # Those of its settings that the processor hands to its rule, which needn't look at the others
    settings = {name: getattr(video_processor, name, None) for name in names}
    return partial(video_processor.sample_frames, **{**settings, **sampling})


def _sampling(processor) -> dict[str, Any] | None:
    """Arguments by which a processor samples frames of a file; `None` where it takes all of them."""
    video_processor, family = processor.video_processor, family_of_processor(processor)
    has_rate = any(getattr(video_processor, name, None) is not None for name in ("fps", "num_frames"))
    if video_processor.do_sample_frames or (has_rate and (family.samples_frames or family.has_qwen_vl_utils)):
        return {}
    return {"fps": _QWEN_FPS} if family.has_qwen_vl_utils else None


def _check_text(
    messages: str | list[dict[str, Any]], refs: list[MediaRef], tokens: list[str], row: int | None
) -> None:
    for message in [{"content": messages}] if isinstance(messages, str) else messages:
        content = message.get("content") or ""
        for part in [{"text": content}] if isinstance(content, str) else content:
            found = next((token for token in tokens if token in (part.get("text") or "")), None)
            if found is not None and refs:
                raise refs[0].error(
                    f"the text of the prompt holds the placeholder {found!r} itself; remove it, the chat template "
                    "writes one for each medium"
                )
            if found is not None:
                raise MediaError(
                    f"{_of_row(row)}column 'prompt': its text holds the placeholder {found!r} but no media; give the "
                    "row its media, or remove the placeholder from the text"
                )


def check_blocks(
    messages: list[dict[str, Any]],
    processor: Any,
    template_kwargs: dict[str, Any],
    row: int | None = None,
) -> None:
    """Refuses blocks of types that only the chat template could know, and doesn't: it writes them as it would any."""
    for m, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for b, block in enumerate(content):
            if block["type"] in ("text", *THOUGHT_TYPES) or block_kind(block["type"]) is not None:
                continue
            of_no_type = [*content[:b], {"type": "-"}, *content[b + 1 :]]
            others = [*messages[:m], {**message, "content": of_no_type}, *messages[m + 1 :]]
            try:
                written, other = (
                    processor.apply_chat_template(chat, tokenize=False, **template_kwargs)
                    for chat in (messages, others)
                )
            except Exception:  # a template that refuses one of them says so, or knows the other
                continue
            if written == other:
                raise MediaError(
                    f"{_of_row(row)}column 'prompt[{m}].content[{b}]': the chat template leaves out blocks of type "
                    f"{block['type']!r}, so that the model would not get it; known types are {KNOWN_TYPES}"
                )


def _of_row(row: int | None) -> str:
    return "" if row is None else f"row {row}, "


def _check_placeholders(
    input_ids: torch.Tensor,
    refs: list[MediaRef],
    media: dict[str, torch.Tensor],
    placeholders: dict[str, set[int]],
    row: int | None,
) -> None:
    present = set(input_ids.tolist())
    for ref in refs:
        # A processor may write its videos with the image token
        ids = placeholders[ref.kind] | (placeholders["image"] if ref.kind == "video" else set())
        if not media or not ids & present:
            raise ref.error(
                f"the chat template wrote no placeholder for this {ref.kind}, so the model would not get it; use the "
                "template that belongs to the model's processor"
            )
    stray = set().union(*placeholders.values()) & present
    if stray and not refs:
        raise MediaError(
            f"{_of_row(row)}column 'prompt': holds the placeholder token ids {sorted(stray)} but no media; give the "
            "row its media, or remove the placeholder from the text"
        )


def replace_refs(messages: list[dict], decoded: dict[int, Any]) -> list[dict]:
    """Puts decoded media into messages."""

    def block(part):
        kind, value = part["type"], part.get(part["type"])
        if not isinstance(value, MediaRef):
            return part
        medium = decoded[id(value)]
        if isinstance(medium, Path):
            return {"type": kind, "path": str(medium)}
        return {"type": kind, "base64" if isinstance(medium, str) else kind: medium}

    return [
        {**message, "content": [block(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in messages
    ]
