# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The interface of the reference pages: its names, its examples, and its parts put together, which train as the trainer.
"""

import dataclasses
import functools
import importlib
import inspect
import subprocess
import textwrap

import pytest
import torch
from helpers.processes import python_command, python_environment
from helpers.reference import media_of
from helpers.trainer_utils import audio_rows, images_rows, length_and_sum, load, norm, relative_difference, run
from torch.testing import assert_close

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.algorithms.losses import aggregate
from trl_multimodal_rft.lightrft import (
    Actor,
    ActorAL,
    ActorOmni,
    ActorVL,
    ReplayBuffer,
    experience,
    replay_buffer_utils,
)
from trl_multimodal_rft.lightrft.experience import Experience, ExperienceVL, Samples
from trl_multimodal_rft.lightrft.experience_maker import ExperienceConfig, NaiveExperienceMaker
from trl_multimodal_rft.lightrft.replay_buffer_utils import (
    BufferItem,
    BufferItemVL,
    is_vl_experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
    zero_pad_sequences,
)


# Names and signatures, as on the pages. Where a page shows no default, ours may have one;
# `gradient_checkpointing_kwargs` has another of the same meaning. What is before `/` is compared by position only.

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
    "lightrft.actor_al:ActorAL": ACTOR,
    "lightrft.actor_al:ActorAL.forward": f"self, {FORWARD}, audio_values=None",
    "lightrft.actor_al:ActorAL.generate": "self, input_ids, audio_values=None, **kwargs",
    "lightrft.actor_omni:ActorOmni": ACTOR,
    "lightrft.actor_omni:ActorOmni.forward": f"self, {FORWARD}, audio_values=None",
    "lightrft.actor_omni:ActorOmni.generate": "self, input_ids, audio_values=None, **kwargs",
    "lightrft.actor_vl:ActorVL": ACTOR,
    "lightrft.actor_vl:ActorVL.forward": f"self, {FORWARD}",
    "lightrft.actor_vl:ActorVL.generate": """self, input_ids, pixel_values=None, image_grid_thw=None,
        pixel_values_videos=None, video_grid_thw=None, **kwargs""",
    **{
        f"lightrft.{module}:{name}.{method}": signature
        for module, name in (("actor_al", "ActorAL"), ("actor_vl", "ActorVL"))
        for method, signature in {
            "process_sequences": "self, sequences, input_len, eos_token_id, pad_token_id",
            "gradient_checkpointing_enable": "self, gradient_checkpointing_kwargs",
            "gradient_checkpointing_disable": "self",
            "print_trainable_parameters": "self",
        }.items()
    },
    "lightrft.replay_buffer_utils:BufferItem": f"sequences, {ACTIONS}, action_entropy=None",
    "lightrft.replay_buffer_utils:BufferItemVL": (
        f"sequences, {VISION}, {ACTIONS.replace(',', '=None,')}=None, action_entropy=None"
    ),
    "lightrft.replay_buffer_utils:is_vl_experience": "experience",
    "lightrft.replay_buffer_utils:make_experience_batch": "items, packing_samples=False",
    "lightrft.replay_buffer_utils:remove_padding_in_sequences": "items",
    "lightrft.replay_buffer_utils:split_experience_batch": "experience",
    "lightrft.replay_buffer_utils:zero_pad_sequences": "sequences, side='left'",
    # Here these take more than tensors, so the first argument has another name
    "lightrft.experience:to": "tensor, device",
    "lightrft.experience:pin_memory": "tensor",
    "lightrft.experience:clip_filter_like_weight_func": "rewards, clip_filter_like_weight_clip_eps=3.0, lamda=1.0",
    "lightrft.experience:Experience": f"sequences, {ACTIONS}, kl=None, action_entropy=None",
    "lightrft.experience:Experience.to_device": "self, device",
    "lightrft.experience:Experience.pin_memory": "self",
    "lightrft.experience:Samples": """sequences, attention_mask, action_mask, num_actions, packed_seq_lens,
        response_length, total_length, prompts, labels, pad_len""",
    "lightrft.experience_maker:NaiveExperienceMaker": """actor, critic, reward_model, initial_model, tokenizer,
        prompt_max_len, kl_controller, strategy, remote_rm_url=None, reward_fn=None, reward_fn_label_map=None,
        reward_recipe=None""",
    **{
        f"lightrft.experience_maker:NaiveExperienceMaker.{method}": f"self, {signature}"
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
    **{
        path: signature
        for name in ("vl:PPOTrainerVL", "al:PPOTrainerAL")
        for path, signature in {
            f"lightrft.ppo_trainer_{name}": PPO,
            **{f"lightrft.ppo_trainer_{name}.{method}": f"self, {own}" for method, own in PPO_METHODS.items()},
        }.items()
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
    # Calls as on the page need nothing that only ours has
    for own in ours[len(page) :]:
        assert own.kind is inspect.Parameter.VAR_KEYWORD or own.default is not inspect.Parameter.empty, own.name
    assert not any(isinstance(own.default, (list, dict, set)) for own in ours)


# Fields of records, which may be given by position
TENSORS = ["action_log_probs", "base_action_log_probs", "values", "returns", "advantages"]
KNOWN = [*TENSORS, "attention_mask", "action_mask", "info"]
IMAGES = ["pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws", "raw_images"]
SOUND = ["audio_values", "audio_attention_mask"]
SAMPLED = """sequences attention_mask action_mask num_actions packed_seq_lens response_length total_length prompts
    labels pad_len encoded_prompts truncated rows"""
FIELDS = {Samples: SAMPLED.split()}
for kinds, media in (("", []), ("VL", IMAGES), ("AL", SOUND), ("Omni", [*IMAGES, *SOUND])):
    extra, counts = (["extra_media"], ["media_rows"]) if media else ([], [])
    FIELDS[getattr(experience, f"Experience{kinds}")] = [
        *["sequences", *media, *KNOWN, "kl", "action_entropy"],
        *[*extra, *counts],
    ]
    FIELDS[getattr(replay_buffer_utils, f"BufferItem{kinds}")] = [
        *["sequences", *media, *KNOWN, "action_entropy", "kl"],
        *extra,
    ]


@pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)
def test_order_of_fields(cls):
    assert [field.name for field in dataclasses.fields(cls)] == FIELDS[cls]
    values = range(len(FIELDS[cls]))
    assert list(vars(cls(*values)).values()) == list(values)
    if "extra_media" in FIELDS[cls]:
        assert [value for value in vars(cls("ids")).values() if value is not None] == ["ids"]


def test_modalities_of_the_pages():
    assert (ActorAL.modality, ActorVL.modality) == ("audio", "vision")
    assert (Actor.modality, ActorOmni.modality) == ("text", "multimodal")


def test_the_package_does_not_load_the_reference_interface():
    code = """
        import sys
        import trl_multimodal_rft as package
        inside = f"{package.__name__}.lightrft"
        assert not [name for name in sys.modules if name.startswith(inside)]
        from trl_multimodal_rft import lightrft
        assert [name for name in sys.modules if name.startswith(inside)] == [inside]
        names = ["ActorAL", "ActorOmni", "ActorVL", "PPOTrainerAL", "PPOTrainerVL", "ReplayBuffer"]
        assert all(getattr(package, name) is getattr(lightrft, name) for name in names)
        assert {*names, "Actor", "Critic"} <= set(dir(lightrft))
        assert all(getattr(lightrft, name).__name__ == name for name in ("Actor", "Critic"))
        assert not hasattr(lightrft, "Acting")
    """
    command = python_command(["-c", textwrap.dedent(code)])
    result = subprocess.run(command, env=python_environment(), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# Examples of the page about the buffer


def fields(n_actions: int) -> dict:
    """What a sample of the page's examples leaves out."""
    names = ("action_log_probs", "base_action_log_probs", "values", "returns", "advantages")
    return {**{name: torch.arange(1.0, n_actions + 1) for name in names}, "info": {"reward": torch.tensor(1.0)}}


def padded(cls, ids: list[int], **changes):
    """A sample all of whose tokens are actions."""
    real = torch.tensor(ids) != 0
    return cls(
        sequences=torch.tensor(ids), attention_mask=real.long(), action_mask=real, **fields(len(ids)), **changes
    )


def test_page_examples_of_padding():
    padded_items = [padded(BufferItem, [0, 0, 1, 2, 3, 0, 0])]
    clean_items = remove_padding_in_sequences(padded_items)
    assert clean_items[0].sequences.tolist() == [1, 2, 3]
    padded_vl_items = [padded(BufferItemVL, [0, 0, 4, 5, 6, 0], pixel_values=torch.ones(4, 5))]
    clean_vl_items = remove_padding_in_sequences(padded_vl_items)
    assert clean_vl_items[0].sequences.tolist() == [4, 5, 6]
    assert clean_vl_items[0].values.tolist() == [3, 4, 5]
    assert clean_vl_items[0].pixel_values is padded_vl_items[0].pixel_values

    sequences = [torch.tensor([1, 2, 3]), torch.tensor([4, 5]), torch.tensor([6, 7, 8, 9])]
    assert zero_pad_sequences(sequences, side="right").tolist() == [[1, 2, 3, 0], [4, 5, 0, 0], [6, 7, 8, 9]]
    assert zero_pad_sequences(sequences, side="left").tolist() == [[0, 1, 2, 3], [0, 0, 4, 5], [6, 7, 8, 9]]


def test_page_examples_of_batches():
    items = remove_padding_in_sequences([padded(BufferItem, [0, 1, 2]), padded(BufferItem, [3, 4, 5])])
    batch_exp = make_experience_batch(items, packing_samples=False)
    assert type(batch_exp) is Experience
    assert batch_exp.sequences.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not is_vl_experience(batch_exp)

    pixels = [torch.randn(4, 5), torch.randn(6, 5)]
    grids = [torch.tensor([[1, 2, 2]]), torch.tensor([[1, 2, 3]])]
    vl_items = [
        padded(BufferItemVL, ids, pixel_values=own, image_grid_thws=grid)
        for ids, own, grid in zip([[7, 8], [7, 8, 9]], pixels, grids, strict=True)
    ]
    batch_vl_exp = make_experience_batch(vl_items, packing_samples=True)
    assert type(batch_vl_exp) is ExperienceVL
    assert [ids.tolist() for ids in batch_vl_exp.sequences] == [[7, 8], [7, 8, 9]]
    exp = ExperienceVL(sequences=torch.zeros(1, 2), pixel_values=torch.cat(pixels), image_grid_thws=torch.cat(grids))
    for each in (batch_vl_exp, exp):
        assert is_vl_experience(each)

    batch_experience = make_experience_batch(items)
    individual_items = split_experience_batch(batch_experience)
    assert [item.sequences.tolist() for item in individual_items] == [[0, 1, 2], [3, 4, 5]]
    individual_items = split_experience_batch(batch_vl_exp)
    for item, own, grid in zip(individual_items, pixels, grids, strict=True):
        assert torch.equal(item.pixel_values, own) and torch.equal(item.image_grid_thws, grid)


# From prompts to an update

FAMILIES = {
    "qwen2_audio": (ActorAL, lambda: audio_rows(2), ["audio_values", "audio_attention_mask"]),
    "qwen2_5_vl": (ActorVL, lambda: images_rows(2), ["pixel_values", "image_grid_thws"]),
}
GROUP, LONGEST = 4, 8
LEARNING_RATE = 1.0  # so large that the rounding of the weights says little about their difference
ENDS = list(range(50, 110))  # enough tokens that responses differ in length
ROUTES = {
    "packed": {"packing_samples": True, "max_tokens": 120},
    "packed with a sample each": {"packing_samples": True, "batch_size": 1},
    "padded": {"batch_size": 3},
    "padded within a budget": {"max_tokens": 120},
}


@functools.cache
def sampled(family: str) -> list[Experience]:
    """Two groups, each an experience; the second group's prompt is longer and has other media."""
    cls, rows, _ = FAMILIES[family]
    model, processor = load(family)
    maker = NaiveExperienceMaker(
        cls(model, bf16=False, packing_samples=True),
        critic=None,
        reward_model=None,
        initial_model=None,
        tokenizer=processor.tokenizer,
        prompt_max_len=512,
        kl_controller=None,
        strategy=ExperienceConfig(n_samples_per_prompt=GROUP, micro_rollout_batch_size=GROUP, progress=False),
        reward_fn=length_and_sum,
        processor=processor,
    )
    torch.manual_seed(0)
    return maker.make_experience_list(list(rows()), max_new_tokens=LONGEST, eos_token_id=ENDS)


def filled(family: str) -> ReplayBuffer:
    buffer = ReplayBuffer()
    for each in sampled(family):
        buffer.append(each)
    return buffer


@functools.cache
def trained(family: str) -> dict[str, torch.Tensor]:
    """What the trainer makes of the same responses."""
    responses: dict[tuple, list[list[int]]] = {}
    for item in filled(family):
        n_actions = len(item.action_mask)
        prompt, response = item.sequences[:-n_actions].tolist(), item.sequences[-n_actions:].tolist()
        responses.setdefault(tuple(prompt), []).append(response)

    class Replaying(MultimodalGRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *args, **kwargs):
            return [responses[tuple(ids)].pop(0) for ids in prompt_ids], None

    result = run(
        Replaying,
        family,
        FAMILIES[family][1](),
        num_generations=GROUP,
        max_completion_length=LONGEST,
        max_steps=1,
        loss_type="dapo",
        advantage_estimator="group_norm",
        learning_rate=LEARNING_RATE,
    )
    assert not any(responses.values())
    return result.update


def policy_loss(actor, batch: Experience, n_tokens: int) -> torch.Tensor:
    """PPO's clipped loss, the batch's part of the sum over all actions; row after row if packed."""
    if isinstance(batch.sequences, list):
        logps = actor(
            torch.cat(batch.sequences)[None],
            num_actions=[len(mask) for mask in batch.action_mask],
            packed_seq_lens=[len(ids) for ids in batch.sequences],
            **media_of(batch),
        )
        columns = (torch.cat(c)[None] for c in (batch.action_log_probs, batch.advantages, batch.action_mask))
    else:
        width = batch.action_mask.size(1)
        logps = actor(batch.sequences, width, batch.attention_mask, **media_of(batch))
        columns = (batch.action_log_probs, batch.advantages, batch.action_mask)
    old_logps, advantages, mask = columns
    ratio = (logps - old_logps).exp()
    assert_close(ratio[mask], torch.ones_like(ratio[mask]), rtol=0, atol=1e-4)
    loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return aggregate(loss, mask, "token-sum", n_tokens)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_parts_train_as_the_trainer(family, route):
    options, buffer = ROUTES[route], filled(family)
    n_tokens = sum(int(item.action_mask.sum()) for item in buffer)
    actor = FAMILIES[family][0](load(family)[0], bf16=False, packing_samples=options.get("packing_samples", False))
    optimizer = torch.optim.SGD(actor.parameters(), lr=LEARNING_RATE)
    before = {name: p.detach().clone() for name, p in actor.model.named_parameters()}
    sizes = []
    for batch in buffer.batches(**options):
        policy_loss(actor, batch, n_tokens).backward()
        sizes.append(len(batch.sequences))
    optimizer.step()
    update = {name: p.detach() - before[name] for name, p in actor.model.named_parameters()}
    assert sum(sizes) == 2 * GROUP and len(sizes) > 1
    assert norm(update) > 0
    assert relative_difference(trained(family), update) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_buffer_holds_what_was_sampled(family):
    """Groups of different prompts and media, responses of different lengths, and the media of a group once."""
    buffer = filled(family)
    lengths = [len(item.action_mask) for item in buffer]
    assert len(set(lengths)) > 2 and max(lengths) <= LONGEST
    assert all(item.advantages.abs().min() > 0 for item in buffer)
    for name in FAMILIES[family][2]:
        storages = [getattr(item, name).untyped_storage() for item in buffer]
        assert len({storage.data_ptr() for storage in storages}) == 2
        first, second = getattr(buffer[0], name), getattr(buffer[-1], name)
        assert [storage.nbytes() for storage in (storages[0], storages[-1])] == [first.nbytes, second.nbytes]
        assert first.shape != second.shape or not torch.equal(first, second)
