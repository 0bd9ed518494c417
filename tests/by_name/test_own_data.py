# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A folder of sounds and a file of rows, through the commands that read them."""

import base64
import json
import re
import sys
from pathlib import Path

import pytest
import soundfile
from datasets import Dataset
from helpers.chats import RATE, audio
from helpers.trainer_utils import saved

from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.cli.commands import Script, distillation, dpo, grpo, ppo, reward, rloo, sft
from trl_multimodal_rft.data.reading.decoding import load_audio
from trl_multimodal_rft.data.reading.refs import MediaError, iter_refs
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.data.rows.unread import check_columns
from trl_multimodal_rft.extras import evaluate, filter


pytestmark = pytest.mark.gate


MODEL = str(saved("qwen2_audio"))
PAIR = {"chosen": "A bird.", "rejected": "A dog."}
# Scripts that read completions, with their columns
COMPLETED = {sft: {"completion": "A bird."}, dpo: PAIR, reward: PAIR}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory, with sounds in `clips`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("clips").mkdir()
    for i in range(4):
        soundfile.write(f"clips/{i}.wav", audio(0.3, seed=i)["audio"], RATE)
    return tmp_path


def write(path: str = "rows.jsonl", n: int = 4, **columns) -> None:
    """Writes rows whose columns may have `{i}`."""
    columns = {"prompt": "What do you hear?", "solution": "{i}", **columns}
    lines = [json.dumps(columns).replace("{i}", str(i)) for i in range(n)]
    Path(path).write_text("\n".join(lines) + "\n")


def name_of(script):
    return script.name if isinstance(script, Script) else script.__name__.rpartition(".")[2]


def command(script, *words):
    given = ["--model_name_or_path", MODEL, "--dtype", "float32", "--dataset_name", "rows.jsonl"]
    if script in (grpo, rloo, ppo):
        given += ["--reward_funcs", "helpers.trainer_utils.length_and_sum", "--num_generations", "2"]
    if script in (evaluate, filter):
        given += ["--max_completion_length", "2", "--dataset_test_split", "train"]
        kept = ["--min_accuracy_with", "-1", "--max_accuracy_without", "9", "--ablate", "audio"]
        kept += ["--reward_funcs", "helpers.trainer_utils.length_and_sum"]
        given += kept if script is filter else []
    else:
        given += ["--use_cpu", "--bf16", "False", "--output_dir", "trained", "--max_steps", "1", "--report_to", "none"]
        given += ["--per_device_train_batch_size", "2", "--gradient_checkpointing", "False"]
        given += ["--max_completion_length", "2"] if script not in COMPLETED else []
    script.main(*parse(script.ARGUMENTS, [*given, *words]))


@pytest.mark.parametrize("script", [grpo, *COMPLETED, evaluate, filter], ids=name_of)
def test_relative_paths_start_from_the_folder(script, folder):
    write(audio="{i}.wav", **COMPLETED.get(script, {}))
    with pytest.raises(MediaError, match=rf"column 'audio': no such file: '{folder}/\d.wav' \(relative paths start"):
        command(script)
    command(script, "--media_dir", "clips")


def test_evaluation_of_a_file_needs_other_rows(folder):
    write(audio="clips/{i}.wav")
    with pytest.raises(ValueError, match=r"'rows.jsonl' is one split, so evaluation would use the training rows"):
        command(grpo, "--eval_strategy", "steps")
    splits = ["--dataset_train_split", "train[:2]", "--dataset_test_split", "train[2:]"]
    command(grpo, "--eval_strategy", "steps", "--eval_steps", "1", "--per_device_eval_batch_size", "2", *splits)


MESSAGES = [{"role": "user", "content": "What do you hear?"}]
ALL_ROWS = r"^`(train_)?dataset`: 4 of 4 rows have errors: row 0, column "


@pytest.mark.parametrize("script", [grpo, sft, evaluate], ids=name_of)
@pytest.mark.parametrize("written", [json.dumps, repr])
def test_text_of_messages(script, written, folder):
    write(prompt=written(MESSAGES), audio="clips/{i}.wav", **COMPLETED.get(script, {}))
    decode = "json.loads" if written is json.dumps else "ast.literal_eval"
    with pytest.raises(MediaError) as error:
        command(script)
    remedy = f"`dataset.map(lambda row: {{'prompt': {decode}(row['prompt'])}})`"
    message = f"'prompt': is the text of a list of messages; decode it: {remedy}"
    assert re.sub(ALL_ROWS, "", str(error.value)).split(" | ")[0] == message


def test_prompts_that_only_look_like_others(folder):
    """A text that begins like messages, and hints of other libraries in blocks of text."""
    known = {"text": "What is it?", "cache_control": {"type": "ephemeral"}, "annotations": [], "image": ""}
    blocks = [{"role": "user", "content": [{"type": "audio"}, {"type": "text", **known}]}]
    for prompt in ('[{"role": "user"}] is what in JSON?', blocks):
        write(prompt=prompt, audio="clips/{i}.wav")
        command(grpo)


ANSWER = {"role": "assistant", "content": "A bird."}
ANSWERED = {
    "text": {"prompt": [*MESSAGES, ANSWER]},
    "blocks": {"prompt": [*MESSAGES, {**ANSWER, "content": [{"type": "text", "text": "A bird."}]}]},
    "turns": {"prompt": [*MESSAGES, ANSWER] * 2, "audio": "clips/{i}.wav"},
    "reasoning": {"prompt": [*MESSAGES, {**ANSWER, "reasoning_content": "It sings."}], "audio": "clips/{i}.wav"},
}


@pytest.mark.parametrize("script", [grpo, rloo, ppo, distillation, evaluate, filter], ids=name_of)
@pytest.mark.parametrize("form", ANSWERED)
def test_prompts_that_hold_their_answer(script, form, folder):
    """The rows of other tools, renamed."""
    write(**ANSWERED[form])
    more = ["--teacher_model_name_or_path", MODEL] if script is distillation else []
    with pytest.raises(ValueError, match=ALL_ROWS + "'prompt': ends with the assistant's message.* prepare ms-"):
        command(script, *more)


WITHOUT_TEXT = {
    "content": ({"type": "text", "content": "What is it?"}, "'text' in 'text' {}['content']"),
    "value": ({"type": "text", "value": "What is it?"}, "'text' in 'text' {}['value']"),
    "type as key": ({"type": "input_text", "input_text": "What is it?"}, "'input_text' in 'text' {}['input_text']"),
    "no text": ({"type": "text", "text": None}, "'text' in 'text' {}[]"),
    "more text": ({"type": "text", "text": "What", "rest": " is it?"}, "'text' in 'text' {}['text', 'rest']"),
    "no refusal": ({"type": "refusal", "text": "No."}, "'refusal' in 'refusal' {}['text']"),
}


@pytest.mark.parametrize("script", [grpo, sft, evaluate], ids=name_of)
@pytest.mark.parametrize("form", WITHOUT_TEXT)
def test_blocks_without_their_text(script, form, folder):
    """The model would get the sound alone, or less than the row says."""
    block, message = WITHOUT_TEXT[form]
    prompt = [{"role": "user", "content": [{"type": "audio"}, block]}]
    write(prompt=prompt, audio="clips/{i}.wav", **COMPLETED.get(script, {}))
    place = re.escape(message.replace(" in ", " has its text in ").format("and nothing else, got "))
    message = rf"{ALL_ROWS}'prompt\[0\].content\[1\]': a block of type {place}; rename"
    with pytest.raises(MediaError, match=message):
        command(script)


CHAT = [{"from": "human", "value": "<audio>What is it?"}, {"from": "gpt", "value": "A bird."}]


@pytest.mark.parametrize(
    ("row", "remedy"),
    [
        ({"conversations": CHAT, "audios": ["clips/0.wav"]}, "prepare sharegpt --task rl`"),
        (
            {"messages": [*MESSAGES, ANSWER], "audios": ["clips/0.wav"]},
            "prepare ms-swift --task rl`; if they don't end",
        ),
        ({"query": "What is it?", "response": "A bird.", "audios": ["clips/0.wav"]}, "prepare ms-swift --task rl`"),
        ({"problem": "What?", "answer": "A", "audios": ["clips/0.wav"]}, "to 'prompt', or convert .* prepare easyr1`"),
        ({"question_text": "?", "multi_choice": ["A"], "answer": 0, "audio_path": "clips/0.wav"}, "prepare avqa`"),
        ({"prompt": MESSAGES, "data_source": "x", "reward_model": {"ground_truth": "A"}}, "prepare verl`"),
    ],
)
def test_rows_of_other_layouts(row, remedy, folder):
    message = rf"has no column '.* {remedy}"
    with pytest.raises(ValueError, match=message):
        check_columns(Dataset.from_list([row]), "rows")
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    for script, options in ((grpo, []), (grpo, ["--dataset_streaming"]), (evaluate, [])):
        if "reward_model" in row:
            with pytest.raises(ValueError, match=message):
                command(script, *options)


def test_supervised_rows_of_other_layouts(folder):
    Path("rows.jsonl").write_text(json.dumps({"query": "What is it?", "response": "A bird."}) + "\n")
    with pytest.raises(ValueError, match="it needs `prompt` and .* with `trl-multimodal-rft prepare ms-swift`"):
        command(sft)
    Path("rows.jsonl").write_text(json.dumps({"conversations": CHAT, "audios": ["clips/0.wav"]}) + "\n")
    with pytest.raises(MediaError, match="the role is 'human'; convert .* with `trl-multimodal-rft prepare sharegpt`"):
        command(sft, "--per_device_train_batch_size", "1")
    Path("rows.jsonl").write_text(json.dumps({"prompt": CHAT[:1], "completion": "A bird."}) + "\n")
    with pytest.raises(MediaError, match=r"got \['from', 'value'\]; convert .* `trl-multimodal-rft prepare sharegpt`"):
        command(sft, "--per_device_train_batch_size", "1")


@pytest.mark.parametrize("form", ["text", "bytes", "block"])
def test_base64_text(form, folder):
    text = base64.b64encode(Path("clips/0.wav").read_bytes()).decode()
    row = {"prompt": "What do you hear?", "solution": "A", "audio": {"bytes": text} if form == "bytes" else text}
    if form == "block":
        row = {"prompt": [{"role": "user", "content": [{"type": "audio", "audio": text}]}], "solution": "A"}

    def read(row):
        (medium,) = iter_refs(rows_to_messages([row]))
        return load_audio(medium, RATE)

    with pytest.raises(MediaError) as error:
        read(row)
    column = "prompt[0].content[0]" if form == "block" else "audio"
    assert str(error.value) == f"row 0, column '{column}': base64 text, not a path; put 'data:;base64,' before it"
    row = json.dumps(row).replace(text, f"data:;base64,{text}")
    assert len(read(json.loads(row))) == 0.3 * RATE
    if form == "text":
        Path("rows.jsonl").write_text(row + "\n")
        command(evaluate)


def test_long_names_are_shortened(folder):
    write(audio="a/" * 3000 + "b.wav")
    with pytest.raises(MediaError, match="row 0, column 'audio': no such file: '.*b.wav'") as error:
        command(evaluate)
    assert len(str(error.value).split(" | ")[0]) < 350
