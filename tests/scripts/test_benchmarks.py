# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The benchmarks run, compare equal computations only, and refuse to time unequal ones."""

import importlib.util
import json
import math
import time
import weakref
from functools import partial
from itertools import product

import conversations
import gpu_report
import masks
import media_pipeline
import project
import pytest
import shared_media
import step_table
import token_budget
import torch
import views
import views_study
from helpers.folders import ROOT
from helpers.real_models import MISSING
from policy_update import PHASES
from small_models import motion_model
from tasks import moving_digits

from trl_multimodal_rft.forward.layout import PrefixLayout


pytestmark = pytest.mark.slow
THREADS = ["--threads", str(torch.get_num_threads())]


def load(name):
    """Loads a benchmark with the name of a module."""
    path = ROOT / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result_of(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.fixture(scope="module")
def policy_update():
    return load("policy_update")


def test_a_pair_of_preferences(policy_update, capsys):
    policy_update.main(["--case", "preference", "--preset", "tiny", "--repeats", "1", *THREADS, "--json"])
    result = result_of(capsys)
    assert result["gradient_difference"] < 1e-4 and result["processor_ratio"] == 4
    assert (result["setting"]["prompt_tokens"], result["setting"]["update_completion_tokens"]) == (418, [64, 64])
    assert result["memory_ratio"] > 1.5
    for trainer in ("trl", "ours"):
        assert 0 < result[trainer]["update_cpu_s"] < result[trainer]["step_cpu_s"]


@pytest.mark.parametrize(("case", "family", "group"), [("image", "qwen2_5_vl", 4), ("audio", "qwen2_audio", 2)])
def test_policy_update(policy_update, case, family, group, capsys):
    options = ["--case", case, "--family", family, "--preset", "tiny", "--repeats", "1", "--tokens", "8", *THREADS]
    policy_update.main([*options, "--group", str(group), "--json"])
    result = result_of(capsys)
    for name in ("update_ratio", "step_ratio", "memory_ratio", "processor_ratio"):
        assert math.isfinite(result[name]) and result[name] > 0
    for trainer in ("trl", "ours"):
        for quantity in ("update", "step", "generation"):
            assert result[trainer][f"{quantity}_s"] > 0 and result[trainer][f"{quantity}_cpu_s"] > 0
        assert 0 < result[trainer]["python_share_of_sampling"] < 1
        for suffix in ("_s", "_cpu_s"):
            parts = {phase: result[trainer][f"step_{phase}{suffix}"] for phase in policy_update.PHASES}
            assert sum(parts.values()) == pytest.approx(result[trainer][f"step{suffix}"])
            assert parts["sampling"] > 0 and parts["rewards"] > 0 and parts["update"] > 0
            assert parts["scoring"] == 0 and parts["overhead"] > 0
    assert result["gradient_difference"] < 1e-4
    setting = result["setting"]
    # TRL processes each prompt once per completion, and once more if it holds an image. For sounds, the baseline is
    # this package's padded rows
    per_prompt = {"image": 2 * setting["group"], "audio": 1}
    assert result["processor_ratio"] == per_prompt[case]
    if case == "image":
        assert setting["media_tokens"] == 392
        assert result["update_shared_fraction"] == 1 - 1 / setting["group"]
        # Bytes, not seconds: the forward pass runs the prompt once instead of `group` times
        assert result["memory_ratio"] > group / 2
    assert {"cpu", "cores", "gpu"} == result["hardware"].keys()
    assert result["versions"]["trl"].startswith("1.16")


def test_updates_of_linear_attention(policy_update, capsys):
    sizes = ["--case", "image", "--family", "qwen3_5", "--preset", "tiny", "--group", "2", "--tokens", "8"]
    policy_update.main([*sizes, "--updates_only", "--repeats", "1", *THREADS, "--json"])
    result = result_of(capsys)
    assert result["gradient_difference"] < 1e-4 and result["processor_ratio"] == 4 and result["memory_ratio"] > 1
    assert result["setting"]["media_tokens"] == 392 and result["update_shared_fraction"] == 0.5


@pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")
def test_pretrained_weights(policy_update, capsys):
    sizes = ["--case", "text", "--prompts", "1", "--group", "2", "--tokens", "4"]
    policy_update.main(["--weights", "speech", *sizes, "--updates_only", "--repeats", "1", *THREADS, "--json"])
    result = result_of(capsys)
    assert result["gradient_difference"] < 1e-4 and result["processor_ratio"] == 2
    assert result["setting"]["parameters"] > 1.3e8 and result["setting"]["update_completion_tokens"] == [4, 4]


def test_shared_media(capsys):
    shared_media.main(["--preset", "tiny", "--frames", "2", "--side", "4", "--repeats", "1", *THREADS, "--json"])
    result = result_of(capsys)
    tokens = {name: each["tokens"] for name, each in result["contestants"].items()}
    assert tokens["tree"] < tokens["separate"] < tokens["trl"]
    assert result["token_share_of_separate"] == tokens["tree"] / tokens["separate"]
    assert all(each["gradient_difference"] < 1e-4 for each in result["contestants"].values())
    assert all(each["update_s"] > 0 and each["update_cpu_s"] > 0 for each in result["contestants"].values())
    assert result["update_share_of_separate"] > 0 and result["update_share_of_trl"] > 0


def test_views(capsys):
    views.main(["--preset", "tiny", "--group", "4", "--repeats", "1", *THREADS, "--json"])
    found = [*result_of(capsys)["contestants"].values()]
    assert found[0]["added_forwards"] == found[0]["added_steps"] == 0
    # One more forward of the same layout; to weigh tokens before the update takes one of the clean prompts, too
    assert [each["added_forwards"] for each in found[1:]] == [1, 2]


def test_study_of_views(capsys, monkeypatch):
    monkeypatch.setitem(views_study.TASKS, "video", (motion_model, partial(moving_digits, 400, 8, frames=4)))
    found = views_study.main(["--task", "video", "--steps", "1", "--cold_steps", "1", "--seeds", "1"])
    assert [*found] == ["cold start", "GRPO", "PAPO", "VPPO", "NoisyRollout", "T-GRPO"]
    start, *trained = ((accuracy, contribution) for ((accuracy, contribution),) in found.values())
    assert math.isnan(start[1]) and all(0 <= accuracy < 0.5 and contribution > 0 for accuracy, contribution in trained)
    assert "| T-GRPO |" in capsys.readouterr().out


def test_checkpointing_runs_layers_again(policy_update, tmp_path, monkeypatch):
    silu = torch.nn.functional.silu
    calls = []
    counts = {}
    monkeypatch.setattr(torch.nn.functional, "silu", lambda *args, **kw: calls.append(1) or silu(*args, **kw))
    for options in ([], ["--checkpointing"]):
        args = policy_update.parse(["--preset", "tiny", "--group", "2", "--tokens", "8", "--updates_only", *options])
        for name, contestant in policy_update.build_trainers(args, str(tmp_path)).items():
            contestant.warm_up(updates_only=True)
            calls.clear()
            contestant.warm_up(updates_only=True)
            counts.setdefault(name, []).append(len(calls))
    # A layer of the decoder or of the vision tower calls it once in each of its forwards
    assert counts == {"trl": [4, 8], "ours": [4, 8]}


def test_step_table(capsys, monkeypatch):
    """TRL scores old log-probabilities in a pass of its own where it corrects those of an engine."""
    rows = ["text", "engine", "equal_rewards"]
    for name in rows:
        small = "--prompts 2 --group 4 --tokens 8" if name == "equal_rewards" else "--group 2 --tokens 4"
        monkeypatch.setitem(step_table.ROWS, name, f"{step_table.ROWS[name]} {small}")
    results = step_table.main(["--rows", *rows, "--preset", "tiny", "--repeats", "1", "--clock", "cpu", *THREADS])
    printed = capsys.readouterr().out.split("\n\n")
    steps, parts = (table.strip().splitlines()[2:] for table in printed[-2:])
    assert [row.split(" | ")[0] for row in steps] == [f"| `{name}`" for name in rows]
    assert [row.split(" | ")[:2] for row in parts] == [
        [f"| `{name}`", trainer] for name, trainer in product(rows[:2], ("TRL", "ours"))
    ]
    assert results["text"]["processor_ratio"] == results["text"]["setting"]["group"]
    assert results["engine"]["trl"]["step_scoring_s"] > 0 == results["engine"]["ours"]["step_scoring_s"]
    for result in results.values():
        assert result["gradient_difference"] < 1e-4


def test_options_that_make_no_sense(policy_update, capsys):
    for options, message in (
        (["--device", "cuda", "--clock", "cpu"], "--clock wall"),
        (["--family", "qwen3_5", "--preset", "3b"], "no `--preset 3b` of qwen3_5"),
        (["--family", "smollm2"], "no `--preset 12m` of smollm2"),
        (["--weights", "speech", "--case", "image"], "take no `--case image`"),
        (["--case", "long_text"], "needs `--weights speech`"),
    ):
        with pytest.raises(SystemExit):
            policy_update.main(options)
        assert message in capsys.readouterr().err


def test_gpu_report(tmp_path, monkeypatch):
    """Runs the GPU report on tiny models in several goes; a trainer fails, one is too slow, one is killed."""
    build = gpu_report.policy_update.build_trainers
    built = []
    alive = weakref.WeakSet()
    kills = ["step, image, ours"]

    def fails_once(args, folder, names):
        assert not alive, "another trainer still holds its memory"
        built.append(f"{args.part}, {args.case}, {names[0]}")
        if len(built) <= 2:
            time.sleep(60)
        if built[-1] in kills:
            kills.clear()
            raise KeyboardInterrupt
        if args.case == "varied" and names == ["trl"]:
            raise RuntimeError("no kernel\nfor this")
        found = build(args, folder, names)
        alive.update(each.trainer for each in found.values())
        return found

    monkeypatch.setattr(gpu_report.policy_update, "build_trainers", fails_once)

    def report(*options):
        out = tmp_path / "report.md"
        gpu_report.main(["--device", "cpu", "--preset", "tiny", "--seconds", "600", "--out", str(out), *options])
        return json.loads(out.with_suffix(".json").read_text())

    slow = report("--rows", "sampling", "--seconds", "0.5")
    assert [*slow["left"].values()] == ["TimeoutError: not within 1 s"] * 2 and slow["done"] == []
    assert report("--rows", "tower", "sampling")["done"] == [*slow["left"], "vision tower"]
    left = report("--minutes", "0")["left"]
    assert {*left.values()} == {"no time"}
    del built[2:]
    with pytest.raises(KeyboardInterrupt):
        report()
    found = report()
    sides = [
        f"{row}, {side}" for row, side in product(("update, image", "update, audio", "step, image"), ("ours", "trl"))
    ]
    assert built[2:] == [*sides[:5], *sides[4:], "update, varied, ours", "update, varied, trl"]
    (failed,) = found["left"].items()
    assert failed == ("update: qwen2_5_vl, varied, 2 x 4 x 16, lognormal; trl", "RuntimeError: no kernel")
    assert report() == {**found, "rate": pytest.approx(found["rate"], rel=100)} and len(built) == 11  # nothing to do

    image, audio, varied = (row for name, row in found["rows"].items() if name.startswith("update"))
    for row in (image, audio):
        assert (
            row["gradient_difference"] < 1e-4 and row["ours"]["operations"]["trl"] > row["ours"]["operations"]["ours"]
        )
    assert [row["ours"]["setting"]["baseline"] for row in (image, audio)] == ["TRL", "padded rows"]
    assert image["trl"]["memory_bytes"] > 1.5 * image["ours"]["memory_bytes"]
    for each in (image["trl"], image["ours"], audio["trl"], audio["ours"], varied["ours"]):
        assert each["is_warm"] and len(each["kernels"]) == 5
        assert 0 < each["host_s"] <= each["update_s"] and each["kernels_s"] > 0
    lengths = varied["ours"]["setting"]["update_completion_tokens"]
    assert max(lengths) == 16 and 7 <= sum(lengths) / len(lengths) <= 8.5 and len(set(lengths)) > 2
    sampled, step = (row for name, row in found["rows"].items() if not name.startswith("update"))
    for side in ("ours", "trl"):
        assert 0 < sampled[side]["generation_s"]
        assert step[side]["step_s"] == pytest.approx(sum(step[side][f"step_{each}_s"] for each in PHASES))
        assert 0 < step[side]["step_sampling_s"] < step[side]["step_s"]
    (tower,) = found["towers"]
    assert tower["difference"] < 1e-5 and min(tower["own_s"], tower["ours_s"]) > 0
    text = (tmp_path / "report.md").read_text()
    for words in ("## Updates", "## Sampling with", "## Whole step", "goes: ours", "## Vision tower", "no kernel"):
        assert words in text


def test_images_vary_with_each_repetition(policy_update, tmp_path):
    args = policy_update.parse([*"--preset tiny --case varied --group 2 --tokens 8 --updates_only".split()])
    found = {}
    for name, contestant in policy_update.build_trainers(args, str(tmp_path)).items():
        for _ in range(2):
            contestant.warm_up(updates_only=True)
            [inputs] = contestant.trainer._buffered_inputs
            lengths = inputs["prompt_mask"].sum(1).tolist() if name == "trl" else [*map(len, inputs.prompts)]
            found.setdefault(name, []).append(sorted(lengths))  # TRL shuffles them
    assert found["trl"] == found["ours"] and len({length for lengths in found["ours"] for length in lengths}) == 4


# Predictions


@pytest.mark.parametrize(("packed", "checkpointing"), [(False, True), (True, False)])
def test_costs_of_layers_add_up(packed, checkpointing):
    """The costs that follow from one and two layers, and from one and two frames, are those of the whole model."""
    machine = project.Machine(kernel=0.0)  # kernels of one frame may take the shortest time
    expected = project.run_decoder(machine, "12m", 6, 60, 4, 20, packed, checkpointing)
    assert project.decoder_costs(machine, "12m", 60, 4, 20, packed, checkpointing) == pytest.approx(expected, rel=1e-6)
    frames = 9, 6, 3, packed, checkpointing
    expected = project.run_tower(machine, "12m", 3, 1, *frames)
    found = project.tower_costs(machine, "12m", *frames)
    assert found[:-1] == pytest.approx(expected[:-1], rel=0.01) and found[-1] == pytest.approx(expected[-1], rel=0.03)


@pytest.mark.parametrize("packed, prompt", [(False, 300), (True, 300), (True, 30_000)])
def test_operations_are_those_of_the_formula(packed, prompt):
    """Counts six operations per weight of a layer and token, and those of attention and of the LM head."""
    group = 4
    tokens = 100
    layers = 6
    heads = 6
    size = 64
    vocabulary = 400
    text = project.policy_update.PRESETS["12m"].text
    width = text["hidden_size"]
    inner = text["intermediate_size"]
    keys = text["num_key_value_heads"]
    weights = 2 * width * heads * size + 2 * width * keys * size + 3 * width * inner
    rows = prompt + group * tokens if packed else group * (prompt + tokens)
    pairs = prompt * (prompt + 1) / 2 + group * (tokens * prompt + tokens * (tokens + 1) / 2)
    if not packed:
        pairs = group * (prompt + tokens) * (prompt + tokens + 1) / 2
    expected = layers * (6 * weights * rows + 14 * heads * size * pairs) + 8 * width * vocabulary * group * tokens
    costs = project.decoder_costs(project.Machine(), "12m", prompt, group, tokens, packed, False)
    places = [i * len(project.QUANTITIES) + project.QUANTITIES.index("operations") for i in range(2)]
    assert costs[places].sum() == pytest.approx(expected, rel=1e-3)


def test_predictions_are_near_what_was_measured(capsys):
    assert project.main(["--measured"]) == {} and "| ours | seconds of kernels | 0.22 | " in capsys.readouterr().out
    for _, relative in project.differences().values():
        assert max(map(abs, relative)) <= 0.25


def test_project(capsys):
    least = project.COMPLETIONS[0]
    options = ["--presets", "tiny", "--group", "2"]
    result = project.main([*options, "--cases", "image", "--tokens", str(least)])
    printed = capsys.readouterr().out
    assert printed.startswith("PREDICTIONS, NOT MEASURED.") and result["targets"] == []
    [row] = result["rows"]
    assert (row["case"], row["tokens"]) == ("image", least)
    assert row["trl"]["fits"] and not row["checkpointing"] and row["update_ratio"] > 1
    assert all(row[f"{name}_ratio"] > 0.9 for name in ("scoring", "sync", "step", "memory"))
    assert row["trl"]["operations"] > row["ours"]["operations"] > 0
    for name, prompt in project.PROMPTS.items():  # which are measured, too
        case = gpu_report.policy_update.CASES[name]
        assert (case.images, *case.image_size) == (prompt.frames, prompt.width, prompt.height)
    # A GPU of the weights alone doesn't fit them
    [row] = project.main([*options, "--cases", "image", "--tokens", str(least), "--memory", "1"])["rows"]
    assert row["checkpointing"] and not row["ours"]["fits"] and "doesn't fit" in capsys.readouterr().out


SMALL_MASKS = ["--prompt-length", "400", "--completion-length", "200", "--group", "8", "--repetitions", "1"]


@pytest.mark.parametrize(("window", "dtype"), [(None, "float32"), (100, "bfloat16")])
def test_masks(window, dtype, capsys):
    options = ["--dtype", dtype, *THREADS, "--json", *(["--window", str(window)] if window else [])]
    masks.main([*SMALL_MASKS, *options])
    size = getattr(torch, dtype).itemsize
    for case in result_of(capsys)["cases"]:
        n = case["prompts"]
        prompts = n * 400**2 if window else 0
        assert case["usual_bool_bytes"] == n * 8 * 200 * 599 + prompts
        assert case["usual_number_bytes"] == size * case["usual_bool_bytes"]
        limit = size * (n * 200 * 600 + prompts if window else 215 * 624)
        assert 0.7 * limit < case["ours_bytes"] <= 1.05 * limit
        assert case["layout_bytes"] < case["usual_bool_bytes"]
        assert min(case["usual_s"], case["ours_s"], case["layout_s"]) > 0


def test_wrong_masks_are_an_error(monkeypatch, capsys):
    right = PrefixLayout.branches

    def wrong(*args, **kwargs):
        *positions, masks = right(*args, **kwargs)
        return *positions, masks.roll(1, -1)

    monkeypatch.setattr(PrefixLayout, "branches", wrong)
    with pytest.raises(SystemExit, match="isn't what it is defined to be"):
        masks.main(SMALL_MASKS)
    assert capsys.readouterr().out == ""


def test_conversations(capsys):
    arguments = ["--preset", "tiny", "--group", "2", "--tokens", "3", "--repeats", "1", *THREADS]
    conversations.main([*arguments, "--json"])
    result = result_of(capsys)
    assert result["same_ids"] and result["ratio"] > 0
    assert result["tokens"]["turn"] == 3 and min(result["tokens"].values()) > 0


def test_media_pipeline(capsys):
    clip = ["--clips", "1", "--seconds", "0.5", "--size", "160", "120", "--prompts", "1"]
    media_pipeline.main([*clip, *THREADS, "--steps", "1", "--repeats", "1", "--json"])
    *printed, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert result["step_s"].keys() == {"when needed", "ahead", "known"} and result["ratios"]["known"] == 1
    assert result["reading_s"] > 0 and min(result["step_s"].values()) > result["wait_s"]
    assert any(line.startswith("| ahead | ") for line in printed)


def test_token_budget(capsys):
    arguments = ["--preset", "tiny", "--prompts", "2", "--group", "4", "--budgets", "600", "--repeats", "1"]
    token_budget.main([*arguments, *THREADS, "--json"])
    whole, parts = result_of(capsys)["budgets"]
    assert (whole["parts"], parts["parts"]) == (1, 2)
    assert 0 < parts["held_ratio"] < 0.9 and 0 < parts["peak_ratio"] < 0.9 and parts["cpu_s"] > 0
    assert parts["gradient_difference"] < 1e-4
