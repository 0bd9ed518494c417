# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Preferences with media: updates and metrics are TRL's, and those of the model's own forward."""

import copy
import functools
import math
from contextlib import nullcontext
from itertools import product

import pytest
import torch
from datasets import Dataset
from helpers.chats import RATE, image
from helpers.chats import turn as chat
from helpers.families import ALL_FAMILIES
from helpers.marks import slow_but
from helpers.trainer_utils import (
    PLAIN,
    assert_equal,
    assert_update_is_gradient,
    counted_calls,
    make_trainer,
    run,
    shifted,
    sound,
    with_media,
)
from helpers.trainer_utils import load as load_model
from peft import LoraConfig, get_peft_model
from torch.nn.functional import logsigmoid
from trl import DPOConfig, DPOTrainer
from trl.kernels import chunked_logprob
from trl.trainer import dpo_trainer

from trl_multimodal_rft import MultimodalDPOConfig, MultimodalDPOTrainer, MultimodalRewardTrainer
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.encoding import supervised
from trl_multimodal_rft.trainers.base import multimodal_config


YES = ["It is a cat.", "Two birds sing, one after the other.", "red", "There is a dog here"]
NO = ["blue", "No", "It is a bird and a dog", "7"]
SIZES = [(84, 56), (56, 56), (112, 84), (56, 112)]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
IN_ORDER = {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "max_length": None}
MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}

# Losses of the ratios alone, in one sum
OF_RATIOS = "hinge ipo nca_pair sppo_hard aot aot_unpaired apo_zero apo_down discopop".split()
CASES = {
    "sigmoid": {"loss_type": ["sigmoid"]},
    "bco_pair": {"loss_type": ["bco_pair"]},
    "sft": {"loss_type": ["sft"]},
    "of ratios": {
        "loss_type": OF_RATIOS,
        "loss_weights": [1 + i / 4 for i in range(len(OF_RATIOS))],
        "dtype": torch.float64,
    },
    "sigmoid_norm": {"loss_type": ["sigmoid_norm"], "dtype": torch.float64},
    "exo_pair": {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "MPO": MPO,
    "forward_kl": {
        "f_divergence_type": "forward_kl",
        "distance": 0.001,
        "learning_rate": 0.1,
        "dtype": torch.float64,
    },
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence", "dtype": torch.float64},
    "length desensitized": {"ld_alpha": 0.3},
    "weighted": {"use_weighting": True, "learning_rate": 1.0},
    "accumulated": {**MPO, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "adapter": {**MPO, "objects": {"peft_config": LORA}},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "checkpointing": {**MPO, "gradient_checkpointing": True},
}


def pairs(n=8):
    """Preferences of texts in messages."""
    return [
        {
            "prompt": chat("user", "What is it?" + " Is there a cat?" * (i % 3)),
            "chosen": chat("assistant", YES[i % 4]),
            "rejected": chat("assistant", NO[i % 4]),
        }
        for i in range(n)
    ]


@functools.cache
def image_pairs(n=8):
    rows = pairs(n)
    return Dataset.from_list([{**row, "image": image(*SIZES[i % 4], seed=i)["image"]} for i, row in enumerate(rows)])


def text_pairs(n=8):
    return Dataset.from_list(pairs(n))


def sound_pairs(n=8):
    return with_media(Dataset.from_list(pairs(n)), "audio", [sound(0.3 + 0.2 * (i % 4), seed=i) for i in range(n)])


def trained(trainer_class, family, rows, *, distance=0.02, dtype=torch.float32, objects=None, **options):
    """Trains from a reference that differs from the policy, so that the first update has ratios other than 1."""
    objects = dict(objects or {})
    model, processor = load_model(family)
    if "peft_config" not in objects and not options.get("sync_ref_model"):
        objects["ref_model"] = shifted(load_model(family)[0], distance).to(dtype)
    objects = {"model": model.to(dtype), "processing_class": processor, **objects}
    options = {**IN_ORDER, "learning_rate": 0.03, **options}
    result = run(trainer_class, family, rows, reward=None, objects=objects, **options)
    result.history[-1].pop("total_flos")  # counted by the names of inputs
    return result


trl_run = functools.cache(lambda name: trained(DPOTrainer, "qwen2_5_vl", image_pairs(), **CASES[name]))


class DoubleTorch:
    """The module `torch`, in which single precision is double."""

    float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@pytest.mark.parametrize("name", slow_but(CASES, "sigmoid", "MPO", "weighted", "length desensitized", "adapter"))
def test_equals_trl_with_images(name, monkeypatch):
    if "dtype" in CASES[name]:
        # Powers and means of probabilities amplify the rounding of TRL's head and loss to 2.6e-5
        single = torch.Tensor.float
        monkeypatch.setattr(torch.Tensor, "float", lambda x: x if x.dtype == torch.float64 else single(x))
        for module in (dpo_trainer, chunked_logprob):
            monkeypatch.setattr(module, "torch", DoubleTorch())
    ours = trained(MultimodalDPOTrainer, "qwen2_5_vl", image_pairs(), **CASES[name])
    assert_equal(trl_run(name), ours, of_metrics=1e-5)


@pytest.mark.parametrize("options", [{"packing": "padded"}, {"max_tokens_per_microbatch": 60}], ids=str)
@pytest.mark.parametrize("name", ["MPO", "adapter"])
def test_equals_trl_padded_and_in_parts(name, options):
    ours = trained(MultimodalDPOTrainer, "qwen2_5_vl", image_pairs(), **CASES[name], **options)
    for entry in ours.history:
        assert entry.pop("token_budget/parts", 2) > 1
        entry.pop("token_budget/extra_time", None)
    assert_equal(trl_run(name), ours, of_metrics=1e-5)


# Comparison with the model


def conversations(family):
    """Rows of a family's chats, which have images, sounds, videos, several of them, and none."""
    prompts = [*ALL_FAMILIES[family].prompts(), chat("user", [{"type": "text", "text": "How are you?"}])]

    def block(part):
        sounds = part["type"] == "audio"
        return {"type": "audio", "audio": {"array": part["audio"], "sampling_rate": RATE}} if sounds else part

    answers = [[{"type": "text", "text": text}] for text in YES + NO]
    rows = [
        {
            "prompt": [{**message, "content": [block(part) for part in message["content"]]} for message in prompt],
            "chosen": chat("assistant", answers[i % 4]),
            "rejected": chat("assistant", answers[4 + i % 4]),
        }
        for i, prompt in enumerate(prompts)
    ]
    dataset = Dataset.from_dict({"n": range(len(rows))})
    dataset = dataset.with_transform(lambda batch: {k: [rows[n][k] for n in batch["n"]] for k in rows[0]})
    return prompts, answers, dataset


def own_logps(model, processor, prompts, answers):
    """Log-probabilities of the tokens of each prompt's answer, from a forward of each conversation."""
    logps = []
    for i, prompt in enumerate(prompts):
        said = [*prompt, *chat("assistant", answers[i % 4])]
        options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        if any(part["type"] == "video" for part in prompt[0]["content"]):
            options["processor_kwargs"] = {"videos_kwargs": {"do_sample_frames": False}}
        inputs = processor.apply_chat_template([said], **options).to(torch.float64)
        n = processor.apply_chat_template([prompt], add_generation_prompt=True, **options)["input_ids"].size(1)
        logits = model(**inputs).logits[:, n - 1 : -1].log_softmax(-1)
        logps.append(logits.gather(-1, inputs["input_ids"][:, n:, None]).flatten())
    return logps


def sums(logps):
    return torch.stack([each.sum() for each in logps])


def under_view(view, prompt, row):
    """A prompt whose media are decoded media under a view, and whether it replaces any."""
    parts = []
    index = 0
    for part in prompt[0]["content"]:
        kind = part["type"]
        if kind != "text":
            if view.applies_to(kind):
                part = {**part, kind: view.seeded(SEED, row)(part[kind], index)}
            index += 1
        parts.append(part)
    return [{**prompt[0], "content": parts}], any(view.applies_to(part["type"]) for part in parts)


SEED = 5
# Media, a reference, or a layout of the forward that a view goes through; the first one isn't slow
VIEWED = {
    "images, sounds and videos": {"family": "qwen2_5_omni", "view": "blank(anchor=0.5, anchor_coef=2.0)"},
    "padded": {"family": "qwen2_5_omni", "view": "blank", "packing": "padded"},
    "in parts": {"family": "qwen2_5_omni", "view": "mask_patches", "max_tokens_per_microbatch": 60},
    "accumulated": {"family": "qwen2_5_omni", "view": "blank(anchor_coef=0)", "per_device_train_batch_size": 1},
    "LoRA": {"family": "qwen2_5_omni", "view": "mask_patches(ratio=0.9)", "peft_config": LORA},
    "sounds": {"family": "qwen2_audio", "view": "mask_audio(conditional_coef=0.5, anchor_coef=2.0)"},
    "measured": {"family": "qwen2_audio", "view": "blank(anchor=-1.0)", "media_contribution_steps": 1},
    "videos": {"family": "qwen3_vl", "view": "shuffle_frames"},
}


@pytest.mark.parametrize(
    "options",
    [
        *(
            pytest.param(
                {"family": f, "packing": p}, id=f"{f}-{p}", marks=[] if f == "qwen2_5_omni" else pytest.mark.slow
            )
            for f, p in product(("qwen2_5_omni", "qwen2_audio", "qwen3_vl"), ("prefix", "padded"))
        ),
        *(
            pytest.param(each, id=name, marks=pytest.mark.slow if i else [])
            for i, (name, each) in enumerate(VIEWED.items())
        ),
    ],
)
def test_updates_are_those_of_the_papers(options, tmp_path):
    """
    Compares with equation 7 of DPO, and with a view with the conditional and the anchored preference of mDPO, in
    float64, on a plain forward of each prompt with each completion.
    """
    options = {"view": None, "peft_config": None, **options}
    family, view, peft_config = (options.pop(name) for name in ("family", "view", "peft_config"))
    prompts, answers, dataset = conversations(family)
    n = len(prompts)
    model, processor = ALL_FAMILIES[family].build()
    plain = copy.deepcopy(model).double().eval()
    reference = shifted(copy.deepcopy(model).double().eval())
    objects = {"model": model.double(), "processing_class": processor, "peft_config": peft_config}
    if peft_config is None:
        objects["ref_model"] = copy.deepcopy(reference)
    options = {**PLAIN, **IN_ORDER, "per_device_train_batch_size": n, "router_aux_loss_coef": 0.0, **options}
    options |= {"max_steps": 1, "seed": SEED, "rejected_view": view, "learning_rate": 0.1}
    options["gradient_accumulation_steps"] = n // options["per_device_train_batch_size"]
    args = MultimodalDPOConfig(str(tmp_path), beta=0.3, **options)
    trainer = MultimodalDPOTrainer(args=args, train_dataset=dataset, **objects)
    if peft_config is not None:
        plain = get_peft_model(plain, peft_config).double().eval()
        plain.load_state_dict(trainer.model.state_dict())
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    settings = args.rejected_view_settings
    views = [under_view(settings.view, prompt, i) if view else (prompt, False) for i, prompt in enumerate(prompts)]

    def ratios(prompts, answers):
        current = sums(own_logps(plain, processor, prompts, answers))
        with torch.no_grad(), nullcontext() if peft_config is None else plain.disable_adapter():
            by_reference = sums(own_logps(plain if peft_config else reference, processor, prompts, answers))
        return current - by_reference

    chosen = ratios(prompts, answers[:4])
    rejected = ratios(prompts, answers[4:])
    expected = -logsigmoid(0.3 * (chosen - rejected))
    log = trainer.state.log_history[0]
    if view:
        has = torch.tensor([has for _, has in views])
        assert has.any() and not has.all()
        other = ratios([prompt for prompt, _ in views], answers[:4])
        terms = settings.conditional_coef * -logsigmoid(0.3 * chosen - 0.3 * other)
        expected = expected + has * (terms + settings.anchor_coef * -logsigmoid(0.3 * chosen - settings.anchor))
        means = {"rewards/view": 0.3 * other, "rewards/view_margins": 0.3 * (chosen - other)}
        if options["gradient_accumulation_steps"] == 1:  # else a mean of the means of micro-batches
            for name, values in means.items():
                assert log[name] == pytest.approx(values[has].mean().item(), rel=1e-4), name
    else:
        assert not any("view" in name for name in log)
    assert log.get("token_budget/parts", 1) > ("max_tokens_per_microbatch" in options)
    if "media_contribution_steps" in options:  # of the first two prompts, whose sounds the view makes silent
        with torch.no_grad():
            logps = [own_logps(plain, processor, each[:2], answers) for each in (prompts, [p for p, _ in views])]
        moved = torch.cat([(a - b).abs() for a, b in zip(*logps, strict=True)])
        assert log["media/contribution"] == pytest.approx(moved.mean().item(), rel=1e-4) and moved.mean() > 1e-3
    expected.mean().backward()
    assert log["loss"] == pytest.approx(expected.mean().item(), rel=1e-5)
    assert_update_is_gradient(before, trainer.model, plain, learning_rate=0.1)


# Runs


def test_the_prompt_is_encoded_and_forwarded_once(tmp_path, monkeypatch):
    encoded = counted_calls(monkeypatch, supervised, "encode_prompt")
    forwarded = []
    result = run_ours(image_pairs(4), tmp_path, max_steps=1, self_check=False, precompute_ref_log_probs=True)
    result.model.get_decoder().register_forward_hook(
        lambda module, args, kwargs, output: forwarded.append(kwargs["inputs_embeds"].shape[:2]), with_kwargs=True
    )
    encoded.clear()
    result.train()
    assert len(encoded) == 4 and len(forwarded) == 1
    batch = result.data_collator([image_pairs(4)[i] for i in range(4)])
    n_tokens = sum(map(len, batch["sequences"])) + int(batch["completion_mask"].sum())
    assert forwarded[0][0] == 1 and n_tokens <= forwarded[0][1] <= n_tokens + 8  # copies of last tokens


def run_ours(rows, folder, family="qwen2_5_vl", objects=None, **options):
    model, processor = load_model(family)
    objects = {"model": model, "processing_class": processor, **(objects or {})}
    args = MultimodalDPOConfig(str(folder), **{**PLAIN, **IN_ORDER, "learning_rate": 0.03, **options})
    return MultimodalDPOTrainer(args=args, train_dataset=rows, **objects)


def weights(trainer):
    trainer.train()
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


@pytest.mark.parametrize(
    "objects, view, size",
    [({}, None, 8), ({"peft_config": LORA}, None, 8), ({}, "mask_patches(ratio=0.7)", 8), ({}, "blank", 1)],
    ids=["whole", "adapter", "view", "view of some micro-batches"],
)
def test_a_reference_computed_before_the_run_is_the_same(objects, view, size, tmp_path):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "report_to": []}
    evaluated |= {"rejected_view": view, "per_device_train_batch_size": size}
    runs = []
    for precompute in (False, True):
        torch.manual_seed(0)
        trainer = run_ours(
            image_pairs() if view is None else mixed_pairs(),
            tmp_path,
            objects={**objects, "eval_dataset": image_pairs(4)},
            precompute_ref_log_probs=precompute,
            **evaluated,
        )
        assert (trainer.ref_model is None) == (precompute or "peft_config" in objects)
        runs.append(
            (weights(trainer), [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry])
        )
    torch.testing.assert_close(runs[0][0], runs[1][0], rtol=0, atol=1e-6)
    assert runs[0][1] == pytest.approx(runs[1][1], rel=1e-5) and len(runs[0][1]) == 2


def test_resuming_continues_bit_for_bit(tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "train_sampling_strategy": "random"}
    options |= {"sync_ref_model": True, "ref_model_sync_steps": 1, "optim": "adamw_torch", "learning_rate": 1e-3}
    options |= {"rejected_view": "mask_patches(ratio=0.5)", "media_contribution_steps": 3}
    whole = run_ours(image_pairs(), tmp_path, **options)
    expected = weights(whole)
    resumed = run_ours(image_pairs(), tmp_path, **options)
    resumed.train(f"{tmp_path}/checkpoint-2")
    assert torch.equal(torch.cat([each.detach().flatten() for each in resumed.model.parameters()]), expected)
    kept = ("loss", "num_tokens", "rewards/margins", "rewards/view_margins", "media/contribution")
    logs = [[[entry.get(name) for name in kept] for entry in each.state.log_history[:4]] for each in (whole, resumed)]
    assert logs[0] == logs[1] and [bool(entry[-1]) for entry in logs[0]] == [False, False, True, False]


def test_an_adapter_of_the_audio_tower_resumes_bit_for_bit(tmp_path):
    """Its reference, the tower without it, joins features of several sounds as before."""
    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 2}
    given = sound_pairs(), tmp_path, "qwen2_audio", {"peft_config": LORA}
    whole, resumed = (run_ours(*given, **options, optim="adamw_torch") for _ in range(2))
    expected = weights(whole)
    resumed.train(f"{tmp_path}/checkpoint-1")
    assert torch.equal(torch.cat([each.detach().flatten() for each in resumed.model.parameters()]), expected)


def mixed_pairs(n=8):
    """Every third row is text."""
    return image_pairs(n).map(lambda row, i: {**row, "image": None if i % 3 == 1 else row["image"]}, with_indices=True)


def test_a_view_of_another_row_is_of_the_next_one_with_media(tmp_path):
    trainer = run_ours(mixed_pairs(4), tmp_path, rejected_view="other_row", objects={"eval_dataset": mixed_pairs(4)})
    batch = trainer.data_collator([mixed_pairs(4)[i] for i in range(4)])
    pictures = [row["image"] for row in mixed_pairs(4)]
    assert [len(pair.sides) == 3 for pair in batch["sequences"]] == [True, False, True, True]
    for i, other, view in zip((0, 2, 3), (2, 3, 0), batch["prompts"][8:], strict=True):
        picture = pictures[other].resize(pictures[i].size)
        expected = trainer.processing_class.image_processor(picture, return_tensors="pt")["pixel_values"]
        assert torch.equal(view.media["pixel_values"], expected)
        assert torch.equal(view.input_ids, batch["sequences"][i].input_ids)
    trainer.train()
    assert trainer.evaluate()["eval_rewards/view_accuracies"] in (0, pytest.approx(1 / 3), pytest.approx(2 / 3), 1)


def test_rows_without_media_train_as_without_a_view(tmp_path):
    rows = text_pairs().to_iterable_dataset()
    options = {"max_steps": 1, "media_contribution_steps": 1}
    runs = [run_ours(rows, tmp_path, rejected_view=view, **options) for view in (None, "blank")]
    assert torch.equal(*map(weights, runs))
    assert not [name for run in runs for name in run.state.log_history[0] if "view" in name or "media" in name]


@pytest.mark.parametrize("family, rows", [("qwen2_audio", sound_pairs), ("qwen2_5_vl", text_pairs)])
def test_other_rows_train_and_evaluate(family, rows, tmp_path):
    trainer = run_ours(rows(), tmp_path, family, objects={"eval_dataset": rows(3)}, max_steps=1)
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_rewards/margins"} <= metrics.keys()
    assert ("eval_media/contribution" in metrics) == (family == "qwen2_audio")
    assert trainer.evaluate(rows(3))["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("form", ["messages", "whole conversations"])
def test_the_console_shows_the_first_pair(form, tmp_path, capsys):
    row = {**FORMS[form], "image": image(56, 56)["image"]}
    trainer = run_ours(Dataset.from_list([row] * 4), tmp_path, max_steps=1)
    trainer.train()
    assert "It is a cat." in capsys.readouterr().out


def test_the_model_is_the_reference_until_it_is_trained(tmp_path):
    """As in TRL, with a dataset whose reference wasn't computed before the run."""
    options = {"precompute_ref_log_probs": True, "max_steps": 1}
    trainer = run_ours(image_pairs(4), tmp_path, **options)
    assert trainer.evaluate(image_pairs(3))["eval_loss"] == pytest.approx(math.log(2), rel=1e-5)
    trainer.train()
    other = run_ours(image_pairs(4), tmp_path, objects={"ref_model": shifted(load_model("qwen2_5_vl")[0])}, **options)
    for each in (trainer, other):
        with pytest.raises(ValueError, match="dataset passed to `evaluate.*keeps no reference; pass it"):
            each.evaluate(image_pairs(3))


def test_a_reference_of_some_rows_is_an_error(tmp_path):
    options = {"precompute_ref_log_probs": True, "dataloader_drop_last": True, "per_device_eval_batch_size": 3}
    with pytest.raises(ValueError, match="The reference scored 3 of 4 rows; .* don't set `dataloader_drop_last`"):
        run_ours(image_pairs(4), tmp_path, **options)
    columns = {name: image_pairs(4)[:][name] for name in ("prompt", "chosen", "rejected")}
    narrow = image_pairs(4).with_transform(lambda batch: {k: v[: len(batch["prompt"])] for k, v in columns.items()})
    with pytest.raises(ValueError, match="the dataset's transform leaves out; let the transform keep"):
        run_ours(narrow, tmp_path, precompute_ref_log_probs=True)


# Rows


FORMS = {
    "messages": pairs(1)[0],
    "whole conversations": {name: pairs(1)[0]["prompt"] + pairs(1)[0][name] for name in ("chosen", "rejected")},
    "several turns": {
        **pairs(1)[0],
        "prompt": [*chat("user", "Who?"), *chat("assistant", "A cat."), *chat("user", "Why?")],
    },
    "text": {"prompt": "What is it?", "chosen": " A cat.", "rejected": " A dog, maybe."},
    "an answer without words": {"prompt": "What is it?", "chosen": " A cat.", "rejected": ""},
    "texts that start alike": {"chosen": "It is a cat.", "rejected": "It is a dog, maybe."},
}


@pytest.mark.parametrize("form", FORMS)
def test_texts_are_encoded_as_by_trl(form, tmp_path):
    rows = Dataset.from_list([FORMS[form]] * 2)
    model, processor = load_model("qwen2_5_vl")
    args = DPOConfig(str(tmp_path), **PLAIN)
    theirs = DPOTrainer(model, args=args, train_dataset=rows, processing_class=processor).train_dataset[0]
    pair = run_ours(rows, tmp_path).data_collator([rows[0]])["sequences"][0]
    assert pair.input_ids.tolist() == theirs["prompt_ids"]
    assert [side.ids for side in pair.sides] == [theirs["chosen_ids"], theirs["rejected_ids"]]


# Answers that the template writes in part: their message, and the error behind its place
LOST = {
    "unknown block": (
        {"content": [{"type": "document", "document": "Important"}, {"type": "text", "text": "A cat."}]},
        r".content\[0\]': the chat template leaves out blocks of type 'document'",
    ),
    "thinking block": (
        {"content": [{"type": "thinking", "thinking": "Fur."}, {"type": "text", "text": "A cat."}]},
        r".content\[0\]': the chat template leaves out blocks of type 'thinking'",
    ),
    "no content": ({"name": "x"}, "': the message has no content"),
    "None as content": ({"content": None, "tool_calls": []}, "': the message has no content"),
    "thoughts": (
        {"content": "A cat.", "reasoning_content": "Fur."},
        "': the chat template leaves out 'reasoning",
    ),
    "calls": ({"content": None, "tool_calls": [{"type": "function"}]}, "': the chat template leaves out 'tool_calls'"),
    "calls beside an empty text": (
        {"content": "", "tool_calls": [{"type": "function"}]},
        "': the chat template leaves out 'tool_calls'",
    ),
}

REFUSED = {
    "no answer": ({**pairs(1)[0], "rejected": []}, "row 0, column 'rejected': is an empty list; give a text or a l"),
    "missing answer": ({**pairs(1)[0], "chosen": None}, "row 0, column 'chosen': is None; give a text or a list of m"),
    "NaN": ({**pairs(1)[0], "chosen": math.nan}, "row 0, column 'chosen': is of type float; give a text or a list"),
    "number": (
        {"prompt": "Which?", "chosen": 1, "rejected": 2},
        "row 0, column 'chosen': is of type int; give a",
    ),
    "numbers": ({**pairs(1)[0], "rejected": [1, 2]}, r"row 0, column 'rejected\[0\]': a message must be a dictionary"),
    "message": ({**pairs(1)[0], "chosen": chat("assistant", "A")[0]}, "row 0, column 'chosen': is of type dict; give"),
    "prompt": ({**pairs(1)[0], "prompt": 3}, "row 0, column 'prompt': is of type int"),
    **{
        name: ({**pairs(1)[0], "chosen": [{"role": "assistant", **answer}]}, rf"row 0, column 'chosen\[0\]{message}")
        for name, (answer, message) in LOST.items()
    },
    "role": ({**pairs(1)[0], "chosen": chat("user", "A cat.")}, "row 0, column 'chosen': .* must be the assistant's"),
    "encoded": (
        {**pairs(1)[0], "chosen": '[{"role": "assistant", "content": "A"}]'},
        "row 0, column 'chosen': .* decode",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rows_are_refused_by_name(name, tmp_path):
    row, message = REFUSED[name]
    trainer = run_ours(Dataset.from_list([row]).with_transform(lambda batch: {k: [row[k]] for k in row}), tmp_path)
    with pytest.raises(ValueError, match=message):
        trainer.train()


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "rows, options, message",
    [
        (Dataset.from_list([{"prompt": "a", "completion": "b"}]), {}, r"train dataset has the columns .* it needs"),
        (Dataset.from_list([]), {}, "`train_dataset` has no rows"),
        (None, {}, "`train_dataset` is required"),
        (text_pairs(2), {"neftune_noise_alpha": 5.0}, "The noise of `neftune_noise_alpha` .* `packing='padded'`"),
        (
            image_pairs(2),
            {"truncation_mode": "keep_end", "max_length": 9},
            "'keep_end' is not supported for vision-",
        ),
        (text_pairs(2), {"sync_ref_model": True, "precompute_ref_log_probs": True}, "`sync_ref_model=True` updates"),
        (text_pairs(2), {"packing": "rows"}, "`packing`"),
        (text_pairs(2), {"rejected_view": "mask_patch"}, "Did you mean `mask_patches`"),
        (text_pairs(2), {"rejected_view": "blank(anchor_coeff=2.0)"}, "Did you mean `anchor_coef`"),
        (text_pairs(2), {"rejected_view": "blank(conditional_coef=0, anchor_coef=0)"}, "has no effect with"),
        (text_pairs(2), {"rejected_view": "blank", "ld_alpha": 0.5}, "`ld_alpha` compares the lengths"),
        (
            text_pairs(2),
            {"rejected_view": "other_row", "precompute_ref_log_probs": True},
            "'other_row' takes media from other rows of the micro-batch",
        ),
    ],
)
def test_datasets_and_options_are_refused(rows, options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_ours(rows, tmp_path, **options)


def test_completions_end_at_max_length(tmp_path):
    trainer = run_ours(text_pairs(2), tmp_path, max_length=20)
    whole = run_ours(text_pairs(2), tmp_path).data_collator([text_pairs(2)[0]])["sequences"][0]
    pair = trainer.data_collator([text_pairs(2)[0]])["sequences"][0]
    n = 20 - len(pair)
    assert 0 < n < len(whole.sides[0].ids)
    assert [side.ids for side in pair.sides] == [side.ids[:n] for side in whole.sides]
    with pytest.raises(MediaError, match=r"row \d has a prompt of \d+ tokens, .* none of `max_length` \(10\)"):
        run_ours(text_pairs(2), tmp_path, max_length=10)


@pytest.mark.parametrize("is_hidden", [False, True])
@pytest.mark.parametrize("precomputes", [False, True])
def test_rows_whose_prompt_fills_max_length_are_dropped(precomputes, is_hidden, tmp_path):
    """Before the epoch is counted, or when a transform shows them; in evaluations, and with a scored reference."""
    rows = text_pairs(6)
    sizes = [len(run_ours(rows, tmp_path).data_collator([row])["sequences"][0]) for row in rows]
    most = sorted(sizes)[3]
    kept = [i for i, size in enumerate(sizes) if size < most]
    options = {"max_length": most, "per_device_train_batch_size": 1, "num_train_epochs": 1, "max_steps": -1}
    options |= {"self_check": False, "precompute_ref_log_probs": precomputes}
    given = rows.with_transform(dict) if is_hidden else rows
    trainer = run_ours(given, tmp_path, objects={"eval_dataset": {"all": rows, "kept": rows.select(kept)}}, **options)
    assert 0 < len(kept) < 6 and len(trainer.train_dataset) == (6 if is_hidden else len(kept))
    trainer.train()
    assert trainer._stream.skipped.keys() == ({*range(6)} - {*kept} if is_hidden else set())
    assert trainer.state.max_steps == (6 if is_hidden else len(kept))
    assert (tmp_path / "skipped_rows.jsonl").read_text().count('"split": "train"') == 6 - len(kept)
    assert all(entry["loss"] > 0 and entry["grad_norm"] > 0 for entry in trainer.state.log_history[: len(kept)])
    found = trainer.evaluate()
    assert found["eval_all_loss"] == pytest.approx(found["eval_kept_loss"]) and found["eval_all_loss"] != math.log(2)


@pytest.mark.filterwarnings("ignore:The `'keep_end'` truncation mode is deprecated:FutureWarning")
@pytest.mark.parametrize("mode, most", [("keep_start", 20), ("keep_end", 20), ("keep_end", 4)])
def test_rows_of_text_are_cut_as_by_trl(mode, most):
    """Also where only the end of a completion is left, and where both prompts begin elsewhere."""
    options = {"max_length": most, "truncation_mode": mode}
    theirs, ours = (
        trained(trainer, "qwen2_5_vl", text_pairs(), **options) for trainer in (DPOTrainer, MultimodalDPOTrainer)
    )
    assert [entry.pop("rows/cut", 0) for entry in ours.history][0] > 0
    assert_equal(theirs, ours, of_metrics=1e-5)


def test_rows_with_media_are_never_cut(tmp_path):
    rows = Dataset.from_list([{**row, "image": None} for row in pairs(2)] + image_pairs(2).to_list())
    rows = rows.cast(image_pairs().features)
    limited, whole = (run_ours(rows, tmp_path, max_length=n, self_check=False) for n in (24, None))
    sequences = (trainer.data_collator([*rows])["sequences"] for trainer in (limited, whole))
    for limit, all_of_it in zip(*sequences, strict=True):
        assert not (limit.is_cut and all_of_it.modalities)
        assert limit.is_cut or limit.example() == all_of_it.example()
    limited.train()
    assert limited.state.log_history[0]["rows/longer_with_media"] == 2
    assert limited.state.log_history[0]["rows/cut"] > 0


def test_options_of_layout_warn_and_change_nothing(tmp_path, caplog):
    options = {"dataset_num_proc": 2, "pad_to_multiple_of": 8, "padding_free": True}
    options["include_num_input_tokens_seen"] = "all"
    multimodal_config.main_logger.warning_once.cache_clear()
    changed = run_ours(text_pairs(4), tmp_path, **options)
    for name in options:
        assert caplog.text.count(f"`{name}=") == 1
    assert torch.equal(weights(changed), weights(run_ours(text_pairs(4), tmp_path)))


@pytest.mark.filterwarnings("ignore:`pad_token` is deprecated:FutureWarning")
@pytest.mark.parametrize("token", ["<|im_start|>", "no token"])
def test_the_padding_token_is_set_as_by_trl(token, tmp_path):
    (model, processor) = load_model("qwen2_5_vl")
    found = []
    for trainer_class, config in ((DPOTrainer, DPOConfig), (MultimodalDPOTrainer, MultimodalDPOConfig)):
        args = config(str(tmp_path), **PLAIN, pad_token=token)
        with (
            pytest.raises(ValueError, match="`pad_token` .'no token'. is not found in the vocabulary")
            if (token == "no token")
            else nullcontext()
        ):
            trainer_class(model, args=args, train_dataset=text_pairs(2), processing_class=processor)
            found.append((processor.tokenizer.pad_token, model.config.get_text_config().pad_token_id))
            processor.tokenizer.pad_token = "<|endoftext|>"
    assert len({*found}) < 2


def test_rows_have_trls_columns_of_tokens(tmp_path):
    model, processor = load_model("qwen2_5_vl")
    shown = []
    for trainer_class, config in ((DPOTrainer, DPOConfig), (MultimodalDPOTrainer, MultimodalDPOConfig)):
        objects = {"processing_class": processor, "eval_dataset": {"all": text_pairs(4).to_iterable_dataset()}}
        trainer = trainer_class(model, None, config(str(tmp_path), **PLAIN), None, text_pairs(), **objects)
        shown.append([trainer.train_dataset[2], trainer.train_dataset[:2], next(iter(trainer.eval_dataset["all"]))])
        assert trainer.precompute_ref_logps is False
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    for theirs, ours in zip(*shown, strict=True):
        assert [theirs[name] for name in names] == [ours[name] for name in names]
    assert "prompt_ids" not in run_ours(image_pairs(2), tmp_path).train_dataset[0]


@pytest.mark.filterwarnings("ignore:`return_outputs=True`:FutureWarning")
@pytest.mark.parametrize("rows", [text_pairs, image_pairs], ids=["texts", "images"])
def test_metrics_of_the_user_get_trls_logits(rows, tmp_path):
    found = []
    for trainer_class, config in ((DPOTrainer, DPOConfig), (MultimodalDPOTrainer, MultimodalDPOConfig)):
        model, processor = load_model("qwen2_5_vl")
        args = config(str(tmp_path), **PLAIN, max_length=None, per_device_eval_batch_size=4)
        objects = {"train_dataset": rows(4), "eval_dataset": rows(4), "processing_class": processor}
        seen = {"compute_metrics": lambda each: found.append(each) or {"n": len(each.predictions)}}
        assert trainer_class(model, args=args, **objects, **seen).evaluate()["eval_n"] == 8
    (theirs, labels), (ours, own) = ((each.predictions, each.label_ids) for each in found)
    tokens = (own != processor.tokenizer.pad_token_id) & (own >= 0)
    assert theirs.shape == ours.shape and (labels == own)[tokens].all() and tokens.sum() > 100
    assert abs(theirs - ours)[tokens].max() < 1e-5


@pytest.mark.parametrize("column", ["chosen_image", "images_rejected"])
@pytest.mark.parametrize("trainer", [MultimodalDPOTrainer, MultimodalRewardTrainer])
def test_columns_of_answers_are_refused_at_construction(trainer, column, tmp_path):
    picture = image(56, 56)["image"]
    rows = Dataset.from_list([{**pairs(1)[0], "image": picture, column: [picture] if "s_" in column else picture}])
    with pytest.raises(MediaError, match=rf"no answer gets \['{column}'\]; put media of answers into blocks"):
        make_trainer(trainer, "qwen2_5_vl", rows, tmp_path, reward=None)


# Cells

MISSING = "row 1 has no `ref_rejected_logps`, but other rows have it; add it, or remove the column"
CELLS = [
    ({"ref_chosen_logps": [-9.0, -8.0], "ref_rejected_logps": [-7.0, math.nan]}, MISSING),
    ({"ref_chosen_logps": [-9.0, -8.0], "ref_rejected_logps": [-7.0, None]}, MISSING),
    (
        {"ref_chosen_logps": ["-9", "-8"]},
        "row 0, column 'ref_chosen_logps': is '-9' of type str; give a finite",
    ),
    ({"ref_chosen_logps": [-9.0, math.inf]}, "row 1, column 'ref_chosen_logps': is inf of type float; give a finite"),
]


@pytest.mark.parametrize("columns, message", CELLS)
def test_log_probabilities_of_a_reference_are_numbers_of_all_rows(columns, message, tmp_path):
    rows = Dataset.from_list([{**row, **{k: v[i] for k, v in columns.items()}} for i, row in enumerate(pairs(2))])
    trainer = run_ours(rows, tmp_path, per_device_train_batch_size=2, train_sampling_strategy="sequential")
    with pytest.raises(ValueError, match=message):
        trainer.train()


def test_a_row_with_a_view_needs_its_log_probability(tmp_path):
    rows = mixed_pairs(4)
    columns = {"ref_chosen_logps": [-9.0] * 4, "ref_rejected_logps": [-8.0] * 4}
    for name, logps in {**columns, "ref_view_logps": [-7.0, None, None, -7.0]}.items():
        rows = rows.add_column(name, logps)
    with pytest.raises(ValueError, match="row 2 has no `ref_view_logps`, but other rows have it"):
        run_ours(rows, tmp_path, rejected_view="blank").train()


def test_a_column_of_missing_log_probabilities_is_none(tmp_path):
    names = ("ref_chosen_logps", "ref_rejected_logps")
    rows = Dataset.from_list([{**row, **dict.fromkeys(names, math.nan)} for row in pairs(4)])
    assert torch.equal(*(weights(run_ours(each, tmp_path)) for each in (rows, text_pairs(4))))
