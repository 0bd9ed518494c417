# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The RLOO trainers of TRL and of this package, with pseudo-random completions."""

from trl import RLOOTrainer

from helpers.samplers import pseudo_random
from helpers.trainer_utils import Injected, RemembersPacking
from trl_multimodal_rft import MultimodalRLOOTrainer


class InjectedTRL(RLOOTrainer):
    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return pseudo_random(prompt_ids, self.state.global_step, self.model.training, self._tokenizer)


class InjectedOurs(RemembersPacking, Injected, MultimodalRLOOTrainer):
    pass
