"""A Hugging Face Hub on this machine: an HTTP server with repositories in memory, for downloads and uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

Files = dict[str, bytes]


@dataclass
class Repo:
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False

    def commit(self, files, branch="main"):
        digest = hashlib.sha1(branch.encode())
        for name, content in sorted(files.items()):
            digest.update(name.encode() + content)
        self.commits[digest.hexdigest()] = dict(files)
        self.branches[branch] = digest.hexdigest()
        return digest.hexdigest()


@dataclass
class FakeHub:
    """Its repositories by `org/name` and `datasets/org/name`, and the requests that it has answered."""

    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    uploads: dict[str, bytes] = field(default_factory=dict)  # large files by their hash
    url: str = ""

    def add(self, name, files, branch="main", **options):
        """Add a commit to a repository, from a folder or from contents by name; returns its hash."""
        if isinstance(files, Path):
            found = [file for file in files.rglob("*") if file.is_file()]
            files = {file.relative_to(files).as_posix(): file.read_bytes() for file in found}
        repo = self.repos.setdefault(name, Repo(**options))
        return repo.commit({".gitattributes": b"", **files}, branch)

    def downloads(self):
        """The files that were downloaded, in order."""
        return [
            line.rpartition("/")[2]
            for line in self.requests
            if line.startswith("GET") and "/resolve/" in line
        ]

    @contextmanager
    def serve(self):
        handler = type("Handler", (_Handler,), {"hub": self})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def use_hub(url, home, patch=None):
    """Let `huggingface_hub` use the Hub at `url`, with its cache in `home`. It reads its variables when imported."""
    from huggingface_hub import constants

    values = {
        "ENDPOINT": url,
        "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_HUB_DISABLE_XET": True,
        "HF_TOKEN_PATH": str(home / "token"),
    }
    for name, value in values.items():
        patch.setattr(constants, name, value) if patch else setattr(constants, name, value)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self._handle()

    def do_GET(self):
        self._handle()

    def do_PUT(self):
        self._handle()

    def do_POST(self):
        self._handle()

    def _handle(self):
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append(f"{self.command} {path}")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if path in ("/api/models", "/api/datasets"):
            self._list(path, parse_qs(url.query)["author"][0])
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif path.startswith("/upload/"):
            self.hub.uploads[path.rpartition("/")[2]] = body
            self._answer({})
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._answer(
                {"objects": [self._lfs_object(one) for one in json.loads(body)["objects"]]}
            )
        else:
            self._repo_request(path, body)

    def _repo_request(self, path, body):
        api = re.fullmatch(
            r"/api/(models/|(?=datasets/))(?P<repo>(datasets/)?[^/]+/[^/]+)(/(?P<rest>.*))?", path
        )
        file = re.fullmatch(r"/(?P<repo>(datasets/)?[^/]+/[^/]+)/resolve/(?P<rest>.+)", path)
        found = api or file
        repo = self.hub.repos.get(found["repo"]) if found else None
        if (
            found is None
            or repo is None
            or (repo.private and not self.headers.get("Authorization"))
        ):
            self._refuse(404 if self.headers.get("Authorization") else 401, "RepoNotFound")
        elif file:
            revision, name = self._split_revision(repo, file["rest"])
            content = repo.commits.get(revision or "", {}).get(name)
            if repo.gated:
                self._refuse(403, "GatedRepo")
            elif content is None:
                self._refuse(404, "EntryNotFound")
            else:
                headers = {
                    "X-Repo-Commit": str(revision),
                    "ETag": f'"{hashlib.sha1(content).hexdigest()}"',
                }
                self._answer(content, headers)
        else:
            self._api(repo, found["repo"], found["rest"] or "revision/main", body)

    def _api(self, repo, name, rest, body):
        action, _, rest = rest.partition("/")
        if action == "preupload":
            files = json.loads(body)["files"]
            modes = [
                "lfs" if one["path"].endswith((".safetensors", ".png")) else "regular"
                for one in files
            ]
            answers = [
                {"path": one["path"], "uploadMode": mode}
                for one, mode in zip(files, modes, strict=True)
            ]
            self._answer({"files": [{**one, "shouldIgnore": False} for one in answers]})
            return
        if action == "commit":
            self._commit(repo, name, body)
            return
        revision, _ = self._split_revision(repo, rest)
        if revision is None:
            self._refuse(404, "RevisionNotFound")
            return
        files = repo.commits[revision]
        if action == "tree":
            oids = {file: hashlib.sha1(content).hexdigest() for file, content in files.items()}
            tree = [
                {"type": "file", "path": f, "size": len(c), "oid": oids[f]}
                for f, c in files.items()
            ]
            self._answer(tree)
        else:
            siblings = [{"rfilename": file} for file in files]
            owned = {"private": repo.private, "gated": repo.gated}
            self._answer(
                {
                    "id": name.removeprefix("datasets/"),
                    "sha": revision,
                    "siblings": siblings,
                    **owned,
                }
            )

    def _commit(self, repo, name, body):
        files = dict(repo.commits[repo.branches["main"]])
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
        sha = repo.commit(files)
        self._answer(
            {"commitUrl": f"{self.hub.url}/{name}/commit/{sha}", "commitOid": sha, "success": True}
        )

    def _lfs_object(self, wanted):
        upload = {"href": f"{self.hub.url}/upload/{wanted['oid']}"}
        return {"oid": wanted["oid"], "size": wanted["size"], "actions": {"upload": upload}}

    def _create(self, wanted):
        if not self.headers.get("Authorization"):
            self._refuse(401, "")
            return
        name = "/".join(filter(None, [wanted.get("organization"), wanted["name"]]))
        url = f"{self.hub.url}/{name}"
        if name in self.hub.repos:
            self._answer({"error": "exists", "url": url}, {}, 409)
            return
        self.hub.add(
            name, {}, private=bool(wanted.get("private") or wanted.get("visibility") == "private")
        )
        self._answer({"url": url, "name": name})

    def _list(self, path, author):
        prefix = f"datasets/{author}/" if path.endswith("datasets") else f"{author}/"
        names = [
            name.removeprefix("datasets/") for name in self.hub.repos if name.startswith(prefix)
        ]
        self._answer([{"id": name} for name in names])

    def _split_revision(self, repo, rest):
        """The commit at the front of a path, and what follows. Branches may have slashes."""
        for branch, commit in [
            *repo.branches.items(),
            *zip(repo.commits, repo.commits, strict=True),
        ]:
            if rest == branch or rest.startswith(f"{branch}/"):
                return commit, rest.removeprefix(branch).removeprefix("/")
        return None, ""

    def _refuse(self, status, code):
        self._answer({"error": code}, {"X-Error-Code": code} if code else {}, status)

    def _answer(self, content, headers=None, status=200):
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
