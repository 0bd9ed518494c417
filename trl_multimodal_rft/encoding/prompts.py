# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoding of chat messages: one [`EncodedPrompt`] per unique prompt, shared by all its completions."""

import copy
import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from jinja2 import TemplateError
from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin
from transformers.utils import logging
from trl import is_conversational
from trl.data_utils import prepare_multimodal_messages

from ..data.reading.refs import MediaError, MediaRef, iter_refs
from ..data.reading.sources import encoded_source, join_media_dir
from ..data.rows.rendered import RenderedPrompt
from ..families import AUDIO_NAMES, TOKEN_FIELDS, family_of, family_of_processor
from ..modalities import MODALITIES
from ..versions import is_torchcodec_usable
from ..views.views import View
from .media import SOUNDS, decode_media, frame_sampling, replace_refs, with_budgets
from .messages import (
    VERBATIM,
    check_media,
    check_placeholders,
    check_text,
    check_written,
    has_template,
    of_row,
    template_error,
    without_none,
)
from .processors import Processor, tokenizer_of


logger = logging.get_logger(__name__)


@dataclass(eq=False)
class DecodedPrompt:
    """A prompt, or a tool result, with decoded media, for engines that run the processor themselves."""

    messages: list[dict[str, Any]]
    media: dict[str, list]  # by modality, in prompt order
    processor_kwargs: dict[str, Any]
    template_kwargs: dict[str, Any]
    tokenizer_kwargs: dict[str, Any] = field(default_factory=dict)

    def token_ids(self, processor: ProcessorMixin) -> list[int]:
        """Tokenizes the rendered messages, with one placeholder per image, video or sound."""
        options = generation_options(self.messages, self.template_kwargs)
        text = processor.apply_chat_template(self.messages, tokenize=False, **options)
        bos = processor.tokenizer.bos_token
        # Like `apply_chat_template`, adds no second BOS token if the template writes one
        bos_options = {"add_special_tokens": False} if bos is not None and text.startswith(bos) else {}
        return processor.tokenizer(text, **{**bos_options, **self.tokenizer_kwargs})["input_ids"]


@dataclass(eq=False)
class EncodedPrompt:
    """
    A prompt as model inputs, encoded once and shared by its completions, generation, scoring and the update.

    Args:
        input_ids (`torch.Tensor`):
            Token ids with expanded placeholders, shape `(P,)` for `P` tokens, on the CPU.
        token_fields (`dict[str, torch.Tensor]`):
            Per-token processor outputs such as `mm_token_type_ids`, each of shape `(P,)`, and masks of cross-attention
            such as `cross_attention_mask`, each of shape `(P, ...)`.
        media (`dict[str, torch.Tensor]`):
            All other processor outputs, on the CPU. Empty for text-only prompts, unless the model's forward requires
            media, and the processor adds blank media.
        position_ids (`torch.Tensor`):
            Positions by the rule of the model, or of the engine that samples. Shape `(1, P)`, or `(R, 1, P)` for
            multimodal rotary embeddings with `R` axes.
        decoded (`tuple[tuple[slice, DecodedPrompt], ...]` or `dict[str, Any]`, *optional*):
            Spans and decoded media of the parts with media (the prompt, and tool results of a conversation), if media
            are kept. If another process encodes prompts, the features that a vLLM server takes.
        modalities (`frozenset[str]`, *optional*):
            Modalities of the prompt's media: `"image"`, `"video"` or `"audio"`.
        row (`int`, *optional*):
            Index of the row in its dataset, for errors.
        media_span (`tuple[int, int]`, *optional*):
            Index of the first placeholder, and the index after the last one, if known. For the ids 5, 9, 9, 9, 7 with
            the placeholder 9, the span is `(1, 4)`.
        mask_cache (`dict`, *optional*):
            Attention masks of this prompt with text after it, by layer type, filled when completions are packed.
        on_device (`dict`, *optional*):
            Cache of forwards on their device: the tensors of the media, and the outputs of frozen encoders for them.
            Copies of the prompt with the same media share the cache.
    """

    input_ids: torch.Tensor
    token_fields: dict[str, torch.Tensor]
    media: dict[str, torch.Tensor]
    position_ids: torch.Tensor
    decoded: Any = ()
    modalities: frozenset[str] = frozenset()
    row: int | None = None
    media_span: tuple[int, int] | None = None
    mask_cache: dict = field(default_factory=dict, repr=False)
    on_device: dict = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def shared(self) -> "EncodedPrompt":
        """The part that completions share in one forward pass."""
        return self

    @property
    def parts(self) -> list["EncodedPrompt"]:
        """The prompt and, if tools returned media, the tokens after the prompt up to the end of the last result."""
        return [self]

    @property
    def contexts(self) -> list["EncodedPrompt"]:
        """The prompt, and the contexts that replaced it in the course of a completion."""
        return [self]

    def lengths_by_context(self, n: int) -> list[int]:
        """
        Splits a completion by contexts.

        Args:
            n (`int`):
                Number of tokens of the completion.

        Returns:
            `list[int]`: The number of tokens that follow each context.
        """
        return [n]

    def part(self, span: slice) -> "EncodedPrompt":
        """
        Returns some of the tokens, with the media if the first placeholder is among them.

        Args:
            span (`slice`):
                Indices of the tokens.

        Returns:
            [`EncodedPrompt`]: The part, at the positions of the whole.
        """
        has_media = (self.media_span or (0, 0))[0] in range(*span.indices(len(self)))
        return EncodedPrompt(
            self.input_ids[span],
            {name: value[span] for name, value in self.token_fields.items()},
            self.media if has_media else {},
            self.position_ids[..., span],
            modalities=self.modalities if has_media else frozenset(),
            row=self.row,
            on_device=self.on_device if has_media else {},
        )

    def positions_after(self, n: int) -> torch.Tensor:
        """
        Returns the positions of the tokens after the prompt.

        Args:
            n (`int`):
                Number of tokens.

        Returns:
            `torch.Tensor`: Shape `(1, n)` or `(R, 1, n)`.
        """
        return self.position_ids[..., -1:] + 1 + torch.arange(n)

    def field_after(self, name: str, n: int, fill: int) -> torch.Tensor:
        """
        Returns the values of a token field on the tokens after the prompt.

        Args:
            name (`str`):
                Name of the field.
            n (`int`):
                Number of tokens.
            fill (`int`):
                The field's value on text.

        Returns:
            `torch.Tensor`: Shape `(n,)`.
        """
        return torch.full((n,), fill)

    def __getstate__(self) -> dict:
        # The update needs no decoded media and can fill the caches again
        return {**self.__dict__, "decoded": (), "mask_cache": {}, "on_device": {}}


def placeholder_token_ids(model: PreTrainedModel, processor: Processor | PreTrainedModel | None) -> dict[str, set]:
    """
    Returns ids of placeholder tokens by modality. Families name these ids differently, so the result has all ids under
    the names `<modality>_token_id`, `<modality>_token_index` and `<modality>_pad_token_id` in the model's config, in
    its sub-configs and in the processor.
    """
    config = model.config
    holders = [config, processor, *(getattr(config, name) for name in config.sub_configs)]
    ids_by_modality: dict[str, set] = {}
    for modality in MODALITIES:
        ids: set[Any] = set()
        for name in (f"{modality}_token_id", f"{modality}_token_index", f"{modality}_pad_token_id"):
            ids.update(getattr(holder, name, None) for holder in holders)
        ids_by_modality[modality] = {token_id for token_id in ids if isinstance(token_id, int)}  # not `None`
    return ids_by_modality


def all_placeholder_ids(model: PreTrainedModel, processor: Processor | PreTrainedModel | None) -> set[int]:
    """Returns the ids of [`placeholder_token_ids`] for all modalities."""
    return set().union(*placeholder_token_ids(model, processor).values())


def placeholder_tokens(model: PreTrainedModel, processor: Processor) -> list[str]:
    """Returns the tokens of [`placeholder_token_ids`] as text."""
    tokens = tokenizer_of(processor).convert_ids_to_tokens(sorted(all_placeholder_ids(model, processor)))
    return [token for token in tokens if token is not None]


def text_placeholders(model: PreTrainedModel, processor: Processor) -> dict[str, list[str]]:
    """
    Returns by modality the texts that a chat template writes for a medium, such as `"<start_of_image>"`, for which the
    processor inserts the tokens of [`placeholder_token_ids`].
    """
    tokenizer = tokenizer_of(processor)
    texts = {}
    for modality, ids in placeholder_token_ids(model, processor).items():
        own_text = getattr(processor, f"{modality}_token", None)
        tokens = tokenizer.convert_ids_to_tokens(sorted(ids)) if own_text is None else [own_text]
        texts[modality] = [token for token in tokens if token is not None]
    return texts


def encode_prompt(
    messages: str | list[dict[str, Any]] | RenderedPrompt,
    processor: Processor,
    model: PreTrainedModel,
    *,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: Literal["raise", "truncate"] = "raise",
    keep_decoded: bool = False,
    use_engine_positions: bool = False,
    view: View | None = None,
    row: int | None = None,
    sampled: bool = False,
) -> EncodedPrompt:
    """
    Decodes a prompt's media and runs the processor over it, once.

    Args:
        messages (`str`, `list[dict]` or [`~data.rows.rendered.RenderedPrompt`]):
            Plain text, or messages whose media blocks hold [`MediaRef`]s, or a text that already has its template and
            placeholders, which the processor gets as it is.
        processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            Processing class with a chat template (for messages).
        model ([`~transformers.PreTrainedModel`]):
            Unwrapped model, which determines the placeholder ids and the positions.
        template_kwargs (`dict[str, Any]`, *optional*):
            Arguments for `apply_chat_template`, such as `tools` or `chat_template`.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            Treatment of audio longer than the model's window: `"raise"` or `"truncate"`.
        keep_decoded (`bool`, *optional*, defaults to `False`):
            Whether to keep the decoded media, for engines that process them themselves.
        use_engine_positions (`bool`, *optional*, defaults to `False`):
            Whether to use vLLM's positions, see [`engine_position_ids`], instead of the model's.
        view ([`~views.View`], *optional*):
            Change of the media that the model sees or hears.
        row (`int`, *optional*):
            Index of the row in its dataset, for errors.
        sampled (`bool`, *optional*, defaults to `False`):
            Whether the assistant's messages were sampled, so that the template may leave out their thoughts.

    Returns:
        [`EncodedPrompt`]: The encoded prompt.

    Raises:
        [`MediaError`]: If media can't be decoded, if the processing class doesn't support them, if the placeholders of
            the prompt don't match its media, or if the chat template leaves out a block. The message names the row and
            the column.
    """
    processor_options = {}
    if isinstance(messages, RenderedPrompt):
        if family_of_processor(processor).takes_base64_audio:
            raise MediaError(
                f"{of_row(row)}column 'prompt': a chat template was applied to its text, which mistral-common can't "
                "take beside audio; give the raw messages"
            )
        messages.check_placeholders(text_placeholders(model, processor), row or 0)
        template_kwargs = {**(template_kwargs or {}), **VERBATIM, "continuation": messages.text}
        processor_options = {"add_special_tokens": False}  # the template has written them
        messages = messages.messages
    elif isinstance(messages, list) and is_conversational({"prompt": messages}):
        check_written(messages, processor, template_kwargs or {}, row, sampled=sampled)
    needed_media = _needed_media(type(model))
    if needed_media and next(iter_refs(messages), None) is None:
        raise MediaError(
            f"{of_row(row)}column 'prompt': holds no media, but the forward of {type(model).__name__} requires "
            f"{' and '.join(f'`{name}`' for name in needed_media)}; remove the row"
        )
    prompt = encode_messages(
        messages,
        processor,
        model,
        template_kwargs=template_kwargs,
        audio_overlong=audio_overlong,
        keep_decoded=keep_decoded,
        view=view,
        row=row,
        **processor_options,
    )
    positions = prompt_position_ids(model, prompt.input_ids, prompt.media, prompt.token_fields)
    prompt.position_ids = positions
    if use_engine_positions:
        placeholders = torch.tensor(sorted(all_placeholder_ids(model, processor)))
        prompt.position_ids = engine_position_ids(positions, torch.isin(prompt.input_ids, placeholders))
        if not torch.equal(positions, prompt.position_ids):
            logger.warning_once(
                f"{model.config.model_type}: a video has more steps in time than in space, after which vLLM continues "
                "at other positions than transformers. Completions are scored at vLLM's positions."
            )
    return prompt


def encode_messages(
    messages: str | list[dict[str, Any]],
    processor: Processor,
    model: PreTrainedModel,
    *,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: Literal["raise", "truncate"] = "raise",
    keep_decoded: bool = False,
    view: View | None = None,
    row: int | None = None,
    **processor_options: bool,
) -> EncodedPrompt:
    """
    Encodes messages. Leaves `position_ids` empty, because positions depend on the tokens before the messages. See
    [`encode_prompt`] for the arguments; `processor_options`, such as `add_special_tokens`, are the processor's.
    """
    refs = list(iter_refs(messages))
    placeholders = placeholder_token_ids(model, processor)
    if isinstance(processor, ProcessorMixin):
        check_text(messages, refs, placeholder_tokens(model, processor), row)
    # `decoded` has the media by the `id` of their references
    decoded, processor_kwargs = decode_media(refs, processor, audio_overlong, view)
    decoded_prompt = None
    if keep_decoded and refs and isinstance(messages, list) and isinstance(processor, ProcessorMixin):
        media_by_modality = {
            modality: [decoded[id(ref)] for ref in refs if ref.modality == modality] for modality in MODALITIES
        }
        decoded_prompt = DecodedPrompt(
            replace_refs(_prepared_messages(messages, processor, row), decoded),
            {modality: items for modality, items in media_by_modality.items() if items},
            copy.deepcopy(processor_kwargs),  # processors write into their arguments
            template_kwargs or {},
            processor_options,
        )
    processor_kwargs |= processor_options
    outputs = processor_outputs(messages, refs, processor, decoded, processor_kwargs, template_kwargs, row)
    input_ids = outputs["input_ids"][0]
    family = family_of(model)
    token_fields = {name: outputs[name][0] for name in (*TOKEN_FIELDS, *family.token_masks) if name in outputs}
    media = {name: value for name, value in outputs.items() if name not in ("input_ids", *token_fields)}
    check_placeholders(input_ids, refs, media, placeholders, row)
    is_placeholder = torch.isin(input_ids, torch.tensor(sorted(set().union(*placeholders.values()))))
    check_ids(input_ids[~is_placeholder], model.config, row)  # some placeholders have no embedding
    placeholder_indices = is_placeholder.nonzero()[:, 0].tolist()
    return EncodedPrompt(
        input_ids=input_ids,
        token_fields=token_fields,
        media=media if refs or family.adds_blank_media else {},
        position_ids=input_ids.new_empty(1, 0),
        decoded=() if decoded_prompt is None else ((slice(0, len(input_ids)), decoded_prompt),),
        # Sounds of videos have no reference
        modalities=frozenset(ref.modality for ref in refs) | ({"audio"} if SOUNDS in processor_kwargs else set()),
        row=row,
        media_span=(placeholder_indices[0], placeholder_indices[-1] + 1) if placeholder_indices else None,
    )


def check_ids(ids: torch.Tensor, config: PreTrainedConfig, row: int | None) -> None:
    """Raises a `ValueError` for token ids without an embedding. The error of a model's forward would name no row."""
    text_config = config.get_text_config(decoder=True)
    # Idefics has an `additional_vocab_size`
    vocab_size = sum(getattr(text_config, name, 0) for name in ("vocab_size", "additional_vocab_size"))
    if vocab_size and len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
        label = "a prompt" if row is None else f"row {row}"
        raise ValueError(
            f"{label} has token ids from {ids.min()} to {ids.max()}, and the model has 0 to {vocab_size - 1}; "
            "tokenize with the model's tokenizer, or call `model.resize_token_embeddings`"
        )


def cast_features(media: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns media with features in a dtype. One-dimensional tensors, such as times of frames, stay as they are."""
    return {
        name: value.to(dtype) if value.is_floating_point() and value.dim() > 1 else value
        for name, value in media.items()
    }


@functools.cache
def _needed_media(model_class: type[PreTrainedModel]) -> list[str]:
    parameters = inspect.signature(model_class.forward).parameters
    required_arguments = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    return [name for name in required_arguments if any(word in name for word in ("pixel", *MODALITIES, *AUDIO_NAMES))]


def check_encodes(refs: list[MediaRef], processor: Processor) -> None:
    """Raises a [`MediaError`] if a prompt has media and the processing class is a tokenizer."""
    if refs and not isinstance(processor, ProcessorMixin):
        sense = "audio" if refs[0].modality == "audio" else "vision"
        raise refs[0].error(
            f"the dataset is {sense}-related, but {type(processor).__name__} is a tokenizer and can't encode "
            f"{refs[0].modality}; pass `processing_class=AutoProcessor.from_pretrained(...)` of a {sense}-language "
            f"model that takes {refs[0].modality}, or leave the column out with `ignored_media_columns`"
        )


def processor_outputs(
    messages: str | list[dict[str, Any]],
    refs: list[MediaRef],
    processor: Processor,
    decoded: dict[int, Any],
    processor_kwargs: dict[str, Any],
    template_kwargs: dict[str, Any] | None = None,
    row: int | None = None,
) -> dict[str, torch.Tensor]:
    """Calls a processor on one prompt with decoded media. Returns the tensors by name, without the attention mask."""
    if isinstance(messages, str) or not is_conversational({"prompt": messages}):
        call: Callable[..., Mapping[str, torch.Tensor | list]] = processor
        outputs = call(text=[messages], return_tensors="pt")
    else:
        check_encodes(refs, processor)
        messages = _prepared_messages(messages, processor, row)
        options: dict[str, Any] = generation_options(messages, template_kwargs or {})
        if processor_kwargs and SOUNDS not in processor_kwargs:
            options["processor_kwargs"] = _lift_sampling(processor_kwargs)
        try:
            if SOUNDS in processor_kwargs:
                outputs = _outputs_with_sounds(messages, refs, processor, decoded, processor_kwargs, options)
            else:
                chats = [replace_refs(messages, decoded)]
                return_options = {"return_dict": True, "return_tensors": "pt"}
                outputs = cast(dict, processor.apply_chat_template(chats, tokenize=True, **return_options, **options))
        except ImportError:
            raise
        except Exception as error:  # templates and processors raise errors of any type
            if not refs or isinstance(error, TemplateError) or not has_template(processor, options):
                raise template_error(error, processor, options, f"{of_row(row)}column 'prompt'") from error
            check_media(refs, decoded, processor, processor_kwargs)  # raises for the medium at fault, if there is one
            n_frames = [len(decoded[id(ref)]) for ref in refs if ref.modality == "video"]
            # Errors of stacking videos of different lengths into one tensor have one of these phrases
            if len({*n_frames}) > 1 and re.search("to tensor|equal size|same size|inhomogeneous", str(error)):
                raise refs[0].error(
                    f"{type(processor).__name__} takes several videos only with the same number of frames, got "
                    f"{n_frames}; set `nframes` in their blocks, or `max_frames`"
                ) from error
            raise refs[0].error(
                f"{type(processor).__name__} rejected the prompt and its media ({error}); check that the chat "
                "template writes one placeholder per medium, and that the text contains no placeholder"
            ) from error
    return {
        name: value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))
        for name, value in outputs.items()
        if name not in ("attention_mask", "labels")
    }


def generation_options(messages: list[dict[str, Any]], template_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the template's arguments for a prompt. `continue_final_message` only affects an assistant's message."""
    if not template_kwargs.get("continue_final_message"):
        return {"add_generation_prompt": True, **template_kwargs}
    continues_message = messages[-1]["role"] == "assistant"
    return {
        **template_kwargs,
        "add_generation_prompt": not continues_message,
        "continue_final_message": continues_message,
    }


def _outputs_with_sounds(
    messages: list[dict[str, Any]],
    refs: list[MediaRef],
    processor: Processor,
    decoded: dict[int, Any],
    processor_kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Mapping[str, torch.Tensor]:
    kwargs = {**processor_kwargs, "videos_kwargs": {**processor_kwargs["videos_kwargs"]}}
    text = processor.apply_chat_template(replace_refs(messages, decoded), tokenize=False, **options)
    sounds = iter(kwargs.pop(SOUNDS))
    media: dict[str, list] = {modality: [] for modality in MODALITIES}
    video_indices: list[int | None] = []  # for each sound of the prompt, the index of its video, if any
    for ref in refs:
        media[ref.modality].append(decoded[id(ref)])
        if ref.modality == "video":
            media["audio"].append(next(sounds))
        if ref.modality != "image":
            video_indices.append(len(media["video"]) - 1 if ref.modality == "video" else None)
    if hasattr(processor, "load_audio_from_video"):
        kwargs |= {"load_audio_from_video": True, "audio_from_video_indices": video_indices}
    else:  # before transformers 5.23
        kwargs["videos_kwargs"]["use_audio_in_video"] = True
    rate = processor.feature_extractor.sampling_rate
    call: Callable[..., Mapping[str, torch.Tensor]] = processor
    return call(
        text=[text],
        images=[media["image"]] if media["image"] else None,
        videos=[media["video"]],
        audio=media["audio"],
        audio_kwargs={"sampling_rate": rate},
        return_tensors="pt",
        **kwargs,
    )


def _prepared_messages(messages: list[dict[str, Any]], processor: Processor, row: int | None) -> list[dict[str, Any]]:
    """Roles that only tokenizers support are an error."""
    messages = without_none(messages)
    if not isinstance(processor, ProcessorMixin):
        return messages
    try:
        return prepare_multimodal_messages(messages)
    except ValueError as error:
        raise MediaError(f"{of_row(row)}column 'prompt': {error} Rename the role, or remove the row.") from error


def _lift_sampling(processor_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Moves `do_sample_frames` to the top level, where `apply_chat_template` of some processors reads it."""
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
    Lets a processor read the files of a prompt's videos itself, and returns its outputs. Returns `None` if there are
    no videos, if transformers can't read them, or if a video has options or isn't a local file.
    """
    refs = list(iter_refs(messages))
    videos = [ref for ref in refs if ref.modality == "video"]
    if (
        not videos
        or not is_torchcodec_usable()
        or any(with_budgets(ref).options or ref.rules.use_audio_in_video for ref in videos)
    ):
        return None
    sources = [encoded_source(ref) for ref in videos]
    if not all(isinstance(source, (str, os.PathLike)) for source in sources):
        return None
    paths = [Path(join_media_dir(ref, source)) for ref, source in zip(videos, sources, strict=True)]
    if not all(path.is_file() for path in paths):
        return None
    decoded, kwargs = decode_media([ref for ref in refs if ref.modality != "video"], processor, audio_overlong)
    decoded |= {id(ref): path for ref, path in zip(videos, paths, strict=True)}
    sampling_kwargs = frame_sampling(processor)
    kwargs["videos_kwargs"] = {"do_sample_frames": sampling_kwargs is not None, **(sampling_kwargs or {})}
    return processor_outputs(messages, refs, processor, decoded, kwargs, template_kwargs)


def plain_outputs(
    messages: str | list[dict[str, Any]],
    processor: ProcessorMixin,
    audio_overlong: Literal["raise", "truncate"],
    template_kwargs: dict[str, Any],
) -> dict[str, torch.Tensor]:
    """
    Returns a processor's outputs for messages, for a comparison with the trainer's inputs. The media are decoded here.
    If the processor can also read the videos' files itself, and its outputs for the files differ in ids or shapes,
    returns the outputs for the files.
    """
    refs = list(iter_refs(messages))
    decoded_and_kwargs = decode_media(refs, processor, audio_overlong)
    outputs = processor_outputs(messages, refs, processor, *decoded_and_kwargs, template_kwargs)
    metadata = sum(decoded_and_kwargs[1].get("videos_kwargs", {}).get("video_metadata", ()), [])
    frame_indices = sum((list(video["frames_indices"]) for video in metadata), [])
    if any(isinstance(index, float) for index in frame_indices):
        return outputs  # the frame rate varies, and a processor that reads a file tells times at a constant rate
    try:
        file_outputs = outputs_of_files(messages, processor, audio_overlong, template_kwargs)  # pyrefly: ignore[bad-argument-type]
    except Exception as error:  # the processor may support fewer formats
        class_name = type(processor).__name__
        logger.warning(f"{class_name} can't read a row's videos, so that its frames weren't compared ({error})")
        return outputs
    # Frames that the processor reads may differ slightly, but must have the same sizes and times
    shapes = [
        {name: tensor.shape for name, tensor in tensors.items()} for tensors in (outputs, file_outputs or outputs)
    ]
    if file_outputs is None or shapes[0] == shapes[1] and torch.equal(file_outputs["input_ids"], outputs["input_ids"]):
        return outputs
    return file_outputs


def prompt_position_ids(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    media: dict[str, torch.Tensor],
    token_fields: dict[str, torch.Tensor],
) -> torch.Tensor:
    """
    Returns positions of a prompt by the rule of the model's `generate`, `(1, P)` or, for `R` rotary axes, `(R, 1, P)`.
    The ids and token fields have the shape `(P,)`. Text after the prompt continues at `positions[..., -1:] + 1`.
    """
    ids = input_ids[None]
    model_kwargs: dict[str, Any] = {**media, **{name: value[None] for name, value in token_fields.items()}}
    if hears_videos(model, input_ids):
        model_kwargs["use_audio_in_video"] = True
    # The rule stores an offset in the model, for the decoding steps of `generate`, which this call must not change
    rope_holder: Any = next((m for m in (model, model.base_model) if hasattr(m, "rope_deltas")), None)
    rope_deltas = rope_holder.rope_deltas if rope_holder is not None else None
    positions = model._prepare_position_ids_for_generation(
        ids, {**model_kwargs, "attention_mask": torch.ones_like(ids)}
    )
    if rope_holder is not None:
        rope_holder.rope_deltas = rope_deltas
    return positions


def hears_videos(model: PreTrainedModel, input_ids: torch.Tensor) -> bool:
    """
    Returns whether the ids `(P,)` of a prompt have sounds within videos, on which the model's positions depend. Raises
    a [`MediaError`] if only some of the videos have sounds.
    """
    if not family_of(model).hears_videos:
        return False
    names = ("vision_start_token_id", "audio_start_token_id", "video_token_id")
    config: Any = model.config
    vision_start, audio_start, video_id = (getattr(config, name) for name in names)
    # The start token of a video is followed by the start token of its sound, or, without a sound, by a placeholder
    ids_after_start = input_ids[1:][input_ids[:-1] == vision_start].tolist()
    has_sounds = audio_start in ids_after_start
    if has_sounds and video_id in ids_after_start:
        raise MediaError(
            "The prompt has a video with a sound and one without, which the model's positions don't allow; add a "
            "silent sound track."
        )
    return has_sounds


def engine_position_ids(positions: torch.Tensor, is_media: torch.Tensor) -> torch.Tensor:
    """
    Returns positions by the rule of vLLM, under which text after media continues one after the largest position: at 5
    after heights of 2 and times of 2 to 4. Takes and returns `(1, P)` or `(R, 1, P)`; the mask of media is `(P,)`.
    """
    if positions.dim() < 3:
        return positions
    axes = positions[-3:, 0].clone()  # times, heights and widths
    # Shifts the tokens after the end of media so that they continue after the largest position before them
    for end in ((is_media[:-1] & ~is_media[1:]).nonzero()[:, 0] + 1).tolist():
        axes[:, end:] += axes[:, :end].max() + 1 - axes[0, end]
    return torch.cat([positions[:-3], axes[:, None]])
