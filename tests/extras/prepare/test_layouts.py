# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`prepare` converts rows in other tools' layouts, and keeps the positions of their media."""

import base64
import json
import re
import shutil

import pytest
import soundfile
from datasets import Dataset, Features, Image, List, Value, load_dataset
from helpers.chats import RATE, audio, image
from helpers.chats import assistant as answered
from helpers.files import image_file, write_lines
from helpers.trainer_utils import TRAINERS, length_and_sum, load, make_trainer, saved

from trl_multimodal_rft.cli import main
from trl_multimodal_rft.data import (
    load_avqa_r1,
    load_conversations,
    load_easyr1,
    load_preferences,
    load_verl,
)
from trl_multimodal_rft.data.reading.refs import iter_refs
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.data.rows.features import undecoded
from trl_multimodal_rft.encoding.supervised import SupervisedEncoder


@pytest.fixture
def files(tmp_path):
    """Returns pictures and sounds of all layouts, and a function that writes rows next to them."""
    (tmp_path / "data" / "media").mkdir(parents=True)
    for i in range(3):
        image(56 + 28 * i, 56, seed=i)["image"].save(tmp_path / "data" / "media" / f"{i}.png")
        soundfile.write(tmp_path / "data" / "media" / f"{i}.wav", audio(0.3, i)["audio"], RATE)

    def write(rows, name="rows.json"):
        (tmp_path / "data" / name).write_text(json.dumps(rows))
        return tmp_path / "data" / name

    return write


def blocks(message):
    return [block["text"] or block["type"] for block in message["content"]]


LLAVA = [
    {
        "id": "a",
        "image": "media/0.png",
        "conversations": [
            {"from": "human", "value": "<image>\nIs there a cat?"},
            {"from": "gpt", "value": "No."},
            {"from": "human", "value": "A dog?"},
            {"from": "gpt", "value": "Yes."},
        ],
    },
    {
        "id": "b",
        "image": ["media/1.png", "media/2.png"],
        "conversations": [
            {"from": "human", "value": "Is <image> <image>?"},
            {"from": "gpt", "value": "The <image> is not."},
        ],
    },
    {"id": "c", "conversations": [{"from": "human", "value": "Is red blue?"}, {"from": "gpt", "value": "No."}]},
]


def test_llava_is_written_and_learned_from(files, tmp_path, capsys):
    """Covers the tokens of a supervised batch, after the source files are deleted."""
    main(["prepare", "llava", str(files(LLAVA)), "--output_dir", str(tmp_path / "out")])
    assert "train: 3 rows of messages, images, id" in capsys.readouterr().out
    shutil.rmtree(tmp_path / "data")
    dataset = load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    rows = list(dataset)
    said = [["image", "\nIs there a cat?"], ["No."], ["A dog?"], ["Yes."]]
    assert [blocks(message) for message in rows[0]["messages"]] == said
    assert blocks(rows[1]["messages"][0]) == ["Is ", "image", " ", "image", "?"]
    assert blocks(rows[1]["messages"][1]) == ["The <image> is not."]  # assistant content is text
    assert [message["role"] for message in rows[0]["messages"]] == ["user", "assistant"] * 2
    assert [[each.width for each in row["images"]] for row in rows] == [[56], [84, 112], []]
    model, processor = load("qwen2_5_vl")
    stored = undecoded(dataset).__getitems__([0, 1, 2])
    prompts, completions, _ = SupervisedEncoder(processor, model).encode_pairs(
        stored, [processor.tokenizer.eos_token_id]
    )
    counts = [int((prompt.input_ids == model.config.image_token_id).sum()) for prompt in prompts]
    assert counts == [2 * 2, 3 * 2 + 4 * 2, 0]
    assert "Yes." in processor.decode(completions[0]) and "is not" in processor.decode(completions[1])


def test_llava_as_prompts(files):
    dataset = load_conversations(files(LLAVA), task="rl")
    assert dataset.column_names == ["prompt", "images", "solution", "id"]
    assert dataset["solution"][:] == ["Yes.", "The <image> is not.", "No."]
    assert [[blocks(message) for message in prompt] for prompt in dataset["prompt"][:]] == [
        [["image", "\nIs there a cat?"], ["No."], ["A dog?"]],
        [["Is ", "image", " ", "image", "?"]],
        [["Is red blue?"]],
    ]
    (first,) = rows_to_messages([dataset.cast_column("images", List(Image(decode=False)))[0]])
    assert first["prompt"][0]["content"][0]["image"].source["path"].endswith("data/media/0.png")


def in_png(i):
    return {"bytes": image_file(image(56 + 28 * i, 56, seed=i)["image"]), "path": None}


def verl(i, **columns):
    """Returns a row in the format of verl's `examples/data_preprocess`."""
    return {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"<image>Find x{i}."}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i)},
        "extra_info": {"split": "train", "index": i, "answer": str(i), "question": f"<image>Find x{i}."},
        **columns,
    }


@pytest.mark.parametrize("form", ["feature", "bytes"])
def test_verl(form, tmp_path, capsys):
    """Covers images as the feature of Datasets, as `load_dataset` and `to_parquet` write them, and as bytes alone."""
    dataset = Dataset.from_list([verl(i, images=[in_png(i)]) for i in range(3)])
    dataset = dataset.cast_column("images", List(Image())) if form == "feature" else dataset
    dataset.to_parquet(tmp_path / "verl" / "train.parquet")
    with pytest.raises(SystemExit):  # unmodified
        words = ["check", "--dataset_name", str(tmp_path / "verl"), "--num_workers", "0"]
        main([*words, "--model_name_or_path", str(saved("qwen2_5_vl"))])
    assert "convert the verl rows with `trl-multimodal-rft prepare verl`" in capsys.readouterr().out
    main(["prepare", "verl", str(tmp_path / "verl"), "--output_dir", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "train: 3 rows of prompt, images, solution, data_source, ability, extra_info" in shown
    rows = load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert rows["solution"][:] == ["0", "1", "2"] and [each.width for (each,) in rows["images"][:]] == [56, 84, 112]
    assert [blocks(message) for message in rows[1]["prompt"]] == [["Be brief."], ["image", "Find x1."]]
    main([*shown.strip().splitlines()[-1].split()[1:-1], str(saved("qwen2_5_vl")), "--num_workers", "0"])
    assert "All 3 rows would train." in capsys.readouterr().out


def test_verl_with_media_of_qwen_vl_utils(files):
    rows = [
        verl(0, images=[{"image": "media/0.png", "max_pixels": 3136}]),
        verl(1, images=[{"type": "image", "image": "media/1.png"}]),
        verl(2, prompt=[{"role": "user", "content": "<video>?"}], videos=[{"video": "media/0.png", "fps": 0.5}]),
    ]
    dataset = load_verl(files(rows))
    first, second, third = ([b for m in row["prompt"] for b in m["content"] if b["type"] != "text"] for row in dataset)
    assert (first[0]["max_pixels"], second[0]["max_pixels"], third[0]["fps"]) == (3136, None, 0.5)
    stored = dataset.cast_column("images", List(Image(decode=False)))
    refs = [*iter_refs(rows_to_messages([stored[0], stored[1]]))]
    assert [ref.options for ref in refs] == [{"max_pixels": 3136}, {}]
    assert [ref.source["path"].rpartition("/")[2] for ref in refs] == ["0.png", "1.png"]
    for row, message in (
        ({"reward_model": {"style": "model"}}, "row 0 has no 'ground_truth'"),
        ({"prompt": "What?"}, "row 0, column 'prompt': 'What.' is no list of messages"),
        ({"images": [{"image": "media/0.png", "dpi": 3}]}, r"row 0, column 'images\[0\]': \['dpi'\] are no options"),
    ):
        with pytest.raises(ValueError, match=message):
            load_verl(files([verl(0, **{"images": ["media/0.png"], **row})]))


def test_values_are_shortened_in_errors(files):
    text = base64.b64encode(b"png" * 9000).decode()
    for row in ({"image": text}, {"image": {"of": text}}, {"conversations": [{"from": "human", "value": [text]}]}):
        with pytest.raises(ValueError, match="^row 0, column '") as error:
            load_conversations(files([{**LLAVA[2], **row}]))
        assert len(str(error.value)) < 350


def test_sharegpt_and_ms_swift(files):
    chats = [
        [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        for asked, said in (("<audio>Who <image>?", "A cat."), ("What is it?", "A dog."))
    ]
    media = {"audios": ["media/0.wav"], "images": ["media/0.png"]}
    rows = [{"messages": chats[0], **media, "system": "Be brief."}, {"messages": chats[1], "images": ["media/1.png"]}]
    dataset = load_conversations(files(rows))
    assert dataset.column_names == ["messages", "images", "audios"]
    first, second = dataset["messages"][:]
    assert [message["role"] for message in first] == ["system", "user", "assistant"]
    assert [blocks(message) for message in first] == [["Be brief."], ["audio", "Who ", "image", "?"], ["A cat."]]
    assert blocks(second[0]) == ["image", "What is it?"]  # without a placeholder, it comes first
    rows = [
        {"messages": [{"role": "user", "content": "<audio>Who?"}], "audios": ["media/0.wav"], "solution": "A cat"},
        {"query": "<audio>And now?", "history": [["Who?", "A cat."]], "audios": ["media/1.wav"], "solution": "A dog"},
        {"query": "Who?", "response": "A bird.", "system": "Listen.", "audios": ["media/2.wav"]},
    ]
    dataset = load_conversations(files(rows), task="rl")
    assert dataset["solution"][:] == ["A cat", "A dog", "A bird."]
    roles = [[message["role"] for message in prompt] for prompt in dataset["prompt"][:]]
    assert roles == [["user"], ["user", "assistant", "user"], ["system", "user"]]
    assert blocks(dataset[1]["prompt"][2]) == ["audio", "And now?"] and blocks(dataset[2]["prompt"][1])[0] == "audio"


def test_easyr1_as_its_files_and_as_a_dataset(files, tmp_path):
    """The dataset keeps bytes without a feature, as its Parquet files often do."""
    rows = [
        {"problem": f"{'<image>' * n}Find $x$. {n}", "answer": str(n), "images": [f"media/{i}.png" for i in range(n)]}
        for n in (1, 2)
    ]
    dataset = load_easyr1(files(rows))
    assert dataset["solution"][:] == ["1", "2"]
    asked = "Find $x$. 2 Output the final answer in <answer> </answer>."
    assert blocks(dataset[1]["prompt"][0]) == ["image", "image", asked]
    data = [[{"bytes": (tmp_path / "data" / each).read_bytes(), "path": None} for each in r["images"]] for r in rows]
    features = {"question": Value("string"), "answer": Value("string")}
    features["images"] = List({"bytes": Value("binary"), "path": Value("string")})
    stored = {"question": [r["problem"] for r in rows], "answer": ["1", "2"], "images": data}
    Dataset.from_dict(stored, Features(features)).to_parquet(tmp_path / "rows.parquet")
    again = load_easyr1(tmp_path / "rows.parquet", prompt_key="question")
    assert again["prompt"][:] == dataset["prompt"][:] and again.features["images"] == List(Image())
    assert [each.size for each in again[1]["images"]] == [each.size for each in dataset[1]["images"]]


AVQA_R1 = {
    "problem_id": 2,
    "problem": "What appears?",
    "data_type": "image_audio",
    "problem_type": "multiple choice",
    "options": ["A. A cat", "B. A dog"],
    "solution": "<answer>B</answer>",
    "path": {"image": "media/0.png", "audio": "media/0.wav"},
    "data_source": "OmniInstruct_v1-AVQA",
}


def test_avqa_r1(files, tmp_path):
    (tmp_path / "data" / "media" / "0.wav").write_bytes(b"a sound")
    other = {"options": [], "solution": "<answer>2</answer>", "problem_type": "numerical"}
    dataset = load_avqa_r1(files([AVQA_R1, {**AVQA_R1, **other}]), max_pixels=784)
    assert dataset["choices"][:] == [["A cat", "A dog"], None] and dataset[0]["problem_type"] == "multiple choice"
    asked = "What appears?\nA. A cat\nB. A dog\nOutput the final answer in <answer> </answer>."
    assert blocks(dataset[0]["prompt"][0]) == ["image", "audio", asked]
    image, audio = iter_refs(rows_to_messages([dataset[0]]))
    assert image.options == {"max_pixels": 784} and audio.options == {}
    for wrong in ({"image": "media/0.png"}, "media/0.mp4"):
        with pytest.raises(ValueError, match="row 0, column 'path': .* doesn't name an image and its sound; write"):
            load_avqa_r1(files([{**AVQA_R1, "path": wrong}]))


def trains(dataset, family, folder, kind="dpo"):
    """One update on all pairs by DPO or of a reward model, or on all labelled completions by KTO."""
    trainer = make_trainer(TRAINERS[kind], family, dataset, folder, reward=None, max_steps=1, self_check=False)
    trainer.train()
    return trainer.state.log_history[0]["grad_norm"] > 1e-3


def test_rlaif_v(tmp_path):
    """The columns of openbmb/RLAIF-V-Dataset, whose images are stored."""
    texts = {"ds_name": "RLAIF-V", "question": "What is it?", "chosen": "A bird.", "rejected": "A cat <image>."}
    texts |= {"origin_dataset": "COCO", "origin_split": "{}", "idx": "7", "image_path": "coco/1.jpg"}
    rows = [{**texts, "image": image(56 + 28 * i, 56, seed=i)["image"]} for i in range(2)]
    Dataset.from_list(rows).to_parquet(tmp_path / "rlaif" / "RLAIF-V-Dataset_000.parquet")
    dataset = load_preferences(tmp_path / "rlaif")
    assert dataset.column_names[:4] == ["prompt", "image", "chosen", "rejected"]
    assert [blocks(message) for message in dataset[0]["prompt"]] == [["image", "What is it?"]]
    assert dataset[1]["chosen"] == answered("A bird.") and dataset[1]["rejected"] == answered("A cat <image>.")
    assert [each.width for each in dataset["image"][:]] == [56, 84] and dataset["idx"][:] == ["7", "7"]
    assert trains(dataset, "qwen2_5_vl", tmp_path / "out")
    judged = load_preferences(tmp_path / "rlaif", task="judge", template="{question} {answer_a} {answer_b}?")
    assert judged["solution"][:] == ["A", "B"] * 2 and [each.width for each in judged["image"][:]] == [56, 56, 84, 84]
    assert [*map(blocks, judged[1]["prompt"])] == [["image", "What is it? A cat < image>. A bird.?"]]
    with pytest.raises(ValueError, match="`template` is the prompt of a judge"):
        load_preferences(tmp_path / "rlaif", template="{question}")
    with pytest.raises(ValueError, match="; rename 'question' to 'prompt', or convert the rlaif-v .* prepare rlaif-v"):
        trains(Dataset.from_list(rows), "qwen2_5_vl", tmp_path / "out")


def test_mmpr(files, tmp_path, capsys):
    """The parts of `meta.json`, in their shares; rows with an image, several and none."""
    pair = {"chosen": "So it is 7.", "rejected": "So it is 8."}
    one = [{**pair, "image": "0.png", "question": f"<image>\nFind x{i}."} for i in range(4)]
    several = {**pair, "image": ["1.png", "2.png"], "question": "Is <image> or <image> red?"}
    text = [{**pair, "image": each, "question": "Find y."} for each in ("", [])] + [{**pair, "question": "Find z."}]
    mmpr = tmp_path / "MMPR-v1.2"
    shutil.copytree(tmp_path / "data" / "media", mmpr / "images" / "M3CoT")
    meta = {}
    for name, rows, times in (("a", one, 0.5), ("b", [several], 2), ("c", text, 1)):
        write_lines(mmpr / "annotations" / f"{name}.jsonl", rows)
        meta[name] = {"root": "MMPR-v1.2/images/M3CoT", "annotation": f"MMPR-v1.2/annotations/{name}.jsonl"}
        meta[name] |= {"data_augment": False, "repeat_time": times, "length": len(rows)}
    (mmpr / "meta.json").write_text(json.dumps(meta, indent=4))
    words = ["mmpr", str(mmpr / "meta.json"), "--media_dir", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    main(["prepare", *words])
    assert "train: 7 rows of prompt, images, chosen, rejected" in capsys.readouterr().out
    shutil.rmtree(mmpr)
    dataset = load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    shown = [[*map(blocks, row["prompt"])] for row in dataset]
    assert {each[0][1] for each in shown[:2]} < {f"\nFind x{i}." for i in range(4)} and shown[0] != shown[1]
    assert shown[2] == shown[3] == [["Is ", "image", " or ", "image", " red?"]]
    assert shown[4:] == [[["Find y."]], [["Find y."]], [["Find z."]]]
    assert [len(row["images"]) for row in dataset] == [1, 1, 2, 2, 0, 0, 0]
    assert trains(dataset, "internvl", tmp_path / "trained")
    with pytest.raises(SystemExit):
        main(["prepare", *words[:-1], str(tmp_path / "other"), "--task", "rl"])
    assert "the layout 'mmpr' supports `--task dpo` or `judge`" in capsys.readouterr().err


ASKED = {"from": "human", "value": "<image>What is it?"}
SAID = {name: {"from": "gpt", "value": text} for name, text in (("chosen", "A bird."), ("rejected", "A cat."))}
MESSAGES = [{"role": "user", "content": ASKED["value"]}, *answered("A bird.")]
PAIRS = {
    "llama-factory": {"conversations": [ASKED], **SAID},
    "llama-factory alpaca": {
        "instruction": "<image>What is",
        "input": "it?",
        "chosen": "A bird.",
        "rejected": "A cat.",
    },
    "ms-swift": {"messages": MESSAGES, "rejected_response": "A cat."},
    "ms-swift messages": {"messages": MESSAGES, "rejected_messages": MESSAGES[:1] + answered("A cat.")},
    "ms-swift query": {"query": ASKED["value"], "response": "A bird.", "rejected_response": "A cat."},
}
COLUMNS = {"messages": "chat", "chosen": "good", "rejected": "bad", "images": "files"}
ENTRIES = {
    "NAME": {"NAME": {"file_name": "rows.json", "ranking": True, "columns": COLUMNS}},
    "rows": [{"dataset_path": "rows.json", "columns": {"chat": "messages", "bad": "rejected", "files": "images"}}],
}


def check_pairs(dataset, folder):
    for row in dataset:
        assert [blocks(message)[0] for message in row["prompt"]] == ["image"] and len(row["images"]) == 1
        assert (row["chosen"], row["rejected"]) == (answered("A bird."), answered("A cat."))
    assert trains(dataset, "qwen2_5_vl", folder)


@pytest.mark.parametrize("form", PAIRS)
def test_pairs_of_other_tools(form, files, tmp_path):
    """Trainers name the command that converts them."""
    row = {**PAIRS[form], "images": ["media/0.png"]}
    layout = form.split()[0]
    main(["prepare", layout, str(files([row] * 2)), "--task", "dpo", "--output_dir", str(tmp_path / "out")])
    check_pairs(load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache")), tmp_path)
    for kind, reward in (("dpo", None), ("reward", None), ("grpo", length_and_sum)):
        with pytest.raises(ValueError, match=rf"with `trl-multimodal-rft prepare {layout} --task dpo`"):
            make_trainer(TRAINERS[kind], "qwen2_5_vl", Dataset.from_list([row] * 2), tmp_path, reward=reward)
    nothing = {name: None for name in row if name.startswith("rejected")}
    wrong = {
        "row 1 has no 'rejected' or": nothing,
        "row 1: its rejected answer must be one message": {"rejected": MESSAGES[0]},
    }
    for message, changes in wrong.items():
        with pytest.raises(ValueError, match=message):
            load_conversations(files([row, {**row, **changes}]), task="dpo")


@pytest.mark.parametrize("name", ENTRIES)
def test_pairs_by_their_names_in_dataset_info(name, files, tmp_path):
    """Those of LLaMA-Factory have a name, those of ms-swift that of their file."""
    row = {"chat": MESSAGES[: 1 + (name == "rows")], "bad": SAID["rejected"], "files": ["media/0.png"]}
    rows = files([row | ({"good": SAID["chosen"]} if name == "NAME" else {})] * 2)
    for path in (files(ENTRIES[name], "dataset_info.json"), rows.with_name(name)):
        check_pairs(load_conversations(path, task="dpo"), tmp_path / path.name)
    with pytest.raises(
        ValueError, match=f"dataset_info.json names no file for 'NAMES', only the entries '{name}'; name"
    ):
        load_conversations(rows.with_name("NAMES"), task="dpo")


LABELLED = {
    "ms-swift": {"messages": MESSAGES, "label": True},
    "llama-factory": {"conversations": [ASKED, SAID["chosen"]], "kto_tag": True},
    "llama-factory alpaca": {"instruction": "<image>What is", "input": "it?", "output": "A bird.", "kto_tag": True},
}


@pytest.mark.parametrize("form", LABELLED)
def test_labelled_answers_of_other_tools(form, files, tmp_path):
    """Also covers a column of another name, as in `dataset_info.json` of LLaMA-Factory."""
    good = {**LABELLED[form], "images": ["media/0.png"]}
    [name] = {"label", "kto_tag"} & good.keys()
    rows = files([good, {**good, name: False}] * 2)
    main(["prepare", form.split()[0], str(rows), "--task", "kto", "--output_dir", str(tmp_path / "out")])
    dataset = load_dataset(str(tmp_path / "out"), split="train", cache_dir=str(tmp_path / "cache"))
    assert dataset["label"][:] == [True, False, True, False] and {*dataset.column_names} == {
        *("prompt", "completion", "label", "images")
    }
    for row in dataset:
        assert [blocks(message)[0] for message in row["prompt"]] == ["image"] and len(row["images"]) == 1
        assert row["completion"] == answered("A bird.")
    good_rows = dataset.select([0, 2])  # the gradients of the same answer with another label cancel out
    assert trains(good_rows, "qwen2_5_vl", tmp_path / "run", kind="kto")
    for value, message in (("so", f"row 1, column '{name}': is 'so'"), (None, "row 1 has no 'label' or 'kto_tag'")):
        with pytest.raises(ValueError, match=message):
            load_conversations(files([good, {**good, name: value}]), task="kto")
    with pytest.raises(
        ValueError, match=f"row 0 has one answer and a '{name}', so it isn't a pair; convert with 'kto' as"
    ):
        load_conversations(files([good]), task="dpo")
    if name == "kto_tag":
        entry = {"file_name": "rows.json", "columns": {"kto_tag": "good", "images": "images"}}
        files([{key.replace(name, "good"): value for key, value in good.items()}])
        dataset = load_conversations(files({"NAME": entry}, "dataset_info.json"), task="kto")
        assert dataset["label"][:] == [True] and "good" not in dataset.column_names


TURNS = ({"role": "user", "content": "q"}, {"role": "assistant", "content": "x"})
QUERY = {"query": "What?", "response": "x"}
UNREAD = [
    ("sft", {"messages": [TURNS[0], {**TURNS[1], "loss": False}]}, r"'messages\[1\]': 'loss' of the message isn't"),
    ("rl", {"conversations": [{**TURNS[0], "loss": True}, TURNS[1]]}, r"'conversations\[0\]': 'loss' of the message"),
    ("kto", {"messages": [TURNS[0], {**TURNS[1], "thinking": "T"}], "label": 1}, "'thinking' of the message isn't"),
    ("sft", {"messages": [{**TURNS[0], "audios": ["a.wav"]}, TURNS[1]]}, "'audios' of the message isn't converted"),
    ("sft", {"messages": [TURNS[0], {**TURNS[1], "value": "y"}]}, "'content' of the message isn't converted"),
    ("sft", {"conversation": [{"human": "q", "assistant": "x", "loss": False}]}, "'loss' of the message isn't"),
    (
        "dpo",
        {"messages": TURNS[:1], "chosen": {**TURNS[1], "reasoning": "T"}, "rejected": "y"},
        r"'chosen\[0\]': 'reas",
    ),
    (
        "dpo",
        {"messages": TURNS, "rejected_response": "y", "rejected_audios": ["a.wav"]},
        "column 'rejected_audios': me",
    ),
    ("dpo", {"messages": TURNS, "chosen": "z", "rejected": "y"}, "has a 'chosen' answer, but its conversation also"),
    ("kto", {"messages": TURNS, "label": 0, "kto_tag": "good"}, "'label' and 'kto_tag' differ"),
    ("sft", {**QUERY, "history": "Hi"}, r"column 'history\[0\]': 'H' is no pair"),
    ("sft", {**QUERY, "history": [["q", "a"], ["q", "a", "b"]]}, r"column 'history\[1\]': .* is no pair"),
    ("rl", {**QUERY, "history": [["q", 5]]}, r"column 'history\[0\]': 5 is no text"),
    ("sft", {"instruction": "q", "input": 5, "output": "x"}, "column 'input': 5 is no text"),
    ("sft", {"instruction": "q", "output": ["x"]}, r"column 'output': \['x'\] is no text"),
    ("sft", {**QUERY, "query": 2.5}, "column 'query': 2.5 is no text"),
    ("sft", {"messages": TURNS, "system": {"text": "s"}}, "column 'system': .* is no text"),
    ("sft", {"messages": [{"role": ["user"], "content": "q"}, TURNS[1]]}, r"column 'messages\[0\]': .* isn't a text"),
]


@pytest.mark.parametrize(("task", "row", "message"), UNREAD)
def test_what_would_be_lost_is_an_error_of_its_row(task, row, message, files):
    good = {"messages": TURNS, "label": True, "rejected_response": "y"}
    with pytest.raises(ValueError, match=f"row 1.*{message}"):
        load_conversations(files([good, row]), task=task)


def test_keys_that_say_nothing_more_are_no_error(files):
    messages = [{**TURNS[0], "id": 3, "loss": False, "images": []}, {**TURNS[1], "loss": True, "tool_calls": None}]
    rows = [{"messages": messages, "history": [["a", "b"]], "query": "kept"}]
    dataset = load_conversations(files(rows))
    assert [blocks(message) for message in dataset[0]["messages"]] == [["q"], ["x"]]
    assert dataset["query"][:] == ["kept"] and dataset["history"][:] == [[["a", "b"]]]  # of no conversation


def test_tags_of_dataset_info(files):
    tags = {"role_tag": "who", "content_tag": "says", "user_tag": "person", "assistant_tag": "model"}
    entry = {"file_name": "rows.json", "formatting": "sharegpt", "columns": {"messages": "talk"}, "tags": tags}
    talk = [{"who": "person", "says": "q"}, {"who": "model", "says": "x"}]
    pair = {"talk": talk[:1], "a": talk[1], "b": talk[1:]}
    for row, columns, task in (({"talk": talk}, {}, "sft"), (pair, {"chosen": "a", "rejected": "b"}, "dpo")):
        entry["columns"] = {"messages": "talk", **columns}
        files([row])
        tagged = load_conversations(files({"NAME": entry}, "dataset_info.json"), task=task)
        plain = {"messages": TURNS[: len(row["talk"])], **dict.fromkeys(columns, TURNS[1])}
        assert tagged.to_list() == load_conversations(files([plain], "plain.json"), task=task).to_list()
    files([{"talk": [*talk, {"who": "function", "says": "{}"}]}])
    with pytest.raises(ValueError, match="isn't a text of the user"):
        load_conversations(files({"NAME": {**entry, "columns": {"messages": "talk"}}}, "dataset_info.json"))


@pytest.mark.parametrize(("start", "end"), [("", "\n"), ("\ufeff", "\n"), ("\ufeff", "\r\n"), ("\ufeff\n", "\n\n")])
def test_lines_of_json_end_at_line_feeds_alone(start, end, tmp_path):
    texts = ["a\u2028b", "c\u2029d", "e\x85f", "g\x1eh", "i\x0bj"]
    lines = [json.dumps({"messages": [{**TURNS[0], "content": text}, TURNS[1]]}, ensure_ascii=False) for text in texts]
    for text in (end.join([*lines, ""]), f"[{f',{end}'.join(lines)}]"):
        (tmp_path / "rows.jsonl").write_bytes((start + text).encode())
        dataset = load_conversations(tmp_path / "rows.jsonl")
        assert [blocks(row["messages"][0]) for row in dataset] == [[text] for text in texts]


def test_errors_name_the_columns_of_the_file(files):
    row = {"messages": MESSAGES, "pictures": ["media/0.png"], "source": "me"}
    with pytest.raises(
        ValueError, match=r"row 0, column 'images': has no image for .*; rename the column 'pictures'\."
    ):
        load_conversations(files([row]))
    with pytest.raises(ValueError, match=r"; add it, or remove the tag"):
        load_conversations(files([{**row, "pictures": ["a word"]}]))
    row = {"messages": MESSAGES, "images": ["media/0.png"]}
    for task, missing in (("dpo", "rejected"), ("kto", "label")):
        with pytest.raises(ValueError, match=rf"row 0 has no '{missing}' .*, only \['images', 'messages'\];"):
            load_conversations(files([row]), task=task)


@pytest.mark.parametrize("answers", [("A", "A"), (answered("A"), answered("A")), (answered("A")[0], answered("B")[0])])
def test_pairs_that_teach_nothing(answers, tmp_path):
    rows = Dataset.from_list([{"prompt": "What?", "chosen": answers[0], "rejected": answers[1]}] * 2)
    message = "are equal in all rows|'chosen' holds a message; write a list of .*factory --task dpo`"
    for kind in ("dpo", "reward"):
        with pytest.raises(ValueError, match=message):
            make_trainer(TRAINERS[kind], "qwen2_5_vl", rows, tmp_path, reward=None)


def test_files_that_are_no_media_are_named(files, tmp_path, capsys):
    (tmp_path / "data" / "media" / "0.png").write_text("no picture")
    with pytest.raises(SystemExit):
        main(["prepare", "llava", str(files(LLAVA)), "--output_dir", str(tmp_path / "out")])
    assert re.search(r"row 0, column 'images\[0\]': cannot read this image .*0.png", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("layout", "row", "message"),
    [
        (
            "llava",
            {"image": "media/9.png"},
            r"row 1, column 'image': the file '.*9.png' doesn't exist; pass the folder",
        ),
        ("llava", {"image": ["media/0.png"] * 2}, "row 1, column 'images': has 2 images for 1 '<image>' in the text"),
        ("llava", {"image": None}, "row 1, column 'images': has no image for '<image>'"),
        ("llava", {"image": 3}, "row 1, column 'image': 3 is no path"),
        ("llava", {"image": {"path": "0.png", "image": "1.png"}}, "row 1, column 'image': has media in both 'path'"),
        ("sharegpt", {"conversations": LLAVA[0]["conversations"][:1]}, "row 1, column 'conversations': the last mess"),
        (
            "sharegpt",
            {"conversations": [{"from": "function_call", "value": "{}"}]},
            r"'conversations\[0\]': .* isn't a text",
        ),
        ("ms-swift", {"conversations": None}, "row 1 has no 'messages' or 'conversations' or 'query'"),
        ("ms-swift", {"objects": {"bbox": [[1, 2, 3, 4]]}}, "row 1, column 'objects': boxes depend on the model"),
        ("ms-swift", {"id": 3}, "column 'id': its values are of several types"),
        ("easyr1", {}, "row 0 has no 'problem'"),
        ("avqa-r1", {}, "row 0 has no 'path'"),
        ("mmau", {}, "row 0 has no 'audio_path' or 'audio' or 'audio_id'"),
    ],
)
def test_what_is_wrong_is_named(files, tmp_path, capsys, layout, row, message):
    path = files([LLAVA[0], {**LLAVA[0], **row}], "mmau-rows.json")
    with pytest.raises(SystemExit) as exit:
        main(["prepare", layout, str(path), "--output_dir", str(tmp_path / "out")])
    assert exit.value.code == 1 and not (tmp_path / "out").exists()
    assert re.search(message, capsys.readouterr().err)


def test_options_and_rules(files, tmp_path, capsys):
    path = str(files(LLAVA))
    out = str(tmp_path / "out")
    for options, message in (
        (
            ["--template", "{problem}"],
            r"the layout 'llava' doesn't support `--template`, only \['--media_dir'",
        ),
        (
            ["--media_rules", '{"allowed_media_folders": ["other"]}'],
            r"row 0, column 'images\[0\]': .*allowed_media_folders",
        ),
        (["--output_dir", str(tmp_path / "data")], "data' isn't an empty folder"),
    ):
        with pytest.raises(SystemExit):
            main(["prepare", "llava", path, "--output_dir", out, *options])
        assert re.search(message, capsys.readouterr().err)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["data"]
    main(["prepare", "llava", path, "--output_dir", out, "--splits", "dev", "--task", "rl"])
    shown = capsys.readouterr().out
    assert "dev: 3 rows of prompt, images, solution, id" in shown
    command = shown.strip().splitlines()[-1].split()[1:]
    main([*command[:-1], str(saved("qwen2_5_vl")), "--num_workers", "0"])
    assert "All 3 rows would train." in capsys.readouterr().out


def test_marks_in_answers_are_images_of_the_answers(files, tmp_path):
    """In rows of LLaMA-Factory with an image for each mark; other marks in answers are text."""
    rows = [
        {
            "conversations": [{"from": "human", "value": "<image>\nDraw it."}],
            "chosen": {"from": "gpt", "value": "So: <image>"},
            "rejected": {"from": "gpt", "value": "<image>\n<image>"},
            "images": [f"media/{i}.png" for i in (0, 1, 2, 0)],
        },
        {
            "conversations": [{"from": "human", "value": "What is it?"}],
            "chosen": {"from": "gpt", "value": "A cat."},
            "rejected": {"from": "gpt", "value": "<image> <image>"},
            "images": ["media/1.png"],
        },
    ]
    dataset = load_conversations(files(rows), task="dpo")
    shown = [[blocks(row[name][0]) for name in ("prompt", "chosen", "rejected")] for row in dataset]
    assert shown[0] == [["image", "\nDraw it."], ["So: ", "image"], ["image", "\n", "image"]]
    assert shown[1] == [["image", "What is it?"], ["A cat."], ["<image> <image>"]]
    assert [[each.width for each in row["images"]] for row in dataset] == [[56, 84, 112, 56], [84]]
    assert trains(dataset, "qwen2_5_vl", tmp_path / "trained", "reward")
