# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios of preferences. Each rank has other media, another number of tokens, and other pairs with a view."""

from functools import partial

import torch
from accelerate import PartialState
from datasets import Dataset
from helpers.chats import image, turn
from helpers.families import FAMILIES
from helpers.trainer_utils import relative_difference, shifted
from peft import LoraConfig, get_peft_model
from training import GROUP, compared, engine_options, image_rows, observed, start
from training import train as train_grpo
from trl import KTOConfig, KTOTrainer

from trl_multimodal_rft import (
    MultimodalDPOConfig,
    MultimodalDPOTrainer,
    MultimodalKTOConfig,
    MultimodalKTOTrainer,
    MultimodalRewardConfig,
    MultimodalRewardTrainer,
)
from trl_multimodal_rft.models.reward_model import as_reward_model


SIZES = [(84, 56), (56, 56), (112, 84), (56, 112)]


def pairs(has_images=False):
    """Returns sixteen pairs, in whose fours one rank has all images, then the other, unless all have images."""
    return [
        {
            "prompt": "What is it?" + " Is there a cat?" * (i % 3),
            "chosen": "It is a bird." + " It sings." * (i % 5),
            "rejected": "It is a cat" + " or a dog" * (i % 4),
            "image": image(*SIZES[i % 4], seed=i)["image"] if has_images or i // 2 % 2 == i // 8 else None,
        }
        for i in range(16)
    ]


def saved(folder, batch, **options):
    """Saves a model. Returns it, and options of two updates of two micro-batches of `batch` pairs each."""
    state = start()
    model, processor = FAMILIES["qwen2_5_vl"].build()
    model.save_pretrained(folder / "model")
    state.wait_for_everyone()
    config = {
        "output_dir": str(folder / "output"),
        "per_device_train_batch_size": batch // state.num_processes,
        "gradient_accumulation_steps": 2,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1e9,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        **engine_options(state),
        **options,
    }
    return {"model": str(folder / "model"), "processing_class": processor}, config


def train(folder, rows, batch=4, peft_config=None, moves=False, checkpoint=None, **options):
    """Trains from another reference unless it moves."""
    options = {"rejected_view": "mask_patches(ratio=0.5)", "media_contribution_steps": 1, **options}
    objects, config = saved(folder, batch, **options)
    other = {} if peft_config or moves else {"ref_model": shifted(FAMILIES["qwen2_5_vl"].build()[0])}
    objects |= {"peft_config": peft_config, **other}
    trainer = MultimodalDPOTrainer(
        args=MultimodalDPOConfig(**config), train_dataset=Dataset.from_list(rows), **objects
    )
    return trainer, observed(trainer, checkpoint)


def dpo_pairs(folder, **options):
    return train(folder, pairs(), **options)[1]


dpo_parts = partial(dpo_pairs, max_tokens_per_microbatch=60)
dpo_adapter = partial(
    dpo_pairs, peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
)


def dpo_answers(folder):
    """Media of the prompt, of both answers, of one, or of none, so that ranks have other encoders to run."""
    rows = []
    for i, row in enumerate(pairs()):
        counts = {"prompt": i % 2, "chosen": i // 2 % 2, "rejected": i // 4 % 2}
        chats = {
            name: [{"type": "image"}] * count + [{"type": "text", "text": row[name]}] for name, count in counts.items()
        }
        images = [image(*SIZES[(i + j) % 4], seed=3 * i + j)["image"] for j in range(sum(counts.values()))]
        roles = dict.fromkeys(counts, "assistant") | {"prompt": "user"}
        rows.append({**{name: turn(roles[name], chats[name]) for name in counts}, "images": images})
    return train(folder, rows)[1]


def resumed_with(train, folder, **options):
    """Compares a run whose rows are shuffled with one that resumes before its last step."""
    options |= {"optim": "adamw_torch", "learning_rate": 0.01, "train_sampling_strategy": "random", "max_steps": 4}
    straight = train(folder / "straight", save_strategy="steps", save_steps=3, **options)
    PartialState().wait_for_everyone()
    return compared(straight, train(folder / "again", checkpoint=folder / "straight/output/checkpoint-3", **options))


def dpo_resumed(folder):
    """The reference follows the policy, and views are random."""
    return resumed_with(dpo_pairs, folder, moves=True, sync_ref_model=True, ref_model_sync_steps=1)


def dpo_skipped(folder):
    """One row is unreadable, and another one on the second rank alone. Evaluation leaves both out."""
    state = start()
    rows = pairs()[:8]
    own = folder / f"images-{state.process_index}"
    own.mkdir(parents=True)
    for i, row in enumerate(rows):
        image(*SIZES[i % 4], seed=i)["image"].save(own / f"{i}.png")
        row["image"] = str(own / f"{i}.png")
    (own / "1.png").unlink()
    if state.process_index == state.num_processes - 1:
        (own / "6.png").unlink()
    options = {"on_media_error": "skip", "max_skipped_rows": 3, "per_device_eval_batch_size": 6 // state.num_processes}
    trainer, result = train(folder, rows, **options)
    metrics = trainer.evaluate(Dataset.from_list(rows))
    names = ("eval_loss", "eval_media/skipped", "eval_rewards/view_margins", "eval_rewards/margins")
    kept = {name: metrics[name] for name in names}
    return {**result, "skipped": sorted(trainer._stream.skipped), "evaluated": kept}


def kto_rows(folder, trainer=MultimodalKTOTrainer, config_class=MultimodalKTOConfig, has_images=False, **options):
    """Ranks have other numbers of desirable completions. The reference is another model."""
    objects, config = saved(folder, 4, **options)
    rows = [
        {
            "prompt": turn("user", row["prompt"]),
            "completion": turn("assistant", row["chosen" if i % 3 else "rejected"]),
            "label": bool(i % 3),
            "image": row["image"],
        }
        for i, row in enumerate(pairs(has_images))
    ]
    objects["ref_model"] = shifted(FAMILIES["qwen2_5_vl"].build()[0], seed=1)
    return observed(trainer(args=config_class(**config), train_dataset=Dataset.from_list(rows), **objects))


kto_parts = partial(kto_rows, loss_type="apo_zero_unpaired", max_tokens_per_microbatch=60)


def kto_as_trl(folder):
    """The KL estimate is of a micro-batch, and a mean over ranks, so that one process has another."""
    options = {"has_images": True, "max_length": None, "gradient_accumulation_steps": 1}
    theirs = kto_rows(folder / "trl", KTOTrainer, KTOConfig, **options)
    PartialState().wait_for_everyone()
    ours = kto_rows(folder / "ours", **options)
    return {**ours, "trl": theirs["steps"], "distance": relative_difference(theirs["update"], ours["update"])}


def reward_pairs(folder, checkpoint=None, **options):
    """Margins, and ties of other ranks than the media."""
    objects, config = saved(folder, 4, center_rewards_coefficient=0.1, **options)
    rows = [{**row, "margin": i % 3 / 2, "tie": i % 5 == 0} for i, row in enumerate(pairs())]
    args = MultimodalRewardConfig(**config)
    return observed(MultimodalRewardTrainer(args=args, train_dataset=Dataset.from_list(rows), **objects), checkpoint)


reward_parts = partial(reward_pairs, max_tokens_per_microbatch=60)
reward_resumed = partial(resumed_with, reward_pairs)


def rewarded_by_models(folder):
    """By a reward model and an adapter of one, each by its name."""
    state = start()
    (model, processor) = FAMILIES["qwen2_5_vl"].build()
    names = [str(folder / each) for each in ("base", "whole", "adapter")]
    if state.is_main_process:
        model.save_pretrained(names[0])
        torch.manual_seed(1)
        judge = as_reward_model(model)
        judge.save_pretrained(names[1])
        judge.name_or_path = names[0]
        config = LoraConfig(target_modules=["q_proj"], modules_to_save=["score"], init_lora_weights=False)
        get_peft_model(judge, config).save_pretrained(names[2])
        for each in names:
            processor.save_pretrained(each)
    state.wait_for_everyone()
    return train_grpo(folder, "qwen2_5_vl", image_rows(), 2 * GROUP, reward_func=names[1:], max_steps=2)[1]
