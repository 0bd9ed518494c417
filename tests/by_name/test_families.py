# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Compares every family, loaded by the name of its folder, with the model's forward pass and `generate`."""

import base64
import functools
import json
from itertools import product

import pytest
import torch
import transformers
from helpers.chats import RATE
from helpers.completions import random_completions
from helpers.encoding import assert_same_features, extended
from helpers.families import ALL_FAMILIES, FAMILIES, MORE_FAMILIES, encode, mel_extractor, tokenizer  # noqa: F401
from helpers.marks import slow_but
from helpers.packed_rows import LLAMA4_PACKS
from helpers.trainer_utils import checkpoint, make_trainer, relative_difference, text_rows
from packaging.version import Version

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.engines.transformers import sample_completions
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.policy import Fallbacks


G = 2  # completions per prompt


@functools.cache
def built(name):
    return ALL_FAMILIES[name].build()


def kinds(messages):
    """Returns the types of the media of a chat, in order."""
    return [block["type"] for block in messages[0]["content"] if block["type"] != "text"]


# By name


def as_users_write(block, processor):
    if block["type"] != "audio":
        return block
    if "base64" in block:
        return {"type": "audio", "audio": {"bytes": base64.b64decode(block["base64"])}}
    extractor = getattr(processor, "feature_extractor", None)
    return {**block, "sampling_rate": getattr(extractor, "sampling_rate", RATE)}


def plain_inputs(model, processor, messages):
    """Returns the processor's encoding of a chat, without resampling its frames."""
    options = (
        {"processor_kwargs": {"videos_kwargs": {"do_sample_frames": False}}} if "video" in kinds(messages) else {}
    )
    inputs = encode(processor, messages, **options)
    inputs.pop("labels", None)  # PaliGemma's processor adds them
    return inputs.to(model.dtype)  # Llama 4's images are in bfloat16


def plain_scores(model, inputs, ids):
    """Returns log-probabilities and entropies of a completion from the model's forward pass."""
    inputs = extended(inputs, ids, **family_of(model).token_field_fill)
    logps = model(**inputs, use_cache=False).logits[0, -len(ids) - 1 : -1].log_softmax(-1)
    return torch.stack([logps.gather(-1, ids[:, None])[:, 0], -(logps.exp() * logps).sum(-1)])


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


SLOWEST = {"gemma3n", "gemma4", "granite_speech", "phi4_multimodal", "voxtral"}


@pytest.mark.usefixtures("mel_extractor")
@pytest.mark.parametrize(
    "name", slow_but([*FAMILIES, *MORE_FAMILIES, "lfm2_vl", "qwen3_5_moe"], *FAMILIES.keys() - SLOWEST)
)
def test_by_name(name, tmp_path):
    """
    One batch holds prompts with media of different sizes and numbers, and one without. Features, scores, gradients and
    greedy samples equal those of the original model for each completion alone.
    """
    family = ALL_FAMILIES[name]
    (plain, processor) = built(name)
    plain.zero_grad()
    chats = family.prompts()
    template = {"chat_template": processor.chat_template} if name == "phi4_multimodal" else None  # it isn't saved
    if template is None:  # older versions of transformers load others than they saved
        processor = transformers.AutoProcessor.from_pretrained(checkpoint(name))
    inputs = [plain_inputs(plain, processor, chat) for chat in chats]
    objects = {"model": checkpoint(name)}
    trainer = make_trainer(
        MultimodalGRPOTrainer, name, text_rows(), tmp_path, objects=objects, chat_template_kwargs=template
    )
    model = trainer.model.eval()
    policy = trainer._policy
    assert type(model) is type(plain) and type(trainer.processing_class) is type(processor)
    assert model.generation_config.eos_token_id == plain.generation_config.eos_token_id
    chats = [
        [{**chat[0], "content": [as_users_write(block, processor) for block in chat[0]["content"]]}] for chat in chats
    ]
    messages = [row["prompt"] for row in rows_to_messages([{"prompt": chat} for chat in chats])]
    prompts = [trainer.prompts.encode(message, row) for row, message in enumerate(messages)]
    for prompt, expected in zip(prompts, inputs, strict=True):
        assert_same_features(prompt, expected)

    # A prompt represents a medium by a repeated special token, which must not be sampled, also later
    runs = [each["input_ids"][0].unfold(0, 3, 1) for each in inputs]
    repeated = {int(run[0]) for run in torch.cat(runs) if run.eq(run[0]).all()} & {
        *processor.tokenizer.all_special_ids
    }
    assert repeated and repeated <= {*trainer.generation_config.suppress_tokens}
    assert repeated <= {*trainer.generation_kwargs["suppress_tokens"]}
    assert repeated <= {*model.generation_config.suppress_tokens}
    trainer.save_model(tmp_path)
    saved_settings = json.loads((tmp_path / "config.json").read_text()).keys()
    assert saved_settings <= plain.config.to_dict().keys() | {"use_cache"}  # transformers' trainer sets it

    trainer.checks.on_prompts(trainer.model, messages, prompts, trainer._sampling.self_check_settings)
    packs = sharing_obstacle(model) is None and (name != "llama4" or LLAMA4_PACKS)
    assert packs or Version(transformers.__version__) < Version("5.21")
    assert policy.fallbacks == Fallbacks(packing=packs, isolate=family_of(model).isolate if packs else None)
    assert trainer.checks.self_check.media.keys() == set(family.modalities)
    assert min(trainer.checks.self_check.media.values()) > 5e-3

    repeated = [prompt for prompt, _ in product(prompts, range(G))]
    ids, mask = random_completions(len(repeated))
    weights = torch.randn(2, *ids.shape, generator=torch.Generator().manual_seed(1)) * mask
    expected = torch.zeros(weights.shape)
    for i, length in enumerate(mask.sum(1).tolist()):
        scores = plain_scores(plain, inputs[i // G], ids[i, :length])
        (scores * weights[:, i, :length]).sum().backward()
        expected[:, i, :length] = scores.detach()
    scores = policy.score(model, ScoreRequest(repeated, ids, mask, packed=packs))
    scores = torch.stack([scores.logps, scores.entropies])
    (scores * weights).sum().backward()
    assert (scores - expected).abs().max() <= (2e-5 if name == "qwen3_5" else 1e-5)  # its large weights round more
    assert relative_difference(gradients(plain), gradients(model)) <= 1e-5

    config = trainer.generation_config
    config.update(do_sample=False, max_new_tokens=5, top_k=None, top_p=None, temperature=None)
    sampled = sample_completions(policy, model, repeated, config, trainer._tokenizer.pad_token_id)
    for i, each in enumerate(inputs):
        ids = plain.generate(**each, generation_config=config)[:, each["input_ids"].size(1) :]
        assert torch.equal(sampled[G * i : G * (i + 1), : ids.size(1)], ids.expand(G, -1))


# Properties of the models
