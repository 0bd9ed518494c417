# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Families with an obstacle to a fast path are exact on a fallback, or raise an error of one sentence."""

import re
from itertools import product

import pytest
import torch
import transformers as hf
from datasets import Dataset
from helpers.chats import chat, image, text
from helpers.completions import random_completions
from helpers.families import template, tokenizer
from helpers.packed_rows import LLAMA4_PACKS, backward
from helpers.synthetic import FAMILIES, own_logps
from helpers.trainer_utils import length_and_sum

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.engines.transformers import sample_completions
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.logprobs import completion_scores, completion_values
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.models import Critic, ValueHead
from trl_multimodal_rft.policy import Fallbacks, PolicyForward, training_obstacle


pytestmark = pytest.mark.gate


G = 3

# Obstacles to packing their completions
PADDED = {
    "mllama": "a mask for each token (cross_attention_mask)",
    "idefics": "a mask for each token (image_attention_mask)",
    **dict.fromkeys(["inkling2", "inkling2_loop"], "layers of type hybrid, hybrid_sliding"),
    "unlimited_ocr": "layers of type reference_sliding_attention",
    "minimax_m3_vl": "layers of type minimax_m3_sparse",
    **dict.fromkeys(["mistral_large4", "hy_v4_vl"], "layers of type indexed_attention"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_equals_the_plain_forward_of_each_completion_and_generate(name):
    model, prompts = FAMILIES[name]()
    obstacle = sharing_obstacle(model)
    no_states = name == "minicpmv4_6" and not hasattr(hf.Cache, "get_conv_state")
    padded = "before transformers 5.21" if no_states else PADDED.get(name)
    assert obstacle is None if padded is None else padded in obstacle
    if no_states:
        pytest.skip("padded, its encoder doesn't take all the images of this batch; alone, it does")
    isolate = family_of(model).isolate
    repeated = [prompt for prompt, _ in product(prompts, range(G))]
    ids, mask = random_completions(len(repeated), vocab=(50, 100))
    expected = own_logps(model, repeated, ids, mask)
    own = backward(model, expected)
    scale = max(gradient.abs().max() for gradient in own.values())

    has_head = add_fused_head(model, outputs=("log_probs", "entropy"))
    if name == "llama4" and not LLAMA4_PACKS:
        pytest.skip("this transformers can't create its masks; `test_families.test_by_name` falls back")
    if obstacle is None:
        install_prefix_attention(model)
    ways = [{}] if has_head else [{"logits_temperature": 1.0}]
    if name == "llama4":  # tests a model without a backbone once, in both ways
        ways.append({"logits_temperature": 1.0})
    for way in ways:
        for packed in [False, True][: 1 + (obstacle is None)]:
            logps = completion_scores(
                model, model, ScoreRequest(repeated, ids, mask, packed=packed, isolate=isolate, **way)
            ).logps
            assert (logps - expected).abs().max() <= 1e-5, (way, packed)
            for key, gradient in backward(model, logps).items():
                assert (gradient - own[key]).abs().max() <= 1e-5 * scale, (way, packed, key)

    if name == "llama4":  # its `generate` pads rows in a way that its layers don't expect beyond the first 8191 tokens
        for module in model.modules():
            module.floor_scale = 8192
    config = hf.GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    plain = [
        model.generate(
            input_ids=prompt.input_ids[None],
            attention_mask=torch.ones_like(prompt.input_ids)[None],
            **{field: values[None] for field, values in prompt.token_fields.items()},
            **prompt.media,
            generation_config=config,
        )[0, -5:]
        for prompt in prompts
    ]
    twice = [prompt for prompt, _ in product(prompts, range(2))]
    sampled = sample_completions(PolicyForward(fallbacks=Fallbacks(isolate=isolate)), model, twice, config, 0)
    assert torch.equal(sampled, torch.stack([row for row, _ in product(plain, range(2))]))


def test_mllama_trains_with_its_processor(tmp_path, caplog):
    words = tokenizer(image_token="<|image|>", bos_token="<|begin_of_text|>")
    words.bos_token = "<|begin_of_text|>"
    sizes = {"height": 56, "width": 56}
    processor = hf.MllamaProcessor(
        hf.MllamaImageProcessor(size=sizes, max_image_tiles=2), words, chat_template=template(image="<|image|>")
    )
    changes = {"vocab_size": len(words), "pad_token_id": words.pad_token_id, "cross_attention_layers": [1]}
    model, _ = FAMILIES["mllama"](text_config=changes, image_token_index=processor.image_token_id)
    rows = [
        [image(28, 28), text("Is there a cat?")],
        [text("Compare"), image(56, 28, seed=1), image(28, 28, seed=2)],
        [text("What is red?")],
        [image(28, 56, seed=3), text("What?")],
    ]
    args = MultimodalGRPOConfig(
        tmp_path,
        per_device_train_batch_size=8,
        num_generations=2,
        max_completion_length=5,
        max_steps=1,
        learning_rate=0.1,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        bf16=False,
    )
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = MultimodalGRPOTrainer(
        model,
        reward_funcs=lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": chat(*blocks)} for blocks in rows]),
        processing_class=processor,
    )
    trainer.train()
    check = trainer.checks.self_check
    assert max(check.padded, check.rows, check.sampled, check.features) <= 1e-5 and check.media["image"] > 0.01
    assert not trainer._policy.fallbacks.logits_from_model and "padded rows" in caplog.text
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert any("cross_attn" in name for name in moved) and any("vision_model" in name for name in moved)


@pytest.mark.parametrize("name", ["llama4", "nemotron_h_omni"])
def test_values_of_a_model_without_a_backbone(name):
    model, prompts = FAMILIES[name]()
    if name == "llama4" and not LLAMA4_PACKS:
        pytest.skip("this transformers can't create its masks")
    repeated = [prompt for prompt, _ in product(prompts, range(G))]
    ids, mask = random_completions(len(repeated), vocab=(50, 100))
    states = []
    handle = model.language_model.lm_head.register_forward_pre_hook(lambda module, args: states.append(args[0]))
    with torch.no_grad():
        own_logps(model, repeated, ids, mask)
    handle.remove()
    head = ValueHead(model.config.get_text_config().hidden_size)
    head.weight.data.normal_(std=0.1)
    expected = torch.zeros(ids.shape)
    for row, length in enumerate(mask.sum(1).tolist()):
        expected[row, :length] = head(states[row])[0, -length - 1 : -1]

    add_fused_head(model, outputs=("log_probs", "entropy"))
    install_prefix_attention(model)
    for packed in (False, True):
        for way in [{}, {"logits_temperature": 1.0}][name == "nemotron_h_omni" :]:
            values = completion_scores(
                model, model, ScoreRequest(repeated, ids, mask, packed=packed, critic=head, **way)
            ).values
            assert (values - expected).abs().max() <= 1e-5, (packed, way)
    if name == "llama4":
        critic = Critic(model)
        critic.head = head
        assert (completion_values(critic, model, ScoreRequest(repeated, ids, mask)) - expected).abs().max() <= 1e-5


class Words(hf.ProcessorMixin):
    """A processor without media token names."""

    def __init__(self):
        self.tokenizer = tokenizer()


REFUSED = {
    "GitForCausalLM": "(git) can't be trained: neither its config nor Words names a token that stands for image",
    "Kosmos2ForConditionalGeneration": "(kosmos-2) can't be trained: neither its config nor Words names a token",
    "Kosmos2_5ForConditionalGeneration": "(kosmos-2.5) can't be trained: neither its config nor Words names a token",
    "Blip2ForConditionalGeneration": "(blip-2) can't be trained: it is an encoder-decoder",
    "KyutaiSpeechToTextForConditionalGeneration": "can't be trained: it consumes one audio frame per generated token",
    "VoxtralRealtimeForConditionalGeneration": "can't be trained: it consumes one audio frame per generated token",
}


def construct(model, folder, **options):
    args = MultimodalGRPOConfig(folder, report_to="none", use_cpu=True, bf16=False, **options)
    rows = Dataset.from_list([{"prompt": chat(text("What?"))}])
    return MultimodalGRPOTrainer(
        model, reward_funcs=length_and_sum, args=args, train_dataset=rows, processing_class=Words()
    )


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_a_sentence(name, tmp_path):
    model_class = getattr(hf, name)
    options = {"text_config": {"model_type": "t5"}} if name.startswith("Blip2") else {}
    with torch.device("meta"):
        model = model_class(model_class.config_class(**options))
    with pytest.raises(ValueError, match=re.escape(REFUSED[name])):
        construct(model, tmp_path)


def test_completions_beyond_the_window_of_generate_are_refused(tmp_path):
    model, prompts = FAMILIES["unlimited_ocr"]()
    window = model.config.text_config.sliding_window
    with pytest.raises(ValueError, match=f"set `max_completion_length` to at most {window + 1}"):
        construct(model, tmp_path, max_completion_length=window + 2)
    assert training_obstacle(model, Words(), window + 1) is None

    # Its forward pass matches its samples only up to there
    prompt = prompts[0]
    config = hf.GenerationConfig(max_new_tokens=window + 2, do_sample=False, pad_token_id=0)
    config.update(return_dict_in_generate=True, output_logits=True)
    output = model.generate(prompt.input_ids[None], **prompt.media, generation_config=config)
    with torch.no_grad():
        own = model(input_ids=output.sequences, **prompt.media).logits[0, len(prompt) - 1 : -1]
    differences = (torch.stack(output.logits, dim=1)[0] - own).abs().amax(-1)
    assert differences[:-1].max() <= 1e-4 < differences[-1]


def test_text_alone_is_refused_where_there_is_no_forward_without_media():
    model, _ = FAMILIES["blip-2"]()
    with pytest.raises(MediaError, match="row 3, column 'prompt': holds no media, .* requires `pixel_values`"):
        encode_prompt("What?", Words(), model, row=3)
