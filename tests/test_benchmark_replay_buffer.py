# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmark of the replay buffer runs, and refuses to time what doesn't give the same."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch


FUNCTIONS = ["split", "remove_padding", "make_padded", "make_packed", "append"]
SMALL = ["--samples", "24", "--group-size", "4", "--batch-size", "8", "--tokens", "20", "--repetitions", "1"]
SMALL += ["--made-size", "5", "--max-tokens", "1200", "--patch-values"]


@pytest.fixture(scope="module")
def replay_buffer():
    path = Path(__file__).parents[1] / "benchmarks" / "replay_buffer.py"
    spec = importlib.util.spec_from_file_location("replay_buffer_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_benchmark(replay_buffer, clock, capsys):
    threads = torch.get_num_threads()
    replay_buffer.main([*SMALL, "3", "--threads", str(threads), "--clock", clock, "--json"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])

    for name in FUNCTIONS:
        for side in ("ours", "usual"):
            assert result[side][f"{name}_per_s"] == 24 / result[side][f"{name}_s"] > 0
        assert result[f"{name}_ratio"] == result["usual"][f"{name}_s"] / result["ours"][f"{name}_s"]
    assert result["memory_ratio"] == result["batch_bytes"] / result["buffer_bytes"]
    expected = {"samples": 24, "group_size": 4, "batch_size": 8, "made_size": 5, "tokens": 20}
    expected |= {"patch_values": 3, "max_tokens": 1200}
    assert {**expected, "clock": clock, "threads": threads}.items() <= result["setting"].items()
    assert {"cpu", "cores"} == result["hardware"].keys()
    assert {"python", "trl-multimodal-rft", "torch"} == result["versions"].keys()


def test_bytes_are_those_of_storages(replay_buffer):
    (batch,) = replay_buffer.build_batches(samples=8, group_size=4, batch_size=8, tokens=20, patch_values=50)
    rows, n_actions = batch.action_mask.shape
    own = {name: (8 if name in ("sequences", "attention_mask") else 4) for name in replay_buffer.FIELDS}
    own["action_mask"] = 1
    expected = sum(rows * getattr(batch, name).size(1) * size for name, size in own.items())
    expected += batch.pixel_values.numel() * 4 + rows * 3 * 8 + 2 * rows * 4  # with grids and two numbers of `info`
    assert replay_buffer.held(batch) == expected

    # Nothing but images and grids is shared, and of these the buffer has one for each group
    items = list(replay_buffer.append_all([batch]))
    images = sum(4 * items[i].pixel_values.numel() + 8 * 3 for i in (0, 4))
    rest = sum(16 * len(item.sequences) + 25 * len(item.action_mask) + 8 for item in items)
    assert replay_buffer.held(items) == images + rest
    assert replay_buffer.held(replay_buffer.append_loop([batch])) == 4 * images + rest
    # A view counts with all that it keeps
    assert replay_buffer.held({"view": torch.zeros(100)[:1]}) == 400


def test_buffer_is_smaller_than_its_batches(replay_buffer):
    result = replay_buffer.main([*SMALL, "500"])
    assert 3.5 < result["memory_ratio"] < 4.1
    assert result["batch_bytes"] > result["usual_bytes"] > 3.5 * result["buffer_bytes"]


def test_batches_are_mixed(replay_buffer):
    batches = replay_buffer.build_batches(samples=40, group_size=8, batch_size=16, tokens=50, patch_values=1)
    assert [len(batch.sequences) for batch in batches] == [16, 16, 8]
    items = [item for batch in batches for item in replay_buffer.split_experience_batch(batch)]
    for start in range(0, 40, 8):
        group = items[start : start + 8]
        assert all(torch.equal(item.pixel_values, group[0].pixel_values) for item in group)
    assert len({tuple(item.image_grid_thws[0].tolist()) for item in items}) == 5
    lengths = [len(item.sequences) for item in replay_buffer.append_all(batches)]
    assert len(set(lengths)) > 20
    assert 16 <= min(lengths) and max(lengths) <= replay_buffer.LONGEST_PROMPT + 50
    for batch in batches[:2]:
        padding = batch.attention_mask == 0
        assert padding[:, 0].any() and padding[:, -1].any()


def test_token_efficiency(replay_buffer):
    def buffer(*lengths):
        items = [
            replay_buffer.BufferItemVL(torch.ones(n).long(), torch.ones(1), action_mask=torch.ones(1).bool())
            for n in lengths
        ]
        return replay_buffer.append_all([replay_buffer.make_experience_batch(items, packing_samples=True)])

    # 6 4 | 5 5; dealt out, 6 and 5 columns for two samples each; padded to 10 tokens, 6 | 5 5 | 4
    found = replay_buffer.token_efficiency(buffer(6, 5, 5, 4), max_tokens=10)
    assert (found["packed_rows"], found["packed_efficiency"]) == (2, 1.0)
    assert (found["padded_batches"], found["padded_budget_batches"]) == (2, 3)
    assert found["padded_efficiency"] == 20 / 22
    assert found["padded_budget_efficiency"] == 20 / 30
    # A row counts in full
    assert replay_buffer.token_efficiency(buffer(6, 5), max_tokens=10)["packed_efficiency"] == 11 / 20


def test_packed_rows_of_many_samples_are_full(replay_buffer):
    """The default size, but for the pixels."""
    buffer = replay_buffer.append_all(replay_buffer.build_batches(512, 8, 32, 1024, patch_values=1))
    found = replay_buffer.token_efficiency(buffer, 8192)
    assert 0.95 <= found["packed_efficiency"] <= 1
    assert found["padded_efficiency"] < found["padded_budget_efficiency"] < found["packed_efficiency"]


def test_table(replay_buffer, capsys):
    result = replay_buffer.main([*SMALL, "3"])
    output = capsys.readouterr().out
    rows = {line.split()[0]: line for line in output.splitlines() if line.endswith("x")}
    for name in FUNCTIONS:
        assert f"{result[f'{name}_ratio']:.2f}x" in rows[name]
    assert f"{result['memory_ratio']:.2f}x" in output
    for name in ("packed", "padded", "padded_budget"):
        assert f"{result[f'{name}_efficiency']:.1%}" in output


def lost_media(value):
    return replace(value, pixel_values=value.pixel_values[1:])


def another_reward(value):
    return replace(value, info={**value.info, "reward": value.info["reward"] + 1})


def other_advantages(value):
    advantages = value.advantages
    last = advantages[-1] + 1
    return replace(
        value, advantages=[*advantages[:-1], last] if isinstance(advantages, list) else advantages.nextafter(last)
    )


def another_dtype(value):
    mask = value.attention_mask
    return replace(value, attention_mask=[m.int() for m in mask] if isinstance(mask, list) else mask.int())


@pytest.mark.parametrize("fault", [lost_media, another_reward, other_advantages, another_dtype])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_disagreement_is_an_error(replay_buffer, name, fault, monkeypatch, capsys):
    function = {
        "split": "split_experience_batch",
        "remove_padding": "remove_padding_in_sequences",
        "append": "append_all",
    }.get(name, "make_experience_batch")
    right = getattr(replay_buffer, function)

    def wrong(*args, **kwargs):
        result = right(*args, **kwargs)
        if function == "make_experience_batch":
            return fault(result) if kwargs.get("packing_samples", False) == (name == "make_packed") else result
        return [*result[:-1], fault(result[-1])]

    monkeypatch.setattr(replay_buffer, function, wrong)
    with pytest.raises(SystemExit, match=f"^{name}: ours and the usual loop don't give the same"):
        replay_buffer.main([*SMALL, "3", "--json"])
    assert capsys.readouterr().out == ""  # nothing was reported


def test_missing_samples_are_an_error(replay_buffer, monkeypatch):
    right = replay_buffer.append_all
    monkeypatch.setattr(replay_buffer, "append_all", lambda batches: right(batches)[1:])
    with pytest.raises(SystemExit, match="^append: "):
        replay_buffer.main([*SMALL, "3"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--samples", "10"], "`--samples` must be a multiple of `--group-size`"),
        (["--samples", "0"], "`--samples` must be a multiple of `--group-size`"),
        (["--batch-size", "6"], "`--batch-size` must be a multiple of `--group-size`"),
        (["--group-size", "0"], "`--batch-size` must be a multiple of `--group-size`"),
        (["--tokens", "0"], "at least 1"),
        (["--made-size", "0"], "at least 1"),
        (["--repetitions", "0"], "at least 1"),
        (["--max-tokens", "531"], "at least 512 more than `--tokens`"),
    ],
)
def test_unusable_options_are_refused(replay_buffer, options, message, capsys):
    with pytest.raises(SystemExit):
        replay_buffer.main([*SMALL, "3", *options])
    assert message in capsys.readouterr().err
