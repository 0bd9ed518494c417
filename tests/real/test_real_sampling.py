# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions of a pretrained model are those of its own `generate`, token by token."""

from itertools import product

import pytest
import torch
from helpers.real_models import REAL, load, rows_of
from transformers import GenerationConfig

from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import all_placeholder_ids, encode_prompt
from trl_multimodal_rft.engines.transformers import generate_completions
from trl_multimodal_rft.forward.attention import install_prefix_attention, original_attention


pytestmark = REAL
G = 2
# Each model has options of its own: they change logits, which don't say whose they are
OPTIONS = {"text": {"temperature": 0.7, "top_p": 0.9}, "sound": {"temperature": 1.2, "min_p": 0.05}}


def made(kind):
    model, processor = load(kind)
    install_prefix_attention(model)
    messages = [row["prompt"] for row in rows_to_messages(list(rows_of(kind, 3)))]
    prompts = [encode_prompt(message, processor, model) for message in messages]
    for message in messages if kind == "sound" else ():
        for part in message[0]["content"]:
            if part["type"] == "audio":
                part["audio"] = part["audio"].source["path"]  # as the processor documents
    getattr(processor, "tokenizer", processor).padding_side = "left"
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    options |= {"padding": True} if kind == "text" else {"processor_kwargs": {"padding": True}}
    inputs = processor.apply_chat_template(messages, **options)
    assert len({len(prompt) for prompt in prompts}) > 1
    repeated = {name: value.repeat_interleave(G, 0) for name, value in inputs.items()}
    return model, processor, [prompt for prompt, _ in product(prompts, range(G))], repeated


@pytest.mark.parametrize("kind", OPTIONS)
def test_tokens_and_random_state_are_those_of_generate(kind):
    """With the model's chat template, prompts of several lengths, and completions that the model ends itself."""
    model, processor, prompts, inputs = made(kind)
    end = model.generation_config.eos_token_id
    config = GenerationConfig(
        do_sample=True,
        max_new_tokens=16,
        eos_token_id=end,
        pad_token_id=model.generation_config.pad_token_id,
        suppress_tokens=sorted(all_placeholder_ids(model, processor)) or None,
        disable_compile=True,
        **OPTIONS[kind],
    )
    torch.manual_seed(1)
    with torch.no_grad(), original_attention(model):
        output = model.generate(**inputs, generation_config=config)
    expected = output[:, inputs["input_ids"].size(1) :]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    completions = generate_completions(model, model, prompts, config, config.pad_token_id, model.device)
    assert torch.equal(completions, expected) and torch.equal(torch.get_rng_state(), state)
    lengths = (expected != end).sum(1)
    assert lengths.min() < 16 and len(lengths.unique()) > 1, lengths
