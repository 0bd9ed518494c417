# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The processor of a model, as its checkpoint has it."""

from transformers import AutoProcessor, PreTrainedTokenizerBase, ProcessorMixin

from ..families import AUDIO_EXTRACTORS
from .model_folders import naming_what_is_missing


def load_processor(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> ProcessorMixin | PreTrainedTokenizerBase:
    """
    Loads a processor as it was saved. A `padding_side` or `truncation_side` here would reach more than the tokenizer.
    """
    with naming_what_is_missing(name, "processor"):
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    check_processor(processor)
    return processor


def check_processor(processor: ProcessorMixin | PreTrainedTokenizerBase | None) -> None:
    """Refuses a processor that pads audio on another side than it was made for. The tokenizer's sides don't matter."""
    for part in AUDIO_EXTRACTORS:
        extractor = getattr(processor, part, None)
        side, own = getattr(extractor, "padding_side", None), _own_side(extractor)
        if side != own:
            raise ValueError(
                f"The {part} of {type(processor).__name__} pads audio on the {side}, {type(extractor).__name__} by "
                f"itself on the {own}: encoders would hear the padding and miss the sound. Load it without "
                "`padding_side`, which `AutoProcessor.from_pretrained` gives not to the tokenizer alone; if it was "
                f"saved like that, delete `padding_side` of `{part}` in its `processor_config.json` (in older "
                f"folders, in `preprocessor_config.json`), or set `processor.{part}.padding_side = {own!r}`."
            )


def _own_side(extractor) -> str | None:
    """The side on which an extractor pads when it isn't told."""
    if not hasattr(extractor, "padding_side"):
        return None
    settings = {name: value for name, value in extractor.to_dict().items() if name != "padding_side"}
    try:
        return type(extractor).from_dict(settings).padding_side
    except TypeError:  # what isn't built of its settings was never loaded
        return extractor.padding_side
