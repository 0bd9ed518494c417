# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Writes a sheet for each recipe: what is as in its source, and what isn't and why, by option. `make fix` runs it.

Files of `tests/sources` have the values of sources under the names of this package's options, in the form of recipes;
`ours` is what no file says, with a note. A file is for the recipes that name its first source, too. A recipe's field
`Told:` has reasons for options that it leaves at their defaults.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import MISSING, fields
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import yaml


sys.path.append(str(Path(__file__).parents[1]))

from helpers.provenance import Origin, header, method, origins, sources  # noqa: E402

from trl_multimodal_rft.cli.commands import script_of  # noqa: E402


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "trl_multimodal_rft" / "recipes"
PAGE = ROOT / "docs" / "generated" / "recipe_differences.md"
ABOUT = """
What each [recipe](../recipes.md) has as its sources have it, and what it has otherwise and why. `make fix` wrote this
from the comments of the recipes and from what was read in the sources, at the lines named here; a value that differs
without a reason fails a test. `batch_size` and `generation_batch_size` count the completions of all processes in an
update and in a rollout. Options of files, logging, saving, evaluation, memory and speed aren't here.
""".strip()
# These decide neither the gradient nor the data, but for the optimizer, which is AdamW in all
OTHERS = re.compile(
    r"accelerat|activation|attn|audio_overlong|auto_find|balance|batch_eval|bf16|bnb|cache|chat_template_path"
    r"|command|dataloader|dataset_|datasets|ddp|debug|deepspeed|disable_(compact|tqdm)|do_|dry|ds3|dtype|enable_jit"
    r"|eval|fp16|fsdp|full_|gradient_|greater|hub|ignore|include|label_names|length_column|liger|load_|local_rank"
    r"|log|lora_(task|target_param|modules)|max_skipped|max_steps|max_tokens_per|media|metric|model_|num_completions"
    r"|num_generations_eval|num_train_epochs|offload|on_media|optim|output_dir|packing|pad|parallelism|per_device"
    r"|precompute|prediction_|project$|ptx_batch|push|remove|report|restore|resume|run_name|save|self_check|skip"
    r"|state$|steps_per|streaming|teacher_(model|processor)|test_split|tf32|torch_|trackio|truncation|trust"
    r"|use_(bnb|cache|cpu|liger|transformers|vllm|peft)|user_options|video_fps|vllm_(?!importance)"
)
UNREAD = "couldn't be read"  # in the note of a value that the source may have
# Settings of options that are off unless a recipe names them, and defaults that are TRL's way of doing what all do
NEUTRAL = re.compile(
    r"average_tokens_across_devices|discopop_tau|entropy_(coef_\w+|source|target)|f_(alpha_)?divergence_\w+"
    r"|kl_horizon|multi_objective_aggregation|ptx_\w+|ref_model_\w+|sapo_\w+|top_entropy_quantile"
    r"|train_sampling_strategy|vespo_\w+|vllm_importance_sampling_clip_max"
)
# These are in each sheet. Others are in it where they are on, or where the recipe or its source names them.
ALWAYS = re.compile(
    r"adam_\w+|advantage_estimator|beta|delta|disable_dropout|epochs|epsilon(_high)?|freeze|(generation_)?batch_size"
    r"|importance_sampling_level|kl_estimator|learning_rate|lora_(r|alpha|dropout|target_modules)|loss_type"
    r"|lr_scheduler_type|mask_truncated_completions|max_(completion_)?length|max_grad_norm|min_p|(min|max)_pixels"
    r"|num_(generations|iterations|ppo_epochs)|precision|prompt|repetition_penalty|reward_(funcs|weights)"
    r"|scale_rewards|seed|shuffle_dataset|steps|temperature|top_[kp]|use_bias_correction_kl"
    r"|vllm_importance_sampling_correction|warmup_steps|weight_decay"
)
# Options that count only where another one is on
NEEDS = {"kl_estimator": "beta", "use_bias_correction_kl": "beta", "vllm_importance_sampling_correction": "use_vllm"}
NEEDS["reward_label_column"] = "reward_recipe"
NEEDS |= {f"lora_{name}": "use_peft" for name in ("r", "alpha", "dropout", "target_modules")}
# Options of a recipe whose comments say where these were read
READ_AT = {"batch_size": "gradient_accumulation_steps", "epochs": "num_train_epochs", "steps": "max_steps"}
READ_AT |= {"generation_batch_size": "steps_per_generation", "precision": "dtype"}


class Row(NamedTuple):
    """An option of a run beside the source's."""

    option: str
    here: object
    there: object
    read_at: str
    verdict: str  # equal, told or red
    note: str


def options_of_run(recipe: str) -> dict[str, object]:
    """Returns the options of a run with a recipe's text, with what follows from several."""
    said = header(recipe)
    defined = chain.from_iterable(fields(each) for each in script_of(method(recipe)).ARGUMENTS)
    options = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory() for field in defined
    }
    options |= yaml.safe_load(recipe)
    rows = options["per_device_train_batch_size"] * int(re.search(r"\((\d+) GPUs?,", " ".join(said["Launch"]))[1])
    options["batch_size"] = rows * options["gradient_accumulation_steps"]
    if "steps_per_generation" in options:
        steps = options["steps_per_generation"] or options["gradient_accumulation_steps"]
        options["generation_batch_size"] = rows * steps
    if "epsilon_high" in options:
        options["epsilon_high"] = options["epsilon_high"] or options["epsilon"]
    if "use_bias_correction_kl" in options:
        options["kl_estimator"] = options["kl_estimator"] or "k3"
    if "reward_weights" in options:
        options["reward_weights"] = options["reward_weights"] or [1.0] * len(options["reward_funcs"] or ())
    options["epochs" if options["max_steps"] < 0 else "steps"] = max(options["num_train_epochs"], options["max_steps"])
    launcher = RECIPES.parent / "accelerate_configs" / f"{options['accelerate_config']}.yaml"
    computed = yaml.safe_load(launcher.read_text())["mixed_precision"]
    options["precision"] = f"{computed} on {'4-bit' if options['load_in_4bit'] else options['dtype']} weights"
    template = re.search(r"--template (['\"])(.*)\1", " ".join(said["Dataset"]))
    return options | {"prompt": template[2] if template else "as `prepare` makes it"}


def source_values(recipe: str) -> tuple[dict[str, tuple[object, Origin, str]], set[str]]:
    """Returns values of a recipe's sources by option, each with its origin and the URL of that, and all these URLs."""
    texts = [path.read_text() for path in (ROOT / "tests" / "sources").glob("*.yaml")]
    by_source = {next(iter(sources(text).values())): text for text in texts}
    values: dict[str, tuple[object, Origin, str]] = {}
    seen: set[str] = set()
    for text in (by_source[url] for url in sources(recipe).values() if url in by_source):
        there = yaml.safe_load(text)
        urls = sources(text)
        seen.update(urls.values())
        values |= {
            option: (there[option], origin, urls.get(origin.name, ""))
            for option, (origin, *_) in origins(text).items()
        }
    return values, seen


def rows(recipe: str) -> Iterator[Row]:
    """Yields the rows of a recipe's text: options that decide the gradient or the data."""
    read = origins(recipe)
    values, seen = source_values(recipe)
    options = options_of_run(recipe)
    told = dict(line.split(": ", 1) for line in header(recipe).get("Told", ()))
    for option, here in options.items():
        is_off = option in NEEDS and not options[NEEDS[option]]
        is_on = here not in (None, False, 0, [], "") and not NEUTRAL.fullmatch(option)
        is_named = option in read or option in values
        if is_off or not (is_named or is_on or ALWAYS.fullmatch(option)):
            continue
        if OTHERS.match(option) and option not in values:
            continue
        places = read.get(option) or read.get(READ_AT.get(option, "")) or ()
        if option == "generation_batch_size":
            places = places or read["gradient_accumulation_steps"]
        note = "; ".join(origin.note for origin in places if origin.note) or told.get(option, "")
        lines = {sources(recipe)[origin.name]: str(origin) for origin in places if origin.name != "ours"}
        there, origin, url = values.get(option, (None, None, ""))
        if origin is None or not seen.issuperset(lines):  # read for this recipe alone
            read_at = "; ".join(lines.values())
            verdict = "equal" if lines else "told" if note else "red"
            yield Row(option, here, here if lines else None, read_at, verdict, note)
        elif option in read and lines.get(url, str(origin)).partition(" ")[2] != origin.lines:
            yield Row(option, here, there, str(origin), "red", f"the recipe names {lines[url]}")
        elif here == there and (lines or not note) and UNREAD not in origin.note:
            yield Row(option, here, there, str(origin) if origin.name != "ours" else origin.note, "equal", "")
        else:
            is_silent = origin.name == "trl" and option not in read  # TRL's default has changed since
            note = note or origin.note
            yield Row(option, here, there, str(origin), "told" if note and not is_silent else "red", note)


def sheet(name: str) -> str:
    """Returns the sheet of a recipe."""
    parts: dict[str, list[Row]] = {"equal": [], "told": [], "red": []}
    for row in rows((RECIPES / f"{name}.yaml").read_text()):
        parts[row.verdict].append(row)
    equal = ", ".join(f"`{row.option}: {_text(row.here)}` ({row.read_at})" for row in parts["equal"])
    lines = [f"## `{name}`", "", f"As in the source: {equal or 'nothing'}.", ""]
    lines += ["| option | here | source | read at | why |", "|---|---|---|---|---|"]
    for row in (*parts["red"], *parts["told"]):
        there = "" if row.there is None else f"`{_text(row.there)}`"
        read_at = "" if row.read_at == "ours" else row.read_at
        lines.append(f"| `{row.option}` | `{_text(row.here)}` | {there} | {read_at} | {row.note or '**no reason**'} |")
    return "\n".join(lines)


def _text(value: object) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value).replace("'", "")
    return text.replace("|", "\\|").replace("`", "'")


def page() -> str:
    """Returns the page of all sheets."""
    names = sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))
    return "\n\n".join(["# Recipes and their sources", ABOUT, *map(sheet, names)]) + "\n"
