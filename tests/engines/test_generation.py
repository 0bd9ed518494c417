# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Generation with one prefill per prompt equals `generate` on repeated prompts, for every family."""

import copy
from itertools import product

import pytest
import torch
import transformers as hf
from helpers import families
from helpers.cuda_path import Counts
from helpers.encoding import build_encoded, encode_chats
from helpers.families import FAMILIES, every_family
from helpers.trainer_utils import image_rows, length_and_sum, make_trainer
from transformers import GenerationConfig

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.encoding.conversations import encode_prefix
from trl_multimodal_rft.engines import transformers as generation
from trl_multimodal_rft.engines.transformers import Branches, generate_completions, sample_completions, trim_after_eos
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.forward import shared_cache
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.encoders import to_model
from trl_multimodal_rft.forward.prompt_groups import group_by_prompt, left_pad, split_samples
from trl_multimodal_rft.policy import Fallbacks, PolicyForward


G = 3
# Special tokens of all families come first in their vocabularies
SPECIAL = list(range(30))


def build(name):
    model, processor, prompts = build_encoded(name)
    model.config.get_text_config().output_router_logits = False  # `generate` fails with it on padded prompts
    plain = copy.deepcopy(model)
    install_prefix_attention(model)
    return model, plain, processor, [prompt for prompt, _ in product(prompts, range(G))]


def config(tokenizer, **kwargs):
    return GenerationConfig(
        max_new_tokens=8,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        suppress_tokens=SPECIAL,
        disable_compile=True,
        **kwargs,
    )


@pytest.mark.parametrize("name", every_family())
def test_shared_prefill_equals_generate(name, monkeypatch):
    """`test_families.test_by_name` compares greedy samples with `generate` on each prompt alone."""
    model, plain, processor, prompts = build(name)
    tokenizer = processor.tokenizer
    args = (config(tokenizer, do_sample=True, top_p=0.95), tokenizer.pad_token_id, model.device)
    prefilled = []

    def count_rows(rows, pad_token_id):
        prefilled.append(len(rows))
        return left_pad(rows, pad_token_id)

    monkeypatch.setattr(generation, "left_pad", count_rows)
    for part in split_samples(prompts, "media"):  # prompts that can't join exactly can't be compared either
        rows = [prompts[i] for i in part]
        torch.manual_seed(0)
        expected = generate_completions(plain, plain, rows, *args, shared_prefill=False)
        torch.manual_seed(0)
        completions = generate_completions(model, model, rows, *args)
        assert torch.equal(completions, expected)
        assert prefilled[-3:] == [len(rows), len(group_by_prompt(rows)), len(rows)]  # the last for ids alone


@pytest.mark.parametrize("name", ["Exaone4_5_", "HyperCLOVAXVisionV2"])
def test_models_that_make_their_own_positions_are_sampled_by_generate(name, tmp_path):
    """In evaluations and in runs without a self-check, too."""
    if not hasattr(hf, f"{name}ForConditionalGeneration"):
        pytest.skip("a newer transformers has it")
    vision = {**families.tower(num_key_value_heads=2), "depth": 2, "num_heads": 4, "out_hidden_size": 64}
    text = {"model_type": "exaone4", "head_dim": 16, "sliding_window": 8} if name == "Exaone4_5_" else {}
    parts = (getattr(hf, f"Qwen2VL{kind}Processor")(size=families.qwen_pixels(28)) for kind in ("Image", "Video"))
    options = {"processor": {"blocks": families.QWEN_VISION_BLOCKS}, "text": text, "vision_config": vision}
    model, processor = families.build(
        name, families.QWEN_VISION_TOKENS, *parts, image_token_id="image", video_token_id="video", **options
    )
    config = EvaluationConfig(max_completion_length=4)
    found = [evaluate(model, processor, image_rows(n), length_and_sum, config).rows[0] for n in (1, 4)]
    assert found[0]["completions"] == found[1]["completions"]
    objects = {"model": model, "processing_class": processor}
    make_trainer(MultimodalGRPOTrainer, "", image_rows(), tmp_path, objects=objects, max_steps=1).train()


def test_decoding_copies_no_earlier_keys(monkeypatch):
    """Logits are those of transformers' own cache, also after room for more tokens was made."""
    model, _, processor, prompts = build("qwen2_5_vl")
    options = config(processor.tokenizer, do_sample=False, output_logits=True, return_dict_in_generate=True)
    args = (model, model, prompts[:1] * 2, options, processor.tokenizer.pad_token_id, model.device)
    found = {}
    monkeypatch.setattr(shared_cache, "ROOM", 3)
    for is_shared in (False, True):
        with Counts() as counts:
            output = generate_completions(*args, shared_prefill=is_shared)
        found[is_shared] = torch.stack(output.logits), counts.operations["cat"]
    (theirs, copies), (ours, rest) = found.values()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)
    layers = model.config.text_config.num_hidden_layers
    steps = len(ours)
    assert copies - rest >= 2 * layers * (steps - 1)  # of keys and values


@pytest.mark.parametrize("option", [{"cache_implementation": "static"}, {"use_cache": False}])
def test_options_that_conflict_with_a_cache(option):
    model, _, processor, prompts = build("qwen2_audio")
    tokenizer = processor.tokenizer
    args = (model, model, prompts)
    expected = generate_completions(*args, config(tokenizer, do_sample=False), tokenizer.pad_token_id, model.device)
    greedy = config(tokenizer, do_sample=False, **option)
    assert torch.equal(generate_completions(*args, greedy, tokenizer.pad_token_id, model.device), expected)


def test_isolated_prompts_keep_their_completions():
    """Text joins the media of one part, in any order."""
    model, plain, processor, prompts = build("glm4v")
    media, text = (next(p for p in prompts if bool(p.media) == has) for has in (True, False))
    rows = [text, media, text]
    greedy = config(processor.tokenizer, do_sample=False)
    args = (greedy, processor.tokenizer.pad_token_id)
    expected = [generate_completions(plain, plain, [row], *args, model.device)[0] for row in rows]
    assert not torch.equal(expected[0], expected[1])
    sampled = sample_completions(PolicyForward(fallbacks=Fallbacks(isolate="media")), model, rows, *args)
    assert torch.equal(sampled, torch.stack(expected))


def test_given_fallbacks_replace_those_of_the_policy(monkeypatch):
    model, _, processor, prompts = build("glm4v")
    media, text = (next(p for p in prompts if bool(p.media) == has) for has in (True, False))
    parts = []

    def recorded(model, unwrapped_model, part, *args, **options):
        parts.append(part)
        return generate_completions(model, unwrapped_model, part, *args, **options)

    monkeypatch.setattr(generation, "generate_completions", recorded)
    args = (config(processor.tokenizer), processor.tokenizer.pad_token_id)
    sample_completions(PolicyForward(), model, [text, media, text], *args, fallbacks=Fallbacks(isolate="prompt"))
    assert parts == [[text, text], [media]]


def test_trim_after_eos():
    ids = torch.tensor([[5, 2, 7, 2], [5, 6, 7, 8], [3, 0, 0, 0], [0, 0, 0, 2]])
    assert trim_after_eos(ids, [2, 3]) == [[5, 2], [5, 6, 7, 8], [3], [0, 0, 0, 2]]


# Reasons to prefill completions again after tool results; `None` where generation continues from its cache. Families
# that isolate media also prefill again.
OBSTACLES = {
    "qwen2_5_omni": None,
    "gemma3": "windows",
    "qwen3_vl": None,
    "qwen3_5": "carry states",
    "audioflamingo3": None,
    "internvl": None,
    "llava": None,
    "qwen2_5_vl": None,
    "qwen2_audio": None,
    "qwen2_vl": None,
    "qwen3_vl_moe": None,
    "paligemma": "attend to later ones",
}


def appended(model, prompts, completions, turns):
    """Returns each prompt with its completions and the tool result after each."""
    ids = [[] for _ in prompts]
    placed = [[] for _ in prompts]
    for sampled, returned in zip(completions, turns, strict=True):
        for i, (own, turn) in enumerate(zip(sampled, returned, strict=True)):
            placed[i].append((len(ids[i]) + len(own), turn))
            ids[i] += [*own, *turn.input_ids.tolist()]
    return [encode_prefix(*each, model) for each in zip(prompts, ids, placed, strict=True)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if i > 1 else []) for i, name in enumerate(OBSTACLES)],
)
@torch.no_grad()
def test_continues_from_its_cache(name):
    """After two turns, with some rows in another order, like the model's forward pass of the whole."""
    model, _, processor, prompts = build(name)
    tokenizer = processor.tokenizer
    branches = Branches()
    ends = list(range(30, len(tokenizer), 5))  # so that completions have different lengths
    options = config(tokenizer, do_sample=False, output_logits=True, return_dict_in_generate=True)
    options.eos_token_id = ends
    chats = [*encode_chats(model, processor, FAMILIES[name].prompts())]
    chats = [chat for chat in chats if not chat.media] + [chat for chat in chats if chat.media]

    def sample(prompts, branches):
        output = generate_completions(
            model, model, prompts, options, tokenizer.pad_token_id, model.device, branches=branches
        )
        start = output.sequences.size(1) - len(output.logits)
        return trim_after_eos(output.sequences[:, start:], ends), torch.stack(output.logits, 1).log_softmax(-1)

    sizes = []
    places = [*range(len(prompts))]
    sampled = []
    turns = []
    wholes = prompts
    for turn in range(3):
        ids, logps = sample(wholes, branches)
        sizes.append({*map(len, ids)})
        if turn > 0:
            assert ids == sample(wholes, None)[0]
            for row, whole in enumerate(wholes):
                batch = left_pad([whole], 0)
                plain = model(
                    input_ids=batch["input_ids"],
                    position_ids=batch["position_ids"],
                    **batch["fields"],
                    **to_model(whole.media, model, model.device),
                ).logits[0, -1]
                assert (logps[row, 0] - plain.log_softmax(-1)).abs().max() <= 1e-4
        chosen = places[::-1][turn:]  # the unfinished ones, in another order
        order = [places.index(place) for place in chosen]
        prompts = [prompts[row] for row in order]
        ids = [ids[row] for row in order]
        sampled = [[each[row] for row in order] for each in sampled] + [ids]
        turns = [[each[row] for row in order] for each in turns]
        turns += [[chats[(place + turn) % len(chats)] for place in chosen]]
        places = chosen
        wholes = appended(model, prompts, sampled, turns)
        branches.continuations = list(zip(places, turns[-1], strict=True))
    expected = OBSTACLES[name]
    assert branches.obstacle is None if expected is None else expected in branches.obstacle
    assert expected is not None or any(len(each) > 1 for each in sizes)
