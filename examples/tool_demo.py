# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Code that the example scripts with tools share."""

from collections import Counter, defaultdict
from collections.abc import Callable

from datasets import Dataset, DatasetDict
from demo import DEMO_ARGUMENTS, cold_start, demo_inputs, publish, train, train_and_measure
from transformers import PreTrainedModel, ProcessorMixin
from trl import ModelConfig

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalGRPOTrainer
from trl_multimodal_rft.cli.arguments import RLScriptArguments
from trl_multimodal_rft.cli.inputs import trainer_inputs
from trl_multimodal_rft.cli.training import curves_callbacks, script_run
from trl_multimodal_rft.rewards import accuracy_reward


TOOL_DEMO_ARGUMENTS = {
    **DEMO_ARGUMENTS,
    "per_device_train_batch_size": 256,
    "max_tool_calling_iterations": 1,
    "entropy_coef": 0.01,
}


def best_without_tool(rows: Dataset) -> float:
    """
    Upper bound of a policy's accuracy without the tool.

    A policy without the tool can't distinguish rows with the same prompt and the same medium. At best, it gives the
    most frequent of their answers.
    """
    (column,) = {"audio", "image"} & set(rows.column_names)
    answers: defaultdict[tuple, Counter] = defaultdict(Counter)
    for row in rows:
        medium = row[column]
        content = medium["bytes"] if column == "audio" else (medium.size, medium.tobytes())
        answers[repr(row["prompt"]), content][row["solution"]] += 1
    return sum(max(counts.values()) for counts in answers.values()) / len(rows)


def demonstration(row: dict, tool: Callable, **arguments) -> dict:
    """A conversation in which the model calls a tool and answers correctly."""
    (block,) = tool(**arguments)
    kind = block["type"]
    question = {"type": "text", "text": row["prompt"][0]["content"]}
    call = {"type": "function", "function": {"name": tool.__name__, "arguments": arguments}}
    messages = [
        {"role": "user", "content": [{"type": kind}, question]},
        {"role": "assistant", "content": [], "tool_calls": [call]},
        {"role": "tool", "content": [{"type": kind}]},
        {"role": "assistant", "content": [{"type": "text", "text": row["solution"]}]},
    ]
    return {"messages": messages, f"{kind}s": [row[kind], block[kind]]}


def train_demo(
    model: PreTrainedModel,
    processor: ProcessorMixin,
    dataset: DatasetDict,
    demonstrations: list[dict],
    epochs: int,
    environment: Callable,
    name: str,
    script_args: RLScriptArguments,
    training_args: MultimodalGRPOConfig,
    model_args: ModelConfig,
) -> None:
    """Fine-tunes a small model on demonstrations of tool calls, then trains it with GRPO."""
    cold_start(
        model,
        processor,
        Dataset.from_list(demonstrations),
        training_args,
        batch_size=20,
        max_steps=-1,
        num_train_epochs=epochs,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        assistant_only_loss=True,
    )
    trainer = MultimodalGRPOTrainer(
        **demo_inputs(model, processor, dataset, training_args, model_args),
        reward_funcs=accuracy_reward,
        environment_factory=environment,
    )
    trainer.accelerator.print(f"Accuracy without the tool, at best: {best_without_tool(dataset['test']):.1%}")
    train_and_measure(trainer, script_args, dataset["test"], name)


def train_by_name(
    prepare: Callable[[Dataset], Dataset],
    environment: Callable,
    script_args: RLScriptArguments,
    training_args: MultimodalGRPOConfig,
    model_args: ModelConfig,
) -> None:
    """Trains the model that the arguments name on the dataset that they name."""
    with script_run(script_args, training_args):
        inputs = trainer_inputs(script_args, training_args, model_args)
        for name in ("train_dataset", "eval_dataset"):
            if inputs[name] is not None:
                inputs[name] = prepare(inputs[name])
        trainer = MultimodalGRPOTrainer(**inputs, environment_factory=environment, callbacks=curves_callbacks())
        train(trainer, script_args)
        publish(trainer, script_args)
