# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Suggestions for unknown names, parsing of names with settings such as `f(a=1)`, and checks of option values."""

import ast
import difflib
import importlib.util
import inspect
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from numbers import Real
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from .paths import similar_names


_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
# Names that TRL or transformers removed, with what to do instead
REMOVED = {
    # TRL's trainers
    "max_prompt_length": "remove long prompts from the dataset (`check` lists them)",
    "max_seq_length": "use `max_length`",
    "max_new_tokens": "use `max_completion_length`",
    "response_length": "use `max_completion_length`",
    "kl_coef": "use `beta`",
    "cliprange": "use `epsilon`",
    "gamma": "use `advantage_estimator` with a setting, such as 'gae(gamma=1.0)'",
    "lam": "use `advantage_estimator` with a setting, such as 'gae(lam=0.95)'",
    "use_liger_loss": "use `use_liger_kernel`",
    "vllm_max_model_len": "use `vllm_max_model_length`",
    "vllm_device": "use `vllm_mode`",
    "torch_dtype": "use `dtype`",
    "gradient_checkpointing_use_reentrant": "use `activation_checkpointing_kwargs`",
    # Arguments of trainers
    "tokenizer": "use `processing_class`",
    "processor": "use `processing_class`",
    "policy": "use `model`",
    "dataset": "use `train_dataset`",
    "reward_model": "use `reward_funcs`",
    # transformers' TrainingArguments
    "evaluation_strategy": "use `eval_strategy`",
    "no_cuda": "use `use_cpu`",
    "warmup_ratio": "use `warmup_steps`, which takes a ratio below 1, too",
    "logging_dir": "set the environment variable TENSORBOARD_LOGGING_DIR",
    "overwrite_output_dir": "leave it out, or use `resume_from_checkpoint`",
    "group_by_length": "use `train_sampling_strategy`",
    "push_to_hub_token": "use `hub_token`",
    "push_to_hub_model_id": "use `hub_model_id`",
    "save_safetensors": "leave it out, weights are always saved as safetensors",
    "adafactor": "use `optim`",
}


# Names of other tools and of other trainers, with what to do here. The first remedy whose name is valid is shown
_ELSEWHERE = {
    "n": ("use `num_generations`", "use `num_samples`"),
    "group_size": ("use `num_generations`", "use `num_samples`"),
    "num_return_sequences": ("use `num_generations`", "use `num_samples`"),
    "num_generations": ("use `num_samples`", "leave it out, as completions are those of the dataset"),
    "max_completion_length": ("use `max_length`, for a prompt and its completion together",),
    "max_response_length": ("use `max_completion_length`", "use `max_length`"),
    "cutoff_len": ("use `max_length`",),
    "system_prompt": ("put a message of the role 'system' at the start of `prompt`, as `--system_prompt` does",),
    "lr": ("use `learning_rate`",),
    "epochs": ("use `num_train_epochs`",),
    "num_epochs": ("use `num_train_epochs`",),
    "batch_size": ("use `per_device_train_batch_size`",),
    "lora_rank": ("use `lora_r`",),
    "kl_loss_coef": ("use `beta`",),
    "val_dataset": ("use `eval_dataset`",),
}
# Options of other tools that freeze a part, by its name here
_FREEZING = {
    "vision_tower": ("freeze_vision_tower", "freeze_vision_modules", "freeze_vision", "freeze_vit"),
    "audio_tower": ("freeze_audio_tower", "freeze_audio_encoder", "freeze_audio"),
    "projector": ("freeze_multi_modal_projector", "freeze_projector", "freeze_aligner"),
    "language_model": ("freeze_language_model", "freeze_llm"),
}
for _part, _names in _FREEZING.items():
    _ELSEWHERE |= dict.fromkeys(_names, (f"use `freeze` with the names of parts, as in `freeze=['{_part}']`",))


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """
    Returns a sentence for the end of an error message about a wrong `name`: the replacement of a removed name or of
    another tool's, or the most similar of the valid `names`; `""` without either.
    """
    name = name.replace("-", "_")
    names = list(names)
    remedies = {"It was removed: ": (REMOVED[name],) if name in REMOVED else (), "": _ELSEWHERE.get(name, ())}
    for start, texts in remedies.items():
        for remedy in texts:
            # It helps only if the name to use instead is valid here
            replacement = re.match(r"use `(\w+)`", remedy)
            if replacement is None or replacement[1] in names:
                return f" {start}{remedy if start else remedy[0].upper() + remedy[1:]}."
    close = [word for word in names if word.startswith(f"{name}_") or word.strip().lower() == name.strip().lower()]
    close += difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    return f" Did you mean `{close[0]}`?" if close else ""


def split_settings(text: str, option: str | None = None) -> tuple[str, dict[str, Any] | None]:
    """
    Returns a name and the settings behind it: `"f(a=1)"` is `("f", {"a": 1})`, and `"f"` is `("f", None)`.

    Raises `ValueError` if the text has neither form, or a setting twice. The message names the `option`, if any.
    """
    label = repr(text) if option is None else f"`{option}={text!r}`"
    if not isinstance(text, str):
        raise ValueError(f"{label} can't be read; write a name as text.")
    if not text.endswith(")"):
        return text, None
    try:
        name, _, settings = text.strip().partition("(")
        call = ast.parse(f"_({settings}", mode="eval").body  # a name such as `reinforce++` is no expression
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError("settings need names")
        return name, _without_duplicates([(str(keyword.arg), _literal(keyword.value)) for keyword in call.keywords])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(
            f"{label} can't be read ({error}); write a name, or a name with settings such as "
            "`box_iou_reward(iou_threshold=0.5)`, whose values are numbers, quoted texts or lists."
        ) from None


def _without_duplicates(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in entries]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ValueError(f"it sets `{duplicate}` twice; remove one")
    return dict(entries)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"`{text}` is no finite number")
    return value


def read_json(text: str) -> Any:
    """Reads JSON. Raises a `ValueError` also for a key that is set twice, and for numbers beyond floats."""
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates, parse_float=_finite)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except ValueError:
        text = ast.unparse(value)
        remedy = f"; quote it, as in {text!r}" if isinstance(value, ast.Name) else ""
        raise ValueError(f"`{text}` is no value{remedy}") from None


def join_settings(name: str, settings: dict[str, Any]) -> str:
    """Joins a name and its settings, the inverse of [`split_settings`]: `("f", {"a": 1})` is `"f(a=1)"`."""
    listing = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    return f"{name}({listing})" if listing else name


def recipe_names(recipe: dict[str, dict[str, float]] | str) -> list[str]:
    """Returns the names of the functions in a `reward_recipe`, without duplicates."""
    weights_by_label = [*recipe.values()] if isinstance(recipe, dict) else []
    if not weights_by_label or not all(
        isinstance(weights, dict) and all(map(_is_finite_number, weights.values())) for weights in weights_by_label
    ):
        raise ValueError(
            f"`reward_recipe` is {recipe!r}; write the weights of reward functions by the label of a row, such as "
            '{"counting": {"counting_reward": 1.0}}.'
        )
    return [*dict.fromkeys(chain.from_iterable(weights_by_label))]


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_finite_number(value: Any) -> bool:
    return _is_number(value) and math.isfinite(value)


def check_settings(
    function: Callable, name: str, settings: dict[str, Any], names: Sequence[str] | None = None
) -> None:
    """
    Raises a `ValueError` about unknown settings, and about values that the function's annotations exclude, see
    [`check_setting`]. Valid settings are `names`, by default the function's parameters without `**kwargs`.
    """
    parameters = inspect.signature(function).parameters
    valid_names = (
        [key for key, spec in parameters.items() if spec.kind is not spec.VAR_KEYWORD] if names is None else names
    )
    for key, value in settings.items():
        if key not in valid_names:
            raise ValueError(
                f"{name!r} has no setting {key!r}, only {[*valid_names]}.{did_you_mean(key, valid_names)}"
            )
        check_setting(f"`{key}` of {name!r}", value, parameters[key].annotation, parameters[key].default)


def check_properties(cls: type, name: str, properties: dict[str, Any]) -> None:
    """
    Raises a `ValueError` about properties with which users register a function under a name: those that the dataclass
    `cls` doesn't have, and values that its annotations exclude.
    """
    names = [key for key in inspect.signature(cls).parameters if key not in ("name", "function", "settings")]
    check_settings(cls, name, properties, names)


def check_setting(name: str, value: Any, annotation: Any, default: Any) -> None:
    """
    Raises a `ValueError` about the value of a setting that its annotation excludes, see [`check_value`]. Unlike an
    option, a setting must also be a text where the annotation is `str`, finite without an interval, and not `None`
    unless the annotation or the default is.
    """
    types, interval = _types_and_interval(annotation)
    remedy = f"the default is {default!r}"
    if value is None and (default is None or NoneType in types):
        return
    types = {cls for cls in types if cls is not NoneType}
    if not (types <= {bool, int, float, str, list[float]} or any(get_origin(cls) is Literal for cls in types)):
        return
    if value is None or types == {str} and not isinstance(value, str):
        raise ValueError(f"{name} can't be {value!r}; {remedy}.")
    if types == {bool} and not isinstance(value, (bool, str)):
        raise ValueError(f"{name} must be `True` or `False`, got {value!r}; {remedy}.")
    if interval is None and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}; {remedy}.")
    check_value(name, value, annotation, remedy)


T = TypeVar("T")


def read_settings(cls: Callable[..., T], option: str, text: str) -> T:
    """
    Parses the value of an option to an instance of the dataclass `cls`. The text begins with a name, the value of the
    first field. Settings may follow, the values of other fields: `"ema(rate=0.3)"` becomes `cls("ema", rate=0.3)`.
    Raises a `ValueError` about an unknown setting, and about a value that the annotation of its field excludes.
    """
    first_field, *other_fields = inspect.signature(cls).parameters.values()
    name, settings = split_settings(text, option)
    check_value(f"`{option}`", name, first_field.annotation, f"the default is {first_field.default!r}")
    check_settings(cls, option, settings or {}, [parameter.name for parameter in other_fields])
    return cls(name, **(settings or {}))


def interval_of(annotation: Any) -> str | None:
    """Returns the interval such as `"[0, 1)"` that an annotation names, if any."""
    return _types_and_interval(annotation)[1]


def _types_and_interval(annotation: type | UnionType) -> tuple[tuple[Any, ...], str | None]:
    """Returns the types that an annotation names, and its interval such as `"[0, 1)"`, if any."""
    interval = None
    if get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        interval = next((item for item in metadata if isinstance(item, str)), None)
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,), interval


def check_value(name: str, value: Any, annotation: Any, remedy: str) -> None:
    """
    Raises a `ValueError` about a value that an annotation excludes. Checked annotations are `Literal["a", "b"]`,
    `bool`, `int`, `float`, `Annotated[float, "[0, 1)"]` for a number within an interval, `list[float]` for finite
    numbers, and their unions with `None`. Other annotations allow any value.
    """
    types, interval = _types_and_interval(annotation)
    has_choices = any(get_origin(cls) is Literal for cls in types)
    # Only choices and an interval exclude `None`, unless the annotation also allows `None`
    if value is None and (NoneType in types or not (has_choices or interval is not None)):
        return
    types = tuple(cls for cls in types if cls is not NoneType)
    if get_origin(types[0]) is Literal:
        check_choice(name, value, get_args(types[0]))
    elif types == (bool,) and isinstance(value, str):
        raise ValueError(f"{name} must be `True` or `False`, got the text {value!r}; write it without quotes.")
    elif types == (bool,) and type(value).__name__ not in ("bool", "bool_", "int"):  # of Python and numpy
        raise ValueError(f"{name} must be `True` or `False`, got {value!r}; {remedy}.")
    elif {*types} <= {int, float}:
        if isinstance(value, str):
            raise ValueError(f"{name} must be a number, got the text {value!r}; write it without quotes.")
        if value is not None and not _is_number(value):
            raise ValueError(f"{name} must be a number, got {value}; {remedy}.")
        if types == (int,) and _is_finite_number(value) and not hasattr(value, "__index__"):
            raise ValueError(f"{name} must be a whole number, got {value}; {remedy}.")
        if interval is not None:
            check_interval(name, value, interval, remedy)
    elif types == (list[float],):
        wrong = [value]
        if isinstance(value, (list, tuple)):
            wrong = [item for item in value if not _is_finite_number(item)]
        if wrong:
            raise ValueError(f"{name} must be a list of finite numbers, got {wrong[0]!r}; {remedy}.")


def check_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Raises a `ValueError` about a value that isn't among the choices."""
    if value not in choices:
        suggestion = did_you_mean(value, map(str, choices)) if isinstance(value, str) else ""
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.{suggestion}")


def interval_words(interval: str) -> str:
    """Returns what numbers within an interval such as `"[0, 1)"` are: `"at least 0 and below 1"`."""
    low, high = map(float, interval[1:-1].split(", "))
    closed_low = interval[0] == "["
    closed_high = interval[-1] == "]"
    if low == -math.inf and high == math.inf:
        return "finite"
    if high < math.inf and closed_low and closed_high:
        return f"between {low:g} and {high:g}"
    words = f"{'at least' if closed_low else 'above'} {low:g}"
    return words if high == math.inf else f"{words} and {'at most' if closed_high else 'below'} {high:g}"


def check_interval(name: str, value: float | None, interval: str, remedy: str) -> None:
    """Raises a `ValueError` about a number outside of an interval such as `"[0, 1)"`."""
    low, high = map(float, interval[1:-1].split(", "))
    closed_low = interval[0] == "["
    closed_high = interval[-1] == "]"
    if value is not None and (low <= value if closed_low else low < value):
        if value <= high if closed_high else value < high:
            return
    words = interval_words(interval)
    takes_infinity = closed_high and high == math.inf
    if low > -math.inf and not takes_infinity and value is not None and not math.isfinite(value):
        words += " and finite"
    raise ValueError(f"{name} must be {words}, got {value}; {remedy}.")


def unknown_name_error(kind: str, name: str, names: Iterable[str], alternative: str) -> ValueError:
    """Returns the error for a name that isn't among the valid ones, which it lists if none is similar."""
    near = did_you_mean(name, names)
    return ValueError(
        f"There is no {kind} {name!r}" + (f".{near}" if near else f"; name one of {[*names]}, or {alternative}.")
    )


def check_dotted(name: str, kind: str) -> None:
    """
    Raises a `ValueError` for a dotted path whose module can't be found. Names in it are checked when it is imported.
    """
    module, _, _ = name.rpartition(".")
    top = module.split(".")[0]
    path = Path(*module.split("."))
    is_here = path.with_suffix(".py").is_file() or (path / "__init__.py").is_file() or Path(top).is_dir()
    if not is_here and importlib.util.find_spec(top) is None:
        hint = similar_names(Path(f"{top}.py"))[0]
        raise ValueError(f"There is no {kind} {name!r}: there is no module {top!r}. {hint}.")


def _names_in_module(name: str, names: Mapping[str, object]) -> str:
    """A sentence for the end of an error about a missing name."""
    public = [key for key, value in names.items() if not key.startswith("_") and not isinstance(value, ModuleType)]
    listing = f" It has {', '.join(map(repr, public))}." if 0 < len(public) <= 5 else ""
    return did_you_mean(name, public) or listing


def spelling_of(option: str | Callable | None) -> str | None:
    """Returns an option that may be a function as text, for a saved config."""
    return getattr(option, "__name__", type(option).__name__) if callable(option) else option


def is_dotted(name: str) -> bool:
    """Returns whether a name has the form of a dotted path, such as `"my_rewards.brief"`."""
    return bool(_DOTTED.fullmatch(name))


def load_dotted(name: str, kind: str, names: Sequence[str], example: str) -> Any:
    """Imports a callable by its dotted path, also from the working directory. Errors suggest the built-in `names`."""
    module, _, function = name.rpartition(".")
    if not module or name.startswith("."):
        raise unknown_name_error(kind, name, names, f"a dotted path such as {example!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, SyntaxError) as error:
        # Names in the module. If it can't be imported, the names of the error stand in, and are none.
        suggestion = _names_in_module(function, vars(sys.modules.get(module, error)))
        # The module itself is missing, and not a module that it imports
        if isinstance(error, ModuleNotFoundError) and module.startswith(str(error.name)):
            suggestion = f" {similar_names(Path(f'{module}.py'))[0]}."
        raise ValueError(f"There is no {kind} {name!r}: {error}.{suggestion}") from error
    if not callable(target):
        raise ValueError(f"There is no {kind} {name!r}: it is of type {type(target).__name__}.")
    return target


def check_unused(names: Iterable[str], used: Iterable[str], decorator: str) -> None:
    """Raises a `ValueError` if one of `names` is among `used`, so that no function silently replaces another."""
    duplicates = sorted({*names} & {*used})
    if duplicates:
        raise ValueError(
            f"`@{decorator}` got the name {duplicates[0]!r}, which is registered already; choose another name."
        )
