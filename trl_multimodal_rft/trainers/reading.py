# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What trainers that read completions share: rows on their way to micro-batches, and how these are scored."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from accelerate import Accelerator
from accelerate.logging import get_logger
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedModel

from ..data.rows.batches import BatchShape, seeded_order
from ..data.rows.row import Row
from ..encoding.prompts import EncodedPrompt
from ..families import family_of
from ..forward.attention import install_prefix_attention
from ..forward.encoders import install_encoder_attention
from ..forward.head import add_fused_head
from ..forward.masks import sharing_obstacle
from ..policy import Fallbacks, PolicyForward
from ..reporting.model_card import CardNotes
from ..rollout.stream import EncodedRow, RowStream, warn_of_positions
from .setup import modalities, warn_of_unread
from .sft_config import MultimodalSFTConfig
from .signatures import Processor


logger = get_logger(__name__)


class Collator(Protocol):
    """Encodes rows, and makes micro-batches whose `sequences` are prompts, completions included."""

    model: PreTrainedModel

    def encode(self, row: Row) -> EncodedPrompt: ...

    def __call__(self, rows: Sequence[EncodedRow]) -> dict[str, Any]: ...


@dataclass
class CompletionReader:
    """Rows with completions, from datasets to micro-batches, and what the model card says of them."""

    args: MultimodalSFTConfig
    accelerator: Accelerator
    stream: RowStream
    collator: Collator
    notes: CardNotes
    unseen: set[str]  # datasets whose columns are checked with their first batch
    show: Callable[[Row, Any], None]  # gets the first row of each micro-batch of training, and its sequence
    warned_of_positions: bool = False

    def train_loader(self, dataset: Any) -> DataLoader:
        args, ranks = self.args, (self.accelerator.num_processes, self.accelerator.process_index)
        order = partial(seeded_order, seed=args.seed if args.data_seed is None else args.data_seed)
        return self.stream.train_loader(
            dataset,
            BatchShape(args.per_device_train_batch_size, 1, 1, *ranks, drop_last=args.dataloader_drop_last),
            # An update reads its micro-batches before it forwards the first one, to count their labels
            args.media_prefetch * args.gradient_accumulation_steps,
            order if args.train_sampling_strategy == "random" else None,
            collate_fn=partial(self._collate, split="train"),
        )

    def eval_loader(self, dataset: Any, make_sampler: Callable[[Any], Sampler | None]) -> DataLoader:
        return self.stream.eval_loader(dataset, 1, make_sampler, collate_fn=partial(self._collate, split="eval"))

    def _collate(self, rows: Sequence[EncodedRow], split: Literal["train", "eval"]) -> dict[str, Any]:
        batch, name, model = self.collator(rows), f"{split}_dataset", self.collator.model
        stored, sequences = [each.stored for each in rows], batch["sequences"]
        if name in self.unseen:
            self.unseen.remove(name)
            first = {name: [dict(row) for row in stored]}
            warn_of_unread(self.args, first, modalities(model, self.args), extent="first", supervised=True)
        if not self.warned_of_positions:
            self.warned_of_positions = warn_of_positions(sequences, [each.row_index for each in rows], model)
        prompts = [row.get("prompt") or (row.get("messages") or [])[:-1] for row in stored]
        self.notes.add(set().union(*stored), filter(None, prompts), (each.modalities for each in sequences))
        if split == "train":
            self.show(stored[0], sequences[0])
        return batch


def sequence_policy(
    accelerator: Accelerator, model: PreTrainedModel, processor: Processor, args: MultimodalSFTConfig
) -> PolicyForward:
    """What scores whole sequences of a model, packed if the config says so and the model allows it."""
    obstacle = sharing_obstacle(model)
    has_head = add_fused_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if obstacle and (args.packing or args.eval_packing):
        logger.warning(f"Rows are padded (`packing=False`): {obstacle}.")
    if not has_head:
        logger.warning(
            f"{model.config.model_type}: TRL's fused head doesn't know what the model does around its LM head, so "
            "log-probabilities are taken from its own logits, which needs more memory."
        )
    install_encoder_attention(model)
    if not obstacle:  # padded rows, too, need what it corrects
        install_prefix_attention(model)
    fallbacks = Fallbacks(not obstacle, family_of(model).isolate, logits_from_model=not has_head)
    return PolicyForward(accelerator, processor, fallbacks, max_tokens=args.max_tokens_per_microbatch)
