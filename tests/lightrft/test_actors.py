# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Actors equal the bare models that they hold, and each of their arguments has its documented effect."""

import copy
import functools
import logging
import re
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from helpers.chats import audio, chat, text
from helpers.encoding import build_encoded, encode_chats
from helpers.families import FAMILIES, decoder, every_family, tokenizer
from helpers.four_bits import save_wide
from helpers.synthetic import FAMILIES as SYNTHETIC
from helpers.trainer_utils import audio_rows, image_rows, load, make_trainer, relative_difference, run, saved
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers.integrations import is_deepspeed_available, is_deepspeed_zero3_enabled
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.utils import is_flash_attn_2_available

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.encoding.join import join_media
from trl_multimodal_rft.encoding.prompts import all_placeholder_ids
from trl_multimodal_rft.engines import transformers as generation
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.prompt_groups import left_pad
from trl_multimodal_rft.lightrft import Actor, ActorAL, ActorOmni, ActorVL, Critic
from trl_multimodal_rft.lightrft.models.completions import mask_completions
from trl_multimodal_rft.models.parts import find_tower


pytestmark = pytest.mark.gate


TEMPERATURE = 0.7
N = 5  # actions per row
ORDINARY = (60, 180)  # ids without special tokens in any family
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
    """Returns an actor of a fresh model, by default in float32."""
    return actor_class(name)(FAMILIES[name].build()[0], **{"bf16": False, **options})


def make_both(name, n=None, **options):
    """Returns an actor and a batch of the family's first `n` prompts."""
    return make(name, **options), make_batch(bare(name)[2][:n])


@functools.cache
def language_model():
    """A language model that no actor modifies."""
    words = tokenizer()
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**decoder(words))).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(6)
    model.generation_config.eos_token_id = words.eos_token_id
    model.generation_config.pad_token_id = words.pad_token_id
    return model


def text_actor(**options):
    return Actor(copy.deepcopy(language_model()), bf16=False, **options)


@dataclass
class Batch:
    """
    Rows of prompts and responses, left-padded, and their media.

    `media` have the names of an actor's arguments; `prompts` and `responses` are the rows before joining.
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

    # An actor's output for the batch, with other media or options

    def score(self, actor, n=N, **options):
        return actor(self.sequences, n, self.attention_mask, **{**self.media, **options})

    def score_packed(self, actor, n=N, **options):
        return actor(self.packed, n, packed_seq_lens=self.lengths, **{**self.media, **options})

    def generate(self, actor, **options):
        return actor.generate(self.prompt_ids, attention_mask=self.prompt_mask, **{**self.media, **options})


@dataclass
class Prompt:
    """The fields of an encoded prompt that these tests use."""

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


def left_padded(rows, pad=0):
    longest = max(map(len, rows))
    return torch.stack([nn.functional.pad(row, (longest - len(row), 0), value=pad) for row in rows])


def make_batch(prompts, sizes=None, pad=0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = sizes or [N] * len(prompts)
    responses = [torch.randint(*ORDINARY, (size,), generator=generator) for size in sizes]
    rows = [torch.cat([p.input_ids, r]) for p, r in zip(prompts, responses, strict=True)]
    mask = left_padded([torch.ones_like(row) for row in rows])
    return Batch(left_padded(rows, pad), mask, renamed(join_media(prompts)), list(prompts), responses)


def fields_of(batch, name, fill=0):
    """Returns the processor's per-token field for each row."""
    rows = zip(batch.prompts, batch.responses, strict=True)
    return [torch.cat([p.token_fields[name], torch.full_like(r, fill)]) for p, r in rows]


def bare_logits(model, prompt, response, **changes):
    """Returns the model's logits for one row from the processor's output."""
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
    """Returns log-probabilities of each row's response."""
    return [
        (bare_logits(model, prompt, response, **changes).float() / temperature)
        .log_softmax(-1)
        .gather(-1, response[:, None])[:, 0]
        for prompt, response in zip(batch.prompts, batch.responses, strict=True)
    ]


@functools.cache
def bare(name):
    """Returns a family's model that no actor modifies, its processor and its encoded prompts."""
    return build_encoded(name)


@functools.cache
@torch.no_grad()
def cases(name):
    """
    Yields batches of the family's prompts and the log-probabilities of the bare model, row by row.

    Yields one batch if its media join exactly. Otherwise yields one batch per prompt, which appears twice in it.
    """
    model, _, prompts = bare(name)
    pad = model.config.get_text_config().pad_token_id
    parts = [prompts] if family_of(model).isolate is None else [[prompt, prompt] for prompt in prompts]
    batches = [make_batch(part, pad=pad, seed=i) for i, part in enumerate(parts)]
    return [(batch, torch.stack(bare_logps(model, batch, TEMPERATURE))) for batch in batches]


def assert_close(actual, expected, tolerance=2e-5):
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= tolerance


def assert_rows_end(logps, expected):
    """Compares the last columns of each row. The others belong to its prompt."""
    for row, values in zip(logps, expected, strict=True):
        assert_close(row[-len(values) :], values)


# Log-probabilities


@pytest.mark.parametrize("name", every_family())
@torch.no_grad()
def test_forward_equals_the_bare_model(name):
    """Covers padded and packed batches that hold all of the family's media in several numbers, with padding."""
    actor, packing = (make(name, temperature=TEMPERATURE, packing_samples=packed) for packed in (False, True))
    batches = [batch for batch, _ in cases(name)]
    kinds = {kind for batch in batches for prompt in batch.prompts for kind in prompt.modalities}
    assert kinds == set(FAMILIES[name].modalities)
    if len(batches) == 1:
        assert not batches[0].attention_mask[:, 0].all()
        assert len({tuple(len(v) for v in p.media.values()) for p in batches[0].prompts}) > 1
    for batch, expected in cases(name):
        fields = packed_fields = {}
        if name == "glm4v":  # it writes videos with the image token, and only the processor's field distinguishes them
            rows = fields_of(batch, "mm_token_type_ids")
            fields, packed_fields = (
                {"mm_token_type_ids": value} for value in (left_padded(rows), torch.cat(rows)[None])
            )
        logps = batch.score(actor, **fields)
        again, output = batch.score(actor, return_output=True, **fields)
        plain = batch.score(actor, None, return_output=True, **fields)
        packed = batch.score_packed(packing, [N] * len(expected), **packed_fields)
        assert logps.dtype == again.dtype == packed.dtype == torch.float32
        assert packed.shape == (1, N * len(expected))
        for found in (logps, again, packed.view(-1, N), batch.score(packing, **fields)):
            assert_close(found, expected)
        assert output.logits.shape[:2] == plain.logits.shape[:2] == batch.sequences.shape
        if name != "paligemma":  # its row without actions is all prompt
            mask = batch.attention_mask[..., None]
            assert_close(plain.logits * mask, output.logits * mask)
        assert "action_entropy" not in output


def test_text():
    batch = text_batch(sizes=[5, 3, 1])
    logps = batch.score(text_actor())
    assert logps.shape == (3, 5)
    assert_rows_end(logps, bare_logps(language_model(), batch))
    # All tokens but the first may be actions
    batch = text_batch(lengths=(1, 1))
    assert_close(text_actor()(batch.sequences, N), torch.stack(bare_logps(language_model(), batch)))
    # Packed
    batch = text_batch(sizes=[3, 0, 2])
    actor = text_actor(packing_samples=True)
    expected = bare_logps(language_model(), batch)
    assert_close(batch.score_packed(actor, [3, 0, 2])[0], torch.cat(expected))
    everything = batch.score_packed(actor, [n - 1 for n in batch.lengths])
    assert everything.shape == (1, sum(batch.lengths) - 3)
    assert_close(everything[0, batch.lengths[0] - 1 - 3 : batch.lengths[0] - 1], expected[0])
    # Tensors of numbers work as well, and the mask has no effect
    sizes = torch.tensor([3, 0, 2])
    lengths = torch.tensor(batch.lengths)
    assert_close(actor(batch.packed, sizes, torch.ones(1), packed_seq_lens=lengths)[0], torch.cat(expected))
    none = batch.score_packed(actor, 0)
    assert none.shape == (1, 0)
    none.sum().backward()


def test_number_of_actions():
    actor, batch = make_both("qwen2_audio")
    for n in (0, 1):
        logps, output = batch.score(actor, n, return_output=True)
        again = batch.score(actor, n)
        assert logps.shape == again.shape == (3, n) and output.logits.shape[:2] == batch.sequences.shape
        assert torch.allclose(logps, again, atol=1e-5)
    with pytest.raises(ValueError, match="return_output=True"):
        batch.score(actor, None)
    length = batch.sequences.size(1)
    for n in (length, -1):
        with pytest.raises(ValueError, match=rf"`num_actions` \({n}\) must be between 0 and {length - 1}"):
            batch.score(actor, n)


def test_actions_before_media_belong_to_the_prompt():
    """As in padded experience, where the columns of a longer row's actions reach into a prompt."""
    actor, batch = make_both("qwen2_5_vl", 2, packing_samples=True)
    expected = batch.score(actor)
    n = batch.sequences.size(1) - 1
    for logps in (batch.score(actor, n), batch.score(actor, n, return_output=True)[0]):
        assert_close(logps[:, -N:], expected)
        placeholder = batch.sequences[:, 1:] == actor.config.image_token_id
        last = placeholder.shape[1] - 1 - placeholder.flip(1).int().argmax(1)
        for row, stop in zip(logps, last.tolist(), strict=True):
            assert not row[: stop + 2].any() and row[stop + 2 :].all()  # nor the token behind


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def weights_of(logps):
    return torch.randn(logps.shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "qwen2_5_omni", "gemma3", "paligemma"])
def test_gradients(name):
    """Compares with the bare model's gradients row by row, with the output, and packed."""
    model, _ = FAMILIES[name].build()
    batch = make_batch(bare(name)[2])
    logps = torch.stack(bare_logps(model, batch))
    weights = weights_of(logps)
    (logps * weights).sum().backward()
    expected = gradients(model)
    for call in (
        batch.score,
        lambda actor: batch.score(actor, return_output=True)[0],
        lambda actor: batch.score_packed(actor).view(-1, N),
    ):
        actor = make(name, packing_samples=True)
        (call(actor) * weights).sum().backward()
        assert relative_difference(expected, gradients(actor.model)) <= 1e-5


# Packed samples


def test_errors_of_packed_samples():
    actor, batch = make_both("qwen2_audio", packing_samples=True)
    unpacked = make("qwen2_audio")
    lengths = batch.lengths
    wrong = [lengths[0] + 1, *lengths[1:]]
    cases = [
        (unpacked, batch.packed, N, lengths, "made with `packing_samples=True`"),
        (unpacked, batch.sequences, [N] * 3, None, "A list of `num_actions` belongs to packed sequences"),
        (actor, batch.packed, N, wrong, f"add up to {sum(wrong)}, but the sequences have the shape"),
        (actor, batch.sequences, N, lengths, "add up to"),
        (actor, batch.packed, [N, N], lengths, "There are 2 `num_actions` for 3 packed samples"),
        (actor, batch.packed, None, lengths, "Packed sequences need `num_actions`"),
        *[
            (actor, batch.packed, [N, n, N], lengths, rf"`num_actions` of sample 1 \({n}\) must be between 0 and")
            for n in (lengths[1], lengths[1] + 1, -1)
        ],
    ]
    for chosen, ids, n, lengths, error in cases:
        with pytest.raises(ValueError, match=error):
            chosen(ids, n, packed_seq_lens=lengths, return_output=n is None, **batch.media)
    # Positions and masks of media belong to prompts, so that actions can't hold media
    actor, batch = make_both("qwen2_5_vl", packing_samples=True)
    with pytest.raises(MediaError, match="actions of sample 1 hold media"):
        batch.score_packed(actor, [N, batch.lengths[1] - 1, N, N, N])


def test_models_that_can_not_pack():
    with pytest.raises(ValueError, match="`packing_samples=True` isn't exact for this model: how layers of type hybr"):
        ActorVL(SYNTHETIC["inkling2"]()[0], packing_samples=True)


# Inconsistent arguments


@pytest.mark.parametrize("name", ["qwen2_audio", "llava"])
def test_placeholders_and_media_that_do_not_agree(name):
    """`test_media_tensors.py` has other disagreements."""
    actor, batch = make_both(name, 1, packing_samples=True)
    modality = next(iter(batch.prompts[0].modalities))
    for call in (
        lambda ids, **media: actor(ids, 2, **media),
        lambda ids, **media: actor(ids, 2, packed_seq_lens=[ids.size(1)], **media),
        lambda ids, **media: actor.generate(ids, **media, max_new_tokens=2),
    ):
        call(batch.sequences, **batch.media)
        with pytest.raises(MediaError, match=f"row 0 holds placeholders for {modality}, but there is no {modality}"):
            call(batch.sequences)
        with pytest.raises(MediaError, match=f"there is {modality}, but the sequences hold no placeholder"):
            call(torch.tensor([[60, 61, 62, 63]]), **batch.media)


def test_grids():
    # The first example of the reference pages passes one to LLaVA, a family without it
    actor, batch = make_both("llava", 1)
    grid = torch.tensor([[1, 24, 24]])
    assert torch.equal(batch.score(actor, image_grid_thw=grid, video_grid_thw=grid), batch.score(actor))
    one, two = (batch.generate(actor, max_new_tokens=3, **more)[0] for more in ({}, {"image_grid_thw": grid}))
    assert torch.equal(one, two)
    # Videos that use the image token
    actor = make("glm4v")
    batch = make_batch(bare("glm4v")[2][3:])
    with pytest.raises(MediaError, match="pass the processor's `mm_token_type_ids`"):
        batch.score(actor)


def test_media_of_another_kind():
    ids = torch.tensor([[60, 61, 62]])
    hearing = make("qwen2_audio")
    for actor, media, error in (
        (make("qwen2_5_vl"), {"audio_values": torch.zeros(1, 16, 100)}, "takes no audio"),
        (make("voxtral"), {"audio_attention_mask": torch.ones(1, 100)}, "takes no mask of audio"),
        (ActorVL(hearing.model, bf16=False), {"pixel_values": torch.zeros(1, 3)}, "no media tensor `pixel_values`"),
        (make("llava"), {"mm_token_type_ids": [0, 0, 0]}, "takes no media tensor `mm_token_type_ids`"),
        (hearing, {"position_ids": torch.zeros(1, 3)}, "takes no media tensor `position_ids`"),
    ):
        with pytest.raises(TypeError, match=error):
            actor(ids, 1, **media)
    hearing(ids, 1, nonsense=None)


# Audio


def one_clip(name, *seconds):
    model, processor, _ = bare(name)
    clips = [audio(each, seed=i) for i, each in enumerate(seconds, 1)]
    return make_batch(encode_chats(model, processor, [chat(*clips, text("a"))]))


def test_the_mask_of_audio_travels():
    """
    A clip that fills its frames needs no mask. The frames of another clip end with silence, which the mask hides.
    """
    actor = make("qwen2_audio", packing_samples=True)
    full = one_clip("qwen2_audio", 1.0)
    short = one_clip("qwen2_audio", 0.4)
    assert torch.equal(full.score(actor, audio_attention_mask=None), full.score(actor))
    features = short.media["audio_values"]
    for call, options in ((short.score, {}), (short.score_packed, {}), (short.generate, {"max_new_tokens": 2})):
        call(actor, **options)
        with pytest.raises(MediaError, match="^row 0 .* don't add up .* mask of frames as `audio_attention_mask`"):
            call(actor, audio_attention_mask=None, **options)
        with pytest.raises(MediaError, match="^there is audio but no `feature_attention_mask`; pass the processor's"):
            call(actor, audio_values=None, audio_attention_mask=None, input_features=features, **options)
    with pytest.raises(MediaError, match="there is no audio; pass the audio"):
        short.score(actor, audio_values=None)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        *[(name, 1.0) for name in ("qwen2_audio", "qwen2_5_omni", "qwen3_omni_moe", "audioflamingo3")],
        ("voxtral", 30.0),  # whose window is always full
        *[(name, 0.7) for name in ("gemma3n", "gemma4")],  # which have their frames first
        *[(name, 0.7) for name in ("granite_speech", "phi4_multimodal")],  # which need no mask
    ],
)
def test_the_mask_by_default(name, seconds):
    batch = one_clip(name, seconds)
    actor = make(name)
    logps = batch.score(actor, audio_attention_mask=None)
    if name.startswith("gemma"):
        ones = torch.ones_like(batch.media["audio_attention_mask"])
        assert_close(logps, batch.score(actor, audio_attention_mask=ones))
    else:
        assert_close(logps, torch.stack(bare_logps(bare(name)[0], batch)))


def test_placeholders_say_how_many_tokens_of_a_clip_count():
    """Granite Speech masks tokens, not frames, so that their number is clear."""
    model, processor, _ = bare("granite_speech")
    parts = audio(0.3, seed=1), text("a"), audio(0.9, seed=2), text("b")
    batch = make_batch(encode_chats(model, processor, [chat(*parts)]))
    actor = make("granite_speech")
    assert len(batch.media["audio_attention_mask"].sum(1).unique()) == 2
    assert torch.equal(batch.score(actor, audio_attention_mask=None), batch.score(actor))


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni"])
def test_audio_matters_and_images_do_not_to_an_actor_that_only_hears(name):
    batch = make_batch(bare(name)[2][:1])
    actor = ActorAL(FAMILIES[name].build()[0], bf16=False, packing_samples=True)
    patches = torch.ones(4, 1176)
    grid = torch.tensor([[1, 2, 2]])
    seen = {"pixel_values": patches, "image_grid_thw": grid, "pixel_values_videos": patches, "video_grid_thw": grid}
    for call in (batch.score, batch.score_packed):
        expected = call(actor)
        assert torch.equal(call(actor, **seen), expected)
        assert (call(actor, audio_values=batch.media["audio_values"].flip(-1)) - expected).abs().max() > 1e-2


# Sampling

GENERATED = ["qwen2_audio", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen2_5_omni", "gemma3", "paligemma", "voxtral"]


def prompt_inputs(batch):
    """Returns the processor's output for the prompts of the batch, under the model's names."""
    names = batch.prompts[0].token_fields
    fields = {name: left_padded([prompt.token_fields[name] for prompt in batch.prompts]) for name in names}
    return {"input_ids": batch.prompt_ids, "attention_mask": batch.prompt_mask, **join_media(batch.prompts), **fields}


@pytest.mark.parametrize("name", GENERATED)
def test_generate_equals_that_of_transformers(name):
    model, processor, prompts = bare(name)
    model = copy.deepcopy(model)
    model.config.get_text_config().output_router_logits = False  # `generate` fails with it on padded prompts
    batch = make_batch(prompts, pad=processor.tokenizer.pad_token_id)
    suppressed = sorted(all_placeholder_ids(model, model))
    inputs = prompt_inputs(batch)
    options = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**inputs, **options, suppress_tokens=suppressed)
    actor = make(name, packing_samples=True)
    width = batch.prompt_ids.size(1)
    for _ in range(2):  # a call leaves no state behind
        sequences, attention_mask, action_mask = batch.generate(actor, **options)
        assert torch.equal(sequences, expected)
        assert sequences.shape == attention_mask.shape == (len(prompts), width + action_mask.size(1))
        assert (attention_mask.dtype, action_mask.dtype) == (torch.int64, torch.bool)
        assert torch.equal(attention_mask[:, :width], batch.prompt_mask)
        assert torch.equal(attention_mask[:, width:].bool(), action_mask)
    own = {key: value for key, value in inputs.items() if key in ("mm_token_type_ids", "token_type_ids")}
    assert torch.equal(batch.generate(actor, **own, **options)[0], expected)


def test_repeated_prompts_are_prefilled_once(monkeypatch):
    """By the loop of this package, with media and random numbers of the prompts' rows."""
    model, _, prompts = bare("qwen2_5_vl")
    actor = make("qwen2_5_vl")
    batch = make_batch([*prompts[:1] * 3, prompts[1]])
    rows = []
    options = {"max_new_tokens": 6, "do_sample": True}
    inputs = prompt_inputs(batch)
    torch.manual_seed(0)
    expected = model.generate(**inputs, **options, suppress_tokens=sorted(all_placeholder_ids(model, model)), top_k=0)

    def count(prompts, pad_token_id):
        rows.append(len(prompts))
        return left_pad(prompts, pad_token_id)

    monkeypatch.setattr(generation, "left_pad", count)
    torch.manual_seed(0)
    assert torch.equal(batch.generate(actor, **options)[0], expected)
    assert rows == [2, 4]  # the latter for ids alone


def test_end_of_sequence():
    """Ends are those of the call, of its generation config, or of the model's; padding defaults to the end."""
    actor, batch = make_both("qwen2_5_vl", 2)
    greedy = {"max_new_tokens": 8, "do_sample": False}
    config = transformers.GenerationConfig
    free, _, mask = batch.generate(actor, **greedy, eos_token_id=[399])
    width = batch.prompt_ids.size(1)
    own = actor.model.generation_config
    assert mask.all()
    ends = [free[0, width + 2].item(), free[1, width + 4].item()]
    first = ends[0]
    sequences, attention, mask = batch.generate(actor, **greedy, eos_token_id=ends, pad_token_id=0)
    for row in range(2):
        stop = width + next(i for i, token in enumerate(free[row, width:].tolist()) if token in ends) + 1
        assert mask[row].tolist() == [i < stop for i in range(width, sequences.size(1))]
        assert torch.equal(sequences[row, :stop], free[row, :stop]) and not sequences[row, stop:].any()
    assert torch.equal(attention[:, width:].bool(), mask) and not mask.all()
    single, _, mask = batch.generate(actor, **greedy, eos_token_id=first)
    for end, options in (
        (first, {**greedy, "eos_token_id": None}),
        (399, {"do_sample": False, "generation_config": config(max_new_tokens=8, eos_token_id=first)}),
    ):
        own.eos_token_id = end
        again = batch.generate(actor, **options)
        assert torch.equal(again[0], single) and torch.equal(again[2], mask)
    own.pad_token_id = None
    sequences, _, mask = batch.generate(actor, **greedy, eos_token_id=[first, 398])
    assert mask.tolist() == [[True] * 3 + [False] * 5, [True] * 8]
    assert (sequences[0, width + 2 :] == first).all() and torch.equal(sequences[1], free[1])


@pytest.mark.parametrize(
    ("options", "config", "message"),
    [
        ({"temperature": 0.8}, {}, "Sampling at temperature 0.8, but log-probabilities are those at 1.0"),
        ({"top_p": 0.9}, {}, "`top_p` and `top_k` cut off tokens"),
        ({}, {"top_k": 5}, "`top_p` and `top_k` cut off tokens"),
        ({"generation_config": transformers.GenerationConfig(temperature=0.3)}, {}, "Sampling at temperature 0.3"),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.0}, {"top_k": 5, "temperature": 0.1}, None),
        ({"temperature": 0.8, "top_k": 5, "do_sample": False}, {}, None),
    ],
)
def test_sampling_from_another_policy_warns(options, config, message, caplog, monkeypatch):
    # Accelerate's logger raises without its state, which a user's script may not create
    monkeypatch.setattr(PartialState, "_shared_state", {})
    actor = text_actor()
    actor.model.generation_config.update(**config)
    with caplog.at_level(logging.WARNING, "trl_multimodal_rft"):
        actor.generate(torch.tensor([[60, 61]]), **{"do_sample": True, "max_new_tokens": 1, **options})
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("trl_multimodal_rft")]
    assert len(messages) == (message is not None) and all(message in m for m in messages)


def test_what_generate_does_not_do():
    actor, batch = make_both("qwen2_audio")
    for options, error in (
        ({"num_return_sequences": 2, "do_sample": True}, "repeat the prompts, and their media with them"),
        ({"num_beams": 2}, "Beams aren't supported with audio"),
        ({"nonsense": 3}, "`nonsense` is no option of sampling"),
        ({"nonsense": torch.ones(1)}, "`nonsense` is no option of sampling"),
    ):
        with pytest.raises(ValueError, match=error):
            batch.generate(actor, **options)
    words = text_batch()
    with pytest.raises(ValueError, match="padded on the left"):
        actor.generate(words.prompt_ids, attention_mask=words.prompt_mask.flip(1), max_new_tokens=2)
    # Beams
    model, _, prompts = bare("qwen2_5_vl")
    inputs = prompt_inputs(make_batch(prompts[:2]))
    options = {"max_new_tokens": 4, "num_beams": 2, "do_sample": False}
    expected = model.generate(**inputs, suppress_tokens=sorted(all_placeholder_ids(model, model)), **options)
    assert torch.equal(make("qwen2_5_vl").generate(**inputs, **options)[0], expected)


# Response masks: prompt length, end ids, pad id, prompt mask, input, then the expected result


@dataclass
class Golden:
    sequence: list[int]
    actions: list[int]
    truncated: bool
    after: list[int] | None = None  # defaults to the sequence
    attention: list[int] | None = None  # defaults to ones on the prompt and the actions
    prompt: int = 3
    eos: int | list[int] | None = 2
    pad: int = 0
    prompt_mask: list[int] | None = None


GOLDEN = {
    "truncated": Golden([4, 5, 6, 7, 8, 9, 10], [1, 1, 1, 1], True),
    "ended": Golden([4, 5, 6, 7, 8, 2, 0], [1, 1, 1, 0], False),
    "ended in the last column": Golden([4, 5, 6, 7, 8, 9, 2], [1, 1, 1, 1], False),
    "padding in the middle": Golden([4, 5, 6, 7, 0, 8, 9, 2], [1, 1, 1, 1, 1], False),
    "several ends, the other": Golden([4, 5, 6, 7, 2, 3, 0], [1, 1, 0, 0], False, [4, 5, 6, 7, 2, 0, 0], eos=[2, 3]),
    "padding ends": Golden(
        *[[2, 4, 2, 5, 7, 2, 8, 9, 2], [1, 1, 0, 0, 0], False, [2, 4, 2, 5, 7, 2, 2, 2, 2]],
        *[[0, 1, 1, 1, 1, 1, 0, 0, 0], 4, 2, 2, [0, 1, 1, 1]],
    ),
    "end in the prompt, empty response": Golden([4, 5, 2, 2, 0, 0], [1, 0, 0], False),
    "text after the end": Golden([4, 5, 6, 7, 2, 8, 2], [1, 1, 0, 0], False, [4, 5, 6, 7, 2, 0, 0]),
    "stopped by a string": Golden([4, 5, 6, 7, 8, 0, 0], [1, 1, 0, 0], False),
    "no end known": Golden([4, 5, 6, 7, 2, 0], [1, 1, 0], False, eos=None),
    "left padding": Golden([0, 0, 4, 7, 2], [1, 1], False, attention=[0, 0, 1, 1, 1]),
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
    # The actors' method returns the first three
    processed = text_actor().process_sequences(*args)
    assert len(processed) == 3
    assert all(torch.equal(a, b) for a, b in zip(processed, (after, attention, actions), strict=True))


def test_lengths_tell_padding_from_an_end():
    """An engine that returns lengths may stop a completion early, where the padding token ends text."""
    sequences = torch.tensor([[7, 5, 6, 2, 2], [7, 5, 2, 2, 2], [7, 5, 6, 8, 9]])
    _, attention, actions, truncated = mask_completions(sequences, 1, 2, 2, None, [2, 2, 4])
    assert actions.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]]
    assert attention[:, 1:].tolist() == actions.int().tolist()
    # Only the longest completion reached the limit
    assert truncated.tolist() == [False, False, True]


# Construction


def sources(name):
    """Returns both ways to name the model."""
    return [str(saved(name)), load(name)[0]]


class Asked(Exception):
    pass


@pytest.fixture
def asked(monkeypatch):
    """Records the arguments of model loading. Models load unless `asked["only"]` is set."""
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


def test_use_flash_attention_2(asked):
    path = str(saved("qwen2_audio"))
    asked["only"] = True
    for flag, expected in ((True, "flash_attention_2"), (False, None)):
        with pytest.raises(Asked):
            ActorAL(path, use_flash_attention_2=flag)
        assert asked.get("attn_implementation") == expected
    asked["only"] = False
    assert ActorAL(path, bf16=False).config._attn_implementation == "sdpa"
    if not is_flash_attn_2_available():
        with pytest.raises(ImportError, match="(?i)flash.?att"):
            ActorAL(path, use_flash_attention_2=True)


def test_bf16(tmp_path):
    """Actors cast parameters but not buffers: rounded frequencies would turn rotary positions."""
    by_path, by_instance = (ActorVL(source).model for source in sources("qwen2_5_vl"))  # by default
    assert {p.dtype for p in by_path.parameters()} == {torch.bfloat16}
    for kind in ("named_buffers", "named_parameters"):
        for (name, a), (_, b) in zip(*(getattr(each, kind)() for each in (by_path, by_instance)), strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b), name
    for source in sources("qwen2_5_vl"):
        assert {p.dtype for p in ActorVL(source, bf16=False).parameters()} == {torch.float32}
    half = load("qwen2_5_vl")[0].to(torch.float16)
    half.save_pretrained(tmp_path)
    assert ActorVL(half, bf16=False).model.dtype == torch.float16
    assert ActorVL(str(tmp_path), bf16=False).model.dtype == torch.float16
    assert ActorVL(str(tmp_path), bf16=True).model.dtype == torch.bfloat16


def adapted(actor):
    """Returns full names of the layers with an adapter."""
    prefix = "base_model.model."
    names = [name for name, module in actor.model.named_modules() if hasattr(module, "lora_A")]
    assert all(name.startswith(prefix) for name in names)
    return [name.removeprefix(prefix) for name in names]


def trainable(actor):
    return [name for name, parameter in actor.model.named_parameters() if parameter.requires_grad]


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "qwen3_omni_moe"])
def test_lora(name):
    cls = actor_class(name)
    for source in sources(name):
        actor = cls(source, bf16=False, lora_rank=4, lora_alpha=12, lora_dropout=0.25)
        linear = {n for n, module in bare(name)[0].named_modules() if isinstance(module, nn.Linear) and n != "lm_head"}
        assert set(adapted(actor)) == linear
        assert all("lora_" in n for n in trainable(actor))
        assert not any(module.training for module in actor.modules())  # it loads in evaluation mode
        for layer in (module for module in actor.model.modules() if hasattr(module, "lora_A")):
            assert layer.lora_A["default"].out_features == layer.lora_B["default"].in_features == 4
            assert layer.scaling["default"] == 3 and layer.lora_dropout["default"].p == 0.25
    assert not adapted(cls(load(name)[0], bf16=False))
    assert len(trainable(cls(load(name)[0], bf16=False))) == len(list(bare(name)[0].parameters()))


def set_weights(actor, part, std):
    """Sets the weights of the adapter, which are zero at first."""
    with torch.no_grad():
        for name, parameter in actor.model.named_parameters():
            if part in name:
                parameter.normal_(std=std, generator=torch.Generator().manual_seed(len(name)))


def test_target_modules():
    def made(modules, **options):
        return make("qwen2_5_vl", target_modules=modules, **{"lora_rank": 2, **options})

    layers = [f"model.language_model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    chosen = adapted(made(["q_proj", "language_model.layers.0.mlp.up_proj"]))
    assert sorted(chosen) == ["model.language_model.layers.0.mlp.up_proj", *layers]
    assert sorted(adapted(made(None))) == sorted(adapted(made("all-linear")))
    for modules, options, error in (
        (["proj"], {"freeze_vision_tower": True}, r"has a name that ends in one of \['proj'\]"),
        (["_proj"], {}, "ends in one of"),  # not a part of a name
    ):
        with pytest.raises(ValueError, match=error):
            made(modules, **options)


def test_lora_on_an_adapter():
    model = get_peft_model(load("qwen2_audio")[0], LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="already has an adapter"):
        ActorAL(model, lora_rank=4)
    actor = ActorAL(model, bf16=False, temperature=TEMPERATURE)
    assert actor.model is model and type(actor.base_model).__name__ == "Qwen2AudioForConditionalGeneration"
    batch, expected = cases("qwen2_audio")[0]
    assert_close(batch.score(actor), expected)


# Encoders, which `test_freeze.py` tells from other parts in all families

FREEZE = {"image": "freeze_vision_tower", "audio": "freeze_audio_tower"}


def towers_of(name) -> dict[str, str]:
    return {kind: find_tower(bare(name)[0], kind) for kind in FREEZE if kind in FAMILIES[name].modalities}


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "llava"])
def test_names_of_layers_in_towers_and_decoder_coincide(name):
    """Otherwise the tests of frozen encoders would prove nothing."""
    ((modality, tower),) = towers_of(name).items()
    layers, frozen = (adapted(make(name, lora_rank=2, **{FREEZE[modality]: freezes})) for freezes in (False, True))
    inside = [layer for layer in layers if layer.startswith(f"{tower}.")]
    assert sorted([*frozen, *inside]) == sorted(layers) and "lm_head" not in layers
    common, *_ = sorted({layer.rsplit(".", 1)[1] for layer in frozen} & {each.rsplit(".", 1)[1] for each in inside})
    for source in sources(name):
        actor = actor_class(name)(source, bf16=False, lora_rank=2, target_modules=[common], **{FREEZE[modality]: True})
        assert set(adapted(actor)) == {layer for layer in frozen if layer.endswith(f".{common}")} != set()


def test_models_of_a_path(asked, tmp_path):
    path = str(saved("qwen2_audio"))
    options = {"bf16": False, "temperature": TEMPERATURE, "packing_samples": True}
    batch, expected = cases("qwen2_audio")[0]
    for device_map in ({}, {"device_map": {"": "cpu"}}):
        actor = ActorAL(path, **device_map, **options)
        assert asked["device_map"] == device_map.get("device_map")
        assert actor.device == torch.device("cpu")
        assert_close(batch.score(actor), expected)
        assert_close(batch.score_packed(actor).view(-1, N), expected)
    assert ActorAL(path, device_map={"": "meta"}).device == torch.device("meta")
    assert type(actor.model) is transformers.Qwen2AudioForConditionalGeneration
    # Without media
    language_model().save_pretrained(tmp_path)
    actor = Actor(str(tmp_path), bf16=False)
    batch = text_batch()
    assert type(actor.model) is transformers.Qwen2ForCausalLM
    assert_close(batch.score(actor), torch.stack(bare_logps(language_model(), batch)))
    with pytest.raises(OSError):
        ActorVL("/nowhere/at/all")


@pytest.mark.skipif(not is_deepspeed_available(), reason="needs DeepSpeed")
def test_ds_config(asked):
    """Transformers uses ZeRO-3 while weights load, and forgets the configuration of a deleted actor."""
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


@pytest.mark.parametrize("method", ["score", "score_packed", "generate", "output"])
def test_ranks_with_other_media_are_refused_where_weights_are_in_parts(method, monkeypatch):
    """They would wait for each other's encoders. The other rank is made up."""
    actor, batch = make_both("qwen2_audio", packing_samples=True)
    others = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", lambda into, mine: into.__setitem__(slice(2), [mine, others]))

    def call():
        if method == "output":
            return batch.score(actor, return_output=True)
        return getattr(batch, method)(actor, **({"max_new_tokens": 1} if method == "generate" else {}))

    call()  # ranks with whole weights needn't agree
    next(actor.parameters()).ds_id = 0  # as DeepSpeed marks weights in parts
    for others[:] in ([[]], [["audio"], ["audio"]]):
        with pytest.raises(ValueError, match=r"rank 0 holds the modalities \[\['audio'\]\], but rank 1 .* ZeRO-2"):
            call()
    others[:] = [["audio"]]
    call()


def test_arguments_that_do_not_fit():
    model = bare("qwen2_audio")[0]
    zero3 = {"zero_optimization": {"stage": 3}}
    loading = {"use_flash_attention_2": True, "ds_config": zero3, "device_map": {"": "cpu"}, "load_in_4bit": True}
    for name, value in loading.items():
        with pytest.raises(ValueError, match=f"`{name}` says how to load a model, but an instance was passed"):
            ActorAL(model, **{name: value})
    for name in ("load_in_8bit", "trust_remote_code", "nonsense"):
        with pytest.raises(TypeError, match=name):
            ActorVL("somewhere", **{name: None})


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "gemma3"])
def test_high_entropy_token_ratio(name):
    model, _, prompts = bare(name)
    batch = make_batch(prompts)
    options = {"bf16": False, "temperature": TEMPERATURE, "packing_samples": True}
    logits = torch.stack([bare_logits(model, p, r) for p, r in zip(prompts, batch.responses, strict=True)])
    probabilities = (logits.double() / TEMPERATURE).softmax(-1)
    expected = -(probabilities * probabilities.log()).nan_to_num(0).sum(-1).float()
    for source in sources(name):
        actor = actor_class(name)(source, high_entropy_token_ratio=0.2, **options)
        for call in (batch.score, batch.score_packed):
            logps, output = call(actor, return_output=True)
            assert output.action_entropy.shape == logps.shape and not output.action_entropy.requires_grad
            assert_close(output["action_entropy"].view(-1, N), expected, 2e-5)
    actor = make(name, packing_samples=True)
    assert "action_entropy" not in batch.score(actor, return_output=True)[1]
    assert "action_entropy" not in batch.score_packed(actor, return_output=True)[1]
    for ratio in (-0.1, 1.1):
        with pytest.raises(ValueError, match=f"must be between 0 and 1, got {ratio}"):
            make(name, high_entropy_token_ratio=ratio)


def test_positions_of_the_audio_tower_stay_as_they_are():
    """`from_pretrained` makes them trainable."""
    path = str(saved("qwen2_audio"))
    loaded = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(path)
    actor = ActorAL(path, bf16=False)
    critic = Critic.from_pretrained(path, type(loaded))
    for model in (actor.model, critic.model):
        fixed = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
        assert fixed == {"model.audio_tower.embed_positions.weight"}


@pytest.mark.slow
def test_load_in_4bit(tmp_path, asked):
    bnb = pytest.importorskip("bitsandbytes")
    path = str(tmp_path)
    save_wide("qwen2_audio", path)
    actor = ActorAL(path, load_in_4bit=True, lora_rank=4, packing_samples=True)
    batch = make_batch(bare("qwen2_audio")[2])
    config = asked["quantization_config"]
    assert config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_compute_dtype == torch.bfloat16
    quantized = [module for module in actor.model.modules() if isinstance(module, bnb.nn.Linear4bit)]
    assert quantized and all(module.weight.dtype == torch.uint8 for module in quantized)
    logps = batch.score(actor)
    assert 1e-3 < (logps - batch.score(ActorAL(path, bf16=False))).abs().mean() < 1
    logps.sum().backward()
    assert any(p.grad is not None and p.grad.any() for n, p in actor.model.named_parameters() if "lora_B" in n)
    assert batch.generate(actor, max_new_tokens=3)[0].size(1) > batch.prompt_ids.size(1)
    # 4-bit weights count as their full-precision counterparts, and a quantized instance stays unchanged
    assert counted(actor)[1] == sum(p.numel() for p in ActorAL(path, lora_rank=4).parameters())
    single = ActorAL(path, load_in_4bit=True, bf16=False)
    assert asked["quantization_config"].bnb_4bit_compute_dtype == torch.float32
    assert any(isinstance(m, bnb.nn.Linear4bit) for m in ActorAL(single.model).modules())


# Training


def counted(actor):
    """Returns the two numbers that the actor prints."""
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
    assert counted(make("qwen2_5_vl", freeze_vision_tower=True)) == [total - tower, total]
    actor = make("qwen2_5_vl", lora_rank=4, target_modules=["q_proj"])
    assert counted(actor) == [2 * 4 * 128, total + 2 * 4 * 128]  # two layers of 64 to 64
    # Both encoders
    names = tuple(towers_of("qwen2_5_omni").values())
    both = dict.fromkeys(FREEZE.values(), True)
    layers = adapted(make("qwen2_5_omni", lora_rank=2, **both))
    assert len(names) == 2 and layers and not any(layer.startswith(names) for layer in layers)
    for flag in FREEZE.values():
        with pytest.raises(ValueError, match=f"has no (image|audio) encoder. Remove `{flag}`"):
            text_actor(**{flag: True})


@pytest.mark.parametrize("lora", ["", "lora", "lora, frozen"])
@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl"])
def test_gradient_checkpointing(name, lora):
    ((modality, tower),) = towers_of(name).items()
    options = {"lora_rank": 4 if "lora" in lora else 0, FREEZE[modality]: "frozen" in lora}
    actor, batch = make_both(name, packing_samples=True, **options)
    set_weights(actor, "lora_B", 0.02)
    actor.train()

    def backward():
        """Returns gradients, and the number of elements that the forward pass saved for them."""
        kept = []
        actor.zero_grad(set_to_none=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            logps = batch.score(actor)
            loss = (logps * weights_of(logps)).sum()
        loss.backward()
        return gradients(actor.model), sum(kept)

    expected, plain = backward()
    assert set(expected) == set(trainable(actor))
    for kwargs in ((), ({"use_reentrant": False},), ({"use_reentrant": True},)):
        for _ in range(2):
            actor.gradient_checkpointing_enable(*kwargs)
        encoder = actor.base_model.get_submodule(tower)
        assert any(getattr(part, "gradient_checkpointing", False) for part in encoder.modules())
        recomputed, kept = backward()
        assert relative_difference(expected, recomputed) <= 1e-5 and kept < 0.6 * plain
        actor.gradient_checkpointing_disable()
    again, kept = backward()
    assert relative_difference(expected, again) <= 1e-5 and kept == plain


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "qwen3_omni_moe"])
def test_load_balancing_loss(name):
    model, _, prompts = bare(name)
    actor, batch = make_both(name, 1, packing_samples=True)
    fields = {key: nn.functional.pad(value, (0, N))[None] for key, value in batch.prompts[0].token_fields.items()}
    inputs = {"input_ids": batch.sequences, "attention_mask": batch.attention_mask, **batch.prompts[0].media, **fields}
    expected = bare(name)[0](**inputs, output_router_logits=True).aux_loss
    _, output = batch.score(actor, return_output=True)
    assert expected > 0
    for values in (
        output,
        batch.score(actor, None, return_output=True),
        batch.score_packed(actor, return_output=True)[1],
    ):
        torch.testing.assert_close(values.aux_loss, expected)
    output.aux_loss.backward()
    assert any("gate" in n for n in gradients(actor.model))
    dense, batch = make_both("qwen2_5_vl", 1)
    assert getattr(batch.score(dense, return_output=True)[1], "aux_loss", None) is None


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
    assert_close(batch.score(again), batch.score(actor))


ROWS = {"qwen2_audio": audio_rows, "qwen2_5_vl": image_rows}


@pytest.mark.parametrize("trainer", [MultimodalGRPOTrainer, MultimodalRLOOTrainer])
@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl"])
def test_trainers_take_actors(name, trainer):
    """An actor trains like its model, bit for bit."""
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


def test_trainers_refuse_actors_of_another_objective(tmp_path):
    model, processor = load("qwen2_audio")

    def trainer(actor_options, **options):
        objects = {"model": ActorAL(model, bf16=False, **actor_options), "processing_class": processor}
        return make_trainer(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(), tmp_path, objects=objects, **options)

    with pytest.raises(ValueError, match="made for temperature 0.5, but `temperature` is 1.0; make them equal"):
        trainer({"temperature": 0.5})
    with pytest.raises(ValueError, match="high_entropy_token_ratio=0.2`; set `top_entropy_quantile=0.2`"):
        trainer({"high_entropy_token_ratio": 0.2})
    options = {"temperature": 0.5, "top_entropy_quantile": 0.2}
    assert trainer({"temperature": 0.5, "high_entropy_token_ratio": 0.2}, **options).temperature == 0.5
    trainer({"high_entropy_token_ratio": 1.0})  # both ways count all tokens


@pytest.mark.parametrize("name", ["granite_speech", "qwen3_omni_moe"])
def test_clips_of_different_lengths_where_the_encoder_would_mix_them(name):
    """The caller padded the clips of two rows to one length."""
    model, processor = FAMILIES[name].build()
    actor = ActorAL(model, bf16=False)
    prompts = encode_chats(model, processor, [chat(audio(seconds), text("What?")) for seconds in (0.4, 1.2)])
    with pytest.raises(MediaError, match="clips of different lengths"):
        make_batch(prompts).score(actor)
    assert make_batch(prompts[:1] * 2).score(actor).shape == (2, N)


def test_padding_does_not_move_the_positions_of_a_language_model():
    """Learned positions, unlike rotary ones, depend on where the padding ends."""
    config = transformers.GPT2Config(vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    torch.manual_seed(0)
    actor = Actor(transformers.GPT2LMHeadModel(config).eval(), bf16=False)
    ids = torch.randint(1, 50, (1, 8))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], dim=1)
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones_like(ids)], dim=1)
    with torch.no_grad():
        assert (actor(ids, 4) - actor(padded, 4, mask)).abs().max() <= 1e-5
