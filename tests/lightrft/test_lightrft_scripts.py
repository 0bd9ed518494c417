# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
LightRFT's own training scripts, of a checkout that the environment variable `LIGHTRFT` names, with this package's
names in their imports. They need `pip install mathruler librosa easydict`.
"""

import ast
import importlib
import inspect
import os
import re
from contextlib import suppress
from pathlib import Path

import pytest
import soundfile
import torch
from datasets import Dataset
from helpers import forked
from helpers.folders import TESTS
from helpers.processes import python_command, python_environment
from helpers.trainer_utils import image_rows, saved
from safetensors.torch import load_file
from transformers import AutoProcessor, GenerationConfig

from trl_multimodal_rft.lightrft import Actor, Critic, PPOTrainerVL
from trl_multimodal_rft.lightrft.strategy import RULES
from trl_multimodal_rft.lightrft.strategy_object import Strategy


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("LIGHTRFT" not in os.environ, reason="`LIGHTRFT` names no checkout of LightRFT"),
]

# Modules that the scripts import, and lines that can't stay: two calls that patch private methods
PATCHES = ("patch_strategy_for_audio", "patch_experience_maker_for_audio")
SCRIPTS = {"gsm8k_geo3k": (["mathruler"], ()), "r1_aqa": (["librosa", "easydict"], PATCHES)}


METHODS = {
    "grpo": ["--advantage_estimator", "group_norm", "--use_kl_loss", "--kl_estimator", "k3"],
    "gae": ["--advantage_estimator", "gae"],
}


def copied(name: str, folder: Path) -> Path:
    """Copies a script and the modules beside it, with this package in their imports. Returns the script's path."""
    patched = SCRIPTS[name][1]
    folder.mkdir()
    for path in Path(os.environ["LIGHTRFT"], "examples", name).glob("*.py"):
        text = re.sub(
            r"^(\s*(?:from|import) )lightrft\b", r"\1trl_multimodal_rft.lightrft", path.read_text(), flags=re.M
        )
        if path.name == "train_colocate.py" and patched:
            calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
            calls = [node for node in calls if ast.unparse(node).startswith(patched)]
            assert len(calls) == 2
            lines = text.splitlines()
            for node in calls:
                for number in range(node.lineno - 1, node.end_lineno or node.lineno):
                    lines[number] = ""
            text = "\n".join(lines)
        (folder / path.name).write_text(text)
    return folder / "train_colocate.py"


def run(script: Path, model: Path, rows: Dataset, folder: Path, *options: str):
    """Runs two updates on the CPU."""
    (folder / "data").mkdir()
    rows.to_parquet(folder / "data" / "train.parquet")
    options = f"""
        --pretrain {model} --save_path {folder / "model"} --ckpt_path {folder / "model"}
        --prompt_data {folder / "data"}
        --engine_type transformers --n_samples_per_prompt 2 --rollout_batch_size 2 --init_kl_coef 0.1 --l2 0.1
        --micro_rollout_batch_size 2 --train_batch_size 4 --micro_train_batch_size 2 --num_episodes 1
        --generate_max_len 8 --prompt_max_len 512 --actor_learning_rate 1e-3 --critic_learning_rate 1e-3
        --lr_warmup_ratio 0.0 --eval_split none --save_steps -1 {" ".join(options)}
    """.split()
    command = python_command([TESTS / "helpers" / "cuda_as_cpu.py", script, *options])
    result = forked.run(command, capture_output=True, env=python_environment(ACCELERATE_USE_CPU="true"), cwd=folder)
    assert result.returncode == 0, result.stderr[-6000:]
    assert "step 2/2" in result.stdout, result.stdout[-3000:]
    weights = [load_file(part / "model.safetensors") for part in (model, folder / "model")]
    assert weights[0].keys() == weights[1].keys()
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    AutoProcessor.from_pretrained(folder / "model")
    return result


@pytest.fixture
def script(request, tmp_path):
    for module in SCRIPTS[request.param][0]:
        pytest.importorskip(module)
    return copied(request.param, tmp_path / "script")


@pytest.mark.parametrize("script", ["gsm8k_geo3k"], indirect=True)
@pytest.mark.parametrize("method", METHODS)
def test_pictures(script, method, tmp_path):
    rows = [
        {
            "prompt": f"<image>What is the angle {i}?",
            "images": [row["image"]],
            "label": "geo3k_rule",
            "reward_model": {"ground_truth": "2"},
        }
        for i, row in enumerate(image_rows(4))
    ]
    keys = "--input_key prompt --images_key images --label_key label --apply_chat_template --freeze_prefix".split()
    run(script, saved("qwen2_5_vl"), Dataset.from_list(rows), tmp_path, *keys, *METHODS[method])


@pytest.mark.parametrize("script", ["r1_aqa"], indirect=True)
def test_sounds(script, tmp_path):
    rows = []
    for i in range(4):
        path = tmp_path / f"{i}.wav"
        soundfile.write(path, 0.1 * torch.randn(9600 + 800 * i).numpy(), 16000)
        content = [{"type": "audio", "audio_url": str(path)}, {"type": "text", "text": f"Which word is it? {i}"}]
        rows.append({"prompt": [{"role": "user", "content": content}], "audio_path": str(path), "reference": "two"})
    keys = "--input_key prompt --reference_key reference --label_key label".split()
    run(script, saved("qwen2_audio"), Dataset.from_list(rows), tmp_path, *keys, *METHODS["grpo"])


# Scripts of reinforcement learning and of reward models, and names in them that can't stay, see docs/from_lightrft.md
LINES = {
    "gsm8k_geo3k/train_colocate.py": set(),
    "r1_aqa/train_colocate.py": set(),  # without the two calls above
    "grm_vl_rl/train_colocate.py": {"RFTDatasetVL"},
    "srm_training/train_srm_vl.py": {"RankDatasetVL", "ScalarRewardModelVL", "SRMTrainerVL", "prepare_reward_model"},
    "srm_training/train_srm_al.py": {"RankDatasetAL", "ScalarRewardModelAL", "SRMTrainerAL", "prepare_reward_model"},
    "grm_training/train_grm_vl.py": {"GRMDataset", "GenerativeRewardModelVL", "GRMTrainerVL", "prepare_reward_model"},
}
CALLED = {"Actor": Actor, "SPMDPPOTrainerVL": PPOTrainerVL, "CriticVL": Critic}


def missing_names(tree: ast.Module) -> set[str]:
    """Returns names that a script imports or reads of its strategy, and keywords of its calls, that there aren't."""
    missing = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightrft"):
            module = None
            with suppress(ModuleNotFoundError):
                module = importlib.import_module(f"trl_multimodal_rft.{node.module}")
            missing |= {alias.name for alias in node.names if not hasattr(module, alias.name)}
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "strategy":
            missing |= set() if hasattr(Strategy, node.attr) else {node.attr}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in CALLED:
            taken = {*inspect.signature(CALLED[ast.unparse(node.func)]).parameters, *vars(GenerationConfig()), *RULES}
            missing |= {str(each.arg) for each in node.keywords} - taken - {"reward_tokenizers", "normalize_reward"}
    return missing


@pytest.mark.parametrize("name", LINES)
def test_names_that_cannot_stay(name):
    tree = ast.parse(Path(os.environ["LIGHTRFT"], "examples", name).read_text())
    assert missing_names(tree) == LINES[name]
