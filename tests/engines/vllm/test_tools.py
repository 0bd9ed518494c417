# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tools that see, hear and show, with vLLM: the engine samples each turn after the full conversation so far."""

import pytest
import torch
from helpers import engine_runs
from helpers.chats import image
from helpers.tools import talking
from helpers.trainer_utils import audio_rows, image_rows, sound
from talking import ENGINE, Talking, TalkingGRPO, make

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.data.reading.refs import MediaError


TEXT = {"type": "text", "text": "Is there a cat?"}


class TalkingRLOO(Talking, MultimodalRLOOTrainer):
    pass


def images(seed=0):
    return [[image(56, 84, seed), TEXT], [TEXT], [image(84, 56, seed + 1), image(56, 56, seed + 2)]]


def sounds():
    return [[{"type": "audio", "audio": sound(0.3 + 0.2 * n, n)}, TEXT] for n in range(3)]


def assert_exact(trainer):
    """Asserts that the engine, the trainer and the model score each token alike."""
    assert len(trainer.largest) == 2 and max(trainer.largest) <= 1e-4
    check = trainer.checks.self_check
    assert check.conversation <= 1e-4
    assert all(largest <= 1e-4 for _, largest in (check.engine, check.engine_updated, check.engine_conversation))
    assert "engine vs. recomputed, tool media" in str(check)


def test_images(tmp_path):
    """Covers 0 to 3 turns in one batch, before and after an update."""
    options = {"vllm_engine_kwargs": {**ENGINE, "block_size": 32}, "max_tool_media": 4}
    trainer = make(TalkingGRPO, talking("qwen2_5_vl"), image_rows(), images(), tmp_path, **options)
    engine = trainer.vllm_generation
    limits = engine.llm.model_config.multimodal_config
    assert [limits.get_limit_per_prompt(kind) for kind in ("image", "video")] == [5, 4]
    rendered = []
    render = engine.prompts.renderer.render_cmpl
    engine.prompts.renderer.render_cmpl = lambda prompts: rendered.append(1) or render(prompts)
    turns = []
    step = engine.llm.llm_engine.step

    def stepping():
        outputs = step()
        turns.extend(outputs)
        return outputs

    engine.llm.llm_engine.step = stepping
    trainer.train()
    assert_exact(trainer)
    assert [len(entry) for entry in trainer.differences] == [8, 8]
    # The trainer encodes two prompts, and seven of ten results that have media, once each, however many turns read
    # them
    assert len(rendered) == 2 * (2 + 7)
    assert any(output.num_cached_tokens > 0 for output in turns)  # vLLM continues from these

    *conversation, _ = trainer.conversations[-1]
    own, other = (trainer.difference(*conversation, 0.0, media) for media in (None, images(seed=50)))
    moved = (own - other).abs()
    called = conversation[-1].tolist().index(False)
    assert moved[:called].max() <= 1e-4 and moved[called:].max() > 1e-3


class Rewriting(TalkingGRPO):
    def difference(self, *conversation):
        return torch.zeros(1)  # there is no whole one; the self-check compares each context


@pytest.mark.slow
def test_contexts_with_the_last_image(tmp_path):
    """Results are appended until one shows images."""
    options = {"max_tool_media": 4, "max_context_media": 1}
    trainer = make(Rewriting, talking("qwen2_5_vl"), image_rows(), images()[1:], tmp_path, **options)
    trainer.train()
    assert [len(prompt.contexts) for _, prompt, *_ in trainer.conversations[-8:]] == [1, 1, 2, 2, 1, 1, 2, 1]
    check = trainer.checks.self_check
    assert all(largest <= 1e-4 for _, largest in (check.engine, check.engine_updated, check.engine_conversation))


@pytest.mark.slow
def test_sounds_up_to_the_engines_limit(tmp_path):
    engine = {**ENGINE, "max_model_len": 160}
    options = {"vllm_engine_kwargs": engine, "max_completion_length": 400, "beta": 0.0}
    trainer = make(TalkingRLOO, talking("qwen2_audio"), audio_rows(), sounds(), tmp_path, **options)
    trainer.train()
    assert_exact(trainer)
    first = trainer.state.log_history[0]
    assert 0 < first["tools/ended_by_length"] < first["tools/call_frequency"]
    assert all(len(prompt) + len(ids) <= 160 for _, prompt, ids, *_ in trainer.conversations)


@pytest.mark.slow
def test_engines_that_do_not_take_what_a_tool_shows(tmp_path):
    engine = {**ENGINE, "limit_mm_per_prompt": {"image": 1, "video": 0}}
    args = (talking("qwen2_5_vl"), image_rows(), images(), tmp_path)
    trainer = make(TalkingGRPO, *args, vllm_engine_kwargs=engine)
    with pytest.raises(MediaError, match="2 media of the modality 'image', and the engine was started for 1"):
        trainer.train()


def rollout(prompts, trainer):
    """Sends media to the engine in vLLM's format."""
    processor = trainer.processing_class
    asked = []
    for prompt in prompts:
        text = processor.apply_chat_template(prompt, add_generation_prompt=True)
        media = {"image": [prompt[0]["content"][0]["image"]]}
        asked.append({"prompt_token_ids": processor.tokenizer(text)["input_ids"], "multi_modal_data": media})
    prompt_ids, completion_ids, logps, _ = trainer.vllm_generation.generate(asked)
    logps = [[logp for [logp] in each] for each in logps]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logps}


@pytest.mark.slow
def test_rollout_func_shows_the_engine_media(tmp_path):
    objects = {"rollout_func": rollout}
    options = {"max_steps": 2, "generation_kwargs": None}
    args = (MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(), tmp_path)
    trainer = engine_runs.make(*args, objects=objects, **options)
    trainer.train()
    assert trainer.checks.self_check.engine[1] <= 1e-4
