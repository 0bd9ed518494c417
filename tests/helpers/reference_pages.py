# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What the five pages of the reference system say, where it is here, how it differs, and the test that shows it."""

from typing import NamedTuple


class Row(NamedTuple):
    """A statement of a page."""

    statement: str
    path: str  # of the object in `trl_multimodal_rft.lightrft`, as `module:name`
    here: str  # "same", or how it differs
    test: str  # file and function


ACTORS = [
    Row(
        "loads a path or adopts a model",
        "models.actor_vl:ActorVL",
        "the class that the config names",
        "actors.models_of_a_path",
    ),
    Row("LoRA, target modules found if `None`", "models.actor_vl:ActorVL", "never in a frozen encoder", "actors.lora"),
    Row(
        "`bf16`, `use_flash_attention_2`",
        "models.actor_vl:ActorVL",
        "without it, transformers chooses the attention",
        "actors.bf16",
    ),
    Row("`ds_config`", "models.actor_al:ActorAL", "same", "actors.ds_config"),
    Row("`modality`", "models.actor_al:ActorAL", "same", "reference_api.names_of_lightrft_import"),
    Row(
        "`forward` returns log-probabilities of actions, or also the output",
        "models.actor_vl:ActorVL.forward",
        "same",
        "actors.forward_equals_the_bare_model",
    ),
    Row(
        "`packed_seq_lens`",
        "models.actor_vl:ActorVL.forward",
        "same, with media; prompts are shared",
        "actors.errors_of_packed_samples",
    ),
    Row(
        "`audio_values`",
        "models.actor_al:ActorAL.forward",
        "all frames count without `audio_attention_mask`, or those that placeholders say",
        "actors.the_mask_of_audio_travels",
    ),
    Row(
        "`pixel_values` of `ActorAL` are unused",
        "models.actor_al:ActorAL.forward",
        "same",
        "actors.audio_matters_and_images_do_not_to_an_actor_that_only_hears",
    ),
    Row(
        "`generate` returns sequences and two masks",
        "models.actor_vl:ActorVL.generate",
        "same; never samples placeholders",
        "actors.generate_equals_that_of_transformers",
    ),
    Row(
        "`process_sequences` ends at the first EOS",
        "models.actor_vl:ActorVL.process_sequences",
        "changes no sampled token",
        "actors.response_masks",
    ),
    Row(
        "gradient checkpointing on and off",
        "models.actor_vl:ActorVL.gradient_checkpointing_enable",
        "same",
        "actors.gradient_checkpointing",
    ),
    Row(
        "prints trainable parameters",
        "models.actor_vl:ActorVL.print_trainable_parameters",
        "same",
        "actors.print_trainable_parameters",
    ),
]
BUFFER = [
    Row(
        "fields of an item; `values`, `returns`, `advantages` of shape `(1)`",
        "trainer.replay_buffer_utils:BufferItem",
        "also `(A)`, which GAE needs",
        "replay_buffer.one_number_for_all_actions",
    ),
    Row(
        "fields of an item with images",
        "trainer.replay_buffer_utils:BufferItemVL",
        "same; audio and other media, too",
        "replay_buffer.split_undoes_make",
    ),
    Row(
        "`is_vl_experience`",
        "trainer.replay_buffer_utils:is_vl_experience",
        "by the type, so also with text or audio",
        "replay_buffer.types_hold_media",
    ),
    Row(
        "joins items, padded or packed; empty is a `ValueError`",
        "trainer.replay_buffer_utils:make_experience_batch",
        "same",
        "reference_api.examples_of_buffer_utilities",
    ),
    Row(
        "removes padding on both sides",
        "trainer.replay_buffer_utils:remove_padding_in_sequences",
        "same",
        "replay_buffer.padding_is_removed",
    ),
    Row(
        "splits a batch",
        "trainer.replay_buffer_utils:split_experience_batch",
        "an ambiguous split of media is an error",
        "replay_buffer.split_undoes_make",
    ),
    Row(
        "pads on a side, else an `AssertionError`",
        "trainer.replay_buffer_utils:zero_pad_sequences",
        "same",
        "reference_api.examples_of_buffer_utilities",
    ),
]
MAKER = [
    Row(
        "moves and pins tensors and lists",
        "trainer.experience_maker:to",
        "also dictionaries; `None` stays",
        "replay_buffer.moves_of_everything",
    ),
    Row(
        "weights of groups without variance",
        "trainer.experience_maker:clip_filter_like_weight_func",
        "variance up to rounding",
        "replay_buffer.weights_make_up_for_groups_without_signal",
    ),
    Row("fields of `Experience`", "trainer.experience_maker:Experience", "same", "reference_api.order_of_fields"),
    Row(
        "fields of `Samples`, padded or packed",
        "trainer.experience_maker:Samples",
        "same; a packed one is padded by `make_experience`",
        "experience_maker.packed_samples_are_those_of_padded_ones",
    ),
    Row(
        "attributes of the maker",
        "trainer.experience_maker:NaiveExperienceMaker",
        "same; `strategy` is an `ExperienceConfig`",
        "experience_maker.what_subclasses_read",
    ),
    Row(
        "`tokenize_fn` cuts at `max_length`",
        "trainer.experience_maker:NaiveExperienceMaker.tokenize_fn",
        "at the tokenizer's side, never media; pads on the left",
        "experience_maker.tokenize_fn",
    ),
    Row(
        "`n_samples_per_prompt` completions, in micro-batches",
        "trainer.experience_maker:NaiveExperienceMaker.generate_samples",
        "a prompt is encoded and forwarded once",
        "experience_maker.group_shares_one_encoded_prompt",
    ),
    Row(
        "scores of actor, reference and critic",
        "trainer.experience_maker:NaiveExperienceMaker.make_experience",
        "same; modes of models stay",
        "experience_maker.scores_are_those_of_the_models",
    ),
    Row(
        "a server, or the function of a file, replaces the reward model",
        "trainer.experience_maker:NaiveExperienceMaker",
        "same, unless `reward_fn` or a recipe combines all sources",
        "experience_maker.servers_replace_reward_models",
    ),
    Row(
        "a server gets decoded sequences and prompts",
        "trainer.experience_maker:NaiveExperienceMaker.make_experience",
        "same, and completions, labels, references and media",
        "experience_maker.servers_and_functions_see_one_text",
    ),
    Row(
        "`reward_func(queries, prompts)` of a file",
        "trainer.experience_maker:NaiveExperienceMaker.make_experience",
        "same; a third parameter gets references",
        "experience_maker.reward_files_are_called_by_position",
    ),
    Row(
        "shaping by group",
        "trainer.experience_maker:NaiveExperienceMaker.process_experiences",
        "same in float64; rewards equal up to rounding give 0",
        "reference_numbers.equal_rewards_of_a_group_are_no_advantage",
    ),
    Row(
        "`gae` and `reinforce` raise an error in the shaping",
        "trainer.experience_maker:NaiveExperienceMaker.process_experiences",
        "they keep the rewards",
        "reference_numbers.advantages_and_returns_are_those_of_the_definitions",
    ),
    Row(
        "clip, KL divergence (k1, or k3) and reward of tokens",
        "models.utils:compute_reward",
        "same; `kl_in_reward=False` leaves the divergence out",
        "reference_numbers.no_divergence_in_rewards",
    ),
    Row(
        "discounted returns as advantages",
        "trainer.experience_maker:NaiveExperienceMaker.get_cumulative_returns",
        "same; masked actions between others are skipped",
        "reference_numbers.three_actions_are_discounted",
    ),
    Row(
        "GAE",
        "trainer.experience_maker:NaiveExperienceMaker.get_advantages_and_returns",
        "same; masked actions between others are skipped",
        "reference_api.formulas_of_the_experience_maker",
    ),
    Row(
        "`cpgd` raises an error",
        "trainer.experience_maker:NaiveExperienceMaker.make_experience_list",
        "returns of its rewards; `use_cpg_loss` chooses the loss",
        "reference_numbers.three_actions_are_discounted",
    ),
    Row(
        "`lambd` is ignored by other estimators than `gae`",
        "trainer.experience_maker:NaiveExperienceMaker.make_experience_list",
        "same",
        "reference_numbers.lambda_belongs_to_gae",
    ),
    Row(
        "normalization over all batches",
        "trainer.advantage_calculator:normalize_advantages_cross_batch",
        "same, over all ranks",
        "lightrft_names.advantages_are_those_of_all_batches",
    ),
    Row(
        '`info["return"]`; `kl` and `num_actions` go',
        "trainer.experience_maker:NaiveExperienceMaker.make_experience_list",
        "same",
        "experience_maker.info",
    ),
    Row(
        "`init_logger`, `remote_rm_fn`",
        "utils:remote_rm_fn",
        "same, with the retries and checks of `RemoteReward`",
        "lightrft_names.all_arguments_of_requests_for_rewards",
    ),
]
TRAINER = [
    Row(
        "arguments and defaults",
        "trainer.ppo_trainer_vl:PPOTrainerVL",
        "same; `strategy` is a `MultimodalPPOConfig`",
        "reference_api.signature_is_that_of_the_page",
    ),
    Row(
        "optimizers and schedulers of actor and critic",
        "trainer.ppo_trainer_vl:PPOTrainerVL",
        "same; `None` makes one of both",
        "reference_updates.two_updates_are_those_of_the_loop",
    ),
    Row(
        "`max_norm`",
        "trainer.ppo_trainer_vl:PPOTrainerVL",
        "of each side with two optimizers, else of both",
        "reference_updates.two_updates_are_those_of_the_loop",
    ),
    Row(
        "`ema_model`, `ema_beta`",
        "trainer.ppo_trainer_vl:PPOTrainerVL",
        "filled when `fit` ends; without `ema_model`, the strategy's `ema_decay` saves an average",
        "ppo_reference.average_of_the_weights",
    ),
    Row(
        "`kl_target`, `kl_horizon`",
        "trainer.kl_controller:AdaptiveKLController",
        "the coefficient stays positive",
        "ppo_reference.fit_is_a_run_of_the_trainer",
    ),
    Row(
        "`ptx_coef`",
        "trainer.ppo_trainer_vl:PPOTrainerVL",
        "prompts are masked",
        "ppo_reference.supervised_rows_that_are_missing_or_not_used",
    ),
    Row(
        "`buffer_limit`, `buffer_cpu_offload`",
        "trainer.replay_buffer:NaiveReplayBuffer",
        "same",
        "ppo_reference.limit_of_the_buffer",
    ),
    Row(
        "`save_hf_ckpt`, `disable_ds_ckpt`",
        "trainer.ppo_trainer_vl:PPOTrainerVL",
        "same",
        "ppo_reference.what_a_checkpoint_holds",
    ),
    Row(
        "`fit`",
        "trainer.ppo_trainer_vl:PPOTrainerVL.fit",
        "a run of the trainer's `train`; samples fill whole updates",
        "reference_updates.killed_script_resumes_bit_for_bit",
    ),
    Row("`ppo_train`", "trainer.ppo_trainer_vl:PPOTrainerVL.ppo_train", "same", "ppo_reference.ppo_train"),
    Row(
        "steps of both, of the actor, of the critic; `entropy_mask`",
        "trainer.ppo_trainer_vl:PPOTrainerVL.training_step",
        "one backward pass of both",
        "ppo_reference.one_part_alone",
    ),
    Row(
        "`training_step_actor`",
        "trainer.ppo_trainer_vl:PPOTrainerVL.training_step_actor",
        "same",
        "ppo_reference.one_part_alone",
    ),
    Row(
        "`training_step_critic`",
        "trainer.ppo_trainer_vl:PPOTrainerVL.training_step_critic",
        "same",
        "ppo_reference.one_part_alone",
    ),
    Row(
        "`evaluate`",
        "trainer.ppo_trainer_vl:PPOTrainerVL.evaluate",
        "greedy, each prompt once, nothing changes",
        "ppo_reference.greedy_evaluation_changes_nothing",
    ),
    Row(
        "`save_logs_and_checkpoints`",
        "trainer.ppo_trainer_vl:PPOTrainerVL.save_logs_and_checkpoints",
        "trackers are those of `report_to`",
        "ppo_reference.logs_and_checkpoints_of_a_loop_of_ones_own",
    ),
]
PAGES = {
    "actor_al, actor_vl": ACTORS,
    "replay_buffer_utils": BUFFER,
    "experience_maker": MAKER,
    "ppo_trainer_vl": TRAINER,
}


def table() -> str:
    """Returns the table of all statements."""
    lines = ["| page | what it says | where | here |", "|---|---|---|---|"]
    for page, rows in PAGES.items():
        for row in rows:
            lines.append(
                f"| `{page.replace(', ', '`, `')}` | {row.statement} | `{row.path.split(':')[1]}` | {row.here} |"
            )
    return "\n".join(lines)
