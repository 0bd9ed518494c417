# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Every option of TRL's configs means here what it means in TRL's trainers, but for the table of `difference_table.py`.

All fields of the eight configs run with valid values and with neighbours (a wrong word, -1, NaN, the text "False"),
by TRL's trainer and by this package's on the same rows and completions. Losses, metrics, weights, names of saved
files and the config's value have to be equal, or both have to refuse the value. Fields of transformers run all their
values in GRPO (with sampling) and SFT (without), and the first in the other trainers. Fields about servers, the Hub
and devices make configs alone. A trainer's own fields about data run on text and on images.

The fields are in the weekly suite, and a sample of them in the gate.
"""

import pytest
from parity.difference_runs import SUBJECTS
from parity.difference_table import ANY, DIFFERENCES, WITHOUT_EFFECT, Difference, difference_of
from parity.difference_values import cases_of, is_config_only, names_of
from parity.differences import BOTH_REFUSE, DIFFERS, SAME, Outcome, outcome_of, rows_of


ALL_OPTIONS = []
for _trainer in SUBJECTS:
    for _option in names_of(_trainer):
        ALL_OPTIONS.append((_trainer, _option))

# What the gate runs: a mechanism each, with values that are equal, refused by both, refused here, or different
SAMPLE = [
    ("grpo", "loss_type"),
    ("grpo", "scale_rewards"),
    ("grpo", "top_p"),
    ("rloo", "reward_clip_range"),
    ("ppo", "num_iterations"),
    ("distillation", "beta"),
    ("sft", "truncation_mode"),
    ("sft", "save_strategy"),
    ("dpo", "label_smoothing"),
    ("dpo", "max_length"),
    ("kto", "desirable_weight"),
    ("reward", "center_rewards_coefficient"),
]


def runs_of(trainer: str, option: str) -> list[tuple]:
    """Returns the values of an option with the kinds of rows on which they run."""
    runs = []
    for rows in rows_of(trainer, option):
        for value in cases_of(trainer, option):
            runs.append((value, rows))
    return runs


def described(outcome: Outcome) -> str:
    theirs, ours = outcome.errors
    details = {"where": outcome.where, "TRL": theirs, "here": ours}
    details = {name: detail for name, detail in details.items() if detail}
    return f"{outcome.option}={outcome.value!r} ({outcome.rows}): {outcome.outcome}, {details}"


def expected_by(entry: Difference | None) -> tuple[str, ...]:
    """Returns the outcomes that an entry allows. One about all options allows that both trainers refuse."""
    if entry is None:
        return (SAME, BOTH_REFUSE)
    return (entry.outcome, BOTH_REFUSE) if entry.options == ANY else (entry.outcome,)


def check(trainer: str, option: str) -> None:
    """Runs an option's values, and compares each outcome with the table."""
    problems = []
    compared = []
    for value, rows in runs_of(trainer, option):
        entry = difference_of(trainer, option, value, rows)
        outcome = outcome_of(trainer, option, value, rows)
        if outcome.outcome in (SAME, DIFFERS):
            compared.append(outcome)
        expected = expected_by(entry)
        if outcome.outcome not in expected:
            problems.append(f"{described(outcome)}; the table has {' or '.join(expected)!r}")
    assert not problems, "\n".join(problems)
    # Equal results of an option without effect would say nothing
    if compared and not is_config_only(option):
        changes_results = any(outcome.has_effect for outcome in compared)
        assert changes_results != (option in WITHOUT_EFFECT[trainer]), "`WITHOUT_EFFECT` is wrong about it"


@pytest.mark.slow
@pytest.mark.parametrize(("trainer", "option"), ALL_OPTIONS)
def test_option_is_trls(trainer, option):
    check(trainer, option)


@pytest.mark.gate
@pytest.mark.parametrize(("trainer", "option"), SAMPLE)
def test_option_of_the_sample_is_trls(trainer, option):
    check(trainer, option)


def test_each_entry_is_about_a_value_that_runs():
    matched = {}
    for trainer, option in ALL_OPTIONS:
        for value, rows in runs_of(trainer, option):
            entries = [entry for entry in DIFFERENCES if entry.matches(trainer, option, value, rows)]
            assert len(entries) <= 1, f"several entries for {option}={value!r} of {trainer}: {entries}"
            for entry in entries:
                parts = matched.setdefault(id(entry), set())
                parts |= {trainer, option, repr(value), rows}
    for entry in DIFFERENCES:
        parts = matched.get(id(entry), set())
        named = {*entry.trainers, *entry.options, *map(repr, entry.values or ()), entry.rows} - {"*", None}
        assert entry.why and entry.what, entry
        assert parts and named <= parts, f"{named - parts} of {entry} match no run"
