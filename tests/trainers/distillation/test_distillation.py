# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The distillation trainer: TRL's updates on text and images, and those of the equations on audio and video."""

import functools
import itertools
from itertools import product

import numpy as np
import PIL.Image
import pytest
import torch
from datasets import Dataset
from helpers.chats import image, video
from helpers.distillation_runs import CallingTRL, InjectedOurs, InjectedTRL, distill, plain_step, teacher
from helpers.families import encode
from helpers.marks import slow_but
from helpers.samplers import pseudo_random
from helpers.tools import Calling, look_up, with_tools
from helpers.trainer_utils import (
    assert_equal,
    audio_rows,
    image_rows,
    load,
    make_trainer,
    norm,
    relative_difference,
    saved,
    sound,
    text_rows,
    video_rows,
)
from peft import LoraConfig, get_peft_model

from trl_multimodal_rft import MultimodalDistillationTrainer
from trl_multimodal_rft.data.reading.refs import MediaError


SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
OPTIONS = {
    "reverse": {},
    "forward": {"beta": 0.0},
    "jsd": {"beta": 0.5},
    "temperature": {"beta": 0.3, "temperature": 0.7},
    "accumulation": {**SPLIT, "beta": 0.5},
    "checkpointing": {**SPLIT, "gradient_checkpointing": True},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 6},
}


@pytest.mark.parametrize(
    ("rows", "name"),
    [*((image_rows, name) for name in OPTIONS), *slow_but(((text_rows, n) for n in OPTIONS), (text_rows, "jsd"))],
)
def test_packed_equals_trl(rows, name):
    """Losses, updates and metrics."""
    runs = []
    for trainer_class in (InjectedTRL, InjectedOurs):
        options = dict(OPTIONS[name])
        if name == "evaluated":
            options["objects"] = {"eval_dataset": rows(6)}
        if trainer_class is InjectedOurs:
            options["packing_shuffle"] = True
        runs.append(distill(trainer_class, "qwen2_5_vl", rows(), **options))
    assert all(runs[1].trainer.scored_packed)
    assert_equal(*runs)


KINDS = {
    "audio": ("qwen2_audio", audio_rows),
    "video": ("qwen2_5_vl", video_rows),
    "image": ("qwen2_5_vl", image_rows),
}


def blank(medium, kind):
    if kind == "audio":
        return {**medium, "array": 0 * medium["array"]}
    grey = np.full_like(np.asarray(medium), 128)
    return grey if kind == "video" else PIL.Image.fromarray(grey)


def content(row, kind, question=None, blanked=False, medium=None):
    """Returns a row's turn of the user."""
    medium = row[kind] if medium is None else medium
    medium = blank(medium, kind) if blanked else medium
    block = {"type": kind, kind: medium["array"] if kind == "audio" else medium}
    return [block, {"type": "text", "text": question or row["prompt"][0]["content"]}]


def one_step(kind, n_rows=2, objects=None, **options):
    """Returns a step on 4 completions of each of some rows, and what it made of weights and metrics."""
    return one_step_on(KINDS[kind][1](n_rows), kind, objects, **options)


def one_step_on(rows, kind, objects=None, **options):
    options = {"max_steps": 1, "learning_rate": 1.0, **options}
    return distill(InjectedOurs, KINDS[kind][0], rows, objects, **options)


def completions_of(run, kind, contents):
    """Returns what the sampler gave for prompts of which each is completed 4 times."""
    prompts = [encode_ids(run.trainer.processing_class, each) for each, _ in product(contents, range(4))]
    return pseudo_random(prompts, 0, True, run.trainer._tokenizer)


def encode_ids(processor, content):
    return encode(processor, [{"role": "user", "content": content}])["input_ids"][0].tolist()


def expected(run, kind, contents, *, read=None, teaches=None, **options):
    """Returns the loss, the entropy and the gradients of a step by the equations."""
    family, _ = KINDS[kind]
    student, processor = load(family)
    ids = completions_of(run, kind, contents)
    four = [each for each, _ in product(contents, range(4))]
    read = [each for each, _ in product(read or contents, range(4))]
    return plain_step(student, teaches or teacher(family), processor, four, ids, read=read, **options)


def assert_step(run, loss, entropy, gradients):
    logs = run.history[0]
    assert logs["loss"] == pytest.approx(loss, rel=1e-4) and logs["entropy"] == pytest.approx(entropy, rel=1e-4)
    update = {name: run.update[name] for name in gradients}
    rate = run.trainer.args.learning_rate
    assert relative_difference({name: -rate * value for name, value in gradients.items()}, update) <= 1e-5
    assert loss > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_update_is_that_of_the_equations(kind):
    """With a teacher of its own, packed."""
    run = one_step(kind, beta=0.5, temperature=0.8)
    assert all(run.trainer.scored_packed)
    contents = [content(row, kind) for row in KINDS[kind][1](2)]
    assert_step(run, *expected(run, kind, contents, beta=0.5, temperature=0.8))


@pytest.mark.parametrize(
    ("kind", "side"), [("audio", "teacher_view"), ("video", "student_view"), ("image", "teacher_view")]
)
def test_student_is_its_own_teacher_under_a_view(kind, side):
    run = one_step(kind, objects={"teacher_model": None}, **{side: "blank"})
    rows = KINDS[kind][1](2)
    clean, blanked = ([content(row, kind, blanked=each) for row in rows] for each in (False, True))
    if side == "teacher_view":
        seen = clean
        read = blanked
    else:
        seen = blanked
        read = clean
    itself, _ = load(KINDS[kind][0])
    assert_step(run, *expected(run, kind, seen, read=read, teaches=itself, beta=1.0))


OWN = {"audio": ("audio", sound(0.45, seed=9)), "video": ("videos", video(4, 56, 84, seed=9)["video"])}
OWN |= {"image": ("images", image(28, 56, seed=9)["image"])}


def told_rows(kind, questions=(None, None), has_own=True):
    """Returns two rows, of which the teacher sees another medium in the first, if it has its own."""
    rows = [*KINDS[kind][1](2)]
    (column, own) = OWN[kind]
    told = [{"prompt": row["prompt"], "index": i} for i, row in enumerate(rows)]
    if any(questions):
        asked = [None if each is None else [{"role": "user", "content": each}] for each in questions]
        told = [{**row, "teacher_prompt": each} for row, each in zip(told, asked, strict=True)]
    media = {kind: [row[kind] for row in rows]}
    if has_own:
        media[f"teacher_{column}"] = [[own] if column != kind else own, None]
    dataset = Dataset.from_list(told)
    return dataset.with_transform(
        lambda batch: {**batch, **{name: [each[i] for i in batch["index"]] for name, each in media.items()}}
    )


ASKED = "Is there a bird? The answer is cat, and no dog."  # longer than the student's
TOLD = [("image", ASKED, None), ("image", None, "blank"), ("audio", ASKED, "blank")]
TOLD += [(kind, None, None) for kind in KINDS]
PRIVILEGED = [("audio", ASKED, "blank", False), ("image", ASKED, "blank", False)]


@pytest.mark.parametrize(("kind", "asked", "view", "has_own"), [*((*each, True) for each in TOLD), *PRIVILEGED])
def test_teacher_sees_media_or_a_prompt_of_its_own(kind, asked, view, has_own):
    """Media of another size, in one row, with or without a prompt, and under a view."""
    rows = told_rows(kind, (asked, None), has_own)
    run = one_step_on(rows, kind, {"teacher_model": None}, beta=0.5, teacher_view=view)
    seen = [content(row, kind) for row in rows]
    own = content(rows[0], kind, asked, view == "blank", OWN[kind][1] if has_own else None)
    itself, _ = load(KINDS[kind][0])
    options = {"read": [own, content(rows[1], kind, blanked=view == "blank")], "teaches": itself, "beta": 0.5}
    assert_step(run, *expected(run, kind, seen, **options))


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


class Watched(InjectedOurs):
    """Keeps the weights that train, before the first update and after each one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = [self.trained()]

    def trained(self):
        return {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}

    def log(self, logs, *args, **kwargs):
        if "loss" in logs:
            self.seen.append(self.trained())
        super().log(logs, *args, **kwargs)


def with_weights(model, weights):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights.get(name, parameter))
    return model


@pytest.mark.parametrize(("k", "adapter"), slow_but([(5, False), (5, True), (None, False)], (5, True)))
def test_vision_opd_is_that_of_the_paper(k, adapter):
    """
    https://huggingface.co/papers/2605.18740: the Jensen-Shannon divergence over the most likely tokens and the rest,
    or over all, from a teacher that sees the crop, whose weights are an average of the student's.
    """
    rate = 0.3
    family = "qwen2_5_vl"
    rows = told_rows("image")
    options = {"beta": 0.5, "loss_top_k": k or 0, "self_teacher": f"ema(rate={rate})", "max_steps": 3}
    objects = {"teacher_model": None, **({"peft_config": LORA} if adapter else {})}
    run = distill(Watched, family, rows, objects, learning_rate=0.3, **options)
    trainer = run.trainer
    average = None
    seen = [each for row in rows for each in [content(row, "image")] * 4]
    read = [content(rows[0], "image", medium=OWN["image"][1])] * 4 + seen[4:]
    logs = [each for each in run.history if "loss" in each]
    for step, (before, after) in enumerate(itertools.pairwise(trainer.seen)):
        average = before if step == 0 else {n: (1 - rate) * average[n] + rate * before[n] for n in before}
        student = load(family)[0]
        teaches = load(family)[0]
        if adapter:
            student, teaches = (get_peft_model(each, LORA) for each in (student, teaches))
        student = with_weights(student, before)
        teaches = with_weights(teaches, average)
        prompts = [encode_ids(trainer.processing_class, each) for each in seen]
        ids = pseudo_random(prompts, step, True, trainer._tokenizer)
        loss, _, gradients = plain_step(
            student, teaches, trainer.processing_class, seen, ids, read=read, beta=0.5, top_k=k
        )
        assert logs[step]["loss"] == pytest.approx(loss, rel=1e-3)
        moved = {name: after[name] - before[name] for name in gradients}
        assert relative_difference({n: -0.3 * value for n, value in gradients.items()}, moved) <= 1e-3
    assert max((average[n] - before[n]).abs().max() for n in before) > 1e-4


def test_the_average_takes_the_place_of_weights_that_an_engine_has_replaced(tmp_path):
    """Such as FSDP or DeepSpeed, which put other parameters into the modules, for each call of `train`."""
    options = {"objects": {"teacher_model": None}, "self_teacher": "ema(rate=0.3)", "reward": None}
    trainer = make_trainer(MultimodalDistillationTrainer, "qwen2_5_vl", image_rows(), tmp_path, **options)
    norm_layer = trainer.model.get_decoder().norm
    initial = norm_layer.weight.detach().clone()
    norm_layer.weight = torch.nn.Parameter(initial + 1)
    with trainer._teachers.single.scoring_model():
        assert torch.equal(norm_layer.weight, initial)
    assert torch.equal(norm_layer.weight, initial + 1)


BROKEN = {"no file": "missing.png", "no image": "broken.png"}


@pytest.mark.parametrize(("name", "prefetch"), [("no file", 0), ("no image", 1)])
def test_broken_medium_of_a_teacher(name, prefetch, tmp_path):
    """Ends the run with its row and column, or is skipped, as a student's."""
    (tmp_path / "broken.png").write_bytes(b"no image")
    image(28, 56)["image"].save(tmp_path / "crop.png")
    files = [str(tmp_path / (BROKEN[name] if i == 1 else "crop.png")) for i in range(8)]
    rows = image_rows().add_column("teacher_images", [[file] for file in files])
    options = {"media_prefetch": prefetch, "remove_unused_columns": True, "max_steps": 3, "shuffle_dataset": False}
    make = functools.partial(make_trainer, InjectedOurs, "qwen2_5_vl", rows, reward=None, **options)
    objects = {"teacher_model": None}
    with pytest.raises(MediaError, match=r"row 1, column 'teacher_images\[0\]'"):
        make(tmp_path / "ends", objects=objects).train()
    skips = make(tmp_path / "skips", objects=objects, on_media_error="skip", max_skipped_rows=1)
    skips.train()
    assert "teacher_images[0]" in (tmp_path / "skips" / "skipped_rows.jsonl").read_text()
    assert skips._stream.skipped.keys() == {1}


@pytest.mark.parametrize("weights", ["current", "base"])
def test_own_teacher_of_an_adapter(weights):
    """The teacher has the adapter, or is the model that it starts from."""
    rows = KINDS["image"][1](2)
    objects = {"teacher_model": None, "peft_config": LORA}
    options = {"objects": objects, "teacher_view": "blank", "self_teacher": weights, "max_steps": 2}
    run = distill(InjectedOurs, "qwen2_5_vl", rows, learning_rate=0.0, **options)
    clean, blanked = ([content(row, "image", blanked=each) for row in rows] for each in (False, True))
    student = run.trainer.accelerator.unwrap_model(run.trainer.model).eval()
    teaches = student if weights == "current" else load("qwen2_5_vl")[0]
    ids = completions_of(run, "image", clean)
    four = [[each for each, _ in product(given, range(4))] for given in (clean, blanked)]
    processor = run.trainer.processing_class
    loss, entropy, gradients = plain_step(student, teaches, processor, four[0], ids, read=four[1], beta=1.0)
    assert run.history[0]["loss"] == pytest.approx(loss, rel=1e-4)
    assert run.history[0]["grad_norm"] == pytest.approx(norm(gradients), rel=1e-4)
    assert all("lora" in name for name in gradients)


def test_several_updates_of_a_generation_batch():
    """Each has the mean over its own share of the tokens, whichever those of the batch are."""
    rows = image_rows(4)
    at_once = distill(InjectedOurs, "qwen2_5_vl", rows, per_device_train_batch_size=16, max_steps=1)
    split = distill(
        InjectedOurs,
        "qwen2_5_vl",
        rows,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=1,
        steps_per_generation=2,
        learning_rate=0.0,
    )
    # Over both updates, the shares add up
    losses = [logs["loss"] for logs in split.history if "loss" in logs]
    assert sum(losses) / 2 == pytest.approx(at_once.history[0]["loss"], rel=1e-4)


CALLS = {"max_completion_length": 200, "generation_kwargs": {"max_new_tokens": 8, "suppress_tokens": list(range(9))}}


@pytest.mark.gate
def test_tools_work_as_in_trl():
    """Tokens of their results don't count in the divergence."""
    objects = with_tools(tools=[look_up], teacher_model=teacher("qwen3_vl"))
    theirs = distill(CallingTRL, "qwen3_vl", text_rows(), objects, **CALLS)
    objects = with_tools(tools=[look_up], teacher_model=teacher("qwen3_vl"))
    options = {**CALLS, "packing_shuffle": True, "sampler": Calling}
    ours = distill(MultimodalDistillationTrainer, "qwen3_vl", text_rows(), objects, **options)
    assert theirs.history[0]["tools/call_frequency"] == 0.5
    assert_equal(theirs, ours)


SEVERAL = {"steps_per_generation": 4, "gradient_accumulation_steps": 2}
AVERAGE = {"self_teacher": "ema(rate=0.3)"}


@pytest.mark.parametrize("options", slow_but([{}, SEVERAL, {**SEVERAL, **AVERAGE}], {**SEVERAL, **AVERAGE}))
def test_resumed_run_is_the_run(tmp_path, options):
    """Bit for bit, with a view whose random numbers depend on the step, and in the middle of a generation batch."""
    objects = {"teacher_model": None}
    options = {
        **options,
        "teacher_view": "mask_patches(ratio=0.5)",
        "shuffle_dataset": True,
        "per_device_train_batch_size": 4,
    }
    options |= {"objects": objects, "max_steps": 3, "optim": "adamw_torch", "reward": None, "media_prefetch": 1}

    def trainer(folder, **more):
        class_ = MultimodalDistillationTrainer
        return make_trainer(class_, "qwen2_5_vl", image_rows(5), tmp_path / folder, **options, **more)

    whole = trainer("whole", save_strategy="steps", save_steps=1)
    whole.train()
    resumed = trainer("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    for (name, one), other in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    logs = [[each["loss"] for each in run.state.log_history if "loss" in each] for run in (whole, resumed)]
    assert logs[0] == logs[1] and len(set(logs[0])) == 3
    assert (whole.ema is None) == ("self_teacher" not in options)
    if whole.ema is not None:
        assert all(
            torch.equal(*each)
            for each in zip(*(run.ema.state_dict().values() for run in (whole, resumed)), strict=True)
        )
        assert any(
            not torch.equal(*each)
            for each in zip(whole.ema.state_dict().values(), whole.model.parameters(), strict=True)
        )


def test_table_and_card(tmp_path):
    """The table of completions has no rewards, and the card says who taught, and how."""
    options = {"log_completions": True, "teacher_view": "blank", "beta": 0.5, "loss_top_k": 8, "max_steps": 1}
    objects = {"teacher_model": None}
    class_ = MultimodalDistillationTrainer
    made = make_trainer(class_, "qwen2_5_vl", image_rows(2), tmp_path, reward=None, objects=objects, **options)
    made.train()
    (path,) = tmp_path.glob("_*/completions/*.parquet")
    table = Dataset.from_parquet(str(path))
    assert {"prompt", "completion", "image"} <= {*table.column_names} and "advantage" not in table.column_names
    made.save_model()
    made.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "the model itself, `teacher_view=blank`" in card and "2306.13649" in card
    assert "generalized Jensen-Shannon divergence over the teacher's 8 most likely tokens, `beta=0.5`" in card
    again = type(made.model).from_pretrained(tmp_path)
    for (name, one), other in zip(made.model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_teacher_by_name(tmp_path):
    name = str(saved("qwen2_5_vl"))
    options = {"teacher_model_name_or_path": name, "teacher_model_init_kwargs": {"dtype": "bfloat16"}}
    made = make_trainer(MultimodalDistillationTrainer, "qwen2_5_vl", image_rows(2), tmp_path, reward=None, **options)
    assert made.teacher_model.dtype == torch.bfloat16 and not made.teacher_model.training
    assert not made.model.training or made.model.dtype == torch.float32


SERVER = {"teacher_model_server_url": "http://localhost:1", "loss_top_k": 4}
REFUSED = {
    "whole vocabulary of a server": ({}, {**SERVER, "loss_top_k": 0}, "set `loss_top_k`"),
    "temperature of a server": ({}, {**SERVER, "temperature": 0.5}, "so set it to 1"),
    "server and name": ({}, {**SERVER, "teacher_model_name_or_path": "a/b"}, "name two teachers"),
    "server and model": ({}, SERVER, "are two teachers"),
    "address as a model": (
        {"teacher_model": "http://localhost:1"},
        {},
        "give addresses in `teacher_model_server_url`",
    ),
    "server and tools": ({"teacher_model": None, "tools": [look_up]}, SERVER, "remove `tools`"),
    "itself": ({"teacher_model": None}, {}, "would learn nothing"),
    "no adapter": ({"teacher_model": None}, {"self_teacher": "base", "teacher_view": "blank"}, "has no adapter"),
    "adapter of a teacher": ({}, {"self_teacher": "base"}, "but there is another teacher"),
    "average of a teacher": ({}, {"self_teacher": "ema"}, "but there is another teacher"),
    "average of a server": (
        {"teacher_model": None},
        {**SERVER, "self_teacher": "ema"},
        "but there is another teacher",
    ),
    "rate": ({"teacher_model": None}, {"self_teacher": "ema(rate=0.0)"}, "above 0 and at most 1"),
    "rate of no average": (
        {"teacher_model": None},
        {"self_teacher": "base(rate=0.1)"},
        "no effect without an average",
    ),
    "settings of a model": ({}, {"teacher_model_init_kwargs": {"dtype": "float32"}}, "is a model already"),
    "no view": ({}, {"teacher_view": "blanc"}, "blank"),
    "top of one": ({}, {"loss_top_k": 1, "loss_add_tail": False}, "raise `loss_top_k`"),
    "tail of all": ({}, {"loss_add_tail": False}, "no effect without `loss_top_k`"),
    "beta": ({}, {"beta": 1.5}, "beta must be in"),
    "batches": ({}, {"num_generations": 3}, "multiple of `num_generations=3`"),
    "both sizes": ({}, {"generation_batch_size": 16, "steps_per_generation": 4}, "set only one of both"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    objects, options, why = REFUSED[name]
    objects = {"teacher_model": teacher("qwen2_5_vl"), **objects}
    with pytest.raises(ValueError, match=why):
        class_ = MultimodalDistillationTrainer
        make_trainer(class_, "qwen2_5_vl", image_rows(2), tmp_path, reward=None, objects=objects, **options).train()


def test_other_teachers_are_refused(tmp_path):
    """Of other tokens, other media, or other features."""

    def error(family="qwen2_5_vl", change=lambda model, processor: None, saves=False):
        model, processor = load(family)
        change(model, processor)
        if saves:
            model.save_pretrained(tmp_path / "teacher")
            processor.save_pretrained(tmp_path / "teacher")
            model = str(tmp_path / "teacher")
        class_ = MultimodalDistillationTrainer
        objects = {"teacher_model": model}
        with pytest.raises(ValueError) as raised:
            make_trainer(class_, "qwen2_5_vl", image_rows(2), tmp_path / "run", reward=None, objects=objects)
        return str(raised.value)

    assert "it has vocab_size 371, the student 372" in error("qwen2_audio")
    assert "'qwen2_vl', the student a 'qwen2_5_vl'" in error("qwen2_vl")
    assert "`image_token_id` is 9" in error(change=lambda model, _: setattr(model.config, "image_token_id", 9))

    def other_mean(model, processor):
        processor.image_processor.image_mean = [0.1, 0.2, 0.3]

    assert "`image_mean` of its image_processor is" in error(change=other_mean, saves=True)
