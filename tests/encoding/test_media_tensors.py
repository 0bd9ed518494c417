# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Bare media tensors: their kinds, their rows, and conflicts with the placeholders."""

import functools
from itertools import product

import pytest
import torch
from helpers.chats import audio, chat, image, text
from helpers.encoding import build_encoded, encode_chats
from helpers.families import FAMILIES

from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.encoding.join import continued_field, join_media
from trl_multimodal_rft.encoding.prompts import placeholder_token_ids
from trl_multimodal_rft.families import family_of, modality_of
from trl_multimodal_rft.forward.prompt_groups import split_samples
from trl_multimodal_rft.lightrft.models.bare_inputs import bare_prompt, split_media, token_fields


@functools.cache
def encoded(name):
    """Returns model and encoded prompts of a family."""
    model, _, prompts = build_encoded(name)
    return model, prompts


def with_chats(name, *chats):
    model, processor = FAMILIES[name].build()
    return model, encode_chats(model, processor, list(chats))


def modalities(prompt):
    """Returns the model's modalities: InternVL's processor makes images of a video."""
    return {modality_of(name) for name in prompt.media}


def ids_of(prompts):
    return [prompt.input_ids for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "modality"),
    [
        *[(name, "image") for name in ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask")],
        *[(name, "image") for name in ("spatial_shapes", "aspect_ratio_ids", "image_pixel_values", "num_tiles")],
        *[(name, "video") for name in ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")],
        *[(name, "video") for name in ("video_second_per_grid", "image_sizes_videos", "num_frames_per_video")],
        *[(name, "audio") for name in ("input_features", "feature_attention_mask", "input_features_mask")],
        *[(name, "audio") for name in ("audio_embed_sizes", "audio_input_features", "input_values")],
    ],
)
def test_modality_of(name, modality):
    assert modality_of(name) == modality


@pytest.mark.parametrize("name", FAMILIES)
def test_modalities_of_what_processors_return(name):
    model, prompts = encoded(name)
    for prompt in prompts:
        assert modalities(prompt) == ({"image"} if name == "internvl" and prompt.media else prompt.modalities)
        bare = bare_prompt(model, prompt.input_ids, prompt.media, prompt.token_fields)
        assert bare.modalities == modalities(prompt)


# Gemma 3n's processor numbers audio in a field that its forward pass doesn't read; PaliGemma's field has another
# meaning; GLM writes videos with the image token
@pytest.mark.parametrize("name", [*sorted(FAMILIES.keys() - {"gemma3n", "paligemma", "glm4v"}), "ernie4_5_vl_moe"])
def test_token_fields_are_the_processors(name):
    model, prompts = encoded(name)
    for prompt in prompts:
        fields = token_fields(model, prompt.input_ids)
        for key, value in fields.items():
            assert value.shape == prompt.input_ids.shape
            if key in prompt.token_fields:
                assert torch.equal(value, prompt.token_fields[key].long()), key


def test_token_fields_of_families_with_rules_of_their_own():
    model, prompts = encoded("paligemma")
    assert not token_fields(model, prompts[0].input_ids)["token_type_ids"].any()
    processor = FAMILIES["paligemma"].build()[1]
    picture = image(56, 56)["image"]
    answered = processor(text="cap", suffix="a cat", images=picture, return_tensors="pt")["token_type_ids"]
    alone = processor(text="cap", images=picture, return_tensors="pt", return_token_type_ids=True)["token_type_ids"]
    assert torch.equal(continued_field(model, "token_type_ids", alone, answered.shape[1] - alone.shape[1]), answered)
    model, prompts = encoded("glm4v")
    images = prompts[0]
    videos = prompts[3]
    found = token_fields(model, images.input_ids)["mm_token_type_ids"]
    assert torch.equal(found, images.token_fields["mm_token_type_ids"])
    # A video counts as images, which is why an actor needs the processor's field for it
    assert token_fields(model, videos.input_ids)["mm_token_type_ids"].max() == 1
    assert videos.token_fields["mm_token_type_ids"].max() == 2
    model, prompts = encoded("llava")
    assert token_fields(model, prompts[0].input_ids) == {}


def parts(model, prompts):
    """Returns prompts whose media one forward pass may hold, in order."""
    isolate = family_of(model).isolate
    return [[prompts[i] for i in part] for part in split_samples(prompts, isolate)]


@pytest.mark.parametrize("name", FAMILIES)
def test_split_undoes_join(name):
    model, prompts = encoded(name)
    for part in parts(model, prompts):
        # The second order starts with text, the third repeats prompts
        for order in (part, part[::-1], [prompt for prompt, _ in product(part, range(2))]):
            joined = join_media(order)
            split_media(model, ids_of(order), joined)
            for prompt, media in zip(order, split_media(model, ids_of(order), joined), strict=True):
                assert media.keys() == prompt.media.keys()
                for key, value in media.items():
                    # Joining pads the trailing dimensions
                    own = prompt.media[key]
                    assert len(value) == len(own)
                    assert torch.equal(value[tuple(slice(size) for size in own.shape)], own), key


def swap(prompts):
    """Swaps ids and media of two prompts: two opposite errors, with equal totals."""
    assert len(prompts[0]) != len(prompts[1])
    return ids_of(prompts), join_media(prompts[::-1])


def test_opposite_errors_in_two_rows_are_seen():
    images = (image(56, 56), image(112, 84))
    sounds = (audio(0.3), audio(0.9))
    visual = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "qwen2_5_omni")
    for kind, media, names in (
        ("image", images, visual),
        ("audio", sounds, ("qwen2_audio", "qwen2_5_omni", "audioflamingo3")),
    ):
        for name in names:
            model, prompts = with_chats(name, *(chat(medium, text("a")) for medium in media))
            for check in (split_media,):
                check(model, ids_of(prompts), join_media(prompts))
                with pytest.raises(MediaError, match=rf"row 0 holds \d+ placeholders for {kind}, .*same processor"):
                    check(model, *swap(prompts))


@pytest.mark.parametrize("name", ["qwen3_omni_moe", "granite_speech", "phi4_multimodal"])
def test_lengths_of_other_encoders_are_known(name):
    """Cuts or extends clips by hand, because clips of two lengths don't join here."""
    model, (prompt,) = with_chats(name, chat(audio(0.7), text("a")))
    split_media(model, [prompt.input_ids], prompt.media)
    (token,) = placeholder_token_ids(model, model)["audio"]
    at = (prompt.input_ids == token).nonzero()[0]
    less = torch.cat([prompt.input_ids[:at], prompt.input_ids[at + 1 :]])
    more = torch.cat([prompt.input_ids[: at + 1], prompt.input_ids[at:]])
    for ids in (less, more):
        with pytest.raises(MediaError, match="row 0 holds"):
            split_media(model, [ids], prompt.media)


@pytest.mark.parametrize("name", FAMILIES)
def test_placeholders_without_media_and_media_without_placeholders(name):
    model, prompts = encoded(name)
    for index, prompt in enumerate(prompts):
        for modality in modalities(prompt):
            own = {key: value for key, value in prompt.media.items() if modality_of(key) == modality}
            with pytest.raises(MediaError, match=f"there is {modality}, but the sequences hold no placeholder for it"):
                split_media(model, [torch.tensor([60, 61, 62])], own)
            media = {key: value for key, value in prompt.media.items() if modality_of(key) != modality}
            rows = [ids_of(prompts)[-1][-3:], prompt.input_ids]  # text comes first
            kinds = "image|video" if name == "glm4v" else modality
            with pytest.raises(MediaError, match=f"row 1 holds placeholders for ({kinds}), but there is no ({kinds})"):
                split_media(model, rows, media)
            with pytest.raises(MediaError, match="row 1 holds"):
                split_media(model, rows, media)
        assert index or prompt.modalities


def test_what_comes_with_media_is_no_media():
    """With grid or mask alone, models process text without an error."""
    model, prompts = encoded("qwen2_5_vl")
    grid = {"image_grid_thw": prompts[0].media["image_grid_thw"]}
    with pytest.raises(MediaError, match="no image; pass the image"):
        split_media(model, ids_of(prompts[:1]), grid)
    with pytest.raises(MediaError, match="1 images have no placeholder in any row"):
        split_media(model, [torch.tensor([60])], grid)
    model, prompts = encoded("qwen2_audio")
    with pytest.raises(MediaError, match="no audio; pass the audio"):
        split_media(model, ids_of(prompts[:1]), {"feature_attention_mask": prompts[0].media["feature_attention_mask"]})
    # Pixels without the grid of a family that needs one
    model, prompts = encoded("qwen2_5_vl")
    with pytest.raises(MediaError, match="there is image but no `image_grid_thw`"):
        split_media(model, ids_of(prompts[:1]), {"pixel_values": prompts[0].media["pixel_values"]})
    model, prompts = encoded("llava")
    split_media(model, ids_of(prompts[:1]), prompts[0].media)


def test_too_many_media():
    model, prompts = encoded("qwen2_5_vl")
    two = {key: torch.cat([value, value]) for key, value in prompts[0].media.items()}
    with pytest.raises(MediaError, match="1 images have no placeholder in any row"):
        split_media(model, ids_of(prompts[:1]), two)
    # Without grids, only the split can detect it, because it counts media
    model, prompts = encoded("llava")
    rows = ids_of(prompts[:1]) * 2
    three = {"pixel_values": prompts[0].media["pixel_values"].repeat(3, 1, 1, 1)}
    with pytest.raises(MediaError, match="2 runs of placeholders for image, but there are 3 images"):
        split_media(model, rows, three)


def test_split_are_slices_of_tensors_as_long_as_their_media():
    model, prompts = encoded("qwen2_5_vl")
    joined = join_media(prompts)
    first = split_media(model, ids_of(prompts), joined)[0]["pixel_values"]
    assert first.data_ptr() == joined["pixel_values"].data_ptr()
    media = {**join_media(prompts[:2]), "image_sizes": torch.zeros(5, 2)}
    with pytest.raises(MediaError, match="`image_sizes` has 5 entries for 3 images"):
        split_media(model, ids_of(prompts[:2]), media)


def test_adjacent_images_are_told_apart_by_equal_sizes():
    model, (first, second) = with_chats("llava", chat(image(28, 28)), chat(image(56, 28)))
    (token,) = placeholder_token_ids(model, model)["image"]
    n = int((first.input_ids == token).sum())
    rows = [torch.tensor([60, *[token] * 2 * n, 61]), torch.tensor([60, *[token] * n])]
    pixels = torch.cat([first.media["pixel_values"], second.media["pixel_values"], first.media["pixel_values"]])
    split = split_media(model, rows, {"pixel_values": pixels})
    assert torch.equal(split[0]["pixel_values"], pixels[:2]) and torch.equal(split[1]["pixel_values"], pixels[2:])


def test_a_row_may_hold_its_images_as_one_entry():
    """Idefics 3 has one entry per row with images, whatever their number."""
    model, prompts = encoded("idefics3")
    assert prompts[1].media["pixel_values"].shape[:2] != prompts[0].media["pixel_values"].shape[:2]
    split = split_media(model, ids_of(prompts[:2]), join_media(prompts[:2]))
    assert [len(media["pixel_values"]) for media in split] == [1, 1]
