# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The distillation trainers of TRL and of this package, with pseudo-random completions and a teacher that differs."""

from itertools import product

import torch
from datasets import Dataset
from trl import DistillationTrainer

from helpers.samplers import pseudo_random
from helpers.tools import first_calls
from helpers.trainer_utils import Injected, RemembersPacking, load, run, shifted
from trl_multimodal_rft import MultimodalDistillationTrainer
from trl_multimodal_rft.plain.distillation import jensen_shannon as divergence
from trl_multimodal_rft.plain.forward import Completion, descend, encode, in_double, log_distributions


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
        dataset = Dataset.from_list([row for row, _ in product(dataset, range(4))])
    objects = {"teacher_model": teacher(family), **(objects or {})}
    options = {"learning_rate": 0.1, "shuffle_dataset": False, **options}
    return run(trainer_class, family, dataset, reward=None, objects=objects, **options)


def plain_step(student, teacher, processor, contents, completions, *, beta, read=None, temperature=1.0, top_k=None):
    """
    Returns the loss of the plain step, the student's mean entropy, and the loss's gradients. `contents` are content
    blocks of prompts. `read` has the teacher's if they differ. With `top_k`, tokens beyond the teacher's `top_k` count
    as one.
    """
    student = in_double(student)
    teacher = in_double(teacher)
    divergences = []
    entropies = []
    for content, teacher_content, ids in zip(contents, read or contents, completions, strict=True):
        seen, told = (
            Completion(encode(processor, [{"role": "user", "content": blocks}]), torch.tensor(ids))
            for blocks in (content, teacher_content)
        )
        of_student = log_distributions(student, seen, temperature)
        with torch.no_grad():
            of_teacher = log_distributions(teacher, told, temperature)
        entropies.append(-(of_student.exp() * of_student).sum(-1).detach())
        if top_k is not None:
            of_student, of_teacher = with_rest(of_student, of_teacher, top_k)
        divergences.append(divergence(of_student, of_teacher, beta))
    loss = torch.cat(divergences).mean()
    return loss.item(), torch.cat(entropies).mean().item(), descend(student, loss, 0.0)


def with_rest(student, teacher, top_k):
    """Returns log-probabilities of the teacher's `top_k` most likely tokens and, as the last entry, of all others."""
    ids = teacher.topk(top_k, dim=-1).indices
    chosen = [log_probs.exp().gather(-1, ids) for log_probs in (student, teacher)]
    return [torch.cat([log_probs, 1 - log_probs.sum(-1, keepdim=True)], dim=-1).log() for log_probs in chosen]
