# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The report of `trl-multimodal-rft check` on a dataset matches the results on its rows."""

import json
import os
import shutil
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace

import av
import numpy as np
import pytest
import soundfile
import torch
import yaml
from datasets import Audio, Dataset, DatasetDict, List, load_from_disk
from datasets import Image as ImageFeature
from helpers import forked
from helpers.chats import RATE, audio, image, user
from helpers.families import FAMILIES
from helpers.files import sound_by_ffmpeg, write_film
from helpers.marks import OUTSIDE
from helpers.trainer_utils import load, saved

from trl_multimodal_rft import cli
from trl_multimodal_rft.cli import main
from trl_multimodal_rft.cli.check import RowChecker, checked_rows, without_weights
from trl_multimodal_rft.cli.parsers import options_for_check
from trl_multimodal_rft.cli.words import in_shell
from trl_multimodal_rft.data.reading.refs import MediaError, MediaRef
from trl_multimodal_rft.data.reading.rules import MediaRules
from trl_multimodal_rft.data.reading.sizes import media_size
from trl_multimodal_rft.data.rows.batches import DatasetRows
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt, placeholder_token_ids


@pytest.fixture
def said(capsys):
    """Returns what the command prints: its report if it has one, or its error."""

    def run(family, rows, *argv, status=0):
        model = saved(family) if family in FAMILIES else family
        words = ["--model_name_or_path", model, "--num_workers", 0, *["--dataset_name", rows] * bool(rows), *argv]
        with pytest.raises(SystemExit) if status else nullcontext() as exit:
            main(["check", *map(str, words)])
        assert not status or exit.value.code == status
        return "".join(capsys.readouterr())

    return run


def table(report, first):
    """Returns a table of the report: numbers by the name in the first column."""
    lines = report[report.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    header = [cell.strip() for cell in lines[0].strip("|").split("|")][1:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    return {name: dict(zip(header, cells, strict=True)) for name, *cells in rows}


@pytest.fixture
def sounds(tmp_path):
    """Returns rows with good sounds, and others with sounds of every fault, decoded by the feature of Datasets."""
    files = {}
    for name, seconds in (("short", 0.3), ("long", 0.9), ("beyond", 1.5)):
        soundfile.write(tmp_path / f"{name}.wav", audio(seconds)["audio"], RATE)
        files[name] = str(tmp_path / f"{name}.wav")
    soundfile.write(tmp_path / "click.wav", np.zeros(5), RATE)
    (tmp_path / "corrupt.wav").write_bytes(b"RIFF but no more")
    prompts = [user("What do you hear?" + " Is there a cat?" * (i % 5)) for i in range(24)]
    media = [files["long" if i % 2 else "short"] for i in range(24)]
    media[3] = media[11] = str(tmp_path / "corrupt.wav")
    media[17] = str(tmp_path / "click.wav")
    media[5] = media[6] = files["beyond"]
    media[9] = None
    prompts[8] = None
    prompts[14] = user("Is <|AUDIO|> one?")
    prompts[20] = user("Is there a cat?" * 40)
    rows = Dataset.from_dict({"prompt": prompts, "audio": media, "answer": ["cat"] * 24})
    return rows.cast_column("audio", Audio())


def truth(rows, **options):
    """Computes the report with the trainers' functions and the whole model."""
    model, processor = load("qwen2_audio")
    ids = placeholder_token_ids(model, processor)["audio"]
    lengths = {}
    tokens = {}
    failed = {}
    for i, row in enumerate(DatasetRows(rows)):
        try:
            prompt = rows_to_messages([row])[0]["prompt"]
            encoded = encode_prompt(prompt, processor, model, **options)
        except MediaError as error:
            failed[i] = str(error)
            continue
        lengths[i] = len(encoded)
        tokens[i] = sum(int(each) in ids for each in encoded.input_ids)
    return lengths, tokens, failed


@pytest.mark.parametrize("overlong", ["raise", "truncate"])
def test_report_is_true(sounds, tmp_path, overlong, said):
    sounds.save_to_disk(tmp_path / "rows")
    lengths, tokens, failed = truth(load_from_disk(tmp_path / "rows"), audio_overlong=overlong)
    limit = 200
    words = ["--output", tmp_path / "report.md", "--max_completion_length", 60]
    # Of a prompt, or of a context with room for a completion
    words += ["--max_prompt_length", limit] if overlong == "raise" else ["--vllm_max_model_length", limit + 60]
    shown = said("qwen2_audio", tmp_path / "rows", *words, "--audio_overlong", overlong, status=1)
    report = (tmp_path / "report.md").read_text()
    assert report in shown and report.startswith("# Check of `")
    assert sorted(failed) == [3, *([5, 6] if overlong == "raise" else []), 8, 11, 14, 17]
    assert [i for i in lengths if lengths[i] > limit] == [20]
    assert f"{len(failed) + 1} of 24 rows" in report.split("## ")[0]
    causes = report.split("## What would fail")[1].split("\n## ")[0].split("### ")[1:]
    rows = [[int(i.split()[0]) for i in cause.split("Rows: ")[1].split(",")] for cause in causes]
    assert sorted(map(tuple, rows)) == sorted([(3, 11), (8,), (14,), (17,)] + [(5, 6)] * (overlong == "raise"))
    for cause, places in zip(causes, rows, strict=True):
        reason = in_shell(failed[places[0]].split(": ", 1)[1], ["audio_overlong"])
        assert ("'corrupt.wav': " in cause) == (places == [3, 11])
        assert cause.startswith(f"{len(places)} of 24 rows")
        assert " ".join(reason.split()) in cause
        assert ("in `audio`" in cause) == (8 not in places and "prompt" not in failed[places[0]].split(":")[0])
    shown = table(report, "tokens of")
    text = {i: n - tokens[i] for i, n in lengths.items()}
    for name, values in (("prompt", lengths), ("text", text), ("audio", {i: n for i, n in tokens.items() if i != 9})):
        numbers = sorted(values.values())
        assert int(shown[name]["rows"]) == len(numbers)
        assert (int(shown[name]["min"]), int(shown[name]["max"])) == (numbers[0], numbers[-1])
        assert int(shown[name]["median"]) in (numbers[(len(numbers) - 1) // 2], numbers[len(numbers) // 2])
    assert shown["audio"]["share"] == f"{100 * sum(tokens.values()) / sum(lengths.values()):.3g} %"
    assert f"Overlong, of more than {limit} tokens: 1 of 24 rows (4.17 %). Rows: 20" in report
    cut = " which is cut" if overlong == "truncate" else ""
    places = "Rows: 5 (beyond.wav), 6 (beyond.wav)"
    assert f"Audio beyond the model's window{',' * bool(cut)}{cut}: 2 of 24 rows (8.33 %). {places}" in report
    assert table(report, "kind")["audio"]["max"] == "1"


@pytest.mark.slow
def test_entry_point_with_workers(sounds, tmp_path, said):
    """Worker processes on one split of a dataset give the same report as no workers."""
    DatasetDict(good=sounds.select([0, 1, 2, 4]), all=sounds).save_to_disk(tmp_path / "rows")
    options = ["--dataset_name", tmp_path / "rows", "--model_name_or_path", saved("qwen2_audio"), "--dataset_split"]
    command = [sys.executable, "-c", "from trl_multimodal_rft.cli import main; main()", "check", *options, "all"]
    shown = forked.run([*command, "--num_workers", "2"], capture_output=True)
    assert shown.returncode == 1, shown.stderr
    alone, good, other = (
        said("qwen2_audio", tmp_path / "rows", "--dataset_split", split, status=status)
        for split, status in (("all", 1), ("good", 0), ("other", 1))
    )
    assert shown.stdout[shown.stdout.index("# Check of") :] in alone
    assert "7 of 24 rows (29.2 %) would not train." in alone
    assert "All 4 rows would train." in good and "What would fail" not in good
    assert "it has the splits ['all', 'good'], not 'other'" in other


def test_streams_and_files(tmp_path, said):
    rows = [{"prompt": "What is it?", "images": [str(tmp_path / "a.png")] * n} for n in (1, 2, 0, 3, 1)]
    image(56, 84)["image"].save(tmp_path / "a.png")
    for name, row, place in (("b", 1, 1), ("c", 4, 0)):
        (tmp_path / f"{name}.png").write_bytes(b"not a picture")
        rows[row]["images"][place] = str(tmp_path / f"{name}.png")
    Dataset.from_list(rows).cast_column("images", List(ImageFeature())).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "folder").mkdir()
    Dataset.from_list(rows).to_json(tmp_path / "folder" / "rows.jsonl")
    (tmp_path / "run.yaml").write_text(f"dataset_name: {tmp_path / 'rows.parquet'}\nreward_funcs: format_reward\n")
    for options in (
        [None, "--config", tmp_path / "run.yaml"],
        [tmp_path / "rows.parquet"],
        [tmp_path / "folder"],
        [tmp_path / "folder", "--dataset_streaming", "--num_workers", 1],
    ):
        report = said("qwen2_5_vl", *options, status=1)
        assert "2 of 5 rows (40 %) would not train." in report and "Rows: 1 (b.png), 4 (c.png)\n" in report
        assert "2 of 5 rows (40 %) in `images[1]`, `images[0]`" in report and "cannot read this image" in report
        media = table(report, "kind")["image"]
        assert (media["rows"], media["min"], media["max"], media["all"]) == ("4", "1", "3", "7")
    for rule, value in (("max_image_pixels", 100), ("allowed_media_folders", [str(tmp_path / "folder")])):
        report = said("qwen2_5_vl", options[0], "--media_rules", json.dumps({rule: value}), status=1)
        assert "4 of 5 rows (80 %) would not train." in report and f"`{rule}`" in report


def test_a_batch_of_a_run_needs_its_rows(tmp_path, said):
    """`train` raises the same error."""
    Dataset.from_list([{"prompt": f"What is {i}?"} for i in range(4)]).to_parquet(tmp_path / "rows.parquet")
    run = {"per_device_train_batch_size": 8, "num_generations": 2, "num_processes": 2}
    run["reward_funcs"] = ["format_reward"]
    for steps in (1, 2, None):
        config = {**run, "gradient_accumulation_steps": steps, "generation_batch_size": None if steps else 10}
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
        report = said("qwen2_5_vl", tmp_path / "rows.parquet", "--config", tmp_path / "run.yaml", status=1)
        batch = 8 * steps if steps else 5
        assert f"has 4 rows, fewer than a batch of {batch}, so there is nothing to train on." in report
        assert "4 of 4 rows (100 %) would not train." in report
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({**run, "per_device_train_batch_size": 4}))
    report = said("qwen2_5_vl", tmp_path / "rows.parquet", "--config", tmp_path / "run.yaml")
    assert "All 4 rows would train." in report


@pytest.mark.parametrize(
    ("name", "value"), [("per_device_train_batch_size", "8.0"), ("num_processes", "auto"), ("num_generations", [4])]
)
def test_sizes_of_a_run_are_integers(name, value):
    with pytest.raises(ValueError, match=f"`{name}` is .*, which isn't an integer"):
        options_for_check({"num_generations": 2, name: value})


def test_no_weights_are_read(tmp_path, said):
    model, processor = FAMILIES["qwen2_5_vl"].build()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    Dataset.from_list([{"prompt": "What is it?"}] * 3).to_parquet(tmp_path / "rows.parquet")
    report = said(tmp_path / "model", tmp_path / "rows.parquet")
    # By default, the model's positions minus those for completions
    assert f"Overlong, of more than {2048 - 256} tokens: 0 of 3 rows (0 %)" in report
    assert "Media of a row" not in report


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_omni", "glm4v", "gemma4", "phi4_multimodal", "llava_onevision"])
def test_rows_are_as_long_as_for_the_model_with_its_weights(name):
    model, processor = FAMILIES[name].build()
    args = cli._parser("check").parse_args(["--dataset_name", "-", "--model_name_or_path", "-"])
    checker = RowChecker(None, without_weights(model.config, type(model)), processor, args)
    kinds = set()
    for i, prompt in enumerate(FAMILIES[name].prompts()):
        for block in prompt[0]["content"]:
            if block["type"] == "audio":
                block["sampling_rate"] = RATE
        checked = checker[i, {"prompt": prompt}]
        encoded = encode_prompt(rows_to_messages([{"prompt": prompt}])[0]["prompt"], processor, model)
        assert (checked.index, checked.error, checked.n_tokens) == (i, None, len(encoded))
        assert checked.n_media.keys() == checked.n_placeholders.keys() == encoded.modalities
        assert all(0 < number < len(encoded) for number in checked.n_placeholders.values())
        kinds |= encoded.modalities
    assert kinds == set(FAMILIES[name].modalities)


class Killed(torch.utils.data.Dataset):
    """A row that kills the process that reads it, like a crash of a C decoder or the OOM killer."""

    def __getitem__(self, place):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_named():
    with pytest.raises(ValueError, match="killed while it read one of the rows from 0 on"):
        list(checked_rows(Dataset.from_dict({"prompt": ["?"] * 2}), Killed(), 1))


def test_datasets_that_have_no_rows_to_train_on(tmp_path, said):
    Dataset.from_list([{"question": "What?"}] * 3).to_parquet(tmp_path / "rows.parquet")
    picture = image(56, 56)["image"]
    Dataset.from_list([{"prompt": "What?", "photo": picture}] * 3).to_parquet(tmp_path / "unread.parquet")
    for name, options, *messages in (
        ("rows.parquet", (), "3 of 3 rows (100 %) would not train.", 'pass `--prompt "{question}"`.'),
        ("rows.parquet", ("--prompt", "{question}", "--system_prompt", "Answer."), "All 3 rows would train."),
        ("unread.parquet", (), "rename it to 'image'"),
        ("unread.parquet", ("--ignored_media_columns", "photo"), "All 3 rows would train."),
        ("none", (), "There is no file or folder"),
    ):
        shown = said("qwen2_5_vl", tmp_path / name, *options, status=int(not options))
        assert all(message in shown for message in messages)


SHEETS = [
    (
        "audio,prompt|a.wav,A|,B|a.wav,C",
        "",
        "All 3 rows would train. Note: column 'audio' is empty in 1 of 3 rows, first in 1.",
    ),
    ("audio,prompt,solution|a.wav,A,1|a.wav,B,", "", "Note: column 'solution' is empty in 1 of 2 rows, first in 1."),
    ("audio,prompt,solution|a.wav,A,|a.wav,B,", "accuracy_reward", "2 of 2 rows (100 %) would not train."),
    pytest.param(
        "audio,prompt,solution|a.wav,A,1|a.wav,B,",
        "wer_reward",
        "gives no reward where column 'solution' is empty in",
        marks=OUTSIDE,
    ),
    pytest.param(
        "audio,prompt,solution|a.wav,A,|a.wav,B,",
        "wer_reward",
        "2 of 2 rows (100 %) would not train.",
        marks=OUTSIDE,
    ),
    ("audio,prompt, solution|a.wav,A,1", "accuracy_reward", "Did you mean ` solution`?"),
    ("audio, prompt|a.wav,A", "", "rename ' prompt' to 'prompt'"),
    ("audio,prompt|,A|,B", "", "no row has anything in 'audio', so that the model would get text alone"),
    ("audio;prompt|a.wav;A", "", "column 'audio;prompt' is several"),
]


@pytest.mark.parametrize(("table", "reward", "message"), SHEETS)
def test_tables_of_spreadsheets(table, reward, message, tmp_path, said):
    soundfile.write(tmp_path / "a.wav", audio(0.3)["audio"], RATE)
    (tmp_path / "rows.csv").write_text(table.replace("|", "\n"))
    words = ["--media_dir", tmp_path, *["--reward_funcs", reward] * bool(reward)]
    shown = said("qwen2_audio", tmp_path / "rows.csv", *words, status=int(" is empty in" not in message))
    assert message in " ".join(shown.split())


@pytest.mark.parametrize("columns", [{}, {"chosen": "Yes.", "rejected": "No."}, {"completion": "Yes.", "label": True}])
def test_prompts_with_their_template_beside_media(columns, tmp_path, said):
    """Rows that the trainers refuse; pictures may be in the prompt's column, or in those of answers."""
    words = load("qwen2_5_vl")[1].apply_chat_template(user("What?"), tokenize=False, add_generation_prompt=True)
    picture = image(56, 56)["image"]
    rows = [{"prompt": words, "image": picture, **columns}, {"prompt": "What?", "image": picture, **columns}]
    rows += [{"prompt": words, "image": None, **columns}]
    if "completion" in columns:
        rows[1]["label"] = False
    Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    report = said("qwen2_5_vl", tmp_path / "rows", status=1)
    assert "it looks like a chat template was applied already" in report and "Rows: 0, 2\n" in report
    if "chosen" in columns:
        picture.save(tmp_path / "picture.png")
        content = [{"type": "image", "image": str(tmp_path / "picture.png")}]
        answer = [{"role": "assistant", "content": content}]
        rows = [{"prompt": text, "chosen": answer, "rejected": answer} for text in (words, "What?")]
        Dataset.from_list(rows).save_to_disk(tmp_path / "pairs")
        report = said("qwen2_5_vl", tmp_path / "pairs", "--rejected_view", "drop", status=1)
        assert "it looks like a chat template was applied already" in report and "Rows: 0\n" in report


@pytest.mark.parametrize(
    ("table", "columns"),
    [
        ("prompt,chosen,rejected|A,yes,no|B,yes,|C,,no", ["chosen", "rejected"]),
        ("prompt,completion,label|A,yes,true|B,,false", ["completion"]),
    ],
)
def test_answers_of_pairs_and_labels(table, columns, tmp_path, said):
    (tmp_path / "rows.csv").write_text(table.replace("|", "\n"))
    report = said("qwen2_audio", tmp_path / "rows.csv", status=1)
    for row, column in enumerate(reversed(columns), start=1):
        assert f"in `{column}`\n\n" in report and f"Rows: {row}\n" in report
    assert "All" not in report


@pytest.mark.parametrize(
    ("table", "options", "status", "words"),
    [
        ("prompt,chosen,rejected|A,one,one|B,two,two", (), 1, "The dataset prefers nothing"),
        (
            "prompt,chosen,rejected|A,one,one|B,two,two",
            ("--rejected_view", "drop"),
            0,
            "2 of 2 rows (100 %). Rows: 0, 1",
        ),
        (
            "prompt,chosen,rejected|A,one,one|B,two,one",
            (),
            0,
            "which teach nothing: 1 of 2 rows (50 %)",
        ),
        ("prompt,chosen,rejected|A,one,' '|B,two,one", (), 0, "without anything to read: 1 of 2 rows (50 %). Rows: 0"),
        ("prompt,completion,label|A,one,Yes|B,two,no", (), 0, "Labels: 1 desirable, 1 undesirable"),
        ("prompt,completion,label|A,one,GOOD|B,two,1", (), 0, "All labels are True, so that"),
        ("prompt,completion,label|A,one,good|B,two,so so", (), 1, "is 'so so' of type str; give True or False."),
        ("prompt,completion,label|A,one,cat|B,two,dog", (), 0, "No cell of 'label' is true or false"),
        ("prompt,chosen,rejected|A,one,one two three|B,two,a", ("--max_length", 8), 0, "refuse: 1 of 2 rows"),
        (
            "prompt,completion,label|A,one,good|B,one two three,bad",
            ("--max_length", 8),
            0,
            "refuse: 1 of 2 rows (50 %)",
        ),
    ],
)
def test_what_pairs_and_labels_teach(table, options, status, words, tmp_path, said):
    (tmp_path / "rows.csv").write_text(table.replace("|", "\n").replace("'", '"'))
    report = said("qwen2_audio", tmp_path / "rows.csv", *options, status=status)
    assert words in " ".join(report.split())


def test_the_default_rewards_of_a_config_are_checked(tmp_path, said):
    Dataset.from_list([{"prompt": "What?"}] * 2).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list([{"prompt": "What?", "completion": "A bird."}] * 2).to_parquet(tmp_path / "answers.parquet")
    for rows, options, status in (
        ("rows", {}, 1),
        ("rows", {"reward_funcs": None}, 1),
        ("rows", {"reward_funcs": "format_reward"}, 0),
        ("rows", {"reward_model_name_or_path": "org/scorer"}, 0),
        ("rows", {"teacher_model_name_or_path": "org/teacher"}, 0),
        ("answers", {}, 0),
    ):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump({"learning_rate": 1e-6, **options}))
        words = [tmp_path / f"{rows}.parquet", "--config", tmp_path / "run.yaml"]
        assert ("column `solution`" in said("qwen2_5_vl", *words, status=status)) == bool(status)


def test_files_silence_and_repeated_rows(tmp_path, said):
    sounds = {"loud": audio(0.3)["audio"], "same": audio(0.3)["audio"], "mute": np.full(4800, 9e-4)}
    for name, samples in sounds.items():
        soundfile.write(tmp_path / f"{name}.wav", samples, RATE, "FLOAT")
    (tmp_path / "bad.wav").write_bytes(b"RIFF but no more")
    names = ["loud", "mute", "same", "bad", "loud"]
    rows = [{"prompt": user("What?"), "audio": str(tmp_path / f"{name}.wav")} for name in names]
    rows += [{**rows[0], "prompt": user("Is there a cat?")}]
    Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    report = said("qwen2_audio", tmp_path / "rows", status=1)
    assert "Rows: 3 (bad.wav)" in report
    assert "Silence, nowhere above -60 dB: 1 of 6 rows (16.7 %). Rows: 1 (mute.wav)" in report
    assert (
        "Rows that repeat the prompt and media of an earlier row: 2 of 6 rows (33.3 %). Rows: 2 (as 0), 4 (as 0)"
        in report
    )


def test_prompts_that_open_thoughts(tmp_path, said):
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "Is there a cat?"}]}\n' * 2)
    shutil.copytree(saved("qwen3_5"), tmp_path / "model")
    words = "Prompts that end with an open `<think>`, which rewards and logs put before completions: 2 of 2 rows"
    assert words not in said("qwen3_5", tmp_path / "rows.jsonl")
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    assert words in said(str(tmp_path / "model"), tmp_path / "rows.jsonl")


def test_sizes(tmp_path, said):
    """Also those of media that a limit refuses, from their headers."""
    rows = []
    for i, (width, height) in enumerate([(84, 56), (168, 112), (280, 280), (84, 56)]):
        image(width, height)["image"].save(tmp_path / f"{i}.png")
        rows.append({"prompt": user("What is it?"), "image": str(tmp_path / f"{i}.png"), "video": None})
    write_film(tmp_path / "film.mp4")  # 20 frames in two seconds
    rows.append({"prompt": user("What happens?"), "image": None, "video": str(tmp_path / "film.mp4")})
    Dataset.from_list(rows).save_to_disk(tmp_path / "rows")
    words = ["--media_rules", '{"max_image_pixels": 50000}', "--max_pixels", 6000, "--min_pixels", 5000]
    words += ["--max_frames", 8, "--video_fps", 5, "--max_completion_length", 20, "--vllm_max_model_length", 60]
    report = said("qwen2_5_vl", tmp_path / "rows", *words, status=1)
    sizes = table(report, "size")
    pixels = sizes["pixels of an image"]
    assert (pixels["number"], pixels["min"], pixels["max"]) == ("4", str(84 * 56), str(280 * 280))
    assert sizes["frames of a video"]["max"] == "20" and sizes["seconds of a video"]["max"] == "2"
    assert sizes["sampled frames of a video"]["max"] == "8"
    model, processor = load("qwen2_5_vl")
    rules = MediaRules(max_pixels=6000, min_pixels=5000, max_frames=8, video_fps=5.0)
    read = rows_to_messages([rows[i] for i in (0, 1, 3, 4)], rules=rules)
    lengths = [len(encode_prompt(each["prompt"], processor, model)) for each in read]
    tokens = table(report, "tokens of")["prompt"]
    assert [tokens[name] for name in ("rows", "min", "max")] == ["4", str(min(lengths)), str(max(lengths))]
    assert f"Overlong, of more than 40 tokens: {sum(length > 40 for length in lengths)} of 5 rows" in report


SOUNDS = {"m4a": ("mp4", "aac"), "mp4": ("mp4", "libopus"), "wma": ("asf", "wmav2"), "aac": ("adts", "aac")}
SOUNDS |= {"webm": ("webm", "libopus"), "opus": ("ogg", "libopus"), "mkv": ("matroska", "pcm_s16le")}


@pytest.mark.parametrize("ending", ["wav", "mp3", "ogg", "flac", "aiff", *SOUNDS])
def test_seconds_are_those_of_the_sound(ending, tmp_path):
    samples = audio(3.0)["audio"].astype(np.float32)
    if ending in SOUNDS:
        path = tmp_path / f"sound.{ending}"
        path.write_bytes(sound_by_ffmpeg(samples[:, None], RATE, *SOUNDS[ending]))
    else:
        path = tmp_path / f"sound.{ending}"
        soundfile.write(path, samples, RATE)
    with av.open(str(path)) as container:
        seconds = float(sum(frame.samples / frame.sample_rate for frame in container.decode(audio=0)))
    ref = MediaRef("audio", str(path), {}, "audio", 0)
    assert media_size(ref) == {"seconds": pytest.approx(seconds, abs=1e-2)} and seconds == pytest.approx(3, abs=0.1)
    short = replace(ref, rules=MediaRules(max_audio_seconds=1.0))
    assert media_size(short)["seconds"] > 1
    array = replace(ref, source={"array": np.zeros(RATE // 2, np.float32), "sampling_rate": RATE})
    assert media_size(array) == {"seconds": 0.5}
    assert media_size(MediaRef("image", np.zeros((3, 20, 30), np.uint8), {}, "image", 0)) == {"pixels": 600}
    assert media_size(MediaRef("image", "https://host/i.png", {}, "image", 0)) == {}
