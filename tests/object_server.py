"""An S3 server on loopback, and a connection to it that fails as it is told to."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pyarrow import fs


class Faults:
    """What happens to requests on their way. Counts what passes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.requests = 0
        self.bytes = 0
        """Bytes of the objects that were sent to the client."""
        self.refused = 0
        self.every = 0
        """One request in so many is answered 503."""
        self.forbidden = False
        """Every request is answered 403, as of a key that was revoked."""
        self.first_byte = 0.0
        """Seconds until an answer begins."""
        self.cut_until = 0.0
        """`time.monotonic()` until which connections are dropped."""

    def next_is_refused(self) -> bool:
        with self.lock:
            self.requests += 1
            refused = self.every > 0 and self.requests % self.every == 0
            self.refused += refused
            return refused


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: Faults
    target: tuple[str, int]

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if time.monotonic() < self.faults.cut_until:
            self.close_connection = True
            self.connection.close()
            return
        refused = self.faults.next_is_refused()
        if refused or self.faults.forbidden:
            self.send_response(403 if self.faults.forbidden else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        time.sleep(self.faults.first_byte)
        server = http.client.HTTPConnection(*self.target)
        server.request(self.command, self.path, body, dict(self.headers))
        answer = server.getresponse()
        content = answer.read()
        server.close()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "server", "date"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        self.wfile.write(content)
        with self.faults.lock:
            self.faults.bytes += len(content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that go away are part of the tests."""


@contextmanager
def object_server() -> Iterator[tuple[fs.S3FileSystem, fs.S3FileSystem, Faults]]:
    """A server: as it is, to write to; over the connection that fails; and how it fails."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    faults = Faults()
    handler = type("Handler", (_Handler,), {"faults": faults, "target": server.get_host_and_port()})
    proxy = _Proxy(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        host, port = server.get_host_and_port()
        yield s3(f"{host}:{port}"), s3(f"127.0.0.1:{proxy.server_port}"), faults
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
        server.stop()


def s3(address: str) -> fs.S3FileSystem:
    return fs.S3FileSystem(
        access_key="testing",
        secret_key="testing",
        region="us-east-1",
        scheme="http",
        endpoint_override=address,
        allow_bucket_creation=True,
        request_timeout=10,
        connect_timeout=10,
    )
