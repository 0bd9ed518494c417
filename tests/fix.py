# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`tests/tools/fix.py` under its former name."""

import runpy
import sys
from pathlib import Path


TOOLS = Path(__file__).parent / "tools"
sys.path.insert(0, str(TOOLS))
runpy.run_path(str(TOOLS / "fix.py"), run_name="__main__")
