# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Each recipe parses like on the command line, prepares its dataset, and trains a tiny model."""

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import datasets
import difference_sheets
import PIL.Image
import pytest
import reproduced
import soundfile
import yaml
from datasets import Dataset, Image, List
from helpers import forked
from helpers.chats import RATE, audio, image, mosaic
from helpers.files import video_file, write_lines
from helpers.folders import ROOT
from helpers.four_bits import save_wide
from helpers.provenance import Origin, header, method, origins
from helpers.trainer_utils import TRAINERS, length_and_sum, load, saved
from trl.chat_template_utils import qwen3_vl_chat_template

from trl_multimodal_rft.cli import main
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.cli.commands import script_of
from trl_multimodal_rft.cli.inputs import trainer_inputs
from trl_multimodal_rft.cli.options import launched_command_parser, options_of
from trl_multimodal_rft.cli.preflight import check_names
from trl_multimodal_rft.extras import estimate
from trl_multimodal_rft.rollout.tools import TOOLS
from trl_multimodal_rft.spelling import split_settings


FOLDER = ROOT / "trl_multimodal_rft" / "recipes"
RECIPES = {path.relative_to(FOLDER).with_suffix("").as_posix(): path for path in sorted(FOLDER.rglob("*.yaml"))}
FAMILIES = {
    "InternVL3": "internvl",
    "MiMo-VL": "qwen2_5_vl",
    "Qwen2-Audio": "qwen2_audio",
    "Qwen2.5-Omni": "qwen2_5_omni",
    "Qwen2-VL": "qwen2_vl",
    "Qwen2.5-VL": "qwen2_5_vl",
    "Qwen3-VL-30B": "qwen3_vl_moe",
    "Qwen3-VL": "qwen3_vl",
    "Qwen3.5": "qwen3_5",
    "Qwen3-Omni": "qwen3_omni_moe",
    "llava-1.5": "llava",
}
# Kinds of media of prepared datasets, images if it isn't here
KINDS = {"avqa": {"audio"}, "avqa-r1": {"image", "audio"}, "intent-train": {"video"}, "mixed": {"image", "video"}}
FIELDS = ("Model", "Dataset", "Launch", "Reported", "Memory")
# Options that depend on the size of the model and of its machine
SMALL = {"learning_rate": 1e-2, "warmup_steps": 0, "max_steps": 1, "per_device_train_batch_size": 4}
SMALL |= {"num_generations": 2, "save_strategy": "no", "report_to": "none", "use_cpu": True, "disable_tqdm": True}
SMALL |= {"gradient_accumulation_steps": 1, "steps_per_generation": 1, "max_completion_length": 8, "dtype": "float32"}
SMALL |= {"lora_r": 2, "soft_overlong_cache": 4, "use_vllm": False, "bf16": False, "gradient_checkpointing": False}


def sources(folder):
    """Handmade files of each dataset in its published format, by the path that recipes use."""
    folder.mkdir()
    (folder / "media").mkdir()
    for i in range(4):
        image(56 + 28 * (i % 2), 56, seed=i)["image"].save(folder / "media" / f"{i}.png")
        soundfile.write(folder / "media" / f"{i}.wav", audio(0.3 + 0.1 * i, seed=i)["audio"], RATE)
        clip = video_file(mosaic(18, 56, 84, seed=i), codec="mpeg4", rate=4)
        (folder / "media" / f"{i}.mp4").write_bytes(clip)
    avqa = {"question_text": "What is in the video?", "multi_choice": ["cat", "dog"]}
    lines = [{**avqa, "id": i, "answer": i % 2, "audio_path": f"media/{i}.wav"} for i in range(4)]
    write_lines(folder / "train_r1aqa_line.json", lines)
    video = {"problem": "Is there a cat?", "problem_type": "multiple choice", "options": ["A. yes", "B. no"]}
    video |= {"process": "<think>I see a dog.</think>", "solution": "<answer>B</answer>"}
    clips = [{**video, "answer": "B", "video": f"{i}.mp4"} for i in range(4)]
    (folder / "social_iq_v2_rewrite.json").write_text(json.dumps(clips))
    asked = {"reasoning": "2", "grounding": "[0, 0, 28, 28]", "counting": "3", "video": "0.5 to 1.5"}
    media = {task: {"videos": ["media/0.mp4"]} if task == "video" else {"images": ["media/0.png"]} for task in asked}
    rows = [{"problem": f"Which {task}?", "answer": answer, "task": task} for task, answer in asked.items()]
    (folder / "mixed.json").write_text(json.dumps([{**row, **media[row["task"]]} for row in rows]))
    both = [{"image": f"media/{i}.png", "audio": f"media/{i}.wav"} for i in range(4)]
    rows = [{**video, "data_type": "image_audio", "problem_id": i, "path": each} for i, each in enumerate(both)]
    (folder / "omni_rl_format_train.json").write_text(json.dumps(rows))
    pictures = [str(folder / "media" / f"{i}.png") for i in range(4)]
    rows = [{"images": [each], "problem": f"<image>Find x. {i}", "answer": "2"} for i, each in enumerate(pictures)]
    rows = Dataset.from_list(rows).cast_column("images", List(Image()))
    for split in ("train", "test"):
        rows.to_parquet(folder / "geometry3k" / f"{split}-00000-of-00001.parquet")
    save_grounding(folder, pictures)
    save_preferences(folder, pictures)
    for name, crop in (("images", None), ("teacher_images", (0, 0, 28, 56))):
        (folder / "Vision-OPD-6K" / name).mkdir(parents=True)
        for i, path in enumerate(pictures):
            PIL.Image.open(path).crop(crop).save(folder / "Vision-OPD-6K" / name / f"{i}.png")
    asked = {"question": "What color is the cat?", "answer": "A"}
    rows = [{name: [f"{name}/{i}.png"] for name in ("images", "teacher_images")} for i in range(4)]
    rows = [{**row, "problem": f"<image>\n{asked['question']}", "answer": "A", "extra_info": asked} for row in rows]
    write_lines(folder / "Vision-OPD-6K" / "train.jsonl", [{**row, "bbox": [1, 2, 3, 4]} for row in rows])


def save_grounding(folder, pictures):
    """Handmade files of the datasets whose answers are boxes and points, and of the ones beside them."""
    problem = "Detect all objects belonging to the category 'cat' in the image."
    columns = {
        "MMK12": {"question": "<image>Find x.", "answer": "2", "subject": "math"},
        "PAPO_ViRL39K_train": {"problem": "<image>Find x.", "answer": "2"},
        "VPPO_ViRL39K_train": {"problem": "<image>Find x.", "answer": "2"},
        "ViRFT_COCO_base65": {
            "problem": problem,
            "solution": "<answer>[{'Position': [64, 0, 950, 411], 'Confidence': 1}]</answer>",
        },
        "refcoco_320k": {"problem": "left cat", "solution": "[64, 0, 950, 411]"},
    }
    for name, each in columns.items():
        rows = Dataset.from_list([{**each, "image": path} for path in pictures]).cast_column("image", Image())
        rows.to_parquet(folder / name / "train-00000-of-00001.parquet")
    clicks = [[221, 343], [476, 173]]
    rows = [{"problem": "cats", "clicks": clicks[: 1 + i % 2], "image": f"{i}.png"} for i in range(4)]
    (folder / "pr1_counting_10k.json").write_text(json.dumps(rows))


def save_preferences(folder, pictures):
    """Handmade files of the datasets of pairs."""
    pair = {"question": "What is it?", "chosen": "A bird.", "rejected": "A cat."}
    rows = [{**pair, "image": path, "idx": str(i)} for i, path in enumerate(pictures)]
    pairs = Dataset.from_list(rows).cast_column("image", Image())
    pairs.to_parquet(folder / "RLAIF-V-Dataset" / "train-00000-of-00001.parquet")
    write_lines(folder / "MMPR-v1.2" / "a.jsonl", [{**pair, "image": f"{i}.png"} for i in range(4)])
    part = {"root": "media", "annotation": "MMPR-v1.2/a.jsonl", "repeat_time": 1}
    (folder / "MMPR-v1.2" / "meta.json").write_text(json.dumps({"a": part}))


@pytest.fixture(scope="module")
def handmade(tmp_path_factory):
    folder = tmp_path_factory.mktemp("handmade") / "sources"
    sources(folder)
    return folder


def prepared(path, handmade, tmp_path):
    """Returns the folder that the recipe's command writes from handmade files."""
    lines = " ".join(header(path.read_text())["Dataset"]).replace("\\ ", "").split("trl-multimodal-rft ")[1]
    words = shlex.split(lines)
    place = Path(words[2]) if words[2].endswith(("/train.jsonl", "/meta.json")) else Path(Path(words[2]).name)
    words[2] = str(handmade / place)
    if "--media_dir" in words:
        at = words.index("--media_dir") + 1
        words[at] = str(handmade / ("." if words[at] == "." else "media"))
    at = words.index("--output_dir") + 1
    name = words[at]
    words[at] = str(tmp_path / words[at])
    main(words)
    return name


def arguments(name, **changes):
    """Returns the parsed arguments: `--accelerate_config`, and the script's arguments, some with other values."""
    command = method(RECIPES[name].read_text())
    parser = launched_command_parser(command, options_of(command))
    known = {action.dest for action in parser._actions}
    values = {key: value if isinstance(value, list) else [value] for key, value in changes.items() if key in known}
    words = [word for key, value in values.items() for word in (f"--{key}", *map(str, value))]
    argv = ["--config", name, *words]
    script = script_of(command)
    return parser.parse_with_config(argv).accelerate_config, parse(script.ARGUMENTS, argv)


@pytest.mark.parametrize("name", RECIPES)
def test_says_what_it_is(name):
    path = RECIPES[name]
    text = RECIPES[name].read_text()
    said = header(path.read_text())
    assert [each for each in FIELDS if each not in said] == [] and len(text) < 5000
    keys = yaml.safe_load(text)
    rows = keys["dataset_name"]
    with pytest.raises(ValueError, match=f"no folder '{rows}' with .* make it: trl-multimodal-rft prepare .*{rows}"):
        check_names(Namespace(config=name, dataset_name=rows))
    launcher = keys["accelerate_config"]
    assert f"--config {name} " in " ".join(said["Launch"]) and f"{launcher})" in said["Launch"][-1]
    assert (ROOT / "trl_multimodal_rft" / "accelerate_configs" / f"{launcher}.yaml").is_file()
    reported = " ".join(said["Reported"])
    assert ("https://" in reported and "not reproduced here" in reported) or reported.startswith(("nothing", "see "))
    files = re.findall(r"https://github\.com/\S+/blob/(\w+)", reported)
    assert all(len(commit) == 40 for commit in files) or "whose commit we don't know" in reported
    sources = r"^[\d.]+ GiB (of .* trl-multimodal-rft estimate|less than )|^left out: "
    assert re.search(sources, " ".join(said["Memory"]))
    row = next(line for line in (ROOT / "docs" / "recipes.md").read_text().splitlines() if f"/{name}.yaml)" in line)
    for number in re.findall(r"[\d.]+ -> [\d.]+", reported):
        assert number.replace("->", "→") in row


@pytest.mark.parametrize("name", RECIPES)
def test_memory_is_of_its_own_settings(name, monkeypatch):
    said = re.search(
        r"estimate --config (\S+)((?: --\w+ \w+)*)", " ".join(header(RECIPES[name].read_text())["Memory"])
    )
    if said is None:  # another recipe's command makes it
        return
    seen = []
    monkeypatch.setattr(estimate, "run", seen.append)
    main(["estimate", "--config", said[1], *said[2].split()])
    keys = yaml.safe_load(RECIPES[name].read_text())
    assert said[1] == name and seen[0].model_name_or_path == keys["model_name_or_path"]
    assert seen[0].use_vllm == keys.get("use_vllm", False) and seen[0].beta == keys.get("beta", 0.0)


def test_page_names_no_other():
    named = re.findall(r"recipes/([\w/]+)\.yaml\)", (ROOT / "docs" / "recipes.md").read_text())
    assert sorted(set(named)) == sorted(RECIPES)


# Owners of the sources' own repositories
OWNERS = {
    "HarryHsing/EchoInk",
    "hiyouga",
    "huaixuheqing",
    "huggingface",
    "inclusionAI",
    "ModalMinds",
    "NUS-TRAIL",
    "NVIDIA-NeMo",
}
OWNERS |= {"OpenGVLab", "RLHF-V", "THUDM", "tmfk418", "verl-project", "xiaomi-research"}


def test_comments_say_where_values_are_from():
    """Each value has a source, and a source in another repository than its authors' is called a fork."""
    for name, path in RECIPES.items():
        text = path.read_text()
        assert all(origins(text).values()), name
        links, note = (" ".join(header(text).get(field, ())) for field in ("Sources", "Note"))
        others = [each for each in re.findall(r"github\.com/(([\w.-]+)/[\w.-]+)", links) if OWNERS.isdisjoint(each)]
        assert not others or re.search(r"\bforks?\b|project that kept it", note), (name, others)


@pytest.mark.parametrize("name", RECIPES)
def test_differences_from_the_source_have_reasons(name):
    """Of all options of the run that decide the gradient or the data, defaults included."""
    sheet = [*difference_sheets.rows(RECIPES[name].read_text())]
    assert len(sheet) > 15 and not [row for row in sheet if row.verdict == "red"]


def test_page_of_differences_is_fresh():
    assert difference_sheets.PAGE.read_text() == difference_sheets.page()


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("qwen2_5_vl_7b/geometry3k_grpo", "use_bias_correction_kl"),
        ("qwen2_5_vl_7b/geometry3k_dapo", "vllm_importance_sampling_correction"),
        ("qwen2_audio_7b/avqa_grpo", "max_completion_length"),  # 256 in TRL 0.15
        ("qwen2_audio_7b/avqa_grpo", "beta"),
        ("qwen2_vl_2b/refcoco_grpo", "temperature"),  # 0.9 then
        ("qwen2_5_vl_7b/mmk12_grpo", "adam_beta2"),
        ("qwen2_5_vl_7b/geometry3k_grpo", "max_grad_norm: 2.0  # config L39"),
        ("qwen2_5_vl_7b/geometry3k_grpo", "max_grad_norm: 1.0  # config L40"),
        ("qwen2_5_vl_7b/geometry3k_grpo", "entropy_coef: 0.1  # ours"),
    ],
)
def test_a_difference_without_a_reason_is_red(name, option):
    """Such as a default of TRL that is newer than the source, in a recipe that doesn't name the option."""
    option, is_changed, value = option.partition(": ")
    line = f"{option}: {value}\n" * bool(is_changed)
    text = re.sub(rf"^{option}: .*\n", "", RECIPES[name].read_text(), flags=re.MULTILINE) + line
    assert option in {row.option for row in difference_sheets.rows(text) if row.verdict == "red"}


def test_a_new_option_that_is_on_is_red(monkeypatch):
    """Until its value in the source is read, in each recipe."""
    known = difference_sheets.options_of_run
    monkeypatch.setattr(difference_sheets, "options_of_run", lambda text: {**known(text), "new": True, "quiet": False})
    red = {
        row.option
        for path in RECIPES.values()
        for row in difference_sheets.rows(path.read_text())
        if row.verdict == "red"
    }
    assert red == {"new"}


PAPERS = [row.split(" | ") for row in (ROOT / "docs" / "algorithms.md").read_text().splitlines() if "recipe `" in row]


def agree(paper, recipe):
    """Whether a paper's value is the recipe's: of a method with settings the name, and what both set."""
    if not isinstance(paper, str):
        return paper == recipe
    (name, settings) = split_settings(paper)
    (other, others) = split_settings(recipe)
    settings = settings or {}
    others = others or {}
    return name == other and all(agree(settings[key], others[key]) for key in settings.keys() & others.keys())


def test_agreement_of_settings():
    assert agree("blank(fraction=0.5, schedule='sigmoid')", "blank(schedule='sigmoid(steepness=30)')")
    assert not agree("cpgd(weight='std')", "cpgd(weight='one')") and not agree("dapo", "grpo") and not agree(4, 5)


@pytest.mark.parametrize("row", PAPERS, ids=lambda row: row[0])
def test_papers_and_recipes_agree(row):
    """Where a row of the papers names a recipe, what both set is the same."""
    recipe = yaml.safe_load(RECIPES[re.search(r"recipe `([\w/]+)`", row[2])[1]].read_text())
    rewards = re.search(r"`--reward_funcs ([^`]+)`", row[1])
    arguments = re.match(r"`(?:\w+Config\()?(.*?)\)?`", row[1].lstrip())[1]
    values = eval(f"dict({arguments})") | ({"reward_funcs": rewards[1].split()} if rewards else {})
    common = values.keys() & recipe.keys()
    assert common and not {key: (values[key], recipe[key]) for key in common if not agree(values[key], recipe[key])}


URL = f"https://github.com/a/b/blob/{40 * 'c'}/run.sh"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("beta: 0.01", "beta: no comment says where 0.01 was read"),
        ("beta: 0.01  # run L3", "`Sources:` has no run"),
        (f"# Sources: run {URL}\nbeta: 0.01  # run", "name the line of a file"),
        (f"# Sources: run {URL.replace(40 * 'c', 'main')}\nbeta: 0.01  # run L3", "may change"),
        ("# Sources: paper https://huggingface.co/papers/2503.11197\nbeta: 0.01  # paper", "in a note"),
        ("beta: 0.01  # ours, as others", "is no `name L1`"),
        ("peft:\n  r: 8  # ours", "no line of its own"),
    ],
)
def test_values_without_a_source_are_refused(text, problem):
    with pytest.raises(ValueError, match=problem):
        origins(text)


def test_values_have_several_sources():
    text = f"# Sources: run {URL}\n#          paper https://huggingface.co/papers/2503.11197\n"
    text += "beta: 0.01  # run L3-L4: kl; paper: section 3\nseed: 1  # ours"
    read = {"beta": (Origin("run", "L3-L4", "kl"), Origin("paper", "", "section 3")), "seed": (Origin("ours"),)}
    assert origins(text) == read


def test_chat_template_of_another_model(tmp_path):
    (tmp_path / "tools.jinja").write_text(qwen3_vl_chat_template)
    Dataset.from_list([{"prompt": "?", "solution": "1"}]).to_json(tmp_path / "rows.jsonl")
    changes = {"model_name_or_path": saved("qwen2_5_vl"), "dataset_name": tmp_path / "rows.jsonl"}
    changes |= {"output_dir": tmp_path / "out", "use_cpu": True, "bf16": False}

    def template(path):
        given = {**changes, "tools": "zoom", "chat_template_path": path}
        _, (script, config, model) = arguments("qwen2_5_vl_7b/geometry3k_grpo", **given)
        inputs = trainer_inputs(script, config, model)
        assert inputs["environment_factory"] is TOOLS["zoom"]
        return inputs["processing_class"].chat_template

    assert template(tmp_path / "tools.jinja") == qwen3_vl_chat_template
    assert template(saved("qwen2_audio")) == load("qwen2_audio")[1].chat_template != qwen3_vl_chat_template
    with pytest.raises(OSError, match=r"missing\.jinja"):
        template(tmp_path / "missing.jinja")


LARGE = "qwen2_5_vl_7b/geometry3k_grpo"  # whose images are as large as it says
FAST = ("qwen2_audio_7b/avqa_grpo", "qwen2_5_omni_7b/avqa_r1_grpo")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_trains(name, handmade, tmp_path, monkeypatch, request):
    path = RECIPES[name]
    folder = prepared(path, handmade, tmp_path)
    recipe = yaml.safe_load(path.read_text())
    assert folder == recipe["dataset_name"]
    family = next(family for start, family in FAMILIES.items() if start in recipe["model_name_or_path"])
    changes = {**SMALL, "model_name_or_path": str(saved(family)), "output_dir": str(tmp_path / "out")}
    changes["dataset_name"] = str(tmp_path / folder)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    expected = KINDS.get(folder, {"image"})
    if len(expected) > 1:
        changes["max_steps"] = 2  # rows of all kinds
    if "min_pixels" in recipe and name != LARGE:
        changes["min_pixels"] = 56 * 56
    if recipe.get("num_generations") == 1:
        changes["num_generations"] = 1
    if recipe.get("load_in_4bit"):
        pytest.importorskip("bitsandbytes")
        save_wide(family, tmp_path / "model")
        changes["model_name_or_path"] = str(tmp_path / "model")
    if "chat_template_path" in recipe:
        changes["chat_template_path"] = tmp_path / "tools.jinja"
        changes["chat_template_path"].write_text(qwen3_vl_chat_template)
    url = re.search(r"http://[\w.:]+", str(recipe.get("reward_funcs")))
    if url is not None:
        reply = {"choices": [{"message": {"role": "assistant", "content": "Score: 1"}}]}
        judge = request.getfixturevalue("serve")(lambda request: reply)
        changes["reward_funcs"] = [each.replace(url[0], judge.url) for each in recipe["reward_funcs"]]
    launcher, (script, config, model) = arguments(name, **changes)
    assert launcher == recipe["accelerate_config"]
    inputs = trainer_inputs(script, config, model)
    if "reward_funcs" in inputs:
        config.reward_weights = [*(config.reward_weights or [1.0] * len(inputs["reward_funcs"])), 1.0]
        inputs["reward_funcs"] = [*inputs["reward_funcs"], length_and_sum]
    trainer = TRAINERS[method(path.read_text())](**inputs)
    before = {key: value.clone() for key, value in trainer.model.named_parameters() if value.requires_grad}
    trainer.train()
    assert trainer.state.global_step == changes["max_steps"] and (url is None or judge.requests)
    assert any((value != before[key]).any() for key, value in trainer.model.named_parameters() if key in before)
    kinds = {kind for row, kind in product(trainer.train_dataset, expected) if row.get(kind) or row.get(f"{kind}s")}
    assert kinds == expected == (trainer.card_notes.modalities if hasattr(trainer, "card_notes") else expected)
    routed = {each for weights in recipe.get("reward_recipe", {}).values() for each in weights}
    for each in routed | set(recipe.get("reward_funcs", ())):
        name = each.partition("(")[0].replace("JudgeReward", "judge_reward")
        assert any(f"rewards/{name}/mean" in entry for entry in trainer.state.log_history)


def test_table_of_seeds(tmp_path):
    """Accuracies with their intervals, the mean over seeds, and a curve of all seeds."""
    parts = {"before": 0.25, "seed-0/after": 0.5, "seed-1/after": 0.75}
    for part, accuracy in parts.items():
        (tmp_path / part).mkdir(parents=True)
        metrics = {"accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1, "rows": 8.0}
        (tmp_path / part / "metrics.json").write_text(json.dumps({"metrics": metrics}))
    for seed, step in ((0, 9), (0, 10), (1, 10)):
        state = {
            "log_history": [{"step": 1, "reward": 0.5}, {"step": step, "reward": 1.0}, {"step": step, "loss": 0.0}]
        }
        path = tmp_path / f"seed-{seed}" / f"checkpoint-{step}" / "trainer_state.json"
        path.parent.mkdir()
        path.write_text(json.dumps(state))
    assert reproduced.rewards_of(tmp_path / "seed-0") == {1: 0.5, 10: 1.0}
    reproduced.write_results(tmp_path)
    lines = (tmp_path / "results.md").read_text().splitlines()
    assert lines[2:] == [
        "| before | 25.0% | 15.0% to 35.0% |",
        "| after, seed-0 | 50.0% | 40.0% to 60.0% |",
        "| after, seed-1 | 75.0% | 65.0% to 85.0% |",
        "| after, mean | 62.5% | ± 17.7% over seeds |",
        "",
        "Rows: 8",
    ]
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_settings_to_reproduce():
    """Of a recipe that trains by another command, with the model of the training's options; others are refused."""
    options = ["--model_name_or_path=here", "--model-revision", "v2", "--max_pixels", "9", "--media_dir", "a b"]
    command, model, words = reproduced.settings_of("qwen2_5_vl_3b/geometry3k_ppo", options)
    assert (command, model) == ("ppo", ["--model_name_or_path", "here", "--model_revision=v2"])
    assert {"--dataset_name=geometry3k", "--max_pixels=9", "--media_dir=a b"} <= {*words} and words[-1] == "bfloat16"
    assert words[words.index("--reward_funcs") + 1] == "accuracy_reward"
    with pytest.raises(ValueError, match="Did you mean"):
        reproduced.settings_of("qwen3_vl_2b/geometry3k_grp", [])
    with pytest.raises(ValueError, match="'internvl3_5_8b/mmpr_mpo' names no command or no `reward_funcs`"):
        reproduced.settings_of("internvl3_5_8b/mmpr_mpo", [])


def test_options_to_reproduce_are_those_of_an_evaluation():
    assert {*reproduced.SHARED, "model_revision"} <= {option["name"] for option in options_of("evaluate")}


def test_what_a_reproduction_calls(tmp_path, monkeypatch):
    """Each call for the recipe, options and commit of the folder; an interrupted training goes on."""
    recipe = tmp_path / "my.yaml"
    called = []
    settings = {"model_name_or_path": "m", "dataset_name": "d", "reward_funcs": "accuracy_reward"}
    settings |= {"system_prompt": "Think.\n--output_dir elsewhere", "ignored_media_columns": ["a", "b"]}
    recipe.write_text("# trl-multimodal-rft grpo --config my.yaml\n" + yaml.safe_dump(settings))
    folder = tmp_path / "out [1]"
    dies = [True]

    def run(words, check=True, **kwargs):
        if words[0] == "git":
            return SimpleNamespace(stdout="abc\n")
        called.append(words)
        out = Path(words[words.index("--output_dir") + 1])
        out.mkdir(parents=True, exist_ok=True)
        if words[1] == "evaluate":
            (out / "metrics.json").write_text(json.dumps({"metrics": {"accuracy": 0.5, "rows": 8}}))
            return
        (out / "checkpoint-2").mkdir(exist_ok=True)
        (out / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"log_history": []}))
        if dies.pop():
            raise subprocess.CalledProcessError(1, words)

    monkeypatch.setattr(reproduced.subprocess, "run", run)
    with pytest.raises(subprocess.CalledProcessError):
        reproduced.reproduce(str(recipe), folder, [], ["0"], [])
    dies.append(False)
    (folder / "seed-7").mkdir()  # another one that was interrupted
    for _ in range(2):
        reproduced.reproduce(str(recipe), folder, [], ["0"], [])
    assert [words[1] for words in called] == ["evaluate", "grpo", "grpo", "evaluate"]
    assert ["--resume_from_checkpoint" in words for words in called] == [False, False, True, False]
    assert "--system_prompt=Think.\n--output_dir elsewhere" in called[0] and called[0].count("--output_dir") == 1
    assert called[0][called[0].index("--ignored_media_columns") + 1 :][:2] == ["a", "b"]
    for words, options, what in ((["--seed", "1"], [], "evaluation"), ([], ["--max_steps=3"], "training")):
        with pytest.raises(ValueError, match=f"has results of another {what} "):
            reproduced.reproduce(str(recipe), folder, words, ["0"], options)
    monkeypatch.setattr(reproduced, "commit", lambda: "def")
    recipe.write_text(recipe.read_text() + "seed: 3\n")
    with pytest.raises(ValueError, match="has results of another recipe and commit"):
        reproduced.reproduce(str(recipe), folder, [], ["0"], [])
    (folder / reproduced.RECORD).unlink()
    with pytest.raises(ValueError, match="has results without settings.json"):
        reproduced.reproduce(str(recipe), folder, [], ["0"], [])
    assert len(called) == 4


MAIN = "from trl_multimodal_rft.cli import main; main()"
FORKED = """#!{python}
import sys
sys.path.insert(0, {tests!r})
from helpers import forked
sys.exit(forked.run([sys.executable, *{words!r}, *sys.argv[1:]]).returncode)
"""


def commands(folder):
    """Returns a folder with Python and this package's command, both forked: they start eight times."""
    folder.mkdir()
    forked.run([sys.executable, "-c", ""], check=True)  # starts the server
    for name, words in {"python": [], "trl-multimodal-rft": ["-c", MAIN]}.items():
        text = FORKED.format(python=sys.executable, tests=str(ROOT / "tests"), words=words)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


@pytest.mark.slow
def test_reproduces_a_curve(handmade, tmp_path):
    """The script trains and evaluates a small model; a second call repeats neither."""
    prepared(RECIPES["qwen3_vl_2b/geometry3k_grpo"], handmade, tmp_path)
    model = saved("qwen3_vl")
    small = {**SMALL, "save_strategy": "steps", "num_processes": 1}
    train = " ".join(f"--{name} {value}" for name, value in small.items())
    environment = {**os.environ, "SEEDS": "0", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    environment |= {"TRAIN": f"{train} --model_name_or_path {model} --accelerate_config cpu"}
    environment["PATH"] = f"{commands(tmp_path / 'bin')}:{environment['PATH']}"
    script = ROOT / "examples" / "reproduce.sh"
    folder = tmp_path / "results"
    words = ["bash", str(script), "qwen3_vl_2b/geometry3k_grpo", str(folder), "--max_completion_length", "8"]
    words += ["--dtype", "float32", "--accelerate_config", "cpu"]
    tables = []
    for _ in range(2):
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
        tables.append(done.stdout)
    written = (folder / "results.md").read_text()
    assert "| after, seed-0 | " in written and "Rows: 4" in written
    assert tables[0].endswith(written) and tables[1] == written
