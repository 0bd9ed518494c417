# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A judge behind real local servers: its requests, scores, failures, cache and bounds, also by name in a trainer."""

import time
import traceback

import numpy as np
import pytest
from extras.test_remote_rewards import pixels, waveform
from helpers.chats import RATE, image
from helpers.trainer_utils import image_rows, make_trainer, sound

from trl_multimodal_rft import MultimodalGRPOTrainer
from trl_multimodal_rft.rewards import JudgeReward
from trl_multimodal_rft.rewards.named import load_reward_funcs


KEY = "sk-of-a-test-1234"


def chat(reply):
    return {"choices": [{"message": {"role": "assistant", "content": reply}}]}


def right_if_seven(request):
    text = request["messages"][0]["content"]
    text = text if isinstance(text, str) else text[-1]["text"]
    answer = text.split("<answer>\n")[1].split("\n</answer>")[0]
    return chat(f"I compare.\nScore: {int('seven' in answer)}")


def judge_of(server, **settings):
    return JudgeReward(server.url, "judge", **{"backoff": 0.01, **settings})


def ask(judge, answers, solution="7", **columns):
    return judge(["How many?"] * len(answers), answers, solution=[solution] * len(answers), **columns)


@pytest.fixture
def server(serve):
    return serve(right_if_seven)


# Requests


def test_request_and_scores(server):
    judge = judge_of(server, options={"temperature": 0.0, "max_tokens": 64})
    prompt = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": [{"type": "text", "text": "How many {answer}?"}]},
    ]
    completions = [[{"role": "assistant", "content": f"<answer>{text}</answer>"}] for text in ("seven", "8", "", "9")]
    solution = ["<answer>7</answer>", ["7", "VII"], "7", None]
    assert judge([prompt] * 4, completions, solution=solution) == [1.0, 0.0, 0.0, None]
    first, second = sorted(server.requests, key=lambda each: "VII" in each["messages"][0]["content"])
    assert {name: first[name] for name in ("model", "temperature", "max_tokens")} == {
        "model": "judge",
        "temperature": 0.0,
        "max_tokens": 64,
    }
    [message] = first["messages"]
    assert message["role"] == "user" and "Hello" not in message["content"] and "Be brief" not in message["content"]
    for part in ("<question>\nHow many {answer}?\n</question>", "<reference>\n7\n<", "<answer>\nseven\n</answer>"):
        assert part in message["content"]
    assert "<reference>\n7\nVII\n<" in second["messages"][0]["content"]


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/", "/v1/chat/completions"])
def test_urls(tail):
    assert JudgeReward(f"http://judge:8000{tail}", "m").url == "http://judge:8000/v1/chat/completions"


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 1", 1.0),
        ("**Score:** 0", 0.0),
        ("Score: 0? No.\nScore: 1", 1.0),
        ("1", 1.0),
        (" 0.5\n", 0.5),
        ("Score: 2", None),
        ("Score: -1", None),
        ("I don't know", None),
        ("nan", None),
        ("Score: 1/2", None),
        ("Score: 1 / 3", None),
        ("Score: 1 out of 2", None),
        ("Score: 1%", None),
        ("Score: 0-1", None),
        ("1/1", None),
        ("Score: 1/1.0", 1.0),
        ("Score: 0.\nThat is 1/2 of it", 0.0),
        ("Score: 1st", None),
        ("<think>Score: 1</think>", None),
        ("<think>Score: 1", None),
        ("<think>Score: 0?</think>\n\nScore: 1", 1.0),
        ("Score: 0?</think>1", 1.0),
        ("", None),
        (None, None),
    ],
)
def test_replies(serve, reply, score):
    metrics = {}
    judge = judge_of(serve(lambda request: chat(reply)))
    assert ask(judge, ["seven", ""], log_metric=metrics.__setitem__) == [score, 0.0]
    assert metrics["judge_reward/unreadable"] == float(score is None)


@pytest.mark.parametrize("reason", ["length", "content_filter", "error", "abort", "tool_calls"])
def test_replies_that_did_not_end(serve, reason):
    reply = chat("Score: 1")
    reply["choices"][0]["finish_reason"] = reason
    assert ask(judge_of(serve(lambda request: reply)), ["seven"]) == [None]


@pytest.mark.parametrize("reason", ["stop", None, "eos_token"])
def test_replies_that_ended(serve, reason):
    reply = chat("Score: 1")
    reply["choices"][0]["finish_reason"] = reason
    assert ask(judge_of(serve(lambda request: reply)), ["seven"]) == [1.0]


def test_own_template_and_pattern(serve):
    server = serve(lambda request: chat("Judgement: 4 of 5"))
    settings = {"template": "Rate: {answer}", "pattern": r"Judgement: (\d)", "max_score": 5.0, "name": "rating"}
    judge = judge_of(server, **settings)
    assert judge(["?"], ["seven {reference}"]) == [0.8]  # without a reference
    assert server.requests[0]["messages"] == [{"role": "user", "content": "Rate: seven {reference}"}]
    assert judge.__name__ == "rating"
    with pytest.raises(ValueError, match="put the score into a group"):
        judge_of(server, pattern="Score")
    with pytest.raises(ValueError, match=r"column `solution`, which is missing.*`template`"):
        judge_of(server)(["?"], ["seven"])
    with pytest.raises(ValueError, match="row 0, column 'solution'"):
        ask(judge_of(server), ["seven"], solution={"a": 1})


def test_tool_bonus_and_longest_answer(server):
    """DeepEyes: 0.8 for a right answer, 1.2 more with a tool's image, and none for an answer of 1,000 characters."""
    shown = {"role": "tool", "content": [image(28, 28)]}
    refused = {"role": "tool", "content": "{'error': 'no image'}"}

    def said(text, *before):
        return [*before, {"role": "assistant", "content": text}]

    completions = [said("seven", shown), said("seven", refused), said("8", shown), said("seven"), said("seven" * 200)]
    judge = judge_of(server, tool_bonus=1.5, max_answer_length=1000)
    prompts = [[{"role": "user", "content": "?"}]] * 5
    assert judge(prompts, completions, solution=["7"] * 5) == [2.5, 1.0, 0.0, 1.0, 0.0]
    assert len(server.requests) == 2


def test_media(server):
    picture = image(56, 28)
    heard = {"type": "audio", "audio": sound(0.1, 0)}
    prompt = [{"role": "user", "content": [picture, heard, {"type": "text", "text": "How many?"}]}]
    assert judge_of(server, media=True)([prompt] * 2, ["seven", "8"], solution=["7"] * 2) == [1.0, 0.0]
    content = server.requests[0]["messages"][0]["content"]
    assert [block["type"] for block in content] == ["image_url", "input_audio", "text"]
    head, _, data = content[0]["image_url"]["url"].partition(",")
    assert head == "data:image/png;base64" and (pixels(data) == np.asarray(picture["image"])).all()
    assert content[1]["input_audio"]["format"] == "wav" and len(waveform(content[1]["input_audio"]["data"])) > 0
    judge_of(server)([prompt], ["seven"], solution=["7"])
    assert isinstance(server.requests[-1]["messages"][0]["content"], str)


def test_a_completion_that_is_speech_is_heard(serve):
    """The recording is the last one of the request; without media, or without a sound, there is none."""

    def right_if_heard(request):
        blocks = request["messages"][0]["content"]
        recordings = [block for block in blocks if isinstance(block, dict) and block["type"] == "input_audio"]
        return chat(f"Score: {len(recordings)}")

    server = serve(right_if_heard)
    spoken = sound(0.2, 1)["array"]
    sounds = [{"array": spoken, "sampling_rate": RATE, "frames": 2, "dropped_frames": 0}, None]
    columns = {"solution": ["seven"] * 2, "completion_audio": sounds}
    assert judge_of(server, media=True)(["Say seven."] * 2, ["<|s_1|>", "<|s_2|>"], **columns) == [1.0, 0.0]
    (request,) = server.requests
    blocks = request["messages"][0]["content"]
    assert np.abs(waveform(blocks[-2]["input_audio"]["data"]) - spoken).max() <= 2.0**-15
    assert "the last recording" in blocks[-1]["text"]


# Failures


@pytest.mark.parametrize(
    "failure",
    [
        (429, {"error": "slow down"}),
        (503, b"busy"),
        (200, b"<html>"),
        (200, b"{'choices'"),
        (200, {"choices": []}),
        (200, {"error": {"message": "overloaded"}}),
        (200, {**chat("Score: 1"), "error": {"message": "overloaded"}}),
        (200, [1]),
    ],
)
def test_failures_are_retried(serve, failure):
    answers = iter([failure, failure])
    server = serve(lambda request: next(answers, None) or right_if_seven(request))
    assert ask(judge_of(server), ["seven"]) == [1.0] and len(server.requests) == 3
    endless = serve(lambda request: failure)
    with pytest.raises(RuntimeError, match=r"^The request to the reward server .* failed: status .*after 2 attempts"):
        ask(judge_of(endless, retries=1), ["seven"])


def test_failure_is_raised_before_all_others_have_failed(serve):
    server = serve(lambda request: (500, b""))
    judge = judge_of(server, retries=0, concurrency=2)
    with pytest.raises(RuntimeError, match="status 500"):
        ask(judge, [f"{i} things" for i in range(200)])
    assert len(server.requests) < 100


def test_api_key_is_sent_and_never_shown(serve, monkeypatch, tmp_path):
    monkeypatch.setenv("KEY_OF_A_TEST", KEY)
    server = serve(lambda request: (401, {"error": f"Incorrect key {KEY}"}))
    judge = judge_of(server, api_key_variable="KEY_OF_A_TEST", cache_dir=str(tmp_path))
    with pytest.raises(RuntimeError, match=r"answered 401: .*Incorrect key \*\*\*") as error:
        ask(judge, ["seven"])
    assert KEY not in str(error.value) and KEY not in repr(vars(judge)) and len(server.requests) == 1
    assert server.headers_seen[0]["Authorization"] == f"Bearer {KEY}"
    server.answer = right_if_seven
    assert ask(judge, ["seven"]) == [1.0]
    assert all(KEY not in path.read_text() for path in tmp_path.iterdir())
    ask(judge_of(server), ["seven"])
    assert "Authorization" not in server.headers_seen[-1]
    monkeypatch.delenv("KEY_OF_A_TEST")
    with pytest.raises(ValueError, match="'KEY_OF_A_TEST', with the judge's API key, isn't set"):
        judge_of(server, api_key_variable="KEY_OF_A_TEST")


@pytest.mark.parametrize("status", [200, 302, 400, 403, 429, 500, 503])
@pytest.mark.parametrize("start", ["no ", "x" * 190, '"'])
def test_api_keys_stay_out_of_errors_of_any_status(status, start, serve, monkeypatch):
    key = 'a"b/' + KEY
    monkeypatch.setenv("KEY_OF_A_TEST", key)
    server = serve(lambda request: (status, {"error": f"{start}{key}"}))
    judge = judge_of(server, api_key_variable="KEY_OF_A_TEST", retries=1, backoff=0.001)
    with pytest.raises(RuntimeError, match=str(status)) as error:
        ask(judge, ["seven"])
    shown = "".join(traceback.format_exception(error.value))
    assert KEY[:6] not in shown and "a\\" not in shown and len(str(error.value)) < 400


# Cache and bounds


def test_nothing_is_asked_twice(server, tmp_path):
    judge = judge_of(server, cache_dir=str(tmp_path))
    assert ask(judge, ["seven", "seven", "8"]) == [1.0, 1.0, 0.0]
    assert ask(judge, ["8", "seven"]) == [0.0, 1.0] and len(server.requests) == 2
    [path] = tmp_path.iterdir()
    assert "seven" not in path.read_text()  # only keys and replies
    path.write_text(path.read_text()[:-20])  # as a killed process leaves it
    (tmp_path / "replies-1.jsonl").write_text('[{"key": "k"}]\n{}')  # as one of another version
    again = judge_of(server, cache_dir=str(tmp_path))
    assert ask(again, ["seven", "8", "nine"]) == [1.0, 0.0, 0.0] and len(server.requests) == 4
    last = judge_of(server, cache_dir=str(tmp_path))
    assert ask(last, ["seven", "8", "nine"]) == [1.0, 0.0, 0.0] and len(server.requests) == 4
    ask(judge_of(server, cache_dir=str(tmp_path), options={"temperature": 1.0}), ["seven"])  # another request
    assert len(server.requests) == 5


def test_requests_are_bounded(server, tmp_path):
    settings = {"max_requests": 3, "cache_dir": str(tmp_path), "concurrency": 1}
    judge = judge_of(server, **settings)
    assert ask(judge, ["seven", "8"]) == [1.0, 0.0]
    resumed = judge_of(server, **settings)
    with pytest.raises(RuntimeError, match=r"^The judge 'judge_reward' reached its limit `max_requests=3`[^\n]*$"):
        ask(resumed, ["seven", "9", "10"])
    assert len(server.requests) == 3 and ask(resumed, ["seven", "8", "9"]) == [1.0, 0.0, 0.0]


def test_processes_share_the_bound(server, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    judge = judge_of(server, max_requests=5, concurrency=1)
    with pytest.raises(RuntimeError, match="after 2 requests of this process"):
        ask(judge, ["a", "b", "c"])


def test_requests_are_concurrent(serve):
    def slow(request):
        time.sleep(0.05)
        return right_if_seven(request)

    server = serve(slow)
    ask(judge_of(server, concurrency=4), [str(i) for i in range(8)])
    assert 2 <= server.most_busy <= 4


# In a run


def test_by_name_in_a_trainer(server, tmp_path):
    name = f"JudgeReward(url={server.url!r}, model='judge', name='deepeyes', options={{'temperature': 0.3}})"
    assert load_reward_funcs([name])[0].options == {"temperature": 0.3}
    rows = image_rows().add_column("solution", ["7"] * 8)
    options = {"max_steps": 1, "self_check": False}
    trainer = make_trainer(MultimodalGRPOTrainer, "qwen3_vl", rows, tmp_path, reward=[name], **options)
    trainer.train()
    logs = trainer.state.log_history[0]
    assert logs["rewards/deepeyes/mean"] == 0 and logs["deepeyes/requests"] == len(server.requests) > 0
    assert "What is in the image?" in server.requests[0]["messages"][0]["content"]
