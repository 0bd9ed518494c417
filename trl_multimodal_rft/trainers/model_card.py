# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a model card says, and code that asks the model."""

from collections.abc import Sequence
from importlib.metadata import version

from ..media.encoding import MODALITIES


_VERSIONS = {
    "trl-multimodal-rft": "trl-multimodal-rft",
    "TRL": "trl",
    "Transformers": "transformers",
    "PyTorch": "torch",
    "Datasets": "datasets",
    "Tokenizers": "tokenizers",
}

# For each kind, what is imported, how a file is read, and the block of the message
_MEDIA = {
    "image": ("import PIL.Image", 'image = PIL.Image.open("image.png")', '{"type": "image", "image": image}'),
    "audio": (
        "import soundfile",
        'audio, rate = soundfile.read("audio.wav", dtype="float32")  # mono, at the rate of the processor',
        '{"type": "audio", "audio": audio}',
    ),
    "video": ("", "", '{"type": "video", "video": "video.mp4"}'),
}


def quick_start(
    model_class: str, folder: str, kinds: Sequence[str], max_new_tokens: int, base_model: str | None
) -> str:
    """
    Code that asks a model about files, complete but for the files.

    Args:
        model_class (`str`):
            Class of transformers.
        folder (`str`):
            Folder or repository of the model, or of its adapter.
        kinds (`Sequence[str]`):
            Media of a question, of `"image"`, `"audio"` and `"video"`.
        max_new_tokens (`int`):
            Length of an answer at most.
        base_model (`str`, *optional*):
            Folder or repository of the model without its adapter, where there is one.

    Returns:
        `str`: The code.
    """
    imports, reads, blocks = (
        (filter(None, column) for column in zip(*(_MEDIA[kind] for kind in kinds), strict=True))
        if kinds
        else ([], [], [])
    )
    lines = [*imports]
    processor = "AutoProcessor" if kinds else "AutoTokenizer"
    if base_model is not None:
        lines.append("from peft import PeftModel")
    lines += [f"from transformers import {', '.join(sorted([processor, model_class]))}", ""]
    loaded = f'{model_class}.from_pretrained("{base_model or folder}")'
    lines.append(
        f"model = {loaded}" if base_model is None else f'model = PeftModel.from_pretrained({loaded}, "{folder}")'
    )
    lines += [f'processor = {processor}.from_pretrained("{folder}")', *reads]
    question = '{"type": "text", "text": "What is this?"}' if kinds else '"What is this?"'
    content = f"[{', '.join([*blocks, question])}]" if kinds else question
    lines += [
        f'messages = [{{"role": "user", "content": {content}}}]',
        "inputs = processor.apply_chat_template(",
        '    [messages], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True',
        ").to(model.device)",
        f"output = model.generate(**inputs, max_new_tokens={max_new_tokens})",
        'answer = output[0, inputs["input_ids"].size(1) :]',
        "print(processor.decode(answer, skip_special_tokens=True))",
    ]
    return "\n".join(lines)


def card_values(trainer, kinds: set[str], dataset_columns: Sequence[str], base_model: str | None) -> dict:
    """
    What the template is filled with, beside what TRL knows.

    Args:
        trainer (`MultimodalMixin`):
            Trainer of the model.
        kinds (`set[str]`):
            Media that the prompts had.
        dataset_columns (`Sequence[str]`):
            Columns of the training data.
        base_model (`str`, *optional*):
            What an adapter is for, if it is one.

    Returns:
        `dict`: Values by their names in the template.
    """
    args, ordered = trainer.args, [kind for kind in MODALITIES if kind in kinds]
    model_class = type(trainer._unwrapped(trainer.model)).__name__
    paper = f"[{trainer._paper['title']}](https://huggingface.co/papers/{trainer._paper['id']})"
    training = [("Method", f"{trainer._name}, {paper}")]
    options = args.to_dict()
    for name in ("advantage_estimator", "loss_type", "beta", "learning_rate", "num_generations", "temperature"):
        if name in options:
            training.append((f"`{name}`", f"`{options[name]}`"))
    training += [
        ("Rewards", ", ".join(f"`{name}`" for name in trainer.reward_func_names)),
        ("Updates", trainer.state.global_step),
    ]
    return {
        "columns": ", ".join(f"`{name}`" for name in dataset_columns),
        "kinds": " and ".join(["text", *ordered]),
        "model_class": model_class,
        "quick_start": quick_start(
            model_class, trainer.hub_model_id or args.output_dir, ordered, trainer.max_completion_length, base_model
        ),
        "training": training,
        "versions": [(name, version(package)) for name, package in _VERSIONS.items()],
        "trainer_name": trainer._name,
        "citation": trainer._paper["citation"],
        "self_check": trainer._self_check,
    }
