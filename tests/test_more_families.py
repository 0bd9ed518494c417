# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
Families by their folder alone: media of different sizes and counts beside text in one batch, against the model's own
forward and `generate` on one prompt at a time, with nothing of the package.
"""

import pytest
import torch
import transformers
from helpers.completions import random_completions
from helpers.encoding import encode_chats
from helpers.families import FAMILIES, SPECIAL, encode
from helpers.more_families import MORE_FAMILIES
from helpers.trainer_utils import make_trainer, relative_difference, saved, text_rows

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.data.columns import rows_to_messages
from trl_multimodal_rft.families import TOKEN_FIELDS, family_of
from trl_multimodal_rft.policy import Remedies


G = 2


def alone(model, inputs, ids):
    """Log-probabilities of a completion by the model's own forward."""
    fill = family_of(model).token_field_fill
    inputs = {**inputs, "input_ids": torch.cat([inputs["input_ids"], ids[None]], dim=1)}
    for name, value in (("attention_mask", 1), *((name, fill.get(name, 0)) for name in inputs if "type_ids" in name)):
        inputs[name] = torch.nn.functional.pad(inputs[name], (0, len(ids)), value=value)
    logits = model(**inputs, use_cache=False).logits[0, -len(ids) - 1 : -1]
    return logits.float().log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}


def measure(name, tmp_path, say=print):
    family = {**FAMILIES, **SPECIAL, **MORE_FAMILIES}[name]
    folder = family.save(tmp_path)
    architecture = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    plain = getattr(transformers, architecture).from_pretrained(folder).eval()
    processor = transformers.AutoProcessor.from_pretrained(folder)
    trainer = make_trainer(MultimodalGRPOTrainer, name, text_rows(), tmp_path, objects={"model": str(folder)})
    model, policy = trainer.model.eval(), trainer._policy
    say(policy.remedies)
    prompts = encode_chats(model, trainer.processing_class, family.prompts())
    chats = family.prompts()
    for c in chats:
        for b in c[0]["content"]:
            if b["type"] == "audio": b["sampling_rate"] = 16000
    rows = rows_to_messages([{"prompt": chat} for chat in chats])
    trainer._run_self_check([row["prompt"] for row in rows], prompts)

    inputs = [encode(processor, chat).to(torch.float32) for chat in family.prompts()]
    for each, prompt in zip(inputs, prompts, strict=True):
        each.pop("labels", None)
        if not torch.equal(each["input_ids"][0], prompt.input_ids): say("DIFFERENT TOKENS", each["input_ids"].shape, prompt.input_ids.shape)
    repeated = [prompt for prompt in prompts for _ in range(G)]
    ids, mask = random_completions(len(repeated))
    weights = torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.zeros(ids.shape)
    for i, (row, length) in enumerate(zip(ids, mask.sum(1), strict=True)):
        logps = alone(plain, inputs[i // G], row[:length])
        (logps * weights[i, :length]).sum().backward()
        expected[i, :length] = logps.detach()
    scores = policy.score(model, repeated, ids, mask, packed=policy.remedies.can_pack)
    (scores.logps * weights).sum().backward()
    grads = gradients(plain), gradients(model)
    missing = grads[0].keys() ^ grads[1].keys()
    diff = (scores.logps - expected).abs().max().item()
    rel = relative_difference(*grads) if not missing else missing
    say(name, policy.remedies, "logp", diff, "grad", rel)
    with torch.no_grad():
      for other in (True, False):
        s = policy.score(model, repeated, ids, mask, packed=other).logps
        say("  packed" if other else "  padded", (s-expected).abs().max().item())
    config = trainer.generation_config
    config.update(do_sample=False, max_new_tokens=6, top_k=None, top_p=None, temperature=None)
    sampled = policy.sample(model, repeated, config, trainer._tokenizer.pad_token_id)
    bad = []
    for i, each in enumerate(inputs):
        out = plain.generate(**each, generation_config=config)[0, each["input_ids"].size(1):]
        for row in sampled[G*i:G*i+G]:
            if not torch.equal(row[:len(out)], out): bad.append(i)
    say("  sampled", "wrong at %s" % bad if bad else "ok")
    return trainer
