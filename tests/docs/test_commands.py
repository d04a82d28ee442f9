"""Every command in the documentation and in the help texts is one that Residua understands, and, tiny, runs."""

import glob
import re
import subprocess
from pathlib import Path

import pytest

from residua.cli.main import VERBS
from residua.config.run import RunConfig
from residua.config.variants import changed, overrides
from tests.docs.commands import (
    NOT_EXECUTED,
    PAGES,
    ROOT,
    Command,
    blocks,
    commands,
    every_command,
    help_commands,
    parse,
)
from tests.docs.world import World, shrunk, sources
from tests.trained import residua


def test_code_blocks_with_commands_are_marked_as_bash() -> None:
    unmarked = [
        f"{page.relative_to(ROOT)}:{line}"
        for page in PAGES
        for line, language, text in blocks(page)
        if language != "bash" and re.search(r"^\s*(residua [a-z]|torchrun |\$ )", text, re.M)
    ]
    assert unmarked == [], "begin these blocks with ```bash, so that their commands are tested"


@pytest.mark.slow
def test_every_documented_command_parses() -> None:
    found = [command for command in every_command() if command.arguments is not None]
    assert len(found) > 100
    _check_understood(found)


@pytest.mark.slow
def test_every_example_in_a_help_text_parses() -> None:
    found = help_commands()
    assert {command.page.split()[1] for command in found} == set(VERBS)
    _check_understood(found)


def _check_understood(found: list[Command]) -> None:
    for command in found:
        try:
            verb, parameters = parse(command.arguments or [])
            _check_settings(verb, parameters)
        except BaseException as error:
            pytest.fail(f"{command.page}:{command.line}: {error}", pytrace=False)


def _check_settings(verb: str, parameters: dict) -> None:
    """Refuse overrides, presets, variants and entries that do not exist."""
    if verb == "train":
        source, changes = parameters["source"], parameters["changes"] or []
        if source is not None and "=" in source:
            source, changes = None, [source, *changes]
        changed(
            _run(source), [change for change in changes if "channel_gain" not in change and ".start=" not in change]
        )
    elif verb == "compare":
        _check_study(parameters)
    elif verb in ("bench step", "bench curve", "bench plan"):
        base = changed(_run(parameters["preset"]), parameters["overrides"] or [])
        _check_cases(base, ",".join(parameters.get("compare") or []))
    elif verb in ("bench prefill", "bench decode"):
        for preset in parameters["presets"] or ["mgr-s-prenorm"]:
            _check_cases(_run(preset), parameters["compare"])
    elif verb == "reproduce" and parameters["entry"] is not None:
        from residua.reproduce.entry import load

        load(parameters["entry"])


def _run(source: str | None) -> RunConfig:
    return RunConfig.find("tiny" if source is None or source.endswith(".toml") else source)


def _check_cases(base: RunConfig, cases: str) -> None:
    from residua.bench.step import read_cases

    read_cases(base, cases.split(",") if cases else [])


def _check_study(parameters: dict) -> None:
    base = _run(parameters["base"]).override(parameters["change"] or [])
    for name in parameters["what"] or []:
        if name != "base" and "/" not in name and not name.endswith((".toml", ".json")):
            base.override(overrides([name], base.model))
    for size in (parameters["sizes"] or "").split(","):
        _run(size or None)


def test_every_unexecuted_command_has_a_reason() -> None:
    found = [str(command) for command in every_command()]
    used = {pattern: [text for text in found if re.search(pattern, text)] for pattern in NOT_EXECUTED}
    for pattern, texts in used.items():
        print(f"{NOT_EXECUTED[pattern]}:", *texts, sep="\n  ")
    assert [pattern for pattern, texts in used.items() if not texts] == []


def test_every_documented_make_target_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.M))
    named = {
        target
        for page in [*PAGES, ROOT / "Makefile"]
        for target in re.findall(r"`make ([a-z]+)`", page.read_text(encoding="utf-8"))
    }
    assert named <= targets


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    return World(tmp_path_factory.mktemp("world"))


@pytest.mark.nightly
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_run_in_order(page: Path, world: World, tmp_path: Path, monkeypatch) -> None:
    wanted = [command for command in commands(page) if command.reason is None]
    if not wanted:
        pytest.skip("no commands")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RESIDUA_CACHE", str(world.place / "cache"))
    monkeypatch.setattr("builtins.input", lambda *_: "")
    sources(tmp_path)
    failed = [str(command) for command in wanted if not _runs(command, world, tmp_path, monkeypatch)]
    assert failed == []


def _runs(command: Command, world: World, folder: Path, monkeypatch) -> bool:
    if command.words[0] == "export":
        monkeypatch.setenv(*command.words[1].split("=", 1))
        return True
    if command.arguments is None:
        return subprocess.run(command.words, check=False).returncode == 0
    world.supply(folder, command)
    verb, parameters = parse(command.arguments)
    words = [found for word in shrunk(command, verb, parameters) for found in sorted(glob.glob(word)) or [word]]
    print(f"\n$ residua {' '.join(words)}", flush=True)
    return residua(monkeypatch, *words) == 0
