"""An object store for tests, in this process and in memory: so much of S3's protocol as archives need."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import attrs


@attrs.define(eq=False)
class Objects:
    """``objects``: by their paths, /bucket/key. ``before``: is called before each request, with method and path;
    returns a status to refuse it with, or None. ``requests``: how many there were of a method."""

    port: int = 0
    objects: dict[str, bytes] = attrs.field(factory=dict)
    uploads: dict[str, dict[int, bytes]] = attrs.field(factory=dict)
    requests: dict[str, int] = attrs.field(factory=dict)
    lock: threading.Lock = attrs.field(factory=threading.Lock)
    before: Callable[[str, str], int | None] = lambda method, path: None

    def url(self, place: str) -> str:
        """For pyarrow.fs; ``place``: bucket/prefix."""
        return f"s3://key:secret@{place}?endpoint_override=127.0.0.1:{self.port}&scheme=http&region=us-east-1"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Objects

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        given = {"Content-Length": str(len(body)), **(headers or {})}
        for name, value in given.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def error(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = joined(self.rfile)
            self.rfile.readline()
        else:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return joined(io.BytesIO(content)) if "x-amz-decoded-content-length" in self.headers else content

    def handled(self) -> None:
        parts = urlsplit(self.path)
        path = unquote(parts.path).rstrip("/") if parts.path.count("/") < 2 else unquote(parts.path)
        told = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        content = self.body()
        refused = self.store.before(self.command, path)
        with self.store.lock:
            self.store.requests[self.command] = self.store.requests.get(self.command, 0) + 1
            if refused is not None:
                self.error(refused, "AccessDenied" if refused == 403 else "InternalError")
            else:
                getattr(self, f"on_{self.command.lower()}")(path, told, content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handled

    def on_head(self, path: str, _: dict[str, str], __: bytes) -> None:
        if path.count("/") == 1:
            self.answer(200)
        elif path not in self.store.objects:
            self.answer(404)
        else:
            self.answer(200, self.store.objects[path], described(self.store.objects[path]))

    def on_get(self, path: str, told: dict[str, str], _: bytes) -> None:
        if "list-type" in told or path.count("/") == 1:
            return self.answer(200, listed(self.store.objects, path, told), {"Content-Type": "application/xml"})
        if path not in self.store.objects:
            return self.error(404, "NoSuchKey")
        content = self.store.objects[path]
        headers = described(content)
        wanted = self.headers.get("Range", "").removeprefix("bytes=")
        if not wanted:
            return self.answer(200, content, headers)
        first, _, last = wanted.partition("-")
        low = int(first) if first else max(0, len(content) - int(last))
        high = min(int(last), len(content) - 1) if first and last else len(content) - 1
        headers["Content-Range"] = f"bytes {low}-{high}/{len(content)}"
        return self.answer(206, content[low : high + 1], headers)

    def on_put(self, path: str, told: dict[str, str], content: bytes) -> None:
        if "uploadId" in told:
            self.store.uploads[told["uploadId"]][int(told["partNumber"])] = content
        elif self.headers.get("If-None-Match") == "*" and path in self.store.objects:
            return self.error(412, "PreconditionFailed")
        else:
            self.store.objects[path] = content
        return self.answer(200, headers={"ETag": described(content)["ETag"]})

    def on_post(self, path: str, told: dict[str, str], content: bytes) -> None:
        if "uploads" in told:
            made = f"u{len(self.store.uploads)}"
            self.store.uploads[made] = {}
            name = f"<UploadId>{made}</UploadId>"
            return self.answer(200, f"<InitiateMultipartUploadResult>{name}</InitiateMultipartUploadResult>".encode())
        if "uploadId" in told:
            parts = self.store.uploads.pop(told["uploadId"])
            self.store.objects[path] = b"".join(parts[number] for number in sorted(parts))
            return self.answer(200, b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>")
        return self.error(501, "NotImplemented")

    def on_delete(self, path: str, told: dict[str, str], _: bytes) -> None:
        self.store.uploads.pop(told.get("uploadId", ""), None)
        self.store.objects.pop(path, None)
        self.answer(204)


def joined(source: Any) -> bytes:
    """The chunks of a body, up to the empty one."""
    found = b""
    while size := int(source.readline().partition(b";")[0], 16):
        found += source.read(size)
        source.readline()
    return found


def described(content: bytes) -> dict[str, str]:
    return {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Last-Modified": formatdate(usegmt=True)}


def listed(objects: dict[str, bytes], bucket: str, told: dict[str, str]) -> bytes:
    """All at once, whatever is said of pages."""
    prefix, mark = told.get("prefix", ""), told.get("delimiter", "")
    start = f"{bucket.rstrip('/')}/"
    after = told.get("start-after", "")
    keys = sorted(path.removeprefix(start) for path in objects if path.startswith(start + prefix))
    found, folders = "", dict[str, None]()
    for key in keys:
        rest = key[len(prefix) :]
        if mark and mark in rest:
            folders[prefix + rest.partition(mark)[0] + mark] = None
        elif key > after:
            size = len(objects[start + key])
            found += (
                f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>x</ETag>"
                "<LastModified>2026-05-11T12:00:00.000Z</LastModified></Contents>"
            )
    found += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders)
    return (
        f"<ListBucketResult><Name>{start[1:-1]}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        f"<KeyCount>{len(keys)}</KeyCount>{found}</ListBucketResult>"
    ).encode()


@contextlib.contextmanager
def object_store() -> Iterator[Objects]:
    """One that runs."""
    store = Objects()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"store": store}))
    server.daemon_threads = True
    store.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
