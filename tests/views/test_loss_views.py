# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A view in the loss: gradients and weights equal the equations of papers, on forwards of the model's own."""

import math

import numpy as np
import pytest
import torch
from helpers.marks import slow_but
from helpers.trainer_utils import (
    InjectedOurs,
    Recorded,
    assert_equal,
    audio_rows,
    by_key,
    image_rows,
    keys,
    load,
    logged,
    moved,
    relative_difference,
    run,
)
from peft import LoraConfig
from torch.testing import assert_close

from trl_multimodal_rft import MultimodalGRPOConfig, MultimodalPPOTrainer
from trl_multimodal_rft.algorithms.entropy import relevance_weights
from trl_multimodal_rft.views import as_view


MASKED = "mask_patches(ratio=0.6)"
TERMS = "kl_coef=0.5, entropy_coefs=[0.3, 0.2]"
PAPO = {"loss_view": f"mask_patches(ratio=0.6, {TERMS})", "seed": 3}
WITHOUT = {"loss_view": None}
VPPO = {"loss_view": "mask_patches(ratio=0.5, advantage_min=0.9, token_quantile=0.4)"}
ONE = {"max_steps": 1}
FOUR = {"per_device_train_batch_size": 16}  # prompts, of which some are text


def mixed_rows(n=8):
    """Every third row is text."""
    return image_rows(n).map(lambda row, i: {**row, "image": None if i % 3 == 0 else row["image"]}, with_indices=True)


class Weighed(Recorded):
    """Records the weights before each micro-batch."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.weights = [*getattr(self, "weights", []), {n: p.detach().clone() for n, p in model.named_parameters()}]
        return super().compute_loss(model, inputs, *args, **kwargs)


class RecordedPPO(Recorded, MultimodalPPOTrainer):
    def _moment(self, **values):
        view = getattr(self._scores, "view", None)
        own = {"values": self._scores.values.detach()} if self._scores is not None else {}
        return super()._moment(**values, **own, view_logps=None if view is None else view.logps.detach())


def message(row, medium):
    """The conversation of a row with a medium of its kind, as users write it."""
    content = [{"type": "text", "text": row["prompt"][0]["content"]}]
    if medium is not None:
        kind = "audio" if isinstance(medium, np.ndarray) else "image"
        content = [{"type": kind, kind: medium}, *content]
    return [{"role": "user", "content": content}]


def medium_of(row):
    if "audio" in row:
        return row["audio"]["array"]
    return row["image"]


def seen_under(view, row, number, seed, step):
    """The medium of a row under a view."""
    medium = medium_of(row)
    return None if medium is None else as_view(view).seeded(seed, step, number)(medium, 0)


def encoded(processor, row, medium):
    return processor.apply_chat_template(
        message(row, medium), add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )


def distributions(model, inputs, completion):
    """Log-probabilities of all tokens at each token of a completion, `(T, V)`, from the model's own forward."""
    n = inputs["input_ids"].size(1)
    ids = torch.cat([inputs["input_ids"], completion[None]], dim=1)
    given = {name: value for name, value in inputs.items() if name not in ("input_ids", "attention_mask")}
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in given:
            given[name] = torch.nn.functional.pad(given[name], (0, len(completion)))
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits
    return logits[0, n - 1 : -1].float().log_softmax(-1)


def of_rows(rows, processor):
    """Numbers of rows by the ids of their prompts."""
    numbers = {}
    for i, row in enumerate(rows):
        numbers[tuple(encoded(processor, row, medium_of(row))["input_ids"][0].tolist())] = i
    return numbers


def clean_and_view(model, processor, rows, view, seed, step, names):
    """For each completion its tokens, and the log-probabilities of all tokens after the clean prompt and its view."""
    numbers = of_rows(rows, processor)
    for prompt, completion in names:
        number = numbers[prompt]
        completion = torch.tensor(completion)
        media = medium_of(rows[number]), seen_under(view, rows[number], number, seed, step)
        clean, other = (distributions(model, encoded(processor, rows[number], each), completion) for each in media)
        yield completion, clean, other


def papo_loss(model, processor, rows, moment, args):
    """The objective of PAPO (equation 2), negated, of a micro-batch that is a whole batch."""
    batch = moment.batch
    names = keys(moment.batch)
    n_tokens = sum(len(completion) for _, completion in names)
    total = 0
    scored = clean_and_view(model, processor, rows, args.loss_view_settings.view, args.seed, 0, names)
    for i, (completion, clean, view) in enumerate(scored):
        logps, masked = (each.gather(1, completion[:, None])[:, 0] for each in (clean, view))
        old = batch["old_per_token_logps"][i, : len(completion)]
        ratio = (logps - old).exp()
        advantage = batch["advantages"][i]
        surrogate = torch.min(ratio * advantage, ratio.clamp(1 - args.epsilon, 1 + args.epsilon) * advantage)
        divergence = (masked - logps).exp() - (masked - logps) - 1
        settings = args.loss_view_settings
        clean_coef, view_coef = settings.entropy_coefs
        objective = surrogate + settings.kl_coef * divergence.clamp(max=settings.kl_clip)
        objective = objective - clean_coef * -logps - view_coef * -masked
        share = 1 / (len(completion) * len(names)) if args.loss_type == "grpo" else 1 / n_tokens
        total = total - share * objective.sum()
    return total


def check_papo(rows, **options):
    """Each update of a run equals the gradient of the paper's objective."""
    family = options.pop("family", "qwen2_5_vl")
    result = run(Weighed, family, rows, **{**PAPO, "learning_rate": 0.05, **options})
    trainer = result.trainer
    model, processor = load(family)
    states = [*trainer.weights, {n: p.detach() for n, p in trainer.model.named_parameters()}]
    for moment, before, after in zip(trainer.micro_batches, states[:-1], states[1:], strict=True):
        trained = {n for n, p in trainer.model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
                parameter.grad = None
        loss = papo_loss(model, processor, rows, moment, trainer.args)
        loss.backward()
        assert_close(moment.loss, loss.detach(), rtol=1e-4, atol=1e-5)
        expected = {n: p.grad for n, p in model.named_parameters() if n in trained and p.grad is not None}
        update = {n: (before[n] - after[n]) / trainer.args.learning_rate for n in expected}
        assert relative_difference(expected, update) <= 1e-3
        idle = {n for n in states[0] if n not in expected}
        assert all(torch.equal(before[n], after[n]) for n in idle)
    return result


SOUND = {"family": "qwen2_audio", "loss_view": f"mask_audio(ratio=0.5, {TERMS})", "loss_type": "grpo"}


@pytest.mark.parametrize(
    ("rows", "options"),
    [
        (image_rows, {"loss_type": "grpo", "packing": "prefix", **ONE}),
        (image_rows, {"loss_type": "dapo", "packing": "padded", **ONE}),
        (
            image_rows,
            {"loss_view": f"mask_patches(ratio=0.6, kl_clip=1e-3, {TERMS})", "freeze": ["vision_tower"], **ONE},
        ),
        (image_rows, {"family": "gemma3", "loss_view": f"blank({TERMS})", "loss_type": "grpo", **ONE}),
        (audio_rows, {**SOUND, **ONE}),
        # The view of a text is the text, so that its divergence is 0 and has no gradient
        (mixed_rows, {"loss_type": "grpo", "num_iterations": 2, "max_steps": 2, **FOUR}),
    ],
    ids=["packed", "padded", "frozen", "gemma3", "audio", "mixed"],
)
def test_papo(rows, options):
    result = check_papo(rows(), **options)
    assert logged(result, "view/kl")[0] > 1e-3 and logged(result, "view/entropy")[0] > 0
    viewed = result.trainer.micro_batches[0].batch.view.replaces.unique().tolist()
    assert viewed == ([False, True] if rows is mixed_rows else [True])


def test_papo_with_an_adapter():
    """The gradient of LoRA's weights is that of the whole weights, by the chain rule."""
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    options = {**PAPO, **ONE, "loss_type": "grpo", "learning_rate": 0.05}
    result = run(Recorded, "qwen2_5_vl", image_rows(), objects={"peft_config": lora}, **options)
    trainer = result.trainer
    model, processor = load("qwen2_5_vl")
    whole = dict(trainer.model.named_parameters())
    before = {name: whole[name].detach() - update for name, update in result.update.items()}
    prefix = "base_model.model."
    layers = [name for name in whole if "lora_A" in name]
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name in layers:
            a = before[name]
            b = before[name.replace("lora_A", "lora_B")]
            ours[name.removeprefix(prefix).replace(".lora_A.default", "")] += 2 * b @ a
    papo_loss(model, processor, image_rows(), trainer.micro_batches[0], trainer.args).backward()
    expected = {}
    update = {}
    for name in layers:
        other = name.replace("lora_A", "lora_B")
        gradient = ours[name.removeprefix(prefix).replace(".lora_A.default", "")].grad
        expected |= {name: 2 * before[other].T @ gradient, other: 2 * gradient @ before[name].T}
        update |= {each: -result.update[each] / 0.05 for each in (name, other)}
    assert relative_difference(expected, update) <= 1e-3


@pytest.mark.parametrize("packing", slow_but(["prefix", "padded"], "prefix"))
def test_papo_in_parts(packing):
    """Clean and masked scores are differentiated exactly where a micro-batch doesn't fit, and where several do."""
    options = {**PAPO, "loss_type": "grpo", "packing": packing, "num_iterations": 2, "beta": 0.1, **FOUR}
    whole = run(InjectedOurs, "qwen2_5_vl", mixed_rows(), **options)
    parts = run(InjectedOurs, "qwen2_5_vl", mixed_rows(), max_tokens_per_microbatch=80, **options)
    assert min(logged(parts, "token_budget/parts")) >= 2
    assert_equal(whole, parts, same_metrics=False)
    for others in (
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2},
        {"gradient_checkpointing": True},
    ):
        assert_equal(whole, run(InjectedOurs, "qwen2_5_vl", mixed_rows(), **{**options, **others}), same_metrics=False)


def vppo_by_hand(model, processor, rows, trainer, batch, names):
    """Shaping factors of trajectories and gradient masks of tokens, as in equations of VPPO, each by itself."""
    args = trainer.args
    numbers = of_rows(rows, processor)
    dependencies = []
    with torch.no_grad():
        scored = clean_and_view(model, processor, rows, args.loss_view_settings.view, args.seed, 0, names)
        for _, clean, view in scored:
            dependencies.append((clean.exp() * (clean - view)).sum(1))
    seen = [medium_of(rows[numbers[prompt]]) is not None for prompt, _ in names]
    means = [each.mean().item() for each in dependencies]
    among = [mean for mean, has in zip(means, seen, strict=True) if has]
    normalized = [(mean - min(among)) / (max(among) - min(among)) for mean in means]
    middle = sum(each for each, has in zip(normalized, seen, strict=True) if has) / len(among)
    smallest = args.loss_view_settings.advantage_min
    largest = smallest + (1 - smallest) / middle
    factors = [
        smallest + (largest - smallest) * each if has else 1.0 for each, has in zip(normalized, seen, strict=True)
    ]
    masks = []
    for each, has in zip(dependencies, seen, strict=True):
        k = math.ceil(args.loss_view_settings.token_quantile * len(each) - 1e-9) if has else len(each)
        top = set(each.argsort(descending=True)[:k].tolist())
        masks.append(torch.tensor([float(not has or i in top) for i in range(len(each))]))
    return dict(zip(names, factors, strict=True)), dict(zip(names, masks, strict=True)), dependencies


@pytest.mark.parametrize("packing", ["prefix", "padded"])
def test_vppo(packing):
    rows = mixed_rows()
    options = {"loss_type": "grpo", "packing": packing, **ONE, **FOUR}
    plain = run(Recorded, "qwen2_5_vl", rows, **options).trainer
    result = run(Recorded, "qwen2_5_vl", rows, **options, **VPPO)
    trainer = result.trainer
    model, processor = load("qwen2_5_vl")
    (moment,) = trainer.micro_batches
    names = keys(moment.batch)
    factors, masks, dependencies = vppo_by_hand(model, processor, rows, trainer, moment.batch, names)
    unweighted, weighted = (by_key(each.micro_batches, "advantages") for each in (plain, trainer))
    chosen = by_key(trainer.micro_batches, "tokens.weights")
    assert unweighted.keys() == weighted.keys() == factors.keys()
    for name, factor in factors.items():
        assert_close(weighted[name], factor * unweighted[name], rtol=1e-3, atol=1e-5)
        assert torch.equal(chosen[name], masks[name])
    assert {0.0, 1.0} == {value for each in masks.values() for value in each.tolist()}
    measured = by_key(trainer.micro_batches, "view.dependency")
    for name, each in zip(names, dependencies, strict=True):
        assert_close(measured[name], each, rtol=1e-3, atol=1e-5)
    assert not moment.batch.view.prompts  # which the update doesn't forward
    assert logged(result, "view/weight_max")[0] > 1


def test_vppo_with_its_entropy_penalty_changes_the_gradient_by_that_alone():
    """The update forwards no view for the entropy of the clean policy."""
    plain, penalized = (
        run(Recorded, "qwen2_5_vl", image_rows(), loss_type="grpo", loss_view=view, **ONE)
        for view in (f"{VPPO['loss_view'][:-1]}, entropy_coefs=[{coef}, 0.0])" for coef in (0.0, 0.06))
    )
    gradients = [each.trainer.micro_batches[0] for each in (plain, penalized)]
    mask = gradients[0].batch["completion_mask"]
    share = mask / mask.sum(1, keepdim=True) / len(mask)
    assert_close(gradients[1].gradient - gradients[0].gradient, -0.06 * share, rtol=1e-4, atol=1e-7)
    assert not logged(penalized, "view/kl")


def test_mapo():
    """Weights of tokens from the entropies of a reference that hears silence, and of the policy."""
    rows = audio_rows()
    tau = 0.05
    options = {"loss_view": f"blank(temperature={tau})", "beta": 0.02, "loss_type": "grpo", **ONE}
    result = run(Recorded, "qwen2_audio", rows, objects=moved("qwen2_audio"), **options)
    (moment,) = result.trainer.micro_batches
    policy, processor = moved("qwen2_audio").values()
    reference, _ = load("qwen2_audio")
    chosen = by_key([moment], "tokens.weights")
    numbers = of_rows(rows, processor)
    spread = []
    for name in keys(moment.batch):
        row = rows[numbers[name[0]]]
        completion = torch.tensor(name[1])
        with torch.no_grad():
            heard = distributions(policy, encoded(processor, row, medium_of(row)), completion)
            silent = distributions(reference, encoded(processor, row, np.zeros_like(medium_of(row))), completion)
        entropies = [-(each.exp() * each).sum(1) for each in (silent, heard)]
        difference = (entropies[0] - entropies[1]).abs()
        n = len(completion)
        scores = [math.exp(value / (tau * math.log(max(n, 2)))) for value in difference.tolist()]
        expected = torch.tensor([n * score / sum(scores) for score in scores])
        assert expected.max() < 5  # so that none is clipped
        assert_close(chosen[name], expected, rtol=1e-3, atol=1e-4)
        spread.append((expected.max() - expected.min()).item())
    assert max(spread) > 0.01
    assert logged(result, "view/dependency")[0] > 0


def test_the_bound_of_mapos_weights():
    n = 12
    differences = torch.tensor([math.log(89), *[0.0] * (n - 1)])[None]  # shares of 0.89 and 0.01
    weights = relevance_weights(differences, torch.ones(1, n), temperature=1 / math.log(n))
    bounded = torch.tensor([5.0, *[0.12] * (n - 1)])[None]
    assert_close(weights, bounded * n / bounded.sum())


# Refusals

WRONG = [
    ({"loss_view": MASKED}, "has no effect by itself; set one of `kl_coef`"),
    ({"loss_view": "mask_patch(kl_coef=0.01)"}, "Did you mean `mask_patches`"),
    ({"loss_view": "blank(kl_ceof=0.01)"}, "has no setting 'kl_ceof': the view 'blank' has "),
    ({"loss_view": "blank(kl_ceof=0.01)"}, "Did you mean `kl_coef`"),
    ({"loss_view": "blank(entropy_coefs=[0.03])"}, "`entropy_coefs` of `loss_view` must be two"),
    ({"loss_view": "blank(temperature=1.0)"}, "`beta=0` loads no reference"),
    ({"loss_view": "blank(temperature=1.0, token_quantile=0.5)", "beta": 0.1}, "Remove `temperature`, or the other"),
    ({"loss_view": "blank(token_quantile=0.5)", "top_entropy_quantile": 0.5}, "both weigh tokens"),
    ({"loss_view": "blank(kl_coef=-0.1)"}, "`kl_coef` of `loss_view` must be at least 0, got -0.1"),
    ({"loss_view": "blank(token_quantile=0.0)"}, "`token_quantile` of `loss_view` must be above 0 and at most 1, got"),
    ({"loss_view": "blank(kl_coef='0.1')"}, "`kl_coef` of `loss_view` must be a number, got the text '0.1'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG, ids=lambda each: each if isinstance(each, str) else None)
def test_refused(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        MultimodalGRPOConfig(str(tmp_path), use_cpu=True, bf16=False, **options)


def test_the_head_of_a_model_must_be_known(monkeypatch):
    monkeypatch.setattr("trl_multimodal_rft.trainers.grpo.loss_views.head_rule", lambda model: None)
    with pytest.raises(ValueError, match="what this model does around its LM head is unknown"):
        run(InjectedOurs, "qwen2_5_vl", image_rows(), **VPPO)


# PPO


def test_ppo_has_the_same_term():
    """Its critic's values are of clean prompts, whole and in parts."""
    options = {**PAPO, "num_ppo_epochs": 1, "loss_type": "grpo", **ONE, **FOUR}
    plain, added = (run(RecordedPPO, "qwen2_5_vl", mixed_rows(), **{**options, **own}) for own in (WITHOUT, {}))
    moments = [each.trainer.micro_batches[0] for each in (plain, added)]
    assert_close(moments[0].values, moments[1].values, rtol=1e-4, atol=1e-5)
    mask = moments[0].batch["completion_mask"]
    share = mask / mask.sum(1, keepdim=True) / len(mask)
    logps = moments[1].logps
    view = moments[1].view_logps
    # With respect to the clean log-probabilities; those under the view are their own leaf, or, of texts, the same
    kl = -0.5 * (1 - (view - logps).exp()) - 0.3
    text = torch.where(moments[1].batch.view.replaces[:, None], kl, torch.tensor(-0.3 - 0.2))
    assert_close(moments[1].gradient - moments[0].gradient, text * share, rtol=1e-3, atol=1e-6)
    parts = run(RecordedPPO, "qwen2_5_vl", mixed_rows(), **options, max_tokens_per_microbatch=80)
    assert_equal(added, parts, same_metrics=False)
