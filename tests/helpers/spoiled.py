# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Wrong answers of a vLLM server, and a proxy that gives such answers."""

import json
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import requests


VOCABULARY = 10**6
PLACEHOLDER = 7
GENERATE = "/inference/v1/generate"


class Spoiled(NamedTuple):
    """Change of an answer, and the outcome for a run. If all answers are changed, the run's error contains `says`."""

    # Returns the new answer, or its status and body, or "cut" (20 of 120 bytes), "drip" (endless bytes), "never"
    change: Callable[[dict], Any]
    outcome: str  # "again": the request is repeated; "ends": the run ends; "taken": the answer counts
    says: str = ""


# Changes of an answer, from a change of each choice, of its ids, of its second id, or of its log-probabilities


def each(change: Callable[[dict], Any]) -> Callable[[dict], dict]:
    return lambda answer: {"choices": [{**choice, **change(choice)} for choice in answer["choices"]]}


def tokens(change: Callable[[list], list]) -> Callable[[dict], dict]:
    return each(lambda choice: {"token_ids": change(choice["token_ids"])})


def second(token: Any) -> Callable[[dict], dict]:
    return tokens(lambda ids: [ids[0], token, *ids[2:]])


def logps(change: Callable[[list], list]) -> Callable[[dict], dict]:
    return each(lambda choice: {"logprobs": {"content": change(choice["logprobs"]["content"])}})


def second_logp(value: Any) -> Callable[[dict], dict]:
    return logps(lambda content: [content[0], {"logprob": value}, *content[2:]])


def choices(change: Callable[[list], list]) -> Callable[[dict], dict]:
    return lambda answer: {"choices": change(answer["choices"])}


def twenty_times(choice: dict) -> dict:
    return {"token_ids": choice["token_ids"] * 20, "logprobs": {"content": choice["logprobs"]["content"] * 20}}


def nothing(choice: dict) -> dict:
    return {"token_ids": [], "logprobs": {"content": []}}


def status(code: int, body: bytes = b"x", outcome: str = "again") -> Spoiled:
    return Spoiled(lambda answer: (code, body), outcome, str(code))


NO_TOKENS = "completion 0 has no tokens, where 1 to 6 are possible"
KINDS = {
    "html": Spoiled(lambda answer: (200, b"<html>busy</html>"), "again", "it holds no completions"),
    "empty body": Spoiled(lambda answer: (200, b""), "again", "it holds no completions"),
    "{}": Spoiled(lambda answer: {}, "again", "it holds no completions"),
    "a list": Spoiled(lambda answer: [], "again", "it holds no completions"),
    "an error": Spoiled(lambda answer: {"error": {"message": "engine dead"}}, "again", "it holds no completions"),
    "null choices": Spoiled(lambda answer: {"choices": None}, "again", "it holds no completions"),
    "no token_ids": Spoiled(
        choices(lambda items: [{k: v for k, v in choice.items() if k != "token_ids"} for choice in items]),
        "again",
        NO_TOKENS,
    ),
    "null token_ids": Spoiled(tokens(lambda ids: None), "again", NO_TOKENS),
    "null logprobs": Spoiled(each(lambda choice: {"logprobs": None}), "again", "0 has no log-probabilities"),
    "too few logprobs": Spoiled(
        logps(lambda content: content[:-2]), "again", "has 4 values of log-probability instead of 6"
    ),
    "too many logprobs": Spoiled(
        logps(lambda content: content * 2), "again", "has 12 values of log-probability instead of 6"
    ),
    "NaN logprobs": Spoiled(logps(lambda content: [{"logprob": math.nan}] * len(content)), "taken"),
    "one NaN": Spoiled(second_logp(math.nan), "taken"),
    "null logprob": Spoiled(second_logp(None), "taken"),
    "-inf": Spoiled(second_logp(-math.inf), "taken"),
    "-9999": Spoiled(second_logp(-9999.0), "taken"),
    "positive logprob": Spoiled(second_logp(5.0), "again", "has the log-probability 5.0"),
    "string logprob": Spoiled(second_logp("-1.0"), "again", "has the log-probability '-1.0'"),
    "too many tokens": Spoiled(each(twenty_times), "again", "has 120 tokens, where 1 to 6 are possible"),
    "no tokens": Spoiled(each(nothing), "again", "has 0 tokens, where 1 to 6 are possible"),
    "one of no tokens": Spoiled(
        choices(lambda items: [{**items[0], **nothing(items[0])}, *items[1:]]), "again", "completion 0 has 0 tokens"
    ),
    "unknown token": Spoiled(second(VOCABULARY), "again", f"has the token {VOCABULARY}, which isn't a "),
    "negative token": Spoiled(second(-1), "again", "has the token -1, which isn't a whole n"),
    "fraction of a token": Spoiled(second(60.5), "again", "has the token 60.5, which isn't a whole"),
    "placeholder": Spoiled(second(PLACEHOLDER), "again", "7, which stands for media that don't exist"),
    "a choice less": Spoiled(choices(lambda items: items[:-1]), "again", "holds the completions [0, 1, 2], not 4"),
    "a choice more": Spoiled(choices(lambda items: items + items[:1]), "again", "completions [0, 1, 2, 3, 0], not 4"),
    "another order": Spoiled(choices(lambda items: items[::-1]), "taken"),
    "another's logprob": Spoiled(
        logps(lambda content: [content[0], {**content[1], "token": "token_id:1"}, *content[2:]]),
        "again",
        "has the log-probability of token_id:1 for the token",
    ),
    "an error beside choices": Spoiled(
        lambda answer: {**answer, "error": {"message": "engine dead"}}, "again", "it holds an error beside"
    ),
    "aborted": Spoiled(each(lambda choice: {"finish_reason": "abort"}), "again", "completion 0 ended by 'abort'"),
    **{str(code): status(code) for code in (500, 501, 503, 507, 530, 599)},
    "429": status(429),
    "404": status(404, outcome="ends"),
    "400": status(400, b'{"error": "too long"}', outcome="ends"),
    "302": status(302, b"", outcome="ends"),
    "204": status(204, b"", outcome="ends"),
    "cut": Spoiled(lambda answer: "cut", "again", "(20 of 120 bytes)"),
    "too large": Spoiled(lambda answer: (200, b" " * 2**21 + json.dumps(answer).encode()), "again", "more than 1,0"),
    "never": Spoiled(lambda answer: "never", "ends", "(no complete answer in 0.3 s)"),
    "bytes by bytes": Spoiled(lambda answer: "drip", "ends", "(no complete answer in 0.3 s)"),
}


class Proxy(ThreadingHTTPServer):
    """
    Proxy that passes requests on to a server. `change` spoils the next `n_spoiled` answers that hold completions.
    Paths in `hang` get no answer, paths in `fail` an error. `drops` counts, by path, the next connections to close.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, target: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.target = target
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.change: Callable[[dict], Any] = lambda answer: answer
        self.n_spoiled = 0
        self.asked = Counter()
        self.body = b""
        self.hang: set[str] = set()
        self.fail: set[str] = set()
        self.drops: Counter[str] = Counter()

    def handle_error(self, request, client_address):
        """Ignores clients that are gone."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Proxy

    def do_GET(self):
        self.pass_on("GET")

    def do_POST(self):
        self.pass_on("POST")

    def pass_on(self, method: str) -> None:
        proxy = self.server
        path = self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path in proxy.hang:
            return self.end(proxy.over.wait())
        if proxy.drops[path] > 0:
            proxy.drops[path] -= 1
            return self.end()
        if path in proxy.fail:
            return self.answer(500, b"broken")
        with proxy.lock:
            is_spoiled = path == GENERATE and len(body) > 4 and proxy.n_spoiled > 0
            proxy.n_spoiled -= is_spoiled
            proxy.asked[path] += 1
            proxy.body = body if path == GENERATE else proxy.body
        response = requests.request(method, proxy.target + self.path, data=body)
        if not is_spoiled:
            return self.answer(response.status_code, response.content)
        spoiled = proxy.change(json.loads(response.content))
        if spoiled == "never":
            return self.end(proxy.over.wait())
        if spoiled == "cut":
            self.answer(200, b" " * 20, 120)
            return self.end()
        if spoiled == "drip":
            self.answer(200, b"", 10**6)
            while not proxy.over.wait(0.05):
                self.wfile.write(b" ")
        if not isinstance(spoiled, tuple):
            spoiled = (200, json.dumps(spoiled).encode())
        self.answer(*spoiled)

    def answer(self, code: int, content: bytes, length: int | None = None) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)

    def end(self, *_: Any) -> None:
        self.close_connection = True

    def log_message(self, *args):
        pass


@contextmanager
def proxy_of(target: str) -> Iterator[Proxy]:
    """Yields a proxy of a server, while it runs."""
    with Proxy(target) as proxy:
        threading.Thread(target=proxy.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield proxy
        finally:
            proxy.over.set()
            proxy.shutdown()
