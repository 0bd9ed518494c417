# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The seam with TRL: everything this package overrides in TRL's trainers."""

import logging
import math
import shutil
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model, set_seed
from datasets import Dataset
from huggingface_hub import ModelCard
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoProcessor, PreTrainedModel, ProcessorMixin, is_wandb_available
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy, sort_checkpoints
from trl.extras.profiling import profiling_context
from trl.models import prepare_deepspeed, prepare_fsdp, unwrap_model_for_generation
from trl.models.utils import _ForwardRedirection, disable_gradient_checkpointing
from trl.trainer import grpo_trainer, rloo_trainer
from trl.trainer.utils import (
    add_fused_lm_head,
    disable_dropout_in_model,
    get_comet_experiment_url,
    get_config_model_id,
    get_trackio_space_url,
    split_tensor_dict,
)

from ..data.columns import MEDIA_COLUMNS, iter_refs, restore_media, rows_to_messages, strip_media
from ..data.fetch import FetchOnce
from ..data.unread import check_columns, columns_known, no_prompt
from ..encoding.companions import companion_prompt, unreached_parameters
from ..encoding.processors import check_processor, load_processor
from ..encoding.prompts import EncodedPrompt, all_placeholder_ids, encode_prompt, placeholder_tokens, same_prompt
from ..families import MODALITIES, family_of
from ..forward.attention import install_prefix_attention, original_attention
from ..forward.launched import refuse_runs_apart
from ..forward.layout import group_by_prompt, micro_batch_order, packed_length, split_by_tokens, split_samples
from ..forward.masks import sharing_obstacle
from ..forward.scores import Scores
from ..forward.scoring import completion_scores
from ..forward.token_budget import DeferredParts, backward_by_parts
from ..generation.transformers import generate_in_parts, trim_after_eos
from ..models.modes import evaluation_mode
from ..models.pretrained import load_model
from ..models.quantization import keep_differentiable
from ..models.towers import find_tower, freeze_as_built
from ..reporting.hub import explain, explained, how_to_upload, private_files, uploads
from ..reporting.media_logs import MediaLog, log_completions
from ..reporting.model_card import card_values, task_of
from ..rewards.checks import checked_reward, distinct_names
from ..rewards.model import RewardModel
from .checkpoint import load_rollout_state, load_whole, local_part, save_rollout_state, save_whole
from .self_check import Remedies, SelfCheck, check_engine, run_self_check


if is_wandb_available():
    import wandb


logger = get_logger(__name__)

# A packed row must have this share of the padded batch's tokens at most: the time saved follows the tokens saved, and
# below that it is lost in the noise (measured on a CPU, see `benchmarks/`).
_WORTH_PACKING = 0.9

# Rows of a dataset in which media are looked for before training
_ROWS_TO_LOOK_AT = 16

# Options of vLLM that leave its log-probabilities alone
_NEUTRAL_OPTIONS = {"max_tokens", "min_tokens", "seed", "stop", "stop_token_ids", "detokenize"}

# Folder of a checkpoint for a reference that moves with the policy
_REFERENCE = "ref_model"

# Where a checkpoint is until it is whole and before it is deleted, and there, the one whose place another takes
_PARTIAL = "_partial_checkpoint"
_REPLACED = "replaced"


class MultimodalMixin:
    """
    Gives a TRL trainer that samples completions media of every kind, encoded and forwarded once per prompt.

    Losses, metrics and the training loop stay TRL's: media are moved into the messages before TRL sees a row, and the
    packed forward hides behind TRL's function for log-probabilities, with the shapes TRL expects.
    """

    _partial: Path | None = None  # where a checkpoint is being written
    _folders_beside_model: tuple[str, ...] = ()  # what else of a checkpoint belongs to the published model
    _uploaded: Path | None = None  # the checkpoint of the last push from one
    push_in_progress = None  # which `Trainer` sets on the main process
    _sampling_logps_expected = True  # whether TRL's trainer takes log-probabilities beside sampled completions

    def __init__(
        self, model, reward_funcs, args, processing_class=None, quantization_config=None, ref_model=None, **kwargs
    ):
        _refuse_runs_apart(args)
        _refuse_unchecked_steps(args)
        if kwargs.get("environment_factory") is None:  # environments read what columns they like
            warn_of_unread(args, train_dataset=kwargs.get("train_dataset"), eval_dataset=kwargs.get("eval_dataset"))
        set_seed(args.seed)  # as TRL does before it loads a model
        if hasattr(model, "model_for"):  # an actor, whose model the trainer handles itself
            model = model.model_for(args)
        loaded_here = isinstance(model, str)
        if loaded_here:
            init_kwargs = dict(args.model_init_kwargs or {})
            if quantization_config is not None:
                if "quantization_config" in init_kwargs:
                    raise ValueError(
                        "`quantization_config` is set both as a trainer argument and in `args.model_init_kwargs`. Set it "
                        "as a trainer argument."
                    )
                init_kwargs["quantization_config"] = quantization_config
            if args.distributed_state.distributed_type in ["MULTI_GPU", "DEEPSPEED"]:
                init_kwargs["device_map"] = None
            init_kwargs.setdefault("trust_remote_code", args.trust_remote_code)
            model = load_model(model, **init_kwargs)
            freeze_as_built(model)
        _check_name(model, args, processing_class, ref_model, kwargs.get("peft_config"))
        self._processor_source: dict[str, Any] | None = None  # how to load the processor again
        if processing_class is None:
            self._processor_source = {
                "pretrained_model_name_or_path": get_config_model_id(model.config),
                "revision": (args.model_init_kwargs or {}).get("revision") if loaded_here else None,
                "trust_remote_code": args.trust_remote_code,
            }
            processing_class = load_processor(*self._processor_source.values())
        check_processor(processing_class)
        _check_takes_media(model, processing_class, args, kwargs.get("train_dataset"), kwargs.get("eval_dataset"))
        if reward_funcs is not None:
            reward_funcs = list(reward_funcs) if isinstance(reward_funcs, list) else [reward_funcs]
        reward_processors = kwargs.pop("reward_processing_classes", None) or [None] * len(reward_funcs or [])
        if not isinstance(reward_processors, list):
            reward_processors = [reward_processors]
        loaded_rewards = [isinstance(f, str) for f in reward_funcs or []]

        self._samples: list[EncodedPrompt] | None = None  # the prompts of the rows at hand
        self._packed: bool | None = None  # how the rows at hand are scored
        self._scores: list[Scores] = []  # of the rows at hand, in the order of scoring
        self._train_sampler = None
        self._remedies = Remedies(can_pack=False, apart=family_of(model).apart)
        self._self_check: SelfCheck | None = None
        self._companion_prompts: dict[str, EncodedPrompt] = {}
        self._kinds_seen: set[str] = set()  # media of the prompts so far, for the model card
        self._columns_seen: set[str] = set()
        # Datasets whose rows are looked at when the first ones come
        self._unseen = {name for name in ("train_dataset", "eval_dataset") if _is_unknown(kwargs.get(name))}
        self._encoders_to_train: tuple[nn.Module, set[str]] | None = None  # and the wrapped model that they are of
        self._encoders_used: set[str] = set()  # kinds whose encoders got a gradient on any process
        self._unreached: list[nn.Parameter] | None = None  # weights to train that no forward uses
        self._deferred: DeferredParts | None = None  # what is to be differentiated once the loss is known
        self._media_log: MediaLog | None = None  # what the tables of completions show
        self._n_skipped = 0  # updates skipped in a row
        placeholders = all_placeholder_ids(model, processing_class)
        own = args.generation_kwargs or {}
        # Options of an engine that change with which probabilities it samples; a config that was used has our own bias
        bias = [token for token in own.get("logit_bias", {}) if int(token) not in placeholders]
        self._alters_logits = bool(bias or own.keys() - _NEUTRAL_OPTIONS - {"logit_bias"})
        if args.use_vllm and placeholders:
            bias = {str(i) if args.vllm_mode == "server" else i: -100.0 for i in placeholders}
            args.generation_kwargs = {**own, "logit_bias": {**bias, **own.get("logit_bias", {})}}
        with (
            _image_token_id(model.config, placeholders),
            _no_warning_about_init_kwargs(loaded_here),
            _no_reference(args, ref_model),
            _reference_as_policy(),
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
        self._own_tokens = placeholder_tokens(model, self.processing_class)
        self.reward_func_names = distinct_names(self.reward_func_names)
        for i, loaded in enumerate(loaded_rewards):
            if isinstance(self.reward_funcs[i], nn.Module):
                self._let_reward_model_see(i, reward_processors[i], loaded)
        if ref_model is not None:
            self._set_reference(ref_model)
        if args.log_completions:
            self._media_log = MediaLog(
                args.generation_batch_size,
                args.max_logged_media if args.log_multimodal else 0,
                args.max_logged_megabytes,
                self.accelerator.process_index,
                self.accelerator.num_processes,
            )
        if not self.use_vllm and placeholders:
            # A sampled placeholder would stand for media that aren't there
            suppressed = sorted(placeholders | set(self.generation_config.suppress_tokens or []))
            self.generation_config.suppress_tokens = self.generation_kwargs["suppress_tokens"] = suppressed
            # Never sampled, they are never discouraged either, so the saved model must go on without them
            self._unwrapped(self.model).generation_config.suppress_tokens = suppressed

        keep_differentiable(self.model)
        obstacle = sharing_obstacle(self._unwrapped(self.model))
        if args.packing == "prefix" and obstacle:
            logger.warning(f"Completions are scored in padded rows (`packing='padded'`): {obstacle}.")
        self._remedies.can_pack = args.packing == "prefix" and not obstacle
        if self._remedies.can_pack:
            install_prefix_attention(self._unwrapped(self.model))
            if self.ref_model is not None:
                install_prefix_attention(self._unwrapped(self.ref_model))
            per_device, group = args.per_device_train_batch_size, args.num_generations
            if per_device % group != 0:
                logger.warning(
                    f"`per_device_train_batch_size` ({per_device}) holds no whole groups of `num_generations` ({group}), "
                    "so part of each prompt is forwarded more than once (see the metric `packing/shared_frac`). Make it "
                    f"a multiple of {group}."
                )

    def _set_reference(self, ref_model: PreTrainedModel) -> None:
        """Does for a given reference what TRL does for one that it loads."""
        self.beta = self.args.beta
        if self.args.disable_dropout:
            disable_dropout_in_model(ref_model)
        add_fused_lm_head(ref_model, temperature=self.temperature)
        if self.is_deepspeed_enabled:
            self.ref_model = prepare_deepspeed(ref_model, self.accelerator)
        elif self.is_fsdp_enabled:
            self.ref_model = prepare_fsdp(ref_model, self.accelerator)
        else:
            self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

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
        model = self.accelerator.unwrap_model(model)
        return model.get_base_model() if is_peft_model(model) else model

    @contextmanager
    def _overridden(self, **attributes):
        """Other values of attributes that TRL's code reads."""
        saved = {name: getattr(self, name) for name in attributes}
        self.__dict__.update(attributes)
        try:
            yield
        finally:
            self.__dict__.update(saved)

    # Data

    def _set_signature_columns_if_needed(self):
        super()._set_signature_columns_if_needed()
        self._signature_columns = list(dict.fromkeys([*self._signature_columns, *MEDIA_COLUMNS]))

    def _get_dataloader(self, dataset, description, *args, **kwargs):
        if isinstance(dataset, Dataset):
            dataset = FetchOnce(self._remove_unused_columns(dataset, description=description))
        return super()._get_dataloader(dataset, description, *args, **kwargs)

    # Rollout

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if self.environment_factories is None:
            for index, row in enumerate(inputs):
                if "prompt" not in row:
                    raise ValueError(f"row {index} {no_prompt(row)}")
            name = "train_dataset" if self.model.training else "eval_dataset"
            if name in self._unseen:
                self._unseen.remove(name)
                warn_of_unread(self.args, whole=False, **{name: inputs})
        ignored = self.args.ignored_media_columns or ()
        rows = rows_to_messages(inputs, ignored, self._own_tokens) if "prompt" in inputs[0] else inputs
        refs = list(iter_refs([row.get("prompt") for row in rows]))
        if refs:
            self._refuse_media_where_unsupported(refs[0], {ref.kind for ref in refs})
        self._rows = inputs
        self._columns_seen.update(inputs[0])
        self._packed = None
        self._scores.clear()
        try:
            output = super()._generate_and_score_completions(rows)
            # Prompts are logged as text: TRL's table can't hold media
            for key in ("prompt", "completion"):
                logged = [strip_media(messages) for messages in self._logs[key]]
                self._logs[key].clear()
                self._logs[key].extend(logged)
            if self._media_log is not None:
                group_size = self.num_generations if self.model.training else self.num_generations_eval
                self._media_log.add([row.get("prompt") for row in rows], group_size)
            if self._samples is not None:
                self._check_engine(output)
                self._choose_packing(output["completion_mask"])
                output["encoded_prompts"] = self._samples
                output["packed"] = [self._packed] * len(inputs)
        finally:
            self._samples = self._rows = None
        return output

    def _refuse_media_where_unsupported(self, ref, kinds: set[str]) -> None:
        if self.use_vllm and kinds - {"image"}:
            raise ref.error("vLLM generation takes images only so far; set `use_vllm=False` for audio and video")
        for option in ("environment_factories", "rollout_func", "tools"):  # TRL adds those of environments to `tools`
            if getattr(self, option):
                name = "environment_factory" if option == "environment_factories" else option
                raise ref.error(f"`{name}` works on text rows only; drop the media columns or `{name}`")

    def _tokenize_prompts(self, prompts: list):
        mode_generations = self.num_generations if self.model.training else self.num_generations_eval
        offset = self.accelerator.process_index * len(prompts)  # a group may straddle processes
        model = self._unwrapped(self.model)
        samples: list[EncodedPrompt] = []
        for i, prompt in enumerate(prompts):
            first_of_group = (offset + i) % mode_generations == 0
            if i > 0 and not first_of_group and same_prompt(prompt, prompts[i - 1]):
                samples.append(samples[-1])
                continue
            template_kwargs = self._template_kwargs()
            if self.environment_factories is not None:
                template_kwargs["tools"] = self._env_tools[self._batch_environments[i]] or None
            samples.append(
                encode_prompt(
                    prompt,
                    self.processing_class,
                    model,
                    template_kwargs=template_kwargs,
                    audio_overlong=self.args.audio_overlong,
                    keep_images=self.use_vllm,
                    row=i,
                )
            )
        self._samples = samples
        self._kinds_seen.update(*(sample.modalities for sample in samples))
        if self.args.self_check and self.model.training and self._needs_self_check():
            self._run_self_check(prompts)
        return [sample.input_ids.tolist() for sample in samples], None, {}

    def _template_kwargs(self) -> dict[str, Any]:
        return {"chat_template": self.chat_template, **self.chat_template_kwargs, "tools": self.tools or None}

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, *args, **kwargs):
        if kwargs.get("has_tool_images"):
            raise ValueError(
                "A tool returned an image, which would be missing when its completion is scored; return text only."
            )
        samples = self._samples
        if self.use_vllm and any(sample.images for sample in samples):
            images = [sample.images or None for sample in samples]
        # A tool loop asks for the continuation of longer ids, which no record knows; only text rows get there
        unknown = prompt_ids != [sample.input_ids.tolist() for sample in samples]
        if self.use_vllm or self.use_transformers_continuous_batching or unknown:
            # Continuous batching refuses names of attention that it doesn't know
            with original_attention(self._unwrapped(self.model)):
                return super()._generate_single_turn(prompt_ids, images, {}, *args, **kwargs)
        completion_ids = trim_after_eos(self._sample_completions(samples, self.generation_config), self.eos_token_ids)
        return (completion_ids, None) if self._sampling_logps_expected else completion_ids

    def _sample_completions(self, samples, generation_config, share_prefill: bool | None = None):
        with torch.no_grad():  # nothing waits for gradients here
            companions = self._companions(self.model_wrapped, samples)
        apart = self._remedies.apart
        parts = split_samples(samples, apart)
        kinds = [_kinds([samples[i] for i in part] + companions) for part in parts]
        surplus = self._most_over_ranks(kinds, apart) - len(parts)
        with profiling_context(self, "transformers.generate"), self._generating() as model:
            return generate_in_parts(
                model,
                self._unwrapped(model),
                samples,
                parts,
                generation_config,
                self._tokenizer.pad_token_id,
                self.accelerator.device,
                surplus=surplus,
                share_prefill=self._remedies.share_prefill if share_prefill is None else share_prefill,
                companions=companions,
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

    def _companions(self, model, samples) -> list[EncodedPrompt]:
        """
        Prompts with media of the kinds that this process lacks, where processes wait for each other's encoders: sharded
        weights are gathered, and gradients reduced, on all of them alike.
        """
        own = _kinds(samples)
        if self.accelerator.num_processes == 1:
            return []
        if not self._is_whole:
            held = torch.tensor([[kind in own for kind in MODALITIES]], device=self.accelerator.device)
            everyone = self.accelerator.gather(held).any(0).tolist()
            needed = {kind for kind, any_has in zip(MODALITIES, everyone, strict=True) if any_has}
            if torch.is_grad_enabled() and is_deepspeed_zero3_enabled():
                # It takes a gradient of the past where an encoder gets none
                encoders = {"image" if kind == "video" else kind for kind in needed}
                self._encoders_used |= encoders
                needed |= (self._encoders_used - encoders) & self._trained_encoders()
        elif torch.is_grad_enabled() and isinstance(model, DistributedDataParallel):
            # Where it looks for weights without a gradient, it also reduces those that only an earlier forward used
            needed = set() if model.find_unused_parameters else self._trained_encoders()
            # One encoder sees images and videos
            own = {"image" if kind == "video" else kind for kind in own}
        else:
            return []
        return [self._companion(kind) for kind in sorted(needed - own)]

    def _companion(self, kind: str) -> EncodedPrompt:
        if kind not in self._companion_prompts:
            model = self._unwrapped(self.model)
            self._companion_prompts[kind] = companion_prompt(kind, self.processing_class, model)
        return self._companion_prompts[kind]

    def _trained_encoders(self) -> set[str]:
        """Kinds whose media reach weights to train before the language model does, when an engine wraps the model."""
        # It decides then, too, which gradients it waits for
        if self._encoders_to_train is None or self._encoders_to_train[0] is not self.model_wrapped:
            self._encoders_to_train = self.model_wrapped, self._find_trained_encoders()
        return self._encoders_to_train[1]

    def _find_trained_encoders(self) -> set[str]:
        policy = self._unwrapped(self.model)
        kinds = {kind for kind in ("image", "audio") if kind in policy.input_modalities}
        trained = set()
        # A critic is a model like the policy, with weights of its own to train
        for model in self.accelerator.unwrap_model(self.model).modules():
            if type(model) is not type(policy):
                continue
            encoders = {kind: model.get_submodule(find_tower(model, kind)) for kind in kinds}
            known = {p for module in (model.get_decoder(), *encoders.values()) for p in module.parameters()}
            # What lies between encoders and decoder may be any kind's
            if any(p.requires_grad and p not in known for p in model.base_model.parameters()):
                return kinds
            trained |= {kind for kind, each in encoders.items() if any(p.requires_grad for p in each.parameters())}
        return trained

    def _touch_unreached(self, model, scores) -> torch.Tensor | int:
        """A zero that depends on the weights that no forward uses, which DDP would wait for."""
        if self._unreached is None:
            self._unreached = unreached_parameters(model, scores)
        return sum(0 * parameter.flatten()[0] for parameter in self._unreached)

    def _most_over_ranks(self, kinds: list[set[str]], apart: str | None) -> int:
        """Number of forwards, given the media of each. Ranks of a sharded model must run the same ones."""
        if apart is None or self.accelerator.num_processes == 1:
            return len(kinds)
        count = int(self.accelerator.gather(torch.tensor([len(kinds)], device=self.accelerator.device)).max())
        if not self._is_whole:
            forwards = [[kind in each for kind in MODALITIES] for each in kinds + kinds[-1:] * (count - len(kinds))]
            everyone = self.accelerator.gather(torch.tensor([forwards], device=self.accelerator.device))
            if (everyone != everyone[0]).any():
                raise ValueError(
                    "Processes hold media of different kinds, and this model takes prompts apart, so that their forwards "
                    "would wait for each other forever under FSDP or DeepSpeed. Use DDP, or batches of one kind."
                )
        return count

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        ref = next(iter_refs(prompts), None)
        for name, reward_func in zip(self.reward_func_names, self.reward_funcs, strict=True):
            if ref is not None and isinstance(reward_func, nn.Module):
                raise ref.error(
                    f"the reward model '{name}' would be given the text alone; pass its processor in "
                    f"`reward_processing_classes` if it takes {ref.kind}, or use a reward function"
                )
        # Reward functions get the dataset's rows as they are, and what `rollout_func` added
        inputs = [{**original, **row} for row, original in zip(inputs, self._rows, strict=True)]
        checked = [
            reward_func if isinstance(reward_func, nn.Module) else checked_reward(reward_func, name)
            for name, reward_func in zip(self.reward_func_names, self.reward_funcs, strict=True)
        ]
        with self._overridden(reward_funcs=checked):
            rewards = super()._calculate_rewards(inputs, restore_media(prompts), completions, completion_ids_list)
        self._rewards_per_func = rewards  # of all processes
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

    def _choose_packing(self, completion_mask: torch.Tensor) -> None:
        """Once per generation batch, so that old, reference and current log-probabilities agree."""
        if self._packed is None:
            lengths = completion_mask.sum(1).tolist()
            padded = len(lengths) * (max(map(len, self._samples)) + max(lengths))
            size = self.args.per_device_train_batch_size  # prompts are shared within a micro-batch at most
            slices = [slice(start, start + size) for start in range(0, len(lengths), size)]
            packed = sum(packed_length(self._samples[part], lengths[part]) for part in slices)
            self._packed = self._remedies.can_pack and packed <= _WORTH_PACKING * padded

    @contextmanager
    def _rows_at_hand(self, inputs):
        self._samples = inputs.get("encoded_prompts")
        self._packed = inputs["packed"][0] if self._samples is not None else None
        try:
            yield
        finally:
            self._samples = None

    def _compute_loss(self, model, inputs):
        self._scores.clear()
        with self._rows_at_hand(inputs):
            return super()._compute_loss(model, inputs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        parts, self._deferred = self._deferred, None
        if parts is None:
            return loss
        # `training_step` divides what it gets here
        divisor = 1 if self.loss_is_scaled_for_ga else self.current_gradient_accumulation_steps
        return backward_by_parts(self.accelerator, model, loss, parts, divisor)

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
        if self._samples is None:  # `rollout_func` makes its own prompts
            scores = super()._get_per_token_logps_and_entropies(
                model,
                input_ids,
                attention_mask,
                logits_to_keep,
                batch_size=batch_size,
                compute_entropy=compute_entropy,
                compute_aux_loss=compute_aux_loss,
                **kwargs,
            )
            self._scores.append(Scores(*scores[:2]))
            return scores
        completion_ids, completion_mask = input_ids[:, -logits_to_keep:], attention_mask[:, -logits_to_keep:]
        self._choose_packing(completion_mask)
        size = batch_size or len(completion_ids)
        places = [range(len(completion_ids))[start : start + size] for start in range(0, len(completion_ids), size)]
        parts = []
        for place in places:
            part = slice(place.start, place.stop)
            rows = self._samples[part], completion_ids[part], completion_mask[part]
            parts.append(self._score(model, *rows, compute_aux_loss))
        scores = Scores.join(parts, places)
        self._scores.append(scores)
        return (
            scores.logps,
            scores.entropies if compute_entropy else None,
            scores.aux_loss if compute_aux_loss else None,
        )

    def _score(
        self,
        model,
        samples,
        completion_ids,
        completion_mask,
        compute_aux_loss: bool = False,
        beside: Callable | None = None,
        **overrides,
    ) -> Scores:
        """
        Scores of completions, differentiable where gradients are on.

        `beside(rows, first, **options)` may add to each forward: given its rows and whether it is the first forward, it
        returns a function of the model's forward that returns further fields of their scores.
        """
        remedies = self._remedies
        overrides = {"packed": self._packed, "apart": remedies.apart, "own_logits": remedies.own_logits, **overrides}
        budget = self.args.max_tokens_per_microbatch if torch.is_grad_enabled() else None
        parts, n_parts = [], 1
        if budget is not None:
            parts = split_by_tokens(samples, completion_mask.sum(1).tolist(), budget, overrides["packed"])
            count = torch.tensor([len(parts)], device=self.accelerator.device)
            n_parts = int(self.accelerator.gather(count).max())

        def score(index: int, part: list[int]) -> Scores:
            rows = [samples[i] for i in part], completion_ids[part], completion_mask[part]
            return self._score_part(model, rows, compute_aux_loss, beside, first=index == 0, **overrides)

        if n_parts == 1:
            return score(0, list(range(len(samples))))  # a part has an order of its own
        if compute_aux_loss:
            raise ValueError(
                "`max_tokens_per_microbatch` can't split the load-balancing loss of a mixture of experts, which is one of the "
                "whole micro-batch; drop `router_aux_loss_coef` or the budget."
            )
        start = time.perf_counter()
        self._deferred = DeferredParts(score, parts, n_parts, self.accelerator.device)
        metrics = self._metrics["train" if self.model.training else "eval"]
        metrics["token_budget/parts"].append(float(n_parts))
        metrics["token_budget/extra_time"].append(time.perf_counter() - start)
        return self._deferred.joined()

    def _score_part(self, model, rows, compute_aux_loss, beside, first, **options) -> Scores:
        n = len(rows[0])
        rows = self._with_companions(model, rows)
        options["min_forwards"] = self._n_forwards(rows[0], options["apart"])
        options["logits_temperature"] = self.temperature if options.pop("own_logits") else None
        others = None
        if beside is not None:
            own = {name: options[name] for name in ("packed", "apart", "min_forwards")}
            others = beside(rows, first, **own)
        head = self._unwrapped(model).get_output_embeddings()
        if isinstance(head, FSDPModule) and torch.is_grad_enabled():
            # TRL's fused head reads the weight of a module that never runs. What it gathers itself gets a gradient that
            # isn't reduced: each rank would train its rows of the head on its own samples alone.
            head.unshard()

        def score(call) -> dict[str, torch.Tensor]:
            scores = completion_scores(
                call, self._unwrapped(model), *rows, output_router_logits=compute_aux_loss, **options
            )
            return {**scores.tensors(), **({} if others is None else others(call))}

        with self.accelerator.autocast():
            # DDP looks for unused parameters in its last forward alone, so it must see all parts as one
            is_ddp = isinstance(model, DistributedDataParallel)
            if others is not None or options["apart"] is not None and is_ddp:
                tensors = self._as_one_forward(model, score)
            else:
                tensors = score(model)
        if is_ddp and torch.is_grad_enabled() and not model.find_unused_parameters:
            tensors["logps"] = tensors["logps"] + self._touch_unreached(model, list(tensors.values()))
        return Scores(**tensors).rows(slice(n))  # without companions

    def _as_one_forward(self, model, function: Callable):
        """Calls a function of a model's forward within the forward of its wrapper, as engines need it."""
        module = self.accelerator.unwrap_model(model)
        return _ForwardRedirection()(model, module, lambda: function(module.forward))

    def _with_companions(self, model, rows: tuple) -> tuple:
        """Adds rows without a completion, whose prompts the others don't see, see [`_companions`]."""
        samples, completion_ids, completion_mask = rows
        companions = self._companions(model, samples)
        if not companions:
            return rows
        padding = (0, 0, 0, len(companions))
        return (
            [*samples, *companions],
            nn.functional.pad(completion_ids, padding),
            nn.functional.pad(completion_mask, padding),
        )

    def _n_forwards(self, samples, apart: str | None) -> int:
        """Number of forwards that these samples take, on the process where they take the most."""
        parts = split_samples(samples, apart)
        return self._most_over_ranks([_kinds([samples[i] for i in part]) for part in parts], apart)

    def _any_process(self, condition: bool) -> bool:
        return bool(self.accelerator.gather(torch.tensor([condition], device=self.accelerator.device)).any())

    # Numbers that aren't finite

    def _get_grad_norm(self, model, grad_norm=None):
        """Leaves out an update whose gradient isn't finite."""
        norm = super()._get_grad_norm(model, grad_norm)
        # The same on all processes, which hold the same gradient. DeepSpeed may have no norm, or -1.
        skipped = norm is not None and not (math.isfinite(norm) and norm >= 0)
        scaler = self.accelerator.scaler
        if skipped and self.accelerator.mixed_precision == "fp16" and (scaler is None or scaler.get_scale() > 1):
            skipped = False  # the scale of the loss is why; it is lowered, and the step left out, by the scaler
        elif skipped:
            self._skip_update()
        else:
            self._n_skipped = 0
        self._metrics["train"]["skipped_updates"].append(float(skipped))
        return norm

    def _skip_update(self) -> None:
        step = self.state.global_step
        if self.is_deepspeed_enabled:
            if not self.accelerator.optimizer_step_was_skipped:
                raise FloatingPointError(
                    f"DeepSpeed made step {step + 1} with a gradient that isn't finite. Go on from a checkpoint, with ZeRO-1, "
                    "2 or 3, which leave out such steps."
                )
            self.optimizer.optimizer.overflow = False  # so that the schedule goes on, as without DeepSpeed
        self._n_skipped += 1
        if self._n_skipped > self.args.max_skipped_updates:
            raise FloatingPointError(
                f"The gradient of {self._n_skipped} updates in a row isn't finite. Look for what changed before step "
                f"{step - self._n_skipped + 2}; a lower `learning_rate` or `max_grad_norm` may help."
            )
        self.optimizer.zero_grad()  # a step without gradients changes neither weights nor the optimizer

    @torch.no_grad()
    def _check_weights(self, folder: str | None) -> None:
        """Refuses to save what can't be trained or used any more. All processes have to call this."""
        trained = {name: local_part(p) for name, p in self.model.named_parameters() if p.requires_grad}
        trained = {name: value for name, value in trained.items() if value.numel() > 0}
        # The largest weight isn't finite if one isn't
        largest = nn.utils.get_total_norm(trained.values(), math.inf)
        if self._any_process(not largest.isfinite().item()):
            broken = [name for name, value in trained.items() if not value.isfinite().all()]
            raise FloatingPointError(
                f"Weights aren't finite after step {self.state.global_step}{f', such as {broken[0]!r}' if broken else ''}, so "
                f"the model isn't saved in {folder or self.args.output_dir!r}; what is saved there stays. Go on from an "
                "earlier checkpoint, with a lower `learning_rate` or `max_grad_norm`."
            )

    # Logs

    def log(self, logs, start_time=None):
        if self._media_log is None:
            super().log(logs, start_time)
            return
        tables, self.log_completions = self.log_completions, False  # TRL's hold no audio or video
        try:
            super().log(logs, start_time)
        finally:
            self.log_completions = tables
        if tables and self.accelerator.is_main_process and self._logs["prompt"]:
            log_completions(self, self._media_log)

    def _maybe_log_save_evaluate(self, *args, **kwargs):
        # Media are gathered where all processes are, as they needn't be where `log` is called
        if self._media_log is not None and (self.control.should_log or self.control.should_training_stop):
            self._media_log.gather()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def evaluation_loop(self, *args, **kwargs):
        output = super().evaluation_loop(*args, **kwargs)
        if self._media_log is not None:
            self._media_log.gather()
        return output

    # Checks and checkpoints

    def _needs_self_check(self) -> bool:
        """On the first batch, and again on the first that has media of a kind not seen before."""
        if self._self_check is None:
            return True
        unmeasured = [kind for kind in MODALITIES if kind not in self._self_check.media]
        if not set(unmeasured) & set(self._unwrapped(self.model).input_modalities):
            return False
        found = torch.tensor([bool(_kinds(self._samples) & {*unmeasured})], device=self.accelerator.device)
        return bool(self.accelerator.gather(found).any())

    def _run_self_check(self, messages: list) -> None:
        model = self.model
        devices = [self.accelerator.device] if self.accelerator.device.type == "cuda" else []
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=devices),
            disable_gradient_checkpointing(model, self.args.gradient_checkpointing_kwargs),
            evaluation_mode(model),
        ):
            measured = {} if self._self_check is None else self._self_check.media
            self._self_check = run_self_check(self, messages, self._remedies, measured)
        self._remedies = self._self_check.remedies
        logger.info(str(self._self_check))
        self.accelerator.print(self._self_check)

    def _check_engine(self, output: dict[str, Any]) -> None:
        """Compares what an engine sampled with, on its first batch."""
        check = self._self_check
        if check is None or check.engine is not None or not self.model.training:
            return
        sampled = output.get("sampling_per_token_logps")
        if sampled is None or not self._samples_from_policy():
            return
        ids, mask = output["completion_ids"], output["completion_mask"]
        recomputed = output.get("old_per_token_logps")
        if recomputed is None:
            with torch.no_grad():
                recomputed = self._get_per_token_logps_and_entropies(
                    self.model,
                    torch.cat([output["prompt_ids"], ids], dim=1),
                    torch.cat([output["prompt_mask"], mask], dim=1),
                    ids.size(1),
                    batch_size=self.args.per_device_train_batch_size,
                )[0]
        check_engine(check, sampled, recomputed, self._loss_mask(output), self.accelerator)
        self.accelerator.print(check)

    def _samples_from_policy(self) -> bool:
        """Whether an engine's log-probabilities are those of the policy at its temperature, with no token cut off."""
        args = self.args
        if args.repetition_penalty not in (None, 1.0) or getattr(args, "vllm_structured_outputs_regex", None):
            return False
        return args.top_p in (None, 1.0) and args.top_k in (None, 0, -1) and not args.min_p and not self._alters_logits

    @staticmethod
    def _loss_mask(batch: dict[str, Any]) -> torch.Tensor:
        return batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]

    def _processor_as_loaded(self):
        """The processor as transformers loads it, for what is compared with it; a processor that was passed as it is."""
        source = self._processor_source
        return self.processing_class if source is None else AutoProcessor.from_pretrained(**source)

    def create_model_card(self, model_name=None, dataset_name=None, tags=None):
        """
        Writes a card that says on what and how the model was trained, and how to ask it about media.

        Args:
            model_name (`str`, *optional*):
                Name of the model.
            dataset_name (`str`, *optional*):
                Name of the dataset.
            tags (`str` or `list[str]`, *optional*):
                Tags beside the package's own.
        """
        tags = {tags} if isinstance(tags, str) else set(tags or ())
        super().create_model_card(model_name, dataset_name, sorted(tags | self._kinds_seen))
        if not self.is_world_process_zero():
            return
        path = Path(self.args.output_dir, "README.md")
        data = ModelCard.load(path).data
        data.pop("licence", None)  # of which TRL knows as little
        data.pipeline_tag = data.pipeline_tag or task_of(self._kinds_seen)
        adapted = None
        if is_peft_model(self.model):
            adapted = get_config_model_id(self.model.config)
            data.library_name = "peft"
        values = card_values(self, self._kinds_seen, sorted(self._columns_seen), adapted)
        wandb_url = wandb.run.url if is_wandb_available() and wandb.run is not None else None
        urls = {"Weights & Biases": wandb_url, "Trackio": get_trackio_space_url(), "Comet": get_comet_experiment_url()}
        card = ModelCard.from_template(
            data,
            template_path=str(files("trl_multimodal_rft.reporting").joinpath("templates", "model_card.md")),
            model_name=model_name or Path(self.args.output_dir).name,
            base_model=data.base_model,
            dataset_name=dataset_name,
            reports=[(name, url) for name, url in urls.items() if url],
            **values,
        )
        card.save(path)

    def _get_train_sampler(self, dataset=None):
        self._train_sampler = super()._get_train_sampler(dataset)
        if len(self._train_sampler) == 0:
            prompts = self.args.generation_batch_size // self.num_generations
            raise ValueError(
                f"The training dataset has {len(self._train_sampler.data_source)} rows, fewer than the {prompts} prompts "
                "of a generation batch, so there would be nothing to train on. Lower `per_device_train_batch_size`, "
                "`gradient_accumulation_steps` or `steps_per_generation`, raise `num_generations`, or add rows."
            )
        return self._train_sampler

    def _init_training_state(self, max_steps, steps_per_epoch, n_epochs, *args):
        epochs_trained, steps_trained = super()._init_training_state(max_steps, steps_per_epoch, n_epochs, *args)
        if self.state.global_step >= max_steps:
            # Resumed after its last step, `Trainer` would go on to the end of the epoch, and stop one step too late
            return n_epochs, 0
        # TRL's sampler draws one order after the other, and `Trainer` skips steps within an epoch only
        if self._train_sampler is not None and self.shuffle_dataset:
            for _ in range(epochs_trained):
                torch.randperm(self._train_sampler.num_samples, generator=self._train_sampler.generator)
        return epochs_trained, steps_trained

    def _rollout_state(self) -> dict[str, Any]:
        """What this process needs to go on in the middle of a generation batch as if it hadn't stopped."""
        reused = self._step % (self.args.steps_per_generation * self.num_iterations) != 0
        return {
            "batches": self._batches(),
            "step": self._step,
            "buffered_inputs": self._buffered_inputs if reused else None,
            "metrics": dict(self._metrics["train"]),
            "self_check": None if self._self_check is None else asdict(self._self_check),
            "remedies": asdict(self._remedies),
            "checked": self._checked(),
            "n_skipped": self._n_skipped,
        }

    def _checked(self) -> dict[str, Any]:
        """What the self-check's measurements hold for."""
        model = self._unwrapped(self.model)
        return {
            "packing": self.args.packing,
            "precision": [self.accelerator.mixed_precision, str(model.dtype)],
            "attention": model.config.get_text_config(decoder=True)._attn_implementation,
        }

    def _batches(self) -> dict[str, Any]:
        """What the size and the contents of a generation batch depend on."""
        args = self.args
        return {
            "per_device_train_batch_size": args.per_device_train_batch_size,
            "gradient_accumulation_steps": args.gradient_accumulation_steps,
            "steps_per_generation": args.steps_per_generation,
            "num_generations": args.num_generations,
            "num_iterations": args.num_iterations,
            "num_processes": self.accelerator.num_processes,
            "reference": args.beta != 0,
        }

    def _load_rollout_state(self, state: dict[str, Any]) -> None:
        """Restores what is the same on all processes, and a process's own completions if they still fit."""
        if state["batches"] == self._batches():
            self._step = state["step"]
            self._metrics["train"].update(state["metrics"])
            if state["buffered_inputs"] is not None:
                self._buffered_inputs = [
                    {name: _to_device(value, self.accelerator.device) for name, value in batch.items()}
                    for batch in state["buffered_inputs"]
                ]
        else:
            logger.warning(
                f"Batches have changed from {state['batches']} to {self._batches()}, so the run goes on with new "
                "completions."
            )
        if state["checked"] == self._checked():  # else what this run does is measured anew
            self._remedies = Remedies(**state["remedies"])
            if state["self_check"] is not None:
                self._self_check = SelfCheck(**{**state["self_check"], "remedies": self._remedies})
        for batch in self._buffered_inputs or ():
            batch["packed"] = [packed and self._remedies.can_pack for packed in batch["packed"]]
        self._n_skipped = state["n_skipped"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Saves the model and its processor. All processes have to call this.

        Args:
            output_dir (`str`, *optional*):
                Folder. Defaults to the `output_dir` of the config.

        Raises:
            `FloatingPointError`: If weights aren't finite. What the folder holds stays as it is.
        """
        self._check_weights(output_dir)
        super().save_model(output_dir, _internal_call)

    def _get_output_dir(self, trial):
        return super()._get_output_dir(trial) if self._partial is None else str(self._partial)

    def _save_checkpoint(self, model, trial):
        """
        Writes a checkpoint aside and moves it to its place when it is whole, and aside what is to be deleted, so that none is
        ever half there.
        """
        run_folder, name = Path(self._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        partial = run_folder / _PARTIAL
        if self.args.should_save and partial.exists():  # from a run that was killed while it saved
            shutil.rmtree(partial)
        self.accelerator.wait_for_everyone()
        self._partial = partial
        try:
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                self._save_beside_model(partial / name)
        finally:
            self._partial = None
        self.accelerator.wait_for_everyone()
        if self.state.best_model_checkpoint == str(partial / name):
            self.state.best_model_checkpoint = str(run_folder / name)
        if self.args.should_save:
            self.state.save_to_json(str(partial / name / TRAINER_STATE_NAME))
            if (run_folder / name).exists():
                (run_folder / name).rename(partial / _REPLACED)
            (partial / name).rename(run_folder / name)
            for checkpoint in self._surplus_checkpoints(run_folder):
                checkpoint.rename(partial / checkpoint.name)
            shutil.rmtree(partial, ignore_errors=True)  # what stays goes before the next is written
        self.accelerator.wait_for_everyone()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_folder / name))

    def _surplus_checkpoints(self, run_folder: Path) -> list[Path]:
        """The checkpoints that `Trainer` would delete, oldest first."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return []
        checkpoints = [Path(checkpoint) for checkpoint in sort_checkpoints(str(run_folder), use_mtime=True)]
        kept = {checkpoints[-1]}
        if self.state.best_model_checkpoint is not None:
            kept.add(Path(self.state.best_model_checkpoint))
        surplus = max(0, len(checkpoints) - max(limit, len(kept)))
        deleted = [checkpoint for checkpoint in checkpoints if checkpoint not in kept][:surplus]
        if self._pushes and self._uploaded in deleted:
            deleted.remove(self._uploaded)  # the next time, as it is being read
        return deleted

    def _save_beside_model(self, folder: Path) -> None:
        """Adds to a checkpoint what TRL leaves out."""
        save_rollout_state(folder, self.accelerator.process_index, self._rollout_state())
        if self.args.sync_ref_model:
            save_whole(self.accelerator, self.ref_model, folder / _REFERENCE, self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is None:
            return
        if self.args.sync_ref_model:
            if not Path(checkpoint, _REFERENCE).is_dir():
                raise ValueError(
                    f"{checkpoint} has no folder {_REFERENCE!r} with a reference that follows the policy, so that "
                    "`sync_ref_model` would start again from the first one. Resume from a checkpoint that was saved with it "
                    "and without `save_only_model`, or set `sync_ref_model=False`."
                )
            load_whole(self.accelerator, self.ref_model, Path(checkpoint, _REFERENCE))
        # A process that the run before hadn't takes what is the same for all from the first
        state = load_rollout_state(checkpoint, self.accelerator.process_index) or load_rollout_state(checkpoint, 0)
        if state is None:
            logger.warning(f"{checkpoint} has no state of the rollouts; the run goes on with new completions.")
        else:
            self._load_rollout_state(state)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._reload_weights(resume_from_checkpoint)

    def _load_best_model(self):
        super()._load_best_model()
        self._reload_weights(self.state.best_model_checkpoint)

    @property
    def _is_whole(self) -> bool:
        """Whether processes run forwards without each other: all hold all weights, and no engine stands between."""
        return not (self.is_deepspeed_enabled or self.is_fsdp_enabled)

    def _reload_weights(self, folder: str | Path) -> None:
        # `Trainer` loads a state dict whose keys `save_pretrained` has renamed for many multimodal models, and restores
        # nothing without an error (huggingface/transformers#43701). `from_pretrained` knows the names.
        if self._is_whole and not is_peft_model(self.accelerator.unwrap_model(self.model)):
            load_whole(self.accelerator, self.model, folder)

    # Hub

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        with explained(
            self._repo, "Or train with `push_to_hub=False`, and publish with `trainer.push_to_hub()` afterwards."
        ):
            super().init_hf_repo(token, private)

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs,
    ):
        """
        Saves the model and publishes the output folder: the model, its processor, its card, and what belongs to it. Not
        published are checkpoints, and files that hold prompts, completions and media of the dataset.

        Args:
            commit_message (`str`, *optional*, defaults to `"End of training"`):
                Message of the commit.
            blocking (`bool`, *optional*, defaults to `True`):
                Whether to return only when all is uploaded.
            token (`str`, *optional*):
                Token that may write. Defaults to `hub_token`, then to that of the environment or of `hf auth login`.
            revision (`str`, *optional*):
                Branch, which must exist. Defaults to `hub_revision`, then to `"main"`.
            private (`bool`, *optional*):
                Whether to make the repository private when it is created. Defaults to `hub_private_repo`.
            kwargs:
                Arguments of [`create_model_card`].

        Returns:
            [`~huggingface_hub.CommitInfo`] or `Future`: The commit, with `blocking=False` a future of it.

        Raises:
            `PermissionError`: If there is no token, or the Hub refuses it. The saved folder stays as it is.
            `ConnectionError`: If the Hub can't be reached. The saved folder stays as it is.
        """
        patterns = private_files(self.args)
        hidden = bool(self.args.hub_private_repo if private is None else private)
        command = how_to_upload(self._repo, self.args.output_dir, patterns, hidden)
        again = (
            f"The model is saved in {self.args.output_dir!r}. To publish it: `trainer.push_to_hub()`, or `{command}`."
        )
        if self.hub_model_id is None:
            try:
                with explained(self._repo, again):
                    super().init_hf_repo(token, private)
            except Exception:
                # All processes save what was trained, as those do that have no part in the repository
                self.save_model(_internal_call=True)
                self.create_model_card(**kwargs)
                raise
        with uploads(self._repo, patterns, again):
            return super().push_to_hub(commit_message, blocking, token, revision, private, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder):
        quiet = self.args.hub_strategy == HubStrategy.END or not self.is_world_process_zero()
        if self._partial is not None or quiet:
            return
        if self._pushes:
            if not self.args.hub_always_push:
                return
            self._finish_current_push()  # what it uploads would change meanwhile
        self._warn_of_failed_pushes()
        for name in self._folders_beside_model:
            if Path(checkpoint_folder, name).is_dir():
                shutil.copytree(Path(checkpoint_folder, name), Path(self.args.output_dir, name), dirs_exist_ok=True)
        self._uploaded = Path(checkpoint_folder)
        with uploads(self._repo, private_files(self.args)):
            super()._push_from_checkpoint(checkpoint_folder)

    def _finish_current_push(self):
        super()._finish_current_push()
        self._warn_of_failed_pushes()

    def _warn_of_failed_pushes(self) -> None:
        """Of pushes in the background, whose errors nobody would see."""
        if self.push_in_progress is None or self._pushes:
            return
        errors = [job.exception() for job in self.push_in_progress.jobs]
        self.push_in_progress = None
        for error in filter(None, errors):
            logger.warning(
                f"{self._uploaded} was not published, or not all of it: {explain(error, self._repo) or repr(error)} Training "
                "goes on."
            )

    def _published_beside_model(self, model_class: str, folder: str) -> list[tuple[str, str]]:
        """What the card says about the folders beside the model."""
        return []

    @property
    def _pushes(self) -> bool:
        """Whether a checkpoint is being uploaded."""
        return self.push_in_progress is not None and not self.push_in_progress.is_done()

    @property
    def _repo(self) -> str:
        """The repository, as far as it is known before it is made."""
        return self.hub_model_id or self.args.hub_model_id or Path(self.args.output_dir).absolute().name


def own_config(config_class: type, args, model):
    """
    The config of a trainer.

    Args:
        config_class (`type`):
            The trainer's config class.
        args (`TrainingArguments`, *optional*):
            What the user passed.
        model (`str` or [`~transformers.PreTrainedModel`]):
            The model, after which a default config is named.

    Returns:
        `config_class`: The user's config, or a default one.

    Raises:
        `TypeError`: If it is another config, such as TRL's own, which lacks arguments that are read.
    """
    if args is None:
        name = model if isinstance(model, str) else get_config_model_id(model.config)
        algorithm = config_class.__name__.removeprefix("Multimodal").removesuffix("Config")
        return config_class(f"{name.split('/')[-1]}-{algorithm}")
    if not isinstance(args, config_class):
        raise TypeError(
            f"`args` is a {type(args).__name__}; use {config_class.__name__}, which takes TRL's arguments and those "
            "of this package."
        )
    return args


def _check_name(model, args, processing_class, ref_model, peft_config) -> None:
    """An instance that was built in memory has no name to load anything else by."""
    if get_config_model_id(model.config):
        return
    lacks = "The model was passed as an instance without a name (its config's `_name_or_path` is empty), by which"
    if processing_class is None:
        raise ValueError(f"{lacks} its processor would be loaded; pass `processing_class`.")
    if args.beta != 0 and ref_model is None and peft_config is None and not is_peft_model(model):
        raise ValueError(
            f"{lacks} the reference of `beta={args.beta}` would be loaded; save the model and load it from there, or "
            "set `beta=0`."
        )


def _check_takes_media(model, processing_class, args, *datasets) -> None:
    """A tokenizer does for text, of a model that takes media, too, but not for rows that have some."""
    takes_media = any(kind in model.input_modalities for kind in MODALITIES)
    if isinstance(processing_class, ProcessorMixin) or not takes_media:
        return
    datasets = [part for each in datasets for part in (each.values() if isinstance(each, dict) else [each])]
    for dataset in datasets:
        if not isinstance(dataset, Dataset) or "prompt" not in dataset.column_names:
            continue  # streams are read once, and say so then
        rows = [dataset[index] for index in range(min(_ROWS_TO_LOOK_AT, len(dataset)))]
        for ref in iter_refs([row["prompt"] for row in rows_to_messages(rows, args.ignored_media_columns or ())]):
            raise ref.error(
                f"{type(processing_class).__name__} is a tokenizer and can't encode {ref.kind}; pass "
                "`processing_class=AutoProcessor.from_pretrained(...)` with the model's processor"
            )


def warn_of_unread(args, *, whole: bool = True, **datasets) -> None:
    """
    Warns of media that nothing reads, or raises, see [`check_columns`].

    Args:
        args ([`MultimodalArguments`]):
            The config.
        whole (`bool`, *optional*, defaults to `True`):
            Whether the datasets have all their rows.
        datasets:
            Datasets, dictionaries of them and `None`, under the name of their argument.
    """
    for argument, given in datasets.items():
        supervised = argument == "ptx_dataset"
        reads = ("prompt", "completion", "messages") if supervised else ("prompt",)
        ignored = args.ignored_media_columns or ()
        for key, dataset in given.items() if isinstance(given, dict) else [(None, given)]:
            name = f"`{argument}`" if key is None else f"`{argument}[{key!r}]`"
            if dataset is not None:
                warning = check_columns(dataset, name, ignored, reads=reads, needs_prompt=not supervised, whole=whole)
                if warning is not None:
                    logger.warning(warning)


def _is_unknown(dataset) -> bool:
    datasets = dataset.values() if isinstance(dataset, dict) else [dataset]
    return any(each is not None and not columns_known(each) for each in datasets)


def _refuse_runs_apart(args) -> None:
    """
    Accelerate doesn't say when it takes processes that were launched together for runs of one process each, nor `Trainer`
    when it takes several GPUs for one process.
    """
    refuse_runs_apart(
        args.world_size,
        ": {launched} runs would know nothing of each other and write into the same folder. To train on the CPU, set "
        "`ACCELERATE_USE_CPU=true` in the environment, or with DeepSpeed `ddp_backend='gloo'` in the config; to train on "
        "GPUs, make them visible and start the script with `accelerate launch`.",
    )
    if args.n_gpu > 1:
        raise RuntimeError(
            f"One process sees {args.n_gpu} GPUs, over which `torch.nn.DataParallel` would split packed rows. Start the script "
            f"with `accelerate launch --num_processes {args.n_gpu}`, or show it one GPU: `CUDA_VISIBLE_DEVICES=0`."
        )


def _refuse_unchecked_steps(args) -> None:
    """DeepSpeed steps before anybody else has seen the gradient, so that only its own checks can leave out an update."""
    config = {} if args.deepspeed_plugin is None else args.deepspeed_plugin.deepspeed_config
    for section, option in (("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")):
        if config.get(section, {}).get(option) is False:
            raise ValueError(
                f"`{section}.{option}` is false in the DeepSpeed config, so that it would step with gradients that aren't "
                "finite; remove it."
            )


def _kinds(prompts: list[EncodedPrompt]) -> set[str]:
    return set().union(*(prompt.modalities for prompt in prompts))


def _to_device(value, device):
    """Moves tensors; lists of prompts stay where they are."""
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _reorder(value, order: list[int]):
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        return value[order]
    return [value[i] for i in order] if isinstance(value, list) else value


@contextmanager
def _image_token_id(config, placeholders: set[int]):
    """TRL reads `config.image_token_id` for every processor; a model without images has none."""
    missing = not hasattr(config, "image_token_id")
    if missing:
        config.image_token_id = min(placeholders, default=None)
    try:
        yield
    finally:
        if missing:
            del config.image_token_id


@contextmanager
def _no_reference(args, ref_model: PreTrainedModel | None):
    """Keeps TRL from loading a reference where one is given."""
    if ref_model is None:
        yield
        return
    if args.beta == 0 or args.sync_ref_model:
        option = "sync_ref_model=True" if args.sync_ref_model else "beta=0"
        raise ValueError(f"`ref_model` was passed, which `{option}` has no use for; change one of them.")
    coefficient, args.beta = args.beta, 0.0
    try:
        yield
    finally:
        args.beta = coefficient


@contextmanager
def _reference_as_policy():
    """TRL loads the reference by the policy's name, under which a model may be of which the policy is a part."""
    modules = (grpo_trainer, rloo_trainer)
    theirs = [module.create_model_from_path for module in modules]
    for module in modules:
        module.create_model_from_path = load_model
    try:
        yield
    finally:
        for module, function in zip(modules, theirs, strict=True):
            module.create_model_from_path = function


@contextmanager
def _no_warning_about_init_kwargs(active: bool):
    """TRL warns that it ignores how to load a model for an instance; here the instance was loaded that way."""

    def keep(record):
        return not (active and "but your model is already instantiated" in record.getMessage())

    loggers = [logging.getLogger(f"trl.trainer.{name}_trainer") for name in ("grpo", "rloo")]
    for trl_logger in loggers:
        trl_logger.addFilter(keep)
    try:
        yield
    finally:
        for trl_logger in loggers:
            trl_logger.removeFilter(keep)
