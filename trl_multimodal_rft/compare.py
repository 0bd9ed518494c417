# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`python -m trl_multimodal_rft.compare`: the command `trl-multimodal-rft compare`."""

import sys

from .cli import main


if __name__ == "__main__":
    main(["compare", *sys.argv[1:]])
