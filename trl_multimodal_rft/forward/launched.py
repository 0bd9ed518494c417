# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Whether processes that were launched together know of each other."""

import os


def refuse_runs_apart(num_processes: int, consequence: str) -> None:
    """
    Refuses to go on alone where a launcher started several processes, which Accelerate doesn't.

    Args:
        num_processes (`int`):
            Processes that Accelerate knows of.
        consequence (`str`):
            What would happen, with `{launched}` for the number of processes, and the remedy. Follows "..., as it does
            where it finds no GPU".

    Raises:
        `RuntimeError`: If they know nothing of each other.
    """
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched > 1 and num_processes == 1:
        raise RuntimeError(
            f"`WORLD_SIZE` is {launched}, but Accelerate runs this process alone, as it does where it finds no GPU"
            + consequence.format(launched=launched)
        )
