# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets of LightRFT's scripts: blended sources, prompts with their template, and supervised rows."""

import ast
import logging
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import datasets
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from .strategy_object import Strategy


logger = logging.getLogger(__name__)

_SUFFIXES = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}


# Sources


def blending_datasets(
    sources: str,
    probabilities: str,
    strategy: Strategy | None = None,
    seed: int = 42,
    max_count: int = 5_000_000,
    return_eval: bool = True,
    stopping_strategy: Literal["first_exhausted", "all_exhausted"] = "first_exhausted",
    train_split: str = "train",
    eval_split: str = "test",
) -> datasets.Dataset | tuple[datasets.Dataset, datasets.Dataset]:
    """
    Loads datasets, and interleaves them. Code of repositories never runs.

    Args:
        sources (`str`):
            Sources with commas between them: names on the Hub, folders that `save_to_disk` wrote, other folders, or
            files (`.json`, `.jsonl`, `.csv`, `.parquet`). `name@folder` takes a folder within a repository.
        probabilities (`str`):
            Their shares of the drawn rows, with commas between them.
        strategy ([`~lightrft.strategy_object.Strategy`], *optional*):
            Ignored.
        seed (`int`, *optional*, defaults to `42`):
            Seed of the draws.
        max_count (`int`, *optional*, defaults to `5_000_000`):
            Largest number of rows of a source.
        return_eval (`bool`, *optional*, defaults to `True`):
            Whether to return rows for evaluation, too.
        stopping_strategy (`str`, *optional*, defaults to `"first_exhausted"`):
            `"first_exhausted"` or `"all_exhausted"`, see [`~datasets.interleave_datasets`].
        train_split, eval_split (`str`, *optional*, default to `"train"` and `"test"`):
            Splits. A source without the first one gives its first split, and one without the second 3 % of the rows
            for training, each with a line in the log.

    Returns:
        `datasets.Dataset` or `tuple`: Rows for training, or also those for evaluation.

    Raises:
        `ValueError`: If there isn't one probability per source.
    """
    names = [source.strip() for source in sources.split(",")]
    shares = [float(share) for share in probabilities.split(",")]
    if len(names) != len(shares):
        raise ValueError(
            f"There are {len(shares)} probabilities ({probabilities}) for {len(names)} datasets; pass one for each."
        )
    train = []
    held_out = []
    for name in names:
        splits = _load(name)
        split = train_split if train_split in splits else next(iter(splits))
        if split != train_split:
            logger.warning(f"{name!r} has no split {train_split!r}, but {[*splits]}: {split!r} is taken.")
        rows = splits[split]
        train.append(rows.select(range(min(max_count, len(rows)))))
        if return_eval and eval_split not in splits:
            logger.warning(f"{name!r} has no split {eval_split!r}: 3 % of the rows for training are evaluated.")
        rows = splits.get(eval_split, train[-1].select(range(int(0.03 * len(train[-1])))))
        held_out.append(rows.select(range(min(max_count, len(rows)))))
    blended = _blend(train, shares, seed, stopping_strategy)
    return (blended, _blend(held_out, shares, seed, stopping_strategy)) if return_eval else blended


def _blend(
    parts: list[datasets.Dataset],
    shares: list[float],
    seed: int,
    stopping_strategy: Literal["first_exhausted", "all_exhausted"],
) -> datasets.Dataset:
    if len(parts) == 1:
        return parts[0]
    return datasets.interleave_datasets(parts, shares, seed, stopping_strategy=stopping_strategy)


def _load(name: str) -> dict[str, datasets.Dataset]:
    """Loads the splits of a source."""
    path, _, folder = name.partition("@")
    kind = _SUFFIXES.get(Path(path).suffix.lower())
    if kind is not None:
        data = datasets.load_dataset(kind, data_files=path)
    elif Path(path, "dataset_dict.json").exists() or Path(path, "state.json").exists():
        data = datasets.load_from_disk(path)
    else:
        data = datasets.load_dataset(path, data_dir=folder or None)
    return dict(data) if isinstance(data, datasets.DatasetDict) else {"train": data}


# Prompts


class PromptDatasetVL(Dataset):
    """
    Prompts with images, as tuples of prompt, images, reference and label. Columns are those that the command line of
    the strategy names: `input_key`, `images_key`, `reference_key` and `label_key`.

    With `apply_chat_template`, a prompt is the text of the chat template: the `system_prompt`, if any, the images, and
    the text of the user's first message. Without it, the prompt is what the column holds.

    Args:
        dataset:
            Rows, which are dictionaries.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Ignored, as the processor has one.
        processor ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            Processor with the chat template.
        max_length (`int`):
            Ignored: [`PPOTrainerVL`] has `prompt_max_len`.
        strategy ([`~lightrft.strategy_object.Strategy`]):
            Strategy with the command line.
        input_template (`str`, *optional*):
            Text around the user's, with `{}` in its place.
    """

    def __init__(
        self,
        dataset: datasets.Dataset | Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase | None,
        processor: ProcessorMixin | PreTrainedTokenizerBase,
        max_length: int | None,
        strategy: Strategy,
        input_template: str | None = None,
    ):
        self.dataset = dataset
        self.processor = processor
        self.args = strategy.args
        self.input_template = input_template

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Any, Any, Any, Any]:
        """Returns the prompt, the images, the reference and the label of a row."""
        row = self.dataset[index]
        args = self.args
        content = row[getattr(args, "input_key", None) or "input"]
        images = row.get(getattr(args, "images_key", None) or "images")
        if getattr(args, "apply_chat_template", False):
            prompt = self._templated(_user_text(content).replace("<image>", ""), images)
        elif self.input_template:
            prompt = self.input_template.format(content)
        else:
            prompt = content
        return prompt, images, _reference(row, getattr(args, "reference_key", None)), _label(row, args)

    def collate_fn(self, rows: Sequence[tuple]) -> tuple[list, list, list, list]:
        """Returns lists of prompts, images, references and labels."""
        prompts, images, references, labels = map(list, zip(*rows, strict=True))
        return prompts, images, references, labels

    def _templated(self, text: str, images: Any) -> str:
        if self.input_template:
            text = self.input_template.format(text)
        n_images = len(images) if isinstance(images, (list, tuple)) else int(images is not None)
        system_prompt = getattr(self.args, "system_prompt", None)
        messages = [{"role": "system", "content": system_prompt}] if system_prompt else []
        messages.append({"role": "user", "content": text})
        if isinstance(self.processor, ProcessorMixin):  # templates of tokenizers take texts
            for message in messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
            messages[-1]["content"][:0] = [{"type": "image"}] * n_images
        processor: Any = self.processor
        return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _user_text(content: Any) -> str:
    """Returns the text of a prompt, or of the first message of a user."""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = content.get("value", content.get("content"))
        if isinstance(content, (list, tuple)):
            return " ".join(block["text"] for block in content if block.get("type") == "text")
        return content
    for message in content:
        if message.get("role") == "user":
            return _user_text(message)
    raise ValueError(f"The prompt {content!r} has no message of a user; add one.")


def _reference(row: Mapping[str, Any], key: str | None) -> Any:
    """Returns the reference of a row, or the first of its other columns that hold one."""
    values = [row.get(key) if key else None]
    for name, field in (("reward_model", "ground_truth"), ("ground_truth", None), ("extra_info", "constraints")):
        value = row.get(name)
        values.append(value if field is None else value.get(field) if isinstance(value, Mapping) else None)
    return next((_only(value) for value in values if value is not None), None)


def _only(value: Any) -> Any:
    """Returns the only item of a list, also of a list that is written as text, and a text without outer spaces."""
    if isinstance(value, Mapping):
        value = value.get("value", value.get("ground_truth", value))
    if isinstance(value, str):
        value = value.strip()
        if value[:1] + value[-1:] in ("[]", "()"):
            try:
                value = ast.literal_eval(value)
            except (SyntaxError, ValueError):
                return value
    return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value


def _label(row: Mapping[str, Any], args: Namespace) -> Any:
    key = getattr(args, "label_key", None) or "label"
    if row.get(key) is not None:
        return row[key]
    extra = row.get("extra_info")
    return extra.get(key) if isinstance(extra, Mapping) else None


# Supervised rows


class SFTDatasetVL(Dataset):
    """
    Rows for `pretrain_dataloader` of [`PPOTrainerVL.fit`]. Columns are those that the command line of the strategy
    names: `input_key`, `output_key` and `images_key`. Without `output_key`, the first of them holds conversations.

    Args:
        dataset:
            Rows, which are dictionaries.
        tokenizer, processor, max_length (*optional*):
            Ignored: the trainer encodes the rows. LightRFT's script leaves the processor out, which is fine.
        strategy ([`~lightrft.strategy_object.Strategy`]):
            Strategy with the command line.
        input_template (`str`, *optional*):
            Text around the input, with `{}` in its place.
        pretrain_mode (`bool`, *optional*, defaults to `False`):
            Whether to leave `input_template` out.
    """

    def __init__(
        self,
        dataset: datasets.Dataset | Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase | None,
        processor: ProcessorMixin | PreTrainedTokenizerBase | int | None = None,
        max_length: int | Strategy | None = None,
        strategy: Strategy | None = None,
        input_template: str | None = None,
        pretrain_mode: bool = False,
    ):
        # Without a processor, the arguments behind it move
        own_strategy = max_length if strategy is None else strategy
        if not isinstance(own_strategy, Strategy):
            raise TypeError(f"`strategy` must be that of `get_strategy`, got {type(own_strategy).__name__}.")
        self.dataset = dataset
        self.args = own_strategy.args
        self.input_template = None if pretrain_mode else input_template

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns `prompt` and `completion`, or `messages`, and `images`, if the row has any."""
        row = self.dataset[index]
        content = row[getattr(self.args, "input_key", None) or "input"]
        output_key = getattr(self.args, "output_key", None)
        images = row.get(getattr(self.args, "images_key", None) or "images")
        media = {}
        if images is not None:
            media["images"] = images if isinstance(images, list) else [images]
        if output_key is None:
            if isinstance(content, str):
                raise ValueError("Supervised rows of texts need the column of their answers; set `output_key`.")
            return {"messages": content, **media}
        text = _user_text(content)
        if self.input_template:
            text = self.input_template.format(text)
        prompt = [{"role": "user", "content": text}]
        return {
            "prompt": prompt,
            "completion": [{"role": "assistant", "content": _user_text(row[output_key])}],
            **media,
        }

    def collate_fn(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the rows."""
        return rows
