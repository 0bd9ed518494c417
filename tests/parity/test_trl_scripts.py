# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Text scripts of TRL's users give the same results with this package's classes as with TRL's."""

import functools
import inspect
import re
import tempfile
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers as hf
import trl
from datasets import Dataset, DatasetDict, IterableDataset
from helpers.chats import image
from helpers.families import decoder, instantiate, template, tokenizer
from helpers.tools import look_up
from helpers.trainer_utils import PLAIN, Run, assert_equal, make_trainer, run, update_of
from helpers.trainer_utils import length_and_sum as length
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, get_peft_model
from trl import GRPOTrainer, RLOOTrainer, SFTConfig, SFTTrainer
from trl.chat_template_utils import qwen3_chat_template

import trl_multimodal_rft
from trl_multimodal_rft import (
    MultimodalGRPOTrainer,
    MultimodalRLOOTrainer,
    MultimodalSFTConfig,
    MultimodalSFTTrainer,
)
from trl_multimodal_rft.data.rows import prefetch


pytestmark = pytest.mark.gate


TRAINERS = {"grpo": (GRPOTrainer, MultimodalGRPOTrainer), "rloo": (RLOOTrainer, MultimodalRLOOTrainer)}

_MODELS = tempfile.TemporaryDirectory()


@functools.cache
def saved(model_class=hf.Qwen3ForCausalLM, **changes) -> str:
    """Returns the folder of a tiny model and its tokenizer, which pads on the right, like most."""
    words = tokenizer()
    words.padding_side = "right"
    words.chat_template = qwen3_chat_template
    config = model_class.config_class(**decoder(words, head_dim=16, **changes))
    model, _ = instantiate(model_class, config, SimpleNamespace(tokenizer=words), scale=3.0)
    folder = tempfile.mkdtemp(dir=_MODELS.name, prefix="policy" if "Causal" in model_class.__name__ else "judge")
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def judge() -> str:
    return saved(hf.Qwen3ForSequenceClassification, num_labels=1)


def standard(n: int = 8) -> Dataset:
    return Dataset.from_list(
        [{"prompt": f"The answer is{' red' * (i % 3)} {i}", "solution": f"{i}"} for i in range(n)]
    )


def conversational(n: int = 8) -> Dataset:
    start = {"role": "system", "content": "You are a helpful assistant."}
    chats = [[start, {"role": "user", "content": f"Is there a cat?{' A dog?' * (i % 3)} {i}"}] for i in range(n)]
    return Dataset.from_list([{"prompt": chat, "solution": f"{i}"} for i, chat in enumerate(chats)])


def streamed(rows: Dataset) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(rows))


def lora() -> LoraConfig:
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def from_folder(model_class=hf.Qwen3ForCausalLM) -> dict:
    return {
        "model": model_class.from_pretrained(saved()),
        "processing_class": hf.AutoTokenizer.from_pretrained(saved()),
    }


# Rewards


def spread(completions, **kwargs):
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [0.1 * len(set(text)) for text in texts]


async def later(completion_ids, **kwargs):
    return length(completion_ids)


class Even:
    def __call__(self, completion_ids, solution, trainer_state, log_extra, log_metric, **kwargs):
        log_extra("solution", solution)
        log_metric("step", trainer_state.global_step)
        return [0.5 if sum(ids) % 2 else None for ids in completion_ids]


def never(completions, **kwargs):
    return [None] * len(completions)


# Models that answer from a script, with ids only


class Scripted(hf.Qwen3ForCausalLM):
    def answers(self, input_ids):
        generator = torch.Generator().manual_seed(int(input_ids.sum()))
        return torch.randint(60, 300, (len(input_ids), 6), generator=generator)

    def generate(self, input_ids, **kwargs):
        return torch.cat([input_ids, self.answers(input_ids)], dim=1)


class OfOneSize(Scripted):
    """Supports only batches of 8 rows."""

    def answers(self, input_ids):
        assert len(input_ids) == 8
        return super().answers(input_ids)


class OfOneBatch(Scripted):
    """Supports only rows of several prompts, as they occur in a run."""

    def answers(self, input_ids):
        assert len(set(map(tuple, input_ids.tolist()))) > 1
        return super().answers(input_ids)


class Calling(Scripted):
    """Calls a tool in every other first turn of a batch."""

    def answers(self, input_ids):
        answers = super().answers(input_ids)
        if len(input_ids) == 8:
            call = '<tool_call>\n{"name": "look_up", "arguments": {"word": "cat"}}\n</tool_call><|im_end|>'
            ids = tokenizer()(call)["input_ids"]
            answers = torch.nn.functional.pad(answers, (0, len(ids) - answers.size(1)), value=2)
            answers[::2] = torch.tensor(ids)
        return answers


class Library:
    """An environment that returns rewards itself."""

    def reset(self, **kwargs):
        self.asked = 0
        return " Look it up."

    def look_up(self, word: str) -> str:
        self.asked += 1
        return look_up(word)

    def get_reward(self) -> float:
        return float(self.asked)


class Shelf(Library):
    async def look_up(self, word: str) -> str:
        return super().look_up(word)

    async def get_reward(self) -> float:
        return 0.5 - self.asked


for environment in (Library, Shelf):
    environment.look_up.__doc__ = look_up.__doc__


def rollout(prompts, trainer):
    generator = torch.Generator().manual_seed(trainer.state.global_step)
    return {
        "prompt_ids": trainer.processing_class(prompts)["input_ids"],
        "completion_ids": [torch.randint(60, 300, (6,), generator=generator).tolist() for _ in prompts],
        "logprobs": None,
        "bonus": [0.25 * i for i in range(len(prompts))],
    }


def bonus(bonus, **kwargs):
    return bonus


class Remember(hf.TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(
            (
                state.global_step,
                sorted(
                    key for key in logs if key != "skipped_updates" and not key.startswith(("packing/", "signal/"))
                ),
            )
        )


# Changes of each script: arguments of the trainer and, all others, of the config. A function makes them afresh
TEXT = {"model": saved, "reward": lambda: length, "dataset": standard}
BOTH = {
    "by name": {},
    "conversational": {"dataset": conversational},
    "weights of rewards": {
        "reward": lambda: [length, spread],
        "reward_weights": [1.0, 0.3],
        "dataset": conversational,
    },
    "async, None and logs of rewards": {"reward": lambda: [later, Even(), functools.partial(spread), never]},
    "model of rewards by name": {"reward": lambda: [judge(), length], "dataset": conversational},
    "model of rewards with its tokenizer": {
        "reward": lambda: hf.AutoModelForSequenceClassification.from_pretrained(judge(), num_labels=1),
        "reward_processing_classes": lambda: hf.AutoTokenizer.from_pretrained(judge()),
    },
    "instance": {"": from_folder, "beta": 0.1},
    "instance without tokenizer": {"model": lambda: hf.AutoModelForCausalLM.from_pretrained(saved())},
    "how to load": {"model_init_kwargs": {"attn_implementation": "eager", "dtype": "float32"}, "beta": 0.1},
    "adapter": {"peft_config": lora, "beta": 0.1, "gradient_checkpointing": True},
    "adapted instance": {
        "": lambda: {**from_folder(), "model": get_peft_model(from_folder()["model"], lora())},
        "beta": 0.1,
    },
    "evaluation": {
        "eval_dataset": lambda: {"plain": standard(4), "chat": conversational(4)},
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_on_start": True,
        "per_device_eval_batch_size": 8,  # all rows, as TRL logs means of batches
        "num_generations_eval": 2,
    },
    "streams": {
        "dataset": lambda: streamed(standard()),
        "eval_dataset": lambda: streamed(standard(4)),
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 16,
    },
    "reference that follows": {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1, "num_iterations": 2},
    "sampling": {"top_p": 0.9, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.2, "temperature": 0.8},
    "any argument of generate": {"generation_kwargs": {"min_new_tokens": 3, "no_repeat_ngram_size": 2}},
    "beams": {"generation_kwargs": {"num_beams": 2, "max_new_tokens": 4}},
    "arguments of the template": {"dataset": conversational, "chat_template_kwargs": {"enable_thinking": False}},
    "callbacks and completions": {
        "callbacks": lambda: [Remember()],
        "log_completions": True,
        "num_completions_to_print": 1,
    },
    "without shuffling": {"shuffle_dataset": False, "disable_dropout": True, "pad_to_multiple_of": 8},
    "continuous batching": {
        "use_transformers_continuous_batching": True,
        "transformers_continuous_batching_config": {"num_blocks": 64, "max_batch_tokens": 64},
    },
    "generate that returns ids": {"": lambda: from_folder(Scripted)},
    "generate for one number of rows": {"": lambda: from_folder(OfOneSize)},
    "generate for the rows of a batch": {"": lambda: from_folder(OfOneBatch)},
}
GRPO = {
    "rewards by batch": {"scale_rewards": "batch", "loss_type": "dr_grpo"},
    "rewards normalized one by one": {
        "reward": lambda: [length, spread],
        "multi_objective_aggregation": "normalize_then_sum",
    },
    "head in float32": {"cast_lm_head_to_fp32": True},
    "tools": {"": lambda: from_folder(Calling), "dataset": conversational, "tools": lambda: [look_up]},
    "environment with rewards": {
        "": lambda: from_folder(Calling),
        "reward": None,
        "dataset": None,
        "environment_factory": lambda: Library,
    },
    "environments": {
        "": lambda: from_folder(Calling),
        "dataset": lambda: conversational().add_column("environment", ["a", "b"] * 4),
        "environment_factory": lambda: {"a": Library, "b": Shelf},
    },
    "rollout": {"rollout_func": lambda: rollout, "reward": lambda: [length, bonus]},
}
RLOO = {"normalized": {"normalize_advantages": True, "reward_clip_range": (0.0, 2.0), "beta": 0.1}}
# TRL's two trainers share most of their code by duplication
SHARED = (
    "conversational",
    "weights of rewards",
    "async, None and logs of rewards",
    "model of rewards by name",
    "instance",
    "adapter",
    "evaluation",
    "streams",
    "callbacks and completions",
    "generate that returns ids",
)
SCRIPTS = [("grpo", name, script) for name, script in {**BOTH, **GRPO}.items()]
SCRIPTS += [("rloo", name, {"beta": 0.0, **BOTH[name]}) for name in SHARED]
SCRIPTS += [("rloo", name, script) for name, script in RLOO.items()]
ARGUMENTS = {name for trainers in TRAINERS.values() for name in inspect.signature(trainers[0]).parameters} - {"args"}


def with_names_of_trl(run: Run) -> Run:
    """Returns a run's logs without the names of datasets in metrics that TRL logs without them."""
    name = re.compile(r"eval_(plain|chat|one|other)_(?!loss|runtime|samples_|steps_|model_)")
    return replace(run, history=[{name.sub("eval_", key): entry[key] for key in entry} for entry in run.history])


def run_script(trainer_class, script: dict):
    """Returns a run, with the arguments of reward functions and callbacks."""
    settings = {name: value() if callable(value) else value for name, value in {**TEXT, **script}.items()}
    reward = settings.pop("reward")
    dataset = settings.pop("dataset")
    seen = []

    def remember(prompts, completions, completion_ids, **kwargs):
        objects = ("log_extra", "log_metric", "trainer_state", "environments")
        kwargs.pop("group_ids", None)  # which this package adds
        columns = {name: value for name, value in kwargs.items() if name not in objects}
        seen.append((prompts, completions, completion_ids, columns, sorted(kwargs)))
        return [None] * len(prompts)

    if reward is not None and not {"reward_weights", "reward_processing_classes"} & script.keys():
        reward = [*(reward if isinstance(reward, list) else [reward]), remember]
    objects = {name: settings.pop(name) for name in ARGUMENTS & settings.keys()}
    objects |= settings.pop("", {})
    if trainer_class not in (GRPOTrainer, RLOOTrainer):
        settings["packing_shuffle"] = True  # to draw the same random numbers as TRL's shuffle
    options = {"learning_rate": 0.1, "max_completion_length": 6, **settings}
    result = run(trainer_class, "", dataset, reward=reward, objects=objects, **options)
    return result, seen + [callback.seen for callback in objects.get("callbacks", [])]


# RLOO has the rollout of GRPO; the default run has its specific scripts, and two that both share
SLOW = {("rloo", name) for name in SHARED[2:]}
# Beside "instance", "sampling" and "conversational"
SLOW |= {("grpo", name) for name in ("how to load", "instance without tokenizer", "beams", "without shuffling")}


@pytest.mark.parametrize(
    ("algorithm", "name", "script"),
    [
        pytest.param(
            *each,
            id=f"{each[0]}: {each[1]}",
            marks=[pytest.mark.slow] * (each[:2] in SLOW),
        )
        for each in SCRIPTS
    ],
)
def test_script_does_what_it_does_with_trl(algorithm, name, script):
    (theirs, their_view), (ours, our_view) = (run_script(each, script) for each in TRAINERS[algorithm])
    assert_equal(theirs, with_names_of_trl(ours))
    assert their_view == our_view


def test_training_steps_get_the_rows_that_they_get_with_trl(tmp_path):
    given = []
    for trainer_class in TRAINERS["grpo"]:
        trainer = make_trainer(
            trainer_class,
            "",
            conversational(),
            tmp_path,
            reward=length,
            objects={"model": saved()},
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
        )
        rows = []
        step = trainer.training_step
        trainer.training_step = lambda model, inputs, *args, step=step, rows=rows: (
            rows.append([getattr(row, "row", row) for row in inputs]) or step(model, inputs, *args)
        )
        trainer.train()
        given.append(rows)
    assert len(given[0]) == 4 and given[0] == given[1]


def chatml():
    words = hf.AutoTokenizer.from_pretrained(saved())
    words.chat_template = template()
    return words


class NoReset:
    pass


# The same with errors
ERRORS = {
    "weights of rewards": {"reward": lambda: [length, spread], "reward_weights": [1.0]},
    "processing classes of rewards": {"reward": lambda: [length, spread], "reward_processing_classes": lambda: [None]},
    "too few rewards": {"reward": lambda: lambda **_: [1.0]},
    "rows in a list": {"dataset": lambda: standard().to_list()},
    "no rows": {"dataset": None},
    "stream without a number of steps": {"dataset": lambda: streamed(standard()), "max_steps": -1},
    "stream that is dispatched": {
        "dataset": lambda: streamed(standard()),
        "accelerator_config": {"dispatch_batches": True},
    },
    "missing model": {"model": "no/model"},
    "processing class of another type": {"processing_class": lambda: SimpleNamespace(pad_token=None)},
    "adapter of the head": {"peft_config": lambda: LoraConfig(target_modules=["lm_head"])},
    "adapter of another type": {"peft_config": lambda: {"r": 4}},
    "adapter on an adapter": {
        "": lambda: {"model": get_peft_model(from_folder()["model"], lora()), "peft_config": lora()}
    },
    "batch that holds no groups": {"per_device_train_batch_size": 6},
    "one completion": {"num_generations": 1},
}
ERRORS_GRPO = {
    "no rewards": {"reward": None},
    "kind of loss": {"loss_type": "ppo"},
    "template without tools": {"tools": lambda: [look_up], "processing_class": chatml},
    "environment that can't be reset": {"environment_factory": lambda: NoReset},
    "rollout without completions": {"rollout_func": lambda: lambda prompts, trainer: {"prompt_ids": []}},
}
WRONG = [("grpo", name, script) for name, script in {**ERRORS, **ERRORS_GRPO}.items()]
WRONG += [("rloo", name, ERRORS[name]) for name in ("too few rewards", "no rows", "one completion")]


@pytest.mark.parametrize(("algorithm", "name", "script"), WRONG, ids=[f"{a}: {n}" for a, n, _ in WRONG])
def test_script_fails_as_it_does_with_trl(algorithm, name, script):
    theirs, ours = TRAINERS[algorithm]
    with pytest.raises(Exception) as error:
        run_script(theirs, script)
    with pytest.raises(error.type):
        run_script(ours, script)


# Supervised training


def texts(n: int = 8, column: str = "text") -> Dataset:
    return Dataset.from_list([{column: f"Is there a bird?{' Is there a cat?' * (i % 3)} Yes, {i}."} for i in range(n)])


def tokenized(n: int = 8, **columns) -> Dataset:
    ids = [hf.AutoTokenizer.from_pretrained(saved())(text)["input_ids"] for text in texts(n)["text"]]
    made = [{name: make(row) for name, make in columns.items()} for row in ids]
    return Dataset.from_list([{"input_ids": row, **more} for row, more in zip(ids, made, strict=True)])


def conversations(n: int = 8) -> Dataset:
    chats = [[("user", f"Is there a cat? {i}"), ("assistant", f"There are {i}.")] for i in range(n)]
    return Dataset.from_list([{"conversations": [{"from": r, "value": v} for r, v in chat]} for chat in chats])


def second_half(row: list) -> list:
    return [int(i >= len(row) // 2) for i in range(len(row))]


def ready(batch: dict) -> dict:
    return {**batch, "labels": [[-100, *ids[1:]] for ids in batch["input_ids"]]}


EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
SFT = {
    "text": {},
    "text of another column": {"dataset": lambda: texts(column="words"), "dataset_text_field": "words"},
    "text that is cut": {"max_length": 8},
    "text whose beginning is cut": {"max_length": 8, "truncation_mode": "keep_end"},
    "formatting function": {
        "dataset": lambda: standard().rename_column("prompt", "asked"),
        "objects": lambda: {"formatting_func": lambda row: f"Q: {row['asked']} A: {row['solution']}"},
    },
    "conversations": {"dataset": conversations},
    "tokenized": {"dataset": lambda: tokenized(attention_mask=lambda ids: [1] * len(ids))},
    "tokenized, with labels": {
        "dataset": lambda: tokenized(labels=lambda ids: [-100, -100, *ids[2:]], assistant_masks=second_half)
    },
    "tokenized, with masks": {"dataset": lambda: tokenized(assistant_masks=second_half)},
    "tokenized completions": {
        "dataset": lambda: tokenized(completion_mask=second_half, assistant_masks=lambda ids: [1, 0] * len(ids)),
        "completion_only_loss": True,
    },
    "tokenized by a transform": {
        "dataset": lambda: tokenized().with_transform(ready),
        "dataset_kwargs": {"skip_prepare_dataset": True},
    },
    "shuffled rows, of which one is dropped": {
        "dataset": lambda: tokenized(
            assistant_masks=lambda ids: [len(ids) > 16] * 3 + [len(ids) <= 16] * (len(ids) - 3)
        ),
        "shuffle_dataset": True,
        "max_length": 6,
    },
    "options of layout": {"dataset_num_proc": 2, "pad_to_multiple_of": 8, "include_num_input_tokens_seen": "no"},
    "adapter": {"objects": lambda: {"peft_config": lora()}},
    "prompt learning": {
        "objects": lambda: {"peft_config": PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)}
    },
    "prefix learning": {
        "objects": lambda: {"peft_config": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)}
    },
    "metrics of the user": {
        **EVALUATED,
        "objects": lambda: {
            "eval_dataset": texts(4),
            "compute_metrics": lambda found: {"mine": float(found.predictions.mean()) + found.label_ids.max()},
        },
    },
    "loss of the user": {
        "objects": lambda: {"compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.logits.mean()}
    },
    "evaluation": {**EVALUATED, "objects": lambda: {"eval_dataset": {"one": texts(4), "other": texts(2)}}},
    "stream": {"dataset": lambda: streamed(texts())},
    "evaluation on a stream": {**EVALUATED, "objects": lambda: {"eval_dataset": streamed(texts(4))}},
    "evaluation on streams": {
        **EVALUATED,
        "objects": lambda: {"eval_dataset": {"one": streamed(texts(4)), "other": streamed(texts(2))}},
    },
}


def run_sft(trainer_class, config_class, folder, script: dict) -> Run:
    settings = {"dataset": texts, "objects": dict, **script}
    rows = settings.pop("dataset")()
    objects = settings.pop("objects")()
    options = {"per_device_train_batch_size": 2, "max_length": None, "train_sampling_strategy": "sequential"}
    args = config_class(str(folder), **{**PLAIN, **options, "learning_rate": 0.1, **settings})
    trainer = trainer_class(saved(), args, train_dataset=rows, **objects)
    update = update_of(trainer)
    left_out = re.compile("total_flos|rows/cut")
    history = [
        {key: value for key, value in each.items() if not left_out.fullmatch(key)}
        for each in trainer.state.log_history
    ]
    return Run(trainer, update, history)


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # prefixes of PEFT
@pytest.mark.parametrize("name", SFT)
def test_supervised_script_does_what_it_does_with_trl(name, tmp_path):
    theirs = run_sft(SFTTrainer, SFTConfig, tmp_path / "trl", SFT[name])
    ours = run_sft(MultimodalSFTTrainer, MultimodalSFTConfig, tmp_path / "ours", SFT[name])
    assert_equal(theirs, with_names_of_trl(ours))


LABELLED = [{"prompt": "Is there a cat?", "completion": " Yes.", "label": i % 2 == 0} for i in range(4)]
PAIRS = [{"prompt": "Is there a cat?", "chosen": f" Yes, {i}.", "rejected": " No."} for i in range(4)]
TOKENS = {
    "texts": ("SFT", texts, ("input_ids", "labels"), {"max_length": 6}),
    "completions": (
        "SFT",
        lambda: standard().rename_column("solution", "completion"),
        ("input_ids", "labels"),
        {},
    ),
    "labelled": ("KTO", lambda: Dataset.from_list(LABELLED), ("prompt_ids", "completion_ids"), {"max_length": 9}),
    "pairs": ("Reward", lambda: Dataset.from_list(PAIRS), ("chosen_ids", "rejected_ids"), {}),
}


@pytest.mark.parametrize("name", TOKENS)
def test_rows_have_trls_columns_of_tokens(name, tmp_path):
    algorithm, rows, columns, options = TOKENS[name]
    found = []
    for package, prefix in ((trl, ""), (trl_multimodal_rft, "Multimodal")):
        args = getattr(package, f"{prefix}{algorithm}Config")(str(tmp_path), **{**PLAIN, **options})
        model = judge() if algorithm == "Reward" else saved()
        trainer = getattr(package, f"{prefix}{algorithm}Trainer")(model, args=args, train_dataset=rows())
        found.append(([trainer.train_dataset[:][column] for column in columns], trainer))
    (theirs, trl_trainer), (ours, trainer) = found
    assert theirs == ours and len(theirs[0]) > 0
    if algorithm == "SFT":
        assert trl_trainer.completion_only_loss == trainer.completion_only_loss == (name == "completions")


UNPREPARED = {
    "transform of text": (texts, lambda: texts().with_transform(dict), {}),
    "masks": (lambda: tokenized(assistant_masks=second_half),) * 2
    + ({"dataset_kwargs": {"skip_prepare_dataset": True}},),
}


@pytest.mark.parametrize("name", UNPREPARED)
def test_supervised_rows_that_trl_has_to_prepare(name, tmp_path, monkeypatch):
    """
    TRL refuses them unprepared, and refuses to train on a transform. Here the trainer encodes rows on reading, also
    where it has to wait for them.
    """
    monkeypatch.setattr(prefetch, "_POLL_SECONDS", 0)
    prepared, rows, options = UNPREPARED[name]
    with pytest.raises(ValueError, match="with_transform|Add a 'labels' column"):
        run_sft(SFTTrainer, SFTConfig, tmp_path, {"dataset": rows, **options})
    theirs = run_sft(SFTTrainer, SFTConfig, tmp_path / "trl", {"dataset": prepared})
    assert_equal(
        theirs, run_sft(MultimodalSFTTrainer, MultimodalSFTConfig, tmp_path / "ours", {"dataset": rows, **options})
    )


def test_evaluation_prepares_what_it_is_given(tmp_path):
    """Covers plain text other than the trainer's dataset, and a trainer with plain arguments."""
    results = []
    for trainer_class in (SFTTrainer, MultimodalSFTTrainer):
        args = hf.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True, disable_tqdm=True)
        trainer = trainer_class(saved(), args, train_dataset=texts())
        given = [texts(4), streamed(texts(4)), {"rows": texts(4)}, {"stream": streamed(texts(4))}]
        results.append([trainer.evaluate(eval_dataset=each) for each in given])
    for theirs, ours in zip(*results, strict=True):
        losses = {name: value for name, value in theirs.items() if name.endswith("_loss")}
        assert losses and losses == pytest.approx({name: ours[name] for name in losses}, rel=1e-5)


def pictures() -> Dataset:
    """The last row has the only one."""
    rows = [{**row, "image": image(56, 56)["image"] if i == 7 else None} for i, row in enumerate(conversational(8))]
    return Dataset.from_list(rows).rename_column("prompt", "messages")


SFT_ERRORS = {
    "no rows": ({"dataset": lambda: None}, "`train_dataset` is required"),
    "splits": ({"dataset": lambda: DatasetDict({"train": texts()})}, "must be a `Dataset` or `IterableDataset`"),
    "images for a reader": ({"dataset": pictures, "max_steps": 1}, "vision-related|row 7, .* can't encode image"),
    "assistant in plain text": ({"assistant_only_loss": True}, "`assistant_only_loss=True`"),
    "formatting function and completions": (
        {"objects": lambda: {"formatting_func": str}, "completion_only_loss": True},
        "completion_only_loss",
    ),
}


@pytest.mark.parametrize("name", SFT_ERRORS)
def test_supervised_script_fails_as_it_does_with_trl(name, tmp_path):
    script, message = SFT_ERRORS[name]
    for trainer_class, config_class in ((SFTTrainer, SFTConfig), (MultimodalSFTTrainer, MultimodalSFTConfig)):
        with pytest.raises((ValueError, TypeError), match=message):
            run_sft(trainer_class, config_class, tmp_path, script)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"dataset": lambda: texts(column="words")}, r"columns \['words'\]; it needs `prompt`.*`dataset_text_field`"),
        ({"objects": lambda: {"eval_dataset": {"one": texts(column="words")}}}, "The one dataset has the columns"),
        ({"dataset": lambda: texts().select([])}, "`train_dataset` has no rows"),
        (
            {"dataset": lambda: tokenized(labels=lambda ids: [*ids[1:], 5])},
            "row 0, column 'labels': a label must equal the token",
        ),
        ({"dataset": lambda: tokenized(labels=lambda ids: [-100] * len(ids))}, "row 0 has nothing to learn"),
        ({"dataset": lambda: tokenized(completion_mask=second_half)}, "train dataset has `completion_mask` and no"),
        (
            {"packing": True, "objects": lambda: {"compute_loss_func": lambda *_, **__: None}},
            "`compute_loss_func` forward padded rows whole",
        ),
    ],
    ids=["columns", "columns of an evaluation", "empty", "other labels", "no labels", "mask", "packed"],
)
@pytest.mark.filterwarnings("ignore:`compute_loss_func` is deprecated:FutureWarning")
def test_text_that_can_not_be_learned(script, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_sft(MultimodalSFTTrainer, MultimodalSFTConfig, tmp_path, script)
