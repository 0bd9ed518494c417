# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Judges and reward models on pairs: verdicts as others spell them, both orders, and metrics against slow counting."""

import functools
import json
import random
import re
from itertools import chain

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import ClassLabel, Dataset
from helpers.chats import image
from helpers.chats import turn as chat
from helpers.samplers import Wrapped
from helpers.trainer_utils import Recording, load, make_trainer, saved
from rewards.test_reward_models import alone, classifier
from rewards.test_reward_models import saved as saved_classifier
from torch import nn
from trainers.preference.test_dpo import REFUSED

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.cli.arguments import parse
from trl_multimodal_rft.data import judge_rows, write_folder
from trl_multimodal_rft.data.reading.refs import MediaError, iter_refs
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.evaluation import (
    EvaluationConfig,
    EvaluationResult,
    evaluate,
    mean_interval,
    pair_result,
    score_pairs,
    wilson_interval,
)
from trl_multimodal_rft.evaluation.result import summary
from trl_multimodal_rft.extras import evaluate as evaluate_script
from trl_multimodal_rft.rewards import RewardModel, preference_reward
from trl_multimodal_rft.rewards.calls import RowError
from trl_multimodal_rft.rewards.ready.preference import verdict_in


# Verdicts


def omni_rrm(better, final=None):
    """A completion in the form that the source's prompt asks for."""
    fields = {"score_A": 6, "score_B": 9, "better": better, "reasoning": "<think>Part 1: [[A]] or [[B]]?</think>"}
    return json.dumps({**fields, "final_verdict": f"<answer>[[{final or better}]]</answer>"})


VERDICTS = {
    "A": [
        *("A", "(A)", "**A**.", "[[A]]", "<answer>A</answer>", "<ANSWER> a </ANSWER>", "\\boxed{A}", "Assistant A"),
        *("Answer A is better.", "The answer is A", "<answer>Response 1 is better</answer>"),
        "<think>Response 2 has <answer>B</answer>.</think><answer>1</answer>",  # R1-Reward
        "<think>Total score: 31 and 28</think>\n<answer>Image 1 is better</answer>",  # LightRFT
        "Both name the bird. My final verdict: [[A]]",  # MT-Bench
        *(omni_rrm("A"), f"```json\n{omni_rrm('A')}\n```", '{"verdict": "A", "final_verdict": "A"}'),
        "<answer>A</answer> again: <answer>A</answer>, not <answer>seven</answer>",
    ],
    "B": ["b", "2", "<answer>Video 2 is better</answer>", omni_rrm("B"), "<answer>Ｂ</answer>"],
    "tie": [
        *("tie", "Tie.", "C", "[[C]]", omni_rrm("equal"), "<answer>Both are equally good</answer>"),
        "<answer>Both images are equally good</answer>",
    ],
    None: [
        *("", "A or B", "not A", "A is worse", "D", "3", "[[A]] or [[B]]", "<answer>A</answer><answer>B</answer>"),
        *("<answer></answer>", "<answer>AB</answer>", "<think>[[A]]", "<think>[[A]]</think>"),
        '{"better": "A", "reasoning": "<think>It was cut off, and [[B]]',
        '{"better": "A", "final_verdict": "<answer>[[B]]</answer>"}',
    ],
}


@pytest.mark.parametrize("verdict", VERDICTS)
def test_verdicts_as_judges_write_them(verdict):
    assert {text: verdict_in(text) for text in VERDICTS[verdict]} == dict.fromkeys(VERDICTS[verdict], verdict)


def test_references_are_verdicts():
    solution = ["A", "Image 1 is better", "<answer>2</answer>", ["A", "tie"], "C", None, np.array(["B", "A"])]
    assert preference_reward(["A"] * 7, solution=solution) == [1.0, 1.0, 0.0, 1.0, 0.0, None, 1.0]
    with pytest.raises(RowError, match="row 1, column 'solution': 'better' is no verdict; write 'A', 'B' or 'tie'"):
        preference_reward(["A", "A"], solution=["A", "better"])
    with pytest.raises(ValueError, match="the dataset column `solution`, which is missing"):
        preference_reward(["A"])


# Pairs


@functools.cache
def image_pairs(n=6):
    """Pairs about an image each, of which some are ties."""
    rows = [
        {
            "prompt": chat("user", [{"type": "image", "text": None}, {"type": "text", "text": f"What is it? {i}"}]),
            "chosen": chat("assistant", "a red bird" * (1 + i % 2)),
            "rejected": chat("assistant", f"no cat {i} <image>"),
            "images": [image(56 + 28 * (i % 2), 56, seed=i)["image"]],
            "tie": i % 3 == 2,
            "task": "sound" if i < 2 else "music",
        }
        for i in range(n)
    ]
    return Dataset.from_list(rows)


def shown(row):
    """The text of a judge's prompt, in which `<image>` stands for a medium."""
    (message,) = rows_to_messages([row])[0]["prompt"]
    return "".join(block.get("text", f"<{block['type']}>") for block in message["content"])


def test_each_pair_is_shown_in_both_orders():
    pairs = image_pairs()
    rows = judge_rows(pairs, "{question}? One: {answer_a}. Other: {answer_b} {x}")
    assert rows.column_names == ["prompt", "solution", "images", "task"] and len(rows) == 2 * len(pairs)
    assert rows["solution"][:] == ["A", "B", "A", "B", "tie", "tie"] * 2
    assert shown(rows[2]) == "<image>What is it? 1? One: a red birda red bird. Other: no cat 1 < image> {x}"
    assert shown(rows[3]) == "<image>What is it? 1? One: no cat 1 < image>. Other: a red birda red bird {x}"
    for i, row in enumerate(rows):
        assert (
            row["images"][0].tobytes() == pairs[i // 2]["images"][0].tobytes() and row["task"] == pairs[i // 2]["task"]
        )
        assert len([*iter_refs(rows_to_messages([row]))]) == 1


def test_pairs_of_other_forms():
    pictures = [image(56, 56, seed=i)["image"] for i in range(2)]
    text = {
        "prompt": "Is <image> or <image> red?",
        "chosen": "yes",
        "rejected": "no",
        "images": pictures,
        "solution": "x",
    }
    (row, other) = judge_rows(Dataset.from_list([text]), "{answer_b}|{question}|{answer_a}")
    assert shown(row) == "no|Is <image> or <image> red?|yes" and other["solution"] == "B"
    turns = [*chat("user", "Look."), *chat("assistant", "Yes?"), *chat("user", "Is it red?")]
    several = {"prompt": turns, "chosen": chat("assistant", "yes"), "rejected": chat("assistant", "no")}
    rows = judge_rows(Dataset.from_list([several]), "{question}|{answer_a}|{answer_b}")
    assert rows.column_names == ["prompt", "solution"]
    assert shown(rows[0]) == "user: Look.\nassistant: Yes?\nuser: Is it red?|yes|no"


@pytest.mark.parametrize(
    ("rows", "template", "message"),
    [
        ([{"chosen": "a", "rejected": "b"}], "", r"add \['prompt'\], or, if both completions contain the prompt"),
        ([{"prompt": "a", "chosen": "a", "rejected": "b"}], "{question}", "must contain {question}, {answer_a} and"),
        ([{"prompt": "a", "chosen": "a", "rejected": "b"}], "{answer_a}{answer_b}", "must contain {question}"),
    ],
)
def test_what_is_no_pair_is_refused(rows, template, message):
    with pytest.raises(ValueError, match=message):
        judge_rows(Dataset.from_list(rows), template)


CALLS = {"calls", "calls beside an empty text"}  # a judge is shown calls


@pytest.mark.parametrize("name", sorted(CALLS))
def test_calls_are_shown(name):
    row = judge_rows(Dataset.from_list([REFUSED[name][0]]), "{question}|{answer_a}|{answer_b}")[0]
    assert "{'type': 'function'}" in shown(row)


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - CALLS))
def test_pairs_are_checked_as_those_of_dpo(name):
    readers = [judge_rows] + [functools.partial(score_pairs, lambda **kwargs: [0.0] * 2)] * (name != "thoughts")
    for read in readers:
        with pytest.raises(ValueError, match="^row 0, column '(prompt|chosen|rejected)"):
            read(Dataset.from_list([REFUSED[name][0]]))


@pytest.mark.parametrize("tie", [None, False, 0, 0.0, float("nan"), True, 1, "False", "yes", "so", 2, b"1"], ids=repr)
def test_ties_are_truth_values(tie):
    rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c", "tie": tie}])
    readers = [lambda rows: judge_rows(rows)["solution"][0] == "tie"]
    readers += [lambda rows: score_pairs(lambda **kwargs: [1.0, 0.0], rows).rows[0]["tie"]]
    for read in readers:
        if tie in ("so", 2, b"1"):
            with pytest.raises(ValueError, match=re.escape(f"row 0, column 'tie': is {tie!r} of type ")):
                read(rows)
        else:
            assert read(rows) == (tie in (True, 1, "yes"))


@pytest.mark.parametrize("names", [["yes", "no"], ["no", "yes"]])
def test_classes_are_ties_by_their_names(names):
    rows = Dataset.from_dict({"prompt": ["a"] * 2, "chosen": ["b"] * 2, "rejected": ["c"] * 2, "tie": [0, 1]})
    rows = rows.cast_column("tie", ClassLabel(names=names))
    assert [solution == "tie" for solution in judge_rows(rows)["solution"][::2]] == [name == "yes" for name in names]
    scored = score_pairs(lambda **kwargs: [1.0, 0.0] * 2, rows).rows
    assert [row["tie"] for row in scored] == [name == "yes" for name in names]


class Judges(Wrapped):
    """Writes the verdict of a rule, which reads the prompt."""

    def __call__(self, model, prompts, **options):
        texts = [self.tokenizer.decode(prompt.input_ids) for prompt in prompts]
        return [self.encoded(f"<answer>{self.rule(text)}</answer>") for text in texts], None


class PrefersTheFirst(Judges):
    rule = staticmethod(lambda text: "A")


class PrefersBirds(Judges):
    rule = staticmethod(lambda text: "A" if text.index("bird") < text.index("no cat") else "B")


class Trainer(Recording, MultimodalGRPOTrainer):
    pass


@pytest.mark.parametrize(("judge", "earned"), [(PrefersTheFirst, 0.5), (PrefersBirds, 1.0)])
def test_grpo_rewards_no_position(judge, earned, tmp_path):
    """In the rows of pairs, through the trainer, with the reward by its name."""
    rows = judge_rows(image_pairs().filter(lambda tie: not tie, input_columns="tie"))
    options = {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 2, "self_check": False}
    trainer = make_trainer(Trainer, "qwen2_5_vl", rows, tmp_path, reward="preference_reward", **options)
    trainer.sampler = judge(trainer)
    trainer.train()
    assert len(trainer.draws) == 2
    assert torch.cat([draw.rewards for draw in trainer.draws]).mean() == earned


# Metrics of judges


SPELLED = {"A": "<answer>A</answer>", "B": "[[B]]", "tie": "equal", None: "I don't know"}


def judged(verdicts, solutions, **options):
    """An evaluation of a judge's verdicts on judge rows."""
    args = EvaluationConfig(num_samples=len(verdicts[0]), temperature=1.0, confidence=0.9, **options)
    rows = [
        {
            "index": i,
            "prompt": "?",
            "completions": [SPELLED[each] for each in row],
            "extracted_answers": list(map(str, row)),
            "correct": [each == right for each in row],
            "completion_lengths": [i + 1] * len(row),
            "truncated": [False] * len(row),
            "reward/preference_reward": [float(each == right) for each in row],
            "solution": right,
            "task": f"t{i // 2 % 2}",
        }
        for i, (row, right) in enumerate(zip(verdicts, solutions, strict=True))
    ]
    settings = {**vars(args), "reward_funcs": ["preference_reward"]}
    return EvaluationResult({}, rows, settings)


@pytest.mark.parametrize("n", [1, 3])
def test_metrics_are_those_of_slow_counting(n):
    generator = random.Random(n)
    kinds = [("A", "B"), ("A", "B"), ("tie", "tie")]
    solutions = [*chain.from_iterable(generator.choice(kinds) for _ in range(40))]
    verdicts = [generator.choices([*SPELLED], k=n) for _ in solutions]
    result = pair_result(judged(verdicts, solutions, group_by="task"))
    found = result.metrics
    pairs = [(i, i + 1) for i in range(0, len(solutions), 2)]
    right = [[verdict == solutions[i] for verdict in verdicts[i]] for i in range(len(solutions))]
    shares = [(sum(right[i]) + sum(right[j])) / (2 * n) for i, j in pairs]
    both = [np.mean([a and b for a, b in zip(right[i], right[j], strict=True)]) for i, j in pairs]
    flips = [
        np.mean([a == b and a in ("A", "B") for a, b in zip(verdicts[i], verdicts[j], strict=True)]) for i, j in pairs
    ]
    decided = [share for share, (i, _) in zip(shares, pairs, strict=True) if solutions[i] != "tie"]
    assert 0 < np.mean(flips) < 1 and 0 < np.mean(both) < np.mean(shares) and 0 < len(decided) < 40
    for name, values in (("accuracy", shares), ("accuracy_without_ties", decided), ("accuracy/t0", shares[::2])):
        ends = np.clip(mean_interval(values, 0.9), 0, 1)
        assert [found[f"{name}{end}"] for end in ("", "_low", "_high")] == pytest.approx([np.mean(values), *ends])
    for name, values in (("consistent_accuracy", both), ("flips", flips)):
        ends = wilson_interval(int(sum(values)), 40, 0.9) if n == 1 else np.clip(mean_interval(values, 0.9), 0, 1)
        assert [found[f"{name}{end}"] for end in ("", "_low", "_high")] == pytest.approx([np.mean(values), *ends])
    flat = [verdict for row in verdicts for verdict in row]
    assert found["predicted_ties"] == pytest.approx(flat.count("tie") / len(flat))
    assert found["unreadable"] == pytest.approx(flat.count(None) / len(flat))
    assert found["first_preferred"] == pytest.approx(flat.count("A") / (flat.count("A") + flat.count("B")))
    assert (found["rows"], found["completion_length"]) == (40, 40.5)
    assert result.rows[1]["verdicts"] == [*verdicts[2], *verdicts[3]] and result.rows[1]["index"] == 1


def test_pairs_with_an_unreadable_order_are_left_out():
    result = judged([["A"]] * 6, ["A", "B"] * 3)
    result.metrics["skipped_rows"] = 2
    result.skipped = {2: "gone", 3: "gone"}
    del result.rows[2:4]
    pairs = pair_result(result)
    assert [row["index"] for row in pairs.rows] == [0, 2] and pairs.skipped == {1: "gone"}
    assert (pairs.metrics["skipped_rows"], pairs.metrics["rows"], pairs.metrics["flips"]) == (1, 2, 1.0)


def test_pairs_without_a_score_are_left_out_of_accuracies():
    """In the first or the second order. Verdicts count, as they need no score."""
    result = judged([["A"], ["B"]] * 4, ["A", "B"] * 4)
    result.rows[0]["correct"] = result.rows[3]["correct"] = [None]
    found = pair_result(result).metrics
    assert found["accuracy"] == found["consistent_accuracy"] == 1.0 and found["flips"] == 0.0
    assert found["consistent_accuracy_low"] == wilson_interval(2, 2, 0.9)[0]
    assert (found["rows"], found["scored_rows"]) == (4, 2)


def test_tools_of_a_judge_count_in_both_orders():
    """Also environments that fail in the second order alone."""
    result = judged([["A"]] * 4, ["A", "B"] * 2)
    names = ("tool_calls", "tool_failures", "unparsed_calls", "environment_failures", "ended_by")
    for i, row in enumerate(result.rows):
        row |= dict(zip(names, ([2], [1], [0], ["lost" if i == 1 else None], ["turns"]), strict=True))
    measured = pair_result(result).metrics
    assert measured["tools/call_frequency"] == 2 and measured["tools/failure_frequency"] == 0.5
    assert measured["tools/environment_failures"] == 1 and measured["tools/ended_by_turns"] == 1


def test_a_judge_that_prefers_a_position_flips():
    model, processor = load("qwen2_5_vl")
    head = nn.Linear(model.lm_head.in_features, model.lm_head.out_features)
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    (token,) = processor.tokenizer("A")["input_ids"]
    with torch.no_grad():
        head.bias[token] = 1.0
    model.set_output_embeddings(head)
    pairs = image_pairs()
    config = EvaluationConfig(max_completion_length=1)
    found = pair_result(evaluate(model, processor, judge_rows(pairs), preference_reward, config)).metrics
    assert (found["flips"], found["consistent_accuracy"], found["first_preferred"]) == (1.0, 0.0, 1.0)
    assert found["accuracy"] == pytest.approx(1 / 3) and found["accuracy_without_ties"] == 0.5
    assert found["rows"] == 6 and found["predicted_ties"] == found["unreadable"] == 0


# Metrics of reward models


def expected_scores(pairs):
    model, processor = classifier()
    scores = []
    for row in pairs:
        picture = {"type": "image", "image": row["images"][0]}
        words = {"type": "text", "text": row["prompt"][0]["content"][1]["text"]}
        prompt = chat("user", [picture, words])
        scores.append(
            [
                alone(model, processor, prompt + chat("assistant", row[name][0]["content"]))
                for name in ("chosen", "rejected")
            ]
        )
    return scores


def test_scores_are_those_of_the_model():
    pairs = image_pairs()
    expected = expected_scores(image_pairs())
    differences = [chosen - rejected for chosen, rejected in expected]
    margin = sorted(map(abs, differences))[2] + 1e-4
    for tie_margin in (0.0, margin):
        args = EvaluationConfig(batch_size=4, group_by="task", confidence=0.9)
        result = score_pairs(RewardModel(*classifier()), pairs, args, tie_margin=tie_margin)
        found = result.metrics
        ties = pairs["tie"][:]
        assert [row["scores"] for row in result.rows] == [pytest.approx(each, abs=1e-5) for each in expected]
        equal = [abs(each) <= tie_margin for each in differences]
        right = [e if tie else d > 0 and not e for d, e, tie in zip(differences, equal, ties, strict=True)]
        assert [row["correct"] for row in result.rows] == [[each] for each in right]
        assert found["accuracy"] == pytest.approx(np.mean(right)) and found["predicted_ties"] == np.mean(equal)
        assert (found["accuracy_low"], found["accuracy_high"]) == wilson_interval(sum(right), 6, 0.9)
        shown = summary(result)
        wrong = right.index(False)
        for name, score in zip(("chosen", "rejected"), result.rows[wrong]["scores"], strict=True):
            text = f"    {name}, score {score:.4g}: {pairs[wrong][name][0]['content']}\n"
            assert text in shown[shown.index(f"row {wrong}: wrong") :] + "\n"
        decided = [each for each, tie in zip(right, ties, strict=True) if not tie]
        assert found["accuracy_without_ties"] == np.mean(decided) and found["accuracy/sound"] == np.mean(right[:2])
        assert found["margin"] == pytest.approx(
            np.mean([d for d, tie in zip(differences, ties, strict=True) if not tie]), abs=1e-5
        )
    assert 0 < sum(equal) < 6


def test_unreadable_media_and_missing_scores(tmp_path):
    image(56, 56)["image"].save(tmp_path / "0.png")
    (tmp_path / "1.png").write_bytes(b"no picture")
    pair = {"prompt": "What is it?", "chosen": "a bird", "rejected": "a cat"}
    pairs = Dataset.from_list([{**pair, "images": [str(tmp_path / f"{i}.png")]} for i in (0, 1, 0)])
    reward = RewardModel(*classifier())
    config = EvaluationConfig(on_media_error="skip")
    with pytest.raises(MediaError, match=r"1\.png"):
        score_pairs(reward, pairs)
    result = score_pairs(reward, pairs, config)
    assert [row["index"] for row in result.rows] == [0, 2] and [*result.skipped] == [1]
    assert (result.metrics["skipped_rows"], result.metrics["scored_rows"]) == (1, 2)

    def some(completions, images, **kwargs):
        return [None if len(text[-1]["content"]) > 5 else 1.0 for text in completions]

    texts = Dataset.from_list([{**pair, "images": [str(tmp_path / "0.png")], "chosen": c} for c in ("bird", "a bird")])
    found = score_pairs(some, texts).metrics
    assert (found["rows"], found["scored_rows"], found["accuracy"], found["predicted_ties"]) == (2, 1, 0.0, 1.0)


# By name


def run_script(folder, *options):
    words = [f"--dataset_name={folder / 'pairs'}", "--dataset_test_split=train", f"--output_dir={folder / 'results'}"]
    evaluate_script.main(*parse(evaluate_script.ARGUMENTS, [*words, "--pairs", *options]))
    return json.loads((folder / "results" / "metrics.json").read_text())


def test_the_command_measures_a_judge_and_a_reward_model(tmp_path, capsys):
    write_folder(image_pairs(), tmp_path / "pairs")
    judge = str(saved("qwen2_5_vl"))
    reward_model = str(saved_classifier(hf.Gemma3ForSequenceClassification))
    written = run_script(
        tmp_path, f"--model_name_or_path={judge}", "--max_completion_length=2", "--system_prompt=Judge."
    )
    assert written["metrics"]["rows"] == 6 and written["metrics"]["unreadable"] == 1.0 and written["settings"]["pairs"]
    rows = Dataset.from_parquet(str(tmp_path / "results" / "rows.parquet"), cache_dir=str(tmp_path / "cache"))
    assert rows[0]["prompt"].startswith("system: Judge.\nuser: You compare two answers")
    assert rows["verdicts"][0] == [None, None] and "flips 0.0 % (95 %: " in capsys.readouterr().out
    written = run_script(tmp_path, f"--reward_model_name_or_path={reward_model}", "--tie_margin=0.001", "--max_rows=4")
    expected = expected_scores(image_pairs().take(4))
    assert written["metrics"]["margin"] == pytest.approx(
        np.mean([a - b for a, b in expected[:2] + expected[3:]]), abs=1e-5
    )
    assert written["settings"]["tie_margin"] == 0.001 and "accuracy_without_ties" in capsys.readouterr().out
    with pytest.raises(ValueError, match="measures one of"):
        run_script(tmp_path, f"--model_name_or_path={judge}", f"--reward_model_name_or_path={reward_model}")
