# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions of the prompts of a dataset, and what reward functions say about them."""

import asyncio
import functools
import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.utils import gather_object, set_seed
from datasets import Dataset
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerState,
)
from trl.distributed import DistributedBackend
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import (
    get_callable_name,
)

from ..data.columns import (
    MEDIA_COLUMNS,
    MediaError,
    MediaRef,
    as_text,
    iter_refs,
    rows_to_messages,
    strip_media,
)
from ..data.features import restore_media, restore_rows
from ..data.rows import DatasetRows, Row
from ..data.rules import DEFAULT_RULES, MediaRules
from ..data.unread import check_columns, check_has_prompt, check_ignored, columns_known
from ..encoding.ablation import Ablation
from ..encoding.control_tokens import checked_prompt
from ..encoding.join import same_prompt
from ..encoding.processors import check_processor
from ..encoding.prompts import EncodedPrompt, all_placeholder_ids, encode_prompt, placeholder_tokens
from ..families import MODALITIES, family_of
from ..forward.processes import refuse_separate_runs
from ..generation.transformers import Branches, trim_after_eos
from ..models.modes import evaluation_mode
from ..models.wrapped import unwrapped
from ..policy import Fallbacks, PolicyForward
from ..rewards.answers import extract_answer, normalize_answer
from ..rewards.calls import call_rewards, reward_arguments, reward_loop
from ..rewards.checks import checked_reward, distinct_names
from ..rewards.choices import named_choice
from ..rewards.named import as_reward_funcs
from ..rollout.environments import Environments, template_for_tools
from ..rollout.turns import ENDS, ToolLoop, Trajectory, parse_assistant_turn
from ..trainers.arguments import help_from_docstring
from ..trainers.base import MultimodalTrainer
from ..trainers.random_state import kept_random_state
from ..trainers.setup import check_takes_tools
from .metrics import majority_at_k, mean_interval, paired_interval, pass_at_k, wilson_interval


logger = get_logger(__name__)

# Where a record keeps its value of `group_by` until the metrics are made
_GROUP = "\0group"

_VERSIONS = ("trl-multimodal-rft", "trl", "transformers", "torch", "accelerate", "datasets")


@help_from_docstring
@dataclass
class EvaluationConfig:
    """
    How completions are sampled and counted.

    Args:
        num_samples (`int`, *optional*, defaults to `1`):
            Completions of each prompt. More than one need a temperature.
        temperature (`float`, *optional*, defaults to `0.0`):
            Temperature of sampling; 0 is greedy decoding.
        top_p (`float`, *optional*, defaults to `1.0`):
            Share of probability that tokens are sampled from.
        top_k (`int`, *optional*, defaults to `0`):
            Number of tokens that are sampled from; 0 is all.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Most tokens of a completion.
        batch_size (`int`, *optional*, defaults to `8`):
            Completions sampled at once on each process. A batch has the `batch_size // num_samples` prompts that fit,
            or one, whose completions are drawn in turns where they don't.
        pass_at (`list[int]`, *optional*, defaults to `[1]`):
            The `k` of pass@k, at most `num_samples`.
        majority_at (`list[int]`, *optional*):
            The `k` of majority@k, at most `num_samples`. By default those of `pass_at` but 1.
        correct_threshold (`float`, *optional*, defaults to `1.0`):
            Smallest value of the first reward function at which a completion counts as correct.
        group_by (`str`, *optional*):
            Column by whose values accuracy is told apart too, such as `"task"` of MMAU.
        max_tool_calling_iterations (`int`, *optional*):
            How often a completion's calls of tools are answered at most. By default as often as the trainer does, if
            there is one, or else as often as the completion has room for.
        max_tool_media (`int`, *optional*):
            Media that tools return in a completion at most. By default as many as with the trainer, if there is one.
        ablate (`str`, *optional*):
            `"audio"`, `"image"` or `"video"`: rows with such a medium in their prompt are answered again without it,
            which tells how much it contributes to the accuracy. Something else of the same duration and size is in its
            place.
        ablate_with (`str`, *optional*, defaults to `"blank"`):
            What that is: `"blank"` is silence or grey, `"shuffled"` another row's medium.
        confidence (`float`, *optional*, defaults to `0.95`):
            Level of the confidence intervals.
        seed (`int`, *optional*, defaults to `0`):
            Seed of sampling. Each batch has its own seed, made of this one and of its place.
        ignored_media_columns (`list[str]`, *optional*):
            Columns with media that only reward functions read, see [`MultimodalGRPOConfig`]. By default those of the
            trainer, if there is one.
        on_media_error (`str`, *optional*):
            What happens to a row that can't be read: `"raise"` ends the evaluation with an error that names the row,
            `"skip"` leaves it out of all metrics. By default that of the trainer, if there is one, or else `"raise"`.

    Raises:
        `ValueError`: If a value is out of range.
    """

    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_completion_length: int = 256
    batch_size: int = 8
    pass_at: list[int] = field(default_factory=lambda: [1])
    majority_at: list[int] | None = None
    correct_threshold: float = 1.0
    group_by: str | None = None
    max_tool_calling_iterations: int | None = None
    max_tool_media: int | None = None
    ablate: str | None = field(default=None, metadata={"choices": [None, *MODALITIES]})
    ablate_with: str = field(default="blank", metadata={"choices": ["blank", "shuffled"]})
    confidence: float = 0.95
    seed: int = 0
    ignored_media_columns: list[str] | None = None
    on_media_error: str | None = field(default=None, metadata={"choices": [None, "raise", "skip"]})

    def __post_init__(self):
        for name in ("num_samples", "max_completion_length", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` is {getattr(self, name)}; set it to at least 1.")
        if self.temperature < 0:
            raise ValueError(f"`temperature` is {self.temperature}; set it to 0 for greedy decoding, or to more.")
        if self.num_samples > 1 and self.temperature == 0:
            raise ValueError(
                f"`num_samples` is {self.num_samples}, but greedy decoding gives the same completion every time; set "
                "a `temperature`."
            )
        if self.majority_at is None:
            self.majority_at = [k for k in self.pass_at if k > 1]
        for name in ("pass_at", "majority_at"):
            for k in getattr(self, name):
                if not 1 <= k <= self.num_samples:
                    raise ValueError(
                        f"`{name}` has {k}, but must be between 1 and `num_samples` ({self.num_samples})."
                    )
        check_ignored(self.ignored_media_columns)
        if self.ablate not in (None, *MODALITIES):
            raise ValueError(f"`ablate` is {self.ablate!r}; set it to one of {', '.join(map(repr, MODALITIES))}.")
        if self.ablate_with not in ("blank", "shuffled"):
            raise ValueError(f"`ablate_with` is {self.ablate_with!r}; set it to 'blank' or 'shuffled'.")
        if self.on_media_error not in (None, "raise", "skip"):
            raise ValueError(f"`on_media_error` is {self.on_media_error!r}; set it to 'raise' or 'skip'.")
        if not 0 < self.confidence < 1:
            raise ValueError(f"`confidence` is {self.confidence}, but must be between 0 and 1, such as 0.95.")


@dataclass
class EvaluationResult:
    """
    What an evaluation found, the same on each process.

    Args:
        metrics (`dict[str, float | None]`):
            `accuracy` (of all completions, which is pass@1), `pass@k` and `majority@k`, each with `_low` and `_high`,
            the ends of its confidence interval; `reward/<name>`, the mean of each reward function; `completion_length`
            in tokens; `truncated`, the share of completions that didn't end; `rows`, and `scored_rows`, those whose
            samples the first reward function all gave a value; `skipped_rows`, those that couldn't be read and aren't
            counted, where they are left out; `accuracy/<value>` of each value of `group_by`; with tools,
            `tools/call_frequency` (calls per completion), `tools/failure_frequency` (of calls) and
            `tools/ended_by_length`, `..._turns` and `..._media` (of completions); and `metric/<name>`, means over
            batches of what reward functions gave to `log_metric`. `None` where there is nothing to take a mean of, or
            too little for an interval. With `ablate="audio"`, of the rows with a sound alone: `accuracy_with_audio`,
            `accuracy_without_audio`, and their difference `audio_contribution`, each with `_low` and `_high`, see
            [`~evaluation.paired_interval`]; and `audio_rows`, how many these are.
        rows (`list[dict]`):
            For each row, in the order of the dataset: its `index`, its `prompt` as text, in which media are marks such
            as `"<audio>"`; lists with an entry for each completion: `completions`, `extracted_answers`, `correct`,
            `completion_lengths`, `truncated`, `reward/<name>` and `extra/<name>`, what reward functions gave to
            `log_extra`; with tools, `tool_calls`, `tool_failures` and `ended_by`, while `completions` are the whole
            conversations as text; with `ablate`, `completions_without` and `correct_without`, where the prompt has
            such a medium, else `None`; and the dataset's other columns, if they hold text and numbers and have none of
            these names.
        settings (`dict`):
            What was evaluated, and how.
        skipped (`dict[int, str]`):
            For each row that couldn't be read its index, and why.
    """

    metrics: dict[str, float | None]
    rows: list[dict[str, Any]]
    settings: dict[str, Any]
    skipped: dict[int, str] = field(default_factory=dict)

    def save(self, folder: str | Path) -> None:
        """
        Writes `metrics.json` (metrics, settings and versions) and `rows.parquet`. Only the main process does.

        Args:
            folder (`str` or `Path`):
                Where to, made if need be.
        """
        if not PartialState().is_main_process:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        versions = {name: version(name) for name in _VERSIONS}
        content = {"metrics": self.metrics, "settings": self.settings, "versions": versions, "skipped": self.skipped}
        (folder / "metrics.json").write_text(json.dumps(content, indent=2) + "\n")
        Dataset.from_list(self.rows).to_parquet(folder / "rows.parquet")


class _Asked(NamedTuple):
    """What one completion answers: a row, its prompt as messages and encoded, and the environment it is in."""

    row: Row
    messages: Any
    prompt: EncodedPrompt
    environment: Any = None


@dataclass
class _Policy:
    """
    What completes prompts.

    `model` is what is put in evaluation mode, `base` the model without wrappers and adapters. `complete(prompts,
    config, branches)` gives the ids of completions, each up to its end. With `in_step`, processes must call it equally
    often; with `keep_decoded`, it takes the prompts' media, too, as they were decoded. With
    `on_media_error="skip"`, rows that can't be read are left out. With `conversations`, `tools` and those of
    `environments` are called.
    """

    model: nn.Module
    base: PreTrainedModel
    processor: ProcessorMixin | PreTrainedTokenizerBase
    complete: Callable[[list[EncodedPrompt], GenerationConfig, Branches | None], list[list[int]]]
    template_kwargs: dict[str, Any]
    audio_overlong: Literal["raise", "truncate"]
    media_rules: MediaRules
    special_tokens_in_text: Literal["allow", "raise", "strip"] | None = None
    ignored_media_columns: Sequence[str] = ()
    on_media_error: str = "raise"
    in_step: bool = False
    keep_decoded: bool = False
    trainer_state: TrainerState = field(default_factory=TrainerState)
    environments: Environments = field(default_factory=Environments)  # and tools
    tool_loop: Callable[..., ToolLoop] | None = None

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.processor.tokenizer if isinstance(self.processor, ProcessorMixin) else self.processor


def evaluate(
    model: PreTrainedModel | nn.Module,
    processing_class: ProcessorMixin | PreTrainedTokenizerBase,
    dataset: Dataset | Sequence[dict[str, Any]],
    reward_funcs: Callable | list[Callable] | None,
    args: EvaluationConfig | None = None,
    *,
    accelerator: Accelerator | None = None,
    template_kwargs: dict[str, Any] | None = None,
    audio_overlong: Literal["raise", "truncate"] = "raise",
    media_rules: MediaRules = DEFAULT_RULES,
    tools: list[Callable] | None = None,
    environment_factory: Callable[[], Any] | dict[str, Callable[[], Any]] | None = None,
    special_tokens_in_text: Literal["allow", "raise", "strip"] | None = None,
) -> EvaluationResult:
    """
    Lets a model complete the prompts of a dataset and counts what is right.

    Each prompt and its media are decoded, encoded and prefilled once for all its completions. Processes take turns
    with the batches, and each row counts once, whatever the number of rows and processes. What a batch holds and its
    seed don't depend on the processes either, so neither do the completions. Placeholder tokens can't be sampled. Of
    the model's own generation config, the ends of sequence and suppressed tokens count, and nothing else.

    The modes of the model's modules and the random states of Python, NumPy and torch are the same afterwards.

    Args:
        model ([`~transformers.PreTrainedModel`], [`~peft.PeftModel`] or [`Actor`]):
            Model to evaluate, where it is to run, and whole on each process; what [`~accelerate.Accelerator`] has
            wrapped for DDP is fine. For models in training under FSDP or ZeRO-3 there is [`evaluate_trainer`].
        processing_class ([`~transformers.ProcessorMixin`] or [`~transformers.PreTrainedTokenizerBase`]):
            The model's processor, or its tokenizer for text.
        dataset ([`~datasets.Dataset`] or `Sequence[dict]`):
            Rows with the column `prompt`, media columns, and what reward functions ask for, such as `solution`.
        reward_funcs (`Callable` or `list[Callable]`):
            Reward functions as the trainers take them, plain or async, or their names. The first tells what is
            correct. `None` where environments give the reward, which otherwise comes after these.
        args ([`EvaluationConfig`], *optional*):
            How to sample and count. By default one greedy completion per row.
        accelerator ([`~accelerate.Accelerator`], *optional*):
            The processes and their device. By default a new one.
        template_kwargs (`dict[str, Any]`, *optional*):
            Arguments for `apply_chat_template`.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            What happens to audio longer than the model's window: `"raise"` or `"truncate"`.
        media_rules ([`~data.rules.MediaRules`], *optional*):
            From where media may come, and how large they may be.
        tools (`list[Callable]`, *optional*):
            Tools that the model may call, as for [`MultimodalGRPOTrainer`].
        environment_factory (`Callable` or `dict[str, Callable]`, *optional*):
            Environments, as for [`MultimodalGRPOTrainer`].
        special_tokens_in_text (`str`, *optional*):
            What happens to control tokens in texts of messages and of tools' results, see [`MultimodalGRPOConfig`].

    Returns:
        [`EvaluationResult`]: Metrics and rows, the same on each process.

    Raises:
        `ValueError`: If there are no rows, a row has no prompt, a reward function returns something else than a number
            or `None` per completion, the model's weights are spread over processes, or the processor pads audio on the
            wrong side.
        [`MediaError`]: If a medium can't be decoded or placed. The message names the row in its batch.

    Example:
    ```python
    result = evaluate(model, processor, dataset, accuracy_reward, EvaluationConfig(max_completion_length=16))
    print(result.metrics["accuracy"], result.metrics["accuracy_low"], result.metrics["accuracy_high"])
    ```
    """
    check_processor(processing_class)
    accelerator = accelerator or Accelerator()
    refuse_separate_runs(
        accelerator.num_processes,
        ", so that {launched} processes would all evaluate everything. To evaluate on the CPU, set "
        "`ACCELERATE_USE_CPU=true` in the environment.",
    )
    own: Any = model.model if hasattr(model, "model_for") else model  # an actor's
    base = unwrapped(accelerator, own)
    if DistributedBackend(accelerator).is_zero3 or any(isinstance(p, DTensor) for p in base.parameters()):
        raise ValueError(
            "The weights of the model are spread over processes, where `evaluate` can't tell how to sample; load it "
            "whole on each process, or evaluate with `evaluate_trainer` or `GenerationEvalCallback` during training."
        )

    # Without the accelerator: processes have batches of their own, and wait for nobody
    forward = PolicyForward(processor=processing_class, fallbacks=Fallbacks(isolate=family_of(base).isolate))

    def complete(
        prompts: list[EncodedPrompt], config: GenerationConfig, branches: Branches | None = None
    ) -> list[list[int]]:
        ready = functools.partial(unwrap_model_for_generation, own, accelerator)
        output = forward.sample(own, prompts, config, config.pad_token_id, generating=ready, branches=branches)
        return trim_after_eos(output, config.eos_token_id)

    policy = _Policy(own, base, processing_class, complete, template_kwargs or {}, audio_overlong, media_rules)
    policy.special_tokens_in_text = special_tokens_in_text
    with kept_random_state():
        policy.environments = Environments(tools or (), environment_factory, media_rules)
    if policy.environments.tools or policy.environments:
        check_takes_tools(processing_class)
        policy.template_kwargs = {"chat_template": template_for_tools(processing_class), **policy.template_kwargs}
        policy.tool_loop = functools.partial(
            ToolLoop,
            model=base,
            processor=processing_class,
            max_turns=math.inf,
            max_media=None,
            template_kwargs=policy.template_kwargs,
            audio_overlong=audio_overlong,
            media_rules=media_rules,
            special_tokens_in_text=special_tokens_in_text or "raise",
            isolate=forward.fallbacks.isolate,
        )
    reward_funcs = [*(as_reward_funcs(reward_funcs) if reward_funcs else ())]
    reward_funcs += policy.environments.reward_funcs().values()
    return _evaluate(policy, dataset, _named(reward_funcs), args or EvaluationConfig(), accelerator)


def evaluate_trainer(
    trainer: MultimodalTrainer,
    dataset: Dataset | Sequence[dict[str, Any]] | None = None,
    reward_funcs: Callable | list[Callable] | None = None,
    args: EvaluationConfig | None = None,
) -> EvaluationResult:
    """
    [`evaluate`] of the model of a trainer, as it is now, also in the middle of training and with weights that FSDP2 or
    ZeRO-3 spread over processes. Nothing that training depends on is changed.

    Completions are sampled by what the trainer samples with, transformers or vLLM, with its chat template and its
    `audio_overlong` and rules for media. They call its tools; environments are made anew.

    Args:
        trainer ([`MultimodalGRPOTrainer`], [`MultimodalRLOOTrainer`] or [`MultimodalPPOTrainer`]):
            Trainer.
        dataset ([`~datasets.Dataset`] or `Sequence[dict]`, *optional*):
            Rows with the prompts. By default the trainer's `eval_dataset`.
        reward_funcs (`Callable` or `list[Callable]`, *optional*):
            Reward functions; the first tells what is correct. By default those of the trainer.
        args ([`EvaluationConfig`], *optional*):
            How to sample and count. By default one greedy completion per row, of the trainer's
            `max_completion_length`, in batches of its `per_device_eval_batch_size`.

    Returns:
        [`EvaluationResult`]: Metrics and rows, the same on each process.

    Raises:
        `ValueError`: If there is no dataset, or as [`evaluate`] says.
    """
    _check_trainer(trainer)
    dataset = trainer.eval_dataset if dataset is None else dataset
    if dataset is None:
        raise ValueError("There is nothing to evaluate on; pass a dataset, or give the trainer an `eval_dataset`.")
    if args is None:
        args = EvaluationConfig(
            max_completion_length=trainer.max_completion_length, batch_size=trainer.args.per_device_eval_batch_size
        )
    trainer.sampler.invalidate_weights()  # an engine may have other weights, wherever these are from

    @torch.no_grad()
    def complete(prompts: list[EncodedPrompt], config: GenerationConfig, branches: Branches | None) -> list[list[int]]:
        step = trainer.state.global_step
        return trainer.sampler(trainer.model_wrapped, prompts, step=step, config=config, branches=branches)[0]

    policy = _Policy(
        model=trainer.model,
        base=trainer._unwrapped(trainer.model),
        processor=trainer.processing_class,
        complete=complete,
        template_kwargs={"chat_template": trainer.chat_template, **trainer.chat_template_kwargs},
        audio_overlong=trainer.args.audio_overlong,
        media_rules=trainer.args.media_rules,
        special_tokens_in_text=trainer.args.special_tokens_in_text,
        ignored_media_columns=trainer.args.ignored_media_columns or (),
        on_media_error=trainer.args.on_media_error,
        in_step=trainer.sampler.is_collective,
        keep_decoded=trainer.use_vllm,
        trainer_state=trainer.state,
    )
    with kept_random_state():
        policy.environments = trainer.toolbox.fresh()
    if trainer.tools:
        policy.tool_loop = trainer._tool_loop
    named = _named(reward_funcs) if reward_funcs else _named(list(trainer.reward_funcs), trainer.reward_func_names)
    return _evaluate(policy, dataset, named, args, trainer.accelerator)


def _check_trainer(trainer: MultimodalTrainer) -> None:
    if not isinstance(trainer, MultimodalTrainer):
        raise ValueError(
            f"The trainer is a {type(trainer).__name__}, which doesn't sample as the trainers of this package do; "
            "evaluate its model with `evaluate`."
        )


@torch.no_grad()
def _evaluate(
    policy: _Policy,
    dataset: Dataset | Sequence[dict[str, Any]],
    named_funcs: dict[str, Callable],
    args: EvaluationConfig,
    accelerator: Accelerator,
) -> EvaluationResult:
    if not isinstance(dataset, (Dataset, Sequence)) or len(dataset) == 0:
        raise ValueError(
            f"The dataset ({type(dataset).__name__}) has no rows to count; pass a `Dataset` or a list with at least "
            "one: a split of several, or `list(stream.take(100))` of one that streams."
        )
    if args.ignored_media_columns is not None:
        policy.ignored_media_columns = args.ignored_media_columns
    policy.on_media_error = args.on_media_error or policy.on_media_error
    is_table = isinstance(dataset, Dataset)

    def look(at, extent: Literal["all", "first"]) -> None:
        if policy.environments:
            return  # environments read what columns they like
        ignored = policy.ignored_media_columns
        takes: Any = getattr(policy.model, "input_modalities", ())
        needs_prompt = is_table and extent == "all"
        warning = check_columns(at, "The dataset", ignored, needs_prompt=needs_prompt, extent=extent, takes=takes)
        if warning is not None:
            logger.warning_once(warning)  # also of one evaluation after the other

    look(dataset, "all")
    rows = DatasetRows(dataset) if is_table else _Rows(dataset)
    if args.group_by is not None and args.group_by not in rows.__getitems__([0])[0]:
        raise ValueError(f"`group_by` is {args.group_by!r}, a column that the rows don't have; name one of theirs.")
    if args.group_by in MEDIA_COLUMNS:
        raise ValueError(f"`group_by` is {args.group_by!r}, a column of media; name one of text or numbers.")
    n_prompts = max(args.batch_size // args.num_samples, 1)
    batches = [range(start, min(start + n_prompts, len(dataset))) for start in range(0, len(dataset), n_prompts)]
    config = _generation_config(policy, args)
    records, logged, left_out, skipped = [], [], set(), {}
    with (
        kept_random_state(),
        evaluation_mode(policy.model),
        reward_loop([*named_funcs.values(), *policy.environments.tools]) as loop,
    ):
        for first in range(0, len(batches), accelerator.num_processes):
            place = first + accelerator.process_index
            if place < len(batches) or policy.in_step:
                # Where there is none left, the first one again keeps the other processes from waiting forever
                indices = list(batches[place] if place < len(batches) else batches[0])
                seed = int(np.random.SeedSequence([args.seed, place]).generate_state(1)[0])
                set_seed(seed)
                batch = rows.__getitems__(indices)
                if first == 0 and not columns_known(dataset):
                    look(batch, "first")
                read, failed = _read(policy, batch, args.num_samples)
                answered, metrics = _answer(policy, read, named_funcs, config, args, loop)
                if args.ablate is not None and (chosen := _to_ablate(policy, read, args)):
                    ablation = functools.partial(_ablation, policy, rows, len(dataset), args)
                    blind, _ = _read(policy, chosen, args.num_samples, ablation)
                    set_seed(seed)  # so that nothing else tells the answers apart
                    again, _ = _answer(policy, blind, named_funcs, config, args, loop)
                    numbers = [asked.row.number for asked in blind[:: args.num_samples]]
                    _add_answers_without(answered, read, dict(zip(numbers, again, strict=True)), args)
                if place < len(batches):
                    skipped |= failed
                    for asked, record in zip(read[:: args.num_samples], answered, strict=True):
                        row = asked.row
                        record = {"index": row.number, **record}
                        others = {name: row[name] for name in row if name not in record and name not in MEDIA_COLUMNS}
                        left_out.update(name for name, value in others.items() if not _is_plain(value))
                        if args.group_by is not None:  # which may be left out, or have the name of another entry
                            others[_GROUP] = str((record if args.group_by == "prompt" else row).get(args.group_by))
                        records.append({**record, **others})
                    logged += metrics
    if accelerator.num_processes > 1:
        left_out = set(gather_object(list(left_out)))
    records = [{name: value for name, value in record.items() if name not in left_out} for record in records]
    if accelerator.num_processes > 1:
        records, logged, skipped = (
            gather_object(records),
            gather_object(logged),
            dict(gather_object([*skipped.items()])),
        )
    names = dict.fromkeys(name for record in records for name in record)
    records = [{name: record.get(name) for name in names} for record in sorted(records, key=lambda r: r["index"])]
    names = [*named_funcs]
    if args.ablate is not None and not any(record.get("correct_without") for record in records):
        raise ValueError(f"No row has {args.ablate} to answer without; leave out `ablate`, or name another kind.")
    metrics = _metrics(records, names, args)
    if policy.on_media_error == "skip":
        metrics["skipped_rows"] = len(skipped)
    for name in sorted({name for name, _ in logged}):
        metrics[f"metric/{name}"] = _mean([value for own, value in logged if own == name])
    for record in records:
        record.pop(_GROUP, None)
    settings = {
        **asdict(args),
        "model": policy.base.config._name_or_path,
        "reward_funcs": names,
    }
    return EvaluationResult(metrics, records, settings, skipped)


class _Rows:
    """Rows of a sequence, read as those of a dataset are."""

    def __init__(self, rows: Sequence[dict[str, Any]]):
        self._rows = rows

    def __getitems__(self, indices: list[int]) -> list[Row]:
        return [Row(index, self._rows[index]) for index in indices]


def _named(reward_funcs: Callable | list[Callable], names: Sequence[str] | None = None) -> dict[str, Callable]:
    """Reward functions by the names of their metrics."""
    reward_funcs = as_reward_funcs(reward_funcs)
    if not reward_funcs:
        raise ValueError("There is no reward function; pass at least one, which tells what is correct.")
    for reward_func in reward_funcs:
        if isinstance(reward_func, (str, nn.Module)):
            raise ValueError(
                "A reward model can't be called like a function; pass `RewardModel(model, processor)` or functions as "
                "`reward_funcs`."
            )
    names = names or [get_callable_name(reward_func) for reward_func in reward_funcs]
    if len(set(map(id, reward_funcs))) < len(reward_funcs):
        raise ValueError(f"Reward functions must have different names, but are called {names}; one is there twice.")
    return dict(zip(distinct_names(names), reward_funcs, strict=True))


def _generation_config(policy: _Policy, args: EvaluationConfig) -> GenerationConfig:
    tokenizer, own = policy.tokenizer, policy.base.generation_config
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    ends = [end for end in dict.fromkeys([tokenizer.eos_token_id, *ends]) if end is not None]
    padding = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    # A sampled placeholder would stand for media that aren't there
    suppressed = all_placeholder_ids(policy.base, policy.processor) | set(own.suppress_tokens or [])
    sampling = {"do_sample": False}
    if args.temperature > 0:
        sampling = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k}
    return GenerationConfig(
        max_new_tokens=args.max_completion_length,
        eos_token_id=ends,
        pad_token_id=padding,
        bos_token_id=tokenizer.bos_token_id,
        suppress_tokens=sorted(suppressed) or None,
        disable_compile=True,
        **sampling,
    )


def _read(
    policy: _Policy, rows: Sequence[Row], n_samples: int, ablation: Callable[[Row], Ablation] | None = None
) -> tuple[list[_Asked], dict[int, str]]:
    """What each completion of rows answers; and rows that are left out, and why."""
    for row in () if policy.environments else rows:
        check_has_prompt(row)
    own_tokens = placeholder_tokens(policy.base, policy.processor)

    def encode(prompt: Any, row: Row, environment: Any = None) -> EncodedPrompt:
        template_kwargs = policy.template_kwargs
        if policy.tool_loop is not None:
            if isinstance(prompt, str):
                raise ValueError(f"The prompt of row {row.number} is a text; tools need one of messages.")
            template_kwargs = {
                **template_kwargs,
                "tools": [*policy.environments.tools_in(environment).values()] or None,
            }
        return encode_prompt(
            checked_prompt(prompt, policy.processor, policy.special_tokens_in_text, row.number),
            policy.processor,
            policy.base,
            template_kwargs=template_kwargs,
            audio_overlong=policy.audio_overlong,
            keep_decoded=policy.keep_decoded,
            ablation=None if ablation is None else ablation(row),
            row=row.number,
        )

    def encoded(rows: Sequence[Row]) -> list[_Asked]:
        if "prompt" in rows[0] or not policy.environments:
            placed = rows_to_messages(rows, policy.ignored_media_columns, own_tokens, policy.media_rules)
            messages = [row["prompt"] for row in placed]
        else:
            messages = [None] * len(rows)
        if not policy.environments:
            asked = [_Asked(row, own, encode(own, row)) for row, own in zip(rows, messages, strict=True)]
            return [each for each in asked for _ in range(n_samples)]
        # An environment for each completion, which may each show something else
        wholes = restore_rows(rows, policy.media_rules)
        repeated = [i for i in range(len(rows)) for _ in range(n_samples)]
        numbers = [rows[i].number for i in repeated]
        entered = policy.environments.enter([messages[i] for i in repeated], [wholes[i] for i in repeated], numbers)
        asked = []
        for i, environment, prompt in zip(repeated, *entered, strict=True):
            same = bool(asked) and asked[-1].row is rows[i] and same_prompt(prompt, asked[-1].messages)
            shared = asked[-1].prompt if same else encode(prompt, rows[i], environment)
            asked.append(_Asked(rows[i], prompt, shared, environment))
        return asked

    try:
        return encoded(rows), {}
    except MediaError:
        if policy.on_media_error == "raise":
            raise
    failed: dict[int, str] = {}
    for row in rows:
        try:
            encoded([row])
        except MediaError as error:
            failed[row.number] = str(error)
    rest = [row for row in rows if row.number not in failed]
    read = encoded(rest) if rest else []
    if not read and policy.in_step:
        raise MediaError(
            "No row of a batch can be read, and other processes wait for its completions; make `batch_size` larger. "
            f"The last row: {failed[rows[-1].number]}"
        )
    return read, failed


def _to_ablate(policy: _Policy, read: list[_Asked], args: EvaluationConfig) -> list[Row]:
    """The rows whose prompts have a medium; all, where there is none and other processes wait for completions."""
    asked = read[:: args.num_samples]
    chosen = [each.row for each in asked if args.ablate in each.prompt.modalities]
    return chosen or ([each.row for each in asked] if policy.in_step else [])


def _ablation(policy: _Policy, rows: Any, n_rows: int, args: EvaluationConfig, row: Row) -> Ablation:
    """What takes the place of a row's medium: nothing to hear or see, or other media, of a row drawn by lot."""
    kind = str(args.ablate)
    if args.ablate_with == "blank":
        return Ablation(kind)
    if policy.environments:
        raise ValueError("Environments show media of their own, of which rows don't know; set `ablate_with='blank'`.")
    own = _media_of(policy, row, kind)
    if not own:
        return Ablation(kind)
    first = int(np.random.default_rng([args.seed, row.number]).integers(n_rows))
    for place in range(first, first + n_rows):
        try:
            media = _media_of(policy, rows.__getitems__([place % n_rows])[0], kind)
        except MediaError:  # a row that can't be read tells so in its turn
            continue
        if media and not same_prompt(media, own):
            return Ablation(kind, media)
    raise own[0].error(f"no other row has another {kind} to put in its place; set `ablate_with='blank'`")


def _media_of(policy: _Policy, row: Row, kind: str) -> list[MediaRef]:
    check_has_prompt(row)
    own_tokens = placeholder_tokens(policy.base, policy.processor)
    placed = rows_to_messages([row], policy.ignored_media_columns, own_tokens, policy.media_rules)
    return [ref for ref in iter_refs(placed[0]["prompt"]) if ref.kind == kind]


def _add_answers_without(
    records: list[dict[str, Any]], read: list[_Asked], without: dict[int, dict[str, Any]], args: EvaluationConfig
) -> None:
    """Adds to the records of rows with a medium what they are answered without it, by the numbers of rows."""
    for asked, record in zip(read[:: args.num_samples], records, strict=True):
        if args.ablate in asked.prompt.modalities and asked.row.number in without:
            other = without[asked.row.number]
            record |= {f"{name}_without": other[name] for name in ("completions", "correct")}


def _answer(
    policy: _Policy,
    read: list[_Asked],
    named_funcs: dict[str, Callable],
    config: GenerationConfig,
    args: EvaluationConfig,
    loop: asyncio.AbstractEventLoop | None,
) -> tuple[list[dict[str, Any]], list[tuple[str, float]]]:
    """The records of rows, and the metrics that reward functions logged."""
    if not read:
        return [], []
    n = args.num_samples
    trajectories: list[Trajectory] = []
    for start in range(0, len(read), args.batch_size):
        trajectories += _complete(policy, read[start : start + args.batch_size], config, args, loop)
    ids = [trajectory.ids for trajectory in trajectories]
    texts = policy.tokenizer.batch_decode(ids, skip_special_tokens=True)
    numbers = [asked.row.number for asked in read]
    rows, prompts = ([getattr(asked, name) for asked in read[::n]] for name in ("row", "messages"))
    restored = [row for row in restore_rows(rows, policy.media_rules) for _ in range(n)]
    messages = None
    if policy.tool_loop is not None:
        messages = [trajectory.messages for trajectory in trajectories]
        texts = [as_text(strip_media(each)) for each in messages]
    if policy.environments:
        restored = [{**row, "environments": asked.environment} for row, asked in zip(restored, read, strict=True)]
    extras: dict[str, list] = {}
    metrics: list[tuple[str, float]] = []
    arguments = {
        **reward_arguments(
            restore_media([asked.messages for asked in read]), texts, ids, restored, restore_media(messages)
        ),
        "trainer_state": policy.trainer_state,
        "log_extra": lambda column, values: extras.__setitem__(column, list(values)),
        "log_metric": lambda name, value: metrics.append((name, float(value))),
    }
    checked = {name: checked_reward(func, name, policy.media_rules, numbers) for name, func in named_funcs.items()}
    rewards = call_rewards(checked, arguments, loop)
    for column, values in extras.items():
        if len(values) != len(texts):
            raise ValueError(
                f"`log_extra` got {len(values)} values of {column!r} for {len(texts)} completions; give one each."
            )
    answers = texts if messages is None else [str(strip_media(each[-1])["content"]) for each in messages]
    ends = {*config.eos_token_id, config.pad_token_id}
    records = []
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        part = slice(i * n, (i + 1) * n)
        decisive = rewards[next(iter(named_funcs))][part]
        own = {
            "prompt": as_text(strip_media(prompt)),
            "completions": texts[part],
            "extracted_answers": [extracted_answer(text, row.get("choices")) for text in answers[part]],
            "correct": [None if reward is None else reward >= args.correct_threshold for reward in decisive],
            "completion_lengths": [sum(trajectory.mask) for trajectory in trajectories[part]],
            "truncated": [not tokens or tokens[-1] not in ends for tokens in ids[part]],
            **{f"reward/{name}": values[part] for name, values in rewards.items()},
            **{f"extra/{name}": values[part] for name, values in extras.items()},
        }
        if policy.tool_loop is not None:
            own["tool_calls"] = [trajectory.counts["calls"] for trajectory in trajectories[part]]
            own["tool_failures"] = [trajectory.counts["failures"] for trajectory in trajectories[part]]
            own["ended_by"] = [
                next((end for end in ENDS if trajectory.counts[end]), None) for trajectory in trajectories[part]
            ]
        records.append(own)
    return records, metrics


def _complete(
    policy: _Policy,
    asked: list[_Asked],
    config: GenerationConfig,
    args: EvaluationConfig,
    loop: asyncio.AbstractEventLoop | None,
) -> list[Trajectory]:
    """Completions, with calls of tools answered."""
    branches = None if policy.tool_loop is None else Branches()
    ids = policy.complete([each.prompt for each in asked], config, branches)
    trajectories = [
        Trajectory(each.prompt, own, [], [], None, [1] * len(own)) for each, own in zip(asked, ids, strict=True)
    ]
    if policy.tool_loop is None or branches is None:
        return trajectories

    def go_on(
        prompts: list[EncodedPrompt], places: list[tuple[int, EncodedPrompt]], _: list[int]
    ) -> tuple[list[list[int]], None]:
        branches.asked = places
        return policy.complete(prompts, config, branches), None

    tools = [policy.environments.tools_in(each.environment) for each in asked]
    for trajectory, own, each in zip(trajectories, tools, asked, strict=True):
        trajectory.history = list(each.messages)
        trajectory.messages = [
            parse_assistant_turn(policy.tokenizer, trajectory.ids, trajectory.prompt.input_ids.tolist(), own)
        ]
    limits = {"max_turns": args.max_tool_calling_iterations, "max_media": args.max_tool_media}
    policy.tool_loop(
        tools=tools,
        complete=go_on,
        max_length=args.max_completion_length,
        ends=config.eos_token_id,
        loop=loop,
        **{name: limit for name, limit in limits.items() if limit is not None},
    ).run(trajectories)
    return trajectories


def extracted_answer(completion: str, choices: Sequence[str] | None = None) -> str:
    """The answer in a completion, by which completions are compared."""
    answer = extract_answer(completion)
    index = named_choice(answer, choices) if choices else None
    return answer if index is None or choices is None else choices[index]


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return value is None or isinstance(value, (str, bool, int, float))


def _metrics(records: list[dict[str, Any]], names: list[str], args: EvaluationConfig) -> dict[str, float | None]:
    scored = [record for record in records if None not in record["correct"]]
    n = args.num_samples
    right = np.array([sum(record["correct"]) for record in scored])
    metrics: dict[str, float | None] = {}

    def add(name: str, values: np.ndarray, one_each: bool) -> None:
        """The mean of a value between 0 and 1 of each row, which is 0 or 1 where a row makes one observation."""
        low = high = None
        if len(values) and one_each:
            low, high = wilson_interval(int(values.sum()), len(values), args.confidence)
        elif len(values) > 1:
            low, high = np.clip(mean_interval(values, args.confidence), 0.0, 1.0).tolist()
        metrics.update({name: _mean(values), f"{name}_low": low, f"{name}_high": high})

    add("accuracy", right / n, one_each=n == 1)
    for k in args.pass_at:
        add(f"pass@{k}", pass_at_k(n, right, k), one_each=k == n)
    # Answers that differ in case, whitespace or punctuation only agree
    answers = [[normalize_answer(answer) for answer in record["extracted_answers"]] for record in scored]
    for k in args.majority_at or ():
        votes = majority_at_k(answers, [record["correct"] for record in scored], k)
        add(f"majority@{k}", votes, one_each=n < 2 * k)
    if args.group_by is not None:
        for value in sorted({record[_GROUP] for record in scored}):
            of_group = [i for i, record in enumerate(scored) if record[_GROUP] == value]
            add(f"accuracy/{value}", right[of_group] / n, one_each=n == 1)
    if args.ablate is not None:
        pairs = [record for record in scored if None not in (record["correct_without"] or [None])]
        shares = [np.array([sum(pair[name]) / n for pair in pairs]) for name in ("correct", "correct_without")]
        for name, values in zip(("with", "without"), shares, strict=True):
            add(f"accuracy_{name}_{args.ablate}", values, one_each=n == 1)
        contribution = shares[0] - shares[1]
        name = f"{args.ablate}_contribution"
        low, high = paired_interval(contribution, args.confidence) if pairs else (None, None)
        metrics.update({name: _mean(contribution), f"{name}_low": low, f"{name}_high": high})
        metrics[f"{args.ablate}_rows"] = len(pairs)
    for name in names:
        metrics[f"reward/{name}"] = _mean(_flat(record[f"reward/{name}"] for record in records))
    metrics["completion_length"] = _mean(_flat(record["completion_lengths"] for record in records))
    metrics["truncated"] = _mean(_flat(record["truncated"] for record in records))
    if records and "ended_by" in records[0]:
        calls, failures = (sum(_flat(record[f"tool_{name}"] for record in records)) for name in ("calls", "failures"))
        ended = [end for record in records for end in record["ended_by"]]
        metrics["tools/call_frequency"] = calls / len(ended)
        metrics["tools/failure_frequency"] = failures / calls if calls else 0.0
        metrics |= {f"tools/ended_by_{end}": ended.count(end) / len(ended) for end in ENDS}
    return {**metrics, "rows": len(records), "scored_rows": len(scored)}


def _flat(values: Iterable[list]) -> list:
    return [value for part in values for value in part if value is not None]


def _mean(values: Sequence[float] | np.ndarray) -> float | None:
    return math.fsum(values) / len(values) if len(values) else None
