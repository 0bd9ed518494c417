# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Models by their names."""

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from trl.trainer.utils import create_model_from_path

from ..families import family_of


# Arguments of `from_pretrained` that say where files are
SOURCE = ("cache_dir", "force_download", "local_files_only", "revision", "subfolder", "token")


def trained_part(name: str, **kwargs) -> type[PreTrainedModel] | None:
    """
    The class that loads what is trained of a model, where that isn't all of it.

    Args:
        name (`str`):
            Name or folder of a model.
        kwargs:
            Arguments of `from_pretrained`, of which those count that say where files are.

    Returns:
        `type`, *optional*: The class. `None` where the model's config names it.
    """
    config, _ = PreTrainedConfig.get_config_dict(name, **{key: kwargs[key] for key in SOURCE if key in kwargs})
    model_type = config.get("model_type", "")
    part = family_of(model_type).trained_part.get(model_type)
    return None if part is None else getattr(transformers, part)


def load_model(name: str, **kwargs) -> PreTrainedModel:
    """
    Loads what is trained of a model, as TRL loads a policy.

    Args:
        name (`str`):
            Name or folder of a model.
        kwargs:
            Arguments of `from_pretrained`.

    Returns:
        [`~transformers.PreTrainedModel`]: The model.
    """
    kwargs.setdefault("architecture", trained_part(name, **kwargs))
    return create_model_from_path(name, **kwargs)
