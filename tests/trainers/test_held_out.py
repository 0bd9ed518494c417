# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A dataset for evaluation gets the checks of the training dataset before step 1, in all trainers."""

import pytest
from datasets import Dataset, IterableDataset
from helpers.families import ALL_FAMILIES
from helpers.trainer_utils import TRAINERS, InjectedOurs, image_rows, make_trainer, run, text_rows
from trl.chat_template_utils import qwen3_vl_chat_template

from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.evaluation import EvaluationConfig, GenerationEvalCallback
from trl_multimodal_rft.rewards import accuracy_reward


KINDS = ["grpo", "rloo", "ppo", "distillation", "sft", "dpo", "kto", "reward"]
SAMPLING = ["grpo", "rloo", "ppo"]
FAMILY = "qwen2_5_vl"
DEAF = "`eval_dataset`: no prompt has media, so that a model for image, video gets text alone. The columns are"


def answered(rows: Dataset) -> Dataset:
    """Rows with the answers that any trainer reads."""
    n = len(rows)
    answers = {}
    for name in ("completion", "chosen", "rejected"):
        answers[name] = [[{"role": "assistant", "content": f"A {name} bird."}]] * n
    answers |= {"label": [i % 2 == 0 for i in range(n)], "solution": ["a bird"] * n}
    for name, column in answers.items():
        rows = rows.add_column(name, column)
    return rows


TRAIN = answered(image_rows(8))
PATHS = answered(text_rows(8)).add_column("image", ["missing folder/my bird.png"] * 8)


def made(kind, test, tmp_path, train=TRAIN, **options):
    options |= {} if kind in SAMPLING else {"reward": None}
    objects = {"eval_dataset": test, **options.pop("objects", {})}
    return make_trainer(TRAINERS[kind], FAMILY, train, tmp_path, objects=objects, **options)


def test_all_trainers_are_here():
    assert {*KINDS} <= {*TRAINERS}


@pytest.mark.parametrize("kind", KINDS)
def test_first_row_is_read_before_training(kind, tmp_path):
    message = r"^`eval_dataset\['far'\]`: row 0, column 'image': .*missing folder/my bird.png"
    with pytest.raises(MediaError, match=message):
        made(kind, {"near": TRAIN, "far": PATHS}, tmp_path)
    made(kind, PATHS, tmp_path, on_media_error="skip")
    with pytest.raises(ValueError, match="^`eval_dataset` has no rows; add rows, or leave it out."):
        made(kind, TRAIN.select([]), tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["table", "transform"])
def test_deaf_evaluation_is_said_before_training(kind, form, tmp_path, caplog):
    deaf = TRAIN.remove_columns("image")
    made(kind, deaf if form == "table" else deaf.with_transform(lambda batch: batch), tmp_path)
    (warning,) = [message for message in caplog.messages if "gets text alone" in message]
    expected = DEAF if form == "table" else DEAF.replace("no prompt", "no prompt of the first batch")
    assert expected in warning and "'prompt'" in warning


@pytest.mark.parametrize("kind", SAMPLING)
def test_columns_of_rewards_are_looked_for(kind, tmp_path):
    for rows, message in (
        (TRAIN.remove_columns("solution"), "^`eval_dataset`: accuracy_reward compares with the dataset column `sol"),
        (
            TRAIN.remove_columns("solution").add_column("solution", [" "] * 8),
            "^`eval_dataset`: 'accuracy_reward' has nothing to read",
        ),
        (TRAIN.add_column("completions", ["a"] * 8), "has a column 'completions', the name under which reward"),
    ):
        with pytest.raises(ValueError, match=message):
            made(kind, rows, tmp_path, reward=accuracy_reward)


def test_stream_is_looked_at_when_it_comes(tmp_path, caplog):
    read = []

    def generate():
        for row in TRAIN.remove_columns("image").select(range(4)):
            read.append(row)
            yield row

    trainer = made("grpo", IterableDataset.from_generator(generate), tmp_path, max_steps=1)
    assert not read
    trainer.evaluate()
    assert any("`eval_dataset`: no prompt of the first batch has media" in message for message in caplog.messages)


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_dataset_that_is_passed_to_evaluate(kind, tmp_path, caplog):
    trainer = made(kind, TRAIN.select(range(4)), tmp_path)
    deaf = TRAIN.remove_columns("image").select(range(4))
    trainer.evaluate()
    trainer.evaluate(TRAIN)
    assert not [message for message in caplog.messages if "gets text alone" in message]
    trainer.evaluate(deaf)
    trainer.evaluate(deaf)
    assert len([message for message in caplog.messages if DEAF in message]) == 1
    with pytest.raises(MediaError, match="^`eval_dataset`: row 0, column 'image'"):
        trainer.evaluate(PATHS)


def test_dataset_of_a_callback(tmp_path):
    trainer = made("grpo", None, tmp_path)
    with pytest.raises(ValueError, match="^`eval_dataset`: accuracy_reward compares with the dataset column"):
        GenerationEvalCallback(trainer, TRAIN.remove_columns("solution"), accuracy_reward)
    with pytest.raises(MediaError, match="^`eval_dataset`: row 0, column 'image'"):
        GenerationEvalCallback(trainer, [*PATHS], accuracy_reward)
    GenerationEvalCallback(trainer, TRAIN, accuracy_reward)
    GenerationEvalCallback(trainer, [*PATHS], accuracy_reward, EvaluationConfig(on_media_error="skip"))


class Needy:
    def reset(self, prompt, image=None, **row):
        return None if image is None else "Look."

    def look(self) -> str:
        """Tells what is there."""
        return "a bird"


class Demanding(Needy):
    def reset(self, prompt, image, solution):
        return None


def with_tools():
    model, processor = ALL_FAMILIES["qwen3_vl"].build()
    processor.chat_template = processor.tokenizer.chat_template = qwen3_vl_chat_template
    return {"model": model, "processing_class": processor}


def test_environment_gets_the_columns_of_evaluation(tmp_path):
    train = image_rows(8).add_column("solution", ["a"] * 8)
    objects = {**with_tools(), "environment_factory": Demanding, "eval_dataset": train.remove_columns("solution")}
    with pytest.raises(TypeError, match="`Demanding.reset` can't be called with the columns"):
        make_trainer(InjectedOurs, "qwen3_vl", train, tmp_path, objects=objects)


@pytest.mark.parametrize("rows", [text_rows, image_rows])
def test_environments_without_media_are_named(rows, caplog):
    run(InjectedOurs, "qwen3_vl", rows(8), max_steps=2, objects={**with_tools(), "environment_factory": Needy})
    warnings = [message for message in caplog.messages if "The environments: no prompt of the first batch" in message]
    assert len(warnings) == (rows is text_rows)
