# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""All rows are read before the first step, or beside the first steps, without their media."""

import re
import subprocess

import numpy as np
import PIL.Image
import pytest
from datasets import Dataset, Features, Image, List, Value, concatenate_datasets
from helpers.processes import PATIENCE, python_command, python_environment
from helpers.trainer_utils import make_trainer

from trl_multimodal_rft import (
    MultimodalDPOTrainer,
    MultimodalGRPOTrainer,
    MultimodalKTOTrainer,
    MultimodalPPOTrainer,
    MultimodalSFTTrainer,
)
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.features import outlined_rows, table_order
from trl_multimodal_rft.rollout import row_pass


QUESTION = [{"role": "user", "content": "What is it?"}]
ANSWER = [{"role": "assistant", "content": "A bird"}]
OTHER = [{"role": "assistant", "content": "A cat"}]
COLUMNS = {
    MultimodalGRPOTrainer: {"prompt": QUESTION},
    MultimodalSFTTrainer: {"prompt": QUESTION, "completion": ANSWER},
    MultimodalDPOTrainer: {"prompt": QUESTION, "chosen": ANSWER, "rejected": OTHER},
    MultimodalKTOTrainer: {"prompt": QUESTION, "completion": ANSWER},
}


@pytest.fixture
def picture(tmp_path):
    PIL.Image.effect_noise((56, 56), 64).convert("RGB").save(tmp_path / "a.png")
    return str(tmp_path / "a.png")


def rows_of(trainer_class, files, **columns):
    rows = [{**COLUMNS[trainer_class], "image": file, **columns} for file in files]
    if trainer_class is MultimodalKTOTrainer:
        rows = [{**row, "label": i % 2 == 0} for i, row in enumerate(rows)]
    return Dataset.from_list(rows)


def train(trainer_class, rows, folder, **options):
    options = {"max_steps": 1, "reward": None, **options}
    if trainer_class is MultimodalGRPOTrainer:
        del options["reward"]
        options["max_completion_length"] = 2
    trainer = make_trainer(trainer_class, "qwen2_5_vl", rows, folder, **options)
    trainer.train()
    return trainer


@pytest.mark.parametrize("trainer_class", COLUMNS)
def test_all_missing_files_are_named_before_a_step(trainer_class, picture, tmp_path):
    files = [picture] * 1100
    files[700] = files[1050] = str(tmp_path / "gone.png")
    with pytest.raises(MediaError) as error:
        train(trainer_class, rows_of(trainer_class, files), tmp_path / "out")
    assert str(error.value).startswith(
        "`train_dataset`: 2 of 1,100 rows have errors: row 700, column 'image': no such"
    )
    assert " | row 1050, column 'image': no such file: " in str(error.value)


def test_held_out_rows_of_several_datasets(picture, tmp_path):
    good = rows_of(MultimodalSFTTrainer, [picture] * 8)
    bad = rows_of(MultimodalSFTTrainer, [picture] * 7 + ["gone.png"])
    with pytest.raises(MediaError, match=r"^`eval_dataset\['b'\]`: row 7, column 'image': no such file"):
        train(MultimodalSFTTrainer, good, tmp_path, objects={"eval_dataset": {"a": good, "b": bad}})


def test_skipped_rows_are_counted_before(picture, tmp_path, caplog):
    files = [picture] * 39 + ["gone.png"]
    train(MultimodalSFTTrainer, rows_of(MultimodalSFTTrainer, files), tmp_path, on_media_error="skip")
    assert "`train_dataset`: 1 of 40 rows has errors and will be left out: row 39, column 'image'" in caplog.text
    options = {"on_media_error": "skip", "max_skipped_rows": 2}
    with pytest.raises(MediaError, match=r"3 of 40 rows have errors, more than `max_skipped_rows` \(2\) allows"):
        train(MultimodalSFTTrainer, rows_of(MultimodalSFTTrainer, [*files[2:], *["x.png"] * 2]), tmp_path, **options)


def test_a_long_pass_goes_on_beside_the_first_steps(picture, tmp_path, monkeypatch):
    monkeypatch.setattr(row_pass, "_FIRST_SECONDS", 0)
    files = [picture] * 1200
    files[900] = "gone.png"
    trainer = make_trainer(
        MultimodalSFTTrainer, "qwen2_5_vl", rows_of(MultimodalSFTTrainer, files), tmp_path, reward=None, max_steps=400
    )
    with pytest.raises(MediaError, match=r"^`train_dataset`: row 900, column 'image': no such file"):
        trainer.train()
    assert 0 < trainer.state.global_step < 400
    assert trainer._row_pass._pool is None


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("prompt", [{"role": "user", "content": "<video>What?"}], "'<video>' in the text has no video"),
        ("prompt", [{"role": "user", "content": "../cat.png"}], "the text '../cat.png' is a medium"),
        ("prompt", [{"role": "user", "content": [{"type": "image", "image": 3}]}], "is the int 3"),
        ("image", "https://user:pw@example.org/a.png", "has a user or a password"),
        ("image", "gopher://example.org/a.png", "the protocol 'gopher' isn't one of"),
    ],
)
def test_cheap_facts(column, value, message, picture, tmp_path):
    rows = [{**COLUMNS[MultimodalGRPOTrainer], "image": picture} for _ in range(60)]
    rows[41][column] = value
    if "is a medium" in message:  # beside a picture, a name may be its caption
        rows[41]["image"] = None
    if column == "prompt" and isinstance(value[0]["content"], list):  # as a column has one type
        for row in rows[:41] + rows[42:]:
            row["prompt"] = [{"role": "user", "content": [{"type": "text", "text": "What?"}]}]
    data = Dataset.from_list(rows)
    with pytest.raises(MediaError, match=r"^`train_dataset`: row 41, ") as error:
        train(MultimodalGRPOTrainer, data, tmp_path)
    assert message in str(error.value)


def test_tags_without_media_are_a_warning(picture, tmp_path, caplog):
    rows = rows_of(MultimodalSFTTrainer, [picture] * 8)
    asked = [{"role": "user", "content": "<audio> Who speaks?"}]
    text = Dataset.from_list([{"prompt": asked, "completion": ANSWER, "image": None}] * 2, rows.features)
    train(MultimodalSFTTrainer, concatenate_datasets([rows, text]), tmp_path)
    assert "2 of 10 rows have a tag in the text and no such medium, the first is row 8 with '<audio>'" in caplog.text


def test_calls_of_tools_with_paths_hold_no_media(tmp_path, caplog):
    call = {"type": "function", "function": {"name": "crop", "arguments": {"path": "a.png", "bytes": "x"}}}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Done"},
    ]
    rows = Dataset.from_list([{"prompt": turns, "completion": ANSWER}] * 8)
    make_trainer(MultimodalSFTTrainer, "qwen2_5_vl", rows, tmp_path, reward=None)
    assert "no prompt has media, so that a model for image, video gets text alone" in caplog.text


def test_outlined_rows_are_the_rows_without_contents():
    picture = PIL.Image.fromarray(np.full((5, 7, 3), 9, np.uint8))
    features = Features(
        {
            "prompt": List({"role": Value("string"), "content": List({"type": Value("string"), "image": Image()})}),
            "image": Image(),
            "images": List(Image()),
            "audio": {"array": List(Value("float32")), "sampling_rate": Value("int64")},
            "n": Value("int64"),
        }
    )
    rows = [
        {
            "prompt": [{"role": "user", "content": [{"type": "image", "image": picture}] * (n % 3)}],
            "image": picture if n % 2 else None,
            "images": None if n % 5 == 0 else [picture] * (n % 4),
            "audio": None if n % 7 == 0 else {"array": [0.5] * 300, "sampling_rate": 8000},
            "n": n,
        }
        for n in range(40)
    ]
    table = concatenate_datasets([Dataset.from_list(rows[i : i + 10], features) for i in range(0, 40, 10)])
    for data in (table, table.select(range(3, 33)), table.shuffle(seed=2).select(range(1, 30, 2))):
        outlines = dict(outlined_rows(data, data.column_names, table_order(data)))
        assert sorted(outlines) == [*range(len(data))]
        for i, outline in outlines.items():
            row = data[i]
            n_media = [len(message["content"]) for message in row["prompt"]]
            assert [len(message["content"]) for message in outline["prompt"]] == n_media
            assert outline["n"] == row["n"]
            assert (outline["image"] is None) == (row["image"] is None)
            assert outline["image"] is None or outline["image"].value["bytes"] == b"\0"
            assert (outline["images"] and len(outline["images"])) == (row["images"] and len(row["images"]))
            assert outline["audio"] == (row["audio"] and {"array": [0.5], "sampling_rate": 8000})


def test_supervised_rows_of_ppo(picture, tmp_path):
    ptx = rows_of(MultimodalSFTTrainer, [picture] * 5 + ["gone.png"])
    rows = rows_of(MultimodalGRPOTrainer, [picture] * 8)
    trainer = make_trainer(
        MultimodalPPOTrainer, "qwen2_5_vl", rows, tmp_path, objects={"ptx_dataset": ptx}, ptx_coef=0.5, max_steps=1
    )
    with pytest.raises(MediaError, match="^`ptx_dataset`: row 5, column 'image': no such file"):
        trainer.train()


@pytest.mark.parametrize("form", ["text", "formatting_func", "input_ids"])
def test_an_image_that_a_transform_makes_beside_text(form, picture, tmp_path):
    """As a stored column, it is refused."""
    row = {"input_ids": [5, 6, 7]} if form == "input_ids" else {"text": "A cat is here"}
    rows = Dataset.from_list([row] * 8)
    rows = rows.with_transform(lambda batch: {**batch, "image": [picture] * len(next(iter(batch.values())))})
    objects = {"formatting_func": lambda row: row["text"]} if form == "formatting_func" else {}
    with pytest.raises(MediaError, match=r"^row \d: plain text and media \(\['image'\]\), and nothing says where"):
        train(MultimodalSFTTrainer, rows, tmp_path / "out", objects=objects)


@pytest.mark.parametrize("name", ["a::b.png", "a#1.png", "a%20b.png", "a?b.png", "zip:b.png", "what is it.png"])
@pytest.mark.parametrize("form", ["relative", "absolute", "file://"])
def test_a_name_is_a_name_where_its_file_is(name, form, picture, tmp_path):
    (tmp_path / name).write_bytes((tmp_path / "a.png").read_bytes())
    source = {"relative": name, "absolute": str(tmp_path / name), "file://": f"file://{tmp_path}/{name}"}[form]
    rows = rows_of(MultimodalSFTTrainer, [source] * 8)
    trainer = train(MultimodalSFTTrainer, rows, tmp_path / "out", media_dir=str(tmp_path))
    assert trainer.state.global_step == 1


def test_rows_that_are_right(picture, tmp_path, caplog):
    """Captions beside pictures, texts about files, pages with icons and tags of HTML train as they are."""
    icon = "data:image/png;base64," + "iVBORw0KGgo" * 20
    texts = ["photo.png", "Yes/No: is cat.png a file", f"Fix this: a {{ background: url({icon}) }}", "page_1.png\n"]
    texts += ["Turn this into HTML with a <video> element", "// Implement a function that sums numbers " * 4]
    rows = [{"prompt": [{"role": "user", "content": text}], "completion": ANSWER, "image": picture} for text in texts]
    train(MultimodalSFTTrainer, Dataset.from_list(rows * 2), tmp_path / "captions")
    alone = [{"prompt": text, "completion": "x.png", "solution": f"<img src='{icon}'>"} for text in texts[1:3] * 4]
    train(MultimodalSFTTrainer, Dataset.from_list(alone), tmp_path / "texts")
    assert "2 of 12 rows have a tag in the text and no such medium, the first is row 4 with '<video>'" in caplog.text


def test_pictures_of_numbers_are_counted(tmp_path):
    pixels = [np.full((56, 56 + 28 * i, 3), 90, np.uint8).tolist() for i in range(2)]
    rows = [{**COLUMNS[MultimodalSFTTrainer], "images": pixels, "n": i} for i in range(8)]
    for row in rows:
        row["prompt"] = [{"role": "user", "content": "<image> or <image>?"}]
    train(MultimodalSFTTrainer, Dataset.from_list(rows), tmp_path)


def test_skipped_rows_add_up_over_the_whole_pass(picture, tmp_path, monkeypatch):
    monkeypatch.setattr(row_pass, "_FIRST_SECONDS", 0)
    monkeypatch.setattr(row_pass, "_ROWS_PER_PART", 100)
    files = [*["gone.png"] * 4, *[picture] * 392, *["gone.png"] * 4]
    rows = rows_of(MultimodalSFTTrainer, files)
    trainer = make_trainer(
        MultimodalSFTTrainer,
        "qwen2_5_vl",
        rows,
        tmp_path,
        reward=None,
        max_steps=300,
        on_media_error="skip",
        max_skipped_rows=6,
    )
    with pytest.raises(MediaError, match=r"8 of 400 rows have errors, more than `max_skipped_rows` \(6\)"):
        trainer.train()


def test_shuffled_tables_are_read_in_their_order(picture, tmp_path):
    contents = open(picture, "rb").read()
    features = Features({"prompt": Value("string"), "completion": Value("string"), "image": Image()})
    rows = [{"prompt": "What?", "completion": "A", "image": {"bytes": contents, "path": None}} for _ in range(700)]
    rows[650]["image"] = {"bytes": None, "path": "gone.png"}
    shuffled = Dataset.from_list(rows, features).shuffle(seed=3)
    index = [*shuffled._indices.column(0).to_pylist()].index(650)
    with pytest.raises(MediaError, match=rf"^`train_dataset`: row {index}, column 'image': no such file"):
        train(MultimodalSFTTrainer, shuffled, tmp_path)


SCRIPT = """
import sys
from datasets import load_from_disk
from helpers.processes import PATIENCE, python_command, python_environment
from helpers.trainer_utils import make_trainer
from trl_multimodal_rft import MultimodalSFTTrainer
from trl_multimodal_rft.rollout import row_pass

row_pass._FIRST_SECONDS = 0
row_pass._ROWS_PER_PART = 100
options = {"reward": None, "max_steps": 200, "per_device_train_batch_size": 2, "self_check": False}
options["train_sampling_strategy"] = "sequential"  # 800 rows in order: the steps reach none with an error
trainer = make_trainer(MultimodalSFTTrainer, "qwen2_5_vl", load_from_disk(sys.argv[1]), sys.argv[2], **options)
try:
    trainer.train()
except ValueError as error:
    print(f"\\nat step {trainer.state.global_step} {error}", flush=True)
"""


@pytest.mark.gate
def test_all_processes_end_at_the_same_step_with_the_errors_of_all(picture, tmp_path):
    files = [picture] * 1000
    files[830] = files[950] = "gone.png"  # in the shares of different processes
    rows_of(MultimodalSFTTrainer, files).save_to_disk(tmp_path / "rows")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = python_command([tmp_path / "script.py", tmp_path / "rows", tmp_path / "out"], processes=2)
    result = subprocess.run(command, capture_output=True, text=True, env=python_environment(), timeout=PATIENCE)
    line = r"^at step (\d+) `train_dataset`: 2 of 1,000 rows have errors: row 830, .* \| row 950, "
    steps = re.findall(line, result.stdout, re.MULTILINE)
    assert len(steps) == 2 and steps[0] == steps[1], result.stdout + result.stderr


def test_a_run_after_one_that_ended_within_the_pass(picture, tmp_path, monkeypatch):
    monkeypatch.setattr(row_pass, "_FIRST_SECONDS", 0)
    files = [picture] * 5000
    rows = rows_of(MultimodalSFTTrainer, files)
    trainer = make_trainer(MultimodalSFTTrainer, "qwen2_5_vl", rows, tmp_path, reward=None, max_steps=1)
    trainer.train()
    monkeypatch.setattr(row_pass, "_FIRST_SECONDS", 60)
    trainer.train_dataset = rows_of(MultimodalSFTTrainer, ["gone.png", *[picture] * 7])
    with pytest.raises(MediaError, match="^`train_dataset`: row 0, column 'image': no such file"):
        trainer.train()
