# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""PPO against a slow implementation: token by token, one plain forward pass per completion, two plain models."""

import copy
import functools
import itertools
import math
from statistics import fmean, pstdev, pvariance

import pytest
import torch
import transformers
from helpers.grpo_runs import loss_by_hand, shares
from helpers.marks import slow_but
from helpers.ppo_runs import FAMILY, Ours, Sampled, critic_of, dataset, encoded, head_weights, rough, weights_of
from helpers.trainer_utils import (
    InjectedOurs,
    assert_equal,
    audio_rows,
    by_key,
    image_rows,
    keys,
    length_and_sum,
    load,
    logged,
    make_trainer,
    moved,
    norm,
    relative_difference,
    run,
    saved,
    text_rows,
    video_rows,
)
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import Trainer

from trl_multimodal_rft.models import Critic
from trl_multimodal_rft.models.critic import policy_alone


SLOW = pytest.mark.slow
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)

# An update has two micro-batches, and a second update reuses the completions
TWICE = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_ppo_epochs": 2, "max_steps": 2}
# One update on each batch of completions, from one micro-batch
ONCE = {"num_ppo_epochs": 1}


def ppo(family=FAMILY, rows=None, trainer_class=Ours, **options):
    return run(trainer_class, family, rows or dataset(), **{"self_check": False, **options})


def halves(weights):
    critic = {name: value for name, value in weights.items() if name.startswith("critic.")}
    return {name: value for name, value in weights.items() if name not in critic}, critic


def identical(a, b):
    assert a.keys() == b.keys()
    return all(torch.equal(a[name], b[name]) for name in a)


# The slow implementation


def log_probabilities(model, processor, row, completion):
    """Returns log-probabilities of each token from a plain forward pass."""
    inputs, start = encoded(processor, row, completion)
    logits = model(**inputs).logits[0]
    return [logits[start - 1 + t].log_softmax(-1)[token] for t, token in enumerate(completion)]


def completions_of(drawn):
    mask = drawn.batch["completion_mask"].bool()
    return [ids[m].tolist() for ids, m in zip(drawn.batch["completion_ids"], mask, strict=True)]


class Slow:
    """Values, advantages and returns of plain models, token by token, on the first draw of a trainer."""

    def __init__(self, trainer, policy, reference, backbone, head):
        args = trainer.args
        self.processor = trainer.processing_class
        self.backbone = backbone
        (weight, bias) = head
        self.weight = weight[0]
        self.bias = bias[0]
        drawn = trainer.draws[0]
        self.completions = completions_of(drawn)
        pairs = list(zip(drawn.rows, self.completions, strict=True))
        self.rewards = [None if math.isnan(reward) else reward for (reward,) in drawn.rewards.tolist()]
        self.cut = [ids[-1] != self.processor.tokenizer.eos_token_id for ids in self.completions]
        with torch.no_grad():
            self.logps, self.ref_logps = (
                [[x.item() for x in log_probabilities(model, self.processor, *pair)] for pair in pairs]
                for model in (policy, reference)
            )
            self.values = [self.values_of(*pair) for pair in pairs]
        beta = args.beta if args.kl_in_reward else 0.0
        self.arguments = dict(beta=beta, bootstrap=args.bootstrap_truncated)
        self.arguments |= {"gamma": 1.0, "lam": 0.95, **args.estimator.settings}
        self.advantages, self.returns = self.estimate(**self.arguments)

    def values_of(self, row, completion):
        """Returns the values of the state before each token and after the last."""
        inputs, start = encoded(self.processor, row, completion)
        hidden = self.backbone.base_model(**inputs).last_hidden_state[0]
        return (hidden[start - 1 :] @ self.weight + self.bias).tolist()

    def estimate(self, gamma, lam, beta, bootstrap):
        """Returns advantages, not whitened, and returns of each completion's tokens."""
        advantages = []
        returns = []
        for i, completion in enumerate(self.completions):
            follows = self.values[i][-1] if self.cut[i] and bootstrap else 0.0
            row = []
            running = 0.0
            for t in reversed(range(len(completion))):
                reward = self.rewards[i] or 0.0 if t == len(completion) - 1 else 0.0
                reward -= beta * (self.logps[i][t] - self.ref_logps[i][t])
                running = reward + gamma * follows - self.values[i][t] + gamma * lam * running
                row.insert(0, running)
                follows = self.values[i][t]
            advantages.append(row)
            returns.append([row[t] + self.values[i][t] for t in range(len(row))])
        return advantages, returns

    def valid(self, rows):
        """Returns all values of completions with a reward."""
        return [x for row, reward in zip(rows, self.rewards, strict=True) if reward is not None for x in row]


RATES = {"learning_rate": 0.01, "value_learning_rate": 0.1}
FREE = {
    "bootstrap_truncated": True,
    "advantage_estimator": "gae(gamma=0.95)",
    "trainer_class": Sampled,
    "max_completion_length": 5,
    **RATES,
}
TRUNK = {"shared_trunk": True, "vf_coef": 1.0, "reward": rough, "learning_rate": 0.01, "value_learning_rate": 0.3}
PAIRS = {
    "beta": 0.5,
    "advantage_estimator": "gae(gamma=0.9, lam=0.8)",
    "bootstrap_truncated": True,
    "reward": rough,
    "num_generations": 2,
}
CASES = {
    "audio": ("qwen2_audio", audio_rows, {**PAIRS, **RATES}),
    "images, KL in the loss": (FAMILY, image_rows, {"beta": 0.5, "kl_estimator": "k3", "vf_coef": 0.5, **RATES}),
    "video, one completion per prompt": (FAMILY, video_rows, {"num_generations": 1, "learning_rate": 0.03}),
    "text, sampled": ("qwen2_audio", text_rows, FREE),
    "audio, a copy of the policy": ("qwen2_audio", audio_rows, {"value_learning_rate": 0.3, "beta": 0.5}),
    "images, shared trunk": (FAMILY, image_rows, TRUNK),
}


@pytest.mark.parametrize(
    "name", slow_but(CASES, "audio", "images, KL in the loss", "text, sampled", "images, shared trunk")
)
def test_rollouts_equal_those_of_the_slow_version(name):
    """Updates on them are those by hand, and those of `test_ppo_reference.py`."""
    family, rows, options = CASES[name]
    shared = options.get("shared_trunk", False)
    copied = "copy" in name
    objects = {**moved(family), **({} if shared or copied else {"value_model": critic_of(family)})}
    result = ppo(family, rows(), objects=objects, **{"reward": length_and_sum, **TWICE, **options})
    policy = moved(family)["model"]
    backbone = policy if shared else moved(family, 0.02 if copied else 0.03)["model"]
    head = (torch.zeros(1, 64), torch.zeros(1)) if shared or copied else head_weights()
    slow = Slow(result.trainer, policy, load(family)[0], backbone, head)
    batch = result.trainer.draws[0].batch
    values = [row[:-1] for row in slow.values]
    advantages = slow.valid(slow.advantages)
    mean = fmean(advantages)
    std = pstdev(advantages)
    whitened = [[(x - mean) / std for x in row] for row in slow.advantages]
    mask = batch["completion_mask"].bool()
    known = torch.tensor([reward is not None for reward in slow.rewards])[:, None]
    for name, expected, each in (
        ("values.old", values, mask),
        ("values.returns", slow.returns, mask),
        ("advantages", whitened, mask & known),
    ):
        expected = [row for row, own in zip(expected, each, strict=True) if own.any()]
        assert batch[name][each].tolist() == pytest.approx(sum(expected, []), rel=1e-4, abs=1e-4), name
    assert not batch["advantages"][~(mask & known)].any()
    values = slow.valid(values)
    returns = slow.valid(slow.returns)
    first, second = result.history[:2]
    for name, numbers in (("values", values), ("returns", returns), ("advantages", advantages)):
        assert first[f"{name}/mean"] == pytest.approx(fmean(numbers), rel=1e-4, abs=1e-5)
        assert first[f"{name}/std"] == pytest.approx(pstdev(numbers), rel=1e-4, abs=1e-5)
    errors = [r - v for r, v in zip(returns, values, strict=True)]
    expected = 1 - pvariance(errors) / pvariance(returns)
    assert first["explained_variance"] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    assert "explained_variance" not in second
    assert any(slow.cut) and (not all(slow.cut) or rows is text_rows)
    assert (None in slow.rewards) == (options.get("reward") is rough)
    # The case's options have an effect here
    neutral = {"gamma": 1.0, "lam": 1.0, "beta": 0.0, "bootstrap": False}
    for option in (option for option, value in slow.arguments.items() if value != neutral[option]):
        changed, _ = slow.estimate(**{**slow.arguments, option: neutral[option]})
        assert max(abs(a - b) for a, b in zip(slow.valid(changed), advantages, strict=True)) > 0.01


# Packing


@pytest.mark.parametrize(
    "family, rows, shared",
    [
        ("qwen2_audio", audio_rows, False),
        (FAMILY, image_rows, True),
        pytest.param("llava_onevision", image_rows, False, marks=SLOW),  # media that don't join
        pytest.param("qwen2_audio", audio_rows, True, marks=SLOW),
        pytest.param(FAMILY, image_rows, False, marks=SLOW),
        pytest.param("llava_onevision", image_rows, True, marks=SLOW),
        pytest.param(FAMILY, video_rows, True, marks=SLOW),
    ],
)
def test_packed_equals_padded(family, rows, shared):
    def trained(packing):
        objects = {**moved(family), **({} if shared else {"value_model": critic_of(family)})}
        options = {"beta": 0.2, "bootstrap_truncated": True, "reward": rough, "shared_trunk": shared, **TWICE, **RATES}
        return ppo(family, rows(), objects=objects, packing=packing, **options)

    padded = trained("padded")
    packed = trained("prefix")
    assert all(packed.trainer.scored_packed) and not any(padded.trainer.scored_packed)
    assert_equal(padded, packed, tolerance=3e-5 if family == "llava_onevision" else 1e-5)  # 1.9e-5 with torch 2.11
    for a, b in zip(halves(padded.update), halves(packed.update), strict=True):
        assert norm(a) > 0.01 and relative_difference(a, b) <= 5e-5


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=SLOW)])
def test_gradient_checkpointing_changes_nothing(shared):
    def trained(checkpointing):
        objects = {**moved(FAMILY), **({} if shared else {"value_model": critic_of(FAMILY)})}
        return ppo(objects=objects, gradient_checkpointing=checkpointing, shared_trunk=shared, **TWICE)

    assert_equal(trained(False), trained(True))


# Freezing

OPTIMIZERS = {
    "adamw": {"optim": "adamw_torch", "weight_decay": 0.1},
    "sgd": {"optim": "sgd", "optim_args": "momentum=0.9,weight_decay=0.1"},
}


@pytest.mark.parametrize(
    "optimizer, shared",
    [
        ("adamw", False),
        pytest.param("sgd", True, marks=SLOW),
        pytest.param("adamw", True, marks=SLOW),
        pytest.param("sgd", False, marks=SLOW),
    ],
)
def test_frozen_policy_stays_as_it_is(optimizer, shared):
    result = ppo(
        freezing_actor_steps=2,
        shared_trunk=shared,
        beta=0.1,
        objects=moved(FAMILY),
        **OPTIMIZERS[optimizer],
        **{**TWICE, "max_steps": 5, "lr_scheduler_type": "linear", "warmup_steps": 1},
    )
    weights = [halves(w) for w in (*result.trainer.weights, weights_of(result.trainer.model))]
    for step, ((policy, critic), (next_policy, next_critic)) in enumerate(itertools.pairwise(weights)):
        # Warmup comes first in each schedule, at rate 0
        assert identical(policy, next_policy) == (step <= 2)
        assert identical(critic, next_critic) == (step == 0)
    assert logged(result, "learning_rate") == pytest.approx([0, 0, 0, 0.01, 0.005])
    assert logged(result, "value_learning_rate") == pytest.approx([0, 0.01, 0.0075, 0.005, 0.0025])
    if optimizer == "adamw":
        state = result.trainer.optimizer.state
        groups = result.trainer.optimizer.param_groups
        for group, is_critic in zip(groups, [False, True, False, True], strict=True):
            counts = {int(state[p]["step"]) for p in group["params"] if p in state}
            assert counts == ({5} if is_critic else {3})  # no earlier moments


def test_coefficient_adapts_once_for_each_rollout_and_not_while_the_policy_is_frozen():
    """The policy is frozen in the first of four rollouts, and in the first epoch of the second."""
    adaptive = {"beta": 0.1, "kl_estimator": "k3", "kl_target": 1e-9, "kl_horizon": 40, "freezing_actor_steps": 3}
    result = ppo(objects=moved(FAMILY), **adaptive, **{**TWICE, "max_steps": 8})
    assert logged(result, "kl_coef") == pytest.approx([0.1 * 1.04**n for n in (0, 0, 0, 0, 1, 1, 2, 2)])


def test_frozen_policy_leaves_the_gradient_norm_alone():
    """Otherwise it would affect the clipping of the critic's gradient."""
    result = ppo(
        freezing_actor_steps=1, objects={**moved(FAMILY), "value_model": critic_of(FAMILY)}, max_steps=1, **ONCE
    )
    policy, critic = halves(result.update)
    assert norm(policy) == 0
    assert result.history[0]["grad_norm"] * 0.01 == pytest.approx(norm(critic), rel=1e-4)


# Rates


def test_rates_and_schedules_are_those_by_hand():
    result = ppo(
        learning_rate=0.02,
        lr_scheduler_type="linear",
        warmup_steps=2,
        value_learning_rate=0.06,
        value_lr_scheduler_type="cosine",
        value_warmup_steps=0.2,
        **{**ONCE, "max_steps": 5},
    )
    assert logged(result, "learning_rate") == pytest.approx([0.02 * x for x in (0, 1 / 2, 1, 2 / 3, 1 / 3)])
    cosine = [0, *((1 + math.cos(math.pi * i / 4)) / 2 for i in range(4))]
    assert logged(result, "value_learning_rate") == pytest.approx([0.06 * x for x in cosine])


@pytest.mark.parametrize(
    "schedule, end",
    slow_but(
        [("cosine_with_min_lr", {"min_lr": 1e-3}), ("polynomial", {"lr_end": 1e-3})], ("polynomial", {"lr_end": 1e-3})
    ),
)
def test_schedules_end_at_the_same_rate(schedule, end):
    """The option is a rate, not a share of the initial one."""
    options = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": end, "value_learning_rate": 0.1, **ONCE}
    result = ppo(**options)
    assert result.trainer.lr_scheduler.get_last_lr() == pytest.approx([1e-3] * 4)
    # Arguments of the policy's schedule don't apply to others
    result = ppo(**{**options, "value_learning_rate": 0.1, "value_lr_scheduler_type": "linear"})
    assert logged(result, "value_learning_rate") == pytest.approx([0.1, 0.05])


@pytest.mark.parametrize("family", ["qwen2_audio", pytest.param(FAMILY, marks=SLOW)])
def test_weight_decay_is_that_of_transformers(family, tmp_path):
    trainer = make_trainer(
        Ours, family, text_rows(), tmp_path, weight_decay=0.1, value_learning_rate=0.5, self_check=False
    )
    optimizer = trainer.create_optimizer()
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    plain = load(family)[0]
    decayed = set(Trainer.get_decay_parameter_names(None, plain))
    assert 0 < len(decayed) < len(dict(plain.named_parameters()))
    for name, parameter in trainer.model.named_parameters():
        critic = name.startswith("critic.")
        group = groups[id(parameter)]
        original = name.removeprefix("critic.model.")
        expected = original == "critic.head.weight" if original.startswith("critic.") else original in decayed
        assert group["weight_decay"] == (0.1 if expected else 0.0), name
        assert group["lr"] == (0.5 if critic else 0.01), name
        assert not ("bias" in name or "layernorm" in name) or group["weight_decay"] == 0


def test_optimizer_of_the_user():
    """It makes the updates of the trainer's optimizer."""
    options = {"optim_args": "momentum=0.9", **RATES, **TWICE}
    theirs = ppo(objects={**moved(FAMILY), "value_model": critic_of(FAMILY)}, **options)
    objects = {**moved(FAMILY), "value_model": critic_of(FAMILY)}
    policy, critic = (list(objects[name].parameters()) for name in ("model", "value_model"))
    groups = [{"params": critic, "lr": 0.1}, {"params": policy, "lr": 0.01}]
    ours = ppo(objects={**objects, "optimizers": (torch.optim.SGD(groups, momentum=0.9), None)}, **options)
    assert identical(weights_of(theirs.trainer.model), weights_of(ours.trainer.model))
    for parameters in ([*policy, *critic], policy):
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        with pytest.raises(ValueError, match="in separate parameter groups"):
            ppo(objects={**objects, "optimizers": (optimizer, None)}, **options)


# Sources of the critic


def classifier(labels=1):
    """Returns a reward model of Gemma 3, with images."""
    model = moved("gemma3", 0.03)["model"]
    config = copy.deepcopy(model.config)
    config.num_labels = labels
    torch.manual_seed(5)
    reward_model = transformers.Gemma3ForSequenceClassification(config)
    reward_model.model.load_state_dict(model.model.state_dict())
    with torch.no_grad():
        reward_model.score.weight.normal_()
    return reward_model.eval()


class Bootstrapping(Ours):
    def _score_values(self, batch):
        self.scored = super()._score_values(batch)
        return self.scored


@pytest.mark.parametrize("from_path", [False, True])
def test_reward_model_gives_the_first_values(from_path, tmp_path):
    """The value after the last token is the model's score of the whole."""
    model = classifier()
    if from_path:
        model.save_pretrained(tmp_path)
    objects = {**moved("gemma3"), "value_model": str(tmp_path) if from_path else classifier()}
    options = {
        "bootstrap_truncated": True,
        "max_steps": 1,
        "learning_rate": 0.0,
        "trainer_class": Bootstrapping,
        **ONCE,
    }
    trainer = ppo("gemma3", image_rows(), objects=objects, **options).trainer
    (drawn,) = trainer.draws
    (_, after) = trainer.scored
    processor = trainer.processing_class
    cut = 0
    for row, completion, value in zip(drawn.rows, completions_of(drawn), after.tolist(), strict=True):
        if completion[-1] == processor.tokenizer.eos_token_id:
            assert value == 0
            continue
        with torch.no_grad():
            score = model(**encoded(processor, row, completion)[0]).logits.item()
        assert value == pytest.approx(score, rel=1e-4) and abs(score) > 0.01
        cut += 1
    assert 1 < cut < 8


@pytest.mark.parametrize("peft", [False, True])
def test_critic_is_a_copy_of_the_policy(peft, tmp_path):
    objects = {**moved(FAMILY), **({"peft_config": LORA} if peft else {})}
    trainer = make_trainer(Ours, FAMILY, text_rows(), tmp_path, objects=objects)
    expected = moved(FAMILY)["model"].base_model.state_dict()
    assert identical(trainer.critic.model.base_model.state_dict(), expected)
    assert not any(parameter.any() for parameter in trainer.critic.head.parameters())
    assert all(parameter.requires_grad for parameter in trainer.critic.parameters())
    assert not any("lora" in name for name, _ in trainer.critic.named_parameters())
    own = {parameter.data_ptr() for parameter in policy_alone(trainer.model).parameters()}
    assert own.isdisjoint(parameter.data_ptr() for parameter in trainer.critic.parameters())


def test_critic_is_what_was_passed(tmp_path):
    """An instance of the policy's class, a critic, and the folder of a critic make the same updates."""
    options = {**TWICE, "max_steps": 1}
    backbone = moved(FAMILY, 0.03)["model"]
    critic = critic_of(FAMILY)
    critic.save_pretrained(tmp_path)
    expected = {name: value.clone() for name, value in critic.state_dict().items()}
    from_instance, from_critic, from_path = (
        ppo(objects={**moved(FAMILY), "value_model": value_model}, **options)
        for value_model in (backbone, critic, str(tmp_path))
    )
    assert from_instance.trainer.critic.model is backbone and from_critic.trainer.critic is critic
    for result in (from_instance, from_critic, from_path):
        before = {n.removeprefix("critic."): w for n, w in halves(result.trainer.weights[0])[1].items()}
        heads = ("head.weight", "head.bias")
        assert all(torch.equal(before[name], expected[name]) for name in before if name not in heads)
        zero = not any(before[name].any() for name in heads)
        assert zero if result is from_instance else identical(before, expected)
    assert identical(from_critic.update, from_path.update)
    assert logged(from_path, "values/mean")[0] != 0 == logged(from_instance, "values/mean")[0]


def other_vocabulary():
    model = load(FAMILY)[0]
    model.resize_token_embeddings(model.config.get_text_config().vocab_size + 8, mean_resizing=False)
    return model


@pytest.mark.parametrize(
    "value_model, found",
    [
        (lambda: str(saved("qwen2_audio")), "'qwen2_audio' model"),
        (lambda: str(saved("qwen2_vl")), "'qwen2_vl' model"),
        (lambda: load("qwen2_audio")[0], "Qwen2AudioForConditionalGeneration"),
        (lambda: Critic(load("qwen2_audio")[0]), "Qwen2AudioForConditionalGeneration with 371"),
        (classifier, "Gemma3ForSequenceClassification"),
        (
            other_vocabulary,
            "Qwen2_5_VLForConditionalGeneration with 380 tokens, and the policy is a "
            "Qwen2_5_VLForConditionalGeneration with 372",
        ),
    ],
    ids=["path", "path of a relative", "instance", "critic", "reward model", "vocabulary"],
)
def test_critic_of_another_family_is_refused(value_model, found, tmp_path):
    objects = {**moved(FAMILY), "value_model": value_model()}
    with pytest.raises(ValueError, match=rf"must be of the policy's family.*it is a {found}"):
        make_trainer(Ours, FAMILY, text_rows(), tmp_path, objects=objects)


def test_unused_critic_raises(tmp_path):
    make = functools.partial(make_trainer, Ours, FAMILY, text_rows(), tmp_path)
    objects = {**moved(FAMILY), "value_model": str(tmp_path)}
    with pytest.raises(ValueError, match="`value_model` was passed, which `advantage_estimator='rloo'` doesn't use"):
        make(objects=objects, advantage_estimator="rloo")
    with pytest.raises(ValueError, match="`value_model` was passed, which `shared_trunk=True` doesn't use"):
        make(objects=objects, shared_trunk=True)
    objects = {**moved("gemma3"), "value_model": classifier(3)}
    with pytest.raises(ValueError, match="Gemma3ForSequenceClassification has 3"):
        make_trainer(Ours, "gemma3", text_rows(), tmp_path, objects=objects)


def test_critic_of_a_quantized_policy(tmp_path):
    pytest.importorskip("bitsandbytes")
    config = transformers.BitsAndBytesConfig(load_in_4bit=True)

    def objects():
        model, processor = load(FAMILY)
        model = type(model).from_pretrained(saved(FAMILY), quantization_config=config)
        return {"model": model, "processing_class": processor, "peft_config": LORA}

    with pytest.raises(ValueError, match="A copy of a quantized policy can't be trained as its critic"):
        make_trainer(Ours, FAMILY, text_rows(), tmp_path, objects=objects())
    for choice in ({"shared_trunk": True}, {"objects": {**objects(), "value_model": critic_of(FAMILY)}}):
        result = ppo(rows=text_rows(), **{"objects": objects(), "max_steps": 1, **ONCE, **choice})
        assert all(norm(part) > 1e-3 for part in halves(result.update))


# Losses


def value_loss_by_hand(trainer, moment, values):
    """Computes the value loss of a micro-batch token by token, and the number of clipped tokens."""
    args = trainer.args
    batch = moment.batch
    rows = [batch["completion_mask"][i].nonzero().flatten().tolist() for i in range(len(values))]
    scorable = [i for i, flag in enumerate(batch["rewards.scorable"].tolist()) if flag]
    n_scorable = sum(len(rows[i]) for i in scorable)
    weights = shares(trainer, moment)
    if args.loss.name == "bnpo":
        weights = weights * batch["completion_mask"].sum() / n_scorable
    total = mean = clipped = 0.0
    for i in scorable:
        for t in rows[i]:
            value, old, target = (x[i, t].item() for x in (values, batch["values.old"], batch["values.returns"]))
            near = old + max(min(value - old, args.cliprange_value), -args.cliprange_value)
            error = max((value - target) ** 2, (near - target) ** 2) / 2
            clipped += (near - target) ** 2 > (value - target) ** 2
            total += weights[i, t].item() * error
            mean += error / n_scorable
    return total, mean, clipped / max(n_scorable, 1)


# One of each kind of average; `test_losses.py` compares all types
@pytest.mark.parametrize(
    "loss_type", slow_but(["grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cpgd"], "grpo", "dr_grpo", "dapo")
)
def test_losses_and_their_metrics_are_those_by_hand(loss_type):
    """Covers four micro-batches in two updates, and a second epoch on them."""
    result = ppo(
        loss_type=loss_type,
        beta=0.3,
        reward=rough,
        objects={**moved(FAMILY), "value_model": critic_of(FAMILY)},
        # So that the value loss, which is taken from their float32 sum, stays near the policy's
        value_learning_rate=0.01 if loss_type in ("luspo", "bnpo") else 0.1,
        vf_coef=0.3,
        **{**TWICE, "steps_per_generation": 4, "max_steps": 4},
    )
    trainer = result.trainer
    assert all(norm(part) > 1e-3 for part in halves(result.update))
    scale = 1 if loss_type in ("dapo", "cpgd") else trainer.args.gradient_accumulation_steps
    expected = [{} for _ in range(4)]
    for moment, values in zip(trainer.micro_batches, trainer.values, strict=True):
        mask = moment.batch["completion_mask"].bool()
        value_loss, mean, clipped = value_loss_by_hand(trainer, moment, values)
        policy_loss = moment.loss.item() - trainer.args.vf_coef * value_loss
        if loss_type != "luspo":
            by_hand = loss_by_hand(trainer, moment, moment.logps).item()
            assert policy_loss == pytest.approx(by_hand, rel=1e-4, abs=1e-6)
        n_valued = mask[moment.batch["rewards.scorable"].bool()].sum().item()
        log_ratios = (moment.logps - moment.batch["old_per_token_logps"])[mask].tolist()
        metrics = {
            "policy_loss": scale * policy_loss,
            "value_loss": mean,
            "value_clip_ratio": clipped,
            "ratio/mean": fmean(map(math.exp, log_ratios)),
            "ratio/max": math.exp(max(log_ratios)),
            "approx_kl": fmean(math.exp(x) - 1 - x for x in log_ratios),
        }
        for name, value in metrics.items():
            n = 1 if name == "policy_loss" else n_valued if name.startswith("value") else len(log_ratios)
            expected[moment.step].setdefault(name, []).append((value, n))
    for entry, metrics in zip(result.history[:4], expected, strict=True):
        assert entry["kl_coef"] == 0.3 and entry["skipped_updates"] == 0
        for name, parts in metrics.items():
            values, weights = zip(*parts, strict=True)
            value = max(values) if name == "ratio/max" else fmean(values, weights)
            assert entry[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    assert max(logged(result, "value_clip_ratio")) > 0 and max(logged(result, "approx_kl")) > 1e-4


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"advantage_estimator": "group_norm", "beta": 0.1}, marks=SLOW, id="group_norm"),
        pytest.param(
            {"advantage_estimator": "reinforce", "beta": 0.1, "num_generations": 1}, marks=SLOW, id="reinforce"
        ),
        {"advantage_estimator": "rloo", "loss_type": "cpgd", "top_entropy_quantile": 0.5},
        {"advantage_estimator": "cpgd", "loss_type": "gmpo", "epsilon": 0.4},
    ],
    ids=lambda options: options["advantage_estimator"],
)
def test_estimators_without_critic_are_those_of_grpo(options):
    options = {**TWICE, "max_steps": 4, "optim": "adamw_torch", **options}
    n = options.pop("num_ppo_epochs")
    theirs = ppo(trainer_class=InjectedOurs, objects=moved(FAMILY), num_iterations=n, **options)
    ours = ppo(objects=moved(FAMILY), num_ppo_epochs=n, **options)
    assert ours.trainer.critic is None
    assert not {"value_loss", "value_learning_rate", "explained_variance"} & set().union(*ours.history)
    # The second epoch orders the micro-batches of an update differently
    assert_equal(theirs, ours, same_metrics=False)
    assert relative_difference(theirs.update, ours.update) <= 1e-5


# Micro-batches


def test_order_of_micro_batches_changes_with_the_epoch():
    result = ppo(**{**TWICE, "steps_per_generation": 4, "num_ppo_epochs": 3, "max_steps": 12})
    names = [tuple(keys(moment.batch)) for moment in result.trainer.micro_batches]
    assert len(names) == 24
    orders = [names[start : start + 4] for start in range(0, 24, 4)]
    for epochs in (orders[:3], orders[3:]):
        assert all(set(order) == set(epochs[0]) and len(set(order)) == 4 for order in epochs)
        assert len(set(map(tuple, epochs))) > 1
    assert not set(orders[0]) & set(orders[3])


def test_groups_that_are_exchanged_keep_values_and_returns():
    def hard_or_not(completion_ids, hard, **kwargs):
        return [0.1 if h else r for r, h in zip(length_and_sum(completion_ids), hard, strict=True)]

    result = ppo(
        reward=hard_or_not,
        dynamic_sampling=2,
        replay_buffer_size=8,
        objects={**moved(FAMILY), "value_model": critic_of(FAMILY)},
        beta=0.1,
        **{**TWICE, "max_steps": 8},
    )
    assert sum(logged(result, "replay/frac")) > 0 and max(logged(result, "sampling/rounds")) == 2
    trainer = result.trainer
    for name in ("values.old", "values.returns", "advantages", "old_per_token_logps"):
        drawn = by_key(trainer.draws, name)
        trained = by_key(trainer.micro_batches, name)
        assert trained.keys() <= drawn.keys()
        assert all(torch.equal(drawn[key], value) for key, value in trained.items())
        assert all(value.any() for value in trained.values())
    steps = {key: draw.step for draw in trainer.draws for key in keys(draw.batch)}
    ages = [moment.step - steps[key] for moment in trainer.micro_batches for key in keys(moment.batch)]
    assert max(ages) > 1  # 1 is the maximum within the two epochs of a draw


# Non-finite gradients


class BrokenReference(Ours):
    """The loss of the frozen policy isn't finite."""

    broken = True

    def _compute_loss(self, model, inputs):
        if self.broken and not self._is_updated("policy"):
            inputs["ref_per_token_logps"] = inputs["ref_per_token_logps"] * torch.nan
        return super()._compute_loss(model, inputs)


@pytest.mark.parametrize(
    "options",
    slow_but([{}, {"max_tokens_per_microbatch": 110}, {"shared_trunk": True}], {"shared_trunk": True}),
    ids=str,
)
def test_loss_of_a_frozen_policy_does_not_count(options):
    """A non-finite loss doesn't, either."""
    options = {"beta": 0.1, "kl_estimator": "k3", "freezing_actor_steps": 2, **options}
    results = []
    for broken in (True, False):
        trainer_class = type("Reference", (BrokenReference,), {"broken": broken})
        results.append(ppo(trainer_class=trainer_class, objects=moved(FAMILY), **options, **{**TWICE, "max_steps": 3}))
    assert logged(results[0], "skipped_updates") == [0, 0, 0]
    assert [loss is None for loss in logged(results[0], "policy_loss")] == [True, True, False]  # which is NaN
    assert all(norm(part) > 1e-3 for part in halves(results[0].update))
    assert identical(results[0].update, results[1].update)


# References


def test_reference_follows_the_policy_without_the_critic():
    result = ppo(
        beta=0.1,
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=0.3,
        objects={**moved(FAMILY), "value_model": critic_of(FAMILY)},
        **{**TWICE, "max_steps": 4},
    )
    trainer = result.trainer
    expected = weights_of(load(FAMILY)[0])
    for step in (2, 4):
        policy, _ = halves([*trainer.weights, weights_of(trainer.model)][step])
        expected = {name: 0.7 * value + 0.3 * policy[name] for name, value in expected.items()}
    reference = weights_of(trainer.accelerator.unwrap_model(trainer.ref_model))
    assert reference.keys() == expected.keys()
    assert relative_difference(expected, reference) <= 1e-6
    assert list(trainer.model._modules)[-1] == "critic"
    assert norm(halves(result.update)[1]) > 0


def test_unused_reference_raises(tmp_path):
    objects = {**moved(FAMILY), "ref_model": load(FAMILY)[0]}
    with pytest.raises(ValueError, match="`ref_model` was passed, which `beta=0` doesn't use"):
        make_trainer(Ours, FAMILY, text_rows(), tmp_path, objects=objects)


# Saving


def values_of(critic, processor, rows, completions):
    """Returns values from plain forward passes."""
    with torch.no_grad():
        pairs = zip(rows, completions, strict=True)
        return [critic(**encoded(processor, *pair)[0]) for pair in pairs]


@pytest.mark.parametrize(
    "family, rows, shared",
    [
        ("qwen2_audio", audio_rows, False),
        (FAMILY, image_rows, True),
        pytest.param(FAMILY, image_rows, False, marks=SLOW),
    ],
)
def test_saved_policy_is_a_plain_model_beside_its_critic(family, rows, shared, tmp_path):
    objects = {**moved(family), **({} if shared else {"value_model": critic_of(family)})}
    trainer = make_trainer(
        Ours, family, rows(), tmp_path, objects=objects, shared_trunk=shared, self_check=False, **TWICE
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    trainer.create_model_card()
    card = (tmp_path / "README.md").read_text()
    assert "1707.06347" in card and ("a head on the policy's last hidden states" in card) == shared
    policy, critic = halves(trainer.model.state_dict())
    names = {name for file in (tmp_path / "final").glob("*.safetensors") for name in load_file(file)}
    assert names and not any("critic" in name or "value" in name for name in names - policy.keys())
    again, info = type(trainer.model).from_pretrained(tmp_path / "final", output_loading_info=True)
    assert not any(info.values()), info
    assert identical(again.state_dict(), policy)
    if shared:
        assert [file.name for file in (tmp_path / "final" / "critic").iterdir()] == ["value_head.safetensors"]
        assert identical(
            {f"critic.{n}": w for n, w in load_file(tmp_path / "final/critic/value_head.safetensors").items()}, critic
        )
        return
    again = Critic.from_pretrained(tmp_path / "final" / "critic", type(trainer.model))
    drawn = trainer.draws[0]
    given = trainer.processing_class, drawn.rows, completions_of(drawn)
    for a, b in zip(values_of(again, *given), values_of(trainer.critic, *given), strict=True):
        assert torch.equal(a, b) and a.std() > 0.01


@pytest.mark.parametrize("shared", [False, True])
def test_saved_adapter_has_no_critic(shared, tmp_path):
    objects = {**moved(FAMILY), "peft_config": LORA}
    trainer = make_trainer(
        Ours, FAMILY, dataset(), tmp_path, objects=objects, shared_trunk=shared, self_check=False, beta=0.1, **TWICE
    )
    before = weights_of(trainer.model)
    trainer.train()
    after = weights_of(trainer.model)
    moving = {name for name, value in after.items() if not torch.equal(value, before[name])}
    policy, critic = halves(after)
    assert {name for name in policy if "lora" in name} == moving & policy.keys()
    assert critic.keys() & moving and not any("lora" in name for name in critic)
    trainer.save_model(str(tmp_path / "final"))
    assert {file.name for file in (tmp_path / "final").glob("*.safetensors")} == {"adapter_model.safetensors"}
    again = PeftModel.from_pretrained(moved(FAMILY)["model"], tmp_path / "final")
    assert identical(weights_of(again), policy)
    head = load_file(tmp_path / "final" / "critic" / "value_head.safetensors")
    assert (
        torch.equal(head["weight"], after["critic.weight" if shared else "critic.head.weight"])
        and head["weight"].any()
    )


# Other tests


def test_evaluation_leaves_training_alone():
    options = {"objects": {**moved(FAMILY), "value_model": critic_of(FAMILY)}, **TWICE}
    plain = ppo(**options)
    objects = {**moved(FAMILY), "value_model": critic_of(FAMILY), "eval_dataset": image_rows(2)}
    evaluation = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "num_generations_eval": 2,
    }
    evaluated = ppo(**{**options, "objects": objects}, **evaluation)
    assert identical(plain.update, evaluated.update)
    assert len(logged(evaluated, "eval_explained_variance")) == 2
    assert all(logged(evaluated, "eval_values/std"))
