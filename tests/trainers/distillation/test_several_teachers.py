# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Several teachers, chosen by row: an update is that of a plain loop with each row's own teacher."""

import copy
import math

import pytest
import torch
from datasets import ClassLabel, Dataset
from helpers.distillation_runs import InjectedOurs, distill, divergence, teacher, with_rest
from helpers.encoding import extended
from helpers.families import encode
from helpers.trainer_utils import Weights, load, make_trainer, relative_difference, saved
from peft import LoraConfig, get_peft_model
from trainers.distillation.test_distillation import KINDS, completions_of, content
from transformers import Qwen2_5_VLForConditionalGeneration

from trl_multimodal_rft import MultimodalDistillationTrainer
from trl_multimodal_rft.trainers.distillation import teacher_loading


DISTANCES = {"near": 0.05, "far": 0.2}  # of two teachers from the student


def rows_with(kind, names):
    """Returns a row for each name of a teacher, or for `None`."""
    rows = KINDS[kind][1](len(names))
    transform = rows.format["format_kwargs"].get("transform", lambda batch: batch)
    numbered = rows.with_format(None).add_column("number", [*range(len(names))])
    return numbered.with_transform(
        lambda batch: {**transform(batch), "teacher_id": [names[i] for i in batch["number"]]}
    )


def teachers(kind):
    return {name: teacher(KINDS[kind][0], distance) for name, distance in DISTANCES.items()}


def one_step(kind, names, objects=None, **options):
    objects = {"teacher_model": None, "teacher_models": teachers(kind), **(objects or {})}
    options = {"max_steps": 1, "learning_rate": 1.0, "per_device_train_batch_size": 4 * len(names), **options}
    return distill(InjectedOurs, KINDS[kind][0], rows_with(kind, names), objects, **options)


def plain_loop(run, kind, names, *, beta, temperature=1.0, top_k=None):
    """
    Returns the mean divergence of each teacher's tokens, the share of tokens by teacher, and the gradients of the
    mean over all of them, from forwards of single completions in float64.
    """
    student, processor = load(KINDS[kind][0])
    student = copy.deepcopy(student).double()
    models = teachers(kind)
    contents = [content(row, kind) for row in KINDS[kind][1](len(names))]
    sums = dict.fromkeys(models, 0.0)
    counts = dict.fromkeys(models, 0)
    for i, ids in enumerate(completions_of(run, kind, contents)):
        name = names[i // 4]
        if name is None:
            continue
        inputs = encode(processor, [{"role": "user", "content": contents[i // 4]}])
        inputs = extended(inputs, torch.tensor(ids))
        inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
        log_probs = []
        for model in (student, models[name].double()):
            with torch.set_grad_enabled(model is student):
                logits = model(**inputs).logits[0, -len(ids) - 1 : -1]
                log_probs.append((logits / temperature).log_softmax(-1))
        log_probs = log_probs if top_k is None else with_rest(*log_probs, top_k)
        sums[name] = sums[name] + divergence(*log_probs, beta).sum()
        counts[name] += len(ids)
    n_tokens = sum(counts.values())
    (sum(sums.values()) / n_tokens).backward()
    gradients = {name: p.grad.float() for name, p in student.named_parameters() if p.grad is not None}
    means = {name: sums[name].item() / counts[name] for name in models if counts[name]}
    return means, {name: count / n_tokens for name, count in counts.items()}, gradients


def assert_step(run, kind, names, **options):
    means, shares, gradients = plain_loop(run, kind, names, **options)
    logs = run.history[0]
    for name in DISTANCES if run.trainer.args.gradient_accumulation_steps == 1 else ():
        assert logs[f"teacher/{name}/token_frac"] == pytest.approx(shares[name])
        assert logs.get(f"teacher/{name}/divergence") == (means.get(name) and pytest.approx(means[name], rel=1e-4))
    loss = sum(shares[name] * mean for name, mean in means.items())
    assert logs["loss"] == pytest.approx(loss, rel=1e-4) and loss > 1e-4
    update = {name: run.update[name] for name in gradients}
    rate = run.trainer.args.learning_rate
    assert relative_difference({name: -rate * value for name, value in gradients.items()}, update) <= 1e-5


MIXED = ["near", None, "far"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{"beta": 0.5, "temperature": 0.8}, {"beta": 1.0, "loss_top_k": 5}], ids=str)
def test_each_row_learns_from_its_own_teacher(kind, options):
    run = one_step(kind, MIXED, **options)
    assert all(run.trainer.scored_packed)
    options = {"top_k" if key == "loss_top_k" else key: value for key, value in options.items()}
    assert_step(run, kind, MIXED, **options)


MICRO_BATCHES = [
    (["near", "far", None], {}),
    (["far", "far", None], {"max_tokens_per_microbatch": 60}),
    ([None, "near", None], {"packing": "padded"}),
]


@pytest.mark.parametrize(("names", "options"), MICRO_BATCHES, ids=str)
def test_micro_batches_with_one_teacher_or_none(names, options):
    """One row in each of three micro-batches."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, **options}
    assert_step(one_step("image", names, beta=0.5, **options), "image", names, beta=0.5)


def test_only_the_teacher_that_scores_is_on_the_device():
    run = one_step("image", MIXED, beta=0.5, offload_during_generation=True)
    named = run.trainer._teachers.named
    sizes = [{p.untyped_storage().nbytes() for p in each.model.parameters()} for each in named]
    assert sizes == [{0}, {0}]
    with named[1].on_device():
        assert 0 not in {p.untyped_storage().nbytes() for p in named[1].model.parameters()}
        assert {p.untyped_storage().nbytes() for p in named[0].model.parameters()} == {0}
    assert_step(run, "image", MIXED, beta=0.5)


def test_resumed_run_is_the_run(tmp_path):
    """Bit for bit, in the middle of a generation batch."""
    options = {"teacher_models": teachers("image"), "max_steps": 3, "optim": "adamw_torch", "reward": None}
    options |= {"per_device_train_batch_size": 4, "steps_per_generation": 3, "shuffle_dataset": False}
    options["objects"] = {"teacher_models": options.pop("teacher_models")}

    def trainer(folder, **more):
        rows = rows_with("image", MIXED)
        return make_trainer(MultimodalDistillationTrainer, "qwen2_5_vl", rows, tmp_path / folder, **options, **more)

    whole = trainer("whole", save_strategy="steps", save_steps=1)
    whole.train()
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_teachers_by_name(tmp_path):
    name = str(saved("qwen2_5_vl"))
    objects = {"teacher_models": {"near": teacher("qwen2_5_vl")}}
    run = one_step("image", ["near", "itself"], objects, teacher_models={"itself": name}, beta=0.5)
    assert run.history[0]["teacher/itself/divergence"] == pytest.approx(0, abs=1e-6)
    assert run.history[0]["teacher/near/divergence"] > 1e-4
    run.trainer.create_model_card()


def test_a_teacher_is_the_folder_of_an_adapter(tmp_path):
    """It teaches what its merged weights teach."""
    base = str(saved("qwen2_5_vl"))
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(Qwen2_5_VLForConditionalGeneration.from_pretrained(base), lora)
    adapted.save_pretrained(tmp_path / "adapter")
    losses = []
    by_name = {"teacher_models": {"tuned": str(tmp_path / "adapter")}}
    for options, passed in ((by_name, {}), ({}, {"tuned": adapted.merge_and_unload()})):
        objects = {"teacher_models": {"near": teacher("qwen2_5_vl"), **passed}}
        run = one_step("image", ["near", "tuned"], objects, beta=0.5, **options)
        losses.append([run.history[0][name] for name in ("loss", "teacher/tuned/divergence")])
    assert min(losses[0]) > 1e-4 and losses[0] == pytest.approx(losses[1], rel=1e-4)


REFUSED = {
    "unknown": (
        ["near", "fra"],
        {},
        {},
        r"row 1, column 'teacher_id': 'fra' is none of the teachers \['near', 'far'\]",
    ),
    "no teachers": (["near"], {"teacher_models": None, "teacher_model": teacher}, {}, "row 0 has a 'teacher_id', but"),
    "two sources": (["near"], {"teacher_model": teacher}, {}, "`teacher_models` and `teacher_model` name teachers"),
    "average": (["near"], {}, {"self_teacher": "ema"}, "`teacher_models` and `self_teacher` name teachers"),
    "address": (
        ["near"],
        {"teacher_models": {"a": "http://localhost:1"}},
        {},
        "an address for 'a'; give addresses in",
    ),
    "empty": (["near"], {"teacher_models": {}}, {"teacher_models": {}}, "`teacher_models` is empty"),
    "server": (
        ["near"],
        {},
        {"teacher_models": {"a": "http://localhost:1"}},
        "set `loss_top_k`, at most the server's",
    ),
    "number": (["near"], {}, {"teacher_models": {"a": 3}}, "`teacher_models` has 'a': 3; give each teacher as a name"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    names, objects, options, message = REFUSED[name]
    objects = {key: value("qwen2_5_vl") if callable(value) else value for key, value in objects.items()}
    with pytest.raises(ValueError, match=message):
        one_step("image", names, objects, **options)


def ids_in_rows(ids, **more):
    return Dataset.from_dict({"prompt": [f"Is there a bird? {i}" for i in range(len(ids))], "teacher_id": ids, **more})


def text_trainer(folder, rows, objects=None, **options):
    objects = {"teacher_models": teachers("image"), **(objects or {})}
    options = {"num_generations": 2, "per_device_train_batch_size": 2, "shuffle_dataset": False, **options}
    return make_trainer(InjectedOurs, "qwen2_5_vl", rows, folder, reward=None, objects=objects, **options)


GOOD = ["near", "far", None]
CLASSES = ClassLabel(names=["far", "near", "other"])
IDS = {
    "all wrong ids": (
        ["near", "b", "far", "a", "b"],
        {},
        r"'b' in 2 of 5 rows, first in row 1; 'a' in 1 of 5 rows, fi",
    ),
    "selected": (ids_in_rows(["x", "near", "far", "x"]).select([2, 1, 3]), {}, "'x' in 1 of 3 rows, first in row 2"),
    "classes": (ids_in_rows([1, 0, -1, 2]).cast_column("teacher_id", CLASSES), {}, "'other' in 1 of 4 rows"),
    "held out": (GOOD, {"eval_dataset": ids_in_rows(["near", "X"])}, "`eval_dataset`, column 'teacher_id': 'X' in 1"),
    "splits": (
        GOOD,
        {"eval_dataset": {"a": ids_in_rows(GOOD), "b": ids_in_rows(["B"])}},
        r"`eval_dataset\['b'\]`, column 'teacher_id': 'B' in 1 of 1",
    ),
    "no column": (ids_in_rows(GOOD).remove_columns("teacher_id"), {}, "`train_dataset` has no column 'teacher_id'"),
    "no column of the format": (ids_in_rows(GOOD).with_format(None, columns=["prompt"]), {}, "no column 'teacher_id'"),
    "no column of a stream": (
        ids_in_rows(GOOD).remove_columns("teacher_id").to_iterable_dataset(),
        {},
        r"no column 'teacher_id', .* only \['prompt'\]",
    ),
    "no name": ([None, None], {}, "no row names its teacher; write one of"),
    "no teachers": (
        [None, "near"],
        {"teacher_models": None, "teacher_model": teacher},
        "`train_dataset`: row 1 has a 'teacher_id', but there are no teachers",
    ),
}


@pytest.mark.parametrize("name", IDS)
def test_ids_are_checked_before_anything_is_loaded(name, tmp_path, monkeypatch):
    monkeypatch.setattr(teacher_loading, "_load", lambda *_: pytest.fail("a teacher is loaded"))
    rows, objects, message = IDS[name]
    objects = {key: value("qwen2_5_vl") if callable(value) else value for key, value in objects.items()}
    with pytest.raises(ValueError, match=message):
        text_trainer(tmp_path, ids_in_rows(rows) if isinstance(rows, list) else rows, objects)


def test_a_teacher_without_rows_is_a_warning(tmp_path, caplog):
    rows = ids_in_rows([1, -1, 1, 1]).cast_column("teacher_id", CLASSES)
    trainer = text_trainer(tmp_path, rows, max_steps=2)
    assert "no row names the teachers ['far'] in the column 'teacher_id'" in caplog.text
    trainer.train()
    assert trainer.state.log_history[0]["loss"] > 1e-4
    assert trainer.state.log_history[1]["loss"] == 0


@pytest.mark.parametrize("options", [{}, {"beta": 1.0, "loss_top_k": 5}], ids=str)
def test_a_batch_without_teacher_changes_nothing(options, tmp_path):
    """With held-out rows of the same kind; the next batches go on, and no metric is NaN."""
    rows = ids_in_rows([None, "near", None, "far"])
    held_out = {"eval_dataset": ids_in_rows([None, None, "near"]), "teacher_models": teachers("image")}
    options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 1, **options}
    trainer = text_trainer(tmp_path, rows, held_out, **options)
    weights = Weights()
    trainer.add_callback(weights)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["loss"] > 0 for log in logs] == [False, True, False, True]
    moved = [any((weights[i + 1][key] != value).any() for key, value in weights[i].items()) for i in range(3)]
    assert moved == [False, True, False]
    numbers = [value for log in trainer.state.log_history for value in log.values() if isinstance(value, float)]
    assert not any(map(math.isnan, numbers))


def test_rows_without_teacher_leave_the_scale_of_others(tmp_path):
    """Accumulated with them, the gradient is the mean over the tokens that have a teacher, as without these rows."""
    named = one_step("image", ["near", "far"], beta=0.5)
    parts = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4}
    mixed = one_step("image", ["near", "far", None, None], beta=0.5, **parts)
    assert_step(mixed, "image", ["near", "far", None, None], beta=0.5)
    assert named.history[0]["loss"] > 1e-4


@pytest.mark.parametrize("kind", ["one", "several"])
def test_weights_of_a_teacher_are_finite(kind, tmp_path):
    broken = teacher("qwen2_5_vl")
    with torch.no_grad():
        broken.lm_head.weight[3, 5] = math.nan
    objects = {"one": {"teacher_models": None, "teacher_model": broken}}
    objects["several"] = {"teacher_models": {**teachers("image"), "far": broken}}
    rows = ids_in_rows(GOOD) if kind == "several" else ids_in_rows(GOOD).remove_columns("teacher_id")
    label = "the teacher 'far'" if kind == "several" else "the teacher"
    with pytest.raises(ValueError, match=f"Weights of {label} aren't finite, such as '.*weight'"):
        text_trainer(tmp_path, rows, objects[kind])


def test_another_vocabulary_is_refused():
    other = load("qwen2_audio")[0]
    with pytest.raises(ValueError, match="`teacher_models`, 'far': The teacher .* can't score completions of the st"):
        one_step("image", MIXED, {"teacher_models": {**teachers("image"), "far": other}})


class Served:
    """Stands for a server with a teacher, whose top tokens are those of the model in this process."""

    def __init__(self, name, model, processor):
        self.name = name
        self.model = model
        self.processor = processor

    def requests_for(self, prompts):
        return [*prompts]

    def top_k(self, prompts, completions, width, k):
        ids = torch.zeros(len(prompts), width, k, dtype=torch.long)
        logps = torch.zeros(len(prompts), width, k)
        for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            sequence = torch.cat([prompt.input_ids, torch.tensor(completion)])
            positions = torch.cat([prompt.position_ids, prompt.positions_after(len(completion))], dim=-1)
            with torch.no_grad():
                outputs = self.model(input_ids=sequence[None], position_ids=positions, **prompt.media)
            logits = outputs.logits[0, -len(completion) - 1 : -1]
            top = logits.log_softmax(-1).topk(k, dim=-1)
            ids[i, : len(completion)] = top.indices
            logps[i, : len(completion)] = top.values
        return ids, logps


def test_a_server_among_models(monkeypatch):
    served = Served("served", teacher("qwen2_5_vl", DISTANCES["far"]), load("qwen2_5_vl")[1])
    monkeypatch.setattr("trl_multimodal_rft.trainers.distillation.teachers.server_teacher", lambda *_: served)
    objects = {"teacher_models": {"near": teacher("qwen2_5_vl", DISTANCES["near"])}}
    address = {"teacher_models": {"far": "http://localhost:1"}}
    run = one_step("image", MIXED, objects, beta=1.0, loss_top_k=5, **address)
    assert_step(run, "image", MIXED, beta=1.0, top_k=5)
