# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Evaluation: statistics against slow counting, answers against plain `generate`, and no effect on training."""

import io
import itertools
import json
import math
import random
import re
from datetime import date
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import trl
from datasets import Dataset
from helpers import forked
from helpers.checks import in_float32
from helpers.families import FAMILIES, greedy
from helpers.folders import ROOT
from helpers.marks import slow_but
from helpers.processes import PATIENCE, python_command, python_environment
from helpers.trainer_utils import (
    audio_rows,
    image_rows,
    length_and_sum,
    load,
    make_trainer,
    metrics,
    norm,
    saved,
    sound,
    text_rows,
    update_of,
)
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import EarlyStoppingCallback
from trl import GRPOConfig, GRPOTrainer

from trl_multimodal_rft import (
    GenerationEvalCallback,
    MultimodalGRPOTrainer,
    MultimodalPPOTrainer,
    MultimodalRLOOTrainer,
)
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.evaluation import (
    EvaluationConfig,
    evaluate,
    evaluate_trainer,
    majority_at_k,
    mean_interval,
    pass_at_k,
    wilson_interval,
)
from trl_multimodal_rft.evaluation.evaluator import named_rewards
from trl_multimodal_rft.extras import evaluate as evaluate_script
from trl_multimodal_rft.lightrft import ActorAL
from trl_multimodal_rft.rewards import RemoteReward, accuracy_reward, format_reward


def test_pass_at_k_is_the_share_of_sets_of_samples_with_a_right_one():
    for n, k in ((1, 1), (5, 1), (5, 2), (5, 5), (8, 3)):
        for c in range(n + 1):
            samples = [True] * c + [False] * (n - c)
            sets = list(itertools.combinations(samples, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, sets)) / len(sets), abs=1e-12)
    n = np.array([[4, 10_000], [6, 3]])
    c = np.array([1, 2])
    values = pass_at_k(n, c, 3)
    for value, one_n, one_c in zip(values.flat, n.flat, np.broadcast_to(c, n.shape).flat, strict=True):
        expected = 1 - math.comb(int(one_n - one_c), 3) / math.comb(int(one_n), 3)
        assert value == pytest.approx(expected, rel=1e-9)
    assert pass_at_k([], [], 3).shape == (0,)


@pytest.mark.parametrize(
    ("answers", "correct", "k", "share"),
    [
        ("aab", [1, 1, 0], 3, 1),
        ("bba", [0, 0, 1], 3, 0),
        ("ab", [0, 1], 2, 0),  # the first wins a tie
        ("ba", [1, 0], 2, 1),
        ("bcaa", [0, 0, 1, 1], 4, 1),
        ("abbab", [1, 0, 0, 1, 0], 1, 2 / 5),
        ("aabb" + "b", [1, 1, 0, 0, 0], 2, 1 / 2),  # two blocks, and a fifth row
        ("abb", [1, 0, 0], 2, 1),
    ],
)
def test_majority(answers, correct, k, share):
    assert majority_at_k([answers], [correct], k) == pytest.approx([share])


def test_majority_of_several_rows_and_its_default():
    answers = [list("aab"), list("abc")]
    correct = [[False, False, True], [True, False, False]]
    assert majority_at_k(answers, correct, 3).tolist() == [0.0, 1.0]
    assert majority_at_k([[None, None, "7"], [None] * 3], [[False, False, True]] * 2, 3).tolist() == [1.0, 0.0]
    config = EvaluationConfig(num_samples=4, temperature=1.0, pass_at=[1, 2, 4])
    assert config.majority_at == [2, 4]


def test_intervals():
    # Solves (p - share)^2 = z^2 p (1 - p) / n
    for successes, n, z, confidence in (
        (8, 10, 1.959963985, 0.95),
        (1, 7, 1.644853627, 0.9),
        (0, 20, 1.959963985, 0.95),
    ):
        share = successes / n
        a = 1 + z**2 / n
        b = -(2 * share + z**2 / n)
        c = share**2
        expected = [(-b + sign * math.sqrt(b**2 - 4 * a * c)) / (2 * a) for sign in (-1, 1)]
        assert wilson_interval(successes, n, confidence) == pytest.approx(expected, abs=1e-8)
    assert wilson_interval(0, 5)[0] == 0 and wilson_interval(5, 5)[1] == 1
    low, high = mean_interval([0.0, 0.5, 1.0, 0.5])  # standard deviation sqrt(1/6), standard error sqrt(1/24)
    assert (low, high) == pytest.approx((0.5 - 1.959964 / math.sqrt(24), 0.5 + 1.959964 / math.sqrt(24)), abs=1e-6)
    assert np.isnan(mean_interval([0.5])).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pass_at_k(4, 1, 5), "`k` is 5"),
        (lambda: pass_at_k([4, 2], 1, 3), "`k` is 3"),
        (lambda: pass_at_k([4, 4], [1, 5], 2), "between 0 and `n`"),
        (lambda: majority_at_k(["aab", "ab"], [[1, 1, 0], [1, 0]], 3), "row 1 has 2 answers"),
        (lambda: majority_at_k(["aab"], [[1, 1]], 2), "row 0 has 3 answers and 2 values"),
        (lambda: wilson_interval(3, 2), "`successes` is 3 and `n` is 2"),
        (lambda: mean_interval([0.0, 1.0], 95), "`confidence` is 95"),
        (lambda: EvaluationConfig(num_samples=4), "greedy decoding gives the same completion"),
        (lambda: EvaluationConfig(pass_at=[2]), "`pass_at` has 2"),
        (lambda: EvaluationConfig(num_samples=2, temperature=1.0, majority_at=[3]), "`majority_at` has 3"),
        (lambda: named_rewards(EvaluationConfig()), "`reward_funcs` is an `EvaluationConfig`; pass it as `args`"),
        (lambda: EvaluationConfig(temperature=-1.0), "`temperature` must be at least 0, got -1.0; 0 decodes greedily"),
        (lambda: EvaluationConfig(max_tool_media=-1), "`max_tool_media` must be at least 0"),
        (lambda: EvaluationConfig(batch_size=0), "`batch_size` must be at least 1, got 0"),
        (lambda: EvaluationConfig(confidence=95), "`confidence` must be above 0 and below 1, got 95"),
    ],
)
def test_what_makes_no_sense(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# Answers


def greedy_answers(family: str, rows: Dataset, length: int) -> list[str]:
    """Answers each row alone, with the processor and `generate`."""
    model, processor = load(family)
    answers = []
    for row in rows:
        text = {"type": "text", "text": row["prompt"][0]["content"]}
        media = [{"type": "image", "image": row["image"]}] if row.get("image") else []
        media += [{"type": "audio", "audio": np.float32(row["audio"]["array"])}] if row.get("audio") else []
        answers.append(greedy(model, processor, [{"role": "user", "content": [*media, text]}], length))
    return answers


def with_solutions(rows: Dataset, solutions: list) -> list[dict]:
    return [{**row, "solution": solution} for row, solution in zip(rows, solutions, strict=True)]


def numbered(rows: Dataset) -> Dataset:
    return rows if "index" in rows.column_names else rows.add_column("index", range(len(rows)))


@pytest.mark.parametrize(("family", "make"), [("qwen2_audio", audio_rows), ("qwen2_5_vl", image_rows)])
def test_greedy_answers_are_those_of_generate(family, make):
    rows = numbered(make(5))
    answers = greedy_answers(family, rows, 6)
    assert len(set(answers)) > 2
    dataset = with_solutions(rows, [answer if i != 3 else "wrong" for i, answer in enumerate(answers)])
    model, processor = load(family)
    config = EvaluationConfig(max_completion_length=6, batch_size=2)
    result = evaluate(model, processor, dataset, accuracy_reward, config, accelerator=in_float32())
    assert [row["completions"] for row in result.rows] == [[answer] for answer in answers]
    assert [row["index"] for row in result.rows] == list(range(5))
    assert [row["correct"] for row in result.rows] == [[True], [True], [True], [False], [True]]
    found = result.metrics
    assert found["accuracy"] == found["pass@1"] == found["reward/accuracy_reward"] == 0.8
    assert (found["accuracy_low"], found["accuracy_high"]) == wilson_interval(4, 5)
    assert found["rows"] == found["scored_rows"] == 5
    lengths = [row["completion_lengths"][0] for row in result.rows]
    assert found["completion_length"] == np.mean(lengths) and set(lengths) <= set(range(1, 7))
    assert [row["truncated"] for row in result.rows] == [[length == 6] for length in lengths] and 6 in lengths


def completions_of(model, processor, rows, config=None, reward=format_reward) -> list[list[str]]:
    return [row["completions"] for row in evaluate(model, processor, rows, reward, config).rows]


def test_actors_and_adapters_answer_as_their_models():
    rows = audio_rows(3)
    config = EvaluationConfig(max_completion_length=6)
    model, processor = load("qwen2_audio")
    expected = completions_of(model, processor, rows, config)
    assert completions_of(ActorAL(load("qwen2_audio")[0], bf16=False), processor, rows, config) == expected
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=True))
    assert completions_of(adapted, processor, rows, config) == expected
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    assert completions_of(adapted, processor, rows, config) != expected


def test_rows_with_and_without_media_mix():
    rows = [*audio_rows(2), *text_rows(2)]
    model, processor = load("qwen2_audio")
    config = EvaluationConfig(max_completion_length=5)
    together = evaluate(model, processor, rows, format_reward, config)
    alone = [evaluate(model, processor, [row], format_reward, config) for row in rows]
    assert [row["completions"] for row in together.rows] == [result.rows[0]["completions"] for result in alone]
    assert together.rows[0]["prompt"].startswith("<audio>What do you hear")
    assert together.rows[2]["prompt"] == "Is there a bird? 0"


@pytest.mark.parametrize(
    ("family", "make"),
    [("granite_speech", audio_rows), pytest.param("phi4_multimodal", image_rows, marks=pytest.mark.slow)],
)
def test_prompts_whose_media_must_not_join_are_answered_apart(family, make):
    """The features of these encoders depend on their neighbours in the batch."""
    model, processor = FAMILIES[family].build()
    config = {"max_completion_length": 12, "num_samples": 2, "temperature": 1e-4, "top_k": 1}
    together, alone = (
        completions_of(model, processor, make(6), EvaluationConfig(**config, batch_size=size)) for size in (12, 2)
    )
    assert together == alone and len({tuple(row) for row in alone}) > 1


def sampled(**options):
    return EvaluationConfig(**{"num_samples": 4, "temperature": 1.0, "max_completion_length": 6, **options})


def odd_length(completion_ids, **kwargs):
    return [float(len(ids) % 2) for ids in completion_ids]


def test_metrics_of_samples_are_those_of_the_table():
    model, processor = load("qwen2_audio")
    model.generation_config.eos_token_id = list(range(3, 200))  # so that completions end
    config = sampled(pass_at=[1, 2, 4], majority_at=[3], batch_size=8)
    result = evaluate(model, processor, audio_rows(7), [odd_length, format_reward], config)
    rows = result.rows
    found = result.metrics
    assert all(len(row[name]) == 4 for row, name in product(rows, ("completions", "correct", "truncated")))
    assert len({text for row in rows for text in row["completions"]}) > 7
    right = [sum(row["correct"]) for row in rows]
    assert 0 < sum(right) < 28
    for row in rows:
        assert row["reward/odd_length"] == [float(n % 2) for n in row["completion_lengths"]]
        assert row["truncated"] == [n == 6 for n in row["completion_lengths"]] or 6 in row["completion_lengths"]
    assert found["accuracy"] == found["pass@1"] == found["reward/odd_length"] == pytest.approx(sum(right) / 28)
    shares = [c / 4 for c in right]
    assert (found["accuracy_low"], found["accuracy_high"]) == pytest.approx(
        [min(max(end, 0), 1) for end in mean_interval(shares)]
    )
    tries = [1 - math.comb(4 - c, 2) / math.comb(4, 2) for c in right]
    assert found["pass@2"] == pytest.approx(np.mean(tries))
    assert found["pass@4"] == np.mean([c > 0 for c in right])
    assert (found["pass@4_low"], found["pass@4_high"]) == wilson_interval(sum(c > 0 for c in right), 7)
    votes = []
    for row in rows:
        first = row["extracted_answers"][:3]
        winner = max(first, key=lambda answer: (first.count(answer), -first.index(answer)))
        votes.append(row["correct"][first.index(winner)])
    assert found["majority@3"] == pytest.approx(np.mean(votes))
    assert found["truncated"] == np.mean([flag for row in rows for flag in row["truncated"]])


def test_samples_depend_on_the_seed_and_on_nothing_else():
    model, processor = load("qwen2_audio")
    dataset = audio_rows(3)

    def completions(**options):
        return completions_of(model, processor, dataset, sampled(batch_size=4, **options))

    first = completions()
    torch.rand(7), np.random.rand(3)
    assert completions() == first
    assert completions(seed=1) != first
    # A row in another batch has another seed
    dataset = [*audio_rows(1)] * 2
    assert len({tuple(row) for row in completions()}) == 2


def test_samples_are_drawn_in_turns_with_media_encoded_once(monkeypatch):
    model, processor = load("qwen2_audio")
    sizes = []
    extracted = []
    forwards = []

    def counting(owner, name, note):
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, *args, **kw: note(kw) or function(self, *args, **kw))

    counting(type(model), "generate", lambda kwargs: sizes.append(len(kwargs["input_ids"])))
    counting(type(processor.feature_extractor), "__call__", lambda kwargs: extracted.append(1))
    result = evaluate(model, processor, audio_rows(2), format_reward, sampled(num_samples=5, batch_size=2))
    assert sizes == [2, 2, 1] * 2
    assert [len(set(row["completions"])) for row in result.rows] == [5, 5]
    model.get_encoder(modality="audio").register_forward_hook(lambda module, args, output: forwards.append(1))
    extracted.clear()
    evaluate(model, processor, audio_rows(3), format_reward, sampled(batch_size=12))
    assert (len(extracted), len(forwards)) == (3, 1)


def test_placeholders_are_never_sampled():
    model, processor = load("qwen2_audio")
    head = model.get_output_embeddings()
    biased = nn.Linear(head.in_features, head.out_features)
    nn.init.zeros_(biased.weight), nn.init.zeros_(biased.bias)
    with torch.no_grad():
        biased.bias[model.config.audio_token_index] = 100.0
        biased.bias[300] = 1.0
    model.set_output_embeddings(biased)
    result = evaluate(model, processor, audio_rows(1), format_reward, EvaluationConfig(max_completion_length=3))
    assert result.rows[0]["completions"] == [processor.tokenizer.decode([300] * 3)]


def test_recommendations_of_the_checkpoint_do_not_count():
    model, processor = load("qwen2_audio")
    expected = completions_of(model, processor, audio_rows(2), sampled())
    own = model.generation_config
    own.update(repetition_penalty=9.0, no_repeat_ngram_size=1, min_p=0.9, typical_p=0.1)
    assert completions_of(model, processor, audio_rows(2), sampled()) == expected
    assert model.generation_config is own


def random_states():
    numpy_state = np.random.get_state()
    return random.getstate(), (numpy_state[1].tolist(), numpy_state[2]), torch.get_rng_state().tolist()


def test_nothing_is_left_behind():
    model, processor = load("qwen2_5_vl")
    model.train()
    model.get_encoder(modality="image").eval()
    modes = [module.training for module in model.modules()]
    assert len(set(modes)) == 2

    def drawing(completions, **kwargs):
        assert not any(module.training for module in model.modules())
        return [random.random() * np.random.rand() * torch.rand(()).item() for _ in completions]

    before = random_states()
    weights = {name: p.clone() for name, p in model.named_parameters()}
    deltas = model.base_model.rope_deltas
    for error in (False, True):
        if error:
            with pytest.raises(ValueError, match="no column 'prompt'"):
                evaluate(model, processor, [*image_rows(1), {"text": "?"}], drawing, sampled(batch_size=4))
        else:
            evaluate(model, processor, image_rows(2), drawing, sampled(batch_size=4))
        assert random_states() == before
        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(p, weights[name]) and p.grad is None for name, p in model.named_parameters())
    assert deltas is None  # each call resets what `generate` leaves there


# Rewards


def test_reward_functions_get_what_the_trainers_give(tmp_path):
    seen = []

    def spy(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
        columns["audio"] = [audio["array"].tolist() for audio in columns["audio"]]
        prompts = [(text["type"], text["text"], audio["type"]) for [p] in prompts for audio, text in [p["content"]]]
        completions = [[message.keys() for message in completion] for completion in completions]
        assert all(isinstance(i, int) for ids in completion_ids for i in ids)
        rows = zip(prompts, completions, columns["audio"], columns["solution"], columns["index"], strict=True)
        seen.append((columns.keys(), type(trainer_state), sorted(rows, key=lambda row: row[-1])))
        return [0.0] * len(completions)

    dataset = audio_rows(2).add_column("solution", ["cat", "dog"])
    options = {"max_steps": 1, "per_device_train_batch_size": 4, "num_generations": 2, "self_check": False}
    make_trainer(MultimodalGRPOTrainer, "qwen2_audio", dataset, tmp_path, reward=spy, **options).train()
    evaluate(*load("qwen2_audio"), dataset, spy, sampled(num_samples=2, batch_size=4))
    theirs, ours = seen
    assert ours == theirs
    assert ours[0] == {"audio", "group_ids", "index", "solution"} and [row[-1] for row in ours[2]] == [0, 0, 1, 1]
    assert ours[2][2][2] == sound(0.5, 1)["array"].tolist()


async def waiting_reward(completions, **kwargs):
    return [0.5] * len(completions)


def test_async_functions_missing_rewards_and_what_functions_log(tmp_path):
    def first(completions, index, log_extra, log_metric, **kwargs):
        log_extra("shout", [str(i) for i in index])
        log_metric("seen", len(completions))
        return [None if i == 1 else float(i > 1) for i in index]

    async def late(completions, **kwargs):
        return [0.25] * len(completions)

    dataset = numbered(text_rows(4))
    short = EvaluationConfig(batch_size=2, max_completion_length=2)
    result = evaluate(*load("qwen2_audio"), dataset, [first, waiting_reward, late], short)
    found = result.metrics
    assert found["rows"] == 4 and found["scored_rows"] == 3
    assert found["accuracy"] == pytest.approx(2 / 3) == found["reward/first"]
    assert found["reward/waiting_reward"] == 0.5 and found["reward/late"] == 0.25 and found["metric/seen"] == 2
    assert [row["correct"] for row in result.rows] == [[False], [None], [True], [True]]
    assert [row["extra/shout"] for row in result.rows] == [["0"], ["1"], ["2"], ["3"]]
    nothing = evaluate(*load("qwen2_audio"), dataset, lambda completions, **_: [None] * len(completions), short)
    assert nothing.metrics["accuracy"] is None and nothing.metrics["scored_rows"] == 0
    nothing.save(tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text())["metrics"]["accuracy_low"] is None


def test_groups_and_thresholds():
    def graded(completions, index, **kwargs):
        return [i / 4 for i in index]

    dataset = numbered(text_rows(5)).add_column("task", ["sound", "music", "sound", "music", "music"])
    config = EvaluationConfig(group_by="task", correct_threshold=0.5, confidence=0.9, max_completion_length=2)
    found = evaluate(*load("qwen2_audio"), dataset, graded, config).metrics
    assert found["accuracy"] == 3 / 5 and found["reward/graded"] == 0.5
    assert found["accuracy/sound"] == 1 / 2 and found["accuracy/music"] == pytest.approx(2 / 3)
    assert (found["accuracy/music_low"], found["accuracy/music_high"]) == wilson_interval(2, 3, 0.9)
    with pytest.raises(ValueError, match="`group_by` is 'kind'"):
        evaluate(*load("qwen2_audio"), dataset, graded, EvaluationConfig(group_by="kind"))


@pytest.mark.parametrize(
    ("rows", "reward", "message"),
    [
        ([], format_reward, "no rows"),
        ({"test": [{"prompt": "?"}]}, format_reward, r"\(dict\) has no rows"),
        ([{"text": "?"}], format_reward, "row 0 has no column 'prompt'"),
        ([{"prompt": "?"}], [], "no reward function"),
        ([{"prompt": "?"}], [format_reward, format_reward], "one is passed twice"),
        ([{"prompt": "?"}], "path/to/model", "reward model"),
        ([{"prompt": i} for i in "0123"], lambda prompts, **_: [float(p) - 3 or math.nan for p in prompts], "row 3"),
        ([{"prompt": "?"}], lambda completions, **_: [], "0 rewards for 1 completions"),
        ([{"prompt": "?"}], lambda completions, **_: 1.0, "returned 1.0 for 1 completions; return a list"),
    ],
)
def test_errors(rows, reward, message):
    with pytest.raises(ValueError, match=message):
        evaluate(*load("qwen2_audio"), rows, reward, EvaluationConfig(max_completion_length=2, batch_size=2))


def test_results_are_written_without_what_a_table_can_not_hold(tmp_path):
    dataset = with_solutions(numbered(audio_rows(3)), ["cat", "dog", "bird"])
    result = evaluate(*load("qwen2_audio"), dataset, [accuracy_reward], sampled(num_samples=2, pass_at=[1, 2]))
    result.save(tmp_path / "new" / "folder")
    written = json.loads((tmp_path / "new" / "folder" / "metrics.json").read_text())
    assert written["metrics"] == result.metrics
    assert written["settings"]["temperature"] == 1.0 and written["settings"]["reward_funcs"] == ["accuracy_reward"]
    assert written["versions"]["trl"] == trl.__version__
    table = Dataset.from_parquet(str(tmp_path / "new" / "folder" / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    assert table.to_list() == result.rows
    assert table["solution"][:] == ["cat", "dog", "bird"] and "audio" not in table.column_names
    assert table[1]["prompt"].startswith("<audio>What do you hear") and len(table[1]["completions"]) == 2
    rows = [{"prompt": "?", "thing": object() if i else None, "solution": "x", "correct": "mine"} for i in range(2)]
    result = evaluate(*load("qwen2_audio"), rows, accuracy_reward, EvaluationConfig(max_completion_length=2))
    assert "thing" not in result.rows[0] and result.rows[0]["correct"] == [False]


@pytest.mark.parametrize("column", ["day", "correct"])
def test_groups_of_a_column_that_a_table_can_not_hold(column):
    """Covers columns with the name of one of the table's columns."""
    days = [date(2026, 1, 1 + i // 2) for i in range(4)]
    rows = [{"prompt": "?", "n": i, column: day} for i, day in enumerate(days)]

    def second_day(n, **kwargs):
        return [float(i >= 2) for i in n]

    config = EvaluationConfig(max_completion_length=2, group_by=column, batch_size=3)
    result = evaluate(*load("qwen2_audio"), rows, second_day, config)
    groups = {name: value for name, value in result.metrics.items() if name.startswith("accuracy/")}
    assert groups["accuracy/2026-01-01"] == 0 and groups["accuracy/2026-01-02"] == 1 and len(groups) == 6
    assert all(isinstance(name, str) and name.isprintable() for name in result.rows[0])
    assert [row["correct"] for row in result.rows] == [[False], [False], [True], [True]]
    with pytest.raises(ValueError, match="`group_by` is 'image', a column of media"):
        evaluate(*load("qwen2_5_vl"), image_rows(1), second_day, EvaluationConfig(group_by="image"))


# Trainers


@pytest.mark.parametrize(
    ("trainer_class", "options"),
    [
        (MultimodalGRPOTrainer, {"log_completions": True, "soft_overlong_cache": 2}),
        (MultimodalRLOOTrainer, {}),
        (MultimodalPPOTrainer, {"num_generations": 2}),
    ],
)
def test_rewards_of_one_name_have_metrics_of_their_own(trainer_class, options, tmp_path):
    class Judge(RemoteReward):
        """A judge without a server."""

        def __call__(self, prompts, completions, **columns):
            return [float(self.url)] * len(completions)

    rewards = [
        *(Judge("1"), Judge("2"), Judge("3", name="other")),
        *(lambda completions, value=value, **_: [value] * len(completions) for value in (4.0, 5.0)),
    ]
    trainer = make_trainer(
        trainer_class, "qwen2_audio", audio_rows(4), tmp_path, reward=rewards, max_steps=1, **options
    )
    trainer.train()
    names = ["remote_reward", "remote_reward_2", "other", "<lambda>", "<lambda>_2"]
    [entry] = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry[f"rewards/{name}/mean"] for name in names] == [1, 2, 3, 4, 5]
    metrics = evaluate_trainer(trainer, audio_rows(2)).metrics
    assert [metrics[f"reward/{name}"] for name in names] == [1, 2, 3, 4, 5]


def test_trainers_answer_as_their_models_and_what_the_callback_refuses(tmp_path):
    dataset = audio_rows(5)
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen2_audio", dataset, tmp_path, eval_strategy="no")
    result = evaluate_trainer(trainer, dataset, [format_reward, length_and_sum])
    assert result.settings["max_completion_length"] == 8 and result.settings["temperature"] == 0
    config = EvaluationConfig(max_completion_length=8)
    assert result.rows == evaluate(*load("qwen2_audio"), dataset, [format_reward, length_and_sum], config).rows
    assert evaluate_trainer(trainer, dataset).metrics["reward/length_and_sum"] is not None
    with pytest.raises(ValueError, match="nothing to evaluate on"):
        evaluate_trainer(trainer)
    with pytest.raises(ValueError, match="no dataset to evaluate on"):
        GenerationEvalCallback(trainer)
    with pytest.raises(ValueError, match="`freq` is 0"):
        GenerationEvalCallback(trainer, audio_rows(2), freq=0)
    with pytest.raises(ValueError, match="reward model"):
        GenerationEvalCallback(trainer, audio_rows(2), nn.Linear(1, 1))
    model, processor = load("qwen2_5_vl")
    theirs = GRPOTrainer(
        model, length_and_sum, GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[]),
        train_dataset=image_rows(2), processing_class=processor,
    )  # fmt: skip
    with pytest.raises(ValueError, match="is a GRPOTrainer"):
        GenerationEvalCallback(theirs, image_rows(2))


def by_turn(*counts):
    """Rewards as many completions as the next count with 1, the others with 0."""
    counts = iter(counts)

    def reward(completions, **kwargs):
        right = next(counts)
        return [float(i < right) for i in range(len(completions))]

    return reward


def logged(trainer, name="eval_accuracy") -> list[tuple]:
    return [(entry["step"], entry[name]) for entry in trainer.state.log_history if name in entry]


def without_evaluation(history: list[dict]) -> list[dict]:
    return metrics([entry for entry in history if not any(name.startswith("eval_") for name in entry)])


def trained(trainer_class, family, dataset, folder, evaluated, **options):
    trainer = make_trainer(trainer_class, family, dataset, folder, **options)
    if evaluated is not None:
        trainer.add_callback(GenerationEvalCallback(trainer, **evaluated))
    return trainer, update_of(trainer)


@pytest.mark.parametrize(
    ("trainer_class", "options"),
    [
        (MultimodalGRPOTrainer, {"gradient_checkpointing": True, "num_iterations": 2, "logging_steps": 2}),
        pytest.param(MultimodalRLOOTrainer, {"beta": 0.1}, marks=pytest.mark.slow),
        (MultimodalPPOTrainer, {"num_generations": 2}),
    ],
)
def test_training_does_not_notice(trainer_class, options, tmp_path):
    evaluated = {
        "eval_dataset": image_rows(3),
        "reward_funcs": [odd_length, format_reward],
        "args": sampled(pass_at=[1, 2], batch_size=6),
        "freq": 1,
    }
    options = {"max_steps": 2, **options}
    (plain, update), (watched, same) = (
        trained(trainer_class, "qwen2_5_vl", image_rows(), tmp_path / str(i), kwargs, **options)
        for i, kwargs in enumerate((None, evaluated))
    )
    assert norm(update) > 0.01
    assert update.keys() == same.keys() and all(torch.equal(update[name], same[name]) for name in update)
    expected, actual = (without_evaluation(trainer.state.log_history) for trainer in (plain, watched))
    assert len(expected) == len(actual) > 1 and expected == actual
    entries = [entry for entry in watched.state.log_history if "eval_accuracy" in entry]
    assert [entry["step"] for entry in entries] == [0, 1, 2]
    intervals = {"eval_accuracy_low", "eval_accuracy_high", "eval_pass@2", "eval_majority@2"}
    assert all(intervals <= entry.keys() for entry in entries)
    assert watched.model.training


def test_evaluations_follow_those_of_the_trainer_and_can_choose_the_best(tmp_path):
    held_out = numbered(audio_rows(4))
    trainer = make_trainer(
        MultimodalGRPOTrainer, "qwen2_audio", audio_rows(), tmp_path,
        objects={"eval_dataset": {"a": held_out, "b": held_out}},
        eval_strategy="steps", eval_steps=1, max_steps=2, metric_for_best_model="accuracy", greater_is_better=True,
        load_best_model_at_end=True, save_strategy="steps", save_steps=1, save_only_model=True,
    )  # fmt: skip
    config = EvaluationConfig(max_completion_length=3)
    callback = GenerationEvalCallback(trainer, held_out, by_turn(0, 4, 2), config, output_dir=tmp_path / "results")
    trainer.add_callback(callback)
    trainer.train()
    # Once per step despite two datasets, and once for the best weights at the end
    assert logged(trainer) == [(1, 0.0), (2, 1.0), (2, 0.5)]
    assert trainer.state.best_metric == 1.0 and trainer.state.best_model_checkpoint.endswith("checkpoint-2")
    assert len(logged(trainer, "reward")) == 2
    assert callback.result.metrics["accuracy"] == 0.5
    assert written(tmp_path / "results" / "step-1")[0]["metrics"]["accuracy"] == 0


@pytest.mark.parametrize("order", slow_but(["stop first", "evaluate first"], "stop first"))
def test_training_stops_early_and_loads_the_best(order, tmp_path):
    """The order of callbacks doesn't matter, as one takes the trainer and the other is often passed to it."""
    early = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = make_trainer(
        MultimodalGRPOTrainer, "qwen2_audio", audio_rows(8), tmp_path,
        objects={"eval_dataset": audio_rows(2), "callbacks": [early] if order == "stop first" else []},
        eval_strategy="steps", eval_steps=1, max_steps=6, metric_for_best_model="accuracy",
        load_best_model_at_end=True, save_strategy="steps", save_steps=1, save_only_model=True,
        learning_rate=0.1,
    )  # fmt: skip
    share = by_turn(1, 3, 2, 2, 4, 4, 0)
    config = EvaluationConfig(max_completion_length=2)
    trainer.add_callback(GenerationEvalCallback(trainer, audio_rows(4), share, config))
    if order == "evaluate first":
        trainer.add_callback(early)
    trainer.train()
    assert [value for _, value in logged(trainer)] == [0.25, 0.75, 0.5, 0.5, 1.0]  # the last: best weights
    assert trainer.state.global_step == 4 and trainer.state.best_global_step == 2
    best = type(trainer.model).from_pretrained(tmp_path / "checkpoint-2").state_dict()
    last = type(trainer.model).from_pretrained(tmp_path / "checkpoint-4").state_dict()
    assert all(torch.equal(weight, best[name]) for name, weight in trainer.model.state_dict().items() if name in best)
    assert any(not torch.equal(best[name], last[name]) for name in best)


def wav(audio: dict) -> dict:
    buffer = io.BytesIO()
    soundfile.write(buffer, audio["array"], audio["sampling_rate"], format="WAV", subtype="FLOAT")
    return {"bytes": buffer.getvalue(), "path": None}


@pytest.fixture
def spoken(tmp_path):
    """
    Rows in a file, every third with a wrong reference, their greedy answers, and options of the script, which writes
    into `results`.
    """
    answers = greedy_answers("qwen2_audio", audio_rows(7), 6)
    rows = [
        {"prompt": row["prompt"], "audio": wav(row["audio"]), "solution": answers[i] if i % 3 else "wrong"}
        for i, row in enumerate(audio_rows(7))
    ]
    Dataset.from_list(rows).to_parquet(tmp_path / "data" / "test.parquet")
    options = [
        *("--dataset_name", str(tmp_path / "data"), "--dtype", "float32", "--max_completion_length", "6"),
        *("--output_dir", str(tmp_path / "results"), "--model_name_or_path"),
    ]
    return rows, answers, options


def run_script(options: list[str]) -> None:
    evaluate_script.main(*parse(evaluate_script.ARGUMENTS, options))


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_rows_of_one_split_are_read_and_said_to_be_those_of_training_by_their_name(split, spoken, tmp_path, capsys):
    options = [*spoken[2], str(saved("qwen2_audio")), "--reward_funcs", "accuracy_reward", "--max_rows", "1"]
    file = (tmp_path / "data" / "test.parquet").rename(tmp_path / "data" / f"{split}.parquet")
    for words in (["--dataset_name", str(file)], []):
        run_script([*options, *words])
        said = "The rows are those of 'train', which training may have used.\n" in capsys.readouterr().out
        assert said == (split == "train") and written(tmp_path / "results")[0]["settings"]["split"] == split
    if split == "train":  # a part of it may be what training leaves out
        run_script([*options, "--dataset_test_split", "train[:1]"])
        assert "which training may have used" not in capsys.readouterr().out


def test_the_script_prints_per_cent_with_intervals_and_answers(spoken, tmp_path, capsys):
    rows, answers, options = spoken
    run_script([*options, str(saved("qwen2_audio")), "--reward_funcs", "accuracy_reward"])
    printed = capsys.readouterr().out
    low, high = wilson_interval(4, 7)
    assert f"accuracy 57.1 % (95 %: {100 * low:.1f} to {100 * high:.1f} %), 7 rows\n" in printed
    assert "accuracy_low" not in printed and "\nreward/accuracy_reward 0.5714\n" in printed and "\nrows 7\n" in printed
    shown = re.findall(
        r"row (\d): (right|wrong)\n    prompt: <audio>(.*)\n    reference: (.*)\n    completion: (.*)", printed
    )
    assert [(int(number), verdict) for number, verdict, *_ in shown] == [(0, "wrong"), (1, "right"), (3, "wrong")]
    for number, _, prompt, reference, completion in shown:
        row = rows[int(number)]
        expected = row["prompt"][0]["content"], row["solution"], answers[int(number)]
        assert (prompt, reference, completion) == tuple(" ".join(text.split()) for text in expected)
    content, _ = written(tmp_path / "results")
    assert content["metrics"]["accuracy"] == pytest.approx(4 / 7) and content["metrics"]["accuracy_low"] == low


@pytest.mark.parametrize("freq", slow_but([1, 2, "epoch"], 2))
def test_evaluations_of_a_frequency_can_choose_the_best(freq, tmp_path):
    """Evaluations of the trainer have the metrics of their step, also where the callback alone would have none."""

    trainer = make_trainer(
        MultimodalGRPOTrainer, "qwen2_audio", audio_rows(2), tmp_path,
        objects={"eval_dataset": audio_rows(2)},
        eval_strategy="steps", eval_steps=1, max_steps=3, metric_for_best_model="eval_accuracy",
        greater_is_better=True, save_strategy="best", save_only_model=True,
    )  # fmt: skip
    config = EvaluationConfig(max_completion_length=2)
    before = [] if freq == "epoch" else [0]
    share = by_turn(*before, 1, 4, 2, 0)
    trainer.add_callback(GenerationEvalCallback(trainer, audio_rows(4), share, config, freq=freq))
    trainer.train()
    assert logged(trainer) == [*((0, 0.0) for _ in before), (1, 0.25), (2, 1.0), (3, 0.5)]
    assert (trainer.state.best_metric, trainer.state.best_global_step) == (1.0, 2)


@pytest.mark.parametrize(("freq", "steps"), [(2, [0, 2, 3]), ("epoch", [1, 2, 3]), (None, [3])])
def test_when_to_evaluate(freq, steps, tmp_path):
    """An epoch is a step. Without evaluations of the trainer, only the last weights are evaluated."""
    config = EvaluationConfig(max_completion_length=2)
    evaluated = {"eval_dataset": audio_rows(2), "reward_funcs": format_reward, "args": config, "freq": freq}
    trainer, _ = trained(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(2), tmp_path, evaluated, max_steps=3)
    assert [step for step, _ in logged(trainer)] == steps and len(logged(trainer, "reward")) == 3


# Processes


def launched(script: list[str], processes: int, **environment) -> str:
    command = python_command(script, processes)
    environment = python_environment(**environment)
    run = forked.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=PATIENCE)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
    return run.stdout


def written(folder: Path) -> tuple[dict, list[dict]]:
    content = json.loads((folder / "metrics.json").read_text())
    return content, Dataset.from_parquet(str(folder / "rows.parquet"), cache_dir=str(folder / "cache")).to_list()


@pytest.mark.gate
@pytest.mark.parametrize("sampling", [[], ["--num_samples", "4", "--temperature", "1.0", "--pass_at", "1", "2", "4"]])
def test_two_processes_of_the_script_find_what_one_finds(sampling, spoken, tmp_path, capsys):
    _, answers, options = spoken
    options += [str(saved("qwen2_audio")), "--batch_size", "4", *sampling]
    run_script(options)
    outputs = [capsys.readouterr().out]
    results = [written(tmp_path / "results")]
    outputs.append(launched(["examples/evaluate.py", *options], 2, ACCELERATE_USE_CPU="true"))
    results.append(written(tmp_path / "results"))
    for output in outputs:
        assert len(re.findall(r"^accuracy \d", output, re.MULTILINE)) == 1 and output.count("reference: ") == 3
    assert results[0] == results[1]
    (content, table), _ = results
    assert content["metrics"]["rows"] == 7 and [row["index"] for row in table] == list(range(7))
    if not sampling:
        assert [row["completions"] for row in table] == [[answer] for answer in answers]
        assert content["metrics"]["accuracy"] == pytest.approx(4 / 7)


@pytest.mark.slow
def test_the_script_takes_an_adapter_and_refuses_runs_apart(spoken, tmp_path):
    rows, _, options = spoken
    model, processor = load("qwen2_audio")
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    options += [str(tmp_path / "adapter"), "--max_rows", "2"]
    run_script([*options, "--reward_funcs", "trl_multimodal_rft.rewards.format_reward"])
    _, table = written(tmp_path / "results")
    own = evaluate(adapted, processor, rows[:2], format_reward, EvaluationConfig(max_completion_length=6))
    plain = evaluate(*load("qwen2_audio"), rows[:2], format_reward, EvaluationConfig(max_completion_length=6))
    assert [row["completions"] for row in table] == [row["completions"] for row in own.rows]
    assert [row["completions"] for row in table] != [row["completions"] for row in plain.rows]
    if not torch.cuda.is_available():
        with pytest.raises(AssertionError, match="ACCELERATE_USE_CPU=true"):
            launched(["examples/evaluate.py", *options], 2)


def found_by(processes: int, engine: str, folder: Path) -> list[dict]:
    switch = "ACCELERATE_USE_DEEPSPEED" if engine == "zero3" else "ACCELERATE_USE_CPU"
    script = [str(ROOT / "tests" / "distributed" / "evaluation_worker.py"), engine, str(folder)]
    launched(script, processes, **{switch: "true"})
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(processes)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Returns the results of one process."""
    return found_by(1, "ddp", tmp_path_factory.mktemp("alone"))[0]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", "zero3"])
def test_callback_on_two_processes_finds_what_it_finds_on_one(engine, alone, tmp_path):
    if engine == "zero3":
        pytest.importorskip("deepspeed")
    first, second = found_by(2, engine, tmp_path)
    assert first == second
    assert first["sharded"] and not alone["sharded"]
    assert first == {**alone, "sharded": True}
    assert first["unchanged"] and [entry["step"] for entry in first["logged"]] == [1, 2]
    assert len({tuple(row) for table in first["tables"] for row in table}) > 3
    # Two of the four rows have a sound to ablate; every rank takes part
    assert [without is not None for _, without in first["mixed"]] == [False, True, False, True]
