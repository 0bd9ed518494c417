# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""LightRFT's name for the trainer that runs on several processes, as all trainers do here."""

from .ppo_trainer_vl import PPOTrainerVL as SPMDPPOTrainerVL


__all__ = ["SPMDPPOTrainerVL"]
