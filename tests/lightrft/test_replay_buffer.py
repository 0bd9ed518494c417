# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Experiences: moves of all of their tensors, samples and batches without losing media, and the buffer."""

import gc
from dataclasses import replace
from functools import partial

import PIL.Image
import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch.testing import assert_close
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from trl_multimodal_rft.algorithms.returns import whiten
from trl_multimodal_rft.lightrft import ReplayBuffer
from trl_multimodal_rft.lightrft.trainer.experience import (
    Experience,
    ExperienceVL,
    clip_filter_like_weight_func,
    pin_memory,
    to,
)
from trl_multimodal_rft.lightrft.trainer.experience_config import ExperienceConfig
from trl_multimodal_rft.lightrft.trainer.replay_buffer_utils import (
    BufferItem,
    BufferItemVL,
    is_vl_experience,
    make_experience_batch,
    remove_padding_in_sequences,
    split_experience_batch,
    zero_pad_sequences,
)


pytestmark = pytest.mark.gate


ACTION_FIELDS = [
    *["action_log_probs", "base_action_log_probs", "values", "returns", "advantages"],
    *["kl", "action_entropy"],
]
TENSORS = ACTION_FIELDS[:5]
VISION = ["pixel_values", "image_grid_thws", "pixel_values_videos", "video_grid_thws"]
MEDIA = [*VISION, "audio_values", "audio_attention_mask"]


def same(a, b) -> bool:
    """Compares values, dtypes and shapes of tensors, and types."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, (Experience, BufferItem)):
        return same(vars(a), vars(b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def text(size: int = 2, length: int = 6, n_actions: int = 3, **changes) -> dict:
    """Returns fields of an experience without padding."""
    values = torch.arange(size * n_actions, dtype=torch.float32).view(size, n_actions)
    return {
        "sequences": torch.arange(1, size * length + 1).view(size, length),
        **{name: values + i for i, name in enumerate(TENSORS)},
        "attention_mask": torch.ones(size, length, dtype=torch.long),
        "action_mask": torch.ones(size, n_actions, dtype=torch.bool),
        "info": None,
        **changes,
    }


def item(ids: list[int], attention: list[int] | None = None, actions: list[int] | None = None, **changes):
    """Returns a sample whose other fields number their columns from 10."""
    n = len(actions) if actions is not None else len(ids)
    numbered = {name: torch.arange(10.0, 10 + n) for name in TENSORS}
    attention = None if attention is None else torch.tensor(attention)
    actions = None if actions is None else torch.tensor(actions, dtype=torch.bool)
    rest = {"attention_mask": attention, "action_mask": actions, "info": None, **changes}
    return BufferItem(sequences=torch.tensor(ids), **{**numbered, **rest})


# Records


def tensors_in(value) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def full_experience() -> ExperienceVL:
    """Every field has tensors, some of them nested."""
    image = PIL.Image.new("RGB", (2, 2))
    info = {"reward": torch.ones(2), "metrics": {"format": torch.ones(2), "parts": [torch.ones(1), "text"]}, "step": 3}
    return ExperienceVL(
        sequences=[torch.ones(4), torch.ones(5)],
        **{name: torch.ones(2, 3) for name in (*MEDIA, *TENSORS, "attention_mask", "action_mask")},
        raw_images=[[image], None],
        info=info,
        kl=torch.ones(2, 3),
        action_entropy=[torch.ones(3), torch.ones(2)],
        extra_media={"image_sizes": torch.ones(2, 2)},
        media_rows={"image_sizes": [1, 1]},
    )


def test_moves_of_everything():
    experience = full_experience()
    before = vars(experience).copy()
    assert len(tensors_in(before)) == 2 + 4 + 2 + 5 + 2 + 3 + 1 + 2 + 1
    assert experience.pin_memory() is experience
    assert all(tensor.is_pinned() == torch.cuda.is_available() for tensor in tensors_in(vars(experience)))
    assert experience.to_device("meta") is experience
    moved = tensors_in(vars(experience))
    assert len(moved) == len(tensors_in(before)) and all(tensor.is_meta for tensor in moved)
    assert not any(tensor.is_meta for tensor in tensors_in(before))  # the inputs of the experience stay unchanged
    assert (experience.raw_images, experience.media_rows) == (before["raw_images"], before["media_rows"])
    assert (experience.info["step"], experience.info["metrics"]["parts"][1]) == (3, "text")
    experience = Experience(torch.ones(1, 4), torch.ones(1, 2), *[None] * 7).to_device("meta")
    assert experience.action_log_probs.is_meta and list(vars(experience).values())[2:] == [None] * 9
    value = {"a": [torch.ones(2), None], "b": (torch.ones(2), 1.5)}
    assert [t.is_meta for t in tensors_in(to(value, "meta"))] == [True] * 2 and isinstance(
        to(value, "meta")["b"], tuple
    )
    assert to(None, "meta") is pin_memory(None) is None and len(tensors_in(pin_memory(value))) == 2


@pytest.mark.parametrize("constant", [0.0, 0.1, 0.3, 0.7, 1 / 3])
def test_weights_make_up_for_groups_without_signal(constant):
    live = [0.0, 1.0, 0.0]
    dead = [constant] * 3
    rewards = torch.tensor([live, dead, dead, live])
    assert clip_filter_like_weight_func(rewards).tolist() == [[2] * 3, [1] * 3, [1] * 3, [2] * 3]
    weights = clip_filter_like_weight_func(rewards, 1.5, lamda=0.5)  # clipped
    assert weights.tolist() == [[1.5] * 3, [0.5] * 3, [0.5] * 3, [1.5] * 3]
    assert clip_filter_like_weight_func(rewards[1:3], lamda=0.5).tolist() == [[1] * 3] * 2
    assert clip_filter_like_weight_func(torch.tensor([[0.3], [0.7]]), lamda=0.5).tolist() == [[1.0], [1.0]]
    assert clip_filter_like_weight_func(rewards.bfloat16()).dtype == torch.bfloat16


def test_types_hold_media():
    for cls in (ExperienceVL, BufferItemVL):
        assert is_vl_experience(cls(torch.zeros(1, 2)))
        assert is_vl_experience(cls(torch.zeros(1, 2), audio_values=torch.zeros(1, 2)))
    assert not is_vl_experience(Experience(**text())) and not is_vl_experience(BufferItem(torch.zeros(2)))


@pytest.mark.parametrize("cls", [BufferItem, BufferItemVL])
@pytest.mark.parametrize("packing", [False, True])
def test_one_number_for_all_actions(cls, packing):
    """Items with `(1,)` values, returns and advantages are joined, split and stripped as others are."""
    items = []
    for index, n in enumerate((3, 1, 2)):
        numbers = {name: torch.tensor([float(index)]) for name in ("values", "returns", "advantages")}
        mask = torch.ones(n + 2, dtype=torch.long)
        fields = {"action_log_probs": torch.randn(n), "attention_mask": mask, "action_mask": torch.ones(n).bool()}
        items.append(cls(torch.arange(1, n + 3), **fields, **numbers))
    batch = make_experience_batch(items, packing)
    if not packing:
        assert batch.advantages.tolist() == [[0.0], [1.0], [2.0]] and batch.action_log_probs.shape == (3, 3)
    split = split_experience_batch(batch)
    stripped = split if packing else remove_padding_in_sequences(split)
    for item, original in zip(stripped, items, strict=True):
        assert type(item) is cls and item.n_actions == original.n_actions
        for name in ("sequences", "action_log_probs", "values", "returns", "advantages"):
            assert torch.equal(getattr(item, name), getattr(original, name)), name
    per_action = replace(items[2], advantages=torch.zeros(2))
    with pytest.raises(ValueError, match="`advantages` of item 0 has one number, but that of others one per action"):
        make_experience_batch([items[0], per_action])
    with pytest.raises(ValueError, match=r"`action_mask` of item 0 has shape \(3,\), but \(1,\) fits"):
        make_experience_batch([replace(items[0], action_log_probs=torch.zeros(1))])
    buffer = ReplayBuffer()
    buffer.append(batch)
    buffer.normalize()
    assert_close(torch.cat([item.advantages for item in buffer]), torch.tensor([-1.0, 0.0, 1.0]) * 1.5**0.5)


def test_padding_of_tensors_with_leading_dimensions():
    for dtype in (torch.bool, torch.long, torch.bfloat16):
        padded = zero_pad_sequences([torch.ones(2, 1, 3).to(dtype), torch.ones(2, 1, 1).to(dtype)])
        assert padded.dtype == dtype and padded.tolist() == [[[[1, 1, 1]]] * 2, [[[0, 0, 1]]] * 2]
    with pytest.raises(ValueError, match="no sequences"):
        zero_pad_sequences([])


# Round trips


def patches(own, modality, pixels, n, generator):
    """Gives a sample images or videos in Qwen-VL's format: grids, and rows of flattened patches."""
    grid = torch.randint(1, 4, (n, 3), generator=generator)
    setattr(own, f"{modality}_grid_thws", grid)
    setattr(own, pixels, torch.randn(int(grid.prod(1).sum()), 5, generator=generator))


def images(own, n, generator):
    own.pixel_values = torch.randn(n, 3, 4, 4, generator=generator)


def audio(own, n, generator):
    own.audio_values = torch.randn(n, 4, 6, generator=generator)
    own.audio_attention_mask = torch.randint(0, 2, (n, 6), generator=generator)


IMAGES = partial(patches, modality="image", pixels="pixel_values")
VIDEOS = partial(patches, modality="video", pixels="pixel_values_videos")
KINDS = {
    "text": {},
    "images in patches": {"image": IMAGES},
    "image and video": {"image": IMAGES, "video": VIDEOS},
    "audio": {"audio": audio},
    "all": {"image": images, "video": VIDEOS, "audio": audio},
}


def random_items(kind: str, seed: int) -> list[BufferItem]:
    """Returns samples without padding, with 0, 1 or 3 media of each modality."""
    generator = torch.Generator().manual_seed(seed)
    items = []
    for _ in range(4):
        length, n_actions, *numbers = torch.randint(0, 5, (5,), generator=generator).tolist()
        mask = torch.rand(n_actions + 1, generator=generator) > 0.3
        mask[0] = True
        own = (BufferItemVL if KINDS[kind] else BufferItem)(
            sequences=torch.randint(1, 9, (length + 5,), generator=generator),
            **{name: torch.randn(len(mask), generator=generator) for name in ACTION_FIELDS},
            attention_mask=torch.ones(length + 5, dtype=torch.long),
            action_mask=mask,
            info={"reward": torch.randn((), generator=generator), "metrics": {"steps": length}},
        )
        for (modality, give), number in zip(KINDS[kind].items(), numbers, strict=False):
            own.info[f"{modality}_num"] = n = [0, 0, 1, 3, 3][number]
            if n:
                give(own, n=n, generator=generator)
        items.append(own)
    return items


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_split_undoes_make(kind, seed):
    """Rows of media are told by `media_rows` or by the numbers in `info`; padding comes and goes."""
    items = random_items(kind, seed)
    packed, padded = (make_experience_batch(items, packing_samples) for packing_samples in (True, False))
    assert same(split_experience_batch(packed), items)
    if KINDS[kind]:
        assert same(split_experience_batch(replace(packed, media_rows=None)), items)
    back = remove_padding_in_sequences(split_experience_batch(padded))
    assert same(back, items) and same(make_experience_batch(back), padded)
    n_actions = padded.action_mask.size(1)
    for own, ids, mask in zip(items, padded.sequences, padded.action_mask, strict=True):
        # The action block keeps its alignment with the tokens
        assert torch.equal(ids[-n_actions:][mask], own.sequences[-len(own.action_mask) :][own.action_mask])


def test_items_with_and_without_media_together():
    picture = PIL.Image.new("RGB", (1, 1))
    fields_of = {name: value[0] for name, value in text(1).items() if value is not None}
    items = [
        BufferItemVL(**fields_of, audio_values=torch.ones(1, 4, 6)),
        BufferItem(**fields_of, info=None),
        BufferItemVL(**fields_of, pixel_values=torch.ones(2, 3, 4, 4), raw_images=[picture] * 2),
        BufferItemVL(**fields_of, extra_media={"image_sizes": torch.ones(1, 2)}),
    ]
    batch = make_experience_batch(items)
    rows = {"pixel_values": [0, 0, 2, 0], "audio_values": [1, 0, 0, 0], "image_sizes": [0, 0, 0, 1]}
    assert type(batch) is ExperienceVL and batch.media_rows == rows
    back = split_experience_batch(batch)
    assert [own.pixel_values is not None for own in back] == [False, False, True, False]
    assert [own.raw_images for own in back] == [None, None, [picture] * 2, None]


# The assignment of media rows to samples


def media_lengths(name, info=None, **media):
    """Returns the length of a tensor of each of two samples."""
    items = split_experience_batch(ExperienceVL(**text(info=info), **media))
    return [len({**vars(own), **(own.extra_media or {})}[name]) for own in items]


def test_rows_of_media_that_are_clear():
    for shape in ((3, 4, 4), (1, 3, 4, 4), (5, 3, 4, 4)):  # one image per sample, whatever its layout
        for info in (None, {"image_num": [1, 1]}):
            assert media_lengths("pixel_values", info, pixel_values=torch.randn(2, *shape)) == [1, 1]
    grid = torch.tensor([[1, 2, 2], [1, 4, 2]])
    assert media_lengths("pixel_values", pixel_values=torch.randn(12, 5), image_grid_thws=grid) == [4, 8]
    assert media_lengths("pixel_values", {"image_num": 2}, pixel_values=torch.randn(4, 3, 4, 4)) == [2, 2]
    # Other media use the only rows that fit
    extra = {"second_per_grid_ts": torch.ones(3), "position_ids": torch.arange(9)}
    video = {
        "pixel_values_videos": torch.randn(9, 5),
        "video_grid_thws": torch.tensor([[1, 1, 1], [1, 2, 2], [1, 2, 2]]),
    }
    for name, lengths in {"second_per_grid_ts": [1, 2], "position_ids": [1, 8]}.items():
        assert media_lengths(name, {"video_num": [1, 2]}, **video, extra_media=extra) == lengths


TWO, THREE = ({"pixel_values": torch.ones(n, 3, 4, 4)} for n in (2, 3))
GRIDS = {"pixel_values": torch.ones(3, 5), "image_grid_thws": torch.ones(3, 3).long()}
SET = {"pixel_values": torch.ones(2, 2, 3, 4, 4)}  # of images of a sample, or an image of tiles
UNCLEAR = [
    (THREE, {}, "pixel_values"),
    (GRIDS, {}, "image_grid_thws"),
    (THREE, {"image_num": [1, 1]}, "pixel_values"),
    (TWO, {"image_num": [1, 0]}, "pixel_values"),
    (SET, {"image_num": [2, 0]}, "pixel_values"),
    ({**TWO, "extra_media": {"image_sizes": torch.ones(2, 2)}}, {"image_num": [2, 0]}, "image_sizes"),
    ({"audio_values": torch.ones(5, 4, 6)}, {"audio_num": [1, 2]}, "audio_values"),
]


@pytest.mark.parametrize(("media", "info", "name"), UNCLEAR)
def test_unclear_rows_are_refused_until_media_rows_settle_them(media, info, name):
    with pytest.raises(ValueError, match=rf"rows of `{name}`.*`media_rows\['{name}'\]`"):
        split_experience_batch(ExperienceVL(**text(info=info), **media))
    tensors = {**media, **media.get("extra_media", {})}
    rows = {name: [len(tensor), 0] for name, tensor in tensors.items() if name != "extra_media"}
    batch = ExperienceVL(**text(info=info), **media, media_rows=rows)
    assert make_experience_batch(split_experience_batch(batch)).media_rows == rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"media_rows": {"pixel_values": [1, 2]}}, r"`media_rows\['pixel_values'\]` must split 2 rows among 2 sampl"),
        ({"media_rows": {"pixel_values": [2]}}, r"`media_rows\['pixel_values'\]` must split 2 rows"),
        ({"media_rows": {"pixel_values": [3, -1]}}, r"`media_rows\['pixel_values'\]` must split 2 rows"),
        ({"media_rows": {"pixels": [1, 1]}}, r"has `pixels`, but the experience has \['pixel_values'\]"),
        ({"info": {"image_num": [0.5, 1.5]}}, r"`info\['image_num'\]` must hold a whole number for each of 2 samples"),
        ({"info": {"image_num": [1, 1, 0]}}, r"`info\['image_num'\]` must hold a whole number"),
        ({"image_grid_thws": torch.ones(2, 2).long()}, r"`image_grid_thws` must have shape \(N, 3\)"),
        ({"image_grid_thws": torch.full((2, 3), 2)}, r"`pixel_values` has 2 rows, but its grid has 16 patches"),
        ({"extra_media": {"pixel_values": torch.ones(2)}}, r"`extra_media` gives \['pixel_values'\] a second time"),
        ({"raw_images": [None]}, r"`raw_images` has 1 entries for 2 samples"),
        ({"values": torch.ones(3, 3)}, r"`values` has 3 rows, but there are 2 samples"),
        ({"values": torch.ones(2)}, r"`values` of item 0 has shape \(\), but \(3,\)"),
        ({"attention_mask": torch.ones(2, 5)}, r"`attention_mask` of item 0 has shape \(5,\), but \(6,\)"),
        ({"sequences": torch.ones(2)}, r"`sequences` of item 0 has shape \(\), not \(S,\)"),
        ({"sequences": torch.ones(2, 2), "attention_mask": None}, "3 action columns, but only 2 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        split_experience_batch(ExperienceVL(**{**text(), "pixel_values": torch.ones(2, 5), **changes}))


def test_media_of_different_sizes_are_padded_on_the_right():
    short, long = (BufferItemVL(torch.tensor([1]), audio_values=torch.ones(1, 2, n)) for n in (3, 5))
    short.audio_attention_mask = torch.ones(1, 3).long()
    long.audio_attention_mask = torch.ones(1, 5).long()
    batch = make_experience_batch([short, long])
    assert batch.audio_values[0].tolist() == [[1, 1, 1, 0, 0]] * 2
    assert batch.audio_attention_mask.tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    # The model's patch positions
    items = [BufferItemVL(torch.tensor([1]), extra_media={"image_position_ids": torch.ones(1, n)}) for n in (2, 3)]
    assert make_experience_batch(items).extra_media["image_position_ids"].tolist() == [[1, 1, -1], [1, 1, 1]]


def test_indices_into_other_media_are_those_of_the_sample():
    """In a batch, indices count over the patches of all samples, as the model takes them, and -1 is padding."""
    places = [torch.tensor([[0, 1]]), torch.tensor([[2, 0, 1], [1, 1, -1]]), torch.tensor([[1, 0]])]
    items = [
        BufferItemVL(torch.tensor([1]), pixel_values=torch.ones(n, 5), extra_media={"image_token_pooling": own})
        for n, own in zip((2, 3, 2), places, strict=True)
    ]
    batch = make_experience_batch(items)
    assert batch.extra_media["image_token_pooling"].tolist() == [[0, 1, -1], [4, 2, 3], [3, 3, -1], [6, 5, -1]]
    own = [each.extra_media["image_token_pooling"].tolist() for each in split_experience_batch(batch)]
    assert own == [[[0, 1, -1]], [[2, 0, 1], [1, 1, -1]], [[1, 0, -1]]]


# Info and missing fields


def test_info_of_samples():
    """Values of the whole batch come back once per sample; values that only some samples have, in lists."""
    info = {"reward": torch.tensor([1.0, 2.0]), "name": ["a", "b"], "kl_coef": 0.5, "histogram": torch.arange(3)}
    info["metrics"] = {"format": torch.tensor([0.0, 1.0]), "beta": 0.1}
    first, second = (own.info for own in split_experience_batch(Experience(**text(info=info))))
    expected = {"reward": torch.tensor(2.0), "name": "b", "kl_coef": 0.5, "histogram": info["histogram"]}
    assert same(second, {**expected, "metrics": {"format": torch.tensor(1.0), "beta": 0.1}})
    made = make_experience_batch([item([1], [1], [1], info=own) for own in (first, second)]).info
    metrics = {"format": info["metrics"]["format"], "beta": [0.1, 0.1]}
    per_sample = {"kl_coef": [0.5] * 2, "histogram": torch.arange(3).repeat(2, 1), "metrics": metrics}
    assert same(made, {**info, **per_sample})
    infos = None, {"reward": torch.tensor(1.0), "metrics": {"a": 1}}, {"metrics": {"b": 2}}
    made = make_experience_batch([item([1], [1], [1], info=own) for own in infos]).info
    metrics = {"a": [None, 1, None], "b": [None, None, 2]}
    assert same(made, {"reward": [None, torch.tensor(1.0), None], "metrics": metrics})


def full(n: int):
    return item([1] * n, [1] * n, [1] * n, kl=torch.ones(n), action_entropy=torch.ones(n))


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("name", ["values", "kl", "action_entropy", "action_mask", "attention_mask"])
def test_field_that_only_some_have_is_refused(name, missing):
    items = [full(2), full(2)]
    setattr(items[missing], name, None)
    with pytest.raises(ValueError, match=f"`{name}` is None in item {missing}"):
        make_experience_batch(items)


def test_masks_are_made_where_there_is_padding():
    nothing = dict.fromkeys(TENSORS[1:])
    short = item([5, 6], action_log_probs=torch.ones(1), **nothing)
    long = item([1, 2, 3], action_log_probs=torch.ones(2), **nothing)
    batch = make_experience_batch([short, long], pad_token_id=7)
    assert batch.sequences.tolist() == [[7, 5, 6], [1, 2, 3]]
    assert batch.attention_mask.tolist() == [[0, 1, 1], [1, 1, 1]]
    assert batch.action_mask.tolist() == [[False, True], [True, True]]
    for together, packed in (([long, long], False), ([short, long], True)):
        batch = make_experience_batch(together, packing_samples=packed)
        assert batch.attention_mask is None and batch.action_mask is None
    with pytest.raises(ValueError, match="no items"):
        make_experience_batch([])
    assert split_experience_batch(ExperienceVL(torch.ones(0, 3))) == []


# Removing padding: sequence, attention mask, action mask; then the sequence and the remaining columns


REMOVED = {
    "on both sides": ([0, 0, 1, 2, 3, 0, 0], [0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 1, 0, 0], [1, 2, 3], [2, 3, 4]),
    "more on the left": ([0, 0, 4, 5, 6, 0], [0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 0], [4, 5, 6], [2, 3, 4]),
    "prompt before the actions": ([0, 4, 5, 7, 8, 0], [0, 1, 1, 1, 1, 0], [1, 1, 0], [4, 5, 7, 8], [0, 1]),
    "actions padded on the left": ([0, 0, 4, 5, 7], [0, 0, 1, 1, 1], [0, 0, 0, 1], [4, 5, 7], [3]),
    "gap in the actions": ([4, 7, 0, 8, 0], [1, 1, 1, 1, 0], [1, 0, 1, 0], [4, 7, 0, 8], [0, 1, 2]),
    "masked last action": ([4, 7, 8, 9], [1, 1, 1, 1], [1, 1, 0], [4, 7, 8, 9], [0, 1, 2]),
    "no action": ([0, 4, 7, 8, 0], [0, 1, 1, 1, 0], [0, 0, 0], [4, 7, 8], [0, 1]),
    "no action and a block that is wider": ([0, 0, 4, 7], [0, 0, 1, 1], [0, 0, 0, 0], [4, 7], [2, 3]),
    "empty response": ([4, 5, 0, 0], [1, 1, 0, 0], [0, 0], [4, 5], []),
    "gap in the attention": ([0, 4, 0, 5, 7], [0, 1, 0, 1, 1], [1], [4, 0, 5, 7], [0]),
    "no padding": ([4, 5, 7], [1, 1, 1], [1, 1], [4, 5, 7], [0, 1]),
}


@pytest.mark.parametrize("case", REMOVED)
def test_padding_is_removed(case):
    ids, attention, actions, expected_ids, expected_columns = REMOVED[case]
    own = item(ids, attention, actions, kl=torch.arange(10.0, 10 + len(actions)), info={"reward": 1.0})
    before = {name: value.clone() for name, value in vars(own).items() if isinstance(value, torch.Tensor)}
    (clean,) = remove_padding_in_sequences([own])
    assert clean.sequences.tolist() == expected_ids
    assert len(clean.attention_mask) == len(expected_ids)
    for name in (*TENSORS, "kl"):
        assert getattr(clean, name).tolist() == [10 + column for column in expected_columns], name
    assert clean.action_mask.tolist() == [bool(actions[column]) for column in expected_columns]
    assert clean.info == {"reward": 1.0}
    assert clean.action_entropy is None
    (again,) = remove_padding_in_sequences([clean])
    assert same(again, clean)
    # The sample stays unchanged
    assert clean is not own
    assert all(torch.equal(getattr(own, name), value) for name, value in before.items())


def test_padding_is_removed_by_id():
    """The padding id may equal the end id, which is an action."""
    for ids, actions, expected in (([0, 4, 0, 5, 0], None, [4, 0, 5]), ([0, 4, 5, 7, 0, 0], [1, 1, 0], [4, 5, 7, 0])):
        (clean,) = remove_padding_in_sequences([item(ids, None, actions)], pad_token_id=0)
        assert clean.sequences.tolist() == expected and clean.attention_mask is None
    with pytest.raises(ValueError, match="Item 1 has no `attention_mask` .*; pass `pad_token_id`"):
        remove_padding_in_sequences([item([1], [1]), item([1])])
    with pytest.raises(ValueError, match="Item 0 has no token"):
        remove_padding_in_sequences([item([1, 2], [0, 0])])


# Memory


def bytes_alive() -> int:
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
    # Other tests may have left tensors of `vmap`, which have no storage
    storages = [each.untyped_storage() for each in tensors if not torch._C._functorch.is_batchedtensor(each)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


IMAGE_BYTES = 3 * 64 * 64 * 4


def test_samples_do_not_keep_the_batch():
    before = bytes_alive()
    images = torch.randn(12, 3, 64, 64)
    info = {"vectors": images[4:8], "list": list(images[8:]), "for all": images[0, 0, 0, :2]}
    items = split_experience_batch(ExperienceVL(**text(4, info=info), pixel_values=images[:4]))
    kept = items[2]
    del images, info, items
    assert 3 * IMAGE_BYTES < bytes_alive() - before < 3.1 * IMAGE_BYTES and len(kept.info) == 3
    weight = torch.ones(2, 3, requires_grad=True)  # without a gradient of their history
    assert not split_experience_batch(Experience(**text(action_log_probs=weight * 2)))[
        0
    ].action_log_probs.requires_grad
    (clean,) = remove_padding_in_sequences([item([0] * 100 + [1], [0] * 100 + [1], [0] * 50 + [1])])
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors_in(vars(clean)))
    items = [full(2), full(3)]
    make_experience_batch(items, packing_samples=True).values[0].zero_()
    assert items[0].values.tolist() == [10, 11]


# The buffer


def ragged(lengths: list[int], **changes) -> Experience:
    """Returns a batch of samples with distinct first tokens. Half of each sample are actions."""
    n_actions = [length // 2 for length in lengths]
    sequences = zero_pad_sequences([torch.arange(1, n + 1) + 100 * i for i, n in enumerate(lengths)])
    values = zero_pad_sequences([torch.arange(1.0, n + 1) * (i + 1) for i, n in enumerate(n_actions)])
    return Experience(
        sequences=sequences,
        attention_mask=zero_pad_sequences([torch.ones(n, dtype=torch.long) for n in lengths]),
        action_mask=zero_pad_sequences([torch.ones(n, dtype=torch.bool) for n in n_actions]),
        **{**dict.fromkeys(TENSORS, values), "info": None, **changes},
    )


def filled(*parts: Experience, **options) -> ReplayBuffer:
    buffer = ReplayBuffer(**options)
    for part in parts:
        buffer.append(part)
    return buffer


def names(entries) -> list[int]:
    return [int(own.sequences[0]) // 100 for own in entries]


@pytest.mark.parametrize("packed", [False, True])
def test_samples_of_the_buffer(packed):
    """They come in without padding, the newest stay, and they are drawn without replacement."""
    batch = ragged([4, 6], info={"reward": torch.ones(2)})
    before = vars(batch).copy()
    buffer = filled(batch, limit=3, packing_samples=packed)
    assert buffer[0].sequences.tolist() == [1, 2, 3, 4] and buffer[0].advantages.tolist() == [1, 2]
    assert all(value is before[name] for name, value in vars(batch).items())
    buffer.append(ragged([8, 10]))
    assert [len(own.sequences) for own in buffer] == [6, 8, 10]
    batches = list(DataLoader(buffer, batch_size=2, collate_fn=buffer.collate_fn))
    items = list(buffer)
    assert same(batches, [make_experience_batch(part, packed) for part in (items[:2], items[2:])])
    with pytest.raises(ValueError, match="has no `attention_mask`"):
        filled(replace(ragged([4, 6]), attention_mask=None))
    buffer = filled(ragged([2] * 20), sample_batch_size=5, packing_samples=packed)
    drawn = [names(split_experience_batch(buffer.sample())) for _ in range(4)]
    assert all(len(set(part)) == 5 for part in drawn) and len({tuple(part) for part in drawn}) == 4
    assert len(buffer) == 20


# Normalization


@pytest.mark.parametrize("attribute", ["advantages", "returns"])
def test_normalization_counts_each_action_once(attribute):
    batch = ragged([4, 10, 6])
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)) * 3 + 7  # masked columns are not 0
    batch.action_mask[1, 2] = False
    setattr(batch, attribute, values)
    buffer = filled(batch)
    handed_out = list(buffer)
    before = [getattr(own, attribute).clone() for own in handed_out]
    buffer.normalize(attribute)
    made = make_experience_batch(list(buffer))
    assert_close(getattr(made, attribute), whiten(values, batch.action_mask), rtol=0, atol=1e-6)
    assert torch.equal(made.action_log_probs, batch.action_log_probs)
    assert all(torch.equal(getattr(own, attribute), b) for own, b in zip(handed_out, before, strict=True))


def test_normalization_happens_once():
    buffer = filled(ragged([4, 6]))
    buffer.normalize()
    with pytest.raises(RuntimeError, match="`advantages` has been normalized before"):
        buffer.normalize()
    buffer.normalize("returns")
    with pytest.raises(RuntimeError, match=r"\['advantages', 'returns'\] have been normalized"):
        buffer.append(ragged([4, 6]))
    buffer.clear()
    buffer.normalize()  # nothing
    with pytest.raises(ValueError, match="`returns` of item 0 is None"):
        filled(ragged([4, 6], returns=None)).normalize("returns")


def normalize_on_two_ranks():
    """The first time, one rank has nothing to normalize."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state()
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2
    rank = accelerator.process_index
    buffer = filled(*[ragged([4, 10, 6])][rank:])
    buffer.normalize(strategy=ExperienceConfig(accelerator=accelerator))
    buffer.clear()
    buffer.append(ragged([[4, 10], [12]][rank]))
    buffer.normalize(strategy=ExperienceConfig(accelerator=accelerator))
    own = [[1, 2], [2, 4, 6, 8, 10]], [[1, 2, 3, 4, 5, 6]]
    everything = torch.tensor([x for rank in own for row in rank for x in row], dtype=torch.float64)
    for item, row in zip(buffer, own[rank], strict=True):
        expected = (torch.tensor(row) - everything.mean()) / everything.std(correction=0)
        assert_close(item.advantages.double(), expected, rtol=0, atol=1e-6)


def test_normalization_over_processes():
    debug_launcher(normalize_on_two_ranks)


def test_without_offload_samples_stay_where_they_are():
    """The meta device represents a GPU: nothing moves from there to the CPU."""
    batch = make_experience_batch([item([1, 2])], packing_samples=True).to_device("meta")
    assert filled(batch, cpu_offload=False)[0].sequences.is_meta
    with pytest.raises(NotImplementedError, match="meta"):
        filled(batch)
    for offload in (True, False):  # the buffer keeps a copy
        batch = ragged([4])
        buffer = filled(batch, cpu_offload=offload)
        batch.sequences.zero_()
        assert buffer[0].sequences.tolist() == [1, 2, 3, 4]


def test_group_spread_over_batches_shares_its_media():
    """Three of a group are in one batch, one and another group in the next."""
    image = torch.randn(4, 6)
    other = torch.randn(4, 6)
    parts = [
        ExperienceVL(
            **text(len(images)),
            pixel_values=torch.cat(images),
            image_grid_thws=torch.tensor([[1, 2, 2]] * len(images)),
            extra_media={"image_sizes": torch.cat([i[:1, :2] for i in images])},
        )
        for images in ([image, image, image], [image, other])
    ]
    items = list(filled(*parts))
    assert len({id(item.pixel_values) for item in items}) == 2
    assert len({id(item.extra_media["image_sizes"]) for item in items}) == 2
    assert [torch.equal(item.pixel_values, image) for item in items] == [True] * 4 + [False]
