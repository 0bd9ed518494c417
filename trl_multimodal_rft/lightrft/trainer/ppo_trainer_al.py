# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO of models that hear, with the interface of the reference system."""

from .ppo_trainer_vl import PPOTrainerVL


class PPOTrainerAL(PPOTrainerVL):
    """
    PPO of models that hear, in the steps of the reference system, see [`PPOTrainerVL`].

    Arguments are the same, with [`~lightrft.ActorAL`] as actors. Batches of prompts are lists of rows, or tuples of
    lists: prompts, audios, references and labels.
    """

    _columns = (("audios",),)
