# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The interface of the five reference pages: every name, signature and example, and the helpers that they import."""

import dataclasses
import importlib
import inspect
import re
from itertools import product

import fix
import pytest
import torch
from helpers import reference_pages
from helpers.encoding import build_encoded
from helpers.folders import TESTS
from helpers.ppo_runs import critic_of
from helpers.trainer_utils import PLAIN, image_rows, length_and_sum, load, saved
from torch.testing import assert_close
from torch.utils.data import DataLoader

import trl_multimodal_rft as package
from trl_multimodal_rft import MultimodalPPOConfig, lightrft
from trl_multimodal_rft.lightrft import Actor, ActorAL, ActorOmni, ActorVL, PPOTrainerVL, ReplayBuffer
from trl_multimodal_rft.lightrft.models import compute_approx_kl, compute_reward, masked_mean
from trl_multimodal_rft.lightrft.trainer.experience import Experience, ExperienceVL, Samples
from trl_multimodal_rft.lightrft.trainer.experience_config import ExperienceConfig
from trl_multimodal_rft.lightrft.trainer.experience_maker import NaiveExperienceMaker
from trl_multimodal_rft.lightrft.trainer.replay_buffer_utils import (
    BufferItem,
    BufferItemVL,
    is_vl_experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
    zero_pad_sequences,
)


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
        for (module, name), (method, signature) in product(
            (("actor_al", "ActorAL"), ("actor_vl", "ActorVL")),
            {
                "process_sequences": "self, sequences, input_len, eos_token_id, pad_token_id",
                "gradient_checkpointing_enable": "self, gradient_checkpointing_kwargs",
                "gradient_checkpointing_disable": "self",
                "print_trainable_parameters": "self",
            }.items(),
        )
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


# The table of the pages' statements in docs/from_lightrft.md

ROWS = [row for rows in reference_pages.PAGES.values() for row in rows]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.statement)
def test_statement_of_a_page_is_here_and_tested(row):
    assert callable(find(f"lightrft.{row.path}"))
    file, function = row.test.split(".")
    (path,) = TESTS.rglob(f"test_{file}.py")
    source = path.read_text()
    assert re.search(rf"^def test_{function}\(", source, re.MULTILINE), row.test


# Names that stand with another one in a row: of both actors, of the same class, or helpers that the pages import
BESIDE = ["Experience.to_device", "Experience.pin_memory", "pin_memory", "compute_approx_kl", "masked_mean"]
BESIDE += [f"NaiveReplayBuffer.{method}" for method in ("sample", "collate_fn", "normalize")] + ["NaiveReplayBufferVL"]
BESIDE += ["ActorVL.gradient_checkpointing_disable"]


def test_table_has_all_names_of_the_pages():
    names = {row.path.split(":")[1] for row in ROWS}
    for path in SIGNATURES:
        name = path.split(":")[1]
        assert not names.isdisjoint({name, name.replace("ActorAL", "ActorVL")}) or name.replace("AL", "VL") in BESIDE
    page = fix.LIGHTRFT.read_text()
    assert fix.with_block(page, "pages", reference_pages.table()) == page, "run `make fix`"


# Fields of records, which callers may pass by position
TENSORS = ["action_log_probs", "base_action_log_probs", "values", "returns", "advantages"]
KNOWN = [*TENSORS, "attention_mask", "action_mask", "info"]
IMAGES = ["pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws", "raw_images"]
SAMPLED = """sequences attention_mask action_mask num_actions packed_seq_lens response_length total_length prompts
    labels pad_len prompted"""
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


# Examples of the pages, with tiny models


ACTOR_EXAMPLES = {
    "qwen2_audio": (ActorAL, {"input_features": "audio_values", "feature_attention_mask": "audio_attention_mask"}),
    "qwen2_5_vl": (ActorVL, {}),
}


@pytest.mark.gate
@pytest.mark.parametrize("family", ACTOR_EXAMPLES)
def test_examples_of_actors(family, capsys):
    cls, names = ACTOR_EXAMPLES[family]
    actor = cls(pretrain_or_model=str(saved(family)), use_flash_attention_2=False, lora_rank=16, lora_alpha=32)
    prompt = build_encoded(family)[2][0]
    input_ids = prompt.input_ids[None]
    media = {names.get(name, name): value for name, value in prompt.media.items()}
    for options in ({"max_new_tokens": 100}, {"max_new_tokens": 50, "temperature": 0.8, "do_sample": True}):
        sequences, attention_mask, action_mask = actor.generate(input_ids=input_ids, **media, **options)
        n = action_mask.size(1)
        assert 0 < n <= options["max_new_tokens"] and sequences.shape == attention_mask.shape == (1, len(prompt) + n)
    num_actions = min(n, 10)
    log_probs = actor(sequences=sequences, num_actions=num_actions, **media)
    again, output = actor(sequences=sequences, num_actions=num_actions, **media, return_output=True)
    assert log_probs.shape == (1, num_actions) and output.logits.shape[:2] == sequences.shape
    assert_close(again, log_probs, atol=0.05, rtol=0)  # in bfloat16
    actor.train()
    for kwargs in ((), ({"use_reentrant": True},)):
        actor.gradient_checkpointing_enable(*kwargs)
    actor.gradient_checkpointing_disable()
    actor.print_trainable_parameters()
    assert "trainable params: " in capsys.readouterr().out
    ids = torch.tensor([[4, 5, 6, 7, 2, 9]])  # what follows the end becomes padding
    processed = actor.process_sequences(ids, input_len=3, eos_token_id=2, pad_token_id=0)
    assert [tensor.int().tolist() for tensor in processed] == [[[4, 5, 6, 7, 2, 0]], [[1, 1, 1, 1, 1, 0]], [[1, 1, 0]]]


def samples(cls, *ids, **fields):
    """Returns samples of these ids, whose actions are all tokens that aren't 0."""
    columns = [torch.ones(len(row)) for row in ids]
    masks = [torch.tensor(row) != 0 for row in ids]
    return [
        cls(
            sequences=torch.tensor(row),
            **dict.fromkeys(TENSORS, values),
            **{"attention_mask": mask.long(), "action_mask": mask, "info": {}, **fields},
        )
        for row, values, mask in zip(ids, columns, masks, strict=True)
    ]


def test_examples_of_buffer_utilities():
    sequences = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])]
    padded = zero_pad_sequences(sequences, side="right")
    assert padded.tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]
    padded_left = zero_pad_sequences(sequences, side="left")
    assert padded_left.tolist() == [[0, 1, 2, 3], [0, 0, 4, 5], [6, 7, 8, 9]]
    with pytest.raises(AssertionError):
        zero_pad_sequences(sequences, side="middle")
    clean_items = remove_padding_in_sequences(samples(BufferItem, [0, 0, 1, 2, 3, 0, 0]))
    assert [item.sequences.tolist() for item in clean_items] == [[1, 2, 3]]
    images = {"pixel_values": torch.ones(4, 6), "image_grid_thws": torch.tensor([[1, 2, 2]])}
    padded_vl_items = samples(BufferItemVL, [0, 0, 4, 5, 6, 0], **images)
    clean_vl_items = remove_padding_in_sequences(padded_vl_items)
    assert clean_vl_items[0].sequences.tolist() == [4, 5, 6] and clean_vl_items[0].pixel_values.shape == (4, 6)
    items = samples(BufferItem, [1, 2], [3])
    vl_items = samples(BufferItemVL, [1, 2], [3], **images)
    for own, cls, packing in ((items, Experience, False), (vl_items, ExperienceVL, True)):
        batch_experience = make_experience_batch(own, packing_samples=packing)
        assert type(batch_experience) is cls and is_vl_experience(batch_experience) == (cls is ExperienceVL)
        individual_items = split_experience_batch(batch_experience)
        assert [type(item) for item in individual_items] == [type(item) for item in own]
        if packing:
            assert [item.sequences.tolist() for item in individual_items] == [[1, 2], [3]]
            assert all(torch.equal(item.pixel_values, images["pixel_values"]) for item in individual_items)
        else:
            assert batch_experience.sequences.tolist() == [[1, 2], [0, 3]]
    with pytest.raises(ValueError):
        make_experience_batch([])


def test_formulas_of_the_experience_maker():
    """Compares advantages and returns with the page's recursions, without gaps in the mask."""
    maker = NaiveExperienceMaker.__new__(NaiveExperienceMaker)
    values, rewards = torch.randn(2, 2, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    gamma = 0.9
    lambd = 0.8
    advantages = torch.zeros(2, 5)
    sums = torch.zeros(2, 5)
    following = torch.cat([values * mask, torch.zeros(2, 1)], dim=1)
    for t in reversed(range(4)):
        delta = (rewards * mask)[:, t] + gamma * following[:, t + 1] - following[:, t]
        advantages[:, t] = delta + gamma * lambd * advantages[:, t + 1]
        sums[:, t] = (rewards * mask)[:, t] + gamma * sums[:, t + 1]
    ours, returns = maker.get_advantages_and_returns(values, rewards, mask, gamma, lambd)
    assert_close(ours, advantages[:, :4])
    assert_close(returns * mask, (advantages[:, :4] + values) * mask)
    assert_close(maker.get_cumulative_returns(rewards, mask, gamma), sums[:, :4])
    lists = [[row[:n] for row, n in zip(rows, (4, 2), strict=True)] for rows in (values, rewards, mask)]
    for row, own in zip(maker.get_advantages_and_returns(*lists, gamma, lambd)[0], ours, strict=True):
        assert_close(row, own[: len(row)])


@pytest.mark.gate
def test_loop_of_the_experience_maker():
    """Makes experience by the steps of the page, as `make_experience_list` does in one."""
    model, processor = load("qwen2_5_vl")
    config = ExperienceConfig("rloo", n_samples_per_prompt=2, micro_rollout_batch_size=2, progress=False)
    arguments = ActorVL(model, bf16=False), None, None, None, processor.tokenizer, 512, None, config
    maker = NaiveExperienceMaker(*arguments, reward_fn=length_and_sum)
    tokens = maker.tokenize_fn(["Is there a bird?"], 3, device="cpu")
    assert tokens["input_ids"].shape == tokens["attention_mask"].shape == (1, 3)
    options = {"max_new_tokens": 4, "do_sample": False}
    experiences = [maker.make_experience(part) for part in maker.generate_samples(["Is there?", "A bird"], **options)]
    experiences, rewards = maker.process_experiences(experiences)
    assert [type(experience) for experience in experiences] == [Experience] * 2 and len(rewards) == 2
    made = maker.make_experience_list(["Is there?", "A bird"], **options, gamma=1.0)
    for experience, other, shaped in zip(experiences, made, rewards, strict=True):
        assert torch.equal(other.sequences, experience.sequences)
        assert_close(other.advantages, torch.where(other.action_mask, shaped[:, None], 0))


@pytest.mark.gate
def test_loop_of_the_trainer(tmp_path):
    """Calls each method of the page: the whole loop, and its steps."""
    options = {"num_generations": 2, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "beta": 0.0}
    strategy = MultimodalPPOConfig(str(tmp_path), **{**PLAIN, "max_steps": 2, "learning_rate": 1e-3, **options})
    model, processor = load("qwen2_5_vl")
    trainer = PPOTrainerVL(
        *(strategy, ActorVL(model, bf16=False), critic_of("qwen2_5_vl"), None, None, None, None, None, None, None),
        micro_train_batch_size=4,
        processor=processor,
        prompt_max_len=512,
        reward_fn=length_and_sum,
        max_new_tokens=4,
    )
    prompts = DataLoader(list(image_rows(4)), batch_size=2, collate_fn=list)
    trainer.fit(strategy, prompts, None)
    assert trainer.trainer.state.global_step == 2
    (experience,) = trainer.experience_maker.make_experience_list(list(image_rows(2)), **trainer.generate_kwargs)
    trainer.replay_buffer.append(experience)
    for status in (
        trainer.ppo_train(2),
        trainer.training_step(experience, 3),
        trainer.training_step_actor(experience),
        trainer.training_step_critic(experience),
    ):
        assert {"policy_loss", "critic_loss"} <= status.keys()
    assert trainer.evaluate(prompts, 6)["num_samples"] == 4
    trainer.save_logs_and_checkpoints(strategy, 6, None, {"policy_loss": 1.0}, {"consumed_samples": 8}, episode=1)
    assert trainer.trainer.state.log_history[-1]["policy_loss"] == 1.0


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
