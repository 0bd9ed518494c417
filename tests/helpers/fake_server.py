# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
vLLM's server without an engine, in a process of its own: `fake_server.py CONFIG`.

A completion is a function of its prompt, its seed and the version of the weights, and takes a random time. Requests
fail on command, see `FakeServer.fault`.
"""

import contextlib
import hashlib
import heapq
import itertools
import json
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from urllib.request import Request, urlopen


LENGTH = 6  # tokens of a completion
# bounds of latencies with the mean 1
SHORTEST = 0.2907
LONGEST = 8.0


def latency(number: int) -> float:
    """
    Returns the time of a completion relative to the mean time, drawn from a bounded Pareto distribution of shape 1.
    `number` counts completions in the order of arrival, and seeds the draw.
    """
    return 1 / random.Random(number).uniform(1 / LONGEST, 1 / SHORTEST)


def digest(*values: Any) -> bytes:
    """Returns 32 pseudo-random bytes that depend on the values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).digest()


@dataclass
class Group:
    """The completions of a request."""

    arrival: float  # time of the engine's clock
    n_left: int  # completions that run or wait
    over: threading.Event = field(default_factory=threading.Event)


class Engine:
    """
    Engine that runs up to `slots` completions at once, in order of arrival. Its clock stops while it pauses. With one
    slot, two completions of 3 s that arrive at 0 end at 3 and at 6.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.paused = False
        self.waiting: deque[tuple[Group, float]] = deque()  # groups and seconds
        self.running: list[tuple[float, int, Group]] = []  # heap by the end, with numbers that decide ties
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._time = 0.0
        self._last = time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()

    def _now(self) -> float:
        now = time.monotonic()
        self._time += 0.0 if self.paused else now - self._last
        self._last = now
        return self._time

    def add(self, seconds: list[float]) -> Group:
        """Adds completions that take these seconds."""
        with self._changed:
            group = Group(self._now(), len(seconds))
            self.waiting.extend((group, duration) for duration in seconds)
            self._fill(group.arrival)
            self._changed.notify()
        return group

    def drop(self, group: Group) -> None:
        """Removes the completions of a client that is gone."""
        with self._changed:
            now = self._now()
            self.waiting = deque(entry for entry in self.waiting if entry[0] is not group)
            self.running = [entry for entry in self.running if entry[2] is not group]
            heapq.heapify(self.running)
            self._fill(now)
            self._changed.notify()

    def pause(self, paused: bool) -> None:
        with self._changed:
            self._now()
            self.paused = paused
            self._changed.notify()

    def _fill(self, now: float) -> None:
        while self.waiting and len(self.running) < self.slots:
            group, seconds = self.waiting.popleft()
            heapq.heappush(self.running, (max(now, group.arrival) + seconds, next(self._numbers), group))

    def _run(self) -> None:
        with self._changed:
            while True:
                while self.running and self.running[0][0] <= self._now():
                    end, _, group = heapq.heappop(self.running)
                    group.n_left -= 1
                    if group.n_left == 0:
                        group.over.set()
                    self._fill(end)  # waiting completions start at `end`, even if this thread wakes later
                idle = self.paused or not self.running
                self._changed.wait(None if idle else max(0.0, self.running[0][0] - self._time))


class Server(ThreadingHTTPServer):
    """A server. Its `state` goes on to the next server if it dies."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, state: "State"):
        super().__init__(("127.0.0.1", state.config["port"]), Handler)
        self.state = state
        self.engine = Engine(state.config["slots"])
        self.connections: set[socket.socket] = set()
        self.adapters: list[str] = []
        self.instance = str(time.time_ns())  # time of its start, as in vLLM

    def handle_error(self, request, client_address):
        """Ignores clients that are gone."""

    def post(self, path: str, query: dict[str, list[str]], body: Any) -> Any:
        """Returns the answer to a request other than for completions."""
        if path == "/fake/fault":
            self.state.faults.append(body)
            return {}
        state = self.state
        engine = self.engine
        record = body
        if path in ("/pause", "/resume"):
            engine.pause(path == "/pause")
            record = {name: value for name, [value] in query.items()}
        elif path == "/collective_rpc":  # as tests/shims/vllm_cpu.py sends weights
            file = Path(body["kwargs"]["weights_path"], "model.safetensors")
            record = hashlib.sha256(file.read_bytes()).hexdigest()
            state.count("torn", bool(engine.running and not engine.paused))
        elif path == "/v1/load_lora_adapter":
            assert Path(body["lora_path"], "adapter_model.safetensors").is_file()
            self.adapters.append(body["lora_name"])
        elif path == "/v1/unload_lora_adapter":
            self.adapters = [adapter for adapter in self.adapters if adapter != body["lora_name"]]
        state.posts.append((path, record))
        # Running requests keep the cache, unless the engine is paused
        is_kept = path == "/reset_prefix_cache" and engine.running and not engine.paused
        return {"success": not is_kept}

    def complete(self, handler: "Handler", body: Any) -> Any:
        """Returns completions once their time is over, or `None` as soon as the client is gone."""
        state = self.state
        params = body["sampling_params"]
        prompt = [body["token_ids"], body["features"] and body["features"]["mm_hashes"]]
        first_seed = 0 if params.get("temperature") == 0 else params.get("seed")
        first_seed = random.getrandbits(32) if first_seed is None else first_seed
        first_number = state.asked(digest(prompt, first_seed, params["n"]), params["n"])
        times = [state.config["unit"] * latency(first_number + i) + handler.delay for i in range(params["n"])]
        group = self.engine.add(times)
        while not group.over.wait(0.1):
            if handler.is_gone():
                self.engine.drop(group)
                return None
        choices = []
        vocabulary = state.config["words"]
        for i in range(params["n"]):
            drawn_bytes = digest(prompt, first_seed + i, body.get("cache_salt"))[: min(LENGTH, params["max_tokens"])]
            ids = [vocabulary[item % len(vocabulary)] for item in drawn_bytes]
            logprobs = {"content": [{"logprob": -1.0}] * len(ids)}
            choices.append({"index": i, "token_ids": ids, "logprobs": logprobs, "finish_reason": "length"})
        state.count("answers", 1)
        state.count("tokens", sum(len(item["token_ids"]) for item in choices))
        return {"choices": choices}

    def die(self, seconds: float) -> None:
        """Ends the server, which comes back after some seconds without weights."""
        self.state.away = seconds
        threading.Thread(target=self.shutdown).start()


class State:
    """Config and records of servers that run one after another."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        self.posts: list[tuple[str, Any]] = []
        self.faults: list[dict[str, Any]] = []
        self.counters: Counter[str] = Counter()
        self.away = 0.0  # seconds from a server's end to the start of the next
        self._seen: set[bytes] = set()
        self._lock = threading.Lock()

    def count(self, name: str, n: int) -> int:
        """Adds to a counter and returns its previous value."""
        with self._lock:
            self.counters[name] += n
            return self.counters[name] - n

    def asked(self, request: bytes, n: int) -> int:
        """Records a request for `n` completions. Returns the number of the first one, from 0 in order of arrival."""
        self.count("asked again", request in self._seen)
        self._seen.add(request)
        return self.count("completions", n)

    def fault(self) -> dict[str, Any]:
        """Returns the fault of a request, or an empty dictionary. Faults behind a fault that is due don't count it."""
        with self._lock:
            for fault in self.faults:
                fault["after"] -= 1
                if fault["after"] < 0 < fault["count"]:
                    fault["count"] -= 1
                    return fault
            return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # otherwise the body of an answer waits for 40 ms
    server: Server
    delay = 0.0  # additional seconds for the completions of a request

    def setup(self):
        super().setup()
        self.server.connections.add(self.connection)

    def finish(self):
        self.server.connections.discard(self.connection)
        super().finish()

    def do_GET(self):
        state = self.server.state
        server = self.server
        config = state.config
        model = state.config["model_config"]["model"]
        answers = {
            "/health": {},
            "/version": {"version": config["version"]},
            "/v1/models": {"data": [{"id": name} for name in (model, *server.adapters)]},
            "/server_info": {
                "vllm_config": {
                    "model_config": config["model_config"],
                    "weight_transfer_config": {},
                    "instance_id": server.instance,
                }
            },
            "/get_world_size": {"world_size": config["world_size"]},
            "/is_paused": {"is_paused": server.engine.paused},
            "/fake/counters": state.counters,
            "/fake/posts": state.posts,
        }
        self._send(200, answers[urlsplit(self.path).path])

    def do_POST(self):
        url = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(text) if text else None
        server = self.server
        if url.path == "/v1/load_lora_adapter" and body["lora_name"] in server.adapters:
            return self._send(400, {"error": {"message": "The lora adapter has already been loaded."}})
        if url.path != "/inference/v1/generate":
            return self._send(200, server.post(url.path, parse_qs(url.query), body))
        if not body:
            return self._send(422, {"detail": "Field required"})
        if body["model"] not in (None, server.state.config["model_config"]["model"], *server.adapters):
            return self._send(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        server.state.count("requests", 1)
        fault = server.state.fault()
        kind = fault.get("kind")
        if kind == "error":
            return self._send(500, {"detail": "Internal Server Error"})
        if kind == "die":
            server.die(fault["seconds"])
        if kind in ("drop", "die"):
            return self.hang_up()
        self.delay = fault["seconds"] if kind == "slow" else 0.0
        answer = server.complete(self, body)
        return self.hang_up() if answer is None else self._send(200, answer)

    def is_gone(self) -> bool:
        try:
            readable = select.select([self.connection], [], [], 0)[0]
            return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def hang_up(self) -> None:
        """Closes the connection without an answer."""
        self.close_connection = True

    def _send(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def serve(config: dict[str, Any]) -> None:
    """Serves until the process that started this one ends, or closes the pipe."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    state = State(config)
    while True:
        with Server(state) as server:
            server.serve_forever(0.01)
        for connection in [*server.connections]:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        time.sleep(state.away)


# Clients


class FakeServer:
    """
    A running fake server.

    `unit` is the mean time of a completion in seconds, `slots` the number of completions that run at once, and `words`
    are the token ids to sample from. `cache_salt` of a request names the version of the weights.
    """

    def __init__(self, model_config: dict[str, Any], **options):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        config = {"port": port, "model_config": model_config, "version": "", "world_size": 1, "unit": 0.0}
        config |= {"slots": 256, "words": [*range(50, 150)], **options}
        self.process = subprocess.Popen([sys.executable, __file__, json.dumps(config)], stdin=subprocess.PIPE)
        self._ask("/health")

    def _ask(self, path: str, body: Any = None) -> Any:
        """Returns the answer to a request. Repeats the request for up to 60 s while no server answers."""
        request = Request(self.url + path, None if body is None else json.dumps(body).encode())
        deadline = time.monotonic() + 60
        while True:
            try:
                with urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except (OSError, HTTPException):
                assert self.process.poll() is None and time.monotonic() < deadline
                time.sleep(0.02)

    def fault(self, kind: str, after: int = 0, count: int = 1, seconds: float = 0.0) -> None:
        """
        Makes `count` requests for completions fail after the next `after` requests: by `"error"` (status 500),
        `"drop"` (no answer), `"slow"` (an answer later by `seconds`) or `"die"` (no answer to any running request; the
        server is gone for `seconds`).
        """
        self._ask("/fake/fault", {"kind": kind, "after": after, "count": count, "seconds": seconds})

    @property
    def counters(self) -> dict[str, int]:
        """
        Numbers of `requests` for completions, of requests that repeat an earlier one (`asked again`), of
        `completions`, of `answers`, of their `tokens`, and of updates of weights while completions ran (`torn`).
        """
        return Counter(self._ask("/fake/counters"))

    @property
    def posts(self) -> list[tuple[str, Any]]:
        """Paths and bodies of all other requests; for weights, their digests in place of bodies."""
        return [(path, body) for path, body in self._ask("/fake/posts")]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


def model_config(model: Path, seed: int) -> dict[str, Any]:
    """Returns the part of `/server_info` that clients read, for a server that starts with these arguments."""
    from vllm.engine.arg_utils import EngineArgs

    from trl_multimodal_rft.engines.vllm_client import _MEDIA_KEYS, _MODEL_KEYS

    args = EngineArgs(
        model=str(model), dtype="float32", max_model_len=512, logprobs_mode="processed_logprobs", seed=seed
    )
    config = args.create_engine_config().model_config
    names = (*_MODEL_KEYS, "model", "revision", "trust_remote_code", "logprobs_mode", "seed")
    settings = {name: getattr(config, name) for name in names}
    media = {name: getattr(config.multimodal_config, name) for name in _MEDIA_KEYS if name in dir(config)}
    return {**settings, "dtype": str(config.dtype), "multimodal_config": media}


@contextmanager
def fake_servers(model: Path, seeds: list[int], **options) -> Iterator[list[FakeServer]]:
    """Yields a running server for each seed."""
    import vllm

    servers: list[FakeServer] = []
    try:
        for seed in seeds:
            servers.append(FakeServer(model_config(model, seed), version=vllm.__version__, **options))
        yield servers
    finally:
        for server in servers:
            server.end()


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
