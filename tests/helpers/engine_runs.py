# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Short runs that sample from a real vLLM engine."""

import torch
import vllm_cpu

from helpers.samplers import Wrapped
from helpers.trainer_utils import config_of, length_and_sum, saved
from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.encoding.prompts import all_placeholder_ids


class Compared(Wrapped):
    """Sampler that calls the trainer's sampler, and compares log-probabilities with those of the trainer's model."""

    def __call__(self, model, prompts, **options):
        completions, logps = super().__call__(model, prompts, **options)
        self.trainer.compare(prompts, completions, logps)
        return completions, logps


class Recorded(MultimodalGRPOTrainer):
    """
    Trainer that records its draws. A draw in `draws` lists ids of prompt and completion, and the largest difference
    between log-probabilities of the engine and of the model's forward pass.
    """

    own_positions = True  # whether the forward pass computes positions itself

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler = Compared(self)
        self.draws: list[list[tuple[list[int], list[int], float]]] = []

    def compare(self, prompts, completions, logps):
        draw = []
        for prompt, ids, sampled in zip(prompts, completions, logps, strict=True):
            difference = (self._own_logps(prompt, torch.tensor(ids)) - torch.tensor(sampled)).abs().max().item()
            draw.append((prompt.input_ids.tolist(), ids, difference))
        self.draws.append(draw)

    def _own_logps(self, prompt, ids):
        model = self._unwrapped(self.model)
        n = len(ids)
        fields = {name: torch.nn.functional.pad(value, (0, n))[None] for name, value in prompt.token_fields.items()}
        if not self.own_positions:
            after = prompt.position_ids[..., -1:] + 1 + torch.arange(n)  # positions of the completion, as of text
            fields = {"position_ids": torch.cat([prompt.position_ids, after], dim=-1)}
        sequence = torch.cat([prompt.input_ids, ids])[None]
        inputs = {"input_ids": sequence, "attention_mask": torch.ones_like(sequence), **fields, **prompt.media}
        with torch.no_grad(), self.accelerator.autocast():
            logits = model(**{name: value.to(model.device) for name, value in inputs.items()}).logits
        logits = logits[0, len(prompt) - 1 : -1].float().cpu()
        # The engine never samples placeholders
        logits[:, sorted(all_placeholder_ids(model, self.processing_class))] = -torch.inf
        return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]

    @property
    def differences(self) -> list[float]:
        return [max(difference for _, _, difference in draw) for draw in self.draws]


class RecordedOmni(Recorded):
    """Trainer that passes positions to the model, which would take a sampled `<|audio_bos|>` for a sound otherwise."""

    own_positions = False


def make(trainer_class, family, rows, tmp_path, objects=None, engine=None, **options):
    """
    Returns a trainer that makes three updates of all weights in float32. `objects` are arguments of the trainer,
    `engine` of the engine, and `options` of the config.
    """
    engine = {**vllm_cpu.ENGINE, "max_model_len": 512, **(engine or {})}
    options = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "gradient_checkpointing": False,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "use_vllm": True,
        "vllm_engine_kwargs": None if options.get("vllm_mode") == "server" else engine,
        **options,
    }
    objects = {"reward_funcs": length_and_sum, "train_dataset": rows, **(objects or {})}
    if "model" not in objects:
        objects["model"] = str(saved(family))
    elif not isinstance(objects["model"], str):
        options["model_init_kwargs"] = None
    args = config_of(trainer_class)(output_dir=str(tmp_path), **options)
    return trainer_class(args=args, **{name: value for name, value in objects.items() if value is not None})
