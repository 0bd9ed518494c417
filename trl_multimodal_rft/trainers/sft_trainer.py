# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Supervised fine-tuning with media."""

import json
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model, set_seed
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    EvalPrediction,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer
from trl.chat_template_utils import get_training_chat_template
from trl.data_utils import get_dataset_column_names, maybe_convert_to_chatml
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling
from trl.trainer.utils import FusedCausalLMOutput, get_config_model_id

from ..data.batches import BatchShape, seeded_order
from ..data.columns import MEDIA_COLUMNS, MediaError, rows_to_messages
from ..data.features import undecoded
from ..data.rows import Row
from ..data.unread import columns_known, other_layout, prepared
from ..encoding.processors import check_processor, load_processor
from ..encoding.prompts import placeholder_tokens
from ..encoding.supervised import SupervisedSequence, encode_sequence, given_sequence
from ..families import family_of
from ..forward.attention import install_prefix_attention
from ..forward.head import head_rule
from ..forward.masks import sharing_obstacle
from ..forward.token_budget import backward_by_parts
from ..models.quantization import keep_differentiable
from ..models.wrapped import unwrapped
from ..policy import Fallbacks, PolicyForward
from ..reporting.console import waiting_display
from ..reporting.model_card import conversation_of
from ..rollout.stream import EncodedRow, RowStream, named_dataset, warn_of_positions
from .arguments import KnownKeywords, check_arguments
from .checkpoints import CheckpointMixin
from .setup import (
    check_family,
    check_processor_name,
    has_unread_rows,
    ignore_deprecated_names,
    load_policy,
    measured_head,
    modalities,
    no_warning_about_init_kwargs,
    refuse_media_without_processor,
    refuse_several_runs,
    refuse_unchecked_steps,
    resolve_config,
    warn_of_unread,
)
from .sft_config import MultimodalSFTConfig


if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig


logger = get_logger(__name__)

# What TRL's constructor is told instead, so that it leaves the dataset as it is and makes no collator: rows are
# encoded here
_TO_TRL: dict[str, Any] = {
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "packing": False,
    "eval_packing": None,
    "assistant_only_loss": False,
    "max_length": None,
    "enable_jit_checkpoint": False,
}


def _is_general(args: TrainingArguments) -> bool:
    """Whether a config is that of no trainer in particular."""
    of_sft = MultimodalSFTConfig.__dataclass_fields__
    return not isinstance(args, SFTConfig) and all(name in of_sft for name in args.__dataclass_fields__)


class MultimodalSFTTrainer(KnownKeywords, CheckpointMixin, SFTTrainer):
    """
    Trainer for supervised fine-tuning (SFT) of models that see and hear.

    [`~trl.SFTTrainer`] with audio and video beside images: loss, metrics and options are TRL's own. Rows have the
    columns of reinforcement training, and are encoded as there, so that what is trained here goes on in
    [`MultimodalGRPOTrainer`] and [`MultimodalPPOTrainer`] with the same tokens and features.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model to train, as for [`~trl.SFTTrainer`].
        args ([`MultimodalSFTConfig`], *optional*):
            Configuration for this trainer. If `None`, a default configuration is used.
        train_dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Dataset with `prompt` and `completion`, each text or messages, or with `messages`; and with the media
            columns that [`MultimodalGRPOTrainer`] takes. Of a completion all is learned; of `messages` all, or with
            `assistant_only_loss` what the assistant says in each turn. Without media also with `text`, or tokenized,
            with `input_ids` and optionally `labels`, which [`~trl.SFTTrainer`] prepares.
        eval_dataset ([`~datasets.Dataset`], [`~datasets.IterableDataset`] or `dict` of them, *optional*):
            Dataset to use for evaluation, with the same columns.
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's processor, or a tokenizer for text. If `None`, it is loaded from the model's name.
        callbacks (list of [`~transformers.TrainerCallback`], *optional*):
            Callbacks to customize the training loop.
        optimizers (`tuple`, *optional*, defaults to `(None, None)`):
            Optimizer and scheduler to use.
        optimizer_cls_and_kwargs (`tuple`, *optional*):
            Optimizer class and its arguments, as for [`~trl.SFTTrainer`].
        quantization_config ([`~transformers.BitsAndBytesConfig`], *optional*):
            Quantization of a model given by name.
        peft_config ([`~peft.PeftConfig`], *optional*):
            PEFT configuration used to wrap the model.
        formatting_func (`Callable`, *optional*):
            Gives the text of a row without media, as for [`~trl.SFTTrainer`].
        compute_loss_func (`Callable`, *optional*):
            See [`~trl.SFTTrainer`], for rows without media.
        compute_metrics (`Callable`, *optional*):
            See [`~trl.SFTTrainer`], for rows without media.
        preprocess_logits_for_metrics (`Callable`, *optional*):
            See [`~trl.SFTTrainer`], for rows without media.

    Raises:
        `TypeError`: If `args` is a config of TRL's own.
        `ValueError`: If the model can't be trained, if rows are to be sharded along their length, if a processor is
            to be loaded by the name of a model that has none, or if a dataset has no columns to learn from, or media
            that a tokenizer can't encode.
    """

    _tag_names = ["trl", "sft", "trl-multimodal-rft"]
    _name = "SFT"
    _paper = {
        "title": "Training language models to follow instructions with human feedback",
        "id": "2203.02155",
        "citation": textwrap.dedent("""\
            @inproceedings{ouyang2022training,
                title     = {{Training language models to follow instructions with human feedback}},
                author    = {Long Ouyang and Jeff Wu and Xu Jiang and Diogo Almeida and others},
                year      = 2022,
                booktitle = {Advances in Neural Information Processing Systems 35},
            }"""),
    }
    # Nothing is sampled here, and rows come once
    num_generations = num_generations_eval = 1
    environment_factories = rollout_func = tools = None
    use_vllm = False
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_length = 256  # of the code on the card
    _warned_of_positions = False

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        args: MultimodalSFTConfig | None = None,
        train_dataset: Dataset | IterableDataset | None = None,
        eval_dataset: Dataset
        | IterableDataset
        | DatasetDict
        | IterableDatasetDict
        | dict[str, Dataset | IterableDataset]
        | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, torch.optim.lr_scheduler.LambdaLR | None] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "PeftConfig | None" = None,
        formatting_func: Callable[[dict], str] | None = None,
        compute_loss_func: Callable | None = None,
        compute_metrics: Callable[[EvalPrediction], dict] | None = None,
        preprocess_logits_for_metrics: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ):
        if isinstance(args, TrainingArguments) and _is_general(args):  # as TRL takes them
            options: dict[str, Any] = {**args.to_dict(), "hub_token": args.hub_token}
            args = MultimodalSFTConfig(**options)
        args = resolve_config(MultimodalSFTConfig, args, model)
        ignore_deprecated_names()
        check_arguments(
            callbacks=callbacks,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )
        refuse_several_runs(args)
        refuse_unchecked_steps(args)
        datasets = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
        warn_of_unread(args, datasets, modalities(model, args), supervised=True)
        set_seed(args.seed)  # as TRL does before it loads a model
        loaded_here = isinstance(model, str)
        if loaded_here:
            model = load_policy(model, args, quantization_config)
        check_processor_name(model, processing_class)
        if processing_class is None:
            init_kwargs: Any = args.model_init_kwargs or {}
            revision = init_kwargs.get("revision") if loaded_here else None
            processing_class = load_processor(get_config_model_id(model.config), revision, args.trust_remote_code)
        check_family(model, processing_class, max_completion_length=0)
        check_processor(processing_class)

        self._kinds_seen: set[str] = set()  # media of the rows so far, for the model card
        self._columns_seen: set[str] = set()
        self._asked: set[tuple[tuple[str, str], ...]] = set()  # what rows ask; of questions that differ, some
        # Datasets whose rows are looked at when the first ones come
        self._unseen = {name for name, dataset in datasets.items() if has_unread_rows(dataset)}
        stand_in = Dataset.from_dict({"prompt": ["-"]})  # TRL looks into the first row, and would decode its media
        with (
            no_warning_about_init_kwargs(loaded_here),
            measured_head(type(self)),
            patch.multiple(args, **_TO_TRL),
        ):
            parent: Any = super()  # of TRL's trainers, mixins name another one
            parent.__init__(
                model=model,
                args=args,
                data_collator=list,
                train_dataset=stand_in if isinstance(train_dataset, Dataset) else _undecoded_streams(train_dataset),
                eval_dataset=_undecoded_streams(eval_dataset),
                processing_class=processing_class,
                callbacks=callbacks,
                optimizers=optimizers,
                optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
                quantization_config=quantization_config,
                peft_config=peft_config,
                compute_loss_func=compute_loss_func,
                compute_metrics=compute_metrics,
                preprocess_logits_for_metrics=preprocess_logits_for_metrics,
            )
        self._formatting_func = formatting_func
        dataset_kwargs: Any = args.dataset_kwargs or {}
        self._skip_prepare_dataset = bool(dataset_kwargs.get("skip_prepare_dataset"))
        if isinstance(train_dataset, Dataset):
            self.train_dataset = train_dataset
        own_collator = DataCollatorForLanguageModeling(pad_token_id=0)  # TRL's check is for rows without another one
        self._reject_skip_prepare_without_labels({"train": train_dataset}, own_collator)
        self.train_dataset = self._prepare_all(self.train_dataset, "train")
        self.eval_dataset = self._prepare_all(self.eval_dataset, "eval")
        parallelism = self.accelerator.parallelism_config
        if parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled):
            raise ValueError(
                "Rows with media can't be sharded along their length; set `cp_size` and `sp_size` to 1, and "
                "`max_tokens_per_microbatch` for long rows."
            )
        # TRL's loss is that of all tokens of an update, unless the model's own forward couldn't make it one. That
        # forward makes no loss here.
        self.model_accepts_loss_kwargs = self._loss_shifts_labels = True
        if args.assistant_only_loss:
            self.chat_template = _training_template(self.processing_class)
        own = self._unwrapped(self.model)
        self._own_tokens = placeholder_tokens(own, self.processing_class)
        columns = ["prompt", "completion", "messages", "tools", "chat_template_kwargs", "input_ids", "labels"]
        self._stream = RowStream(
            args,
            self.accelerator,
            encode=self._encode_row,
            columns=[*columns, *MEDIA_COLUMNS] if args.remove_unused_columns else None,
            metrics=self._metrics,
            state=lambda: self.state,
        )
        self.data_collator = self._encode_batch  # for `predict`
        obstacle = sharing_obstacle(own)
        if obstacle and (args.packing or args.eval_packing):
            logger.warning(f"Rows are padded (`packing=False`): {obstacle}.")
        fallbacks = Fallbacks(
            packing=not obstacle, isolate=family_of(own).isolate, logits_from_model=head_rule(own) is None
        )
        if fallbacks.logits_from_model:
            logger.warning(
                f"{own.config.model_type}: TRL's fused head doesn't know what the model does around its LM head, so "
                "log-probabilities are taken from its own logits, which needs more memory."
            )
        if fallbacks.packing and (args.packing or args.eval_packing):
            install_prefix_attention(own)
        self._policy = PolicyForward(
            self.accelerator, self.processing_class, fallbacks, max_tokens=args.max_tokens_per_microbatch
        )
        keep_differentiable(self.model)
        self._add_checkpoint_callbacks()
        if self._needs_plain_rows and (args.packing or args.eval_packing or args.max_tokens_per_microbatch):
            raise ValueError(
                "Prompt learning and `compute_loss_func` forward padded rows whole; set `packing=False`, and drop "
                "`max_tokens_per_microbatch`."
            )

    def _unwrapped(self, model) -> PreTrainedModel:
        return unwrapped(self.accelerator, model)

    # Rows

    def _prepare_all(self, datasets: Any, name: str) -> Any:
        """A dataset, a dictionary of them or `None`, as TRL's `evaluate` prepares what it is given."""
        if isinstance(datasets, dict):
            return {key: self._prepare_all(each, key) for key, each in datasets.items()}
        if datasets is None or self._skip_prepare_dataset:
            return datasets
        return self._prepare_dataset(datasets, self.processing_class, self.args, False, self._formatting_func, name)

    def _prepare_dataset(self, dataset, processing_class, args, packing, formatting_func, dataset_name):
        """Has TRL tokenize rows of plain text; all others are encoded when they are read, with their media."""
        columns = set(get_dataset_column_names(dataset))
        media = sorted(columns & MEDIA_COLUMNS.keys() - set(args.ignored_media_columns or ()))
        if not isinstance(processing_class, ProcessorMixin):
            refuse_media_without_processor(processing_class, dataset, media, dataset_name)
        if formatting_func is None and "input_ids" not in columns:
            if columns & {"prompt", "messages"}:
                return dataset
            if "conversations" in columns:
                return dataset.map(maybe_convert_to_chatml, remove_columns="conversations")
            if args.dataset_text_field not in columns:
                if isinstance(dataset, Dataset) and not columns_known(dataset):
                    return dataset  # a transform gives others
                layout = other_layout(dataset.features or dict.fromkeys(columns))
                remedy = "" if layout is None else f"; {prepared(layout)}"
                raise ValueError(
                    f"The {dataset_name} dataset has the columns {sorted(columns)}; it needs `prompt` and "
                    f"`completion`, `messages`, `input_ids` or `{args.dataset_text_field}` (`dataset_text_field`)"
                    f"{remedy}."
                )
        elif formatting_func is not None and args.completion_only_loss:
            raise ValueError(
                "`formatting_func` writes a row as one text, which has no completion; drop `completion_only_loss`."
            )
        if media:
            raise ValueError(
                f"The {dataset_name} dataset has plain text and media ({media}), and nothing says where in the text "
                "they are; give `prompt` and `completion`, or `messages`, or name the columns in "
                "`ignored_media_columns`."
            )
        if args.assistant_only_loss and "input_ids" not in columns:
            raise ValueError(
                f"`assistant_only_loss=True` needs `messages`, and the {dataset_name} dataset has text; set it to "
                "False."
            )
        return super()._prepare_dataset(dataset, processing_class, args, False, formatting_func, dataset_name)

    def get_train_dataloader(self):
        args, ranks = self.args, (self.accelerator.num_processes, self.accelerator.process_index)
        order = partial(seeded_order, seed=args.seed if args.data_seed is None else args.data_seed)
        return self._stream.train_loader(
            self.train_dataset,
            BatchShape(args.per_device_train_batch_size, 1, 1, *ranks, drop_last=args.dataloader_drop_last),
            # An update reads its micro-batches before it forwards the first one, to count their labels
            args.media_prefetch * args.gradient_accumulation_steps,
            order if args.train_sampling_strategy == "random" else None,
            collate_fn=partial(self._encode_batch, split="train"),
        )

    def get_eval_dataloader(self, eval_dataset=None):
        dataset = named_dataset(self.eval_dataset, eval_dataset)
        return self._stream.eval_loader(dataset, 1, self._get_eval_sampler, collate_fn=self._encode_batch)

    def _encode_row(self, row: Row) -> SupervisedSequence:
        if row.get("input_ids"):
            return given_sequence(row, self.processing_class, self._unwrapped(self.model))
        args, tools = self.args, row.get("tools")
        own = row.get("chat_template_kwargs") or {}
        template = {"chat_template": self.chat_template, "tools": _parsed(tools) or None, **own}
        sequence = encode_sequence(
            row,
            self.processing_class,
            self._unwrapped(self.model),
            completion_only=args.completion_only_loss,
            assistant_only=args.assistant_only_loss,
            template_kwargs=template,
            audio_overlong=args.audio_overlong,
            ignored_media_columns=args.ignored_media_columns or (),
            own_tokens=self._own_tokens,
            media_rules=args.media_rules,
            special_tokens_in_text=args.special_tokens_in_text,
        )
        if args.max_length is not None and len(sequence) > args.max_length:
            if sequence.modalities:
                raise MediaError(
                    f"row {row.number} has {len(sequence)} tokens with its media, more than `max_length` "
                    f"({args.max_length}), and media aren't cut; raise it, make the media smaller, or leave such rows "
                    "out with `on_media_error='skip'`"
                )
            sequence = sequence.first(args.max_length, from_end=args.truncation_mode == "keep_end")
        return sequence

    def _encode_batch(self, rows: Sequence[Any], split: str = "eval") -> dict[str, Any]:
        """A micro-batch: sequences, and the labels that `Trainer` counts."""
        name, model = f"{split}_dataset", self._unwrapped(self.model)
        if isinstance(rows[0], EncodedRow):
            read, sequences = [each.stored for each in rows], [each.prompt for each in rows]
        else:  # of `predict`
            read = [each.stored for each in self._stream.without_prompts(rows)]
            sequences = [self._encode_row(row) for row in read]
        if name in self._unseen:
            self._unseen.remove(name)
            first = {name: [dict(row) for row in read]}
            warn_of_unread(self.args, first, modalities(model, self.args), extent="first", supervised=True)
        self._kinds_seen.update(*(each.modalities for each in sequences))
        numbers = [row.number for row in read]
        self._warned_of_positions = self._warned_of_positions or warn_of_positions(sequences, numbers, model)
        self._columns_seen.update(*read)
        if len(self._asked) < 2 and "input_ids" not in read[0]:
            self._asked.update(conversation_of(row.get("prompt") or row["messages"][:-1]) for row in read)
        if split == "train":
            self._show_first(read[0], sequences[0])
        labels = [each.input_ids.masked_fill(~each.learned, -100) for each in sequences]
        return {"sequences": sequences, "labels": pad_sequence(labels, batch_first=True, padding_value=-100)}

    def _show_first(self, row: Row, sequence: SupervisedSequence) -> None:
        display = waiting_display(self)
        if display is not None:
            messages = None
            if sequence.modalities:
                (placed,) = rows_to_messages(
                    [{**row, "prompt": row.get("messages") or row["prompt"]}],
                    self.args.ignored_media_columns or (),
                    self._own_tokens,
                    self.args.media_rules,
                )
                messages = placed["prompt"]
            ids, learned = sequence.input_ids, sequence.learned
            display.show_example(ids[: int(learned.int().argmax())].tolist(), messages, ids[learned].tolist())

    # Update

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if return_outputs or self._needs_plain_rows:
            return super().compute_loss(model, self._plain_rows(inputs), return_outputs, num_items_in_batch)
        found = []
        lengths = torch.tensor(list(map(len, inputs["sequences"])), device=inputs["labels"].device)
        loss = super().compute_loss(
            partial(self._score, model, inputs["sequences"], found),  # in the place of the model
            {"labels": inputs["labels"], "attention_mask": lengths},  # which TRL sums up
            num_items_in_batch=num_items_in_batch,
        )
        (scores,) = found
        if scores.deferred is None:
            return loss
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["token_budget/parts"].append(float(len(scores.deferred.parts)))
        metrics["token_budget/extra_time"].append(scores.deferred.seconds)
        return backward_by_parts(
            self.accelerator,
            model,
            loss,
            scores.deferred,
            1 if num_items_in_batch is not None else self.current_gradient_accumulation_steps,
        )

    @property
    def _needs_plain_rows(self) -> bool:
        """Whether the model's own forward makes the loss: with virtual tokens of PEFT, or a loss of the user's."""
        configs = self.model.peft_config.values() if is_peft_model(self.model) else ()
        return self.compute_loss_func is not None or any(each.is_prompt_learning for each in configs)

    def _plain_rows(self, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
        """A micro-batch of text as TRL's collator makes it."""
        sequences: list[SupervisedSequence] = inputs["sequences"]
        labels = inputs["labels"]
        for each in sequences:
            if each.modalities:
                raise ValueError(
                    f"row {each.row} has media, of which no logits are kept; without `compute_metrics`, "
                    "`compute_loss_func` and prompt learning, `evaluate()` gives the loss and the metrics, and "
                    "`trl_multimodal_rft.evaluation.evaluate` answers."
                )
        ids = [each.input_ids for each in sequences]
        fields = {
            "input_ids": ids,
            "attention_mask": [torch.ones_like(each) for each in ids],
            **{name: [each.token_fields[name] for each in sequences] for name in sequences[0].token_fields},
        }
        padded = {name: pad_sequence(rows, batch_first=True).to(labels.device) for name, rows in fields.items()}
        return {**padded, "labels": labels}

    def _score(self, model, sequences, found: list, labels, **kwargs) -> FusedCausalLMOutput:
        """What TRL's fused head gives for padded rows."""
        following = labels[:, 1:]
        mask = following != -100
        args, n = self.args, len(sequences)
        packing = args.packing if self.model.training or args.eval_packing is None else args.eval_packing
        scores = self._policy.score(
            model,
            sequences,
            following.clamp(min=0),
            mask.long(),
            packed=packing and self._policy.worth_packing(sequences, [0] * n, n),
            compute_aux_loss=self.aux_loss_enabled,
            whole=True,
        )
        found.append(scores)
        return FusedCausalLMOutput(
            log_probs=scores.logps,
            entropy=scores.entropies,
            is_top1=scores.top1,
            label_mask=mask,
            aux_loss=scores.aux_loss,
        )

    # Checkpoints and card

    def _rollout_state(self) -> dict[str, Any]:
        return {
            "metrics": dict(self._metrics["train"]),
            "n_skipped": self._n_skipped,
            "skipped_rows": self._stream.skipped,
            "num_tokens": self._total_train_tokens,
        }

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        self._metrics["train"].update(state["metrics"])
        self._n_skipped, self._stream.skipped = state["n_skipped"], state["skipped_rows"]
        self._total_train_tokens = state["num_tokens"]

    def _training_lines(self) -> list[tuple[str, str]]:
        args = self.args
        learned = "the assistant's turns" if args.assistant_only_loss else "completions, or whole conversations"
        if args.completion_only_loss is False and not args.assistant_only_loss:
            learned = "whole rows"
        return [("Loss", f"`{args.loss_type}` of {learned}"), ("`learning_rate`", f"`{args.learning_rate}`")]


def _training_template(processing_class) -> str | None:
    """TRL's form of a template that writes earlier turns otherwise, where it has one."""
    try:
        return get_training_chat_template(processing_class)
    except ValueError:  # unknown
        return None


def _parsed(tools: Any) -> Any:
    return json.loads(tools) if isinstance(tools, str) else tools


def _undecoded_streams(datasets: Any) -> Any:
    """Streams, or a dictionary of them, before TRL maps them, after which their features are unknown."""
    if isinstance(datasets, dict):
        return type(datasets)({name: _undecoded_streams(each) for name, each in datasets.items()})
    return undecoded(datasets) if isinstance(datasets, IterableDataset) else datasets
