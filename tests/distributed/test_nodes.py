"""Several nodes: they must share the run's folder, and a run survives the loss of one of them."""

import gzip
import json
import re
import time
from pathlib import Path

import pytest

from residua.model.size import shapes
from residua.train.trainer import train
from tests.distributed.conftest import TRAIN, Ranks, curve
from tests.distributed.launch import LIMIT, nodes

pytestmark = pytest.mark.slow


def places(folder: Path) -> list[Path]:
    """The working folders of two nodes."""
    found = [folder / "node-a", folder / "node-b"]
    for place in found:
        place.mkdir()
    return found


def test_nodes_that_do_not_share_the_folder_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    """A relative --out in two working folders. Each node would write its half of every checkpoint."""
    one, other = places(tmp_path)
    ranks.start(2, "parallel.shard=2", out="runs/mine", beat=0.25, places=[one, other])
    said = ranks.wait()
    assert ranks.codes == [2, 2], said
    assert re.fullmatch(
        rf"residua: the ranks do not share the run's folder: {other}/runs/mine on \S+ \(rank 1\) does not "
        rf"contain what rank 0 wrote there \({one}/runs/mine on \S+\): set --out to a path on a disk that all "
        r"nodes share, .*\n",
        said[0],
    ), said
    assert said[1] == ""
    assert not list(one.iterdir()) and not list(other.iterdir())


def test_checkpoint_split_over_two_disks_is_not_published(ranks: Ranks, tmp_path: Path) -> None:
    """The second save: by then a node has lost the shared disk."""
    (tmp_path / "elsewhere").mkdir()
    ranks.start(2, "parallel.shard=2", astray=["step-4", 1, str(tmp_path / "elsewhere")], beat=0.25)
    said = ranks.wait()
    assert all(ranks.codes)
    assert re.search(
        r"residua: could not write \S+step-4: shard-00002-model-00001-of-00001.safetensors, which rank 1 "
        r"wrote, is incomplete in the folder of rank 0, so the nodes no longer share its disk; the last good "
        r"checkpoint is "
        r"\S+step-2",
        said[0],
    ), said
    assert ranks.saved() == [2]


@pytest.mark.nightly  # in `make test`, test_runs.py has torchrun restart a job of one node
@pytest.mark.parametrize("by", ["node", "SIGKILL"])
def test_run_on_two_nodes_survives_the_death_of_one(ranks: Ranks, tmp_path: Path, by: str) -> None:
    """A rank is killed, or its node with the agent of torchrun: another takes its place, and the run continues."""
    train(ranks.recipe, tmp_path / "alone")
    asked = ranks.spec("parallel.shard=2", dies={"rank": 1, "after": 5, "by": by}, beat=0.25)
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
    assert ranks.from_steps() == [0, 4]
    assert curve(ranks.run) == pytest.approx(curve(tmp_path / "alone"), abs=1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("dead", [0, 3])
def test_dead_rank_is_named_once_per_node(ranks: Ranks, dead: int) -> None:
    ranks.start(4, "parallel.data=4", dies={"rank": dead, "after": 3}, beat=0.5, per_node=2)
    said = ranks.wait()
    for node in (said[:2], said[2:]):
        named = re.findall(r"residua: rank (\d) \(.*\) died, last heard of after step (\d);", "".join(node))
        assert named == [(str(dead), "3")] and "".join(node).count("residua: ") == 1, said


SHORT = "data.validation_tokens=1"
"""The slow rank of these tests waits in the last validation too."""


def test_run_traces_chosen_steps_and_names_a_slow_rank(ranks: Ranks) -> None:
    ranks.start(2, "parallel.shard=2", "train.steps=3", "train.profile=[2]", SHORT, slow=[1, 0.3])
    said = ranks.wait()
    assert ranks.codes == [0, 0], said
    assert said[0].count("is slow:") == 1 and "rank 1 on" in said[0], said
    assert f"step 2 was traced: open {ranks.run}/profile/step-2-rank-0.json.gz in" in said[0]
    for rank in (0, 1):
        trace = json.loads(gzip.decompress((ranks.run / f"profile/step-2-rank-{rank}.json.gz").read_bytes()))
        assert {event["name"] for event in trace["traceEvents"]} >= {"aten::mm", "gloo:all_reduce"}
    assert len(list((ranks.run / "profile").iterdir())) == 2
    lines = ranks.records("ranks")
    assert [line["step"] for line in lines] == [1, 2, 3] and {tuple(line["slow"]) for line in lines} == {(1,)}
    assert all(300 <= line["forward_ms"][1] < 1e5 for line in lines)


@pytest.mark.nightly
def test_pipeline_of_unequal_stages_names_no_slow_rank(ranks: Ranks) -> None:
    """Its summary also counts the whole model."""
    ranks.start(2, "parallel.pipeline=2", "train.steps=3", SHORT, slow=[1, 0.3])
    said = ranks.wait()
    assert ranks.codes == [0, 0], said
    assert "is slow:" not in said[0]
    lines = ranks.records("ranks")
    assert len(lines) == 3 and all(line["slow"] == [] and line["forward_ms"][1] >= 300 for line in lines)
    counts = [int(count) for count in re.findall(r" in (\d+) tensors", said[0])]
    assert sum(counts) == len(list(shapes(ranks.recipe.model).parameters())), said[0]


def test_step_that_hangs_is_reported_with_the_last_collectives(ranks: Ranks) -> None:
    """All ranks are alive, and one does not compute. The last collective of each rank shows which."""
    dies = {"rank": 1, "after": 3, "by": "hang", "patience": 1}
    ranks.start(2, "parallel.data=2", dies=dies, beat=0.25)
    leader, other = ranks.started
    records, until = [ranks.run / f"collectives-rank-{rank}.json" for rank in (0, 1)], time.monotonic() + LIMIT
    while "no step finished" not in leader.said() or not all(path.exists() for path in records):
        assert time.monotonic() < until, [leader.said(), other.said()]
        time.sleep(0.05)
    where = f"after step 3; the last collectives of each rank are in {ranks.run}/collectives-"
    assert f"no step finished within 1 seconds {where}" in leader.said()
    assert "no step finished" not in other.said()
    ahead, behind = (json.loads(path.read_text())["gloo"]["entries"] for path in records)
    assert len(ahead) > len(behind) and ahead[-1]["profiling_name"].startswith("gloo:")
