"""`residua watch`: a live page of runs and studies, on this machine only."""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from residua.cli.options import argument, option
from residua.errors import UserError

if TYPE_CHECKING:
    from residua.watch.server import Server

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def watch(
    what: Annotated[
        list[Path] | None,
        argument("Run or study folders, or folders that contain them.", default="runs", metavar="RUN|STUDY..."),
    ] = None,
    port: Annotated[int | None, option("Port of the page.", default="a free one", min=1, max=65535)] = None,
) -> None:
    """Watch running and finished runs in a browser: curves, speed, ETA and recent messages.

    \b
    residua watch runs/wiki
    residua watch runs/mgr runs/prenorm
    residua watch runs
    residua watch runs/study --port 8080

    The page is served on this machine only, and nothing is sent elsewhere. To open it from another machine, use the
    printed ssh command. Ctrl-C ends the page and leaves the runs alone.
    """
    from residua.watch.run_list import check, find
    from residua.watch.server import how_to_open

    folders = what or [Path("runs")]
    if what is None and not folders[0].is_dir():
        raise UserError("there is no folder runs here: name a run or a study to watch.")
    check(folders)
    server = _open(folders, port)
    runs = len(find(folders))
    print(f"Watching {runs} run{'s' * (runs != 1)}; Ctrl-C ends the page, not the runs.")
    for line in how_to_open(server.server_port, server.key):
        print(line, flush=True)
    with suppress(KeyboardInterrupt):
        server.serve_forever()
    server.server_close()


def _open(folders: list[Path], port: int | None) -> Server:
    from residua.watch.run_list import RunList
    from residua.watch.server import Server

    try:
        return Server(RunList(folders), port or 0)
    except OSError as error:
        why = {errno.EADDRINUSE: "is in use", errno.EACCES: "needs more privileges than you have"}
        if port is None or error.errno not in why:
            raise
        raise UserError(f"port {port} {why[error.errno]}: choose another --port, or leave it out.") from None
