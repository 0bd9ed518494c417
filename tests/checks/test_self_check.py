# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Breaks each rule of the self-check once. The check detects it, falls back and measures again, or training stops. Most
tests need only a policy and prompts; those at the end cover the trainer's use of the results.
"""

import functools
import logging
import math
import re
from dataclasses import replace

import pytest
import torch
import transformers as hf
from datasets import Dataset, concatenate_datasets
from helpers.checks import subject
from helpers.families import ALL_FAMILIES
from helpers.files import write_film
from helpers.trainer_utils import (
    TRAINERS,
    audio_rows,
    forget_isolation,
    image_rows,
    load,
    make_trainer,
    saved,
    sound,
    text_rows,
    with_media,
)
from trainers.preference.test_dpo import image_pairs, text_pairs

from trl_multimodal_rft import MultimodalGRPOTrainer, policy
from trl_multimodal_rft.checks.self_check import SelfCheck
from trl_multimodal_rft.checks.targets import Traits, choose_prompts
from trl_multimodal_rft.encoding import media as encoding
from trl_multimodal_rft.engines import transformers as generation
from trl_multimodal_rft.forward import logprobs as forward
from trl_multimodal_rft.forward.masks import linear_masks
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.models.modes import checkpoint_activations
from trl_multimodal_rft.policy import Fallbacks, PolicyForward
from trl_multimodal_rft.versions import cache_name


def asking(prompts, **columns):
    """Returns rows of questions with media."""
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts])
    for column, media in columns.items():
        rows = with_media(rows, column, media)
    return rows


def picture(width=84, height=56):
    return image_rows(1)[0]["image"].resize((width, height))


@pytest.mark.parametrize(("family", "rows"), [("qwen2_audio", audio_rows), ("qwen2_5_vl", image_rows)])
def test_a_sound_model_passes(family, rows):
    sound_model = subject(family, rows(2))
    check = sound_model.check()
    assert check.features == 0
    assert max(check.padded, check.packed, check.rows, check.sampled) < 1e-5 < check.tolerance < 1e-2
    assert min(check.media.values()) > 1e-2
    assert check.fallbacks == Fallbacks(packing=True, isolate=None)
    assert check.changes == ("no media tokens",) and check.changed > 0 and check.training == 0
    assert sound_model.policy.fallbacks is not check.fallbacks  # the caller must apply them


# Log-probabilities against the model's logits


def test_model_logits_where_the_fused_head_is_wrong(caplog):
    wrong = subject("llava", image_rows(2), temperature=0.7)
    assert not wrong.policy.fallbacks.logits_from_model
    # The check had nothing to measure before
    wrong.model.lm_head.register_forward_hook(lambda module, args, logits: logits * 2)
    check = wrong.check()
    assert re.search("llava: scores of padded rows differ by .* falling back to the model's own logits", caplog.text)
    assert check.fallbacks.logits_from_model
    assert max(check.padded, check.packed, check.sampled) < 1e-4 and "with the model's logits" in str(check)


# Features


def test_video_files_are_compared_with_what_the_processor_reads(tmp_path, monkeypatch):
    rows = asking(["Is there a dog?"]).add_column("video", [write_film(tmp_path / "film.mp4")])
    assert subject("qwen3_vl", rows).check().features == 0

    def larger(processor, size, frames, count):
        return frames.repeat(2, 1).repeat(2, 2)

    monkeypatch.setattr(encoding, "_resized_frames", larger)
    with pytest.raises(RuntimeError, match="its media tensors differ by inf from those of its processor"):
        subject("qwen3_vl", rows).check()


# Media


def test_an_ignored_audio_cannot_hide_behind_an_image():
    rows = with_media(image_rows(2), "audio", [sound(0.3 + 0.1 * i, seed=i) for i in range(2)])
    whole = subject("qwen2_5_omni", rows)
    media = whole.check().media
    assert media.keys() == {"image", "audio"} and min(media.values()) > 1e-2
    projection = whole.model.get_encoder(modality="audio").proj
    torch.nn.init.zeros_(projection.weight)
    torch.nn.init.zeros_(projection.bias)
    with pytest.raises(RuntimeError, match="answers the same with another audio"):
        whole.check()
    assert whole.check(audio=0.5).media.keys() == {"image", "audio"}  # the check measured these before


def test_a_model_that_hears_only_that_there_is_a_sound_raises():
    """It answers differently without the features, but doesn't distinguish sounds."""
    deaf = subject("qwen2_audio", audio_rows(2))
    torch.nn.init.zeros_(deaf.model.model.multi_modal_projector.linear.weight)
    torch.nn.init.constant_(deaf.model.model.multi_modal_projector.linear.bias, 0.5)
    with pytest.raises(RuntimeError, match="qwen2_audio answers the same with another audio .log-probs move by 0"):
        deaf.check()


@pytest.mark.parametrize("rows", [1, 2])
def test_one_sound_in_all_rows_passes(rows):
    dataset = asking([f"What do you hear? {i}" for i in range(rows)], audio=[sound(0.4, seed=1)] * rows)
    assert subject("qwen2_audio", dataset).check().media["audio"] > 1e-2


# Prompts in one forward pass


def test_rows_that_disturb_each_other_are_isolated(monkeypatch, caplog):
    forget_isolation(monkeypatch)
    check = subject("gemma3n", audio_rows(4)).check()
    assert check.fallbacks.isolate == "media" and check.rows < 1e-5
    assert "one forward per shape of media" in str(check)
    assert (
        "batching prompts changes their log-probabilities; falling back to one forward per shape of media."
        in caplog.text
    )


def test_a_text_prompt_does_not_hide_what_clips_do_to_each_other(monkeypatch):
    """Text next to a clip changes nothing in an encoder without a padding mask; a clip of another length does."""
    forget_isolation(monkeypatch)
    prompts = ["What do you hear in the audio? Is there a cat?", "Is there a bird?", "What do you hear?"]
    rows = asking(prompts, audio=[sound(0.9, seed=1), None, sound(0.7, seed=2)])
    check = subject("gemma3n", rows).check()
    assert check.fallbacks.isolate == "media" and check.rows < 1e-5


def test_rows_of_equal_shape_that_disturb_each_other_are_isolated(monkeypatch):
    def leak(prompts, *args, **kwargs):
        row = pack(prompts, *args, **kwargs)
        row.position_ids = row.position_ids + torch.arange(row.position_ids.size(-1)) // (len(prompts[0]) + 12)
        return row

    pack = forward.pack
    monkeypatch.setattr(forward, "pack", leak)  # positions of later prompts depend on the earlier ones
    check = subject("llava", image_rows(2)).check()
    assert check.fallbacks.isolate == "prompt" or not check.fallbacks.packing
    assert check.rows < 1e-5


def test_rows_that_padding_changes_are_isolated(monkeypatch):
    """The check detects it with the shortest prompt, next to others as long as the longest."""

    def from_the_edge(prompts, pad_token_id):
        batch = left_pad(prompts, pad_token_id)
        gaps = (batch["attention_mask"] == 0).sum(1, keepdim=True)
        return {**batch, "position_ids": batch["position_ids"] + gaps * batch["position_ids"]}

    left_pad = forward.left_pad
    monkeypatch.setattr(forward, "left_pad", from_the_edge)
    prompts = ["What is in the image? Describe it.", "What is in the image?", "What is in the image? Describe it."]
    check = subject("llava", asking(prompts, image=[picture()] * 3)).check()
    assert check.fallbacks == Fallbacks(isolate="prompt") and check.rows < 1e-5


def test_rows_that_no_fallback_separates_raise(monkeypatch):
    def one_after_the_other(model, unwrapped, request):
        scores = completion_scores(model, unwrapped, request)
        n_prompts = len({id(prompt) for prompt in request.prompts})
        return replace(scores, logps=scores.logps + 0.01 * (n_prompts - 1))

    completion_scores = policy.completion_scores
    monkeypatch.setattr(policy, "completion_scores", one_after_the_other)
    with pytest.raises(RuntimeError, match="llava can't be trained exactly: batching prompts changes log-probabil"):
        subject("llava", image_rows(2)).check()


# Packing


def causal(model, prompt, n_new):
    return {"full_attention": None, "sliding_attention": None}


def test_packing_that_is_wrong_falls_back_to_padded(monkeypatch, caplog):
    monkeypatch.setattr(forward, "linear_masks", causal)  # Gemma 3 needs other masks
    check = subject("gemma3", image_rows(2)).check()
    assert check.packed > check.tolerance and not check.fallbacks.packing
    assert "falls back to padded rows" in str(check)
    assert re.search("gemma3: scores of packed rows differ by .* falling back to padded rows", caplog.text)


def test_packing_is_measured_on_the_longest_prompt(monkeypatch):
    """Only the longest prompt exceeds the window."""
    narrow = subject("llava", asking(["Is there a bird?", "Is there a cat? " * 12], image=[picture()] * 2))
    window = 48

    def sliding(model, prompt, n_new):
        assert linear_masks(model, prompt, n_new) == {None: None}
        steps = torch.arange(len(prompt) + n_new)
        return {None: (steps[:, None] >= steps) & (steps[:, None] - steps < window)}

    monkeypatch.setattr(forward, "linear_masks", sliding)
    check = narrow.check()
    lengths = sorted({*map(len, narrow.prompts)})
    assert lengths[0] + 8 < window < lengths[1]
    assert check.packed > 1e-2 and not check.fallbacks.packing


@pytest.mark.parametrize("error", [NotImplementedError, TypeError, KeyError])
def test_packing_that_fails_falls_back_to_padded(error, monkeypatch, caplog):
    def no_masks(model, prompt, n_new):
        raise error("masks of an unknown kind")

    monkeypatch.setattr(forward, "linear_masks", no_masks)
    with caplog.at_level(logging.WARNING):
        check = subject("llava", image_rows(2)).check()
    assert check.packed == math.inf and not check.fallbacks.packing
    assert re.search(rf"self-check: llava: scoring packed rows failed \({error.__name__}: .*masks", caplog.text)


# Sampling


def test_sampling_from_a_wrong_cache_falls_back_to_separate_prefills(monkeypatch):
    # Tokens that are decoded don't see the last ones of their prompt
    share = generation.share_prompts
    monkeypatch.setattr(
        generation,
        "share_prompts",
        lambda cache, mask, *args: share(cache, mask.index_fill(1, torch.tensor([mask.size(1) - 1]), 0), *args),
    )
    check = subject("paligemma", image_rows(2)).check()
    assert not check.fallbacks.shared_prefill and "separate prefills" in str(check)
    assert check.sampled <= check.tolerance


def test_sampling_that_fails_falls_back_to_separate_prefills(monkeypatch, caplog):
    def no_sharing(*args):
        raise NotImplementedError("an unknown cache")

    monkeypatch.setattr(generation, "share_prompts", no_sharing)
    with caplog.at_level(logging.WARNING):
        check = subject("llava", image_rows(2)).check()
    assert not check.fallbacks.shared_prefill and check.sampled <= check.tolerance
    failure = "sampling from a shared prefill fails; falling back to one prefill per completion."
    assert f"self-check: llava: {failure}" in caplog.text


def test_sampling_from_another_distribution_raises():
    drifts = subject("llava", image_rows(2))
    forward_once = drifts.model.forward
    calls = []

    @functools.wraps(forward_once)
    def drifting(*args, **kwargs):
        output = forward_once(*args, **kwargs)
        cache = kwargs.get(cache_name())
        if cache is not None and cache.get_seq_length() > 5:
            calls.append(1)
            output.logits = output.logits + 0.05 * len(calls) * torch.arange(output.logits.size(-1)) / 100
        return output

    drifts.model.forward = drifting
    with pytest.raises(RuntimeError, match="llava can't be trained exactly: it samples with log-probabilities"):
        drifts.check()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_generate_that_filters_raises(top_p):
    """The user may still change the distribution explicitly, and the message names the option."""
    changes = [] if top_p == 1.0 else ["top_p"]
    filters = subject("llava", image_rows(2), top_p=top_p, changes=changes)
    filters.model.generate = functools.partial(
        filters.model.generate, logits_processor=hf.LogitsProcessorList([hf.MinPLogitsWarper(0.5)])
    )
    if top_p == 1.0:
        with pytest.raises(RuntimeError, match="draws from another distribution than the scored one"):
            filters.check()
        return
    check = filters.check()
    assert check.changes == ("no media tokens", "top_p") and check.changed > 0.1
    assert "  intended: no media tokens, top_p\n" in str(check)


# The backward pass


class NoBackward(torch.autograd.Function):
    """A kernel that has a forward alone."""

    error: Exception

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise NoBackward.error


def without_backward(model, monkeypatch, *, packed, error=None):
    """Runs a kernel without a backward in all forwards, or in those of packed rows."""
    monkeypatch.setattr(NoBackward, "error", error or NotImplementedError("no backward on Hopper"), raising=False)
    rows = []
    pack = forward.pack
    monkeypatch.setattr(forward, "pack", lambda *args, **kwargs: rows.append(1) or pack(*args, **kwargs))

    def run(module, args, output):
        return NoBackward.apply(output) if not packed or rows else output

    model.get_decoder().layers[0].register_forward_hook(run)
    model.register_forward_hook(lambda module, args, output: rows.clear())


def test_a_kernel_without_a_backward_in_packed_rows_falls_back_to_padded(monkeypatch, caplog):
    checked = subject("llava", image_rows(2))
    model = checked.model
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    without_backward(model, monkeypatch, packed=True)
    check = checked.check()
    assert check.packed < 1e-5 and check.fallbacks == Fallbacks(packing=False)
    assert "falls back to padded rows" in str(check)
    message = "llava: the backward pass of packed rows failed (NotImplementedError: no backward on Hopper)"
    assert message in caplog.text and "packed rows have no backward pass; falling back to padded rows" in caplog.text
    assert all((parameter.grad == 1).all() for parameter in model.parameters())


def test_a_model_without_a_backward_raises(monkeypatch):
    checked = subject("llava", image_rows(2))
    without_backward(checked.model, monkeypatch, packed=False)
    with pytest.raises(RuntimeError, match="llava can't be trained: its backward pass fails .Not.*: no backward on"):
        checked.check()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_and_frozen_weights_have_a_backward(reentrant):
    checked = subject("qwen2_5_vl", image_rows(2))
    model = checked.model
    model.train()
    checkpoint_activations(model, {"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert checked.check().fallbacks == Fallbacks()
    model.requires_grad_(False)
    assert checked.check().fallbacks == Fallbacks()


# Memory


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    torch.AcceleratorError("CUDA error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    MemoryError(),
]


@pytest.mark.parametrize("where", ["packed", "processor", "backward"])
@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_running_out_of_memory_is_no_inexactness(error, where, monkeypatch):
    def too_large(*args, **kwargs):
        raise error

    checked = subject("llava", image_rows(2), **({"load_processor": too_large} if where == "processor" else {}))
    if where == "packed":
        monkeypatch.setattr(forward, "pack", too_large)
    elif where == "backward":
        without_backward(checked.model, monkeypatch, packed=True, error=error)
    with pytest.raises(type(error)):
        checked.check()


def test_running_out_of_memory_raises_what_it_led_to(monkeypatch):
    def wraps(*args, **kwargs):
        try:
            raise OUT_OF_MEMORY[0]
        except RuntimeError:
            raise ValueError("a layer failed") from None

    monkeypatch.setattr(forward, "pack", wraps)
    with pytest.raises(ValueError, match="a layer failed"):
        subject("llava", image_rows(2)).check()


def test_a_generate_that_fails_raises():
    picky = subject("qwen2_audio", audio_rows(2))
    picky.model.generate = functools.partial(picky.model.generate, unknown=1)
    with pytest.raises(RuntimeError, match="qwen2_audio can't be trained exactly: it can't sample completions"):
        picky.check()


def test_a_generate_that_returns_ids_alone_is_not_measured():
    checked = subject("qwen2_audio", audio_rows(2))
    generate = checked.model.generate

    def ids_alone(**kwargs):
        output = generate(**kwargs)
        return output if isinstance(output, torch.Tensor) else output.sequences

    checked.model.generate = ids_alone
    check = checked.check()
    assert check.sampled is None and check.padded < 1e-5 and check.media["audio"] > 1e-2
    assert "sampled vs. model's forward" not in str(check)


def test_a_checkpoint_without_a_cache_shares_its_prefill():
    """Checkpoints of Idefics and SmolVLM may set `use_cache: false`, which the trainer ignores."""
    uncached = subject("idefics3", image_rows(2))
    uncached.model.generation_config.use_cache = False
    check = uncached.check()
    assert check.sampled <= check.tolerance and check.fallbacks.shared_prefill


def test_nothing_is_sampled_where_an_engine_does():
    check = subject("qwen2_audio", audio_rows(2), sample=None).check()
    assert check.sampled is check.changed is None and check.padded < 1e-5
    assert "sampled vs. model's forward" not in str(check)
    assert re.search("sampled vs. full distribution +not measured +intended: no media tokens", str(check))


# Choices of the check, and state that it restores


def test_partners_are_prompts_with_other_grids():
    """Patches of all images have one shape; their grids distinguish them."""
    grids = []

    class Remembering(PolicyForward):
        def score(self, model, request, **options):
            grids.append({tuple(p.media["image_grid_thw"].flatten().tolist()) for p in request.prompts if p.media})
            return super().score(model, request, **options)

    subject("qwen2_5_vl", image_rows(4), policy_class=Remembering).check()
    assert max(len(each) for each in grids) == 4


def test_choice_has_the_longest_of_each_kind_another_medium_and_partners_of_every_kind():
    traits = [
        Traits(0, 0, 30, "", {}),
        Traits(0, 1, 40, "", {}),
        Traits(1, 0, 20, "a", {"image": 1.0}),
        Traits(1, 1, 10, "b", {"image": 2.0}),
        Traits(1, 2, 15, "c", {"audio": 1.0}),
    ]
    text, long, image, wide, clip = traits
    assert choose_prompts(traits) == ([image, clip, long], {"image": wide}, [wide, clip, text])
    assert choose_prompts([text]) == ([text], {}, [])
    same = Traits(0, 2, 5, "a", {"image": 1.0})
    assert choose_prompts([image, same]) == ([image], {}, [same])


def test_a_failure_names_the_model_and_the_reason():
    blind = subject("llava", asking(["Is there a bird?"] * 2, image=[picture(), None]))
    forward_once = blind.model.model.forward

    @functools.wraps(forward_once)
    def no_text_alone(*args, pixel_values=None, **kwargs):
        if pixel_values is None and kwargs.get(cache_name()) is None:
            raise IndexError("tuple index out of range")
        return forward_once(*args, pixel_values=pixel_values, **kwargs)

    blind.model.model.forward = no_text_alone
    with pytest.raises(RuntimeError, match="llava can't be trained exactly: .* fails .IndexError: tuple index"):
        blind.check()


def test_a_check_leaves_modes_checkpointing_and_random_numbers():
    checked = subject("qwen2_audio", audio_rows(2))
    model = checked.model
    model.train()
    checkpoint_activations(model, {"use_reentrant": False})

    def state():
        flags = {name: vars(part).get("gradient_checkpointing") for name, part in model.named_modules()}
        return flags, {name: part.training for name, part in model.named_modules()}, torch.get_rng_state().tolist()

    before = state()
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append((module.training, torch.is_grad_enabled())))
    layer = model.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda module, args: seen.append(layer.gradient_checkpointing))
    checked.check()
    assert any(before[0].values()) and state() == before
    # The last measurements are of training mode, and of a backward pass, which has checkpointing
    assert {*seen} == {(False, False), (True, False), (True, True), False, True}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_block_has_every_figure():
    check = SelfCheck(
        features=0.0,
        padded=1e-6,
        packed=0.5,
        media={"audio": 0.29, "image": math.nan},
        rows=5e-7,
        sampled=math.nan,
        changes=("no media tokens", "top_p"),
        changed=8e-3,
        training=0.1,
        tolerance=7e-4,
        fallbacks=Fallbacks(packing=False, isolate="media", logits_from_model=True, shared_prefill=False),
        engine_positions=True,
        engine=(1e-6, 3e-6),
        engine_updated=(2e-6, 4e-6),
        engine_conversation=(3e-6, 5e-6),
        conversation=2e-6,
    )
    assert (
        str(check)
        == """\
self-check: largest differences of log-probs (tolerance 7e-04)
  features vs. processor             0e+00
  padded rows vs. model's forward    1e-06         with the model's logits, at the engine's positions
  packed rows vs. model's forward    5e-01         falls back to padded rows
  batched vs. one by one             5e-07         one forward per shape of media
  sampled vs. model's forward        not measured  separate prefills
  sampled vs. full distribution      8e-03         intended: no media tokens, top_p
  training vs. evaluation mode       1e-01         dropout or batch norm
  tool media vs. model's forward     2e-06
  engine vs. recomputed              1e-06         on average, at most 3e-06
  engine vs. recomputed, updated     2e-06         on average, at most 4e-06
  engine vs. recomputed, tool media  3e-06         on average, at most 5e-06
  effect of another audio            0.29
  effect of another image            not measured"""
    )
    assert re.search("effect of media +no media yet$", str(replace(check, media={})))
    assert "full distribution" not in str(replace(check, changes=(), changed=0.0))


# Use of the results in trainers


def train(family, rows, output_dir, trainer_class=MultimodalGRPOTrainer, **options):
    trainer = make_trainer(trainer_class, family, rows, output_dir, **{"max_steps": 1, "self_check": True, **options})
    trainer.train()
    return trainer


def test_trainer_prints_it_and_the_model_card_has_it(tmp_path, capsys):
    trainer = train("qwen2_audio", audio_rows(), tmp_path)
    block = re.compile(
        r"self-check: largest differences of log-probs \(tolerance 7e-04\)\n"
        r"  features vs. processor +0e\+00\n.*  sampled vs. full distribution +\S+  intended: no media tokens\n"
        r"  training vs. evaluation mode +0e\+00\n  effect of another audio +\S+\n",
        re.DOTALL,
    )
    (printed,) = block.findall(capsys.readouterr().out)
    trainer.create_model_card()
    assert f"\n```\n{printed}```\n" in (tmp_path / "README.md").read_text()


def test_trainer_compares_with_the_processor_as_it_is_loaded(tmp_path):
    objects = {"model": str(saved("qwen2_audio"))}
    options = {"objects": objects, "max_steps": 1, "self_check": True}
    run = make_trainer(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(), tmp_path, **options)
    # As if loading had passed the tokenizer's side on to the extractor
    run.processing_class.feature_extractor.padding_side = "left"
    with pytest.raises(RuntimeError, match="its media tensors differ by .* `AutoProcessor.from_pretrained` loads it"):
        run.train()


def test_trainer_applies_fallbacks(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(forward, "linear_masks", causal)  # Gemma 3 needs other masks
    history = train("gemma3", image_rows(), tmp_path).state.log_history
    assert "falls back to padded rows" in capsys.readouterr().out
    assert history[0]["packing/shared_frac"] == 0


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward"])
def test_rows_with_answers_are_checked_on_their_media(kind, tmp_path, capsys):
    """Also by a model's name, whose processor is loaded again, and when media come after text."""
    rows = concatenate_datasets(
        [text_pairs(2).add_column("image", [None] * 2).cast(image_pairs(4).features), image_pairs(4)]
    )
    rows = rows.rename_column("chosen", "completion") if kind == "sft" else rows
    options = {"reward": None, "per_device_train_batch_size": 2, "train_sampling_strategy": "sequential"}

    def trainer():
        objects = {"model": str(saved("qwen2_5_vl"))}
        return make_trainer(TRAINERS[kind], "", rows, tmp_path, objects=objects, **options)

    trainer().train()
    printed = capsys.readouterr().out
    assert len(re.findall("features vs. processor +0e|effect of another image +0.[0-9]", printed)) == 2
    blind = trainer()
    other = trainer()
    for parameter in blind.model.get_encoder(modality="image").merger.parameters():
        torch.nn.init.zeros_(parameter)
    other.processing_class.image_processor.image_mean = [0.1] * 3
    for each, message in ((blind, "the same with another image"), (other, "its media tensors differ by .* as `Auto")):
        with pytest.raises(RuntimeError, match=message):
            each.train()


def test_media_of_a_new_kind_are_checked_when_they_come(tmp_path, capsys):
    rows = concatenate_datasets([text_rows(2), image_rows(2)])
    train("qwen2_5_vl", rows, tmp_path, max_steps=2, shuffle_dataset=False)
    effects = re.findall(r"  effect of (.*?)  ", capsys.readouterr().out)
    assert effects == ["media", "another image"]


def test_a_policy_in_float64_trains(tmp_path, capsys):
    model, processor = load("qwen2_audio")
    objects = {"model": model.double(), "processing_class": processor}
    run = train("qwen2_audio", audio_rows(), tmp_path, objects=objects)
    assert run.model.dtype == torch.float64
    assert "(tolerance 7e-04)" in capsys.readouterr().out


# Training mode


@pytest.mark.parametrize("option", [None, False])
def test_encoders_are_the_same_in_training_mode(option, tmp_path, capsys):
    """Granite Speech has dropout and batch norms in its encoder. Its scores are those of its evaluation mode."""
    steps = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.0, "disable_dropout": option}
    model, processor = ALL_FAMILIES["granite_speech"].build()
    encoder = model.model.encoder
    before = {name: value.clone() for name, value in encoder.named_buffers() if "running" in name}
    assert before and any(type(part).__name__ == "Dropout" for part in encoder.modules())
    objects = {"model": model, "processing_class": processor}
    run = train("granite_speech", audio_rows(), tmp_path, objects=objects, **steps)
    batch = run._buffered_inputs[0]
    scores = {}
    for training in (False, True):
        run.model.train(training)
        for packed in (False, True):
            torch.manual_seed(int(packed))
            with torch.no_grad():
                scores[training, packed] = run._policy.score(
                    run.model, ScoreRequest(batch.prompts, batch.completion_ids, batch.completion_mask, packed=packed)
                ).logps
    worst = max((each - scores[False, False]).abs().max() for each in scores.values())
    logged = [entry for entry in run.state.log_history if "clip_ratio/region_mean" in entry]
    moved = any(not torch.equal(value, before[name]) for name, value in encoder.named_buffers() if name in before)
    ((measured, note),) = re.findall(r"training vs. evaluation mode +(\S+) *(.*)", capsys.readouterr().out)
    if option is False:
        assert worst > 0.1 and moved and float(measured) >= 0.1 and note == "dropout or batch norm"
    else:
        assert worst < 1e-5 and not moved and float(measured) < 1e-5 and not note
        assert logged and all(entry["clip_ratio/region_mean"] == 0 for entry in logged)


def test_the_language_model_keeps_its_dropout(tmp_path, capsys):
    """As in TRL, unless `disable_dropout` is set."""
    model, processor = load("llava")
    layers = model.model.language_model.layers
    for layer in layers:
        layer.self_attn.attention_dropout = 0.5
    train("llava", image_rows(), tmp_path, objects={"model": model, "processing_class": processor})
    (measured,) = re.findall(r"training vs. evaluation mode +(\S+)", capsys.readouterr().out)
    assert float(measured) > 1e-2
    assert all(layer.self_attn.attention_dropout == 0.5 for layer in layers)
