# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Settings, parts and state that the stages of all rollouts of a run share."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from torch import nn
from transformers import PreTrainedTokenizerBase
from trl.models.utils import disable_gradient_checkpointing
from trl.trainer.utils import use_adapter

from ...algorithms.metrics import Latest, MetricLog
from ...checks.run_checks import Checks
from ...data.rows.batches import Row
from ...data.rows.names import TEACHER, check_has_prompt, check_reward_columns
from ...data.rows.unread import without_media
from ...encoding.processors import ends_with, tokenizer_of
from ...encoding.prompt_encoder import PromptEncoder, has_teacher_prompt
from ...engines.samplers import Sampler
from ...families import input_modalities
from ...forward.scores import Scores
from ...models.parts import kept_requires_grad
from ...models.wrapped import is_unsharded
from ...policy import Live, PolicyForward
from ...reporting.card_notes import CardNotes
from ...rollout.collect import collect
from ...rollout.completions import add_completions
from ...rollout.environments import Environments
from ...rollout.estimates import rewards_by_turn, rewards_per_func, turn_metrics, warn_of_unscorable
from ...rollout.ranks import any_rank, arrange_rollout, rank_metrics, sum_over_ranks
from ...rollout.reward_functions import RewardFunctions
from ...rollout.rollout import Rollout
from ...rollout.score import score_in_batches
from ...rollout.skipped_forwards import packing_metrics
from ...rollout.stream import EncodedRow, RowStream, warn_of_positions
from ...rollout.turns import ToolLoop
from .configs import SamplingConfig, stops_of
from .dataset_checks import check_held_out, unchecked_datasets, warn_of_unread_media
from .finite import check_weights


logger = get_logger(__name__)


def attribute_of(holder: str, name: str) -> Any:
    """
    Returns a property for the attribute `name` of another object, which the instance has as `holder`. With the holder
    `_live` and the name `model`, the property `trainer.model` reads and sets `trainer._live.model`.
    """
    return property(attrgetter(f"{holder}.{name}"), lambda owner, value: setattr(getattr(owner, holder), name, value))


@dataclass
class CompletionSettings:
    """Settings of completions that the trainer derives from its config, model and arguments."""

    ends: Sequence[int]  # tokens that end a completion
    end_texts: Sequence[str]  # stop strings
    group_sizes: tuple[int, int]  # completions per prompt, in training and in evaluation
    encodes_text: bool  # `False` if `rollout_func` tokenizes prompts without media

    @classmethod
    def of(
        cls, args: SamplingConfig, eos_token_ids: Sequence[int], n_eval: int, encodes_text: bool
    ) -> "CompletionSettings":
        """
        Returns the settings of a config. `eos_token_ids` are the model's ends of text, and `n_eval` is the number of
        completions per prompt in evaluation.
        """
        stop_ids, stop_texts = stops_of(args)
        ends = [*dict.fromkeys([*eos_token_ids, *stop_ids])]
        return cls(ends, stop_texts, (args.num_generations or 1, n_eval), encodes_text)

    def has_ended(self, ids: list[int], tokenizer: PreTrainedTokenizerBase) -> bool:
        """Returns whether a completion ends with a token or a text that ends completions."""
        ends_with_token = bool(ids) and ids[-1] in (*self.ends, tokenizer.pad_token_id)
        return ends_with_token or ends_with(ids, self.end_texts, tokenizer)


@dataclass
class Notices:
    """Record of checks and messages that a run doesn't repeat."""

    unchecked_datasets: set[str]  # names of datasets whose first batch is still to be checked
    checked_calls: bool = False  # whether the first batch with calls of tools was checked
    looked_for_media: bool = False  # whether the media of environments were looked for in a batch
    warned_of_positions: bool = False  # whether a warning of positions beyond the model's range was logged
    checked_step: int | None = None  # step at which the weights were last checked before sampling
    mode_after_tools: str | None = None  # last logged message about generation after tools


@dataclass
class Run:
    """State of a run that the stages of a rollout share: its settings, parts and progress."""

    args: Any  # the config of the trainer
    policy: PolicyForward
    prompts: PromptEncoder
    toolbox: Environments
    stream: RowStream
    checks: Checks
    metrics: MetricLog
    reward_functions: RewardFunctions
    notes: CardNotes
    live: Live
    completions: CompletionSettings
    notices: Notices

    def check_policy(self) -> None:
        """Raises an error before sampling if weights aren't finite. Checks only once per update, on all ranks."""
        if self.notices.checked_step != self.step:
            check_weights(self.model, self.accelerator, self.step, "no completions can be sampled")
            self.notices.checked_step = self.step

    def collect(self, rows: Sequence[EncodedRow]) -> Rollout:
        """Returns the rollout of rows, one per completion, with their environments and encoded prompts."""
        return collect(
            rows,
            self.prompts,
            self.toolbox,
            encodes_text=self.completions.encodes_text,
            group_size=self.group_size,
            pad_token_id=self.tokenizer.pad_token_id,
            accelerator=self.accelerator,
        )

    def begin_rollout(self, inputs: Sequence[Any]) -> Rollout:
        """Checks a batch of rows, returns its rollout, and notes columns and modalities for the model card."""
        rows = list(inputs) if isinstance(inputs[0], EncodedRow) else self.stream.without_prompts(inputs)
        self._check_rows([row.stored for row in rows])
        rollout = self.collect(rows)
        prompts = rollout.prompts
        source = rollout.source
        source.batch_index = getattr(inputs, "batch_index", None) if self.is_training else None
        rollout.step = self.step
        self.notes.add(source.rows[0], source.messages, [prompt.modalities for prompt in prompts])
        if prompts and not self.notices.warned_of_positions:  # no prompts if `rollout_func` encodes them
            self.notices.warned_of_positions = warn_of_positions(prompts, source.row_indices, self.prompts.model)
        return rollout

    def _check_rows(self, rows: list[Row]) -> None:
        # Reward models get no columns, so no name of a column is wrong for them
        if not all(isinstance(function, nn.Module) for function in self.reward_functions.functions):
            check_reward_columns(rows[0], 0)
        if self.toolbox.factories:  # environments make prompts, and may read any column
            return
        for row in rows:
            check_has_prompt(row)
        name = "train_dataset" if self.is_training else "eval_dataset"
        if name in self.notices.unchecked_datasets:
            self.notices.unchecked_datasets.remove(name)
            modalities = input_modalities(self.prompts.model)
            warn_of_unread_media(self.args, {name: [dict(row) for row in rows]}, modalities, dataset_part="first")

    def read_row(self, row: Row) -> list:
        """Returns the prompts of a row, also its teacher's, without decoding media. Asks environments for the row."""
        if self.toolbox.factories:
            self.toolbox.check_row(row)
            return []
        if not self.completions.encodes_text:  # `rollout_func` reads the messages
            return self.prompts.messages([row])
        prompts = [self.prompts.read_row(row)]
        if self.args.encodes_teacher_prompts and has_teacher_prompt(row):
            prompts.append(self.prompts.read_row(row, TEACHER))
        return prompts

    def check_new(self, datasets: dict[str, Any], reward_funcs: Sequence[Any]) -> None:
        """Checks datasets for evaluation that the constructor didn't get, as it checks its own."""
        if not self.toolbox.factories:  # environments may read any column
            takes = input_modalities(self.prompts.model)
            warn_of_unread_media(self.args, datasets, takes, reward_funcs=reward_funcs)
        self.check_held_out(datasets)

    def check_held_out(self, datasets: Mapping[str, Any]) -> None:
        """
        Checks the first rows of datasets for evaluation before training begins, see
        [`~trainers.shared.dataset_checks.check_held_out`].
        """
        self.notices.unchecked_datasets |= unchecked_datasets(datasets)
        for row in check_held_out(self.args, datasets, self.stream, input_modalities(self.prompts.model)):
            if not all(isinstance(function, nn.Module) for function in self.reward_functions.functions):
                check_reward_columns(row, 0)
            self.toolbox.check_row(row)

    def look_for_media(self, rollout: Rollout) -> None:
        """Warns if no prompt and no result of a tool has media in the first batch of environments."""
        if self.notices.looked_for_media or not self.toolbox.factories or not rollout.prompts:
            return
        self.notices.looked_for_media = True
        takes = input_modalities(self.prompts.model)
        warning = without_media("The environments", rollout.source.rows[0], takes)
        if warning and not self.notes.modalities:
            logger.warning(warning)

    def complete(
        self,
        rollout: Rollout,
        ids: list[list[int]],
        logps: list[list[float | None]] | None,
        tool_mask: list[list[int]] | None,
        **options: Any,
    ) -> None:
        """
        Adds completions to a rollout by `add_completions`, which takes the `options`. Logs lengths,
        and decides on packing.
        """
        state = self.live.state
        options |= {"ended": [*map(self.has_ended, ids)], "accelerator": self.accelerator}
        metrics, n_tokens = add_completions(rollout, ids, logps, tool_mask, **options)
        if self.is_training:
            state.num_input_tokens_seen += n_tokens
        self.metrics.add({"num_tokens": Latest(state.num_input_tokens_seen), **metrics})
        # Packing is decided once, so that old, reference and current log-probabilities are computed alike
        lengths = rollout.completion_mask.sum(1).tolist()
        batch_size = self.args.per_device_train_batch_size
        rollout.packed = self.policy.worth_packing(rollout.prompts, lengths, batch_size, self.prompts.model)

    def has_ended(self, ids: list[int]) -> bool:
        """Returns whether a completion ends with a token or a text that ends completions."""
        return self.completions.has_ended(ids, self.tokenizer)

    @torch.no_grad()
    def score(self, model: nn.Module, rollout: Rollout) -> Scores:
        """Returns scores of a rollout, or of a part of it, without gradients."""
        args = self.args
        batch_size = args.per_device_train_batch_size if self.is_training else args.per_device_eval_batch_size
        policy: Any = self.model
        with disable_gradient_checkpointing(policy, args.gradient_checkpointing_kwargs):
            return score_in_batches(self.policy, model, rollout, batch_size)

    def score_reference(self, rollout: Rollout) -> Scores:
        """
        Returns a rollout's scores under the reference: a separate model, or else the policy with the adapter `ref`
        or without an adapter.
        """
        if self.live.ref_model is not None:
            return self.score(self.live.ref_model, rollout)
        model: Any = self.accelerator.unwrap_model(self.model)
        with kept_requires_grad(model), use_adapter(model, "ref" if "ref" in model.peft_config else None):
            return self.score(self.model, rollout)

    def call_reward_functions(self, rollout: Rollout, *, only_first: bool = False) -> list[list[float | None]]:
        """
        Returns this rank's rewards by completion and function. With `only_first`, only the first function is called,
        and what it logs is discarded.
        """
        if not self.reward_functions.were_called:
            self.reward_functions.were_called = True
            tokenizer = tokenizer_of(self.prompts.processor)
            for warning in self.reward_functions.warnings(rollout.source.messages, tokenizer):
                logger.warning(warning)
        functions = self.reward_functions
        early_rewards = None
        if only_first:
            functions = functions.first()
        elif rollout.source.flight is not None:
            # Some functions have already rewarded completions of asynchronous sampling, on their arrival
            early_rewards = rollout.source.flight.early_rewards
        by_function = functions(rollout, self.live.state, self.prompts.media_rules, self.live.profile, early_rewards)
        rewards_by_completion = [[*row] for row in zip(*by_function.values(), strict=True)]
        warn_of_unscorable(rewards_by_completion, by_function, rollout.source)
        return rewards_by_completion

    def gather_rewards(self, rollout: Rollout) -> None:
        """Sets and logs the rewards of the completions of all ranks. All ranks must call this."""
        rewards = self.call_reward_functions(rollout)
        rollout.rewards.by_function = rewards
        by_turn = rewards_by_turn(rewards, rollout.source.sampled_turns)
        # `(B, F, 1 + turns)` for `F` functions: rewards of completions, then of turns, so that one call gathers both
        stacked = torch.cat([rewards_per_func(rewards)[..., None], by_turn], dim=2)
        stacked = self.accelerator.gather(stacked.to(self.accelerator.device))
        rollout.rewards.per_func = stacked[..., 0].contiguous()
        self.metrics.add(turn_metrics(stacked[..., 1:], self.reward_functions.names))

    def leave_out_failed(self, rollout: Rollout) -> None:
        """
        Counts completions whose environment failed, and excludes them from the loss. All ranks must call this.

        Raises a `RuntimeError` if all environments of all ranks failed in training, which hints at a common cause.
        """
        if not (self.toolbox.factories or self.toolbox.standalone_tools):
            return
        rows_and_errors = zip(rollout.source.row_indices, rollout.source.failures, strict=True)
        failed = [(row, error) for row, error in rows_and_errors if error is not None]
        n_failed, n = sum_over_ranks(self.accelerator, [len(failed), len(rollout)])
        self.metrics.add({"tools/environment_failures": n_failed})
        for row, error in failed[:1]:  # one message stands for all failures
            reason = f"row {row}: the environment failed, {type(error).__name__}: {error}"
            if n_failed == n and self.is_training:
                raise RuntimeError(
                    f"All environments of a batch failed, so no completion can be trained on; {reason}"
                ) from error
            logger.warning(f"{reason}; its completion isn't trained on.", main_process_only=False)
        if n_failed:
            is_valid = torch.tensor([[error is None] for error in rollout.source.failures]).to(rollout.completion_mask)
            rollout.completion_mask = rollout.completion_mask * is_valid
            for name in ("old_per_token_logps", "ref_per_token_logps"):
                logps = getattr(rollout, name)
                if logps is not None:
                    setattr(rollout, name, logps * is_valid)  # masked tokens have log-probabilities of 0
            rollout.num_items_in_batch = self.accelerator.reduce(rollout.loss_mask.sum())

    def micro_batches(self, rollout: Rollout, shuffles: bool) -> list[Rollout]:
        """
        Returns the micro-batches of a rollout. With `shuffles`, completions are shuffled as in TRL. Otherwise,
        micro-batches have whole groups, and about equal packed lengths.
        """
        if shuffles:
            rollout = rollout.select(torch.randperm(len(rollout)).tolist())
        else:
            # With separate forwards of prompts (`isolate`), ranks with sharded weights need micro-batches of the same
            # modalities, so each rank keeps its groups
            may_move_groups = self.policy.fallbacks.isolate is None or is_unsharded(self.accelerator)
            rollout, metrics = arrange_rollout(rollout, self.args, self.accelerator, may_move_groups)
            self.metrics.add(metrics)
        micro_batches = rollout.micro_batches(self.args.steps_per_generation)
        self.metrics.add(rank_metrics(micro_batches, self.accelerator))
        self.metrics.add(packing_metrics(self.policy, self.prompts.model, micro_batches))
        return micro_batches

    def restored(self, micro_batches: list[Rollout]) -> list[Rollout]:
        """Returns the micro-batches of a checkpoint on this rank's device."""
        parts = [part.to(self.accelerator.device) for part in micro_batches]
        for part in parts:  # this run may have fallen back to padded rows
            part.packed = part.packed and self.policy.fallbacks.packing
        return parts

    @property
    def accelerator(self) -> Accelerator:
        assert self.policy.accelerator is not None
        return self.policy.accelerator

    @property
    def model(self) -> nn.Module:
        """The policy, as prepared for training."""
        return self.live.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return tokenizer_of(self.prompts.processor)

    @property
    def step(self) -> int:
        return self.live.state.global_step

    @property
    def is_training(self) -> bool:
        """`True` in training, `False` in evaluation."""
        return self.model.training

    @property
    def samples_views(self) -> bool:
        """`True` if some completions are sampled from a view."""
        return self.args.rollout_view is not None or self.args.contrast_view is not None

    @property
    def group_size(self) -> int:
        """Number of completions per prompt in the current mode, training or evaluation."""
        return self.completions.group_sizes[not self.is_training]

    def tool_loop(self, sampler: Sampler, **options: Any) -> ToolLoop:
        """Returns a loop that calls tools and continues completions. `options` replace or add fields of the loop."""
        args = self.args
        loop_fields: dict[str, Any] = {
            "encoder": self.prompts,
            "max_media": args.max_tool_media,
            "max_context_media": args.max_context_media,
            "end_ids": self.completions.ends,
            "isolate": self.policy.fallbacks.isolate,
            "engine_length": sampler.max_length,
            # If all ranks must call the sampler equally often, a loop goes on while any rank has calls
            "any_rank": functools.partial(any_rank, self.accelerator) if sampler.is_collective else bool,
            "loop": self.reward_functions.loop,
        }
        return ToolLoop(**{**loop_fields, **options})
