"""`residua doctor`: list installed and missing packages, test this machine, and suggest fixes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from residua.cli.options import option, say

if TYPE_CHECKING:
    from residua.doctor.findings import Check, Finding
    from residua.report.terminal import ProgressBars

app = typer.Typer(rich_markup_mode=None, add_completion=False)


@app.command()
def doctor(
    as_json: Annotated[bool, option("Print JSON, for a bug report or a script.", "--json")] = False,
    quick: Annotated[
        bool, option("Only inspect: import no optional packages and skip the self-test.", "--quick")
    ] = False,
) -> None:
    """Check this installation: packages, the device, and every kernel against its reference.

    \b
    residua doctor
    residua doctor --quick
    residua doctor --json > doctor.json

    The first self-test on a GPU takes longer, since it compiles the kernels in up to 8 processes. The exit status is 1
    if a check fails.
    """
    from residua.doctor import findings as show
    from residua.report.terminal import ProgressBars, open_console

    findings: list[Finding] = []
    console = open_console(None)
    with nullcontext() if as_json else ProgressBars(console) as bars:
        for finding in show.run_checks(checks(quick, bars)):
            if not as_json:
                show.print_finding(console, finding, findings[-1] if findings else None)
            findings.append(finding)
    if as_json:
        print(json.dumps(show.as_json(findings), indent=1))
    else:
        say(console, f"\n{show.closing(findings)}")
    if not show.passed(findings):
        raise typer.Exit(1)


def checks(quick: bool, bars: ProgressBars | None = None) -> list[tuple[str, Check]]:
    """The checks in order; each imports what it needs when it runs."""
    from residua.doctor import environment

    named: list[tuple[str, Check]] = [
        ("machine", environment.machine),
        ("packages", lambda: environment.packages(environment.requirements(), imported=not quick)),
    ]
    return named if quick else [*named, ("device", environment.accelerator), ("self-test", partial(_self_test, bars))]


def _self_test(bars: ProgressBars | None) -> Iterator[Finding]:
    from residua.doctor.kernels import self_test
    from residua.machine import choose_device

    yield from self_test(choose_device("auto"), progress=None if bars is None else bars.track("self-test"))
