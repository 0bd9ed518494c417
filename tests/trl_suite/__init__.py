# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""TRL's own tests, run with this package's trainers in place of TRL's; see `__main__.py`."""
