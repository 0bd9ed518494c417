# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The trainer from dataset to saved model, on every kind of media."""

import asyncio
import functools
import logging
import math

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, IterableDataset
from helpers.chats import RATE, audio, audio_prompts, image, video
from helpers.families import ALL_FAMILIES, FAMILIES
from helpers.marks import slow_but
from helpers.samplers import Wrapped
from helpers.trainer_utils import (
    AS_SHIPPED,
    TRAINERS,
    InjectedOurs,
    InjectedTRL,
    Recorded,
    audio_rows,
    image_rows,
    largest_difference,
    length_and_sum,
    load,
    make_trainer,
    norm,
    relative_difference,
    run,
    saved,
    sound,
    text_rows,
    video_rows,
    with_media,
)
from peft import LoraConfig
from transformers import (
    Qwen2AudioProcessor,
)

from trl_multimodal_rft import (
    MultimodalGRPOTrainer,
    MultimodalPPOTrainer,
    MultimodalRLOOTrainer,
)
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.batches import DatasetRows
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.rewards.calls import check_rewards, checked_reward


ROWS = {"audio": audio_rows, "image": image_rows, "video": video_rows}
FAMILY = {"audio": "qwen2_audio", "image": "qwen2_5_vl", "video": "qwen2_5_vl"}

# The second update of a generation batch is off-policy
REUSED = {"num_iterations": 2, "max_steps": 3, "learning_rate": 0.03}
# Two updates on one generation batch, each from two of its four micro-batches
SPLIT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4, "max_steps": 4}


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


# Packed and padded


PACKED = {
    "dapo": REUSED,
    "kl, checkpointing": {**REUSED, "beta": 0.1, "gradient_checkpointing": True},
    "vespo, truncated masked": {**REUSED, "loss_type": "vespo", "mask_truncated_completions": True},
    "grpo by sequence": {
        **SPLIT,
        **{"loss_type": "grpo", "importance_sampling_level": "sequence", "packing_shuffle": True},
    },
    "lora, kl, checkpointing": {
        **REUSED,
        **{"beta": 0.1, "gradient_checkpointing": True, "objects": {"peft_config": lora()}},
    },
}


@pytest.mark.parametrize(
    ("kind", "name"),
    slow_but(
        [(["video", "audio"][i % 2], name) for i, name in enumerate(PACKED)],
        ("audio", "kl, checkpointing"),
        ("video", "vespo, truncated masked"),
        ("audio", "grpo by sequence"),
    ),
)
def test_packed_equals_padded(kind, name):
    options = PACKED[name]
    packed = run(InjectedOurs, FAMILY[kind], ROWS[kind](), **options)
    in_rows = {**options, "packing": options.get("packing", "prefix").replace("prefix", "padded")}
    padded = run(InjectedOurs, FAMILY[kind], ROWS[kind](), **in_rows)
    assert all(packed.trainer.scored_packed) and not any(padded.trainer.scored_packed)
    difference = relative_difference(padded.update, packed.update)
    worst, where = largest_difference(padded.history, packed.history)
    assert norm(padded.update) > 0.01
    assert difference <= 1e-5
    assert worst <= 1e-4, where


@pytest.mark.parametrize(("kind", "packing"), [("image", "prefix"), ("audio", "padded")])
def test_old_log_probabilities_equal_current_ones_before_an_update(kind, packing):
    """Groups move after the computation of the old ones."""
    # Two groups in a micro-batch, so that their pairs can change
    options = {**SPLIT, "per_device_train_batch_size": 8}
    moments = run(Recorded, FAMILY[kind], ROWS[kind](), packing=packing, **options).trainer.micro_batches
    before_update = [moment for i, moment in enumerate(moments) if i % 4 < 2]
    assert len(before_update) == 4  # two micro-batches in each of two generation batches
    assert max((each.logps - each.batch.old_per_token_logps).abs().max() for each in before_update) <= 5e-6


def test_one_generation_batch_is_scored_in_one_way(tmp_path):
    """Micro-batches that would gain nothing from packing use it, too, so that all log-probabilities agree."""
    options = {**SPLIT, "per_device_train_batch_size": 2, "packing_shuffle": True, "beta": 0.1}
    trainer = make_trainer(
        InjectedOurs, "qwen2_audio", audio_rows(), tmp_path, num_generations=2, self_check=False, **options
    )
    packed = []
    score = trainer._policy.score
    trainer._policy.score = lambda model, request: packed.append(request.packed) or score(model, request)
    trainer.train()
    # Four reference parts of a generation batch, its micro-batches, and the two of the second optimizer step
    assert len(packed) == 2 * (4 + 4 + 2) and all(packed)


def test_groups_over_several_micro_batches(caplog):
    options = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "beta": 0.1}
    padded = run(InjectedOurs, "qwen2_audio", audio_rows(), packing="padded", **options)
    with caplog.at_level(logging.WARNING):
        packed = run(InjectedOurs, "qwen2_audio", audio_rows(), **options)
    assert "`per_device_train_batch_size` (6) holds no whole groups of `num_generations` (4)" in caplog.text
    assert all(packed.trainer.scored_packed)
    assert 0.5 < packed.history[0]["packing/shared_frac"] < 0.75
    assert relative_difference(padded.update, packed.update) <= 1e-5


@pytest.mark.parametrize("kwargs", [{"stop_strings": ["e", "st"]}, {"stop_strings": "e"}, {"eos_token_id": [60, 366]}])
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_what_stops_completions_does_not_cut_them(name, kwargs, tmp_path):
    """No padding follows a text that stops, and masks and critics take the completion for whole."""
    options = {"generation_kwargs": kwargs, "max_completion_length": 6, "mask_truncated_completions": True}
    options |= {"max_steps": 1, **({"bootstrap_truncated": True} if name == "ppo" else {})}
    trainer = make_trainer(TRAINERS[name], "qwen2_5_vl", image_rows(), tmp_path, **options)
    seen = []
    reward = trainer._reward
    decode = trainer._tokenizer.decode
    texts = [*kwargs.get("stop_strings", [])]
    tokens = {2, *kwargs.get("eos_token_id", [])}
    trainer._reward = lambda rollout: (seen.append(rollout), reward(rollout))[1]
    trainer.train()
    ended = []
    for ids, mask in zip(seen[0].source.ids, seen[0].completion_mask, strict=True):
        ended.append(ids[-1] in tokens or any(text in decode(ids) for text in texts))
        assert mask.sum() == ended[-1] * len(ids) and (ended[-1] or len(ids) == 6)
        assert not any(text in decode(ids[:-1]) for text in texts) and tokens.isdisjoint(ids[:-1])
    assert trainer.state.log_history[0]["completions/clipped_ratio"] == 1 - sum(ended) / 8 and 0 < sum(ended)


def test_no_completion_left():
    class Truncated(Wrapped):
        def __call__(self, model, prompts, **options):
            return [[60 + i] * 8 for i in range(len(prompts))], None

    options = {"sampler": Truncated, "mask_truncated_completions": True, "beta": 0.1, **REUSED}
    result = run(InjectedOurs, "qwen2_audio", audio_rows(), **options)
    assert all(result.trainer.scored_packed)
    assert norm(result.update) == 0


# Datasets


def mixed_rows():
    """Returns every kind of media, alone and together, and none."""
    rows = []
    for i in range(8):
        media = {
            "image": image(84, 56, seed=i)["image"] if i in (0, 4, 5) else None,
            "audio": sound(0.3 + 0.1 * i, seed=i) if i in (1, 4, 6) else None,
            "video": video(4, 28, 56, seed=i)["video"] if i in (2, 5, 6) else None,
        }
        rows.append({"prompt": [{"role": "user", "content": f"What is it? {i}"}], **media})
    return rows


def streamed(rows):
    return IterableDataset.from_generator(lambda: iter(rows))


def as_arrow(rows):
    return Dataset.from_list(
        [{**row, "video": None if row["video"] is None else row["video"].tolist()} for row in rows]
    )


def with_extra_column(rows):
    return [{**row, "extra": i} for i, row in enumerate(rows)]


def with_media_in_messages(rows):
    result = []
    for row in rows:
        blocks = [{"type": kind, kind: row[kind]} for kind in ("image", "video") if row[kind] is not None]
        if row["audio"] is not None:
            blocks.append({"type": "audio", "audio": row["audio"]["array"], "sampling_rate": RATE})
        blocks.append({"type": "text", "text": row["prompt"][0]["content"]})
        result.append({"prompt": [{"role": "user", "content": blocks}]})
    return result


MIXED = {"shuffle_dataset": False, "per_device_train_batch_size": 16, "learning_rate": 0.03}


@pytest.fixture(scope="module")
def mixed_update():
    """Returns the update that every form of [`mixed_rows`] must give."""
    result = run(InjectedOurs, "qwen2_5_omni", streamed(mixed_rows()), packing="padded", **MIXED)
    assert norm(result.update) > 0.01
    return result.update


FORMS = {
    "arrow": (as_arrow, {}),
    "arrow, in a worker": (as_arrow, {"dataloader_num_workers": 1}),
    "arrow, unused columns removed": (lambda rows: as_arrow(with_extra_column(rows)), {"remove_unused_columns": True}),
    "arrow, streamed": (lambda rows: as_arrow(rows).to_iterable_dataset(), {}),
    "streamed": (streamed, {}),
    "streamed, unused columns removed": (
        lambda rows: streamed(with_extra_column(rows)),
        {"remove_unused_columns": True},
    ),
    "media in messages": (lambda rows: streamed(with_media_in_messages(rows)), {}),
}


@pytest.mark.parametrize(("dataset", "options"), FORMS.values(), ids=FORMS)
def test_every_form_of_a_dataset_trains_alike(dataset, options, mixed_update):
    result = run(InjectedOurs, "qwen2_5_omni", dataset(mixed_rows()), **options, **MIXED)
    assert all(result.trainer.scored_packed)
    assert relative_difference(mixed_update, result.update) <= 1e-5


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("options", [{}, REUSED, SPLIT], ids=["one update", "reused", "split"])
def test_media_are_fetched_and_processed_once(options, prefetch, tmp_path):
    """Once per prompt, for all its completions, micro-batches and updates, also in worker processes."""
    fetched = tmp_path / "fetched"
    processed = tmp_path / "processed"

    class Counting(Qwen2AudioProcessor):
        def __call__(self, *args, **kwargs):
            with processed.open("a") as file:
                file.write("1")
            return super().__call__(*args, **kwargs)

    def fetch(batch):
        with fetched.open("a") as file:
            file.writelines(f"{index}\n" for index in batch["index"])
        return {**batch, "audio": [sound(0.3 + 0.02 * i, seed=i) for i in batch["index"]]}

    rows = text_rows(32).add_column("index", range(32)).with_transform(fetch)
    objects = {"model": load("qwen2_audio")[0], "processing_class": Counting.from_pretrained(saved("qwen2_audio"))}
    result = run(
        MultimodalGRPOTrainer,
        "qwen2_audio",
        rows,
        objects=objects,
        media_prefetch=prefetch,
        dataloader_num_workers=prefetch,
        self_check=True,
        **options,
    )
    args = result.trainer.args
    batches = math.ceil(args.max_steps * args.gradient_accumulation_steps / args.steps_per_generation)
    batches = math.ceil(batches / args.num_iterations)
    prompts = args.generation_batch_size // args.num_generations
    assert len(processed.read_text()) == batches * prompts + 1  # the self-check compares with it
    found = fetched.read_text().split()
    assert len(found) == len(set(found))
    ahead = 0 if prefetch else prompts  # the dataloader reads one batch ahead
    assert batches * prompts <= len(found) <= batches * prompts + ahead


def test_only_media_become_arrays():
    call = [{"function": {"name": "add", "arguments": {"x": [1, 2, 3]}}}]
    prompt = [
        {"role": "user", "content": [{"type": "audio", "audio": [0.5, 0.25], "sampling_rate": 4}]},
        {"role": "assistant", "content": "", "tool_calls": call},
    ]
    columns = {"prompt": prompt, "solution": [1, 2], "audio": {"array": [0.5, 1.0]}}
    rows = Dataset.from_dict({"index": [0]}).with_transform(lambda batch: {k: [v] for k, v in columns.items()})
    row = DatasetRows(rows)[0]
    assert row["solution"] == [1, 2]
    assert row["prompt"][1]["tool_calls"][0]["function"]["arguments"]["x"] == [1, 2, 3]
    assert isinstance(row["audio"]["array"], np.ndarray)
    assert isinstance(row["prompt"][0]["content"][0]["audio"], np.ndarray)


# Rewards


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, 0.0, 0.0, 1.0, 1.0, math.nan, 1.0, 1.0], "'broken' returned nan for row 1"),
        (1.0, "'broken' returned 1.0 for 8 completions; return a list with one number for each"),
        (None, "'broken' returned None for 8 completions; return a list"),
        (torch.tensor(1.0), r"'broken' returned tensor\(1.\) for 8 completions; return a list"),
        ([[1.0, 2.0]] * 8, r"'broken' returned \[1.0, 2.0\] for row 0"),
        ([1.0] * 7, "'broken' returned 7 rewards for 8 completions"),
        (["good"] * 8, "'broken' returned 'good' for row 0"),
        ([*[1.0] * 7, 1e39], r"'broken' returned 1e\+39 for row 1; return a finite number, .*float32, up to 3.4e38"),
        ([-1e39] * 8, r"'broken' returned -1e\+39 for row 0"),
        ([10**400] * 8, "'broken' returned 10000.* for row 0"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_wrong_rewards_raise(returned, message, asynchronous):
    def broken(completions, **kwargs):
        return returned

    async def broken_later(completions, **kwargs):
        return returned

    checked = checked_reward(broken_later if asynchronous else broken, "broken", rows=[0] * 4 + [1] * 4)
    with pytest.raises(ValueError, match=message):
        found = checked(prompts=["?"] * 8, completions=["?"] * 8)
        asyncio.run(found)


@pytest.mark.parametrize("trainer_class", [MultimodalGRPOTrainer, MultimodalRLOOTrainer, MultimodalPPOTrainer])
def test_reward_functions_stay_what_was_passed(trainer_class, tmp_path):
    """The trainer checks the current function at each call."""
    given = [length_and_sum, functools.partial(length_and_sum)]
    trainer = make_trainer(trainer_class, "qwen2_audio", text_rows(), tmp_path, reward=given)
    assert all(one is other for one, other in zip(trainer.reward_funcs, given, strict=True))
    assert trainer.reward_funcs is not given
    trainer.reward_funcs = [length_and_sum, lambda **_: 1.0]
    with pytest.raises(ValueError, match="'length_and_sum_2' returned 1.0 for 8 completions"):
        trainer.train()
    assert trainer.reward_funcs[0] is length_and_sum


@pytest.mark.parametrize(
    "wrap", [iter, tuple, np.array, torch.tensor, pd.Series, lambda r: [torch.tensor([x]) for x in r]]
)
def test_rewards_may_come_in_any_sequence(wrap):
    assert check_rewards(wrap([1.0, 0.5, -2.0]), 3, "any") == [1.0, 0.5, -2.0]


# Refusals


def test_model_without_a_name_and_a_processor_raises(tmp_path):
    model, processor = FAMILIES["qwen2_audio"].build()
    with pytest.raises(ValueError, match="has no name .* by which its processor .* pass `processing_class`"):
        make_trainer(MultimodalGRPOTrainer, "", audio_rows(), tmp_path, objects={"model": model})
    objects = {"model": model, "processing_class": processor}
    with pytest.raises(ValueError, match="the reference of `beta=0.05` would be loaded; save the model"):
        make_trainer(MultimodalRLOOTrainer, "", audio_rows(), tmp_path, objects=objects, beta=0.05)
    make_trainer(MultimodalRLOOTrainer, "", audio_rows(), tmp_path, objects=objects, beta=0.0)


def test_tokenizer_for_media_raises(tmp_path):
    """Text needs no processor, also with media columns that are ignored."""
    model, processor = load("qwen2_5_vl")
    objects = {"model": model, "processing_class": processor.tokenizer}
    message = "is a tokenizer and can't encode {}; pass `processing_class=AutoProcessor"
    for column, rows in (("image", image_rows(4)), ("video", video_rows(4))):
        with pytest.raises(MediaError, match=f"row 0, column '{column}': .*{message.format(column)}"):
            make_trainer(InjectedOurs, "", rows, tmp_path, objects=objects)
    evaluated = {"eval_dataset": {"text": text_rows(4), "seen": image_rows(4)}}
    with pytest.raises(MediaError, match=message.format("image")):
        make_trainer(InjectedOurs, "", text_rows(), tmp_path, objects={**objects, **evaluated})
    rows = text_rows().add_column("image", [None] * 8)
    ignored = {"ignored_media_columns": ["image"]}
    theirs = run(InjectedTRL, "", text_rows(), objects=objects)
    ours = run(InjectedOurs, "", rows, objects={**objects, "model": load("qwen2_5_vl")[0]}, **ignored)
    assert norm(theirs.update) > 0.01
    assert relative_difference(theirs.update, ours.update) <= 1e-5


def test_overlong_audio():
    def rows(samples):
        clips = [audio(1.5, seed=i)["audio"][:samples] for i in range(4)]
        return with_media(text_rows(4), "audio", [{"array": clip, "sampling_rate": RATE} for clip in clips])

    message = (
        r"row \d, column 'audio': the audio of 1.50 s is longer than .* window of 1 s; .*`audio_overlong='truncate'`"
    )
    with pytest.raises(MediaError, match=message):
        run(InjectedOurs, "qwen2_audio", rows(None))
    cut = run(InjectedOurs, "qwen2_audio", rows(RATE))  # the tiny model's window is 1 s
    truncated = run(InjectedOurs, "qwen2_audio", rows(None), audio_overlong="truncate")
    assert norm(cut.update) > 0.01
    assert relative_difference(cut.update, truncated.update) == 0


@pytest.mark.parametrize("column", ["prompts", "completions"])
def test_columns_that_shadow_arguments_of_rewards_raise(column):
    """The call would pass the keyword twice. Reward models get no columns."""
    rows = text_rows().add_column(column, ["?"] * 8)
    for each in (rows, rows.to_iterable_dataset()):
        for trainer in (InjectedOurs, MultimodalRLOOTrainer, MultimodalPPOTrainer):
            with pytest.raises(ValueError, match=rf"^row \d has a column '{column}'.*`dataset.rename_column"):
                run(trainer, "qwen2_audio", each)


def test_continuous_batching_raises():
    with pytest.raises(ValueError, match="use_transformers_continuous_batching"):
        run(InjectedOurs, "qwen2_audio", audio_rows(), use_transformers_continuous_batching=True)


# Families


# One family of each kind of media, layers and features: `test_families.py` has the self-check and updates of all
KINDS = (
    "qwen2_5_vl qwen2_audio qwen2_5_omni qwen3_vl_moe qwen3_5 gemma3n gemma4 phi4_multimodal voxtral llama4".split()
)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_families_train(name):
    """Samples and runs the self-check, which must pass."""
    model, processor = ALL_FAMILIES[name].build()
    chats = audio_prompts() if name == "voxtral" else ALL_FAMILIES[name].prompts()
    for block in (block for chat in chats for message in chat for block in message["content"]):
        if block["type"] == "audio":
            block["sampling_rate"] = RATE
    rows = streamed([{"prompt": chat} for chat in chats])
    objects = {"model": model, "processing_class": processor}
    options = {"per_device_train_batch_size": 4 * len(chats), **AS_SHIPPED}
    result = run(MultimodalGRPOTrainer, name, rows, objects=objects, **options)
    check = result.trainer.checks.self_check
    trainer = result.trainer
    assert norm(result.update) > 0.001
    assert check.media.keys() == set(ALL_FAMILIES[name].modalities)
    assert min(check.media.values()) > 5e-3
    assert check.sampled <= check.tolerance
    assert trainer._policy.fallbacks.shared_prefill
    if family_of(model).isolate:
        assert trainer._policy.fallbacks.isolate
    else:
        assert check.rows <= check.tolerance
    assert check.packed <= check.tolerance
    assert result.history[0]["packing/shared_frac"] == 0.75


def test_autocast_is_no_reason_to_pad():
    """In bf16, the default of the config on a GPU, all differences are larger, for packed and padded alike."""
    trainer = run(InjectedOurs, "qwen2_audio", audio_rows(), bf16=True).trainer
    assert trainer.model.dtype == torch.float32
    assert all(trainer.scored_packed) and trainer._policy.fallbacks.shared_prefill


def test_autocast_holds_for_an_adapter():
    """A new adapter changes nothing, so that its model samples what the model without it samples, also in bf16."""
    sampled = []

    def record(completion_ids, **columns):
        sampled.append(completion_ids)
        return length_and_sum(completion_ids, **columns)

    for adapter in (None, LoraConfig(r=2, target_modules=["q_proj"])):
        objects = {"peft_config": adapter}
        run(MultimodalGRPOTrainer, "qwen2_audio", audio_rows(), reward=record, objects=objects, bf16=True, max_steps=1)
    assert sampled[0] == sampled[1]
