# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Each rule of the self-check is broken once, and seen; what it finds is mended and measured, or training stops."""

import functools
import logging
import math
import re
from dataclasses import replace

import pytest
import torch
import transformers as hf
from datasets import Dataset, concatenate_datasets
from helpers.chats import write_film
from helpers.families import ALL_FAMILIES
from helpers.trainer_utils import (
    audio_rows,
    forget_apart,
    image_rows,
    length_and_sum,
    load,
    saved,
    sound,
    text_rows,
    with_media,
)

from trl_multimodal_rft import (
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalRLOOConfig,
    MultimodalRLOOTrainer,
    policy,
)
from trl_multimodal_rft.encoding import media as encoding
from trl_multimodal_rft.forward import scoring as forward
from trl_multimodal_rft.forward.masks import linear_masks
from trl_multimodal_rft.generation import transformers as generation
from trl_multimodal_rft.policy import Fallbacks
from trl_multimodal_rft.trainers import rows as trainer_rows


def trainer(family, rows, output_dir, break_model=None, objects=None, **options):
    if objects is None:
        model, processor = load(family)
        objects = {"model": model, "processing_class": processor}
        if break_model is not None:
            break_model(model)
    args = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        **options,
    }
    return MultimodalGRPOTrainer(
        reward_funcs=length_and_sum, args=MultimodalGRPOConfig(**args), train_dataset=rows, **objects
    )


@pytest.mark.parametrize(("family", "rows"), [("qwen2_audio", audio_rows), ("qwen2_5_vl", image_rows)])
def test_a_sound_model_passes(family, rows, tmp_path, capsys):
    run = trainer(family, rows(), tmp_path)
    run.train()
    check = run._self_check
    assert check.features == 0
    assert max(check.padded, check.packed, check.rows, check.sampled) < 1e-5 < check.tolerance < 1e-2
    assert min(check.media.values()) > 1e-2
    assert run._policy.fallbacks == Fallbacks(packing=True, isolate=None)
    line = (
        r"self-check: features = processor's 0e\+00, log-probs = model's own \S+, packed = model's own \S+, "
        r"(audio|image) moves log-probs by \S+, rows independent \S+, sampled = model's own \S+, "
        r"sampling applies suppressed placeholders .moves log-probs by \S+., training mode = evaluation mode 0e\+00"
    )
    assert re.search(line, capsys.readouterr().out)
    run.create_model_card()
    assert re.search(line, (tmp_path / "README.md").read_text())


def test_the_check_draws_no_random_numbers(tmp_path):
    runs = []
    for on in (True, False):
        runs.append(trainer("qwen2_audio", audio_rows(), tmp_path, self_check=on))
        runs[-1].train()
    assert runs[0]._self_check is not None and runs[1]._self_check is None
    pairs = zip(runs[0].model.parameters(), runs[1].model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# Log-probabilities against the model's own logits


def test_own_logits_where_the_fused_head_is_wrong(tmp_path, caplog):
    run = trainer("llava", image_rows(), tmp_path, temperature=0.7)
    assert not run._policy.fallbacks.logits_from_model
    # Nothing that could be measured before
    run.model.lm_head.register_forward_hook(lambda module, args, logits: logits * 2)
    run.train()
    check = run._self_check
    assert "TRL's fused head gives log-probabilities that are" in caplog.text
    assert check.fallbacks.logits_from_model and run._policy.fallbacks == check.fallbacks
    assert max(check.padded, check.packed, check.sampled) < 1e-4 and "(its own logits)" in str(check)


def test_positions_that_are_wrong_stop_training(tmp_path, monkeypatch):
    def shifted(*args):
        batch = left_pad(*args)
        return {**batch, "position_ids": batch["position_ids"] * 3}

    left_pad = forward.left_pad
    monkeypatch.setattr(forward, "left_pad", shifted)  # of the scores; sampling has its own
    run = trainer("qwen2_5_vl", image_rows(), tmp_path)
    with pytest.raises(
        RuntimeError, match="qwen2_5_vl can't be trained exactly: its log-probabilities in a batch differ"
    ):
        run.train()


# Features


@pytest.mark.parametrize("by_name", [True, False])
def test_features_that_are_not_the_processors_stop_training(by_name, tmp_path, monkeypatch):
    objects = {"model": str(saved("qwen2_audio"))} if by_name else None
    run = trainer("qwen2_audio", audio_rows(), tmp_path, objects=objects)
    if by_name:
        # As if loading had passed the side of the tokenizer on to the extractor
        run.processing_class.feature_extractor.padding_side = "left"
    else:

        def quieter(*args, **kwargs):
            prompt = encode_prompt(*args, **kwargs)
            return replace(prompt, media={name: value * 0.9 for name, value in prompt.media.items()})

        encode_prompt = trainer_rows.encode_prompt
        monkeypatch.setattr(trainer_rows, "encode_prompt", quieter)
    with pytest.raises(RuntimeError, match="its media tensors differ by .* `AutoProcessor.from_pretrained` loads it"):
        run.train()


def test_video_files_are_compared_with_what_the_processor_reads(tmp_path, monkeypatch):
    path = write_film(tmp_path / "film.mp4")
    rows = [{"prompt": [{"role": "user", "content": f"Is there a dog? {i}"}], "video": path} for i in range(4)]
    run = trainer("qwen3_vl", Dataset.from_list(rows), tmp_path)
    run.train()
    assert run._self_check.features == 0

    def larger(processor, size, frames, count):
        return frames.repeat(2, 1).repeat(2, 2)

    monkeypatch.setattr(encoding, "_resized_frames", larger)
    run = trainer("qwen3_vl", Dataset.from_list(rows), tmp_path)
    with pytest.raises(RuntimeError, match="its media tensors differ by inf from those of its processor"):
        run.train()


# Media


def test_media_that_do_nothing_raise(tmp_path):
    def deafen(model):
        torch.nn.init.zeros_(model.model.multi_modal_projector.linear.weight)

    run = trainer("qwen2_audio", audio_rows(), tmp_path, deafen)
    with pytest.raises(RuntimeError, match="qwen2_audio answers the same with another audio .log-probs move by 0"):
        run.train()


def test_an_ignored_audio_cannot_hide_behind_an_image(tmp_path):
    rows = with_media(image_rows(), "audio", [sound(0.3 + 0.1 * (i % 3), seed=i) for i in range(8)])

    def deafen(model):
        encoder = model.get_encoder(modality="audio")
        torch.nn.init.zeros_(encoder.proj.weight)
        torch.nn.init.zeros_(encoder.proj.bias)

    whole = trainer("qwen2_5_omni", rows, tmp_path)
    whole.train()
    assert whole._self_check.media.keys() == {"image", "audio"} and min(whole._self_check.media.values()) > 1e-2
    run = trainer("qwen2_5_omni", rows, tmp_path, deafen)
    with pytest.raises(RuntimeError, match="answers the same with another audio"):
        run.train()


def test_a_model_that_hears_only_that_there_is_a_sound_raises(tmp_path):
    """Without the features it answers differently, but every sound is the same to it."""

    def same_for_all(model):
        torch.nn.init.zeros_(model.model.multi_modal_projector.linear.weight)
        torch.nn.init.constant_(model.model.multi_modal_projector.linear.bias, 0.5)

    run = trainer("qwen2_audio", audio_rows(), tmp_path, same_for_all)
    with pytest.raises(RuntimeError, match="answers the same with another audio"):
        run.train()


@pytest.mark.parametrize("rows", [1, 2])
def test_one_sound_in_all_rows_is_no_reason_to_stop(rows, tmp_path):
    prompts = [{"prompt": [{"role": "user", "content": f"What do you hear? {i}"}]} for i in range(rows)]
    dataset = with_media(Dataset.from_list(prompts), "audio", [sound(0.4, seed=1)] * rows)
    run = trainer("qwen2_audio", dataset, tmp_path, per_device_train_batch_size=4 * rows)
    run.train()
    assert run._self_check.media["audio"] > 1e-2


def test_media_of_a_new_kind_are_checked_when_they_come(tmp_path):
    rows = concatenate_datasets([text_rows(2), image_rows(2)])
    run = trainer("qwen2_5_vl", rows, tmp_path, max_steps=2, shuffle_dataset=False)
    checks = []
    check = run._run_self_check
    run._run_self_check = lambda *given: checks.append(check(*given)) or checks[-1]
    run.train()
    assert len(checks) == 2 and run._self_check.media.keys() == {"image"}


# Prompts beside each other


def test_rows_that_disturb_each_other_go_apart(tmp_path, monkeypatch):
    forget_apart(monkeypatch)
    run = trainer("gemma3n", audio_rows(), tmp_path)
    assert run._policy.fallbacks.isolate is None
    run.train()
    assert run._policy.fallbacks.isolate == "media"
    assert "(one forward per media)" in str(run._self_check)
    assert run._self_check.rows < 1e-5


def test_a_text_prompt_does_not_hide_what_clips_do_to_each_other(tmp_path, monkeypatch):
    """Text beside a clip changes nothing in an encoder without a mask for padding; a clip of another length does."""
    forget_apart(monkeypatch)
    prompts = ["What do you hear in the audio? Is there a cat?", "Is there a bird?", "What do you hear?"]
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts])
    rows = with_media(rows, "audio", [sound(0.9, seed=1), None, sound(0.7, seed=2)])
    run = trainer("gemma3n", rows, tmp_path, per_device_train_batch_size=12, shuffle_dataset=False)
    run.train()
    assert run._policy.fallbacks.isolate == "media"
    assert run._self_check.rows < 1e-5


def test_rows_of_equal_shape_that_disturb_each_other_go_apart(tmp_path, monkeypatch):
    def leak(prompts, *args, **kwargs):
        row = pack(prompts, *args, **kwargs)
        row.position_ids = row.position_ids + torch.arange(row.position_ids.size(-1)) // (len(prompts[0]) + 12)
        return row

    pack = forward.pack
    monkeypatch.setattr(forward, "pack", leak)  # positions of later prompts depend on the earlier ones
    run = trainer("llava", image_rows(), tmp_path)
    run.train()
    assert run._policy.fallbacks.isolate == "prompt" or not run._policy.fallbacks.packing
    assert run._self_check.rows < 1e-5


def test_rows_that_padding_changes_go_apart(tmp_path, monkeypatch):
    """Seen beside the shortest prompt, where others are as long as the longest."""

    def from_the_edge(prompts, pad_token_id):
        batch = left_pad(prompts, pad_token_id)
        gaps = (batch["attention_mask"] == 0).sum(1, keepdim=True)
        return {**batch, "position_ids": batch["position_ids"] + gaps * batch["position_ids"]}

    left_pad = forward.left_pad
    monkeypatch.setattr(forward, "left_pad", from_the_edge)
    prompts = ["What is in the image? Describe it.", "What is in the image?", "What is in the image? Describe it."]
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "image": image_rows(1)[0]["image"]} for prompt in prompts
    ]
    run = trainer("llava", Dataset.from_list(rows), tmp_path, per_device_train_batch_size=12)
    run.train()
    assert run._policy.fallbacks == Fallbacks(isolate="prompt") and run._self_check.rows < 1e-5


def test_rows_that_no_remedy_separates_stop_training(tmp_path, monkeypatch):
    def one_after_the_other(model, prompts, *args, **kwargs):
        scores = completion_scores(model, prompts, *args, **kwargs)
        n_prompts = len({id(prompt) for prompt in args[0]})
        return replace(scores, logps=scores.logps + 0.01 * (n_prompts - 1))

    completion_scores = policy.completion_scores
    monkeypatch.setattr(policy, "completion_scores", one_after_the_other)
    run = trainer("llava", image_rows(), tmp_path)
    with pytest.raises(RuntimeError, match="llava can't be trained exactly: prompts disturb each other"):
        run.train()


# Packing


def test_packing_that_is_wrong_falls_back_to_padded(tmp_path, monkeypatch):
    causal = lambda model, prompt, n_new: {"full_attention": None, "sliding_attention": None}  # noqa: E731
    monkeypatch.setattr(forward, "linear_masks", causal)  # Gemma 3 needs its own masks
    run = trainer("gemma3", image_rows(), tmp_path)
    assert run._policy.fallbacks.packing
    packed, score = [], run._policy.score
    run._policy.score = lambda *args, **options: packed.append(options["packed"]) or score(*args, **options)
    run.train()
    assert run._self_check.packed > run._self_check.tolerance
    assert "packed differs from model's own" in str(run._self_check)
    assert not run._policy.fallbacks.packing and packed[-1] is False


def test_packing_is_measured_on_the_longest_prompt(tmp_path, monkeypatch):
    """A window that only the longest prompt exceeds."""
    prompts = ["Is there a bird?", "Is there a cat? " * 12]
    rows = [
        {"prompt": [{"role": "user", "content": prompt}], "image": image_rows(1)[0]["image"]} for prompt in prompts
    ]
    run = trainer("llava", Dataset.from_list(rows), tmp_path, shuffle_dataset=False)
    window = 48

    def sliding(model, prompt, n_new):
        assert linear_masks(model, prompt, n_new) == {None: None}
        steps = torch.arange(len(prompt) + n_new)
        return {None: (steps[:, None] >= steps) & (steps[:, None] - steps < window)}

    monkeypatch.setattr(forward, "linear_masks", sliding)
    run.train()
    lengths = sorted({len(prompt) for batch in run._buffered_inputs for prompt in batch["encoded_prompts"]})
    assert lengths[0] + 8 < window < lengths[1]
    assert run._self_check.packed > 1e-2 and not run._policy.fallbacks.packing


@pytest.mark.parametrize("error", [NotImplementedError, TypeError, KeyError])
def test_packing_that_fails_falls_back_to_padded(error, tmp_path, monkeypatch, caplog):
    def no_masks(model, prompt, n_new):
        raise error("masks of an unknown kind")

    monkeypatch.setattr(forward, "linear_masks", no_masks)
    run = trainer("llava", image_rows(), tmp_path)
    with caplog.at_level(logging.WARNING):
        run.train()
    assert run._self_check.packed == math.inf and not run._policy.fallbacks.packing
    assert re.search(rf"self-check: llava fails at scoring packed rows \({error.__name__}: .*masks", caplog.text)


# Sampling


def test_sampling_from_a_wrong_cache_is_given_up_and_measured_again(tmp_path, monkeypatch):
    # The last token of a bidirectional prefix is seen by all others, so it can't be left out of the prefill
    monkeypatch.setattr(generation, "_cacheable_tokens", lambda model, prompts: -1)
    run = trainer("paligemma", image_rows(), tmp_path)
    assert run._policy.fallbacks.shared_prefill
    run.train()
    assert not run._policy.fallbacks.shared_prefill and "(separate prefills)" in str(run._self_check)
    assert run._self_check.sampled <= run._self_check.tolerance


def test_sampling_from_another_distribution_stops_training(tmp_path):
    run = trainer("llava", image_rows(), tmp_path)
    forward_once, calls = run.model.forward, []

    @functools.wraps(forward_once)
    def drifting(*args, **kwargs):
        output = forward_once(*args, **kwargs)
        if kwargs.get("past_key_values") is not None and kwargs["past_key_values"].get_seq_length() > 5:
            calls.append(1)
            output.logits = output.logits + 0.05 * len(calls) * torch.arange(output.logits.size(-1)) / 100
        return output

    run.model.forward = drifting
    with pytest.raises(RuntimeError, match="llava can't be trained exactly: it samples with log-probabilities"):
        run.train()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_generate_that_filters_stops_training(top_p, tmp_path):
    """Unless the user changes the distribution anyway, which is named."""
    run = trainer("llava", image_rows(), tmp_path, top_p=top_p)
    run.model.generate = functools.partial(
        run.model.generate, logits_processor=hf.LogitsProcessorList([hf.MinPLogitsWarper(0.5)])
    )
    if top_p == 1.0:
        with pytest.raises(RuntimeError, match="draws from a distribution other than the one that is scored"):
            run.train()
        return
    run.train()
    assert run._self_check.changes == ("suppressed placeholders", "top_p") and run._self_check.changed > 0.1


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), MemoryError()]
)
def test_running_out_of_memory_is_no_inexactness(error, tmp_path, monkeypatch):
    def too_large(*args, **kwargs):
        raise error

    monkeypatch.setattr(forward, "pack", too_large)
    run = trainer("llava", image_rows(), tmp_path)
    with pytest.raises(type(error)):
        run.train()


def test_a_policy_in_float64_trains(tmp_path):
    run = trainer("qwen2_audio", audio_rows(), tmp_path, break_model=lambda model: model.double())
    run.train()
    assert run.model.dtype == torch.float64 and run._self_check.padded <= run._self_check.tolerance


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_a_generate_that_returns_ids_alone_is_not_measured(algorithm, tmp_path):
    model, processor = load("qwen2_audio")
    generate = model.generate

    def ids_alone(**kwargs):
        output = generate(**kwargs)
        return output if isinstance(output, torch.Tensor) else output.sequences

    model.generate = ids_alone
    config, trainer_class = {
        "grpo": (MultimodalGRPOConfig, MultimodalGRPOTrainer),
        "rloo": (MultimodalRLOOConfig, MultimodalRLOOTrainer),
    }[algorithm]
    args = config(
        str(tmp_path),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        bf16=False,
    )
    run = trainer_class(model, length_and_sum, args, audio_rows(), processing_class=processor)
    run.train()
    check = run._self_check
    assert check.sampled is None and check.padded < 1e-5 and check.media["audio"] > 1e-2
    assert "sampled" not in str(check)


@pytest.mark.parametrize("rows", [text_rows, audio_rows])
def test_a_generate_that_fails_on_the_check_is_not_measured_on_text(rows, tmp_path):
    run = trainer("qwen2_audio", rows(), tmp_path, max_steps=1)
    generate = run.model.generate

    def of_a_batch(**kwargs):
        assert len(kwargs["input_ids"]) == 8 and not kwargs["generation_config"].return_dict_in_generate
        return generate(**kwargs)

    run.model.generate = of_a_batch
    if rows is audio_rows:
        with pytest.raises(RuntimeError, match="qwen2_audio can't be trained exactly: it can't sample completions"):
            run.train()
        return
    run.train()
    check = run._self_check
    assert math.isnan(check.sampled) and "sampling not measured" in str(check) and check.padded < 1e-5


def test_a_checkpoint_without_a_cache_shares_its_prefill(tmp_path):
    """Checkpoints of Idefics and SmolVLM may say `use_cache: false`, which isn't used."""

    def without_cache(model):
        model.generation_config.use_cache = False

    run = trainer("idefics3", image_rows(), tmp_path, without_cache)
    run.train()
    assert run._self_check.sampled <= run._self_check.tolerance
    assert run._policy.fallbacks.shared_prefill


# Training mode


@pytest.mark.parametrize("option", [None, False])
def test_encoders_are_the_same_in_training_mode(option, tmp_path):
    """Granite Speech has dropout and batch norms in its encoder; its scores are those of its evaluation mode."""
    steps = {"num_iterations": 2, "max_steps": 2, "learning_rate": 0.0, "disable_dropout": option}
    model, processor = ALL_FAMILIES["granite_speech"].build()
    objects = {"model": model, "processing_class": processor}
    run = trainer("granite_speech", audio_rows(), tmp_path, objects=objects, **steps)
    encoder = run.model.model.encoder
    before = {name: value.clone() for name, value in encoder.named_buffers() if "running" in name}
    assert before and any(type(part).__name__ == "Dropout" for part in encoder.modules())
    run.train()
    batch = run._buffered_inputs[0]
    scores = {}
    for training in (False, True):
        run.model.train(training)
        for packed in (False, True):
            torch.manual_seed(int(packed))
            with torch.no_grad():
                scores[training, packed] = run._policy.score(
                    run.model,
                    batch["encoded_prompts"],
                    batch["completion_ids"],
                    batch["completion_mask"],
                    packed=packed,
                ).logps
    worst = max((each - scores[False, False]).abs().max() for each in scores.values())
    logged = [entry for entry in run.state.log_history if "clip_ratio/region_mean" in entry]
    moved = any(not torch.equal(value, before[name]) for name, value in encoder.named_buffers() if name in before)
    check = run._self_check
    if option is False:
        assert worst > 0.1 and moved and check.training > 0.1
        assert "training mode differs from evaluation mode" in str(check)
    else:
        assert worst < 1e-5 and not moved and check.training < 1e-5
        assert logged and all(entry["clip_ratio/region_mean"] == 0 for entry in logged)


def test_the_language_model_keeps_its_dropout(tmp_path):
    """As in TRL, where `disable_dropout` isn't set."""

    def with_dropout(model):
        for layer in model.model.language_model.layers:
            layer.self_attn.attention_dropout = 0.5

    run = trainer("llava", image_rows(), tmp_path, with_dropout)
    run.train()
    assert run._self_check.training > 1e-2
    assert all(layer.self_attn.attention_dropout == 0.5 for layer in run.model.model.language_model.layers)


# What is chosen, and what a failure says


def test_partners_are_prompts_with_other_grids_and_of_every_kind(tmp_path):
    """Patches of all images have one shape; their grids tell them apart."""
    rows = image_rows(4)  # of 84 x 56, 56 x 56, 112 x 84 and 56 x 112 pixels
    run = trainer("qwen2_5_vl", rows, tmp_path, per_device_train_batch_size=16)
    grids = []
    score = run._policy.score

    def remember(model, samples, *args, **options):
        grids.append({tuple(p.media["image_grid_thw"].flatten().tolist()) for p in samples if p.media})
        return score(model, samples, *args, **options)

    run._policy.score = remember
    run.train()
    assert max(len(each) for each in grids) == 4


def test_a_failure_names_the_model_and_the_reason(tmp_path):
    rows = with_media(concatenate_datasets([text_rows(1), text_rows(1)]), "image", [image_rows(1)[0]["image"], None])
    run = trainer("llava", rows, tmp_path, shuffle_dataset=False)
    forward_once = run.model.model.forward

    @functools.wraps(forward_once)
    def no_text_alone(*args, pixel_values=None, **kwargs):
        if pixel_values is None and kwargs.get("past_key_values") is None:
            raise IndexError("tuple index out of range")
        return forward_once(*args, pixel_values=pixel_values, **kwargs)

    run.model.model.forward = no_text_alone
    with pytest.raises(RuntimeError, match="llava can't be trained exactly: it fails at .* .IndexError: tuple index"):
        run.train()
