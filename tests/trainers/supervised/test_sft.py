# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Supervised training with media: the loss equals the model's and TRL's, and rows don't affect each other."""

import re
from pathlib import Path

import pytest
import torch
import transformers
import trl
from datasets import Dataset
from helpers.chats import RATE, image
from helpers.families import ALL_FAMILIES
from helpers.resumed_runs import logged
from helpers.trainer_utils import CONFIGS, PLAIN, TRAINERS, load, norm, relative_difference, saved, sound, with_media
from packaging.version import Version
from peft import LoraConfig
from trainers.preference.test_dpo import LOST
from trl import SFTConfig, SFTTrainer

from trl_multimodal_rft import MultimodalSFTConfig, MultimodalSFTTrainer
from trl_multimodal_rft.encoding import prompts
from trl_multimodal_rft.encoding.supervised import SupervisedEncoder
from trl_multimodal_rft.forward import logprobs


ANSWERS = ["It is a cat.", "There are two of them, I think.", "No", "A bird sings, and then another one answers."]
SIZES = [(84, 56), (56, 56), (112, 84), (56, 112)]
PAIRS = {**PLAIN, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
# TRL needs this to find the assistant's tokens
GENERATION = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{% for block in message.content %}{{ block.text }}"
    "{% endfor %}<|im_end|>\n{% endgeneration %}{% else %}{% for block in message.content %}"
    "{% if block.type == 'text' %}{{ block.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def say(role, *parts):
    return {
        "role": role,
        "content": [{"type": "text", "text": p} if p != "<image>" else {"type": "image"} for p in parts],
    }


def picture_rows(n=8, form="messages"):
    rows = []
    for i in range(n):
        asked = say("user", "<image>", "What is it?" + " Is there a cat?" * (i % 3))
        answer = say("assistant", ANSWERS[i % 4])
        chat = {"messages": [asked, answer]} if form == "messages" else {"prompt": [asked], "completion": [answer]}
        rows.append({**chat, "image": image(*SIZES[i % 4], seed=i)["image"]})
    return Dataset.from_list(rows)


def album_rows(n=8):
    """Returns conversations of two turns, each with a picture."""
    rows = []
    for i in range(n):
        chat = [
            say("user", "<image>", "What is it?"),
            say("assistant", ANSWERS[i % 4]),
            say("user", "And here?", "<image>"),
            say("assistant", ANSWERS[(i + 1) % 4]),
        ]
        rows.append({"messages": chat, "images": [image(*SIZES[(i + j) % 4], seed=i + j)["image"] for j in (0, 1)]})
    return Dataset.from_list(rows)


def text_rows(n=8, form="text"):
    questions = ["Is there a bird?" + " Is there a cat?" * (i % 3) for i in range(n)]
    if form == "text":
        rows = [{"prompt": q, "completion": " " + ANSWERS[i % 4]} for i, q in enumerate(questions)]
    else:
        chats = [[("user", q), ("assistant", ANSWERS[i % 4])] for i, q in enumerate(questions)]
        rows = [{"messages": [{"role": r, "content": c} for r, c in chat]} for chat in chats]
    return Dataset.from_list(rows)


def sound_rows(n=8):
    rows = [
        {"prompt": f"What do you hear?{' Is it a cat?' * (i % 3)}", "completion": ANSWERS[i % 4]} for i in range(n)
    ]
    return with_media(Dataset.from_list(rows), "audio", [sound(0.3 + 0.2 * (i % 4), seed=i) for i in range(n)])


def make(family, rows, folder, chat_template=None, objects=None, **options):
    model, processor = load(family)
    processor.chat_template = chat_template or processor.chat_template
    given = {"model": model, "processing_class": processor, **(objects or {})}
    return MultimodalSFTTrainer(
        args=MultimodalSFTConfig(str(folder), **{**PAIRS, **options}), train_dataset=rows, **given
    )


def trained(trainer):
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    kept = ("loss", "entropy", "mean_token_accuracy", "num_tokens", "grad_norm", "eval_loss")
    logs = [{k: v for k, v in entry.items() if k in kept} for entry in trainer.state.log_history]
    return logs[:-1], {name: p.detach() - before[name] for name, p in trainer.model.named_parameters()}


def assert_same(one, other, tolerance=1e-5, of_means=None):
    """`of_means` is the tolerance of means over tokens, which only one of them takes over several micro-batches."""
    assert len(one[0]) == len(other[0]) > 0
    for a, b in zip(one[0], other[0], strict=True):
        assert a.keys() == b.keys()
        for key in a:
            is_mean = key in ("entropy", "mean_token_accuracy")
            allowed = of_means if is_mean and of_means is not None else tolerance
            assert a[key] == pytest.approx(b[key], rel=allowed, abs=allowed), (key, a, b)
    assert norm(one[1]) > 0 and relative_difference(one[1], other[1]) <= tolerance


# Comparison with TRL


TRL_ROWS = {
    "text": (text_rows, {}),
    "whole text": (text_rows, {"completion_only_loss": False}),
    "chat": (lambda: text_rows(form="chat"), {}),
    "cut": (lambda: text_rows(form="chat"), {"max_length": 24}),
    "images": (picture_rows, {}),
    "completions about images": (lambda: picture_rows(form="prompt"), {}),
    "whole rows about images": (lambda: picture_rows(form="prompt"), {"completion_only_loss": False}),
    "albums": (album_rows, {"assistant_only_loss": True}),
    "dft": (picture_rows, {"loss_type": "dft", "learning_rate": 3.0}),
}
DEFAULT_ROWS = ("chat", "completions about images", "albums")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in DEFAULT_ROWS else [pytest.mark.slow]) for name in TRL_ROWS]
)
def test_equals_trl(name, tmp_path):
    """Rows in TRL's order give TRL's loss, metrics and weights after two updates."""
    rows, options = TRL_ROWS[name]
    if "assistant_only_loss" in options and Version(transformers.__version__) < Version("5.18"):
        pytest.skip("TRL refuses it before transformers 5.18")
    model, processor = load("qwen2_5_vl")
    processor.chat_template = GENERATION if "assistant_only_loss" in options else processor.chat_template
    theirs = SFTTrainer(
        model,
        SFTConfig(str(tmp_path / "trl"), **{**PAIRS, "max_length": None, **options}),
        train_dataset=rows(),
        processing_class=processor,
    )
    theirs.model_accepts_loss_kwargs = True  # otherwise this model's loss is a mean over micro-batches of any length
    ours = make("qwen2_5_vl", rows(), tmp_path / "ours", processor.chat_template, **options)
    assert_same(trained(theirs), trained(ours), of_means=0.02)


# Comparison with the model


def own_gradients(family, chats, masks):
    """Computes the loss over all target tokens and its gradient with plain forward passes."""
    model, processor = ALL_FAMILIES[family].build()
    total = 0.0
    n = sum(int(mask[1:].sum()) for mask in masks)
    for chat, mask in zip(chats, masks, strict=True):
        inputs = processor.apply_chat_template([chat], tokenize=True, return_dict=True, return_tensors="pt")
        inputs = inputs.to(model.dtype)  # Llama 4's processor returns bfloat16
        labels = inputs["input_ids"].masked_fill(~mask, -100)
        loss = model(**inputs, labels=labels).loss * int(mask[1:].sum()) / n
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def flat(gradients, names):
    return torch.cat([gradients[name].flatten() for name in names])


def mixed_rows(family="qwen2_5_omni"):
    """Returns conversations with an image, a sound, a video, several of them, and none."""
    chats = [
        [*prompt, {"role": "assistant", "content": [{"type": "text", "text": ANSWERS[i % 4]}]}]
        for i, prompt in enumerate(ALL_FAMILIES[family].prompts())
    ]
    chats.append([say("user", "How are you?"), say("assistant", "Well.")])
    return chats


def inline(chat):
    def block(part):
        sounds = part["type"] == "audio"
        return {"type": "audio", "audio": {"array": part["audio"], "sampling_rate": RATE}} if sounds else part

    return [{**message, "content": [block(part) for part in message["content"]]} for message in chat]


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("family", ["qwen2_5_omni", "llama4", "gemma3n"])
def test_loss_and_gradient_are_the_models_own(family, packing, tmp_path):
    """
    Compares several rows with all kinds of media in a forward pass with transformers' loss of one row at a time. Llama
    4 scales queries by their places in the row, and the gradient of Gemma 3n's padding isn't finite.
    """
    chats = mixed_rows(family)
    rows = [{"messages": inline(chat)} for chat in chats]
    dataset = Dataset.from_dict({"n": range(len(rows))}).with_transform(
        lambda batch: {"messages": [rows[n]["messages"] for n in batch["n"]]}
    )
    options = {"packing": packing, "per_device_train_batch_size": len(rows), "router_aux_loss_coef": 0.0}
    objects = dict(zip(("model", "processing_class"), ALL_FAMILIES[family].build(), strict=True))
    trainer = make("qwen2_5_omni", dataset, tmp_path, objects=objects, assistant_only_loss=True, **options)
    trainer.model.train()
    batch = trainer.data_collator([dataset[i] for i in range(len(rows))])
    masks = [each.learned for each in batch["sequences"]]
    decode = trainer.processing_class.tokenizer.decode
    learned = [decode(each.input_ids[each.learned]) for each in batch["sequences"]]
    assert learned == [f"{chat[-1]['content'][0]['text']}<|im_end|>\n" for chat in chats]
    n = sum(int(mask[1:].sum()) for mask in masks)
    assert trainer._policy.worth_packing(batch["sequences"], [0] * len(rows), len(rows)) == packing
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(n))
    loss.backward()
    gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
    own_loss, own = own_gradients(family, chats, masks)
    assert loss.item() == pytest.approx(own_loss, rel=1e-5)
    names = own.keys() & gradients.keys()
    assert all(not gradients[name].any() for name in gradients.keys() - names) and len(names) > 20
    expected = flat(own, names)
    assert (flat(gradients, names) - expected).norm() <= 1e-5 * expected.norm()


def test_the_first_rows_are_compared_with_the_models_own_forward(tmp_path, capsys):
    trainer = make("qwen2_5_vl", picture_rows(), tmp_path, packing=True, max_steps=1)
    trainer.train()
    check = trainer.checks.self_check
    printed = capsys.readouterr().out
    lines = re.findall(r"^  (\w+) rows vs. model's forward +(\S+)$", printed, re.MULTILINE)
    assert [(name, float(value)) for name, value in lines] == [
        ("padded", pytest.approx(check.padded, rel=0.5)),
        ("packed", pytest.approx(check.packed, rel=0.5)),
    ]
    assert 0 < max(check.padded, check.packed) < 1e-5
    trainer.create_model_card()
    assert "padded rows vs. model's forward" in (tmp_path / "README.md").read_text()
    silent = make("qwen2_5_vl", picture_rows(), tmp_path, max_steps=1, self_check=False)
    silent.train()
    assert silent.checks.self_check is None and "self-check" not in capsys.readouterr().out


def test_answers_before_a_long_last_turn_are_compared(tmp_path):
    """None of the last 256 tokens is learned. The model's forward computes logits from the first compared token on."""
    chats = [[say("user", "<image>", "What is it?"), say("assistant", answer)] for answer in ANSWERS[:2]]
    rows = [{"messages": [*chat, say("user", "Is it? " * 150)], "image": image(56, 56)["image"]} for chat in chats]
    options = {"assistant_only_loss": True, "max_steps": 1, "gradient_accumulation_steps": 1}
    trainer = make("qwen2_5_vl", Dataset.from_list(rows), tmp_path, GENERATION, **options)
    batch = trainer.data_collator([dict(row) for row in trainer.train_dataset])
    assert not any(sequence.learned[-256:].any() for sequence in batch["sequences"])
    trainer.train()
    assert 0 < trainer.checks.self_check.padded < 1e-5


@pytest.mark.gate
def test_rows_that_change_each_other_get_forwards_of_their_own(tmp_path, monkeypatch):
    """Breaks the correction of Llama 4. The fallback gives the same updates, and a resumed run has it, too."""
    options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 4}
    options |= {"router_aux_loss_coef": 0.0}  # Llama 4 of older releases returns no router logits
    rows = text_rows(8, form="chat")
    expected = weights_after(make("llama4", rows, tmp_path / "whole", **options))
    monkeypatch.setattr(logprobs, "_token_positions", lambda model, positions: {})
    broken = make("llama4", rows, tmp_path / "broken", **options)
    assert torch.dist(weights_after(broken), expected) <= 1e-5 * expected.norm()
    assert broken._policy.fallbacks.isolate == "prompt" and broken.checks.self_check.padded < 1e-5
    unchecked = make("llama4", rows, tmp_path / "unchecked", self_check=False, **options)
    assert torch.dist(weights_after(unchecked), expected) > 1e-4 * expected.norm()
    resumed = make("llama4", rows, tmp_path / "broken", **options)
    resumed.train(f"{tmp_path}/broken/checkpoint-1")
    assert resumed._policy.fallbacks == broken._policy.fallbacks and resumed.checks.self_check is not None


def weights_after(trainer) -> torch.Tensor:
    """Returns the update of all weights."""
    before = torch.cat([parameter.detach().flatten().clone() for parameter in trainer.model.parameters()])
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]) - before


def test_rows_that_no_forward_scores_exactly_end_the_run(tmp_path, monkeypatch):
    """Images at the positions of text."""
    monkeypatch.setattr(prompts, "prompt_position_ids", lambda model, ids, *_: torch.arange(len(ids))[None])
    trainer = make("qwen2_5_vl", picture_rows(), tmp_path, max_steps=1)
    message = "qwen2_5_vl can't be trained exactly: scores of padded rows differ by .* the model's forward"
    with pytest.raises(RuntimeError, match=message):
        trainer.train()


SAID = {
    "messages": lambda asked: {"messages": [asked, say("assistant", "A cat.")]},
    "pair": lambda asked: {"prompt": [asked], "completion": [say("assistant", "A cat.")]},
    "texts": lambda asked: {"prompt": "What is it?", "completion": "A cat."},
    "text": lambda asked: {"text": "What is it? A cat."},
    "tokens": lambda asked: {"input_ids": [5, 6, 7]},
}


@pytest.mark.parametrize("form", SAID)
@pytest.mark.parametrize("options", [{}, {"assistant_only_loss": True}, {"packing": True}], ids=str)
def test_a_family_without_answers_says_so_at_construction(form, options, tmp_path):
    """Voxtral's tokenizer refuses conversations that end with the assistant."""
    dataset = Dataset.from_list([SAID[form](say("user", "What is it?"))] * 2)
    args = MultimodalSFTConfig(str(tmp_path), **{**PAIRS, **options})
    with pytest.raises(ValueError, match="^VoxtralProcessor can't encode supervised rows: mistral-common .*; train "):
        MultimodalSFTTrainer(model=str(saved("voxtral")), args=args, train_dataset=dataset)


def test_a_family_without_answers_says_so_to_ppo(tmp_path):
    args = CONFIGS["ppo"](str(tmp_path), **PLAIN, per_device_train_batch_size=2, num_generations=2, ptx_coef=1.0)
    objects = {"train_dataset": asked_rows(2), "ptx_dataset": text_rows(2), "reward_funcs": lambda **kwargs: [0.0] * 2}
    with pytest.raises(ValueError, match="^VoxtralProcessor can't encode supervised rows: mistral-common .*; train "):
        TRAINERS["ppo"](model=str(saved("voxtral")), args=args, **objects).train()


@pytest.mark.parametrize("kind", ["sft", "grpo"])
def test_models_without_gradient_checkpointing_train_with_trls_default(kind, tmp_path, caplog):
    """Granite Speech has none."""
    model, processor = ALL_FAMILIES["granite_speech"].build()
    options = {**PLAIN, "max_steps": 1, "gradient_checkpointing": True, "per_device_train_batch_size": 2}
    objects = {"model": model, "processing_class": processor}
    if kind == "sft":
        args = MultimodalSFTConfig(str(tmp_path), **options)
        trainer = MultimodalSFTTrainer(args=args, train_dataset=text_rows(2, form="chat"), **objects)
    else:
        args = CONFIGS["grpo"](str(tmp_path), num_generations=2, max_completion_length=4, **options)
        objects["reward_funcs"] = lambda completion_ids, **kwargs: [float(sum(ids) % 7) for ids in completion_ids]
        trainer = TRAINERS["grpo"](args=args, train_dataset=asked_rows(2), **objects)
    trainer.train()
    assert trainer.state.global_step == 1
    assert "GraniteSpeechForConditionalGeneration has no gradient checkpointing" in caplog.text


def asked_rows(n):
    return Dataset.from_list([{"prompt": [{"role": "user", "content": f"Is there a bird? {i}"}]} for i in range(n)])


def test_parts_of_a_token_budget_make_the_same_updates(tmp_path):
    options = {"packing": True, "per_device_train_batch_size": 4}
    whole = trained(make("qwen2_audio", sound_rows(), tmp_path, **options))
    trainer = make("qwen2_audio", sound_rows(), tmp_path, max_tokens_per_microbatch=60, **options)
    parts = trained(trainer)
    assert_same(whole, parts)
    assert all(entry["token_budget/parts"] > 1 for entry in trainer.state.log_history[:-1])


# Runs


def test_resumed_run_is_the_one_that_did_not_stop(tmp_path):
    """Resumes in the second epoch, with rows read ahead, a stateful optimizer, dropout, and evaluation."""
    options = {
        "max_steps": 5,
        "optim": "adamw_torch",
        "lr_scheduler_type": "linear",
        "save_strategy": "steps",
        "save_steps": 1,
        "packing": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "dataloader_num_workers": 2,
    }
    objects = {"eval_dataset": sound_rows(3), "peft_config": LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)}
    trainers = [make("qwen2_audio", sound_rows(7), tmp_path, objects=dict(objects), **options) for _ in range(2)]
    trainers[0].train()
    trainers[1].train(f"{tmp_path}/checkpoint-3")
    one, other = (logged(trainer, but=set()) for trainer in trainers)
    assert one == other and len(one) == 9
    weights = [dict(each.model.named_parameters()) for each in trainers]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_by_name_into_grpo_and_ppo(tmp_path):
    """Uses a folder's name without a processor, and runs a step of each trainer on the trained model."""
    rows = picture_rows(4, form="prompt")
    args = MultimodalSFTConfig(str(tmp_path / "sft"), **PAIRS, packing=True)
    trainer = MultimodalSFTTrainer(str(saved("qwen2_5_vl")), args, train_dataset=rows)
    trainer.train()
    trainer.save_model()
    trainer.create_model_card("model")
    card = (tmp_path / "sft" / "README.md").read_text()
    assert "SFT" in card and "image-text-to-text" in card and "`nll` of completions" in card
    weights = dict(trainer.model.named_parameters())
    plain = {k: v for k, v in PAIRS.items() if k != "gradient_accumulation_steps"} | {"max_steps": 1}
    for kind in ("grpo", "ppo"):
        config = CONFIGS[kind](str(tmp_path / "rl"), **plain, num_generations=2, max_completion_length=4)
        goes_on = TRAINERS[kind](
            str(tmp_path / "sft"),
            lambda completions, **kwargs: [0.1 * len(each[0]["content"]) for each in completions],
            config,
            rows.remove_columns("completion"),
        )
        start = {name: p for name, p in goes_on.model.named_parameters() if not name.startswith("critic.")}
        assert all(torch.equal(start[name], weights[name]) for name in weights)
        goes_on.train()
        assert goes_on.state.global_step == 1


def test_no_batch_is_an_error(tmp_path):
    trainer = make("qwen2_5_vl", text_rows(1), tmp_path, per_device_train_batch_size=2, dataloader_drop_last=True)
    with pytest.raises(
        ValueError, match="`train_dataset` has 1 rows, fewer than a batch of 2, so there is nothing to train on"
    ):
        trainer.train()


# Rows


def encoded(row, family="qwen2_5_vl", **options):
    model, processor = load(family)
    return SupervisedEncoder(processor, model).encode_sequence(row, **options)


def test_loss_on_each_answer_of_a_conversation():
    row = album_rows(1)[0]
    sequence = encoded(row, assistant_only=True)
    model, processor = load("qwen2_5_vl")
    runs = sequence.learned.int().diff(prepend=torch.zeros(1)).eq(1).sum()
    learned = processor.tokenizer.decode(sequence.input_ids[sequence.learned])
    assert runs == 2 and learned == f"{ANSWERS[0]}<|im_end|>\n{ANSWERS[1]}<|im_end|>\n"
    assert len(sequence.media["image_grid_thw"]) == 2


WRONG = {
    "no answer": ({"prompt": "Is it?"}, {}, "row 0 has .* needs `prompt` and `completion`, or `messages`"),
    "no assistant": (
        {"messages": [say("user", "Is it?")]},
        {"assistant_only_loss": True},
        "row 0 has nothing to learn",
    ),
    "media of the assistant": (
        {"messages": [say("user", "Is it?"), say("assistant", "<image>")], "image": image(56, 56)["image"]},
        {},
        "row 0, column 'image': assistant messages must be text",
    ),
    "completions of conversations": (
        {"messages": [say("user", "Is it?"), say("assistant", "Yes.")]},
        {"completion_only_loss": True},
        "row 0, column 'messages': `completion_only_loss=True` needs `prompt` and `completion`",
    ),
    "ids beyond the vocabulary": (
        {"input_ids": [60, 61, 100_000]},
        {},
        r"row 0 has token ids from 60 to 100000, and the model has 0 to \d+; tokenize with the model's tokenizer",
    ),
    "ids below the vocabulary": ({"input_ids": [60, -7, 61]}, {}, "row 0 has token ids from -7 to 61, and the model"),
    "too few images": (
        {
            "messages": [say("user", "<image>", "<image>", "?"), say("assistant", "Yes.")],
            "image": image(56, 56)["image"],
        },
        {},
        "row 0.*image",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_name_the_row(name, tmp_path):
    row, options, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        make(
            "qwen2_5_vl", Dataset.from_list([row] * 4), tmp_path, train_sampling_strategy="sequential", **options
        ).train()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("form, options", [("text", {}), ("chat", {"packing": True}), ("labels", {})])
def test_rows_that_max_length_cuts_off_are_dropped_and_counted(form, options, streams, tmp_path):
    """Also the first of a stream, and rows whose transform shows only then what is learned of them."""
    rows = [*text_rows(6, form="text" if form == "labels" else form)]
    if form == "chat":
        rows = [{"prompt": row["messages"][:1], "completion": row["messages"][1:]} for row in rows]
    sequences = make("qwen2_5_vl", Dataset.from_list(rows), tmp_path).data_collator(rows)["sequences"]
    starts = [int(each.learned.int().argmax()) for each in sequences]
    if form == "labels":
        labels = [each.input_ids.where(each.learned, -100).tolist() for each in sequences]
        rows = [{"input_ids": e.input_ids.tolist(), "labels": own} for e, own in zip(sequences, labels, strict=True)]
    data = Dataset.from_list([rows[i] for i in sorted(range(6), key=lambda i: -starts[i])])  # those to drop first
    n_dropped = starts.count(max(starts))
    given = {"max_length": max(starts), "max_steps": 3, "per_device_train_batch_size": 1, "self_check": False}
    given |= {"train_sampling_strategy": "sequential", **options}
    given_rows = data.to_iterable_dataset() if streams else data.with_transform(dict)
    trainer = make("qwen2_5_vl", given_rows, tmp_path, **given)
    trainer.train()
    logs = trainer.state.log_history[:-1]
    assert len(logs) == 3 and all(entry["loss"] > 0 and entry["grad_norm"] > 0 for entry in logs)
    assert sum(entry["media/skipped"] for entry in logs) > 0 < n_dropped < 6
    assert trainer._stream.skipped.keys() == {*range(n_dropped)}
    assert (tmp_path / "skipped_rows.jsonl").read_text().count("leaves none to learn") == n_dropped
    found = trainer.evaluate(data)
    kept = trainer.evaluate(data.select(range(n_dropped, 6)))
    assert found["eval_loss"] == pytest.approx(kept["eval_loss"]) and kept["eval_media/skipped"] == 0
    is_filtered_before = form == "labels" or "packing" in options
    assert found["eval_media/skipped"] == (0 if is_filtered_before else n_dropped)


@pytest.mark.parametrize("streams", [False, True])
def test_no_row_that_max_length_leaves_something_of_is_an_error(streams, tmp_path):
    rows = text_rows(4)
    with pytest.raises(ValueError, match=r"None .* row \d has \d+ tokens, of which `max_length` \(4\) leave"):
        make("qwen2_5_vl", rows.to_iterable_dataset() if streams else rows, tmp_path, max_length=4).train()
    trainer = make("qwen2_5_vl", rows.to_iterable_dataset(), tmp_path, max_length=4)
    with pytest.raises(ValueError, match="No row to evaluate can be read"):
        trainer.evaluate(rows)


def trl_template(name):
    return (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()


# An answer by a template that TRL has: what is learned of it, or why it is refused
THOUGHT = {"reasoning_content": "Fur.", "content": "A cat"}
WRITTEN = {"content": "<think>\nFur.\n</think>\n\nA cat"}
SAMPLED = {"content": "Fur.\n</think>\n\nA cat"}  # behind a prompt that opens thoughts
WHOLE = "Fur.\n</think>\n\nA cat<|im_end|>\n"
THOUGHTS = {
    "unknown": ("qwen3_vl", THOUGHT, "leaves out 'reasoning_content' of a message"),
    "doubled": ("qwen3_8", SAMPLED, "writes thoughts of its own before a text with thoughts; give the thoughts as '"),
    "doubled tag": ("qwen3_8", WRITTEN, "writes thoughts of its own before a text with thoughts"),
    "cut": ("deepseek_r1_distill", WRITTEN, "leaves out a part of a text with thoughts"),
    "field": ("qwen3_8", THOUGHT, WHOLE),
    "split": ("qwen3_5_think", SAMPLED, WHOLE),
    "split tag": ("qwen3_5_think", WRITTEN, WHOLE),
    "as it is": ("qwen3_vl", WRITTEN, f"<think>\n{WHOLE}"),
}


@pytest.mark.parametrize("form", ["completion", "messages"])
@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_are_learned_once_or_refused(name, form, tmp_path):
    template, answer, expected = THOUGHTS[name]
    asked = {"role": "user", "content": "What is it?"}
    answer = {"role": "assistant", **answer}
    row = {"prompt": [asked], "completion": [answer]} if form == "completion" else {"messages": [asked, answer]}
    trainer = make("qwen3_5", Dataset.from_list([row] * 4), tmp_path, trl_template(template), max_steps=1)
    if "<|im_end|>" not in expected:
        place = r"completion\[0\]" if form == "completion" else r"messages\[1\]"
        with pytest.raises(ValueError, match=rf"row \d, column '{place}': the chat template {expected}"):
            trainer.train()
        return
    (sequence,) = trainer.data_collator([row])["sequences"]
    learned = trainer.processing_class.tokenizer.decode(sequence.input_ids[sequence.learned])
    assert learned.lstrip("\n").endswith(expected) and learned.count("</think>") == 1


@pytest.mark.parametrize("name", LOST)
def test_what_the_template_leaves_out_of_answers_is_refused(name, tmp_path):
    answer, message = LOST[name]
    rows = Dataset.from_list([{"prompt": [say("user", "Hm?")], "completion": [{"role": "assistant", **answer}]}])
    with pytest.raises(ValueError, match=rf"row 0, column 'completion\[0\]{message}"):
        make("qwen2_5_vl", rows, tmp_path, per_device_train_batch_size=1).train()


NUMBERS = [{"text": 3}, {"text": None}, {"prompt": "a", "completion": 3}, {"prompt": 3, "completion": "a"}]


@pytest.mark.parametrize("row", [*NUMBERS, {"messages": 3}, {"prompt": "a", "completion": float("nan")}], ids=str)
def test_numbers_for_texts_are_refused(row, tmp_path):
    with pytest.raises(
        ValueError, match=r"row \d.*(of type int; give|needs `prompt` and|(int|NoneType) in place of text)"
    ):
        make("qwen2_5_vl", Dataset.from_list([row] * 4), tmp_path).train()


def test_masks_hold_truth_values(tmp_path):
    row = {"input_ids": [60, 61, 62], "completion_mask": ["so", "1", "1"]}
    with pytest.raises(ValueError, match="row \\d, column 'completion_mask': is 'so' of type str; give True or False"):
        make("qwen2_5_vl", Dataset.from_list([row] * 4), tmp_path, completion_only_loss=True).train()


def test_rows_with_media_are_never_cut(tmp_path):
    row = {"image": image(112, 112)["image"], "prompt": "What is it?", "completion": "A cat."}
    trainer = make("qwen2_5_vl", Dataset.from_list([row] * 4), tmp_path, max_length=20)
    trainer.train()
    assert trainer.state.log_history[0]["rows/longer_with_media"] == 4
    assert len(trainer.data_collator([row])["sequences"][0]) > 20 and not trainer._stream.skipped


@pytest.mark.parametrize(
    "option",
    [
        {"dataset_kwargs": {"add_special_tokens": False}},
        {"label_smoothing_factor": 0.1},
        {"train_sampling_strategy": "group_by_length"},
        {"neftune_noise_alpha": 5.0, "packing": True},
        {"max_length": 1},
        {"on_media_error": "ignore"},
    ],
)
def test_options_without_effect_are_refused(option, tmp_path):
    with pytest.raises(ValueError, match=next(iter(option))):
        MultimodalSFTConfig(str(tmp_path), **PAIRS, **option)


def test_prefix_models_learn_completions_only(tmp_path):
    """Such a model's bidirectional attention would reveal the answer."""
    model, processor = load("paligemma")
    row = {"prompt": [say("user", "What is it?")], "completion": [say("assistant", "A cat.")]}
    row["image"] = image(56, 56)["image"]
    encoder = SupervisedEncoder(processor, model)
    assert encoder.encode_sequence(row).learned.any()
    with pytest.raises(ValueError, match="row 0: paligemma has bidirectional attention before an answer"):
        encoder.encode_sequence(row, completion_only=False)
