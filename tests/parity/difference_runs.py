# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Short runs of TRL's trainers and of this package's on the same rows and completions, and what differs in them."""

from __future__ import annotations

import copy
import functools
import math
import os
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
import transformers as hf
import trl
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from helpers import distillation_runs, rloo_runs
from helpers import trainer_utils as utils
from helpers.trainer_utils import PLAIN, length_and_sum, metrics, norm, shifted
from parity.test_trl_scripts import saved
from peft import LoraConfig
from trainers.preference.test_dpo import image_pairs
from trainers.preference.test_kto import labelled

import trl_multimodal_rft as own


_FILES = tempfile.TemporaryDirectory()

QUESTIONS = ["Is there a bird?", "Is there a cat? A dog?", "What is in the image?", "Describe it."]
ANSWERS = ["It is a cat.", "Two birds sing, one after the other.", "red", "There is a dog here"]
OTHERS = ["blue", "No", "It is a bird and a dog", "7"]
IMAGES = "qwen2_5_vl"


# Values that stand for files of this process
TEMPLATE = "<file of a template>"
FOLDER = "<folder of a model>"


def _template_file() -> str:
    path = Path(_FILES.name, "template.jinja")
    path.write_text("{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>\n{% endfor %}")
    return str(path)


def say(role: str, text: str) -> list[dict]:
    return [{"role": role, "content": text}]


@functools.cache
def prompts(n: int = 8) -> Dataset:
    return Dataset.from_list([{"prompt": say("user", f"{QUESTIONS[i % 4]} {i}")} for i in range(n)])


def _rows(n: int, **columns: list[str]) -> Dataset:
    rows = []
    for i in range(n):
        row = {"prompt": say("user", f"{QUESTIONS[i % 4]} {i}")}
        rows.append({**row, **{name: say("assistant", texts[i % 4]) for name, texts in columns.items()}})
    return Dataset.from_list(rows)


@functools.cache
def completions() -> Dataset:
    return _rows(8, completion=ANSWERS)


@functools.cache
def pairs() -> Dataset:
    return _rows(8, chosen=ANSWERS, rejected=OTHERS)


@functools.cache
def judged() -> Dataset:
    return labelled(pairs())


@functools.cache
def image_completions() -> Dataset:
    rows = image_pairs()
    return rows.rename_column("chosen", "completion").remove_columns("rejected")


@functools.cache
def judged_images() -> Dataset:
    return labelled(image_pairs())


@functools.cache
def sentences() -> Dataset:
    """Rows of plain text in two columns, for `dataset_text_field`."""
    texts = [f"{QUESTIONS[i % 4]} {ANSWERS[i % 4]}" for i in range(8)]
    return Dataset.from_dict({"text": texts, "sentence": texts[::-1]})


@dataclass(frozen=True)
class Subject:
    """TRL's trainer and this package's, with rows, options of all of their runs, and options of this package's."""

    trl: tuple[type, type]  # with pseudo-random completions, and with the model's
    ours: tuple[type, type]
    rows: Callable[[], Dataset]
    images: Callable[[], Dataset] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)

    @property
    def samples(self) -> bool:
        return "max_completion_length" in self.options


SAMPLING = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "steps_per_generation": 2,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 0.03,
}
OWN_SAMPLING = {"packing_shuffle": True, "self_check": False, "media_prefetch": 0}
READING = {"per_device_train_batch_size": 4, "learning_rate": 0.03}
DISTILLATION = {name: SAMPLING[name] for name in ("per_device_train_batch_size", "max_completion_length")}
# PPO is GRPO with a critic, which TRL has in no trainer of this interface (`trl.experimental.ppo` trains token
# classifiers, with a config of its own). Without its critic it is compared with GRPO
AS_GRPO = {"advantage_estimator": "group_norm", "num_ppo_epochs": 1}


class InjectedPPO(utils.InjectedPPO):
    """PPO without a critic, with pseudo-random completions."""


def _pair(name: str) -> tuple[tuple[type, type], tuple[type, type]]:
    theirs = getattr(trl, f"{name}Trainer")
    ours = getattr(own, f"Multimodal{name}Trainer")
    return (theirs, theirs), (ours, ours)


SUBJECTS = {
    "grpo": Subject(
        (utils.InjectedTRL, trl.GRPOTrainer),
        (utils.InjectedOurs, own.MultimodalGRPOTrainer),
        prompts,
        utils.image_rows,
        SAMPLING,
        OWN_SAMPLING,
    ),
    "rloo": Subject(
        (rloo_runs.InjectedTRL, trl.RLOOTrainer),
        (rloo_runs.InjectedOurs, own.MultimodalRLOOTrainer),
        prompts,
        utils.image_rows,
        SAMPLING,
        OWN_SAMPLING,
    ),
    "ppo": Subject(
        (utils.InjectedTRL, trl.GRPOTrainer),
        (InjectedPPO, own.MultimodalPPOTrainer),
        prompts,
        utils.image_rows,
        SAMPLING,
        {**OWN_SAMPLING, **AS_GRPO},
    ),
    "sft": Subject(*_pair("SFT"), completions, image_completions, READING),
    "dpo": Subject(*_pair("DPO"), pairs, image_pairs, READING, {"self_check": False}),
    "kto": Subject(*_pair("KTO"), judged, judged_images, READING, {"self_check": False}),
    "reward": Subject(*_pair("Reward"), pairs, None, READING),
    "distillation": Subject(
        (distillation_runs.InjectedTRL, trl.DistillationTrainer),
        (distillation_runs.InjectedOurs, own.MultimodalDistillationTrainer),
        prompts,
        utils.image_rows,
        {**DISTILLATION, "learning_rate": 0.1},
        OWN_SAMPLING,
    ),
}
# Where a run of one of these options has more
TWO_REWARDS = ("reward_weights", "multi_objective_aggregation")
BY_NAME = ("model_init_kwargs", "trust_remote_code", "cast_lm_head_to_fp32")
WITH_EXPERTS = ("router_aux_loss_coef",)
ON_PLAIN_TEXT = ("dataset_text_field", "eos_token")
WITH_DROPOUT = ("disable_dropout",)  # of an adapter


def actual(value: Any) -> Any:
    """Returns the path of a file that a value stands for, or the value itself."""
    if isinstance(value, str):
        return _template_file() if value == TEMPLATE else saved() if value == FOLDER else value
    return value


def trl_config(trainer: str) -> type:
    """Returns TRL's config of a trainer; that of PPO is GRPO's."""
    return utils.config_of(SUBJECTS[trainer].trl[1])


def our_config(trainer: str) -> type:
    return utils.config_of(SUBJECTS[trainer].ours[1])


@functools.cache
def _text_model(reward: bool) -> tuple[Any, Any]:
    if reward:
        folder = saved(hf.Qwen3ForSequenceClassification, num_labels=1)
        model = hf.Qwen3ForSequenceClassification.from_pretrained(folder)
    else:
        folder = saved()
        model = hf.Qwen3ForCausalLM.from_pretrained(folder)
    return shifted(model), hf.AutoTokenizer.from_pretrained(folder)


@functools.cache
def _image_model(family: str) -> tuple[Any, Any]:
    model, processor = utils.load(family)
    return shifted(model), processor


def model_of(trainer: str, case: Case) -> tuple[Any, Any]:
    """Returns a new model that differs from the one in its folder, and its processor."""
    made = _text_model(trainer == "reward") if case.family is None else _image_model(case.family)
    return copy.deepcopy(made)


def second_reward(completion_ids, **kwargs) -> list[float]:
    return [0.3 * (sum(ids) % 5) for ids in completion_ids]


def objects_of(trainer: str, case: Case) -> dict[str, Any]:
    """Returns the arguments of a trainer's constructor but for its config."""
    subject = SUBJECTS[trainer]
    model, processor = model_of(trainer, case)
    if case.option in ON_PLAIN_TEXT and trainer == "sft":
        rows = sentences()
    else:
        rows = subject.rows() if case.rows != "images" else subject.images()
    objects = {"model": model, "processing_class": processor, "train_dataset": rows}
    if case.option in BY_NAME:
        classifier = (hf.Qwen3ForSequenceClassification,) if trainer == "reward" else ()
        changes = {"num_labels": 1} if trainer == "reward" else {}
        objects["model"] = saved(*classifier, **changes)
    if "eval_strategy" in case.options:
        objects["eval_dataset"] = rows.select(range(4))
    if trainer in ("grpo", "rloo", "ppo"):
        rewards = [length_and_sum, second_reward]
        objects["reward_funcs"] = rewards if case.option in TWO_REWARDS else length_and_sum
    if trainer == "distillation":
        objects["teacher_model"] = shifted(model_of(trainer, case)[0], 0.05, seed=7)
    if case.option in WITH_DROPOUT:
        task = "SEQ_CLS" if trainer == "reward" else "CAUSAL_LM"
        objects["peft_config"] = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, init_lora_weights=False, task_type=task
        )
    elif trainer in ("dpo", "kto") and not case.options.get("sync_ref_model"):
        objects["ref_model"] = shifted(model_of(trainer, case)[0], 0.005, seed=7)
    return objects


@dataclass(frozen=True)
class Case:
    """A value of an option, the other options of its run, and the kind of rows: "text", "images" or "experts"."""

    option: str
    value: Any
    options: dict[str, Any]
    rows: str = "text"
    sampled: bool = False
    config_only: bool = False

    @property
    def family(self) -> str | None:
        return {"text": None, "images": IMAGES, "experts": "qwen3_vl_moe"}[self.rows]


@dataclass
class Result:
    """What came of a run: an error, or logs, the change of the weights, names of files, and the config's value."""

    error: str | None = None
    history: list[dict] = field(default_factory=list)
    update: dict[str, torch.Tensor] = field(default_factory=dict)
    files: set[str] = field(default_factory=set)
    value: str = ""


def _reset(environment: dict[str, str]) -> None:
    """Removes what a run may leave in the process."""
    os.environ.clear()
    os.environ.update(environment)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.benchmark = False
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def _files_in(folder: str) -> set[str]:
    root = Path(folder)
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def _text(value: Any) -> str:
    """Returns a config's value as text: that of an `Enum`, and the classes of objects."""
    value = getattr(value, "value", value)
    return repr(value)


def train(trainer: str, case: Case, ours: bool, leaves_out: bool = False) -> Result:
    """Runs a case with one side's trainer, or the case without its option if `leaves_out`."""
    subject = SUBJECTS[trainer]
    classes = subject.ours if ours else subject.trl
    config_class = our_config(trainer) if ours else trl_config(trainer)
    options = {**PLAIN, **subject.options, **(subject.own if ours else {}), **case.options}
    if leaves_out:
        options.pop(case.option, None)
    else:
        options[case.option] = actual(case.value)
    environment = dict(os.environ)
    verbosity = hf.utils.logging.get_verbosity(), datasets.utils.logging.get_verbosity()
    _reset(environment)
    result = Result()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options.setdefault("output_dir", folder)
        try:
            config = config_class(**options)
            if not case.config_only:
                objects = objects_of(trainer, case)
                instance = classes[int(case.sampled)](args=config, **objects)
                instance.model_accepts_loss_kwargs = True  # otherwise TRL averages micro-batches of images of any size
                before = {name: p.detach().clone() for name, p in instance.model.named_parameters()}
                instance.train()
                after = dict(instance.model.named_parameters())
                result.update = {name: after[name].detach() - before[name] for name in before}
                result.history = instance.state.log_history
                result.files = _files_in(folder)
                config = instance.args
            result.value = _text(getattr(config, case.option))
        except Exception as error:
            result.error = f"{type(error).__name__}: {error}"
        finally:
            _reset(environment)
            hf.utils.logging.set_verbosity(verbosity[0])
            datasets.utils.logging.set_verbosity(verbosity[1])
    return result


# Metrics of TRL that count something that differs by design
NOT_COMPARED = ("total_flos", "epoch_time")
TOLERANCE = 1e-4
# Over several micro-batches, TRL logs the mean of their values, and this package what sums and counts give: see "Not
# by an option" of the page. `test_trl_parity.py` compares these of single micro-batches
SUMS = re.compile(
    r"(eval_)?(entropy|mean_token_accuracy|kl|clip_ratio/.*|logits/.*|reward_std|rewards/.*/std|min_reward|max_reward"
    r"|completions/(mean_terminated|min|max).*)|eval_loss"
)


def _difference(theirs: float, ours: float) -> float:
    if math.isnan(theirs) or math.isnan(ours) or math.isinf(theirs) or math.isinf(ours):
        return 0.0 if str(theirs) == str(ours) else math.inf
    return abs(theirs - ours) / max(1.0, abs(theirs))


def distance_of_updates(theirs: dict, ours: dict) -> float:
    """Returns the distance of two updates over the length of the first, or of the second if the first is 0."""
    if not theirs and not ours:  # only configs were made
        return 0.0
    shapes = [{name: change.shape for name, change in update.items()} for update in (theirs, ours)]
    if shapes[0] != shapes[1]:
        return math.inf
    distance = norm({name: theirs[name].double() - ours[name].double() for name in theirs})
    if math.isnan(distance):
        is_same = all(torch.equal(theirs[name].isnan(), ours[name].isnan()) for name in theirs)
        return 0.0 if is_same else math.inf
    return distance / (norm(theirs) or norm(ours) or 1.0)


def differences(theirs: Result, ours: Result) -> dict[str, Any]:
    """Returns what differs between two runs, with the size, or with TRL's and our value."""
    found: dict[str, Any] = {}
    if theirs.value != ours.value:
        found["value"] = (theirs.value[:60], ours.value[:60])
    distance = distance_of_updates(theirs.update, ours.update)
    if not distance <= TOLERANCE:
        found["weights"] = distance
    missing = {name for name in theirs.files - ours.files if not name.endswith("chat_template.jinja")}
    if missing:
        found["files"] = sorted(missing)
    logs = metrics(theirs.history), metrics(ours.history)
    if len(logs[0]) != len(logs[1]):
        found["entries"] = (len(logs[0]), len(logs[1]))
        return found
    for a, b in zip(*logs, strict=True):
        for name in a:
            if name in NOT_COMPARED or SUMS.fullmatch(name):
                continue
            size = _difference(a[name], b[name]) if name in b else math.inf
            if not size <= TOLERANCE and size > found.get(name, 0.0):
                found[name] = size
    return found
