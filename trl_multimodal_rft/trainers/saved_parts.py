# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What PPO saves and loads beside the policy: its critic and the average of its weights."""

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils.fsdp_utils import fsdp2_canonicalize_names

from ..models.critic import Critic
from ..models.wrapped import is_unsharded
from ..reporting.model_card import in_code
from .ema import MovingAverage
from .resumable import ResumingMixin


# Folders beside the policy, in a checkpoint and in what is saved at the end
_CRITIC = "critic"
_AVERAGE = "ema"


class SavedPartsMixin(ResumingMixin):
    """Keeps the critic out of the policy's files, and it and the average in folders of their own."""

    critic: Any = None  # a `Critic`, a `ValueHead` or none
    ema: MovingAverage | None = None
    _folders_beside_model = (_CRITIC,)

    @contextmanager
    def _policy_alone(self):
        """Leaves the critic out of what is saved, loaded or synchronized."""
        modules = self.accelerator.unwrap_model(self.model)._modules
        critic = modules.pop("critic", None)
        try:
            yield
        finally:
            if critic is not None:
                modules["critic"] = critic

    def _prepare_for_training(self, *args, **kwargs):
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.ema is not None:
            # FSDP replaces the weights, and DeepSpeed moves them
            parameters = self.accelerator.unwrap_model(self.model).named_parameters()
            self.ema.follow(fsdp2_canonicalize_names(dict(parameters)))
        return prepared

    @contextmanager
    def ema_weights(self):
        """
        Gives the policy its averaged weights within the context, for evaluation or to save them.

        Raises:
            `ValueError`: If there is no average.
        """
        if self.ema is None:
            raise ValueError("There is no average of the weights; set `ema_decay`.")
        with self.ema.applied():
            yield

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if not _internal_call:
            self._save_average(output_dir)
        super().save_model(output_dir, _internal_call)

    def push_to_hub(self, *args, **kwargs):
        self._save_average()
        return super().push_to_hub(*args, **kwargs)

    def _published_beside_model(self, model_class: str, folder: str) -> list[tuple[str, str]]:
        found = []
        if self.args.shared_trunk and self.critic is not None:
            found.append((_CRITIC, "the critic, which is a head on the policy's last hidden states"))
        elif self.critic is not None:
            name = json.dumps(folder, ensure_ascii=False)
            load = f'trl_multimodal_rft.models.Critic.from_pretrained({name}, {model_class}, subfolder="{_CRITIC}")'
            found.append((_CRITIC, f"the critic, {in_code(load)}"))
        if self.ema is not None:
            found.append((_AVERAGE, f'the average of the policy\'s weights, loaded with `subfolder="{_AVERAGE}"`'))
        return found

    def _save_average(self, output_dir: str | None = None) -> None:
        """Saves the averaged policy beside the model."""
        if self.ema is None:
            return
        folder = Path(self.args.output_dir if output_dir is None else output_dir, _AVERAGE)
        critic, self.critic = self.critic, None
        try:
            with self.ema_weights():
                super().save_model(str(folder), _internal_call=True)
        finally:
            self.critic = critic

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        policy = None
        if state_dict is not None:
            policy = {name: value for name, value in state_dict.items() if not name.startswith("critic.")}
        with self._policy_alone():
            super()._save(output_dir, policy)
        if self.critic is not None and self.args.should_save and state_dict != {}:
            own = None
            if state_dict is not None:
                own = {n.removeprefix("critic."): v for n, v in state_dict.items() if n.startswith("critic.")}
            self.critic.save_pretrained(Path(output_dir or self.args.output_dir, _CRITIC), own)

    def _save_beside_model(self, folder: Path) -> None:
        super()._save_beside_model(folder)
        if self.ema is not None:
            self.ema.save(folder / f"{_AVERAGE}.safetensors", self.args.should_save)

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self.ema is not None:
            path = Path(checkpoint, f"{_AVERAGE}.safetensors")
            if not path.exists():
                raise ValueError(f"{checkpoint} has no average of the weights; resume without `ema_decay`.")
            self.ema.load(path)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        if self.is_fsdp_enabled:  # whose checkpoint holds both
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        with self._policy_alone():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._reload_critic(resume_from_checkpoint)

    def _load_best_model(self):
        if is_unsharded(self.accelerator):
            with self._policy_alone():
                super()._load_best_model()
            self._reload_critic(self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    def _reload_critic(self, checkpoint: str | Path) -> None:
        folder = Path(checkpoint, _CRITIC)
        if self.critic is None:
            return
        head = self.critic if self.args.shared_trunk else self.critic.head
        if not folder.is_dir() or not head.load(folder):
            raise ValueError(f"{checkpoint} has no critic; it is no checkpoint of PPO with one.")
        if not self.args.shared_trunk:
            saved = Critic.from_pretrained(folder, type(self.critic.model), dtype=self.critic.model.dtype)
            self.critic.load_state_dict(saved.state_dict())
