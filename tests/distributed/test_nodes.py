"""Several nodes: they must share the run's folder, and a run survives the loss of one of them."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from residua.config.run import RunConfig
from residua.model.size import shapes
from residua.storage.checkpoint import checkpoints
from residua.storage.run import read_metrics
from residua.train.trainer import train
from tests.distributed.launch import LIMIT, nodes, start
from tests.distributed.test_runs import TRAIN, curve, recipe, spec  # noqa: F401
from tests.train.conftest import config, data  # noqa: F401

pytestmark = pytest.mark.slow


def places(folder: Path) -> list[Path]:
    """The working folders of two nodes."""
    found = [folder / "node-a", folder / "node-b"]
    for place in found:
        place.mkdir()
    return found


def test_nodes_that_do_not_share_the_folder_are_refused_in_one_sentence(
    recipe: RunConfig,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A relative --out in two working folders. Each node would write its half of every checkpoint."""
    one, other = places(tmp_path)
    asked = spec(tmp_path / "asked", recipe, out="runs/mine", changes=["parallel.shard=2"], beat=0.25)
    ranks = start(2, TRAIN, asked, places=[one, other])
    said = [rank.wait() for rank in ranks]
    assert [rank.process.exitcode for rank in ranks] == [2, 2], said
    assert re.fullmatch(
        rf"residua: the ranks do not share the run's folder: {other}/runs/mine on \S+ \(rank 1\) does not hold what "
        rf"rank 0 wrote there \({one}/runs/mine on \S+\): give --out a path on a disk that all nodes share, .*\n",
        said[0],
    ), said
    assert said[1] == ""
    assert not list(one.iterdir()) and not list(other.iterdir())


def test_a_checkpoint_whose_parts_lie_on_two_disks_does_not_get_its_name(
    recipe: RunConfig,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The second save: by then a node has lost the shared disk."""
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    asked: dict[str, Any] = {"changes": ["parallel.shard=2"], "astray": ["step-4", 1, str(elsewhere)], "beat": 0.25}
    ranks = start(2, TRAIN, spec(tmp_path / "asked", recipe, out=str(run), **asked))
    said = [rank.wait() for rank in ranks]
    assert all(rank.process.exitcode for rank in ranks)
    assert re.search(
        r"residua: could not write \S+step-4: shard-00002-model-00001-of-00001.safetensors, which rank 1 wrote, is not "
        r"whole in the folder of rank 0, so the nodes do not share its disk any more; the last good checkpoint is "
        r"\S+step-2",
        said[0],
    ), said
    assert [found.step for found in checkpoints(run)] == [2]


@pytest.mark.parametrize("by", ["node", pytest.param("SIGKILL", marks=pytest.mark.nightly)])
def test_a_run_on_two_nodes_survives_the_death_of_one(recipe: RunConfig, tmp_path: Path, by: str) -> None:  # noqa: F811
    """A rank is killed, or its node with the agent of torchrun: then another takes its place. The run goes on."""
    run, alone = tmp_path / "shared" / "run", tmp_path / "alone"
    train(recipe, alone)
    dies = {"rank": 1, "after": 5, "by": by}
    asked = spec(tmp_path / "asked", recipe, out=str(run), changes=["parallel.shard=2"], dies=dies, beat=0.25)
    one, other = places(tmp_path)
    with nodes() as node:
        agents = [node(one, 2, TRAIN, asked), node(other, 2, TRAIN, asked)]
        if by == "node":
            agents.pop().process.join(LIMIT)
            agents.append(node(other, 2, TRAIN, asked))
        said = [agent.wait() for agent in agents]
        assert [agent.process.exitcode for agent in agents] == [0, 0], said
    named = r"residua: rank 1 \(process \d+ on .*\) died, .* `torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint "
    assert re.search(named, "".join(said)), said
    sessions = json.loads((run / "environment.json").read_text())["sessions"]
    assert [session["from_step"] for session in sessions] == [0, 4]
    assert curve(run) == pytest.approx(curve(alone), abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("dead", [0, 3])
def test_a_dead_rank_is_named_once_on_each_node(recipe: RunConfig, tmp_path: Path, dead: int) -> None:  # noqa: F811
    dies = {"rank": dead, "after": 3}
    asked = spec(
        tmp_path / "asked", recipe, out=str(tmp_path / "run"), changes=["parallel.data=4"], dies=dies, beat=0.5
    )
    ranks = start(4, TRAIN, asked, per_node=2)
    said = [rank.wait() for rank in ranks]
    for node in (said[:2], said[2:]):
        named = re.findall(r"residua: rank (\d) \(.*\) died, last heard of after step (\d);", "".join(node))
        assert named == [(str(dead), "3")] and "".join(node).count("residua: ") == 1, said


SHORT = "data.validation_tokens=1"
"""The slow rank of these tests waits in the last validation too."""


def test_a_run_traces_chosen_steps_and_names_a_slow_rank(recipe: RunConfig, tmp_path: Path) -> None:  # noqa: F811
    run = tmp_path / "run"
    changes = ["parallel.shard=2", "train.steps=3", "train.profile=[2]", SHORT]
    asked = spec(tmp_path / "asked", recipe, out=str(run), changes=changes, slow=[1, 0.3])
    leader, other = start(2, TRAIN, asked)
    said = [leader.wait(), other.wait()]
    assert [leader.process.exitcode, other.process.exitcode] == [0, 0], said
    assert said[0].count("computes slowly") == 1 and "rank 1 on" in said[0], said
    assert f"step 2 was traced: open {run}/profile/step-2-rank-0.json.gz in" in said[0]
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((run / f"profile/step-2-rank-{rank}.json.gz").read_bytes()))
        assert {event["name"] for event in trace["traceEvents"]} >= {"aten::mm", "gloo:all_reduce"}
    assert len(list((run / "profile").iterdir())) == 2
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "ranks"]
    assert [line["step"] for line in lines] == [1, 2, 3] and {tuple(line["slow"]) for line in lines} == {(1,)}
    assert all(300 <= line["forward_ms"][1] < 1e5 for line in lines)


def test_a_pipeline_of_unlike_stages_names_no_slow_rank_and_counts_the_whole_model(
    recipe: RunConfig,  # noqa: F811
    tmp_path: Path,
) -> None:
    run, changes = tmp_path / "run", ["parallel.pipeline=2", "train.steps=3", SHORT]
    asked = spec(tmp_path / "asked", recipe, out=str(run), changes=changes, slow=[1, 0.3])
    leader, other = start(2, TRAIN, asked)
    said = [leader.wait(), other.wait()]
    assert [leader.process.exitcode, other.process.exitcode] == [0, 0], said
    assert "computes slowly" not in said[0]
    lines = [line for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "ranks"]
    assert len(lines) == 3 and all(line["slow"] == [] and line["forward_ms"][1] >= 300 for line in lines)
    counts = [int(count) for count in re.findall(r" in (\d+) tensors", said[0])]
    assert sum(counts) == len(list(shapes(recipe.model).parameters())), said[0]


def test_a_step_that_hangs_is_reported_with_the_last_collectives(recipe: RunConfig, tmp_path: Path) -> None:  # noqa: F811
    """All ranks are alive, and one does not compute. What each sent last shows which."""
    run, dies = tmp_path / "run", {"rank": 1, "after": 3, "by": "hang", "patience": 1}
    asked = spec(tmp_path / "asked", recipe, out=str(run), changes=["parallel.data=2"], dies=dies, beat=0.25)
    ranks = start(2, TRAIN, asked)
    records, until = [run / f"collectives-rank-{rank}.json" for rank in (0, 1)], time.monotonic() + LIMIT
    try:
        while "no step was finished" not in ranks[0].said() or not all(path.exists() for path in records):
            assert time.monotonic() < until, [rank.said() for rank in ranks]
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
    where = (
        f"no step was finished in 1 seconds after step 3; the last collectives of each rank are in {run}/collectives-"
    )
    assert where in ranks[0].said() and "no step was finished" not in ranks[1].said()
    ahead, behind = (json.loads(path.read_text())["gloo"]["entries"] for path in records)
    assert len(ahead) > len(behind) and ahead[-1]["profiling_name"].startswith("gloo:")
