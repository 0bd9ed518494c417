# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""GRPO scenarios."""

import dataclasses
import functools
import hashlib
import shutil

import torch
import training
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import merge_fsdp_weights
from datasets import Dataset
from helpers.ahead import Ahead
from helpers.chats import image
from helpers.checks import released
from helpers.families import FAMILIES
from helpers.tools import Scripted, shows, with_turns_of_tools
from peft import AutoPeftModel, LoraConfig, PeftModel
from training import (
    ENGINE,
    GROUP,
    ONE_IMAGE,
    SHORT_AND_LONG,
    Injecting,
    InjectingTrainer,
    RecordingTrainer,
    RemembersParts,
    audio_rows,
    compared,
    engine_options,
    image_rows,
    refusal,
    reward,
    start,
    synced,
    train,
    weights,
)
from transformers import AutoProcessor, TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.algorithms.kl import FixedKLController
from trl_multimodal_rft.forward import logprobs
from trl_multimodal_rft.lightrft import Actor
from trl_multimodal_rft.lightrft.trainer import experience_maker
from trl_multimodal_rft.lightrft.trainer.experience_maker import ExperienceConfig, NaiveExperienceMaker
from trl_multimodal_rft.models.wrapped import local_part
from trl_multimodal_rft.rollout.environments import EnvironmentFailure
from trl_multimodal_rft.trainers.checkpoints.files import load_rollout_state, save_rollout_state


# One process and two train these scenarios alike


def skipped_rows(folder):
    """
    Both groups that straddle two ranks have skipped rows: one row is unreadable, the other is missing on the second
    rank. Evaluation skips both groups.
    """
    state = start()
    rows = image_rows()
    own = folder / f"images-{state.process_index}"
    own.mkdir(parents=True)
    for i, row in enumerate(rows):
        row["image"].save(own / f"{i}.png")
        row["image"] = str(own / f"{i}.png")
    (own / "1.png").unlink()
    if state.process_index == state.num_processes - 1:
        (own / "4.png").unlink()
    options = {"on_media_error": "skip", "max_skipped_rows": 3}
    options["per_device_eval_batch_size"] = 3 * GROUP // state.num_processes
    trainer, result = train(folder, "qwen2_5_vl", rows, 3 * GROUP, **options)
    evaluated = []

    def number(completion_ids, number, **kwargs):
        evaluated.extend(number)
        return [float(each) for each in number]

    trainer.reward_funcs = [number]
    data = Dataset.from_list([{**row, "number": i} for i, row in enumerate(rows)])
    evaluations = []
    for _ in range(2):
        evaluated.clear()
        trainer.model.train()  # as between steps
        metrics = trainer.evaluate(data)
        evaluations.append([evaluated.copy(), metrics["eval_reward"], metrics["eval_media/skipped"]])
    return {**result, "skipped": sorted(trainer._stream.skipped), "evaluations": evaluations}


class Talking(Scripted):
    """The second half of the batch calls a tool that returns images. The trainer drops later tokens."""

    turns = (0, 0, 0, 0, 1, 2, 3, 1)

    def __call__(self, model, prompts, *, room=None, **options):
        if room is not None:  # equally often on both ranks
            self.inner(model, prompts, room=room, **options)
        return super().__call__(model, prompts, room=room, **options)


class TalkingTrainer(MultimodalGRPOTrainer):
    def __init__(self, *args, processing_class, **kwargs):
        super().__init__(*args, processing_class=with_turns_of_tools(processing_class), **kwargs)


def conversations(folder, batch=2 * GROUP, tool=None, **more):
    """Only one of two ranks calls tools."""
    options = {"max_completion_length": 400, "self_check": True, "generation_kwargs": {"max_new_tokens": 4}, **more}
    options["objects"] = {"tools": [tool or shows([image(56, 84, 1)], [image(84, 56, 2), image(56, 56, 3)])]}
    return train(folder, "qwen2_5_vl", image_rows(), batch, TalkingTrainer, sampler=Talking, **options)[1]


def show(number: int) -> str:
    """
    Shows nothing any more.

    Args:
        number: Which one.
    """
    raise EnvironmentFailure("lost")


rewritten_contexts = functools.partial(conversations, max_context_media=1)
lost_environments = functools.partial(conversations, tool=show)


def rewarded_turns(folder):
    """The group that calls tools straddles two ranks, of which one has turns that the other doesn't have."""

    def by_turn(completions, **kwargs):
        said = [[str(message) for message in each if message["role"] == "assistant"] for each in completions]
        return [[sum(text.encode()) % 7 / 6 for text in each] for each in said]

    return conversations(folder, 3 * GROUP, reward_func=[by_turn, reward], advantage_estimator="gigpo(omega=0.5)")


def asynchronous(folder):
    """A group straddles two ranks. Some completions are sampled from a view."""
    options = {"max_steps": 4, "rollout_view": "blank(fraction=0.25)"}
    return train(folder, "qwen2_5_vl", image_rows(), 3 * GROUP, MultimodalGRPOTrainer, sampler=Ahead, **options)[1]


# Each generation has two balanced micro-batches of whole groups, runs twice, and uses a reference model
REUSED = {"beta": 0.1, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 4}


def whole_groups_checkpointed(folder):
    trainer, result = train(folder, "qwen2_5_vl", image_rows(), 2 * GROUP, gradient_checkpointing=True, **REUSED)
    found = synced(trainer) if result["sharded"] else {}
    return {**result, **found, "tokens": [sum(map(len, ids)) for ids in trainer.completions]}


def compiled_layers(folder):
    """Layers are compiled on two ranks, and not in one process."""
    options = {"torch_compile_backend": "eager"} if start().num_processes > 1 else {}
    options["max_steps"] = 1
    trainer, result = train(folder, "qwen2_5_vl", image_rows(), 2 * GROUP, gradient_checkpointing=True, **options)
    return {**result, "compiled": sum(hasattr(each, "is_compiled") for each in trainer.model.modules())}


def without_signal(folder):
    """First no group of the first rank has a signal, then one of each rank's, then none at all."""

    def rewarded(completion_ids, number, trainer_state, **kwargs):
        step = trainer_state.global_step
        dead = [n in ((0, 1), (4, 6), range(8))[step] for n in number]
        return [0.5 if none else value for none, value in zip(dead, reward(completion_ids), strict=True)]

    rows = [{**row, "number": i} for i, row in enumerate(image_rows())]
    options = {"gradient_accumulation_steps": 2, "shuffle_dataset": False, "max_steps": 3}
    options |= {"weight_decay": 0.1, "optim_args": "momentum=0.9"}
    trainer, result = train(folder, "qwen2_5_vl", rows, 2 * GROUP, reward_func=rewarded, **options)
    return result


def partly(rows, *with_media):
    """Keeps media only in the given rows."""
    return [{**row, "image": row["image"] if i in with_media else None} for i, row in enumerate(rows)]


def images_and_clips():
    audios = [{**row, "image": None} for row in audio_rows()]
    images = [{**row, "audio": None} for row in image_rows()]
    return [*audios[:1], *images[1:4], *audios[4:6], *images[6:]]


# Losses other than TRL's default and those of the algorithms below
LOSSES = {
    "grpo_loss": {"loss_type": "grpo"},
    "cispo_loss": {"loss_type": "cispo", "epsilon_high": 5.0},
    "vespo_loss": {"loss_type": "vespo"},
    "luspo_loss": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
}
WHOLE = {**REUSED, "gradient_checkpointing": False}
HYBRID = {"beta": 0.1, "num_iterations": 2, "max_steps": 2, "gradient_checkpointing": True}
RLOO = {"beta": 0.1, "num_iterations": 2, "max_steps": 4, "trainer_class": MultimodalRLOOTrainer, "sampler": Injecting}
PAPO = {"loss_view": "mask_patches(ratio=0.6, kl_coef=0.5, entropy_coefs=[0.1, 0.2])"}
VPPO = {"loss_view": "mask_patches(ratio=0.5, advantage_min=0.5, token_quantile=0.4)"}
MAPO = {"loss_view": "blank(temperature=0.02)"}
VIEWS = {"rollout_view": "mask_patches(patch_size=28)", "contrast_view": "blank(bonus=1.0)"}
VIEWS |= {"generation_kwargs": {"do_sample": False}, "trainer_class": RecordingTrainer}
# Family, rows, number of groups, options
PLAIN = {
    # Each of two ranks has half of the group
    "straddling_group": ("qwen2_5_vl", image_rows(), 1, {}),
    # Each of two ranks has one whole group and half of another
    "straddling_groups": ("qwen2_5_vl", image_rows(), 3, {}),
    "whole_groups": ("qwen2_5_vl", image_rows(), 2, WHOLE),
    # Prompts share their image within each micro-batch
    "one_image": ("qwen2_5_vl", ONE_IMAGE, 4, WHOLE),
    # Micro-batches of arbitrary completions, as in TRL
    "shuffled": ("qwen2_5_vl", image_rows(), 2, {**REUSED, "packing_shuffle": True}),
    # Groups of different lengths; each of two ranks has whole groups
    "clips": ("qwen2_audio", audio_rows(), 2, {**REUSED, "gradient_checkpointing": True}),
    # The second of two ranks has no media in the first step, the first rank has none in the second step
    "mixed_rows": ("qwen2_5_vl", partly(image_rows(), 0, 3), 2, {}),
    # Stateful layers process all prompts as one batch, and each rank has prompts of other lengths
    "hybrid": ("qwen3_5_deep", partly(image_rows(), 1, 2, 4, 5, 7), 3, HYBRID),
    # This family isolates images and clips of different lengths: the first of two ranks runs two forward passes, the
    # second runs one
    "isolated_media": ("gemma3n", images_and_clips(), 4, {}),
    "rloo": ("qwen2_5_vl", image_rows(), 3, RLOO),
    # The view is of some prompts alone, of none on one of two ranks, and of a group that straddles them
    "papo": ("qwen2_5_vl", partly(image_rows(), 0, 3, 4), 3, {**HYBRID, **PAPO}),
    "papo_without_media": ("qwen2_5_vl", partly(image_rows(), 0, 3), 2, PAPO),
    "vppo": ("qwen2_5_vl", partly(image_rows(), 0, 1, 3, 4), 3, {**HYBRID, **VPPO}),
    "mapo": ("qwen2_audio", audio_rows(), 3, {**HYBRID, "learning_rate": 0.1, **MAPO}),
    # In the first step only the second of two ranks has completions from views, in the second step only the first
    "views": ("qwen2_5_vl", partly(image_rows(), 1, 3), 3, VIEWS),
    **{name: ("qwen2_5_vl", image_rows(), 2, {**WHOLE, **loss}) for name, loss in LOSSES.items()},
}


def plain(name, folder):
    family, rows, n_groups, options = PLAIN[name]
    return train(folder, family, rows, n_groups * GROUP, **options)[1]


globals().update({name: functools.partial(plain, name) for name in PLAIN})


def token_budget(folder, trainer_class=InjectingTrainer, budget=110, **others):
    """
    Each of two micro-batches holds two groups. One process forwards a micro-batch whole. Of two ranks, the second has
    the longer prompts and can't forward two at once.
    """
    options = {**REUSED, "max_steps": 2, "gradient_checkpointing": True, **others}
    if PartialState().num_processes > 1:
        options["max_tokens_per_microbatch"] = budget
    trainer_class = type("Parts", (RemembersParts, trainer_class), {})
    trainer, result = train(folder, "qwen2_5_vl", SHORT_AND_LONG, 4 * GROUP, trainer_class, **options)
    return {**result, "parts": trainer.parts}


# Groups of the second rank don't fit, and with DDP, their prompts are forwarded once
split_groups = functools.partial(token_budget, budget=60)
papo_token_budget = functools.partial(token_budget, max_steps=1, **PAPO)
rloo_token_budget = functools.partial(token_budget, trainer_class=MultimodalRLOOTrainer, sampler=Injecting)


# Together, the last four prompts are more than twice as long
UNEVEN = [{**row, **training.row("What is in the image? " * (1 + 9 * (i > 3)))} for i, row in enumerate(image_rows())]


def balanced(folder, run=None, **options):
    """Two ranks have two micro-batches of two groups each, which they keep, then exchange, before two updates."""
    run = run or functools.partial(train, family="qwen2_5_vl", rows=UNEVEN, trainer_class=InjectedTrainer)
    options = {"batch": 4 * GROUP, **REUSED, **PAPO, **options, "max_steps": 2}
    kept, moved = (run(folder / str(on), balance_ranks=on, **options) for on in (False, True))
    updates = [result["update"] for _, result in (kept, moved)]
    norms = [
        torch.cat([each.flatten() for each in values]).norm()
        for values in (updates[0].values(), [updates[1][name] - value for name, value in updates[0].items()])
    ]
    prompts = {id(prompt): prompt for part in moved[0]._buffered_inputs for prompt in part.prompts}
    media = [sum(value.nbytes for value in prompt.media.values()) for prompt in prompts.values()]
    return {**moved[1], "kept": kept[1]["steps"], "difference": float(norms[1] / norms[0]), "media": media}


WEIGHTS = VPPO["loss_view"].replace(")", ", kl_coef=0.5, entropy_coefs=[0.1, 0.2])")
balanced_token_weights = functools.partial(balanced, loss_view=WEIGHTS)


class BreakingTrainer(InjectingTrainer):
    """In some steps, the first micro-batch of rank 0 has a non-finite gradient."""

    n_given = 3
    broken = (1,)

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        breaks = self.state.global_step in self.broken and self._step % 2 == 0
        return loss * torch.nan if breaks and self.accelerator.is_main_process else loss


class Poison(TrainerCallback):
    """The last rank gets a non-finite weight after the second step."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2 and PartialState().is_last_process:
            with torch.no_grad():
                local_part(model.get_output_embeddings().weight).view(-1)[7] = torch.nan


def not_finite(folder):
    """Covers skipped updates, the end of a run after too many in a row, and non-finite weights, which aren't saved."""
    options = {"gradient_accumulation_steps": 2, "gradient_checkpointing": False, "max_steps": 3}
    options |= {"learning_rate": 0.6, "lr_scheduler_type": "linear", "weight_decay": 0.1}
    _, result = train(folder / "once", "qwen2_5_vl", image_rows(), 2 * GROUP, BreakingTrainer, **options)
    errors = []
    once = type("Once", (BreakingTrainer,), {"_max_skipped": 0})
    for name, trainer_class, saving in (
        ("twice", once, {}),
        ("poisoned", InjectingTrainer, {"callbacks": [Poison()]}),
    ):
        run = functools.partial(train, folder / name, "qwen2_5_vl", image_rows(), 2 * GROUP, trainer_class)
        saves = {**options, "save_strategy": "steps", "save_steps": 1}
        errors.append(refusal(run, error=FloatingPointError, objects=saving, **saves))
        PartialState().wait_for_everyone()
    unchecked = engine_options(PartialState())
    if ENGINE == "zero3" and "deepspeed" in unchecked:  # all stages read the option at the same place
        unchecked["deepspeed"]["zero_optimization"]["compute_grad_norm"] = False
        errors.append(refusal(train, folder / "unchecked", "qwen2_5_vl", image_rows(), 2 * GROUP, **unchecked))
    saved = [
        sorted(each.name for each in (folder / name / "output").iterdir() if each.is_dir())
        for name in ("twice", "poisoned")
    ]
    return {**result, "errors": errors, "saved": saved}


# These algorithms need the global batch. Each of two ranks has one group and half of another. The policy has left its
# reference before the second generation batch.
OFF_POLICY = {"num_iterations": 2, "max_steps": 4, "beta": 0.1, "learning_rate": 0.1}


def own_estimator(rewards, rewards_per_func, group_ids, mask, old_logps, ref_logps):
    """Returns one advantage per token, less the divergence from the reference."""
    given = {
        "rewards": rewards,
        "rewards_per_func": rewards_per_func,
        "group_ids": group_ids,
        "mask": mask,
        "old_logps": old_logps,
        "ref_logps": ref_logps,
    }
    ESTIMATED.append({name: hashlib.sha256(value.numpy().tobytes()).hexdigest() for name, value in given.items()})
    means = rewards.view(-1, GROUP).mean(1)[group_ids]
    return (rewards - means)[:, None] - 0.1 * torch.where(mask.bool(), old_logps - ref_logps, 0)


ESTIMATED = []  # digests of the estimator's arguments

ALGORITHMS = {
    "reinforce": {"advantage_estimator": "reinforce"},
    "reinforce_baseline": {"advantage_estimator": "reinforce_baseline"},
    "token_baseline": {"advantage_estimator": "optimal_token_baseline", "loss_type": "dppo_tv", "epsilon": 0.02},
    "best_of_two": {"advantage_estimator": "pass_at_k(k=2)", "loss_type": "fipo(decay_rate=2.0)"},
    "cpgd": {"advantage_estimator": "cpgd", "loss_type": "cpgd", "kl_estimator": "k2"},
    "gmpo": {"loss_type": "gmpo", "epsilon": 0.4, "kl_estimator": "k2"},
    "dual_clip": {
        "loss_type": "dual_clip",
        "kl_estimator": "k2",
        "advantage_estimator": "dr_grpo",  # it doesn't undo the scale
        "reward_running_scale": True,
    },
    "adaptive_kl": {"kl_target": 0.01, "kl_horizon": 40, "gradient_accumulation_steps": 2},
    "entropies_of_rollout": {"top_entropy_quantile": 0.4, "gradient_accumulation_steps": 2},
    "current_entropies": {
        "top_entropy_quantile": 0.4,
        "entropy_source": "current(renormalize=True)",
        "gradient_accumulation_steps": 2,
    },
    "own_estimator": {"advantage_estimator": own_estimator},
}


def algorithm(name, folder):
    ESTIMATED.clear()
    options = {**OFF_POLICY, **ALGORITHMS[name]}
    trainer, result = train(folder, "qwen2_5_vl", image_rows(), 3 * GROUP, **options)
    return {**result, "estimated": list(ESTIMATED)}


globals().update({name: functools.partial(algorithm, name) for name in ALGORITHMS})


# These scenarios need two ranks, which exchange groups and sample with separate random states


def checked(folder):
    """Two ranks run the self-check in bfloat16. In a second one, the last of them runs out of memory."""
    policy = released("llava", image_rows(), objects=FAMILIES["llava"].build())
    check = policy.check()

    def too_large(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    pack = logprobs.pack
    if policy.policy.accelerator.is_last_process:
        logprobs.pack = too_large
    try:
        policy.check()
    except Exception as error:
        return {"self_check": dataclasses.asdict(check), "error": f"{type(error).__name__}: {error}"}
    finally:
        logprobs.pack = pack


def sampled(folder):
    """Two ranks sample the completions of one group."""
    trainer, result = train(folder, "qwen2_audio", audio_rows(), GROUP, RecordingTrainer, self_check=True)
    return {**result, "self_check": dataclasses.asdict(trainer.checks.self_check), "completions": trainer.completions}


class ExchangingTrainer(RecordingTrainer):
    """Records the groups without signal, the tokens and the extra prompts of each batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.batches = []
        self.drawn = []

    def _generate_and_score_completions(self, inputs):
        output = super()._generate_and_score_completions(inputs)
        dead = (output.advantages.view(-1, GROUP) == 0).all(1).sum()
        tokens = output.completion_mask.sum()
        self.batches.append([int(dead), int(tokens), int(output.num_items_in_batch)])
        return output

    def _roll_out_extra(self, n):
        rollout = super()._roll_out_extra(n)
        self.drawn.append(
            [len(row["audio"]["array"]) if "audio" in row else 0 for row in rollout.source.rows[::GROUP]]
        )
        return rollout


def unequal_reward(completion_ids, trainer_state, **kwargs):
    """
    On the second rank, all groups have signal. On the first rank, only the first group of a draw has signal, and in
    the second half of the run no group has.
    """
    if PartialState().process_index == 1:
        n_live = len(completion_ids)
    else:
        n_live = GROUP if trainer_state.global_step < trainer_state.max_steps // 2 else 0
    return [float(i % 2) if i < n_live else 1.0 for i in range(len(completion_ids))]


EXCHANGED = {
    "dynamic_sampling": 2,
    "dynamic_sampling_range": [0.1, 0.9],
    "replay_buffer_size": 4,
    "beta": 0.1,
    "learning_rate": 0.1,
    "shuffle_dataset": True,
    "difficulty_sampling": True,
    "trainer_class": ExchangingTrainer,
    "reward_func": unequal_reward,
}


def exchanged(folder):
    """Each rank has two groups. Each clip needs one forward pass, and the ranks have different numbers of clips."""
    trainer, result = train(folder, "gemma3n", audio_rows(), 4 * GROUP, max_steps=4, **EXCHANGED)
    state = trainer._stream.sampler.state_dict()
    difficulty = [state["rates"].nan_to_num(9.0).tolist(), state["drawn"]]
    return {**result, "batches": trainer.batches, "drawn": trainer.drawn, "difficulty": difficulty}


def resumed(folder):
    """Runs two updates of two micro-batches each per generation batch, and stops between them."""
    options = {
        **EXCHANGED,
        "balance_ranks": True,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "max_steps": 6,
        "optim": "adamw_torch",
        "learning_rate": 0.01,
        "save_strategy": "steps",
        "save_steps": 3,
        "kl_target": 0.01,
        "kl_horizon": 100,
        "self_check": True,
    }
    _, straight = train(folder / "straight", "qwen2_5_vl", UNEVEN, 2 * GROUP, **options)
    PartialState().wait_for_everyone()
    checkpoint = folder / "straight" / "output" / "checkpoint-3"
    _, result = train(folder / "again", "qwen2_5_vl", UNEVEN, 2 * GROUP, checkpoint=checkpoint, **options)
    return compared(straight, result)


def resumed_reference(folder):
    """The reference follows the policy before and after the stop."""
    options = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    options |= {"optim": "adamw_torch", "learning_rate": 0.01, "max_steps": 2}
    saving = {"save_strategy": "steps", "save_steps": 1}
    checkpoint = folder / "straight/output/checkpoint-1"
    trainers = []
    updates = []
    for name, own in (("straight", saving), ("again", {"checkpoint": checkpoint})):
        trainer, result = train(folder / name, "qwen2_5_vl", image_rows(), 2 * GROUP, **options, **own)
        PartialState().wait_for_everyone()
        trainers.append(trainer)
        updates.append(result["update"])
    references = [weights(trainer.accelerator.unwrap_model(trainer.ref_model)) for trainer in trainers]
    first = weights(FAMILIES["qwen2_5_vl"].build()[0]) if ENGINE != "zero3" else None
    message = None
    if ENGINE == "ddp":  # all engines ask for the folder alike
        if PartialState().is_main_process:
            shutil.rmtree(checkpoint / "ref_model")
            (checkpoint / "manifest.json").unlink()
        PartialState().wait_for_everyone()
        message = refusal(train, folder / "without", "qwen2_5_vl", image_rows(), 2 * GROUP, **options, **own)
    return {
        **result,
        "otherwise": [
            name
            for a, b in (updates, references)
            for name in a | b
            if name not in b or not torch.equal(a[name], b[name])
        ],
        "moved": first is None or any(not torch.equal(first[name], references[0][name]) for name in first),
        "kl": [step["kl"] for step in result["steps"]],
        "message": message,
    }


def resumed_by_more(folder):
    """The second rank has no saved state, as after a run of one process."""
    options = {**EXCHANGED, "max_steps": 4, "kl_target": 0.01, "kl_horizon": 100, "self_check": True}
    saving = {"save_strategy": "steps", "save_steps": 2}
    train(folder / "before", "qwen2_5_vl", image_rows(), 2 * GROUP, **options, **saving)
    checkpoint = folder / "before" / "output" / "checkpoint-2"
    state = PartialState()
    state.wait_for_everyone()
    if state.is_main_process:
        (checkpoint / "rollout_state_1.pt").unlink()
        (checkpoint / "manifest.json").unlink()
        saved = load_rollout_state(checkpoint, 0)
        saved["batches"]["num_processes"] = 1
        save_rollout_state(checkpoint, 0, saved)
    state.wait_for_everyone()
    trainer, result = train(folder / "after", "qwen2_5_vl", image_rows(), 2 * GROUP, checkpoint=checkpoint, **options)
    shared = [trainer.kl_coef, trainer._stream.state_dict()["n_extra"], dataclasses.asdict(trainer.checks.self_check)]
    return {**result, "shared": shared, "expected_before": load_rollout_state(checkpoint, 0)["kl_controller"]["value"]}


class InjectedTrainer(RecordingTrainer):
    """Never samples."""

    n_given = 4


def sharded(folder, checkpoint=None):
    """The optimizer has a state of each weight."""
    options = {"optim": "adamw_torch", "learning_rate": 0.01, "adam_epsilon": 1e-3, "max_steps": 3}
    options |= {"save_strategy": "steps", "save_steps": 2, "checkpoint": checkpoint}
    return train(folder, "qwen2_5_vl", image_rows(), 4 * GROUP, InjectedTrainer, **options)[1]


def resharded(folder):
    """Resumes from what other processes wrote in `sharded`, but not from a checkpoint that was saved without FSDP."""
    checkpoint = folder.parent.parent / "two" / "sharded" / "output" / "checkpoint-2"
    result = sharded(folder, checkpoint)
    if PartialState().is_main_process:
        shutil.copytree(checkpoint, folder / "plain", ignore=shutil.ignore_patterns("*_0", "manifest.json"))
    PartialState().wait_for_everyone()
    return {**result, "message": refusal(sharded, folder / "refused", folder / "plain")}


def by_prompt(tokenizer, policy, model, prompts, config, pad_id):
    """Returns completions that depend only on the prompt. Later prompts get longer ones."""
    completions = []
    for i, prompt in enumerate(prompts):
        index = int(tokenizer.decode(prompt.input_ids).split("number ")[1].split()[0])
        generator = torch.Generator().manual_seed(100 * index + i)
        length = 2 + 2 * index + int(torch.randint(0, 3, (), generator=generator))
        completions.append(torch.randint(50, 200, (length,), generator=generator))
    return torch.nn.utils.rnn.pad_sequence(completions, batch_first=True, padding_value=pad_id)


def experience(folder):
    """The statistics of the experience maker cover all ranks, whose responses have different widths."""
    AcceleratorState._reset_state()
    accelerator = Accelerator(cpu=True)
    model, processor = FAMILIES["qwen2_5_vl"].build()
    reference = FAMILIES["qwen2_5_vl"].build()[0]
    with torch.no_grad():
        reference.get_output_embeddings().weight.mul_(1.2)
    prompts = [f"Is there a bird in number {i} of them?" for i in range(4)]
    each = len(prompts) // accelerator.num_processes
    prompts = prompts[accelerator.process_index * each :][:each]
    advantages = {}
    for estimator in ("group_norm", "rloo", "reinforce", "reinforce_baseline", "cpgd", "dr_grpo"):
        config = ExperienceConfig(
            estimator,
            n_samples_per_prompt=3,
            micro_rollout_batch_size=3,
            kl_in_reward=estimator != "cpgd",
            reward_running_scale=True,
            progress=False,
            accelerator=accelerator,
        )
        actor = Actor(model, bf16=False)
        experience_maker.sample_completions = functools.partial(by_prompt, processor.tokenizer)
        maker = NaiveExperienceMaker(
            actor,
            None,
            None,
            Actor(reference, bf16=False),
            processor.tokenizer,
            64,
            FixedKLController(0.1),
            config,
            reward_fn=lambda completion_ids, **kwargs: [sum(ids) % 11 / 10 for ids in completion_ids],
        )
        made = maker.make_experience_list(prompts)
        rows = [a[mask].tolist() for e in made for a, mask in zip(e.advantages, e.action_mask, strict=True)]
        advantages[estimator] = rows
    return {"advantages": advantages}


def refused(folder):
    """Each rank must hold whole groups to exchange them."""
    options = {"per_device_train_batch_size": GROUP // 2, "num_generations": GROUP, "use_cpu": True}
    cases = ({"dynamic_sampling": 4}, {"replay_buffer_size": 4})
    return {"messages": [refusal(MultimodalGRPOConfig, str(folder), **options, **case) for case in cases]}


# Scenarios that save the trained model


def loaded(trainer, family, load, *folders):
    """Returns the names of the weights that differ, for each model loaded from the folders."""
    trained = weights(trainer.model)
    PartialState().wait_for_everyone()
    unset_hf_deepspeed_config()  # prevents ZeRO-3 from sharding the loaded weights
    model_class = FAMILIES[family].model_class
    otherwise = []
    for folder in folders:
        AutoProcessor.from_pretrained(folder)
        for model in load(model_class, folder):
            saved = weights(model)
            differing = [name for name, value in trained.items() if not torch.equal(saved.pop(name), value)]
            otherwise.append([*differing, *saved])
    return otherwise


def merged(checkpoint):
    """Returns a checkpoint with whole weights, which accelerate makes of its shards if it has any."""
    if ENGINE == "fsdp2" and PartialState().num_processes > 1:
        merge_fsdp_weights(str(checkpoint / "pytorch_model_fsdp_0"), str(checkpoint))
    return checkpoint


def greedy(folder, family, rows, batch=2 * GROUP):
    """Trains a step on given completions and one on sampled ones of different lengths, then saves."""
    trainer, result = train(
        folder,
        family,
        rows,
        batch,
        type("Greedy", (RecordingTrainer,), {"n_given": 1}),
        end_ids=list(range(20, 400, 5)),
        max_steps=2,
        generation_kwargs={"do_sample": False},
        save_strategy="steps",
        save_steps=2,
    )
    trainer.save_model(folder / "saved")

    def load(model_class, place):
        yield model_class.from_pretrained(place)

    PartialState().wait_for_everyone()
    otherwise = loaded(trainer, family, load, folder / "saved", merged(folder / "output" / "checkpoint-2"))
    return {**result, "saved_otherwise": otherwise, "completions": trainer.completions[-1]}


greedy_images = functools.partial(greedy, family="qwen2_5_vl", rows=image_rows())
greedy_audio = functools.partial(greedy, family="qwen2_audio", rows=audio_rows())
# Isolated clips of different lengths give two ranks different numbers of forward passes
CLIPS = audio_rows((0.2, 0.4, 0.3, 0.3, 0.2, 0.2, 0.5, 0.3))
greedy_isolated = functools.partial(greedy, family="gemma3n", rows=CLIPS, batch=4 * GROUP)


def adapter(folder, family, rows, modules):
    """LoRA in the encoder and in the language model; the base model is the reference. FSDP2 also resumes."""
    objects = {"peft_config": LoraConfig(r=4, target_modules=modules)}
    options = {**REUSED, "max_steps": 2, "objects": objects, "save_strategy": "steps", "save_steps": 1}
    trainer, result = train(folder, family, rows, 2 * GROUP, **options)
    trainer.save_model(folder / "saved")
    if ENGINE == "fsdp2" and PartialState().num_processes > 1:
        PartialState().wait_for_everyone()
        again = train(folder / "again", family, rows, 2 * GROUP, checkpoint=folder / "output/checkpoint-1", **options)
        result = compared(result, again[1])

    def load(model_class, place):
        yield PeftModel.from_pretrained(model_class.from_pretrained(folder / "model"), place)
        yield AutoPeftModel.from_pretrained(place)

    folders = folder / "saved", folder / "output" / "checkpoint-2"
    otherwise = loaded(trainer, family, load, *folders)  # before the adapter is merged, which rounds
    return {**result, **(synced(trainer) if result["sharded"] else {}), "saved_otherwise": otherwise}


MODULES = ["q_proj", "v_proj"]
adapter_images = functools.partial(adapter, family="qwen2_5_vl", rows=image_rows(), modules=[*MODULES, "qkv"])
adapter_audio = functools.partial(adapter, family="qwen2_audio", rows=audio_rows(), modules=MODULES)
