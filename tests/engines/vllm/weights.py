# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Changes weights under an engine that follows them, or samples with several versions of them."""

from itertools import product

import torch
from helpers.engine_runs import RecordedOmni, make
from helpers.trainer_utils import Recording, Weights


DECODER = r"(?!.*(visual|tower)).*\.(q|k|v|o|gate|up|down)_proj"
QWEN_TOWER = r".*visual\.(blocks|merger).*\.(qkv|proj|gate_proj|up_proj|down_proj|mlp\.0|mlp\.2)"


def trainer_of(
    folder, rows, tmp_path, peft_config=None, quantization_config=None, trainer_class=RecordedOmni, **options
):
    objects = {"model": str(folder), "peft_config": peft_config, "quantization_config": quantization_config}
    options = {"max_completion_length": 8, "self_check": False, **options}
    return make(trainer_class, None, rows(4), tmp_path / "out", objects, **options)


def difference(trainer) -> float:
    """Returns the difference between log-probabilities of the engine and of the model, after a sync."""
    trainer.sampler.invalidate_weights()
    trainer._generate_and_score_completions([row for row, _ in product(list(trainer.train_dataset)[:2], range(4))])
    return trainer.differences[-1]


def change(trainer, part="") -> None:
    """Moves all trainable weights whose names contain `part`."""
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if parameter.requires_grad and part in name:
                parameter.add_(0.1 * parameter.std().clamp(min=0.05) * torch.randn_like(parameter))


def assert_follows(trainer, tolerance=1e-5) -> None:
    assert difference(trainer) < tolerance
    for _ in range(2):
        change(trainer)
        assert difference(trainer) < tolerance


class OfVersions(Recording, RecordedOmni):
    """Compares completions with the model of the version that they claim, if they claim one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weights = Weights()
        self.add_callback(self.weights)

    def differences_by_age(self) -> list[tuple[int, float]]:
        """Returns how many updates old a completion was, and its largest difference, after training."""
        found = []
        for place, rollout in enumerate(draw.batch for draw in self.draws):
            for i, (first, last) in enumerate(rollout.source.flight.versions.tolist()):
                if first == last:
                    self.model.load_state_dict(self.weights[first])
                    ids = torch.tensor(rollout.source.ids[i])
                    sampled = rollout.sampling_per_token_logps[i]
                    difference = self._own_logps(rollout.prompts[i], ids) - sampled[: len(ids)]
                    found.append((place - first, difference.abs().max().item()))
        return found
