# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Publishes with the real client to a local Hub (hub_server.py), and uses the published files.

The runs share a separate process (hub_worker.py), because the client reads the address of the Hub at import.
"""

import io
import json
import re
import shlex
import subprocess
import sys
from itertools import product
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
import yaml
from helpers.folders import TESTS
from helpers.hub_server import HubServer, Token
from helpers.processes import PATIENCE, python_environment
from helpers.trainer_utils import InjectedOurs, make_trainer, text_rows
from huggingface_hub.errors import OfflineModeIsEnabled

from trl_multimodal_rft.reporting.hub import upload_command


TOKENS = {
    "hf_write": Token("someone"),
    "hf_read": Token("someone", write=False),
    "hf_short": Token("short", n_commits=1),
    "hf_slow": Token("slow", held=True),
}
MODEL = {"README.md", "chat_template.jinja", "processor_config.json", "tokenizer.json", "tokenizer_config.json"}
MODEL |= {"training_args.bin"}
WEIGHTS = {"config.json", "generation_config.json", "model.safetensors"}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors"}
STATE = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "rollout_state_0.pt", "trainer_state.json", "manifest.json"}
CRITIC = {"critic/config.json", "critic/model.safetensors", "critic/value_head.safetensors"}


class Published:
    """Published files and results of some scenarios."""

    def __init__(self, hub: HubServer, folder: Path, scenarios: list[str]):
        self.hub = hub
        self.folder = folder
        self.environment = python_environment(HF_ENDPOINT=hub.url, HF_HOME=str(folder / "home"), HF_TOKEN="hf_write")
        self.environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        worker = TESTS / "helpers" / "hub_worker.py"
        run = self.run([sys.executable, "-W", "ignore", str(worker), str(folder), *scenarios])
        assert run.returncode == 0, run.stderr[-3000:]

    def run(self, command: list[str]) -> subprocess.CompletedProcess:
        options = {"capture_output": True, "text": True, "timeout": PATIENCE}
        return subprocess.run(command, cwd=self.folder, env=self.environment, **options)

    def __getitem__(self, scenario: str) -> dict:
        result = json.loads((self.folder / f"{scenario}.json").read_text())
        assert "error" not in result, result["error"]
        return result


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    scenarios = ["grpo_audio", "lora_image", "ppo_image", "strategies", "refused"]
    with HubServer(dict(TOKENS)) as hub:
        yield Published(hub, tmp_path_factory.mktemp("hub"), scenarios)


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    with HubServer(dict(TOKENS)) as hub:
        yield Published(hub, tmp_path_factory.mktemp("hub"), ["mixed"])


def in_folder(names: set[str], folder: str) -> set[str]:
    return {f"{folder}/{name}" for name in names}


def messages(repo) -> list[str]:
    """Returns the commit messages after the initial commit."""
    return [commit.message for commit in repo.commits[1:]]


def assert_answers(asked: dict, *inputs: str) -> None:
    """Asserts that a quick start passes media to the model, and that the model answers."""
    assert set(inputs) <= set(asked["inputs"])
    assert len(asked["answer"]) > 0 and asked["printed"].endswith("\n")


# After training


@pytest.mark.gate
def test_policy_with_audio(published):
    result = published["grpo_audio"]
    repo = published.hub.model("someone/digits")
    assert result["same"] and result["vocabulary"]
    assert result["processor"] == ["Qwen2AudioProcessor", "Qwen2AudioProcessor"]
    (scalars,) = repo.paths - MODEL - WEIGHTS
    assert re.fullmatch(r"runs/.*tfevents.*", scalars)
    assert not repo.private and messages(repo) == ["End of training"]
    assert_answers(result, "input_features")
    assert 'from_pretrained("someone/digits"' in result["code"]
    data = result["data"]
    text = result["text"]
    assert data["library_name"] == "transformers" and data["pipeline_tag"] == "audio-text-to-text"
    assert {"trl", "trl-multimodal-rft", "grpo", "audio", "digits"} <= set(data["tags"])
    assert data["datasets"] == "someone/spoken" and "licence" not in data and "base_model" not in data
    assert "it takes text and audio and answers in text" in text and "`audio`, `index` and `prompt`" in text
    readme = published.hub.model("someone/digits").files["README.md"].content.decode()
    assert yaml.safe_load(readme.split("---\n")[1]) == data


@pytest.mark.gate
def test_what_stays_here(published):
    """Covers tables with prompts and media, their TensorBoard files, checkpoints and the token."""
    local = published["grpo_audio"]["local"]
    kept = [r"_private/completions/completions_00001\.parquet", r"_private/runs/.*tfevents.*"]
    kept += [r"checkpoint-1/rollout_state_0\.pt"]
    for pattern in kept:
        assert any(re.fullmatch(pattern, path) for path in local)
    completions = published.folder / "grpo_audio" / "out" / "_private" / "completions"
    table = pq.read_table(completions / "completions_00001.parquet")
    media = [audio["bytes"] for audio in table["audio"].to_pylist() if audio is not None]
    assert media
    contents = [blob.content for repo in published.hub.repos.values() for blob in repo.files.values()]
    assert len(contents) > 50
    for secret in (b"hf_write", b"hf_slow", b"hf_short", *media):
        assert not any(secret in content for content in contents)


@pytest.mark.gate
def test_nothing_half_written(published):
    """No commit has them, and every checkpoint is complete."""
    n_checkpoints = 0
    for repo in published.hub.repos.values():
        for commit in repo.commits:
            paths = set(commit.files) - {".gitattributes"}
            assert not any(part.startswith("_") for path in paths for part in path.split("/"))
            for folder in {path.split("/")[0] for path in paths if "checkpoint" in path}:
                n_checkpoints += 1
                saved = {path.removeprefix(f"{folder}/") for path in paths if path.startswith(f"{folder}/")}
                assert saved >= STATE | WEIGHTS | MODEL - {"README.md"}
    assert n_checkpoints >= 6


@pytest.mark.gate
def test_adapter(published):
    result = published["lora_image"]
    repo = published.hub.model("someone/adapter")
    assert result["same"] and result["processor"] == "Qwen2_5_VLProcessor"
    assert repo.paths == MODEL | ADAPTER
    assert_answers(result, "pixel_values")
    data = result["data"]
    assert data["library_name"] == "peft" and data["base_model"] == "someone/base"
    assert data["pipeline_tag"] == "image-text-to-text" and {"trl", "trl-multimodal-rft", "image"} <= set(data["tags"])
    assert "An adapter for [someone/base](https://huggingface.co/someone/base)" in result["text"]
    assert re.search(r"- PEFT: \d+\.\d+", result["text"])


@pytest.mark.gate
def test_policy_critic_and_last_checkpoint(published):
    result = published["ppo_image"]
    repo = published.hub.model("someone/ppo")
    assert result["same"] and result["critic"] and result["average"] and result["moved"]
    average = in_folder(MODEL - {"README.md"} | WEIGHTS, "ema")
    checkpoint = in_folder(MODEL - {"README.md"} | WEIGHTS | CRITIC | STATE | {"ema.safetensors"}, "last-checkpoint")
    assert repo.paths == MODEL | WEIGHTS | CRITIC | average | checkpoint
    assert_answers(result, "pixel_values")
    assert 'subfolder="critic"' in result["text"] and '`subfolder="ema"`' in result["text"]
    assert "https://huggingface.co/papers/1506.02438" in result["text"]
    # The critic belongs to the model from the first push on, and the run resumes from the checkpoint on the Hub
    steps = [f"Training in progress, step {i}{part}" for i, part in product((1, 2), ("", ", checkpoint"))]
    assert messages(repo) == [*steps, "End of training"]
    during = [set(commit.files) - {".gitattributes"} for commit in repo.commits[1:5]]
    assert during[0] == MODEL | WEIGHTS | CRITIC
    state = [json.loads(commit.files["last-checkpoint/trainer_state.json"].content) for commit in repo.commits[2:5:2]]
    assert [each["global_step"] for each in state] == [1, 2]
    assert result["resumed"] and result["resumed_steps"] == [1, 2]
    assert not result["warned"]


# While training


@pytest.mark.gate
def test_strategies(published):
    result = published["strategies"]
    hub = published.hub
    assert messages(hub.model("someone/end")) == []
    saves = ["Training in progress, step 1", "Training in progress, step 2"]
    assert messages(hub.model("someone/every_save")) == saves
    assert hub.model("someone/every_save").paths == MODEL | WEIGHTS
    checkpoints = {f"checkpoint-{i}/{name}" for i, name in product((1, 2), MODEL - {"README.md"} | WEIGHTS | STATE)}
    assert hub.model("someone/all_checkpoints").paths == MODEL | WEIGHTS | checkpoints
    assert result["every_save"] and result["all_checkpoints"]
    first, second = (commit.files["model.safetensors"] for commit in hub.model("someone/every_save").commits[1:])
    assert first != second


@pytest.mark.gate
def test_checkpoint_stays_while_it_is_uploaded(published):
    """The first one becomes obsolete when the trainer writes the second, while its upload runs."""
    result = published["strategies"]
    repo = published.hub.model("slow/all_checkpoints")
    assert messages(repo) == ["Training in progress, step 1", "Training in progress, step 1, checkpoint"]
    checkpoint = in_folder(MODEL - {"README.md"} | WEIGHTS | STATE, "checkpoint-1")
    assert repo.paths == MODEL | WEIGHTS | checkpoint
    assert result["left"] == ["checkpoint-1", "checkpoint-3"] and not result["warned"]


# Errors


@pytest.mark.gate
def test_refused_and_the_command_that_publishes(published):
    """`huggingface_hub` raises the errors. After training, the trained model is saved completely."""
    refused = published["refused"]
    down = {"down_before": "ConnectError", "offline": "OfflineModeIsEnabled"}
    for case in ("none", "wrong", "down_before", "offline"):
        assert refused[case]["type"] == down.get(case, "HfHubHTTPError")
        assert case in down or "401" in refused[case]["message"]
    for case in ("none_after", "reading", "foreign", "revoked", "down", "down_saving"):
        assert refused[case]["type"] == ("ConnectError" if case.startswith("down") else "HfHubHTTPError")
        assert refused[case]["whole"]
    # A token is revoked after the first push; the run continues and reports it
    (warning,) = refused["revoked"]["warned"]
    assert "checkpoint-2 was not published" in warning and "401" in warning
    assert "Training continues." in warning
    assert messages(published.hub.model("short/revoked")) == ["Training in progress, step 1"]
    # The command publishes what the trainer would have, for a user with a new token
    folder = str(published.folder / "refused" / "none_after")
    program, *arguments = shlex.split(upload_command("none_after", folder, True))
    run = published.run([str(Path(sys.executable).with_name(program)), *arguments])
    assert run.returncode == 0, run.stderr[-2000:]
    repo = published.hub.model("someone/none_after")
    assert repo.paths == MODEL | WEIGHTS and repo.private


@pytest.mark.gate
def test_offline(tmp_path):
    """Runs in this process."""
    trainer = make_trainer(InjectedOurs, "qwen2_5_vl", text_rows(8), tmp_path / "model", max_steps=1)
    with pytest.raises(OfflineModeIsEnabled):
        trainer.push_to_hub()
    assert {path.name for path in (tmp_path / "model").iterdir()} == MODEL | WEIGHTS


# Other cards


@pytest.mark.slow
def test_policy_of_several_media(more):
    """Tables of completions go only to the configured place."""
    result = more["mixed"]
    hub = more.hub
    assert result["data"]["pipeline_tag"] == "any-to-any"
    assert {"image", "audio", "video"} <= set(result["data"]["tags"])
    assert "it takes text, images, video and audio and answers" in result["text"]
    assert_answers(result, "pixel_values", "input_features", "pixel_values_videos")
    logs = hub.repos["datasets", "someone/omni-logs"]
    assert logs.private and logs.paths == {"README.md", "completions_00001.parquet"}
    table = pq.read_table(io.BytesIO(logs.files["completions_00001.parquet"].content))
    assert isinstance(datasets.Features.from_arrow_schema(table.schema)["audio"], datasets.Audio)
    assert hub.model("someone/omni").paths == MODEL | WEIGHTS and not hub.model("someone/omni").private
