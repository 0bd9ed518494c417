# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Tiny random models of real transformers architectures, each with its real processor, all built without a network.

A family is a function below [`family`], which names its table, its prompts and what they hold. Every model has fewer
than a million parameters, two or three decoder layers and a small vocabulary, and its weights are scaled up after a
seeded initialisation: with the usual small weights attention is nearly uniform and media hardly reach the logits, so
that a wrong mask, a wrong position or a lost image would go unnoticed.
"""

import base64
import copy
import functools
import json
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as hf
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
    """One architecture."""

    name: str
    builder: Callable[[], tuple[hf.PreTrainedModel, hf.ProcessorMixin]]
    prompts: Callable[[], list[list[dict]]]
    modalities: tuple[str, ...]

    def build(self) -> tuple[hf.PreTrainedModel, hf.ProcessorMixin]:
        """A fresh `(model, processor)`: float32, in evaluation mode, the same weights at every call."""
        return fresh(self.builder)

    @property
    def model_class(self) -> type[hf.PreTrainedModel]:
        return type(_made(self.builder)[0][0])

    def save(self, folder: str | Path) -> Path:
        """Saves model and processor, so that both can be loaded from `folder`."""
        model, processor = self.build()
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return Path(folder)


@functools.cache
def _made(make: Callable) -> tuple:
    """What a function without arguments makes, and torch's random state after it."""
    return make(), torch.get_rng_state()


def fresh(make: Callable):
    """A copy of what `make()` returns, which is called once in a process; torch's random state is as after a call."""
    made, state = _made(make)
    torch.set_rng_state(state)
    return copy.deepcopy(made)


FAMILIES: dict[str, Family] = {}  # over which the tests of the packing and of the trainers run
MORE_FAMILIES: dict[str, Family] = {}  # further ones
SPECIAL: dict[str, Family] = {}  # that something is special about, for the tests of that alone


def family(table: dict[str, Family], prompts: Callable, *modalities: str) -> Callable:
    """Puts what a function builds into a table, by the function's name."""

    def add(builder: Callable) -> Callable:
        table[builder.__name__] = Family(builder.__name__, builder, prompts, modalities)
        return builder

    return add


def encode(processor: hf.ProcessorMixin, messages: list[dict], **options) -> hf.BatchFeature:
    """Turns one chat into model inputs of batch size 1, ending where the assistant is to answer."""
    return processor.apply_chat_template(
        [messages], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True, **options
    )


# Tokenizers and templates


def tokenizer(**named: str) -> hf.PreTrainedTokenizerFast:
    """Byte-level BPE tokenizer with ChatML tokens and `named` ones, such as `image_token="<image>"`."""
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


def ids(words: hf.PreTrainedTokenizerFast, *names: str) -> dict[str, int]:
    """Settings such as `image_token_id`, for `"image"`, where config and tokenizer have the same name for a token."""
    return {f"{name}_token_id": getattr(words, f"{name}_token_id") for name in names}


def tile_tokens(mark: str, side: int) -> dict[str, str]:
    """Tokens of the tiles of an image, by row and column."""
    return {
        f"row_{row}_col_{column}_token": mark.format(row, column)
        for row in range(1, side + 1)
        for column in range(1, side + 1)
    }


def template(**placeholders: str) -> str:
    """ChatML template that writes `placeholders[type]` for a content block of another type than text."""
    blocks = "".join(f"{{% elif block.type == '{kind}' %}}{mark}" for kind, mark in placeholders.items())
    return (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for block in message.content %}"
        "{% if block.type == 'text' %}{{ block.text }}" + blocks + "{% endif %}{% endfor %}{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


# Models


def instantiate(model_class: type, config: hf.PreTrainedConfig, processor: hf.ProcessorMixin, scale: float = 6.0):
    """Seeded model with scaled weights whose special token ids are the tokenizer's; returns `(model, processor)`."""
    torch.manual_seed(0)
    model = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2 and not parameter.any():  # such as the image projection of Gemma 3
                parameter.normal_(std=0.1)
            elif parameter.ndim >= 2 and parameter.abs().max() < 0.5:
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
    """Settings that the text configs of most families share."""
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


def build(model_class: type, processor: hf.ProcessorMixin, scale: float = 6.0, **settings):
    """The model that `settings` make, and its processor, whose template by default writes the token of each medium."""
    words = processor.tokenizer
    if processor.chat_template is None:
        kinds = [kind for kind in ("image", "audio", "video") if hasattr(words, f"{kind}_token")]
        processor.chat_template = template(**{kind: getattr(words, f"{kind}_token") for kind in kinds})
    config = model_class.config_class(**copy.deepcopy(settings))  # configs write into what they are given
    return instantiate(model_class, config, processor, scale)


def tower(**changes) -> dict:
    """Settings that most towers share."""
    return {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **changes}


def clip_vision(**changes) -> dict:
    return tower(**{"image_size": 28, "patch_size": 7, **changes})


def siglip_vision() -> dict:
    return clip_vision(model_type="siglip_vision_model", vision_use_head=False)


def whisper_audio(**changes) -> dict:
    return {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 64,
        "num_mel_bins": 16,
        "max_source_positions": 50,  # 1 s
        **changes,
    }


SQUARE = {"height": 28, "width": 28}
CROP = {"size": {"shortest_edge": 28}, "crop_size": SQUARE}
TILES = [[28, 28], [28, 56], [56, 28], [56, 56]]

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR_ATTENTION = {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


# Sounds


@family(FAMILIES, audio_prompts, "audio")
def qwen2_audio():
    words = tokenizer(audio_token="<|AUDIO|>", audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>")
    processor = hf.Qwen2AudioProcessor(
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1),  # the encoder accepts no other length
        words,
        chat_template=template(audio="<|audio_bos|><|AUDIO|><|audio_eos|>"),
    )
    return build(
        hf.Qwen2AudioForConditionalGeneration,
        processor,
        audio_config=whisper_audio(model_type="qwen2_audio_encoder"),
        text_config=decoder(words, model_type="qwen2"),
        audio_token_index=words.audio_token_id,
    )


@family(FAMILIES, single_audio_prompts, "audio")
def audioflamingo3():
    """The processor takes one audio per prompt."""
    words = tokenizer(audio_token="<sound>")
    processor = hf.AudioFlamingo3Processor(hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1), words)
    return build(
        hf.AudioFlamingo3ForConditionalGeneration,
        processor,
        audio_config=tower(num_mel_bins=16, max_source_positions=50),
        text_config=decoder(words, model_type="qwen2"),
        audio_token_id=words.audio_token_id,
    )


@family(MORE_FAMILIES, single_audio_prompts, "audio")
def musicflamingo():
    words = tokenizer(audio_token="<sound>", audio_bos_token="<|sound_bos|>", audio_eos_token="<|sound_eos|>")
    processor = hf.MusicFlamingoProcessor(hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1), words)
    return build(
        hf.MusicFlamingoForConditionalGeneration,
        processor,
        audio_config=tower(model_type="audioflamingo3_encoder", num_mel_bins=16, max_source_positions=50),
        text_config=decoder(words, model_type="qwen2"),
        **ids(words, "audio", "audio_bos", "audio_eos"),
    )


@family(MORE_FAMILIES, functools.partial(single_audio_prompts, 2.6), "audio")
def glmasr():
    words = tokenizer(audio_token="<|pad|>", audio_bos_token="<|begin_of_audio|>", audio_eos_token="<|end_of_audio|>")
    processor = hf.GlmAsrProcessor(
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=2),  # its 100 frames are 25 tokens
        words,
        chat_template=template(audio="<|begin_of_audio|><|pad|><|end_of_audio|>"),
    )
    return build(
        hf.GlmAsrForConditionalGeneration,
        processor,
        audio_config=tower(intermediate_size=128, num_mel_bins=16),
        text_config=decoder(words, model_type="llama"),
        audio_token_id=words.audio_token_id,
    )


TEKKEN_FOLDER = tempfile.TemporaryDirectory()  # mistral-common reads its vocabulary from a file only


@family(FAMILIES, base64_audio_prompts, "audio")
def voxtral():
    """The processor takes audio by path, address or base64, never as an array."""
    from mistral_common.tokens.tokenizers.base import SpecialTokens  # which nothing else here needs

    # The processor looks for the audio token at id 24, two after the place that it has in the enumeration
    order = list(SpecialTokens)
    special = [*order[:22], "<SPECIAL_22>", "<SPECIAL_23>", *order[22:25]]  # audio, its beginning, transcription
    vocabulary = {
        "config": {
            "pattern": r"\p{L}+|\p{N}|[^\p{L}\p{N}]",
            "num_vocab_tokens": 256,
            "default_vocab_size": 256 + len(special),
            "default_num_special_tokens": len(special),
            "version": "v7",
        },
        "vocab": [
            {"rank": byte, "token_bytes": base64.b64encode(bytes([byte])).decode(), "token_str": None}
            for byte in range(256)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(special)
        ],
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
    """Lets transformers load the substitute extractor of Granite Speech."""

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
        self.projector_window_size, self.projector_downsample_rate = 15, 5
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
    """The feature extractor is a substitute without torchaudio, so the processor cannot be loaded again."""
    words = tokenizer(audio_token="<|audio|>")
    return build(
        hf.GraniteSpeechForConditionalGeneration,
        hf.GraniteSpeechProcessor(MelExtractor(8), words),
        text_config=decoder(words, model_type="granite", logits_scaling=logits_scaling),
        encoder_config={
            "input_dim": 16,
            "num_layers": 2,
            "hidden_dim": 32,
            "feedforward_mult": 2,
            "num_heads": 4,
            "dim_head": 8,
            "output_dim": 8,
            "context_size": 20,
            "max_pos_emb": 32,
        },
        projector_config=tower(
            model_type="blip_2_qformer", encoder_hidden_size=32, vocab_size=8, max_position_embeddings=8
        ),
        audio_token_index=words.audio_token_id,
        has_lora_adapter=False,
    )


@family(SPECIAL, audio_prompts, "audio")
def granite_speech_scaled():
    """Whose logits are scaled behind the head, as are those of a few below."""
    return granite_speech(logits_scaling=8.0)


# Images


def of_llava(model_class: type, processor_class: type, images: hf.BaseImageProcessor, text: dict, **settings):
    words = tokenizer(image_token="<image>")
    selected = {"vision_feature_select_strategy": "default"}
    processor = processor_class(images, words, patch_size=7, num_additional_image_tokens=1, **selected)
    return build(
        model_class,
        processor,
        vision_config=clip_vision(model_type="clip_vision_model"),
        text_config=decoder(words, **text),
        image_token_index=words.image_token_id,
        **selected,
        **settings,
    )


@family(FAMILIES, image_prompts, "image")
def llava():
    images, text = hf.CLIPImageProcessor(**CROP), {"model_type": "llama"}
    return of_llava(hf.LlavaForConditionalGeneration, hf.LlavaProcessor, images, text, image_seq_length=16)


@family(SPECIAL, image_prompts, "image")
def perception_lm():
    """An image is a thumbnail and as many tiles as fit it."""
    words = tokenizer(image_token="<|image|>", video_token="<|video|>")
    images = hf.PerceptionLMImageProcessor(tile_size=28, max_num_tiles=4, size={"height": 28, "width": 28})
    processor = hf.PerceptionLMProcessor(
        image_processor=images,
        video_processor=hf.PerceptionLMVideoProcessor(size={"height": 28, "width": 28}),
        tokenizer=words,
        patch_size=7,
        pooling_ratio=2,
    )
    sizes = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 7, "img_size": [28, 28]}
    return build(
        hf.PerceptionLMForConditionalGeneration,
        processor,
        vision_config={
            "model_type": "timm_wrapper",
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {**sizes, "global_pool": "", "ref_feat_shape": [4, 4]},
        },
        text_config=decoder(words, model_type="llama"),
        projector_pooling_ratio=2,
        **ids(words, "image", "video"),
    )


@family(SPECIAL, image_prompts, "image")
def llava_gpt_oss():
    """With attention sinks."""
    images, text = hf.CLIPImageProcessor(**CROP), {"model_type": "gpt_oss", "head_dim": 16, "sliding_window": 16}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    model, processor = of_llava(
        hf.LlavaForConditionalGeneration, hf.LlavaProcessor, images, {**text, **experts}, image_seq_length=16
    )
    for layer in model.get_decoder().layers:
        layer.self_attn.sinks.data.copy_(torch.linspace(-2, 2, 4))
    return model, processor


@family(SPECIAL, image_prompts, "image")
def llava_next_granite():
    tiles, text = {"image_grid_pinpoints": TILES}, {"model_type": "granite", "logits_scaling": 8.0}
    images = hf.LlavaNextImageProcessor(**CROP, **tiles)
    return of_llava(hf.LlavaNextForConditionalGeneration, hf.LlavaNextProcessor, images, text, **tiles)


@family(FAMILIES, image_prompts, "image")
def gemma3():
    words = tokenizer(image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>")
    processor = hf.Gemma3Processor(
        hf.Gemma3ImageProcessor(size=SQUARE),
        words,
        image_seq_length=16,
        chat_template=template(image="<start_of_image>"),
    )
    return build(
        hf.Gemma3ForConditionalGeneration,
        processor,
        text_config=decoder(
            words,
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,  # shorter than an image, let alone a prompt
            layer_types=["sliding_attention", "full_attention"],
        ),
        vision_config=siglip_vision(),
        mm_tokens_per_image=16,
        image_token_index=words.image_token_id,
        boi_token_index=words.boi_token_id,
        eoi_token_index=words.eoi_token_id,
    )


@family(FAMILIES, always_image_prompts, "image")
def paligemma():
    """The checkpoints have no chat template."""
    words = tokenizer(image_token="<image>", bos_token="<bos>")
    images = hf.SiglipImageProcessor(size=SQUARE)
    images.image_seq_length = 16
    return build(
        hf.PaliGemmaForConditionalGeneration,
        hf.PaliGemmaProcessor(images, words),
        text_config=decoder(words, model_type="gemma", head_dim=16),
        vision_config=siglip_vision(),
        image_token_index=words.image_token_id,
        vocab_size=len(words),
        projection_dim=64,
        hidden_size=64,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def idefics2():
    words = tokenizer(image_token="<image>", image_boundary_token="<fake_token_around_image>")
    words.add_special_tokens({"additional_special_tokens": ["<end_of_utterance>"]})  # which the processor adds
    processor = hf.Idefics2Processor(
        hf.Idefics2ImageProcessor(size={"shortest_edge": 28, "longest_edge": 56}), words, image_seq_len=4
    )
    return build(
        hf.Idefics2ForConditionalGeneration,
        processor,
        vision_config=clip_vision(image_size=56),
        perceiver_config={
            "resampler_n_latents": 4,
            "resampler_depth": 1,
            "resampler_n_heads": 4,
            "resampler_head_dim": 16,
            "num_key_value_heads": 2,
        },
        text_config=decoder(words, model_type="mistral", head_dim=16),
        image_token_id=words.image_token_id,
    )


IDEFICS_SIZES = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}


def idefics3_settings(words: hf.PreTrainedTokenizerFast) -> dict:
    return {
        "vision_config": clip_vision(),
        "text_config": decoder(words, model_type="llama"),
        "image_token_id": words.image_token_id,
        "scale_factor": 2,
        "pad_token_id": words.pad_token_id,
    }


@family(FAMILIES, image_prompts, "image")
def idefics3():
    words = tokenizer(
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        **tile_tokens("<row_{}_col_{}>", 3),
    )
    processor = hf.Idefics3Processor(hf.Idefics3ImageProcessor(**IDEFICS_SIZES), words, image_seq_len=4)
    return build(hf.Idefics3ForConditionalGeneration, processor, **idefics3_settings(words))


@family(MORE_FAMILIES, image_or_video_prompts, "image", "video")
def smolvlm():
    """No prompt has both an image and a video: the processor returns both by one name."""
    pytest.importorskip("num2words", reason="which its processor wants")
    words = tokenizer(
        image_token="<image>",
        video_token="<video>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
        **tile_tokens("<row_{}_col_{}>", 3),
    )
    processor = hf.SmolVLMProcessor(
        hf.SmolVLMImageProcessor(**IDEFICS_SIZES), words, hf.SmolVLMVideoProcessor(**IDEFICS_SIZES), image_seq_len=4
    )
    return build(hf.SmolVLMForConditionalGeneration, processor, **idefics3_settings(words))


@family(SPECIAL, image_prompts, "image")
def lfm2_vl():
    """Images of more than 8 tokens are split in tiles of 4."""
    words = tokenizer(
        image_token="<image>",
        image_start_token="<|image_start|>",
        image_end_token="<|image_end|>",
        image_thumbnail_token="<|img_thumbnail|>",
        **tile_tokens("<|img_row_{}_col_{}|>", 4),
    )
    processor = hf.Lfm2VlProcessor(
        hf.Lfm2VlImageProcessor(
            encoder_patch_size=14, min_image_tokens=2, max_image_tokens=8, tile_size=56, max_tiles=4
        ),
        words,
    )
    return build(
        hf.Lfm2VlForConditionalGeneration,
        processor,
        text_config=decoder(
            words,
            model_type="lfm2",
            num_hidden_layers=3,
            layer_types=["conv", "full_attention", "conv"],
            conv_L_cache=3,
            block_multiple_of=2,
        ),
        vision_config=tower(num_patches=16, patch_size=14),
        image_token_id=words.image_token_id,
        projector_hidden_size=32,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def mistral3():
    words = tokenizer(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    processor = hf.PixtralProcessor(
        hf.PixtralImageProcessor(size={"longest_edge": 56}, patch_size=14), words, patch_size=7, spatial_merge_size=2
    )
    return build(
        hf.Mistral3ForConditionalGeneration,
        processor,
        vision_config=clip_vision(image_size=56, model_type="pixtral"),
        text_config=decoder(words, model_type="mistral", head_dim=16, sliding_window=None),
        image_token_index=words.image_token_id,
        vision_feature_layer=-1,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def llama4():
    """One layer sees chunks of 16 tokens, the other scales its queries by their place, of which 8 count as one."""
    words = tokenizer(
        image_token="<|image|>",
        start_of_image_token="<|image_start|>",
        end_of_image_token="<|image_end|>",
        patch_token="<|patch|>",
        tile_x_separator_token="<|tile_x_separator|>",
        tile_y_separator_token="<|tile_y_separator|>",
    )
    images = hf.Llama4ImageProcessor(size=SQUARE, max_patches=4)
    processor = hf.Llama4Processor(images, words, patch_size=7, chat_template=template(image="<|image|>"))
    return build(
        hf.Llama4ForConditionalGeneration,
        processor,
        text_config=decoder(
            words,
            head_dim=16,
            intermediate_size_mlp=96,
            num_local_experts=4,
            num_experts_per_tok=1,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 0],
            attention_chunk_size=16,
            floor_scale=8,
        ),
        vision_config=clip_vision(
            intermediate_size=128, vision_output_dim=64, projector_input_dim=64, projector_output_dim=64
        ),
        boi_token_index=words.start_of_image_token_id,
        eoi_token_index=words.end_of_image_token_id,
        image_token_index=words.patch_token_id,
    )


def cohere_text(words: hf.PreTrainedTokenizerFast) -> dict:
    layers = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    return decoder(words, model_type="cohere2", logit_scale=0.25, **layers)


@family(SPECIAL, image_prompts, "image")
def aya_vision():
    words = tokenizer(
        image_token="<image>",
        img_patch_token="<|IMG_PATCH|>",
        start_of_img_token="<|START_OF_IMG|>",
        end_of_img_token="<|END_OF_IMG|>",
        tile_token="TILE",
        tile_global_token="TILE_GLOBAL",
    )
    processor = hf.AyaVisionProcessor(
        hf.GotOcr2ImageProcessor(size=SQUARE, max_patches=2), words, patch_size=7, img_size=28, downsample_factor=2
    )
    return build(
        hf.AyaVisionForConditionalGeneration,
        processor,
        vision_config=siglip_vision(),
        text_config=cohere_text(words),
        image_token_index=words.img_patch_token_id,
    )


@family(SPECIAL, image_prompts, "image")
def cohere2_vision():
    words = tokenizer(
        image_token="<|IMG_PATCH|>",
        boi_token="<|START_OF_IMG|>",
        eoi_token="<|END_OF_IMG|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )
    processor = hf.Cohere2VisionProcessor(
        hf.Cohere2VisionImageProcessor(size=SQUARE, max_patches=2, patch_size=2), words
    )
    return build(
        hf.Cohere2VisionForConditionalGeneration,
        processor,
        vision_config=siglip_vision(),
        text_config=cohere_text(words),
        image_token_id=words.image_token_id,
        alignment_intermediate_size=64,
    )


@family(SPECIAL, image_prompts, "image")
def chameleon():
    names = {f"code_{i}_token": f"IMGIMG{'A' * 4}{chr(ord('A') + i)}Z" for i in range(8)}
    words = tokenizer(image_token="<image>", boi_token="<racm3:break>", eoi_token="<eoss>", sep_token="<sep>", **names)
    processor = hf.ChameleonProcessor(hf.ChameleonImageProcessor(**CROP), words, image_seq_length=49)
    return build(
        hf.ChameleonForConditionalGeneration,
        processor,
        **decoder(words),
        vq_config={
            "embed_dim": 16,
            "num_embeddings": 8,
            "latent_channels": 16,
            "resolution": 28,
            "base_channels": 32,
            "channel_multiplier": [1, 1, 1],
            "num_res_blocks": 1,
            "attn_type": "vanilla",
        },
        vocabulary_map=words.get_vocab(),
    )


@family(MORE_FAMILIES, image_prompts, "image")
def ovis2():
    words = tokenizer(
        image_token="<image>",
        atom_token="<IMG_ATOM>",
        start_token="<IMG_START>",
        grid_token="<IMG_GRID>",
        column_token="<IMG_COL>",
        row_token="<IMG_ROW>",
        end_token="<IMG_END>",
    )
    processor = hf.Ovis2Processor(
        hf.Ovis2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=4), words, image_seq_length=4
    )
    return build(
        hf.Ovis2ForConditionalGeneration,
        processor,
        vision_config=clip_vision(vocab_size=32, hidden_stride=2),
        text_config=decoder(words, model_type="qwen2"),
        image_token_id=words.atom_token_id,
        visual_indicator_token_ids=words.convert_tokens_to_ids(
            ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
        ),
        vocab_size=len(words),
        hidden_size=64,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def kimi_k25():
    """No video: the model's forward fails on any that it pools over time."""
    words = tokenizer(
        image_token="<|media_pad|>",
        video_token="<|kimi_k25_video_placeholder|>",
        begin_token="<|media_begin|>",
        content_token="<|media_content|>",
        end_token="<|media_end|>",
    )
    processor = hf.Kimi_K25Processor(
        hf.Kimi_K25ImageProcessor(),
        words,
        hf.Kimi_K25VideoProcessor(do_sample_frames=False),
        chat_template=template(
            image="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
            video="<|kimi_k25_video_placeholder|>",
        ),
    )
    return build(
        hf.Kimi_K25ForConditionalGeneration,
        processor,
        text_config=decoder(
            words,
            model_type="deepseek_v3",
            num_key_value_heads=4,
            q_lora_rank=32,
            kv_lora_rank=32,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=16,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            **ROUTED_EXPERTS,
        ),
        vision_config=tower(pos_emb_height=8, pos_emb_width=8),
        projection_hidden_size=32,
        **ids(words, "image", "video"),
        vision_start_token_id=words.begin_token_id,
        vision_end_token_id=words.end_token_id,
        tie_word_embeddings=False,
    )


def of_deepseek(model_class: type, processor_class: type, images: hf.BaseImageProcessor, **settings):
    words = tokenizer(image_token="<image_placeholder>")
    processor = processor_class(images, words, num_image_tokens=16)
    return build(
        model_class,
        processor,
        vision_config=siglip_vision(),
        text_config=decoder(words, model_type="llama"),
        image_token_id=words.image_token_id,
        tie_word_embeddings=False,
        **settings,
    )


@family(MORE_FAMILIES, image_prompts, "image")
def deepseek_vl():
    images = hf.DeepseekVLImageProcessor(size=SQUARE)
    return of_deepseek(hf.DeepseekVLForConditionalGeneration, hf.DeepseekVLProcessor, images)


@family(MORE_FAMILIES, image_prompts, "image")
def deepseek_vl_hybrid():
    return of_deepseek(
        hf.DeepseekVLHybridForConditionalGeneration,
        hf.DeepseekVLHybridProcessor,
        hf.DeepseekVLHybridImageProcessor(size=SQUARE, high_res_size={"height": 56, "width": 56}),
        high_res_vision_config={
            "model_type": "sam_vision_model",
            "hidden_size": 32,
            "output_channels": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 56,
            "patch_size": 7,
            "window_size": 4,
            "global_attn_indexes": [1],
            "mlp_dim": 64,
            "initializer_range": 0.02,
        },
    )


# Images and videos


QWEN_VISION_TOKENS = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
}
QWEN_VISION_TEMPLATE = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
QWEN2_ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}
QWEN3_ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4}
QWEN2_5_VISION = {**QWEN_VISION, "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1]}
QWEN3_5_VISION = {**QWEN_VISION, "out_hidden_size": 64, "num_position_embeddings": 64}
QWEN3_VISION = {**QWEN3_5_VISION, "deepstack_visual_indexes": [0, 1]}


def qwen_vision_ids(words: hf.PreTrainedTokenizerFast) -> dict[str, int]:
    return {
        **ids(words, "image", "video"),
        "vision_start_token_id": words.vision_bos_token_id,
        "vision_end_token_id": words.vision_eos_token_id,
    }


def qwen_pixels(cell: int) -> dict[str, int]:
    """Limits of the resizing, from 1 to 24 cells of `cell` x `cell` pixels; a cell is one token."""
    return {"shortest_edge": cell * cell, "longest_edge": 24 * cell * cell}


def of_qwen2_vl(model_class: type, processor_class: type, vision: dict):
    words = tokenizer(**QWEN_VISION_TOKENS)
    processor = processor_class(
        hf.Qwen2VLImageProcessor(size=qwen_pixels(28)),
        words,
        hf.Qwen2VLVideoProcessor(size=qwen_pixels(28)),
        chat_template=template(**QWEN_VISION_TEMPLATE),
    )
    return build(
        model_class,
        processor,
        text_config=decoder(words, rope_parameters=QWEN2_ROPE),
        vision_config=vision,
        **qwen_vision_ids(words),
    )


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2}
    return of_qwen2_vl(hf.Qwen2VLForConditionalGeneration, hf.Qwen2VLProcessor, vision)


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen2_5_vl():
    return of_qwen2_vl(hf.Qwen2_5_VLForConditionalGeneration, hf.Qwen2_5_VLProcessor, QWEN2_5_VISION)


def qwen3_vl_processor() -> hf.Qwen3VLProcessor:
    return hf.Qwen3VLProcessor(
        hf.Qwen2VLImageProcessor(size=qwen_pixels(32), patch_size=16, merge_size=2),
        tokenizer(**QWEN_VISION_TOKENS),
        hf.Qwen3VLVideoProcessor(size=qwen_pixels(32)),
        chat_template=template(**QWEN_VISION_TEMPLATE),
    )


def of_qwen3_vl(model_class: type, vision: dict, scale: float = 6.0, **text):
    processor = qwen3_vl_processor()
    words = processor.tokenizer
    text_config = decoder(words, **text)
    return build(
        model_class, processor, scale, text_config=text_config, vision_config=vision, **qwen_vision_ids(words)
    )


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen3_vl():
    text = {"head_dim": 16, "rope_parameters": QWEN3_ROPE}
    return of_qwen3_vl(hf.Qwen3VLForConditionalGeneration, QWEN3_VISION, **text)


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen3_vl_moe():
    routing = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    text = {"head_dim": 16, "rope_parameters": QWEN3_ROPE, **EXPERTS, **routing}
    return of_qwen3_vl(hf.Qwen3VLMoeForConditionalGeneration, QWEN3_VISION, **text)


@family(FAMILIES, image_video_prompts, "image", "video")
def qwen3_5(layer_types=("linear_attention", "full_attention"), experts: bool = False, scale: float = 6.0):
    """Half of the layers are linear attention."""
    return of_qwen3_vl(
        hf.Qwen3_5MoeForConditionalGeneration if experts else hf.Qwen3_5ForConditionalGeneration,
        QWEN3_5_VISION,
        scale,
        head_dim=32,
        rope_parameters={"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        num_hidden_layers=len(layer_types),
        layer_types=list(layer_types),
        **LINEAR_ATTENTION,
        **({**EXPERTS, "shared_expert_intermediate_size": 32} if experts else {}),
    )


@family(SPECIAL, image_video_prompts, "image", "video")
def qwen3_5_deep(experts: bool = False):
    """With states before and after attention. Weights are smaller, as rounding grows with each layer."""
    layers = ("linear_attention", "linear_attention", "full_attention", "linear_attention")
    return qwen3_5(layers, experts, scale=3.0)


@family(SPECIAL, image_video_prompts, "image", "video")
def qwen3_5_moe():
    return qwen3_5_deep(experts=True)


@family(MORE_FAMILIES, image_video_prompts, "image", "video")
def minicpmv4_6():
    words = tokenizer(
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
        image_start_token="<image>",
        image_end_token="</image>",
        slice_start_token="<slice>",
        slice_end_token="</slice>",
        image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )
    sizes = {"scale_resolution": 112, "max_slice_nums": 2, "patch_size": 14}
    processor = hf.MiniCPMV4_6Processor(
        image_processor=hf.MiniCPMV4_6ImageProcessor(**sizes),
        video_processor=hf.MiniCPMV4_6VideoProcessor(**sizes, do_sample_frames=False),
        tokenizer=words,
    )
    return build(
        hf.MiniCPMV4_6ForConditionalGeneration,
        processor,
        text_config=decoder(
            words,
            model_type="qwen3_5_text",
            head_dim=32,
            layer_types=["linear_attention", "full_attention"],
            **LINEAR_ATTENTION,
        ),
        vision_config=clip_vision(image_size=112, patch_size=14),
        insert_layer_id=0,
        **ids(words, "image", "video"),
    )


@family(MORE_FAMILIES, image_video_prompts, "image", "video")
def ernie4_5_vl_moe():
    words = tokenizer(
        image_token="<|IMAGE_PLACEHOLDER|>",
        image_start_token="<|IMAGE_START|>",
        image_end_token="<|IMAGE_END|>",
        video_token="<|VIDEO_PLACEHOLDER|>",
        video_start_token="<|VIDEO_START|>",
        video_end_token="<|VIDEO_END|>",
    )
    processor = hf.Ernie4_5_VLMoeProcessor(
        hf.Ernie4_5_VLMoeImageProcessor(size=qwen_pixels(28)),
        words,
        # its font for times is a file of the checkpoint
        hf.Ernie4_5_VLMoeVideoProcessor(size=qwen_pixels(28), do_sample_frames=False, draw_on_frames=False),
        chat_template=template(
            image="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
            video="<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>",
        ),
    )
    return build(
        hf.Ernie4_5_VLMoeForConditionalGeneration,
        processor,
        text_config=decoder(
            words,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]},
            moe_num_experts=4,
            moe_k=2,
            moe_num_shared_experts=1,
            moe_intermediate_size=[32, 32],
        ),
        vision_config=QWEN_VISION,
        **ids(words, "image", "image_start", "image_end", "video", "video_start", "video_end"),
        tie_word_embeddings=False,
    )


GLM_PIXELS = {"shortest_edge": 2 * 28 * 28, "longest_edge": 24 * 28 * 28}
GLM_VISION = {**QWEN_VISION, "image_size": 56, "out_hidden_size": 64}


def of_glm(model_class: type, processor_class: type, images: type, videos: type, vision: dict = GLM_VISION, **text):
    """No prompt has both an image and a video: they share a token, and the model then miscounts."""
    words = tokenizer(
        image_token="<|image|>",
        video_token="<|video|>",
        boi_token="<|begin_of_image|>",
        eoi_token="<|end_of_image|>",
        bov_token="<|begin_of_video|>",
        eov_token="<|end_of_video|>",
    )
    processor = processor_class(
        images(size=GLM_PIXELS),
        words,
        videos(size=GLM_PIXELS, do_sample_frames=False),
        chat_template=template(
            image="<|begin_of_image|><|image|><|end_of_image|>", video="<|begin_of_video|><|video|><|end_of_video|>"
        ),
    )
    return build(
        model_class,
        processor,
        text_config=decoder(words, **{"rope_parameters": {**QWEN2_ROPE, "partial_rotary_factor": 1.0}, **text}),
        vision_config=vision,
        **ids(words, "image", "video"),
        image_start_token_id=words.boi_token_id,
        image_end_token_id=words.eoi_token_id,
        video_start_token_id=words.bov_token_id,
        video_end_token_id=words.eov_token_id,
    )


@family(FAMILIES, image_or_video_prompts, "image", "video")
def glm4v():
    parts = hf.Glm4vProcessor, hf.Glm4vImageProcessor, hf.Glm4vVideoProcessor
    return of_glm(hf.Glm4vForConditionalGeneration, *parts)


@family(MORE_FAMILIES, image_or_video_prompts, "image", "video")
def glm4v_moe():
    parts = hf.Glm4vProcessor, hf.Glm4vImageProcessor, hf.Glm4vVideoProcessor
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    return of_glm(hf.Glm4vMoeForConditionalGeneration, *parts, head_dim=16, rope_parameters=rope, **ROUTED_EXPERTS)


@family(MORE_FAMILIES, image_or_video_prompts, "image", "video")
def glm46v():
    parts = hf.Glm46VProcessor, hf.Glm46VImageProcessor, hf.Glm46VVideoProcessor
    vision = {**GLM_VISION, "model_type": "glm4v_vision"}
    return of_glm(hf.Glm46VForConditionalGeneration, *parts, vision, model_type="glm4v_text")


@family(FAMILIES, image_video_prompts, "image", "video")
def internvl():
    words = tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    processor = hf.InternVLProcessor(
        hf.GotOcr2ImageProcessor(size=SQUARE, crop_to_patches=True, max_patches=3),
        words,
        hf.InternVLVideoProcessor(size=SQUARE),
        image_seq_length=4,
        chat_template=template(image="<IMG_CONTEXT>", video="<video>"),
    )
    return build(
        hf.InternVLForConditionalGeneration,
        processor,
        vision_config=clip_vision(image_size=[28, 28], patch_size=[7, 7]),
        text_config=decoder(words, model_type="qwen2"),
        image_token_id=words.context_image_token_id,
        image_seq_length=4,
        tie_word_embeddings=False,
    )


@family(FAMILIES, image_video_prompts, "image", "video")
def llava_onevision():
    words = tokenizer(image_token="<image>", video_token="<video>")
    processor = hf.LlavaOnevisionProcessor(
        hf.LlavaOnevisionImageProcessor(size=SQUARE, image_grid_pinpoints=TILES),
        words,
        hf.LlavaOnevisionVideoProcessor(size=SQUARE),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
    )
    return build(
        hf.LlavaOnevisionForConditionalGeneration,
        processor,
        vision_config=siglip_vision(),
        text_config=decoder(words, model_type="qwen2"),
        image_token_index=words.image_token_id,
        video_token_index=words.video_token_id,
        image_grid_pinpoints=TILES,
    )


# Sounds and what is seen


QWEN_OMNI_TOKENS = {
    **QWEN_VISION_TOKENS,
    "audio_token": "<|AUDIO|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
QWEN_OMNI_TEMPLATE = {"audio": "<|audio_bos|><|AUDIO|><|audio_eos|>", **QWEN_VISION_TEMPLATE}


@family(FAMILIES, omni_prompts, "image", "audio", "video")
def qwen2_5_omni():
    """The thinker alone, which is the part that reads and writes text."""
    words = tokenizer(**QWEN_OMNI_TOKENS)
    processor = hf.Qwen2_5OmniProcessor(
        hf.Qwen2VLImageProcessor(size=qwen_pixels(28)),
        hf.Qwen2VLVideoProcessor(do_resize=False),  # the processor overrides `size` with at least 128 tokens
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=1),
        words,
        chat_template=template(**QWEN_OMNI_TEMPLATE),
    )
    return build(
        hf.Qwen2_5OmniThinkerForConditionalGeneration,
        processor,
        text_config=decoder(words, rope_parameters=QWEN2_ROPE),
        vision_config=QWEN2_5_VISION,
        audio_config=whisper_audio(n_window=20, output_dim=64),
        audio_token_index=words.audio_token_id,
        audio_start_token_id=words.audio_bos_token_id,
        audio_end_token_id=words.audio_eos_token_id,
        image_token_index=words.image_token_id,
        video_token_index=words.video_token_id,
        vision_start_token_id=words.vision_bos_token_id,  # no field of this config class, but the model reads it
    )


@family(FAMILIES, functools.partial(omni_prompts, 32), "image", "audio", "video")
def qwen3_omni_moe():
    """The thinker alone, which is the part that reads and writes text."""
    words = tokenizer(**QWEN_OMNI_TOKENS)
    processor = hf.Qwen3OmniMoeProcessor(
        hf.Qwen2VLImageProcessor(size=qwen_pixels(32), patch_size=16, merge_size=2),
        hf.Qwen2VLVideoProcessor(do_resize=False, patch_size=16, merge_size=2),
        hf.WhisperFeatureExtractor(feature_size=16, chunk_length=2),
        words,
        chat_template=template(**QWEN_OMNI_TEMPLATE),
    )
    return build(
        hf.Qwen3OmniMoeThinkerForConditionalGeneration,
        processor,
        scale=7.0,  # its three convolutions attenuate the audio
        text_config=decoder(words, head_dim=16, rope_parameters=QWEN3_ROPE, router_aux_loss_coef=0.1, **EXPERTS),
        vision_config=QWEN3_VISION,
        audio_config=whisper_audio(downsample_hidden_size=16, output_dim=64),
        **ids(words, "audio", "image", "video"),
        audio_start_token_id=words.audio_bos_token_id,
        vision_start_token_id=words.vision_bos_token_id,
    )


GEMMA_TEXT = {
    "head_dim": 16,
    "sliding_window": 8,
    "num_hidden_layers": 3,
    "num_kv_shared_layers": 1,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "hidden_size_per_layer_input": 8,
}


@family(FAMILIES, image_audio_prompts, "image", "audio")
def gemma3n():
    """The vision tower is a small ConvNeXt of timm: timm's MobileNetV5 cannot be made tiny through the config."""
    words = tokenizer(
        image_token="<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        audio_token="<audio_soft_token>",
        boa_token="<start_of_audio>",
        eoa_token="<end_of_audio>",
    )
    processor = hf.Gemma3nProcessor(
        hf.Gemma3nAudioFeatureExtractor(feature_size=16),
        hf.SiglipImageProcessor(size={"height": 96, "width": 96}),
        words,
        audio_seq_length=8,
        image_seq_length=9,
    )
    text_vocabulary = len(words) - 16  # the last ids go through the embeddings of the vision and of the audio tower
    return build(
        hf.Gemma3nForConditionalGeneration,
        processor,
        text_config=decoder(
            words, vocab_size_per_layer_input=text_vocabulary, laurel_rank=8, altup_num_inputs=2, **GEMMA_TEXT
        ),
        vision_config={
            "architecture": "test_convnext",
            "hidden_size": 64,
            "vocab_size": 8,
            "vocab_offset": text_vocabulary,
        },
        audio_config={
            "input_feat_size": 16,
            "hidden_size": 32,
            "conf_num_attention_heads": 4,
            "conf_num_hidden_layers": 2,
            "sscp_conv_channel_size": [8, 4],
            "vocab_size": 8,
            "vocab_offset": text_vocabulary + 8,
        },
        audio_soft_tokens_per_image=8,
        vision_soft_tokens_per_image=9,
        **ids(words, "image", "audio", "boi", "eoi", "boa", "eoa"),
    )


@family(FAMILIES, image_audio_prompts, "image", "audio")
def gemma4():
    """70 tokens is the least an image can have."""
    words = tokenizer(
        image_token="<|image|>",
        boi_token="<|image>",
        eoi_token="<image|>",
        audio_token="<|audio|>",
        boa_token="<|audio>",
        eoa_token="<audio|>",
        video_token="<|video|>",
    )
    processor = hf.Gemma4Processor(
        hf.Gemma4AudioFeatureExtractor(feature_size=16),
        hf.Gemma4ImageProcessor(patch_size=4, max_soft_tokens=70),  # 70 is the least that it accepts
        words,
        hf.Gemma4VideoProcessor(patch_size=4, max_soft_tokens=70, do_sample_frames=False),
    )
    return build(
        hf.Gemma4ForConditionalGeneration,
        processor,
        text_config=decoder(
            words,
            global_head_dim=16,
            vocab_size_per_layer_input=len(words),
            use_bidirectional_attention="vision",
            **GEMMA_TEXT,
        ),
        vision_config=tower(
            num_attention_heads=2, num_key_value_heads=2, head_dim=16, patch_size=4, position_embedding_size=256
        ),
        audio_config={
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [16, 4],
            "output_proj_dims": 32,
        },
        **ids(words, "image", "boi", "eoi", "audio", "boa", "video"),
        eoa_token_index=words.eoa_token_id,
    )


@family(FAMILIES, phi4_prompts, "image", "audio")
def phi4_multimodal():
    """Loading the processor loses its chat template; an image has at least 290 tokens."""
    words = tokenizer(image_token="<|image|>", audio_token="<|audio|>")
    processor = hf.Phi4MultimodalProcessor(
        # 32 x 32 patches in a crop: the processor counts tokens for these only
        hf.Phi4MultimodalImageProcessor(size={"height": 64, "width": 64}, patch_size=2, dynamic_hd=2),
        hf.Phi4MultimodalFeatureExtractor(feature_size=16),
        words,
    )
    return build(
        hf.Phi4MultimodalForCausalLM,
        processor,
        **decoder(words),
        vision_config=clip_vision(image_size=64, crop_size=64, patch_size=2, image_token_id=words.image_token_id),
        audio_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_blocks": 2,
            "num_attention_heads": 4,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
            "nemo_conv_channels": 16,
            "input_size": 16,
            "audio_token_id": words.audio_token_id,
        },
    )


@family(SPECIAL, audio_prompts, "audio")
def inkling():
    words = tokenizer(
        image_token="<|image|>",
        audio_token="<|audio|>",
        image_bos_token="<|content_image|>",
        audio_bos_token="<|content_audio_input|>",
    )
    processor = hf.InklingProcessor(
        hf.InklingFeatureExtractor(feature_size=16),
        hf.InklingImageProcessor(size={"height": 40, "width": 40}),
        words,
        num_dmel_bins=8,
        chat_template=template(image="<|content_image|><|image|>", audio="<|content_audio_input|><|audio|>"),
    )
    return build(
        hf.InklingForConditionalGeneration,
        processor,
        text_config=decoder(
            words,
            head_dim=16,
            swa_num_attention_heads=4,
            swa_num_key_value_heads=2,
            swa_head_dim=16,
            sliding_window_size=16,
            d_rel=4,
            rel_extent=32,
            local_layer_ids=[0],
            mlp_layer_types=["dense", "sparse"],
            n_shared_experts=1,
            logits_mup_width_multiplier=4.0,
            **ROUTED_EXPERTS,
        ),
        audio_config={"n_mel_bins": 16, "mel_vocab_size": 8},
        vision_config={"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
        **ids(words, "image", "audio", "image_bos", "audio_bos"),
    )


ALL_FAMILIES = {**FAMILIES, **SPECIAL, **MORE_FAMILIES}

# In the default run of tests that say the same of every family; the slow run has all
ONE_OF_EACH_KIND = {"qwen2_audio", "qwen2_5_vl", "qwen2_5_omni", "qwen3_5", "gemma3", "phi4_multimodal"}


def every_family(names: Iterable[str] = FAMILIES) -> list:
    """Parameters of a test that says the same of every family."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in ONE_OF_EACH_KIND)) for name in names]
