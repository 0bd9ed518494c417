# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Rewards over HTTP from real local servers: their requests, and the handling of failures."""

import base64
import io
import math
import socket
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import soundfile
import soxr
from helpers.chats import RATE, assistant, audio, image, video
from helpers.chats import chat as user
from helpers.files import image_file, video_file

from trl_multimodal_rft.data.reading.refs import MediaError
from trl_multimodal_rft.rewards import RemoteReward


SECRET = "a prompt that is nobody's business"


def pixels(encoded: str) -> np.ndarray:
    file = PIL.Image.open(io.BytesIO(base64.b64decode(encoded)))
    assert file.format == "PNG"
    return np.asarray(file)


def waveform(encoded: str) -> np.ndarray:
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(encoded)), dtype="float32")
    assert rate == RATE
    return samples


# Requests


def test_text(serve):
    server = serve()
    rewards = RemoteReward(server.url)(prompts=["Who? ", "What? "], completions=["I.", "This."])
    assert rewards == [2, 5]
    assert server.requests == [
        {"prompts": ["Who? ", "What? "], "completions": ["I.", "This."], "queries": ["Who? I.", "What? This."]}
    ]
    prompts = [[{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Who? "}], user()]
    RemoteReward(server.url)(prompts, [assistant("I."), assistant("")])
    assert server.requests[1:] == [
        {"prompts": ["Be brief. Who? ", ""], "completions": ["I.", ""], "queries": ["Be brief. Who? I.", ""]}
    ]


@pytest.mark.parametrize("column", ["labels", "solution"])
def test_labels(serve, column):
    server = serve()
    columns = {column: ["you", None], "other": [1, 2], "completion_ids": [[1], [2]]}
    RemoteReward(server.url, label_column=column)(["Who?", "What?"], ["I", "This"], **columns)
    assert server.requests[0]["labels"] == ["you", None]
    assert set(server.requests[0]) == {"prompts", "completions", "queries", "labels"}
    RemoteReward(server.url)(["Who?"], ["I"], labels=None, solution=["you"])
    assert "labels" not in server.requests[1]


PICTURES = [image(84, 56, seed=1)["image"], image(28, 56, seed=2)["image"], image(56, 56, seed=3)["image"]]


@pytest.mark.parametrize("inline", [True, False])
def test_images(serve, inline):
    server = serve()
    prompts = ["Compare them.", "What is it?", "Why?"]
    columns = {"images": [PICTURES[:2], PICTURES[2:], None]}
    if inline:
        prompts = [
            user(*({"type": "image", "image": each} for each in own or []), {"type": "text", "text": words})
            for own, words in zip(columns["images"], prompts, strict=True)
        ]
    # The trainers pass both: media in the prompt, and their source columns
    RemoteReward(server.url)(prompts, ["a", "b", "c"], **columns)
    (request,) = server.requests
    assert request["prompts"] == ["<image><image>Compare them.", "<image>What is it?", "Why?"]
    assert request["queries"][1] == "<image>What is it?b"
    assert [len(each) for each in request["images"]] == [2, 1, 0]
    for sent, own in zip([each for row in request["images"] for each in row], PICTURES, strict=True):
        assert np.array_equal(pixels(sent), np.asarray(own))
    assert set(request) == {"prompts", "completions", "queries", "images"}


def test_placeholders_take_the_media_of_columns_whose_errors_name_the_row(serve):
    server = serve()
    prompt = user({"type": "text", "text": "Is "}, {"type": "image"}, {"type": "text", "text": " red?"})
    RemoteReward(server.url)([prompt], ["No"], image=PICTURES[:1])
    assert server.requests[0]["prompts"] == ["Is <image> red?"]
    assert np.array_equal(pixels(server.requests[0]["images"][0][0]), np.asarray(PICTURES[0]))
    with pytest.raises(MediaError, match="row 1, column 'image': no such file"):
        RemoteReward(serve().url)(["What?"] * 2, ["a"] * 2, image=[PICTURES[0], "nowhere.png"])


@pytest.mark.parametrize("mode", ["RGBA", "P", "L", "LA", "CMYK"])
def test_images_of_any_mode(serve, mode):
    server = serve()
    picture = PICTURES[0].convert("L").convert("RGBA").convert("LA") if mode == "LA" else PICTURES[0].convert(mode)
    RemoteReward(server.url)(["What?"], ["a"], images=[[picture]])
    assert np.array_equal(pixels(server.requests[0]["images"][0][0]), np.asarray(picture.convert("RGB")))


def test_audio(serve):
    server = serve()
    clips = [audio(0.3, seed=1)["audio"], audio(0.5, seed=2)["audio"]]
    fast = soxr.resample(clips[1], RATE, 44100)
    stereo = np.stack([fast, -fast / 2], axis=1)
    audios = [[{"array": clips[0], "sampling_rate": RATE}, {"array": stereo, "sampling_rate": 44100}], []]
    RemoteReward(server.url)([user({"type": "text", "text": "What?"})] * 2, [assistant("a")] * 2, audios=audios)
    (request,) = server.requests
    first, second = (waveform(each) for each in request["audios"][0])
    assert request["audios"][1] == []
    assert np.abs(first - clips[0]).max() <= 2.0**-15
    expected = soxr.resample(fast / 4, 44100, RATE)
    assert np.abs(second - expected).max() <= 2.0**-14
    assert request["prompts"] == ["<audio><audio>What?", "What?"]
    RemoteReward(server.url, sampling_rate=8000)(["What?"], ["a"], audio=[audios[0][0]])
    samples, rate = soundfile.read(io.BytesIO(base64.b64decode(server.requests[1]["audios"][0][0])))
    assert rate == 8000
    assert np.abs(samples - soxr.resample(clips[0], RATE, 8000)).max() <= 2.0**-14


def test_sounds_of_completions(serve):
    server = serve()
    clip = audio(0.3, seed=1)["audio"]
    heard = [{"array": clip, "sampling_rate": RATE, "frames": 3, "dropped_frames": 0}, None]
    RemoteReward(server.url)(["Say one."] * 2, ["<|s_1|>", ""], completion_audio=heard)
    first, second = server.requests[0]["completion_audios"]
    assert second is None and np.abs(waveform(first) - clip).max() <= 2.0**-15


def test_videos(serve):
    server = serve()
    frames = video(4, 56, 28, seed=1)["video"]
    RemoteReward(server.url)(["What?", "Who?"], ["a", "b"], video=[frames, None])
    (request,) = server.requests
    assert [len(each) for each in request["videos"]] == [1, 0]
    assert np.array_equal(np.stack([pixels(each) for each in request["videos"][0][0]]), frames)
    assert request["prompts"] == ["<video>What?", "Who?"]


def test_media_of_a_group_are_decoded_once(serve):
    server = serve()
    prompt = user({"type": "image", "image": f"http://127.0.0.1:{server.server_port}/image.png"})
    RemoteReward(server.url)([prompt] * 4, ["a"] * 4)
    assert server.images_sent == 1
    sent = [each for row in server.requests[0]["images"] for each in row]
    assert len(sent) == 4
    assert all(np.array_equal(pixels(each), np.asarray(image(56, 28)["image"])) for each in sent)


def test_parts_of_one_file_are_told_apart(serve, tmp_path):
    """One file may be two clips, or both picture and sound."""
    frames = video(8, 64, 64, seed=1)["video"]
    path = str(tmp_path / "clip.mp4")
    Path(path).write_bytes(video_file(frames, codec="mpeg4", rate=4))
    server = serve()
    halves = [{"video_start": 0.0, "video_end": 0.9}, {"video_start": 1.0, "video_end": 1.9}]
    prompt = user(*({"type": "video", "video": path, **half} for half in halves))
    RemoteReward(server.url)([prompt], ["a"])
    first, second = (np.stack([pixels(each) for each in clip]) for clip in server.requests[0]["videos"][0])
    assert len(first) == len(second) == 4
    assert np.abs(first.astype(int) - frames[:4]).mean() < 20
    assert np.abs(second.astype(int) - frames[4:]).mean() < 20
    assert np.abs(second.astype(int) - frames[:4]).mean() > 40


def test_one_object_as_image_and_video(serve):
    server = serve()
    frames = [PICTURES[0], PICTURES[0]]
    prompt = user({"type": "image", "image": PICTURES[0]}, {"type": "video", "video": frames})
    RemoteReward(server.url)([prompt], ["a"])
    (request,) = server.requests
    assert np.array_equal(pixels(request["images"][0][0]), np.asarray(PICTURES[0]))
    assert [np.array_equal(pixels(each), np.asarray(PICTURES[0])) for each in request["videos"][0][0]] == [True] * 2
    # An array of three small images is a video or, as channels, an image
    array = np.stack([np.asarray(PICTURES[0].convert("L"))] * 3)
    prompt = user({"type": "image", "image": array}, {"type": "video", "video": array})
    RemoteReward(server.url)([prompt], ["a"])
    request = server.requests[1]
    assert pixels(request["images"][0][0]).shape == (56, 84, 3)
    assert [pixels(each).shape for each in request["videos"][0][0]] == [(56, 84, 3)] * 3


def test_batch_size(serve):
    server = serve()
    completions = ["a" * i for i in range(7)]
    columns = {"labels": list(range(7)), "image": [PICTURES[i % 3] for i in range(7)]}
    rewards = RemoteReward(server.url, batch_size=3)([f"{i}" for i in range(7)], completions, **columns)
    assert rewards == list(range(7))
    parts = sorted(server.requests, key=lambda request: request["labels"])
    assert [request["labels"] for request in parts] == [[0, 1, 2], [3, 4, 5], [6]]
    for request in parts:
        assert {len(values) for values in request.values()} == {len(request["labels"])}
        assert request["prompts"] == [f"<image>{i}" for i in request["labels"]]
        for i, own in zip(request["labels"], request["images"], strict=True):
            assert np.array_equal(pixels(own[0]), np.asarray(PICTURES[i % 3]))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_requests_run_together_up_to_the_limit(serve, concurrency):
    together = threading.Barrier(concurrency)

    def answer(request):
        together.wait(timeout=60)  # for the maximum number of requests
        time.sleep(0.02)  # for unexpected further requests
        return {"rewards": [float(each) for each in request["completions"]]}

    server = serve(answer)
    reward = RemoteReward(server.url, batch_size=1, concurrency=concurrency, retries=0)
    assert reward(["?"] * 6, [f"{i}" for i in range(6)]) == list(range(6))
    assert server.most_busy == concurrency


# Answers


def assert_names_only(url: str, error: Exception):
    """The message has the server. Neither it nor its causes contain the request."""
    assert url in str(error)
    chain = "".join(traceback.format_exception(error))
    assert SECRET not in chain
    assert base64.b64encode(image_file(PICTURES[0])).decode()[:40] not in chain


def test_null_is_no_reward(serve):
    server = serve(lambda request: {"rewards": [None, 0, -1.5]})
    assert RemoteReward(server.url)([], []) == [] and server.requests == []
    assert RemoteReward(server.url)(["?"] * 3, ["a"] * 3) == [None, 0, -1.5]


@pytest.mark.parametrize(
    "answer",
    [
        *({"rewards": each} for each in ([1.0], [1.0, 2.0, 3.0], {"a": 1, "b": 2}, "ab")),
        *({"rewards": [1.0, wrong]} for wrong in (math.nan, math.inf, 1e39, "2.0", [2.0], True)),
        {"rewards": [1.0, 2.0], "error": "CUDA out of memory"},
        {"scores": [1.0, 2.0]},
        [1.0, 2.0],
        b"Hello",
        b'{"rewards": [1, ' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
        *(b'{"rewards": [1, 1' + b"0" * n + b"]}" for n in (400, 5000)),
        b'{"rewards": [1, 1e999]}',
        b" " * 2**21,
        (302, {}),
    ],
)
def test_other_answers_are_errors(serve, answer):
    error = (
        r"answered '.+' for 2 completions \(.+\); it must return {'rewards': \[...\]} with one finite number, or null"
    )
    if isinstance(answer, tuple):
        error = "answered 302"
    elif len(answer) == 2**21:
        error = "is too large for 2 rewards; it must return one number for each"
    server = serve(lambda request: answer)
    with pytest.raises(RuntimeError, match=error) as caught:
        RemoteReward(server.url)([SECRET] * 2, ["a", "b"], image=PICTURES[:2])
    assert_names_only(server.url, caught.value)
    assert len(server.requests) == 1


# Failures


@pytest.fixture
def waits(monkeypatch):
    """Records seconds between attempts, and skips the waiting."""
    waits = []
    monkeypatch.setattr("trl_multimodal_rft.data.reading.http.time.sleep", waits.append)
    return waits


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504, 520])
def test_busy_servers_are_asked_again(serve, status, waits):
    answers = iter([(status, {})] * 4 + [{"rewards": [1, 2]}])
    server = serve(lambda request: next(answers))
    assert RemoteReward(server.url, backoff=0.25)(["?"] * 2, ["a", "b"]) == [1, 2]
    assert len(server.requests) == 5
    assert server.requests[0] == server.requests[-1]
    assert waits == [0.25, 0.5, 1.0, 2.0]


def test_pages_of_what_stands_between_are_asked_again(serve):
    answers = iter([b"<html>One moment</html>", b"\n<!DOCTYPE html>", {"rewards": [1]}])
    server = serve(lambda request: next(answers))
    assert RemoteReward(server.url, backoff=0.001)(["?"], ["a"]) == [1]
    server = serve(lambda request: b"<html>Hello</html>")
    with pytest.raises(RuntimeError, match="failed: status 200: '<html>Hello</html>', after 2 attempts"):
        RemoteReward(server.url, retries=1, backoff=0.001)([SECRET], ["a"])


def test_patience_lasts(serve, waits):
    answers = iter([(503, {})] * 30 + [{"rewards": [1]}] + [(503, {})] * 1030 + [{"rewards": [1]}])
    server = serve(lambda request: next(answers))
    assert RemoteReward(server.url, retries=None)(["?"], ["a"]) == [1]
    assert max(waits) == 60 and len(waits) == 30
    assert RemoteReward(server.url, retries=None, patience=1e6)(["?"], ["a"]) == [1]


def test_patience_ends(serve):
    server = serve(lambda request: (503, {}))
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="within 2 s"):
        RemoteReward(server.url, retries=None, patience=2, backoff=0.01)([SECRET], ["a"])
    assert time.monotonic() - started < 60 and len(server.requests) > 3


@pytest.mark.parametrize(
    ("asked", "waited"),
    [("7", 7), ("86400", 60), ("9" * 5000, 60), ("\xb2", 0.25), ("-1", 0.25), ("Wed, 21 Oct 2099 07:28:00 GMT", 0.25)],
)
def test_servers_may_ask_for_a_minute(serve, asked, waited, waits):
    answers = iter([(429, {}), {"rewards": [1]}])
    server = serve(lambda request: next(answers))
    server.more_headers["Retry-After"] = asked
    assert RemoteReward(server.url, backoff=0.25)(["?"], ["a"]) == [1]
    assert waits == [waited]


def test_answers_that_break_off_are_asked_again():
    """The first connection closes in the middle of the body, the second one answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        whole = b'{"rewards": [1]}'

        def answer():
            for body in (whole[:5], whole):
                connection, _ = listener.accept()
                with connection:
                    while b"completions" not in connection.recv(2**16):
                        pass
                    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(whole)}\r\nConnection: close\r\n\r\n"
                    connection.sendall(head.encode() + body)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/reward"
        assert RemoteReward(url, backoff=0.001, timeout=60.0)(["?"], ["a"]) == [1]
        thread.join(5)


def test_redirects_do_not_get_the_payload(serve):
    other = serve()
    server = serve(lambda request: (307, {}))
    server.location = other.url
    with pytest.raises(RuntimeError, match="answered 307"):
        RemoteReward(server.url)([SECRET], ["a"])
    assert other.requests == []


def test_retries_end(serve):
    server = serve(lambda request: (503, {"detail": "too busy"}))
    message = r"/reward failed: status 503: '{\"detail\": \"too busy\"}', after 3 at"
    with pytest.raises(RuntimeError, match=message) as caught:
        RemoteReward(server.url, retries=2, backoff=0.001)([SECRET], ["a"], image=PICTURES[:1])
    assert len(server.requests) == 3
    assert_names_only(server.url, caught.value)


@pytest.mark.parametrize("status", [400, 401, 404, 422, 505])
def test_refusals_are_not_repeated(serve, status):
    server = serve(lambda request: (status, {"detail": "x" * 1000}))
    with pytest.raises(RuntimeError, match=rf"/reward answered {status}: .*xxx'\.$") as caught:
        RemoteReward(server.url, backoff=0.001)([SECRET], ["a"], image=PICTURES[:1])
    assert len(server.requests) == 1
    assert_names_only(server.url, caught.value)
    assert len(str(caught.value)) < 300


def test_servers_that_do_not_answer(serve):
    over = threading.Event()

    def answer(request):
        over.wait(60)
        return {"rewards": [1]}  # too late

    server = serve(answer)
    try:
        message = "/reward failed: (ConnectionError|ReadTimeout), after 2 attempts"
        with pytest.raises(RuntimeError, match=message) as caught:
            RemoteReward(server.url, timeout=0.1, retries=1, backoff=0.001)([SECRET], ["a"], image=PICTURES[:1])
        deadline = time.monotonic() + 60  # the second request may still be in transit
        while len(server.requests) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(server.requests) == 2
    finally:
        over.set()
    assert_names_only(server.url, caught.value)


def test_servers_that_are_not_there(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/reward"
        with pytest.raises(RuntimeError, match="failed: ConnectionError") as caught:
            RemoteReward(url, retries=1, backoff=0.001)([SECRET], ["a"], image=PICTURES[:1])
    assert_names_only(url, caught.value)


def test_the_first_failure_stops_all(serve):
    def answer(request):
        if request["labels"] == [0]:
            return 400, {}
        time.sleep(0.05)
        return {"rewards": [1]}

    server = serve(answer)
    with pytest.raises(RuntimeError, match="answered 400"):
        RemoteReward(server.url, batch_size=1, concurrency=1)(["?"] * 20, ["a"] * 20, labels=list(range(20)))
    assert len(server.requests) < 20
