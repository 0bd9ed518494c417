# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Groups of completions that outlive their batch."""

import io

import torch

from trl_multimodal_rft.encoding.prompts import DecodedPrompt, EncodedPrompt
from trl_multimodal_rft.rollout.groups import SAVED_CLASSES, GroupBuffer
from trl_multimodal_rft.rollout.rollout import Rollout


def group(number: int, step: int = 0, size: int = 2) -> Rollout:
    ids = torch.tensor([number])
    prompt = EncodedPrompt(
        ids, {}, {"pixel_values": torch.ones(1, 3)}, ids[None], decoded=((slice(0, 1), DecodedPrompt([], {}, {}, {})),)
    )
    completions = {"completion_ids": torch.full((size, 3), number), "completion_mask": torch.ones(size, 3)}
    return Rollout([prompt] * size, torch.zeros(size), 0, **completions, live=torch.ones(size), step=step)


def prompts_in(groups) -> list[int]:
    return [int(own.prompts[0].input_ids) for own in groups]


def test_newest_groups_are_kept_without_images():
    buffer, own = GroupBuffer(2, max_age=5, seed=0), group(1)
    buffer.append([group(0), own, group(2)])
    assert prompts_in(buffer.state_dict()["groups"]) == [1, 2]
    assert own.prompts[0].decoded
    assert not buffer.take(1)[0].prompts[0].decoded
    buffer.append([group(3)])
    assert prompts_in(buffer.state_dict()["groups"]) == [2, 3]


def test_old_groups_are_forgotten():
    buffer = GroupBuffer(0, max_age=2, seed=0)
    buffer.append([group(number, step=number) for number in range(5)])
    assert sorted(prompts_in(buffer.sample(9, step=4))) == [2, 3, 4]
    assert prompts_in(buffer.state_dict()["groups"]) == [2, 3, 4]
    forever = GroupBuffer()
    forever.append([group(0, step=0)])
    assert prompts_in(forever.sample(1, step=10**6)) == [0]


def test_what_is_kept_is_a_copy():
    buffer, own = GroupBuffer(), group(1)
    buffer.append([own])
    own.completion_ids.zero_()
    assert buffer.take(1)[0].completion_ids.tolist() == [[1] * 3] * 2


def test_groups_survive_a_checkpoint():
    buffer = GroupBuffer(3, max_age=2, seed=0)
    buffer.append([group(number) for number in range(3)])
    file = io.BytesIO()
    torch.save(buffer.state_dict(), file)
    file.seek(0)
    loaded = GroupBuffer(3, max_age=2, seed=1)
    with torch.serialization.safe_globals([*SAVED_CLASSES]):
        loaded.load_state_dict(torch.load(file, weights_only=True))
    assert prompts_in(loaded.state_dict()["groups"]) == [0, 1, 2]
    assert prompts_in(loaded.sample(2, 0)) == prompts_in(buffer.sample(2, 0))
