# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A vision-audio-language policy."""

from .actor_al import ActorAL


class ActorOmni(ActorAL):
    """
    A policy that answers prompts with images, videos and audio.

    Arguments are those of [`Actor`], the media those of [`ActorVL`] and [`ActorAL`].
    """

    modality = "multimodal"
    _sees = True
