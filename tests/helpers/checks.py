# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A policy, prompts and settings for the package's checks, as a trainer passes them, without a trainer."""

from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from transformers import GenerationConfig, PreTrainedModel

from helpers.trainer_utils import load
from trl_multimodal_rft.checks.self_check import RunSettings, SelfCheck, run_self_check
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import EncodedPrompt, all_placeholder_ids, encode_prompt
from trl_multimodal_rft.engines.transformers import sample_completions
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.policy import Fallbacks, PolicyForward


G = 4  # completions per prompt


@dataclass
class Subject:
    """Inputs of a check. `prompts` and `messages` have one entry per completion."""

    model: PreTrainedModel
    policy: PolicyForward
    prompts: list[EncodedPrompt]
    messages: list[Any]
    settings: RunSettings

    def check(self, **media: float) -> SelfCheck:
        """Runs the check. `media` are effects of media by modality, from an earlier check."""
        return run_self_check(self.policy, self.model, self.prompts, self.messages, self.settings, media)


def in_float32() -> Accelerator:
    """Returns an accelerator without autocast. Others of the process share its state, which the last trainer set."""
    AcceleratorState._reset_state()
    return Accelerator(cpu=True, mixed_precision="no")


def subject(
    family: str,
    rows: Any,
    *,
    policy_class: type[PolicyForward] = PolicyForward,
    temperature: float = 1.0,
    top_p: float = 1.0,
    objects: Any = None,
    **more: Any,
) -> Subject:
    """
    Returns inputs of a check: a tiny policy and its processor, or those in `objects`, and prompts of rows. `more`
    replaces settings of the run.
    """
    model, processor = objects or load(family)
    fallbacks = Fallbacks(
        packing=sharing_obstacle(model) is None,
        isolate=family_of(model).isolate,
        logits_from_model=not add_fused_head(model, temperature=temperature, outputs=("log_probs", "entropy")),
    )
    if fallbacks.packing:
        install_prefix_attention(model)
    policy = policy_class(in_float32(), processor, fallbacks=fallbacks, temperature=temperature)
    messages = [row["prompt"] for row in rows_to_messages(list(rows))]
    prompts = [encode_prompt(chat, processor, model, row=row) for row, chat in enumerate(messages)]
    tokenizer = getattr(processor, "tokenizer", processor)
    config = GenerationConfig(
        max_new_tokens=8,
        do_sample=True,
        temperature=temperature,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        suppress_tokens=sorted(all_placeholder_ids(model, processor)) or None,
        top_p=top_p,
        top_k=0,
    )

    def sample(prompts: list[EncodedPrompt], config: GenerationConfig, fallbacks: Fallbacks):
        return sample_completions(policy, model, prompts, config, tokenizer.pad_token_id, fallbacks=fallbacks)

    settings: dict[str, Any] = {
        "load_processor": lambda: processor,
        "template_kwargs": {},
        "generation_config": config,
        "eos_token_ids": [tokenizer.eos_token_id],
        "sample": sample,
        "generating": lambda: nullcontext(model),
    }
    repeated = [i for i, _ in product(range(len(prompts)), range(G))]
    return Subject(
        model, policy, [prompts[i] for i in repeated], [messages[i] for i in repeated], RunSettings(**settings | more)
    )


def released(family: str, rows: Any, **options: Any) -> Subject:
    """
    Returns inputs of a check for a policy like a released model: in bfloat16, with logits of up to 25. Its layers
    round at random, as different kernels of a GPU do.
    """
    result = subject(family, rows, **options)
    model = result.model.bfloat16()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    inputs = {"input_ids": torch.arange(40, 60)[None]}
    generator = torch.Generator().manual_seed(1)
    half = torch.finfo(torch.bfloat16).eps / 2

    def rounded(module, args, output):
        # Half of a unit in the last place up or down, for a fifth of the values each
        factors = torch.rand(output.shape, generator=generator)
        return (output * (1 + half * (factors < 0.2) - half * (factors > 0.8))).to(output.dtype)

    with torch.no_grad():
        head.weight *= 25 / model(**inputs).logits.abs().max()
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and module is not head:
            module.register_forward_hook(rounded)
    return result
