# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Time and memory of a step: unmodified `trl.GRPOTrainer` and `MultimodalGRPOTrainer` in one run, or both `DPOTrainer`s.

```bash
python benchmarks/policy_update.py --case image          # a prompt of about 410 tokens, 8 completions of 20 to 64
python benchmarks/policy_update.py --case long           # a prompt of about 1,360 tokens
python benchmarks/policy_update.py --case text           # short prompts without media, 2 completions each
python benchmarks/policy_update.py --case varied         # 2 prompts with images of other sizes in each repetition
python benchmarks/policy_update.py --corrects_engine     # old log-probabilities are needed, as with vLLM
python benchmarks/policy_update.py --family qwen3_5      # Qwen3.5, with linear attention
python benchmarks/policy_update.py --family qwen2_audio --case audio    # baseline: our padded rows (TRL has no audio)
python benchmarks/policy_update.py --case preference     # DPO: a pair of answers of 64 tokens; also long_preference
python benchmarks/policy_update.py --weights speech --case long_text    # pretrained weights, also short_audio
python benchmarks/policy_update.py --case image --device cuda --preset 3b --json
```

Both trainers use the same dataset and the same model: Qwen2.5-VL's architecture with seeded random weights. The script
builds the model and its processor and downloads nothing. With `--weights speech`, the model has the pretrained weights
of `examples/speech_model.py`: SmolLM2-135M-Instruct for texts, and with Whisper's encoder for sounds.

The script measures

- **update**: scoring by the reference model, if there is one (`--beta`), then forward and backward pass of the loss.
  Both trainers get the same seeded completions of 20 to 64 tokens, of `--tokens`, or of log-normal lengths
  (`--lengths`). The script also compares their gradients.
- **step**: the time from reading the rows to the gradients, with completions of 64 tokens sampled by the model. It
  excludes the optimizer step, which is the same for both. Its parts are those of the fastest step: *sampling*,
  *rewards*, *scoring* (old and reference log-probabilities, without gradients), *update* (forward and backward pass)
  and *overhead*, which is all the rest, from reading the rows to metrics.
- **Python** of sampling: the share of the host's time outside of torch's operators, in a further step under torch's
  profiler. The profiler's own time counts as Python, so this is an upper bound.
- **memory** of the update: on a CPU, bytes saved for the backward pass, with each storage counted once and without
  parameters; on CUDA, the peak of allocated memory above that of parameters and gradients.
- **processor**: prompts that go through the processor in a step, media included.

A step of DPO reads a pair, scores it by the reference and by the policy, which is the update, and has no other parts.

After a warm-up step, repetitions of the two trainers alternate, and the script reports the *minimum* of each quantity.
Wall-clock time needs an idle machine. On a shared one, `--clock cpu` computes the ratios from CPU time. On a machine
with several GPUs, make one visible (`CUDA_VISIBLE_DEVICES=0`).

CPU ratios are not GPU ratios. On a CPU, time is proportional to the number of tokens, and TRL's fused LM head, which
both trainers use, projects all positions, prompts included (`compact` in `add_fused_lm_head`). On CUDA, it projects
completion tokens only, so our trainer saves nothing there.
"""

import argparse
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from measuring import (
    CLOCKS,
    MIB,
    Sampling,
    TimedSteps,
    command_line,
    conditions,
    now,
    parse_options,
    python_share,
    report,
)
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    WhisperFeatureExtractor,
)
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

from trl_multimodal_rft import (
    MultimodalDPOConfig,
    MultimodalDPOTrainer,
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
)
from trl_multimodal_rft.encoding.prompts import EncodedPrompt
from trl_multimodal_rft.extras.compare import saved_bytes
from trl_multimodal_rft.models.modes import checkpoint_activations
from trl_multimodal_rft.models.parts import freeze


sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from pretrained import language_model  # noqa: E402
from speech_model import speech_model  # noqa: E402


# completion tokens
SHORTEST = 20
LONGEST = 64
PHASES = ("sampling", "rewards", "scoring", "update", "overhead")  # of a step
VARIED_STEPS = 16  # after which the sizes of varied images repeat
RATE = 16000  # Hz


@dataclass(frozen=True)
class Case:
    """Contents of the prompts, and numbers of prompts and completions per step."""

    prompts: int
    group: int
    image_size: tuple[int, int] | None = None  # width and height in tokens
    images: int = 1  # of each prompt
    varied: bool = False  # each image has half to one and a half times this width and height
    seconds: tuple[float, ...] = ()  # of each audio clip, at 25 tokens per second
    questions: tuple[str, ...] = ("What is in the image?", "Describe the image.", "How many things are there?")
    answers: int | None = None  # tokens of each answer of a pair, on which DPO trains
    pretrained: bool = False  # only for pretrained models


CASES = {
    "image": Case(prompts=1, group=8, image_size=(28, 14)),
    "long": Case(prompts=1, group=8, image_size=(37, 36)),
    "varied": Case(prompts=2, group=8, image_size=(28, 14), varied=True),
    "video": Case(prompts=1, group=8, image_size=(28, 14), images=40),  # as frames, as TRL takes no videos
    "text": Case(
        prompts=4,
        group=2,
        questions=(
            "What is red and green?",
            "Is there a cat, a dog or a bird?",
            "The answer is 1 or 2?",
            "Compare 3, 4.",
        ),
    ),
    "long_text": Case(
        prompts=1,
        group=8,
        questions=("What is three plus four? Answer with one word. An example: two plus two is four. " * 8,),
        pretrained=True,
    ),
    "preference": Case(prompts=1, group=2, image_size=(28, 14), answers=64),
    "long_preference": Case(prompts=1, group=2, image_size=(37, 36), answers=64),
    "short_audio": Case(prompts=1, group=8, seconds=(2,), pretrained=True),
    "audio": Case(prompts=1, group=8, seconds=(16,)),
    "long_audio": Case(prompts=1, group=8, seconds=(28, 28)),
}


@dataclass(frozen=True)
class Preset:
    """Sizes of the text decoder and of the vision or audio tower."""

    text: dict
    tower: dict
    vocab_size: int | None = None  # that of the tokenizer, if None


LARGE_TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
PRESETS = {
    "tiny": Preset(
        text={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        tower={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 64,
            "fullatt_block_indexes": [1],
        },
    ),
    "12m": Preset(
        text={
            "hidden_size": 384,
            "intermediate_size": 1152,
            "num_hidden_layers": 6,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]},
        },
        tower={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 384,
            "fullatt_block_indexes": [3],
        },
    ),
    "3b": Preset(  # https://huggingface.co/Qwen/Qwen2.5-VL-3B-Instruct/blob/main/config.json
        text={
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
            "tie_word_embeddings": True,
        },
        tower={**LARGE_TOWER, "out_hidden_size": 2048},
        vocab_size=151936,
    ),
    "7b": Preset(  # https://huggingface.co/Qwen/Qwen2.5-VL-7B-Instruct/blob/main/config.json
        text={
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "mrope_section": [16, 24, 24], "rope_theta": 1e6},
        },
        tower={**LARGE_TOWER, "out_hidden_size": 3584},
        vocab_size=152064,
    ),
}

# Most layers use linear attention, as in the released models
QWEN3_5_PRESETS = {
    "tiny": Preset(
        text={
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
        tower={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 4,
            "out_hidden_size": 64,
            "num_position_embeddings": 256,
        },
    ),
    "12m": Preset(
        text={
            "hidden_size": 320,
            "intermediate_size": 864,
            "num_hidden_layers": 8,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
            "num_attention_heads": 5,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "rope_parameters": {"rope_type": "default", "mrope_section": [3, 3, 2], "mrope_interleaved": True},
        },
        tower={
            "depth": 4,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "out_hidden_size": 320,
            "num_position_embeddings": 256,
        },
    ),
}

WHISPER_LARGE = {  # https://huggingface.co/Qwen/Qwen2-Audio-7B-Instruct/blob/main/config.json
    "d_model": 1280,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "num_mel_bins": 128,
}
QWEN2_AUDIO_PRESETS = {
    "tiny": Preset(
        text={
            "model_type": "qwen2",
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
        tower={
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "num_mel_bins": 16,
        },
    ),
    "3b": Preset(  # not a released model: the encoder and a decoder of Qwen2.5-3B's size
        text={
            "model_type": "qwen2",
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
        },
        tower=WHISPER_LARGE,
        vocab_size=151936,
    ),
    "7b": Preset(
        text={
            "model_type": "qwen2",
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
        tower=WHISPER_LARGE,
        vocab_size=156032,
    ),
}

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
    "{% if block.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif block.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% else %}{{ block.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Counting:
    """Counts the prompts that a processor or a tokenizer gets, over all calls."""

    encoded = 0

    def __call__(self, *args, text=None, **kwargs):
        self.encoded += 1 if isinstance(text, str) else len(text)
        return super().__call__(*args, text=text, **kwargs)


class CountingQwen2_5(Counting, Qwen2_5_VLProcessor):
    pass


class CountingQwen3(Counting, Qwen3VLProcessor):
    pass


class CountingAudio(Counting, Qwen2AudioProcessor):
    pass


class CountingTokenizer(Counting, PreTrainedTokenizerFast):
    def __call__(self, text=None, **kwargs):
        return super().__call__(text=text, **kwargs)

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """The tokenizer itself, as the other classes have one."""
        return self


@dataclass(frozen=True)
class Family:
    """Classes and sizes of an architecture."""

    presets: dict[str, Preset]
    config: type
    model: type
    processor: type
    video_processor: type | None = None  # None for models that don't see
    patch_size: int = 14  # pixels; 2 x 2 patches make a token
    pretrained: Callable[[], str] | None = None  # returns a folder of weights

    @property
    def hears(self) -> bool:
        return self.processor is CountingAudio


FAMILIES = {
    "qwen2_5_vl": Family(
        PRESETS, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, CountingQwen2_5, Qwen2VLVideoProcessor, 14
    ),
    "qwen3_5": Family(
        QWEN3_5_PRESETS, Qwen3_5Config, Qwen3_5ForConditionalGeneration, CountingQwen3, Qwen3VLVideoProcessor, 16
    ),
    "qwen2_audio": Family(
        QWEN2_AUDIO_PRESETS,
        Qwen2AudioConfig,
        Qwen2AudioForConditionalGeneration,
        CountingAudio,
        pretrained=speech_model,
    ),
    "smollm2": Family({}, LlamaConfig, LlamaForCausalLM, CountingTokenizer, pretrained=language_model),
}
QWEN2_5 = FAMILIES["qwen2_5_vl"]


def build_processor(family: Family = QWEN2_5, mel_bins: int = 128):
    """Builds a processor with a byte-level tokenizer that is trained on the questions."""
    if family.hears:
        named = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}
    else:
        named = {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
        }
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", *named.values()],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    questions = [question for case in CASES.values() if not case.pretrained for question in case.questions]
    bpe.train_from_iterator(questions * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        extra_special_tokens=named,
    )
    if family.hears:
        features = WhisperFeatureExtractor(feature_size=mel_bins)
        return family.processor(features, tokenizer, chat_template=TEMPLATE)
    token = (2 * family.patch_size) ** 2
    pixels = {"shortest_edge": token, "longest_edge": 2000 * token}  # avoids resizing
    return family.processor(
        Qwen2VLImageProcessor(size=pixels, patch_size=family.patch_size),
        tokenizer,
        family.video_processor(size=pixels),
        chat_template=TEMPLATE,
    )


def build_model(preset: Preset, processor, device: str, seed: int, family: Family = QWEN2_5):
    """Builds a model with seeded random weights, in float32 on a CPU and in bfloat16 on CUDA."""
    tokenizer = processor.tokenizer
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    if family.hears:
        tower = {
            "audio_config": {"model_type": "qwen2_audio_encoder", **preset.tower},
            "audio_token_index": tokenizer.audio_token_id,
        }
    else:
        tower = {
            "vision_config": preset.tower,
            "image_token_id": tokenizer.image_token_id,
            "video_token_id": tokenizer.video_token_id,
            "vision_start_token_id": tokenizer.vision_bos_token_id,
            "vision_end_token_id": tokenizer.vision_eos_token_id,
            "tie_word_embeddings": preset.text.get("tie_word_embeddings", False),
        }
    config = family.config(
        text_config={
            "vocab_size": preset.vocab_size or len(tokenizer),
            "max_position_embeddings": 32768,
            **special,
            **preset.text,
        },
        **tower,
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = family.model._from_config(config, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    for key, value in special.items():
        setattr(model.config, key, value)
        setattr(model.generation_config, key, value)
    return model


def load_or_build(args: argparse.Namespace) -> tuple[PreTrainedModel, ProcessorMixin | CountingTokenizer]:
    """Returns the pretrained model, or one with random weights, and its processor or tokenizer."""
    family = FAMILIES[args.family]
    if args.weights == "speech":
        folder = family.pretrained()
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        model = family.model.from_pretrained(folder, dtype=dtype, device_map=args.device)
        return model, family.processor.from_pretrained(folder)
    preset = family.presets[args.preset]
    processor = build_processor(family, preset.tower.get("num_mel_bins", 128))
    return build_model(preset, processor, args.device, args.seed, family), processor


def build_dataset(case: Case, prompts: int, seed: int, family: Family = QWEN2_5) -> Dataset:
    """Builds `prompts` rows, each with a question and, unless the case is text-only, images or audio of noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(prompts):
        row = {"prompt": [{"role": "user", "content": case.questions[i % len(case.questions)]}]}
        if case.image_size is not None:
            scales = rng.uniform(0.5, 1.5, 2) if case.varied else (1, 1)
            tokens = (round(scale * size) for scale, size in zip(scales, case.image_size, strict=True))
            width, height = (2 * family.patch_size * each for each in tokens)
            noise = rng.integers(0, 256, (case.images, height, width, 3), dtype=np.uint8)
            row["images"] = [Image.fromarray(each) for each in noise]
        for column in ("chosen", "rejected") if case.answers else ():
            # Digits are a token each, and the chat template adds two
            digits = "".join(map(str, rng.integers(0, 10, case.answers - 2)))
            row[column] = [{"role": "assistant", "content": digits}]
        rows.append(row)
    dataset = Dataset.from_list(rows)
    if not case.seconds:
        return dataset
    sounds = [
        [
            {"array": rng.standard_normal(int(seconds * RATE)).astype("float32"), "sampling_rate": RATE}
            for seconds in case.seconds
        ]
        for _ in rows
    ]
    # Arrow would convert the arrays to lists
    dataset = dataset.add_column("index", range(len(rows)))
    return dataset.with_transform(lambda batch: {**batch, "audios": [sounds[i] for i in batch["index"]]})


def lognormal_lengths(count: int, longest: int, rng: np.random.Generator) -> np.ndarray:
    """Lengths of a log-normal distribution; at least three of them have a mean of half the longest."""
    deviations = rng.standard_normal(count)
    spreads = np.linspace(0, 8, 801)[:, None]
    shares = np.exp(spreads * (deviations - deviations.max()))
    return np.maximum((longest * shares[np.abs(shares.mean(1) - 0.5).argmin()]).astype(int), 2)


def build_completions(
    count: int, processor, seed: int, tokens: int | None = None, lengths: str = "equal"
) -> list[list[int]]:
    """Seeded completions of 20 to 64 tokens, or of `tokens`, each ending with the end-of-sequence token."""
    rng = np.random.default_rng(seed)
    tokenizer = processor.tokenizer
    ordinary = sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids))
    if lengths == "lognormal":
        drawn = lognormal_lengths(count, tokens or LONGEST, rng)
    else:
        drawn = rng.integers(SHORTEST, LONGEST + 1, count) if tokens is None else [tokens] * count
    return [[*rng.choice(ordinary, length - 1).tolist(), tokenizer.eos_token_id] for length in drawn]


def make_reward(n_equal: int):
    """A reward function that gives the first `n_equal` completions the same reward."""

    def reward(completion_ids, **kwargs):
        return [0.0 if i < n_equal else float(sum(ids) % 17) for i, ids in enumerate(completion_ids)]

    return reward


reward = make_reward(0)


class Contestant(TimedSteps):
    """
    Times the steps of a trainer.

    Args:
        trainer ([`~trl.GRPOTrainer`] or [`~trl.DPOTrainer`]):
            Trainer to measure.
        completions (`list[list[int]]`):
            Completions that the update trains on.
    """

    def __init__(self, trainer: GRPOTrainer | DPOTrainer, completions: list[list[int]]):
        super().__init__(trainer)
        self.processor = trainer.processing_class
        self.completions = completions
        self.times: dict[str, list[np.ndarray]] = defaultdict(list)
        self.launches: dict[str, float] = defaultdict(float)  # seconds until the host has launched all kernels
        self.phases: dict[str, np.ndarray] = {}  # of the fastest step
        self.encoded = 0
        for key, owner, name in (
            ("update", trainer, "compute_loss"),
            ("update", trainer.accelerator, "backward"),
            ("step", trainer, "training_step"),
        ):
            setattr(owner, name, self._timed(key, getattr(owner, name)))

    def _timed(self, key, function):
        def wrapper(*args, **kwargs):
            start = now(self.device)
            result = function(*args, **kwargs)
            launched = time.perf_counter() - start[0]
            # TRL's scoring with gradients is part of the loss
            if key != "scoring" or function.__name__ == "score" or not torch.is_grad_enabled():
                self.times[key].append(now(self.device) - start)
                self.launches[key] += launched
            return result

        return wrapper

    def _run(self, injected: list[list[int]] | None) -> np.ndarray:
        """Runs a step up to the gradients, and returns its time."""
        self._clear()
        total = self._step()
        self.encoded = self.processor.encoded
        return total

    def _clear(self) -> None:
        self.times.clear()
        self.launches.clear()
        self.processor.encoded = 0

    def _time_of(self, key: str) -> np.ndarray:
        return sum(self.times[key], np.zeros(2))

    def warm_up(self, updates_only: bool = False) -> None:
        """Runs a warm-up step, in which our trainer runs its self-check."""
        self._run(self.completions if updates_only else None)

    def memory(self) -> int:
        """Bytes that an update holds for its backward pass. Its gradients remain on the model."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self._run(self.completions)
            return torch.cuda.max_memory_allocated() - before
        saved: list[int] = []
        with saved_bytes(self.trainer.model, saved):
            self._run(self.completions)
        return saved[0]


class PairContestant(Contestant):
    """Times the steps of DPO, which sample nothing."""

    def measure_update(self) -> None:
        total = self._run(self.completions)
        self._keep_best("update", self._time_of("update"))
        self._keep_best("step", total)

    def measure_step(self) -> None:
        """An update has measured it."""

    def python_share(self) -> None:
        """There is none, as nothing is sampled."""

    def shared_fraction(self) -> float:
        """Fraction of prompt tokens that our trainer forwards for the other answer, too."""
        return 0.5

    @property
    def prompt(self) -> EncodedPrompt:
        return self.trainer.data_collator([self.trainer.train_dataset[0]])["sequences"][0]


class GRPOContestant(Contestant):
    """
    Times the steps of GRPO.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Trainer to measure.
        completions (`list[list[int]]`):
            Completions that replace sampled ones when the update is measured.
        corrects_engine (`bool`, *optional*, defaults to `False`):
            Whether completions come with log-probabilities, which the trainer corrects as if an engine had sampled.
    """

    def __init__(self, trainer: GRPOTrainer, completions: list[list[int]], corrects_engine: bool = False):
        super().__init__(trainer, completions)
        trainer.use_vllm = self.corrects_engine = corrects_engine
        self.injected: list[list[int]] | None = None
        is_ours = isinstance(trainer, MultimodalGRPOTrainer)
        self._sample = trainer.sampler if is_ours else trainer._generate_single_turn
        sample = self._timed("sampling", self._sample_or_inject)
        if is_ours:
            trainer.sampler = Sampling(trainer.sampler, sample)
        else:
            trainer._generate_single_turn = sample
        scoring = (trainer._scoring, "score") if is_ours else (trainer, "_get_per_token_logps_and_entropies")
        for key, owner, name in (
            ("rollout", trainer, "_generate_and_score_completions"),
            ("rewards", trainer, "_reward" if is_ours else "_calculate_rewards"),
            ("scoring", *scoring),
        ):
            setattr(owner, name, self._timed(key, getattr(owner, name)))

    def _sample_or_inject(self, *args, **kwargs):
        self.trainer.use_vllm = False  # which transformers, in place of the engine, would not sample with
        ids = self.injected
        logps = None
        if not ids:
            ids, logps = self._sample(*args, **kwargs)
        self.trainer.use_vllm = self.corrects_engine
        if self.corrects_engine:  # uniform, as nearly are those of random weights
            logps = [[-np.log(len(self.processor.tokenizer))] * len(each) for each in ids]
        return ids, logps

    def _run(self, injected: list[list[int]] | None) -> np.ndarray:
        self.injected = injected
        return super()._run(injected)

    def measure_update(self) -> None:
        self._run(self.completions)
        self.keep_update()

    def keep_update(self) -> None:
        """Keeps the time of the update that ran last, if it is the shortest."""
        self._keep_best("update", self.times["step"][0] - self.times["rollout"][0] + self._time_of("scoring"))

    def measure_sampling(self) -> None:
        """Samples and rewards completions, without an update."""
        self.injected = None
        self._clear()
        self.trainer._prepare_inputs(next(self.rows))
        self._keep_best("generation", self.times["sampling"][0])

    def measure_step(self) -> None:
        total = self._run(None)
        if "step" not in self.best or (total < self.best["step"]).all():
            self.phases = {name: self._time_of(name) for name in PHASES[:-1]}
            self.phases[PHASES[-1]] = total - sum(self.phases.values())
        self._keep_best("step", total)
        self._keep_best("generation", self.times["sampling"][0])

    def python_share(self) -> float:
        """The share of Python in the time of sampling."""
        shares: list[float] = []
        sample = self._sample

        def profiled(*args, **kwargs):
            with python_share(shares):
                return sample(*args, **kwargs)

        self._sample = profiled
        self._run(None)
        self._sample = sample
        return shares[0]

    def shared_fraction(self) -> float:
        """Fraction of prompt tokens that our trainer, which shares them, didn't forward in its latest step."""
        return self.trainer._metric_log.pop("train")["packing/shared_frac"]

    @property
    def prompt(self) -> EncodedPrompt:
        return self.trainer._buffered_inputs[0].prompts[0]


def build_trainers(
    args: argparse.Namespace, folder: str, names: Sequence[str] = ("trl", "ours")
) -> dict[str, Contestant]:
    """Builds trainers that differ only in their class or, for data that TRL doesn't support, in packing."""
    case = CASES[args.case]
    family = FAMILIES[args.family]
    prompts = args.prompts or case.prompts
    group = args.group or case.group
    tokens = args.tokens or LONGEST
    # Prefetching would hide the media processing from the measurement
    own = {"media_prefetch": 0, "torch_compile": args.torch_compile}
    if case.answers is not None:
        return build_pair_trainers(args, folder)
    if family.hears:
        padded = MultimodalGRPOTrainer, MultimodalGRPOConfig, {"media_prefetch": 0, "packing": "padded"}
    else:
        padded = GRPOTrainer, GRPOConfig, {}
    contestants = {}
    sides = {"trl": padded, "ours": (MultimodalGRPOTrainer, MultimodalGRPOConfig, own)}
    for name in names:
        trainer_class, config_class, options = sides[name]
        model, processor = load_or_build(args)
        placeholders = [getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
        config = config_class(
            output_dir=str(Path(folder) / name),
            per_device_train_batch_size=prompts * group,
            num_generations=group,
            max_completion_length=tokens,
            generation_kwargs={
                "min_new_tokens": tokens,
                "suppress_tokens": [each for each in placeholders if each is not None],
            },
            beta=args.beta,
            gradient_checkpointing=args.checkpointing,
            use_cpu=args.device == "cpu",
            bf16=args.device == "cuda",
            report_to=[],
            seed=args.seed,
            **options,
        )
        if args.freeze_tower:
            freeze(model, ["audio_tower" if family.hears else "vision_tower", "projector"])
        if args.beta != 0.0:  # the trainers load the reference model from disk
            model.config._name_or_path = str(Path(folder) / "model")
            model.save_pretrained(model.config._name_or_path)
        trainer = trainer_class(
            model,
            make_reward(round(args.equal_rewards * prompts) * group),
            config,
            build_dataset(case, prompts * (VARIED_STEPS if case.varied else 1), args.seed, family),
            processing_class=processor,
        )
        if args.checkpointing:  # `train`, which doesn't run here, would turn it on
            checkpoint_activations(trainer.model)
        completions = build_completions(prompts * group, processor, args.seed, args.tokens, args.lengths)
        contestants[name] = GRPOContestant(trainer, completions, args.corrects_engine)
    return contestants


def build_pair_trainers(args: argparse.Namespace, folder: str) -> dict[str, Contestant]:
    """Builds TRL's trainer for DPO and ours, with the same reference."""
    case = CASES[args.case]
    family = FAMILIES[args.family]
    n = args.prompts or case.prompts
    own = {"media_prefetch": 0, "media_contribution_steps": 0}
    sides = {"trl": (DPOTrainer, DPOConfig, {}), "ours": (MultimodalDPOTrainer, MultimodalDPOConfig, own)}
    contestants = {}
    for name, (trainer_class, config_class, options) in sides.items():
        processor = build_processor(family)
        config = config_class(
            output_dir=str(Path(folder) / name),
            per_device_train_batch_size=n,
            max_length=None,
            gradient_checkpointing=args.checkpointing,
            use_cpu=args.device == "cpu",
            bf16=args.device == "cuda",
            report_to=[],
            seed=args.seed,
            **options,
        )
        model, reference = (
            build_model(family.presets[args.preset], processor, args.device, args.seed, family) for _ in range(2)
        )
        if args.freeze_tower:
            freeze(model, ["vision_tower", "projector"])
        dataset = build_dataset(case, n, args.seed, family)
        trainer = trainer_class(model, reference, args=config, train_dataset=dataset, processing_class=processor)
        if args.checkpointing:
            checkpoint_activations(trainer.model)
        answers = [row[column][0]["content"] for row, column in product(dataset, ("chosen", "rejected"))]
        ids = processor.tokenizer([f"{answer}<|im_end|>\n" for answer in answers])["input_ids"]
        contestants[name] = PairContestant(trainer, ids)
    return contestants


def gradient_difference(expected: torch.nn.Module, actual: torch.nn.Module) -> float:
    """Norm of the difference of two models' gradients, relative to the norm of the first gradient."""
    return relative_difference(*([each.grad for each in model.parameters()] for model in (expected, actual)))


def relative_difference(expected: Iterable[torch.Tensor | None], actual: Iterable[torch.Tensor | None]) -> float:
    """Norm of the difference of two gradients, relative to the norm of the first, over tensors that have one."""
    pairs = [(a, b) for a, b in zip(expected, actual, strict=True) if a is not None]  # the vision tower: not for text
    difference = torch.stack([(a.float() - b.float()).norm() for a, b in pairs]).norm()
    return (difference / torch.stack([a.float().norm() for a, _ in pairs]).norm()).item()


def description(args: argparse.Namespace, ours: Contestant) -> dict:
    """Settings, sizes, hardware and versions of a result, by a trainer that has run a step."""
    prompt = ours.prompt
    group = args.group or CASES[args.case].group
    kind = "audio" if FAMILIES[args.family].hears else "image"
    medium = getattr(ours.processor, f"{kind}_token_id", -1)
    return conditions(
        args,
        "trl",
        "transformers",
        baseline="padded rows" if FAMILIES[args.family].hears else "TRL",
        dtype=str(ours.trainer.model.dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in ours.trainer.model.parameters()),
        prompts=len(ours.completions) // group,
        group=group,
        prompt_tokens=len(prompt),
        media_tokens=int((prompt.input_ids == medium).sum()),
        update_completion_tokens=[len(ids) for ids in ours.completions],
        step_completion_tokens=args.tokens or LONGEST,
    )


def run(args: argparse.Namespace) -> dict:
    """Runs the benchmark."""
    clock = [*CLOCKS].index(args.clock)
    with tempfile.TemporaryDirectory() as folder:
        contestants = build_trainers(args, folder)
        trl = contestants["trl"]
        ours = contestants["ours"]
        for contestant in contestants.values():
            contestant.warm_up(args.updates_only)
        step_shared = ours.shared_fraction()
        memory = {name: contestant.memory() for name, contestant in contestants.items()}
        difference = gradient_difference(trl.trainer.model, ours.trainer.model)
        update_shared = ours.shared_fraction()
        for _ in range(args.repeats):
            for contestant in contestants.values():
                contestant.measure_update()
                if not args.updates_only:
                    contestant.measure_step()
        shares = {} if args.updates_only else {name: each.python_share() for name, each in contestants.items()}

    raw = {
        name: {
            **{f"{quantity}_s": best[0] for quantity, best in contestant.best.items()},
            **{f"{quantity}_cpu_s": best[1] for quantity, best in contestant.best.items()},
            **{f"step_{phase}_s": seconds[0] for phase, seconds in contestant.phases.items()},
            **{f"step_{phase}_cpu_s": seconds[1] for phase, seconds in contestant.phases.items()},
            **({"python_share_of_sampling": shares[name]} if shares.get(name) is not None else {}),
            "memory_bytes": memory[name],
            "processor_prompts": contestant.encoded,
        }
        for name, contestant in contestants.items()
    }
    ratios = {f"{quantity}_ratio": trl.best[quantity][clock] / ours.best[quantity][clock] for quantity in ours.best}
    return {
        **ratios,
        "memory_ratio": memory["trl"] / memory["ours"],
        "processor_ratio": trl.encoded / ours.encoded,
        "gradient_difference": difference,
        "update_shared_fraction": update_shared,
        "step_shared_fraction": step_shared,
        **raw,
        **description(args, ours),
    }


def table(result: dict) -> str:
    """Lines with the settings, and a table."""
    setting = result["setting"]
    trl = result["trl"]
    ours = result["ours"]
    suffix = "_s" if setting["clock"] == "wall" else "_cpu_s"
    clock = "wall-clock" if setting["clock"] == "wall" else "CPU"
    memory = "saved for backward" if setting["device"] == "cpu" else "peak above weights and gradients"
    lengths = setting["update_completion_tokens"]
    lines = [
        f"case {setting['case']}: {setting['family']}, {setting['parameters'] / 1e6:.1f} M, {setting['dtype']}, "
        f"{setting['prompts']} x {setting['group']} completions, prompt of {setting['prompt_tokens']} tokens "
        f"({setting['media_tokens']} of media),",
        f"completions of {min(lengths)} to {max(lengths)} tokens in the update and "
        f"{setting['step_completion_tokens']} in the step; {result['hardware']['gpu'] or result['hardware']['cpu']}, "
        f"{setting['threads']} threads;",
        f"{clock} seconds, minimum of {setting['repeats']}; gradients differ by {result['gradient_difference']:.0e}; "
        f"ours forwards {1 - result['update_shared_fraction']:.0%} of the prompt tokens in the update, "
        f"{1 - result['step_shared_fraction']:.0%} in the step",
    ]
    if setting["device"] == "cpu":
        lines.append(
            "(on a CPU, TRL's fused LM head, which both use, projects prompt positions too: GPU ratios differ)"
        )
    sides = trl, ours
    rows = [
        (label, *(f"{side[name + suffix]:.3f} s" for side in sides), f"{result[f'{name}_ratio']:.2f}x")
        for name, label in {"update": "update", "step": "whole step"}.items()
        if name + suffix in ours
    ]
    if "step_sampling" + suffix in ours:
        for phase in PHASES:
            parts = [
                (side[f"step_{phase}{suffix}"], side[f"step_{phase}{suffix}"] / side["step" + suffix])
                for side in sides
            ]
            rows.append((f"  {phase}", *(f"{seconds:.3f} s {share:4.0%}" for seconds, share in parts), ""))
        rows.append(("  Python in sampling", *(f"{side['python_share_of_sampling']:.0%}" for side in sides), ""))
    rows += [
        (
            f"memory ({memory})",
            *(f"{side['memory_bytes'] / MIB:.0f} MiB" for side in sides),
            f"{result['memory_ratio']:.2f}x",
        ),
        (
            "prompts through the processor",
            *(str(side["processor_prompts"]) for side in sides),
            f"{result['processor_ratio']:.2f}x",
        ),
    ]
    width = max(len(row[0]) for row in rows)
    baseline = setting["baseline"]
    rows.insert(0, ("", baseline, "ours", f"{baseline} / ours"))
    lines += ["", *(f"{label:{width}}  {a:>12}  {b:>12}  {ratio:>10}".rstrip() for label, a, b, ratio in rows)]
    return "\n".join(lines)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the options of the benchmark."""
    parser = command_line(__doc__)
    parser.add_argument("--case", choices=CASES, default="image", help="contents of the prompts")
    parser.add_argument("--family", choices=FAMILIES, default="qwen2_5_vl", help="architecture of the model")
    parser.add_argument("--preset", choices=PRESETS, default="12m", help="size of the model")
    parser.add_argument(
        "--weights",
        choices=("random", "speech"),
        default="random",
        help="weights of `--family` and `--preset`, or those of `examples/speech_model.py` in place of both",
    )
    parser.add_argument("--prompts", type=int, help="prompts per step; that of the case if omitted")
    parser.add_argument("--group", type=int, help="completions per prompt; that of the case if omitted")
    parser.add_argument("--tokens", type=int, help="tokens per completion, in the update and in the step")
    parser.add_argument(
        "--lengths",
        choices=("equal", "lognormal"),
        default="equal",
        help="of completions in the update: `--tokens` each, or at most, with half of it on average",
    )
    parser.add_argument(
        "--equal_rewards", type=float, default=0.0, help="share of prompts whose completions all get the same reward"
    )
    parser.add_argument(
        "--corrects_engine",
        action="store_true",
        help="completions come with log-probabilities, corrected as those of vLLM",
    )
    parser.add_argument("--checkpointing", action="store_true", help="use gradient checkpointing")
    parser.add_argument("--torch_compile", action="store_true", help="compile the layers of ours")
    parser.add_argument("--freeze_tower", action="store_true", help="freeze the encoder and its projector")
    parser.add_argument("--updates_only", action="store_true", help="measure only updates, without sampling")
    parser.add_argument(
        "--beta", type=float, default=0.0, help="KL coefficient; above 0, a reference model scores, too"
    )
    shared = {"device": "cpu", "clock": "wall", "threads": None, "repeats": 3, "seed": 0, "json": False}
    args = parse_options(parser, argv, **shared)
    if args.weights == "speech":
        args.family = "qwen2_audio" if CASES[args.case].seconds else "smollm2"
        args.preset = None
    elif args.preset not in FAMILIES[args.family].presets:
        parser.error(f"there is no `--preset {args.preset}` of {args.family}")
    elif CASES[args.case].pretrained:
        parser.error(f"`--case {args.case}` needs `--weights speech`")
    if args.family == "smollm2" and CASES[args.case].image_size:
        parser.error(f"the pretrained models take no `--case {args.case}`")
    if FAMILIES[args.family].hears != bool(CASES[args.case].seconds):
        parser.error(f"{args.family} takes no `--case {args.case}`")
    return args


def main(argv: Sequence[str] | None = None) -> dict:
    """Runs the benchmark from the command line, and returns the result of [`run`]."""
    return report(parse(argv), run, table)


if __name__ == "__main__":
    main()
