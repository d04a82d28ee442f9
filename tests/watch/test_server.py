"""The server answers this machine's own page only: one key, two addresses, GET, no other host."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread, Timer

import pytest

from residua.machine import python_environment
from residua.watch.run_list import RunList
from residua.watch.server import CONNECTIONS, Server, serve_page
from tests.trained import residua, train_run
from tests.watch.runs import lines, write_result, write_run


@contextmanager
def serving(*folders: Path, interval: float = 0.1) -> Iterator[Server]:
    opened = time.time()  # the clock stands still: on a busy machine a run would be called quiet before the page opens
    server = Server(RunList(folders, clock=lambda: opened), interval=interval)
    thread = Thread(target=lambda: server.serve_forever(0.01), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(write_run(tmp_path_factory.mktemp("runs") / "run", 100)) as found:
        yield found


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request(method, path, headers={"Host": f"127.0.0.1:{server.server_port}", **headers})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def test_the_page_and_its_updates_are_served(server: Server) -> None:
    status, headers, body = ask(server, f"/{server.key}/")
    assert status == 200 and headers["Content-Type"].startswith("text/html") and b"<title>run</title>" in body
    status, headers, body = ask(server, f"/{server.key}/news.json")
    assert status == 200 and json.loads(body)["runs"][0]["step"] == 100
    assert headers["Cache-Control"] == "no-store" and "connect-src 'self'" in headers["Content-Security-Policy"]


def test_only_this_machine_can_connect(server: Server) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::1].evil", "0.0.0.0"]
)
def test_requests_with_another_host_header_are_refused(server: Server, host: str) -> None:
    """DNS rebinding: a foreign page whose domain points here."""
    status, _, body = ask(server, f"/{server.key}/news.json", Host=host)
    assert status == 403 and b"run" not in body


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:9000", "127.0.0.1:1", "[::1]:80", "[::1]"])
def test_host_headers_of_a_tunnel_are_accepted(server: Server, host: str) -> None:
    assert ask(server, f"/{server.key}/news.json", Host=host)[0] == 200


@pytest.mark.parametrize(
    "path",
    ["/", "/wrong/", "/{key}", "/{key}/config.toml", "/{key}/../run/config.toml", "/{key}/%2e%2e/config.toml",
     "/{key}//etc/passwd", "/etc/passwd"],
)  # fmt: skip
def test_only_the_page_and_its_updates_are_served(server: Server, path: str) -> None:
    status, _, body = ask(server, path.replace("{key}", server.key))
    assert status == 404 and len(body) < 100


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    assert ask(server, f"/{server.key}/", method)[0] == 501


@pytest.mark.parametrize(
    "query",
    [
        "?since=x",
        "?since=-1",
        "?since=99999999999999999999",
        "?since=" + "9" * 5000,
        "?epoch=%00&since=",
        "?" + "a" * 3000,
    ],
)
def test_unusual_query_strings_are_answered(server: Server, query: str) -> None:
    assert ask(server, f"/{server.key}/news.json{query}")[0] == 200


@pytest.mark.parametrize(
    ("speed", "steps"), [("5e-324", "1000"), ("1e300", "9" * 400), ("1e308", "1000")], ids=["slow", "long", "fast"]
)
def test_an_infinite_time_left_is_not_shown(tmp_path: Path, speed: str, steps: str) -> None:
    run = write_run(tmp_path / "run", 100)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(re.sub(r'("tokens_per_second": )[\d.]+', rf"\g<1>{speed}", text))
    (run / "config.toml").write_text(f"[train]\nsteps = {steps}\n")
    with serving(run) as server:
        status, _, body = ask(server, f"/{server.key}/news.json")
    assert status == 200 and (json.loads(body)["left"] or 0.0) < 1.0


def test_a_numerical_error_is_reported(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.watched, "title", lambda now: 1 / 0)
    status, _, body = ask(server, f"/{server.key}/news.json")
    assert (status, body) == (500, b"The numbers of these runs cannot be shown (ZeroDivisionError: division by zero).")


def test_too_many_connections_are_refused_in_one_sentence(server: Server) -> None:
    place = ("127.0.0.1", server.server_port)
    idle = [socket.create_connection(place) for _ in range(CONNECTIONS)]
    status, _, body = ask(server, f"/{server.key}/news.json")
    assert status == 503 and body.startswith(b"This page already has 32 connections: close some of its tabs")
    for connection in idle:
        connection.close()
    while ask(server, f"/{server.key}/news.json")[0] == 503:
        time.sleep(0.01)


def test_an_ended_server_waits_only_for_open_pages(tmp_path: Path) -> None:
    with serving(write_run(tmp_path / "run", 100)) as server:
        began = time.monotonic()
        server.end()
        assert time.monotonic() - began < 5
        server.ended = False
        assert json.loads(ask(server, f"/{server.key}/news.json?page=mine")[2])["ended"] is False
        ending = Thread(target=server.end)
        ending.start()
        ending.join(0.2)
        assert ending.is_alive()
        assert json.loads(ask(server, f"/{server.key}/news.json?page=mine")[2])["ended"] is True
        ending.join(5)
        assert not ending.is_alive()


def test_folder_names_are_escaped(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<script>alert(1)<", 20)
    with serving(run) as server:
        assert b"<script>alert" not in ask(server, f"/{server.key}/")[2]


def test_responses_are_compressed_for_a_tunnel(server: Server) -> None:
    _, headers, body = ask(server, f"/{server.key}/news.json", **{"Accept-Encoding": "gzip"})
    assert headers["Content-Encoding"] == "gzip" and len(body) < 4000


@pytest.mark.slow
def test_the_command_prints_the_pages_url_and_ends_quietly(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "one", 50)
    command = [sys.executable, "-P", "-m", "residua", "watch"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=python_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    shown = [process.stdout.readline() for _ in range(3)]
    assert shown[0] == "Watching 1 run; Ctrl-C ends the page, not the runs.\n"
    found = re.fullmatch(r"Live page: http://127\.0\.0\.1:(\d+)/([\w-]+)/\n", shown[1])
    assert found is not None and f"ssh -N -L {found[1]}:127.0.0.1:{found[1]} " in shown[2]
    connection = http.client.HTTPConnection("127.0.0.1", int(found[1]))
    connection.request("GET", f"/{found[2]}/news.json")
    assert json.loads(connection.getresponse().read())["title"] == "runs is training"
    taken = subprocess.run([*command, "--port", found[1]], cwd=tmp_path, env=python_environment(), capture_output=True)
    assert taken.returncode == 2
    assert taken.stderr.decode() == f"residua: port {found[1]} is in use: choose another --port, or leave it out.\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate() == ("", "") and process.returncode == 0


def test_watch_imports_no_torch() -> None:
    code = "import sys, residua.watch.server, residua.cli.watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], env=python_environment()).returncode == 0


@pytest.mark.slow
def test_page_of_a_training_run_starts_and_ends_with_it(tmp_path: Path) -> None:
    said: list[str] = []
    with serve_page(tmp_path / "run", said.append):
        found = re.search(r"http://127\.0\.0\.1:(\d+)/([\w-]+)/", said[0])

        def news() -> dict:
            connection = http.client.HTTPConnection("127.0.0.1", int(found[1]))
            connection.request("GET", f"/{found[2]}/news.json?page=mine")
            return json.loads(connection.getresponse().read())

        assert news()["runs"][0]["state"] == "waiting"
        write_run(tmp_path / "run", 660)
        assert news()["runs"][0]["step"] == 660
        with (tmp_path / "run/metrics.jsonl").open("a") as file:
            file.write(lines(1000, 661))
        write_result(tmp_path / "run", 1000)
        later: list[dict] = []
        asking = Timer(1.0, lambda: later.append(news()))  # as a page does that has just asked
        asking.start()
    asking.join()
    assert later[0]["ended"] and (later[0]["runs"][0]["state"], later[0]["runs"][0]["step"]) == ("finished", 1000)
    with pytest.raises(ConnectionRefusedError):
        news()


@pytest.mark.slow
def test_the_page_ends_when_the_run_is_killed(tmp_path: Path) -> None:
    code = """
        import sys, time
        from pathlib import Path
        from residua.watch.server import serve_page
        with serve_page(Path(sys.argv[1]), lambda line: print(line, flush=True)):
            time.sleep(600)
        """
    code = "\n".join(line.removeprefix(" " * 8) for line in code.splitlines())
    run = subprocess.Popen(
        [sys.executable, "-P", "-c", code, str(tmp_path)], env=python_environment(), stdout=subprocess.PIPE
    )
    found = re.search(rb":(\d+)/", run.stdout.readline())
    with socket.create_connection(("127.0.0.1", int(found[1]))) as waiting:
        os.kill(run.pid, signal.SIGKILL)
        run.wait()
        run.stdout.close()
        with suppress(ConnectionResetError):  # or closed: the other process, which holds the connection, has ended
            while waiting.recv(1024):
                pass


def test_a_page_that_cannot_be_served_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **settings: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "create_server", refuse)
    said: list[str] = []
    with serve_page(tmp_path, said.append):
        pass
    reason = "the system refused a file: Too many open files"
    assert said == [f"The live page is off: {reason}; the run continues without it."]


@pytest.mark.slow
def test_run_trains_while_its_page_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    run = train_run(tmp_path)
    assert residua(monkeypatch, "train", "--resume", "--out", run, "train.steps=6", "--watch") == 0
    shown = capsys.readouterr().out
    assert re.match(r"Live page: http://127\.0\.0\.1:\d+/[\w-]+/\nFrom another machine: ssh -N -L ", shown)
    assert "Finished: validation loss" in shown
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("residua.cli.train._run", lambda *_: None)
    assert residua(monkeypatch, "train", "--resume", "--out", run, "--watch") == 0
    assert capsys.readouterr().out == ""
