# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The RLOO trainers of TRL and of this package, with pseudo-random completions."""

from trl import RLOOTrainer

from helpers.trainer_utils import Injected, RemembersPacking
from trl_multimodal_rft import MultimodalRLOOTrainer


class InjectedIds(Injected):
    """RLOO takes no log-probabilities beside sampled completions."""

    def _generate_single_turn(self, *args, **kwargs):
        return super()._generate_single_turn(*args, **kwargs)[0]


class InjectedTRL(InjectedIds, RLOOTrainer):
    pass


class InjectedOurs(RemembersPacking, InjectedIds, MultimodalRLOOTrainer):
    pass
