# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The values of TRL's options that come to something else here than in TRL, as data.

`test_differences.py` compares each entry with what happens, and `make fix` writes them into
`docs/where_it_differs.md`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


REFUSED = "refused here"
DIFFERS = "takes effect differently"
ACCEPTED = "accepted here alone"
ANY = ("*",)
NAN = math.nan


@dataclass(frozen=True)
class Difference:
    """
    An entry: the trainers, options and values that it is about, what comes of them here, and why.

    `values` of `None` are all values that run, `rows` of `None` all kinds of rows. `size` is how much results differ in
    the tests' runs, `as_trl` what does as TRL. An entry that is open is a defect.
    """

    trainers: tuple[str, ...]
    options: tuple[str, ...]
    values: tuple[Any, ...] | None
    outcome: str
    what: str
    why: str
    size: str = ""
    as_trl: str = ""
    rows: str | None = None
    is_open: bool = False

    def matches(self, trainer: str, option: str, value: Any, rows: str) -> bool:
        return (
            (self.trainers == ANY or trainer in self.trainers)
            and (self.options == ANY or option in self.options)
            and (self.values is None or repr(value) in map(repr, self.values))
            and self.rows in (None, rows)
        )


def difference_of(trainer: str, option: str, value: Any, rows: str) -> Difference | None:
    """Returns the entry about a value, if there is one."""
    for entry in DIFFERENCES:
        if entry.matches(trainer, option, value, rows):
            return entry
    return None


SAMPLING = ("grpo", "rloo", "ppo", "distillation")
READING = ("sft", "dpo", "kto", "reward")
