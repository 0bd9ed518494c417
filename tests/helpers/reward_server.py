# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Local reward servers, and a server that answers too slowly."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from .chats import image
from .files import image_file


# Starts of an answer that then drips: within a header, within the length of a chunk, or within the body
DRIPS = [b"X-Slow: ", b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: 9999\r\n\r\n"]


class Server(ThreadingHTTPServer):
    """A reward server that records its requests."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Callable):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.requests = []
        self.images_sent = 0
        self.headers_seen: list = []
        self.busy = self.most_busy = 0
        self.location = "/elsewhere"  # target of answers with a redirect status
        self.more_headers: dict[str, str] = {}
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/reward"

    def handle_error(self, request, client_address):
        """Ignores clients that gave up."""


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(request)
            server.headers_seen.append(self.headers)
            server.busy += 1
            server.most_busy = max(server.most_busy, server.busy)
        answer = server.answer(request)
        with server.lock:
            server.busy -= 1
        if not isinstance(answer, tuple):
            answer = (200, answer)
        status, body = answer
        self.reply(status, body if isinstance(body, bytes) else json.dumps(body).encode())

    def do_GET(self):
        self.server.images_sent += 1
        self.reply(200, image_file(image(56, 28)["image"]))

    def reply(self, status: int, body: bytes):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if 300 <= status < 400:
            self.send_header("Location", self.server.location)
        for name, value in self.server.more_headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def serve(monkeypatch):
    """Yields a function that starts a server with an answer, by default the length of each completion."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    servers = []

    def start(
        answer=lambda request: {"rewards": [len(completion) for completion in request["completions"]]},
    ) -> Server:
        servers.append(Server(answer))
        threading.Thread(target=servers[-1].serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@contextlib.contextmanager
def dripping(start: bytes, drop: bytes = b"0"):
    """Yields the address of a server that begins its answer with `start`, and then sends `drop` for ever."""
    over = threading.Event()

    def drip():
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1000)
            # Endless responses `100 Continue` have no status 200 before them
            connection.sendall((b"" if drop in start else b"HTTP/1.1 200 OK\r\n") + start)
            while not over.wait(0.02):
                connection.sendall(drop)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/reward"
        over.set()
        thread.join(5)
