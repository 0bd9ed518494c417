# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python tests/families_report --output docs/generated/families.md`"""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parents[1]))

from families_report.report import main  # noqa: E402


main()
