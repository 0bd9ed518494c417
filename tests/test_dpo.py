# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Preferences with media: updates and metrics are TRL's, and those of the model's own forward."""

import copy
import functools

import pytest
import torch
from datasets import Dataset
from helpers.chats import RATE, image
from helpers.families import ALL_FAMILIES
from helpers.marks import slow_but
from helpers.trainer_utils import PLAIN, assert_equal, relative_difference, run, shifted, sound, with_media
from helpers.trainer_utils import load as load_model
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer

from trl_multimodal_rft import CompactLogCallback, MultimodalDPOConfig, MultimodalDPOTrainer
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.encoding import supervised


YES = ["It is a cat.", "Two birds sing, one after the other.", "red", "There is a dog here"]
NO = ["blue", "No", "It is a bird and a dog", "7"]
SIZES = [(84, 56), (56, 56), (112, 84), (56, 112)]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "gate_proj"], init_lora_weights=False)
IN_ORDER = {"per_device_train_batch_size": 4, "train_sampling_strategy": "sequential", "max_length": None}
MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}

CASES = {
    **{
        name: {"loss_type": [name]}
        for name in (
            "sigmoid",
            "hinge",
            "ipo",
            "nca_pair",
            "bco_pair",
            "sppo_hard",
            "aot",
            "aot_unpaired",
            "apo_zero",
            "apo_down",
            "discopop",
            "sft",
            "sigmoid_norm",
        )
    },
    "exo_pair": {"loss_type": ["exo_pair"], "label_smoothing": 1e-3},
    "robust": {"loss_type": ["robust"], "label_smoothing": 0.1},
    "MPO": MPO,
    "forward_kl": {"f_divergence_type": "forward_kl", "distance": 0.001, "learning_rate": 0.1},
    "js_divergence": {"f_divergence_type": "js_divergence"},
    "alpha_divergence": {"f_divergence_type": "alpha_divergence"},
    "length desensitized": {"ld_alpha": 0.3},
    "weighted": {"use_weighting": True, "learning_rate": 1.0},
    "accumulated": {**MPO, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "adapter": {**MPO, "objects": {"peft_config": LORA}},
    "moving reference": {"sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5},
    "checkpointing": {**MPO, "gradient_checkpointing": True},
}


def chat(role, text):
    return [{"role": role, "content": text}]


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


def trained(trainer_class, family, rows, *, distance=0.02, objects=None, **options):
    """Trains from a reference that differs from the policy, so that the first update has ratios other than 1."""
    objects = dict(objects or {})
    model, processor = load_model(family)
    if "peft_config" not in objects and not options.get("sync_ref_model"):
        objects["ref_model"] = shifted(load_model(family)[0], distance)
    objects = {"model": model, "processing_class": processor, **objects}
    options = {**IN_ORDER, "learning_rate": 0.03, **options}
    result = run(trainer_class, family, rows, reward=None, objects=objects, **options)
    result.history[-1].pop("total_flos")  # counted by the names of inputs
    return result


trl_run = functools.cache(lambda name: trained(DPOTrainer, "qwen2_5_vl", image_pairs(), **CASES[name]))


@pytest.mark.parametrize("name", slow_but(CASES, "sigmoid", "MPO", "weighted", "length desensitized", "adapter"))
def test_equals_trl_with_images(name):
    assert_equal(trl_run(name), trained(MultimodalDPOTrainer, "qwen2_5_vl", image_pairs(), **CASES[name]))


@pytest.mark.parametrize("options", [{"packing": "padded"}, {"max_tokens_per_microbatch": 60}], ids=str)
@pytest.mark.parametrize("name", ["MPO", "adapter"])
def test_equals_trl_padded_and_in_parts(name, options):
    ours = trained(MultimodalDPOTrainer, "qwen2_5_vl", image_pairs(), **CASES[name], **options)
    for entry in ours.history:
        assert entry.pop("token_budget/parts", 2) > 1
        entry.pop("token_budget/extra_time", None)
    assert_equal(trl_run(name), ours)


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
    """Sums of log-probabilities of each prompt's chosen and rejected answer, from a forward of each conversation."""
    sums = []
    for offset in (0, 4):
        for i, prompt in enumerate(prompts):
            said = [*prompt, *chat("assistant", answers[offset + i % 4])]
            options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
            if any(part["type"] == "video" for part in prompt[0]["content"]):
                options["processor_kwargs"] = {"videos_kwargs": {"do_sample_frames": False}}
            inputs = processor.apply_chat_template([said], **options).to(torch.float64)
            n = processor.apply_chat_template([prompt], add_generation_prompt=True, **options)["input_ids"].size(1)
            logits = model(**inputs).logits[:, n - 1 : -1].log_softmax(-1)
            sums.append(logits.gather(-1, inputs["input_ids"][:, n:, None]).sum())
    return torch.stack(sums).chunk(2)


@pytest.mark.parametrize("packing", ["prefix", "padded"])
@pytest.mark.parametrize("family", slow_but(["qwen2_5_omni", "qwen2_audio", "qwen3_vl"], "qwen2_5_omni"))
def test_loss_and_gradient_are_those_of_the_paper(family, packing, tmp_path):
    """Compares with equation 7 of the paper, in float64, on a plain forward of each prompt with each completion."""
    prompts, answers, dataset = conversations(family)
    model, processor = ALL_FAMILIES[family].build()
    plain, reference = copy.deepcopy(model).double().eval(), shifted(copy.deepcopy(model).double().eval())
    objects = {"model": model.double(), "processing_class": processor, "ref_model": copy.deepcopy(reference)}
    options = {**PLAIN, "per_device_train_batch_size": len(prompts), "packing": packing, "router_aux_loss_coef": 0.0}
    args = MultimodalDPOConfig(str(tmp_path), beta=0.3, **options)
    trainer = MultimodalDPOTrainer(args=args, train_dataset=dataset, **objects)
    batch = trainer.data_collator([dataset[i] for i in range(len(prompts))])
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    (chosen, rejected), (ref_chosen, ref_rejected) = (
        own_logps(each, processor, prompts, answers) for each in (plain, reference)
    )
    expected = -torch.nn.functional.logsigmoid(0.3 * ((chosen - ref_chosen) - (rejected - ref_rejected))).mean()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    found, own = (
        {name: p.grad for name, p in each.named_parameters() if p.grad is not None and p.grad.any()}
        for each in (trainer.model, plain)
    )
    assert found.keys() == own.keys() and len(own) > 20
    assert relative_difference(own, found) < 1e-5  # the head scores in float32


# Runs


def test_the_prompt_is_encoded_and_forwarded_once(tmp_path, monkeypatch):
    encoded, forwarded = [], []
    encode = supervised.encode_prompt
    monkeypatch.setattr(
        supervised, "encode_prompt", lambda *args, **kwargs: encoded.append(1) or encode(*args, **kwargs)
    )
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


@pytest.mark.parametrize("objects", [{}, {"peft_config": LORA}], ids=["whole", "adapter"])
def test_a_reference_computed_before_the_run_is_the_same(objects, tmp_path):
    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 3, "report_to": []}
    runs = []
    for precompute in (False, True):
        torch.manual_seed(0)
        trainer = run_ours(
            image_pairs(),
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
    whole = run_ours(image_pairs(), tmp_path, **options)
    expected = weights(whole)
    resumed = run_ours(image_pairs(), tmp_path, **options)
    resumed.train(f"{tmp_path}/checkpoint-2")
    assert torch.equal(torch.cat([each.detach().flatten() for each in resumed.model.parameters()]), expected)
    kept = ("loss", "num_tokens", "rewards/margins")
    logs = [[[entry.get(name) for name in kept] for entry in each.state.log_history[:4]] for each in (whole, resumed)]
    assert logs[0] == logs[1]


@pytest.mark.parametrize("family, rows", [("qwen2_audio", sound_pairs), ("qwen2_5_vl", text_pairs)])
def test_other_rows_train_and_evaluate(family, rows, tmp_path):
    trainer = run_ours(rows(), tmp_path, family, objects={"eval_dataset": rows(3)}, max_steps=1)
    trainer.train()
    metrics = trainer.evaluate()
    assert {"eval_loss", "eval_rewards/margins"} <= metrics.keys()
    assert trainer.evaluate(rows(3))["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("form", ["messages", "whole conversations"])
def test_the_console_shows_the_first_pair(form, tmp_path, capsys):
    row = {**FORMS[form], "image": image(56, 56)["image"]}
    trainer = run_ours(Dataset.from_list([row] * 4), tmp_path, max_steps=1)
    trainer.add_callback(CompactLogCallback())
    trainer.train()
    assert "It is a cat." in capsys.readouterr().out


def test_a_reference_of_some_rows_is_an_error(tmp_path):
    options = {"precompute_ref_log_probs": True, "dataloader_drop_last": True, "per_device_eval_batch_size": 3}
    with pytest.raises(ValueError, match="The reference scored 3 of 4 rows; .* don't set `dataloader_drop_last`"):
        run_ours(image_pairs(4), tmp_path, **options)


# Rows


FORMS = {
    "messages": pairs(1)[0],
    "whole conversations": {name: pairs(1)[0]["prompt"] + pairs(1)[0][name] for name in ("chosen", "rejected")},
    "several turns": {
        **pairs(1)[0],
        "prompt": [*chat("user", "Who?"), *chat("assistant", "A cat."), *chat("user", "Why?")],
    },
    "text": {"prompt": "What is it?", "chosen": " A cat.", "rejected": " A dog, maybe."},
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
    assert (pair.chosen, pair.rejected) == (theirs["chosen_ids"], theirs["rejected_ids"])


REFUSED = {
    "medium in an answer": (
        {**pairs(1)[0], "rejected": chat("assistant", [{"type": "image"}]), "image": image(56, 56)["image"]},
        "row 0, .*assistant messages are text",
    ),
    "no answer": ({**pairs(1)[0], "rejected": []}, "row 0 has no `rejected`"),
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


@pytest.mark.parametrize(
    "rows, options, message",
    [
        (Dataset.from_list([{"prompt": "a", "completion": "b"}]), {}, r"train dataset has the columns .* it needs"),
        (Dataset.from_list([]), {}, "train dataset has no rows"),
        (text_pairs(2), {"padding_free": True}, "`padding_free=True` has no use in DPO here"),
        (text_pairs(2), {"sync_ref_model": True, "precompute_ref_log_probs": True}, "`sync_ref_model=True` moves it"),
        (text_pairs(2), {"packing": "rows"}, "`packing`"),
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
    assert 0 < n < len(whole.chosen) and (pair.chosen, pair.rejected) == (whole.chosen[:n], whole.rejected[:n])
    with pytest.raises(MediaError, match=r"row 0 has a prompt of \d+ tokens .* none of `max_length` \(10\)"):
        run_ours(text_pairs(2), tmp_path, max_length=10).train()
