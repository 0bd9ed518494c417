# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rows with media columns become messages with references, whose order and number never change."""

import copy
import json
import math
import pickle
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from helpers.chats import text
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from trl.data_utils import prepare_multimodal_messages
from trl.trainer.utils import print_prompt_completions_sample

from trl_multimodal_rft.data.reading.refs import MediaError, MediaRef, iter_refs
from trl_multimodal_rft.data.rows.columns import as_text, blocks_to_refs, rows_to_messages, strip_media
from trl_multimodal_rft.data.rows.features import restore_media
from trl_multimodal_rft.data.rows.names import MEDIA_COLUMNS
from trl_multimodal_rft.data.rows.values import file_modality


SAMPLED = {"array": [0.5], "sampling_rate": 4}


def user(*content):
    return [{"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}]


def prompt_of(row):
    return rows_to_messages([row])[0]["prompt"]


def sources(value):
    return [ref.source for ref in iter_refs(value)]


def test_reference_is_never_copied_and_travels_as_text():
    ref = MediaRef("audio", "a.wav", {"sampling_rate": 8000}, "audio", 3)
    messages = user({"type": "audio", "audio": ref})
    assert repr(ref) == "<audio>"
    assert copy.copy(ref) is ref
    assert copy.deepcopy(messages) == messages
    assert pickle.loads(pickle.dumps(messages)) == user({"type": "audio", "audio": "<audio>"})
    assert ref != MediaRef("audio", "a.wav", {"sampling_rate": 8000}, "audio", 3)


def test_columns_without_placeholders_go_before_the_first_user_text():
    row = {
        "prompt": [{"role": "system", "content": "Be brief."}, *user("Which <images> is it?"), *user("Well?")],
        "audio": "a.wav",
        "videos": ["v.mp4"],
        "images": ["i.png", "j.png"],
        "answer": "cat",
    }
    before = copy.deepcopy(row)
    (out,) = rows_to_messages([row])
    assert row == before
    assert out.keys() == {"prompt", "answer"}
    assert out["answer"] == "cat"
    system, first, second = out["prompt"]
    assert system["content"] == [text("Be brief.")]
    assert [block["type"] for block in first["content"]] == ["image", "image", "video", "audio", "text"]
    assert first["content"][-1] == text("Which <images> is it?")
    assert second["content"] == [text("Well?")]
    assert sources(out["prompt"]) == ["i.png", "j.png", "v.mp4", "a.wav"]
    assert [ref.column for ref in iter_refs(out["prompt"])] == ["images[0]", "images[1]", "videos[0]", "audio"]
    assert all(ref.row == 0 and ref.options == {} for ref in iter_refs(out["prompt"]))


def test_images_are_placed_as_trl_places_them():
    images = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    for prompt in (
        [*user("Compare."), {"role": "assistant", "content": "Same."}, *user("Sure?")],
        user(text("First"), {"type": "image"}, text("second"), {"type": "image"}, text("?")),
    ):
        expected = prepare_multimodal_messages(prompt, images=images)
        assert restore_media(prompt_of({"prompt": prompt, "images": images})) == expected


def test_placeholders_take_the_media_in_order_with_their_own_options():
    prompt = [
        *user({"type": "image", "max_pixels": 100}, text("or"), {"type": "audio"}),
        {"role": "assistant", "content": "Both."},
        *user(text("And"), {"type": "image", "max_pixels": None}, text("?")),
    ]
    out = prompt_of({"prompt": prompt, "images": ["i.png", "j.png"], "audio": "a.wav"})
    types = [[block["type"] for block in message["content"]] for message in out]
    assert types == [["image", "text", "audio"], ["text"], ["text", "image", "text"]]
    assert [(ref.source, ref.options, ref.column) for ref in iter_refs(out)] == [
        ("i.png", {"max_pixels": 100}, "images[0]"),
        ("a.wav", {}, "audio"),
        ("j.png", {}, "images[1]"),
    ]
    # Placeholders of one kind leave the other kinds at the start


def test_placeholders_name_their_medium_by_its_index():
    """As in the dataset of TRL's script `sft_vlm_gemma3`. Blocks of text have an empty `index`."""
    blocks = [{"type": "image", "index": 1}, {**text("or"), "index": None}, {"type": "image", "index": 0}]
    out = prompt_of({"prompt": user(*blocks), "images": ["i.png", "j.png"]})
    assert [(ref.source, ref.options) for ref in iter_refs(out)] == [("j.png", {}), ("i.png", {})]
    blocks[2]["index"] = 1
    with pytest.raises(MediaError, match=r"the option 'index' of the image blocks is \[1, 1\]; give each image"):
        prompt_of({"prompt": user(*blocks), "images": ["i.png", "j.png"]})


@pytest.mark.parametrize(
    ("block", "source", "options"),
    [
        ({"type": "audio", "audio": "a.wav", "sampling_rate": 8000}, "a.wav", {"sampling_rate": 8000}),
        ({"type": "audio", "audio_url": "http://host/a.wav"}, "http://host/a.wav", {}),
        ({"type": "audio", "bytes": b"RIFF", "path": "a.wav"}, b"RIFF", {}),
        ({"type": "image", "path": "i.png", "min_pixels": 4}, "i.png", {"min_pixels": 4}),
        ({"type": "image", "url": "http://host/i.png"}, "http://host/i.png", {}),
        ({"type": "image_url", "image_url": {"url": "data:,"}}, {"url": "data:,"}, {}),
        ({"type": "video", "video_url": "v.mp4", "fps": 2.0}, "v.mp4", {"fps": 2.0}),
        ({"type": "video", "video": ["0.png", "1.png"]}, ["0.png", "1.png"], {}),
        ({"type": "image", "image": "i.png", "image_url": {"url": "i.png"}, "url": None, "path": ""}, "i.png", {}),
        ({"type": "audio", "audio": SAMPLED | {"path": "a"}, "bytes": None}, SAMPLED | {"path": "a"}, {}),
    ],
)
def test_inline_media_keep_their_place(block, source, options):
    content = prompt_of({"prompt": user(text("Here:"), block, text("?"))})[0]["content"]
    kind = block["type"].removesuffix("_url")
    assert content[0] == text("Here:")
    assert content[2] == text("?")
    assert content[1].keys() == {"type", kind}
    ref = content[1][kind]
    assert (content[1]["type"], ref.modality, ref.source, ref.options) == (kind, kind, source, options)
    assert ref.column == "prompt[0].content[1]"


def test_none_filled_by_arrow_is_dropped():
    rows = [
        {
            "prompt": [
                {"role": "user", "content": [{"type": "image", "path": "i.png"}, text("Colour?")]},
                {"role": "assistant", "content": [text("Red.")], "name": "bot"},
            ],
            "audio": {"path": "a.wav"},
        },
        {"prompt": user({"type": "video", "path": "v.mp4", "fps": 2.0}, text("What?")), "audio": None},
    ]
    table = datasets.Dataset.from_list(rows)
    assert table[0]["prompt"][0]["content"][1] == {"type": "text", "path": None, "text": "Colour?", "fps": None}
    first, second = rows_to_messages(list(table))
    assert first["prompt"][0]["content"][2] == text("Colour?")
    assert "name" not in first["prompt"][0]
    assert first["prompt"][1] == {"role": "assistant", "content": [text("Red.")], "name": "bot"}
    assert sources(first) == [{"path": "a.wav"}, "i.png"]
    assert sources(second) == ["v.mp4"]
    assert next(iter_refs(second)).options == {"fps": 2.0}


def test_plain_text_without_media_is_left_to_trl():
    rows = [{"prompt": "Hello <image>", "image": None}, {"prompt": "Bye", "images": []}]
    assert rows_to_messages(rows) == [{"prompt": "Hello <image>"}, {"prompt": "Bye"}]
    chat = {"prompt": user("Hello"), "audio": None}
    assert rows_to_messages([chat]) == [{"prompt": user("Hello")}]


@pytest.mark.parametrize("other", [{"prompt": "Who?", "audio": "a.wav"}, {"prompt": user("Hi")}])
def test_one_batch_has_one_form(other):
    plain, other = rows_to_messages([{"prompt": "What?", "audio": None}, other])
    content = [text("What?")] if sources(other) else "What?"
    assert plain["prompt"] == [{"role": "user", "content": content}]
    assert isinstance(other["prompt"][0]["content"], type(content))


def test_kinds_mix_in_one_batch():
    rows = [{"prompt": user("?"), **dict.fromkeys(MEDIA_COLUMNS)} for _ in range(4)]
    rows[0]["image"] = "i.png"
    rows[1]["audios"] = ["a.wav", "b.wav"]
    rows[2]["video"] = ["0.png", "1.png"]
    out = rows_to_messages(rows)
    assert [sources(row) for row in out] == [["i.png"], ["a.wav", "b.wav"], [["0.png", "1.png"]], []]
    assert [{ref.row for ref in iter_refs(row)} for row in out] == [{0}, {1}, {2}, set()]


def test_tool_calls_survive():
    calls = [{"function": {"name": "zoom", "arguments": {"x": 1}}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls}
    out = prompt_of({"prompt": [*user("Zoom"), call, {"role": "tool", "content": "done"}], "image": "i.png"})
    assert out[1] == call
    assert strip_media(out)[1] == {**call, "content": ""}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"image": "i", "images": ["j"]}, "row 1, column 'images': the row also has 'image'; set one"),
        ({"image": ["i"]}, "row 1, column 'image': holds a list; rename the column to 'images'"),
        *(
            ({"audio": clips}, "row 1, column 'audio': holds a list; rename the column to 'audios'")
            for clips in (["a.wav"], [None, b"RIFF"], [{"array": [0.5], "sampling_rate": 4}], (Path("a"), Path("b")))
        ),
        *(
            ({"video": clips}, "row 1, column 'video': holds a list; rename the column to 'videos'")
            for clips in (["a.mp4", "b.mp4"], [{"bytes": None, "path": "a.MOV"}], ["https://a.b/c.webm?key=0"])
        ),
        ({"images": "i"}, "row 1, column 'images': holds a str, not a list; rename the column to 'image'"),
        ({"audio": {"bytes": None, "path": None}}, "row 1, column 'audio': ['bytes', 'path'] are all None"),
        ({"audios": ["a", None]}, "row 1, column 'audios[1]': is None; leave it out"),
        (
            {"prompt": user({"type": "image"}, {"type": "image"}, text("?")), "images": ["i", "j", "k"]},
            "row 1, column 'images': has 3 images for 2 image placeholders in the messages; write one {'type'",
        ),
        (
            {"prompt": user(text("?"), {"type": "video", "fps": 2}), "audio": "a"},
            "row 1, column 'prompt[0].content[1]': the placeholder has no video; add the video to its block, or",
        ),
        (
            {"prompt": [{"role": "system", "content": "?"}], "audio": "a"},
            "row 1, column 'audio': there is no user mess",
        ),
        (
            {"prompt": user({"text": "?"})},
            "row 1, column 'prompt[0].content[0]': a content block must be a dictionary",
        ),
        ({"prompt": None}, "row 1, column 'prompt': is None; give a text or a list of messages, or remove the row"),
        ({"prompt": 7}, "row 1, column 'prompt': is of type int; give a text or a list of messages"),
        ({"prompt": []}, "row 1, column 'prompt': is an empty list; give a text or a list of messages"),
        ({"prompt": user("?")[0]}, "row 1, column 'prompt': is of type dict; give a text or a list of messages"),
        ({"prompt": ["What?"]}, "row 1, column 'prompt[0]': a message must be a dictionary with 'role' and 'content'"),
        ({"prompt": [{"content": "?"}]}, "row 1, column 'prompt[0]': a message must be a dictionary with 'role'"),
        (
            {"prompt": [*user("?"), {"role": None, "content": "?"}]},
            "row 1, column 'prompt[1]': a message must be a dictionary with 'role' and 'content', got ['content',",
        ),
        (
            {"prompt": [{"role": "user", "content": 7}]},
            "row 1, column 'prompt[0]': the message has content of type int",
        ),
        ({"prompt": [{"role": "user"}]}, "row 1, column 'prompt[0]': the message has no content; give a text"),
        (
            {"prompt": [{"role": "user", "content": {"type": "text", "text": "?"}}]},
            "row 1, column 'prompt[0]': the message has content of type dict; give a text or a list of blocks",
        ),
        (
            {"prompt": user({"type": "text", "text": 7})},
            "row 1, column 'prompt[0].content[0]': the block has text of type int; write {'type': 'text'",
        ),
        ({"prompt": user({"type": None, "text": "?"})}, "row 1, column 'prompt[0].content[0]': the block has no type"),
        *(
            (
                {"prompt": user({"type": kind, **media})},
                f"row 1, column 'prompt[0].content[0]': the block has media in both {keys}; leave one of them, or",
            )
            for kind, media, keys in (
                ("image", {"image": "i.png", "image_url": {"url": "j.png"}}, "'image' and 'image_url'"),
                ("image", {"url": "i.png", "path": "j.png"}, "'path' and 'url'"),
                ("image", {"bytes": b"i", "path": "i.png", "image": np.zeros(4)}, "'image' and 'bytes'"),
                ("input_audio", {"input_audio": {"data": "UklG", "url": "a.wav"}}, "'url' and 'data'"),
                ("video", {"video": {"path": "v.mp4", "url": "w.mp4"}}, "'path' and 'url'"),
            )
        ),
    ],
)
def test_misplaced_media_are_named(row, message):
    for other in ("fine", user("fine")):
        with pytest.raises(MediaError) as error:
            rows_to_messages([{"prompt": other}, {"prompt": user("?"), **row}])
        assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("video", {"n_frames": 4}, "'n_frames' is no option of a block of video; remove it, or write one of ('min_p"),
        ("image", {"nframes": 4}, "'nframes' is no option of a block of image; remove it, or write one of"),
        ("audio", {"max_pixels": 4}, "'max_pixels' is no option of a block of audio; remove it, or write one of"),
        ("video", {"fps": 0}, "the option 'fps' is 0; give a positive number, or leave it out"),
        ("video", {"fps": -1}, "the option 'fps' is -1; give a positive number"),
        ("video", {"fps": math.nan}, "the option 'fps' is nan; give a positive number"),
        ("video", {"fps": math.inf}, "the option 'fps' is inf; give a positive number"),
        ("video", {"fps": "2"}, "the option 'fps' is '2'; give a positive number"),
        ("video", {"nframes": True}, "the option 'nframes' is True; give a positive number"),
        ("video", {"nframes": 2.5}, "the option 'nframes' is 2.5; give a whole number"),
        ("video", {"video_start": -1.0}, "the option 'video_start' is -1.0; give a positive number"),
        ("video", {"video_start": 2.0, "video_end": 1.0}, "'video_start' of 2.0 is above 'video_end' of 1.0; correct"),
        ("video", {"min_frames": 9, "max_frames": 8}, "'min_frames' of 9 is above 'max_frames' of 8; correct them"),
        ("image", {"min_pixels": 9, "max_pixels": 8}, "'min_pixels' of 9 is above 'max_pixels' of 8; correct them"),
        ("image", {"resized_width": 56}, "one of 'resized_height' and 'resized_width' alone has no effect; give both"),
        ("audio", {"sampling_rate": 0}, "the option 'sampling_rate' is 0; give a positive number"),
    ],
)
@pytest.mark.parametrize("inline", [True, False])
def test_options_that_nobody_reads_or_that_make_no_sense_are_named(kind, options, message, inline):
    block = {"type": kind, **options}
    column = {kind: "a file"}
    row = {"prompt": user(block | column if inline else block), **({} if inline else column)}
    with pytest.raises(MediaError) as error:
        rows_to_messages([{"prompt": user("?")}, row])
    assert str(error.value).startswith(f"row 1, column 'prompt[0].content[0]': {message}")
    with pytest.raises(MediaError, match="row 1"):  # raised for the results of a tool
        blocks_to_refs([block | column], "tool", 1)


def test_options_of_a_formatted_dataset_are_numbers():
    block = {"type": "video", "path": "v.mp4", "fps": torch.tensor(2.0), "nframes": np.int64(4), "video_start": 0}
    (ref,) = iter_refs(rows_to_messages([{"prompt": user(block)}]))
    assert ref.options == {"fps": 2.0, "nframes": 4, "video_start": 0}


def test_stripped_prompts_can_be_logged(tmp_path, capsys):
    rows = [
        {"prompt": user("What do you hear?"), "audio": {"bytes": b"\x00", "path": None}},
        {"prompt": user(text("Look"), {"type": "image", "image": Image.new("RGB", (2, 2))}, text("!"))},
        {"prompt": "Hello"},
    ]
    out = rows_to_messages(rows)
    prompts = strip_media([row["prompt"] for row in out])
    assert prompts == [user("<audio>What do you hear?"), user("Look<image>!"), user("Hello")]
    assert strip_media(out[0]["prompt"][0]["content"][0]) == {"type": "audio", "audio": "<audio>"}
    assert json.loads(json.dumps(prompts)) == prompts
    pd.DataFrame({"prompt": prompts}).to_parquet(tmp_path / "log.parquet")
    assert [list(p) for p in pd.read_parquet(tmp_path / "log.parquet")["prompt"]] == prompts
    print_prompt_completions_sample(prompts, [user("x")] * 3, {"r": [0.0] * 3}, [0.0] * 3, step=1)
    assert "<audio>What do you hear?" in capsys.readouterr().out
    assert len(sources(out)) == 2  # logging doesn't change the prompts


def test_restored_prompts_hold_the_raw_media():
    array = [0.0, 0.5]
    medium = {"array": array, "sampling_rate": 8000}
    out = rows_to_messages([{"prompt": user("?"), "audio": medium, "extra": (1, 2)}])
    assert restore_media(out) == [{"prompt": user({"type": "audio", "audio": medium}, text("?")), "extra": (1, 2)}]
    assert restore_media(out)[0]["prompt"][0]["content"][0]["audio"] is medium


KINDS = ("image", "video", "audio")
blocks = st.one_of(
    st.text(max_size=5).map(text),
    st.sampled_from(KINDS).map(lambda kind: {"type": kind}),
    st.sampled_from(KINDS).map(lambda kind: {"type": kind, kind: f"inline {kind}"}),
)
chats = st.lists(st.lists(blocks, max_size=5), min_size=1, max_size=3)


@given(chats)
def test_every_placeholder_is_filled_and_nothing_moves(contents):
    prompt = [{"role": role, "content": c} for role, c in zip(["user", "assistant", "user"], contents, strict=False)]
    everything = [block for content in contents for block in content]
    columns = {kind: [f"{kind} {i}" for i in range(everything.count({"type": kind}))] for kind in KINDS}
    row = {"prompt": prompt, **{f"{kind}s": media for kind, media in columns.items()}}
    before = copy.deepcopy(row)
    out = restore_media(rows_to_messages([row]))[0]["prompt"]
    assert row == before
    supply = {kind: iter(media) for kind, media in columns.items()}
    expected = [
        {**b, b["type"]: next(supply[b["type"]])} if b in [{"type": k} for k in KINDS] else b for b in everything
    ]
    assert [block for message in out for block in message["content"]] == expected
    assert [len(message["content"]) for message in out] == [len(content) for content in contents]


@given(chats, st.sampled_from(KINDS), st.integers(0, 20))
def test_a_wrong_number_of_media_never_passes(contents, kind, number):
    prompt = [{"role": "user", "content": content} for content in contents]
    placeholders = [block for content in contents for block in content if block == {"type": kind}]
    others = {f"{k}s": ["x"] * sum(c.count({"type": k}) for c in contents) for k in KINDS if k != kind}
    row = {"prompt": prompt, **others, f"{kind}s": ["x"] * number}
    if placeholders and number != len(placeholders):
        with pytest.raises(MediaError, match=kind):
            rows_to_messages([row])
    else:
        inline = sum(block == {"type": kind, kind: f"inline {kind}"} for content in contents for block in content)
        assert sum(ref.modality == kind for ref in iter_refs(rows_to_messages([row]))) == number + inline


def test_texts_of_messages():
    assert as_text("plain") == "plain"
    assert as_text([{"role": "user", "content": "one"}]) == "one"
    assert as_text([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]) == "system: s\nuser: u"
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert as_text([{"role": "assistant", "content": None, "tool_calls": [call]}]) == str(call)
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert as_text(turns, with_roles=False) == "su" and as_text("plain", with_roles=False) == "plain"


def test_kinds_of_files():
    texts = "a.WAV", "/x y/z.mp4", "b.gif#top", "data:audio/wav;base64,A" + "A" * 9999
    assert list(map(file_modality, texts)) == ["audio", "video", "image", "audio"]
    spaced = "rec (2).mp3", "IMG 001.jpg ", "My Folder/録音 3.wav", "Symphony No. 5, live.flac", "a b.mp4?t=1"
    assert list(map(file_modality, spaced)) == ["audio", "image", "audio", "audio", "video"]
    assert file_modality("Screenshot from 2013-01-01 10:22:33.png") == "image"
    others = "", "wav", ".png ", "a.pngs", "line\n/a.png", "data:text/plain,a.png"
    sentences = "Is it here? a.png", "It is: a.png", "Is it in a.wav?", f"{'very ' * 60}long.png"
    assert not any(map(file_modality, (*others, *sentences)))
