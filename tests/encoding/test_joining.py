# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rules for joining prompts in one forward pass. `test_obstacles.py` measures that they are correct."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from datasets import Dataset
from helpers.chats import image
from helpers.completions import random_completions
from helpers.encoding import encode_chats
from helpers.families import FAMILIES as MATRIX
from helpers.families import encode
from helpers.packed_rows import backward
from helpers.synthetic import FAMILIES, own_logps
from helpers.trainer_utils import make_trainer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, GenerationConfig

from trl_multimodal_rft import ActorVL, MultimodalGRPOTrainer
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding import media as encoding
from trl_multimodal_rft.encoding.join import join_media
from trl_multimodal_rft.encoding.prompts import cast_features
from trl_multimodal_rft.engines.transformers import sample_completions
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.encoders import _on_host, media_inputs, to_model
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.logprobs import completion_scores
from trl_multimodal_rft.forward.masks import linear_masks, sharing_obstacle
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.policy import Fallbacks, PolicyForward
from trl_multimodal_rft.versions import cache_name


@pytest.mark.parametrize("name", ["fun_asr_nano", "glmasr", "minimax_m3_vl", "molmo2", "molmo2 video"])
def test_without_the_row_of_the_family_it_would_be_wrong(name, monkeypatch):
    monkeypatch.setattr(encoding, "indexed_media", lambda name: None)
    model, prompts = FAMILIES[name]()
    repeated = [prompt for prompt, _ in product(prompts, range(2))]
    ids, mask = random_completions(len(repeated), vocab=(50, 100))
    assert add_fused_head(model, outputs=("log_probs", "entropy"))
    packed = sharing_obstacle(model) is None
    if packed:
        install_prefix_attention(model)
    with torch.no_grad():
        expected = own_logps(model, repeated, ids, mask)
        logps = completion_scores(model, model, ScoreRequest(repeated, ids, mask, packed=packed)).logps
    assert (logps - expected).abs().max() > 1e-2


def test_images_of_other_numbers_of_tiles_than_those_of_the_first_batch(tmp_path):
    """The self-check sees the first batch alone, in which all have the same number."""
    sizes = [(28, 28), (28, 28), (56, 28), (56, 56)]
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": "?"}], "image": image(*size)["image"]} for size in sizes]
    )
    options = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 2, "shuffle_dataset": False}
    options["self_check"] = True
    trainer = make_trainer(MultimodalGRPOTrainer, "perception_lm", rows, tmp_path, **options)
    trainer.train()
    encoded = [trainer.prompts.encode(row["prompt"], 0) for row in rows_to_messages(list(rows))]
    tiles = [prompt.media["pixel_values"].size(1) for prompt in encoded]
    assert tiles[0] == tiles[1] != tiles[2] != tiles[3]
    repeated = [prompt for prompt, _ in product(encoded, range(2))]
    ids, mask = random_completions(len(repeated), vocab=(50, 100))
    with torch.no_grad():
        logps = trainer._policy.score(trainer.model, ScoreRequest(repeated, ids, mask, packed=True)).logps
        assert (logps - own_logps(trainer.model, repeated, ids, mask)).abs().max() <= 1e-5


def test_places_in_another_tensor_go_on():
    model, (first, second, _) = FAMILIES["molmo2"]()
    joined = join_media([first, second, first])
    places = [each.media["image_token_pooling"] for each in (first, second)]
    patches = [0, 2 * 16, 7 * 16]  # of the previous images
    shifted = [torch.where(own < 0, -1, own + n) for own, n in zip([*places, places[0]], patches, strict=True)]
    assert joined["image_token_pooling"].equal(torch.cat(shifted)) and (joined["image_token_pooling"] == -1).sum() == 3
    with pytest.raises(ValueError, match="molmo2 has media tensors that index others"):
        ActorVL(model, bf16=False)


def test_a_window_that_only_the_config_knows():
    """Qwen3-Omni's forward pass ignores the window of its config; rules that read the window don't."""
    model, processor = MATRIX["qwen3_omni_moe"].build()
    chats = MATRIX["qwen3_omni_moe"].prompts()[:2]
    model.config.get_text_config().sliding_window = 6
    prompts = encode_chats(model, processor, chats)
    assert set(linear_masks(model, prompts[0], 4).values()) == {None}
    repeated = [prompt for prompt, _ in product(prompts, range(2))]
    ids, mask = random_completions(len(repeated))
    expected = own_logps(model, repeated, ids, mask)
    own = backward(model, expected)
    scale = max(gradient.abs().max() for gradient in own.values())
    assert add_fused_head(model, outputs=("log_probs", "entropy"))
    install_prefix_attention(model)
    for packed in (False, True):
        logps = completion_scores(
            model, model, ScoreRequest(repeated, ids, mask, packed=packed, isolate="media")
        ).logps
        assert (logps - expected).abs().max() <= 1e-5
        for key, gradient in backward(model, logps).items():
            assert (gradient - own[key]).abs().max() <= 1e-5 * scale, key

    config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    plain = []
    for chat in chats:
        inputs = encode(processor, chat)
        output = model.generate(**inputs, generation_config=config, **{cache_name(): DynamicCache()})
        plain.append(output[0, inputs["input_ids"].size(1) :].tolist())
    for shared_prefill in (True, False):
        fallbacks = Fallbacks(isolate="media", shared_prefill=shared_prefill)
        sampled = sample_completions(
            PolicyForward(fallbacks=fallbacks), model, prompts, config, 0, generating=partial(nullcontext, model)
        )
        assert sampled.tolist() == plain


class OnHost(TorchDispatchMode):
    """Counts operations that make features on the host."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        made = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        self.count += any(each.is_cpu and each.is_floating_point() for each in made)
        return output


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_audio", "gemma3n", "phi4_multimodal"])
def test_features_are_joined_and_cast_on_the_device(family):
    model, processor = MATRIX[family].build()
    prompts = [each for each in encode_chats(model, processor, MATRIX[family].prompts()) if each.media]
    model.to(torch.bfloat16)
    expected = to_model(join_media(prompts), model, torch.device("cpu"))
    with OnHost() as host:
        moved = media_inputs(prompts, model, torch.device("meta"))
    assert host.count == 0 and all(value.is_meta for value in moved.values())
    assert all(_on_host(moved[name]).equal(value) for name, value in expected.items() if not value.is_floating_point())
    read = [replace(prompt, media=cast_features(prompt.media, model.dtype)) for prompt in prompts]
    for given in (prompts, read):
        inputs = media_inputs(given, model, torch.device("cpu"))
        assert list(inputs) == list(expected) == list(moved)
        for name, value in inputs.items():
            assert value.dtype == expected[name].dtype and value.equal(expected[name])
            assert (value.dtype, value.size()) == (moved[name].dtype, moved[name].size())
