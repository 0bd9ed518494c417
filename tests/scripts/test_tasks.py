# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The example tasks and the small models that train on them."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
import soundfile
import torch
from datasets import Audio, Image, List
from grpo_tools_audio import Player, decoded, with_outlines
from grpo_tools_vision import Magnifier, with_thumbnails
from small_models import cropping_model, digit_model, hidden_digit_model, motion_model, spoken_digit_model
from tasks import (
    DIGITS,
    DIRECTIONS,
    TEST_SPEAKERS,
    TRAIN_SPEAKERS,
    handwritten_digits,
    hidden_digits,
    leading_answer_reward,
    long_recordings,
    move,
    moving_digits,
    spoken_digits,
)
from tool_demo import best_without_tool
from transformers import AutoModelForImageTextToText, AutoProcessor, Qwen2AudioForConditionalGeneration

from trl_multimodal_rft.data.rows.columns import rows_to_messages
from trl_multimodal_rft.encoding.prompts import encode_prompt


pytestmark = pytest.mark.slow  # only the examples use them


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    return spoken_digits(tmp_path_factory.mktemp("speech"), train_rows=60, test_rows=20)


@pytest.fixture(scope="module")
def images():
    return handwritten_digits()


@pytest.fixture(scope="module")
def videos():
    return moving_digits(train_rows=40, test_rows=20)


@pytest.fixture(scope="module")
def tasks(speech, images, videos):
    return {
        "audio": (speech, spoken_digit_model, Qwen2AudioForConditionalGeneration),
        "image": (images, digit_model, AutoModelForImageTextToText),
        "video": (videos, motion_model, AutoModelForImageTextToText),
    }


def test_columns(speech, images, videos):
    for dataset, column, feature in (
        (speech, "audio", Audio(sampling_rate=16000, decode=False)),
        (images, "image", Image()),
        (videos, "video", List(Image())),
    ):
        assert set(dataset) == {"train", "test"}
        for split in dataset.values():
            assert split.features[column] == feature
            assert {"prompt", "solution"} < set(split.column_names)
            assert split[0]["prompt"][0]["role"] == "user"


@pytest.mark.parametrize(("kind", "answers"), [("audio", DIGITS), ("image", DIGITS), ("video", tuple(DIRECTIONS))])
def test_every_answer_is_as_frequent(tasks, kind, answers):
    for split in tasks[kind][0].values():
        counts = Counter(split["solution"])
        assert set(counts) == set(answers)
        assert len(set(counts.values())) == 1


def test_recordings_are_short_audible_and_of_other_voices_in_the_test(speech):
    assert not set(TRAIN_SPEAKERS) & set(TEST_SPEAKERS)
    speakers = {name: {voice.split("+")[1] for voice in split["voice"]} for name, split in speech.items()}
    assert speakers["train"] <= set(TRAIN_SPEAKERS)
    assert speakers["test"] <= set(TEST_SPEAKERS)
    for split in speech.values():
        for row in split:
            samples, rate = soundfile.read(row["audio"]["path"])
            assert rate == 16000 and samples.ndim == 1
            assert 0.15 < len(samples) / rate < 1.0  # the small model processes one second
            assert np.abs(samples).max() > 0.05


def test_recordings_are_reproducible_and_reused(tmp_path):
    first, again = (spoken_digits(tmp_path / name, train_rows=10, test_rows=10) for name in ("first", "again"))
    paths = [[row["audio"]["path"] for split in dataset.values() for row in split] for dataset in (first, again)]
    assert not set(paths[0]) & set(paths[1])
    for one, other in zip(*paths, strict=True):
        np.testing.assert_array_equal(soundfile.read(one)[0], soundfile.read(other)[0])

    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "first").rglob("*.wav")}
    reused = spoken_digits(tmp_path / "first", train_rows=10, test_rows=10)
    assert [row["audio"]["path"] for split in reused.values() for row in split] == paths[0]
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "first").rglob("*.wav")}

    other_size = spoken_digits(tmp_path / "first", train_rows=20, test_rows=10)  # other voices under the same numbers
    assert not {row["audio"]["path"] for row in other_size["test"]} & set(paths[0])


def test_words_sound_different_and_voices_too(speech):
    samples = {(row["solution"], row["voice"]): soundfile.read(row["audio"]["path"])[0] for row in speech["train"]}
    assert len({len(audio) for audio in samples.values()}) > 10
    assert len(set(speech["train"]["voice"])) > 10


def test_handwritten_digits_are_distinct_real_images(images):
    pixels = {name: {np.asarray(image).tobytes() for image in split["image"]} for name, split in images.items()}
    assert not pixels["train"] & pixels["test"]
    assert np.asarray(images["test"][0]["image"]).shape == (28, 28)
    # The mean image of "one" is a narrow stroke, that of "zero" a ring: labels and images match
    zero, one = (
        np.mean([np.asarray(row["image"]) for row in images["test"] if row["solution"] == word], axis=0)
        for word in ("zero", "one")
    )
    assert one[14, 14] > 150 > 50 > zero[14, 14]


def test_hidden_digits_are_seen_from_near_alone(images):
    rows = hidden_digits()["test"]
    seen = with_thumbnails(rows, 2)
    assert best_without_tool(seen) == 0.1
    assert seen.select(range(80))["solution"] == images["test"].select(range(80))["solution"]
    magnifier = Magnifier()
    for number, row in enumerate(seen.select(range(80))):
        x = number // 10 % 2
        y = number // 20 % 2
        thumbnail = np.asarray(row["image"])
        assert thumbnail[y, x] == thumbnail.sum() == 112
        magnifier.reset(**row)
        (block,) = magnifier.zoom(x, y)
        digit = np.asarray(images["test"][number]["image"])
        assert np.corrcoef(np.asarray(block["image"]).reshape(-1), digit.reshape(-1))[0, 1] > 0.999
        (block,) = magnifier.zoom(1 - x, y)
        assert not np.asarray(block["image"]).any()
    # Four pixels of each quarter distinguish digits
    assert best_without_tool(with_thumbnails(rows.select(range(200)), 4)) > 0.5


def test_long_recordings_are_told_by_their_parts_alone(tmp_path):
    rows = long_recordings(tmp_path, train_rows=10, test_rows=80)["test"]
    heard = with_outlines(rows)
    assert best_without_tool(heard) == 0.1
    assert best_without_tool(rows) == 1
    player = Player()
    for number, (row, spoken) in enumerate(zip(heard, spoken_digits(tmp_path, 10, 80)["test"], strict=True)):
        assert row["solution"] == spoken["solution"]
        second = number // 10 % 4
        tones = decoded(row["audio"]).reshape(4, -1)
        assert [tone.any() for tone in tones] == [other == second for other in range(4)]
        player.reset(**row)
        (block,) = player.crop(second, second + 1)
        word, _ = soundfile.read(spoken["audio"]["path"])
        heard_word = decoded(block["audio"])
        np.testing.assert_allclose(heard_word[: len(word)], word, atol=2**-15)
        assert len(heard_word) == 16000 and not heard_word[len(word) :].any()
        (block,) = player.crop((second + 1) % 4, (second + 1) % 4 + 1)
        assert not decoded(block["audio"]).any()
    for start, end in ((3, 5), (-1, 1), (2, 2)):
        with pytest.raises(ValueError, match="start must be before end, both from 0 to 4"):
            player.crop(start, end)


def test_a_single_frame_does_not_tell_the_direction():
    """From every start, each frame is the same collection of pictures, whichever way the digit moves."""
    picture = np.arange(1, 7, dtype=np.uint8).reshape(2, 3)
    starts = [(row, column) for row, column in product(range(5), range(5))]
    options = {"frames": 4, "size": 5, "step": 2}
    seen = [[move(picture, direction, start, **options) for start in starts] for direction in DIRECTIONS]
    for time in range(4):
        collections = [Counter(video[time].tobytes() for video in videos) for videos in seen]
        assert all(collection == collections[0] for collection in collections)
    # but two frames always do
    pairs = [{video[:2].tobytes() for video in videos} for videos in seen]
    assert sum(map(len, pairs)) == len(set.union(*pairs))


def test_videos_move_in_the_direction_of_their_solution(videos):
    for row in videos["test"]:
        first, second = (np.asarray(frame) for frame in row["video"][:2])
        shifted = {name: np.roll(first, 4 * np.array(heading), (0, 1)) for name, heading in DIRECTIONS.items()}
        assert [name for name, frame in shifted.items() if np.array_equal(frame, second)] == [row["solution"]]


def test_leading_answer_reward():
    completions = ["seven", "seven eight", "eight seven", [{"role": "assistant", "content": " sevenx"}], ""]
    assert leading_answer_reward(completions=completions, solution=["seven"] * 5) == [1.0, 1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("kind", ["audio", "image", "video"])
def test_models_answer_rows_and_survive_saving(tasks, kind, tmp_path):
    dataset, build, auto_class = tasks[kind]
    model, processor = build()
    assert model.dtype == torch.float32
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_000_000
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded = auto_class.from_pretrained(tmp_path)
    loaded_processor = AutoProcessor.from_pretrained(tmp_path)

    row = rows_to_messages([dataset["test"][0]])[0]
    outputs = []
    for some_model, some_processor in ((model, processor), (loaded, loaded_processor)):
        assert some_processor.tokenizer.padding_side == "left"
        assert some_model.generation_config.eos_token_id == some_processor.tokenizer.eos_token_id
        assert some_model.generation_config.pad_token_id == some_processor.tokenizer.pad_token_id
        prompt = encode_prompt(row["prompt"], some_processor, some_model)
        assert prompt.modalities == {kind}
        inputs = {"input_ids": prompt.input_ids[None], **prompt.media}
        inputs |= {name: values[None] for name, values in prompt.token_fields.items()}
        with torch.no_grad():
            outputs.append(some_model(**inputs).logits)
            answer = some_model.generate(**inputs, max_new_tokens=3)
        assert answer.shape[1] <= len(prompt) + 3
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(("kind", "media_tokens"), [("image", 4), ("video", 16)])
def test_pictures_keep_their_resolution(tasks, kind, media_tokens):
    """28 x 28 pixels are 2 x 2 tokens of 14 x 14 pixels, and two frames share theirs."""
    dataset, build, _ = tasks[kind]
    model, processor = build()
    prompt = encode_prompt(rows_to_messages([dataset["test"][0]])[0]["prompt"], processor, model)
    placeholder = processor.tokenizer.convert_tokens_to_ids(f"<|{kind}_pad|>")
    assert (prompt.input_ids == placeholder).sum() == media_tokens


@pytest.mark.parametrize(("build", "answers"), [(spoken_digit_model, DIGITS), (motion_model, tuple(DIRECTIONS))])
def test_tokenizers_know_the_answers_and_spell_the_rest(build, answers):
    tokenizer = build()[1].tokenizer
    assert [len(tokenizer.encode(answer)) for answer in answers] == [1] * len(answers)
    text = "Seventeen  dogs:\n\t<answer>7</answer> & more?"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.unk_token_id in tokenizer.encode("dépôt 狗")
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("build", "name", "asked"),
    [
        (hidden_digit_model, "zoom", [{"x": 0, "y": 1}, {"x": 1, "y": 0}]),
        (cropping_model, "crop", [{"start": 0, "end": 1}, {"start": 3, "end": 4}]),
    ],
)
def test_a_call_is_few_tokens_and_survives_saving(build, name, asked, tmp_path):
    build()[1].save_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(tmp_path)
    tokenizer = processor.tokenizer
    for arguments in asked:
        calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
        messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
        text = processor.apply_chat_template(messages, tokenize=False)
        said = text.removeprefix("<|im_start|>assistant\n").removesuffix("\n")
        ids = tokenizer.encode(said)
        assert len(ids) == 8 and tokenizer.decode(ids) == said
        assert tokenizer.parse_response(ids, prefix="<|im_start|>assistant\n")["tool_calls"] == calls


def test_weights_follow_the_seed():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    first, again, other = (spoken_digit_model(seed)[0].lm_head.weight for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.random.get_rng_state())
