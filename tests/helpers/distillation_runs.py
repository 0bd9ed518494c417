# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The distillation trainers of TRL and of this package, with pseudo-random completions and a teacher that differs."""

import torch
from datasets import Dataset
from trl import DistillationTrainer

from helpers.encoding import extended
from helpers.families import encode
from helpers.samplers import pseudo_random
from helpers.tools import first_calls
from helpers.trainer_utils import Injected, RemembersPacking, load, run, shifted
from trl_multimodal_rft import MultimodalDistillationTrainer


def _single_turn(trainer, prompt_ids, *args, **kwargs):
    return pseudo_random(prompt_ids, trainer.state.global_step, trainer.model.training, trainer._tokenizer)


def _calling_turn(trainer, prompt_ids, *args, **kwargs):
    """Returns completions that call tools like those of [`Calling`], and samples later turns."""
    if len(prompt_ids) == trainer.args.per_device_train_batch_size:
        return first_calls(len(prompt_ids), trainer._tokenizer)
    return DistillationTrainer._generate_single_turn(trainer, prompt_ids, *args, **kwargs)


InjectedTRL = type("InjectedTRL", (DistillationTrainer,), {"_generate_single_turn": _single_turn})
CallingTRL = type("CallingTRL", (DistillationTrainer,), {"_generate_single_turn": _calling_turn})


class InjectedOurs(RemembersPacking, Injected, MultimodalDistillationTrainer):
    pass


def teacher(family: str, distance: float = 0.05):
    """Returns a model of the family whose weights differ from the student's."""
    return shifted(load(family)[0], distance, seed=7)


def distill(trainer_class, family: str, dataset, objects=None, **options):
    """Trains on the rows of a dataset in their order, with 4 completions per row."""
    if not issubclass(trainer_class, MultimodalDistillationTrainer):  # TRL's trainer samples one completion per row
        dataset = Dataset.from_list([row for row in dataset for _ in range(4)])
    objects = {"teacher_model": teacher(family), **(objects or {})}
    options = {"learning_rate": 0.1, "shuffle_dataset": False, **options}
    return run(trainer_class, family, dataset, reward=None, objects=objects, **options)


def by_hand(student, teacher, processor, contents, completions, *, beta, read=None, temperature=1.0, top_k=None):
    """
    Returns the mean divergence over the completions' tokens, the student's mean entropy, and the divergence's
    gradients, by the equations, from plain forward passes of single completions. `contents` are content blocks of
    prompts. `read` has the teacher's if they differ. With `top_k`, tokens beyond the teacher's `top_k` count as one.
    """
    total, entropy, n_tokens = 0.0, 0.0, sum(map(len, completions))
    for content, teacher_content, ids in zip(contents, read or contents, completions, strict=True):
        log_probs = []
        for model, blocks in ((student, content), (teacher, teacher_content)):
            with torch.set_grad_enabled(not log_probs):  # gradients of the student, which comes first
                inputs = encode(processor, [{"role": "user", "content": blocks}])
                logits = model(**extended(inputs, torch.tensor(ids))).logits[0, -len(ids) - 1 : -1]
                log_probs.append((logits / temperature).log_softmax(-1))
        entropy -= (log_probs[0].exp() * log_probs[0]).sum().item()
        if top_k is not None:
            log_probs = with_rest(*log_probs, top_k)
        total = total + divergence(*log_probs, beta).sum()
    loss = total / n_tokens
    student.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in student.named_parameters() if p.grad is not None}
    return loss.item(), entropy / n_tokens, gradients


def with_rest(student, teacher, top_k):
    """Returns log-probabilities of the teacher's `top_k` most likely tokens and, as the last entry, of all others."""
    ids = teacher.topk(top_k, dim=-1).indices
    chosen = [log_probs.exp().gather(-1, ids) for log_probs in (student, teacher)]
    return [torch.cat([log_probs, 1 - log_probs.sum(-1, keepdim=True)], dim=-1).log() for log_probs in chosen]


def divergence(student, teacher, beta):
    """Returns the generalized Jensen-Shannon divergence: KL(teacher, student) for a `beta` of 0, reversed for 1."""

    def kl(p, q):
        return (p.exp() * (p - q)).sum(-1)

    if beta in (0, 1):
        return kl(student, teacher) if beta else kl(teacher, student)
    mixture = ((1 - beta) * student.exp() + beta * teacher.exp()).log()
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)
