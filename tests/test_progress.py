# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a terminal and a notebook show while they wait, and that a log gets no bars."""

import fcntl
import json
import os
import pty
import re
import struct
import termios
import time
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from threading import Thread

import pytest
from helpers.trainer_utils import AS_SHIPPED, audio_rows, image_rows, load, make_trainer, saved
from transformers.utils import notebook

from trl_multimodal_rft import CompactLogCallback, GenerationEvalCallback, MultimodalGRPOTrainer
from trl_multimodal_rft.cli import main
from trl_multimodal_rft.data import write_folder
from trl_multimodal_rft.evaluation import EvaluationConfig, EvaluationResult, evaluate, score_pairs
from trl_multimodal_rft.reporting import console


@contextmanager
def terminal():
    """Within the context, both streams are a terminal of 100 columns. Yields a list, at the end with what it got."""
    reading, writing = pty.openpty()
    fcntl.ioctl(writing, termios.TIOCSWINSZ, struct.pack("4H", 40, 100, 0, 0))
    found = []
    texts = []

    def read():
        with suppress(OSError):  # at its end
            for data in iter(lambda: os.read(reading, 4096), b""):
                found.append(data)

    reader = Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(writing, "w") as stream, redirect_stdout(stream), redirect_stderr(stream):
        yield texts
    reader.join()
    os.close(reading)
    texts.append(b"".join(found).decode())


def slow(completions, **kwargs):
    time.sleep(0.15)  # bars change every 0.1 s
    return [float(i % 4 == 0) for i, _ in enumerate(completions)]


def train(tmp_path, **options):
    held_out = {"eval_dataset": audio_rows(2)}
    options |= {"max_steps": 2, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "objects": held_out}
    options |= {"per_device_eval_batch_size": 4, **AS_SHIPPED}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(4), tmp_path, **options)
    trainer.reward_funcs[0] = slow
    config = EvaluationConfig(max_completion_length=2, batch_size=4)
    trainer.add_callback(GenerationEvalCallback(trainer, audio_rows(8), slow, config, freq=1))
    trainer.train()


def test_a_terminal_has_bars_beneath_the_lines(tmp_path):
    with terminal() as texts:
        train(tmp_path, disable_tqdm=False)
    [shown] = texts
    assert re.search(r"\rtrain:   0%\|.* 0/2 \[", shown) and re.search(r"\rtrain:  50%\|.* 1/2 \[", shown)
    assert re.search(r"\revaluate:  50%\|.* 4/8 .*accuracy 25\.0 %\]", shown)
    assert re.search(r"\d/\d \[.*batch/s\]", shown)
    assert len(re.findall(r"step [12]/2 \|", shown)) == 6  # of training, its evaluation, completions and the end
    assert not re.search(r"[^\s\rA](step \d/|self-check|first prompt)", shown)  # lines have the bar removed first
    assert re.search(r"trained in \d+ s\r\n.*\r +\r$", shown)  # no bar is left


@pytest.mark.parametrize("watched", [True, False])
def test_others_have_no_bar(tmp_path, watched, capfd):
    """A terminal with `disable_tqdm`, and a log."""
    with terminal() if watched else nullcontext([]) as texts:
        train(tmp_path, disable_tqdm=watched)
    text = "".join([*texts, *capfd.readouterr()])
    assert len(re.findall(r"^step [12]/2 \|", text, re.MULTILINE)) == 6 and not re.search(r"(train|evaluate): ", text)


def pairs(tmp_path):
    rows = image_rows(4).map(lambda row: {"chosen": "a bird", "rejected": "a cat"})
    score_pairs(slow, rows, EvaluationConfig(batch_size=1))


def answers(tmp_path):
    evaluate(*load("qwen2_5_vl"), image_rows(4), slow, EvaluationConfig(batch_size=1, max_completion_length=2))


def check(tmp_path):
    image_rows(4).save_to_disk(tmp_path / "rows")
    words = ["--dataset_name", str(tmp_path / "rows"), "--model_name_or_path", str(saved("qwen2_5_vl"))]
    main(["check", *words, "--num_workers", "0"])


def prepare(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}] * 4
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    main(["prepare", "ms-swift", str(tmp_path / "rows.json"), "--output_dir", str(tmp_path / "out")])


@pytest.mark.parametrize(
    ("run", "bars"),
    [
        (answers, [r"evaluate: .*[1-3]/4 .*accuracy 100\.0 %"]),
        (pairs, [r"evaluate: .*[1-3]/4 .*pair"]),
        (lambda tmp_path: write_folder(image_rows(4), tmp_path / "out"), [r"write train: .*/4 "]),
        (check, [r"^loading libraries \.\.\.", r"check: .*/4 "]),
        (prepare, [r"^loading libraries \.\.\.", r"write train: .*/4 "]),
    ],
    ids=["evaluate", "score_pairs", "write_folder", "check", "prepare"],
)
def test_rows_have_a_bar(run, bars, tmp_path):
    with terminal() as texts:
        run(tmp_path)
    assert all(re.search(bar, texts[0], re.MULTILINE) for bar in bars), texts


class Page(list):
    """A notebook's page: what is displayed, and what replaces it."""

    HTML = str

    def display(self, html, display_id):
        self.append(html)
        return self

    update = list.append


def test_a_notebook_has_a_table(tmp_path, monkeypatch, capsys):
    page = Page()
    monkeypatch.setattr(console, "in_notebook", lambda: True)
    monkeypatch.setattr(notebook, "disp", page)
    train(tmp_path, disable_tqdm=False)
    table = [re.findall("<t[dh]>(.*?)</t[dh]>", line) for line in page[-1].split("</tr>")][:-1]
    names = table[0]
    rows = [dict(zip(table[0], cells, strict=False)) for cells in table[1:]]
    assert names[0] == "step" and {"reward", "length", "eval accuracy", "eval reward"} < {*names}
    assert [row["step"] for row in rows] == ["0", "1", "2"] and rows[2]["eval accuracy"].startswith("25.0 % (")
    assert all(row["reward"].startswith("0.25 ±") for row in rows[1:]) and "2/2 " in page[-1]
    assert "step 1/2" not in capsys.readouterr().out


def test_a_result_is_shown_in_ten_lines():
    metrics = {f"metric/{i}": 0.5 for i in range(30)}
    shown = repr(EvaluationResult({"accuracy": 0.5, **metrics}, [{"prompt": "p" * 1000}] * 50, {}))
    assert shown.startswith("EvaluationResult of 50 rows:\n  accuracy 50.0 %\n  metric/0 0.5\n")
    assert shown.endswith("... and 23 more in `metrics`") and shown.count("\n") == 9


def test_one_console_shows_a_run(tmp_path, capsys):
    """Also where a user adds one, and none where it is removed."""
    options = {"max_steps": 1, "disable_tqdm": True, "objects": {"callbacks": [CompactLogCallback()]}}
    for count in (1, 0):
        trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", image_rows(4), tmp_path, **options)
        if count:
            trainer.add_callback(CompactLogCallback())
        else:
            trainer.remove_callback(CompactLogCallback)
        trainer.train()
        shown = capsys.readouterr().out
        assert shown.count("trained in") == count and ("'train_runtime'" in shown) == (not count)
