# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Errors for models and processors that can't be loaded by their names."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import is_offline_mode
from safetensors import SafetensorError, safe_open

from ..data.reading.decoding import install
from ..paths import similar_names


_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json", "tokenizer.json")
# Extras of this project that install packages, by package
_EXTRAS = {"torchvision": "image", "bitsandbytes": "quantization", "peft": "peft", "flash_attn": "flash-attn"}
SHARDS = "pytorch_model_fsdp_0"  # folder of weights in shards, as accelerate names it
# Endings of files of weights
_WEIGHTS = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json", ".gguf", ".pt")
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def check_model_folder(name: str, subfolder: str = "") -> None:
    """Raises an `OSError` if a local path holds no model, or a damaged model."""
    folder = os.path.join(name, subfolder) if subfolder else name
    if not os.path.isdir(name):
        if os.path.isfile(name):
            raise FileNotFoundError(f"The model {name!r} is a file; name the folder that holds it.")
        if _is_path(name):
            raise FileNotFoundError(
                f"The model {name!r} can't be loaded: there is no such folder.{_similar_paths(name)}"
            )
        return  # may be a name on the Hub
    if holds_model(folder):
        check_weights(folder)
        return
    files = set(os.listdir(folder)) if os.path.isdir(folder) else set()
    remedy = "name a folder that `save_pretrained` wrote"
    # Subfolders with models, such as checkpoints. The error names the last three
    subfolders = sorted(file for file in files if os.path.isfile(os.path.join(folder, file, "config.json")))
    if "adapter_config.json" in files:
        remedy = "it holds an adapter; pass its base model, wrapped by `PeftModel.from_pretrained(base, folder)`"
    elif SHARDS in files:
        remedy = f"it holds shards; run `accelerate merge-weights {os.path.join(folder, SHARDS)} {folder}`"
    elif subfolders:
        remedy = (
            f"it holds {', '.join(map(repr, subfolders[-3:]))}; "
            f"name one, such as {os.path.join(name, subfolders[-1])!r}"
        )
    missing = "weights (*.safetensors)" if "config.json" in files else "config.json"
    raise FileNotFoundError(f"The model {folder!r} can't be loaded: the folder has no {missing}; {remedy}.")


def holds_model(folder: str) -> bool:
    """Returns whether a path is a folder with a model, not with an adapter alone."""
    files = os.listdir(folder) if os.path.isdir(folder) else []
    weights = (file for file in files if file.endswith(_WEIGHTS) and not file.startswith("adapter_"))
    return "config.json" in files and any(weights)


def check_weights(folder: str) -> None:
    """Raises an `OSError` if a folder has damaged safetensors, or a damaged index of safetensors."""
    for path in (*Path(folder).glob("*.safetensors"), *Path(folder).glob("*.safetensors.index.json")):
        try:
            safe_open(path, "pt") if path.suffix == ".safetensors" else json.loads(path.read_text())
        except (OSError, ValueError, SafetensorError) as error:
            raise OSError(
                f"The model {folder!r} can't be loaded: {path.name!r} is damaged ({error}); copy it again."
            ) from error


def check_adapter_folder(name: str) -> None:
    """Raises an `OSError` if a local folder has no weights of an adapter, or a damaged config or damaged weights."""
    check_weights(name)
    folder = Path(name)
    if not folder.is_dir():
        return  # a name on the Hub
    try:
        json.loads((folder / "adapter_config.json").read_text())
    except ValueError as error:
        raise OSError(
            f"The adapter {name!r} can't be loaded: 'adapter_config.json' is damaged ({error}); copy it again."
        ) from error
    if not any((folder / file).is_file() for file in _ADAPTER_WEIGHTS):
        raise FileNotFoundError(
            f"The adapter {name!r} can't be loaded: the folder has no {_ADAPTER_WEIGHTS[0]}; copy it, too."
        )


@contextmanager
def loading_errors(name: str, part: str = "model") -> Iterator[None]:
    """Adds the names of missing packages and files, and the remedy, to errors of loading within the context."""
    try:
        yield
    except ImportError as error:  # transformers doesn't name the extra that installs the package
        if "FlashAttention" in str(error):
            remedy = (
                f"`{install('flash-attn')}`, or leave `attn_implementation` out, as packed rows need no such package"
            )
            raise ImportError(f"The {part} {name!r} needs a package for FlashAttention: {remedy}.") from error
        for package, extra in _EXTRAS.items():
            if package in str(error).lower():
                raise ImportError(f"The {part} {name!r} needs {package}: `{install(extra)}`") from error
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        if os.path.isdir(name):
            missing = [file for file in _PROCESSOR_FILES if not os.path.isfile(os.path.join(name, file))]
            # The message is replaced only if the folder has no processor files at all, or lacks those of the processor
            # that this model needs. Otherwise the original error stands
            lacks_preprocessor = "preprocessor_config.json" in reason and {*_PROCESSOR_FILES[:2]}.issubset(missing)
            if part != "processor" or not (lacks_preprocessor or len(missing) == len(_PROCESSOR_FILES)):
                raise
            raise OSError(
                f"The processor of {name!r} can't be loaded: the folder has none of {', '.join(missing)}. "
                f"Save the base model's processor there "
                f"(`AutoProcessor.from_pretrained(base).save_pretrained({name!r})`), or pass `processing_class`."
            ) from error
        # Errors that quote the name in their first words, such as errors of this module, stay unchanged
        if isinstance(error, OSError) and repr(name) not in reason[: len(name) + 20]:
            offline = " `HF_HUB_OFFLINE` is set." if is_offline_mode() else ""
            raise OSError(
                f"The {part} {name!r} can't be loaded. There is no such folder in {os.getcwd()!r}."
                f"{_similar_paths(name)} On the Hub: {reason}{offline}"
            ) from error
        raise


def _is_path(name: str) -> bool:
    """
    Returns whether a name can't be a name on the Hub. Doesn't ask whether the first folder of the name exists, as it
    may have the name of an organization on the Hub.
    """
    parts = name.replace(os.sep, "/").split("/")
    return parts[0] in ("", ".", "..", "~") or len(parts) > 2


def _similar_paths(name: str) -> str:
    if name.startswith("~"):
        return f" `~` isn't expanded; write {os.path.expanduser(name)!r}."
    try:
        hint, has_similar = similar_names(Path(name))
    except OSError:
        return ""
    return f" {hint}." if has_similar or _is_path(name) or os.path.isdir(os.path.dirname(name)) else ""
