# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The seam with TRL: what is overridden in TRL's trainers so that completions may see and hear."""

from collections.abc import Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from torch import nn
from transformers import AutoProcessor, GenerationConfig, PreTrainedModel, ProcessorMixin
from trl.extras.profiling import profiling_context
from trl.models import prepare_deepspeed, prepare_fsdp, unwrap_model_for_generation
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import (
    disable_dropout_in_model,
    get_config_model_id,
    split_tensor_dict,
)

from ..algorithms.advantages import ESTIMATORS
from ..data.columns import MEDIA_COLUMNS, iter_refs, rows_to_messages, strip_media
from ..data.features import restore_media, restore_rows
from ..data.fetch import Row
from ..data.unread import check_has_prompt, check_reward_columns
from ..encoding.join import same_prompt
from ..encoding.processors import check_processor, load_processor
from ..encoding.prompts import EncodedPrompt, all_placeholder_ids, placeholder_tokens
from ..families import MODALITIES, family_of
from ..forward.attention import install_prefix_attention, original_attention
from ..forward.head import add_fused_head, head_rule
from ..forward.layout import group_by_prompt, micro_batch_order
from ..forward.masks import sharing_obstacle
from ..forward.processes import kinds_of
from ..forward.scores import Scores
from ..forward.token_budget import backward_by_parts
from ..generation.transformers import Branches, as_generation_config, trim_after_eos
from ..generation.vllm import sampling_parameters
from ..models.modes import fix_encoders
from ..models.quantization import keep_differentiable
from ..models.wrapped import is_unsharded, unwrapped
from ..policy import Fallbacks, PolicyForward
from ..reporting.console import waiting_display
from ..reporting.hints import EqualRewardsHint
from ..reporting.hub import PublishingMixin
from ..reporting.media_logs import MediaLog, MediaLogMixin
from ..reporting.model_card import conversation_of
from ..rewards.checks import checked_reward, distinct_names, missing_instructions
from ..rewards.model import RewardModel, read_as_text
from ..rewards.named import as_reward_funcs
from .arguments import KnownKeywords, check_arguments
from .batch import Batch
from .contribution import is_due, media_contribution
from .engine import EngineMixin, as_tensor
from .finite_updates import FiniteMixin
from .resumable import ResumingMixin
from .rows import RowsMixin
from .self_check import SelfCheck, run_self_check
from .setup import (
    check_engine_format,
    check_family,
    check_head_cast,
    check_name,
    check_processor_name,
    check_takes_media,
    check_takes_tools,
    has_unread_rows,
    ignore_deprecated_names,
    image_token_id,
    load_policy,
    load_reference,
    measured_head,
    modalities,
    no_warning_about_init_kwargs,
    refuse_several_runs,
    refuse_unchecked_steps,
    warn_of_truncation,
    warn_of_unread,
    warn_of_unused_recommendations,
    without_engine_and_signals,
    without_reference,
)
from .tools import WHOLE_ROW, ToolsMixin, with_media, with_whole_rows


logger = get_logger(__name__)


class MultimodalMixin(
    KnownKeywords, RowsMixin, ToolsMixin, EngineMixin, ResumingMixin, FiniteMixin, PublishingMixin, MediaLogMixin
):
    """
    Gives a TRL trainer that samples completions media of every kind, encoded and forwarded once per prompt.

    Losses, metrics and the training loop stay TRL's: media are moved into the messages before TRL sees a row, and the
    packed forward hides behind TRL's function for log-probabilities, with the shapes TRL expects.
    """

    # Whether TRL's trainer takes log-probabilities beside sampled completions, and knows which tokens weren't sampled
    _sampling_logps_expected: Any
    _tool_mask_expected: Any
    _batch: Any = None  # a `Batch` while TRL's code works on one, see `_at_hand`

    def __init__(
        self, model, reward_funcs, args, processing_class=None, quantization_config=None, ref_model=None, **kwargs
    ):
        ignore_deprecated_names()
        check_arguments(reward_funcs, processing_class=processing_class, ref_model=ref_model, **kwargs)
        refuse_several_runs(args)
        refuse_unchecked_steps(args)
        reward_funcs = None if reward_funcs is None else as_reward_funcs(reward_funcs)
        warn_of_truncation(args)
        factory = kwargs.get("environment_factory")
        if factory is None:  # environments read what columns they like
            given = {name: kwargs.get(name) for name in ("train_dataset", "eval_dataset")}
            warn_of_unread(args, given, modalities(model, args))
        elif isinstance(factory, dict):
            rules = args.media_rules
            kwargs["environment_factory"] = {name: with_whole_rows(each, rules) for name, each in factory.items()}
        else:
            kwargs["environment_factory"] = with_whole_rows(factory, args.media_rules)
        if kwargs.get("rollout_func") is not None:
            kwargs["rollout_func"] = with_media(kwargs["rollout_func"])
        set_seed(args.seed)  # as TRL does before it loads a model
        if hasattr(model, "model_for"):  # an actor, whose model the trainer handles itself
            model = model.model_for(args)
        loaded_here = isinstance(model, str)
        if loaded_here:
            model = load_policy(model, args, quantization_config)
        check_processor_name(model, processing_class)
        check_name(model, args, ref_model, kwargs.get("peft_config"))
        revision = (args.model_init_kwargs or {}).get("revision") if loaded_here else None
        self._processor_source: dict[str, Any] | None = None  # how to load the processor again
        if processing_class is None:
            self._processor_source = {
                "pretrained_model_name_or_path": get_config_model_id(model.config),
                "revision": revision,
                "trust_remote_code": args.trust_remote_code,
            }
            processing_class = load_processor(*self._processor_source.values())
        check_family(model, processing_class, args.max_completion_length)
        check_head_cast(model, args)
        check_processor(processing_class)
        if kwargs.get("tools") or factory is not None:
            check_takes_tools(processing_class)
        if args.use_vllm:
            check_engine_format(processing_class)
        if args.disable_dropout is None:
            fix_encoders(unwrapped(None, model))
        check_takes_media(model, processing_class, args, kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        if ref_model is None:
            ref_model = load_reference(model, args, kwargs.get("peft_config"), quantization_config)
        elif args.beta == 0 or args.sync_ref_model:
            option = "sync_ref_model=True" if args.sync_ref_model else "beta=0"
            raise ValueError(f"`ref_model` was passed, which `{option}` has no use for; change one of them.")
        reward_processors = kwargs.pop("reward_processing_classes", None) or [None] * len(reward_funcs or [])
        if not isinstance(reward_processors, list):
            reward_processors = [reward_processors]
        loaded_rewards = [isinstance(f, str) for f in reward_funcs or []]

        self._train_sampler = None
        self._self_check: SelfCheck | None = None
        self._kinds_seen: set[str] = set()  # media of the prompts so far, for the model card
        self._columns_seen: set[str] = set()
        self._asked: set[tuple[tuple[str, str], ...]] = set()  # what prompts say; of those that differ, some
        self._rewarded = False  # whether there were completions yet
        # Datasets whose rows are looked at when the first ones come
        datasets = ("train_dataset", "eval_dataset")
        self._unseen = {name for name in datasets if has_unread_rows(kwargs.get(name))}
        self._media_log: MediaLog | None = None  # what the tables of completions show
        placeholders = all_placeholder_ids(model, processing_class)
        with (
            image_token_id(model.config, placeholders),
            no_warning_about_init_kwargs(loaded_here),
            without_reference(args, active=ref_model is not None),
            measured_head(type(self)),
            without_engine_and_signals(args),
        ):
            super().__init__(
                model=model,
                reward_funcs=reward_funcs,
                args=args,
                processing_class=processing_class,
                # TRL reads texts with them, and asks for padding, which processors don't have
                reward_processing_classes=[
                    p.tokenizer if isinstance(p, ProcessorMixin) else p for p in reward_processors
                ],
                quantization_config=quantization_config,
                **kwargs,
            )
        self._policy = PolicyForward(
            self.accelerator,
            self.processing_class,
            fallbacks=Fallbacks(
                packing=False, isolate=family_of(model).isolate, logits_from_model=self._needs_model_logits()
            ),
            temperature=self.temperature,
            max_tokens=args.max_tokens_per_microbatch,
        )
        self._own_tokens = placeholder_tokens(model, self.processing_class)
        self.use_vllm = args.use_vllm
        if self.use_vllm:
            self._set_engine(placeholders, revision)
        if ref_model is not None:
            self._set_reference(ref_model)
        self._set_rewards(reward_processors, loaded_rewards)
        if args.log_completions:
            self.log_completions = False  # TRL's tables hold no audio or video
            self._media_log = MediaLog(
                args.generation_batch_size,
                args.max_logged_media if args.log_multimodal else 0,
                args.max_logged_megabytes,
                self.accelerator.process_index,
                self.accelerator.num_processes,
            )
        warn_of_unused_recommendations(self._unwrapped(self.model).generation_config, self.generation_config)
        if not self.use_vllm and placeholders:
            # A sampled placeholder would stand for media that aren't there
            suppressed = sorted(placeholders | set(self.generation_config.suppress_tokens or []))
            self.generation_config.suppress_tokens = self.generation_kwargs["suppress_tokens"] = suppressed
            # Never sampled, they are never discouraged either, so the saved model must go on without them
            self._unwrapped(self.model).generation_config.suppress_tokens = suppressed
        keep_differentiable(self.model)
        self._set_packing()
        self._set_signals()
        estimator = ESTIMATORS.get(args.advantage_estimator or "rloo")  # TRL's RLOO has nothing to choose
        self.add_callback(EqualRewardsHint(grouped=estimator is not None and estimator.needs == "group"))

    def _needs_model_logits(self) -> bool:
        model = self._unwrapped(self.model)
        if head_rule(model) is not None:
            return False
        if self.rollout_func is not None:
            raise ValueError(
                "What `rollout_func` samples is scored with TRL's fused head, which doesn't know what "
                f"{model.config.model_type} does around its LM head; drop it."
            )
        logger.warning(
            f"{model.config.model_type}: TRL's fused head doesn't know what the model does around its LM head, so "
            "log-probabilities are taken from its own logits, which needs more memory."
        )
        return True

    def _set_packing(self) -> None:
        """Lets completions share a forward of their prompt where the model can."""
        args, model = self.args, self._unwrapped(self.model)
        obstacle = sharing_obstacle(model)
        if args.packing == "prefix" and obstacle:
            logger.warning(f"Completions are scored in padded rows (`packing='padded'`): {obstacle}.")
        self._policy.fallbacks.packing = args.packing == "prefix" and not obstacle
        if not self._policy.fallbacks.packing:
            return
        for each in filter(None, (model, self.ref_model)):
            install_prefix_attention(self._unwrapped(each))
        per_device, group = args.per_device_train_batch_size, args.num_generations
        if per_device % group != 0:
            logger.warning(
                f"`per_device_train_batch_size` ({per_device}) holds no whole groups of `num_generations` ({group}), "
                "so part of each prompt is forwarded more than once (see the metric `packing/shared_frac`). Make it a "
                f"multiple of {group}."
            )

    def _set_reference(self, ref_model: Any) -> None:
        """Does for a given reference what TRL does for one that it loads."""
        self.beta = self.args.beta
        if self.args.disable_dropout:
            disable_dropout_in_model(ref_model)
        add_fused_head(ref_model, temperature=self.temperature)
        if self.is_deepspeed_enabled:
            self.ref_model = prepare_deepspeed(ref_model, self.accelerator)
        elif self.is_fsdp_enabled:
            self.ref_model = prepare_fsdp(ref_model, self.accelerator)
        else:
            self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)
        if self.args.sync_ref_model:
            prepared: Any = self.ref_model
            self.add_callback(SyncRefModelCallback(ref_model=prepared, accelerator=self.accelerator))

    def _set_rewards(self, processors: list, loaded: list[bool]) -> None:
        """Lets reward models see media, and keeps the names of functions apart."""
        self.reward_func_names = distinct_names(self.reward_func_names)
        for i, reward_func in enumerate(self.reward_funcs):
            if isinstance(reward_func, nn.Module):
                self._let_reward_model_see(i, processors[i], loaded[i])

    def _let_reward_model_see(self, index: int, processor, loaded_here: bool) -> None:
        """TRL gives reward models text only; one that takes media and has a processor gets the media, too."""
        args, model = self.args, self.reward_funcs[index]
        unwrapped = self._unwrapped(model)
        takes_media = isinstance(unwrapped, PreTrainedModel) and any(
            k in unwrapped.input_modalities for k in MODALITIES
        )
        if processor is None and takes_media:
            processor = load_processor(
                get_config_model_id(unwrapped.config),
                revision=(args.model_init_kwargs or {}).get("revision") if loaded_here else None,
                trust_remote_code=args.trust_remote_code,
            )
        if isinstance(processor, ProcessorMixin):
            self.reward_funcs[index] = RewardModel(
                model,
                processor,
                batch_size=args.per_device_train_batch_size,
                template_kwargs=self.chat_template_kwargs,
                audio_overlong=args.audio_overlong,
            )

    def _unwrapped(self, model) -> PreTrainedModel:
        return unwrapped(self.accelerator, model)

    @contextmanager
    def _at_hand(self, **fields):
        """Within this context TRL's code works on a batch of ours; outside of it, all methods are TRL's own."""
        outer, self._batch = self._batch, Batch(**fields)
        try:
            yield self._batch
        finally:
            self._batch = outer

    # Rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        return self._roll_out(inputs)[0]

    def _roll_out(self, inputs: Sequence[Any]) -> tuple[dict[str, Any], Batch]:
        """Samples, scores and rewards completions with TRL's code; what it returns, and what it worked on."""
        self._check_policy()
        rows, inputs, numbers, encoded = self._read_rows(inputs)
        branches = Branches() if self.tools else None
        with self._at_hand(rows=inputs, numbers=numbers, encoded=encoded, branches=branches) as batch:
            output = super()._generate_and_score_completions(rows)
            # Prompts are logged as text: TRL's table can't hold media
            for key in ("prompt", "completion"):
                logged = [strip_media(messages) for messages in self._logs[key]]
                self._logs[key].clear()
                self._logs[key].extend(logged)
            if self._media_log is not None:
                group_size = self.num_generations if self.model.training else self.num_generations_eval
                self._media_log.add([row.get("prompt") for row in rows], group_size, batch.completions)
            if batch.tool_mask is not None:
                output["tool_mask"] = as_tensor(batch.tool_mask, output["completion_ids"]).long()
            if batch.prompts is not None:
                if batch.sampled_logps is not None:
                    output["sampling_per_token_logps"] = as_tensor(batch.sampled_logps, output["completion_ids"])
                self._check_engine(output, batch.prompts, self._loss_mask(output))
                self._choose_packing(batch, output["completion_mask"])
                output["encoded_prompts"] = batch.prompts
                output["packed"] = [batch.packed] * len(inputs)
                self._log_contribution(batch, output)
            self._show_first(batch, output)
        return output, batch

    def _show_first(self, batch: Batch, output: dict[str, Any]) -> None:
        display = waiting_display(self) if self.model.training else None
        if display is not None:
            ids, mask = output["completion_ids"][0], output["completion_mask"][0].bool()
            prompt_ids = output["prompt_ids"][0][output["prompt_mask"][0].bool()]
            display.show_example(
                prompt_ids.tolist() if batch.prompts is None else batch.prompts[0].input_ids.tolist(),
                None if batch.messages is None else batch.messages[0],
                ids[mask].tolist(),
                reference=(batch.rows or [{}])[0].get("solution"),
                rewards=dict(zip(self.reward_func_names, batch.rewards_per_func[0].tolist(), strict=True)),
            )

    def _log_contribution(self, batch: Batch, output: dict[str, Any]) -> None:
        every = self.args.media_contribution_steps
        n_steps = max(1, self._steps_per_rollout // self.args.gradient_accumulation_steps)
        if every and self.model.training and is_due(every, self.state.global_step, n_steps):
            for name, value in media_contribution(self, batch, output).items():
                self._metrics["train"][name].append(value)

    def _read_rows(self, inputs: Sequence[Any]) -> tuple[list, list, list, list]:
        """Rows with their media in the messages, as the dataset has them, their numbers, and encoded prompts."""
        encoded: list[EncodedPrompt | None] = [None] * len(inputs)
        if isinstance(inputs[0], Row) and self._encodes_rows:
            inputs, encoded = self._encode_rows(inputs)
        if not all(isinstance(each, nn.Module) for each in self.reward_funcs):
            check_reward_columns(inputs[0], 0)
        if self.environment_factories is None:
            for index, row in enumerate(inputs):
                check_has_prompt(row, index)
            name = "train_dataset" if self.model.training else "eval_dataset"
            if name in self._unseen:
                self._unseen.remove(name)
                takes = modalities(self._unwrapped(self.model), self.args)
                warn_of_unread(self.args, {name: [dict(row) for row in inputs]}, takes, extent="first")
        rows = originals = restore_rows(inputs, self.args.media_rules)
        if "prompt" in originals[0]:
            ignored, rules = self.args.ignored_media_columns or (), self.args.media_rules
            placed = rows_to_messages(inputs, ignored, self._own_tokens, rules)
            rows = [
                {**{key: original[key] for key in row}, "prompt": row["prompt"]}
                for row, original in zip(placed, originals, strict=True)
            ]
        self._columns_seen.update(originals[0])
        if len(self._asked) < 2:
            self._asked.update(conversation_of(row["prompt"]) for row in rows if "prompt" in row)
        numbers = [getattr(row, "number", place) for place, row in enumerate(inputs)]
        if self.environment_factories is not None:
            wholes: list[Any] = list(zip(numbers, originals, strict=True))
            rows = [
                {**{key: row[key] for key in row if key not in MEDIA_COLUMNS}, WHOLE_ROW: whole}
                for row, whole in zip(rows, wholes, strict=True)
            ]
        return rows, originals, numbers, encoded

    def _tokenize_prompts(self, prompts: list):
        if self._batch is None:
            return super()._tokenize_prompts(prompts)
        mode_generations = self.num_generations if self.model.training else self.num_generations_eval
        offset = self.accelerator.process_index * len(prompts)  # a group may straddle processes
        if self.args.special_tokens_in_text == "strip":  # what is encoded again must be the same
            numbers = self._batch.numbers
            prompts = [self._checked_prompt(prompt, numbers[i]) for i, prompt in enumerate(prompts)]
        encoded: list[EncodedPrompt] = []
        for i, prompt in enumerate(prompts):
            first_of_group = (offset + i) % mode_generations == 0
            if self._batch.encoded[i] is not None:
                encoded.append(self._batch.encoded[i])
            elif i > 0 and not first_of_group and same_prompt(prompt, prompts[i - 1]):
                encoded.append(encoded[-1])
            else:
                encoded.append(self._encode(prompt, self._batch.numbers[i], **self._environment_tools(i)))
        self._batch.prompts, self._batch.messages = encoded, prompts
        self._kinds_seen.update(*(each.modalities for each in encoded))
        self._warn_of_positions(encoded, self._batch.numbers)
        if self.args.self_check and self.model.training and self._needs_self_check(encoded):
            self._run_self_check(prompts, encoded)
        return [each.input_ids.tolist() for each in encoded], None, {}

    def _environment_tools(self, index: int) -> dict[str, Any]:
        """Arguments for the chat template of a row whose tools are those of its environment."""
        if self.environment_factories is None:
            return {}
        return {"tools": self._env_tools[self._batch_environments[index]] or None}

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        prompts = self._batch and (self._batch.continued or self._batch.prompts)
        # Whoever calls this with other ids asks for what follows text
        unknown = not prompts or prompt_ids != [prompt.input_ids.tolist() for prompt in prompts]
        if self.use_vllm:
            room = self._batch and self._batch.room
            completion_ids, logps = self._ask_engine(prompt_ids if unknown else prompts, room=room)
            for prompt in () if self.tools else prompts or ():
                prompt.decoded = ()  # the engine has seen it
            if not self._sampling_logps_expected:
                self._batch.sampled_logps = logps
            return (completion_ids, logps) if self._sampling_logps_expected else completion_ids
        if self.use_transformers_continuous_batching or unknown:
            # Continuous batching refuses names of attention that it doesn't know
            model = self._unwrapped(self.model)
            with original_attention(model), as_generation_config(model, self.generation_config):
                return super()._generate_single_turn(prompt_ids, images, {}, *args, **kwargs)
        output = self._sample_completions(prompts, self.generation_config, branches=self._batch.branches)
        completion_ids = trim_after_eos(output, self.eos_token_ids)
        return (completion_ids, None) if self._sampling_logps_expected else completion_ids

    def _complete(
        self, prompts: list[EncodedPrompt], generation_config: GenerationConfig, branches: Branches | None = None
    ) -> list[list[int]]:
        """Completions under another config than that of training, by whatever samples there, each up to its end."""
        if not self.use_vllm:
            output = self._sample_completions(prompts, generation_config, branches=branches)
            return trim_after_eos(output, generation_config.eos_token_id)
        sampling = sampling_parameters(generation_config)
        if generation_config.do_sample:
            # The engine's own random numbers are those of training
            sampling["seed"] = torch.randint(2**31, ()).item()
        return self._ask_engine(prompts, sampling=sampling)[0]

    @property
    def _completes_in_step(self) -> bool:
        """Whether processes must call [`_complete`] equally often."""
        if not is_unsharded(self.accelerator):  # weights are gathered
            return True
        if self.use_vllm:  # requests are gathered
            return self.args.vllm_mode == "server" or self.args.vllm_tensor_parallel_size > 1
        return self._policy.fallbacks.isolate is not None  # forwards are counted

    def _sample_completions(
        self, prompts, generation_config, shared_prefill: bool | None = None, branches: Branches | None = None
    ):
        with profiling_context(self, "transformers.generate"), self._naming_broken_logits():
            return self._policy.sample(
                self.model_wrapped,
                prompts,
                generation_config,
                self._tokenizer.pad_token_id,
                shared_prefill=shared_prefill,
                generating=self._generating,
                branches=branches,
            )

    @contextmanager
    def _generating(self):
        """The model, ready to generate."""
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                generation_kwargs=self.generation_kwargs,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            torch.no_grad(),
            self._dist.summon_full_params(self.model_wrapped, recurse=False),
        ):
            yield model

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        for warning in (
            () if self._rewarded else missing_instructions(self.reward_funcs, self.reward_func_names, prompts)
        ):
            logger.warning(warning)
        self._rewarded = True
        ref = next(iter_refs(prompts), None)
        shown = next(iter_refs(completions), None)  # by tools
        readers = {
            name: each
            for name, each in zip(self.reward_func_names, self.reward_funcs, strict=True)
            if isinstance(each, nn.Module)
        }
        for name in readers if ref is not None else ():
            raise ref.error(
                f"the reward model '{name}' would be given the text alone; pass its processor in "
                f"`reward_processing_classes` if it takes {ref.kind}, or use a reward function"
            )
        for name in readers if shown is not None else ():
            logger.warning_once(
                f"The reward model '{name}' reads text alone and doesn't get the media that tools returned; pass its "
                "processor in `reward_processing_classes` if it takes them."
            )
        if self._batch is not None:
            # Reward functions get the dataset's rows as they are, and what `rollout_func` added
            inputs = [{**original, **row} for row, original in zip(inputs, self._batch.rows, strict=True)]
            inputs = [{key: value for key, value in row.items() if key != WHOLE_ROW} for row in inputs]
            prompts, completions = restore_media(prompts), restore_media(completions)
        passed, numbers = self.reward_funcs, self._batch and self._batch.numbers
        classes = zip(self.reward_func_names, passed, self.reward_processing_classes, strict=True)
        self.reward_funcs = [
            each
            if isinstance(each, nn.Module) and shown is None
            else checked_reward(
                read_as_text(each, processor, self.chat_template_kwargs) if isinstance(each, nn.Module) else each,
                name,
                self.args.media_rules,
                numbers,
            )
            for name, each, processor in classes
        ]
        try:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = passed
        if self._batch is not None:
            self._batch.rewards_per_func = rewards
        return rewards

    # Update

    def _prepare_inputs(self, generation_batch):
        if not self.model.training or self.rollout_func is not None:
            return super()._prepare_inputs(generation_batch)
        steps = self.args.steps_per_generation
        generate = self._step % (steps * self.num_iterations) == 0 or self._buffered_inputs is None
        if generate and self.args.keep_groups_together:
            output = self._generate_and_score_completions(generation_batch)
            if steps > 1:
                lengths = output["completion_mask"].sum(1).tolist()
                order = micro_batch_order(output["encoded_prompts"], lengths, steps)
                output = {key: _reorder(value, order) for key, value in output.items()}
            self._buffered_inputs = split_tensor_dict(output, steps)
            inputs = self._buffered_inputs[self._step % steps]
        else:
            inputs = super()._prepare_inputs(generation_batch)
        if generate:
            self._log_sharing()
        return inputs

    def _log_sharing(self) -> None:
        """Share of prompt tokens that a forward per completion would repeat and the packed forward doesn't."""
        once = repeated = 0
        for batch in self._buffered_inputs:
            prompts = batch["encoded_prompts"]
            repeated += sum(map(len, prompts))
            once += sum(map(len, group_by_prompt(prompts) if batch["packed"][0] else prompts))
        counts = torch.tensor([[once, repeated]], device=self.accelerator.device)
        once, repeated = self.accelerator.gather(counts).sum(0).tolist()
        self._metrics["train"]["packing/shared_frac"].append(1 - once / repeated)

    def _choose_packing(self, batch: Batch, completion_mask: torch.Tensor) -> None:
        """Once per generation batch, so that old, reference and current log-probabilities agree."""
        if batch.packed is None:
            lengths = completion_mask.sum(1).tolist()
            batch.packed = self._policy.worth_packing(batch.prompts, lengths, self.args.per_device_train_batch_size)

    def _batch_of(self, inputs: dict[str, Any]):
        """The context for what a generation batch, or a part of it, holds; within it, for the same prompts, itself."""
        prompts, outer = inputs.get("encoded_prompts"), self._batch
        if outer is not None and outer.of_inputs and outer.prompts is prompts:
            return nullcontext(outer)
        packed = None if prompts is None else inputs["packed"][0]
        tool_mask = None if self._tool_mask_expected else inputs.get("tool_mask")
        return self._at_hand(of_inputs=True, prompts=prompts, packed=packed, tool_mask=tool_mask)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with self._batch_of(inputs) as batch:
            loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        parts = next((scores.deferred for scores in batch.scores if scores.deferred is not None), None)
        if parts is None:
            return loss
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["token_budget/parts"].append(float(len(parts.parts)))
        metrics["token_budget/extra_time"].append(parts.seconds)
        # `training_step` divides what it gets here
        divisor = 1 if self.loss_is_scaled_for_ga else self.current_gradient_accumulation_steps
        return backward_by_parts(self.accelerator, model, loss, parts, divisor)

    def _compute_loss(self, model, inputs):
        with self._batch_of(inputs):
            return super()._compute_loss(model, inputs)

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,
        compute_entropy=False,
        compute_aux_loss=False,
        **kwargs,
    ):
        batch = self._batch
        if batch is not None and batch.hands_out_current:
            return batch.current.logps, batch.current.entropies, batch.current.aux_loss
        if batch is None or batch.prompts is None:  # `rollout_func` makes its own prompts
            tensors = super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **kwargs,
            )
            if batch is None:
                return tensors
            scores = Scores(*tensors[:2], aux_loss=tensors[2])
            scores = _of_sampled(scores, batch.tool_mask, input_ids[:, -logits_to_keep:])
            batch.scores.append(scores)
            return scores.logps, scores.entropies, scores.aux_loss
        completion_ids, completion_mask = input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:]
        self._choose_packing(batch, completion_mask)
        size = batch_size or len(completion_ids)
        places = [range(len(completion_ids))[start : start + size] for start in range(0, len(completion_ids), size)]
        parts = [
            self._policy.score(
                model,
                batch.prompts[place.start : place.stop],
                completion_ids[place.start : place.stop],
                completion_mask[place.start : place.stop],
                packed=batch.packed,
                compute_aux_loss=compute_aux_loss,
            )
            for place in places
        ]
        scores = parts[0] if len(parts) == 1 else Scores.join(parts, places)
        scores = _of_sampled(scores, batch.tool_mask, completion_ids)
        batch.scores.append(scores)
        return (
            scores.logps,
            scores.entropies if compute_entropy else None,
            scores.aux_loss if compute_aux_loss else None,
        )

    # Checks

    def _needs_self_check(self, prompts: list[EncodedPrompt]) -> bool:
        """On the first batch, and again on the first that has media of a kind not seen before."""
        if self._self_check is None:
            return True
        unmeasured = [kind for kind in MODALITIES if kind not in self._self_check.media]
        if not set(unmeasured) & set(self._unwrapped(self.model).input_modalities):
            return False
        return self._any_process(bool(kinds_of(prompts) & {*unmeasured}))

    def _run_self_check(self, messages: list, prompts: list[EncodedPrompt]) -> None:
        measured = {} if self._self_check is None else self._self_check.media
        self._self_check = run_self_check(self, messages, prompts, measured)
        self._policy.fallbacks = self._self_check.fallbacks
        logger.info(str(self._self_check))
        self.accelerator.print(self._self_check)

    @staticmethod
    def _loss_mask(batch: dict[str, Any]) -> torch.Tensor:
        return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]

    def _processor_as_loaded(self):
        """The processor as transformers loads it, to compare with; a processor that was passed stays as it is."""
        source = self._processor_source
        return self.processing_class if source is None else AutoProcessor.from_pretrained(**source)

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        if len(self._train_sampler) == 0:
            prompts = self.args.generation_batch_size // self.num_generations
            raise ValueError(
                f"The training dataset has {len(self._train_sampler.data_source)} rows, fewer than the {prompts} "
                "prompts of a generation batch, so there would be nothing to train on. Lower "
                "`per_device_train_batch_size`, `gradient_accumulation_steps` or `steps_per_generation`, raise "
                "`num_generations`, or add rows."
            )
        return self._looking_ahead(self._train_sampler)

    def _init_training_state(self, max_steps, steps_per_epoch, n_epochs, *args):
        self._last_loaded_step = -1  # another run may start with other weights
        epochs_trained, steps_trained = super()._init_training_state(max_steps, steps_per_epoch, n_epochs, *args)
        # TRL's sampler draws one order after the other, and `Trainer` skips steps within an epoch only
        if self.state.global_step < max_steps and self._train_sampler is not None and self.shuffle_dataset:
            for _ in range(epochs_trained):
                torch.randperm(self._train_sampler.num_samples, generator=self._train_sampler.generator)
        return epochs_trained, steps_trained


def _of_sampled(scores: Scores, tool_mask: Any, completion_ids: torch.Tensor) -> Scores:
    """Scores that are 0 on what wasn't sampled, where TRL's trainer would count it."""
    if tool_mask is None:
        return scores
    sampled = as_tensor(tool_mask, completion_ids)
    entropies = None if scores.entropies is None else scores.entropies * sampled
    return replace(scores, logps=scores.logps * sampled, entropies=entropies)


def _reorder(value, order: list[int]):
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value[order]
    return [value[i] for i in order] if isinstance(value, list) else value
