# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The interface of the reference pages: its names and its helpers."""

import dataclasses
import importlib
import inspect

import pytest
import torch
from torch.testing import assert_close

import trl_multimodal_rft as package
from trl_multimodal_rft import lightrft
from trl_multimodal_rft.lightrft import Actor, ActorAL, ActorOmni, ActorVL, ReplayBuffer
from trl_multimodal_rft.lightrft.models import compute_approx_kl, compute_reward, masked_mean
from trl_multimodal_rft.lightrft.trainer.experience import Experience, ExperienceVL, Samples
from trl_multimodal_rft.lightrft.trainer.experience_maker import NaiveExperienceMaker
from trl_multimodal_rft.lightrft.trainer.replay_buffer_utils import BufferItem, BufferItemVL


# Names and signatures from the pages. Where a page shows no default, the package may have one;
# `gradient_checkpointing_kwargs` has another one of the same meaning. Parameters before `/` compare by position only.

ACTOR = """pretrain_or_model, use_flash_attention_2, bf16, lora_rank, lora_alpha, lora_dropout, target_modules,
    ds_config, device_map, packing_samples"""
FORWARD = """sequences, num_actions=None, attention_mask=None, pixel_values=None, image_grid_thw=None,
    pixel_values_videos=None, video_grid_thw=None, return_output=False, packed_seq_lens=None"""
VISION = "pixel_values=None, image_grid_thws=None, pixel_values_videos=None, video_grid_thws=None, raw_images=None"
ACTIONS = "action_log_probs, base_action_log_probs, values, returns, advantages, attention_mask, action_mask, info"

PPO = """strategy, actor, critic, reward_model, initial_model, ema_model, actor_optim, critic_optim, actor_scheduler,
    critic_scheduler, ema_beta=0.992, init_kl_coef=0.001, kl_target=None, kl_horizon=10000, ptx_coef=0,
    micro_train_batch_size=8, buffer_limit=0, buffer_cpu_offload=True, eps_clip=0.2, value_clip=0.2,
    micro_rollout_batch_size=8, gradient_checkpointing=False, max_epochs=1, max_norm=1.0, tokenizer=None,
    processor=None, prompt_max_len=128, dataloader_pin_memory=True, remote_rm_url=None, reward_fn=None,
    reward_fn_label_map=None, reward_recipe=None, save_hf_ckpt=False, disable_ds_ckpt=False, **generate_kwargs"""
PPO_METHODS = {
    "fit": """args, prompts_dataloader, pretrain_dataloader, eval_dataloader=None, consumed_samples=0,
        num_update_steps_per_episodes=1""",
    "ppo_train": "global_steps=0",
    "training_step": "experience, global_steps, entropy_mask=None",
    "training_step_actor": "experience, entropy_mask=None",
    "training_step_critic": "experience",
    "evaluate": "eval_dataloader, global_step",
    # Its mutable defaults are `None` here
    "save_logs_and_checkpoints": "args, global_step, step_bar, logs_dict=None, client_states=None, episode=0",
}

SIGNATURES = {
    "lightrft.models.actor_al:ActorAL": ACTOR,
    "lightrft.models.actor_al:ActorAL.forward": f"self, {FORWARD}, audio_values=None",
    "lightrft.models.actor_al:ActorAL.generate": "self, input_ids, audio_values=None, **kwargs",
    "lightrft.models.actor_vl:ActorVL": ACTOR,
    "lightrft.models.actor_vl:ActorVL.forward": f"self, {FORWARD}",
    "lightrft.models.actor_vl:ActorVL.generate": """self, input_ids, pixel_values=None, image_grid_thw=None,
        pixel_values_videos=None, video_grid_thw=None, **kwargs""",
    **{
        f"lightrft.models.{module}:{name}.{method}": signature
        for module, name in (("actor_al", "ActorAL"), ("actor_vl", "ActorVL"))
        for method, signature in {
            "process_sequences": "self, sequences, input_len, eos_token_id, pad_token_id",
            "gradient_checkpointing_enable": "self, gradient_checkpointing_kwargs",
            "gradient_checkpointing_disable": "self",
            "print_trainable_parameters": "self",
        }.items()
    },
    "lightrft.trainer.replay_buffer_utils:BufferItem": f"sequences, {ACTIONS}, action_entropy=None",
    "lightrft.trainer.replay_buffer_utils:BufferItemVL": (
        f"sequences, {VISION}, {ACTIONS.replace(',', '=None,')}=None, action_entropy=None"
    ),
    "lightrft.trainer.replay_buffer_utils:is_vl_experience": "experience",
    "lightrft.trainer.replay_buffer_utils:make_experience_batch": "items, packing_samples=False",
    "lightrft.trainer.replay_buffer_utils:remove_padding_in_sequences": "items",
    "lightrft.trainer.replay_buffer_utils:split_experience_batch": "experience",
    "lightrft.trainer.replay_buffer_utils:zero_pad_sequences": "sequences, side='left'",
    # Here these accept more than tensors, so the first argument has another name
    "lightrft.trainer.experience_maker:to": "tensor, device",
    "lightrft.trainer.experience_maker:pin_memory": "tensor",
    "lightrft.trainer.experience_maker:clip_filter_like_weight_func": """rewards, clip_filter_like_weight_clip_eps=3.0,
        lamda=1.0""",
    "lightrft.trainer.experience_maker:Experience": f"sequences, {ACTIONS}, kl=None, action_entropy=None",
    "lightrft.trainer.experience_maker:Experience.to_device": "self, device",
    "lightrft.trainer.experience_maker:Experience.pin_memory": "self",
    "lightrft.trainer.experience_maker:Samples": """sequences, attention_mask, action_mask, num_actions,
        packed_seq_lens, response_length, total_length, prompts, labels, pad_len""",
    **{
        f"lightrft.trainer.{module}": "sample_batch_size, limit=0, cpu_offload=True, packing_samples=False"
        for module in ("replay_buffer:NaiveReplayBuffer", "replay_buffer_vl:NaiveReplayBufferVL")
    },
    "lightrft.trainer.replay_buffer:NaiveReplayBuffer.sample": "self",
    "lightrft.trainer.replay_buffer:NaiveReplayBuffer.collate_fn": "self, batch",
    "lightrft.trainer.replay_buffer:NaiveReplayBuffer.normalize": "self, attribute, strategy",
    "lightrft.models.utils:compute_approx_kl": "log_probs, log_probs_base, action_mask=None, kl_estimator='k1'",
    "lightrft.models.utils:compute_reward": """r, kl_coef, kl, action_mask=None, num_actions=None,
        reward_clip_range=None""",
    "lightrft.models.utils:masked_mean": "tensor, mask, dim=None",
    "lightrft.trainer.experience_maker:NaiveExperienceMaker": """actor, critic, reward_model, initial_model, tokenizer,
        prompt_max_len, kl_controller, strategy, remote_rm_url=None, reward_fn=None, reward_fn_label_map=None,
        reward_recipe=None""",
    **{
        f"lightrft.trainer.experience_maker:NaiveExperienceMaker.{method}": f"self, {signature}"
        for method, signature in {
            "tokenize_fn": "texts, max_length, padding=True, device=None",
            "make_experience_list": "all_prompts, **generate_kwargs",
            "generate_samples": "all_prompts, **generate_kwargs",
            "make_experience": "samples",
            "process_experiences": "experiences",
            "get_advantages_and_returns": "values, rewards, action_mask, gamma, lambd",
            "get_cumulative_returns": "rewards, action_mask, gamma",
        }.items()
    },
    "lightrft.trainer.ppo_trainer_vl:PPOTrainerVL": PPO,
    **{
        f"lightrft.trainer.ppo_trainer_vl:PPOTrainerVL.{method}": f"self, {signature}"
        for method, signature in PPO_METHODS.items()
    },
}


def find(path):
    module, names = path.split(":")
    found = importlib.import_module(f"trl_multimodal_rft.{module}")
    for name in names.split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("path", SIGNATURES)
def test_signature_is_that_of_the_page(path):
    page = list(inspect.signature(eval(f"lambda {' '.join(SIGNATURES[path].split())}: 0")).parameters.values())
    ours = list(inspect.signature(find(path)).parameters.values())
    if page[-1].kind is inspect.Parameter.VAR_KEYWORD:
        assert ours.pop().kind is page.pop().kind
    for own, expected in zip(ours, page, strict=False):
        assert own.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        if expected.kind is not inspect.Parameter.POSITIONAL_ONLY:
            assert own.name == expected.name
        if expected.default is not inspect.Parameter.empty:
            assert own.default == expected.default
    assert len(ours) >= len(page)
    # Calls from the page need none of the package's extra arguments
    for own in ours[len(page) :]:
        assert own.kind is inspect.Parameter.VAR_KEYWORD or own.default is not inspect.Parameter.empty, own.name
    assert not any(isinstance(own.default, (list, dict, set)) for own in ours)


# Fields of records, which callers may pass by position
TENSORS = ["action_log_probs", "base_action_log_probs", "values", "returns", "advantages"]
KNOWN = [*TENSORS, "attention_mask", "action_mask", "info"]
IMAGES = ["pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws", "raw_images"]
SAMPLED = """sequences attention_mask action_mask num_actions packed_seq_lens response_length total_length prompts
    labels pad_len encoded_prompts truncated rows"""
MEDIA = ["audio_values", "audio_attention_mask", "extra_media"]
FIELDS = {
    Samples: SAMPLED.split(),
    Experience: ["sequences", *KNOWN, "kl", "action_entropy"],
    ExperienceVL: ["sequences", *IMAGES, *KNOWN, "kl", "action_entropy", *MEDIA, "media_rows"],
    BufferItem: ["sequences", *KNOWN, "action_entropy", "kl"],
    BufferItemVL: ["sequences", *IMAGES, *KNOWN, "action_entropy", "kl", *MEDIA],
}


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_order_of_fields(cls):
    assert [field.name for field in dataclasses.fields(cls)] == FIELDS[cls]
    values = range(len(FIELDS[cls]))
    assert list(vars(cls(*values)).values()) == list(values)
    if "extra_media" in FIELDS[cls]:
        assert [value for value in vars(cls("ids")).values() if value is not None] == ["ids"]


def test_names_of_lightrft_import():
    """Covers each path in LightRFT's `__init__` files and pages, each object once."""
    paths = """
        models: ActorAL ActorLanguage ActorVL compute_approx_kl compute_reward masked_mean
        models.actor_al: ActorAL
        models.actor_language: ActorLanguage
        models.actor_vl: ActorVL
        models.utils: compute_approx_kl compute_reward masked_mean
        trainer: AdaptiveKLController Experience ExperienceVL FixedKLController NaiveExperienceMaker
        trainer: NaiveExperienceMakerVL NaiveReplayBuffer NaiveReplayBufferVL PPOTrainerVL SPMDPPOTrainerVL
        trainer.experience_maker: Experience NaiveExperienceMaker Samples clip_filter_like_weight_func pin_memory to
        trainer.experience_maker_vl: ExperienceVL NaiveExperienceMakerVL SamplesVL
        trainer.fast_exp_maker: FastExperienceMaker
        trainer.kl_controller: AdaptiveKLController FixedKLController
        trainer.ppo_trainer_vl: PPOTrainerVL
        trainer.replay_buffer: NaiveReplayBuffer
        trainer.replay_buffer_utils: BufferItem BufferItemVL
        trainer.replay_buffer_vl: NaiveReplayBufferVL
        trainer.spmd_ppo_trainer: SPMDPPOTrainerVL
    """
    found = {}
    for line in paths.split("\n")[1:-1]:
        module, names = line.strip().split(": ")
        for name in names.split():
            namespace = {}
            exec(f"from trl_multimodal_rft.lightrft.{module} import {name}", namespace)
            assert found.setdefault(name, namespace[name]) is namespace[name]
            assert name in dir(importlib.import_module(f"trl_multimodal_rft.lightrft.{module}"))
    assert found["ActorLanguage"] is Actor and found["NaiveExperienceMakerVL"] is NaiveExperienceMaker
    assert found["FastExperienceMaker"] is NaiveExperienceMaker and found["SPMDPPOTrainerVL"] is found["PPOTrainerVL"]
    assert found["NaiveReplayBuffer"] is ReplayBuffer and found["NaiveReplayBufferVL"] is ReplayBuffer
    modalities = [actor.modality for actor in (Actor, ActorAL, ActorVL, ActorOmni)]
    assert modalities == ["text", "audio", "vision", "multimodal"]


def test_strategy_of_lightrft_is_refused():
    class Strategy:
        args = None

    with pytest.raises(TypeError, match="^`strategy` is a Strategy; pass an `ExperienceConfig`"):
        NaiveExperienceMaker(None, None, None, None, None, 512, None, Strategy())


# Helpers of `lightrft.models.utils`, against the published formulas


def test_divergence_of_the_reference():
    """See http://joschu.net/blog/kl-approx.html, with infinities on padding."""
    logps = torch.tensor([[-1.0, -2.0, -torch.inf], [-0.5, -0.25, -3.0]])
    base = torch.tensor([[-1.5, -1.0, 0.0], [-0.5, -1.25, -2.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    formulas = {"k1": lambda r: -r.log(), "k2": lambda r: r.log() ** 2 / 2, "k3": lambda r: r - 1 - r.log()}
    for kind, formula in formulas.items():
        expected = torch.zeros(2, 3)
        for row, column in mask.nonzero().tolist():
            expected[row, column] = formula((base - logps)[row, column].exp())  # r is reference over policy
        assert_close(compute_approx_kl(logps, base, mask, kind), expected)
    assert_close(compute_approx_kl(logps[1:], base[1:]), logps[1:] - base[1:])


def test_reward_of_the_reference():
    """The result is r on the last action, minus the penalty on each; `reward_clip_range` applies to r alone."""
    kl = torch.tensor([[0.1, 0.2, 0.3], [0.2, 0.1, 0.4], [0.5, 0.5, 0.5]])
    mask = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]])
    expected = torch.tensor([[-0.01, 0.98, 0.0], [0.0, -0.01, 1.46], [0.0, 0.0, 0.0]])
    assert_close(compute_reward(torch.tensor([1.0, 1.5, 9.0]), 0.1, kl, mask), expected)
    clipped = compute_reward(torch.tensor([-7.0, 1.5, 9.0]), -1.0, kl, mask, reward_clip_range=(-1.0, 1.0))
    assert clipped.tolist() == [[0, -1, 0], [0, 0, 1], [0, 0, 0]]
    assert compute_reward(2.0, 0.0, kl, mask).tolist() == [[0, 2, 0], [0, 0, 2], [0, 0, 0]]
    packed = compute_reward(torch.tensor([1.0, 2.0]), 0.1, [kl[0, :2], kl[1]], num_actions=[2, 3])
    for row, reward in zip(packed, ([-0.01, 0.98], [-0.02, -0.01, 1.96]), strict=True):
        assert_close(row, torch.tensor(reward))
    assert compute_reward(torch.tensor([1.0]), 0.0, kl[:1], num_actions=2)[0].tolist() == [0, 1, 0]


def test_masked_mean_of_the_reference():
    values = torch.tensor([[1.0, 2.0, torch.nan], [4.0, 5.0, 6.0], [torch.inf, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 0]])
    assert masked_mean(values, mask, dim=1).tolist() == [1.5, 4.0, 0.0]
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    assert masked_mean(values[1], None).item() == 5


def test_names_of_the_reference_interface():
    names = ["ActorAL", "ActorOmni", "ActorVL", "PPOTrainerAL", "PPOTrainerVL", "ReplayBuffer"]
    assert all(getattr(package, name) is getattr(lightrft, name) for name in names)
    assert {*names, "Actor", "Critic"} <= set(dir(lightrft))
    assert all(getattr(lightrft, name).__name__ == name for name in ("Actor", "Critic"))
    assert not hasattr(lightrft, "Acting")
