# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Encoded prompts: the processor's output, checked, with the model's positions."""

import re

import numpy as np
import pytest
import soundfile
import torch
from helpers import clips
from helpers.chats import RATE, audio, image, text, video
from helpers.chats import chat as user
from helpers.encoding import assert_same_features
from helpers.families import ALL_FAMILIES, FAMILIES, encode, tokenizer
from helpers.files import write_film
from helpers.trainer_utils import sound
from PIL import Image

from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding import media
from trl_multimodal_rft.encoding.join import join_media, same_prompt
from trl_multimodal_rft.encoding.prompts import (
    encode_prompt,
    engine_position_ids,
    placeholder_token_ids,
    prompt_position_ids,
)


def messages_of(row):
    return rows_to_messages([row])[0]["prompt"]


def encode_row(family, row, **kwargs):
    model, processor = FAMILIES[family].build()
    return encode_prompt(messages_of(row), processor, model, **kwargs)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("media")
    image(160, 100)["image"].save(folder / "picture.png")
    soundfile.write(folder / "sound.wav", audio(0.8)["audio"], RATE)
    write_film(folder / "film.mp4")
    return folder


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "llava", "gemma3", "qwen2_5_omni", "idefics3"])
def test_equals_the_processor(name):
    model, processor = FAMILIES[name].build()
    for chat in FAMILIES[name].prompts():
        expected = encode(processor, chat)
        for block in chat[0]["content"]:
            if block["type"] == "audio":
                block["sampling_rate"] = RATE
        prompt = encode_prompt(messages_of({"prompt": chat}), processor, model)
        assert prompt.modalities == {b["type"] for b in chat[0]["content"]} - {"text"}
        assert_same_features(prompt, expected)


def test_positions_are_those_of_the_model():
    model, processor = FAMILIES["qwen2_5_vl"].build()
    inputs = encode(processor, FAMILIES["qwen2_5_vl"].prompts()[0])
    seen = {}

    def spy(module, args, kwargs):
        seen["position_ids"] = kwargs["position_ids"]

    hook = model.get_decoder().register_forward_pre_hook(spy, with_kwargs=True)
    model(**inputs)
    hook.remove()
    model.model.rope_deltas = before = torch.tensor([[7]])
    media = {key: inputs[key] for key in ("pixel_values", "image_grid_thw")}
    fields = {"mm_token_type_ids": inputs["mm_token_type_ids"][0]}
    positions = prompt_position_ids(model, inputs["input_ids"][0], media, fields)
    assert torch.equal(positions[-3:], seen["position_ids"][-3:])
    assert positions[-1].max() < inputs["input_ids"].size(1) - 1  # an image takes fewer positions than tokens
    assert model.model.rope_deltas is before


def test_positions_of_an_engine_go_on_behind_the_last_of_any_axis():
    # Two tokens of text, a video of 4 x 1 x 2, text, an image of 1 x 2 x 1, text
    is_media = torch.tensor([0, 0, *[1] * 8, 0, 0, 1, 1, 0]).bool()
    time = [0, 1, 2, 2, 3, 3, 4, 4, 5, 5, 4, 5, 6, 6, 8]
    width = [0, 1, *[2, 3] * 4, 4, 5, 6, 6, 8]
    height = [0, 1, *[2] * 8, 4, 5, 6, 7, 8]
    plain = torch.arange(15)
    positions = torch.stack([plain, *(torch.tensor(axis) for axis in (time, height, width))])[:, None]
    engine = engine_position_ids(positions, is_media)[:, 0]
    assert torch.equal(engine[0], plain)
    assert torch.equal(engine[1:, :10], positions[1:, 0, :10])
    assert torch.equal(engine[1:, 10:], positions[1:, 0, 10:] + 2)  # 6 follows 5
    assert torch.equal(positions[1, 0], torch.tensor(time))
    for untouched in (positions[1:, :, 10:], plain[None]):  # an image, and positions of one axis
        assert torch.equal(engine_position_ids(untouched, is_media[-untouched.size(-1) :]), untouched)


def test_audio_is_resampled(files):
    waveform, _ = soundfile.read(files / "sound.wav", dtype="float32")
    twice = np.interp(np.arange(0, len(waveform), 0.5), np.arange(len(waveform)), waveform).astype("float32")
    path = encode_row("qwen2_audio", {"prompt": "What?", "audio": str(files / "sound.wav")})
    array = encode_row("qwen2_audio", {"prompt": "What?", "audio": {"array": twice, "sampling_rate": 2 * RATE}})
    assert torch.equal(path.input_ids, array.input_ids)
    assert (path.media["input_features"] - array.media["input_features"]).abs().mean() < 0.05


@pytest.mark.parametrize(("name", "limit"), [("qwen2_5_omni", 1), ("gemma3n", 30), ("gemma4", 30)])
def test_no_processor_cuts_audio_silently(name, limit):
    sounds = sound(limit), sound(limit + 0.5)
    encode_row(name, {"prompt": "What do you hear?", "audio": sounds[0]})
    with pytest.raises(MediaError, match="row 0, column 'audio'"):
        encode_row(name, {"prompt": "What do you hear?", "audio": sounds[1]})


def test_qwen_options_reach_qwen_vl_utils(files):
    def grid(**options):
        row = {"prompt": user({"type": "image", "image": str(files / "picture.png"), **options}, text("What?"))}
        return encode_row("qwen2_5_vl", row).media["image_grid_thw"].tolist()

    plain = encode_row("qwen2_5_vl", {"prompt": "?", "image": image(160, 100)["image"]})
    assert grid() == plain.media["image_grid_thw"].tolist()
    assert grid(max_pixels=28 * 28 * 4) == [[1, 2, 4]]
    assert grid(resized_height=56, resized_width=84) == [[1, 4, 6]]


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_qwen_video_options(family, files):
    def media(**options):
        sized = {"type": "video", "video": str(files / "film.mp4"), "resized_height": 64, "resized_width": 96}
        return encode_row(family, {"prompt": user({**sized, **options}, text("Describe"))}).media

    assert media(nframes=4)["video_grid_thw"][0, 0] == 2
    assert media(fps=4.0)["video_grid_thw"][0, 0] == 4
    first = media(nframes=4, video_end=1.0)
    last = media(nframes=4, video_start=1.0)
    assert not torch.equal(first["pixel_values_videos"], last["pixel_values_videos"])
    if family == "qwen2_5_vl":  # seconds per temporal patch of two frames
        assert media(nframes=10)["second_per_grid_ts"].item() == pytest.approx(0.4, rel=0.1)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl"])
def test_a_trimmed_clip_is_seen_as_ffmpeg_shows_it(family, tmp_path):
    """The model gets the displayed frames of a clip that was cut without re-encoding."""
    data = clips.trimmed(clips.encoded("H.264, open groups"), 0, 5)
    (tmp_path / "clip.mp4").write_bytes(data)
    frames = clips.shown(data)[1:]
    options = {"min_pixels": 56 * 56, "max_pixels": 84 * 56} if family == "qwen2_5_vl" else {}

    def pixels(source, **chosen):
        block = {"type": "video", "video": source, **options, **chosen}
        media = encode_row(family, {"prompt": user(block, text("Describe"))}).media
        return next(value for name, value in media.items() if name.startswith("pixel_values"))

    every = pixels(str(tmp_path / "clip.mp4"), video_start=0.1, nframes=len(frames))
    assert torch.equal(every, pixels(frames))


def test_options_that_a_processor_does_not_read_are_said(files, monkeypatch):
    said = []
    monkeypatch.setattr(media.logger, "warning_once", said.append)
    block = {"type": "image", "image": str(files / "picture.png"), "resized_height": 56, "resized_width": 56}
    encode_row("qwen2_5_vl", {"prompt": user(block, text("Describe"))})
    assert not said
    encode_row("llava", {"prompt": user(block, text("Describe"))})
    names = "resized_height, resized_width"
    remedy = "remove them, or set max_frames, max_pixels, min_pixels instead"
    assert said == [f"LlavaProcessor ignores the block options {names}; {remedy}."]


def read_by(processor, path, **options):
    """Returns a processor's output for a video file that it reads itself."""
    chats = [user({"type": "video", "path": str(path)}, text("Describe"))]
    return processor.apply_chat_template(
        chats,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs=options,
    )


VIDEO_FAMILIES = [name for name, family in ALL_FAMILIES.items() if "video" in family.modalities]


@pytest.mark.parametrize("name", VIDEO_FAMILIES)
def test_video_files_are_those_of_the_processor(name, files):
    """Uses its settings for frames and sizes, at 2 frames per second where one of Qwen's has no rate."""
    model, processor = ALL_FAMILIES[name].build()
    settings = processor.video_processor
    path = files / "film.mp4"
    settings.do_resize = True  # the omni models in the matrix don't resize frames
    messages = messages_of({"prompt": user({"type": "video", "path": str(path)}, text("Describe"))})
    rate = {"fps": 2.0} if name.startswith("qwen") and settings.fps is None else {}
    assert_same_features(encode_prompt(messages, processor, model), read_by(processor, path, **rate))
    if settings.fps is None:
        settings.fps = 4
        settings.do_sample_frames = True
        if name in ("internvl", "smolvlm"):  # their rules require both
            settings.num_frames = 3
    if settings.size is not None and settings.size.longest_edge is not None:  # of a frame or a whole video
        lowered = settings.size.longest_edge // 2
        shortest = min(settings.size.shortest_edge or lowered, lowered)
        settings.size = {"shortest_edge": shortest, "longest_edge": lowered}
    fewer = encode_prompt(messages, processor, model)
    assert_same_features(fewer, read_by(processor, path))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_limits_of_the_row_and_of_the_processor_hold_for_video_files(family, files):
    model, processor = FAMILIES[family].build()
    settings = processor.video_processor
    settings.max_frames = 8

    def pixels(**options):
        """Returns the number of frames and their pixels."""
        block = {"type": "video", "path": str(files / "film.mp4"), **options}
        messages = messages_of({"prompt": user(block, text("Describe"))})
        [(t, h, w)] = encode_prompt(messages, processor, model).media["video_grid_thw"].tolist()
        return t * settings.temporal_patch_size, h * w * settings.patch_size**2

    unit = (settings.patch_size * settings.merge_size) ** 2
    settings.size = {"shortest_edge": unit, "longest_edge": 32 * unit}
    together = family == "qwen3_vl"  # `size` is that of all frames together
    count, area = pixels(nframes=4)
    assert count == 4 and area <= 32 * unit / (4 if together else 1)
    count, area = pixels(min_pixels=unit, fps=10.0)
    assert count == 8 and area <= 32 * unit / (8 if together else 1)
    settings.size = {"shortest_edge": 16 * unit, "longest_edge": 64 * unit}
    assert pixels(nframes=4, max_pixels=4 * unit)[1] <= 4 * unit
    assert pixels(nframes=4, total_pixels=4 * unit, min_pixels=unit)[1] <= 2 * unit


def test_templates_without_placeholders_or_that_reject_messages_are_named():
    model, processor = FAMILIES["qwen2_audio"].build()
    processor.chat_template = processor.chat_template.replace("audio", "sound")
    with pytest.raises(MediaError, match="row 0, column 'audio'.*template"):
        encode_prompt(messages_of({"prompt": "What?", "audio": sound(0.5)}), processor, model)
    model, processor = FAMILIES["gemma3"].build()
    processor.chat_template = "{{ raise_exception('Roles must alternate') }}"
    messages = [{"role": "user", "content": "What?"}] * 2
    with pytest.raises(MediaError, match="row 2, column 'prompt': the chat template .* rejected the messages .Roles"):
        encode_prompt(messages, processor, model, row=2)
    processor.chat_template = processor.tokenizer.chat_template = None  # as of PaliGemma's published processor
    message = "^row 2, column 'prompt': Gemma3Processor has no chat template that could write messages; set `process"
    for prompt in (messages, messages_of({"prompt": "What?", "image": image(56, 56)["image"]})):
        with pytest.raises(MediaError, match=message):
            encode_prompt(prompt, processor, model, row=2)


@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_vl", "llava", "gemma3", "internvl"])
def test_a_placeholder_needs_media(name):
    model, processor = FAMILIES[name].build()
    kind = FAMILIES[name].modalities[0]
    token = processor.tokenizer.convert_ids_to_tokens(min(placeholder_token_ids(model, processor)[kind]))
    for prompt in (user(text(f"What is {token} in it?")), f"What is {token} in it?"):
        with pytest.raises(MediaError, match="row 3, column 'prompt': its text holds the placeholder .* but no media"):
            encode_prompt(prompt, processor, model, row=3)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("qwen2_audio", {"audio": 5}, "'audio': 5 samples are too short for a spectrogram; remove the row"),
        ("gemma4", {"audio": 160}, "'audio': 160 samples are too short for a spectrogram; remove the row"),
        ("qwen2_audio", {"audio": 400}, None),
        ("phi4_multimodal", {"audio": 400}, None),
        ("qwen2_5_vl", {"image": (1, 1)}, None),
        ("llava_onevision", {"image": (3000, 1)}, None),
        (
            "qwen2_5_vl",
            {"images": [(56, 56), (1, 1000)]},
            r"'images\[1\]': Qwen2_5_VLProcessor can't take an image of 1 x 1000 pixels \(.*ratio.*\); resize it or",
        ),
        (
            "qwen2_5_omni",
            {"videos": [(56, 56), (1, 1)]},
            r"'videos\[1\]': Qwen2_5OmniProcessor can't take a video of shape \(4, 1, 1, 3\) .*; resize it or remove",
        ),
        (
            "qwen3_vl",
            {"video": (56, 56), "frames": 1},
            r"'video': the video has 1 frame, and Qwen3VLProcessor needs 2; give an image",
        ),
    ],
)
def test_media_of_no_size_are_named(name, row, message):
    """The error names the medium that a processor rejects, not the first one or the template."""
    frames = row.pop("frames", 4)

    def medium(column, size):
        if "audio" in column:
            return {"array": audio(1.0)["audio"][:size], "sampling_rate": RATE}
        return image(*size)["image"] if "image" in column else video(frames, *size)["video"]

    media = {
        column: [medium(column, each) for each in sizes] if column.endswith("s") else medium(column, sizes)
        for column, sizes in row.items()
    }
    if message is None:
        assert encode_row(name, {"prompt": "What?", **media}).media
    else:
        with pytest.raises(MediaError, match=f"row 0, column {message}"):
            encode_row(name, {"prompt": "What?", **media})


@pytest.mark.parametrize(
    "name", ["qwen2_audio", "qwen2_5_vl", "llava", "gemma3", "qwen2_5_omni", "paligemma", "internvl"]
)
def test_a_placeholder_too_many_raises(name):
    """The error names the row. Otherwise the model would get shifted media."""
    model, processor = FAMILIES[name].build()
    chat = next(c for c in FAMILIES[name].prompts() if any(b["type"] != "text" for b in c[0]["content"]))
    kind = next(b["type"] for b in chat[0]["content"] if b["type"] != "text")
    token = processor.tokenizer.convert_ids_to_tokens(min(placeholder_token_ids(model, processor)[kind]))
    for block in chat[0]["content"]:
        if block["type"] == "audio":
            block["sampling_rate"] = RATE
        if block["type"] == "text":
            block["text"] += f" {token} again"
    with pytest.raises(MediaError, match=f"row 0, column '.*placeholder '{re.escape(token)}' itself"):
        encode_prompt(messages_of({"prompt": chat}), processor, model)


def test_a_tokenizer_or_another_modality_raises():
    row = {"prompt": "?", "audio": sound(0.5), "image": image(56, 56)["image"]}
    with pytest.raises(MediaError, match="row 0, column 'image'.*takes no images"):
        encode_row("qwen2_audio", row)
    model, processor = FAMILIES["qwen2_audio"].build()
    picture = messages_of({"prompt": "What?", "image": image(56, 56)["image"]})
    with pytest.raises(MediaError, match="row 0, column 'image'"):
        encode_prompt(picture, processor, model)
    plain = tokenizer()
    plain.chat_template = processor.chat_template
    with pytest.raises(MediaError, match="is a tokenizer"):
        encode_prompt(picture, plain, model)
    for family in ("llava", "qwen2_5_vl"):
        with pytest.raises(MediaError, match="takes no audio"):
            encode_row(family, {"prompt": "What?", "audio": sound(0.5)})
    with pytest.raises(MediaError, match="takes no video"):
        encode_row("gemma3", {"prompt": "What?", "video": video(4, 56, 56)["video"]})


def test_join_media_pads_on_the_right():
    short, long = (encode_row("gemma3n", {"prompt": "?", "audio": sound(seconds)}) for seconds in (0.4, 0.8))
    joined = join_media([short, long])
    width = short.media["input_features"].size(1)
    assert joined["input_features"].shape == (2, *long.media["input_features"].shape[1:])
    assert torch.equal(joined["input_features"][0, :width], short.media["input_features"][0])
    assert not joined["input_features"][0, width:].any()


def test_same_prompt():
    def prompt(seed, words="What?", **options):
        picture = {"type": "image", "image": Image.fromarray(np.full((28, 28, 3), seed, np.uint8)), **options}
        return messages_of({"prompt": user(picture, text(words))})

    assert same_prompt(prompt(1), prompt(1))
    assert not same_prompt(prompt(1), prompt(2))
    assert not same_prompt(prompt(1), prompt(1, "Who?"))
    assert not same_prompt(prompt(1), prompt(1, max_pixels=784))
    assert not same_prompt("a", "b") and same_prompt("a", "a")
