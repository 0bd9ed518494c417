# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Each rule of the self-check is broken once, and seen."""

import re

import pytest
import torch
from trainer_utils import audio_rows, image_rows, length_and_sum, load

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.packing import forward
from trl_multimodal_rft.rollout import generation
from trl_multimodal_rft.trainers import multimodal


def trainer(family, rows, output_dir, break_model=None, **options):
    model, processor = load(family)
    if break_model is not None:
        break_model(model)
    args = MultimodalGRPOConfig(
        output_dir=str(output_dir),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=8,
        max_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        **options,
    )
    return MultimodalGRPOTrainer(model, length_and_sum, args, rows, processing_class=processor)


@pytest.mark.parametrize(("family", "rows"), [("qwen2_audio", audio_rows), ("qwen2_5_vl", image_rows)])
def test_a_sound_model_passes(family, rows, tmp_path, capsys):
    run = trainer(family, rows(), tmp_path)
    run.train()
    check = run._self_check
    assert max(check.packed, check.rows, check.sampled) < 1e-5 < check.tolerance < 1e-2
    assert check.media > 1e-2
    assert run._remedies.can_pack and run._remedies.share_prefill and not run._remedies.apart
    line = r"self-check: packed = padded \S+, media moves log-probs by \S+, rows independent \S+, recomputed = sampled"
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


def test_packing_that_is_wrong_falls_back_to_padded(tmp_path, monkeypatch):
    causal = lambda model, prompt, n_new: {"full_attention": None, "sliding_attention": None}  # noqa: E731
    monkeypatch.setattr(forward, "linear_masks", causal)  # Gemma 3 needs its own masks
    run = trainer("gemma3", image_rows(), tmp_path)
    assert run._remedies.can_pack
    run.train()
    assert run._self_check.packed > run._self_check.tolerance
    assert "packed differs from padded" in str(run._self_check)
    assert not run._remedies.can_pack and not run._packed


def test_packing_that_fails_falls_back_to_padded(tmp_path, monkeypatch):
    def no_masks(model, prompt, n_new):
        raise NotImplementedError("masks of an unknown kind")

    monkeypatch.setattr(forward, "linear_masks", no_masks)
    run = trainer("llava", image_rows(), tmp_path)
    run.train()
    assert run._self_check.packed == float("inf") and not run._remedies.can_pack


def test_media_that_do_nothing_raise(tmp_path):
    def deafen(model):
        torch.nn.init.zeros_(model.model.multi_modal_projector.linear.weight)

    run = trainer("qwen2_audio", audio_rows(), tmp_path, deafen)
    with pytest.raises(RuntimeError, match="media moves log-probs by 0.*answers the same without its media"):
        run.train()


def test_rows_that_disturb_each_other_go_apart(tmp_path, monkeypatch):
    monkeypatch.setattr(multimodal, "JOIN_ONLY_EQUAL_MEDIA", set())
    run = trainer("gemma3n", audio_rows(), tmp_path)
    assert run._remedies.apart is None
    run.train()
    assert run._remedies.apart == "media"
    assert "(each media apart)" in str(run._self_check)
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
    assert run._remedies.apart == "prompt" or not run._remedies.can_pack


def test_sampling_from_a_wrong_cache_is_given_up(tmp_path, monkeypatch):
    # The last token of a bidirectional prefix is seen by all others, so it can't be left out of the prefill
    monkeypatch.setattr(generation, "_cacheable_tokens", lambda model, prompts: -1)
    run = trainer("paligemma", image_rows(), tmp_path)
    assert run._remedies.share_prefill
    run.train()
    assert run._self_check.sampled > run._self_check.tolerance
    assert "recomputed differs from sampled" in str(run._self_check)
    assert not run._remedies.share_prefill
