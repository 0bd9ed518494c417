# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward models: a model of the policy's class that scores a sequence at its last token."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import transformers
from accelerate.utils import is_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from ..encoding.model_folders import check_model_folder, loading_errors
from ..encoding.processors import Processor
from .pretrained import load_model, load_trained, policy_class, read_config
from .wrapped import unwrapped


if TYPE_CHECKING:
    from peft import PeftModel

_Model = TypeVar("_Model", bound=nn.Module)


class _ScoreMixin(GenericForSequenceClassification):
    """
    Mixin that replaces the LM head of a policy's class by a score.

    In a subclass, the next base is the policy's class, whose methods create masks and positions.
    """

    num_labels = 1

    def __init__(self, config: PreTrainedConfig):
        policy = cast(PreTrainedModel, super(GenericForSequenceClassification, self))  # the policy's class
        policy.__init__(config)
        model = cast(PreTrainedModel, self)
        head = policy.get_output_embeddings()
        # The LM head's attribute
        delattr(model, next(name for name, module in model.named_children() if module is head))
        model.score = nn.Linear(config.get_text_config().hidden_size, 1, bias=False)
        model.post_init()

    @classmethod
    def can_generate(cls) -> bool:
        return False

    def get_output_embeddings(self) -> None:
        return None


@functools.cache
def reward_model_class(policy: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """
    Returns the class of reward models on the backbone of a policy's class, with a linear layer `score` in place of the
    LM head. Weights have the names of transformers' `...ForSequenceClassification`, which loads the same files.
    """
    suffixes = "ForConditionalGeneration", "ForCausalLM", "LMHeadModel"
    stem = functools.reduce(str.removesuffix, suffixes, policy.__name__)
    members = {
        "__module__": policy.__module__,  # transformers converts names of weights for its own modules alone
        "base_model_prefix": policy.base_model_prefix,
        "_tied_weights_keys": {},  # the LM head, which may be tied, is removed
    }
    return type(f"{stem}ForSequenceClassification", (_ScoreMixin, policy), members)


def as_reward_model(model: _Model) -> _Model:
    """
    Makes a reward model from a policy, which loses its LM head and gets a new score, or from a sequence classifier,
    which keeps its own. It takes over the modules and an adapter. Raises a `ValueError` for a model without a
    backbone, or with several labels.
    """
    if is_peft_model(model):
        adapter = cast("PeftModel", model)
        adapter.base_model.model = as_reward_model(adapter.get_base_model())
        return model
    if isinstance(model, _ScoreMixin):
        return model
    source = cast(PreTrainedModel, model)
    score = getattr(source, "score", None)
    name = type(source).__name__
    if source.base_model is source:
        raise ValueError(
            f"{name} has no backbone apart from its LM head, so that it can't be a reward model; train another family."
        )
    if score is None and not source.can_generate():
        raise ValueError(f"{name} has neither an LM head nor a `score`, so that it can't be a reward model.")
    if score is None:
        config = source.config.get_text_config()
        score = nn.Linear(config.hidden_size, 1, bias=False, device=source.device, dtype=source.dtype)
        nn.init.normal_(score.weight, std=getattr(config, "initializer_range", 0.02))
        source.config.num_labels = 1
    elif source.config.num_labels != 1:
        raise ValueError(f"{name} has `num_labels={source.config.num_labels}`; reward models require `num_labels=1`.")
    policy = source
    if not source.can_generate():
        with torch.device("meta"):
            policy = policy_class(source.config)(source.config)  # for attributes that its class's methods read
        if type(policy.base_model) is not type(source.base_model):
            raise ValueError(f"{name} has another backbone than {type(policy).__name__}, so that it can't be trained.")
    # Without the constructor, which would create all weights again
    reward_model = object.__new__(reward_model_class(type(policy)))
    modules = {reward_model.base_model_prefix: source.base_model, "score": score}
    tied = {name: target for name, target in source.all_tied_weights_keys.items() if name.split(".")[0] in modules}
    attributes = {"_modules": modules, "all_tied_weights_keys": tied, "generation_config": None}
    vars(reward_model).update({**vars(policy), **vars(source), **attributes})
    # Drops forwards that trainers or hooks have set on the instance, and conversions of the policy's weight names
    for name in ("num_labels", "_weight_conversions", "forward", "_plain_forward", "_original_forward"):
        vars(reward_model).pop(name, None)
    return cast(_Model, reward_model)


def load_reward_model(
    name: str, revision: str | None = None, trust_remote_code: bool = False, **kwargs: dict | str | torch.dtype | None
) -> PreTrainedModel:
    """
    Loads a reward model by name: a sequence classifier, or a policy, which gets a new score. `kwargs` are those of
    `from_pretrained`; to train it, see [`as_reward_model`].
    """
    source = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    if register_reward_model(name, **source):
        return load_model(name, architecture=AutoModelForSequenceClassification, num_labels=1, **source, **kwargs)
    return as_reward_model(load_model(name, **source, **kwargs))


def load_trained_reward_model(
    name: str, revision: str | None = None, trust_remote_code: bool = False, **kwargs: dict | str | torch.dtype | None
) -> "tuple[PreTrainedModel | PeftModel, Processor]":
    """
    Loads a trained reward model, a sequence classifier or an adapter of one, and its processor, with the arguments of
    [`load_reward_model`]. Raises a `ValueError` if it has no trained score.
    """
    model, processor = load_trained(name, revision, trust_remote_code, load=load_reward_model, **kwargs)
    base = unwrapped(None, model)
    if not is_reward_model(base.config.architectures) and not hasattr(base.get_submodule("score"), "modules_to_save"):
        raise ValueError(f"{name!r} has no trained score; name a reward model, or train one from it.")
    base.config._name_or_path = name  # logs would name the model under an adapter
    return model, processor


def is_reward_model(architectures: Sequence[str] | None) -> bool:
    """Returns whether the architectures of a config name a reward model."""
    return bool(architectures) and architectures[0].endswith("ForSequenceClassification")


def check_scores(name: str, revision: str | None = None, trust_remote_code: bool = False) -> None:
    """Registers the class of a model that is named as a reward. Raises `ValueError` for one that writes text."""
    source = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    if register_reward_model(name, **source):
        return
    config_dict, _ = PreTrainedConfig.get_config_dict(name, **source)
    architecture = (config_dict.get("architectures") or [""])[0]
    if architecture.endswith(("ForCausalLM", "ForConditionalGeneration")):
        raise ValueError(
            f"{name!r} is a {architecture}, which writes text and scores nothing; ask it as a judge by `JudgeReward`, "
            "or train a reward model from it by `trl-multimodal-rft reward`."
        )


def register_reward_model(name: str, revision: str | None = None, trust_remote_code: bool = False) -> bool:
    """
    Registers the class of a saved reward model at [`~transformers.AutoModelForSequenceClassification`], if
    transformers has no such class for the family. Returns whether `name` names a reward model.
    """
    source = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    check_model_folder(name)
    with loading_errors(name):
        config_dict, _ = PreTrainedConfig.get_config_dict(name, **source)
    if not is_reward_model(config_dict.get("architectures")):
        return False
    if not hasattr(transformers, config_dict["architectures"][0]) and "auto_map" not in config_dict:
        config, policy = read_config(name, **source)
        AutoModelForSequenceClassification.register(type(config), reward_model_class(policy), exist_ok=True)
    return True
