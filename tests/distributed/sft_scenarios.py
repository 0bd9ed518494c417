# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Scenarios of supervised training. Each rank has other media and another number of tokens."""

from functools import partial

from datasets import Dataset
from helpers.chats import image
from helpers.families import FAMILIES
from peft import LoraConfig
from training import engine_options, observed, start

from trl_multimodal_rft import MultimodalSFTConfig, MultimodalSFTTrainer


def sft_rows(folder, peft_config=None, **options):
    """Runs two updates of two micro-batches each, in whose four rows one rank has all images, then the other."""
    state = start()
    model, processor = FAMILIES["qwen2_5_vl"].build()
    model.save_pretrained(folder / "model")
    state.wait_for_everyone()
    picture = image(84, 56)["image"]
    rows = [
        {
            "prompt": "What is it?" + " Is there a cat?" * (i % 3),
            "completion": "It is a bird." + " It sings." * (i % 5),
            "image": picture if i // 2 % 2 == i // 8 else None,
        }
        for i in range(16)
    ]
    args = MultimodalSFTConfig(
        str(folder / "output"),
        per_device_train_batch_size=4 // state.num_processes,
        gradient_accumulation_steps=2,
        max_steps=2,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
        max_grad_norm=1e9,
        train_sampling_strategy="sequential",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        bf16=False,
        packing=True,
        **engine_options(state),
        **options,
    )
    trainer = MultimodalSFTTrainer(
        str(folder / "model"),
        args,
        train_dataset=Dataset.from_list(rows),
        processing_class=processor,
        peft_config=peft_config,
    )
    return observed(trainer)


ADAPTER = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
sft_parts = partial(sft_rows, max_tokens_per_microbatch=60, ddp_find_unused_parameters=False)
sft_adapter = partial(sft_rows, peft_config=ADAPTER)
