"""The page's server: this machine only, GET only, two addresses, no path of the disk in either.

It listens on 127.0.0.1, so that nothing outside the machine can connect. Its address holds a random key, so that other
people on the machine cannot read it. It answers only requests whose Host is this machine's own name for itself: a web
page elsewhere that points its domain at 127.0.0.1 (DNS rebinding) gets nothing. It holds `CONNECTIONS` connections at
most; more are refused in a sentence. The page has the frame, colours and plots of all pages, filled by `runs.js` and
`watch.js`.
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
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from socketserver import TCPServer
from threading import BoundedSemaphore, Lock, Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from residua.files import explain
from residua.machine import python_command, python_environment
from residua.report import Page
from residua.report.theme import embeddable
from residua.watch.run_list import RunList

HOST = "127.0.0.1"
CONNECTIONS = 32
"""The most connections at a time: a page needs one, for a moment, every two seconds."""
LINGER = 12.0
"""Seconds between two questions of a page in the background, and a little more."""
PATIENCE = 3.0
"""Seconds that a run waits for its page to get the last numbers; a page in the background asks later, without it."""
SETTLE = 0.2
"""Seconds until all that a killed run leaves is there to be seen."""
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
    """Serves the page of some runs. `port` 0 takes any free one; `listening` is a socket that is open already."""

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
        """Bind; the library would also ask the network for this machine's name, and may wait for it."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = HOST, self.server_address[1]

    @property
    def url(self) -> str:
        return address(self.server_address[1], self.key)

    def end(self) -> None:
        """Let the pages that are open have their last numbers, and wait until they do, for `LINGER` seconds at most."""
        self.ended = True
        until = time.monotonic() + LINGER
        while self._waiting(until - LINGER) and time.monotonic() < until:
            time.sleep(0.05)

    def _waiting(self, now: float) -> bool:
        """Whether a page that asked shortly before `now` will ask again."""
        with self._lock:
            return any(now - last < LINGER for last in self._pages.values())

    def note(self, page: str, *, open: bool) -> None:
        """Note that a page is `open` and has asked now, or that it has had its last answer."""
        now = time.monotonic()
        with self._lock:
            self._pages = {name: last for name, last in self._pages.items() if now - last < LINGER and name != page}
            if page and open and len(self._pages) < CONNECTIONS:
                self._pages[page] = now

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread of its own, or refuse where too many are open."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
            return
        with suppress(OSError):
            request.settimeout(0.2)
            request.recv(1 << 16)  # closing before the question is read would take the answer back
            head = f"HTTP/1.0 503 Service Unavailable\r\nContent-Length: {len(_FULL)}\r\nRetry-After: 60\r\n"
            request.sendall(f"{head}Content-Type: text/plain; charset=utf-8\r\n\r\n{_FULL}".encode())
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, then let the next one in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that hangs up: nothing may be printed into a run's display."""


def address(port: int, key: str) -> str:
    """Where a page is."""
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
    timeout = 60  # seconds that a connection may be silent

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
        """Send the news; the page gets our faults too, and keeps asking."""
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
        """The host that the request names, without its port: behind a tunnel that is another one."""
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
"""What is drawn: title and caption. A figure without any value is not shown."""


def watch_page(watched: RunList, interval: float) -> str:
    """The page's HTML; it asks for news every `interval` seconds."""
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
    script = f"const watching = {settings};\n{_asset('runs.js')}\n{_asset('watch.js')}"
    return page.html(live=script, style=_asset("watch.css"))


@cache
def _asset(name: str) -> str:
    return files("residua.watch").joinpath(name).read_text(encoding="utf-8")


@contextmanager
def serve_page(folder: Path, tell: Callable[[str], object]) -> Iterator[None]:
    """Serve the page of the run in `folder` inside the block; `tell` says where, or why not.

    By a process of its own: whatever happens to it, the run continues. The run opens the socket, so that the address is
    known at once, and hands it on. The other process imports no torch, runs at low priority, only reads, and ends when
    the run does, however that ends: its standard input closes then. Pages that are open get the last numbers first.
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
            start_new_session=True,  # Ctrl-C is for the run, which saves first
        )
        assert process.stdin is not None
        process.stdin.write(f"{key}\n".encode())  # not as an argument: others could read it there
        process.stdin.flush()
        for line in how_to_open(listening.getsockname()[1], key):
            tell(line)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        if process.stdin is not None:
            process.stdin.close()
    with suppress(subprocess.TimeoutExpired):  # it ends by itself soon
        process.wait(PATIENCE)


def main() -> None:
    """The other process: arguments are the run's folder and the socket's number; standard input begins with the key."""
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
