# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Critics: value models that read the policy's tokens and media."""

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import cached_file

from ..encoding.model_folders import check_weights, loading_errors
from .parts import freeze_as_built
from .pretrained import SOURCE_ARGUMENTS, is_adapter, require_all_weights
from .reward_model import is_reward_model, load_trained_reward_model, reward_model_class
from .wrapped import hidden_states


if TYPE_CHECKING:
    from peft import PeftModel

PolicyModule = TypeVar("PolicyModule", bound=nn.Module)

_HEAD = "value_head.safetensors"


class ValueHead(nn.Linear):
    """
    Linear head from hidden states to values, in float32. Values are 0 before training.

    Args:
        hidden_size (`int`):
            Size of the hidden states.
        device (`torch.device` or `str`, *optional*):
            Device of the head's weights.
    """

    def __init__(self, hidden_size: int, device: torch.device | str | None = None):
        super().__init__(hidden_size, 1, dtype=torch.float32, device=device)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """
        Computes the values of states.

        Args:
            hidden_states (`torch.Tensor`):
                Last hidden states, shape `(..., hidden_size)`.

        Returns:
            `torch.Tensor`: Values, float32, shape `(...)`.
        """
        with torch.autocast(hidden_states.device.type, enabled=False):
            # Training engines such as DeepSpeed's may have cast the weight
            return super().forward(hidden_states.to(self.weight.dtype))[..., 0].float()

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """
        Saves the head.

        Args:
            folder (`str` or `Path`):
                Folder to save it in.
            state_dict (`dict[str, torch.Tensor]`, *optional*):
                Unsharded weights of the head, if ranks hold shards.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        state_dict = self.state_dict() if state_dict is None else state_dict
        save_file({name: value.float().contiguous() for name, value in state_dict.items()}, Path(folder, _HEAD))

    def load(self, folder: str | Path, **kwargs) -> bool:
        """
        Loads a head that [`save_pretrained`] wrote.

        Args:
            folder (`str` or `Path`):
                Folder or repository of the Hub.
            kwargs:
                Arguments of `from_pretrained` that locate files, such as `revision` and `subfolder`.

        Returns:
            `bool`: `True` if there is a head.
        """
        path = cached_file(str(folder), _HEAD, _raise_exceptions_for_missing_entries=False, **kwargs)
        if path is not None:
            self.load_state_dict(load_file(path))
        return path is not None


class Critic(nn.Module):
    """
    Multimodal backbone with a value head, which estimates the expected return of each state. Its inputs are packed or
    padded rows, like the policy's.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model of the policy's class, whose LM head is removed.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        model.set_output_embeddings(nn.Identity())
        self.model = model
        self.head = ValueHead(model.config.get_text_config().hidden_size, model.device)

    def forward(
        self, input_ids: torch.LongTensor, attention_mask: torch.Tensor | None = None, **inputs: torch.Tensor
    ) -> torch.Tensor:
        """
        Computes the values of the states after every token.

        Args:
            input_ids (`torch.LongTensor`):
                Prompts and completions, shape `(B, S)`.
            attention_mask (`torch.Tensor`, *optional*):
                1 on tokens, shape `(B, S)`; all ones by default.
            inputs (`torch.Tensor`):
                Media, per-token fields and positions, as the model's forward names them.

        Returns:
            `torch.Tensor`: Values, float32, shape `(B, S)`.
        """
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # The model's forward isn't called, as it may cap or scale the output of its head
        with hidden_states(self.model) as states:
            self.model.base_model(input_ids=input_ids, attention_mask=mask, use_cache=False, **inputs)
        return self.head(states[-1])

    def save_pretrained(self, folder: str | Path, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Saves the backbone in transformers' format, and the head next to it, see [`ValueHead.save_pretrained`]."""
        backbone = head = None
        if state_dict is not None:
            backbone, head = (
                {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
                for prefix in (f"model.{self.model.base_model_prefix}.", "head.")
            )
        self.model.base_model.save_pretrained(folder, state_dict=backbone)
        self.head.save_pretrained(folder, head)

    def load(self, folder: str | Path) -> bool:
        """Loads a critic from a local folder. Returns whether the folder has a head, see [`ValueHead.load`]."""
        if not self.head.load(folder):
            return False
        self.load_state_dict(Critic.from_pretrained(folder, type(self.model), dtype=self.model.dtype).state_dict())
        return True

    @classmethod
    def from_pretrained(cls, folder: str | Path, model_class: type[PreTrainedModel], **kwargs) -> "Critic":
        """
        Loads a critic that [`save_pretrained`] wrote, or makes one from a saved reward model or backbone.

        A reward model is a sequence classifier with one label. Its score layer initializes the value head. An adapter
        of a reward model is merged. With a backbone, the first values are 0.

        Args:
            folder (`str` or `Path`):
                Folder or repository of the Hub.
            model_class (`type`):
                Class of the policy.
            kwargs:
                Arguments of `from_pretrained`, such as `subfolder="critic"` for the critic in the repository of a
                policy.

        Returns:
            [`Critic`]: The critic.

        Raises:
            `ValueError`: If the model isn't of the policy's family.
        """
        if "subfolder" not in kwargs and is_adapter(str(folder), kwargs.get("revision")):
            adapter, _ = load_trained_reward_model(str(folder), **kwargs)
            return cls.from_model(cast("PeftModel", adapter).merge_and_unload(), model_class)
        source = {name: kwargs[name] for name in SOURCE_ARGUMENTS if name in kwargs}
        config, _ = PreTrainedConfig.get_config_dict(folder, **source)
        # The config of a saved omni model contains the config of its thinker
        types = [part.get("model_type") for part in (config, *config.values()) if isinstance(part, dict)]
        if getattr(model_class.config_class, "model_type", None) not in types:
            # Without this error, the policy's class would load another family's folder with random weights
            raise other_family_error(f"{types[0]!r} model", model_class.__name__)
        is_reward = is_reward_model(config.get("architectures"))
        check_weights(str(Path(folder, kwargs.get("subfolder", ""))))
        with loading_errors(str(folder)), require_all_weights(_head_weights):
            model = (reward_model_class(model_class) if is_reward else model_class).from_pretrained(folder, **kwargs)
        if is_reward:
            return cls.from_model(model, model_class)
        freeze_as_built(model)
        critic = cls(model)
        critic.head.load(folder, **source)
        return critic

    @classmethod
    def from_model(cls, model: PreTrainedModel, model_class: type[PreTrainedModel]) -> "Critic":
        """
        Makes a critic from a model of the policy's family, and takes over its weights.

        Args:
            model ([`~transformers.PreTrainedModel`]):
                Model of the policy's class, or a reward model (a sequence classifier with one label) on the same
                backbone. The score layer of a reward model initializes the value head.
            model_class (`type`):
                Class of the policy.

        Returns:
            [`Critic`]: The critic.

        Raises:
            `ValueError`: If the model has another backbone or several labels.
        """
        if isinstance(model, model_class) and getattr(model, "score", None) is None:
            return cls(model)
        if model.config.model_type != getattr(model_class.config_class, "model_type", None):
            raise other_family_error(type(model).__name__, model_class.__name__)
        with torch.device("meta"):
            shell = model_class(model.config)  # methods of the policy's class create masks and positions
        if type(model.base_model) is not type(shell.base_model):
            raise other_family_error(type(model).__name__, model_class.__name__)
        setattr(shell, shell.base_model_prefix, model.base_model)
        critic = cls(shell)
        if model.config.num_labels != 1:
            raise ValueError(
                f"A critic needs a reward model with one label; {type(model).__name__} has {model.config.num_labels}."
            )
        with torch.no_grad():
            critic.head.weight.copy_(model.get_parameter("score.weight"))
        return critic


def add_critic(policy: nn.Module, critic: nn.Module) -> None:
    """
    Makes a critic a submodule of its policy, so that both share one wrapper and one optimizer. The policy's
    `save_pretrained` skips the critic.
    """
    policy.critic = critic
    if isinstance(policy, PreTrainedModel):  # a `PeftModel` saves the weights of its adapter alone
        skipped = {f"critic.{name}" for name in critic.state_dict()}
        policy._keys_to_ignore_on_save = {*(policy._keys_to_ignore_on_save or ()), *skipped}


def policy_alone(policy: PolicyModule) -> PolicyModule:
    """
    Returns the policy without its critic, to save, load or synchronize weights: a module of its class that shares all
    else, or the policy itself. It must have no wrapper such as DDP.
    """
    if not isinstance(policy._modules.get("critic"), (Critic, ValueHead)):
        return policy
    # `fully_shard` replaces the policy's class by a subclass with `FSDPModule`. The first other base is the old class.
    policy_without_critic = object.__new__(
        next(base for base in type(policy).__mro__ if not issubclass(base, FSDPModule))
    )
    modules = {name: module for name, module in policy._modules.items() if name != "critic"}
    vars(policy_without_critic).update({**vars(policy), "_modules": modules})
    return cast(PolicyModule, policy_without_critic)


def _head_weights(model: PreTrainedModel) -> set[nn.Parameter]:
    """Returns the untied weights of an LM head, which a critic doesn't have."""
    head = model.get_output_embeddings() or nn.Identity()
    tied = model.get_input_embeddings()
    return {*head.parameters()} - {*tied.parameters()}


def other_family_error(label: str, policy: str) -> ValueError:
    """Returns the error for a critic that takes other tokens or media than its policy."""
    return ValueError(
        f"The critic must be of the policy's family, to take the same tokens and media: it is a {label}, and the "
        f"policy is a {policy}."
    )
