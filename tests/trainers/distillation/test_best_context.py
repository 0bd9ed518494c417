# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A student that learns from itself, as it reads with the best other completion of the group behind the question."""

import copy

import pytest
import torch
from helpers.distillation_runs import InjectedOurs, distill, divergence
from helpers.encoding import extended
from helpers.families import encode
from helpers.tools import look_up
from helpers.trainer_utils import load, make_trainer, relative_difference
from trainers.distillation.test_distillation import KINDS, completions_of, content

from trl_multimodal_rft import MultimodalDistillationTrainer
from trl_multimodal_rft.trainers.distillation.best import _CONTEXT, _with_answer


BEST = {"self_teacher": "current(shows_best=True)"}


def reward(completion_ids, **kwargs):
    """Up to 4, and 0 for many."""
    return [float(max(0, len(ids) - 4)) for ids in completion_ids]


def one_step(kind, objects=None, **options):
    objects = {"teacher_model": None, "reward_funcs": reward, **(objects or {})}
    options = {"max_steps": 1, "learning_rate": 1.0, "per_device_train_batch_size": 8, **BEST, **options}
    return distill(InjectedOurs, KINDS[kind][0], KINDS[kind][1](2), objects, **options)


def best_others(ids, min_reward):
    """Returns for each completion of groups of 4 the index of the best other one, or `None`."""
    rewards = reward(ids)
    chosen = []
    for i in range(len(ids)):
        group = range(i - i % 4, i - i % 4 + 4)
        others = [j for j in group if j != i and rewards[j] >= min_reward]
        chosen.append(min(others, key=lambda j: (-rewards[j], j)) if others else None)
    return chosen


def plain_loop(run, kind, *, beta, min_reward=1.0):
    """Returns the mean divergence, its gradients, and the share of taught completions, one by one in float64."""
    student, processor = load(KINDS[kind][0])
    student = copy.deepcopy(student).double()
    contents = [content(row, kind) for row in KINDS[kind][1](2)]
    ids = completions_of(run, kind, contents)
    chosen = best_others(ids, min_reward)
    total = 0.0
    n_tokens = 0
    for i, (own, other) in enumerate(zip(ids, chosen, strict=True)):
        if other is None:
            continue
        answer = processor.tokenizer.decode(ids[other], skip_special_tokens=True)
        told = [*contents[i // 4], {"type": "text", "text": _CONTEXT.format(answer=answer)}]
        log_probs = []
        for blocks, is_student in ((contents[i // 4], True), (told, False)):
            inputs = extended(encode(processor, [{"role": "user", "content": blocks}]), torch.tensor(own))
            inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
            with torch.set_grad_enabled(is_student):
                log_probs.append(student(**inputs).logits[0, -len(own) - 1 : -1].log_softmax(-1))
        total = total + divergence(*log_probs, beta).sum()
        n_tokens += len(own)
    (total / n_tokens).backward()
    gradients = {name: p.grad.float() for name, p in student.named_parameters() if p.grad is not None}
    return total.item() / n_tokens, gradients, sum(each is not None for each in chosen) / len(ids)


CASES = [("image", {"beta": 0.5}, 1.0), ("audio", {"beta": 1.0}, 3.0), ("video", {"beta": 0.0}, 1.0)]


@pytest.mark.parametrize(("kind", "options", "min_reward"), CASES)
def test_update_is_that_of_a_plain_loop(kind, options, min_reward):
    setting = {"self_teacher": f"current(shows_best=True, min_reward={min_reward})"}
    run = one_step(kind, **options, **setting)
    assert all(run.trainer.scored_packed)
    loss, gradients, taught = plain_loop(run, kind, **options, min_reward=min_reward)
    logs = run.history[0]
    assert logs["loss"] == pytest.approx(loss, rel=1e-4) and loss > 1e-4
    assert logs["teacher/taught_frac"] == pytest.approx(taught) and 0 < taught < 1 + (min_reward == 1)
    update = {name: run.update[name] for name in gradients}
    assert relative_difference({name: -value for name, value in gradients.items()}, update) <= 1e-5


def test_the_student_never_sees_the_context():
    run = one_step("image")
    part = run.trainer._buffered_inputs[0]
    student_ids = {tuple(prompt.input_ids.tolist()) for prompt in part.prompts}
    plain = {
        tuple(
            encode(run.trainer.processing_class, [{"role": "user", "content": content(row, "image")}])["input_ids"][
                0
            ].tolist()
        )
        for row in KINDS["image"][1](2)
    }
    assert student_ids == plain
    assert all(
        len(told) > len(own) for told, own in zip(part.teacher.prompts, part.prompts, strict=True) if told is not own
    )


def test_a_group_without_a_success_is_not_trained_on():
    run = one_step("image", {"reward_funcs": lambda completion_ids, **kwargs: [0.5] * len(completion_ids)})
    assert run.history[0]["teacher/taught_frac"] == 0 and run.history[0]["loss"] == 0
    assert not any(update.any() for update in run.update.values())


def test_a_completion_without_a_reward_is_never_shown():
    """Also where a reward of 0 would be the best of the group."""

    def mostly_none(completion_ids, **kwargs):
        return [None if i % 4 < 3 else -0.5 for i in range(len(completion_ids))]

    run = one_step("image", {"reward_funcs": mostly_none}, self_teacher="current(shows_best=True, min_reward=-1.0)")
    assert run.history[0]["teacher/taught_frac"] == pytest.approx(3 / 4)


def test_the_context_is_behind_the_last_question():
    """Of a conversation, whose messages stay as they are."""
    turns = [("user", "A"), ("assistant", "B"), ("user", "C")]
    prompt = [{"role": role, "content": text} for role, text in turns]
    told = _with_answer(prompt, "D")
    assert [message["content"] for message in told] == ["A", "B", "C" + _CONTEXT.format(answer="D")]
    assert [message["content"] for message in prompt] == ["A", "B", "C"]


def test_resumed_run_is_the_run(tmp_path):
    """Bit for bit, in the middle of a generation batch, with an average as the teacher."""
    options = {"objects": {"teacher_model": None, "reward_funcs": reward_of_any}, "max_steps": 3, "reward": None}
    options |= {"per_device_train_batch_size": 4, "steps_per_generation": 2, "optim": "adamw_torch"}
    options |= {"self_teacher": "ema(rate=0.3, shows_best=True, min_reward=0)"}

    def trainer(folder, **more):
        rows = KINDS["image"][1](4)
        return make_trainer(MultimodalDistillationTrainer, "qwen2_5_vl", rows, tmp_path / folder, **options, **more)

    whole = trainer("whole", save_strategy="steps", save_steps=1)
    whole.train()
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    whole.create_model_card()
    assert "which sees the best other completion of the group" in (tmp_path / "whole" / "README.md").read_text()


def reward_of_any(completions, **kwargs):
    return [float(len(completion[0]["content"]) % 5) for completion in completions]


REFUSED = {
    "no rewards": ({"reward_funcs": None}, {}, "needs `reward_funcs`, which choose the best completion"),
    "unread rewards": ({}, {"self_teacher": "current", "teacher_view": "blank"}, "`reward_funcs` have no effect wit"),
    "one completion": (
        {},
        {"num_generations": 1},
        "shows another completion of the group, but `num_generations` is 1",
    ),
    "evaluation": ({"eval_dataset": KINDS["image"][1](2)}, {"eval_strategy": "steps"}, "set `eval_strategy='no'`"),
    "tools": ({"tools": [look_up]}, {}, "shows completions of one turn; remove `tools`"),
    "min_reward alone": ({}, {"self_teacher": "ema(min_reward=2)"}, "`min_reward` of `self_teacher` has no effect"),
    "a model": ({"reward_funcs": "path/to/model"}, {}, "`reward_funcs` of distillation are functions, got 'path"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    objects, options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        one_step("image", objects, **options)
