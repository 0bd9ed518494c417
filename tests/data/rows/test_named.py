# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets by name, as commands load them."""

import io
import json
import re
import sys
import tarfile
import zipfile
from pathlib import Path

import datasets
import pytest
import yaml
from datasets import Dataset, DatasetDict, IterableDataset
from helpers.chats import image

from trl_multimodal_rft.cli.arguments import PPOScriptArguments, PromptArguments, parse
from trl_multimodal_rft.cli.inputs import load_split, ppo_inputs
from trl_multimodal_rft.data import load_easyr1
from trl_multimodal_rft.rewards.named import load_reward_funcs


ROWS = Dataset.from_dict({"prompt": [f"What is it? {i}" for i in range(4)], "n": [*range(4)]})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Path("home").mkdir()
    ROWS.to_json("home/x.json")
    for name in ("rows.jsonl", "rows[1].jsonl"):
        ROWS.to_json(name)
    ROWS.to_csv("rows.csv")
    ROWS.to_parquet("rows.parquet")
    ROWS.save_to_disk("saved")
    DatasetDict({"train": ROWS, "test": ROWS.select([0])}).save_to_disk("splits")
    for split in ("train", "test"):
        ROWS.to_parquet(f"files/{split}.parquet")
    picture = io.BytesIO()
    image(9, 9)["image"].save(picture, "PNG")
    files = {"0.png": picture.getvalue(), "0.json": b'{"prompt": "What?"}'}
    with tarfile.open("web.tar", "w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    with zipfile.ZipFile("pictures.zip", "w") as packed:
        packed.writestr("0.png", files["0.png"])
        packed.writestr("metadata.jsonl", '{"file_name": "0.png", "prompt": "What?"}\n')
    return tmp_path


def read(*words: str, split: str = "train"):
    (args,) = parse([PromptArguments], words)
    return load_split(args, split)


SMALL = ["rows.jsonl", "./rows.jsonl", "{folder}/rows.jsonl", "~/x.json", "rows[1].jsonl", "rows.csv", "rows.parquet"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", [*SMALL, "saved", "splits", "files", "./files", "~/../files"])
def test_every_form_of_a_name(name, streaming, folder):
    rows = read("--dataset_name", name.format(folder=folder), *["--dataset_streaming"] * streaming)
    assert isinstance(rows, IterableDataset) == streaming
    assert list(rows) == list(ROWS)


@pytest.mark.parametrize("name", ["web.tar", "pictures.zip"])
def test_archives(name, folder):
    stream = read("--dataset_name", name, "--dataset_streaming")
    assert isinstance(stream, IterableDataset) and len(list(stream)) == 1
    written = [path for path in Path("cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert not written, "a stream is unpacked nowhere"
    assert next(iter(read("--dataset_name", name))).keys() == next(iter(stream)).keys()


def test_splits(folder):
    assert len(read("--dataset_name", "rows.jsonl", split="train[:3]")) == 3
    with pytest.raises(ValueError, match=r"'splits' can't be read: it has the splits \['test', 'train'\], not 'val'"):
        read("--dataset_name", "splits", split="val")


@pytest.mark.parametrize("streaming", [False, True])
def test_mixture_of_files(streaming, folder):
    parts = [{"path": name} for name in ("rows.jsonl", "~/x.json", "saved", "files")]
    parts.append({"path": "splits", "split": "test", "columns": ["prompt", "n"]})
    Path("run.yaml").write_text(yaml.safe_dump({"datasets": parts, "streaming": streaming}))
    assert list(read("--config", "run.yaml")) == [*list(ROWS) * 4, ROWS[0]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["row.jsonl"], "There is no file or folder 'row.jsonl'; '{folder}' has 'rows.jsonl', "),
        (["~/y.json"], "There is no file or folder '{folder}/home/y.json'; '{folder}/home' has 'x.json'."),
        (["./data"], "There is no file or folder './data'; '{folder}' has no 'data'."),
        (["rows.jsonl", "--dataset_config", "en"], "'rows.jsonl' can't be read: a file has no configurations"),
        (["saved", "--dataset_config", "en"], "a folder of `save_to_disk` has no configurations, so leave out 'en'"),
        (["files", "--dataset_config", "en"], "the dataset 'files' can't be read: BuilderConfig 'en' not found"),
        (["empty.jsonl"], "the dataset 'empty.jsonl' can't be read: it has no rows"),
        (["broken.jsonl"], "the dataset 'broken.jsonl' can't be read: JSON parse error: "),
        (
            ["scripted"],
            "'scripted' can't be read: Dataset scripts are no longer supported, but found scripted.py; name",
        ),
        (["deep.jsonl"], "the dataset 'deep.jsonl' can't be read: values are nested too deeply; store them as text"),
        (["user/data"], "the dataset 'user/data', which is no local file or folder, can't be read: "),
    ],
)
def test_what_cant_be_read(words, message, folder):
    Path("empty.jsonl").touch()
    Path("broken.jsonl").write_text('{"prompt": "a"\n')
    Path("deep.jsonl").write_text('{"prompt": "a", "x": ' + "[" * 3000 + "1" + "]" * 3000 + "}\n")
    Path("scripted").mkdir()
    Path("scripted", "scripted.py").touch()
    with pytest.raises(ValueError) as error:
        read("--dataset_name", *words)
    assert message.format(folder=folder) in str(error.value) and "\n" not in str(error.value)


TABLES = {
    ".csv audio;prompt|0.wav;What?": "'audio;prompt' is several columns, joined by ';'; save the table with commas",
    ".csv audio;prompt|0.wav;Yes, what?": "'audio;prompt' is several",  # a comma makes a second column
    ".csv audio\tprompt|0.wav\tWhat?": r"'audio\tprompt' is several columns, joined by '\t'",
    ".tsv audio,prompt|0.wav,What?": "'audio,prompt' is several columns, joined by ','",
    ".csv sep=;|audio;prompt|0.wav;What?": "column 'sep=;' is several",
    ".csv audio;prompt|0.wav;What?|1.wav;Yes, what?": "with commas between cells, and quotes around cells with",
    ".csv \udcff\udcfea": "can't decode byte 0xff in position 0: invalid start byte; save it in UTF-8",
    ".xlsx PK": "with any supported extension, such as .csv, .jsonl and .parquet; save a spreadsheet as .csv",
}


@pytest.mark.parametrize("table", TABLES)
def test_tables_that_are_no_rows(table, folder):
    ending, _, text = table.partition(" ")
    Path(f"a{ending}").write_bytes(text.replace("|", "\n").encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=re.escape(TABLES[table])):
        read("--dataset_name", f"a{ending}")


@pytest.mark.parametrize("name", ["rows.csv", "{folder}/rows.jsonl"])
def test_a_file_beside_a_script_of_the_folders_name(name, folder):
    (folder / f"{folder.name}.py").write_text("raise SystemExit")
    assert [*read("--dataset_name", name.format(folder=folder))] == [*ROWS]


FUNCTIONS = {
    "mine.even": "No module named 'mine'. '{}' has 'mine2.py'.",
    "mine2.Even": "module 'mine2' has no attribute 'Even'. Did you mean `even`?",
    "mine2.x": "it is of type int.",
    "broken.f": "invalid syntax (broken.py, line 1).",
    "lost.f": "No module named 'nowhere'.",
}


def test_functions_by_dotted_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    for name, code in {"mine2": "x = 3\ndef even(): 0", "broken": "def f(:", "lost": "import nowhere"}.items():
        Path(f"{name}.py").write_text(code)
    for name, message in FUNCTIONS.items():
        with pytest.raises(ValueError, match=re.escape(f"function '{name}': {message.format(tmp_path)}") + "$"):
            load_reward_funcs([name])


def test_supervised_rows_of_ppo_and_other_layouts(folder):
    (args,) = parse([PPOScriptArguments], ["--ptx_dataset_name", "./rows.jsonl"])
    assert len(ppo_inputs(args)["ptx_dataset"]) == 4
    Path("home", "r1.jsonl").write_text(json.dumps({"problem": "2 + 2", "answer": "4"}) + "\n")
    assert load_easyr1("~/r1.jsonl")["solution"] == ["4"]
    with pytest.raises(ValueError, match="There is no file or folder './r1.jsonl'; "):
        load_easyr1("./r1.jsonl")
    Path("deep.jsonl").write_text("[" * 3000)
    with pytest.raises(ValueError, match=r"^deep\.jsonl can't be read: values are nested too deeply; store"):
        load_easyr1("deep.jsonl")
