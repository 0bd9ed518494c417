# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Samples of torchcodec's audio decoders. They are kept, since a second reading of a decoder returns other samples."""

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np


if TYPE_CHECKING:
    from torchcodec.decoders import AudioDecoder

# By decoder: the seconds that were asked for, and the samples with their rate
_KEPT: "WeakKeyDictionary[AudioDecoder, tuple[float, np.ndarray, int]]" = WeakKeyDictionary()


def decoder_samples(decoder: "AudioDecoder", seconds: float) -> tuple[np.ndarray, int]:
    """
    Returns a decoder's first `seconds`, of shape (N, channels), or more if an earlier call asked for more, and their
    rate. The samples live as long as the decoder. Only a longer part than before is decoded again.
    """
    kept = _KEPT.get(decoder)
    if kept is None or kept[0] < seconds:
        start = decoder.metadata.begin_stream_seconds or 0
        samples = decoder.get_samples_played_in_range(0, start + seconds)
        kept = seconds, samples.data.cpu().numpy().T, samples.sample_rate
        _KEPT[decoder] = kept
    return kept[1:]
