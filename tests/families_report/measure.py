# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Measures how exactly the package scores and samples a tiny model, against the model's plain forward pass."""

import copy
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from helpers.families import ALL_FAMILIES
from transformers import GenerationConfig, PreTrainedModel, ProcessorMixin
from transformers.utils import logging

from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import EncodedPrompt, encode_prompt
from trl_multimodal_rft.engines.transformers import sample_completions
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.attention import install_prefix_attention
from trl_multimodal_rft.forward.encoders import to_model
from trl_multimodal_rft.forward.head import add_fused_head
from trl_multimodal_rft.forward.masks import sharing_obstacle
from trl_multimodal_rft.forward.prompt_groups import group_by_prompt, split_samples
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.policy import Fallbacks, PolicyForward, training_obstacle

from .tiny_media import NotBuilt, chats_of, encode, has_placeholders, kinds_of, ordinary_ids
from .tiny_models import tiny_model


_COMPLETIONS = 2
_NEW_TOKENS = 5

_RATE = 16000  # Hz, of the clips of chats

TIME_LIMIT = 180  # seconds that a family may take

# Tolerances for rounding, in nats and relative to the gradient
TOLERANCE = 1e-4


@dataclass
class Measurement:
    """Measurements of a family."""

    family: str  # its `model_type`
    kinds: str = ""  # measured kinds of media
    real: bool = False  # whether a real processor made the prompts
    # `"packed"` or `"padded"`, with `"(isolated)"` if prompts get separate forward passes, or `"refused"`; `"wrong:
    # ..."` for inexact results, `"error: ..."` for failures, and `"not built"` if there is no measurement
    mode: str = "not built"
    logps: float | None = None  # largest difference of log-probabilities, in nats
    gradient: float | None = None  # difference of the gradient, relative to its norm
    sharing: str = ""  # whether samples share a prefill: `"yes"`, `"no"`, or the failure
    note: str = ""  # remark


def measure_all(families: Mapping[str, Callable[[str], Measurement]]) -> Iterator[Measurement]:
    """Measures each family in a separate process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # imports everything once

    def measured(item: tuple[str, Callable[[str], Measurement]]) -> Measurement:
        name, function = item
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(sender, function, name), daemon=True)
        process.start()
        sender.close()
        try:
            return (
                receiver.recv() if receiver.poll(TIME_LIMIT) else Measurement(name, note=f"more than {TIME_LIMIT} s")
            )
        except EOFError:
            process.join()
            return Measurement(name, mode=f"error: its process ended with status {process.exitcode}")
        finally:
            process.kill()
            process.join()

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(measured, families.items())


def _send(sender, function: Callable[[str], Measurement], name: str) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    with (
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        sender.send(function(name))


def measure_class(name: str, class_name: str) -> Measurement:
    """Measures a tiny model with synthetic media."""
    found = Measurement(name)
    try:
        model = tiny_model(getattr(transformers, class_name))
    except Exception as error:
        return replace(found, note=f"no tiny model: {_sentence(error)}")
    processor = None if has_placeholders(model) else ProcessorMixin.__new__(ProcessorMixin)
    refused = training_obstacle(model, processor, _NEW_TOKENS)
    if refused is not None:
        return replace(found, kinds=", ".join(kinds_of(model)), mode="refused", note=refused)
    prompts = []
    failed = {}
    for seed, media in enumerate(chats_of(kinds_of(model))):
        what = " and ".join(kind for kind, _ in media) or "text"
        reason = ""
        for split_frames in (False, True)[: 1 + any(kind == "video" for kind, _ in media)]:
            try:
                prompt = encode(model, media, seed, split_frames)
                with torch.no_grad():
                    plain_logits(model, prompt, _completions(model, 1)[0][0])
                prompts.append(prompt)
                break
            except Exception as error:
                reason = reason or _sentence(error)
        else:
            failed.setdefault(reason, what)
    left_out = "; ".join(f"{what}: {reason}" for reason, what in failed.items())
    seen = [kind for kind in kinds_of(model) if any(kind in prompt.modalities for prompt in prompts)]
    found = replace(found, kinds=", ".join(seen), note=left_out and f"without {left_out}")
    return measure(model, prompts, found) if seen else found


def measure_real(name: str, class_name: str | None = None) -> Measurement:
    """Measures a tiny model with its real processor."""
    found = Measurement(name, real=True)
    try:
        family = ALL_FAMILIES[name]
        model, processor = family.build()
        chats = family.prompts()
        for block in (block for chat in chats for block in chat[0]["content"] if block["type"] == "audio"):
            block.setdefault("sampling_rate", _RATE)
        rows = rows_to_messages([{"prompt": chat} for chat in chats])
        prompts = [encode_prompt(row["prompt"], processor, model) for row in rows]
    except Exception as error:
        reason = f"no real processor: {_sentence(error)}"
        if class_name is None:
            return replace(found, note=reason)
        found = measure_class(name, class_name)
        return replace(found, note="; ".join(filter(None, (reason, found.note))))
    return measure(model, prompts, replace(found, kinds=", ".join(family.modalities)))


def measure(model: PreTrainedModel, prompts: Sequence[EncodedPrompt], found: Measurement) -> Measurement:
    """Measures a model on prompts."""
    plain = copy.deepcopy(model)
    repeated = [prompt for prompt, _ in product(prompts, range(_COMPLETIONS))]
    ids, mask = _completions(model, len(repeated))
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1)) * mask
    truth = []
    try:
        for prompt, row, own, weight in zip(repeated, ids, mask.bool(), weights, strict=True):
            logps = plain_logits(plain, prompt, row[own]).log_softmax(-1).gather(-1, row[own][:, None])[:, 0]
            (logps * weight[own]).sum().backward()
            truth.append(F.pad(logps.detach(), (0, len(row) - len(logps))))
    except Exception as error:
        return replace(found, note=f"its own forward fails: {_sentence(error)}")
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}

    try:
        obstacle = sharing_obstacle(model)
        if obstacle is None:
            install_prefix_attention(model)
        logits_from_model = not add_fused_head(model, temperature=1.0)
        policy = PolicyForward(fallbacks=Fallbacks(obstacle is None, family_of(model).isolate, logits_from_model))
    except Exception as error:
        return replace(found, mode=f"error: {_sentence(error)}")
    notes = [found.note, obstacle]

    def score(fallbacks: Fallbacks) -> tuple[float, float]:
        model.zero_grad(set_to_none=True)
        scores = policy.score(
            model, ScoreRequest(repeated, ids, mask, packed=fallbacks.packing), fallbacks=fallbacks
        ).logps
        (scores * weights).sum().backward()
        difference = (scores.detach() - torch.stack(truth)) * mask
        own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return difference.abs().max().item(), _relative(own, gradients)

    found = replace(found, mode=_mode(policy.fallbacks))
    try:
        logps, gradient = score(policy.fallbacks)
        found = replace(found, logps=logps, gradient=gradient)
        exact = max(logps, gradient) <= TOLERANCE
    except Exception as error:
        found = replace(found, mode=f"error: {_sentence(error)}")
        exact = False
    if not exact:
        found = replace(found, mode=found.mode if found.mode.startswith("error") else f"wrong: {found.mode}")
        notes.append(_remedy(score, policy.fallbacks))
    sharing, disagreement = _sharing(plain, model, policy, prompts)
    return replace(found, sharing=sharing, note="; ".join(each for each in (*notes, disagreement) if each))


def _mode(fallbacks: Fallbacks) -> str:
    return ("packed" if fallbacks.packing else "padded") + (" (isolated)" if fallbacks.isolate else "")


def _remedy(score, fallbacks: Fallbacks) -> str:
    """Returns an exact configuration."""
    for packing in [True, False][not fallbacks.packing :]:
        for isolate in (None, "media", "prompt"):
            for logits_from_model in (False, True):
                other = Fallbacks(packing=packing, isolate=isolate, logits_from_model=logits_from_model)
                try:
                    if max(score(other)) <= TOLERANCE:
                        own = "; logits from the model" if logits_from_model else ""
                        return f"exact if {_mode(other)}{f' ({isolate})' if isolate else ''}{own}"
                except Exception:
                    continue
    return "nothing is exact"


def _relative(own: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    zero = torch.zeros(())
    names = own.keys() | other.keys()
    difference = torch.stack([(own.get(name, zero) - other.get(name, zero)).norm() for name in names]).norm()
    return (difference / torch.stack([value.norm() for value in other.values()]).norm()).item()


def _completions(model, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, _NEW_TOKENS + 1, (n,), generator=generator)
    mask = (torch.arange(_NEW_TOKENS) < lengths[:, None]).long()
    ids = ordinary_ids(model)
    return ids[torch.randint(len(ids), (n, _NEW_TOKENS), generator=generator)] * mask, mask


def _plain_inputs(model, prompt: EncodedPrompt) -> dict[str, Any]:
    fields = {name: value[None] for name, value in prompt.token_fields.items()}
    ids = prompt.input_ids[None]
    media = to_model(prompt.media, model, ids.device)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **fields, **media}


def plain_logits(model, prompt: EncodedPrompt, completion: torch.Tensor) -> torch.Tensor:
    """Returns the logits of a completion's tokens from the model's forward pass on one row."""
    inputs = _plain_inputs(model, prompt)
    n_new = len(completion)
    inputs["input_ids"] = torch.cat([inputs["input_ids"], completion[None]], dim=1)
    fill = {"attention_mask": 1, **family_of(model).token_field_fill}
    for name in ("attention_mask", *prompt.token_fields):
        behind = inputs[name][:, -1:]
        if inputs[name].dim() == 2:
            behind = torch.full_like(behind, fill.get(name, 0))
        inputs[name] = torch.cat([inputs[name], behind.repeat_interleave(n_new, 1)], dim=1)
    return model(**inputs, use_cache=False).logits[0, -n_new - 1 : -1]


def _sharing(plain, model, policy: PolicyForward, prompts: Sequence[EncodedPrompt]) -> tuple[str, str]:
    """Compares greedy samples from a shared prefill with those of `generate`, and those with the forward pass."""
    text_ids = ordinary_ids(model)
    disagreement = ""
    size = model.config.get_text_config(decoder=True).vocab_size
    greedy = GenerationConfig(
        max_new_tokens=_NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        suppress_tokens=sorted({*range(size)} - {*text_ids.tolist()}),
        disable_compile=True,
    )
    for each in (plain, model):
        each.generation_config = copy.deepcopy(greedy)
    with torch.no_grad():
        try:
            expected = [
                plain.generate(**_plain_inputs(plain, prompt), generation_config=greedy)[0, -_NEW_TOKENS:]
                for prompt in prompts
            ]
        except Exception as error:
            return f"`generate` fails: {_sentence(error)}", ""
        for prompt, ids in zip(prompts, expected, strict=True):
            logits = plain_logits(plain, prompt, ids)[:, text_ids]
            if not torch.equal(text_ids[logits.argmax(-1)], ids):
                disagreement = "its own forward would write other tokens than its `generate`"
        repeated = [prompt for prompt, _ in product(prompts, range(_COMPLETIONS))]
        rows = []
        hook = model.register_forward_pre_hook(
            lambda module, args, kwargs: rows.append(_n_rows(kwargs)), with_kwargs=True
        )
        try:
            sampled = sample_completions(policy, model, repeated, greedy, 0)
        except Exception as error:
            return f"error: {_sentence(error)}", disagreement
        finally:
            hook.remove()
    first = [repeated[i] for i in split_samples(repeated, policy.fallbacks.isolate)[0]]
    shared = "yes" if rows[:1] == [len(group_by_prompt(first))] else "no"
    same = torch.equal(sampled, torch.stack(expected).repeat_interleave(_COMPLETIONS, 0))
    return (shared if same else f"wrong (shared: {shared})"), disagreement


def _n_rows(kwargs: dict[str, Any]) -> int:
    ids = kwargs.get("input_ids")
    return len(kwargs["inputs_embeds"] if ids is None else ids)


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, NotBuilt):
        return text[:160]
    return f"{type(error).__name__}: {text[:160]}"
