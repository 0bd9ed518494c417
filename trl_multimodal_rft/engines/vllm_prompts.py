# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Prompts for vLLM's engines and servers: token ids, and media that vLLM's renderer has processed."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, cast
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from ..data.reading.refs import MediaError
from ..encoding.prompts import DecodedPrompt, EncodedPrompt
from ..families import family_of_processor
from ..models.wrapped import replaced
from .vllm_versions import engine_obstacle


if engine_obstacle() is None:
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import MultiModalKwargsItems
    from vllm.renderers import BaseRenderer

# Frames per second that processors assume for videos without metadata
_ASSUMED_FPS = 24


class EnginePrompts:
    """
    Converter of prompts to the input of an engine in `mode`, `"server"` or `"colocate"`. Processed media are cached as
    long as the decoded media exist.
    """

    def __init__(self, renderer: "BaseRenderer", processor: ProcessorMixin | PreTrainedTokenizerBase, mode: str):
        self.renderer = renderer
        self.processor = processor
        self.mode = mode
        self._processed: WeakKeyDictionary[DecodedPrompt, dict[str, Any]] = WeakKeyDictionary()

    @property
    def max_length(self) -> int:
        """The engine's limit of tokens for a prompt and its completion together."""
        return self.renderer.model_config.max_model_len

    def engine_input(
        self, prompt: EncodedPrompt | dict[str, Any] | Sequence[int], images: Sequence | None, index: int
    ) -> dict[str, Any]:
        """Returns a prompt as input of the engine. Errors name its row, or `index` for prompts without a row."""
        if isinstance(prompt, EncodedPrompt):
            row = index if prompt.row is None else prompt.row
            ids = prompt.input_ids.tolist()
            self._check_length(len(ids), row)
            return self._join_parts(ids, prompt, row)
        tokens_prompt = dict(prompt) if isinstance(prompt, dict) else {"prompt_token_ids": list(prompt)}
        if images:
            tokens_prompt["multi_modal_data"] = {"image": images}
        media = tokens_prompt.get("multi_modal_data")
        if not media:
            self._check_length(len(tokens_prompt["prompt_token_ids"]), index)
            return tokens_input(tokens_prompt["prompt_token_ids"])
        for modality, modality_items in media.items():
            self._check_count(modality, len(modality_items), index)
        processed = self._render(tokens_prompt)
        self._check_length(len(processed["prompt_token_ids"]), index)
        return processed

    def _join_parts(self, ids: list[int], prompt: EncodedPrompt, row: int) -> dict[str, Any]:
        """
        Returns the engine's input for an encoded prompt with the token `ids`. Parts of the prompt with media, such as
        a tool's result, are rendered separately. If a part begins at token 10, and its placeholders at token 2
        of the part, the placeholders begin at token 12 of the prompt.
        """
        if not prompt.modalities:
            return tokens_input(ids)
        if isinstance(prompt.decoded, dict):  # another process has encoded the prompt, with features for a server
            return {"prompt_token_ids": ids, "features": prompt.decoded}
        if not prompt.decoded:
            raise ValueError("A prompt has no decoded media; encode it with `keep_decoded=True`.")
        counts: Counter[str] = Counter()
        for _, decoded in prompt.decoded:
            counts.update({modality: len(media) for modality, media in decoded.media.items()})
        for modality, count in counts.items():
            self._check_count(modality, count, row)
        # By modality, in the order of the prompt
        kwargs = defaultdict(list)
        hashes = defaultdict(list)
        placeholders = defaultdict(list)
        for span, decoded in prompt.decoded:
            if decoded not in self._processed:
                self._processed[decoded] = self._render(self.with_media(decoded, row))
            rendered = self._processed[decoded]
            _check_ids(ids[span], rendered["prompt_token_ids"], row)
            for modality, ranges in rendered["mm_placeholders"].items():
                kwargs[modality] += rendered["mm_kwargs"][modality]
                hashes[modality] += rendered["mm_hashes"][modality]
                placeholders[modality] += [
                    replace(placeholder, offset=span.start + placeholder.offset) for placeholder in ranges
                ]
        return mm_input(ids, MultiModalKwargsItems(kwargs), dict(hashes), dict(placeholders))

    def _render(self, prompt: dict[str, Any]) -> dict[str, Any]:
        with processors_unchecked():
            [processed] = self.renderer.render_cmpl([prompt])
        return processed

    def with_media(self, prompt: DecodedPrompt, row: int) -> dict[str, Any]:
        """Returns a part of a prompt, with its decoded media, as input of the renderer."""
        media: dict[str, Any] = dict(prompt.media)
        processor = self.processor
        for modality in media:
            if modality in family_of_processor(processor).not_in_vllm:
                raise MediaError(
                    f"row {row}: vLLM expands {modality} placeholders differently from {type(processor).__name__}: "
                    "completions would be scored against a different prompt; set `use_vllm=False`."
                )
        options: dict[str, Any] = {modality: dict(value) for modality, value in prompt.processor_kwargs.items()}
        # vLLM counts image tokens by options at the top level. There, they would also apply to videos, so prompts with
        # videos keep them in `images_kwargs`
        if "video" not in media:
            options |= options.pop("images_kwargs", {})
        if "video" in media:
            videos_kwargs = options["videos_kwargs"]
            # Metadata are nested: by prompt, of which there is one, and by video
            metadata = [
                {"fps": _ASSUMED_FPS, **{name: value for name, value in video_metadata.items() if value is not None}}
                for video_metadata in videos_kwargs.pop("video_metadata")[0]
            ]
            # If vLLM passes metadata with the frames, `do_sample_frames` belongs to the metadata and the top level
            if getattr(self.renderer.get_mm_processor().data_parser, "video_needs_metadata", False):
                del videos_kwargs["do_sample_frames"]
                options["do_sample_frames"] = False
                metadata = [{**video_metadata, "do_sample_frames": False} for video_metadata in metadata]
                media["video"] = list(zip(media["video"], metadata, strict=True))
            else:
                videos_kwargs["video_metadata"] = [metadata]
        return {
            "prompt_token_ids": prompt.token_ids(cast(ProcessorMixin, processor)),
            "multi_modal_data": media,
            "mm_processor_kwargs": {name: value for name, value in options.items() if value != {}},
        }

    def _check_count(self, modality: str, count: int, row: int) -> None:
        # `info` has the limits of media. An engine that was started without media has no processor
        info = self.renderer.mm_processor and self.renderer.mm_processor.info
        engine_limit = info.allowed_mm_limits.get(modality, 0) if info else 0
        if count <= engine_limit:
            return
        model_limit = info.supported_mm_limits.get(modality, 0) if info else None
        message = f"row {row}: the prompt has {count} media of the modality {modality!r}"
        if model_limit is not None and count > model_limit:
            raise MediaError(f"{message}, and vLLM takes at most {model_limit} for this model; set `use_vllm=False`.")
        if self.mode == "server":
            remedy = f"start the server with `--limit-mm-per-prompt.{modality} {count}`."
        else:
            remedy = (
                "the default is the largest number in a prompt of the trainer's datasets. Set "
                f"`vllm_engine_kwargs={{'limit_mm_per_prompt': {{'{modality}': {count}}}}}`."
            )
        raise MediaError(f"{message}, and the engine was started for {engine_limit}; {remedy}")

    def _check_length(self, length: int, row: int) -> None:
        if length >= self.max_length:
            raise ValueError(
                f"row {row}: the prompt has {length} tokens, media included, and the engine was started for "
                f"{self.max_length} tokens, so no room is left for a completion; {self.remedy_of_length}."
            )

    @property
    def remedy_of_length(self) -> str:
        """Remedy for prompts that are too long."""
        option = "the server's `--max-model-len`" if self.mode == "server" else "`vllm_max_model_length`"
        return f"raise {option}, or shorten the prompt or its media"


def _check_ids(expected: list[int], actual: Sequence[int], row: int) -> None:
    if list(actual) != expected:
        raise MediaError(
            f"row {row}: vLLM's {len(actual)} tokens of a prompt or a tool's result aren't the {len(expected)} "
            "tokens of the trainer, so completions would be scored against a different prompt. vLLM's processor and "
            "`processing_class` don't agree; load both from the folder of the model, or set `use_vllm=False`."
        )


def processors_unchecked() -> AbstractContextManager[None]:
    """Turns off processors' input check. From transformers 5.23 on, it rejects vLLM's placeholders without videos."""
    return replaced(ProcessorMixin, validate_inputs=lambda self, *args, **kwargs: None)
