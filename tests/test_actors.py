# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Actors equal the bare models that they hold, and each of their arguments does what it says."""

import copy
import functools
import json
import logging
import re
import subprocess
import textwrap
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO

import pytest
import torch
import transformers
from accelerate import PartialState
from helpers.chats import audio, chat, image, text, video
from helpers.encoding import build_encoded, encode_chats
from helpers.families import FAMILIES, decoder, every_family, tokenizer
from helpers.processes import python_command, python_environment
from helpers.trainer_utils import audio_rows, image_rows, load, make_trainer, relative_difference, run, saved
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.integrations import is_deepspeed_available, is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import is_flash_attn_2_available

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.algorithms.completions import mask_completions
from trl_multimodal_rft.data.columns import MediaError
from trl_multimodal_rft.encoding.join import join_media
from trl_multimodal_rft.encoding.prompts import all_placeholder_ids, placeholder_token_ids
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward import states
from trl_multimodal_rft.forward.scoring import left_pad
from trl_multimodal_rft.lightrft import Actor, ActorAL, ActorOmni, ActorVL, Critic
from trl_multimodal_rft.lightrft.models.bare_inputs import token_fields
from trl_multimodal_rft.models.towers import find_tower


pytestmark = pytest.mark.lightrft


TEMPERATURE = 0.7
N = 5  # actions of each row
ORDINARY = (60, 180)  # ids of no special token in any family
AUDIO_NAMES = {
    "input_features": "audio_values",
    "audio_input_features": "audio_values",
    "feature_attention_mask": "audio_attention_mask",
    "input_features_mask": "audio_attention_mask",
}


def actor_class(name):
    kinds = set(FAMILIES[name].modalities)
    return ActorVL if "audio" not in kinds else ActorAL if kinds == {"audio"} else ActorOmni


def make(name, **options):
    """An actor of a fresh model, in float32 unless told otherwise."""
    return actor_class(name)(FAMILIES[name].build()[0], **{"bf16": False, **options})


def language_model():
    words = tokenizer()
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**decoder(words))).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = words.eos_token_id, words.pad_token_id
    return model


@dataclass
class Batch:
    """
    Rows of prompts and responses, left-padded, and what goes with them.

    `media` have the names of an actor's arguments, `prompts` and `responses` are the rows apart.
    """

    sequences: torch.Tensor
    attention_mask: torch.Tensor
    media: dict[str, torch.Tensor]
    prompts: list
    responses: list[torch.Tensor]

    @property
    def lengths(self):
        return [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]

    @property
    def packed(self):
        rows = zip(self.prompts, self.responses, strict=True)
        return torch.cat([torch.cat([prompt.input_ids, response]) for prompt, response in rows])[None]

    @property
    def prompt_ids(self):
        return self.sequences[:, : -len(self.responses[0])]

    @property
    def prompt_mask(self):
        return self.attention_mask[:, : -len(self.responses[0])]


@dataclass
class Prompt:
    """What is used here of an encoded prompt."""

    input_ids: torch.Tensor
    media: dict = field(default_factory=dict)
    token_fields: dict = field(default_factory=dict)

    def __len__(self):
        return len(self.input_ids)


def text_batch(lengths=(4, 9, 6), sizes=None):
    generator = torch.Generator().manual_seed(1)
    return make_batch([Prompt(torch.randint(*ORDINARY, (n,), generator=generator)) for n in lengths], sizes)


def renamed(media):
    return {AUDIO_NAMES.get(name, name): value for name, value in media.items()}


def make_batch(prompts, sizes=None, pad=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes or [N] * len(prompts)
    responses = [torch.randint(*ORDINARY, (size,), generator=generator) for size in sizes]
    rows = [torch.cat([p.input_ids, r]) for p, r in zip(prompts, responses, strict=True)]
    longest = max(map(len, rows))
    sequences = torch.stack([nn.functional.pad(row, (longest - len(row), 0), value=pad) for row in rows])
    mask = torch.stack([(torch.arange(longest) >= longest - len(row)).long() for row in rows])
    return Batch(sequences, mask, renamed(join_media(prompts)), list(prompts), responses)


def with_fields(batch, names=("mm_token_type_ids", "token_type_ids"), fill=0):
    """The batch's media and the processor's per-token fields for its rows."""
    fields = {}
    for name in names:
        if name in batch.prompts[0].token_fields:
            rows = [
                torch.cat([p.token_fields[name], torch.full_like(r, fill)])
                for p, r in zip(batch.prompts, batch.responses, strict=True)
            ]
            longest = batch.sequences.size(1)
            fields[name] = torch.stack([nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    return {**batch.media, **fields}


def bare_logits(model, prompt, response, **changes):
    """What the model itself gives for one row, from what the processor returned."""
    fill = family_of(model).token_field_fill
    fields = {
        name: torch.cat([value, torch.full_like(response, fill.get(name, 0))])[None]
        for name, value in prompt.token_fields.items()
    }
    ids = torch.cat([prompt.input_ids, response])[None]
    media = {
        name: value.to(model.dtype) if value.is_floating_point() else value for name, value in prompt.media.items()
    }
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **media, **fields, **changes)
    return output.logits[0, -len(response) - 1 : -1]


def bare_logps(model, batch, temperature=1.0, **changes):
    """Log-probabilities of each row's response, in a list."""
    return [
        (bare_logits(model, prompt, response, **changes).float() / temperature)
        .log_softmax(-1)
        .gather(-1, response[:, None])[:, 0]
        for prompt, response in zip(batch.prompts, batch.responses, strict=True)
    ]


def slow_entropies(model, batch, temperature=1.0):
    rows = []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        probabilities = (bare_logits(model, prompt, response).double() / temperature).softmax(-1)
        rows.append(-(probabilities * probabilities.log()).nan_to_num(0).sum(-1))
    return torch.stack(rows).float()


@functools.cache
def bare(name):
    """A family's model that no actor touches, its processor and its encoded prompts."""
    return build_encoded(name)


@functools.cache
@torch.no_grad()
def cases(name):
    """
    Batches of the family's prompts and the log-probabilities of the bare model, row by row.

    One batch if its media join exactly; else one for each prompt, which stands twice in it.
    """
    model, _, prompts = bare(name)
    pad = model.config.get_text_config().pad_token_id
    isolate = name_joins_only_equal(model)
    parts = [[prompt, prompt] for prompt in prompts] if isolate else [prompts]
    batches = [make_batch(part, pad=pad, seed=i) for i, part in enumerate(parts)]
    return [(batch, torch.stack(bare_logps(model, batch, TEMPERATURE))) for batch in batches]


def name_joins_only_equal(model):
    return family_of(model).isolate is not None


def arguments(name, batch):
    """GLM writes videos with the token for images, so that only the processor's field tells them apart."""
    return with_fields(batch, ("mm_token_type_ids",)) if name == "glm4v" else batch.media


def assert_close(actual, expected, tolerance=1e-5):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance


# Log-probabilities


@pytest.mark.parametrize("name", every_family())
def test_forward_equals_the_bare_model(name):
    actor = make(name, temperature=TEMPERATURE)
    for batch, expected in cases(name):
        media = arguments(name, batch)
        with torch.no_grad():
            logps = actor(batch.sequences, N, batch.attention_mask, **media)
            again, output = actor(batch.sequences, N, batch.attention_mask, return_output=True, **media)
            plain = actor(batch.sequences, None, batch.attention_mask, return_output=True, **media)
        assert logps.dtype == again.dtype == torch.float32
        assert_close(logps, expected)
        assert_close(again, expected)
        assert output.logits.shape[:2] == plain.logits.shape[:2] == batch.sequences.shape
        if name != "paligemma":  # without actions, all of its row is prompt
            assert_close(
                plain.logits * batch.attention_mask[..., None], output.logits * batch.attention_mask[..., None]
            )
        assert "action_entropy" not in output


@pytest.mark.parametrize("name", FAMILIES)
def test_batches_cover_what_they_should(name):
    batches = [batch for batch, _ in cases(name)]
    assert {kind for batch in batches for p in batch.prompts for kind in p.modalities} == set(
        FAMILIES[name].modalities
    )
    if len(batches) == 1:
        assert not batches[0].attention_mask[:, 0].all()  # padding on the left
        assert len({tuple(len(v) for v in p.media.values()) for p in batches[0].prompts}) > 1


def test_text():
    model, batch = language_model(), text_batch(sizes=[5, 3, 1])
    expected = bare_logps(model, batch)
    logps = Actor(copy.deepcopy(model), bf16=False)(batch.sequences, 5, batch.attention_mask)
    assert logps.shape == (3, 5)
    for row, values in zip(logps, expected, strict=True):
        assert_close(row[-len(values) :], values)


def test_padding_after_short_responses():
    """Rows as `generate` returns them: prompts end together, responses start together."""
    model, _, prompts = bare("qwen2_5_vl")
    sizes = [5, 2, 3, 1, 4]
    batch = make_batch(prompts, sizes)
    sequences, mask = aligned(batch)
    expected = bare_logps(model, batch)
    logps = make("qwen2_5_vl")(sequences, 5, mask, **batch.media)
    for row, values in zip(logps, expected, strict=True):
        assert_close(row[: len(values)], values)


def aligned(batch):
    width, longest = max(map(len, batch.responses)), max(map(len, batch.prompts))
    rows, masks = [], []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        gaps = (longest - len(prompt), width - len(response))
        row = torch.cat([prompt.input_ids, response])
        rows.append(nn.functional.pad(row, gaps))
        masks.append(nn.functional.pad(torch.ones_like(row), gaps))
    return torch.stack(rows), torch.stack(masks)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen2_audio", "paligemma"])
def test_actions_that_are_prompt(name):
    """Rows that end together, as a replay buffer makes them: those with fewer actions hold prompt in their columns."""
    model, _, prompts = bare(name)
    prompts = prompts[:3]
    sizes = [5, 2, 3]
    batch = make_batch(prompts, sizes)
    media = with_fields(batch, fill=1) if name == "paligemma" else batch.media
    expected = bare_logps(model, batch)
    logps = make(name)(batch.sequences, 5, batch.attention_mask, **media)
    for row, values in zip(logps, expected, strict=True):
        assert_close(row[-len(values) :], values)
    # Before them stand those of the prompt's last tokens
    fields = {key: value[:-3] for key, value in prompts[1].token_fields.items()}
    shorter = Prompt(prompts[1].input_ids[:-3], prompts[1].media, fields)
    alone = Batch(None, None, None, [shorter], [batch.sequences[1, -5:]])
    if name != "paligemma":  # its prompts see their ends
        assert_close(logps[1], bare_logps(model, alone)[0])


def test_short_and_long_clips_in_one_batch():
    model, processor, _ = bare("qwen2_audio")
    chats = [chat(audio(0.2, seed=1), text("a")), chat(audio(1.0, seed=2), text("What do you hear in the audio?"))]
    batch = make_batch(encode_chats(model, processor, chats))
    assert batch.media["audio_attention_mask"].sum(1).tolist() == [20, 100]
    logps = make("qwen2_audio")(batch.sequences, N, batch.attention_mask, **batch.media)
    assert_close(logps, torch.stack(bare_logps(model, batch)))


def test_the_comparison_would_see_plain_positions():
    """Positions that only count tokens, which an actor could build from the mask, are wrong after an image."""
    model, _, prompts = bare("qwen2_5_vl")
    batch = make_batch(prompts[:1])
    positions = torch.arange(batch.sequences.size(1)).expand(3, 1, -1)
    wrong = bare_logps(model, batch, position_ids=positions)[0]
    assert (wrong - bare_logps(model, batch)[0]).abs().max() > 1e-3


def test_no_mask_is_all_ones():
    actor = make("qwen2_audio")
    batch = make_batch(bare("qwen2_audio")[2][:1])
    expected = actor(batch.sequences, N, torch.ones_like(batch.sequences), **batch.media)
    assert torch.equal(actor(batch.sequences, N, **batch.media), expected)
    sequences, mask, _ = actor.generate(batch.prompt_ids, **batch.media, max_new_tokens=3)
    again, *_ = actor.generate(
        batch.prompt_ids, attention_mask=torch.ones_like(batch.prompt_ids), **batch.media, max_new_tokens=3
    )
    assert torch.equal(sequences, again) and mask.all()


def test_all_but_the_first_token_may_be_actions():
    model, batch = language_model(), text_batch(lengths=(1, 1))
    logps = Actor(copy.deepcopy(model), bf16=False)(batch.sequences, N)
    assert_close(logps, torch.stack(bare_logps(model, batch)))


@pytest.mark.parametrize("num_actions", [0, 1, None])
def test_few_actions(num_actions):
    actor, batch = make("qwen2_audio"), make_batch(bare("qwen2_audio")[2])
    args = (batch.sequences, num_actions, batch.attention_mask)
    if num_actions is None:
        with pytest.raises(ValueError, match="return_output=True"):
            actor(*args, **batch.media)
        return
    logps, output = actor(*args, return_output=True, **batch.media)
    again = actor(*args, **batch.media)
    assert logps.shape == again.shape == (3, num_actions) and output.logits.shape[:2] == batch.sequences.shape
    assert torch.allclose(logps, again, atol=1e-5)


def test_temperature():
    model, _, prompts = bare("gemma3")
    batch = make_batch(prompts)
    for temperature in (0.5, 1.0, 2.0):
        actor = make("gemma3", temperature=temperature)
        logps, output = actor(batch.sequences, N, batch.attention_mask, return_output=True, **batch.media)
        assert_close(logps, torch.stack(bare_logps(model, batch, temperature)), 2e-5)
        assert_close(actor(batch.sequences, N, batch.attention_mask, **batch.media), logps, 2e-5)
        # The output's logits are the model's
        last = bare_logits(model, batch.prompts[0], batch.responses[0])[-1]
        assert_close(output.logits[0, -2], last)


def test_half_precision():
    """Log-probabilities are computed in float32 from half-precision states."""
    model = FAMILIES["qwen2_5_vl"].build()[0].to(torch.bfloat16)
    batch = make_batch(bare("qwen2_5_vl")[2])
    actor = make("qwen2_5_vl", bf16=True)
    with torch.no_grad():
        expected = torch.stack(bare_logps(model, batch))
        exact = torch.stack(bare_logps(bare("qwen2_5_vl")[0], batch))
        logps = actor(batch.sequences, N, batch.attention_mask, **batch.media)
        again, _ = actor(batch.sequences, N, batch.attention_mask, return_output=True, **batch.media)
    for values in (logps, again):
        assert values.dtype == torch.float32
        # As near to float32 weights as the bare model is, and not rounded to the 8 bits of bfloat16
        assert (values - exact).abs().mean() < 1.2 * (expected - exact).abs().mean()
        assert not torch.equal(values, values.bfloat16().float())


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights_of(logps):
    return torch.randn(logps.shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "qwen2_5_omni", "gemma3", "paligemma"])
def test_gradients(name):
    """Those of the bare model, row by row; with the output, and packed, too."""
    model, _ = FAMILIES[name].build()
    batch = make_batch(bare(name)[2])
    logps = torch.stack(bare_logps(model, batch))
    weights = weights_of(logps)
    (logps * weights).sum().backward()
    expected = gradients(model)
    calls = [
        lambda actor: actor(batch.sequences, N, batch.attention_mask, **batch.media),
        lambda actor: actor(batch.sequences, N, batch.attention_mask, return_output=True, **batch.media)[0],
        lambda actor: actor(batch.packed, N, packed_seq_lens=batch.lengths, **batch.media).view(-1, N),
    ]
    for call in calls:
        actor = make(name, packing_samples=True)
        (call(actor) * weights).sum().backward()
        assert relative_difference(expected, gradients(actor.model)) <= 1e-5


# Packed samples


@pytest.mark.parametrize("name", every_family())
def test_packed_equals_padded(name):
    actor = make(name, temperature=TEMPERATURE, packing_samples=True)
    for batch, expected in cases(name):
        media = batch.media
        if name == "glm4v":
            rows = [
                torch.cat([p.token_fields["mm_token_type_ids"], torch.zeros_like(r)])
                for p, r in zip(batch.prompts, batch.responses, strict=True)
            ]
            media = {**media, "mm_token_type_ids": torch.cat(rows)[None]}
        with torch.no_grad():
            logps = actor(batch.packed, [N] * len(expected), packed_seq_lens=batch.lengths, **media)
            padded = actor(batch.sequences, N, batch.attention_mask, **arguments(name, batch))
        assert logps.shape == (1, N * len(expected)) and logps.dtype == torch.float32
        assert_close(logps.view(-1, N), expected)
        assert_close(padded, expected)  # an actor for packed samples takes padded ones too


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "qwen2_5_omni"])
def test_packed_samples_of_several_lengths(name):
    model, _, prompts = bare(name)
    sizes = [4, 0, 2, 5, 1][: len(prompts)]
    batch = make_batch(prompts, sizes)
    actor = make(name, packing_samples=True)
    logps, output = actor(batch.packed, sizes, packed_seq_lens=batch.lengths, return_output=True, **batch.media)
    assert_close(logps[0], torch.cat(bare_logps(model, batch)))
    assert "aux_loss" not in output
    # Tensors of numbers do as well, and the mask has nothing to say
    again = actor(
        batch.packed, torch.tensor(sizes), torch.ones(1), packed_seq_lens=torch.tensor(batch.lengths), **batch.media
    )
    assert torch.equal(again, logps)


def test_packed_samples_without_any_action():
    actor, batch = make("qwen2_5_vl", packing_samples=True), make_batch(bare("qwen2_5_vl")[2], [0] * 5)
    logps = actor(batch.packed, 0, packed_seq_lens=batch.lengths, **batch.media)
    assert logps.shape == (1, 0)
    logps.sum().backward()


def test_packed_text():
    model, batch = language_model(), text_batch(sizes=[3, 0, 2])
    actor = Actor(copy.deepcopy(model), bf16=False, packing_samples=True)
    logps = actor(batch.packed, [3, 0, 2], packed_seq_lens=batch.lengths)
    assert_close(logps[0], torch.cat(bare_logps(model, batch)))
    # All but the first token may be actions
    everything = actor(batch.packed, [n - 1 for n in batch.lengths], packed_seq_lens=batch.lengths)
    assert everything.shape == (1, sum(batch.lengths) - 3)
    assert_close(everything[0, batch.lengths[0] - 1 - 3 : batch.lengths[0] - 1], bare_logps(model, batch)[0])


def test_packed_samples_do_not_see_each_other():
    actor, batch = make("qwen2_5_vl", packing_samples=True), make_batch(bare("qwen2_5_vl")[2][:2])
    first = actor(batch.packed, N, packed_seq_lens=batch.lengths, **batch.media)[:, :N]
    alone = make_batch(batch.prompts[:1])
    assert torch.equal(alone.responses[0], batch.responses[0])
    assert_close(actor(alone.packed, N, packed_seq_lens=alone.lengths, **alone.media), first, 1e-5)


def test_errors_of_packed_samples():
    batch = make_batch(bare("qwen2_audio")[2])
    actor, unpacked = make("qwen2_audio", packing_samples=True), make("qwen2_audio")
    with pytest.raises(ValueError, match="made with `packing_samples=True`"):
        unpacked(batch.packed, N, packed_seq_lens=batch.lengths, **batch.media)
    with pytest.raises(ValueError, match="A list of `num_actions` belongs to packed sequences"):
        unpacked(batch.sequences, [N] * 3, batch.attention_mask, **batch.media)
    wrong = [batch.lengths[0] + 1, *batch.lengths[1:]]
    with pytest.raises(ValueError, match=f"add up to {sum(wrong)}, but the sequences have the shape"):
        actor(batch.packed, N, packed_seq_lens=wrong, **batch.media)
    with pytest.raises(ValueError, match="add up to"):
        actor(batch.sequences, N, packed_seq_lens=batch.lengths, **batch.media)
    with pytest.raises(ValueError, match="There are 2 `num_actions` for 3 packed samples"):
        actor(batch.packed, [N, N], packed_seq_lens=batch.lengths, **batch.media)
    with pytest.raises(ValueError, match="Packed sequences need `num_actions`"):
        actor(batch.packed, packed_seq_lens=batch.lengths, return_output=True, **batch.media)
    for n in (batch.lengths[1], batch.lengths[1] + 1, -1):
        with pytest.raises(ValueError, match=rf"`num_actions` of sample 1 \({n}\) must be between 0 and"):
            actor(batch.packed, [N, n, N], packed_seq_lens=batch.lengths, **batch.media)


def test_media_among_packed_actions():
    """Positions and masks of media are those of prompts, so that actions can't hold any."""
    actor, batch = make("qwen2_5_vl", packing_samples=True), make_batch(bare("qwen2_5_vl")[2])
    actions = [N, batch.lengths[1] - 1, N, N, N]
    with pytest.raises(MediaError, match="actions of sample 1 hold media"):
        actor(batch.packed, actions, packed_seq_lens=batch.lengths, **batch.media)


@pytest.mark.parametrize("entry", ["path", "instance"])
def test_models_that_can_not_pack(entry, monkeypatch):
    monkeypatch.setattr(states, "_INITIAL_STATES", set())
    source = str(saved("qwen3_5")) if entry == "path" else FAMILIES["qwen3_5"].build()[0]
    with pytest.raises(
        ValueError, match="`packing_samples=True` isn't exact for this model: Qwen3_5GatedDeltaNet starts"
    ):
        ActorVL(source, packing_samples=True)


# What doesn't agree


def test_num_actions_out_of_range():
    actor, batch = make("qwen2_audio"), make_batch(bare("qwen2_audio")[2])
    length = batch.sequences.size(1)
    for n in (length, length + 3, -1):
        with pytest.raises(ValueError, match=rf"`num_actions` \({n}\) must be between 0 and {length - 1}"):
            actor(batch.sequences, n, batch.attention_mask, **batch.media)


@pytest.mark.parametrize("call", ["forward", "packed", "generate"])
@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "qwen2_5_omni", "llava", "gemma3", "voxtral"])
def test_placeholders_and_media_that_do_not_agree(name, call):
    model, _, prompts = bare(name)
    actor = make(name, packing_samples=True)
    batch = make_batch(prompts[:1])
    modality = next(iter(prompts[0].modalities))

    def runs(ids, **media):
        if call == "forward":
            actor(ids, 2, **media)
        elif call == "packed":
            actor(ids, 2, packed_seq_lens=[ids.size(1)], **media)
        else:
            actor.generate(ids, **media, max_new_tokens=2)

    runs(batch.sequences, **batch.media)
    with pytest.raises(MediaError, match=f"row 0 holds placeholders for {modality} but there is no {modality}"):
        runs(batch.sequences)
    with pytest.raises(MediaError, match=f"there is {modality} but the sequences hold no placeholder"):
        runs(torch.tensor([[60, 61, 62, 63]]), **batch.media)


def test_ids_of_the_reference_pages():
    """Their examples pass media with ids 1, 2, 3, which no processor made: what was dropped in silence raises."""
    pixels = bare("qwen2_5_vl")[2][0].media["pixel_values"]
    patches = {"pixel_values": pixels[:1].repeat(576, 1), "image_grid_thw": torch.tensor([[1, 24, 24]])}
    features = {"audio_values": bare("qwen2_audio")[2][0].media["input_features"]}
    options = {"max_new_tokens": 50, "temperature": 0.8, "do_sample": True}
    # Id 3 stands for a medium in these small vocabularies, and one token for a whole image or clip
    for name, media, error in (
        ("qwen2_5_vl", patches, "row 0 holds 1 placeholders for image, which .* don't add up"),
        ("qwen2_audio", features, "`audio_attention_mask` is missing"),
    ):
        actor = make(name, temperature=0.8)
        with pytest.raises(MediaError, match=error):
            actor.generate(input_ids=torch.tensor([[1, 2, 3]]), **media, **options)
        with pytest.raises(MediaError, match="the sequences hold no placeholder"):
            actor.generate(input_ids=torch.tensor([[1, 2, 70]]), **media, **options)
        with pytest.raises(MediaError, match="the sequences hold no placeholder"):
            actor(sequences=torch.tensor([[1, 2, 70]]), num_actions=1, **media)


def test_two_opposite_errors():
    """Two rows whose media are swapped have the right number of tokens in total."""
    for name, medium, small, large in (
        ("qwen2_5_vl", image, (56, 56), (112, 84)),
        ("qwen2_audio", audio, (0.3,), (0.9,)),
        ("qwen2_5_omni", audio, (0.3,), (0.9,)),
    ):
        model, processor, _ = bare(name)
        prompts = encode_chats(model, processor, [chat(medium(*size), text("a")) for size in (small, large)])
        batch = make_batch(prompts)
        swapped = renamed(join_media(prompts[::-1]))
        actor = make(name, packing_samples=True)
        actor(batch.sequences, N, batch.attention_mask, **batch.media)
        with pytest.raises(MediaError, match="row 0 holds"):
            actor(batch.sequences, N, batch.attention_mask, **swapped)
        with pytest.raises(MediaError, match="row 0 holds"):
            actor(batch.packed, N, packed_seq_lens=batch.lengths, **swapped)
        with pytest.raises(MediaError, match="row 0 holds"):
            actor.generate(batch.prompt_ids, attention_mask=batch.prompt_mask, **swapped, max_new_tokens=2)


def test_a_wrong_grid():
    actor, batch = make("qwen2_5_vl"), make_batch(bare("qwen2_5_vl")[2][:1])
    wrong = {**batch.media, "image_grid_thw": batch.media["image_grid_thw"] + torch.tensor([0, 0, 2])}
    with pytest.raises(MediaError, match=r"row 0 holds \d+ placeholders for image"):
        actor(batch.sequences, N, **wrong)
    with pytest.raises(MediaError, match="no `image_grid_thw`"):
        actor(batch.sequences, N, pixel_values=batch.media["pixel_values"])
    # Without pixels the grid would only move positions
    with pytest.raises(MediaError, match="there is no image"):
        actor(batch.sequences, N, image_grid_thw=batch.media["image_grid_thw"])


def test_too_many_images_without_a_grid():
    actor, batch = make("llava"), make_batch(bare("llava")[2][:1])
    with pytest.raises(ValueError, match="do not match"):
        actor(batch.sequences, N, pixel_values=batch.media["pixel_values"].repeat(2, 1, 1, 1))


@pytest.mark.parametrize("name", ["nonsense", "audio_values", "position_ids", "labels", "inputs_embeds"])
def test_unknown_media(name):
    actor, batch = make("qwen2_5_vl", packing_samples=True), make_batch(bare("qwen2_5_vl")[2][:1])
    for packed in ({}, {"packed_seq_lens": batch.lengths}):
        with pytest.raises(TypeError, match=f"Qwen2_5_VLForConditionalGeneration takes no media tensor `{name}`"):
            actor(batch.sequences, N, **packed, **batch.media, **{name: torch.zeros(1, 4)})
        actor(batch.sequences, N, **packed, **batch.media, **{name: None})


def test_media_of_another_kind():
    vision, hearing = make("qwen2_5_vl"), make("qwen2_audio")
    ids = torch.tensor([[60, 61, 62]])
    with pytest.raises(TypeError, match="takes no audio"):
        ActorAL(vision.model, bf16=False)(ids, 1, audio_values=torch.zeros(1, 16, 100))
    with pytest.raises(TypeError, match="takes no mask of audio"):
        make("voxtral")(ids, 1, audio_attention_mask=torch.ones(1, 100))
    with pytest.raises(TypeError, match="takes no media tensor `pixel_values`"):
        ActorVL(hearing.model, bf16=False)(ids, 1, pixel_values=torch.zeros(1, 3, 28, 28))
    with pytest.raises(TypeError, match="takes no media tensor `mm_token_type_ids`"):
        make("llava")(ids, 1, mm_token_type_ids=[0, 0, 0])
    # Options and tensors that `generate` knows nothing of
    for options in ({"nonsense": 3}, {"nonsense": torch.ones(1)}):
        with pytest.raises(ValueError, match="nonsense"):
            vision.generate(ids, max_new_tokens=1, **options)


def test_grids_for_a_family_without_any():
    """The first example of the reference pages passes one to LLaVA."""
    actor, batch = make("llava"), make_batch(bare("llava")[2][:1])
    grid = torch.tensor([[1, 24, 24]])
    expected = actor(batch.sequences, N, **batch.media)
    assert torch.equal(actor(batch.sequences, N, image_grid_thw=grid, video_grid_thw=grid, **batch.media), expected)
    one, *_ = actor.generate(batch.prompt_ids, **batch.media, max_new_tokens=3)
    two, *_ = actor.generate(batch.prompt_ids, image_grid_thw=grid, **batch.media, max_new_tokens=3)
    assert torch.equal(one, two)


def test_logits_of_another_length():
    actor, batch = make("llava"), make_batch(bare("llava")[2])
    own = type(actor.model).forward

    def expanding(*args, **kwargs):
        output = own(actor.model, *args, **kwargs)
        output.logits = torch.cat([output.logits, output.logits], dim=1)
        return output

    actor.model.forward = expanding
    n, length = batch.sequences.shape
    message = rf"logits have the shape \({n}, {2 * length}\) for sequences of \({n}, {length}\).*expands"
    with pytest.raises(ValueError, match=message):
        actor(batch.sequences, N, batch.attention_mask, return_output=True, **batch.media)


def test_videos_written_with_the_token_for_images():
    actor, batch = make("glm4v"), make_batch(bare("glm4v")[2][3:])
    with pytest.raises(MediaError, match="pass the processor's `mm_token_type_ids`"):
        actor(batch.sequences, N, **batch.media)


# Audio


def test_the_mask_of_audio_travels():
    """
    A clip that fills its frames needs no mask; what the frames of another one hold after it is silence to be hidden.
    """
    model, processor, _ = bare("qwen2_audio")
    short, full = encode_chats(model, processor, [chat(audio(s, seed=1), text("a")) for s in (0.4, 1.0)])
    actor = make("qwen2_audio", packing_samples=True)
    batch = make_batch([full])
    features = {"audio_values": batch.media["audio_values"]}
    assert torch.equal(actor(batch.sequences, N, **features), actor(batch.sequences, N, **batch.media))
    batch = make_batch([short])
    features = {"audio_values": batch.media["audio_values"]}
    for call in (
        lambda media: actor(batch.sequences, N, **media),
        lambda media: actor(batch.packed, N, packed_seq_lens=batch.lengths, **media),
        lambda media: actor.generate(batch.prompt_ids, **media, max_new_tokens=2),
    ):
        call(batch.media)
        with pytest.raises(MediaError, match=r"^`audio_attention_mask` is missing.* `feature_attention_mask` as"):
            call(features)
        with pytest.raises(MediaError, match="^there is audio but no `feature_attention_mask`; pass what"):
            call({"input_features": batch.media["audio_values"]})
    with pytest.raises(MediaError, match="there is no audio; pass it"):
        actor(batch.sequences, N, audio_attention_mask=batch.media["audio_attention_mask"])


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni", "qwen3_omni_moe", "audioflamingo3", "voxtral"])
def test_the_mask_by_default(name):
    model, processor, (first, *_) = bare(name)
    if name != "voxtral":  # its window of 30 s is always full
        (first,) = encode_chats(model, processor, [chat(audio(1.0, seed=1), text("a"))])
    batch = make_batch([first])
    logps = make(name)(batch.sequences, N, audio_values=batch.media["audio_values"])
    assert_close(logps, torch.stack(bare_logps(model, batch)))


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_the_mask_by_default_of_features_with_frames_first(name):
    model, processor, _ = bare(name)
    (prompt,) = encode_chats(model, processor, [chat(audio(0.7, seed=1), text("a"))])
    batch = make_batch([prompt])
    whole = torch.ones_like(batch.media["audio_attention_mask"])
    logps = make(name)(batch.sequences, N, audio_values=batch.media["audio_values"])
    assert_close(logps, make(name)(batch.sequences, N, **{**batch.media, "audio_attention_mask": whole}))


@pytest.mark.parametrize("name", ["granite_speech", "phi4_multimodal"])
def test_families_that_do_without_a_mask(name):
    model, processor, _ = bare(name)
    (prompt,) = encode_chats(model, processor, [chat(audio(0.7, seed=1), text("a"))])
    batch = make_batch([prompt])
    media = {key: value for key, value in batch.media.items() if key != "audio_attention_mask"}
    assert_close(make(name)(batch.sequences, N, **media), torch.stack(bare_logps(model, batch)))


def test_names_of_the_family_do_as_well():
    for name in ("qwen2_audio", "phi4_multimodal"):
        model, processor, _ = bare(name)
        (prompt,) = encode_chats(model, processor, [chat(audio(0.3, seed=1), audio(0.9, seed=2), text("a"))])
        batch, actor = make_batch([prompt]), make(name)
        assert {"feature_attention_mask", "audio_attention_mask"} & set(prompt.media)
        logps = actor(batch.sequences, N, **prompt.media)
        assert_close(logps, actor(batch.sequences, N, **batch.media))
        assert_close(logps, torch.stack(bare_logps(model, batch)))


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni"])
def test_audio_matters_and_images_do_not_to_an_actor_that_only_hears(name):
    batch = make_batch(bare(name)[2][:1])
    actor = ActorAL(FAMILIES[name].build()[0], bf16=False, packing_samples=True)
    pixels = {"pixel_values": torch.ones(4, 1176), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    videos = {"pixel_values_videos": torch.ones(4, 1176), "video_grid_thw": torch.tensor([[1, 2, 2]])}
    other = {**batch.media, "audio_values": batch.media["audio_values"].flip(-1)}
    for packed in ({}, {"packed_seq_lens": batch.lengths}):
        expected = actor(batch.sequences, N, **batch.media, **packed)
        assert torch.equal(actor(batch.sequences, N, **batch.media, **pixels, **videos, **packed), expected)
        assert (actor(batch.sequences, N, **other, **packed) - expected).abs().max() > 1e-2


# Sampling

GENERATED = ["qwen2_audio", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_5_omni", "gemma3", "paligemma", "voxtral"]


def prompt_inputs(name, batch):
    """What the processor would return for the prompts of the batch, under the names of the model."""
    fields = {}
    for key in batch.prompts[0].token_fields:
        width = batch.prompt_ids.size(1)
        values = [nn.functional.pad(p.token_fields[key], (width - len(p), 0)) for p in batch.prompts]
        fields[key] = torch.stack(values)
    return {**join_media(batch.prompts), **fields}


@pytest.mark.parametrize("name", GENERATED)
def test_generate_equals_that_of_transformers(name):
    model, processor, prompts = bare(name)
    model = copy.deepcopy(model)
    model.config.get_text_config().output_router_logits = False  # `generate` itself fails with it on padded prompts
    batch = make_batch(prompts, pad=processor.tokenizer.pad_token_id)
    suppressed = sorted(all_placeholder_ids(model, model))
    expected = model.generate(
        input_ids=batch.prompt_ids,
        attention_mask=batch.prompt_mask,
        **prompt_inputs(name, batch),
        max_new_tokens=6,
        do_sample=False,
        suppress_tokens=suppressed,
    )
    actor = make(name, packing_samples=True)
    for _ in range(2):  # nothing is left behind
        sequences, attention_mask, action_mask = actor.generate(
            batch.prompt_ids, attention_mask=batch.prompt_mask, **batch.media, max_new_tokens=6, do_sample=False
        )
        width = batch.prompt_ids.size(1)
        assert torch.equal(sequences, expected)
        assert sequences.shape == attention_mask.shape == (len(prompts), width + action_mask.size(1))
        assert (attention_mask.dtype, action_mask.dtype) == (torch.int64, torch.bool)
        assert torch.equal(attention_mask[:, :width], batch.prompt_mask)
        assert torch.equal(attention_mask[:, width:].bool(), action_mask)
    fields = prompt_inputs(name, batch).items()
    own = {key: value for key, value in fields if key in ("mm_token_type_ids", "token_type_ids")}
    again, *_ = actor.generate(
        batch.prompt_ids, attention_mask=batch.prompt_mask, **batch.media, **own, max_new_tokens=6, do_sample=False
    )
    assert torch.equal(again, expected)


def test_what_is_sampled_is_what_is_scored():
    """Greedy tokens are the likeliest of the forward on what `generate` returned, and sampled ones come from it."""
    actor, batch = make("qwen2_5_vl"), make_batch(bare("qwen2_5_vl")[2])
    sequences, mask, actions = actor.generate(
        batch.prompt_ids, attention_mask=batch.prompt_mask, **batch.media, max_new_tokens=8
    )
    n = actions.size(1)
    output = actor(sequences, None, mask, return_output=True, **batch.media)
    logits = output.logits[:, -n - 1 : -1].clone()
    logits[..., sorted(all_placeholder_ids(actor.model, actor.model))] = -torch.inf
    assert torch.equal(logits.argmax(-1)[actions], sequences[:, -n:][actions])


def some_prompts(name="qwen2_5_vl"):
    return make_batch(bare(name)[2][:2])


def test_end_of_sequence():
    batch, actor = some_prompts(), make("qwen2_5_vl")
    args = {"attention_mask": batch.prompt_mask, **batch.media, "max_new_tokens": 8, "do_sample": False}
    free, _, mask = actor.generate(batch.prompt_ids, **args, eos_token_id=[399])
    width = batch.prompt_ids.size(1)
    assert mask.all()
    first, second = free[0, width + 2].item(), free[1, width + 4].item()
    ends = [first, second]
    sequences, attention, mask = actor.generate(batch.prompt_ids, **args, eos_token_id=ends, pad_token_id=0)
    for row in range(2):
        stop = width + next(i for i, token in enumerate(free[row, width:].tolist()) if token in ends) + 1
        assert mask[row].tolist() == [i < stop for i in range(width, sequences.size(1))]
        assert torch.equal(sequences[row, :stop], free[row, :stop])
        assert not sequences[row, stop:].any()
    assert torch.equal(attention[:, width:].bool(), mask) and not mask.all()
    # One number, that of the model's generation config, and that of a config which says nothing else
    single, _, mask = actor.generate(batch.prompt_ids, **args, eos_token_id=first)
    actor.model.generation_config.eos_token_id = first
    config = transformers.GenerationConfig(max_new_tokens=8)
    rest = {key: value for key, value in args.items() if key != "max_new_tokens"}
    for again in (
        actor.generate(batch.prompt_ids, **args),
        actor.generate(batch.prompt_ids, **args, eos_token_id=None),
        actor.generate(batch.prompt_ids, **rest, generation_config=config),
    ):
        assert torch.equal(again[0], single) and torch.equal(again[2], mask)
    actor.model.generation_config.eos_token_id = 399
    config = transformers.GenerationConfig(max_new_tokens=8, eos_token_id=first)
    again = actor.generate(batch.prompt_ids, **rest, generation_config=config)
    assert torch.equal(again[0], single) and torch.equal(again[2], mask)


def test_padding_defaults_to_the_end_of_sequence():
    batch, actor = some_prompts(), make("qwen2_5_vl")
    args = {"attention_mask": batch.prompt_mask, **batch.media, "max_new_tokens": 8, "do_sample": False}
    free, *_ = actor.generate(batch.prompt_ids, **args, eos_token_id=399)
    stop = batch.prompt_ids.size(1) + 2
    end = free[0, stop].item()
    assert end not in free[0, stop - 2 : stop] and end not in free[1]
    actor.model.generation_config.pad_token_id = None
    for eos in (end, [end, 398]):
        sequences, _, mask = actor.generate(batch.prompt_ids, **args, eos_token_id=eos)
        assert mask.tolist() == [[True] * 3 + [False] * 5, [True] * 8]
        assert (sequences[0, stop:] == end).all() and torch.equal(sequences[1], free[1])


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "qwen2_5_omni", "gemma3", "voxtral"])
def test_placeholders_are_never_sampled(name):
    model, _ = FAMILIES[name].build()
    ids = sorted(all_placeholder_ids(model, model))
    assert ids
    bias = torch.zeros(model.config.get_text_config().vocab_size)
    bias[ids] = 100.0
    bias[77] = 90.0
    model.get_output_embeddings().register_forward_hook(lambda module, args, output: output + bias)
    prompt = next(prompt for prompt in bare(name)[2] if not prompt.media)
    batch = make_batch([prompt] * 4)
    sampled = model.generate(input_ids=batch.prompt_ids, max_new_tokens=4, do_sample=True)
    assert torch.isin(sampled[:, batch.prompt_ids.size(1) :], torch.tensor(ids)).all()
    actor = actor_class(name)(model, bf16=False)
    for options in ({}, {"suppress_tokens": [77]}, {"generation_config": transformers.GenerationConfig()}):
        torch.manual_seed(0)
        sampled, *_ = actor.generate(batch.prompt_ids, max_new_tokens=4, do_sample=True, **options)
        responses = sampled[:, batch.prompt_ids.size(1) :]
        assert not torch.isin(responses, torch.tensor(ids)).any()
        assert (responses == 77).any() != ("suppress_tokens" in options)


def test_the_policy_itself_is_sampled():
    """All tokens, at the actor's temperature: transformers would keep the 50 likeliest, at temperature 1."""
    model, _, prompts = bare("qwen2_audio")
    batch = make_batch([prompts[2]] * 400)
    for temperature in (1.0, 3.0):
        actor = make("qwen2_audio", temperature=temperature)
        logits = bare_logits(model, prompts[2], torch.tensor([60]))[0].detach()
        logits[sorted(all_placeholder_ids(model, model))] = -torch.inf
        likeliest = logits.argsort(descending=True)
        torch.manual_seed(0)
        sampled = actor.generate(batch.prompt_ids, max_new_tokens=1, do_sample=True)[0][:, -1]
        share = (logits / temperature).softmax(-1)[likeliest[50:]].sum().item()
        among = torch.isin(sampled, likeliest[50:]).float().mean().item()
        assert share > 0.02 and abs(among - share) < 4 * (share * (1 - share) / 400) ** 0.5
        few = actor.generate(batch.prompt_ids, max_new_tokens=1, do_sample=True, top_k=2)[0][:, -1]
        assert torch.isin(few, likeliest[:2]).all()


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({"temperature": 0.8}, {}, "Sampling at temperature 0.8, but log-probabilities are those at 1.0"),
        ({"top_p": 0.9}, {}, "`top_p` and `top_k` cut off tokens"),
        ({"top_k": 5}, {}, "`top_p` and `top_k` cut off tokens"),
        ({}, {"top_k": 5}, "`top_p` and `top_k` cut off tokens"),
        ({}, {"temperature": 0.1}, "Sampling at temperature 0.1"),
        (
            {"generation_config": transformers.GenerationConfig(do_sample=True, temperature=0.3)},
            {},
            "Sampling at temperature 0.3",
        ),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, {"top_k": 5, "temperature": 0.1}, None),
        ({}, {}, None),
        ({"temperature": 0.8, "top_k": 5, "do_sample": False}, {}, None),
    ],
)
def test_sampling_from_another_policy_warns(options, config, message, caplog, monkeypatch):
    # Accelerate's logger would refuse without its state, which a script of a user may not have
    monkeypatch.setattr(PartialState, "_shared_state", {})
    model = language_model()
    for key, value in config.items():
        setattr(model.generation_config, key, value)
    actor = Actor(model, bf16=False)
    with caplog.at_level(logging.WARNING, "trl_multimodal_rft"):
        actor.generate(torch.tensor([[60, 61]]), **{"do_sample": True, "max_new_tokens": 1, **options})
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("trl_multimodal_rft")]
    assert len(messages) == (message is not None) and all(message in m for m in messages)


def test_right_padding():
    actor, batch = make("qwen2_audio"), text_batch()
    mask = batch.prompt_mask.flip(1)
    with pytest.raises(ValueError, match="padded on the left"):
        actor.generate(batch.prompt_ids, attention_mask=mask, max_new_tokens=2)


def test_what_generate_does_not_do():
    actor, batch = make("qwen2_audio"), make_batch(bare("qwen2_audio")[2])
    several = {"num_return_sequences": 2, "do_sample": True}
    for options in (several, {"generation_config": transformers.GenerationConfig(**several)}):
        with pytest.raises(ValueError, match="repeat the prompts, and their media with them"):
            actor.generate(batch.prompt_ids, attention_mask=batch.prompt_mask, **batch.media, **options)
    with pytest.raises(ValueError, match="Beams aren't supported with audio"):
        actor.generate(batch.prompt_ids, attention_mask=batch.prompt_mask, **batch.media, num_beams=2)


def test_beams():
    model, _, prompts = bare("qwen2_5_vl")
    batch = make_batch(prompts[:2])
    options = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    suppressed = sorted(all_placeholder_ids(model, model))
    inputs = {"input_ids": batch.prompt_ids, "attention_mask": batch.prompt_mask, **prompt_inputs("qwen2_5_vl", batch)}
    expected = model.generate(**inputs, suppress_tokens=suppressed, **options)
    assert torch.equal(make("qwen2_5_vl").generate(**inputs, **options)[0], expected)


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}])
def test_generate_leaves_the_mode_as_it_was(kwargs):
    batch, actor = some_prompts(), make("qwen2_5_vl", freeze_vision_tower=True)
    args = {"attention_mask": batch.prompt_mask, **batch.media, "max_new_tokens": 4, "do_sample": False}
    expected, *_ = actor.generate(batch.prompt_ids, **args)
    assert not actor.training
    actor.train()
    actor.gradient_checkpointing_enable(kwargs)
    actor.base_model.model.visual.eval()
    modes = [module.training for module in actor.modules()]
    assert len(set(modes)) == 2
    sequences, *_ = actor.generate(batch.prompt_ids, **args)
    assert torch.equal(sequences, expected)
    assert [module.training for module in actor.modules()] == modes
    with pytest.raises(ValueError):
        actor.generate(batch.prompt_ids, **args, nonsense=1)
    assert [module.training for module in actor.modules()] == modes
    assert not actor.config.use_cache and not sequences.requires_grad


# Response masks: prompt length, end ids, pad id, prompt mask, input, then what is expected


@dataclass
class Golden:
    sequence: list[int]
    actions: list[int]
    truncated: bool
    after: list[int] | None = None  # the sequence by default
    attention: list[int] | None = None  # ones on the prompt and the actions by default
    prompt: int = 3
    eos: int | list[int] | None = 2
    pad: int = 0
    prompt_mask: list[int] | None = None


GOLDEN = {
    "truncated": Golden([4, 5, 6, 7, 8, 9, 10], [1, 1, 1, 1], True),
    "ended": Golden([4, 5, 6, 7, 8, 2, 0], [1, 1, 1, 0], False),
    "ended in the last column": Golden([4, 5, 6, 7, 8, 9, 2], [1, 1, 1, 1], False),
    "padding in the middle": Golden([4, 5, 6, 7, 0, 8, 9, 2], [1, 1, 1, 1, 1], False),
    "padding in the middle, truncated": Golden([4, 5, 6, 7, 0, 8, 9], [1, 1, 1, 1], True),
    "several ends": Golden([4, 5, 6, 7, 3, 0, 0], [1, 1, 0, 0], False, eos=[2, 3]),
    "several ends, the other": Golden([4, 5, 6, 7, 2, 3, 0], [1, 1, 0, 0], False, [4, 5, 6, 7, 2, 0, 0], eos=[2, 3]),
    "padding ends": Golden(
        *[[2, 4, 2, 5, 7, 2, 8, 9, 2], [1, 1, 0, 0, 0], False, [2, 4, 2, 5, 7, 2, 2, 2, 2]],
        *[[0, 1, 1, 1, 1, 1, 0, 0, 0], 4, 2, 2, [0, 1, 1, 1]],
    ),
    "padding ends, truncated": Golden([4, 5, 6, 7, 8], [1, 1], True, eos=2, pad=2),
    "end in the prompt, empty response": Golden([4, 5, 2, 2, 0, 0], [1, 0, 0], False),
    "empty response, padding ends": Golden([4, 5, 6, 2, 2, 2], [1, 0, 0], False, pad=2),
    "text after the end": Golden([4, 5, 6, 7, 2, 8, 2], [1, 1, 0, 0], False, [4, 5, 6, 7, 2, 0, 0]),
    "stopped by a string": Golden([4, 5, 6, 7, 8, 0, 0], [1, 1, 0, 0], False),
    "stopped at once": Golden([4, 5, 6, 0, 0], [0, 0], False),
    "no end known": Golden([4, 5, 6, 7, 2, 0], [1, 1, 0], False, eos=None),
    "no end known, truncated": Golden([4, 5, 6, 7, 2, 8], [1, 1, 1], True, eos=None),
    "left padding": Golden([0, 0, 4, 7, 2], [1, 1], False, attention=[0, 0, 1, 1, 1]),
    "padding inside the prompt": Golden([0, 4, 0, 5, 7, 2], [1, 1], False, attention=[0, 1, 1, 1, 1, 1], prompt=4),
    "a prompt that starts with the padding": Golden(
        [0, 0, 4, 7, 2], [1, 1], False, attention=[0, 1, 1, 1, 1], prompt_mask=[0, 1, 1]
    ),
    "nothing sampled": Golden([4, 5, 6], [], True),
}


@pytest.mark.parametrize("golden", GOLDEN.values(), ids=list(GOLDEN))
def test_response_masks(golden):
    sequences = torch.tensor([golden.sequence])
    before = sequences.clone()
    prompt_mask = None if golden.prompt_mask is None else torch.tensor([golden.prompt_mask])
    args = (sequences, golden.prompt, golden.eos, golden.pad, prompt_mask)
    after, attention, actions, truncated = mask_completions(*args)
    assert torch.equal(sequences, before) and after.data_ptr() != sequences.data_ptr()
    assert after.tolist() == [golden.sequence if golden.after is None else golden.after]
    assert actions.int().tolist() == [golden.actions] and actions.dtype == torch.bool
    assert attention.tolist() == [golden.attention or [1] * golden.prompt + golden.actions]
    assert attention.dtype == torch.int64
    assert truncated.tolist() == [golden.truncated]
    # The method of actors returns the first three
    processed = make_text_actor().process_sequences(*args)
    assert len(processed) == 3
    assert all(torch.equal(a, b) for a, b in zip(processed, (after, attention, actions), strict=True))


@functools.cache
def make_text_actor():
    return Actor(language_model(), bf16=False)


def test_response_masks_of_a_batch():
    """Rows don't disturb each other, and a boolean prompt mask becomes numbers."""
    rows = [
        g for g in GOLDEN.values() if (g.eos, g.pad, g.prompt, len(g.sequence), g.prompt_mask) == (2, 0, 3, 7, None)
    ]
    assert len(rows) > 4
    mask = torch.ones(len(rows), 3, dtype=torch.bool)
    after, attention, actions, truncated = mask_completions(torch.tensor([g.sequence for g in rows]), 3, 2, 0, mask)
    assert after.tolist() == [g.after or g.sequence for g in rows]
    assert attention.tolist() == [[1, 1, 1, *g.actions] for g in rows]
    assert actions.int().tolist() == [g.actions for g in rows]
    assert truncated.tolist() == [g.truncated for g in rows]


# Making actors


def sources(name):
    """Both ways to say which model."""
    return [str(saved(name)), load(name)[0]]


class Asked(Exception):
    pass


@pytest.fixture
def asked(monkeypatch):
    """
    What models were asked to load with. They load, unless `asked["only"]` is set.
    """
    options = {"only": False}
    load_model = transformers.PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls, path, **given):
        only = options["only"]
        options.clear()
        options.update(given, only=only, path=path, zero3=is_deepspeed_zero3_enabled())
        if only:
            raise Asked
        return load_model(cls, path, **given)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(from_pretrained))
    return options


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl"])
def test_use_flash_attention_2(name, asked):
    cls, path = actor_class(name), str(saved(name))
    asked["only"] = True
    for flag, expected in ((True, "flash_attention_2"), (False, None)):
        with pytest.raises(Asked):
            cls(path, use_flash_attention_2=flag)
        assert asked.get("attn_implementation") == expected
    asked["only"] = False
    assert cls(path, bf16=False).config._attn_implementation == "sdpa"
    if not is_flash_attn_2_available():
        with pytest.raises(ImportError, match="(?i)flash.?att"):
            cls(path, use_flash_attention_2=True)
    with pytest.raises(
        ValueError, match="`use_flash_attention_2` says how to load a model, but an instance was passed"
    ):
        cls(load(name)[0], use_flash_attention_2=True)


def test_bf16(tmp_path):
    for source in sources("qwen2_5_vl"):
        assert {p.dtype for p in ActorVL(source).parameters()} == {torch.bfloat16}  # by default
    for source in sources("qwen2_5_vl"):
        assert {p.dtype for p in ActorVL(source, bf16=False).parameters()} == {torch.float32}
    half = load("qwen2_5_vl")[0].to(torch.float16)
    assert ActorVL(half, bf16=False).model.dtype == torch.float16
    half.save_pretrained(tmp_path)
    assert ActorVL(str(tmp_path), bf16=False).model.dtype == torch.float16
    assert ActorVL(str(tmp_path), bf16=True).model.dtype == torch.bfloat16


def adapted(actor):
    """Full names of the layers with an adapter."""
    prefix = "base_model.model."
    names = [name for name, module in actor.model.named_modules() if hasattr(module, "lora_A")]
    assert all(name.startswith(prefix) for name in names)
    return [name.removeprefix(prefix) for name in names]


def trainable(actor):
    return [name for name, parameter in actor.model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl"])
def test_lora(name):
    cls = actor_class(name)
    for source in sources(name):
        actor = cls(source, bf16=False, lora_rank=4, lora_alpha=12, lora_dropout=0.25)
        linear = {n for n, module in bare(name)[0].named_modules() if isinstance(module, nn.Linear) and n != "lm_head"}
        assert set(adapted(actor)) == linear
        assert all("lora_" in n for n in trainable(actor))
        layers = [module for module in actor.model.modules() if hasattr(module, "lora_A")]
        for layer in layers:
            assert layer.lora_A["default"].out_features == layer.lora_B["default"].in_features == 4
            assert layer.scaling["default"] == 3 and layer.lora_dropout["default"].p == 0.25
    assert not adapted(cls(load(name)[0], bf16=False))
    assert len(trainable(cls(load(name)[0], bf16=False))) == len(list(bare(name)[0].parameters()))


def test_an_adapter_changes_nothing_until_it_is_trained_and_scales_with_alpha():
    model, _, prompts = bare("qwen2_audio")
    batch = make_batch(prompts)
    args = (batch.sequences, N, batch.attention_mask)
    base = torch.stack(bare_logps(model, batch))
    moved = {}
    for alpha in (16, 32):
        actor = make("qwen2_audio", lora_rank=4, lora_alpha=alpha, packing_samples=True)
        assert_close(actor(*args, **batch.media), base)
        with torch.no_grad():
            for n, parameter in actor.model.named_parameters():
                if "lora_" in n:
                    parameter.copy_(
                        torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(n))) * 1e-3
                    )
            moved[alpha] = actor(*args, **batch.media) - base
            packed = actor(batch.packed, N, packed_seq_lens=batch.lengths, **batch.media)
        assert_close(packed.view(-1, N), moved[alpha] + base)
    assert moved[16].abs().max() > 1e-4
    torch.testing.assert_close(moved[32], 2 * moved[16], rtol=0.05, atol=2e-5)


def test_lora_dropout():
    batch = make_batch(bare("qwen2_audio")[2])
    different = {}
    for dropout in (0.0, 0.5):
        actor = make("qwen2_audio", lora_rank=4, lora_dropout=dropout)
        with torch.no_grad():
            for n, parameter in actor.model.named_parameters():
                if "lora_B" in n:
                    parameter.normal_()

        def differs(actor=actor):
            one, two = (actor(batch.sequences, N, batch.attention_mask, **batch.media) for _ in range(2))
            return not torch.equal(one, two)

        # A model is loaded for evaluation, with its adapter
        assert not any(module.training for module in actor.modules()) and not differs()
        different[dropout] = actor.train() and differs()
    assert different == {0.0: False, 0.5: True}


@pytest.mark.parametrize("source", [0, 1])
def test_target_modules(source):
    options = {"bf16": False, "lora_rank": 2}
    actor = ActorVL(
        sources("qwen2_5_vl")[source], target_modules=["q_proj", "language_model.layers.0.mlp.up_proj"], **options
    )
    layers = [f"model.language_model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    assert sorted(adapted(actor)) == ["model.language_model.layers.0.mlp.up_proj", *layers]
    names = sorted(adapted(ActorVL(sources("qwen2_5_vl")[source], **options)))
    assert sorted(adapted(ActorVL(sources("qwen2_5_vl")[source], target_modules="all-linear", **options))) == names
    with pytest.raises(ValueError, match=r"has a name that ends in one of \['proj'\]"):
        ActorVL(sources("qwen2_5_vl")[source], target_modules=["proj"], freeze_vision_tower=True, **options)
    with pytest.raises(ValueError, match="`target_modules` are those of LoRA"):
        ActorVL(sources("qwen2_5_vl")[source], target_modules=["q_proj"])
    with pytest.raises(ValueError, match="ends in one of"):
        ActorVL(sources("qwen2_5_vl")[source], target_modules=["_proj"], **options)  # no part of a name


def test_lora_on_an_adapter():
    model = get_peft_model(load("qwen2_audio")[0], LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="has an adapter already"):
        ActorAL(model, lora_rank=4)
    actor = ActorAL(model, bf16=False, temperature=TEMPERATURE)
    assert actor.model is model and type(actor.base_model).__name__ == "Qwen2AudioForConditionalGeneration"
    batch, expected = cases("qwen2_audio")[0]
    assert_close(actor(batch.sequences, N, batch.attention_mask, **batch.media), expected)


# Encoders of all families; where there is none, freezing raises

TOWERS = {
    "qwen2_audio": {"audio": "model.audio_tower"},
    "qwen2_vl": {"image": "model.visual"},
    "qwen2_5_vl": {"image": "model.visual"},
    "qwen3_vl": {"image": "model.visual"},
    "qwen3_vl_moe": {"image": "model.visual"},
    "qwen3_5": {"image": "model.visual"},
    "qwen2_5_omni": {"image": "model.visual", "audio": "model.audio_tower"},
    "qwen3_omni_moe": {"image": "model.visual", "audio": "model.audio_tower"},
    "llava": {"image": "model.vision_tower"},
    "llava_onevision": {"image": "model.vision_tower"},
    "gemma3": {"image": "model.vision_tower"},
    "gemma3n": {"image": "model.vision_tower", "audio": "model.audio_tower"},
    "gemma4": {"image": "model.vision_tower", "audio": "model.audio_tower"},
    "paligemma": {"image": "model.vision_tower"},
    "audioflamingo3": {"audio": "model.audio_tower"},
    "voxtral": {"audio": "model.audio_tower"},
    "granite_speech": {"audio": "model.encoder"},
    "internvl": {"image": "model.vision_tower"},
    "idefics3": {"image": "model.vision_model"},
    "glm4v": {"image": "model.visual"},
    "phi4_multimodal": {
        "image": "model.embed_tokens_extend.image_embed",
        "audio": "model.embed_tokens_extend.audio_embed",
    },
}
FREEZE = {"image": "freeze_vision_tower", "audio": "freeze_audio_tower"}


@pytest.mark.parametrize("name", FAMILIES)
def test_towers(name):
    model, _ = FAMILIES[name].build()
    found = {}
    for modality in ("image", "audio"):
        try:
            found[modality] = find_tower(model, modality)
        except ValueError as error:
            assert f"has no {modality} encoder to freeze" in str(error)
    assert found == TOWERS[name]


@pytest.mark.parametrize("name", every_family())
@torch.no_grad()
def test_towers_are_what_sees_and_hears(name):
    """Changing an encoder changes what the model makes of its media, and nothing else."""
    model, _, prompts = bare(name)
    for modality, tower in TOWERS[name].items():
        model_with_other = copy.deepcopy(model)
        for parameter in model_with_other.get_submodule(tower).parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
        kinds = {"image", "video"} if modality == "image" else {"audio"}
        for prompt in prompts:
            batch = make_batch([prompt])
            moved = (bare_logps(model_with_other, batch)[0] - bare_logps(model, batch)[0]).abs().max()
            assert moved > 1e-3 if prompt.modalities & kinds else moved == 0


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("name", every_family())
def test_frozen_towers(name, lora_rank):
    """Nothing in a frozen encoder is trained or adapted, although its layers are called like those of the decoder."""
    towers = TOWERS[name]
    for flags in (
        ({modality} for modality in towers) if len(towers) == 1 else ({"image"}, {"audio"}, {"image", "audio"})
    ):
        actor = make(name, lora_rank=lora_rank, **{FREEZE[modality]: True for modality in flags})
        for modality, tower in towers.items():
            module = actor.base_model.get_submodule(tower)
            frozen = not any(parameter.requires_grad for parameter in module.parameters())
            assert frozen == (modality in flags)
        decoder_name = next(n for n, m in actor.base_model.named_modules() if m is actor.base_model.get_decoder())
        assert any(f"{decoder_name}." in n for n in trainable(actor))
    for modality in {"image", "audio"} - set(towers):
        with pytest.raises(ValueError, match=f"has no {modality} encoder to freeze; drop the argument"):
            make(name, lora_rank=lora_rank, **{FREEZE[modality]: True})


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "llava"])
def test_names_of_layers_in_towers_and_decoder_coincide(name):
    """Else the tests of frozen encoders would prove nothing."""
    ((modality, tower),) = TOWERS[name].items()
    layers = adapted(make(name, lora_rank=2))
    inside = [layer for layer in layers if layer.startswith(f"{tower}.")]
    frozen = adapted(make(name, lora_rank=2, **{FREEZE[modality]: True}))
    leaves = {layer.rsplit(".", 1)[1] for layer in frozen}
    assert leaves & {layer.rsplit(".", 1)[1] for layer in inside}
    assert sorted([*frozen, *inside]) == sorted(layers) and "lm_head" not in layers
    (common, *_) = sorted(leaves & {layer.rsplit(".", 1)[1] for layer in inside})
    for source in sources(name):
        actor = actor_class(name)(source, bf16=False, lora_rank=2, target_modules=[common], **{FREEZE[modality]: True})
        assert adapted(actor) and not [layer for layer in adapted(actor) if layer.startswith(f"{tower}.")]
        assert set(adapted(actor)) == {layer for layer in frozen if layer.endswith(f".{common}")}


def test_freezing_a_language_model():
    for flag in FREEZE.values():
        with pytest.raises(ValueError, match="has no (image|audio) encoder to freeze"):
            Actor(language_model(), **{flag: True})


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "gemma3"])
def test_frozen_towers_stay_as_they_are_in_training(name):
    ((modality, tower),) = TOWERS[name].items()
    actor = make(name, **{FREEZE[modality]: True})
    before = copy.deepcopy(actor.model.state_dict())
    batch = make_batch(bare(name)[2])
    optimizer = torch.optim.SGD([p for p in actor.parameters() if p.requires_grad], 0.1)
    actor(batch.sequences, N, batch.attention_mask, **batch.media).sum().backward()
    optimizer.step()
    changed = {n for n, value in actor.model.state_dict().items() if not torch.equal(value, before[n])}
    assert changed and not [n for n in changed if n.startswith(f"{tower}.")]


def test_device_map(asked):
    path, options = str(saved("qwen2_audio")), {"bf16": False, "temperature": TEMPERATURE}
    actor = ActorAL(path, device_map={"": "cpu"}, **options)
    assert asked["device_map"] == {"": "cpu"} and actor.device == torch.device("cpu")
    batch, expected = cases("qwen2_audio")[0]
    assert_close(actor(batch.sequences, N, batch.attention_mask, **batch.media), expected)
    ActorAL(path, **options)
    assert "device_map" not in asked
    assert ActorAL(path, device_map={"": "meta"}).device == torch.device("meta")


def test_model_class():
    class Other(transformers.Qwen2AudioForConditionalGeneration):
        pass

    path = str(saved("qwen2_audio"))
    assert type(ActorAL(path, model_class=Other).model) is Other
    assert type(ActorAL(path).model) is transformers.Qwen2AudioForConditionalGeneration


def test_a_language_model_from_a_path(tmp_path):
    model = language_model()
    model.save_pretrained(tmp_path)
    batch = text_batch()
    actor = Actor(str(tmp_path), bf16=False)
    assert type(actor.model) is transformers.Qwen2ForCausalLM
    assert_close(actor(batch.sequences, N, batch.attention_mask), torch.stack(bare_logps(model, batch)))


@pytest.mark.skipif(not is_deepspeed_available(), reason="needs DeepSpeed")
def test_ds_config(asked):
    """While weights load, transformers knows of ZeRO-3; the configuration of an actor that is gone is forgotten."""
    asked["only"] = True
    try:
        for config, expected in (
            ({"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}, True),
            ({"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}, False),
            (None, False),
        ):
            unset_hf_deepspeed_config()
            with pytest.raises(Asked):
                ActorAL(str(saved("qwen2_audio")), ds_config=config)
            assert asked["zero3"] is expected
    finally:
        unset_hf_deepspeed_config()


@pytest.mark.parametrize(
    "options",
    [
        {"use_flash_attention_2": True},
        {"ds_config": {"zero_optimization": {"stage": 3}}},
        {"device_map": {"": "cpu"}},
        {"load_in_4bit": True},
        {"model_class": transformers.Qwen2AudioForConditionalGeneration},
    ],
    ids=lambda options: next(iter(options)),
)
def test_loading_an_instance(options):
    with pytest.raises(
        ValueError, match=f"`{next(iter(options))}` says how to load a model, but an instance was passed"
    ):
        ActorAL(bare("qwen2_audio")[0], **options)


def test_arguments_that_do_not_exist():
    for options in ({"load_in_8bit": True}, {"fused_linear_logprob": True}, {"chunk_size": 1}, {"nonsense": None}):
        with pytest.raises(TypeError, match=next(iter(options))):
            ActorVL("somewhere", **options)


def test_a_path_to_nothing():
    with pytest.raises(OSError):
        ActorVL("/nowhere/at/all")


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "gemma3"])
def test_high_entropy_token_ratio(name):
    model, _, prompts = bare(name)
    batch = make_batch(prompts)
    expected = slow_entropies(model, batch, TEMPERATURE)
    for source in sources(name):
        actor = actor_class(name)(
            source, bf16=False, high_entropy_token_ratio=0.2, temperature=TEMPERATURE, packing_samples=True
        )
        padded, output = actor(batch.sequences, N, batch.attention_mask, return_output=True, **batch.media)
        assert output.action_entropy.shape == padded.shape and not output.action_entropy.requires_grad
        assert_close(output.action_entropy, expected, 2e-5)
        packed, output = actor(batch.packed, N, packed_seq_lens=batch.lengths, return_output=True, **batch.media)
        assert output["action_entropy"].shape == packed.shape and not output.action_entropy.requires_grad
        assert_close(output["action_entropy"].view(-1, N), expected, 2e-5)
    actor = make(name, packing_samples=True)
    assert "action_entropy" not in actor(batch.sequences, N, return_output=True, **batch.media)[1]
    packed = {"packed_seq_lens": batch.lengths, "return_output": True}
    assert "action_entropy" not in actor(batch.packed, N, **packed, **batch.media)[1]
    for ratio in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"must be between 0 and 1, got {ratio}"):
            make(name, high_entropy_token_ratio=ratio)


def test_packing_samples_from_a_path():
    batch, expected = cases("qwen2_audio")[0]
    actor = ActorAL(str(saved("qwen2_audio")), bf16=False, temperature=TEMPERATURE, packing_samples=True)
    assert_close(actor(batch.packed, N, packed_seq_lens=batch.lengths, **batch.media).view(-1, N), expected)


def test_temperature_from_a_path():
    batch, expected = cases("qwen2_audio")[0]
    actor = ActorAL(str(saved("qwen2_audio")), bf16=False, temperature=TEMPERATURE)
    assert_close(actor(batch.sequences, N, batch.attention_mask, **batch.media), expected)


def test_positions_of_the_audio_tower_stay_as_they_are():
    """`from_pretrained` makes them weights to train."""
    path = str(saved("qwen2_audio"))
    loaded = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(path)
    actor, critic = ActorAL(path, bf16=False), Critic.from_pretrained(path, type(loaded))
    for model in (actor.model, critic.model):
        fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        assert fixed == {"model.audio_tower.embed_positions.weight"}


@pytest.mark.slow
def test_load_in_4bit(tmp_path, asked):
    pytest.importorskip("bitsandbytes")
    import bitsandbytes as bnb

    # The kernels for the CPU take blocks of 64 weights only
    wide = copy.deepcopy(bare("qwen2_audio")[0].config)
    wide.audio_config.d_model, wide.audio_config.encoder_ffn_dim, wide.text_config.intermediate_size = 64, 128, 128
    torch.manual_seed(0)
    model = transformers.Qwen2AudioForConditionalGeneration(wide)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(4)
    path = str(tmp_path)
    model.save_pretrained(path)
    batch = make_batch(bare("qwen2_audio")[2])
    actor = ActorAL(path, load_in_4bit=True, lora_rank=4, packing_samples=True)
    config = asked["quantization_config"]
    assert config.load_in_4bit and config.bnb_4bit_quant_type == "nf4"
    assert config.bnb_4bit_compute_dtype == torch.bfloat16
    quantized = [module for module in actor.model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert quantized and all(module.weight.dtype == torch.uint8 for module in quantized)
    assert trainable(actor) and all("lora_" in n for n in trainable(actor))
    logps = actor(batch.sequences, N, batch.attention_mask, **batch.media)
    # Not the weights themselves, but not far from them
    exact = ActorAL(path, bf16=False)(batch.sequences, N, batch.attention_mask, **batch.media)
    assert 1e-3 < (logps - exact).abs().mean() < 1
    logps.sum().backward()
    assert any(p.grad is not None and p.grad.any() for n, p in actor.model.named_parameters() if "lora_B" in n)
    packed = actor(batch.packed, N, packed_seq_lens=batch.lengths, **batch.media)
    assert (packed.view(-1, N) - logps).abs().mean() < 0.1
    sequences, _, mask = actor.generate(
        batch.prompt_ids, attention_mask=batch.prompt_mask, **batch.media, max_new_tokens=3
    )
    assert sequences.size(1) == batch.prompt_ids.size(1) + mask.size(1)
    # 4-bit weights count as what they stand for
    full = sum(p.numel() for p in ActorAL(path, lora_rank=4).parameters())
    assert counted(actor)[1] == full
    single = ActorAL(path, load_in_4bit=True, bf16=False)
    assert asked["quantization_config"].bnb_4bit_compute_dtype == torch.float32
    # A quantized instance stays as it is
    again = ActorAL(single.model)
    assert again.model is single.model and any(isinstance(m, bnb.nn.Linear4bit) for m in again.modules())


# Training


def counted(actor):
    """The two numbers that the actor prints."""
    with redirect_stdout(StringIO()) as printed:
        actor.print_trainable_parameters()
    line = r"trainable params: ([\d,]+) \|\| all params: ([\d,]+) \|\| trainable%: (\d+\.\d{4})\n"
    match = re.fullmatch(line, printed.getvalue())
    numbers = [int(match[i].replace(",", "")) for i in (1, 2)]
    assert match[1] == f"{numbers[0]:,}" and match[2] == f"{numbers[1]:,}"
    assert float(match[3]) == pytest.approx(100 * numbers[0] / numbers[1], abs=1e-4)
    return numbers


def test_print_trainable_parameters():
    total = bare("qwen2_5_vl")[0].num_parameters()
    tower = sum(p.numel() for p in bare("qwen2_5_vl")[0].model.visual.parameters())
    assert counted(make("qwen2_5_vl")) == [total, total]
    assert counted(make("qwen2_5_vl", bf16=True)) == [total, total]
    assert counted(make("qwen2_5_vl", freeze_vision_tower=True)) == [total - tower, total]
    actor = make("qwen2_5_vl", lora_rank=4, target_modules=["q_proj"])
    # Two layers of 64 to 64
    assert counted(actor) == [2 * 4 * 128, total + 2 * 4 * 128]


CHECKPOINTED = {
    "default": None,
    "not reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


@pytest.mark.parametrize("lora", ["", "lora", "frozen", "lora, frozen"])
@pytest.mark.parametrize("kwargs", CHECKPOINTED.values(), ids=list(CHECKPOINTED))
@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "gemma3"])
def test_gradient_checkpointing(name, kwargs, lora):
    ((modality, _),) = TOWERS[name].items()
    actor = make(
        name, lora_rank=4 if "lora" in lora else 0, packing_samples=True, **{FREEZE[modality]: "frozen" in lora}
    )
    if "lora" in lora:
        with torch.no_grad():
            for n, parameter in actor.model.named_parameters():
                if "lora_B" in n:
                    parameter.normal_(std=0.02, generator=torch.Generator().manual_seed(0))
    batch = make_batch(bare(name)[2])
    actor.train()

    def backward(packed=False):
        """Gradients, and how many numbers the forward kept for them."""
        kept = []
        actor.zero_grad(set_to_none=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            if packed:
                logps = actor(batch.packed, N, packed_seq_lens=batch.lengths, **batch.media).view(-1, N)
            else:
                logps = actor(batch.sequences, N, batch.attention_mask, **batch.media)
            loss = (logps * weights_of(logps)).sum()
        loss.backward()
        return gradients(actor.model), sum(kept)

    expected, plain = backward()
    assert set(expected) == set(trainable(actor))
    for _ in range(2):
        actor.gradient_checkpointing_enable(*([] if kwargs is None else [kwargs]))
    for packed in (False, True):
        recomputed, kept = backward(packed)
        assert relative_difference(expected, recomputed) <= 1e-5
        assert kept < 0.6 * plain
    actor.gradient_checkpointing_disable()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in actor.modules())
    again, kept = backward()
    assert relative_difference(expected, again) <= 1e-5 and kept == plain


def test_gradient_checkpointing_reaches_the_encoders():
    for name in ("qwen2_audio", "qwen2_5_vl", "qwen2_5_omni"):
        actor = make(name)
        actor.gradient_checkpointing_enable()
        for tower in TOWERS[name].values():
            module = actor.base_model.get_submodule(tower)
            assert any(getattr(part, "gradient_checkpointing", False) for part in module.modules())


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_omni_moe"])
def test_load_balancing_loss(name):
    model, _, prompts = bare(name)
    actor, batch = make(name, packing_samples=True), make_batch(prompts[:1])
    fields = {key: nn.functional.pad(value, (0, N))[None] for key, value in prompts[0].token_fields.items()}
    inputs = {"input_ids": batch.sequences, "attention_mask": batch.attention_mask, **prompts[0].media, **fields}
    expected = model(**inputs, output_router_logits=True).aux_loss
    _, output = actor(batch.sequences, N, batch.attention_mask, return_output=True, **batch.media)
    plain = actor(batch.sequences, None, batch.attention_mask, return_output=True, **batch.media)
    assert expected > 0
    for values in (output, plain):
        torch.testing.assert_close(values.aux_loss, expected)
    output.aux_loss.backward()
    assert any("gate" in n for n in gradients(actor.model))
    _, packed = actor(batch.packed, N, packed_seq_lens=batch.lengths, return_output=True, **batch.media)
    torch.testing.assert_close(packed.aux_loss, expected)
    dense = make("qwen2_5_vl")
    batch = make_batch(bare("qwen2_5_vl")[2][:1])
    _, output = dense(batch.sequences, N, return_output=True, **batch.media)
    assert getattr(output, "aux_loss", None) is None


@pytest.mark.parametrize("lora_rank", [0, 2])
def test_save_pretrained(lora_rank, tmp_path):
    batch, _ = cases("qwen2_audio")[0]
    actor = make("qwen2_audio", lora_rank=lora_rank)
    with torch.no_grad():
        for parameter in actor.parameters():
            if parameter.requires_grad:
                parameter += 0.01
    actor.save_pretrained(str(tmp_path), safe_serialization=True)
    assert (tmp_path / "adapter_config.json").exists() == bool(lora_rank)
    if lora_rank:
        again = ActorAL(PeftModel.from_pretrained(FAMILIES["qwen2_audio"].build()[0], tmp_path), bf16=False)
    else:
        again = ActorAL(str(tmp_path), bf16=False)
    args = (batch.sequences, N, batch.attention_mask)
    assert_close(again(*args, **batch.media), actor(*args, **batch.media))


ROWS = {"qwen2_audio": audio_rows, "qwen2_5_vl": image_rows}


@pytest.mark.parametrize("trainer", [MultimodalGRPOTrainer, MultimodalRLOOTrainer])
@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl"])
def test_trainers_take_actors(name, trainer):
    """An actor trains as its model does, bit for bit."""
    updates = []
    for wrapped in (False, True):
        model, processor = load(name)
        given = actor_class(name)(model, bf16=False, temperature=TEMPERATURE) if wrapped else model
        torch.manual_seed(0)
        objects = {"model": given, "processing_class": processor}
        result = run(trainer, name, ROWS[name](), objects=objects, temperature=TEMPERATURE, seed=3)
        assert result.trainer.accelerator.unwrap_model(result.trainer.model) is model
        updates.append(result.update)
    assert any(value.any() for value in updates[0].values())
    assert all(torch.equal(updates[0][key], updates[1][key]) for key in updates[0])


def test_trainers_take_actors_with_adapters():
    model, processor = load("qwen2_audio")
    actor = ActorAL(model, bf16=False, lora_rank=2, freeze_audio_tower=True, packing_samples=True)
    objects = {"model": actor, "processing_class": processor}
    result = run(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(), objects=objects)
    moved = [key for key, value in result.update.items() if value.any()]
    assert moved and all("lora_" in key and "audio_tower" not in key for key in moved)
    # What was trained is the actor's model
    batch, _ = cases("qwen2_audio")[0]
    args = (batch.sequences, N, batch.attention_mask)
    with torch.no_grad():
        assert (actor.eval()(*args, **batch.media) - make("qwen2_audio")(*args, **batch.media)).abs().max() > 1e-4


def test_trainers_refuse_actors_of_another_objective(tmp_path):
    model, processor = load("qwen2_audio")

    def trainer(actor, trainer_class=MultimodalGRPOTrainer, **options):
        objects = {"model": actor, "processing_class": processor}
        return make_trainer(trainer_class, "qwen2_audio", audio_rows(), tmp_path, objects=objects, **options)

    cold = ActorAL(model, bf16=False, temperature=0.5)
    with pytest.raises(ValueError, match="made for temperature 0.5, but `temperature` is 1.0; make them equal"):
        trainer(cold)
    assert trainer(cold, temperature=0.5).temperature == 0.5
    few = ActorAL(model, bf16=False, high_entropy_token_ratio=0.2)
    for trainer_class, options in (
        (MultimodalGRPOTrainer, {}),
        (MultimodalGRPOTrainer, {"top_entropy_quantile": 0.5}),
    ):
        with pytest.raises(ValueError, match="high_entropy_token_ratio=0.2`; set `top_entropy_quantile`"):
            trainer(few, trainer_class, **options)
    with pytest.raises(ValueError, match="high_entropy_token_ratio=0.2"):
        trainer(few, MultimodalRLOOTrainer)
    assert trainer(few, top_entropy_quantile=0.2).top_entropy_quantile == 0.2
    # All tokens count either way
    trainer(ActorAL(model, bf16=False, high_entropy_token_ratio=1.0))


# The examples of the reference pages, with their keywords


@pytest.fixture(scope="module")
def heard():
    """Ids and features of a clip that fills the window, as the pages have them: without a mask."""
    model, processor, _ = bare("qwen2_audio")
    (prompt,) = encode_chats(model, processor, [chat(audio(1.0, seed=1), text("What do you hear?"))])
    return make_batch([prompt], [10])


@pytest.fixture(scope="module")
def seen():
    """Ids, patches and grid of an image of 24 x 24 patches."""
    model = bare("qwen2_5_vl")[0]
    (token,) = placeholder_token_ids(model, model)["image"]
    ids = torch.tensor([60, *[token] * 144, *range(61, 75)])
    generator = torch.Generator().manual_seed(0)
    media = {
        "pixel_values": torch.randn(576, 1176, generator=generator),
        "image_grid_thw": torch.tensor([[1, 24, 24]]),
    }
    prompt = Prompt(ids, media, {"mm_token_type_ids": token_fields(model, ids)["mm_token_type_ids"]})
    return make_batch([prompt], [10])


def test_page_example_of_initialization():
    """As on the pages but for FlashAttention, which has no CPU version."""
    for cls, name in ((ActorAL, "qwen2_audio"), (ActorVL, "llava")):
        actor = cls(
            pretrain_or_model=str(saved(name)),
            use_flash_attention_2=is_flash_attn_2_available(),
            lora_rank=16,
            lora_alpha=32,
        )
        layer = next(module for module in actor.modules() if hasattr(module, "lora_A"))
        assert layer.r["default"] == 16 and layer.scaling["default"] == 2
        assert actor.model.dtype == torch.bfloat16 and all("lora_" in n for n in trainable(actor))


def test_page_examples_of_audio(heard):
    actor = ActorAL(pretrain_or_model=str(saved("qwen2_audio")), lora_rank=16, lora_alpha=32)
    input_tensor, audio_features_tensor = heard.prompt_ids, heard.media["audio_values"]
    sequences, attention_mask, action_mask = actor.generate(
        input_ids=input_tensor, audio_values=audio_features_tensor, max_new_tokens=100
    )
    assert sequences.shape == attention_mask.shape
    assert sequences.size(1) == input_tensor.size(1) + action_mask.size(1)
    sequences, attention_mask, action_mask = actor.generate(
        input_ids=input_tensor, audio_values=audio_features_tensor, max_new_tokens=50, temperature=0.8, do_sample=True
    )
    assert sequences.size(1) <= input_tensor.size(1) + 50
    token_sequences, input_features_tensor = heard.sequences, audio_features_tensor
    log_probs = actor(sequences=token_sequences, num_actions=10, audio_values=input_features_tensor)
    log_probs_too, output = actor(
        sequences=token_sequences, num_actions=10, audio_values=input_features_tensor, return_output=True
    )
    assert log_probs.shape == log_probs_too.shape == (1, 10)
    assert (log_probs - log_probs_too).abs().max() < 0.1 and output.logits.shape[:2] == token_sequences.shape
    actor.gradient_checkpointing_enable()
    actor.gradient_checkpointing_enable({"use_reentrant": True})
    actor.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    actor.gradient_checkpointing_disable()
    assert counted(actor)[0] == sum(p.numel() for p in actor.parameters() if p.requires_grad)
    assert actor.modality == "audio"
    processed = actor.process_sequences(sequences=token_sequences, input_len=30, eos_token_id=2, pad_token_id=0)
    assert [tuple(t.shape) for t in processed] == [(1, token_sequences.size(1))] * 2 + [
        (1, token_sequences.size(1) - 30)
    ]


def test_page_examples_of_vision(seen):
    actor = ActorVL(pretrain_or_model=str(saved("qwen2_5_vl")), lora_rank=16, lora_alpha=32)
    input_tensor = seen.prompt_ids
    image_tensor, grid_tensor = seen.media["pixel_values"], seen.media["image_grid_thw"]
    sequences, attention_mask, action_mask = actor.generate(
        input_ids=input_tensor, pixel_values=image_tensor, image_grid_thw=grid_tensor, max_new_tokens=100
    )
    assert sequences.shape == attention_mask.shape
    assert sequences.size(1) == input_tensor.size(1) + action_mask.size(1)
    sequences, attention_mask, action_mask = actor.generate(
        input_ids=input_tensor,
        pixel_values=image_tensor,
        image_grid_thw=torch.tensor([[1, 24, 24]]),
        max_new_tokens=50,
        temperature=0.8,
        do_sample=True,
    )
    assert sequences.size(1) <= input_tensor.size(1) + 50
    token_sequences = seen.sequences
    log_probs = actor(sequences=token_sequences, num_actions=10, pixel_values=image_tensor, image_grid_thw=grid_tensor)
    log_probs_too, output = actor(
        sequences=token_sequences,
        num_actions=10,
        pixel_values=image_tensor,
        image_grid_thw=grid_tensor,
        return_output=True,
    )
    assert log_probs.shape == log_probs_too.shape == (1, 10)
    assert (log_probs - log_probs_too).abs().max() < 0.1 and output.logits.shape[:2] == token_sequences.shape
    actor.gradient_checkpointing_enable()
    actor.gradient_checkpointing_enable({"use_reentrant": True})
    actor.gradient_checkpointing_disable()
    assert counted(actor)[0] == sum(p.numel() for p in actor.parameters() if p.requires_grad)
    assert actor.modality == "vision"
    exact = make("qwen2_5_vl")(
        sequences=token_sequences, num_actions=10, pixel_values=image_tensor, image_grid_thw=grid_tensor
    )
    assert_close(exact, torch.stack(bare_logps(bare("qwen2_5_vl")[0], seen)))


def test_examples_of_the_docstrings():
    """A processor's output goes in as it is."""
    model, processor, _ = bare("qwen2_5_vl")
    messages = chat(image(56, 56), text("What is in the image?"), video(4, 56, 56))
    processor_output = processor.apply_chat_template(
        [messages], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    actor = make("qwen2_5_vl")
    sequences, attention_mask, action_mask = actor.generate(**processor_output, max_new_tokens=10)
    assert sequences.size(1) == processor_output["input_ids"].size(1) + action_mask.size(1)
    processor = bare("qwen2_audio")[1]
    inputs = processor.apply_chat_template(
        [chat(audio(0.4), text("a"))], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    sequences, attention_mask, action_mask = make("qwen2_audio").generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        audio_values=inputs["input_features"],
        audio_attention_mask=inputs["feature_attention_mask"],
        max_new_tokens=10,
    )
    assert sequences.size(1) == inputs["input_ids"].size(1) + action_mask.size(1)


# ZeRO-3

ZERO3 = """
    import json, sys
    import deepspeed, torch
    from helpers.families import FAMILIES
    from test_actors import N, cases, counted, make_batch, TEMPERATURE
    from trl_multimodal_rft.lightrft import ActorAL

    path, out = sys.argv[1:]
    (batch, expected), = cases("qwen2_audio")
    deepspeed.init_distributed("gloo")
    ds_config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    actor = ActorAL(path, ds_config=ds_config, bf16=False, temperature=TEMPERATURE, packing_samples=True)
    parameters = list(actor.parameters())
    assert all(hasattr(p, "ds_id") for p in parameters)
    here = sum(p.numel() for p in parameters)
    numbers = counted(actor)
    engine, *_ = deepspeed.initialize(model=actor, config=ds_config)
    with torch.no_grad():
        padded = engine(batch.sequences, N, batch.attention_mask, **batch.media)
        packed = engine(batch.packed, N, packed_seq_lens=batch.lengths, **batch.media).view(-1, N)
        sequences, _, mask = actor.generate(
            batch.prompt_ids, attention_mask=batch.prompt_mask, **batch.media, max_new_tokens=4, synced_gpus=True
        )
    result = {
        "in parts": here < numbers[1],
        "numbers": numbers,
        "padded": (padded - expected).abs().max().item(),
        "packed": (packed - expected).abs().max().item(),
        "sequences": sequences.tolist(),
    }
    rank = torch.distributed.get_rank()
    open(f"{out}/{rank}.json", "w").write(json.dumps(result))
"""


@pytest.mark.slow
def test_zero3(tmp_path):
    """Weights are loaded in parts by two processes, which score and sample as one would."""
    pytest.importorskip("deepspeed")
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(ZERO3))
    process = subprocess.run(
        python_command([script, saved("qwen2_audio"), tmp_path], processes=2),
        env=python_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-6000:]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    numbers = counted(make("qwen2_audio"))
    batch, _ = cases("qwen2_audio")[0]
    expected, *_ = make("qwen2_audio").generate(
        batch.prompt_ids, attention_mask=batch.prompt_mask, **batch.media, max_new_tokens=4
    )
    for result in results:
        assert result["in parts"] and result["numbers"] == numbers
        assert max(result["padded"], result["packed"]) <= 1e-5
        assert result["sequences"] == expected.tolist()


@pytest.mark.parametrize("name", ["granite_speech", "qwen3_omni_moe"])
def test_clips_of_different_lengths_where_the_encoder_would_mix_them(name):
    """Two rows whose clips were padded to one length by whoever joined them."""
    model, processor = FAMILIES[name].build()
    actor = ActorAL(model, bf16=False)
    prompts = encode_chats(model, processor, [chat(audio(seconds), text("What?")) for seconds in (0.4, 1.2)])
    batch, media = left_pad(prompts, 0), join_media(prompts)
    with pytest.raises(MediaError, match="clips of different lengths"):
        actor(batch["input_ids"], 2, batch["attention_mask"], **media)
    one = prompts[0]
    assert actor(one.input_ids[None].repeat(2, 1), 2, **join_media([one, one])).shape == (2, 2)


def test_bf16_instance_is_a_bf16_path(tmp_path):
    """Parameters are cast and buffers aren't: rounded frequencies would turn rotary positions."""
    model, _ = FAMILIES["qwen2_5_vl"].build()
    model.save_pretrained(tmp_path)
    by_path, by_instance = ActorVL(str(tmp_path)).base_model, ActorVL(model).base_model
    for (name, a), (_, b) in zip(by_path.named_buffers(), by_instance.named_buffers(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name
    for (name, a), (_, b) in zip(by_path.named_parameters(), by_instance.named_parameters(), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b), name


def test_padding_does_not_move_the_positions_of_a_language_model():
    """Learned positions, unlike rotary ones, tell where the padding ends."""
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(0)
    actor = Actor(transformers.GPT2LMHeadModel(config).eval(), bf16=False)
    ids = torch.randint(1, 50, (1, 8))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], dim=1)
    with torch.no_grad():
        assert (actor(ids, 4) - actor(padded, 4, mask)).abs().max() <= 1e-5
