# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
How many rows of a dataset a model answers correctly.

A dataset with the columns `prompt`, `solution` and media, and four samples of each prompt:

```bash
accelerate launch examples/evaluate.py \
    --model_name_or_path Qwen/Qwen2-Audio-7B-Instruct \
    --dtype bfloat16 \
    --dataset_name path/to/dataset \
    --num_samples 4 \
    --temperature 1.0 \
    --pass_at 1 2 4 \
    --batch_size 32 \
    --output_dir results
```

A benchmark as it is published, with greedy decoding, and a LoRA adapter that a trainer has saved:

```bash
accelerate launch examples/evaluate.py \
    --model_name_or_path Qwen2-Audio-GRPO \
    --dtype bfloat16 \
    --benchmark mmau \
    --dataset_name MMAU/mmau-test-mini.json \
    --group_by task \
    --output_dir results
```

Writes `metrics.json` and `rows.parquet` into `--output_dir`. Each process holds the whole model; on one process it
spreads over all GPUs.
"""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from accelerate import Accelerator
from datasets import Dataset, load_dataset
from transformers import PreTrainedModel, ProcessorMixin
from transformers.utils import cached_file
from transformers.utils.peft_utils import find_adapter_config_file
from trl import ModelConfig, ScriptArguments, TrlParser, get_quantization_config

from trl_multimodal_rft import rewards
from trl_multimodal_rft.data import load_avqa, load_geo3k, load_mmau
from trl_multimodal_rft.encoding.processors import load_processor
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate
from trl_multimodal_rft.models.pretrained import load_model as load_policy


BENCHMARKS = {
    "mmau": (load_mmau, ["choice_reward", "format_reward"]),
    "avqa": (load_avqa, ["choice_reward", "format_reward"]),
    "geo3k": (load_geo3k, ["accuracy_reward", "format_reward"]),
}


@dataclass
class EvaluationArguments:
    """
    What to evaluate on, and where the results go.

    Args:
        benchmark (`str`, *optional*):
            `"mmau"`, `"avqa"` or `"geo3k"`: layout of `dataset_name`. If `None`, it has this package's columns.
        audio_dir (`str`, *optional*):
            Folder with the audio files of a benchmark.
        reward_funcs (`list[str]`, *optional*):
            Names of functions in `trl_multimodal_rft.rewards`, or dotted paths; the first tells what is correct. By
            default `choice_reward` for MMAU and AVQA, else `accuracy_reward`, and `format_reward`.
        max_rows (`int`, *optional*):
            Number of rows, from the first on. By default all.
        audio_overlong (`str`, *optional*, defaults to `"raise"`):
            What happens to audio longer than the model's window: `"raise"` or `"truncate"`.
        output_dir (`str`, *optional*, defaults to `"outputs/evaluate"`):
            Folder for `metrics.json` and `rows.parquet`.
        trust_remote_code (`bool`, *optional*, defaults to `False`):
            Whether code that comes with a model is run.
    """

    benchmark: str | None = field(
        default=None, metadata={"help": "Layout of `dataset_name`.", "choices": [*BENCHMARKS]}
    )
    audio_dir: str | None = field(default=None, metadata={"help": "Folder with the audio files of a benchmark."})
    reward_funcs: list[str] | None = field(
        default=None, metadata={"help": "Reward functions, by name or dotted path; the first tells what is correct."}
    )
    max_rows: int | None = field(default=None, metadata={"help": "Number of rows, from the first on."})
    audio_overlong: str = field(
        default="raise",
        metadata={"help": "What happens to audio longer than the model's window.", "choices": ["raise", "truncate"]},
    )
    output_dir: str = field(default="outputs/evaluate", metadata={"help": "Folder for the results."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Whether code that comes with a model is run."})


def load_rows(script_args: ScriptArguments, evaluation_args: EvaluationArguments) -> Dataset:
    """The rows to answer."""
    name, split = script_args.dataset_name, script_args.dataset_test_split
    if name is None:
        raise ValueError("There is nothing to evaluate on; set `--dataset_name`.")
    audio = {} if evaluation_args.audio_dir is None else {"audio_dir": evaluation_args.audio_dir}
    if evaluation_args.benchmark in ("mmau", "avqa"):
        dataset = BENCHMARKS[evaluation_args.benchmark][0](name, split, **audio)
    elif audio:
        raise ValueError("`--audio_dir` is for `--benchmark mmau` and `avqa`; leave it out.")
    elif evaluation_args.benchmark is not None:
        dataset = BENCHMARKS[evaluation_args.benchmark][0](name, split)
    else:
        dataset = load_dataset(name, name=script_args.dataset_config, split=split)
    return dataset if evaluation_args.max_rows is None else dataset.take(evaluation_args.max_rows)


def load_model(
    model_args: ModelConfig, accelerator: Accelerator, trust_remote_code: bool
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """The model, with its adapter if there is one, and its processor."""
    name = model_args.model_name_or_path
    if name is None:
        raise ValueError("There is nothing to evaluate; set `--model_name_or_path`.")
    if model_args.use_peft:
        raise ValueError(
            "`--use_peft` makes a new adapter; to evaluate one, name its folder as `--model_name_or_path`."
        )
    source = {"revision": model_args.model_revision}
    init_kwargs = {
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        "quantization_config": get_quantization_config(model_args),
        "trust_remote_code": trust_remote_code,
    }
    if accelerator.num_processes > 1:
        init_kwargs["device_map"] = {"": accelerator.device}
    if find_adapter_config_file(name, **source) is None:
        model, holder = load_policy(name, **source, **init_kwargs), name
    else:
        from peft import PeftConfig, PeftModel

        config = PeftConfig.from_pretrained(name, **source)
        base = config.base_model_name_or_path
        model = load_policy(base, revision=config.revision or "main", **init_kwargs)
        model = PeftModel.from_pretrained(model, name, **source)
        # An adapter may have been saved with or without the processor
        saved = cached_file(name, "tokenizer_config.json", _raise_exceptions_for_missing_entries=False, **source)
        holder, source = (name, source) if saved else (base, {"revision": config.revision or "main"})
    return model, load_processor(holder, trust_remote_code=trust_remote_code, **source)


def load_reward_funcs(names: list[str]) -> list[Callable]:
    """Reward functions of this package, or from dotted paths."""
    reward_funcs = []
    for name in names:
        if "." in name:
            module, function = name.rsplit(".", 1)
            sys.path.insert(0, os.getcwd())
            reward_funcs.append(getattr(importlib.import_module(module), function))
        elif name in rewards.__all__:
            reward_funcs.append(getattr(rewards, name))
        else:
            raise ValueError(f"There is no reward function {name!r}; name one of {rewards.__all__}, or a dotted path.")
    return reward_funcs


def main(script_args, evaluation_args, config, model_args):
    accelerator = Accelerator()
    default = ["accuracy_reward", "format_reward"]
    names = evaluation_args.reward_funcs or BENCHMARKS.get(evaluation_args.benchmark, (None, default))[1]
    reward_funcs = load_reward_funcs(names)
    with accelerator.main_process_first():
        dataset = load_rows(script_args, evaluation_args)
    model, processor = load_model(model_args, accelerator, evaluation_args.trust_remote_code)
    result = evaluate(
        model,
        processor,
        dataset,
        reward_funcs,
        config,
        accelerator=accelerator,
        audio_overlong=evaluation_args.audio_overlong,
    )
    result.settings |= {
        "model": model_args.model_name_or_path,
        "dataset": script_args.dataset_name,
        "split": script_args.dataset_test_split,
        "benchmark": evaluation_args.benchmark,
    }
    result.save(evaluation_args.output_dir)
    for name, value in result.metrics.items():
        accelerator.print(f"{name}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
    accelerator.end_training()


if __name__ == "__main__":
    parser = TrlParser((ScriptArguments, EvaluationArguments, EvaluationConfig, ModelConfig))
    main(*parser.parse_args_and_config())
