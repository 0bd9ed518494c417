# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`tests/tools/idioms.py` under its former name."""

import runpy
from pathlib import Path


runpy.run_path(str(Path(__file__).parent / "tools" / "idioms.py"), run_name="__main__")
