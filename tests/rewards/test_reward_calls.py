# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward functions in a trainer: by name, with other parameters, with failures, and without a matching prompt."""

import functools
import re
import traceback
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset
from helpers.samplers import Wrapped
from helpers.trainer_utils import audio_rows, load, make_trainer
from tokenizers import AddedToken
from trl.chat_template_utils import add_response_schema
from trl.rewards import reasoning_accuracy_reward, think_format_reward

from trl_multimodal_rft import MultimodalGRPOTrainer, MultimodalPPOTrainer, MultimodalRLOOTrainer
from trl_multimodal_rft.encoding.messages import opened_thoughts
from trl_multimodal_rft.encoding.processors import completion_texts
from trl_multimodal_rft.evaluation import EvaluationConfig, evaluate, evaluate_trainer, evaluation
from trl_multimodal_rft.rewards import accuracy_reward, apply_recipe, format_reward, length_reward
from trl_multimodal_rft.rewards.answers import completion_text, extract_answer
from trl_multimodal_rft.rewards.calls import checked_reward
from trl_multimodal_rft.rewards.failures import RewardError, user_frames
from trl_multimodal_rft.rewards.named import as_reward_funcs, load_reward_funcs
from trl_multimodal_rft.rollout.turns import parse_assistant_turn
from trl_multimodal_rft.trainers.sampling import rewarding


def rows(prompt="What is it?", conversational=True, **columns):
    prompt = [{"role": "user", "content": prompt}] if conversational else prompt
    return Dataset.from_list([{"prompt": prompt, "solution": "x", **columns}] * 8)


def trainer_of(reward, folder, dataset=None, trainer_class=MultimodalGRPOTrainer, **options):
    options = {"max_steps": 1, "self_check": False, **options}
    return make_trainer(trainer_class, "qwen2_5_vl", dataset or rows(), folder, reward=reward, **options)


# By name


@pytest.mark.parametrize("trainer_class", [MultimodalGRPOTrainer, MultimodalRLOOTrainer, MultimodalPPOTrainer])
def test_names_are_functions_in_python_too(trainer_class, tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text("def even(completions, **kwargs):\n    return [0.0] * len(completions)\n")
    monkeypatch.chdir(tmp_path)
    names = ["accuracy_reward", "think_format_reward", "my_rewards.even"]
    trainer = trainer_of(names, tmp_path / "out", trainer_class=trainer_class)
    assert trainer.reward_funcs[:2] == [accuracy_reward, think_format_reward]
    assert trainer.reward_func_names == ["accuracy_reward", "think_format_reward", "even"]
    trainer.train()
    assert any("rewards/think_format_reward/mean" in logs for logs in trainer.state.log_history)


def test_a_name_is_a_models_where_it_is_a_folder_or_no_functions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = ["org/model-1.5", "bert-base-uncased", "gpt2"]
    assert as_reward_funcs(["format_reward", *models]) == [format_reward, *models]
    assert as_reward_funcs("reasoning_accuracy_reward") == [reasoning_accuracy_reward]
    (tmp_path / "format_reward").mkdir()
    assert as_reward_funcs("format_reward") == ["format_reward"]
    assert load_reward_funcs(["format_reward"]) == [format_reward]  # of the command, whose option expects models
    (overlong,) = load_reward_funcs(["get_soft_overlong_punishment"])
    assert overlong([[0] * 1281]) == [-1.0]
    for name, meant in (
        ("acuracy_reward", "mean `accuracy_reward`"),
        ("nowhere.even", "No module named 'nowhere'"),
        ("trl_multimodal_rft.rewards.odd", ""),
        ("RewardModel", ""),
    ):
        with pytest.raises(ValueError, match=f"no reward function '{name}'.*{meant}"):
            load_reward_funcs([name])


def test_evaluation_takes_names(tmp_path):
    config = EvaluationConfig(max_completion_length=2)
    result = evaluate(*load("qwen2_5_vl"), rows(), ["accuracy_reward", "think_format_reward"], config)
    assert result.settings["reward_funcs"] == ["accuracy_reward", "think_format_reward"]


class Thinks(Wrapped):
    def __call__(self, model, prompts, **options):
        return [self.encoded("2 + 2.\n</think>\n\nIt is \\boxed{4}.") for _ in prompts], None


@pytest.mark.parametrize("opens", [True, False])
def test_completions_begin_with_the_thoughts_that_their_prompt_opens(opens, tmp_path):
    """In rewards of TRL, of this package and of a user, in logs, and in evaluations."""

    def starts(completions, **kwargs):
        return [float(completion[0]["content"].startswith("<think>\n2 + 2.\n</think>")) for completion in completions]

    model, processor = load("qwen3_5")
    processor.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3_5_think.jinja").read_text()
    objects = {"model": model, "processing_class": processor}
    options = {"max_steps": 1, "log_completions": True, "chat_template_kwargs": {"enable_thinking": opens}}
    rewards = ["think_format_reward", "boxed_format_reward", starts]
    trainer = make_trainer(
        MultimodalGRPOTrainer, "", rows(), tmp_path, reward=rewards, objects=objects, sampler=Thinks, **options
    )
    trainer.train()
    means = [value for name, value in trainer.state.log_history[0].items() if re.fullmatch("rewards/.*/mean", name)]
    assert means == [float(opens)] * 3
    written = [completion[0]["content"] for completion in trainer._logs["completion"]]
    written += evaluate_trainer(trainer, rows()).rows[0]["completions"]
    assert {text.startswith("<think>\n2") for text in written} == {opens}


def with_special_tokens(tags):
    """A tokenizer whose last entries are special tokens, as in Mistral's models and those of harmony."""
    tokenizer = load("qwen2_5_vl")[1].tokenizer
    tokenizer.add_special_tokens({"extra_special_tokens": [AddedToken(tag, special=True) for tag in tags]})
    return tokenizer


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        (["[THINK]", "[/THINK]"], "[THINK]It is 5.[/THINK]4<|im_end|>"),
        (["<|channel>", "<channel|>"], "<|channel>thought\nIt is 5.<channel|>4<|im_end|>"),
        (
            ["<|channel|>", "<|message|>", "<|end|>", "<|start|>"],
            "<|channel|>analysis<|message|>It is 5.<|end|><|start|>assistant<|channel|>final<|message|>4<|im_end|>",
        ),
    ],
)
def test_thoughts_between_special_tokens_are_thoughts(tags, text):
    tokenizer = with_special_tokens(tags)
    texts = completion_texts(
        [tokenizer(part)["input_ids"] for part in (text, text[: text.index("5")], "4")], tokenizer
    )
    assert [extract_answer(text) for text in texts] == ["4", "", "4"] and "<|im_end|>" not in texts[0]
    opening = text[: text.index("It")]
    assert opened_thoughts(torch.tensor(tokenizer(opening)["input_ids"]), tokenizer) == opening
    plain = load("qwen2_5_vl")[1].tokenizer
    ids = [plain("<think>5</think>4<|im_end|>")["input_ids"]]
    assert completion_texts(ids, plain) == plain.batch_decode(ids, skip_special_tokens=True) == ["<think>5</think>4"]


@pytest.mark.parametrize("template", ["qwen3_5_think", "deepseek_r1_distill", "nemotron_3_nano", "qwen3"])
def test_turns_with_tools_keep_what_their_prompt_opened(template):
    """TRL takes a thought that the prompt opened, and that isn't closed, for text in some templates."""
    tokenizer = load("qwen3_5")[1].tokenizer
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja").read_text()
    add_response_schema(tokenizer)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], add_generation_prompt=True)["input_ids"]
    opens = template != "qwen3"
    answers = {"The answer is 4": "" if opens else "4", "I look.\n</think>\n\n4": "4", "\n</think>\n\n4": "4"}
    turns = [parse_assistant_turn(tokenizer, tokenizer(text)["input_ids"], prompt, {}) for text in answers]
    assert [extract_answer(completion_text([turn])) for turn in turns] == [*answers.values()]
    assert "<think>" not in turns[1]["content"] + turns[2]["content"]


def test_tags_that_decoding_drops_are_said_before_the_first_update(tmp_path, monkeypatch):
    told = []
    for module in (rewarding, evaluation):
        monkeypatch.setattr(module.logger, "warning", told.append)
        monkeypatch.setattr(module.logger, "warning_once", told.append)
    objects = dict(zip(("model", "processing_class"), load("qwen2_5_vl"), strict=True))
    for tags in ([], ["</answer>", "<sound>"]):
        special = [AddedToken(tag, special=True) for tag in tags]
        objects["processing_class"].tokenizer.add_special_tokens({"extra_special_tokens": special})
        trainer = make_trainer(
            MultimodalGRPOTrainer, "", rows(), tmp_path, reward=[sounds], objects=objects, max_steps=1
        )
        told.clear()
        trainer.train()
        evaluate_trainer(trainer, rows())
        said = [text for text in told if "Rewards never see" in text]
        assert len(said) == 2 * bool(tags) and all("`</answer>`, `<sound>`" in text for text in said)


# Arguments


def no_prompts(completions, solution):
    return [0.0] * len(completions)


async def no_prompts_async(completions):
    return [0.0] * len(completions)


def other_column(completions, answer, **kwargs):
    return [0.0] * len(completions)


class WithoutKeywords:
    __name__ = "an_instance"

    def __call__(self, prompts, completions):
        return [0.0] * len(completions)


@pytest.mark.parametrize(
    ("reward", "name", "taken"),
    [
        (no_prompts, "no_prompts", "completions, solution"),
        (no_prompts_async, "no_prompts_async", "completions"),
        (WithoutKeywords(), "an_instance", "prompts, completions"),
        (functools.partial(no_prompts, solution=[]), "no_prompts", "completions, solution"),
    ],
)
def test_parameters_are_checked_before_anything_is_sampled(reward, name, taken, tmp_path):
    message = (
        rf"^The reward function '{name}' takes \({taken}\), but it is called with prompts, completions, "
        r"completion_ids, trainer_state, log_extra, log_metric and the columns of the dataset.*add `\*\*kwargs`[^\n]*$"
    )
    for refuse in (
        lambda: trainer_of([accuracy_reward, reward], tmp_path),
        lambda: apply_recipe({name: reward}, {"a": [("rule", name, 1.0)]}),
        lambda: evaluate(*load("qwen2_5_vl"), rows(), reward),
    ):
        with pytest.raises(ValueError, match=message):
            refuse()


def test_a_parameter_that_is_no_column_is_named(tmp_path):
    """At construction, also of functions of this package and of those with settings."""
    alone = rows().remove_columns("solution")
    for reward, data, message in (
        (other_column, rows(), r"'other_column' needs 'answer', but it is called with .*solution.*column"),
        (partial(other_column, answer="a"), rows(), None),
        (accuracy_reward, alone, r"accuracy_reward compares with the dataset column `solution`, which is missing"),
        ("length_reward(max_length=9)", alone, r"the dataset column `solution`, which is missing"),
        (accuracy_reward, rows().rename_column("solution", " solution"), r"Did you mean ` solution`\?"),
        (
            accuracy_reward,
            alone.add_column("solution", [""] * 8),
            r"'accuracy_reward' has nothing to read: col",
        ),
        (
            accuracy_reward,
            alone.with_transform(lambda batch: batch | {"solution": ["a"] * len(batch["prompt"])}),
            None,
        ),
    ):
        with nullcontext() if message is None else pytest.raises(ValueError, match=message):
            trainer_of(reward, tmp_path, data)


# Failures


# Where an error came from, in a batch of several rows
WHERE = r"one of the rows \[\d(, \d)*\]"


def of_texts(completions, **kwargs):
    return [float("x" in completion.lower()) for completion in completions]


def of_texts_with_a_module(completions, **kwargs):
    return [float(bool(re.search("x", completion))) for completion in completions]


def its_own_fault(completions, **kwargs):
    return [completions.index(None)]


def of_messages(completions, **kwargs):
    return [float("x" in completion[-1]["content"]) for completion in completions]


@pytest.mark.parametrize(
    ("reward", "conversational", "note"),
    [
        (of_texts, True, "Completions are lists of messages here.*completion\\[-1\\]\\['content'\\]"),
        (of_texts_with_a_module, True, "Completions are lists of messages here"),
        (of_messages, False, "Completions are texts here"),
        (its_own_fault, True, None),
    ],
)
def test_an_error_about_messages_says_what_completions_are(reward, conversational, note, tmp_path):
    with pytest.raises(RewardError, match=note) as raised:
        trainer_of(reward, tmp_path, rows(conversational=conversational)).train()
    line = reward.__code__.co_firstlineno + 1
    cause = type(raised.value.__cause__).__name__
    expected = (
        rf"The reward function '{reward.__name__}' raised {cause} for {WHERE}, at \S*{Path(__file__).name}:{line}"
    )
    assert re.match(f"{expected}: ", str(raised.value)) and cause in ("AttributeError", "TypeError", "ValueError")
    assert note is not None or "Completions are" not in str(raised.value)
    own = raised.value.user_traceback()
    assert {frame.filename for frame in user_frames(raised.value.__cause__)} == {__file__}
    assert f"line {line}, in {reward.__name__}" in own and f"\n{cause}: " in own
    assert reward.__name__ in "".join(traceback.format_exception(raised.value))


def digits(completions, solution, log_metric, **kwargs):
    log_metric("calls", 1.0)
    return [float(text) for text in solution]


async def digits_later(completions, **columns):
    return digits(completions, **columns)


@pytest.mark.parametrize(
    "reward", [digits, functools.partial(digits), digits_later, lambda completions, **columns: {}[5]]
)
@pytest.mark.parametrize("run", [MultimodalGRPOTrainer, evaluate])
def test_an_error_names_its_function_and_the_rows_of_the_batch(run, reward, tmp_path):
    dataset = Dataset.from_list([{"prompt": "What?", "solution": "five" if i == 5 else str(i)} for i in range(8)])
    with pytest.raises(RewardError) as raised:
        if run is evaluate:
            evaluate(*load("qwen2_5_vl"), dataset, reward, EvaluationConfig(max_completion_length=2))
        else:
            trainer_of(reward, tmp_path, dataset, max_steps=4).train()
    name = getattr(reward, "__name__", "digits")
    assert re.match(rf"The reward function '{name}' raised \w+ for {WHERE}, at \S+\.py:\d+: ", str(raised.value))
    assert isinstance(raised.value.__cause__, (ValueError, KeyError))
    assert {frame.filename for frame in user_frames(raised.value.__cause__)} == {__file__}


def test_an_error_of_a_ready_reward_is_its_own(tmp_path):
    """Without code of the user's, the error keeps its type and has a note."""
    with pytest.raises(TypeError) as raised:
        right = partial(length_reward, correctness=lambda completions, **_: [1.0] * len(completions), min_length="x")
        trainer_of(right, tmp_path).train()
    assert re.fullmatch(rf"The reward function 'length_reward' raised this for {WHERE}\.", raised.value.__notes__[0])


def test_a_function_that_raised_is_not_called_again(tmp_path):
    calls = []

    def fails(completions, **columns):
        calls.append(len(completions))
        raise KeyError("score")

    with pytest.raises(RewardError, match=f"'fails' raised KeyError for {WHERE}, at "):
        trainer_of(fails, tmp_path).train()
    assert len(calls) == 1 and calls[0] > 1


def test_the_row_of_a_batch_of_one_row_is_named():
    def fails(completions, **columns):
        raise KeyError("score")

    with pytest.raises(RewardError, match=r"'fails' raised KeyError for row 7, at "):
        checked_reward(fails, rows=[7, 7])(["What?"] * 2, ["a", "b"])


def test_rows_without_any_reward_are_named_without_their_media(tmp_path, caplog):
    dataset = audio_rows().add_column("solution", [None] * 7 + ["A bird."])
    reward_funcs = [accuracy_reward, lambda completions, **columns: [None] * len(completions)]
    make_trainer(MultimodalGRPOTrainer, "qwen2_audio", dataset, tmp_path, reward=reward_funcs, max_steps=1).train()
    [message] = [each.getMessage() for each in caplog.records if "returned None" in each.getMessage()]
    assert re.search(r"returned None .* a completion of row \d \('accuracy_reward', '<lambda>'\), which", message)
    assert len(message) < 300 and "\n" not in message


def test_a_wrong_reference_is_named_by_its_row_in_the_dataset(tmp_path):
    bad = [{"prompt": "What?", "solution": {"value": "x"} if i == 5 else None} for i in range(8)]
    trainer = trainer_of(accuracy_reward, tmp_path, Dataset.from_list(bad), max_steps=4)
    with pytest.raises(ValueError, match=r"^row 5, column 'solution': accuracy_reward got a dict"):
        trainer.train()
    with pytest.raises(ValueError, match="^row 5, "):
        rule = apply_recipe({"a": accuracy_reward}, {"use": [("rule", "a", 1.0)], "skip": []})[0]
        rule(["?"] * 6, ["x"] * 6, label=["skip"] * 5 + ["use"], solution=[{}] * 6)


# Requests in prompts


def sounds(completions, **kwargs):
    return [0.0] * len(completions)


sounds.required_in_prompt = "<sound>"


@pytest.mark.parametrize(
    ("reward", "prompts", "missing_instructions"),
    [
        ([accuracy_reward, format_reward], ["What is it?"], ["`<answer>`.*'format_reward'"]),
        ([accuracy_reward], ["What is it?"], []),
        ([format_reward], ["What is it?", "Answer in <answer> </answer>."], []),
        (sounds, ["Answer in <answer> </answer>."], ["`<sound>`.*'sounds'"]),
        (
            apply_recipe({"form": format_reward}, {"x": [("rule", "form", 1.0)]}, label_column="solution"),
            ["What is it?"],
            ["`<answer>`.*'format_reward'"],
        ),
    ],
)
def test_what_no_prompt_asks_for_is_said_before_the_first_update(
    reward, prompts, missing_instructions, tmp_path, monkeypatch
):
    told = []
    monkeypatch.setattr(
        rewarding.logger, "warning", lambda text: told.append((trainer and trainer.state.global_step, text))
    )
    made = [{"prompt": [{"role": "user", "content": prompts[i % len(prompts)]}], "solution": "x"} for i in range(8)]
    trainer = None
    trainer = trainer_of(reward, tmp_path, Dataset.from_list(made), max_steps=2)
    told.clear()
    trainer.train()
    found = [(step, message) for step, message in told if "No prompt of the first batch" in message]
    assert [step for step, _ in found] == [0] * len(missing_instructions)
    for (_, message), expected in zip(found, missing_instructions, strict=True):
        assert re.search(expected, message) and "--system_prompt" in message and "\n" not in message
