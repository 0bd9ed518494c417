# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The values of TRL's options that come to something else here than in TRL, as data.

`test_differences.py` compares each entry with what happens, and `make fix` writes them into
`docs/compare.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


REFUSED = "refused here"
DIFFERS = "takes effect differently"
ACCEPTED = "accepted here alone"
ANY = ("*",)
NAN = math.nan


@dataclass(frozen=True)
class Difference:
    """
    An entry: the trainers, options and values that it is about, what comes of them here, and why.

    `values` of `None` are all values that run, `rows` of `None` all kinds of rows. `size` is how much results differ
    in the tests' runs, `as_trl` what does as TRL.
    """

    trainers: tuple[str, ...]
    options: tuple[str, ...]
    values: tuple[Any, ...] | None
    outcome: str
    what: str
    why: str
    size: str = ""
    as_trl: str = ""
    rows: str | None = None

    def matches(self, trainer: str, option: str, value: Any, rows: str) -> bool:
        return (
            (self.trainers == ANY or trainer in self.trainers)
            and (self.options == ANY or option in self.options)
            and (self.values is None or repr(value) in map(repr, self.values))
            and self.rows in (None, rows)
        )


def difference_of(trainer: str, option: str, value: Any, rows: str) -> Difference | None:
    """Returns the entry about a value, if there is one."""
    for entry in DIFFERENCES:
        if entry.matches(trainer, option, value, rows):
            return entry
    return None


SAMPLING = ("grpo", "rloo", "ppo", "distillation")
READING = ("sft", "dpo", "kto", "reward")
WITH_REWARDS = ("grpo", "rloo", "ppo")
ONE_ROUNDING = "the trainers round in another order, and bfloat16 keeps 8 bits"
NOT_FINITE = "the loss, the weights or the completions would be NaN or without sense, and the run would go on"
NO_LAYOUT = "a layout of batches that changes no result; the trainer has its own, says so and sets the neutral value"
IMAGES_CUT = "a cut row has fewer placeholders than its image has features"

# Results that differ
OF_RESULTS = [
    Difference(
        ANY,
        ("max_steps",),
        (0,),
        DIFFERS,
        "no step is made",
        "transformers makes the step, and then looks whether it was one too many",
        "one step",
    ),
    Difference(
        ANY,
        ("bf16",),
        (True,),
        DIFFERS,
        "other rounding",
        ONE_ROUNDING,
        "1e-2 of an update in bfloat16, 1e-6 in float32",
        "`bf16=False`",
    ),
    Difference(
        ANY,
        ("model_init_kwargs",),
        ({"dtype": "bfloat16"},),
        DIFFERS,
        "other rounding",
        ONE_ROUNDING,
        "2e-2 to 7e-2 of an update",
        "`model_init_kwargs={'dtype': 'float32'}`",
    ),
    Difference(
        ("grpo", "ppo"),
        ("cast_lm_head_to_fp32",),
        (True,),
        DIFFERS,
        "other rounding below the head, which is in float32",
        ONE_ROUNDING,
        "5e-2 of an update of weights in bfloat16",
    ),
    Difference(
        ("grpo", "ppo"),
        ("top_entropy_quantile",),
        (0.5,),
        DIFFERS,
        "the entropies of the policy that sampled choose the tokens, among all of a generation batch",
        "the choice is the same in all updates on a generation batch, however it is split",
        "5e-3 of an update",
        "`entropy_source=\"current(scope='micro_batch')\"`",
    ),
    Difference(
        ("grpo", "ppo", "distillation"),
        ("log_completions",),
        (True,),
        DIFFERS,
        "tables of completions are in `_private/completions`",
        "they hold prompts and media, and what begins with `_` isn't pushed to the Hub",
        "names of files",
    ),
    Difference(
        ("grpo", "ppo", "distillation"),
        ("num_completions_to_print",),
        None,
        DIFFERS,
        "as with `log_completions`",
        "as with `log_completions`",
        "names of files",
    ),
    Difference(
        ("grpo", "ppo", "distillation"),
        ("log_unique_prompts",),
        (True,),
        DIFFERS,
        "as with `log_completions`",
        "as with `log_completions`",
        "names of files",
    ),
    Difference(
        ("kto",),
        ("per_device_eval_batch_size",),
        (2,),
        DIFFERS,
        "the KL estimate of an evaluation pairs rows of a batch, or of parts of it as large as a training batch",
        "TRL pairs rows before the run, in parts as large as a training batch",
        "`eval_kl` and `eval_loss`, if batches of the evaluation are smaller",
        "`per_device_eval_batch_size`, a multiple of `per_device_train_batch_size`",
    ),
    Difference(
        ("sft", "dpo", "kto"),
        ("max_length",),
        (38,),
        DIFFERS,
        "rows with media are never cut",
        IMAGES_CUT,
        "all of a cut row",
        rows="images",
    ),
    Difference(
        ("sft", "dpo"),
        ("truncation_mode",),
        ("keep_start",),
        DIFFERS,
        "as with `max_length`",
        IMAGES_CUT,
        "all of a cut row",
        rows="images",
    ),
    Difference(
        ("sft",),
        ("shuffle_dataset",),
        (True,),
        DIFFERS,
        "rows with images are shuffled, too",
        "TRL shuffles where it tokenizes, and leaves rows with images as they are",
        "the order of rows",
        "`shuffle_dataset=False`",
        rows="images",
    ),
    Difference(
        ("dpo",),
        ("label_smoothing",),
        (0.5,),
        DIFFERS,
        "with `loss_type='robust'`, which divides by 0, updates are left out and counted",
        "TRL writes NaN into the weights, and the run goes on",
        "`skipped_updates`",
    ),
]

OTHER_NUMBERS = "random numbers are drawn for the rows of a forward, which are laid out in another way"
OF_RESULTS += [
    Difference(
        ("sft",),
        ("neftune_noise_alpha",),
        (5.0,),
        DIFFERS,
        "other noise of the same size",
        OTHER_NUMBERS,
        "the noise itself",
    ),
    Difference(
        ANY,
        ("disable_dropout",),
        (False,),
        DIFFERS,
        "other masks, with the same share of zeros",
        OTHER_NUMBERS,
        "the masks themselves",
        "`disable_dropout=True` in both",
    ),
]

# Options of layout, which have no effect here
OF_LAYOUT = [
    Difference(
        READING,
        ("dataset_num_proc",),
        (1,),
        DIFFERS,
        "no effect, and a warning",
        "rows are encoded when they are read, by `dataloader_num_workers` processes",
        "none",
    ),
    Difference(
        ("dpo",), ("padding_free",), (True,), DIFFERS, "no effect, and a warning", NO_LAYOUT, "none", "`packing`"
    ),
    Difference(
        READING, ("pad_to_multiple_of",), (16,), DIFFERS, "no effect, and a warning", NO_LAYOUT, "none", rows="text"
    ),
    Difference(
        READING,
        ("include_num_input_tokens_seen",),
        None,
        DIFFERS,
        "no effect, and a warning",
        "the metric `num_tokens` counts them",
        "`num_input_tokens_seen` isn't logged",
    ),
    Difference(
        ("kto",),
        ("precompute_ref_batch_size",),
        (1,),
        DIFFERS,
        "no effect, and a warning",
        "the KL estimate pairs rows of a training batch, which the reference scores as they are trained",
        "none",
    ),
    Difference(
        ANY,
        ("dataloader_in_order",),
        (False,),
        DIFFERS,
        "no effect, and a warning",
        "rows come in the order of the sampler, so that a run can be repeated",
        "none",
    ),
]

# Values that are errors here
NOT_NAN = (
    *("beta", "center_rewards_coefficient", "delta", "desirable_weight", "discopop_tau", "entropy_coef"),
    *("entropy_coef_delta", "entropy_coef_max", "entropy_coef_min", "entropy_target", "epsilon", "epsilon_high"),
    *("f_alpha_divergence_coef", "label_smoothing", "ld_alpha", "learning_rate", "off_policy_mask_threshold"),
    *("ref_model_mixup_alpha", "router_aux_loss_coef", "sapo_temperature_neg", "sapo_temperature_pos"),
    *("top_entropy_quantile", "top_p", "undesirable_weight", "vespo_k_neg", "vespo_k_pos", "vespo_lambda_neg"),
    *("vespo_lambda_pos", "vllm_gpu_memory_utilization", "vllm_importance_sampling_clip_max"),
    *("vllm_importance_sampling_clip_min", "weight_decay"),
)
NOT_NEGATIVE = (
    *("center_rewards_coefficient", "delta", "desirable_weight", "discopop_tau", "epsilon", "epsilon_high"),
    *("label_smoothing", "ld_alpha", "num_train_epochs", "off_policy_mask_threshold", "ref_model_mixup_alpha"),
    *("router_aux_loss_coef", "sapo_temperature_neg", "sapo_temperature_pos", "undesirable_weight", "vespo_k_neg"),
    *("vespo_k_pos", "vespo_lambda_neg", "vespo_lambda_pos", "vllm_gpu_memory_utilization"),
    *("vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min", "weight_decay"),
)
ABOVE_ZERO = (
    *("eval_accumulation_steps", "gradient_accumulation_steps", "ref_model_sync_steps"),
    *("vllm_max_model_length", "vllm_tensor_parallel_size"),
)
OF_ERRORS = [
    Difference(
        ANY,
        ANY,
        ("False",),
        REFUSED,
        "an error",
        'TRL reads the text "False" of a switch as true',
    ),
    Difference(ANY, NOT_NAN, (NAN,), REFUSED, "an error", NOT_FINITE),
    Difference(ANY, NOT_NEGATIVE, (-1.0,), REFUSED, "an error", "the option has a meaning from 0 on"),
    Difference(
        WITH_REWARDS + ("dpo", "kto"),
        ("beta",),
        (-1.0,),
        REFUSED,
        "an error",
        "a negative weight would drive the policy away from the reference without bound",
    ),
    Difference(
        ("grpo", "ppo"),
        ("vllm_importance_sampling_mode",),
        ("token_truncatex",),
        REFUSED,
        "an error",
        "an unknown word, which TRL reads only with an engine",
    ),
    Difference(ANY, ABOVE_ZERO, (-1,), REFUSED, "an error", "a count from 1 on"),
    Difference(SAMPLING, ("pad_to_multiple_of",), (-1,), REFUSED, "an error", "a number above 0"),
    Difference(READING, ("pad_to_multiple_of",), (-1,), REFUSED, "an error", "a number above 0", rows="text"),
    Difference(
        ("sft", "dpo", "kto"),
        ("dataset_num_proc",),
        (-1,),
        REFUSED,
        "an error",
        "a number of processes, which TRL doesn't read with images",
        rows="images",
    ),
    Difference(WITH_REWARDS, ("num_generations_eval",), (0,), REFUSED, "an error", "a count from 1 on"),
    Difference(("grpo", "rloo"), ("num_iterations",), (0,), REFUSED, "an error", "a count from 1 on"),
    Difference(("dpo", "kto"), ("precompute_ref_batch_size",), (0,), REFUSED, "an error", "a count from 1 on"),
    Difference(
        ANY,
        ("top_p",),
        (0.0, 1.5),
        REFUSED,
        "an error",
        "a probability above 0, up to 1",
    ),
    Difference(ANY, ("delta",), (0.0,), REFUSED, "an error", "ratios are above 0"),
    Difference(ANY, ("ref_model_mixup_alpha",), (1.5,), REFUSED, "an error", "a share"),
    Difference(
        ("rloo",),
        ("reward_clip_range",),
        ((3.0, 1.0), (NAN, 1.0)),
        REFUSED,
        "an error",
        "all rewards would be the largest, or NaN",
    ),
    Difference(ANY, ("reward_weights", "loss_weights"), ([NAN, 1.0],), REFUSED, "an error", NOT_FINITE),
    Difference(
        ("sft", "kto"),
        ("max_length",),
        (-1,),
        REFUSED,
        "an error",
        "TRL cuts the last token of each row",
    ),
    Difference(
        ("dpo",),
        ("max_length",),
        (-1,),
        REFUSED,
        "an error",
        "TRL cuts the last token of each row",
        rows="images",
    ),
    Difference(
        ("kto",),
        ("max_length",),
        (0, 3),
        REFUSED,
        "an error",
        "no row has a token to learn, and TRL trains on nothing",
        rows="text",
    ),
    Difference(
        ("sft", "dpo"),
        ("truncation_mode",),
        ("keep_endx",),
        REFUSED,
        "an error",
        "a wrong word, which TRL doesn't read with images",
        rows="images",
    ),
    Difference(
        WITH_REWARDS + ("distillation",),
        ("generation_kwargs",),
        ({"max_new_tokensx": 4},),
        REFUSED,
        "an error",
        "no option of `generate`; a run of TRL ignores it",
    ),
    Difference(SAMPLING, ("vllm_mode",), ("colocatex",), REFUSED, "an error", "a wrong word"),
    Difference(
        ("grpo", "sft"),
        ("train_sampling_strategy", "report_to"),
        ("randomx", "tensorboardx"),
        REFUSED,
        "an error",
        "a wrong word",
    ),
    Difference(
        ANY,
        ("fp16",),
        (True,),
        REFUSED,
        "an error without a GPU",
        "float16 and its scaler need a GPU",
        as_trl="`fp16=False`",
    ),
    Difference(
        READING,
        ("label_smoothing_factor",),
        (0.1, -1.0, NAN),
        REFUSED,
        "an error",
        "the losses here have no labels to smooth; DPO's own option is `label_smoothing`",
    ),
    Difference(
        ("sft",),
        ("train_sampling_strategy",),
        ("group_by_length",),
        REFUSED,
        "an error",
        "lengths aren't known before rows are read",
        as_trl="`max_tokens_per_microbatch` bounds the tokens of a forward",
    ),
    Difference(
        ("sft",),
        ("dataset_kwargs",),
        ({"x": 1},),
        REFUSED,
        "an error",
        "an entry that nothing reads, neither here nor in TRL",
    ),
    Difference(
        ("ppo",),
        ("num_iterations",),
        (2, 0),
        REFUSED,
        "an error",
        "PPO's own option says how often a batch is trained on",
        as_trl="`num_ppo_epochs`",
    ),
    Difference(
        ("distillation",),
        ("auto_find_batch_size",),
        (True,),
        REFUSED,
        "an error, as in GRPO",
        "completions are sampled for batches of a size",
    ),
]

# Values that TRL refuses
OF_MORE = [
    Difference(
        ("dpo", "kto"),
        ("precompute_ref_log_probs",),
        (True,),
        ACCEPTED,
        "the reference scores rows with images before the run",
        "TRL's can't, since it encodes images in each batch",
        rows="images",
    ),
    Difference(
        ("sft",),
        ("packing",),
        (True,),
        ACCEPTED,
        "rows with images are packed",
        "TRL packs texts alone",
        rows="images",
    ),
    Difference(
        ("sft",),
        ("padding_free",),
        (True,),
        ACCEPTED,
        "no effect, and a warning",
        NO_LAYOUT + ". TRL has it with `packing` alone",
    ),
    Difference(
        ("sft", "dpo", "kto"),
        ("pad_to_multiple_of",),
        (16,),
        ACCEPTED,
        "no effect, and a warning",
        NO_LAYOUT + ". TRL has it for texts alone",
        rows="images",
    ),
    Difference(
        ("sft", "dpo", "kto"),
        ("max_length",),
        (3,),
        ACCEPTED,
        "rows with media are never cut",
        "TRL ends at the first cut image",
        rows="images",
    ),
    Difference(
        ("sft",),
        ("assistant_only_loss",),
        (True,),
        ACCEPTED,
        "the assistant's tokens are found by rendering the turns one by one",
        "TRL needs a template with `generation` blocks",
        rows="images",
    ),
    Difference(
        ("sft",),
        ("dataset_kwargs",),
        ({"skip_prepare_dataset": True},),
        ACCEPTED,
        "rows are encoded when they are read, with this entry or without",
        "TRL then needs rows of tokens",
    ),
]

OF_MORE += [
    Difference(
        ANY,
        ("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        (True, 2, -1, "fork", "forkx"),
        ACCEPTED,
        "no effect, and a warning",
        "torch refuses them without `dataloader_num_workers`; processes of this package read rows ahead",
        "none",
    ),
    Difference(
        ANY,
        ("use_liger_kernel",),
        (True,),
        ACCEPTED,
        "no effect, and a warning",
        "packed rows need this package's forward; `torch_compile=True` fuses the same operations",
        "none; without the package `liger-kernel`, TRL raises an error",
    ),
    Difference(
        SAMPLING,
        ("neftune_noise_alpha",),
        (5.0,),
        REFUSED,
        "an error",
        "completions would be sampled by another policy than the one that is trained",
    ),
    Difference(
        ("dpo", "kto", "reward"),
        ("neftune_noise_alpha",),
        (5.0,),
        REFUSED,
        "an error with packed rows",
        "the noise depends on the length of a row, which packed rows don't have",
        as_trl="`packing='padded'`, with other noise of the same size",
    ),
    Difference(
        SAMPLING,
        ("train_sampling_strategy",),
        ("sequential", "group_by_length"),
        REFUSED,
        "an error",
        "it has no effect in TRL; `shuffle_dataset` says whether rows are shuffled",
    ),
    Difference(
        SAMPLING,
        ("data_seed",),
        (7, -1),
        DIFFERS,
        "the order of rows follows it",
        "TRL's samplers follow `seed` alone",
        "the order of rows",
        "`data_seed=None`",
    ),
]

DIFFERENCES = [*OF_RESULTS, *OF_LAYOUT, *OF_ERRORS, *OF_MORE]

# Options that change neither results nor files of TRL's runs here, though runs are made: about speed, devices, logs,
# or what these runs haven't got, such as tools
_NOWHERE = """
activation_checkpointing activation_checkpointing_kwargs average_tokens_across_devices batch_eval_metrics
bf16_full_eval dataloader_drop_last dataloader_in_order dataloader_pin_memory disable_tqdm do_eval do_predict
do_train enable_jit_checkpoint eval_accumulation_steps eval_do_concat_batches eval_use_gather_object
fp16_full_eval full_determinism gradient_checkpointing gradient_checkpointing_kwargs ignore_data_skip
include_for_metrics label_names length_column_name liger_kernel_config log_level log_level_replica
log_on_each_node logging_nan_inf_filter metric_for_best_model optim_args optim_target_modules pad_to_multiple_of
prediction_loss_only project remove_unused_columns restore_callback_states_from_checkpoint
resume_from_checkpoint run_name save_on_each_node skip_memory_metrics torch_empty_cache_steps trust_remote_code
use_cache use_cpu
"""
_BY_TRAINER = {
    "grpo": """
    cache_implementation label_smoothing_factor log_multimodal log_unique_prompts
    max_tool_calling_iterations num_completions_to_print train_sampling_strategy
    data_seed dataloader_num_workers include_num_input_tokens_seen
    """,
    "rloo": """
    cache_implementation dataloader_num_workers label_smoothing_factor log_completions log_multimodal
    log_unique_prompts num_completions_to_print train_sampling_strategy
    data_seed include_num_input_tokens_seen
    """,
    "ppo": """
    cache_implementation dataloader_num_workers label_smoothing_factor log_multimodal
    log_unique_prompts max_tool_calling_iterations num_completions_to_print train_sampling_strategy
    data_seed include_num_input_tokens_seen
    """,
    "sft": """
    assistant_only_loss auto_find_batch_size dataset_num_proc eval_packing include_num_input_tokens_seen
    load_best_model_at_end pad_token
    dataloader_num_workers
    """,
    "dpo": """
    auto_find_batch_size dataloader_num_workers dataset_num_proc include_num_input_tokens_seen
    load_best_model_at_end pad_token padding_free precompute_ref_batch_size precompute_ref_log_probs
    """,
    "kto": """
    auto_find_batch_size data_seed dataloader_num_workers dataset_num_proc include_num_input_tokens_seen
    precompute_ref_batch_size precompute_ref_log_probs seed
    """,
    "reward": """
    auto_find_batch_size dataloader_num_workers dataset_num_proc eos_token include_num_input_tokens_seen
    load_best_model_at_end
    pad_token
    """,
    "distillation": """
    bf16 cache_implementation data_seed dataloader_num_workers label_smoothing_factor load_best_model_at_end
    log_unique_prompts max_tool_calling_iterations num_completions_to_print teacher_model_name_or_path
    teacher_model_revision train_sampling_strategy
    include_num_input_tokens_seen
    """,
}
WITHOUT_EFFECT = {name: {*_NOWHERE.split(), *options.split()} for name, options in _BY_TRAINER.items()}
