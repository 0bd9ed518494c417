# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Modules that tests and launched scripts of this folder share are imported by their names alone."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent))
