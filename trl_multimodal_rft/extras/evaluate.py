# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""`trl-multimodal-rft evaluate`: accuracy of a model on a dataset."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from accelerate import Accelerator
from accelerate.logging import get_logger
from datasets import Dataset
from trl import ModelConfig, get_quantization_config

from ..cli.arguments import RFTScriptArguments, ToolArguments, option
from ..cli.inputs import load_split, model_init_kwargs, with_prompts
from ..cli.preflight import check_model_and_dataset
from ..cli.templates import with_system_message
from ..data import load_avqa, load_geo3k, load_mmau
from ..data.reading.rules import MediaRules, budgets_of
from ..data.rows.load import only_split
from ..data.rows.pairs import judge_rows
from ..evaluation import EvaluationConfig, EvaluationResult, evaluate, pair_result, score_pairs
from ..evaluation.result import gains, summary
from ..models.pretrained import load_trained
from ..models.reward_model import load_trained_reward_model
from ..printable import printable
from ..progress import announce
from ..rewards.model import RewardModel
from ..spelling import did_you_mean


logger = get_logger(__name__)

# Loader, and names of the default reward functions, of each benchmark
BENCHMARKS: dict[str, tuple[Callable, list[str]]] = {
    "mmau": (load_mmau, ["choice_reward", "format_reward"]),
    "avqa": (load_avqa, ["choice_reward", "format_reward"]),
    "geo3k": (load_geo3k, ["accuracy_reward", "format_reward"]),
}


def benchmark_of(name: str) -> tuple[Callable, list[str]]:
    """Returns the loader and the names of the default rewards of a benchmark."""
    if name not in BENCHMARKS:
        raise ValueError(
            f"There is no benchmark {name!r}; name one of {', '.join(BENCHMARKS)}.{did_you_mean(name, BENCHMARKS)}"
        )
    return BENCHMARKS[name]


@dataclass
class EvaluationArguments(ToolArguments):
    """Rows to evaluate, and the folder for the results."""

    benchmark: str | None = option(None, f"Layout of `dataset_name`: {', '.join(BENCHMARKS)}.")
    benchmark_version: str | None = option(
        None, "Version of the benchmark's questions, such as `v05.15.25`, for the record in the results."
    )
    media_dir: str | None = option(
        None,
        "Folder of the media files that rows name. By default the folder of the benchmark's file, or without "
        "`--benchmark` the working directory.",
    )
    max_rows: int | None = option(None, "Number of rows to evaluate, from the first on. By default all rows.")
    audio_overlong: Literal["raise", "truncate"] = option(
        "raise", "What happens to audio longer than the model's window: an error, or truncation."
    )
    special_tokens_in_text: Literal["allow", "raise", "strip"] | None = option(
        None,
        "What happens to control tokens in texts of messages: they are allowed, raise an error, or are stripped. By "
        "default they are allowed with a warning.",
    )
    output_dir: str = option("outputs/evaluate", "Folder for the results.")
    trust_remote_code: bool = option(False, "Run code that comes with a model.")


@dataclass
class PairArguments(EvaluationArguments):
    """Arguments of an evaluation of rows, or of pairs for a judge or a reward model."""

    pairs: bool = option(
        False,
        "Rows are pairs (`prompt`, `chosen`, `rejected`). Measures `--model_name_or_path` as a judge of each "
        "pair in both orders, or `--reward_model_name_or_path` by its scores.",
    )
    tie_margin: float = option(0.0, "Largest difference of a reward model's scores that predicts a tie.")
    compare_with: str | None = option(
        None, "`output_dir` of another model's evaluation on the same rows: adds gains over it, with intervals."
    )


def load_rows(script_args: RFTScriptArguments, evaluation_args: EvaluationArguments, split: str) -> Dataset:
    name = str(script_args.dataset_name)
    benchmark = evaluation_args.benchmark
    if script_args.dataset_streaming:
        raise ValueError("An evaluation needs the number of rows; drop `--dataset_streaming` and set `--max_rows`.")
    loader_options = {"audio_dir": evaluation_args.media_dir} if benchmark in ("mmau", "avqa") else {}
    if benchmark is None and evaluation_args.benchmark_version is not None:
        raise ValueError("`--benchmark_version` needs a `--benchmark`; set it, or leave the version out.")
    if benchmark == "mmau" and evaluation_args.benchmark_version is None:
        logger.warning(
            "MMAU's version v05.15.25 changed a quarter of its questions, so accuracies on two versions can't be "
            "compared. Name the version of these rows, such as `--benchmark_version v05.15.25`."
        )
    if benchmark is None:
        dataset: Any = load_split(script_args, split)
    else:
        dataset = with_prompts(benchmark_of(benchmark)[0](name, split, **loader_options), script_args)
    return dataset if evaluation_args.max_rows is None else dataset.take(evaluation_args.max_rows)


def load_judge_rows(script_args: RFTScriptArguments, pair_args: PairArguments, split: str) -> Dataset:
    """Returns prompts for a judge, with each pair in both orders and the system message for the judge."""
    pairs = load_rows(replace(script_args, system_prompt=None), pair_args, split)
    return with_system_message(judge_rows(pairs), script_args.system_prompt)


def score_by_name(
    script_args: RFTScriptArguments,
    pair_args: PairArguments,
    config: EvaluationConfig,
    model_args: ModelConfig,
    split: str,
    accelerator: Accelerator,
) -> EvaluationResult:
    """Loads a reward model and a dataset of pairs by name, and measures the model on the pairs."""
    name = str(script_args.reward_model_name_or_path)
    if model_args.model_name_or_path is not None:
        raise ValueError(
            "`--pairs` measures one of `--model_name_or_path` and `--reward_model_name_or_path`; leave the other out."
        )
    model_options: dict[str, Any] = {**model_init_kwargs(model_args), "trust_remote_code": pair_args.trust_remote_code}
    model, processor = load_trained_reward_model(name, **model_options)
    batch_size = 2 * config.batch_size
    overlong = pair_args.audio_overlong
    reward = RewardModel(model.to(accelerator.device), processor, batch_size=batch_size, audio_overlong=overlong)
    rules = MediaRules(media_dir=pair_args.media_dir, **budgets_of(config))
    with accelerator.main_process_first():
        dataset = load_rows(script_args, pair_args, split)
    options = {"tie_margin": pair_args.tie_margin, "media_rules": rules, "accelerator": accelerator}
    result = score_pairs(reward, dataset, config, **options)
    result.settings |= {"model": name, "dataset": script_args.dataset_name, "split": split}
    return result


def evaluate_by_name(
    script_args: RFTScriptArguments,
    evaluation_args: EvaluationArguments,
    config: EvaluationConfig,
    model_args: ModelConfig,
    split: str,
    accelerator: Accelerator,
    load: Callable[..., Dataset] = load_rows,
    default_rewards: Sequence[str] = ("accuracy_reward", "format_reward"),
) -> tuple[Dataset, EvaluationResult]:
    """
    Loads a model and a dataset by name, evaluates the model, and returns the rows and the result. If `script_args` has
    no rewards, the rewards are the benchmark's, or `default_rewards` without a benchmark.
    """
    check_model_and_dataset(model_args.model_name_or_path, script_args.dataset_name or script_args.datasets)
    name = str(model_args.model_name_or_path)
    if model_args.use_peft:
        raise ValueError(
            "`--use_peft` makes a new adapter; to evaluate a trained one, set `--model_name_or_path` to its folder."
        )
    if script_args.reward_model_name_or_path is not None:
        raise ValueError(
            "`--reward_model_name_or_path` gives scores, which don't tell whether an answer is correct; leave it out."
        )
    benchmark = evaluation_args.benchmark
    reward_funcs = script_args.load_rewards(default_rewards if benchmark is None else benchmark_of(benchmark)[1])
    media_rules = MediaRules(media_dir=evaluation_args.media_dir)
    announce("loading the dataset")
    with accelerator.main_process_first():
        dataset = load(script_args, evaluation_args, split)
    announce("loading the model")
    init_kwargs = model_init_kwargs(model_args) | {"quantization_config": get_quantization_config(model_args)}
    if accelerator.num_processes > 1:
        init_kwargs["device_map"] = {"": accelerator.device}
    model, processor = load_trained(name, trust_remote_code=evaluation_args.trust_remote_code, **init_kwargs)
    result = evaluate(
        model,
        processor,
        dataset,
        reward_funcs,
        config,
        accelerator=accelerator,
        audio_overlong=evaluation_args.audio_overlong,
        media_rules=media_rules,
        special_tokens_in_text=evaluation_args.special_tokens_in_text,
        **evaluation_args.tool_inputs(),
    )
    result.settings |= {
        "model": name,
        "dataset": script_args.dataset_name,
        "split": split,
        "benchmark": benchmark,
        "benchmark_version": evaluation_args.benchmark_version,
    }
    return dataset, result


ARGUMENTS = (RFTScriptArguments, PairArguments, EvaluationConfig, ModelConfig)


def main(
    script_args: RFTScriptArguments, evaluation_args: PairArguments, config: EvaluationConfig, model_args: ModelConfig
) -> None:
    """Evaluates a model, a judge or a reward model, prints metrics and some answers, and saves metrics and rows."""
    baseline = evaluation_args.compare_with
    if baseline is not None and not Path(baseline, "rows.parquet").is_file():
        raise ValueError(
            f"`compare_with` is {baseline!r}, which has no results; name the `output_dir` of an evaluation."
        )
    accelerator = Accelerator()
    train_split = script_args.dataset_train_split
    split = script_args.dataset_test_split
    name = script_args.dataset_name
    benchmark = evaluation_args.benchmark
    single_split = only_split(name, script_args.dataset_config) if benchmark is None and name is not None else None
    # The default of `dataset_test_split`, "test", stands for the only split of a file or folder with a single one
    split = single_split if single_split is not None and split == "test" else split
    arguments = script_args, evaluation_args, config, model_args, split, accelerator
    if not evaluation_args.pairs:
        _, result = evaluate_by_name(*arguments)
    elif script_args.reward_model_name_or_path is None:
        _, result = evaluate_by_name(*arguments, load_judge_rows, ["preference_reward"])
        result = pair_result(result)
    else:
        result = score_by_name(*arguments)
    try:
        result.metrics |= {} if baseline is None else gains(result, baseline)
    finally:
        result.save(evaluation_args.output_dir)
    accelerator.print(printable(summary(result)))
    if benchmark is None and "[" not in split and train_split in (split, single_split):
        accelerator.print(f"The rows are those of {train_split!r}, which training may have used.")
    accelerator.end_training()
