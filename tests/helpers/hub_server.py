# Copyright 2026 The trl-multimodal-rft Authors. Licensed under the Apache License, Version 2.0 (see LICENSE).
"""
A local Hub: the endpoints of huggingface.co that `huggingface_hub` uploads to and downloads from.

It accepts all files within commits, as the Hub does for files outside Git LFS. The client, not the package, transfers
large files, so no test needs Git LFS.
"""

import base64
import hashlib
import json
import re
import threading
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml


@dataclass
class Token:
    """Permissions of a bearer token."""

    user: str
    write: bool = True
    n_commits: int | None = None  # commits until the token is revoked
    held: bool = False  # whether commits wait for `/release`


@dataclass(frozen=True)
class Blob:
    """The content of a file."""

    content: bytes

    @property
    def sha(self) -> str:
        return hashlib.sha1(self.content).hexdigest()


@dataclass
class Commit:
    """A state of a repository: its id, the commit message, and all files by path."""

    sha: str
    message: str
    files: dict[str, Blob]


@dataclass
class Repo:
    """A repository: whether it is private, and the commits of the branch `main`, oldest first."""

    private: bool
    commits: list[Commit] = field(default_factory=list)

    @property
    def files(self) -> dict[str, Blob]:
        return self.commits[-1].files

    @property
    def paths(self) -> set[str]:
        """Paths of the files, except for `.gitattributes`, which every new repository has."""
        return set(self.files) - {".gitattributes"}

    def commit(self, message: str, files: dict[str, Blob]) -> Commit:
        self.commits.append(Commit(uuid.uuid4().hex, message, files))
        return self.commits[-1]

    def at(self, revision: str) -> Commit | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit.sha == revision), None)


class HubServer:
    """A Hub that serves within its context."""

    def __init__(self, tokens: dict[str, Token]):
        self.tokens = tokens
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lock = threading.Lock()
        self.released = threading.Event()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def model(self, repo_id: str) -> Repo:
        """Returns the repository of a model."""
        return self.repos["models", repo_id]


class _Refused(Exception):
    """An error response, with the Hub's code for the error."""

    def __init__(self, status: int, message: str, code: str | None = None, commit: Commit | None = None):
        self.status = status
        self.message = message
        self.code = code
        self.commit = commit


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    # Requests

    def do_GET(self):
        self._serve()

    do_HEAD = do_POST = do_GET

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            self.body = b"".join(iter(self._chunk, b""))
        else:
            self.body = self.rfile.read(length)
        self.path = urlsplit(self.path).path
        token = self.hub.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if "/commit/" in self.path and token is not None and token.held:
            self.hub.released.wait(300)
        try:
            for methods, pattern, answer in _ROUTES:
                match = re.fullmatch(pattern, self.path)
                if match and self.command in methods:
                    with self.hub.lock:
                        parts = {name: unquote(part) for name, part in match.groupdict().items() if part}
                        response = answer(self, **parts)
                    break
            else:
                raise _Refused(404, f"{self.command} {self.path} isn't served")
            self._answer(*response)
        except _Refused as refusal:
            commit = refusal.commit and refusal.commit.sha
            headers = {"X-Error-Message": refusal.message, "X-Error-Code": refusal.code, "X-Repo-Commit": commit}
            headers = {name: value for name, value in headers.items() if value is not None}
            self._answer(refusal.status, headers, json.dumps({"error": refusal.message}).encode())

    def _chunk(self) -> bytes:
        chunk = self.rfile.read(int(self.rfile.readline(), 16))
        self.rfile.readline()  # the line break behind a chunk
        return chunk

    def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value, status: int = 200) -> tuple[int, dict, bytes]:
        return status, {"Content-Type": "application/json"}, json.dumps(value).encode()

    # Permissions

    def _token(self) -> Token | None:
        scheme, _, value = self.headers.get("Authorization", "").partition(" ")
        if not scheme:
            return None
        if scheme != "Bearer" or value not in self.hub.tokens:
            raise _Refused(401, "Invalid credentials in Authorization header")
        return self.hub.tokens[value]

    def _writer(self, namespace: str | None = None) -> Token:
        """Returns the token if it may write, in its user's namespace."""
        token = self._token()
        if token is None:
            raise _Refused(401, "Invalid username or password.")
        if not token.write or namespace not in (None, token.user):
            raise _Refused(403, f"You don't have the rights to write under the namespace {namespace or token.user!r}.")
        return token

    def _repo(self, kind: str, repo: str) -> Repo:
        repository = self.hub.repos.get((kind, repo))
        token = self._token()
        if repository is None or repository.private and (token is None or token.user != repo.split("/")[0]):
            raise _Refused(404 if token else 401, "Repository not found", "RepoNotFound")
        return repository

    def _at(self, kind: str, repo: str, revision: str) -> Commit:
        commit = self._repo(kind, repo).at(revision)
        if commit is None:
            raise _Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    # Responses

    def release(self):
        self.hub.released.set()
        return self._json({})

    def whoami(self):
        token = self._token()
        if token is None:
            raise _Refused(401, "Invalid username or password.")
        return self._json({"type": "user", "name": token.user, "orgs": [], "auth": {}})

    def create(self):
        request = json.loads(self.body)
        owner = request["organization"] or self._writer().user
        self._writer(owner)
        kind = f"{request.get('type') or 'model'}s"
        repo = f"{owner}/{request['name']}"
        url = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{repo}"
        if (kind, repo) in self.hub.repos:
            return self._json({"error": "You already created this repo", "url": url}, 409)
        private = request.get("visibility") == "private" or bool(request.get("private"))
        created = self.hub.repos[kind, repo] = Repo(private)
        created.commit("initial commit", {".gitattributes": Blob(b"")})
        return self._json({"url": url, "name": repo, "id": repo})

    def info(self, kind: str, repo: str, revision: str = "main"):
        commit = self._at(kind, repo, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        private = self.hub.repos[kind, repo].private
        details = {"_id": "0" * 24, "id": repo, "modelId": repo, "author": repo.split("/")[0], "sha": commit.sha}
        details |= {"private": private, "gated": False, "disabled": False, "tags": [], "downloads": 0, "likes": 0}
        return self._json({**details, "siblings": siblings})

    def history(self, kind: str, repo: str, revision: str):
        self._at(kind, repo, revision)
        more = {"message": "", "authors": [], "date": "2026-01-01T00:00:00.000Z"}
        commits = reversed(self.hub.repos[kind, repo].commits)
        return self._json([{"id": commit.sha, "title": commit.message, **more} for commit in commits])

    def tree(self, kind: str, repo: str, revision: str, folder: str = ""):
        commit = self._at(kind, repo, revision)
        prefix = f"{folder}/" if folder else ""
        below = {path: blob for path, blob in commit.files.items() if path.startswith(prefix)}
        if not below:
            raise _Refused(404, f"{folder} does not exist", "EntryNotFound", commit)
        entries = [
            {"type": "file", "path": path, "oid": blob.sha, "size": len(blob.content)} for path, blob in below.items()
        ]
        return self._json(entries)  # a tree of the Hub also has folders, which nothing reads here

    def validate_yaml(self):
        parts = json.loads(self.body)["content"].split("---\n")
        try:
            data = yaml.safe_load(parts[1]) if len(parts) > 2 and not parts[0] else None
        except yaml.YAMLError as error:
            return self._json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        # Model metadata that the Hub refuses
        for name, types in {"tags": list, "base_model": (str, list), "datasets": (str, list), "license": str}.items():
            if data and data.get(name) is not None and not isinstance(data[name], types):
                return self._json({"errors": [{"message": f'"{name}" has another type'}], "warnings": []}, 400)
        warnings = [] if data else [{"message": "empty or missing yaml metadata in repo card"}]
        return self._json({"errors": [], "warnings": warnings})

    def preupload(self, kind: str, repo: str, revision: str):
        self._writer(repo.split("/")[0])
        self._at(kind, repo, revision)
        more = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
        return self._json({"files": [{"path": file["path"], **more} for file in json.loads(self.body)["files"]]})

    def commit(self, kind: str, repo: str, revision: str):
        token = self._writer(repo.split("/")[0])
        parent = self._at(kind, repo, revision)
        lines = [json.loads(line) for line in self.body.splitlines()]
        files = dict(parent.files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]))
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise _Refused(400, f"{line['key']} isn't served")
        created = self.hub.repos[kind, repo].commit(lines[0]["value"]["summary"], files)
        if token.n_commits is not None:
            token.n_commits -= 1
            if token.n_commits == 0:
                self.hub.tokens = {name: other for name, other in self.hub.tokens.items() if other is not token}
        url = f"{self.hub.url}/{repo}/commit/{created.sha}"
        return self._json({"success": True, "commitOid": created.sha, "commitUrl": url, "hookOutput": ""})

    def resolve(self, repo: str, revision: str, path: str, kind: str = "models"):
        commit = self._at(kind, repo, revision)
        blob = commit.files.get(path)
        if blob is None:
            raise _Refused(404, "Entry not found", "EntryNotFound", commit)
        return 200, {"X-Repo-Commit": commit.sha, "ETag": f'"{blob.sha}"'}, blob.content


_API = r"/api/(?P<kind>models|datasets)/(?P<repo>[^/]+/[^/]+)"
_ROUTES = [
    (("POST",), "/release", _Handler.release),
    (("GET",), "/api/whoami-v2", _Handler.whoami),
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.validate_yaml),
    (("GET",), _API, _Handler.info),
    (("GET",), rf"{_API}/revision/(?P<revision>[^/]+)", _Handler.info),
    (("GET",), rf"{_API}/commits/(?P<revision>[^/]+)", _Handler.history),
    (("GET",), rf"{_API}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", _Handler.tree),
    (("POST",), rf"{_API}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    (("POST",), rf"{_API}/commit/(?P<revision>[^/]+)", _Handler.commit),
    (
        ("GET", "HEAD"),
        r"/((?P<kind>datasets)/)?(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)",
        _Handler.resolve,
    ),
]
