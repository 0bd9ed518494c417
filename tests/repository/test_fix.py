# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
`make fix` writes what follows from the rest of the repository; where that is stale, nothing fails.
"""

import warnings

import fix
import pytest


def test_the_places_of_what_it_writes_are_there():
    if stale := fix.stale(fix.derived()):
        warnings.warn(f"`make fix` would change {', '.join(stale)}")


def test_numbers_and_names_of_lines():
    assert fix.with_number("all 3 families\n| refused | 7 |\n", r"^\| refused \| (\d+) \|", 12).endswith("| 12 |\n")
    assert fix.without_lines("[`A.b`](../p/c.py#L12), [`A`](c.py)") == "[`A.b`](../p/c.py), [`A`](c.py)"
    with pytest.raises(LookupError, match="correct that in tests/tools/fix.py"):
        fix.with_number("many families", r"(\d+) families", 3)


def test_lists_get_new_names_and_lose_old_ones():
    text = "From a shell: [`tool grpo --help`](a.md), also `rloo`, [`chat`](b.md).\n"
    expected = "From a shell: [`tool grpo --help`](a.md), [`chat`](b.md), `dpo`.\n"
    assert fix.with_names(text, "From a shell: ", ".\n", ["dpo", "grpo", "chat"]) == expected
    assert fix.with_names(expected, "From a shell: ", ".\n", ["grpo", "dpo", "chat"]) == expected
    with pytest.raises(LookupError, match="No list is between 'In a shell: '"):
        fix.with_names(text, "In a shell: ", ".\n", ["grpo"])


def test_blocks_are_between_their_markers():
    text = "a\n<!-- rows -->\n\n| old |\n\n<!-- end of rows -->\nb\n"
    assert fix.with_block(text, "rows", "| new |") == text.replace("old", "new")
    with pytest.raises(LookupError, match="No markers of 'columns' are in the page"):
        fix.with_block(text, "columns", "| new |")


def test_entries_stand_with_those_of_their_kind():
    text = "# Trainers\n\n::: a.OneTrainer\n    options:\n      members: []\n\n## Callbacks\n\n::: a.OneCallback\n"
    entry = "\n\n::: a.TwoTrainer\n    options:\n      members: []\n\n## Callbacks"
    assert fix.with_entry(text, "a.TwoTrainer") == text.replace("\n\n## Callbacks", entry)
    assert fix.with_entry(text, "a.TwoCallback") == f"{text}\n::: a.TwoCallback\n"


def test_versions_are_those_of_the_column(tmp_path):
    column = tmp_path / "newest.txt"
    column.write_text("torch==2.15.0\nvllm-cpu==0.33.0\npeft==0.22.0+x  # pinned\n")
    head, row = "| command | Python | torch | vllm | peft |\n|---|\n", "| `make test-newest` | 3.13.1 | {} |\n"
    found = fix.with_versions(head + row.format("2.14.0+cpu | 0.9 (CPU) | "), column)
    assert found == head + row.format("2.15.0+cpu | 0.33.0 (CPU) | ")
