# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Tiny random models of real transformers architectures, each with its real processor, without network access.

A family is a function with the decorator [`family`], which registers it in a table, with prompts and their modalities.
A model has fewer than a million parameters, two or three decoder layers, a small vocabulary, and large weights from a
seeded initialization. With small weights, attention would be nearly uniform and media would hardly reach the logits.
A wrong mask, a wrong position or a lost image would then go unnoticed.
"""

import base64
import copy
import functools
import inspect
import json
import re
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.audio_utils import mel_filter_bank, spectrogram

from .chats import (
    RATE,
    always_image_prompts,
    audio_prompts,
    base64_audio_prompts,
    image_audio_prompts,
    image_or_video_prompts,
    image_prompts,
    image_video_prompts,
    omni_prompts,
    phi4_prompts,
    single_audio_prompts,
)


CORPUS = [
    "You are a helpful assistant. system user assistant",
    "What do you hear in the audio? What is in the image? Describe the video. Compare them.",
    "Is there a cat, a dog or a bird? The answer is red green blue 0 1 2 3 4 5 6 7 8 9 10",
]


@dataclass(frozen=True)
class Family:
    """Builder of a tiny model of one architecture."""

    name: str
    builder: Callable[[], tuple[hf.PreTrainedModel, hf.ProcessorMixin]]
    prompts: Callable[[], list[list[dict]]]  # returns chats of one message
    modalities: tuple[str, ...]  # of the prompts
    since: str = "5.16"  # minimum version of transformers

    def build(self) -> tuple[hf.PreTrainedModel, hf.ProcessorMixin]:
        """Returns a fresh `(model, processor)`: float32, in evaluation mode, the same weights at every call."""
        if self.name == "smolvlm" and hf.__version__ == "5.20.2":
            pytest.skip("its own forward fails in transformers 5.20.2")
        return fresh(self.installed())

    def installed(self) -> Callable[[], tuple[hf.PreTrainedModel, hf.ProcessorMixin]]:
        """Returns the builder. Skips the test if transformers doesn't have the family yet."""
        if Version(hf.__version__) < Version(self.since):
            pytest.skip(f"transformers {hf.__version__} has no {self.name}")
        return self.builder

    @property
    def model_class(self) -> type[hf.PreTrainedModel]:
        return type(_made(self.installed())[0][0])

    def save(self, folder: str | Path) -> Path:
        """Saves model and processor, so that both can be loaded from `folder`."""
        model, processor = self.build()
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return Path(folder)


@functools.cache
def _made(make: Callable) -> tuple:
    """Returns the result of a function without arguments, and torch's random state after the call."""
    return make(), torch.get_rng_state()


def fresh(make: Callable):
    """Returns a copy of the result of `make()`, which runs once. Any call sets torch's random state as the run did."""
    result, state = _made(make)
    torch.set_rng_state(state)
    return copy.deepcopy(result)


FAMILIES: dict[str, Family] = {}  # packing and trainer tests cover these
MORE_FAMILIES: dict[str, Family] = {}  # additional families
SPECIAL: dict[str, Family] = {}  # families for dedicated tests only


def family(table: dict[str, Family], prompts: Callable, *modalities: str, **more: str) -> Callable:
    """Returns a decorator that registers a builder in a table, under the builder's name."""

    def add(builder: Callable) -> Callable:
        table[builder.__name__] = Family(builder.__name__, builder, prompts, modalities, **more)
        return builder

    return add


def encode(processor: hf.ProcessorMixin, messages: list[dict], **options) -> hf.BatchFeature:
    """Encodes one chat into model inputs of batch size 1 that end with the generation prompt."""
    return processor.apply_chat_template(
        [messages], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True, **options
    )


def greedy(model, processor, messages, length=6) -> str:
    """Returns the text that `generate` alone decodes greedily from a chat, with placeholders suppressed."""
    names = (f"{kind}_token_{name}" for kind, name in product(("image", "audio", "video"), ("id", "index")))
    config = hf.GenerationConfig(
        max_new_tokens=length,
        eos_token_id=processor.tokenizer.eos_token_id,
        pad_token_id=processor.tokenizer.pad_token_id,
        suppress_tokens=sorted({getattr(model.config, name, None) for name in names} - {None}) or None,
    )
    inputs = encode(processor, messages)
    output = model.generate(**inputs, generation_config=config)
    return processor.tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True)


# Tokenizers and templates


def tokenizer(**named: str) -> hf.PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer with tokens of ChatML and of `named`, such as `image_token="<image>"`."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *dict.fromkeys(named.values())]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(CORPUS * 20, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        extra_special_tokens=named,
    )


def tile_tokens(mark: str, side: int) -> dict[str, str]:
    """Returns tokens of an image's tiles by names such as `row_1_col_2`, up to `side` rows and columns."""
    positions = [(row, column) for row, column in product(range(1, side + 1), range(1, side + 1))]
    return {f"row_{row}_col_{column}": mark.format(row, column) for row, column in positions}


def template(**placeholders: str) -> str:
    """Returns a ChatML template that writes `placeholders[type]` for each non-text content block."""
    blocks = "".join(f"{{% elif block.type == '{kind}' %}}{mark}" for kind, mark in placeholders.items())
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
        "{% if block.type == 'text' %}{{ block.text }}" + blocks + "{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


# Models


def instantiate(model_class: type, config: hf.PreTrainedConfig, processor: hf.ProcessorMixin, scale: float = 6.0):
    """Returns `(model, processor)`: a seeded model with scaled weights and the special token ids of the tokenizer."""
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and not parameter.any():  # such as the image projection of Gemma 3
                parameter.normal_(std=0.1)
            elif parameter.ndim >= 2 and parameter.abs().max() < 0.5:  # others are large already
                parameter.mul_(scale)
    special = special_ids(processor.tokenizer)
    model.generation_config = hf.GenerationConfig(**special)
    for key, value in special.items():
        setattr(model.config, key, value)
    return model, processor


def special_ids(tokenizer: hf.PreTrainedTokenizerFast) -> dict[str, int | None]:
    return {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
    }


def decoder(tokenizer: hf.PreTrainedTokenizerFast, **changes) -> dict:
    """Returns settings that the text configs of most families share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        **special_ids(tokenizer),
        **changes,
    }


def build(name: str, tokens: dict[str, str], *parts, processor: dict | None = None, text: dict | None = None, **more):
    """
    Returns `(model, processor)` of the classes whose names start with `name`.

    Args:
        tokens:
            Special tokens. `{"image": "<image>"}` sets the tokenizer's `image_token`, and the config's
            `image_token_id` or `image_token_index` if there is one.
        parts:
            Image and video processors and feature extractors.
        processor:
            Further arguments of the processor. `"class"` is its class, if its name doesn't start with `name`.
            `"blocks"` holds the text of the template for each modality, by default the modality's token.
        text:
            Changes of the text config.
        more:
            `scale` of the weights, and settings of the config. A setting may be a function of the tokenizer. A token's
            name stands for its id.
    """
    words = tokenizer(**{f"{name}_token": token for name, token in tokens.items()})
    model_class = getattr(hf, f"{name}ForConditionalGeneration", None) or getattr(hf, f"{name}ForCausalLM")
    options = {"tokenizer": words, **(processor or {})}
    processor_class = options.pop("class", None) or getattr(hf, f"{name}Processor")
    blocks = options.pop("blocks", None)
    accepted = inspect.signature(processor_class).parameters
    for part in parts:
        kind = re.search("(Image|Video)Processor$", type(part).__name__)
        audio = "feature_extractor" if "feature_extractor" in accepted else "audio_processor"
        options[f"{kind[1].lower()}_processor" if kind else audio] = part
    if blocks is not None:
        options["chat_template"] = template(**blocks)
    instance = processor_class(**options)
    if instance.chat_template is None:
        instance.chat_template = template(
            **{kind: tokens[kind] for kind in ("image", "audio", "video") if kind in tokens}
        )
    scale = more.pop("scale", 6.0)
    settings = inspect.signature(model_class.config_class).parameters
    ids = {f"{name}_token_{kind}": name for name, kind in product(tokens, ("id", "index"))}
    more = {**{setting: name for setting, name in ids.items() if setting in settings}, **more}
    decoder_settings = decoder(words, **resolved(text or {}, words))
    if "text_config" in model_class.config_class.sub_configs:
        decoder_settings = {"text_config": decoder_settings}
    # Configs modify their arguments
    config = model_class.config_class(**copy.deepcopy({**decoder_settings, **resolved(more, words)}))
    return instantiate(model_class, config, instance, scale)


def resolved(value, words: hf.PreTrainedTokenizerFast, name: str = ""):
    """Resolves a setting: calls functions with the tokenizer, and replaces names of tokens by their ids."""
    if isinstance(value, dict):
        return {key: resolved(item, words, key) for key, item in value.items()}
    if callable(value):
        return value(words)
    if isinstance(value, str) and name.endswith(("_token_id", "_token_index")):
        return getattr(words, f"{value}_token_id")
    return value


def tower(**changes) -> dict:
    """Returns settings that most towers share."""
    return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **changes}


def clip_vision(**changes) -> dict:
    return tower(**{"image_size": 28, "patch_size": 7, **changes})


def siglip_vision() -> dict:
    return clip_vision(model_type="siglip_vision_model", vision_use_head=False)


def whisper_audio(**changes) -> dict:
    sizes = {"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 64}
    return {**sizes, "num_mel_bins": 16, "max_source_positions": 50, **changes}  # 1 s


def whisper(seconds: int = 1) -> hf.WhisperFeatureExtractor:
    return hf.WhisperFeatureExtractor(feature_size=16, chunk_length=seconds)


def square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


SQUARE = square(28)
CROP = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
TILES = [[28, 28], [28, 56], [56, 28], [56, 56]]

# No weight of an expert is square: a square weight would fit both layouts, so that a wrong one would go unnoticed
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
# Settings of released configs that vLLM reads and transformers doesn't write
RELEASED_ROUTING = {"norm_topk_prob": True}
RELEASED_VISION = {"image_size": 128, "apply_vit_abs_pos_embed": True}  # 8 x 8 patches, as many as positions
LINEAR_ATTENTION = {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
LINEAR_ATTENTION |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}


# Sounds


QWEN_AUDIO_TOKENS = {"audio": "<|AUDIO|>", "audio_bos": "<|audio_bos|>", "audio_eos": "<|audio_eos|>"}
QWEN_AUDIO_BLOCK = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>"}


@family(FAMILIES, audio_prompts, "audio")
def qwen2_audio():
    return build(
        "Qwen2Audio",
        QWEN_AUDIO_TOKENS,
        whisper(),  # the encoder accepts only this length
        processor={"blocks": QWEN_AUDIO_BLOCK},
        audio_config=whisper_audio(model_type="qwen2_audio_encoder"),
        text={"model_type": "qwen2"},
    )


@family(FAMILIES, single_audio_prompts, "audio")
def audioflamingo3():
    """The processor accepts one audio per prompt."""
    audio_config = tower(num_mel_bins=16, max_source_positions=50)
    text = {"model_type": "qwen2"}
    return build("AudioFlamingo3", {"audio": "<sound>"}, whisper(), audio_config=audio_config, text=text)


@family(MORE_FAMILIES, single_audio_prompts, "audio")
def musicflamingo():
    return build(
        "MusicFlamingo",
        {"audio": "<sound>", "audio_bos": "<|sound_bos|>", "audio_eos": "<|sound_eos|>"},
        whisper(),
        audio_config=tower(model_type="audioflamingo3_encoder", num_mel_bins=16, max_source_positions=50),
        text={"model_type": "qwen2"},
    )


@family(MORE_FAMILIES, functools.partial(single_audio_prompts, 2.6), "audio")
def glmasr():
    return build(
        "GlmAsr",
        {"audio": "<|pad|>", "audio_bos": "<|begin_of_audio|>", "audio_eos": "<|end_of_audio|>"},
        whisper(2),  # its 100 frames are 25 tokens
        processor={"blocks": {"audio": "<|begin_of_audio|><|pad|><|end_of_audio|>"}},
        audio_config=tower(intermediate_size=128, num_mel_bins=16),
        text={"model_type": "llama"},
    )


TEKKEN_FOLDER = tempfile.TemporaryDirectory()  # mistral-common reads its vocabulary from a file only


@family(FAMILIES, base64_audio_prompts, "audio")
def voxtral():
    """The processor accepts audio as a path, an address or base64, never as an array."""
    from mistral_common.tokens.tokenizers.base import SpecialTokens  # other families don't need this package

    # The processor expects the audio token at id 24, two after its index in the enumeration
    order = list(SpecialTokens)
    special = [*order[:22], "<SPECIAL_22>", "<SPECIAL_23>", *order[22:25]]  # audio, its beginning, transcription
    tokens = [base64.b64encode(bytes([byte])).decode() for byte in range(256)]
    vocabulary = {
        "config": {
            "pattern": r"\p{L}+|\p{N}|[^\p{L}\p{N}]",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + len(special),
            "default_num_special_tokens": len(special),
            "version": "v7",
        },
        "vocab": [{"rank": i, "token_bytes": token, "token_str": None} for i, token in enumerate(tokens)],
        "special_tokens": [{"rank": i, "token_str": name, "is_control": True} for i, name in enumerate(special)],
        "audio": {
            "sampling_rate": RATE,
            "frame_rate": 2.5,  # 75 tokens in a window of 30 s, instead of 12.5 Hz and 375
            "audio_encoding_config": {"num_mel_bins": 16, "hop_length": 160, "window_size": 400},
            "chunk_length_s": 30.0,
        },
    }
    path = Path(TEKKEN_FOLDER.name, "tekken.json")
    path.write_text(json.dumps(vocabulary))
    words = hf.MistralCommonBackend(path)
    processor = hf.VoxtralProcessor(hf.WhisperFeatureExtractor(feature_size=16), words)
    config = hf.VoxtralConfig(
        audio_config=tower(hidden_size=16, intermediate_size=16 * 1500 // 75, num_attention_heads=2, num_mel_bins=16),
        text_config=decoder(words, model_type="llama", head_dim=16),
        audio_token_id=processor.audio_token_id,
    )
    return instantiate(hf.VoxtralForConditionalGeneration, config, processor)


@pytest.fixture
def mel_extractor(monkeypatch):
    """Registers the substitute extractor of Granite Speech with transformers."""

    class Loadable(MelExtractor):
        def __init__(self, feature_size, **settings):
            super().__init__(feature_size)
            self.padding_side = settings.get("padding_side", self.padding_side)

    Loadable.__name__ = "MelExtractor"
    mapping = hf.models.auto.feature_extraction_auto.FEATURE_EXTRACTOR_MAPPING
    monkeypatch.setattr(mapping, "_extra_content", {hf.GraniteSpeechConfig: Loadable})


class MelExtractor(hf.GraniteSpeechFeatureExtractor):
    """Log-mel features of Granite Speech without torchaudio, whose wheels need CUDA."""

    def __init__(self, mels: int):
        hf.SequenceFeatureExtractor.__init__(self, feature_size=mels, sampling_rate=RATE, padding_value=0.0)
        self.melspec_kwargs = {"hop_length": 160}
        self.projector_window_size = 15
        self.projector_downsample_rate = 5
        self.filters = mel_filter_bank(257, mels, 0, RATE / 2, RATE)

    def __call__(self, audios, device="cpu"):
        padded, lengths = self._get_audios_and_audio_lengths(audios)
        mels = [
            spectrogram(wave.numpy(), np.hanning(400), 400, 160, 512, mel_filters=self.filters, log_mel="log10").T
            for wave in padded
        ]
        mels = torch.tensor(np.stack(mels), dtype=torch.float32)
        mels = mels[:, : mels.shape[1] // 2 * 2] / 4 + 1
        sizes = self._get_num_audio_features(lengths)
        return hf.BatchFeature(
            {
                "input_features": mels.reshape(len(mels), -1, 2 * mels.shape[-1]),
                "audio_embed_sizes": sizes,
                "input_features_mask": torch.arange(max(sizes))[None] < torch.tensor(sizes)[:, None],
            }
        )


@family(FAMILIES, audio_prompts, "audio")
def granite_speech(logits_scaling: float = 1.0):
    """Uses a substitute feature extractor without torchaudio. The processor can't be loaded again."""
    encoder = {"input_dim": 16, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2, "num_heads": 4}
    encoder |= {"dim_head": 8, "output_dim": 8, "context_size": 20, "max_pos_emb": 32}
    projector = {"encoder_hidden_size": 32, "vocab_size": 8, "max_position_embeddings": 8}
    return build(
        "GraniteSpeech",
        {"audio": "<|audio|>"},
        MelExtractor(8),
        text={"model_type": "granite", "logits_scaling": logits_scaling},
        encoder_config=encoder,
        projector_config=tower(model_type="blip_2_qformer", **projector),
        has_lora_adapter=False,
    )


@family(SPECIAL, audio_prompts, "audio")
def granite_speech_scaled():
    """The model scales its logits after the head, like a few families below."""
    return granite_speech(logits_scaling=8.0)


# Images


def of_llava(name: str, images: hf.BaseImageProcessor, text: dict, **settings):
    selected = {"vision_feature_select_strategy": "default"}
    return build(
        name,
        {"image": "<image>"},
        images,
        processor={"patch_size": 7, "num_additional_image_tokens": 1, **selected},
        vision_config=clip_vision(model_type="clip_vision_model"),
        text=text,
        **selected,
        **settings,
    )


@family(FAMILIES, image_prompts, "image")
def llava():
    return of_llava("Llava", hf.CLIPImageProcessor(**CROP), {"model_type": "llama"}, image_seq_length=16)


@family(SPECIAL, image_prompts, "image")
def perception_lm():
    """An image has a thumbnail and as many tiles as fit."""
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 7, "img_size": [28, 28]}
    return build(
        "PerceptionLM",
        {"image": "<|image|>", "video": "<|video|>"},
        hf.PerceptionLMImageProcessor(tile_size=28, max_num_tiles=4, size=SQUARE),
        hf.PerceptionLMVideoProcessor(size=SQUARE),
        processor={"patch_size": 7, "pooling_ratio": 2},
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {**sizes, "global_pool": "", "ref_feat_shape": [4, 4]},
        },
        text={"model_type": "llama"},
        projector_pooling_ratio=2,
    )


@family(SPECIAL, image_prompts, "image")
def llava_gpt_oss():
    """The text model uses attention sinks."""
    text = {"model_type": "gpt_oss", "head_dim": 16, "sliding_window": 16}
    text |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    model, processor = of_llava("Llava", hf.CLIPImageProcessor(**CROP), text, image_seq_length=16)
    for layer in model.get_decoder().layers:
        sinks = layer.self_attn.sinks
        sinks.data.copy_(torch.linspace(-2, 2, len(sinks)))
    return model, processor


@family(SPECIAL, image_prompts, "image")
def llava_next_granite():
    tiles = {"image_grid_pinpoints": TILES}
    text = {"model_type": "granite", "logits_scaling": 8.0}
    return of_llava("LlavaNext", hf.LlavaNextImageProcessor(**CROP, **tiles), text, **tiles)


GEMMA_IMAGE = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}


@family(FAMILIES, image_prompts, "image")
def gemma3():
    window = {"sliding_window": 8}  # shorter than an image, let alone a prompt
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    return build(
        "Gemma3",
        GEMMA_IMAGE,
        hf.Gemma3ImageProcessor(size=SQUARE),
        processor={"image_seq_length": 16, "blocks": {"image": "<start_of_image>"}},
        text={"head_dim": 16, "query_pre_attn_scalar": 16, **window, **layers},
        vision_config=siglip_vision(),
        mm_tokens_per_image=16,
    )


@family(FAMILIES, always_image_prompts, "image")
def paligemma():
    """The checkpoints have no chat template."""
    images = hf.SiglipImageProcessor(size=SQUARE)
    images.image_seq_length = 16
    return build(
        "PaliGemma",
        {"image": "<image>", "bos": "<bos>"},
        images,
        text={"model_type": "gemma", "head_dim": 16},
        vision_config=siglip_vision(),
        vocab_size=len,
        projection_dim=64,
        hidden_size=64,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def idefics2():
    resampler = {"n_latents": 4, "depth": 1, "n_heads": 4, "head_dim": 16}
    return build(
        "Idefics2",
        {"image": "<image>", "image_boundary": "<fake_token_around_image>"},
        hf.Idefics2ImageProcessor(size={"shortest_edge": 28, "longest_edge": 56}),
        processor={"image_seq_len": 4},
        vision_config=clip_vision(image_size=56),
        perceiver_config={f"resampler_{name}": n for name, n in resampler.items()} | {"num_key_value_heads": 2},
        text={"model_type": "mistral", "head_dim": 16},
    )


IDEFICS_TOKENS = {"image": "<image>", "fake_image": "<fake_token_around_image>", "global_image": "<global-img>"}
IDEFICS_SIZES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}


def of_idefics3(name: str, tokens: dict[str, str], *parts):
    return build(
        name,
        {**tokens, **tile_tokens("<row_{}_col_{}>", 3)},
        *parts,
        processor={"image_seq_len": 4},
        vision_config=clip_vision(),
        text={"model_type": "llama"},
        scale_factor=2,
    )


@family(FAMILIES, image_prompts, "image")
def idefics3():
    return of_idefics3("Idefics3", IDEFICS_TOKENS, hf.Idefics3ImageProcessor(**IDEFICS_SIZES))


@family(MORE_FAMILIES, image_or_video_prompts, "image", "video")
def smolvlm():
    """No prompt has both an image and a video, because the processor returns both under one name."""
    pytest.importorskip("num2words", reason="which its processor wants")
    tokens = {"image": "<image>", "video": "<video>", **IDEFICS_TOKENS, "end_of_utterance": "<end_of_utterance>"}
    parts = hf.SmolVLMImageProcessor(**IDEFICS_SIZES), hf.SmolVLMVideoProcessor(**IDEFICS_SIZES)
    return of_idefics3("SmolVLM", tokens, *parts)


@family(SPECIAL, image_prompts, "image")
def lfm2_vl():
    """The processor splits images of more than 8 tokens into tiles of 4."""
    tokens = {"image": "<image>", "image_start": "<|image_start|>", "image_end": "<|image_end|>"}
    sizes = {"min_image_tokens": 2, "max_image_tokens": 8, "tile_size": 56, "max_tiles": 4}
    layers = {"num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}
    return build(
        "Lfm2Vl",
        {**tokens, "image_thumbnail": "<|img_thumbnail|>", **tile_tokens("<|img_row_{}_col_{}|>", 4)},
        hf.Lfm2VlImageProcessor(encoder_patch_size=14, **sizes),
        text={"model_type": "lfm2", **layers, "conv_L_cache": 3, "block_multiple_of": 2},
        vision_config=tower(num_patches=16, patch_size=14),
        projector_hidden_size=32,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def mistral3():
    return build(
        "Mistral3",
        {"image": "[IMG]", "image_break": "[IMG_BREAK]", "image_end": "[IMG_END]"},
        hf.PixtralImageProcessor(size={"longest_edge": 56}, patch_size=14),
        processor={"class": hf.PixtralProcessor, "patch_size": 7, "spatial_merge_size": 2},
        vision_config=clip_vision(image_size=56, model_type="pixtral"),
        text={"model_type": "mistral", "head_dim": 16, "sliding_window": None},
        vision_feature_layer=-1,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def llama4():
    """One layer attends within chunks of 16 tokens. The other scales its queries by position, in steps of 8."""
    tokens = {"start_of_image": "<|image_start|>", "end_of_image": "<|image_end|>", "patch": "<|patch|>"}
    separators = {f"tile_{axis}_separator": f"<|tile_{axis}_separator|>" for axis in "xy"}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2}
    attention = {"head_dim": 16, "no_rope_layers": [1, 0], "attention_chunk_size": 16, "floor_scale": 8}
    projection = {"vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
    return build(
        "Llama4",
        {"image": "<|image|>", **tokens, **separators},
        hf.Llama4ImageProcessor(size=SQUARE, max_patches=4),
        processor={"patch_size": 7, "blocks": {"image": "<|image|>"}},
        text={"intermediate_size_mlp": 96, **experts, **attention},
        vision_config=clip_vision(intermediate_size=128, **projection),
        boi_token_index="start_of_image",
        eoi_token_index="end_of_image",
        image_token_index="patch",
    )


COHERE_TEXT = {"model_type": "cohere2", "logit_scale": 0.25, "sliding_window": 8}
COHERE_TEXT |= {"layer_types": ["sliding_attention", "full_attention"]}


@family(SPECIAL, image_prompts, "image")
def aya_vision():
    tokens = {"img_patch": "<|IMG_PATCH|>", "start_of_img": "<|START_OF_IMG|>", "end_of_img": "<|END_OF_IMG|>"}
    return build(
        "AyaVision",
        {"image": "<image>", **tokens, "tile": "TILE", "tile_global": "TILE_GLOBAL"},
        hf.GotOcr2ImageProcessor(size=SQUARE, max_patches=2),
        processor={"patch_size": 7, "img_size": 28, "downsample_factor": 2},
        vision_config=siglip_vision(),
        text=COHERE_TEXT,
        image_token_index="img_patch",
    )


@family(SPECIAL, image_prompts, "image")
def cohere2_vision():
    ends = {"boi": "<|START_OF_IMG|>", "eoi": "<|END_OF_IMG|>", "img_line_break": "<|IMG_LINE_BREAK|>"}
    return build(
        "Cohere2Vision",
        {"image": "<|IMG_PATCH|>", **ends},
        hf.Cohere2VisionImageProcessor(size=SQUARE, max_patches=2, patch_size=2),
        vision_config=siglip_vision(),
        text=COHERE_TEXT,
        alignment_intermediate_size=64,
    )


@family(SPECIAL, image_prompts, "image")
def chameleon():
    codes = {f"code_{i}": f"IMGIMG{'A' * 4}{chr(ord('A') + i)}Z" for i in range(8)}
    sizes = {"embed_dim": 16, "num_embeddings": 8, "latent_channels": 16, "resolution": 28, "base_channels": 32}
    return build(
        "Chameleon",
        {"image": "<image>", "boi": "<racm3:break>", "eoi": "<eoss>", "sep": "<sep>", **codes},
        hf.ChameleonImageProcessor(**CROP),
        processor={"image_seq_length": 49},
        vq_config={**sizes, "channel_multiplier": [1, 1, 1], "num_res_blocks": 1, "attn_type": "vanilla"},
        vocabulary_map=lambda words: words.get_vocab(),
    )


@family(MORE_FAMILIES, image_prompts, "image")
def ovis2():
    indicators = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    named = dict(zip(("start", "grid", "column", "row", "end"), indicators, strict=True))
    return build(
        "Ovis2",
        {"image": "<image>", "atom": "<IMG_ATOM>", **named},
        hf.Ovis2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=4),
        processor={"image_seq_length": 4},
        vision_config=clip_vision(vocab_size=32, hidden_stride=2),
        text={"model_type": "qwen2"},
        image_token_id="atom",
        visual_indicator_token_ids=lambda words: words.convert_tokens_to_ids(indicators),
        vocab_size=len,
        hidden_size=64,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def kimi_k25():
    """
    No prompt has a video, because the model's forward pass fails on any video that it pools over time. Heads of
    queries are 1.5 times as long as heads of values, as in the checkpoints.
    """
    image = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    tokens = {"image": "<|media_pad|>", "video": "<|kimi_k25_video_placeholder|>"}
    tokens |= {name: f"<|media_{name}|>" for name in ("begin", "content", "end")}
    ranks = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
    experts = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **ROUTED_EXPERTS}
    return build(
        "Kimi_K25",
        tokens,
        hf.Kimi_K25ImageProcessor(),
        hf.Kimi_K25VideoProcessor(do_sample_frames=False),
        processor={"blocks": {"image": image, "video": tokens["video"]}},
        text={"model_type": "deepseek_v3", "num_key_value_heads": 4, **ranks, **experts},
        vision_config=tower(pos_emb_height=8, pos_emb_width=8),
        projection_hidden_size=32,
        vision_start_token_id="begin",
        vision_end_token_id="end",
        tie_word_embeddings=False,
    )


def of_deepseek(name: str, images: hf.BaseImageProcessor, **settings):
    return build(
        name,
        {"image": "<image_placeholder>"},
        images,
        processor={"num_image_tokens": 16},
        vision_config=siglip_vision(),
        text={"model_type": "llama"},
        tie_word_embeddings=False,
        **settings,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def deepseek_vl():
    return of_deepseek("DeepseekVL", hf.DeepseekVLImageProcessor(size=SQUARE))


@family(MORE_FAMILIES, image_prompts, "image")
def deepseek_vl_hybrid():
    sam = {"hidden_size": 32, "output_channels": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 64}
    sam |= {"image_size": 56, "patch_size": 7, "window_size": 4, "global_attn_indexes": [1], "initializer_range": 0.02}
    images = hf.DeepseekVLHybridImageProcessor(size=SQUARE, high_res_size=square(56))
    return of_deepseek("DeepseekVLHybrid", images, high_res_vision_config={"model_type": "sam_vision_model", **sam})


# Images and videos


QWEN_VISION_TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
QWEN_VISION_TOKENS |= {"vision_bos": "<|vision_start|>", "vision_eos": "<|vision_end|>"}
QWEN_VISION_BLOCKS = {kind: f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video")}
QWEN_VISION_IDS = {
    "vision_start_token_id": "vision_bos",
    "vision_end_token_id": "vision_eos",
}
QWEN2_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
QWEN3_ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
QWEN2_5_VISION = {**QWEN_VISION, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]}
QWEN3_5_VISION = {**QWEN_VISION, "out_hidden_size": 64, "num_position_embeddings": 64}
QWEN3_VISION = {**QWEN3_5_VISION, "deepstack_visual_indexes": [0, 1]}


def qwen_pixels(cell: int) -> dict[str, int]:
    """Returns the pixels of the smallest and the largest image: 1 and 24 tokens of `cell` x `cell` pixels."""
    return {"shortest_edge": cell * cell, "longest_edge": 24 * cell * cell}


def of_qwen2_vl(name: str, vision: dict):
    pixels = {"size": qwen_pixels(28)}
    parts = hf.Qwen2VLImageProcessor(**pixels), hf.Qwen2VLVideoProcessor(**pixels)
    options = {"processor": {"blocks": QWEN_VISION_BLOCKS}, "text": {"rope_parameters": QWEN2_ROPE}}
    return build(name, QWEN_VISION_TOKENS, *parts, vision_config=vision, **options, **QWEN_VISION_IDS)


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    return of_qwen2_vl("Qwen2VL", vision)


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen2_5_vl():
    return of_qwen2_vl("Qwen2_5_VL", QWEN2_5_VISION)


def of_qwen3_vl(name: str, vision: dict, scale: float = 6.0, **text):
    images = hf.Qwen2VLImageProcessor(size=qwen_pixels(32), patch_size=16, merge_size=2)
    parts = images, hf.Qwen3VLVideoProcessor(size=qwen_pixels(32))
    options = {"processor": {"class": hf.Qwen3VLProcessor, "blocks": QWEN_VISION_BLOCKS}, "text": text}
    return build(name, QWEN_VISION_TOKENS, *parts, scale=scale, vision_config=vision, **options, **QWEN_VISION_IDS)


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen3_vl():
    return of_qwen3_vl("Qwen3VL", QWEN3_VISION, head_dim=16, rope_parameters=QWEN3_ROPE)


def qwen3_vl_processor() -> hf.Qwen3VLProcessor:
    return fresh(qwen3_vl)[1]


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen3_vl_moe():
    routing = {**EXPERTS, **RELEASED_ROUTING, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    return of_qwen3_vl("Qwen3VLMoe", QWEN3_VISION, head_dim=16, rope_parameters=QWEN3_ROPE, **routing)


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen3_5(layer_types=("linear_attention", "full_attention"), experts: bool = False, scale: float = 6.0):
    """Half of the layers use linear attention."""
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text = {"head_dim": 32, "rope_parameters": rope, **LINEAR_ATTENTION}
    text |= {"num_hidden_layers": len(layer_types), "layer_types": list(layer_types)}
    if experts:
        return of_qwen3_vl("Qwen3_5Moe", QWEN3_5_VISION, scale, **text, **EXPERTS, shared_expert_intermediate_size=32)
    return of_qwen3_vl("Qwen3_5", QWEN3_5_VISION, scale, **text)


@family(SPECIAL, image_video_prompts, "image", "video")
def qwen3_5_deep(experts: bool = False):
    """Linear attention comes before and after attention. Weights are smaller, as rounding grows with each layer."""
    layers = ("linear_attention", "linear_attention", "full_attention", "linear_attention")
    return qwen3_5(layers, experts, scale=3.0)


@family(SPECIAL, image_video_prompts, "image", "video")
def qwen3_5_moe():
    return qwen3_5_deep(experts=True)


@family(MORE_FAMILIES, image_video_prompts, "image", "video")
def minicpmv4_6():
    tokens = {"image": "<|image_pad|>", "video": "<|video_pad|>", "image_start": "<image>", "image_end": "</image>"}
    tokens |= {"slice_start": "<slice>", "slice_end": "</slice>"}
    tokens |= {"image_id_start": "<image_id>", "image_id_end": "</image_id>"}
    sizes = {"scale_resolution": 112, "max_slice_nums": 2, "patch_size": 14}
    layers = {"layer_types": ["linear_attention", "full_attention"], **LINEAR_ATTENTION}
    return build(
        "MiniCPMV4_6",
        tokens,
        hf.MiniCPMV4_6ImageProcessor(**sizes),
        hf.MiniCPMV4_6VideoProcessor(**sizes, do_sample_frames=False),
        text={"model_type": "qwen3_5_text", "head_dim": 32, **layers},
        vision_config=clip_vision(image_size=112, patch_size=14),
        insert_layer_id=0,
    )


@family(MORE_FAMILIES, image_video_prompts, "image", "video")
def ernie4_5_vl_moe():
    tokens = {}
    blocks = {}
    for kind in ("image", "video"):
        mark = kind.upper()
        start = f"<|{mark}_START|>"
        end = f"<|{mark}_END|>"
        tokens[kind] = f"<|{mark}_PLACEHOLDER|>"
        tokens |= {f"{kind}_start": start, f"{kind}_end": end}
        blocks[kind] = f"{start}{tokens[kind]}{end}"
    rope = {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]}
    experts = {"num_experts": 4, "k": 2, "num_shared_experts": 1, "intermediate_size": [48, 48]}
    return build(
        "Ernie4_5_VLMoe",
        tokens,
        hf.Ernie4_5_VLMoeImageProcessor(size=qwen_pixels(28)),
        # The font for times on frames is a file of the checkpoint
        hf.Ernie4_5_VLMoeVideoProcessor(size=qwen_pixels(28), do_sample_frames=False, draw_on_frames=False),
        processor={"blocks": blocks},
        text={"rope_parameters": rope, **{f"moe_{name}": value for name, value in experts.items()}},
        vision_config=QWEN_VISION,
        tie_word_embeddings=False,
    )


GLM_VISION = {**QWEN_VISION, "image_size": 56, "out_hidden_size": 64}


def of_glm(name: str, processor: str, vision: dict = GLM_VISION, **text):
    """No prompt has both an image and a video, because the two share a token, and the model miscounts them."""
    pixels = {"size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 24 * 28 * 28}}
    tokens = {"image": "<|image|>", "video": "<|video|>", "boi": "<|begin_of_image|>", "eoi": "<|end_of_image|>"}
    tokens |= {"bov": "<|begin_of_video|>", "eov": "<|end_of_video|>"}
    blocks = {kind: f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>" for kind in ("image", "video")}
    return build(
        name,
        tokens,
        getattr(hf, f"{processor}ImageProcessor")(**pixels),
        getattr(hf, f"{processor}VideoProcessor")(**pixels, do_sample_frames=False),
        processor={"class": getattr(hf, f"{processor}Processor"), "blocks": blocks},
        text={"rope_parameters": {**QWEN2_ROPE, "partial_rotary_factor": 1.0}, **text},
        vision_config=vision,
        image_start_token_id="boi",
        image_end_token_id="eoi",
        video_start_token_id="bov",
        video_end_token_id="eov",
    )


@family(FAMILIES, image_or_video_prompts, "image", "video")
def glm4v():
    return of_glm("Glm4v", "Glm4v")


@family(MORE_FAMILIES, image_or_video_prompts, "image", "video")
def glm4v_moe():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    return of_glm("Glm4vMoe", "Glm4v", head_dim=16, rope_parameters=rope, **ROUTED_EXPERTS)


@family(MORE_FAMILIES, image_or_video_prompts, "image", "video")
def glm46v():
    return of_glm("Glm46V", "Glm46V", {**GLM_VISION, "model_type": "glm4v_vision"}, model_type="glm4v_text")


@family(FAMILIES, image_video_prompts, "image", "video")
def internvl():
    ends = {"start_image": "<img>", "end_image": "</img>"}
    return build(
        "InternVL",
        {**ends, "context_image": "<IMG_CONTEXT>", "video": "<video>"},
        hf.GotOcr2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=3),
        hf.InternVLVideoProcessor(size=SQUARE),
        processor={"image_seq_length": 4, "blocks": {"image": "<IMG_CONTEXT>", "video": "<video>"}},
        vision_config=clip_vision(image_size=[28, 28], patch_size=[7, 7]),
        text={"model_type": "qwen2"},
        image_token_id="context_image",
        image_seq_length=4,
        tie_word_embeddings=False,
    )


@family(FAMILIES, image_video_prompts, "image", "video")
def llava_onevision():
    tiles = {"image_grid_pinpoints": TILES}
    return build(
        "LlavaOnevision",
        {"image": "<image>", "video": "<video>"},
        hf.LlavaOnevisionImageProcessor(size=SQUARE, **tiles),
        hf.LlavaOnevisionVideoProcessor(size=SQUARE),
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        vision_config=siglip_vision(),
        text={"model_type": "qwen2"},
        **tiles,
    )


# Sounds and vision


QWEN_OMNI_TOKENS = {**QWEN_VISION_TOKENS, **QWEN_AUDIO_TOKENS}
QWEN_OMNI_BLOCKS = {**QWEN_AUDIO_BLOCK, **QWEN_VISION_BLOCKS}


@family(FAMILIES, omni_prompts, "image", "audio", "video")
def qwen2_5_omni():
    """The thinker alone, which reads and writes text."""
    return build(
        "Qwen2_5OmniThinker",
        QWEN_OMNI_TOKENS,
        hf.Qwen2VLImageProcessor(size=qwen_pixels(28)),
        hf.Qwen2VLVideoProcessor(do_resize=False),  # the processor overrides `size` with at least 128 tokens
        whisper(),
        processor={"class": hf.Qwen2_5OmniProcessor, "blocks": QWEN_OMNI_BLOCKS},
        text={"rope_parameters": QWEN2_ROPE},
        vision_config=QWEN2_5_VISION,
        audio_config=whisper_audio(n_window=20, output_dim=64),
        audio_start_token_id="audio_bos",
        audio_end_token_id="audio_eos",
        vision_start_token_id="vision_bos",  # the model reads this setting, but the config class has no such field
    )


@family(FAMILIES, functools.partial(omni_prompts, 32), "image", "audio", "video")
def qwen3_omni_moe():
    """The thinker alone, which reads and writes text."""
    patches = {"patch_size": 16, "merge_size": 2}
    return build(
        "Qwen3OmniMoeThinker",
        QWEN_OMNI_TOKENS,
        hf.Qwen2VLImageProcessor(size=qwen_pixels(32), **patches),
        hf.Qwen2VLVideoProcessor(do_resize=False, **patches),
        whisper(2),
        processor={"class": hf.Qwen3OmniMoeProcessor, "blocks": QWEN_OMNI_BLOCKS},
        scale=7.0,  # its three convolutions attenuate the audio
        text={
            **{"head_dim": 16, "rope_parameters": QWEN3_ROPE, "router_aux_loss_coef": 0.1},
            **EXPERTS,
            **RELEASED_ROUTING,
        },
        vision_config={**QWEN3_VISION, **RELEASED_VISION},
        audio_config=whisper_audio(downsample_hidden_size=16, output_dim=64),
        audio_start_token_id="audio_bos",
        vision_start_token_id="vision_bos",
    )


GEMMA_TEXT = {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 3, "num_kv_shared_layers": 1}
GEMMA_TEXT |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
GEMMA_TEXT |= {"hidden_size_per_layer_input": 8}


@family(FAMILIES, image_audio_prompts, "image", "audio")
def gemma3n():
    """The vision tower is a small ConvNeXt of timm, because the config can't shrink timm's MobileNetV5."""
    sound = {"audio": "<audio_soft_token>", "boa": "<start_of_audio>", "eoa": "<end_of_audio>"}
    layers = {"conf_num_attention_heads": 4, "conf_num_hidden_layers": 2, "sscp_conv_channel_size": [8, 4]}

    def vocabulary(words) -> int:
        return len(words) - 16  # the last ids use the embeddings of the vision and of the audio tower

    vocabulary_settings = {"vocab_size": 8, "vocab_offset": vocabulary}
    return build(
        "Gemma3n",
        {**GEMMA_IMAGE, **sound},
        hf.Gemma3nAudioFeatureExtractor(feature_size=16),
        hf.SiglipImageProcessor(size=square(96)),
        processor={"audio_seq_length": 8, "image_seq_length": 9},
        text={"vocab_size_per_layer_input": vocabulary, "laurel_rank": 8, "altup_num_inputs": 2, **GEMMA_TEXT},
        vision_config={"architecture": "test_convnext", "hidden_size": 64, **vocabulary_settings},
        audio_config={
            **{"input_feat_size": 16, "hidden_size": 32, **layers, **vocabulary_settings},
            "vocab_offset": lambda words: vocabulary(words) + 8,
        },
        audio_soft_tokens_per_image=8,
        vision_soft_tokens_per_image=9,
    )


@family(FAMILIES, image_audio_prompts, "image", "audio")
def gemma4():
    """An image has at least 70 tokens."""
    tokens = {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>"}
    tokens |= {"audio": "<|audio|>", "boa": "<|audio>", "eoa": "<audio|>", "video": "<|video|>"}
    sizes = {"patch_size": 4, "max_soft_tokens": 70}  # the minimum
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return build(
        "Gemma4",
        tokens,
        hf.Gemma4AudioFeatureExtractor(feature_size=16),
        hf.Gemma4ImageProcessor(**sizes),
        hf.Gemma4VideoProcessor(**sizes, do_sample_frames=False),
        text={
            "global_head_dim": 32,
            "vocab_size_per_layer_input": len,
            "use_bidirectional_attention": "vision",
            **GEMMA_TEXT,
        },
        vision_config=tower(**heads, patch_size=4, position_embedding_size=256),
        audio_config={**layers, "subsampling_conv_channels": [16, 4], "output_proj_dims": 32},
    )


@family(FAMILIES, phi4_prompts, "image", "audio")
def phi4_multimodal():
    """Loading the processor loses its chat template. An image has at least 290 tokens."""
    audio = {"hidden_size": 32, "intermediate_size": 64, "num_blocks": 2, "num_attention_heads": 4, "input_size": 16}
    audio |= {"ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 16}
    return build(
        "Phi4Multimodal",
        {"image": "<|image|>", "audio": "<|audio|>"},
        # The processor supports only 32 x 32 patches in a crop
        hf.Phi4MultimodalImageProcessor(size=square(64), patch_size=2, dynamic_hd=2),
        hf.Phi4MultimodalFeatureExtractor(feature_size=16),
        vision_config=clip_vision(image_size=64, crop_size=64, patch_size=2, image_token_id="image"),
        audio_config={**audio, "audio_token_id": "audio"},
    )


@family(SPECIAL, audio_prompts, "audio")
def inkling():
    marks = {"image": "<|content_image|><|image|>", "audio": "<|content_audio_input|><|audio|>"}
    heads = {"head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
    attention = {"sliding_window_size": 16, "d_rel": 4, "rel_extent": 32, "local_layer_ids": [0]}
    layers = {"mlp_layer_types": ["dense", "sparse"], "n_shared_experts": 1, "logits_mup_width_multiplier": 4.0}
    tokens = {"image": "<|image|>", "audio": "<|audio|>"}
    return build(
        "Inkling",
        {**tokens, "image_bos": "<|content_image|>", "audio_bos": "<|content_audio_input|>"},
        hf.InklingFeatureExtractor(feature_size=16),
        hf.InklingImageProcessor(size=square(40)),
        processor={"num_dmel_bins": 8, "blocks": marks},
        text={**heads, **attention, **layers, **ROUTED_EXPERTS},
        audio_config={"n_mel_bins": 16, "mel_vocab_size": 8},
        vision_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    )


@family(SPECIAL, image_video_prompts, "image", "video", since="5.24")
def hy_v4_vl():
    """Layers attend to keys that an indexer chooses. With fewer heads of the indexer, many keys would tie at 0."""
    ranks = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}
    index = {"index_n_heads": 32, "index_head_dim": 16, "index_topk": 8, "rope_parameters": QWEN2_ROPE}
    return build(
        "HYV4VL",
        QWEN_VISION_TOKENS,
        hf.HYV4VLImageProcessor(patch_size=7, size={"shortest_edge": 28 * 28, "longest_edge": 112 * 112}),
        hf.HYV4VLVideoProcessor(patch_size=7),
        processor={"blocks": QWEN_VISION_BLOCKS},
        text={**ranks, **index, **ROUTED_EXPERTS},
        vision_config=tower(patch_size=7, max_image_size=112, out_hidden_size=64),
    )


@family(SPECIAL, image_prompts, "image", since="5.24")
def inkling2_loop():
    """The second layer runs three times, each time with other keys and values."""
    heads = {"head_dim": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
    attention = {"sliding_window_size": 16, "d_rel": 4, "rel_extent": 32, "unpadded_vocab_size": len}
    loop = {"loop_layer_index_start": 1, "loop_layer_index_end": 2, "loop_gate_rank": 8}
    layers = {"num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]}
    return build(
        "Inkling2Loop",
        {"image": "<|image|>"},
        hf.Inkling2ImageProcessor(size=square(28)),
        processor={"class": hf.Inkling2Processor},
        text={**heads, **attention, **loop, **layers, **ROUTED_EXPERTS, "n_layers_per_attn_res_block": 1},
        vision_config=tower(patch_size=14, projection_hidden_dim=64, text_hidden_size=64, posemb_grid_size=8),
    )


@family(MORE_FAMILIES, image_audio_prompts, "image", "audio", since="5.24")
def apertus1p5():
    """Images and sounds become codes with ids after the words. The head has no rows for these codes."""
    tokens = {"image": "<|image|>", "boi": "<|img_start|>", "eoi": "<|img_end|>", "eol": "<|img_end_of_row|>"}
    tokens |= {"image_wrapper": "<|img_token_start|>", "audio": "<|audio|>", "boa": "<|audio_start|>"}
    codec = {"num_filters": 8, "hidden_size": 32, "codebook_dim": 32, "codebook_size": 64, "num_lstm_layers": 1}
    codes = {"codebook_size": 8, "embed_dim": 16, "latent_channels": 16, "base_channels": 32, "num_res_blocks": 1}
    model, processor = build(
        "Apertus1p5",
        {**tokens, "eoa": "<|audio_end|>"},
        hf.Apertus1p5ImageProcessor(spatial_factor=4, size={"min_pixels": 16 * 16, "max_pixels": 28 * 28}),
        hf.WavTokenizerFeatureExtractor(normalize_audio=True, target_peak_dB_FS=24.0),
        text={"vocab_size": lambda words: len(words) + 72, "output_vocab_size": len},
        vision_config={**codes, "channel_multiplier": [1, 1, 1], "resolution": 28},
        audio_config={"model_type": "wavtokenizer_encoder", **codec},
        image_token_offset=len,
        audio_token_offset=lambda words: len(words) + 8,
    )
    model.model.audio_tokenizer.quantizer.codebook.embed.normal_(std=0.03)  # all codes of a random model are 0
    return model, processor


@family(MORE_FAMILIES, single_audio_prompts, "audio", since="5.24")
def omniasr():
    kernels = [10, 3, 3, 3, 3, 2, 2]
    strides = [8, 4, 4, 2, 2, 2, 2]
    convolutions = {"conv_dim": [16] * 7, "conv_kernel": kernels, "conv_stride": strides}
    positions = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    return build(
        "OmniASR",
        {"audio": "<extra_id_1>"},
        hf.OmniASRFeatureExtractor(),
        processor={"audio_token": "<extra_id_1>", "conv_kernel": kernels, "conv_stride": strides},
        text={"model_type": "llama"},
        audio_config=tower(model_type="omniasr_audio", **convolutions, **positions),
    )


ALL_FAMILIES = {**FAMILIES, **SPECIAL, **MORE_FAMILIES}

# For tests that assert the same of every family: the default run has these, the slow run has all
ONE_OF_EACH_KIND = {"qwen2_audio", "qwen2_5_vl", "qwen2_5_omni", "qwen3_5", "gemma3"}


def every_family(names: Iterable[str] = FAMILIES) -> list:
    """Returns parameters of a test of every family, slow for all families that the default run leaves out."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in ONE_OF_EACH_KIND)) for name in names]
