# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Published benchmarks, through to training and evaluation, and multiple-choice rewards."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import Audio, Dataset, load_dataset
from helpers.chats import audio as chirp
from helpers.chats import image as picture
from helpers.files import sound_file, write_lines
from helpers.trainer_utils import load, saved

from trl_multimodal_rft.cli import main
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.data import load_avqa, load_geo3k, load_mmau
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.extras import evaluate as evaluate_script
from trl_multimodal_rft.rewards import choice_reward
from trl_multimodal_rft.rewards.letters import without_letters
from trl_multimodal_rft.rewards.ready.choices import named_choice


TASKS = ["sound", "music", "speech"]


# Rewards


SECOND = ["Woman", "  WOMAN. ", "B", "b", "(B)", "B.", "B)", "(b) woman", "B. Woman", "B: because of the pitch"]
SECOND += ["It is a woman.", "A woman"]  # an article, no letter
# No such letter; letter and text differ
NONE = ["D", "A. Woman", "man or woman", "a robot", ""]


THIRD = ["the man and his dog", "A man and a dog"]


@pytest.mark.parametrize(("index", "answers"), [(1, SECOND), (2, THIRD), (None, NONE)])
def test_named_choice(index, answers):
    for answer in answers:
        assert named_choice(answer, ["Man", "Woman", "man, dog"]) == index, answer


def test_letters_of_choices():
    assert named_choice("B", ["B", "A"]) == 0  # text takes precedence over letters
    assert named_choice("C.", ["c", "d", "e"]) == 0
    for answer in ("A." * 995, "A. " * 3000, "(A)\n" * 3000 + "Man"):
        assert named_choice(answer, ["Man", "Woman"]) == 0
        assert choice_reward([answer], solution=["Man"], choices=[["Man", "Woman"]]) == [1.0]
    assert without_letters(["(A) Man", "(B) A dog"]) == ["Man", "A dog"]
    assert without_letters(["A. Man", "B. Woman", "C) Child"]) == ["Man", "Woman", "Child"]
    assert without_letters(["B. Man", "A. Woman"]) == ["B. Man", "A. Woman"]  # possibly initials
    assert without_letters(["A", "B"]) == ["A", "B"]
    assert without_letters(["(A) Man", "Woman"]) == ["(A) Man", "Woman"]


def test_choice_reward():
    choices = ["Man", "Woman", "Child"]
    completions = [
        "<answer>Woman</answer>",
        "<answer>(B)</answer> not a man",
        [{"role": "assistant", "content": "a woman"}],
        "<answer>Man</answer> Woman",
        "Child",
        "Child",
    ]
    solution = ["Woman", "<answer>Woman</answer>", "B", "Woman", None, "Child"]
    rewards = choice_reward(completions=completions, solution=solution, choices=[choices] * 5 + [None])
    assert rewards == [1.0, 1.0, 1.0, 0.0, None, None]
    with pytest.raises(ValueError, match="`choices`"):
        choice_reward(completions=["a"], solution=["a"])
    with pytest.raises(ValueError, match="row 0, column 'solution': 'Robot'"):
        choice_reward(completions=["a"], solution=["Robot"], choices=[choices])


# MMAU


def write_wavs(folder: Path, start: str, n: int) -> None:
    folder.mkdir()
    for i in range(n):
        (folder / f"{start}{i}.wav").write_bytes(sound_file(chirp(0.3 + 0.1 * i, i)["audio"]))


def mmau_entries(n: int) -> list[dict]:
    return [
        {
            "id": f"id-{i}",
            "audio_id": f"./test-mini-audios/id-{i}.wav",
            "question": f"Who speaks in recording {i}?",
            "choices": ["Man", "Woman", "Child", "Robot"],
            "answer": ["Man", "Woman", "Child", "Robot"][i % 4],
            "dataset": "AudioSet",
            "task": TASKS[i % 3],
            "split": "test-mini",
            "category": "Reasoning",
            "sub-category": "Acoustic Source Inference",
            "difficulty": "medium",
        }
        for i in range(n)
    ]


@pytest.fixture
def mmau(tmp_path):
    """The format of the MMAU repository: a list and a folder of recordings."""
    folder = tmp_path / "MMAU"
    folder.mkdir()
    (folder / "mmau-test-mini.json").write_text(json.dumps(mmau_entries(5), indent=2))
    write_wavs(folder / "test-mini-audios", "id-", 5)
    return folder


def test_mmau(mmau):
    dataset = load_mmau(mmau)
    assert dataset.column_names == [
        *("prompt", "audio", "solution", "choices", "id", "task", "category", "sub_category", "difficulty", "dataset")
    ]
    row = dataset[1]
    options = "Please choose the answer from the following options: ['Man', 'Woman', 'Child', 'Robot']."
    asked = f"Who speaks in recording 1? {options} Output the final answer in <answer> </answer>."
    assert row["prompt"] == [{"role": "user", "content": asked}]
    assert row["audio"]["path"] == str(mmau / "test-mini-audios" / "id-1.wav")
    assert (row["solution"], row["choices"][3], row["task"]) == ("Woman", "Robot", "music")
    assert row["sub_category"] == "Acoustic Source Inference"
    assert load_mmau(mmau / "mmau-test-mini.json").to_list() == dataset.to_list()


def test_mmau_from_the_hub_has_letters(tmp_path):
    """The layout of `gamma-lab-umd/MMAU-test-mini`, from a folder."""
    rows = []
    for i, entry in enumerate(mmau_entries(3)):
        lettered = [f"({letter}) {choice}" for letter, choice in zip("ABCD", entry["choices"], strict=True)]
        names = ("id", "dataset", "task", "split", "category", "sub-category", "difficulty")
        row = {"context": {"bytes": sound_file(chirp(0.3, i)["audio"]), "path": None}}
        row |= {"instruction": entry["question"], "choices": lettered, "answer": lettered[i]}
        rows.append({**row, "other_attributes": json.dumps({name: entry[name] for name in names})})
    hub = Dataset.from_list(rows).cast_column("context", Audio(decode=False))
    hub.to_parquet(tmp_path / "hub" / "test_mini.parquet")
    for path in (tmp_path / "hub", tmp_path / "hub" / "test_mini.parquet"):
        dataset = load_mmau(path)
        row = dataset[2]
        assert row["solution"] == "Child" and row["choices"] == ["Man", "Woman", "Child", "Robot"]
        assert (row["id"], row["task"], row["sub_category"]) == ("id-2", "speech", "Acoustic Source Inference")
        assert "(A)" not in dataset[0]["prompt"][0]["content"]
        assert dataset[1]["audio"]["bytes"] == rows[1]["context"]["bytes"]
    result = evaluate(*load("qwen2_audio"), dataset, choice_reward, EvaluationConfig(max_completion_length=4))
    assert result.metrics["scored_rows"] == 3 and result.metrics["accuracy"] is not None


def test_answers_that_are_withheld(mmau):
    """Covers the test split of MMAU."""
    entries = [{k: v for k, v in entry.items() if k != "answer"} for entry in mmau_entries(2)]
    (mmau / "mmau-test.json").write_text(json.dumps(entries))
    dataset = load_mmau(mmau / "mmau-test.json")
    result = evaluate(*load("qwen2_audio"), dataset, choice_reward, EvaluationConfig(max_completion_length=2))
    assert dataset["solution"][:] == [None, None]
    assert result.metrics["accuracy"] is None and result.metrics["rows"] == 2
    assert len(result.rows[1]["completions"]) == 1
    with pytest.raises(ValueError, match=r"mmau-test-mini.json', 'mmau-test.json'\]; name one"):
        load_mmau(mmau)


def test_recordings_that_are_not_there_and_rows_of_another_layout(mmau, tmp_path, caplog):
    (mmau / "test-mini-audios" / "id-3.wav").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"row 3: the audio file .*id-3.wav doesn.t exist; .*`skip_missing=True`"
    ):
        load_mmau(mmau)
    dataset = load_mmau(mmau, skip_missing=True)
    assert dataset["id"][:] == ["id-0", "id-1", "id-2", "id-4"] and "1 of 5 rows are skipped" in caplog.text
    assert dataset[3]["audio"]["path"].endswith("id-4.wav") and dataset[3]["solution"] == "Man"
    write_wavs(tmp_path / "elsewhere", "id-", 5)
    dataset = load_mmau(mmau, audio_dir=tmp_path / "elsewhere")
    assert dataset[3]["audio"]["path"] == str(tmp_path / "elsewhere" / "id-3.wav")
    with pytest.raises(FileNotFoundError, match="None of the 5 audio files"):
        load_mmau(mmau, audio_dir=tmp_path / "nowhere", skip_missing=True)
    for changed, message in (
        ({"answer": "Robots"}, "row 0: the answer 'Robots' is none of the choices"),
        ({"question": None}, "row 0 has no 'question' or 'instruction'"),
    ):
        (mmau / "wrong.json").write_text(json.dumps([{**mmau_entries(1)[0], **changed}]))
        with pytest.raises(ValueError, match=message):
            load_mmau(mmau / "wrong.json")


# AVQA


@pytest.fixture
def avqa(tmp_path):
    """The format of R1-AQA's conversion: a JSON object per line."""
    choices = ["motorboat", "Yacht consignment", "Sailboat set sail", "Consignment car"]
    lines = [
        {
            "id": 183 + i,
            "video_name": f"-HG3Omg_89c_00003{i}",
            "video_id": 341 + i,
            "question_text": f"What happened in the video? {i}",
            "multi_choice": choices,
            "answer": i % 4,
            "question_relation": "View",
            "question_type": "Happening",
            "dataset_name": "AVQA",
            "audio_path": f"wavs/-HG3Omg_89c_3{i}.wav",
        }
        for i in range(4)
    ]
    write_lines(tmp_path / "train_r1aqa_line.json", lines)
    write_wavs(tmp_path / "wavs", "-HG3Omg_89c_3", 4)
    return tmp_path / "train_r1aqa_line.json"


def test_avqa(avqa):
    dataset = load_avqa(avqa)
    assert dataset.column_names == [
        *("prompt", "audio", "solution", "choices", "id"),
        *("video_name", "question_relation", "question_type", "dataset_name"),
    ]
    row = dataset[1]
    asked = "What happened in the audio? 1 Please choose the answer from the following"
    assert row["prompt"][0]["content"].startswith(asked)
    assert row["audio"]["path"] == str(avqa.parent / "wavs" / "-HG3Omg_89c_31.wav")
    assert (row["solution"], row["id"], row["question_type"]) == ("Yacht consignment", 184, "Happening")
    asked = load_avqa(avqa.parent, template="{choices}: {question}")
    assert asked[0]["prompt"][0]["content"].startswith("['motorboat'")
    # A dataset with the same columns
    (avqa.parent / "parquet").mkdir()
    rows = Dataset.from_json(str(avqa), cache_dir=str(avqa.parent / "cache"))
    rows.to_parquet(avqa.parent / "parquet" / "train.parquet")
    again = load_avqa(avqa.parent / "parquet", audio_dir=avqa.parent / "wavs")
    assert again.to_list() == dataset.to_list()
    # By the command, which has one option for media of all layouts
    moved = (avqa.parent / "wavs").rename(avqa.parent / "moved")
    out = str(avqa.parent / "out")
    main(["prepare", "avqa", str(avqa), "--media_dir", str(moved), "--output_dir", out])
    assert load_dataset(out, split="train")["solution"][:] == dataset["solution"][:]
    moved.rename(avqa.parent / "wavs")
    line = json.loads(avqa.read_text().splitlines()[0])
    avqa.write_text(json.dumps({**line, "answer": 4}))
    with pytest.raises(ValueError, match="row 0: the answer 4 is none of the choices"):
        load_avqa(avqa)


# Geometry3K


@pytest.fixture
def geo3k(tmp_path):
    """The Hub's format, with one or two images per row."""
    rows = [
        {
            "images": [picture(56 + 28 * j, 56, seed=10 * i + j)["image"] for j in range(1 + i % 2)],
            "problem": ["<image>Find $x$.", "Compare <image> with <image>: what is $y$?"][i % 2],
            "answer": ["2 \\sqrt { 221 }", "120"][i % 2],
            "id": 2401 + i,
            "choices": ["120", "60", "2 \\sqrt { 221 }", "27"],
            "ground_truth": "CA"[i % 2],
        }
        for i in range(4)
    ]
    for split, n in (("train", 4), ("validation", 1), ("test", 4)):
        file = tmp_path / "geometry3k" / "data" / f"{split}-00000-of-00001.parquet"
        Dataset.from_list(rows[:n]).to_parquet(file)
    return tmp_path / "geometry3k"


def test_geo3k(geo3k):
    dataset = load_geo3k(geo3k)
    assert dataset.column_names == ["prompt", "images", "solution", "id", "choices", "ground_truth"]
    assert len(dataset) == 4 and len(load_geo3k(geo3k, split="validation")) == 1
    blocks = dataset[1]["prompt"][0]["content"]
    assert [block["type"] for block in blocks] == ["text", "image", "text", "image", "text"]
    assert blocks[4]["text"] == ": what is $y$? Output the final answer in <answer> </answer>."
    assert [block["type"] for block in dataset[0]["prompt"][0]["content"]] == ["image", "text"]
    assert np.array_equal(dataset[1]["images"][1], picture(84, 56, seed=11)["image"])
    assert dataset[0]["solution"] == "2 \\sqrt { 221 }"
    plain = load_geo3k(geo3k, template="{problem}")
    assert plain[0]["prompt"][0]["content"][1]["text"] == "Find $x$."


def test_images_without_their_marks(geo3k):
    rows = Dataset.from_parquet(str(geo3k / "data" / "test-00000-of-00001.parquet"), cache_dir=str(geo3k / "cache"))
    rows.map(lambda row: {"problem": "<image>"}, load_from_cache_file=False).to_parquet(geo3k / "wrong.parquet")
    with pytest.raises(ValueError, match="row 1, column 'images': has 2 images for 1 '<image>' in the text"):
        load_geo3k(geo3k / "wrong.parquet")
    rows.remove_columns("images").to_parquet(geo3k / "wrong.parquet")
    with pytest.raises(ValueError, match="row 0, column 'images': has no image for '<image>'"):
        load_geo3k(geo3k / "wrong.parquet")


# The script


def test_the_script_reads_benchmarks(mmau, geo3k, tmp_path, capsys, caplog):
    """The version of MMAU's questions is in the results; without one, a warning asks for it."""
    for benchmark, path, family, name, n in (
        ("mmau", mmau, "qwen2_audio", "choice_reward", 5),
        ("geo3k", geo3k, "qwen2_5_vl", "accuracy_reward", 4),
    ):
        options = [
            *("--model_name_or_path", str(saved(family)), "--dtype", "float32", "--max_completion_length", "4"),
            *("--benchmark", benchmark, "--dataset_name", str(path), "--output_dir", str(tmp_path / benchmark)),
            *(("--group_by", "task", "--benchmark_version", "v05.15.25") if benchmark == "mmau" else ()),
        ]
        evaluate_script.main(*parse(evaluate_script.ARGUMENTS, options))
        printed = capsys.readouterr().out
        content = json.loads((tmp_path / benchmark / "metrics.json").read_text())
        assert content["settings"]["reward_funcs"] == [name, "format_reward"]
        assert content["settings"]["benchmark"] == benchmark and content["metrics"]["rows"] == n
        assert f"accuracy {content['metrics']['accuracy']:.1%} (95 %: ".replace("%", " %", 1) in printed
        assert ("accuracy/sound " in printed and ", 5 rows of v05.15.25" in printed) or benchmark == "geo3k"
    assert "--benchmark_version" not in caplog.text
    sounds = (mmau / "test-mini-audios").rename(tmp_path / "sounds")
    options = ["--benchmark", "mmau", "--dataset_name", str(mmau), "--media_dir", str(sounds)]
    script_args, evaluation_args, *_ = parse(evaluate_script.ARGUMENTS, options)
    assert len(evaluate_script.load_rows(script_args, evaluation_args, "test")) == 5
    assert "`--benchmark_version v05.15.25`" in caplog.text
