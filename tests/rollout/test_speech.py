# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Completions of codes: their sounds against transformers' own decode, in rewards, metrics, tables and evaluations."""

import io
import json
import math

import numpy as np
import pytest
import soundfile
import torch
from datasets import Audio, Dataset
from helpers.resumed_runs import same_weights
from helpers.speech import codec_folder, speech_model, speech_rows, speech_tokenizer
from transformers import MimiModel, Xcodec2Model
from trl import DPOConfig, DPOTrainer

from trl_multimodal_rft import (
    MultimodalDPOConfig,
    MultimodalDPOTrainer,
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalPPOConfig,
    MultimodalPPOTrainer,
    MultimodalRLOOConfig,
    MultimodalRLOOTrainer,
)
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate, evaluate_trainer
from trl_multimodal_rft.rollout.completion_columns import Ends
from trl_multimodal_rft.rollout.rollout import Prompted, Source
from trl_multimodal_rft.rollout.speech import decoder_of, speech_codes, whole_frames
from trl_multimodal_rft.trainers.sampling.rollout_logs import is_lower_later


END = 2
FIRST = 6  # id of the first code


def config_of(trainer_class) -> type:
    configs = {MultimodalRLOOTrainer: MultimodalRLOOConfig, MultimodalPPOTrainer: MultimodalPPOConfig}
    return configs.get(trainer_class, MultimodalGRPOConfig)


def make(tmp_path, reward_funcs, trainer_class=MultimodalGRPOTrainer, **options):
    tokenizer = speech_tokenizer()
    defaults = {
        "num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 8, "max_steps": 2,
        "learning_rate": 1e-2, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True,
        "bf16": False, "beta": 0.0, "gradient_checkpointing": False, "self_check": False,
    }  # fmt: skip
    if trainer_class is MultimodalPPOTrainer:
        defaults["num_generations"] = 1
    return trainer_class(
        model=speech_model(tokenizer),
        reward_funcs=reward_funcs,
        processing_class=tokenizer,
        train_dataset=speech_rows(16),
        args=config_of(trainer_class)(output_dir=str(tmp_path), **{**defaults, **options}),
    )


def steps(codes: list[int]) -> tuple[np.ndarray, int]:
    """A decoder: 80 samples at 8 kHz per code."""
    return np.repeat(np.array(codes, dtype=np.float32) / 64, 80), 8000


def mean_sample(completion_audio, **kwargs):
    return [0.0 if sound is None else float(sound["array"].mean()) for sound in completion_audio]


def brief(completion_audio, **kwargs):
    return [-1.0 if sound is None else -len(sound["array"]) / 8000 for sound in completion_audio]


def quiet(completion_audio, **kwargs):
    return [-reward for reward in mean_sample(completion_audio)]


class Heard:
    """A reward function that keeps its arguments."""

    __name__ = "heard"

    def __init__(self):
        self.calls = []

    def __call__(self, completions, completion_ids, completion_audio, **columns):
        self.calls.append((completions, completion_ids, completion_audio))
        return [float(len(ids)) for ids in completion_ids]


# Codes


def test_tokens_of_codes():
    tokenizer = speech_tokenizer()
    expected = {FIRST + code: code for code in range(64)}
    assert speech_codes("<|s_{}|>", tokenizer) == speech_codes(f"{FIRST}, 64", tokenizer) == expected
    for wrong in ("<|audio_{}|>", "<|s_|>", f"{FIRST}, 65", "6", ""):
        with pytest.raises(ValueError, match="are no tokens of the tokenizer; set it to the form"):
            speech_codes(wrong, tokenizer)


@pytest.mark.parametrize(
    ("codes", "frames", "n_damaged"),
    [
        ([0, 10, 3, 13], [[0, 0], [3, 3]], 0),
        ([0, 10, 3], [[0, 0]], 1),
        ([10, 0, 11, 12], [[0, 1]], 2),
        ([0, 1, 2, 12], [[2, 2]], 2),
        ([0, 10, 10, 1, 11], [[0, 0], [1, 1]], 1),
        ([10, 11], [], 2),
        ([], [], 0),
    ],
)
def test_damaged_frames_are_dropped(codes, frames, n_damaged):
    assert whole_frames(codes, 2, 10) == (frames, n_damaged)


@pytest.mark.parametrize(
    ("name", "model_class", "n_codebooks"), [("xcodec2", Xcodec2Model, 1), ("mimi", MimiModel, 2)]
)
def test_sounds_are_those_of_the_codec(name, model_class, n_codebooks):
    """Also of completions of other lengths in the batch, which are decoded without padding."""
    tokenizer = speech_tokenizer()
    args = EvaluationConfig(speech_decoder=codec_folder(name))
    decoder = decoder_of(args, Ends([END]), tokenizer, torch.device("cpu"))
    codec = model_class.from_pretrained(codec_folder(name)).eval()
    size = 64 // n_codebooks
    generator = torch.Generator().manual_seed(0)
    frames = [torch.randint(size, (n, n_codebooks), generator=generator) for n in (5, 3, 5, 9)]
    offsets = torch.arange(n_codebooks) * size
    ids = [[*(FIRST + (part + offsets).flatten()).tolist(), END] for part in frames]
    ids += [[END], ids[0][:-1], [3, *ids[1][:-1], 4, END]]  # empty, cut off, and with words around
    source = Source(ids=ids, row_indices=[*range(len(ids))])
    heard = decoder(Prompted([None] * len(ids), torch.zeros(len(ids)), 0, source))
    sounds = heard.source.sounds
    assert sounds[4] is sounds[5] is None
    for sound, part in zip([*sounds[:4], sounds[6]], [*frames, frames[1]], strict=True):
        with torch.no_grad():
            expected = codec.decode(audio_codes=part.T[None]).audio_values.flatten()
        torch.testing.assert_close(torch.from_numpy(sound["array"]), expected, rtol=1e-5, atol=1e-5)
        rate = getattr(codec.config, "sampling_rate", 0)
        assert (sound["sampling_rate"], sound["frames"], sound["dropped_frames"]) == (rate, len(part), 0)
    assert decoder(heard) is heard  # once


# Training


@pytest.mark.parametrize("trainer_class", [MultimodalGRPOTrainer, MultimodalRLOOTrainer, MultimodalPPOTrainer])
def test_rewards_hear_completions(trainer_class, tmp_path):
    heard = Heard()
    trainer = make(tmp_path, heard, trainer_class, speech_decoder=codec_folder(), sample_only="speech")
    codec = Xcodec2Model.from_pretrained(codec_folder()).eval()
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "speech/unended" in entry]
    kinds = set()
    for (completions, completion_ids, sounds), entry in zip(heard.calls, logs, strict=True):
        assert {*completions} == {""}  # codes are special tokens
        seconds = []
        for ids, sound in zip(completion_ids, sounds, strict=True):
            kinds.add(sound is None)
            assert all(token == END or token >= FIRST for token in ids)
            if sound is None:
                assert ids[-1] != END or ids == [END]
                continue
            with torch.no_grad():
                codes = torch.tensor(ids[:-1])[None, None] - FIRST
                expected = codec.decode(audio_codes=codes).audio_values.flatten()
            torch.testing.assert_close(torch.from_numpy(sound["array"]), expected, rtol=1e-5, atol=1e-5)
            seconds.append(len(expected) / 16000)
        n_ended = sum(ids[-1] == END for ids in completion_ids)
        assert entry["speech/unended"] == pytest.approx(1 - n_ended / len(completion_ids))
        assert entry["speech/seconds"] == pytest.approx(np.mean(seconds))
        assert entry["speech/undecodable"] == pytest.approx(1 - len(seconds) / n_ended)
    assert kinds == {True, False}


def test_codes_alone_are_sampled_exactly(tmp_path, caplog):
    """The self-check compares the sampled distribution with the policy's, without the other tokens."""
    trainer = make(tmp_path, mean_sample, speech_decoder=steps, sample_only="speech", self_check=True, max_steps=1)
    trainer.train()
    words = {*range(len(trainer.processing_class))} - {END} - {*range(FIRST, FIRST + 64)}
    assert {*trainer.model.generation_config.suppress_tokens} == words
    assert trainer.checks.self_check.sampled < 1e-4


def test_held_out_rewards_change_nothing(tmp_path):
    trainers = []
    for functions, names in (([mean_sample], None), ([mean_sample, brief], ["brief"])):
        options = {"speech_decoder": steps, "sample_only": "speech", "held_out_rewards": names}
        trainer = make(tmp_path / str(len(functions)), functions, **options)
        trainer.train()
        trainers.append(trainer)
    assert same_weights(*trainers) and [trainer.reward_weights.tolist() for trainer in trainers] == [[1], [1, 0]]
    plain, held_out = ([entry for entry in trainer.state.log_history if "loss" in entry] for trainer in trainers)
    assert [entry["reward"] for entry in plain] == [entry["reward"] for entry in held_out]
    assert all("rewards/brief/mean" not in entry for entry in held_out)
    assert all(entry["held_out_rewards/brief/mean"] < 0 for entry in held_out)


@pytest.mark.parametrize("step", [1, 2])
def test_a_resumed_run_is_the_same(step, tmp_path):
    """Also within the steps of a batch of completions, whose sounds are not decoded again."""
    options = {"speech_decoder": codec_folder(), "held_out_rewards": ["quiet"], "num_iterations": 2, "max_steps": 4}
    options |= {"save_strategy": "steps", "save_steps": 1, "sample_only": "speech"}
    whole, resumed = (make(tmp_path, [mean_sample, quiet], **options) for _ in range(2))
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
    assert same_weights(whole, resumed)
    logs = [[entry for entry in trainer.state.log_history if "loss" in entry] for trainer in (whole, resumed)]
    names = {name for name in logs[0][0] if name.startswith(("speech/", "held_out", "rewards/", "loss"))}
    assert len(names) > 8
    assert [[entry.get(name) for name in names] for entry in logs[0]] == [
        [entry.get(name) for name in names] for entry in logs[1]
    ]


def test_preferences_of_sounds_are_trls(tmp_path):
    """A sound is the text of its codes; DPO and TRL's DPO make the same updates."""
    rows = [{"prompt": "say one ", "chosen": "<|s_1|><|s_2|>" * (i + 1), "rejected": "<|s_9|>" * 3} for i in range(4)]
    trained = []
    for trainer_class, config in ((DPOTrainer, DPOConfig), (MultimodalDPOTrainer, MultimodalDPOConfig)):
        tokenizer = speech_tokenizer()
        args = config(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1,
            report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
        )  # fmt: skip
        trainer = trainer_class(
            model=speech_model(tokenizer),
            ref_model=speech_model(tokenizer),
            args=args,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer,
        )
        trainer.train()
        trained.append(trainer)
    theirs, ours = ({name: weight.cpu() for name, weight in each.model.named_parameters()} for each in trained)
    assert max((ours[name] - weight).abs().max().item() for name, weight in theirs.items()) < 1e-5
    assert trained[1].state.log_history[-2]["rewards/margins"] > 0


def test_held_out_rewards_give_no_signal_of_their_own(tmp_path):
    def silent(completion_audio, **kwargs):
        return [None] * len(completion_audio)

    trainer = make(tmp_path, [silent, brief], speech_decoder=steps, held_out_rewards=["brief"], max_steps=1)
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "held_out_rewards/brief/mean" in entry)
    assert entry["signal/no_reward"] == 1.0


@pytest.mark.parametrize(
    ("names", "message"),
    [(["breif"], "'breif', but the reward functions are 'mean_sample', 'brief'.*Did you mean"),
     (["mean_sample", "brief"], "names all reward functions")],
)  # fmt: skip
def test_wrong_held_out_rewards(names, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, [mean_sample, brief], speech_decoder=steps, held_out_rewards=names)


def test_a_falling_held_out_reward_is_a_warning(tmp_path, caplog):
    options = {"max_steps": 40, "speech_decoder": steps, "sample_only": "speech", "held_out_rewards": ["quiet"]}
    make(tmp_path, [mean_sample, quiet], **options).train()
    warnings = [record.getMessage() for record in caplog.records if "held-out reward" in record.getMessage()]
    assert len(warnings) == 1 and "'quiet' fell to -" in warnings[0]
    rng = np.random.default_rng(0)
    assert not is_lower_later(rng.normal(size=40).tolist()) and is_lower_later(np.linspace(1, 0, 16).tolist())


def test_sounds_are_in_the_table_of_completions(tmp_path):
    heard = Heard()
    make(tmp_path, heard, speech_decoder=steps, sample_only="speech", log_completions=True, max_steps=1).train()
    (path,) = tmp_path.rglob("completions_00001.parquet")
    table = Dataset.from_parquet(str(path), keep_in_memory=True)
    assert isinstance(table.features["completion_audio"], Audio)
    files = table.cast_column("completion_audio", Audio(decode=False))["completion_audio"]
    (_, _, sounds) = heard.calls[0]
    assert len(files) == len(sounds) and any(sounds)
    for file, sound in zip(files, sounds, strict=True):
        assert (file is None) == (sound is None)
        if sound is not None:
            samples, rate = soundfile.read(io.BytesIO(file["bytes"]), dtype="float32")
            assert rate == 8000 and np.abs(samples - sound["array"]).max() < 1e-4


def test_a_function_is_saved_by_its_name(tmp_path):
    trainer = make(tmp_path, mean_sample, speech_decoder=lambda codes: steps(codes), max_steps=1)
    trainer.train()
    trainer.save_model(tmp_path)
    assert json.loads(trainer.args.to_json_string())["speech_decoder"] == "<lambda>"
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).speech_decoder == "<lambda>"


# Decoders that fail


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda codes: np.zeros(3), "returned a ndarray for a completion of row"),
        (lambda codes: ([0.0], 8000, 3), "returned a tuple for a completion of row"),
        (lambda codes: {"samples": [0.0]}, "returned a dict for a completion of row"),
        (lambda codes: (np.zeros((2, 3)), 8000), r"samples of shape \(2, 3\) at 8000 Hz"),
        (lambda codes: ([0.0], 0), "at 0 Hz"),
    ],
)
def test_wrong_decoders_are_errors(value, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, mean_sample, speech_decoder=value, sample_only="speech").train()


def test_an_error_of_a_decoder_names_the_row(tmp_path):
    def broken(codes):
        raise RuntimeError("no frames")

    with pytest.raises(RuntimeError, match="no frames") as raised:
        make(tmp_path, mean_sample, speech_decoder=broken, sample_only="speech").train()
    assert any(
        "`speech_decoder` raised this for the codes of a completion of row" in note for note in raised.value.__notes__
    )


@pytest.mark.parametrize("samples", [[math.nan, 0.0], [math.inf], []])
def test_sounds_that_are_none(samples, tmp_path):
    heard = Heard()
    trainer = make(tmp_path, heard, speech_decoder=lambda codes: (samples, 8000), sample_only="speech", max_steps=1)
    trainer.train()
    assert {*heard.calls[0][2]} == {None}
    assert trainer.state.log_history[0]["speech/undecodable"] == 1.0


def test_silence_is_counted(tmp_path):
    trainer = make(tmp_path, mean_sample, speech_decoder=lambda codes: (np.zeros(9), 8000), sample_only="speech")
    trainer.train()
    assert trainer.state.log_history[0]["speech/silent"] == 1.0


def test_rewards_that_hear_need_a_decoder(tmp_path):
    with pytest.raises(ValueError, match="needs 'completion_audio', but .* set `speech_decoder`, with which it hears"):
        make(tmp_path, mean_sample)
    with pytest.raises(ValueError, match="decodes no codes; name a codec"):
        tokenizer = speech_tokenizer()
        speech_model(tokenizer).save_pretrained(tmp_path / "llama")
        make(tmp_path, mean_sample, speech_decoder=str(tmp_path / "llama"))


# Evaluation


def test_evaluation_hears_completions(tmp_path):
    tokenizer = speech_tokenizer()
    model = speech_model(tokenizer)
    options = {"max_completion_length": 8, "temperature": 1.0, "num_samples": 4, "speech_decoder": steps}
    result = evaluate(model, tokenizer, speech_rows(6), mean_sample, EvaluationConfig(**options))
    seconds = [value for row in result.rows for value in row["speech_seconds"]]
    heard = [value for value in seconds if value is not None]
    assert len(seconds) == 24 and 0 < len(heard) < 24
    assert result.metrics["speech/seconds"] == pytest.approx(np.mean(heard))
    assert result.metrics["speech/undecodable"] == pytest.approx(1 - len(heard) / 24)
    result.save(tmp_path / "result")
    saved = json.loads((tmp_path / "result" / "metrics.json").read_text())
    assert saved["settings"]["speech_decoder"] == "steps"

    trainer = make(tmp_path / "run", mean_sample, speech_decoder=steps)
    config = EvaluationConfig(**{**options, "speech_decoder": None})
    assert evaluate_trainer(trainer, speech_rows(6), mean_sample, config).metrics["speech/seconds"] > 0
