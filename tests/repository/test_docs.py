# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
The documentation: its Python code runs verbatim, its links resolve, and the errors that it explains exist.

Code runs in an empty folder where tiny models and small datasets replace those that it names.
"""

import contextlib
import inspect
import json
import os
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from argparse import Namespace
from collections import Counter
from dataclasses import fields
from functools import partial, partialmethod
from html.parser import HTMLParser
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote

import first_run
import numpy as np
import pytest
import soundfile
import tasks
import torch
import transformers
from datasets import Audio, Dataset, List, load_dataset
from families_report.report import MARK
from helpers import first_run_page, forked
from helpers.chats import RATE, audio
from helpers.families import FAMILIES, MORE_FAMILIES
from helpers.folders import ROOT
from helpers.listeners import whisper_folder
from helpers.marks import slow_but
from helpers.processes import PATIENCE
from helpers.speech import speaking_models
from helpers.trainer_utils import Injected, length_and_sum, make_trainer, saved
from huggingface_hub.cli.jobs import uv_app
from pip_extras import MEDIA
from small_models import digit_model
from tasks import SPOKEN_QUESTION, spoken_digits
from torch.testing import assert_close
from trl import DPOTrainer, GRPOTrainer, KTOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

import trl_multimodal_rft
from trl_multimodal_rft import (
    MultimodalGRPOTrainer,
    cli,
    rewards,
)
from trl_multimodal_rft.cli import COMMANDS, main
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.cli.commands import distillation, dpo, grpo, sft
from trl_multimodal_rft.cli.parsers import LAYOUTS
from trl_multimodal_rft.data.reading.refs import MediaError, iter_refs
from trl_multimodal_rft.data.rows.batches import Row
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.data.rows.pairs import COMPLETIONS, check_pairs, put_answer_media
from trl_multimodal_rft.evaluation import evaluate_trainer
from trl_multimodal_rft.extras import filter
from trl_multimodal_rft.reporting.model_card import PAPERS
from trl_multimodal_rft.rewards import accuracy_reward
from trl_multimodal_rft.rewards.named import load_reward_funcs
from trl_multimodal_rft.versions import bounds
from trl_multimodal_rft.views.views import VIEWS


PAGES = sorted(ROOT.glob("docs/*.md"))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
MODELS = {
    "Qwen/Qwen2-Audio-7B-Instruct": "qwen2_audio",
    "Qwen/Qwen2.5-VL-3B-Instruct": "qwen2_5_vl",
    "Qwen/Qwen2.5-VL-7B-Instruct": "qwen2_5_vl",
}
DATASETS = {"path/to/spoken-questions": "audio", "path/to/geometry": "image", "path/to/clips": "video"}


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture(scope="session")
def first_files(tmp_path_factory):
    """Returns a folder with what `first_run.py` writes."""
    with contextlib.chdir(tmp_path_factory.mktemp("first")):
        first_run.main()
        return Path.cwd()


@pytest.fixture
def first_day(first_files, tmp_path, monkeypatch):
    """Returns a working directory with what `first_run.py` writes."""
    for path in first_files.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Returns the folder in which code runs, as if it had downloaded what it names."""
    for name, family in MODELS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(saved(family))
    for name, saved_folder in {**speaking_models(), "openai/whisper-large-v3": whisper_folder()}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).symlink_to(saved_folder)
    (tmp_path / "openai/whisper-small").symlink_to(whisper_folder())
    (tmp_path / "path/to/sentences").mkdir(parents=True)
    Dataset.from_dict({"text": ["one", "two"]}).to_parquet(tmp_path / "path/to/sentences/train.parquet")
    for name, kind in DATASETS.items():
        (tmp_path / name).mkdir(parents=True)
        media = [str(tmp_path / f"{kind}{i}") for i in range(2)]
        for i, path in enumerate(media):
            Path(path).write_bytes(MEDIA[kind][1](i))
        columns = {"prompt": ["What is it?"] * 2, kind: media, "solution": ["a bird", "a cat"]}
        Dataset.from_dict(columns).to_parquet(tmp_path / name / "train.parquet")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JUDGE_KEY", "secret")
    return tmp_path


def execute(text, each=lambda namespace: None):
    namespace = {"__name__": "__main__"}
    for code in blocks(text):
        if "outputs/" in code:
            continue  # part of a demo, see `test_examples.py`
        exec(compile(code, "page", "exec"), namespace)
        each(namespace)
    return namespace


README, CONTRIBUTING, BENCHMARKS = (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md"))
FIRST_OPTIONS = [README, first_run_page.AGENT]
WITH_CODE = [page for page in PAGES if blocks(page.read_text()) and page.name not in ("datasets.md", "first_run.md")]


@pytest.mark.parametrize(
    "page",
    slow_but(WITH_CODE, ROOT / "docs" / "evaluation.md", ROOT / "docs" / "rewards.md"),
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_code_runs(page, folder, capsys, caplog, monkeypatch):
    """
    A line's comment has its printed value, the page explains the logs, and prompts request what is rewarded. Training
    for epochs takes one, whose steps are all logged.
    """
    base = transformers.Trainer
    monkeypatch.setattr(base, "train", partialmethod(train_an_epoch, base.train))
    execute(page.read_text(), look)
    assert "No prompt of the first batch" not in caplog.text
    printed = capsys.readouterr().out
    for code in blocks(page.read_text()):
        for expected in re.findall(r"^print\(.*\)  # ([\[{('\"\d].*)$", code, re.MULTILINE):
            assert expected in printed


def train_an_epoch(trainer, train, *args, **options):
    if trainer.args.max_steps < 0:
        trainer.args.num_train_epochs = trainer.args.logging_steps = 1
    return train(trainer, *args, **options)


def look(namespace):
    trainer = namespace.get("trainer")
    trainer = getattr(trainer, "trainer", trainer)  # LightRFT's trainer wraps one
    history = trainer.state.log_history if trainer else []
    logged = {name for logs in history for name in logs if not name.startswith("eval_")}
    assert not [name for name in logged if not is_explained(re.escape(name))]


@pytest.mark.gate
@pytest.mark.parametrize("page", FIRST_OPTIONS, ids=lambda page: page.name)
def test_code_runs_on_the_first_files(page, first_day, capsys):
    """
    Code needs what `first_run.py` writes and nothing else; a trajectory has a turn, a look and a turn. README's takes
    a tenth of its steps.
    """
    text = page.read_text()
    if page == README:
        text = text.replace("max_steps=100", "max_steps=10")
    steps = execute(text, look)["trainer"].state.global_step
    assert steps == int(re.search(r"max_steps=(\d+)", text)[1])
    if page == first_run_page.AGENT:
        shown = re.search(r"```text\n(.*?)```", page.read_text(), re.DOTALL)[1].splitlines()
        printed = capsys.readouterr().out.splitlines()[-3:]
        assert printed[1] == shown[1] and [line.split()[0] for line in printed] == [line.split()[0] for line in shown]
        assert "'name': 'zoom'" in printed[0]


@pytest.mark.slow
def test_readmes_code_ends_in_a_model_that_has_learned(first_day):
    trainer = execute(README.read_text())["trainer"]
    held_out = load_dataset("csv", data_files="test.csv", split="train")
    held_out = held_out.map(lambda row: {"prompt": SPOKEN_QUESTION, "audio": f"recordings/{row['audio']}"})
    assert evaluate_trainer(trainer, held_out, accuracy_reward).metrics["accuracy"] > 0.9


@pytest.fixture
def first_recordings(tmp_path, monkeypatch):
    """Returns a working directory with fewer recordings than `first_run.py` writes, and nothing that a model saw."""
    rows = partial(spoken_digits, train_rows=40, test_rows=10)
    black = np.zeros((480, 28, 28), np.uint8)
    monkeypatch.setattr(first_run, "spoken_digits", rows)
    monkeypatch.setattr(tasks, "_mnist", lambda: dict.fromkeys(("train", "test"), (black, np.zeros(480, int))))
    monkeypatch.setattr(first_run, "looking_model", lambda pictures: digit_model())
    monkeypatch.chdir(tmp_path)
    first_run.main()
    return tmp_path


@pytest.mark.slow
def test_pairs_of_the_first_files_train(first_recordings):
    """Each training of the page takes a step of a few rows, from the model that the one before it saved."""
    first_run_page.write_files(first_recordings, first_run_page.PAIRS)
    lines = [shlex.split(line)[1:] for line, _ in first_run_page.typed(first_run_page.PAIRS)]
    trained = [words for words in lines if words[0] != "evaluate"]
    assert [words[0] for words in trained] == ["sft", "dpo", "reward", "kto"]
    judged = "GRPO then trains a policy on its scores, with `--reward_funcs judge`"
    assert judged in first_run_page.PAIRS.read_text()
    policy = "grpo --model_name_or_path taught --dataset_name train.csv --media_dir recordings --num_generations 2"
    trained.append([*policy.split(), "--prompt", "Which digit is spoken?", "--reward_funcs", "judge"])
    for words in trained:
        words += ["--max_steps", "1", "--per_device_train_batch_size", "4"]
        code = f"from trl_multimodal_rft.cli import main; main({words!r})"
        run = forked.run([sys.executable, "-c", code], capture_output=True)
        assert run.returncode == 0 and "step 1/1 | trained in" in run.stdout, run.stdout + run.stderr


WITH_COMMANDS = [README, CONTRIBUTING, *PAGES]


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_there(page):
    """Covers targets of make, options of this package's commands, extras, files, and prompts for what is rewarded."""
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    text = page.read_text()
    named = re.findall(r"`(make [\w-]+|trl-multimodal-rft \w+(?: --help)?)`", text)
    for program, *words in [*first_run_page.commands(page), *map(str.split, named)]:
        if [program, *words[:3]] == ["hf", "jobs", "uv", "run"]:
            job = uv_app.commands["run"].make_context("run", words[3:]).params
            program = job["script"]
            words = job["script_args"]
        if program == "make":
            assert words[0] in targets
        elif program == "trl-multimodal-rft":
            words = words[2:] if words[:2] == ["compare", "--plain"] else words  # whose options are those of a run
            assert words[0] in COMMANDS
            parser = cli._parser(words[0])
            for each in (*parser._actions, *parser._mutually_exclusive_groups):
                each.required = False  # pages may omit options
            if "--help" not in words:
                parser.parse_args(words[1:])
        assert "format_reward" not in words or any("<answer>" in word for word in words), words
        folders = ("examples/", "tests/", "docs/", "benchmarks/", "trl_multimodal_rft/")
        assert all((ROOT / word).exists() for word in words if word.startswith(folders))
        for found in re.findall(r"\[([\w,-]+)\]", " ".join(words)) if program == "pip" else ():
            assert {*found.split(",")} <= {*EXTRAS}


def test_extras_are_those_of_the_package():
    rows = re.findall(r"^\| (`[^|]+`) \| [^|]+ \|$", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(EXTRAS.keys() - {"test", "docs", "dev"})


def test_versions_are_those_of_the_columns():
    """The rows of the table hold what the files of their columns pin."""
    page = (ROOT / "docs" / "install.md").read_text()
    names = re.search(r"^\| command \| Python \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
    for file in sorted((ROOT / "tests" / "columns").glob("*.txt")):
        found = re.search(rf"^\| `make test-{file.stem}` \| [\d.]+ \| (.*) \|$", page, re.MULTILINE)[1].split(" | ")
        versions = {name: re.split(r"[+ ]", each)[0] for name, each in zip(names, found, strict=True)}
        for name, pinned in re.findall(r"^([\w-]+)==([\d.]+)", file.read_text(), re.MULTILINE):
            assert versions.get(name.removesuffix("-cpu"), pinned) == pinned, file  # it has no column of torchvision


def test_versions_that_fit_are_those_of_pyproject():
    page = (ROOT / "docs" / "install.md").read_text()
    head, _, row = re.search(r"<!-- versions -->\n\n(.*)\n(.*)\n(.*)\n", page).groups()
    cells = dict(zip(head.strip("| ").split(" | "), row.strip("| ").split(" | "), strict=True))
    assert cells.pop("this version") == version("trl-multimodal-rft") and {*cells} == {*bounds()}
    for name, text in bounds().items():
        lowest, end = re.findall(r"[\d.]+", text)
        major, minor = end.split(".")
        last = f"{major}.{int(minor) - 1}"
        assert cells[name] == (lowest if lowest == last else f"{lowest} to {last}"), name


@pytest.mark.gate
def test_scripts_of_the_page_about_lightrft(folder, monkeypatch):
    """The script for LightRFT, with the import replaced, makes the updates of the script from a dataset."""
    monkeypatch.setattr(rewards, "accuracy_reward", length_and_sum)  # rewards that differ
    page = ROOT / "docs" / "from_lightrft.md"
    (before,) = re.findall(r"```py\n(.*?)```", page.read_text(), re.DOTALL)
    torch.manual_seed(0)
    after = execute(page.read_text())

    class Prompts(list):
        def collate_fn(self, rows):
            """Works like LightRFT's: returns prompts, images, references and labels."""
            return tuple([row[name] for row in rows] for name in ("prompt", "image", "solution", "solution"))

    args = Namespace(pretrain=after["pretrain"], save_path="saved", advantage_estimator="rloo", n_samples_per_prompt=4)
    vars(args).update(num_episodes=1, rollout_batch_size=2, actor_learning_rate=1e-6, lr_warmup_ratio=0.01, l2=0.01)
    task = {"args": args, "max_steps": 1000, "prompts_dataset": Prompts(after["rows"]), "reward_fn": length_and_sum}
    monkeypatch.setitem(sys.modules, "task", SimpleNamespace(**task))
    script = before.replace("from lightrft.", "from trl_multimodal_rft.lightrft.")
    namespace = {}
    torch.manual_seed(0)
    exec(compile(script, str(page), "exec"), namespace)
    states = [dict(each["actor"].model.named_parameters()) for each in (after, namespace)]
    moved = {name: value for name, value in states[0].items() if "lora_B.default" in name}
    assert any(value.any() for value in moved.values())
    for name, value in moved.items():
        assert_close(states[1][name], value, atol=1e-9, rtol=1e-3)  # the learning rate is 1e-6
    assert (folder / "saved" / "adapter_model.safetensors").exists()
    assert (folder / "Qwen2.5-VL-RLOO" / "adapter_model.safetensors").exists()


class Trainer(Injected, MultimodalGRPOTrainer):
    pass


@pytest.mark.slow
def test_rows_of_every_form_train(folder):
    """Each dataset of the page makes an update on media of its section's kinds."""
    page = ROOT / "docs" / "datasets.md"
    sections = re.split(r"^## (.*)$", page.read_text(), flags=re.MULTILINE)
    titles = [title for title, text in zip(sections[1::2], sections[2::2], strict=True) for _ in blocks(text)]
    kinds = {"Images": {"image"}, "Audio": {"audio"}, "Video": {"video"}, "Options of a medium": {"video"}}
    kinds |= {"From disk, from the Hub, as a stream": {"audio"}}
    trained = []

    def train(namespace):
        if "dataset" not in namespace:
            return  # the first block makes files
        title = titles[len(trained)]
        for family in MODELS.values():
            trainer = make_trainer(Trainer, family, namespace["dataset"], folder / "out", max_steps=3, self_check=True)
            try:
                trainer.train()
            except MediaError as error:  # the other model's medium
                assert re.search("takes no (audio|images|video)", str(error))
                continue
            trained.append(title)
            assert trainer.state.log_history[0]["grad_norm"] > 0
            assert trainer.card_notes.modalities == kinds.get(title, trainer.card_notes.modalities) != set()
            break

    execute(page.read_text(), train)
    assert trained == titles


# Links, errors and the site


NAMED = [README, CONTRIBUTING, *PAGES, *sorted(ROOT.glob("docs/*/*.md"))]


@pytest.mark.parametrize("page", [*NAMED, BENCHMARKS], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", page.read_text())
    links = [link or image for link, image in links]
    for link in links:
        path, _, section = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        if section and target.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert section in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], link


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_code_lead_to_what_they_name(page):
    names_in = runpy.run_path(str(ROOT / "docs" / "site_hooks.py"))["lines_of_names"]
    for name, path in re.findall(r"\[`([\w.]+)`\]\(([\w./]+\.py)(?:#L\d+)?\)", page.read_text()):
        assert name.endswith(".py") or name in names_in(page.parent / path), f"{path} has no {name}"


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_the_package_exist(page):
    """Covers dotted names, and imports of code that doesn't run."""
    text = page.read_text()
    named = re.findall(r"\btrl_multimodal_rft(?:\.\w+)+", text)
    for module, names in re.findall(r"^from (trl_multimodal_rft[\w.]*) import (.+)$", text, re.MULTILINE):
        named += [f"{module}.{name.split()[0]}" for name in names.split(",")]
    for name in named:
        assert pkgutil.resolve_name(name) is not None


# Names that are registered, by the page with a row for each; `test_model_card.py` reads that of algorithms
ROWS = {
    "rewards.md": [name for name in rewards.__all__ if name.endswith("_reward")],
    "views.md": [*VIEWS],
    "generated/families.md": [*FAMILIES, *MORE_FAMILIES],
}


@pytest.mark.parametrize("page", ROWS)
def test_names_that_are_registered_have_rows(page):
    text = "\n".join(re.findall(r"^\| .*", (ROOT / "docs" / page).read_text(), re.MULTILINE))
    missing = [name for name in ROWS[page] if not re.search(rf"""(^\| |[`"]){name}[ `"(]""", text, re.MULTILINE)]
    assert not missing, f"docs/{page} has no row of {', '.join(missing)}"


METRICS = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| (`.*?) \|", (ROOT / "docs/metrics.md").read_text(), re.M)))


def is_explained(pattern):
    """Returns whether a table of the page has a metric of that name."""
    own = re.sub(r"^(held_out_)?rewards/.+/", r"\1rewards/<function>/", pattern)
    return any(re.fullmatch(own, name) for name in METRICS)


def test_metrics_are_explained():
    """The page explains the metrics in this package's and TRL's trainers, and all metrics on the page exist."""
    folders = (
        ROOT / "trl_multimodal_rft" / name
        for name in ("algorithms", "checks", "engines", "forward", "rollout", "trainers")
    )
    own = "".join(path.read_text() for folder in folders for path in folder.rglob("*.py"))
    bases = (GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer, KTOTrainer, RewardTrainer)
    theirs = "".join(Path(inspect.getfile(base)).read_text() for base in bases)
    by_mode = r"""(?:\[(?:mode|"train"[^]]*)\])?"""
    found = {*re.findall(rf"""metrics{by_mode}\[f?"([^"]+)"\]""", own + theirs)} - {"train", "eval"}
    assert len(found) > 40

    def patterns(names):
        return [re.sub(r"\\\{.*?\\\}", "[^/]+", re.escape(name)) for name in names]

    assert not [pattern for pattern in patterns(found) if not is_explained(pattern)]
    # The other names are transformers'
    found |= {*re.findall(r"""f?"(\w[^"]*)": """, own), *re.findall(r"""logged\["(\w+)"\]""", own)}
    of_rewards = "".join(path.read_text() for path in (ROOT / "trl_multimodal_rft" / "rewards").rglob("*.py"))
    found |= {*re.findall(r"""log_metric\("([^"]+)""", of_rewards)}
    unknown = {name for name in METRICS if not any(re.fullmatch(pattern, name) for pattern in patterns(found))}
    unknown -= {"loss", "grad_norm", "learning_rate", "epoch", "step", "total_flos"}
    assert not [name for name in unknown if not name.startswith("train_")]


def test_papers_have_configs():
    """Each line of arguments makes a config, and each command is one."""
    text = (ROOT / "docs" / "algorithms.md").read_text()
    papers = [each for own in PAPERS.values() for each in (own.values() if isinstance(own, dict) else [own]) if each]
    assert not [paper for paper in papers if paper.arxiv_id not in text]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| [")]
    assert all(len(row) == 3 for row in rows) and len(rows) > 45
    assert len(set(re.findall(r"papers/([\d.]+)\)", " ".join(row[0] for row in rows)))) >= 40
    options = {"output_dir": "out", "use_cpu": True, "bf16": False, "per_device_train_batch_size": 48}
    for _, arguments, _ in rows:
        codes = re.findall(r"`([^`]+)`", arguments)
        assert codes
        for code in codes:
            if code.startswith("trl-multimodal-rft filter "):
                parse(filter.ARGUMENTS, code.split()[2:])
                continue
            if code.startswith("--reward_funcs "):
                assert load_reward_funcs(shlex.split(code)[1:])
                continue
            name, values = re.fullmatch(r"(?:(\w+)\()?(.*?)\)?", code).groups()
            config_class = getattr(trl_multimodal_rft, name or "MultimodalGRPOConfig")
            config = eval(f"config_class(**options, {values})", {"config_class": config_class, "options": options})
            given = eval(f"dict({values})")
            assert {key: getattr(config, key) for key in given} == given


def test_errors_that_are_explained_exist():
    source = " ".join(path.read_text() for path in sorted((ROOT / "trl_multimodal_rft").rglob("*.py")))
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", source)  # strings continue in the next line
    page = (ROOT / "docs" / "troubleshooting.md").read_text().split("## The self-check")[0]
    cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    assert len(cells) > 10
    for message in re.findall(r"`([^`]+)`", " ".join(cells)):
        words = message.replace("\\|", "|").split()
        pattern = r"\s+".join(re.escape(word) for word in words)
        assert re.search(pattern, source), message


def test_models_by_name_are_measured():
    text = (ROOT / "docs" / "models.md").read_text()
    table = (ROOT / "docs" / "generated" / "families.md").read_text()
    cells = [line.strip("| ").split(" | ") for line in table.partition(MARK)[2].splitlines()]
    modes = {row[0]: row[3] for row in cells if len(row) > 3 and row[0] not in ("family", "---")}
    by_name, explained = re.split(r"^## ", text, flags=re.MULTILINE)[:2]
    names = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| [A-Z].* \| (`.+) \|$", by_name, re.MULTILINE)))
    assert len(names) > 8 and modes.keys() >= {*names}
    explained = "".join(re.findall(r"^\| (`.+?) \|", explained, re.MULTILINE))
    assert {*modes.values()} == {*re.findall(r"`([\w ()]+)`", explained)}


def test_options_for_users_of_others_exist():
    """Checks this package's column, and its commands."""
    text = (ROOT / "docs" / "from_others.md").read_text()
    rows = [line.rsplit(" | ", 1)[1] for line in text.splitlines() if line.startswith("| `")]
    commands = [line for code in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in code.split("\n\n")]
    launched = [command for command in commands if command.startswith("trl-multimodal-rft grpo")]
    options = {name for part in [*rows, *launched] for name in re.findall(r"--(\w+)", part)}
    commands = (grpo, distillation, dpo, sft)
    known = {each.name for command in commands for arguments in command.ARGUMENTS for each in fields(arguments)}
    launcher = {"accelerate_config", "num_processes", "num_machines", "max_prompt_length"}  # an option of `check`
    launcher |= {"task"}  # of `prepare`
    assert len(launched) == 2 and len(options) > 30 and options <= known | launcher


def test_rows_of_others_become_rows(tmp_path, monkeypatch):
    """The commands of the page convert the row that it shows."""
    text = (ROOT / "docs" / "from_others.md").read_text()
    (row,) = re.findall(r"```json\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(row)
    soundfile.write("seven.wav", audio(0.3)["audio"], RATE)
    layouts = re.findall(r"^trl-multimodal-rft prepare (\S+) (.*)$", text, re.MULTILINE)
    assert {layout for layout, _ in layouts} <= {*LAYOUTS}
    main(["prepare", "ms-swift", *dict(layouts)["ms-swift"].split()])
    (made,) = load_dataset("rows", split="train").cast_column("audios", List(Audio(decode=False)))
    kinds = [block["type"] for block in made["prompt"][0]["content"]]
    assert (made["solution"], kinds) == ("seven", ["audio", "text"])
    assert made["audios"][0]["bytes"] == (tmp_path / "seven.wav").read_bytes()


def test_rows_of_pairs_are_read():
    """The rows that the page shows are pairs, each with one picture."""
    rows = [code for code in blocks((ROOT / "docs" / "preference.md").read_text()) if code.startswith("row = {")]
    assert len(rows) == 2
    for index, code in enumerate(rows):
        namespace = {}
        exec(code, namespace)
        check_pairs(Dataset.from_list([namespace["row"]]))
        [placed] = rows_to_messages([put_answer_media(Row(index, namespace["row"]))])
        assert [ref.source for ref in iter_refs([placed[name] for name in ("prompt", *COMPLETIONS)])] == ["cat.png"]


COLUMNS = {"sft": "messages", "grpo": "prompt solution", "kto": "prompt completion label"}
COLUMNS |= dict.fromkeys(("dpo", "reward"), "prompt chosen rejected")


def test_each_row_of_others_becomes_one_of_a_command(tmp_path, monkeypatch):
    """Each row of the page's tables gets the columns of the commands that it is for, and keeps its sound."""
    text = (ROOT / "docs" / "from_others.md").read_text()
    monkeypatch.chdir(tmp_path)
    soundfile.write("seven.wav", audio(0.3)["audio"], RATE)
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    n = 0
    for title, section in zip(sections[1::2], sections[2::2], strict=True):
        for row, options, names in re.findall(r"^\| `(\{.*\})` \| (.*?) ?\| (.*) \|$", section, re.MULTILINE):
            (tmp_path / "rows.jsonl").write_text(row)
            words = ["prepare", title.lower(), "rows.jsonl", *options.strip("`").split(), "--output_dir", f"out{n}"]
            main(words)
            (made,) = load_dataset(f"out{n}", split="train").cast_column("audios", List(Audio(decode=False)))
            for name in re.findall(r"`(\w+)`", names):
                assert {*COLUMNS[name].split(), "audios"} == made.keys(), row
            messages = str(made.get("messages", made.get("prompt")))
            assert "'audio'" in messages and "Which digit?" in messages and "<audio>" not in messages
            assert made.get("label") in (None, False) and ("Listen." in messages) == ("Listen." in row)
            answer = made.get("solution") or str(made.get("chosen") or made.get("completion") or messages)
            assert ("one" if "label" in made else "seven") in answer
            n += 1
    assert n == 10


class Page(HTMLParser):
    """Anchors and links of a page of the site."""

    def __init__(self, text):
        super().__init__()
        self.ids = set()
        self.links = []
        self.loaded = []
        self.tags = Counter()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags[tag] += 1
        self.ids |= {attrs.get("id"), attrs.get("name")}
        self.links += [attrs["href"]] if tag == "a" and "href" in attrs else []
        self.loaded += [attrs.get("src") or attrs.get("href")] if tag in ("script", "link", "img") else []


@pytest.mark.slow
def test_site_is_built(tmp_path):
    """Builds the site without a network, with the reference from docstrings. A missing name fails."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stderr[-3000:]

    def read(name):
        return (tmp_path / name / "index.html").read_text()

    pages = {path.parent: Page(path.read_text()) for path in tmp_path.rglob("index.html")}
    for folder, page in pages.items():
        for link in page.links:
            path, _, section = unquote(link).partition("#")
            if not path.startswith(("http", "mailto")):
                target = pages[Path(os.path.normpath(folder / path))]
                assert not section or section in target.ids, f"{folder}: {link}"
        assert not [each for each in page.loaded if each and "://" in each]
    for name, least in (("algorithms", 20), ("reference/algorithms", 20), ("reference/configs", 1)):
        assert pages[tmp_path / name].tags["math"] >= least
    config = read("reference/configs")
    assert "kl_target" in config and "Divergence per token, in nats" in config
    # A parsed list, not a raw block
    assert "<b><code>packing</code></b>" in config
    # Defaults come from the docstrings, and types appear once
    assert "0.992" in config and "DEFAULT_RULES.max" not in config
    trainers = read("reference/trainers")
    signature = re.search(r"doc-signature.*?<pre>(.*?)</pre>", trainers, re.DOTALL)[1]
    assert "reward_funcs" in signature and "RewardFunc" not in signature and "RewardFunc" in trainers
    first = read("")
    assert "images/before_after.svg" in first and pages[tmp_path].tags["img"] == 1
    architecture = {*pages[tmp_path / "architecture"].links}
    assert any(re.search(r"source/.*/rollout\.py.*#__codelineno-0-\d+$", link) for link in architecture)
    doors = {"datasets/", "from_others/#trl", "from_lightrft/", "from_others/#ms-swift", "from_others/#verl"}
    assert doors <= {*pages[tmp_path].links}
    assert 'data-md-color-scheme="slate"' in first and "md-footer__link--next" in first
    assert "md-footer__link--prev" in read("datasets")
    found = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    assert {"datasets/", "reference/configs/"} <= {each["location"] for each in found}
    text = " ".join(each["text"] for each in found if each["location"].startswith("first_run"))
    assert all(word in text for word in ("CSV", "spreadsheet", "reward model", "screenshot"))
