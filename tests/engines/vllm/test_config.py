# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Engine inputs and settings: numbers of media, lengths, mixed and missing media, user options."""

import logging

import pytest
import torch
import vllm_cpu
from datasets import Dataset
from helpers.chats import image, video
from helpers.engine_runs import Recorded, RecordedOmni, make
from helpers.omni import OMNI
from helpers.trainer_utils import (
    audio_rows,
    image_rows,
    images_rows,
    length_and_sum,
    load,
    make_trainer,
    sound,
    text_rows,
    with_media,
)

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate_trainer


pytestmark = pytest.mark.slow


def answers(trainer, rows, **options) -> list[list[str]]:
    result = evaluate_trainer(trainer, rows, length_and_sum, EvaluationConfig(max_completion_length=4, **options))
    return [row["completions"] for row in result.rows]


def test_several_images_and_none_and_what_goes_wrong(tmp_path, caplog):
    rows = images_rows(6).to_list() + text_rows(2).map(lambda row: {"images": None}).to_list()
    mixed = Dataset.from_list(rows, features=images_rows(6).features).shuffle(seed=0)
    engine = {**vllm_cpu.ENGINE, "max_model_len": 96}
    del engine["dtype"]  # the trainer's
    options = {"vllm_engine_kwargs": engine, "max_steps": 4, "max_completion_length": 4}
    trainer = make(Recorded, "qwen2_5_vl", mixed, tmp_path, **options)
    config = trainer.vllm_generation.llm.model_config
    assert config.dtype == torch.float32
    limits = config.multimodal_config
    assert [limits.get_limit_per_prompt(kind) for kind in ("image", "video")] == [3, 0]
    trainer.train()  # one epoch
    assert max(trainer.differences) < 1e-4 and len(trainer.differences) == 4

    four = [{"prompt": "a"}, {"prompt": "b", "images": [image(56, 56, seed=i)["image"] for i in range(4)]}]
    with pytest.raises(MediaError, match=r"row 1: .* 4 media .*'image'.*started for 3.*limit_mm_per_prompt.*: 4"):
        answers(trainer, four)
    shown = with_media(text_rows(1), "video", [video(4, 56, 56)["video"]])
    with pytest.raises(MediaError, match=r"row 0: .* 1 media .*'video'.*started for 0"):
        answers(trainer, shown)
    long = [{"prompt": " ".join(["bird"] * 90), **image_rows(1).select_columns("image")[0]}]
    with pytest.raises(ValueError, match=r"row 0: the prompt has \d+ tokens.* for 96 tokens.*vllm_max_model_length"):
        answers(trainer, long)
    near = [{"prompt": " ".join(["bird"] * 40)}]
    caplog.set_level(logging.WARNING)
    evaluate_trainer(trainer, near, length_and_sum, EvaluationConfig(max_completion_length=90, batch_size=1))
    assert "leaves less than 90" in caplog.text
    trainer.train_dataset = Dataset.from_list(2 * long)
    with pytest.raises(ValueError, match="the prompt has") as caught:
        trainer.train()
    assert "Sampling with vLLM failed after step 0 of training. No checkpoint was saved" in caught.value.__notes__[0]

    processor = trainer.processing_class.image_processor
    processor.size = {"shortest_edge": 84 * 84, "longest_edge": 112 * 112}
    with pytest.raises(MediaError, match=r"row 1: vLLM's \d+ tokens .*load both from the folder"):
        answers(trainer, [{"prompt": "a"}, image_rows(1)[0]])


def test_options_of_users(tmp_path):
    two = load("qwen2_audio")[1].tokenizer.decode([300, 300])
    # Each has the bias against placeholders
    for options, drawn in (({}, [300] * 6), ({"stop": [two]}, [300] * 2)):
        options = {"generation_kwargs": {"logit_bias": {300: 100.0}, **options}, "max_steps": 1}
        trainer = make(Recorded, "qwen2_audio", audio_rows(), tmp_path, **options)
        trainer.train()
        assert [[ids for _, ids, _ in draw] for draw in trainer.draws] == [[drawn] * 8]


@pytest.mark.filterwarnings("ignore:max_rollback_tokens is deprecated:DeprecationWarning")  # vLLM's use of xgrammar
def test_structured_outputs(tmp_path):
    options = {"vllm_structured_outputs_regex": "[ab]{2,5}", "vllm_importance_sampling_correction": False}
    trainer = make(Recorded, "qwen2_5_vl", image_rows(), tmp_path, max_steps=1, **options)
    trainer.train()
    texts = trainer.processing_class.batch_decode([ids for _, ids, _ in trainer.draws[0]], skip_special_tokens=True)
    assert len(set(texts)) > 1 and all(2 <= len(text) <= 5 and set(text) <= {"a", "b"} for text in texts)


def test_an_encoder_that_the_data_do_not_need_is_left_out(omni, tmp_path):
    rows = Dataset.from_list([{"prompt": f"What do you hear? {i}", "audio": sound(0.4, seed=i)} for i in range(4)])
    trainer = make(RecordedOmni, OMNI, rows, tmp_path, {"model": str(omni)}, max_steps=2)
    model = trainer.vllm_generation.llm.llm_engine.model_executor.driver_worker.model_runner.model
    assert not list(model.visual.parameters()) and list(model.audio_tower.parameters())
    trainer.train()
    assert max(trainer.differences) < 1e-4 and len(trainer.differences) == 2


def test_all_kinds_in_one_prompt(omni, tmp_path):
    def blocks(i):
        return [
            image(84, 56, seed=i),
            {"type": "audio", "audio": sound(0.9, seed=i + 1)},
            {"type": "text", "text": "Compare them to"},
            video(4, 56, 56, seed=i + 2),
            {"type": "audio", "audio": sound(0.3, seed=i + 3)},
            {"type": "text", "text": "Is there a bird?"},
        ]

    prompts = [[{"role": "user", "content": blocks(i)}] for i in range(4)]
    rows = Dataset.from_dict({"index": range(4)}).with_transform(
        lambda batch: {**batch, "prompt": [prompts[i] for i in batch["index"]]}
    )
    trainer = make(RecordedOmni, OMNI, rows, tmp_path, {"model": str(omni)}, max_steps=2)
    trainer.train()
    assert max(trainer.differences) < 1e-4 and len(trainer.differences) == 2


def rollout(prompts, trainer):
    ids = [trainer.processing_class.tokenizer(prompt[-1]["content"])["input_ids"] for prompt in prompts]
    prompt_ids, completion_ids, logps, _ = trainer.vllm_generation.generate(
        prompts=ids, images=None, num_generations=trainer.num_generations
    )
    logps = [[logp for [logp] in each] for each in logps]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logps}


def test_rollout_func_samples_with_the_engine_as_in_trl(tmp_path):
    options = {"use_vllm": True, "vllm_engine_kwargs": {**vllm_cpu.ENGINE, "max_model_len": 512}}
    objects = {"rollout_func": rollout}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", text_rows(), tmp_path, objects=objects, **options)
    trainer.train()
    differences = [e["sampling/sampling_logp_difference/mean"] for e in trainer.state.log_history if "reward" in e]
    assert len(differences) == 2 and max(differences) < 0.05  # the probability that placeholders had
