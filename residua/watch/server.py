"""The page's server: this machine only, GET only, two URLs, with no disk path in either.

It listens on 127.0.0.1, so that nothing outside the machine can connect. Its URL contains a random key, so that other
users of the machine cannot read it. It answers only requests whose Host is a local name of this machine: a web page
elsewhere that points its domain at 127.0.0.1 (DNS rebinding) gets nothing. It accepts at most `CONNECTIONS` connections
and refuses more with a message. The page shares the frame, colours and plots of all pages; `runs.js` and `watch.js`
fill it.
"""

from __future__ import annotations

import getpass
import gzip
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from threading import BoundedSemaphore, Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from residua.files import explain
from residua.machine import python_command, python_environment
from residua.report import Page
from residua.report.page import asset
from residua.report.theme import embeddable
from residua.watch.run_list import RunList

HOST = "127.0.0.1"
CONNECTIONS = 32
"""The most concurrent connections: a page needs one briefly every two seconds."""
LINGER = 12.0
"""Slightly more than the seconds between two requests from a background page."""
PATIENCE = 3.0
"""Seconds that a run waits for its page to fetch the last numbers; it does not wait for a background page."""
SETTLE = 0.2
"""Seconds until everything that a killed run leaves is visible."""
_FULL = f"This page already has {CONNECTIONS} connections: close some of its tabs, or try again in a minute."
_OWN_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Serves the page of some runs. `port` 0 picks any free port; `listening` is a socket that is already open."""

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(
        self,
        watched: RunList,
        port: int = 0,
        *,
        interval: float = 2.0,
        key: str = "",
        listening: socket.socket | None = None,
    ) -> None:
        self.watched, self.interval = watched, interval
        self.key = key or secrets.token_urlsafe(9)
        self.ended = False
        self._free = BoundedSemaphore(CONNECTIONS)
        self._pages: dict[str, float] = {}
        """When each open page last asked."""
        self._lock = Lock()
        super().__init__((HOST, port), Handler, bind_and_activate=listening is None)
        if listening is not None:
            self.socket.close()
            self.socket = listening
            self.server_address = listening.getsockname()

    def server_bind(self) -> None:
        """Bind without the library's network lookup of this machine's name, which may block."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def url(self) -> str:
        return address(self.server_address[1], self.key)

    def end(self) -> None:
        """Wait until open pages have fetched their last numbers, for at most `LINGER` seconds."""
        self.ended = True
        until = time.monotonic() + LINGER
        while self._waiting(until - LINGER) and time.monotonic() < until:
            time.sleep(0.05)

    def _waiting(self, now: float) -> bool:
        """Whether a page that asked shortly before `now` will ask again."""
        with self._lock:
            return any(now - last < LINGER for last in self._pages.values())

    def note(self, page: str, *, open: bool) -> None:
        """Record that a page is `open` and has just asked, or that it has received its last response."""
        now = time.monotonic()
        with self._lock:
            self._pages = {name: last for name, last in self._pages.items() if now - last < LINGER and name != page}
            if page and open and len(self._pages) < CONNECTIONS:
                self._pages[page] = now

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a separate thread, or refuse if too many connections are open."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.settimeout(0.2)
            request.recv(1 << 16)  # closing before reading the request would discard the response
            head = f"HTTP/1.0 503 Service Unavailable\r\nContent-Length: {len(_FULL)}\r\nRetry-After: 60\r\n"
            request.sendall(f"{head}Content-Type: text/plain; charset=utf-8\r\n\r\n{_FULL}".encode())
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then free the connection's slot."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects: nothing may be printed into a run's display."""


def address(port: int, key: str) -> str:
    """The URL of a page."""
    return f"http://{HOST}:{port}/{key}/"


def how_to_open(port: int, key: str) -> list[str]:
    """What to print: the address, and how to reach it from another machine."""
    tunnel = f"ssh -N -L {port}:{HOST}:{port} {_user()}@{socket.gethostname()}"
    return [f"Live page: {address(port, key)}", f"From another machine: {tunnel}, then open the same address there"]


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        return "USER"


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Server
    server_version, sys_version = "residua", ""
    timeout = 60  # seconds that a connection may stay idle

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        secret, slash, name = place.path.removeprefix("/").partition("/")
        if self._host() not in _OWN_NAMES:
            self._refuse(403, "This page answers only to 127.0.0.1 and localhost.")
        elif not slash or not secrets.compare_digest(secret.encode(), self.server.key.encode()):
            self._refuse(404, "Open the full address printed by residua watch.")
        elif name == "":
            self._answer(200, "text/html", watch_page(self.server.watched, self.server.interval))
        elif name == "news.json":
            self._tell({key: values[0] for key, values in parse_qs(place.query).items()})
        else:
            self._refuse(404, "This page does not exist.")

    def _tell(self, query: dict[str, str]) -> None:
        """Send the changes; our own errors also go to the page, which keeps asking."""
        since, ended = query.get("since", ""), self.server.ended
        known = int(since) if since.isdecimal() and len(since) < 19 else 0
        try:
            news = self.server.watched.news(query.get("epoch", ""), known)
            text = json.dumps({**news, "ended": ended}, allow_nan=False)
        except Exception as error:
            self._refuse(500, f"The numbers of these runs cannot be shown ({type(error).__name__}: {error}).")
            return
        self.server.note(page := query.get("page", "")[:32], open=True)
        self._answer(200, "application/json", text)
        if ended:
            self.server.note(page, open=False)

    def _host(self) -> str:
        """The host that the request names, without its port, which differs behind a tunnel."""
        host = self.headers.get("Host", "")
        return host.lower() if host.endswith("]") else host.lower().rpartition(":")[0] or host.lower()

    def _refuse(self, status: int, sentence: str) -> None:
        self._answer(status, "text/plain", sentence)

    def _answer(self, status: int, kind: str, text: str) -> None:
        body = text.encode()
        packed = "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1024
        body = gzip.compress(body, 1) if packed else body
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if packed:
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


FIGURES = {
    "loss": ("Training loss", "nats per token, smoothed over ten log lines; the faint line is unsmoothed"),
    "validation": ("Validation loss", "nats per token, always on the same text"),
    "tokens_per_second": ("Speed", "tokens per second"),
    "grad_norm": ("Gradient norm", "before clipping; a jump often precedes one in the loss"),
    "peak": ("Peak |h|", "the largest value that any sublayer reads; tenfold growth often precedes a divergence"),
    "sink_ratio": ("Residual-sink ratio", "mean |h| of the largest dimension over the median dimension's, worst layer"),
    "lr": ("Learning rate", "of the first group of parameters"),
    "memory_gib": ("Memory", "GiB, the peak so far"),
    "mfu": ("Model FLOPs utilisation", "share of the GPU's peak"),
    "heaviest": ("Expert load", "the busiest expert and (dotted) the idlest; 1 is an equal share"),
}
"""Title and caption of each figure. Figures without values are not shown."""


def watch_page(watched: RunList, interval: float) -> str:
    """The page's HTML; the page polls for changes every `interval` seconds."""
    title = ", ".join(folder.resolve().name for folder in watched.folders)
    page = Page(title, "Loading the first numbers.")
    now = page.section("Now")
    now.slot("now")
    now.slot("runs")
    curves = page.section("Curves")
    curves.slot("axis")
    curves.slots_beside({name: (words[0], words[1]) for name, words in FIGURES.items()})
    page.section("Messages").slot("messages")
    settings = embeddable(json.dumps({"interval": interval, "figures": list(FIGURES)}))
    runs, watch, style = (asset(name, "residua.watch") for name in ("runs.js", "watch.js", "watch.css"))
    return page.html(live=f"const watching = {settings};\n{runs}\n{watch}", style=style)


@contextmanager
def serve_page(folder: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Serve the page of the run in `folder` inside the block; `tell` gets its URL, or the reason for failure.

    A separate process serves the page: whatever happens to it, the run continues. The run opens the socket, so that the
    URL is known at once, and passes it on. The server process does not import torch, runs at low priority and only
    reads. It ends when the run ends for any reason, because its standard input closes. Open pages get the last numbers
    first.
    """
    process = None
    try:
        process = _start(folder, tell)
    except OSError as error:
        tell(f"The live page is off: {explain(error)[0]}; the run continues without it.")
    try:
        yield
    finally:
        if process is not None:
            _stop(process)


def _start(folder: Path, tell: Callable[[str], object]) -> subprocess.Popen[bytes]:
    key = secrets.token_urlsafe(9)
    with socket.create_server((HOST, 0)) as listening:
        number = listening.fileno()
        process = subprocess.Popen(
            python_command("-m", "residua.watch.server", str(folder.absolute()), str(number)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=python_environment(),
            pass_fds=(number,),
            start_new_session=True,  # Ctrl-C must reach only the run, which saves first
        )
        assert process.stdin is not None
        process.stdin.write(f"{key}\n".encode())  # not as an argument, which other users could read
        process.stdin.flush()
        for line in how_to_open(listening.getsockname()[1], key):
            tell(line)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with suppress(subprocess.TimeoutExpired):  # it soon ends by itself
        process.wait(PATIENCE)


def main() -> None:
    """Run the server process. Its arguments are the run's folder and the socket's number; stdin starts with the key."""
    folder, number = sys.argv[1:]
    with suppress(OSError):
        os.nice(10)
    key = sys.stdin.readline().strip()
    server = Server(RunList([Path(folder)]), key=key, listening=socket.socket(fileno=int(number)))
    Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()
    time.sleep(SETTLE)
    server.end()


if __name__ == "__main__":
    main()
