# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""vLLM samples codes of an audio codec alone, with the probabilities that the policy gives them."""

from helpers.speech import speech_model, speech_rows, speech_tokenizer
from talking import ENGINE

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer


def test_codes_alone_are_sampled(tmp_path):
    tokenizer = speech_tokenizer()
    speech_model(tokenizer, hidden_size=128).save_pretrained(tmp_path / "model")  # heads of 32, for vLLM on the CPU
    tokenizer.save_pretrained(tmp_path / "model")
    heard = []

    def length(completion_ids, completion_audio, **kwargs):
        heard.extend(zip(completion_ids, completion_audio, strict=True))
        return [float(len(ids)) for ids in completion_ids]

    args = MultimodalGRPOConfig(
        output_dir=str(tmp_path), use_vllm=True, vllm_gpu_memory_utilization=0.3,
        vllm_engine_kwargs=ENGINE, speech_decoder=lambda codes: ([0.5] * len(codes), 8000), sample_only="speech",
        max_completion_length=8, num_generations=4, per_device_train_batch_size=8, max_steps=3, learning_rate=1e-2,
        bf16=False, gradient_checkpointing=False, report_to="none", use_cpu=True, save_strategy="no",
    )  # fmt: skip
    trainer = MultimodalGRPOTrainer(str(tmp_path / "model"), length, args=args, train_dataset=speech_rows(8))
    trainer.train()
    check = trainer.checks.self_check
    assert max(check.engine) < 1e-4
    words = {*range(6)} - {tokenizer.eos_token_id}
    assert len(heard) == 24 and not any(words & {*ids} for ids, _ in heard)
    for ids, sound in heard:
        n_codes = len(ids) - 1
        has_sound = ids[-1] == tokenizer.eos_token_id and n_codes > 0
        assert (sound is not None and len(sound["array"]) == n_codes) == has_sound
