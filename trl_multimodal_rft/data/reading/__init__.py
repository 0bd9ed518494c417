# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reading of media: allowed sources, limits, file formats, and decoding to images, waveforms and frames."""
