# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
What all plain steps share: a prompt with media and a completion as one row, the model's log-probabilities of the row's
tokens, and gradient descent.

A forward pass has one row, without padding, in float64.
"""

import copy
from dataclasses import dataclass
from typing import cast

import torch
from transformers import BatchFeature, PreTrainedModel, ProcessorMixin


@dataclass
class Completion:
    """
    A completion of C tokens. `prompt` has the arguments of the forward of the prompt alone, such as `pixel_values`.
    Methods that sample also use `reward`, and `old`, the log-probabilities under the model that sampled it.
    """

    prompt: dict[str, torch.Tensor]
    ids: torch.Tensor  # (C,)
    reward: float = 0.0
    old: torch.Tensor = torch.empty(0)  # (C,), which `sampled` sets


def encode(processor: ProcessorMixin, messages: list[dict], is_prompt: bool = True) -> dict[str, torch.Tensor]:
    """Returns the arguments of a model's forward for messages, whose blocks hold the media."""
    options = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
    encoded = processor.apply_chat_template([messages], add_generation_prompt=is_prompt, **options)
    return dict(cast(BatchFeature, encoded))


def encode_answer(processor: ProcessorMixin, messages: list[dict], answer: str) -> Completion:
    """Returns a written answer to messages: the tokens that the chat with the answer has beyond the prompt."""
    prompt = encode(processor, messages)
    reply = {"role": "assistant", "content": [{"type": "text", "text": answer}]}
    chat = encode(processor, [*messages, reply], is_prompt=False)
    return Completion(prompt, chat["input_ids"][0, prompt["input_ids"].size(1) :])


def row_of(completion: Completion) -> dict[str, torch.Tensor]:
    """Returns the arguments of the model's forward for prompt and completion."""
    prompt_ids = completion.prompt["input_ids"]
    row = dict(completion.prompt)
    for name, value in row.items():
        if name == "input_ids":
            row[name] = torch.cat([value, completion.ids[None]], dim=1)
        elif value.shape == prompt_ids.shape:  # per token: a mask, which is 1 on text, or types, which are 0
            tail = torch.full_like(completion.ids[None], int(name == "attention_mask"), dtype=value.dtype)
            row[name] = torch.cat([value, tail], dim=1)
        elif value.is_floating_point():  # media
            row[name] = value.double()
    return row


def log_distributions(model: PreTrainedModel, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Returns the log-probabilities of all tokens of the vocabulary at each token of a completion, `(C, V)`."""
    start = completion.prompt["input_ids"].size(1)
    logits = model(**row_of(completion)).logits[0, start - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def log_probabilities(model: PreTrainedModel, completion: Completion, temperature: float = 1.0) -> torch.Tensor:
    """Returns the log-probability of each token of a completion, `(C,)`."""
    return log_distributions(model, completion, temperature).gather(1, completion.ids[:, None])[:, 0]


def log_ratio(model: PreTrainedModel, reference: PreTrainedModel, answer: Completion) -> torch.Tensor:
    """Returns the log-probability of an answer under a model minus that under the reference, a scalar."""
    with torch.no_grad():
        log_reference = log_probabilities(reference, answer).sum()
    return log_probabilities(model, answer).sum() - log_reference


def sampled(model: PreTrainedModel, completions: list[Completion], temperature: float = 1.0) -> None:
    """Sets the log-probabilities `old` of completions that a model has just sampled."""
    for completion in completions:
        completion.old = log_probabilities(model, completion, temperature).detach()


def descend(model: torch.nn.Module, loss: torch.Tensor, learning_rate: float) -> dict[str, torch.Tensor]:
    """Moves a model by gradient descent without momentum. Returns the gradients by the names of parameters."""
    model.zero_grad()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameter -= learning_rate * gradients[name]
    return gradients


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """Returns a copy of a model in float64 and without dropout."""
    return copy.deepcopy(model).double().eval()
