# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Loading and checks of a model's processor, and checks of texts for its control tokens."""

from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Literal, TypeVar, cast
from weakref import WeakKeyDictionary

from transformers import AutoProcessor, FeatureExtractionMixin, PreTrainedTokenizerBase, ProcessorMixin
from transformers.utils import logging

from ..data.reading.refs import MediaError
from ..data.rows.thoughts import is_part_of_tag
from ..families import AUDIO_EXTRACTORS
from .model_folders import loading_errors


logger = logging.get_logger(__name__)

Processor = ProcessorMixin | PreTrainedTokenizerBase
M = TypeVar("M", str, list)  # a prompt: text or messages
T = TypeVar("T")

# Control tokens by tokenizer, with its size and its named special tokens at the time of reading. Reading takes 0.7 s
# with the 65,536 codes of a codec as added tokens
_control_tokens: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[tuple, frozenset[str]]] = WeakKeyDictionary()


def tokenizer_of(processor: Processor) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of a processor, or the tokenizer itself."""
    return processor.tokenizer if isinstance(processor, ProcessorMixin) else processor


def load_processor(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Processor:
    """Loads and checks a processor. Takes no options such as `padding_side`, which change more than the tokenizer."""
    with loading_errors(name, "processor"):
        processor = AutoProcessor.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    check_processor(processor)
    adopt_template(processor)
    return processor


def adopt_template(processor: Processor) -> None:
    """Copies the chat template of the tokenizer to a processor that has none."""
    if isinstance(processor, ProcessorMixin) and getattr(processor, "chat_template", None) is None:
        processor.chat_template = getattr(tokenizer_of(processor), "chat_template", None)


def check_processor(processor: Processor | None) -> None:
    """Raises a `ValueError` if the padding side of audio isn't the default. Tokenizers may pad on either side."""
    for name in AUDIO_EXTRACTORS:
        extractor = getattr(processor, name, None)
        side = getattr(extractor, "padding_side", None)
        default = _default_side(extractor)
        if side != default:
            raise ValueError(
                f"The {name} of {type(processor).__name__} pads audio on the {side}, but {type(extractor).__name__} "
                f"by default on the {default}: encoders would hear the padding and miss the sound. Load the processor "
                "without `padding_side`, which `AutoProcessor.from_pretrained` also passes to the extractor of audio. "
                f"If it was saved with this option, delete `padding_side` of `{name}` in its `processor_config.json` "
                f"(in older folders, in `preprocessor_config.json`), or set `processor.{name}.padding_side = "
                f"{default!r}`."
            )


def _default_side(extractor: FeatureExtractionMixin | None) -> str | None:
    """Returns the side on which an extractor of this class, with these settings, pads by default."""
    if extractor is None or not hasattr(extractor, "padding_side"):
        return None
    settings = {name: value for name, value in extractor.to_dict().items() if name != "padding_side"}
    try:
        return getattr(type(extractor).from_dict(settings), "padding_side", None)
    except TypeError:  # the extractor can't be loaded from its settings
        return extractor.padding_side


def audio_rate(processor: Processor) -> int | None:
    """Returns the sampling rate in Hz of a processor that takes audio, or `None` for other processors."""
    extractors = (getattr(processor, name, None) for name in AUDIO_EXTRACTORS)
    return next((extractor.sampling_rate for extractor in extractors if extractor is not None), None)


def ends_with(ids: list[int], stop_strings: Sequence[str], processor: Processor | None) -> bool:
    """
    Returns whether the last tokens of a completion contain one of `stop_strings`. A few characters may follow the stop
    string, because the token that completes it may hold more.
    """
    if not stop_strings or processor is None:
        return False
    # A token has at least one byte, so a stop string at the end lies in as many last tokens as it has bytes. One more
    # is read, as some tokenizers drop a space at the start of a decoded text.
    tails = ((stop_string, ids[-len(stop_string.encode()) - 1 :]) for stop_string in stop_strings)
    return any(stop_string in str(tokenizer_of(processor).decode(tail)) for stop_string, tail in tails)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Returns the control tokens of a tokenizer, which are its special tokens."""
    named = tokenizer.all_special_tokens
    state = (len(tokenizer), *named)
    if _control_tokens.get(tokenizer, ((), ()))[0] != state:
        added_tokens = getattr(tokenizer, "added_tokens_decoder", None)  # Mistral's tokenizers have none
        added_tokens = added_tokens.values() if isinstance(added_tokens, dict) else ()
        tokens = {*named, *(str(token) for token in added_tokens if token.special)} - {""}
        _control_tokens[tokenizer] = (state, frozenset(tokens))
    return _control_tokens[tokenizer][1]


def completion_texts(ids: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Decodes completions without special tokens, except those of thoughts, since rewards read what follows them."""
    tokens = control_tokens(tokenizer)
    dropped = {token for token in tokens if not is_part_of_tag(token)}
    if dropped == tokens:
        return tokenizer.batch_decode(ids, skip_special_tokens=True)
    dropped_ids = {tokenizer.convert_tokens_to_ids(token) for token in dropped}

    def is_kept(token_id: int) -> bool:
        return token_id not in dropped_ids

    return tokenizer.batch_decode([[*filter(is_kept, row)] for row in ids], skip_special_tokens=False)


def checked_text(
    text: str,
    tokenizer: PreTrainedTokenizerBase,
    mode: Literal["allow", "warn", "raise", "strip"],
    label: str,
    tokens: Collection[str],
) -> str:
    """
    Checks a text for control tokens by `mode`, and returns the text, without the tokens in mode `"strip"`. Raises a
    [`MediaError`] for a control token in mode `"raise"`, and for a lone surrogate in any mode.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MediaError(
            f"{label}: the text has the lone surrogate {text[error.start]!a} at character {error.start}, which no "
            "tokenizer can encode; decode the text with `errors='replace'`, or remove the row"
        ) from error
    if mode == "allow":
        return text
    to_strip: set[str] = set()
    while True:
        candidates = sorted(token for token in tokens if token in text)
        if not candidates:
            break
        ids = set(tokenizer(text, add_special_tokens=False)["input_ids"])
        # Not every text that looks like a control token is encoded as one
        matches = [token for token in candidates if tokenizer.convert_tokens_to_ids(token) in ids]
        if not matches:
            break
        # A text that begins with a control token is likely the output of a chat template
        is_rendered = text.lstrip().startswith(tuple(matches))
        remedy = "give messages, as the trainer applies the template; or " * is_rendered
        if mode == "raise":
            raise MediaError(
                f"{label}: the text holds the control token {matches[0]!r}, which the model would take for one of the "
                f"chat template; {remedy}remove it, or set `special_tokens_in_text` to 'strip', or to 'allow' if "
                "intended"
            )
        if mode == "warn":
            logger.warning_once(
                f"A text of the dataset holds the control token {matches[0]!r}, which the model takes for one of the "
                f"chat template: {remedy}set `special_tokens_in_text` to 'raise' to find the row, to 'strip' to "
                "remove such tokens, or to 'allow' if they are intended."
            )
            break
        to_strip.update(matches)
        text = _without_tokens(text, to_strip)  # may bring parts of other tokens together
    return text


def _without_tokens(text: str, tokens: Collection[str]) -> str:
    """
    Removes tokens from a text in linear time, also those that a removal brings together: nothing is left of
    `<e<eos>os>`.
    """
    tokens_by_end: dict[str, list[str]] = {}
    for token in sorted(tokens, key=len, reverse=True):  # a longer token is removed before a token at its end
        tokens_by_end.setdefault(token[-1], []).append(token)
    characters: list[str] = []
    for character in text:
        characters.append(character)
        for token in tokens_by_end.get(character, ()):
            if characters[-len(token) :] == [*token]:
                del characters[-len(token) :]
                break
    return "".join(characters)


def checked_texts(value: T, processor: Processor, mode: Literal["allow", "warn", "raise", "strip"], label: str) -> T:
    """Applies [`checked_text`] to all texts in messages or content."""
    tokenizer = tokenizer_of(processor)
    tokens = frozenset() if mode == "allow" else control_tokens(tokenizer)
    return _map_texts(value, lambda text: checked_text(text, tokenizer, mode, label, tokens))


def checked_prompt(
    prompt: M, processor: Processor, mode: Literal["allow", "raise", "strip"] | None, row: int, column: str = "prompt"
) -> M:
    """Applies [`checked_texts`] to a row's column, by default with a warning. Plain text may hold control tokens."""
    text_mode = "allow" if isinstance(prompt, str) else mode or "warn"
    return checked_texts(prompt, processor, text_mode, f"row {row}, column '{column}'")


def _map_texts(value: T, change: Callable[[str], str]) -> T:
    """Applies `change` to nested texts. Joins consecutive text blocks first, as a token may be split between them."""
    if isinstance(value, str):
        return cast(T, change(value))
    if isinstance(value, dict):
        return cast(T, {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()})
    if not isinstance(value, list):
        return value
    items = []
    for is_text, neighbors in groupby(
        value, lambda block: isinstance(block, dict) and isinstance(block.get("text"), str)
    ):
        blocks = list(neighbors)
        joined = "".join(block["text"] for block in blocks) if is_text else ""
        new_text = change(joined)
        if new_text != joined:  # a single block replaces the blocks
            blocks = [{**blocks[0], "text": new_text}]
        items += [_map_texts(block, change) for block in blocks]
    return cast(T, items)
