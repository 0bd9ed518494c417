# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What rows may name, and what they may not: hostile and unlucky sources, each with a correct medium or an error."""

import base64
import contextlib
import http.server
import io
import os
import socket
import sys
import threading
import time
import wave
from pathlib import Path

import av
import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from trl_multimodal_rft.data import http as http_client
from trl_multimodal_rft.data.columns import MediaError, MediaRef, without_credentials
from trl_multimodal_rft.data.loading import load_audio, load_image, load_video
from trl_multimodal_rft.data.rules import MediaRules


RED = (200, 30, 40)


def ref(kind, source, **rules):
    return MediaRef(kind, source, {}, kind, 3, MediaRules(**rules))


def png(color=RED, size=(6, 4)):
    buffer = io.BytesIO()
    Image.new("RGB", size, color).save(buffer, "PNG")
    return buffer.getvalue()


def wav(seconds=1.0, rate=16000):
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((8000 * np.sin(np.arange(int(seconds * rate)) / 7)).astype("<i2").tobytes())
    return buffer.getvalue()


def mp4(frames=8):
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for i in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), 20 * i, np.uint8))))
        container.mux(stream.encode())
    return buffer.getvalue()


class Site(http.server.ThreadingHTTPServer):
    """Answers as each path says, and remembers what was asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked, self.answers = [], {}

    def url(self, path):
        return f"http://127.0.0.1:{self.server_port}{path}"


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.server.answers[self.path.split("?")[0]](self)

    def log_message(self, *args):
        pass


def answer(status=200, body=b"", **headers):
    def send(handler):
        handler.send_response(status)
        for name, value in {"Content_Length": str(len(body)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(body)

    return send


def in_turn(*answers):
    left = list(answers)
    return lambda handler: (left.pop(0) if len(left) > 1 else left[0])(handler)


@pytest.fixture
def site():
    server = Site()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


_HEARD = []  # what the interpreter was asked to open or start while `watched` is at work


def _listen(event, args):
    if _HEARD and event in ("open", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect"):
        _HEARD[-1].append((event, str(args[0]) if event == "open" else str(args)))


sys.addaudithook(_listen)


@contextlib.contextmanager
def watched():
    heard = []
    _HEARD.append(heard)
    try:
        yield heard
    finally:
        _HEARD.pop()


# Protocols


REFERENCE = base64.b64encode(
    b'{"version": 1, "templates": {"u": "{{ cycler.__init__.__globals__.os.system(\'touch PLACE\') }}"},'
    b' "gen": [], "refs": {"a": ["{{u}}"]}}'
).decode()


@pytest.mark.parametrize(
    "url",
    [
        "memory://secret.png",
        f"reference://a::data:application/json;base64,{REFERENCE}",
        "filecache::https://127.0.0.1:1/a.png",
        "zip://a.png::memory://b.zip",
        "ftp://127.0.0.1/a.png",
        "github://user:repo@/a.png",
        "python://os",
        "local::/etc/hostname",
        "hdfs://127.0.0.1/a.png",
        "webhdfs://127.0.0.1:1/a.png",
    ],
)
@pytest.mark.parametrize("kind", ["image", "audio", "video"])
def test_protocols_that_are_not_allowed_reach_nothing(kind, url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load = {"image": load_image, "audio": lambda each: load_audio(each, 16000), "video": load_video}[kind]
    with watched() as heard, pytest.raises(MediaError, match="row 3, .*protocol .*`allowed_media_protocols`"):
        load(ref(kind, url))
    assert not [event for event in heard if event[0] != "open"] and not os.listdir(tmp_path)


@pytest.mark.parametrize(
    ("url", "package"),
    [
        ("s3://bucket/a.png", "s3fs"),
        ("gs://bucket/a.png", "gcsfs"),
        ("az://bucket/a.png", "adlfs"),
        ("abfss://bucket/a.png", "abfss"),
        ("zip://a.png::s3://bucket/a.zip", "s3fs"),
    ],
)
def test_packages_that_protocols_need_are_named(url, package, monkeypatch):
    for name in ("s3fs", "gcsfs", "adlfs"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"^row 3, column 'image': no package is installed that reads .*{package}"):
        load_image(ref("image", url))


def test_archives_are_read_where_each_link_is_allowed(tmp_path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.writestr("i.png", png())
    url = f"zip://i.png::{tmp_path / 'all.zip'}"
    assert load_image(ref("image", url)).getpixel((0, 0)) == RED
    assert load_image(ref("image", f"zip://i.png::file://{tmp_path / 'all.zip'}")).getpixel((0, 0)) == RED
    for link in (url, f"zip://i.png::file://{tmp_path / 'all.zip'}"):
        with pytest.raises(MediaError, match="`allowed_media_folders`"):
            load_image(ref("image", link, allowed_media_folders=("/nowhere",)))


def test_local_files_can_be_kept_to_folders(tmp_path):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "i.png").write_bytes(png())
    (tmp_path / "other.png").write_bytes(png())
    (tmp_path / "media" / "link.png").symlink_to(tmp_path / "other.png")
    folders = [str(tmp_path / "media")]
    for source in (tmp_path / "media" / "i.png", (tmp_path / "media" / "i.png").as_uri()):
        assert load_image(ref("image", source, allowed_media_folders=folders)).getpixel((0, 0)) == RED
    for name in ("other.png", "media/link.png", "media/../other.png"):
        for source in (tmp_path / name, f"file://{tmp_path / name}", {"path": str(tmp_path / name)}):
            with pytest.raises(MediaError, match="row 3.*in none of `allowed_media_folders`"):
                load_image(ref("image", source, allowed_media_folders=folders))
    assert load_image(ref("image", tmp_path / "other.png")).getpixel((0, 0)) == RED


def test_servers_can_be_kept_to_domains(site):
    site.answers["/i.png"] = answer(body=png())
    assert load_image(ref("image", site.url("/i.png"), allowed_media_domains=("127.0.0.1",)))
    with pytest.raises(MediaError, match="'127.0.0.1' is none of `allowed_media_domains`"):
        load_image(ref("image", site.url("/i.png"), allowed_media_domains=("example.com",)))
    assert site.asked == ["/i.png"]
    site.answers["/away"] = answer(302, Location=site.url("/i.png").replace("127.0.0.1", "localhost"))
    with pytest.raises(MediaError, match="'localhost' is none of `allowed_media_domains`"):
        load_image(ref("image", site.url("/away"), allowed_media_domains=("127.0.0.1",)))


@pytest.mark.parametrize("location", ["file:///etc/hostname", "ftp://127.0.0.1/a", "memory://a", "s3://bucket/a"])
def test_redirects_stay_with_web_servers(site, location):
    site.answers["/away"] = answer(302, Location=location)
    with watched() as heard, pytest.raises(MediaError, match="it redirects to the protocol"):
        load_image(ref("image", site.url("/away")))
    assert not [event for event in heard if "hostname" in event[1]]
    site.answers["/round"] = answer(302, Location=site.url("/round"))
    with pytest.raises(MediaError, match="more than 5 redirects"):
        load_image(ref("image", site.url("/round")))


# What isn't media


@pytest.mark.parametrize("suffix", [".eps", ".png"])
def test_postscript_is_not_run(tmp_path, suffix, monkeypatch):
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(made) (w) file closefile showpage\n%%EOF\n"
    (tmp_path / f"i{suffix}").write_bytes(program)
    for source in (tmp_path / f"i{suffix}", program):
        with watched() as heard, pytest.raises(MediaError, match="row 3, column 'image': cannot read this image"):
            load_image(ref("image", source))
        assert not [event for event in heard if event[0] != "open"]


def lists(folder):
    """Texts that make FFmpeg open other files."""
    secret = folder / "secret.mp4"
    secret.write_bytes(mp4())
    return {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{secret}\n#EXT-X-ENDLIST\n".encode(),
        "ffconcat": f"ffconcat version 1.0\nfile '{secret}'\n".encode(),
        "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=No\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
        "dash": f'<?xml version="1.0"?><MPD><BaseURL>{secret}</BaseURL></MPD>'.encode(),
    }


@pytest.mark.parametrize("decoder", ["torchcodec", "pyav"])
@pytest.mark.parametrize("name", ["hls", "ffconcat", "sdp", "dash"])
def test_lists_of_other_files_are_not_followed(tmp_path, name, decoder, monkeypatch):
    if decoder == "pyav":
        monkeypatch.setattr("trl_multimodal_rft.data.loading.is_torchcodec_usable", lambda decode: False)
    data = lists(tmp_path)[name]
    paths = [tmp_path / f"a{suffix}" for suffix in (".m3u8", ".txt", ".mp4", ".wav")]
    for path in paths:
        path.write_bytes(data)
    for source in (data, *paths):
        for kind, load in (("video", load_video), ("audio", lambda each: load_audio(each, 16000))):
            with watched() as heard, pytest.raises(MediaError, match=f"row 3, column '{kind}'"):
                load(ref(kind, source))
            assert not [event for event in heard if "secret" in event[1]]


@pytest.mark.parametrize("decoder", ["torchcodec", "pyav"])
def test_names_with_patterns_are_one_file(tmp_path, decoder, monkeypatch):
    if decoder == "pyav":
        monkeypatch.setattr("trl_multimodal_rft.data.loading.is_torchcodec_usable", lambda decode: False)
    (tmp_path / "f1.png").write_bytes(png())
    (tmp_path / "f%d.png").write_bytes(mp4(5))
    frames, _ = load_video(ref("video", tmp_path / "f%d.png"))
    assert frames.shape == (5, 48, 64, 3)


# Limits


def test_files_have_a_largest_size(site, tmp_path):
    data = png(size=(300, 200))
    (tmp_path / "i.png").write_bytes(data)
    site.answers["/i.png"] = answer(body=data)
    site.answers["/unknown"] = lambda handler: (
        handler.send_response(200),
        handler.end_headers(),
        handler.wfile.write(data),
    )
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    for source in (data, uri, tmp_path / "i.png", site.url("/i.png"), site.url("/unknown")):
        assert load_image(ref("image", source)).size == (300, 200)
        with pytest.raises(MediaError, match="more than 100 bytes; remove the row or raise `max_media_bytes`"):
            load_image(ref("image", source, max_media_bytes=100))


def test_images_and_frames_have_most_pixels(monkeypatch):
    with pytest.raises(MediaError, match="30 x 20 pixels where 500 are allowed.*`max_image_pixels`"):
        load_image(ref("image", png(size=(30, 20)), max_image_pixels=500))
    with pytest.raises(MediaError, match="64 x 48 pixels where 500 are allowed.*`max_image_pixels`"):
        load_video(ref("video", mp4(), max_image_pixels=500))
    monkeypatch.setattr("trl_multimodal_rft.data.loading.is_torchcodec_usable", lambda decode: False)
    with pytest.raises(MediaError, match="64 x 48 pixels where 500 are allowed.*`max_image_pixels`"):
        load_video(ref("video", mp4(), max_image_pixels=500))


def test_sounds_and_videos_have_a_longest_time():
    with pytest.raises(MediaError, match="2 s where 1.5 s are allowed.*`max_audio_seconds`"):
        load_audio(ref("audio", wav(2.0), max_audio_seconds=1.5), 16000)
    with pytest.raises(MediaError, match="s where 0.5 s are allowed.*`max_video_seconds`"):
        load_video(ref("video", mp4(), max_video_seconds=0.5))


def test_a_sound_that_was_cut_off_is_named():
    data = wav(2.0)
    with pytest.raises(MediaError, match="the file is cut off: .* of 64000 bytes"):
        load_audio(ref("audio", data[: len(data) // 2]), 16000)
    streamed = data[:40] + b"\xff\xff\xff\xff" + data[44:]  # as written while it is recorded
    assert len(load_audio(ref("audio", streamed), 16000)) == 32000


# Downloads


def test_busy_servers_and_broken_downloads_are_asked_again(site, monkeypatch):
    monkeypatch.setattr(http_client.time, "sleep", lambda seconds: None)
    whole = answer(body=png())
    half = answer(body=png()[:40], Content_Length=str(len(png())))
    for path, first in (("/busy", answer(503)), ("/limited", answer(429, Retry_After="1")), ("/cut", half)):
        site.answers[path] = in_turn(first, first, whole)
        assert load_image(ref("image", site.url(path))).getpixel((0, 0)) == RED
        assert site.asked.count(path) == 3
    site.answers["/down"] = answer(503)
    with pytest.raises(MediaError, match="cannot download .*status 503"):
        load_image(ref("image", site.url("/down")))
    assert site.asked.count("/down") == 4
    site.answers["/gone"] = answer(404)
    with pytest.raises(MediaError, match="gives status 404"):
        load_image(ref("image", site.url("/gone")))
    assert site.asked.count("/gone") == 1


def test_a_slow_drip_ends_with_the_time_that_is_allowed(site):
    def drip(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(200):
            handler.wfile.write(b"a")
            time.sleep(0.02)

    site.answers["/drip"], site.answers["/silent"] = drip, lambda handler: time.sleep(3)
    for path in ("/drip", "/silent"):
        started = time.monotonic()
        with pytest.raises(MediaError, match="`media_timeout`"):
            load_image(ref("image", site.url(path), media_timeout=0.5))
        assert time.monotonic() - started < 2.5


@pytest.mark.parametrize("start", [b"A: ", b"Transfer-Encoding: chunked\r\n\r\n", b"Content-Length: 9999\r\n\r\n"])
def test_a_drip_ends_wherever_it_is(start):
    """In a header, in the length of a chunk, in the body: each byte is in time."""

    def drip():
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\n" + start)
            while not ended.wait(0.05):
                connection.sendall(b"0")

    ended = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        started = time.monotonic()
        with pytest.raises(MediaError, match="`media_timeout`"):
            load_image(ref("image", f"http://127.0.0.1:{server.getsockname()[1]}/i.png", media_timeout=0.5))
        assert time.monotonic() - started < 5
        ended.set()
        thread.join()


def test_a_store_that_does_not_answer_is_not_waited_for():
    class Silent(MemoryFileSystem):
        protocol = "silent"

        def _open(self, *args, **kwargs):
            ended.wait(30)

    ended = threading.Event()
    fsspec.register_implementation("silent", Silent, clobber=True)
    started = time.monotonic()
    with pytest.raises(MediaError, match="cannot read 'silent://i.png' .*`media_timeout`"):
        load_image(ref("image", "silent://i.png", allowed_media_protocols=["silent"], media_timeout=0.5))
    assert time.monotonic() - started < 10
    ended.set()


def test_errors_keep_credentials_to_themselves(site):
    site.answers["/i.png"] = answer(403)
    url = site.url("/i.png?X-Amz-Signature=secret").replace("//", "//user:secret@")
    with pytest.raises(MediaError, match="status 403") as error:
        load_image(ref("image", url))
    assert "secret" not in str(error.value) and "i.png?***" in str(error.value)
    with pytest.raises(MediaError) as error:
        load_image(ref("image", "http://127.0.0.1:9/i.png?token=secret", media_timeout=0.2))
    assert "secret" not in str(error.value)
    assert without_credentials("is 1 = 1? yes") == "is 1 = 1? yes"


def test_allowed_places_are_absolute_or_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("i.png").write_bytes(png())
    assert load_image(ref("image", "i.png", allowed_media_folders=(".",))).getpixel((0, 0)) == RED
