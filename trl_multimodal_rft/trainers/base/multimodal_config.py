# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Arguments that this package adds to TRL's: for all trainers, for trainers that sample, and for rewards."""

import copy
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from accelerate.logging import get_logger
from transformers import GenerationConfig
from transformers.utils import is_torch_bf16_gpu_available, is_torch_xla_available

from ...credentials import secured
from ...data.reading.rules import OPTION_NAMES, MediaRules, rules_of
from ...data.rows.unread import check_ignored
from ...reporting.trackers import check_trackers, tracker_names
from ...spelling import spelling_of
from ...views.view_options import ContrastView, RolloutView, view_option
from .argument_checks import CheckedKeywords
from .batch_sizes import batch_options, check_batches
from .config_options import (
    SPEED_OPTIONS,
    UNUSED_IN_SAMPLING,
    Ascending,
    Needs,
    Unused,
    as_names,
    as_rates,
    check_dtype,
    check_generation_kwargs,
    check_json,
    check_padding,
    check_values,
    help_from_docstring,
    settle_unused,
    warn_of_rates,
)
from .conflicts import Conflicts, conflicts_of_engine, conflicts_of_groups, conflicts_of_staleness, conflicts_of_views


logger = logging.getLogger(__name__)
main_logger = get_logger(__name__)  # of the main process, once processes are known

# Options that loaders, engines and clients read, whose values may hold tokens and passwords
_OF_LOADERS = re.compile(r"_init_kwargs$|_url$|^vllm_engine_kwargs$|^teacher_models$")
# Arguments of `apply_chat_template` that trainers set
_TEMPLATE_ARGUMENTS = {"conversation", "messages", "tools", "tokenize", "return_dict", "return_tensors"}
_TEMPLATE_ARGUMENTS |= {"add_generation_prompt"}

# For type checkers, the class that a config with these arguments extends
if TYPE_CHECKING:
    from transformers import TrainingArguments as _Config
else:
    _Config = object


@help_from_docstring
@dataclass(init=False, repr=False, eq=False)
class MediaArguments(CheckedKeywords, _Config):
    r"""
    Arguments about media and checkpoints, for a TRL config to inherit.

    Parameters:
        > Parameters that control the packing

        max_tokens_per_microbatch (`int`, *optional*):
            Largest number of tokens that are forwarded with their activations at once. A larger micro-batch is
            forwarded and differentiated in parts of whole groups, with the same loss and gradient. A larger group
            forwards its prompt once, and its completions in chunks of at least one completion, which attend to the
            prompt. Several parts cost one more forward without activations, whose seconds are logged as
            `token_budget/extra_time`.

        > Parameters that control what is trained

        freeze (`list[str]` or `str`, *optional*):
            Parts of the model that aren't trained (`vision_tower`, `audio_tower`, `projector`, `language_model`), or
            patterns of the names of its parameters and modules, such as `model.visual.blocks.[0-3]`. A text lists
            several, separated by commas. Adapters in frozen parts are frozen, too, and so are the same parts of PPO's
            critic.
        learning_rates (`dict[str, float]` or `str`, *optional*):
            Learning rates of parts, or of parameters by patterns, as in `freeze`; JSON on a command line. A pattern
            wins over a part, and the first pattern over other patterns. Weights that no key names are trained at
            `learning_rate`. The schedule scales all rates.

        > Parameters that control the media

        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            What happens to audio that is longer than the model's window: `"raise"` or `"truncate"`.
        ignored_media_columns (`list[str]`, *optional*):
            Columns with media that only reward functions read. They aren't put into prompts, even if they are called
            `audio`, `image` or `video`. Other columns with media that no prompt contains raise an error if no row has
            media that a prompt contains, and cause a warning otherwise.
        special_tokens_in_text (`str`, *optional*):
            How to treat the tokenizer's control tokens, such as `<|im_end|>`, in texts of messages and in results of
            tools: `"allow"` keeps them, and `"strip"` removes them before the text is encoded. `"raise"` raises an
            error for the row, or tells the model that the tool call failed. By default, control tokens in rows are
            kept, with one warning per token, and results of tools are treated as by `"raise"`. Plain-text prompts,
            which no chat template wraps, keep control tokens.
        media_prefetch (`int`, *optional*, defaults to `1`):
            Number of generation batches, or of optimizer steps in supervised training, whose media are fetched,
            decoded and run through the processor ahead of need, while the model samples and is trained.
            `dataloader_num_workers` processes do this, at least one. With 0, with streams, and on systems other than
            Linux, media are processed when they are needed, as are those of a dataset with a transform if
            `dataloader_num_workers` is 0. With a transform, the processes are forked anew for each epoch.
        on_media_error (`str`, *optional*, defaults to `"raise"`):
            What happens to a row that can't be read: `"raise"` ends the run with an error that names the row. `"skip"`
            puts another row in its place, lists it in `skipped_rows.jsonl` in the output folder, and leaves it out
            from then on. Evaluation leaves such rows out, without replacement. The metric `media/skipped` counts them.
        max_skipped_rows (`float`, *optional*, defaults to `0.1`):
            Largest number of rows that `on_media_error="skip"` skips. If more rows can't be read, the run ends with an
            error. A value below 1 is a share of the dataset's rows, or for a stream of 1,000 rows.
        media_rules (`dict[str, Any]` or `str`, *optional*):
            Allowed sources and sizes of media, by fields of [`~data.reading.rules.MediaRules`]; JSON on a command
            line, such as `{"allowed_media_folders": ["/data"], "max_audio_seconds": 60}`. Other fields keep their
            defaults.
        media_dir (`str`, *optional*):
            Folder that relative paths of media in rows start from. By default the working directory. Files must be in
            the `allowed_media_folders` of `media_rules` all the same.
        min_pixels (`int`, *optional*):
            Images, and frames of videos, with fewer pixels are enlarged to this many. By default, the processor
            decides. A value in a content block wins over this option. The same holds for `max_pixels`, `video_fps` and
            `max_frames`.
        max_pixels (`int`, *optional*):
            Images, and frames of videos, with more pixels are made smaller before their tokens are counted.
        video_fps (`float`, *optional*):
            Frames per second that are sampled from videos. Lists of frames are used as they are.
        max_frames (`int`, *optional*):
            Largest number of frames of a video. Of a longer video, this many evenly spaced frames are used.
        use_audio_in_video (`bool`, *optional*, defaults to `False`):
            Whether the model hears the sound of a video, interleaved with its frames by the processor, as for Qwen's
            Omni models. Of a video without sound, the model gets only the frames.

    Raises:
        ValueError: If arguments are out of range. The message names them and the remedy.
    """

    max_tokens_per_microbatch: Annotated[int | None, "[1, inf]"] = None
    freeze: list[str] | None = None
    learning_rates: dict | str | None = None
    audio_overlong: Literal["raise", "truncate"] = "raise"
    ignored_media_columns: list[str] | None = None
    special_tokens_in_text: Literal["allow", "raise", "strip"] | None = None
    media_prefetch: Annotated[int, "[0, inf]"] = 1
    on_media_error: Literal["raise", "skip"] = "raise"
    max_skipped_rows: Annotated[float, "[0, inf)", Needs(on_media_error="skip")] = 0.1
    media_rules: dict | str | None = None
    media_dir: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    video_fps: float | None = None
    max_frames: int | None = None
    use_audio_in_video: bool = False

    takes_prompt_learning = False  # whether the trainer scores rows with PEFT's virtual tokens before the prompt
    # The method's part of the table of options
    _annotations: ClassVar[dict[str, Any]] = {}  # of TRL's options
    _unused: ClassVar[dict[str, Unused]] = {}
    _conflicts: ClassVar[tuple[Callable[[Any], Conflicts], ...]] = ()

    def __post_init__(self):
        # transformers reads these fields from JSON, too
        self._VALID_DICT_FIELDS = [*self._VALID_DICT_FIELDS, "learning_rates", "media_rules"]
        check_json(self, self._VALID_DICT_FIELDS)
        # TRL sets defaults under deprecated names, such as `gradient_checkpointing`. Newer versions of transformers
        # warn of them unless the new names are set
        for suffix in ("checkpointing", "checkpointing_kwargs"):
            if getattr(self, f"activation_{suffix}", False) is None:
                setattr(self, f"activation_{suffix}", getattr(self, f"gradient_{suffix}"))
        check_values(self)
        check_padding(getattr(self, "pad_to_multiple_of", "auto"))
        check_trackers(self.report_to)
        self.report_to = [*tracker_names(self.report_to)]
        warn_of_rates(self)
        settle_unused(self, SPEED_OPTIONS, logger.warning)
        if self.ddp_find_unused_parameters is None:
            # The loss reaches all trained weights. DDP would search for others in each step, and warn of finding none
            self.ddp_find_unused_parameters = False
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # without an accelerator, torch would only warn
        has_bf16 = is_torch_bf16_gpu_available() or is_torch_xla_available()
        lacks_bf16 = False
        if self.bf16 is None and not (self.fp16 or self.use_cpu or has_bf16):
            # TRL's default is `True`, which transformers refuses here
            self.bf16 = False
            lacks_bf16 = True
        if self.bf16 and not (self.use_cpu or has_bf16):
            raise ValueError(
                "`bf16=True` needs a device that computes in bfloat16, and none is here; leave `bf16` out to train in "
                "float32, or set `use_cpu=True` to compute in bfloat16 on the CPU, which is slow."
            )
        super().__post_init__()
        if lacks_bf16 and self.mixed_precision == "no":
            main_logger.warning(
                "No device here computes in bfloat16, so `bf16` is set to `False`: the run uses float32."
            )
        elif lacks_bf16:
            main_logger.warning(
                f"No device here computes in bfloat16, but the launch has `mixed_precision={self.mixed_precision!r}`, "
                "which the run uses; it is slow. Launch with `--mixed_precision no` for float32."
            )
        settle_unused(self, self._unused, main_logger.warning_once)
        for name in ("model", "teacher_model", "value_model"):
            check_dtype(f"{name}_init_kwargs", getattr(self, f"{name}_init_kwargs", None))
        if self.fp16 and self.device.type == "cpu":
            raise ValueError(
                "`fp16=True` needs a GPU, and this run is on the CPU; set `fp16=False`. `bf16=True` with "
                "`use_cpu=True` computes in bfloat16 there."
            )
        self.freeze = as_names(self.freeze)
        self.learning_rates = as_rates(self.learning_rates)
        check_ignored(self.ignored_media_columns)
        _ = self.rules  # the property raises an error for invalid settings

    @property
    def order_seed(self) -> int:
        """The seed of the order of rows."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def rules(self) -> MediaRules:
        """Allowed sources and sizes of media, and their budgets."""
        return rules_of(self.media_rules, **{name: getattr(self, name) for name in OPTION_NAMES})

    def __setattr__(self, name: str, value: Any):
        # The config is saved and published with the model. Code that loads a model by these options reveals them
        super().__setattr__(name, secured(value) if _OF_LOADERS.search(name) else value)

    def __getstate__(self):
        # Also saved and published. transformers reads this token from the config, so it can't be a `Secret`
        return {**self.__dict__, "hub_token": None}

    # Copies in this process keep the token, which `__getstate__` hides
    def __copy__(self):
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __deepcopy__(self, memo):
        copied = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


@help_from_docstring
@dataclass(init=False, repr=False, eq=False)
class SamplingArguments(MediaArguments):
    r"""
    Arguments about sampling and packing, for a TRL config to inherit, in addition to those of [`MediaArguments`].

    Parameters:
        > Parameters that control the packing

        packing (`str`, *optional*, defaults to `"prefix"`):
            How completions are scored and trained on. `"prefix"` forwards each prompt and its media once for all its
            completions, with the same result. It falls back to padded rows, with a message for a model whose
            completions can't share a prompt, and silently for a generation batch that gains nothing. `"padded"` uses
            one padded row per completion, as TRL does.
        packing_shuffle (`bool`, *optional*, defaults to `False`):
            Whether to shuffle completions as TRL does, with TRL's random numbers, so that fewer completions of a
            micro-batch share a prompt. Otherwise, micro-batches hold whole groups, with about equal packed lengths.

        > Parameters that control the media

        max_tool_media (`int`, *optional*):
            Largest number of images, sounds and videos that tools may return within a completion. A result with more
            media is left out, and the completion ends with the call, as with a result that exceeds the length of the
            completion. `None` allows any number.
        max_context_media (`int`, *optional*):
            Largest number of images, sounds and videos that the policy reads at a time while it calls tools, such as
            the last screenshots of an agent. If more media precede a turn, the first ones are removed from the
            conversation, prompt included, and the rest becomes the context of the next tokens. Each token is scored in
            the context in which it was sampled, and a completion counts once, whatever its contexts. `None` keeps all
            media.

        > Parameters that control the model

        disable_dropout (`bool`, *optional*):
            Whether to turn off dropout. `None` turns it off outside the language model, and keeps batch norms there
            at their running statistics, so that sampling, scoring and training see the same features; `True` turns
            off all dropout, as TRL does; `False` leaves the model as it is.

        > Parameters that control generation

        offload_during_generation (`bool`, *optional*, defaults to `False`):
            Whether optimizer states, gradients, the reference, PPO's critic and the average of weights, and with
            `vllm_mode="colocate"` also the model, move to the host's memory while completions are sampled. Set
            `vllm_enable_sleep_mode=True` with it, so that vLLM and the update take turns on the GPU. Updates stay the
            same bit for bit.

        > Parameters that control vLLM

        vllm_engine_kwargs (`dict[str, Any]` or `str`, *optional*):
            Extra arguments for `vllm.LLM`, which override TRL's; JSON on a command line. For a server, only
            `enable_lora` is allowed here; other arguments go to the command that starts the server. `max_model_len`
            and `vllm_max_model_length` exclude each other. With `{"enable_lora": true}`, the default for 4-bit
            weights, vLLM gets only the LoRA adapter at each sync. With `false`, it gets all weights, with the adapter
            merged into them. In both cases, vLLM holds 4-bit weights dequantized, and rounds nothing to 4 bits. A
            server with `enable_lora` loads the adapter from a folder within `output_dir`, so it must see the folder
            under the same path.
        vllm_server_base_url (`str`, *optional*):
            Address of the server with `vllm_mode="server"`, or addresses of several servers, separated by commas. With
            two servers, process 0 asks the first one, process 1 the second one, process 2 the first one, and so on.
            With `max_staleness`, each process spreads its requests over all servers. All servers get the weights.

        > Parameters that control the logging

        media_contribution_steps (`int`, *optional*, defaults to `10`):
            Number of optimizer steps between measurements of the metric `media/contribution`: how far the
            log-probabilities of completions move, in nats per token, when sounds of their prompts become silent, and
            images and videos grey. A measurement takes two forwards of two completions, of two prompts. The metric is
            a moving average, in which the latest measurement weighs 0.3. 0 measures nothing.
        num_completions_to_print (`int`, *optional*, defaults to `4`):
            Number of completions that `log_completions` prints with `rich`; `None` prints all of a batch.

        > Parameters that control the checks

        self_check (`bool`, *optional*, defaults to `True`):
            Whether to measure, on the first batch and before the first update, that packed and padded forwards agree,
            that the media change the log-probabilities, that prompts in one row don't see each other, and that
            recomputed log-probabilities are the same as in sampling.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    packing: Literal["prefix", "padded"] = "prefix"
    packing_shuffle: bool = False
    max_tool_media: Annotated[int | None, "[0, inf]"] = None
    max_context_media: Annotated[int | None, "[1, inf]"] = None
    disable_dropout: bool | None = None
    offload_during_generation: bool = False
    vllm_engine_kwargs: dict | str | None = None
    vllm_server_base_url: str | None = None
    media_contribution_steps: Annotated[int, "[0, inf]"] = 10
    num_completions_to_print: int | None = 4
    self_check: bool = True

    if TYPE_CHECKING:  # fields of TRL's configs
        generation_batch_size: int | None = None
        steps_per_generation: int | None = None
        use_vllm: bool = False
        vllm_mode: str = "colocate"
        vllm_max_model_length: int | None = None
        generation_kwargs: dict | None = None
        min_p: float | None = None

    needs_rewards = True  # whether completions must be rewarded
    reads_steps = False  # whether advantages depend on the positions of rewards in a completion, not only on their sum
    ratio_level = ""  # the only level of ratios to a sampler that the loss takes, if there is one
    beta_is_kl = True  # whether `beta` is the coefficient of a divergence from a reference
    teacher_columns: ClassVar[Sequence[str]] = ()  # columns of rows that only a teacher reads
    encodes_teacher_prompts = False  # whether they are encoded with the rows
    keeps_decoded = False  # whether decoded media are kept after sampling, for a teacher on a server
    max_staleness = 0  # number of generation batches that are sampled before they are due

    _unused = UNUSED_IN_SAMPLING
    _conflicts = (conflicts_of_engine,)

    def __post_init__(self):
        # transformers reads this field from JSON, too
        self._VALID_DICT_FIELDS = [*self._VALID_DICT_FIELDS, "vllm_engine_kwargs"]
        batch_names = batch_options(self)  # before TRL fills in options
        try:
            super().__post_init__()
        except ValueError:
            if hasattr(self, "distributed_state"):  # set before TRL checks batches, so the error may be about them
                check_batches(self, batch_names)
            raise
        # `None` skips the check of names, since vLLM has other options than transformers
        check_generation_kwargs(self, None if self.use_vllm else {*vars(GenerationConfig())})
        for name in getattr(self, "chat_template_kwargs", None) or ():
            if name in _TEMPLATE_ARGUMENTS:
                raise ValueError(f"`chat_template_kwargs` has {name!r}, which the trainer sets itself; remove it.")


@help_from_docstring
@dataclass(init=False, repr=False, eq=False)
class MultimodalArguments(SamplingArguments):
    r"""
    Arguments about prompts with rewards, for a TRL config to inherit, in addition to those of [`SamplingArguments`].

    Parameters:
        > Parameters that control which prompts are sampled and trained on

        dynamic_sampling (`int`, *optional*, defaults to `0`):
            Largest number of times to sample for one batch, with other prompts each time, until the batch is full of
            groups with different rewards, see [DAPO](https://huggingface.co/papers/2503.14476). 0 samples once, and
            keeps all groups.
        dynamic_sampling_range (`list[float]`, *optional*):
            Range (min, max), such as `[0.1, 0.9]` in [MM-EUREKA](https://huggingface.co/papers/2503.07365). Dynamic
            sampling and replay treat a group like one with equal rewards unless its mean reward is above min and below
            max.
        dynamic_sampling_reward (`str`, *optional*):
            Name of the reward function whose mean `dynamic_sampling_range` bounds and `difficulty_sampling` measures.
            By default, the range bounds the weighted sum of all functions, and the first function measures the
            difficulty.
        replay_buffer_size (`int`, *optional*, defaults to `0`):
            Number of past groups with different rewards that each process keeps in CPU memory, to replace groups with
            equal rewards. Groups are kept for 8 optimizer steps. 0 keeps none.
        difficulty_sampling (`bool`, *optional*, defaults to `False`):
            Whether to draw a row more often, the closer the share of its right completions is to a half, see
            [`~data.rows.difficulty.DifficultySampler`] and
            [GLM-4.1V-Thinking](https://huggingface.co/papers/2507.01006). The run itself measures the shares. A column
            `pass_rate` of the dataset, as `trl-multimodal-rft filter` writes it, gives the shares before the first
            measurement.

        > Parameters that control when prompts are sampled, see `docs/vllm.md`

        max_staleness (`int`, *optional*, defaults to `0`):
            Number of generation batches by which servers sample ahead of the update, with `vllm_mode="server"`. With
            2, servers sample batch 3 while the batches 1 and 2 are trained on. 0 samples a batch when it is needed.
        vllm_importance_sampling_mode (`str`, *optional*):
            Treatment of ratios of the policy to vLLM that are out of bounds, one of TRL's modes. Defaults to
            `"sequence_mask"`, as in TRL, or with `max_staleness` to `"token_truncate"`, and for losses with one ratio
            per completion (RLOO and `"gmpo"`) to `"sequence_truncate"`.

        > Parameters that control the rank on which prompts are trained on

        balance_ranks (`bool`, *optional*, defaults to `False`):
            Whether ranks exchange whole groups before the update, prompts and media included, so that packed lengths
            are about equal on all ranks, and no rank waits for another. The metric `packing/rank_imbalance` shows the
            possible gain. The global batch, and so the update, stays the same.

        > Parameters that control views in sampling, see `docs/views.md`

        rollout_view (`str`, *optional*):
            View of the media from which a part of each group is sampled in training, such as
            `"diffusion_noise(step=500)"`, see [NoisyRollout](https://huggingface.co/papers/2504.13055). All
            completions are scored, rewarded and trained on with the original media. Prompts without media for the view
            are sampled as they are. vLLM's log-probabilities of completions from the view depend on the view, so no
            importance ratio corrects them. Further settings are `fraction` (0.5), the share of a group, rounded down,
            that is sampled from the view (its last completions), and `schedule`, the strength of the view over the
            run: `'constant'`, `'linear'` down to 0, or NoisyRollout's decay `'sigmoid(midpoint=0.66, steepness=30)'`,
            whose midpoint is a share of the run.
        contrast_view (`str`, *optional*):
            View of the media from which further completions are sampled in training, such as `"shuffle_frames"`, see
            T-GRPO in [Video-R1](https://huggingface.co/papers/2503.21776). They are rewarded by the first reward
            function and not trained on. Prompts without media for the view have no such completions. Further settings
            are `fraction` (0.5), the number of further completions of a group, as a share of its size, rounded down;
            `bonus` (0.3), which is added to the rewards of a group's right completions; and `reward_ratio` (0.8): the
            bonus needs a mean reward of the group of at least this many times the mean reward of its further
            completions. Both means are of the first reward function, which gives right completions more than 0.1.

        > Parameters that control speech and held-out rewards, see `docs/speech.md`

        speech_decoder (`str` or `Callable`, *optional*):
            Decoder of completions that are codes of an audio codec. Reward functions then get `completion_audio`: for
            each completion a dictionary with the samples (`"array"`), the `"sampling_rate"`, the number of `"frames"`
            and of `"dropped_frames"`, or `None` if the completion is empty, cut off or can't be decoded. The name of a
            codec of transformers with `decode(audio_codes)`, such as `"HKUSTAudio/xcodec2-hf"`, which isn't trained,
            or a function, by its dotted path on a command line. The function gets the codes of a completion, and
            returns the samples and the sampling rate, such a dictionary, or `None`.
        speech_tokens (`str`, *optional*):
            The tokens that stand for codes: their form, with `{}` for the code, or the id of the first one and their
            number, such as `"128266, 28672"`. By default `"<|s_{}|>"`. Of a codec with several codebooks, the codes of
            a frame follow one another, and those of the second codebook begin where those of the first one end.
        sample_only (`str`, *optional*):
            `"speech"` samples only `speech_tokens` and ends of text.
        held_out_rewards (`list[str]`, *optional*):
            Names of reward functions that aren't trained on, such as a second recognizer of speech. Their weights are
            0, their means are logged as `held_out_rewards/<name>/mean`, and a warning says if one falls while the
            reward rises.

    Raises:
        ValueError: If arguments are out of range, contradict each other or have no effect. The message names them and
            the remedy.
    """

    dynamic_sampling: Annotated[int, "[0, inf]"] = 0
    dynamic_sampling_range: Annotated[
        list[float] | None, Ascending(), Needs("dynamic_sampling", "replay_buffer_size")
    ] = None
    dynamic_sampling_reward: Annotated[str | None, Needs("dynamic_sampling_range", "difficulty_sampling")] = None
    replay_buffer_size: Annotated[int, "[0, inf]"] = 0
    difficulty_sampling: bool = False
    max_staleness: Annotated[int, "[0, inf]"] = 0
    vllm_importance_sampling_mode: (
        Literal["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"] | None
    ) = None
    balance_ranks: bool = False
    rollout_view: str | None = None
    contrast_view: str | None = None
    speech_decoder: str | None = None
    speech_tokens: Annotated[str | None, Needs("speech_decoder", "sample_only")] = None
    sample_only: Literal["speech"] | None = None
    held_out_rewards: list[str] | None = None

    _conflicts = (conflicts_of_engine, conflicts_of_staleness, conflicts_of_views, conflicts_of_groups)

    def __post_init__(self):
        if self.load_best_model_at_end and self.metric_for_best_model is None:
            if self.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy"):
                raise ValueError(
                    "With this `lr_scheduler_type`, the learning rate follows the metric of `load_best_model_at_end`. "
                    "Set `metric_for_best_model` to 'loss', or to 'reward' with `lr_scheduler_kwargs={'mode': 'max'}`."
                )
            self.metric_for_best_model = "reward"
            self.greater_is_better = True
            logger.warning(
                "`load_best_model_at_end` loads the checkpoint with the highest `eval_reward`, since the loss of a "
                "policy gradient doesn't tell which checkpoint is best. To use another metric, set "
                "`metric_for_best_model`."
            )
        super().__post_init__()
        if self.vllm_importance_sampling_mode is None:
            stale_mode = "sequence_truncate" if self._weighs_completions else "token_truncate"
            self.vllm_importance_sampling_mode = stale_mode if self.max_staleness > 0 else "sequence_mask"

    def to_dict(self):
        """Returns the options as in transformers, with a function as its name."""
        return {**super().to_dict(), "speech_decoder": spelling_of(self.speech_decoder)}

    def __getstate__(self):
        # A function may not be picklable, and loading a name runs no code
        return {**super().__getstate__(), "speech_decoder": spelling_of(self.speech_decoder)}

    @property
    def rollout_view_settings(self) -> RolloutView:
        """The view from which a share of each group is sampled, with its settings."""
        return view_option(RolloutView, "rollout_view", self.rollout_view)

    @property
    def contrast_view_settings(self) -> ContrastView:
        """The view from which further completions are sampled for contrast, with its settings."""
        return view_option(ContrastView, "contrast_view", self.contrast_view)

    @property
    def compares_groups(self) -> bool:
        """`True` if advantages compare the completions of a prompt."""
        return True

    @property
    def _weighs_completions(self) -> bool:
        """`True` if the loss takes one weight per completion."""
        return True
