# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward models: a model of the policy's class that scores a sequence at its last token."""

import functools
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import transformers
from accelerate.utils import is_peft_model
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification

from .pretrained import load_model, policy_class, read_config


if TYPE_CHECKING:
    from peft import PeftModel

_Model = TypeVar("_Model", bound=nn.Module)


class _Scores(GenericForSequenceClassification):
    """Takes the place of the LM head of the next class, whose masks and positions stay."""

    num_labels = 1

    def __init__(self, config: PreTrainedConfig):
        policy = cast(PreTrainedModel, super(GenericForSequenceClassification, self))  # of the next class
        policy.__init__(config)
        model, head = cast(PreTrainedModel, self), policy.get_output_embeddings()
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
    The class of reward models on the backbone of a policy's class. Names of weights are those of transformers'
    `...ForSequenceClassification`, and where transformers has one for the family, each loads what the other saves.

    Args:
        policy (`type`):
            Class of the policy.

    Returns:
        `type`: Its subclass, with a linear layer `score` instead of the LM head.
    """
    stem = policy.__name__.removesuffix("ForConditionalGeneration").removesuffix("ForCausalLM")
    members = {
        "__module__": policy.__module__,  # by which transformers knows names of weights in other versions
        "base_model_prefix": policy.base_model_prefix,
        "_tied_weights_keys": {},  # which are those of the LM head
    }
    return type(f"{stem}ForSequenceClassification", (_Scores, policy), members)


def as_reward_model(model: _Model) -> _Model:
    """
    Makes a reward model of a policy, whose LM head goes, or of a sequence classifier, whose score it keeps.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model, whose modules are taken over.

    Returns:
        The same type: The reward model, with an adapter if there was one; the model itself if it is one. A new score
        is initialized as the other weights are.

    Raises:
        `ValueError`: If the model has no backbone of its own, or several labels.
    """
    if is_peft_model(model):
        adapter = cast("PeftModel", model)
        adapter.base_model.model = as_reward_model(adapter.get_base_model())
        return model
    if isinstance(model, _Scores):
        return model
    given = cast(PreTrainedModel, model)
    score, name = getattr(given, "score", None), type(given).__name__
    if given.base_model is given:
        raise ValueError(
            f"{name} has no backbone apart from its LM head, so that it can't be a reward model; train another family."
        )
    if score is None:
        config = given.config.get_text_config()
        score = nn.Linear(config.hidden_size, 1, bias=False, device=given.device, dtype=given.dtype)
        nn.init.normal_(score.weight, std=getattr(config, "initializer_range", 0.02))
        given.config.num_labels = 1
    elif given.config.num_labels != 1:
        raise ValueError(f"{name} has `num_labels={given.config.num_labels}`; reward models require `num_labels=1`.")
    kind = type(given) if given.can_generate() else policy_class(given.config)
    made = object.__new__(reward_model_class(kind))
    modules = {made.base_model_prefix: given.base_model, "score": score}
    tied = {name: to for name, to in given.all_tied_weights_keys.items() if name.split(".")[0] in modules}
    attributes = {"_modules": modules, "all_tied_weights_keys": tied, "generation_config": None}
    vars(made).update({**vars(given), **attributes})
    for name in ("num_labels", "_weight_conversions"):  # the latter are between names of the policy's class
        vars(made).pop(name, None)
    return cast(_Model, made)


def load_reward_model(
    name: str, revision: str | None = None, trust_remote_code: bool = False, **kwargs: dict | str | torch.dtype | None
) -> PreTrainedModel:
    """
    Loads a reward model: a saved one, a sequence classifier of transformers, or a policy, which gets a new score.

    Args:
        name (`str`):
            Folder or repository of the Hub.
        revision (`str`, *optional*):
            Version in the repository.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether to run code that comes with it.
        kwargs:
            Further arguments of `from_pretrained`.

    Returns:
        [`~transformers.PreTrainedModel`]: The reward model.

    Raises:
        `ValueError`: As [`as_reward_model`] says.
    """
    source = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    kind = register_reward_model(name, **source)
    return as_reward_model(load_model(name, **source, **kwargs, **({} if kind is None else {"architecture": kind})))


def register_reward_model(
    name: str, revision: str | None = None, trust_remote_code: bool = False
) -> type[PreTrainedModel] | None:
    """
    Tells [`~transformers.AutoModelForSequenceClassification`] how to load a saved reward model of a family for which
    transformers has no class.

    Returns the class of reward models of that family; `None` if it is no reward model.
    """
    source = {"revision": revision or "main", "trust_remote_code": trust_remote_code}
    fields, _ = PreTrainedConfig.get_config_dict(name, **source)
    if not (fields.get("architectures") or [""])[0].endswith("ForSequenceClassification"):
        return None
    config, policy = read_config(name, **source)
    kind = reward_model_class(policy)
    if not hasattr(transformers, kind.__name__):
        AutoModelForSequenceClassification.register(type(config), kind, exist_ok=True)
    return kind
