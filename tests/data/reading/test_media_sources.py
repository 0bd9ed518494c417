# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Sources that rows may and may not name: each hostile or broken source gives a correct medium or an error."""

import base64
import contextlib
import http.server
import io
import os
import sys
import threading
import time
import zipfile
from itertools import product
from urllib.parse import urlsplit

import datasets
import fsspec
import numpy as np
import pytest
import requests
from fsspec.implementations.memory import MemoryFileSystem
from helpers.files import LISTS, image_file, load, sound_file, video_file
from helpers.reward_server import DRIPS, dripping
from PIL import Image

from trl_multimodal_rft.data.reading import http as http_client
from trl_multimodal_rft.data.reading.decoding import decoding, load_audio, load_image, load_video
from trl_multimodal_rft.data.reading.refs import MediaError, MediaRef, without_credentials
from trl_multimodal_rft.data.reading.rules import MediaRules
from trl_multimodal_rft.data.reading.sizes import media_size
from trl_multimodal_rft.data.rows.features import restore_rows, undecoded
from trl_multimodal_rft.data.rows.unread import check_columns


RED = (200, 30, 40)


def ref(kind, source, **rules):
    return MediaRef(kind, source, {}, kind, 3, MediaRules(**rules))


def png(color=RED, size=(6, 4)):
    return image_file(Image.new("RGB", size, color))


def wav(seconds=1.0, rate=16000):
    return sound_file(0.25 * np.sin(np.arange(int(seconds * rate)) / 7), rate)


def mp4(frames=8):
    return video_file([np.full((48, 64, 3), 20 * i, np.uint8) for i in range(frames)])


class Site(http.server.ThreadingHTTPServer):
    """Answers according to the path, and records the requests."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Answers)
        self.asked = []
        self.answers = {}

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
            if value is not None:
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
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


_HEARD = []  # paths that the interpreter opened or started while `watched` is active
_ON_OPENING: dict[str, list] = {}  # what is done when the interpreter first opens a path


def _listen(event, args):
    if event == "open" and _ON_OPENING.get(str(args[0])):
        _ON_OPENING[str(args[0])].pop()()
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
    with pytest.raises(ImportError, match=f"^row 3, column 'image': no installed package reads .*{package}"):
        load_image(ref("image", url))


def test_archives_are_read_where_each_link_is_allowed(tmp_path):
    (tmp_path / "all.zip").write_bytes(packed())
    for link in (f"zip://i.png::{tmp_path}/all.zip", f"zip:///i.png::file://{tmp_path}/all.zip"):
        with fsspec.open(link, "rb") as file:
            assert file.read() == png()
        assert load_image(ref("image", link)).getpixel((0, 0)) == RED
        with pytest.raises(MediaError, match="`allowed_media_folders`"):
            load_image(ref("image", link, allowed_media_folders=("/nowhere",)))
    for name in ("none.png", "../all.zip"):
        with pytest.raises(MediaError, match=f"row 3, column 'image'.*{name}"):
            load_image(ref("image", f"zip://{name}::{tmp_path}/all.zip"))
    for link in ("simplecache::http://127.0.0.1:1/", f"zip://i.png::zip://a.zip::{tmp_path}/all.zip"):
        with pytest.raises(MediaError, match="'(simplecache|zip)' can't be chained; chain zip:// alone, and once"):
            load_image(ref("image", link, allowed_media_protocols=("simplecache", "zip", "file", "http")))


def test_local_files_can_be_kept_to_folders(tmp_path, monkeypatch):
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "i.png").write_bytes(png())
    (tmp_path / "other.png").write_bytes(png())
    (tmp_path / "media" / "link.png").symlink_to(tmp_path / "other.png")

    def given(path):
        return load_image(ref("image", path, allowed_media_folders=[str(tmp_path / "media")]))

    for source in (tmp_path / "media" / "i.png", (tmp_path / "media" / "i.png").as_uri()):
        assert given(source).getpixel((0, 0)) == RED
    for name in ("other.png", "media/link.png", "media/../other.png"):
        for source in (tmp_path / name, f"file://{tmp_path / name}", {"path": str(tmp_path / name)}):
            with pytest.raises(MediaError, match="row 3.*in none of `allowed_media_folders`"):
                given(source)
    assert load_image(ref("image", tmp_path / "other.png")).getpixel((0, 0)) == RED
    monkeypatch.chdir(tmp_path)
    assert load_image(ref("image", "other.png", allowed_media_folders=(".",))).getpixel((0, 0)) == RED


def replaced(path, other):
    path.rename(path.parent.parent / "away")
    path.symlink_to(other)


CHANGES = {
    "a link": (replaced, "'.*else/medium' is in none of `allowed_media_folders`"),
    "a folder": (lambda path, other: replaced(path.parent, other.parent), "'.*else/medium' is in none of "),
    "a pipe": (lambda path, other: (path.unlink(), os.mkfifo(path)), "it isn't a regular file"),
    "more": (lambda path, other: path.write_bytes(bytes(10**6)), "more than 100,000 bytes"),
}


CHANGED = [(kind, change) for kind, change in product(("image", "audio", "video", "feature"), CHANGES)]


@pytest.mark.parametrize(("kind", "change"), [each for each in CHANGED if each != ("feature", "a pipe")])
def test_a_file_that_changes_after_its_check_is_refused(kind, change, tmp_path, monkeypatch):
    """It changes as it is opened, by a hook of the interpreter; a feature must not open it again."""
    path = tmp_path / "media" / "in" / "medium"
    other = tmp_path / "else" / "medium"
    for file, color in ((path, RED), (other, (1, 2, 3))):
        file.parent.mkdir(parents=True)
        file.write_bytes({"audio": wav, "video": mp4}.get(kind, lambda color=color: png(color))())
    rules = {"allowed_media_folders": [str(tmp_path / "media")], "max_media_bytes": 10**5}
    run, message = CHANGES[change]
    changes = [lambda: run(path, other)]
    monkeypatch.setitem(_ON_OPENING, str(path), changes)
    if kind != "feature":
        with pytest.raises(MediaError, match=f"row 3, column '{kind}'.*{message}"):
            load(ref(kind, path, **rules))
        return
    changes.append(list)  # nothing, at first
    rows = undecoded(datasets.Dataset.from_dict({"image": [str(path)]}).cast_column("image", datasets.Image()))
    [row] = restore_rows(rows.__getitems__([0]), MediaRules(**rules))
    assert row["image"].getpixel((0, 0)) == RED and len(changes) == 1


# One URL parser sees the allowed host
LOOKALIKES = [
    "http://127.0.0.1:{port}\\@allowed.example/i.png",
    "http://127.0.0.1:{port}\\/@allowed.example/i.png",
    "http://allowed.example@127.0.0.1:{port}/i.png",
    "http://127.0.0.1:{port}#@allowed.example/i.png",
    "http://127.0.0.1:{port}?@allowed.example/i.png",
    "http://127.0.0.1:{port}\t/@allowed.example/i.png",
    "http://allowed.example:x@127.0.0.1:{port}/i.png",
    "http://127.0.0.1:{port}/\\@allowed.example/../../i.png",
    "http://allowed.example.127.0.0.1.nip.io:{port}/i.png",
    "http://allowed.example%40127.0.0.1:{port}/i.png",
    "http://2130706433:{port}/i.png",
    "http:127.0.0.1:{port}/i.png",
    "http:///127.0.0.1:{port}/i.png",
]


@pytest.mark.parametrize("chained", ["", "zip://i.png::"])
@pytest.mark.parametrize("url", LOOKALIKES)
def test_the_host_that_is_connected_to_is_the_one_that_is_checked(site, url, chained):
    """The test expects no request, neither at first nor after a redirect from an allowed host."""
    url = url.format(port=site.server_port)
    with watched() as heard, pytest.raises(MediaError, match="row 3, column 'image'"):
        load_image(ref("image", chained + url, allowed_media_domains=("allowed.example",)))
    assert not [event for event in heard if event[0] == "socket.connect"]
    site.answers["/away"] = answer(302, Location=url)
    relative = f"/127.0.0.1:{site.server_port}/i.png"  # `http:` alone means the same host
    site.answers[relative] = answer(404)
    allowed = {"allowed_media_domains": ("localhost",), "media_timeout": 5}
    with pytest.raises(MediaError, match="row 3, column 'image'"):
        load_image(ref("image", chained + site.url("/away").replace("127.0.0.1", "localhost"), **allowed))
    assert set(site.asked) <= {"/away", relative}


def test_hosts_are_compared_as_dns_has_them(site):
    from urllib3.util import parse_url

    for url in ("http://EXAMPLE.com:80/a?b#c", "http://b\u00fccher.example/", "hdfs://Name:9/a", "http://[::1]:7/a"):
        prepared = requests.Request("GET", url).prepare().url
        assert http_client.host_of(url) == parse_url(prepared).host.lower()
        assert http_client.host_of(url).strip("[]") == urlsplit(prepared).hostname
    assert http_client.host_of("http://b\u00fccher.example/") == "xn--bcher-kva.example"
    site.answers["/i.png"] = answer(body=png())
    url = site.url("/i.png").replace("127.0.0.1", "LOCALHOST")
    assert load_image(ref("image", url, allowed_media_domains=("LocalHost",))).getpixel((0, 0)) == RED


@pytest.mark.parametrize("form", ["user:secret@", "user@", ":@"])
def test_urls_with_user_information_are_refused(site, form):
    site.answers["/i.png"] = answer(body=png())
    with pytest.raises(MediaError, match="its URL has a user or a password") as error:
        load_image(ref("image", site.url("/i.png").replace("//", f"//{form}")))
    assert not site.asked and "secret" not in str(error.value)


def packed(name="i.png", data=None):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, png() if data is None else data)
    return buffer.getvalue()


def test_archives_on_servers_keep_the_rules_of_servers(site, tmp_path):
    """The package downloads them like other media, and opens them locally."""
    site.answers["/a.zip"] = answer(body=packed())
    site.answers["/away"] = answer(302, Location=site.url("/a.zip").replace("127.0.0.1", "localhost"))
    site.answers["/file"] = answer(302, Location=f"file://{tmp_path}/a.zip")
    (tmp_path / "a.zip").write_bytes(packed())
    link = "zip://i.png::" + site.url("/a.zip?x=y")
    assert load_image(ref("image", link)).getpixel((0, 0)) == RED
    for rules, message in (
        ({"allowed_media_domains": ("example.com",)}, "'127.0.0.1' isn't one of `allowed_media_domains`"),
        ({"allowed_media_protocols": ("zip", "https")}, "the protocol 'http' isn't one of"),
        ({"max_media_bytes": 60}, "more than 60 bytes"),
    ):
        with pytest.raises(MediaError, match=message):
            load_image(ref("image", link, **rules))
    assert load_image(ref("image", "zip://i.png::" + site.url("/away"))).getpixel((0, 0)) == RED
    asked = len(site.asked)
    with pytest.raises(MediaError, match="'localhost' isn't one of `allowed_media_domains`"):
        load_image(ref("image", "zip://i.png::" + site.url("/away"), allowed_media_domains=("127.0.0.1",)))
    with pytest.raises(MediaError, match="it redirects to the protocol 'file'"):
        load_image(ref("image", "zip://i.png::" + site.url("/file")))
    assert site.asked[asked:] == ["/away", "/file"]


@pytest.mark.parametrize("form", ["file://{}", "{}"])
@pytest.mark.parametrize("mark", ["?", "#", "?x=1#", "%3F", ";"])
def test_a_path_behind_a_mark_keeps_to_the_folders(tmp_path, mark, form):
    (tmp_path / "allowed" / f"all.zip{mark}").mkdir(parents=True)
    (tmp_path / "secret.zip").write_bytes(packed())
    (tmp_path / "allowed" / "all.zip").write_bytes(packed(data=png((9, 9, 9))))
    link = form.format(tmp_path / "allowed" / f"all.zip{mark}" / ".." / ".." / "secret.zip")
    with watched() as heard:
        try:
            image = load_image(ref("image", f"zip://i.png::{link}", allowed_media_folders=(tmp_path / "allowed",)))
            assert image.getpixel((0, 0)) == (9, 9, 9)  # the image of the path before the mark
        except MediaError as error:
            assert "`allowed_media_folders`" in str(error) or "no such file" in str(error)
    assert not [event for event in heard if "secret.zip" in event[1]]


@pytest.mark.parametrize("location", ["file:///etc/hostname", "ftp://127.0.0.1/a", "memory://a", "s3://bucket/a"])
def test_redirects_stay_with_web_servers(site, location):
    site.answers["/away"] = answer(302, Location=location)
    with watched() as heard, pytest.raises(MediaError, match="it redirects to the protocol"):
        load_image(ref("image", site.url("/away")))
    assert not [event for event in heard if "hostname" in event[1]]
    site.answers["/round"] = answer(302, Location=site.url("/round"))
    with pytest.raises(MediaError, match="more than 5 redirects"):
        load_image(ref("image", site.url("/round")))


# Invalid media


@pytest.mark.parametrize("suffix", [".eps", ".png"])
def test_postscript_is_not_run(tmp_path, suffix):
    program = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(made) (w) file closefile showpage\n%%EOF\n"
    (tmp_path / f"i{suffix}").write_bytes(program)
    for source in (tmp_path / f"i{suffix}", program):
        with watched() as heard, pytest.raises(MediaError, match="row 3, column 'image': cannot read this image"):
            load_image(ref("image", source))
        assert not [event for event in heard if event[0] != "open"]


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_other_files_are_not_followed(tmp_path, name, decoder):
    (tmp_path / "secret.mp4").write_bytes(mp4())
    data = LISTS[name].replace(b"SECRET", os.fsencode(tmp_path / "secret.mp4"))
    paths = [tmp_path / f"a{suffix}" for suffix in (".m3u8", ".txt", ".mp4", ".wav")]
    for path in paths:
        path.write_bytes(data)
    for source in (data, *paths):
        for kind in ("video", "audio"):
            message = f"row 3, column '{kind}': this isn't a readable {kind} file: it starts with"
            with watched() as heard, pytest.raises(MediaError, match=message):
                load(ref(kind, source))
            assert not [event for event in heard if "secret" in event[1]]


def test_names_with_patterns_are_one_file(tmp_path, decoder):
    (tmp_path / "f1.png").write_bytes(png())
    (tmp_path / "f%d.png").write_bytes(mp4(5))
    frames, _ = load_video(ref("video", tmp_path / "f%d.png"))
    assert frames.shape == (5, 48, 64, 3)


# Limits


def test_files_have_a_largest_size(site, tmp_path):
    data = png(size=(300, 200))
    (tmp_path / "i.png").write_bytes(data)
    site.answers["/i.png"] = answer(body=data)
    site.answers["/unknown"] = answer(body=data, Content_Length=None)
    uri = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    for source in (data, uri, tmp_path / "i.png", site.url("/i.png"), site.url("/unknown")):
        assert load_image(ref("image", source)).size == (300, 200)
        with pytest.raises(MediaError, match="more than 100 bytes; remove the row or raise `max_media_bytes`"):
            load_image(ref("image", source, max_media_bytes=100))


def test_size_of_a_data_uri_is_that_of_its_bytes():
    data = png(size=(30, 20))
    escaped_data, escaped_base64 = (
        "".join(f"%{byte:02X}" for byte in part) for part in (data, base64.b64encode(data + bytes(2)))
    )
    uris = [f"data:image/png,{escaped_data}", f"data:;base64,{base64.encodebytes(data).decode()}"]
    for uri, size in (*((uri, len(data)) for uri in uris), (f"data:;base64,{escaped_base64}", len(data) + 2)):
        assert load_image(ref("image", uri, max_media_bytes=size)).size == (30, 20)
        with pytest.raises(MediaError, match=f"more than {size - 1} bytes"):
            load_image(ref("image", uri, max_media_bytes=size - 1))
    with pytest.raises(MediaError, match="more than 100 bytes"):  # isn't decoded
        load_image(ref("image", f"data:;base64,{'!' * 409}", max_media_bytes=100))


def test_media_have_a_largest_extent(decoder):
    with pytest.raises(MediaError, match="30 x 20 pixels exceed the limit of 500.*`max_image_pixels`"):
        load_image(ref("image", png(size=(30, 20)), max_image_pixels=500))
    with pytest.raises(MediaError, match="64 x 48 pixels exceed the limit of 500.*`max_image_pixels`"):
        load_video(ref("video", mp4(), max_image_pixels=500))
    with pytest.raises(MediaError, match="2 s exceed the limit of 1.5 s.*`max_audio_seconds`"):
        load_audio(ref("audio", wav(2.0), max_audio_seconds=1.5), 16000)
    with pytest.raises(MediaError, match="s exceed the limit of 0.5 s.*`max_video_seconds`"):
        load_video(ref("video", mp4(), max_video_seconds=0.5))


@pytest.mark.parametrize(
    "length", [0, 2**32 - 1, 2**32 - 37, 2**31 - 1, 2**31 - 45, 0x7FFFF000, 2 * 10**9, 2 * 10**9 - 36]
)
def test_a_sound_whose_length_was_never_known_is_whole(length):
    """Servers that speak, and programs that write to pipes, state such lengths."""
    data = wav(2.0)
    streamed = data[:40] + length.to_bytes(4, "little") + data[44:]
    assert len(load_audio(ref("audio", streamed), 16000)) == 32000
    assert media_size(ref("audio", streamed)) == {"seconds": 2.0}


@pytest.mark.parametrize("length", [64001, 10**6, 1_900_000_000, 2_100_000_000, 3 * 10**9])
def test_a_sound_that_is_cut_off_is_named(length):
    data = wav(2.0)
    cut = data[:40] + length.to_bytes(4, "little") + data[44:]
    with pytest.raises(MediaError, match=f"the file is damaged or cut off: 64000 of {length} bytes"):
        load_audio(ref("audio", cut), 16000)


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
    with pytest.raises(MediaError, match="returns status 404"):
        load_image(ref("image", site.url("/gone")))
    assert site.asked.count("/gone") == 1


def test_a_silent_server_ends_with_the_time_that_is_allowed(site):
    ended = threading.Event()
    site.answers["/silent"] = lambda handler: ended.wait(120)
    started = time.monotonic()
    with pytest.raises(MediaError, match="`media_timeout`"):
        load_image(ref("image", site.url("/silent"), media_timeout=0.2))
    assert time.monotonic() - started < 60
    ended.set()


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize(("start", "drop"), [*((start, b"0") for start in DRIPS), (CONTINUE, CONTINUE)])
def test_a_drip_ends_wherever_it_is(start, drop):
    """Its thread ends, too, while the server goes on."""
    started = time.monotonic()
    threads = threading.active_count() + 1
    with dripping(start, drop) as url:
        with pytest.raises(MediaError, match="`media_timeout`"):
            load_image(ref("image", url, media_timeout=0.5))
        while threading.active_count() > threads and time.monotonic() - started < 60:
            time.sleep(0.05)
        assert time.monotonic() - started < 60


@pytest.mark.parametrize("entry", ["default", "machine 127.0.0.1", "machine localhost"])
def test_no_password_goes_to_a_server_that_a_row_names(site, entry, tmp_path, monkeypatch):
    (tmp_path / "netrc").write_text(f"{entry} login bob password hunter2\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    whole = answer(body=png())
    sent = []
    site.answers["/i.png"] = lambda handler: (sent.append(handler.headers["Authorization"]), whole(handler))
    site.answers["/away"] = answer(302, Location=site.url("/i.png").replace("127.0.0.1", "localhost"))
    for path in ("/i.png", "/away"):
        assert load_image(ref("image", site.url(path))).getpixel((0, 0)) == RED
    assert sent == [None, None]
    assert requests.get(site.url("/i.png")).ok and any(sent) == (entry != "machine localhost")  # as requests does it


@pytest.mark.parametrize("status", [201, 206])
def test_a_part_that_was_not_asked_for_is_not_the_whole(site, status):
    body = png()
    site.answers["/i.png"] = answer(status, body, Content_Range=f"bytes 0-{len(body) - 1}/999")
    with pytest.raises(MediaError, match=f"i.png' returns status {status}; correct the URL or remove the row"):
        load_image(ref("image", site.url("/i.png")))


def test_a_store_that_does_not_answer_is_not_waited_for():
    class Silent(MemoryFileSystem):
        protocol = "silent"

        def _open(self, *args, **kwargs):
            ended.wait(120)

    ended = threading.Event()
    fsspec.register_implementation("silent", Silent, clobber=True)
    started = time.monotonic()
    with pytest.raises(MediaError, match="cannot read 'silent://i.png' .*`media_timeout`"):
        load_image(ref("image", "silent://i.png", allowed_media_protocols=["silent"], media_timeout=0.2))
    assert time.monotonic() - started < 60
    ended.set()


SECRETIVE = [
    "{}/i.png?X-Amz-Signature=SECRET",
    "{}/i.png?SECRET",
    "{}/i.png?sig=a(b)SECRET",
    "{}/i.png?sig=a'SECRET",
    '{}/i.png?sig=a"SECRET',
    "{}/i.png?sig=a SECRET",
    "{}/i.png?sig=%20SECRET%",
    "{}/i.png?a=b::SECRET",
    "{}/i.png#SECRET",
    "{}/i.png%3Ftoken=SECRET",
    "{}/i.png%23SECRET",
    "{}/i.png?a=" + 300 * "b" + "'SECRET",
    "{u}user:SECRET@{h}/i.png",
    "{u}SECRET@{h}/i.png",
    "{u}user:SECRET/SECRET@{h}/i.png",
    "{u}user:7/SECRET@{h}/i.png",
    "{u}user:SECRET@SECRET@{h}/i.png",
    "{u}user:SECRET?SECRET@{h}/i.png",
    "{u}user:7#SECRET@{h}/i.png",
    "{u}user:SECRET%40{h}/i.png",
    "{u}user:%53SECRET%@{h}/i.png",
    "{u}user:SECRET::SECRET@{h}/i.png",
    "{u}user:SECRET\\SECRET@{h}/i.png",
    "zip://a.png::{u}user:SECRET@{h}/i.zip?SECRET",
    "//user:SECRET@{h}/i.png",
    "//user:SECRET@{h}//i.png?SECRET",
    "///user:SECRET@{h}/i.png",
    "//SECRET@{h}/i.png",
    "http:/user:SECRET@{h}/i.png",
    "user:SECRET@{h}/i.png",
    "data:image/png;token=SECRET;base64,AAAA",
    'data:image/png;name="a SECRET";base64,AA//',
    "data:;token='SECRET';base64,AA@@",
    "DATA:image/png;token=SECRET;base64,AA//BB",
]


@pytest.mark.parametrize("form", SECRETIVE)
def test_errors_keep_credentials_to_themselves(site, form, monkeypatch):
    """Covers errors of servers, rules, parsers and decoders, for paths, dictionaries and unread columns."""
    monkeypatch.setattr(http_client.time, "sleep", lambda seconds: None)
    site.answers["/i.png"] = answer(403)
    url = form.format(site.url(""), u="http://", h=f"127.0.0.1:{site.server_port}")
    errors = []
    for source in (url, {"url": url}, {"bytes": b"none", "path": url}):
        for rules in ({}, {"allowed_media_domains": ("example.com",)}, {"allowed_media_protocols": ("file",)}):
            with pytest.raises(MediaError, match="row 3, column 'image'") as error:
                load_image(ref("image", source, media_timeout=2, **rules))
            errors.append(str(error.value))
    with pytest.raises(MediaError) as error, decoding(ref("image", url)):
        raise OSError(f"of a library: '{url}' is not there")
    errors += [str(error.value), check_columns([{"prompt": "What?", "image": "a.png", "other": url}], "dataset") or ""]
    assert not [error for error in errors if "SECRET" in error]
    assert len({*errors}) > 3


def test_what_is_no_secret_is_shown():
    for text in (
        "is 1 = 1? yes, #1 is",
        "of data: none, //server/share/logo@2x.png, at 12:30, a@b",
        "'https://host/a/logo@2x.png' returns status 404",
        "hf://datasets/who/what@main/i.png",
        "s3://bucket/a@b/i.png: [1/2]",
        "zip://a.png::/data/a.zip and http://[::1]:8000/a",
    ):
        assert without_credentials(text) == text
    assert without_credentials("with url: /i.png?a=(b)c (Caused") == "with url: /i.png?*** (Caused"
    assert without_credentials("(https://u:p@h/a?b), 'x://h#c'") == "(https://***@h/a?*** 'x://h#***'"
    many = "?" * 10**6 + "a" * 10**6  # the time must not grow faster than the text
    assert len(without_credentials(many)) == len(many)
