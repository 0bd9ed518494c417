# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""vLLM's server without an engine: it says how it was started, and samples tokens by the prompt and the seed."""

import hashlib
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import vllm
from safetensors import safe_open
from vllm.engine.arg_utils import EngineArgs

from trl_multimodal_rft.generation.vllm_server import _OF_MEDIA, _OF_MODEL


LENGTH = 6  # tokens of a completion


def settings(model: Path, seed: int) -> dict[str, Any]:
    """Returns the part of `/server_info` that clients read, as a server started with these arguments says it."""
    args = EngineArgs(
        model=str(model), dtype="float32", max_model_len=512, logprobs_mode="processed_logprobs", seed=seed
    )
    config = args.create_engine_config().model_config
    names = (*_OF_MODEL, "model", "revision", "trust_remote_code", "logprobs_mode", "seed")
    found = {name: getattr(config, name) for name in names}
    media = {name: getattr(config.multimodal_config, name) for name in _OF_MEDIA if name in dir(config)}
    return {**found, "dtype": str(config.dtype), "multimodal_config": media}


class FakeServer(ThreadingHTTPServer):
    """
    A server on a free port.

    `posts` are the paths and bodies of all requests but those of completions, whose seeds are in `seeds`.
    """

    daemon_threads = True

    def __init__(self, info: dict[str, Any], world_size: int = 1):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.model_config, self.world_size = info, world_size
        self.posts: list[tuple[str, Any]] = []
        self.seeds: list[int | None] = []
        self.n_answers: float = float("inf")  # after so many completions, connections are closed without an answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, path: str, body: Any) -> Any:
        if path == "/inference/v1/generate":
            return self.complete(body)
        self.posts.append((path, body))
        if path == "/collective_rpc":  # as tests/shims/vllm_cpu.py sends weights
            with safe_open(Path(body["kwargs"]["weights_path"], "model.safetensors"), "pt") as weights:
                self.posts[-1] = (path, sum(weights.get_tensor(name).double().sum().item() for name in weights.keys()))
        return {"success": True}

    def complete(self, body: Any) -> Any:
        params = body["sampling_params"]
        self.seeds.append(params.get("seed"))
        media = body["features"] and body["features"]["mm_hashes"]
        prompt = json.dumps([body["token_ids"], media], sort_keys=True)
        choices = []
        first = 0 if params.get("temperature") == 0 else params.get("seed")
        for i in range(params["n"]):
            seed = random.random() if first is None else first + i
            drawn = hashlib.sha256(f"{prompt} {seed}".encode()).digest()[: min(LENGTH, params["max_tokens"])]
            content = [{"logprob": -1.0}] * len(drawn)
            choices.append({"token_ids": [50 + each % 100 for each in drawn], "logprobs": {"content": content}})
        return {"choices": choices}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_GET(self):
        server = self.server
        answers = {
            "/health": {},
            "/version": {"version": vllm.__version__},
            "/v1/models": {"data": [{"id": server.model_config["model"]}]},
            "/server_info": {"vllm_config": {"model_config": server.model_config, "weight_transfer_config": {}}},
            "/get_world_size": {"world_size": server.world_size},
        }
        self._send(200, answers[self.path.split("?")[0]])

    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(text) if text else None
        if self.path == "/inference/v1/generate":
            if not body:
                return self._send(422, {"detail": "Field required"})
            self.server.n_answers -= 1
            if self.server.n_answers < 0:
                self.close_connection = True
                return None
        return self._send(200, self.server.answer(self.path, body))

    def _send(self, status: int, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@contextmanager
def fake_servers(model: Path, seeds: list[int], **options) -> Iterator[list[FakeServer]]:
    """Yields a running server for each seed."""
    servers = [FakeServer(settings(model, seed), **options) for seed in seeds]
    for each in servers:
        Thread(target=each.serve_forever, daemon=True).start()
    try:
        yield servers
    finally:
        for each in servers:
            each.shutdown()
            each.server_close()
