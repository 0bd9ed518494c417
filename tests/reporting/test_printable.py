# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a terminal gets of rows, completions and names has no control sequences, and files keep them."""

import json
import logging
import re
import sys
import unicodedata

import pytest
from datasets import Dataset
from helpers.samplers import Wrapped
from helpers.trainer_utils import TRAINERS, make_trainer, saved

from trl_multimodal_rft.cli import main
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.extras import evaluate, filter
from trl_multimodal_rft.printable import printable
from trl_multimodal_rft.rewards.failures import RewardError


# Writes the clipboard (OSC 52), clears the screen, by C1 characters, too, and turns the direction of text
EVIL = "\x1b]52;c;b3duZWQ=\x07\x1b[2J\x9b2J\u202eevil\u2066\x7f"
NAME = f"of {EVIL.replace(';', '')}"  # a column; semicolons would be taken for separators
# Progress bars return to the start of the line, and `rich` has colors
RAW = re.compile("\x1b\\]|\x1b\\[2J|[\x07\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture
def shown(capfdbinary):
    """Returns a function that returns what was written to the descriptors 1 and 2, with logs, and asserts its form."""
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger().addHandler(handler)

    def read() -> str:
        written = b"".join(capfdbinary.readouterr()).decode()
        assert not RAW.search(written)
        return written

    yield read
    logging.getLogger().removeHandler(handler)


def test_all_characters_that_control_a_terminal():
    for number in (*range(0x3000), *range(0xD700, 0xE100)):
        character = chr(number)
        controls = unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n"
        controls = controls or unicodedata.bidirectional(character) in {
            *("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")
        }
        text = printable(f"a{character}b")
        assert (text != f"a{character}b") == controls, hex(number)
        assert not controls or text == f"a{ascii(character)[1:-1]}b" and text.isprintable()
    assert printable("é\t\n漢🙂") == "é\t\n漢🙂" and printable(printable(EVIL)) == printable(EVIL)


def test_errors_and_logs(shown):
    logger = logging.getLogger("trl_multimodal_rft.some.module")
    logger.warning("row 3: %s", EVIL)
    logger.warning(f"row 4: {EVIL}")
    text = f"{MediaError(f'row 5: {EVIL}')} {RewardError(f'row 6: {EVIL}')} {shown()}"
    assert text.count("\\x1b]52;c;") == 4 and "\\x9b2J\\u202eevil\\u2066\\x7f" in text
    record = logging.getLogger("of_a_user").makeRecord("of_a_user", logging.INFO, "", 0, "%s", (EVIL,), None)
    assert record.getMessage() == EVIL and record.args == (EVIL,)


class Evil(Wrapped):
    def __call__(self, model, prompts, **options):
        return [self.encoded(f"seven {EVIL}") for _ in prompts], None


def say(role, text=EVIL):
    return [{"role": role, "content": f"What? {text}"}]


ROWS = {
    "grpo": {"prompt": say("user"), "solution": EVIL},
    "sft": {"prompt": say("user"), "completion": say("assistant")},
    "dpo": {"prompt": say("user"), "chosen": say("assistant"), "rejected": say("assistant", "")},
    "kto": {"prompt": say("user"), "completion": say("assistant"), "label": True},
    "reward": {"prompt": say("user"), "chosen": say("assistant"), "rejected": say("assistant", "")},
}


@pytest.mark.parametrize("name", ROWS)
def test_trainers(name, shown, tmp_path):
    rewards = []

    def logs_it(completions, log_extra, **kwargs):
        log_extra(f"note {EVIL}", [EVIL] * len(completions))
        rewards.append(completions[0][0]["content"])
        return [0.0] * len(completions)

    options = {"objects": {"model": str(saved("qwen2_5_vl"))}} if name == "reward" else {}
    sampling = {"log_completions": True, "num_completions_to_print": 1, "sampler": Evil, "reward": logs_it}
    options |= sampling if name == "grpo" else {"reward": None}
    rows = Dataset.from_list([ROWS[name]] * 8)
    make_trainer(TRAINERS[name], "qwen2_5_vl", rows, tmp_path, max_steps=1, self_check=False, **options).train()
    text = shown()
    assert text.count("\\x1b]52") >= 2
    if name == "grpo":
        assert EVIL in rewards[0]
        (table,) = tmp_path.rglob("completions_*.parquet")
        row = Dataset.from_parquet(str(table))[0]
        texts = [row[name][0]["content"] for name in ("prompt", "completion")]
        assert all(EVIL in text for text in texts) and row[f"note {EVIL}"] == EVIL


def test_errors_of_files(shown, tmp_path):
    rows = Dataset.from_list([{"prompt": say("user", ""), "image": f"/tmp/{EVIL}.png"}] * 8)
    with pytest.raises(MediaError) as error:
        make_trainer(TRAINERS["grpo"], "qwen2_5_vl", rows, tmp_path, max_steps=1).train()
    assert "\\x1b]52" in str(error.value) and not RAW.search(f"{error.value}{shown()}")


@pytest.mark.parametrize("command", ["check", "evaluate", "filter", "prepare"])
def test_commands(command, shown, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"What? {EVIL}", "solution": EVIL, NAME: i} for i in range(4)]
    if command == "check":
        rows = [{**rows[0], "image": file} for file in (None, f"/tmp/{EVIL}.png")]
    Dataset.from_list(rows).to_parquet("rows.parquet")
    words = ["--dataset_name", "rows.parquet", "--model_name_or_path", str(saved("qwen2_5_vl"))]
    if command == "check":
        with pytest.raises(SystemExit):
            main(["check", *words, "--num_workers", "0"])
        assert "\\x1b]52" in shown()
        with pytest.raises(SystemExit):
            main(["check", *words[2:], "--dataset_name", NAME])
        assert "\\x1b]52" in shown()
    elif command == "prepare":
        chats = [{"from": "human", "value": EVIL}, {"from": "gpt", "value": EVIL}]
        (tmp_path / "rows.json").write_text(json.dumps([{"conversations": chats, NAME: 1}]))
        main(["prepare", "sharegpt", "rows.json", "--output_dir", "rows"])
        assert "\\x1b]52" in shown()
    else:
        module = {"evaluate": evaluate, "filter": filter}[command]
        more = ["--max_completion_length", "4", "--output_dir", "out", "--reward_funcs", "accuracy_reward"]
        more += ["--by", "accuracy", "--min", "0", "--max", "1"] if command == "filter" else []
        module.main(*parse(module.ARGUMENTS, [*words, *more]))
        shown()
