# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The model card documents the data and the training of a model, and its code runs."""

import ast
import html
import inspect
import re
from pathlib import Path

import PIL.Image
import PIL.ImageOps
import pytest
from helpers.families import encode
from helpers.folders import ROOT
from helpers.hub_worker import media_files
from helpers.trainer_utils import InjectedOurs, audio_rows, image_rows, make_trainer, text_rows, video_rows
from huggingface_hub import ModelCard, ModelCardData, constants
from torch.testing import assert_close
from transformers.audio_utils import load_audio

from trl_multimodal_rft import (
    GenerationEvalCallback,
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalPPOTrainer,
    MultimodalRLOOConfig,
    MultimodalRLOOTrainer,
    TrainingCurvesCallback,
)
from trl_multimodal_rft.algorithms.advantages import ESTIMATORS
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt
from trl_multimodal_rft.reporting.model_card import (
    PAPERS,
    base_metadata,
    held_out_lines,
    held_out_results,
    in_text,
    is_hub_name,
    quick_start,
    training_lines,
)
from trl_multimodal_rft.rewards import accuracy_reward


FILES = {"audio": "audio.wav", "image": "image.png", "video": "video.mp4"}


@pytest.mark.parametrize(
    ("trainer_class", "family", "rows", "kind", "pipeline"),
    [
        (MultimodalGRPOTrainer, "qwen2_audio", audio_rows, "audio", "audio-text-to-text"),
        (MultimodalGRPOTrainer, "qwen2_5_vl", image_rows, "image", "image-text-to-text"),
        (MultimodalGRPOTrainer, "qwen2_5_vl", video_rows, "video", "video-text-to-text"),
        pytest.param(
            MultimodalPPOTrainer, "qwen2_5_vl", image_rows, "image", "image-text-to-text", marks=pytest.mark.slow
        ),
        pytest.param(MultimodalRLOOTrainer, "qwen2_5_vl", text_rows, None, None, marks=pytest.mark.slow),
    ],
)
def test_card_of_a_run(trainer_class, family, rows, kind, pipeline, tmp_path, monkeypatch):
    """Its code passes the model the same inputs as training does for the same file, and as the processor documents."""
    trainer = make_trainer(trainer_class, family, rows(8), tmp_path / "model", max_steps=1, self_check=True)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card(model_name="Answers", dataset_name="someone/questions", tags="digits")
    card = ModelCard.load(tmp_path / "model" / "README.md")
    assert card.data.library_name == "transformers"
    assert card.data.pipeline_tag == pipeline
    assert {"trl", "trl-multimodal-rft", "digits", *([kind] if kind else [])} <= set(card.data.tags)
    assert card.data.datasets == "someone/questions"
    assert "`prompt`" in card.text and (kind is None or f"`{kind}`" in card.text)
    assert f"https://huggingface.co/papers/{trainer._paper['id']}" in card.text
    assert "padded rows vs. model's forward" in card.text
    assert "- Rewards: `length_and_sum`" in card.text and "- Updates: 1" in card.text
    for package in ("TRL", "Transformers", "PyTorch", "trl-multimodal-rft"):
        assert re.search(rf"- {package}: \d+\.\d+", card.text)
    namespace = run_code(card.text, tmp_path, monkeypatch)
    if kind is None:
        return
    monkeypatch.chdir(tmp_path)
    block = {"type": kind, "path": FILES[kind]}
    if kind == "image":  # torchvision reads its path, and not all builds support image formats
        block = {"type": kind, "image": PIL.ImageOps.exif_transpose(PIL.Image.open(FILES[kind]))}
    if kind == "audio" and '"soundfile"' not in inspect.getsource(load_audio):
        return  # an older transformers, whose backends resample otherwise
    options = {"processor_kwargs": {"load_audio_backend": "soundfile"}} if kind == "audio" else {}
    chat = [{"role": "user", "content": [block, {"type": "text", "text": "What is this?"}]}]
    documented = encode(namespace["processor"], chat, **options)
    (row,) = rows_to_messages([{"prompt": "What is this?", kind: FILES[kind]}])
    encoded = encode_prompt(row["prompt"], trainer.processing_class, trainer.model)
    assert encoded.media.keys() <= namespace["inputs"].keys()
    for name, value in {**encoded.media, "input_ids": encoded.input_ids[None]}.items():
        assert_close(namespace["inputs"][name], value)
        assert_close(namespace["inputs"][name], documented[name])


def test_card_asks_what_was_asked(tmp_path):
    """The card shows text that all prompts share, system prompt included. It omits text that differs between rows."""
    asked = [{"role": "system", "content": 'Say "yes".'}, {"role": "user", "content": "Do you see ``` it?"}]
    for name, rows in (("same", image_rows(8).map(lambda row: {"prompt": asked})), ("other", image_rows(8))):
        trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_5_vl", rows, tmp_path / name, max_steps=1)
        trainer.add_callback(GenerationEvalCallback(trainer, rows.add_column("solution", ["a"] * 8), accuracy_reward))
        trainer.train()
        trainer.save_model()
        trainer.create_model_card()
        text = (tmp_path / name / "README.md").read_text()
        (interval,) = re.findall(r"- Held-out accuracy: 0.0% \((.*% to .*%, of 8 rows)\)\n", text)
        (result,) = ModelCard(text).data.eval_results
        assert result.metric_name == f"Held-out accuracy, confidence interval {interval}"
        assert (result.metric_type, result.metric_value, result.dataset_name) == ("accuracy", 0.0, "held-out rows")
        assert result.task_type == "image-text-to-text" and ModelCard(text).data.model_name == name
        (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
        ast.parse(code)
        (line,) = re.findall(r"^messages = (.*)$", code, re.MULTILINE)
        messages = eval(line, {"image": "image"})
        texts = [block["text"] for message in messages for block in message["content"] if block["type"] == "text"]
        assert texts == ([each["content"] for each in asked] if name == "same" else ["What is this?"])
        assert [block["type"] for block in messages[-1]["content"]] == ["image", "text"]


def test_held_out_results_and_lines():
    """The card has `model-index` in the Hub's format, with the dataset if it is known."""
    before = {"step": 0, "eval_accuracy": 0.0}
    after = {"step": 9, "eval_accuracy": 0.5, "eval_accuracy_low": 0.25, "eval_accuracy_high": 0.75, "eval_rows": 12}
    (result,) = held_out_results([before, after], "audio-text-to-text", "someone/questions")
    data = ModelCardData(model_name="mine", eval_results=[result])
    metric = {"type": "accuracy", "value": 0.5}
    metric["name"] = "Held-out accuracy, confidence interval 25.0% to 75.0%, of 12 rows"
    results = {"task": {"type": "audio-text-to-text"}, "metrics": [metric]}
    results["dataset"] = {"name": "someone/questions", "type": "someone/questions"}
    assert data.to_dict() == {"model-index": [{"name": "mine", "results": [results]}]}
    assert held_out_results([{"step": 1}], None, None) is None
    assert held_out_lines([{"step": 1, "reward": 1.0}]) == []
    expected = "50.0% (25.0% to 75.0%, of 12 rows), 0.0% before training"
    assert held_out_lines([before, {"step": 1}, after]) == [("Held-out accuracy", expected)]
    assert held_out_lines([after]) == [("Held-out accuracy", expected.split("),")[0] + ")")]


def test_origins(tmp_path, monkeypatch):
    """Names on the Hub are names that aren't paths, and licenses come from local files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    for folder in ("someone/here", "ours", "broken"):
        Path(folder).mkdir(parents=True)
    for name, known in {"someone/model": True, "someone/here": False, "ours": False, "ours/": False}.items():
        assert is_hub_name(name) is known
    assert not any(map(is_hub_name, ["", "rows", "/abs/olute", "~/rows.jsonl", "./a/b", "a/b/c", "hf://datasets/a/b"]))

    assert base_metadata("") == base_metadata("someone/here") == base_metadata("nowhere") == {}
    assert base_metadata("someone/model") == {"base_model": "someone/model"}
    snapshot = tmp_path / "cache" / "models--someone--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    (snapshot / "README.md").write_text("---\nlicense: other\nlicense_name: own\nbase_model: someone/older\n---\n")
    license = {"license": "other", "license_name": "own"}
    assert base_metadata("someone/model") == {"base_model": "someone/model", **license}
    text = "---\nlicense: mit\nbase_model: someone/model\ntags: [{}]\n---\n"
    Path("someone/here/README.md").write_text(text.format("chat"))
    assert base_metadata("someone/here") == {"license": "mit"}
    Path("ours/README.md").write_text(text.format("trl-multimodal-rft"))
    assert base_metadata("ours") == {"base_model": "someone/model", "license": "mit"}
    Path("broken/README.md").write_text("---\na: [\n---\n")
    assert base_metadata("broken") == {}


def test_origins_on_the_card(tmp_path, monkeypatch):
    """The card doesn't present a folder as a dataset on the Hub, and shows existing curves."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "private" / "questions"
    folder.mkdir(parents=True)
    trainer = make_trainer(InjectedOurs, "qwen2_5_vl", text_rows(8), tmp_path / "model", max_steps=1)
    base = Path(trainer.model.config._name_or_path)
    trainer.create_model_card(dataset_name="private/questions")
    card = ModelCard.load("model/README.md")
    assert "datasets" not in card.data.to_dict() and "base_model" not in card.data.to_dict()
    assert "- Training data: questions, columns" in card.text
    for hidden in ("private", "huggingface.co/datasets", "training_curves.png", str(base)):
        assert hidden not in card.content
    trainer.add_callback(TrainingCurvesCallback())
    trainer.train()
    trainer.model.config._name_or_path = "someone/base"
    trainer.create_model_card(dataset_name="someone/questions")
    card = ModelCard.load("model/README.md")
    assert card.data.datasets == "someone/questions" and card.data.base_model == "someone/base"
    assert "[someone/questions](https://huggingface.co/datasets/someone/questions)" in card.text
    assert "A fine-tuned version of [someone/base](https://huggingface.co/someone/base)" in card.text
    assert "\n![Training curves](training_curves.png)\n" in card.text
    assert (tmp_path / "model" / "training_curves.png").exists()


BAD = "<img src=x onerror=alert(1)>\n# Owned [here](https://evil.example) `{{ 7*7 }}` www.evil.example ```"


def test_names_are_no_markup(tmp_path):
    """The card shows names of columns, rewards, datasets and runs verbatim, whatever they hold."""

    def length(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    length.__name__ = BAD
    folder = tmp_path / BAD.replace("/", ":").replace("\n", " ")
    rows = image_rows(8).add_column(BAD, [1] * 8)
    trainer = make_trainer(MultimodalPPOTrainer, "qwen2_5_vl", rows, folder, reward=length, max_steps=1)
    trainer.train()
    trainer.create_model_card(model_name=BAD, dataset_name="https://user:word@host.example/a?sig=key" + BAD)
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "image-text-to-text"
    outside = re.sub(r"```(python|bibtex)\n.*?\n```(\n|$)", "", card.content, flags=re.DOTALL)  # code blocks
    for mark in ("<img", "](https://evil", "{{", "www.evil", "https://host", "user:word", "sig=key"):
        assert mark not in outside
    headings = [line for line in outside.splitlines() if line.startswith("#")]
    assert [each for each in headings if "Owned" in each] == [f"# {in_text(BAD)}"]
    shown = html.unescape(outside)
    one_line = " ".join(BAD.split())
    assert shown.count(f"<code>{one_line}</code>") == 2 and "https://***@host.example/a?***" in shown
    (code,) = re.findall(r"## Quick start\n\n```python\n(.*?)```\n", card.content, re.DOTALL)
    ast.parse(code)
    for name in (None, BAD):
        trainer.create_model_card(model_name=name)
        assert in_text(folder.name if name is None else name) in (folder / "README.md").read_text()


def test_how_a_model_was_trained():
    options = {"advantage_estimator": "reinforce_baseline", "loss_type": "gmpo", "epsilon": 0.4, "beta": 0.02}
    options |= {"kl_target": 0.1, "top_entropy_quantile": 0.2, "dynamic_sampling": 4}
    options |= {"reward_clip_range": [-1.0, 1.0]}
    config = MultimodalGRPOConfig("out", use_cpu=True, bf16=False, num_generations=4, **options)
    lines = dict(training_lines(config.to_dict()))
    assert lines["Advantages"] == "`reinforce_baseline` ([REINFORCE++](https://huggingface.co/papers/2501.03262))"
    assert lines["Loss"].startswith("`gmpo` ([Geometric-Mean Policy Optimization](")
    assert "`epsilon=0.4`" in lines["Loss"]
    divergence = lines["KL divergence from the reference"]
    assert "`beta=0.02`, `k2` ([REINFORCE++](" in divergence and "in the loss, adaptive, `kl_target=0.1`" in divergence
    assert "`top_entropy_quantile=0.2`, [Beyond the 80/20 Rule](" in lines["Tokens trained on"]
    assert lines["`dynamic_sampling`"] == "`4`, [DAPO](https://huggingface.co/papers/2503.14476)"
    assert lines["`reward_clip_range`"] == "`[-1.0, 1.0]`"

    def mine(rewards, **kwargs):
        return rewards

    config = MultimodalRLOOConfig("out", use_cpu=True, bf16=False, num_generations=4, beta=0.02)
    assert dict(training_lines(config.to_dict()))["KL divergence from the reference"] == "`beta=0.02`, in the reward"
    config = MultimodalGRPOConfig("out", use_cpu=True, bf16=False, num_generations=4, advantage_estimator=mine)
    lines = dict(training_lines(config.to_dict()))
    assert lines["Advantages"] == "`mine`" and lines["KL divergence from the reference"] == "none"
    assert "Tokens trained on" not in lines and "`dynamic_sampling`" not in lines


def test_papers_are_those_of_the_documentation():
    """Each option that the card explains by a paper is in a row of that paper, as an argument."""
    page = (ROOT / "docs" / "algorithms.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| [")]
    missing = []
    for name, papers in PAPERS.items():
        for value, paper in papers.items() if isinstance(papers, dict) else [(None, papers)]:
            argument = f"{name}=" if value is None else f'{name}="{value}'
            links = f"papers/{'' if paper is None else paper.arxiv_id})"
            if paper and not any(links in row[0] and argument in row[1] for row in rows):
                missing.append(f"{argument} in a row of {paper.arxiv_id}")
    assert not missing, f"docs/algorithms.md has no {', '.join(missing)}"
    for own in ESTIMATORS.values():
        assert own.alias is None or f'`"{own.alias}"`' in page


def test_quick_start_hands_over_the_template_arguments():
    code = quick_start("Model", "someone/model", ["audio"], 8, rate=24000, template_kwargs={"enable_thinking": False})
    assert "    enable_thinking=False,\n).to(model.device, model.dtype)" in code and "rate, 24000)" in code


def test_quick_start_of_an_adapter_says_whose_folder_its_base_is(tmp_path):
    line = "# The base model is a folder of the machine that trained the adapter; write the name of yours\n"
    assert line in quick_start("Model", "someone/adapter", [], 8, str(tmp_path))
    assert line not in quick_start("Model", "someone/adapter", [], 8, "someone/base")


def run_code(text: str, folder, monkeypatch) -> dict:
    """Returns the variables of the card's quick start, which runs in a folder with the files that it names."""
    media_files(folder)
    (code,) = re.findall(r"## Quick start\n\n```python\n(.*?)```", text, re.DOTALL)
    namespace = {"__name__": "__main__"}
    with monkeypatch.context() as context:
        context.chdir(folder)
        exec(compile(code, "card", "exec"), namespace)
    assert len(namespace["answer"]) > 0
    return namespace
