"""The few endpoints of the Hugging Face Hub that snapshot_download uses, over files in memory."""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "a" * 40


class HubLookAlike(ThreadingHTTPServer):
    """Serves one repository at one commit, and knows of a gated one beside it.

    Args:
        files: of the repository, by path.
        token: that every request must bring; None asks for none.

    ``may_send`` holds downloads up while it is cleared.
    """

    def __init__(self, host: str, repo: str, files: Mapping[str, bytes], token: str | None = None) -> None:
        super().__init__((host, 0), _Handler)
        self.repo = repo
        self.files = files
        self.token = token
        self.may_send = threading.Event()
        self.may_send.set()

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host}:{port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubLookAlike

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, repo, files = self.path.split("?")[0], self.server.repo, self.server.files
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith("/api/models/acme/gated"):
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted."})
        elif path in (f"/api/models/{repo}/tree/{COMMIT}", f"/api/models/{repo}/tree/main"):  # newer and older clients
            self._send(200, json.dumps([_tree_entry(name, files[name]) for name in files]).encode())
        elif path == f"/api/models/{repo}/revision/main":
            self._send(200, json.dumps({"id": repo, "sha": COMMIT}).encode())
        elif path.startswith(f"/api/models/{repo}/revision/"):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path.startswith(f"/{repo}/resolve/{COMMIT}/"):
            self.server.may_send.wait()
            content = files[path.removeprefix(f"/{repo}/resolve/{COMMIT}/")]
            self._send(200, content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


def _tree_entry(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
