# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The critic: values of the states before the actions, packed equals padded, and media affect every value."""

import copy
from contextlib import contextmanager
from itertools import product

import pytest
import torch
import torch.distributed as dist
from helpers.completions import G, random_completions
from helpers.encoding import encode_chats
from helpers.families import FAMILIES, every_family
from helpers.packed_rows import skip_linear_attention
from helpers.trainer_utils import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trl_multimodal_rft import models
from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.families import family_of
from trl_multimodal_rft.forward.logprobs import completion_values
from trl_multimodal_rft.forward.scores import ScoreRequest
from trl_multimodal_rft.lightrft import Critic
from trl_multimodal_rft.models.critic import add_critic, policy_alone


def build(name):
    """Returns a model with a nonzero head, prompts of its family and their completions."""
    model, processor = FAMILIES[name].build()
    skip_linear_attention(model)
    critic = Critic(model)
    with torch.no_grad():
        critic.head.weight.normal_(generator=torch.Generator().manual_seed(0))
    prompts = [p for p, _ in product(encode_chats(model, processor, FAMILIES[name].prompts()), range(G))]
    isolate = family_of(model).isolate
    return critic, prompts, *random_completions(len(prompts)), isolate


def gradients(critic, values, mask):
    weights = torch.randn(values.shape, generator=torch.Generator().manual_seed(1))
    critic.zero_grad(set_to_none=True)
    (values * weights * mask).sum().backward()
    return torch.cat([p.grad.flatten() for p in critic.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", every_family())
def test_packed_equals_padded(name):
    critic, prompts, ids, mask, isolate = build(name)

    def run(packed, isolate):
        values = completion_values(
            critic, critic.model, ScoreRequest(prompts, ids, mask, packed=packed, isolate=isolate)
        )
        return values, gradients(critic, values, mask)

    # Pads each prompt separately, without padding on the left
    (packed, packed_gradient) = run(True, isolate)
    (padded, padded_gradient) = run(False, "prompt")
    assert packed[mask.bool()].std() > 0.1
    assert not packed[mask == 0].any()
    assert (packed - padded).abs().max() <= 1e-4
    assert (packed_gradient - padded_gradient).norm() <= 1e-4 * padded_gradient.norm()


def test_values_are_those_before_the_actions():
    critic, prompts, ids, mask, _ = build("qwen2_5_vl")
    values = completion_values(critic, critic.model, ScoreRequest(prompts, ids, mask))
    # A value doesn't depend on its action, and an action affects only later values
    other = ids.clone()
    other[:, 1] = (other[:, 1] + 1) * mask[:, 1]
    changed = completion_values(critic, critic.model, ScoreRequest(prompts, other, mask))
    assert torch.equal(values[:, :2], changed[:, :2])
    later = (mask[:, 2] == 1).nonzero()[:, 0]
    assert (values[later, 2] != changed[later, 2]).all()


def test_first_values_are_0():
    model, processor = FAMILIES["qwen2_audio"].build()
    prompts = encode_chats(model, processor, FAMILIES["qwen2_audio"].prompts())
    ids, mask = random_completions(len(prompts))
    critic = Critic(model.to(torch.bfloat16))
    assert critic.head.weight.dtype == torch.float32
    assert not completion_values(critic, critic.model, ScoreRequest(prompts, ids, mask)).any()


def test_saved_critic_is_the_same(tmp_path):
    critic, prompts, ids, mask, _ = build("qwen2_5_vl")
    critic.save_pretrained(tmp_path)
    again = Critic.from_pretrained(tmp_path, type(critic.model))
    a, b = (completion_values(each, each.model, ScoreRequest(prompts, ids, mask)) for each in (critic, again))
    assert torch.equal(a, b)


def test_wrong_input_is_refused():
    model, processor = FAMILIES["qwen2_audio"].build()
    critic = Critic(model)
    prompt = next(p for p in encode_chats(model, processor, FAMILIES["qwen2_audio"].prompts()) if p.media)
    with pytest.raises(MediaError, match="pass the audio"):
        critic(prompt.input_ids[None], 2)
    with pytest.raises(ValueError, match="`num_actions`"):
        critic(torch.ones(1, 3, dtype=torch.long), 3)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3"])  # one has tied weights
def test_policy_without_its_critic(name, tmp_path):
    """It has exactly the weights of the policy, and so do the policy's files."""
    policy = load(name)[0]
    weights = dict(policy.named_parameters())
    policy.save_pretrained(tmp_path / "alone")
    assert policy_alone(policy) is policy
    add_critic(policy, models.Critic(copy.deepcopy(policy)))
    alone = policy_alone(policy)
    assert type(alone) is type(policy) and policy.critic is not None and not hasattr(alone, "critic")
    found = dict(alone.named_parameters())
    assert found.keys() == weights.keys() < dict(policy.named_parameters()).keys()
    assert all(found[each] is weights[each] for each in weights)
    policy.save_pretrained(tmp_path / "with critic")
    contents = [(tmp_path / each / "model.safetensors").read_bytes() for each in ("alone", "with critic")]
    assert contents[0] == contents[1]
    ids = torch.arange(60, 75)[None]
    assert torch.equal(alone(input_ids=ids).logits, policy(input_ids=ids).logits)


@contextmanager
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_policy_within_fsdp_without_its_critic():
    """FSDP derives a class from the model's, whose instances can't be copied."""
    with one_process():
        policy = load("qwen2_5_vl")[0]
        add_critic(policy, models.ValueHead(policy.config.get_text_config().hidden_size))
        names = set(dict(policy.named_parameters())) - {"critic.weight", "critic.bias"}
        fully_shard(policy, mesh=init_device_mesh("cpu", (1,)))
        alone = policy_alone(policy)
        assert {*dict(alone.named_parameters())} == names
        assert all(isinstance(each, DTensor) for each in alone.parameters())
