# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Hidden states of completions, and divergences of two models' distributions from them."""

import itertools

import pytest
import torch
from accelerate import Accelerator
from families_report.measure import plain_logits
from helpers.completions import random_completions
from helpers.distillation_runs import divergence as written_out
from helpers.marks import slow_but
from helpers.packed_rows import build
from helpers.trainer_utils import relative_difference
from torch.testing import assert_close

from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward import divergence
from trl_multimodal_rft.forward.divergence import (
    Head,
    Target,
    divergences,
    head_of,
    top_k_divergence,
    top_k_tokens,
)
from trl_multimodal_rft.forward.head import HeadRule, head_rule
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.forward.token_budget import backward_by_parts
from trl_multimodal_rft.policy import Fallbacks, PolicyForward


FAMILIES = ["qwen2_5_vl", "qwen2_audio", "gemma3", "qwen2_5_omni", "llava"]


def plain_states(model, prompts, ids, mask):
    """Returns the states that the head gets, in a forward of the model's own for each completion."""
    taken = []
    rows = []
    handle = model.get_output_embeddings().register_forward_pre_hook(lambda module, args: taken.append(args[0][0]))
    for prompt, completion, length in zip(prompts, ids, mask.sum(1).tolist(), strict=True):
        plain_logits(model, prompt, completion[:length])
        rows.append(torch.nn.functional.pad(taken.pop()[-length - 1 : -1], (0, 0, 0, len(completion) - length)))
    handle.remove()
    return torch.stack(rows)


PLAIN = HeadRule()


def head(vocabulary, width, seed, rule=PLAIN, bias=True):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(vocabulary, width, generator=generator, requires_grad=True)
    return Head(weight, torch.randn(vocabulary, generator=generator, requires_grad=True) if bias else None, rule)


def distribution(hidden, given, temperature):
    """Returns log-probabilities as the equations of the papers have them, in float64."""
    logits = hidden.double() @ given.weight.double().T
    logits = given.rule.scale * (logits + (0 if given.bias is None else given.bias.double()))
    if given.rule.softcap is not None:
        logits = given.rule.softcap * (logits / given.rule.softcap).tanh()
    return (logits / temperature).log_softmax(-1)


def assert_same_gradients(found, expected, leaves):
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(4))
    ours, theirs = (torch.autograd.grad((each * weights).sum(), leaves) for each in (found, expected))
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, atol=1e-5, rtol=1e-4)


RULES = HeadRule(0.5, 3.0), HeadRule(1.5, None)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_divergence_is_that_of_the_equations(beta):
    """Two models of different width, with bias, scale and soft cap, and a mask of tokens that count."""
    hidden = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    theirs = torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    student = head(40, 8, 2, RULES[0])
    teacher = head(40, 12, 3, RULES[1])
    target = Target(mask, RULES[0], beta, 1.7, hidden=theirs, head=teacher)
    found, entropies = divergences(hidden, student, target)
    of_student = distribution(hidden, student, 1.7)
    expected = written_out(of_student, distribution(theirs, teacher, 1.7).detach(), beta) * mask
    assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert_close(entropies.double(), -(of_student.exp() * of_student).sum(-1) * mask, atol=1e-5, rtol=1e-5)
    assert not entropies.requires_grad
    assert_same_gradients(found, expected, [hidden, student.weight, student.bias])


@pytest.mark.parametrize("add_tail", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_top_k_divergence_is_that_of_the_equations(beta, add_tail, monkeypatch):
    monkeypatch.setattr(divergence, "_TOKENS_AT_ONCE", 3)
    hidden = torch.randn(7, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    theirs = torch.randn(7, 12, generator=torch.Generator().manual_seed(1))
    student = head(40, 8, 2, RULES[0])
    teacher = head(40, 12, 3, RULES[1], bias=False)
    ids, logps = top_k_tokens(theirs, teacher, 4, temperature=1.7)
    of_teacher = distribution(theirs, teacher, 1.7).detach()
    of_student = distribution(hidden, student, 1.7)
    best = of_teacher.topk(4, -1)
    assert torch.equal(ids, best.indices) and not logps.requires_grad
    assert_close(logps.double(), best.values, atol=1e-5, rtol=1e-5)

    chosen = of_student.gather(-1, ids), of_teacher.gather(-1, ids)
    if add_tail:
        chosen = (torch.cat([each, (1 - each.exp().sum(-1, keepdim=True)).log()], -1) for each in chosen)
    else:
        chosen = ((each.exp() / each.exp().sum(-1, keepdim=True)).log() for each in chosen)
    expected = written_out(*chosen, beta)
    found, entropies = top_k_divergence(hidden, student, ids, logps, beta=beta, temperature=1.7, add_tail=add_tail)
    assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)
    assert_close(entropies.double(), -(of_student.exp() * of_student).sum(-1), atol=1e-5, rtol=1e-5)
    assert_same_gradients(found, expected, [hidden, student.weight, student.bias])


def test_top_k_of_all_tokens_is_the_whole_divergence():
    """And with fewer it is a lower bound, as merging tokens loses information."""
    hidden, theirs = (torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    student = head(30, 8, 2)
    teacher = head(30, 8, 3)
    whole = written_out(distribution(hidden, student, 1.0), distribution(theirs, teacher, 1.0), 0.5)
    bounds = [
        top_k_divergence(hidden, student, *top_k_tokens(theirs, teacher, k), beta=0.5)[0].double() for k in (30, 8, 2)
    ]
    assert_close(bounds[0], whole, atol=1e-4, rtol=1e-4)
    assert (bounds[2] <= bounds[1] + 1e-6).all() and (bounds[1] <= whole + 1e-6).all()


def test_a_token_that_a_server_left_out_counts_to_the_rest():
    hidden = torch.randn(1, 8, generator=torch.Generator().manual_seed(0))
    student = head(30, 8, 2)
    ids = torch.tensor([[3, 5, 0]])
    logps = torch.tensor([[-1.0, -2.0, -torch.inf]])
    for add_tail in (True, False):
        found = top_k_divergence(hidden, student, ids, logps, add_tail=add_tail)[0]
        expected = top_k_divergence(hidden, student, ids[:, :2], logps[:, :2], add_tail=add_tail)[0]
        assert_close(found, expected)
        assert found.isfinite().all() and found > 0


@pytest.mark.parametrize(
    ("name", "k"),
    slow_but(
        itertools.product(FAMILIES, [None, 5]), *((name, 5 if i % 2 else None) for i, name in enumerate(FAMILIES))
    ),
)
def test_scores_against_a_target(name, k):
    """Packed, padded, and in parts of a token budget: divergences and gradients of the model's own forward."""
    model, prompts = build(name)
    teacher, _ = build(name)
    with torch.no_grad():
        for i, p in enumerate(teacher.parameters()):
            p += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
    ids, mask = random_completions(len(prompts))
    counts = mask * torch.randint(0, 2, mask.shape, generator=torch.Generator().manual_seed(5))
    rule = head_rule(model)
    with torch.no_grad():
        theirs = plain_states(teacher, prompts, ids, mask)
    of_teacher = head_of(teacher, rule)
    options = {"hidden": theirs, "head": of_teacher}
    if k is not None:
        best = top_k_tokens(theirs.flatten(0, 1), of_teacher, k)
        options = dict(zip(("ids", "logps"), (each.unflatten(0, mask.shape) for each in best), strict=True))
    target = Target(counts, rule, beta=0.5, **options)
    expected, entropies = divergences(plain_states(model, prompts, ids, mask), head_of(model, rule), target)
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    assert expected.max() > 1e-3

    longest = max(len(prompt) for prompt in prompts) + mask.size(1)
    for packed, budget in ((True, None), (False, None), (True, longest), (False, longest)):
        model.zero_grad()
        policy = PolicyForward(fallbacks=Fallbacks(isolate=family_of(model).isolate), max_tokens=budget)
        scores = policy.score(model, ScoreRequest(prompts, ids, mask, packed=packed, target=target))
        assert_close(scores.divergences, expected, atol=1e-5, rtol=1e-5)
        assert_close(scores.entropies, entropies, atol=1e-5, rtol=1e-5)
        assert scores.logps is None
        loss = (scores.divergences * weights).sum()
        if budget is not None:
            assert len(scores.deferred.parts) > 1
            loss = backward_by_parts(Accelerator(cpu=True), model, loss, scores.deferred)
        loss.backward()
        ours = {n: p.grad for n, p in model.named_parameters() if n in gradients}
        assert relative_difference(gradients, ours) <= 1e-5
    states = policy.score(teacher, ScoreRequest(prompts, ids, mask, packed=True, hidden=True, logps=False))
    assert states.logps is None
    assert_close(states.hidden, theirs, atol=1e-5, rtol=1e-5)
