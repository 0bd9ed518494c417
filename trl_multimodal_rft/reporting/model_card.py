# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Model cards: training, versions, and code to run the model."""

import functools
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from accelerate.utils import is_peft_model
from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.repocard import metadata_load
from jinja2 import Environment, Template
from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin, TrainerState, TrainingArguments, is_wandb_available
from trl.trainer.utils import get_comet_experiment_url, get_config_model_id, get_trackio_space_url

from ..algorithms.advantages import ESTIMATORS
from ..algorithms.entropy import high_entropy_mask
from ..algorithms.kl import KL_ESTIMATORS, AdaptiveKLController
from ..algorithms.losses import LOSSES
from ..algorithms.papers import Paper, paper_of
from ..algorithms.shaping import RunningScale, contrast_bonus
from ..checks.self_check import SelfCheck
from ..credentials import without_credentials
from ..data.reading.rules import BUDGET_NAMES
from ..data.rows.difficulty import DifficultySampler
from ..encoding.processors import audio_rate
from ..modalities import MODALITIES
from ..models.reward_model import is_reward_model
from ..models.wrapped import unwrapped
from ..spelling import split_settings
from ..views.view_options import sigmoid
from .card_notes import CardNotes


CURVES = "training_curves.png"  # file of the picture of a run's curves, in its folder
_TEMPLATES = Path(__file__).with_name("templates")

_VERSIONS = {
    "trl-multimodal-rft": "trl-multimodal-rft",
    "TRL": "trl",
    "Transformers": "transformers",
    "PyTorch": "torch",
    "Datasets": "datasets",
    "Tokenizers": "tokenizers",
}

# Task of a model on the Hub, by the modalities of its inputs
_TASKS = {
    frozenset({"image"}): "image-text-to-text",
    frozenset({"image", "video"}): "image-text-to-text",
    frozenset({"video"}): "video-text-to-text",
    frozenset({"audio"}): "audio-text-to-text",
}

# Papers by option, or by option and value
_DAPO = LOSSES["dapo"].paper
PAPERS: dict[str, Any] = {
    "advantage_estimator": {name: estimator.paper for name, estimator in ESTIMATORS.items()},
    "loss_type": {name: loss.paper for name, loss in LOSSES.items()},
    "importance_sampling_level": {"sequence": Paper("GSPO", "2507.18071")},
    "kl_estimator": {name: paper_of(function) for name, function in KL_ESTIMATORS.items()},
    "kl_target": paper_of(AdaptiveKLController),
    "top_entropy_quantile": paper_of(high_entropy_mask),
    "soft_overlong_cache": _DAPO,
    "reward_running_scale": paper_of(RunningScale),
    "dynamic_sampling": _DAPO,
    "dynamic_sampling_range": Paper("MM-EUREKA", "2503.07365"),
    "replay_buffer_size": Paper("VL-Rethinker", "2504.08837"),
    "difficulty_sampling": paper_of(DifficultySampler),
    "rollout_view": paper_of(sigmoid),  # NoisyRollout, whose schedule this is
    "contrast_view": paper_of(contrast_bonus),
}


# Template of the confidence interval of the held-out accuracy, filled with an entry of the log history
_INTERVAL = "{eval_accuracy_low:.1%} to {eval_accuracy_high:.1%}, of {eval_rows:.0f} rows"

# Options that a card names unless they are off (0, `False`, `None` or empty)
_IF_ON = ("soft_overlong_cache", "reward_running_scale", "reward_clip_range", "dynamic_sampling", "replay_buffer_size")
_IF_ON += ("dynamic_sampling_range", "difficulty_sampling", "rollout_view", "contrast_view")
# Options that a card names unless they are `None`
_IF_SET = ("learning_rate", "num_generations", "temperature", "max_completion_length", "num_iterations", "vf_coef")
_IF_SET += ("cliprange_value", "ema_decay")


def in_text(name: str) -> str:
    """Returns an untrusted name as plain text, without Markdown, HTML, links, templates or credentials."""
    name = without_credentials(" ".join(name.split()))
    letters = [letter if letter.isalnum() or letter in " _-/." else f"&#{ord(letter)};" for letter in name]
    return re.sub(r"(?i)(www)\.", r"\1&#46;", "".join(letters))


def in_code(name: str) -> str:
    """Returns an untrusted name as code, see [`in_text`]."""
    name = without_credentials(name)
    return f"`{name}`" if re.fullmatch(r"[\w .,:=()\[\]'\"/+*?-]+", name) else f"<code>{in_text(name)}</code>"


def linked_repository(name: str, prefix: str = "") -> str:
    """Returns a link to a repository on the Hub, the last part of a local path, or any other name as text."""
    if is_hub_name(name):
        return f"[{name}](https://huggingface.co/{prefix}{name})"
    return in_text(os.path.basename(os.path.abspath(name)) if os.path.exists(name) else name)


def is_hub_name(name: str) -> bool:
    """Returns whether a name is `owner/name` of a repository on the Hub. A local path takes precedence."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not os.path.exists(name)


def base_metadata(name: str) -> dict[str, str]:
    """
    Returns metadata of the base model for a model card: its name on the Hub and its license. They come from a card in
    a local folder or the Hub's cache, without requests. For a local folder, the base model is the one that the
    folder's card names, but only if this package wrote that card.
    """
    on_hub = is_hub_name(name)
    path = try_to_load_from_cache(name, "README.md") if on_hub else os.path.join(name, "README.md")
    try:
        card = metadata_load(path) or {} if isinstance(path, str) and os.path.isfile(path) else {}
    except (ValueError, yaml.YAMLError):  # other programs may write invalid cards
        card = {}
    base = name if on_hub else card.get("base_model") if "trl-multimodal-rft" in (card.get("tags") or ()) else None
    metadata = {"base_model": base, **{key: card.get(key) for key in ("license", "license_name", "license_link")}}
    return {key: value for key, value in metadata.items() if isinstance(value, str)}


def held_out_lines(history: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Returns a card's line on the held-out accuracy, or no line without a [`GenerationEvalCallback`]."""
    evaluations = [logs for logs in history if "eval_accuracy" in logs]
    if not evaluations:
        return []
    first = evaluations[0]
    last = evaluations[-1]
    interval = f" ({_INTERVAL})".format(**last) if "eval_accuracy_low" in last else ""
    before = f", {first['eval_accuracy']:.1%} before training" if first["step"] == 0 else ""
    return [("Held-out accuracy", f"{last['eval_accuracy']:.1%}{interval}{before}")]


def held_out_results(history: list[dict[str, Any]], task: str | None, dataset: str | None) -> list[EvalResult] | None:
    """Returns the latest held-out accuracy for the `model-index` of a card, or `None`, see [`held_out_lines`]."""
    last = next((logs for logs in reversed(history) if "eval_accuracy" in logs), None)
    if last is None:
        return None
    interval = f", confidence interval {_INTERVAL}".format(**last) if "eval_accuracy_low" in last else ""
    return [
        EvalResult(
            task_type=task or "text-generation",
            dataset_type=dataset or "custom",
            dataset_name=dataset or "held-out rows",
            metric_type="accuracy",
            metric_name=f"Held-out accuracy{interval}",
            metric_value=round(last["eval_accuracy"], 4),
        )
    ]


def quick_start(
    model_class: str,
    folder: str,
    modalities: Sequence[str],
    max_new_tokens: int,
    base_model: str | None = None,
    rate: int | None = None,
    template_kwargs: dict[str, Any] | None = None,
    conversation: Sequence[tuple[str, str]] = (("user", "What is this?"),),
) -> str:
    """
    Returns code that prompts a model, or scores completions with a reward model. `folder` is the model's local folder
    or its name on the Hub. The media files of the code, such as `image.png`, are the user's.
    """
    # The parameters of this function are the variables of the templates
    values = {**locals(), "template_kwargs": template_kwargs or {}}
    values["base_is_folder"] = base_model is not None and Path(base_model).is_dir()
    template_name = "quick_start_reward.md" if is_reward_model([model_class]) else "quick_start.md"
    return _template(template_name, strips_blocks=True).render(values)


# Each checkpoint has a card, so templates are compiled, and versions read, only once
_version = functools.cache(version)


@functools.cache
def _template(name: str, strips_blocks: bool = False) -> Template:
    """With `strips_blocks`, a line that has only a Jinja tag leaves no empty line."""
    environment = Environment(trim_blocks=strips_blocks, lstrip_blocks=strips_blocks)
    # Three backticks would end the block of code
    environment.filters["quoted"] = lambda text: json.dumps(text, ensure_ascii=False).replace("```", r"\u0060" * 3)
    return environment.from_string(_TEMPLATES.joinpath(name).read_text(encoding="utf-8"))


@dataclass
class CardRun:
    """The facts about a run that its model card shows."""

    args: TrainingArguments
    state: TrainerState
    model: nn.Module  # with its adapter
    processor: ProcessorMixin | PreTrainedTokenizerBase
    notes: CardNotes
    trainer_name: str
    paper: dict[str, str]  # paper of the method, in TRL's format
    repository: str  # its name on the Hub, or a local folder
    max_new_tokens: int
    template_kwargs: dict[str, Any]
    training: list[tuple[str, str]]  # names and texts of the lines about the method
    folders: list[tuple[str, str]]  # name of each further folder of the model, and a phrase about its contents
    self_check: SelfCheck | None = None


def write_card(run: CardRun, model_name: str | None, dataset_name: str | None) -> None:
    """Replaces the model card that TRL wrote to the output folder, and keeps TRL's metadata except wrong entries."""
    folder = Path(str(run.args.output_dir))
    modalities = run.notes.modalities
    history = run.state.log_history
    path = folder / "README.md"
    name = model_name or folder.name
    base = unwrapped(None, run.model)
    loaded_from = get_config_model_id(base.config)
    hub_dataset = dataset_name if dataset_name is not None and is_hub_name(dataset_name) else None
    data = ModelCard.load(path).data
    assert isinstance(data, ModelCardData)
    data.pop("licence", None)  # TRL's placeholder
    # Replaces TRL's names of base model and dataset, since the Hub can't resolve local ones
    for key, value in {"base_model": None, "datasets": hub_dataset, **base_metadata(loaded_from)}.items():
        data[key] = value
    model_class = type(base).__name__
    is_reward = is_reward_model([model_class])
    task = _TASKS.get(frozenset(modalities), "any-to-any") if modalities else None  # no task for text alone
    data.pipeline_tag = "text-classification" if is_reward else data.pipeline_tag or task
    data.eval_results = held_out_results(history, data.pipeline_tag, hub_dataset)
    needs_name = model_name is not None or data.eval_results is not None  # results need a name
    data.model_name = (name if in_text(name) == name else "model") if needs_name else None
    has_adapter = is_peft_model(run.model)
    if has_adapter:
        data.library_name = "peft"
    ordered_modalities = [modality for modality in MODALITIES if modality in modalities]
    packages = {**_VERSIONS, "PEFT": "peft"} if has_adapter else _VERSIONS
    # The card shows the prompt if it is the same in all rows (`conversations` is a set). Different prompts are data,
    # which a card must not show.
    conversations = run.notes.conversations
    shared = [chat for chat in conversations if len(conversations) == 1 and chat and chat[-1][0] == "user"]
    text = _template("model_card.md").render(
        card_data=data.to_yaml(),
        model_name=in_text(name),
        base_model=data.get("base_model") and linked_repository(data["base_model"]),
        dataset=dataset_name and linked_repository(dataset_name, "datasets/"),
        reports=_dashboards(),
        columns=_join_words(in_code(name) for name in sorted(run.notes.columns)),
        task=data.pipeline_tag,
        scores=is_reward,
        input_words=_join_words(
            ["text", *("images" if modality == "image" else modality for modality in ordered_modalities)]
        ),
        method=Paper(run.trainer_name, run.paper["id"]).link,
        adapter=has_adapter,
        model_class=model_class,
        quick_start=quick_start(
            model_class,
            run.repository,
            ordered_modalities,
            run.max_new_tokens,
            loaded_from if has_adapter else None,
            audio_rate(run.processor) if "audio" in modalities else None,
            run.template_kwargs,
            **({"conversation": shared[0]} if shared else {}),
        ),
        training=[*run.training, ("Updates", run.state.global_step), *held_out_lines(history)],
        curves=CURVES if (folder / CURVES).exists() else None,
        folders=run.folders,
        versions=[(name, _version(package)) for name, package in packages.items()],
        trainer_name=run.trainer_name,
        paper=Paper(run.paper["title"], run.paper["id"]).link,
        citation=run.paper["citation"],
        self_check=run.self_check,
    )
    ModelCard(text).save(path)


def _dashboards() -> list[tuple[str, str]]:
    urls = {"Trackio": get_trackio_space_url(), "Comet": get_comet_experiment_url()}
    if is_wandb_available():
        import wandb

        urls = {"Weights & Biases": None if wandb.run is None else wandb.run.url, **urls}
    return [(name, url) for name, url in urls.items() if url]


def training_lines(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns a card's lines about the method: advantages, loss, divergence, tokens, rewards, sampling."""
    lines = []
    estimator = options.get("advantage_estimator")
    if estimator is not None:
        lines.append(("Advantages", _option_with_paper(estimator, "advantage_estimator")))
    if "loss_type" in options:
        clip_names = (
            ("epsilon", "epsilon_high", "delta")
            if LOSSES[split_settings(options["loss_type"])[0]].clips_ratios
            else ()
        )
        bounds = [f"`{name}={options[name]}`" for name in clip_names if options[name] is not None]
        level = options["importance_sampling_level"]
        ratios = [f"ratios per {_option_with_paper(level, 'importance_sampling_level')}"] if level != "token" else []
        lines.append(("Loss", ", ".join([_option_with_paper(options["loss_type"], "loss_type"), *bounds, *ratios])))
    lines.append(("KL divergence from the reference", _divergence(options)))
    quantile = options.get("top_entropy_quantile", 1.0)
    if quantile < 1:
        share_text = f"those of the highest entropy, `top_entropy_quantile={quantile}`"
        lines.append(("Tokens trained on", share_text + _paper_suffix("top_entropy_quantile")))
    lines += common_lines(options)
    # Options without a sentence
    shown_options = [name for name in _IF_ON if options.get(name)]
    shown_options += [name for name in _IF_SET if options.get(name) is not None]
    return [*lines, *((f"`{name}`", f"`{options[name]}`{_paper_suffix(name)}") for name in shown_options)]


def common_lines(options: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns the lines on cards of all trainers: frozen parts, learning rates of parts, and budgets of media."""
    frozen = options.get("freeze") or ()
    rates = options.get("learning_rates") or {}
    budgets = {name: options[name] for name in BUDGET_NAMES if options.get(name)}
    lines = {
        "Frozen": map(in_code, frozen),
        "Learning rates of parts": (f"{in_code(key)} {rate:g}" for key, rate in rates.items()),
        "Budgets of media": (f"`{name}={value}`" for name, value in budgets.items()),
    }
    texts = [(title, ", ".join(words)) for title, words in lines.items()]
    return [(title, text) for title, text in texts if text]


def _divergence(options: dict[str, Any]) -> str:
    beta = options["beta"]
    estimator = options.get("kl_estimator")
    if beta == 0:
        return "none"
    parts = [f"`beta={beta}`"]
    if estimator is None:
        parts.append("in the reward")  # RLOO has no choice of estimator
    else:
        parts += [_option_with_paper(estimator, "kl_estimator"), f"in the {'reward' if estimator == 'k1' else 'loss'}"]
    if options.get("kl_target") is not None:
        settings = f"`kl_target={options['kl_target']}`, `kl_horizon={options['kl_horizon']}`"
        parts.append(f"adaptive, {settings}{_paper_suffix('kl_target')}")
    return ", ".join(parts)


def _option_with_paper(value: str, name: str) -> str:
    paper = PAPERS[name].get(split_settings(value)[0])
    return f"`{value}`" if paper is None else f"`{value}` ({paper.link})"


def _paper_suffix(name: str) -> str:
    paper = PAPERS.get(name)
    return "" if paper is None else f", {paper.link}"


def _join_words(words: Iterable[str]) -> str:
    """Joins words as in `"text, images and audio"`."""
    *first, last = [*words] or [""]
    return " and ".join(part for part in [", ".join(first), last] if part)
