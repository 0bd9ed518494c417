# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Datasets, short runs, and comparisons of their results for tests of the trainers."""

import copy
import functools
import json
import operator
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import accelerate
import torch
from datasets import Dataset
from transformers import AutoProcessor, PreTrainedConfig, TrainerCallback, TrainingArguments
from trl import GRPOTrainer

from helpers.chats import RATE, audio, image, video
from helpers.families import ALL_FAMILIES, fresh
from helpers.samplers import PseudoRandom, pseudo_random
from trl_multimodal_rft import (
    MultimodalDistillationConfig,
    MultimodalDistillationTrainer,
    MultimodalDPOConfig,
    MultimodalDPOTrainer,
    MultimodalGRPOConfig,
    MultimodalGRPOTrainer,
    MultimodalKTOConfig,
    MultimodalKTOTrainer,
    MultimodalPPOConfig,
    MultimodalPPOTrainer,
    MultimodalRewardConfig,
    MultimodalRewardTrainer,
    MultimodalRLOOConfig,
    MultimodalRLOOTrainer,
    MultimodalSFTConfig,
    MultimodalSFTTrainer,
    families,
)
from trl_multimodal_rft.trainers.base.logs import LoggedTrainer
from trl_multimodal_rft.trainers.base.multimodal_config import SamplingArguments


torch.set_num_threads(1)  # the matrices are too small to gain from more threads
# Clearing the cache costs a fifth of a run of 0.2 s
if not torch.cuda.is_available():
    accelerate.utils.memory.clear_device_cache = lambda garbage_collection=False: None
# Formatting configs for logs that nobody reads takes a quarter of `from_pretrained`
PreTrainedConfig.__repr__ = object.__repr__
accelerate.utils.imports._is_package_available = functools.cache(accelerate.utils.imports._is_package_available)

_MODELS = tempfile.TemporaryDirectory()  # TRL loads a reference model from the policy's path


@functools.cache
def saved(family: str) -> Path:
    """Returns a folder with model and processor of a family, written once."""
    return ALL_FAMILIES[family].save(Path(_MODELS.name, family))


@functools.cache
def checkpoint(family: str, side: str | None = None) -> str:
    """Returns a family's folder whose tokenizer config sets the padding side, or doesn't, like most released ones."""
    folder = Path(_MODELS.name, f"{family}-{side}")
    shutil.copytree(saved(family), folder)
    path = folder / "tokenizer_config.json"
    if path.exists():  # Voxtral uses Mistral's tokenizer
        settings = json.loads(path.read_text())
        assert settings.pop("padding_side") == "left"
        path.write_text(json.dumps(settings if side is None else {**settings, "padding_side": side}))
    return str(folder)


@functools.cache
def _loader(family: str):
    def load():
        folder = saved(family)
        ALL_FAMILIES[family].build()  # leaves the same random state in all processes, whichever wrote the folder
        return ALL_FAMILIES[family].model_class.from_pretrained(folder), AutoProcessor.from_pretrained(folder)

    return load


def load(family: str):
    """Returns a fresh `(model, processor)` whose config names a folder that TRL can load again."""
    return fresh(_loader(family))


# Datasets


@functools.cache
def text_rows(n: int = 8) -> Dataset:
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"Is there a bird? {i}"}]} for i in range(n)])


@functools.cache
def image_rows(n: int = 8) -> Dataset:
    """Returns rows with one image of 4 to 12 tokens and prompts of different lengths."""
    sizes = [(84, 56), (56, 56), (112, 84), (56, 112)]
    rows = [
        {
            "prompt": [{"role": "user", "content": "What is in the image?" + " Is there a cat?" * (i % 3) + f" {i}"}],
            "image": image(*sizes[i % 4], seed=i)["image"],
        }
        for i in range(n)
    ]
    return Dataset.from_list(rows)


@functools.cache
def images_rows(n: int = 8) -> Dataset:
    """Returns rows with one, two or three images."""
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Compare them. Is there a bird? {i}"}],
            "images": [image(56 + 28 * (j % 2), 56, seed=10 * i + j)["image"] for j in range(1 + i % 3)],
        }
        for i in range(n)
    ]
    return Dataset.from_list(rows)


@functools.cache
def audio_rows(n: int = 8) -> Dataset:
    """Returns rows with one chirp of 0.3 to 0.9 s."""
    prompts = [f"What do you hear in the audio?{' Is there a cat?' * (i % 3)} {i}" for i in range(n)]
    rows = [{"prompt": [{"role": "user", "content": prompt}]} for prompt in prompts]
    return with_media(Dataset.from_list(rows), "audio", [sound(0.3 + 0.2 * (i % 4), seed=i) for i in range(n)])


@functools.cache
def video_rows(n: int = 8) -> Dataset:
    """Returns rows with a video of 4 or 6 frames."""
    rows = [{"prompt": [{"role": "user", "content": f"Describe the video. Is there a dog? {i}"}]} for i in range(n)]
    videos = [video(4 + 2 * (i % 2), 84, 56, seed=i)["video"] for i in range(n)]
    return with_media(Dataset.from_list(rows), "video", videos)


# Questions, some with a common start
QUESTIONS = ["Is there a bird?", "Is there a cat? Yes", "Is there a bird? No", "Describe the image."]


@functools.cache
def clip_rows(order=range(8)) -> Dataset:
    """Returns rows with four questions about each of two clips."""
    clips = [video(6, 112, 112, seed=i // 4)["video"] for i in order]
    contents = [f"Describe the video. {QUESTIONS[i % 4]}" for i in order]
    rows = [{"prompt": [{"role": "user", "content": content}]} for content in contents]
    return with_media(Dataset.from_list(rows), "video", clips)


def with_media(rows: Dataset, column: str, media: list) -> Dataset:
    """Returns rows that get a column of media on reading, because Arrow would turn arrays into lists of numbers."""
    rows = rows if "index" in rows.column_names else rows.add_column("index", range(len(rows)))
    return rows.with_transform(lambda batch: {**batch, column: [media[i] for i in batch["index"]]})


def forget_isolation(monkeypatch) -> None:
    """Makes families run prompts and media in shared batches, also those families that isolate them."""
    rows = tuple(replace(family, isolate=None) for family in families.FAMILIES)
    monkeypatch.setattr(families, "FAMILIES", rows)


def sound(seconds: float, seed: int = 0) -> dict:
    return {"array": audio(seconds, seed)["audio"], "sampling_rate": RATE}


# Rewards and completions


def length_and_sum(completion_ids, **kwargs) -> list[float]:
    """Returns rewards that differ between most completions, for trainers of this package and of TRL."""
    return [len(ids) % 5 + 0.1 * (sum(ids) % 7) for ids in completion_ids]


class Injected:
    """Mixin of trainers with pseudo-random completions."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.sampler = PseudoRandom(self)


class InjectedTRL(GRPOTrainer):
    """TRL's trainer with the completions of [`Injected`]."""

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        return pseudo_random(prompt_ids, self.state.global_step, self.model.training, self._tokenizer), None


class RemembersPacking:
    """Mixin that records whether the trainer packed each micro-batch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scored_packed = []

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.scored_packed.append(inputs.packed)
        return super().compute_loss(model, inputs, *args, **kwargs)


class InjectedOurs(RemembersPacking, Injected, MultimodalGRPOTrainer):
    pass


class InjectedPPO(Injected, MultimodalPPOTrainer):
    pass


class Recording:
    """
    Mixin that records every draw of completions and every micro-batch.

    A draw in `draws` has the rows, the `batch` before its split into micro-batches, the rewards of all functions, and
    the optimizer step. A record in `micro_batches` has the micro-batch as `batch`, log-probabilities and entropies
    of its forward pass, the loss, the loss's gradient by log-probabilities, the step and the KL coefficient.
    """

    def __init__(self, *args, **kwargs):
        self.draws = []
        self.micro_batches = []
        super().__init__(*args, **kwargs)

    def _estimate(self, rollout, rewards):
        rollout = super()._estimate(rollout, rewards)
        rewards = rewards.per_func.clone()
        self.draws.append(self._moment(rows=rollout.source.rows, batch=ByName(rollout), rewards=rewards))
        return rollout

    def _compute_loss(self, model, inputs):
        kl_coef = getattr(self, "kl_coef", None)
        loss = super()._compute_loss(model, inputs)
        logps = self._scores.logps
        entropies = self._scores.entropies
        gradient = torch.autograd.grad(loss, logps, retain_graph=True)[0] if loss.requires_grad else None
        self.micro_batches.append(
            self._moment(
                batch=_cloned(inputs.rollout),
                logps=logps.detach(),
                entropies=entropies.detach(),
                loss=loss.detach(),
                gradient=gradient,
                kl_coef=kl_coef,
            )
        )
        return loss

    def _moment(self, **values):
        return SimpleNamespace(step=self.state.global_step, training=self.model.training, **values)


class Weights(TrainerCallback, dict):
    """Callback and dictionary: a model's weights before an optimizer step, by the number of steps so far."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self[state.global_step] = copy.deepcopy(model.state_dict())


class Gradients(TrainerCallback):
    """Callback that keeps the gradients of each update."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.seen.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})


class ByName:
    """Wrapper of a rollout that also reads fields as `batch["advantages"]`, and nested ones as `["values.old"]`."""

    def __init__(self, rollout):
        self.rollout = rollout

    def __getattr__(self, name):
        return getattr(vars(self)["rollout"], name)

    def __len__(self):
        return len(self.rollout)

    def __getitem__(self, name):
        return operator.attrgetter(name)(self.rollout)

    def get(self, name, default):
        value = self[name]
        return default if value is None else value


def _cloned(rollout):
    cloned = rollout.map_values(lambda _, value: value.clone() if isinstance(value, torch.Tensor) else value)
    vars(cloned).update({name: vars(rollout)[name] for name in vars(rollout).keys() - vars(cloned).keys()})
    return ByName(cloned)


class Recorded(Recording, InjectedOurs):
    pass


def keys(batch) -> list[tuple]:
    """Returns a key for each completion of a batch: the ids of prompt and completion."""
    completions = [
        ids[mask.bool()] for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    ]
    prompts = [prompt.input_ids for prompt in batch.prompts]
    return [(tuple(p.tolist()), tuple(c.tolist())) for p, c in zip(prompts, completions, strict=True)]


def by_key(moments, name: str) -> dict[tuple, torch.Tensor]:
    """Returns the field `name` of recorded batches for the tokens of each completion, by [`keys`]."""
    values = {}
    for batch in (moment.batch for moment in moments):
        for key, value, mask in zip(keys(batch), batch[name], batch["completion_mask"].bool(), strict=True):
            values[key] = (value if value.dim() else value.expand(len(mask)))[mask]
    return values


def moved(family: str, distance: float = 0.02) -> dict:
    """
    Returns the arguments `model` and `processing_class` of a policy that differs from the reference, which TRL loads
    from the folder of the family.
    """
    model, processor = load(family)
    return {"model": shifted(model, distance), "processing_class": processor}


def shifted(model, distance: float = 0.02, seed: int = 0):
    """Returns a model after a random step."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += distance * torch.randn(parameter.shape, generator=generator)
    return model


# Runs

TRAINERS = {
    "grpo": MultimodalGRPOTrainer,
    "rloo": MultimodalRLOOTrainer,
    "ppo": MultimodalPPOTrainer,
    "sft": MultimodalSFTTrainer,
    "dpo": MultimodalDPOTrainer,
    "kto": MultimodalKTOTrainer,
    "reward": MultimodalRewardTrainer,
    "distillation": MultimodalDistillationTrainer,
}
CONFIGS = {
    "grpo": MultimodalGRPOConfig,
    "rloo": MultimodalRLOOConfig,
    "ppo": MultimodalPPOConfig,
    "sft": MultimodalSFTConfig,
    "dpo": MultimodalDPOConfig,
    "kto": MultimodalKTOConfig,
    "reward": MultimodalRewardConfig,
    "distillation": MultimodalDistillationConfig,
}


@dataclass
class Run:
    """Results of a run."""

    trainer: GRPOTrainer
    update: dict[str, torch.Tensor]  # change of each parameter
    history: list[dict]  # logs


# A short, plain run of any trainer
PLAIN = {
    "max_steps": 2,
    "optim": "sgd",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 1e9,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
}

# Options of this package's trainers: `QUICK` for tests of neither feature, `AS_SHIPPED` for tests of one of them
QUICK = {"media_prefetch": 0, "self_check": False}
AS_SHIPPED = {"media_prefetch": 1, "self_check": True}


def config_of(trainer_class) -> type:
    """Returns the config class of a trainer class of this package or of TRL, by its name."""
    packages = [(sys.modules[base.__module__.split(".")[0]], base.__name__) for base in trainer_class.__mro__]
    configs = [getattr(package, name.replace("Trainer", "Config"), None) for package, name in packages]
    return next(config for config in configs if isinstance(config, type) and issubclass(config, TrainingArguments))


def make_trainer(
    trainer_class, family: str, dataset, output_dir, *, reward=length_and_sum, objects=None, sampler=None, **options
):
    """
    Returns a trainer of a tiny model: 8 completions in groups of 4, plain gradient descent without clipping.

    `objects` are further arguments of the trainer, `options` arguments of its config; `sampler` makes a sampler from
    the trainer.
    """
    config_class = config_of(trainer_class)
    sampling = {"num_generations": 4, "max_completion_length": 8}
    arguments = {
        "per_device_train_batch_size": 8,
        **{name: value for name, value in sampling.items() if name in config_class.__dataclass_fields__},
        **PLAIN,
        **(QUICK if issubclass(config_class, SamplingArguments) else {}),
        **options,
    }
    objects = dict(objects or {})
    if "model" not in objects:
        model, processor = load(family)
        objects = {"model": model, "processing_class": processor, **objects}
    if reward is not None:
        objects["reward_funcs"] = reward
    trainer = trainer_class(args=config_class(str(output_dir), **arguments), train_dataset=dataset, **objects)
    if sampler is not None:
        trainer.sampler = sampler(trainer)
    return trainer


def update_of(trainer, checkpoint: str | None = None) -> dict[str, torch.Tensor]:
    """Trains, from a checkpoint if there is one, and returns the change of each parameter."""
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train(resume_from_checkpoint=checkpoint)
    return {name: p.detach() - before[name] for name, p in trainer.model.named_parameters()}


def run(trainer_class, family: str, dataset, **options) -> Run:
    """Trains in a temporary folder with the arguments of [`make_trainer`] and returns the results."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(trainer_class, family, dataset, folder, **options)
        update = update_of(trainer)
    return Run(trainer, update, trainer.state.log_history)


# Comparisons


def norm(update: dict[str, torch.Tensor]) -> float:
    return torch.stack([value.square().sum() for value in update.values()]).sum().sqrt().item()


def relative_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Returns the Euclidean distance of two updates over the length of the first."""
    assert a.keys() == b.keys()
    return norm({name: a[name] - b[name] for name in a}) / norm(a)


def assert_update_is_gradient(before: dict[str, torch.Tensor], model, plain, learning_rate: float) -> None:
    """Asserts that one update of SGD moved a model from `before` by the gradient of `plain` (head in float32)."""
    update = {name: (before[name] - p.detach()) / learning_rate for name, p in model.named_parameters()}
    update = {name: value for name, value in update.items() if value.any()}
    gradient = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None and p.grad.any()}
    assert update.keys() == gradient.keys() and len(gradient) > 10
    assert relative_difference(gradient, update) < 1e-5


def counted_calls(monkeypatch, module, name: str) -> list[int]:
    """Returns a list that gets an entry for each call of a module's function."""
    calls = []
    function = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: calls.append(1) or function(*args, **kwargs))
    return calls


def logged(result: Run, name: str) -> list[float]:
    """Returns the values of a metric, in the order of the steps."""
    return [entry[name] for entry in result.history if name in entry]


def metrics(history: list[dict]) -> list[dict[str, float]]:
    """Returns the floats of a log history, without durations and metrics that only this package logs."""
    excluded = (
        "time",
        "per_second",
        "packing/",
        "signal/",
        "skipped_updates",
        "tools/ended_by",
        "tools/environment_failures",
        "tools/unparsed_frequency",
        "media/",
    )
    return [
        {
            key: value
            for key, value in entry.items()
            if isinstance(value, float) and not any(part in key for part in excluded)
        }
        for entry in history
    ]


# Metrics over several micro-batches, which TRL averages, and this package sums: those that differ a bit, and others
SUMMED = (
    "entropy",
    "kl",
    "mean_token_accuracy",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "clip_ratio/region_mean",
)
SUMMED += ("logits/chosen", "logits/rejected", "rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen")
SUMMED += ("logps/rejected", "cispo_clip_ratio", "vespo/phi_seq_mean")
EXTREMES = ("low_min", "high_max", "min_length", "max_length", "terminated_length", "std", "min_reward", "max_reward")


def largest_difference(a: list[dict], b: list[dict], *, sums: bool = False) -> tuple[float, str]:
    """
    Returns the largest difference between metrics of two histories, and the metric's name. Differences are relative to
    the metric if it exceeds 1. Entropies are compared only if no update left out completions. With `sums`, only one
    of the histories has sums over several micro-batches, by which token means differ by a few percent.
    """
    skips = any(entry.get("packing/skipped_frac") for entry in [*a, *b])
    a = metrics(a)
    b = metrics(b)
    for entry in [*a, *b] if skips else ():
        entry.pop("entropy", None)
    assert [entry.keys() for entry in a] == [entry.keys() for entry in b]
    differences = []
    for x, y in zip(a, b, strict=True):
        for key in x:
            difference = abs(x[key] - y[key]) / max(1, abs(x[key]))
            if sums and key.endswith(EXTREMES):
                continue
            if sums and key.removeprefix("eval_") in SUMMED:
                difference /= 500
            differences.append((difference, f"{key}: {x[key]} and {y[key]}"))
    return max(differences)


def assert_equal(
    theirs: Run,
    ours: Run,
    *,
    same_metrics: bool = True,
    tolerance: float = 1e-5,
    of_metrics: float = 1e-4,
    sums: bool | None = None,
) -> None:
    """Asserts that two runs made the same nonzero update, and logged the same."""
    assert norm(theirs.update) > 0.01
    assert relative_difference(theirs.update, ours.update) <= tolerance
    if same_metrics:
        is_ours = [isinstance(run.trainer, LoggedTrainer) for run in (theirs, ours)]
        sizes = {"gradient_accumulation_steps", "logging_steps"}
        has_parts = any(getattr(run.trainer.args, size) > 1 for run in (theirs, ours) for size in sizes)
        sums = has_parts and is_ours != [True, True] if sums is None else sums
        worst, where = largest_difference(theirs.history, ours.history, sums=sums)
        assert worst <= of_metrics, where
