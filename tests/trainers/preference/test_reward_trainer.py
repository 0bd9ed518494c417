# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Reward models with media: updates and metrics are TRL's, and those of the model's own forward of each completion."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
import transformers as hf
from datasets import Dataset
from evaluation.test_judges import run_script
from helpers.families import ALL_FAMILIES, tokenizer
from helpers.marks import slow_but
from helpers.trainer_utils import PLAIN, Recorded, assert_equal, image_rows, relative_difference, run
from helpers.trainer_utils import load as load_model
from peft import LoraConfig
from torch.nn.functional import logsigmoid
from trainers.preference.test_dpo import FORMS, IN_ORDER, REFUSED, chat, conversations, image_pairs, pairs, sound_pairs
from trl import RewardConfig, RewardTrainer

from trl_multimodal_rft import (
    MultimodalRewardConfig,
    MultimodalRewardTrainer,
    MultimodalSFTConfig,
    MultimodalSFTTrainer,
)
from trl_multimodal_rft.data import write_folder
from trl_multimodal_rft.encoding import supervised
from trl_multimodal_rft.models import Critic
from trl_multimodal_rft.models.reward_model import as_reward_model, load_reward_model, load_trained_reward_model
from trl_multimodal_rft.policy import Fallbacks
from trl_multimodal_rft.rewards import RewardModel


LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, modules_to_save=["score"])
MARGINS = [0.5, 0.0, 1.5, 0.2, 0.0, 0.7, 0.1, 2.0]
# Of which one continues the other
TOKENS = [{"chosen_ids": [*range(20, 25 + i)], "rejected_ids": [*range(20, 32 - 2 * i)]} for i in range(4)]

CASES = {
    "plain": {},
    "margin": {"margin": True},
    "centered": {"center_rewards_coefficient": 0.1},
    "accumulated": {"margin": True, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "adapter": {"margin": True, "objects": {"peft_config": LORA}},
    "checkpointing": {"gradient_checkpointing": True},
    "tokens": {"rows": Dataset.from_list(TOKENS * 2)},
}


def fresh(family="qwen2_5_vl"):
    """A reward model of a family, whose score is seeded and as large as its other weights, and its processor."""
    model, processor = load_model(family)
    torch.manual_seed(1)
    model = as_reward_model(model)
    with torch.no_grad():
        model.score.weight.mul_(6)
    processor.tokenizer.chat_template = processor.chat_template  # which TRL reads
    return model, processor


def text_pairs(n=8, margin=False):
    rows = [{**row, **({"margin": value} if margin else {})} for row, value in zip(pairs(n), MARGINS, strict=False)]
    return Dataset.from_list(rows)


def trained(trainer_class, *, margin=False, objects=None, rows=None, **options):
    model, processor = fresh()
    ours = issubclass(trainer_class, MultimodalRewardTrainer)
    objects = {"model": model, "processing_class": processor if ours else processor.tokenizer, **(objects or {})}
    rows = rows or text_pairs(margin=margin)
    options = {**IN_ORDER, "learning_rate": 0.03, **options}
    result = run(trainer_class, "qwen2_5_vl", rows, reward=None, objects=objects, **options)
    result.history[-1].pop("total_flos")  # counted by the names of inputs
    return result


@functools.cache
def trl_run(name):
    return trained(RewardTrainer, **CASES[name])


@pytest.mark.parametrize("options", [{}, {"packing": "padded"}, {"max_tokens_per_microbatch": 60}], ids=str)
@pytest.mark.parametrize("name", slow_but(CASES, "margin", "centered", "adapter"))
def test_equals_trl(name, options):
    ours = trained(MultimodalRewardTrainer, **CASES[name], **options)
    for entry in ours.history:
        assert entry.pop("token_budget/parts", 2) > 1
        entry.pop("token_budget/extra_time", None)
    assert ours.history[0].keys() - {"skipped_updates"} == trl_run(name).history[0].keys()
    assert_equal(trl_run(name), ours, of_metrics=1e-5)


def test_prompts_with_images_are_packed_exactly():
    padded, packed = (
        trained(MultimodalRewardTrainer, rows=image_pairs(), packing=each) for each in ("padded", "prefix")
    )
    assert_equal(padded, packed)


# Comparison with the model


def own_scores(model, processor, prompts, answers):
    """Scores of each prompt's chosen and rejected answer by the model's own forward of each conversation."""
    scores = []
    for offset in (0, 4):
        for i, prompt in enumerate(prompts):
            said = [*prompt, *chat("assistant", answers[offset + i % 4])]
            options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
            if any(part["type"] == "video" for part in prompt[0]["content"]):
                options["processor_kwargs"] = {"videos_kwargs": {"do_sample_frames": False}}
            inputs = processor.apply_chat_template([said], **options).to(torch.float64)
            scores.append(model(**inputs).logits[0, 0])
    return torch.stack(scores).chunk(2)


@pytest.mark.parametrize("packing", ["prefix", "padded"])
@pytest.mark.parametrize("family", slow_but(["qwen2_5_omni", "qwen2_audio", "qwen3_vl", "gemma3"], "qwen2_5_omni"))
def test_loss_and_gradient_are_those_of_plain_forwards(family, packing, tmp_path):
    """In float64: text, images, sounds and videos in one batch, with margins, a tie and centering."""
    prompts, answers, dataset = conversations(family)
    rows = [{**dataset[i], "margin": MARGINS[i], "tie": i == 0} for i in range(len(prompts))]
    model, processor = ALL_FAMILIES[family].build()
    torch.manual_seed(1)
    model = as_reward_model(model).double().eval()
    plain = copy.deepcopy(model)
    options = {
        **PLAIN,
        "per_device_train_batch_size": len(rows),
        "packing": packing,
        "center_rewards_coefficient": 0.1,
    }
    args = MultimodalRewardConfig(str(tmp_path), **options)
    trainer = MultimodalRewardTrainer(model, args, train_dataset=text_pairs(), processing_class=processor)
    loss = trainer.compute_loss(trainer.model, trainer.data_collator(rows))
    loss.backward()
    chosen, rejected = own_scores(plain, processor, prompts, answers)
    difference = chosen - rejected
    margin = torch.tensor(MARGINS[: len(rows)])
    losses = -logsigmoid(difference - margin)
    losses[0] = losses[0] - logsigmoid(-difference[0] - margin[0])
    expected = losses.mean() + 0.1 * (chosen + rejected).square().mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and difference.std() > 0.01
    found, own = (
        {name: p.grad for name, p in each.named_parameters() if p.grad is not None and p.grad.any()}
        for each in (trainer.model, plain)
    )
    assert found.keys() == own.keys() and len(own) > 20
    assert relative_difference(own, found) < 1e-6


def test_ties_pull_scores_together_and_are_no_right_or_wrong(tmp_path):
    rows = [{**row, "tie": i in (0, 3)} for i, row in enumerate(pairs(4))]
    trainer = run_ours(Dataset.from_list(rows), tmp_path, self_check=False)
    trainer.model.train()
    batch = trainer.data_collator(rows)
    scores = trainer._loss(trainer.model, batch, None)[1].values[:, 0].detach()
    trainer._metric_log.pop("train")
    difference = scores[:4] - scores[4:]
    loss = trainer.compute_loss(trainer.model, batch)
    both = -(logsigmoid(difference) + logsigmoid(-difference))
    expected = torch.where(batch["tie"], both, -logsigmoid(difference)).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert (both[[0, 3]] > both.new_tensor(4.0).log()).all()  # least where the scores are equal
    kept = difference[1:3]
    metrics = trainer._metric_log.pop("train")
    assert metrics["accuracy"] == (kept > 0).float().mean().item()
    assert metrics["margin"] == pytest.approx(kept.mean().item(), rel=1e-5)
    trainer.compute_loss(trainer.model, trainer.data_collator([{**row, "tie": True} for row in rows]))
    metrics = trainer._metric_log.pop("train")
    assert "accuracy" not in metrics and "mean_reward" in metrics


@pytest.mark.parametrize("of_rows", [{"tie": "maybe"}, {"margin": "1.5"}, {"margin": True}, {"margin": math.inf}])
def test_cells_of_another_type_are_refused(of_rows, tmp_path):
    ((name, cell),) = of_rows.items()
    trainer = run_ours(Dataset.from_list([{**row, **of_rows} for row in pairs(4)]), tmp_path)
    with pytest.raises(ValueError, match=rf"row \d, column '{name}': is {cell!r} of type {type(cell).__name__}"):
        trainer.train()


def test_missing_cells_are_none(tmp_path):
    found = []
    for cells in ({}, {"margin": math.nan, "tie": math.nan}):
        trainer = run_ours(Dataset.from_list([{**row, **cells} for row in pairs(4)]), tmp_path, self_check=False)
        trainer.train()
        found.append((trainer.state.log_history[0]["loss"], *map(torch.Tensor.sum, trainer.model.parameters())))
    assert found[0] == found[1]


def test_windows_and_evaluations_of_ties_alone_have_no_accuracy(tmp_path):
    rows = Dataset.from_list([{**row, "tie": i == 1} for i, row in enumerate(pairs(4))])
    options = {"per_device_train_batch_size": 1, "max_steps": 4, "self_check": False}
    trainer = run_ours(rows, tmp_path, objects={"eval_dataset": rows.select([1])}, **options)
    trainer.train()
    assert ["accuracy" in entry for entry in trainer.state.log_history[:4]] == [True, False, True, True]
    assert trainer.state.log_history[1]["mean_reward"] and "eval_accuracy" not in trainer.evaluate()


def test_the_score_is_where_transformers_reads_it():
    """A sequence classifier ignores its padding token at the end, which the end of a sequence may be."""
    model, processor = fresh()
    model.config.get_text_config().pad_token_id = processor.tokenizer.eos_token_id = 2
    rows = Dataset.from_list([FORMS["text"]] * 4)
    trained_by = [
        trained(
            each,
            rows=rows,
            objects={"processing_class": processor if each is MultimodalRewardTrainer else processor.tokenizer},
        )
        for each in (RewardTrainer, MultimodalRewardTrainer)
    ]
    assert_equal(*trained_by)


# Models


def test_saved_models_are_those_of_transformers(tmp_path):
    model, _ = fresh("gemma3")
    model.save_pretrained(tmp_path / "ours")
    theirs = hf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "ours", dtype="float32")
    assert type(theirs) is hf.Gemma3ForSequenceClassification
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_reward_model(str(tmp_path / "theirs"))
    ids = torch.arange(20, 30)[None]
    scores = [each.eval()(input_ids=ids).logits for each in (model, theirs, again, as_reward_model(theirs))]
    assert all(torch.allclose(each, scores[0], atol=1e-6) for each in scores)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("family, rows", [("qwen2_5_vl", image_pairs), ("qwen2_audio", sound_pairs)])
def test_a_policy_that_another_trainer_has_trained(family, rows, tmp_path):
    """Its instance has a forward around the LM head."""
    model, processor = load_model(family)
    args = MultimodalSFTConfig(str(tmp_path), **PLAIN)
    answered = rows().rename_column("chosen", "completion").remove_columns("rejected")
    MultimodalSFTTrainer(model, args, train_dataset=answered, processing_class=processor).train()
    assert "forward" in vars(model)
    trainer = run_ours(rows(), tmp_path, objects={"model": model, "processing_class": processor})
    trainer.train()
    check = trainer.checks.self_check
    assert check.padded < check.tolerance > check.packed and check.fallbacks == Fallbacks()
    assert trainer.state.log_history[0]["loss"] > 0


def test_what_can_not_score_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Llama4ForConditionalGeneration has no backbone apart from its LM head"):
        as_reward_model(ALL_FAMILIES["llama4"].build()[0])
    model, processor = fresh("gemma3")
    model.config.num_labels = 2
    with pytest.raises(ValueError, match="has `num_labels=2`; reward models require `num_labels=1`"):
        as_reward_model(hf.Gemma3ForSequenceClassification(model.config))


# Runs


def run_ours(rows, folder, family="qwen2_5_vl", objects=None, **options):
    model, processor = fresh(family)
    objects = {"model": model, "processing_class": processor, **(objects or {})}
    args = MultimodalRewardConfig(str(folder), **{**PLAIN, **IN_ORDER, "learning_rate": 0.03, **options})
    return MultimodalRewardTrainer(args=args, train_dataset=rows, **objects)


def test_the_prompt_is_encoded_and_forwarded_once(tmp_path, monkeypatch):
    encoded = []
    forwarded = []
    encode = supervised.encode_prompt
    monkeypatch.setattr(
        supervised, "encode_prompt", lambda *args, **kwargs: encoded.append(1) or encode(*args, **kwargs)
    )
    trainer = run_ours(image_pairs(4), tmp_path, max_steps=1, self_check=False)
    trainer.model.get_decoder().register_forward_hook(
        lambda module, args, kwargs, output: forwarded.append(kwargs["inputs_embeds"].shape[:2]), with_kwargs=True
    )
    trainer.train()
    assert len(encoded) == 4 and len(forwarded) == 1
    batch = trainer.data_collator([image_pairs(4)[i] for i in range(4)])
    n_tokens = sum(map(len, batch["sequences"])) + int(batch["completion_mask"].sum())
    assert forwarded[0][0] == 1 and n_tokens <= forwarded[0][1] <= n_tokens + 8  # copies of last tokens


@pytest.mark.parametrize(
    "family, rows, frozen", [("qwen2_5_vl", image_pairs, None), ("qwen2_audio", sound_pairs, ["audio_tower"])]
)
def test_resuming_continues_bit_for_bit(family, rows, frozen, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
    options |= {"optim": "adamw_torch", "learning_rate": 1e-3, "freeze": frozen}
    whole, resumed = (run_ours(rows(), tmp_path, family, **options) for _ in range(2))
    whole.train()
    resumed.train(f"{tmp_path}/checkpoint-2")
    assert all(map(torch.equal, whole.model.parameters(), resumed.model.parameters()))
    kept = ("loss", "num_tokens", "margin", "accuracy")
    logs = [[[entry.get(name) for name in kept] for entry in each.state.log_history[:4]] for each in (whole, resumed)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("family, rows", [("qwen2_audio", sound_pairs), ("qwen2_5_vl", text_pairs)])
def test_other_rows_train_and_evaluate(family, rows, tmp_path):
    trainer = run_ours(rows(), tmp_path, family, objects={"eval_dataset": rows(3)}, max_steps=1)
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_accuracy", "eval_margin"} <= metrics.keys()
    assert trainer.evaluate(rows(3))["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


def test_metrics_of_the_user_get_the_scores(tmp_path):
    seen = []
    objects = {"eval_dataset": text_pairs(4), "compute_metrics": lambda found: seen.append(found.predictions) or {}}
    run_ours(text_pairs(), tmp_path, objects=objects, per_device_eval_batch_size=4).evaluate()
    assert seen[0].shape == (8, 1) and seen[0].std() > 0.01


def test_the_console_shows_the_first_pair(tmp_path, capsys):
    row = {**FORMS["whole conversations"], "image": image_pairs(1)[0]["image"]}
    trainer = run_ours(Dataset.from_list([row] * 4), tmp_path, max_steps=1)
    trainer.train()
    assert "It is a cat." in capsys.readouterr().out


def test_an_adapter_trains_the_score_or_warns(tmp_path, caplog):
    run_ours(text_pairs(), tmp_path, objects={"peft_config": LoraConfig(target_modules=["q_proj"])})
    assert "The adapter doesn't train `score`" in caplog.text


@pytest.mark.parametrize("frozen, trains", [("language_model", "visual"), ("model", "score")])
def test_parts_are_frozen(frozen, trains, tmp_path):
    trainer = run_ours(image_pairs(), tmp_path, freeze=[frozen])
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    moved = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert moved and all(trains in name for name in moved)


# What its folder is


@pytest.mark.parametrize("objects", [{}, {"peft_config": LORA}], ids=["whole", "adapter"])
def test_the_folder_is_a_reward_by_name(objects, tmp_path):
    """In Python, in GRPO as TRL's `reward_funcs`, in the command, and as a first critic."""
    model, processor = load_model("qwen2_5_vl")
    trainer = run_ours(image_pairs(), tmp_path, objects={"model": model, **objects}, max_steps=1)
    trainer.train()
    folder = str(tmp_path / "my-reward")
    rows = image_pairs(4)
    trainer.save_model(folder)
    trainer.create_model_card()
    trained = RewardModel(trainer.model, processor)
    loaded = RewardModel.from_pretrained(folder)
    scores = [trained(rows["prompt"], rows[name], image=rows["image"]) for name in ("chosen", "rejected")]
    assert loaded(rows["prompt"], rows["chosen"], image=rows["image"]) == pytest.approx(scores[0], abs=1e-5)
    assert "scores completions" in (tmp_path / "README.md").read_text() and len({*scores[0]}) == 4

    result = run(Recorded, "qwen2_5_vl", image_rows(), reward=folder, max_steps=1)
    drawn = result.trainer.draws[0]
    assert result.trainer.reward_func_names == ["my-reward"]
    ids = [
        each[mask.bool()] for each, mask in zip(drawn.batch.completion_ids, drawn.batch.completion_mask, strict=True)
    ]
    words = [chat("assistant", processor.decode(each, skip_special_tokens=True)) for each in ids]
    columns = {name: [row[name] for row in drawn.rows] for name in ("prompt", "image")}
    expected = trained(columns["prompt"], words, image=columns["image"])
    assert drawn.rewards[:, 0].tolist() == pytest.approx(expected, abs=1e-5) and len({*expected}) > 4

    write_folder(rows, tmp_path / "pairs")
    metrics = run_script(tmp_path, f"--reward_model_name_or_path={folder}")["metrics"]
    assert metrics["margin"] == pytest.approx(np.subtract(*scores).mean(), abs=1e-5)

    critic = Critic.from_pretrained(folder, type(model), dtype=torch.float32)
    tokens = torch.arange(20, 30)[None]
    assert torch.allclose(critic.eval()(tokens)[:, -1:], trainer.model(input_ids=tokens).logits, atol=1e-5)
    with pytest.raises(ValueError, match="has no trained score"):
        RewardModel.from_pretrained(model.config._name_or_path)


@pytest.mark.parametrize("kind", ["Bert", "GPT2", "Qwen2"])
def test_other_classifiers_stay_those_of_transformers(kind, tmp_path):
    """Also encoders, of whose families no policy is."""
    config = getattr(hf, f"{kind}Config")(vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.num_labels = 1
    getattr(hf, f"{kind}ForSequenceClassification")(config).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    loaded = load_trained_reward_model(str(tmp_path))[0]
    assert type(loaded) is getattr(hf, f"{kind}ForSequenceClassification")
    assert type(hf.AutoModelForSequenceClassification.from_pretrained(tmp_path)) is type(loaded)
    if kind == "Bert":
        with pytest.raises(ValueError, match="BertForSequenceClassification has neither an LM head nor a `score`"):
            as_reward_model(loaded)


# Rows


TOKENIZED = {"chosen_ids": [5, 6, 7, 8], "rejected_ids": [5, 6, 9]}


@pytest.mark.parametrize("form", [*FORMS, "tokenized"])
def test_texts_are_encoded_as_by_trl(form, tmp_path):
    row = {**FORMS, "tokenized": TOKENIZED}[form]
    rows = Dataset.from_list([row] * 2)
    model, processor = fresh()
    args = RewardConfig(str(tmp_path), **PLAIN)
    theirs = RewardTrainer(model, args, train_dataset=rows, processing_class=processor.tokenizer).train_dataset[0]
    pair = run_ours(rows, tmp_path).data_collator([rows[0]])["sequences"][0]
    prompt, chosen, rejected = pair.example()
    assert prompt + chosen == theirs["chosen_ids"] and prompt + rejected == theirs["rejected_ids"]
    assert chosen[0] != rejected[0]  # all that they share is shared


@pytest.mark.parametrize("name", [*REFUSED, "no prompt"])
def test_rows_are_refused_by_name(name, tmp_path):
    start = ({"chosen": "Yes", "rejected": "No"}, "row 0: `chosen` and `rejected` start differently")
    row, message = {**REFUSED, "no prompt": start}[name]
    trainer = run_ours(Dataset.from_list([row]).with_transform(lambda batch: {k: [row[k]] for k in row}), tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.train()


@pytest.mark.parametrize(
    "rows, options, message",
    [
        (Dataset.from_list([{"prompt": "a", "completion": "b"}]), {}, r"train dataset has the columns .* it needs"),
        (Dataset.from_list([]), {}, "`train_dataset` has no rows"),
        (
            text_pairs(2),
            {"train_sampling_strategy": "group_by_length"},
            "`train_sampling_strategy='group_by_length'` has no effect here",
        ),
        (text_pairs(2), {"packing": "rows"}, "`packing`"),
    ],
)
def test_datasets_and_options_are_refused(rows, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_ours(rows, tmp_path, **options)


@pytest.mark.parametrize("streams", [False, True])
def test_long_rows_of_text_are_left_out(streams, tmp_path, caplog):
    """Before the epoch is counted, or of a stream when they are read."""
    rows = Dataset.from_list([{**pairs(1)[0], "chosen": chat("assistant", "a cat " * 30)}, *pairs(3)])
    given = rows.to_iterable_dataset() if streams else rows
    options = {"max_length": 60, "max_steps": 2, "per_device_train_batch_size": 1}
    trainer = run_ours(given, tmp_path, objects={"eval_dataset": rows}, **options)
    assert "1 of the 4 rows of the eval dataset are left out" in caplog.text and len(trainer.eval_dataset) == 3
    assert streams or [row["prompt"] for row in trainer.train_dataset] == [row["prompt"] for row in pairs(3)]
    trainer.train()
    assert [*trainer._stream.skipped] == ([0] if streams else [])
    assert "tokens, more than `max_length` (60)" in (tmp_path / "skipped_rows.jsonl").read_text()
