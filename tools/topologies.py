"""Draw how information flows along depth: `make map` writes docs/img/topology-KIND.svg, one per topology.

Nothing is drawn by hand. Each junction of a small model runs on random tensors, and its results are solved for what it
was given: which lanes of the state a sublayer's output was written to, which lanes were mixed, and which the next
sublayer reads. A topology is a weighted sum of its lanes, with weights that may depend on them, so this is exact.
"""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from residua.config import choices
from residua.model.context import Input, one_read
from residua.model.topology import State, Topology, build_topology

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "img"
SUBLAYERS, WIDTH = 6, 96
OPTIONS: dict[str, dict[str, object]] = {
    "block_attnres": {"sublayers_per_block": 2},
    "boundary_attnres": {"sublayers_per_block": 2},
    "delta_attnres": {"sublayers_per_block": 2},
    "multi_gate": {"streams": 3},
    "injection": {"prelude": 1, "loop": 1, "turns": 2},
    "gated_residual": {"streams": 3},
    "frac": {"fractions": 1},
    "hyper": {"streams": 3},
    "hyper_single_pass": {"streams": 3},
    "mhc": {"streams": 3},
    "mhc_lite": {"streams": 3},
}
DRAWN_AS = dict.fromkeys(["hyper_single_pass", "mhc", "mhc_lite"], "hyper")
"""Kinds whose picture would be that of another kind."""
ALIKE = {"gain": 1.0, "weight": 1.0, "scales": 0.5, "up": 0.0, "rate": 0.0, "step_size": -0.4, "input": 0.7}
"""Parameters that scale lanes by channel, and a value with which all channels are scaled alike."""


class Lane(NamedTuple):
    """What one junction does to one lane of the state."""

    output: float
    """The weight of the sublayer's output in it."""
    kept: float
    """The weight of what it held before; 0 in a new lane."""
    mixed: list[int]
    """The other lanes that flow into it."""
    new: bool
    bent: bool
    """Whether large values are cut off."""


class Junction(NamedTuple):
    """What happens between two sublayers: the lanes after it, and the weights of the next reader."""

    lanes: list[Lane]
    reads: dict[int, float]


def trace(topology: Topology) -> list[Junction]:
    """Every junction of a topology of `SUBLAYERS`, and before them how the embedding enters."""
    with torch.no_grad():
        for name, parameter in topology.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.3)
            for part in set(name.split(".")) & set(ALIKE):
                parameter.fill_(ALIKE[part])
            if name.endswith("bias") and parameter.shape[-1] == WIDTH:  # weights of channels are drawn as one
                parameter.copy_(parameter[..., :1].abs().expand_as(parameter))
        x = torch.randn(1, 1, WIDTH, dtype=torch.float64)
        h, state = _read(topology.open(x))
        # every lane is the embedding or a multiple; the first sublayer gets one of them, or a weighted sum of all
        entered, share = len(_lanes(state)), float(h.flatten() @ x.flatten() / x.square().sum())
        same = [i for i, lane in enumerate(_lanes(state)) if torch.equal(lane, h.flatten())]
        read = {same[0]: 1.0} if same else dict.fromkeys(range(entered), share / entered)
        found = [Junction([Lane(1.0, 0.0, [], True, False)] * entered, read)]
        for k in range(SUBLAYERS):
            y = torch.randn(1, 1, WIDTH, dtype=torch.float64)
            given = _random_like(state)
            h, after = _read(topology.step(k, y, given))
            found.append(_junction(_lanes(given), y.flatten(), _lanes(after), h.flatten(), _bends(topology, k, state)))
            state = after
    return found


def _read(opened: tuple[Input, State]) -> tuple[Tensor, State]:
    """Of several reads, the picture shows r."""
    h, state = opened
    return one_read(h), state


def _lanes(state: tuple[Tensor, ...]) -> list[Tensor]:
    """The state's vectors of the model's width; what it carries besides (logits of weights) is left out."""
    wide = [tensor for tensor in state if tensor.shape[-1] == WIDTH]
    return [vector for tensor in wide for vector in tensor.reshape(-1, WIDTH)]


def _random_like(state: tuple[Tensor, ...], scale: float = 1.0) -> tuple[Tensor, ...]:
    """Independent lanes: those of a real model can be copies of each other."""
    return tuple(scale * torch.randn(t.shape, dtype=t.dtype) if t.shape[-1] == WIDTH else t for t in state)


def _bends(topology: Topology, k: int, state: tuple[Tensor, ...]) -> list[bool]:
    y, given = torch.randn(1, 1, WIDTH, dtype=torch.float64), _random_like(state, 1e6)
    _, after = topology.step(k, y, given)
    return [_solve([*_lanes(given), y.flatten()], lane)[1] > 1e-6 for lane in _lanes(after)]


def _solve(parts: list[Tensor], whole: Tensor) -> tuple[list[float], float]:
    """Weights with which the parts add up to the whole, and the relative error that is left."""
    matrix = torch.stack(parts, 1)
    weights = torch.linalg.lstsq(matrix, whole[:, None]).solution[:, 0]
    error = (matrix @ weights - whole).norm() / whole.norm()
    return [0.0 if abs(w) < 1e-9 else float(w) for w in weights], float(error)


def _junction(before: list[Tensor], y: Tensor, after: list[Tensor], h: Tensor, bent: list[bool]) -> Junction:
    lanes = []
    for i, lane in enumerate(after):
        weights, error = _solve([*before, y], lane)
        assert error < 1e-6, "a lane is not a sum of the lanes before it and the output"
        others = [j for j, weight in enumerate(weights[:-1]) if weight and j != i]
        kept = weights[i] if i < len(before) else 0.0
        lanes.append(Lane(weights[-1], kept, others, i >= len(before), bent[i]))
    same = [i for i, lane in enumerate(after) if torch.equal(lane, h)]
    if same:
        return Junction(lanes, {same[0]: 1.0})
    reads, error = _solve(after, h)
    assert error < 1e-6, "an input is not a sum of lanes"
    return Junction(lanes, {i: weight for i, weight in enumerate(reads) if weight})


COLUMN, LEFT, TOP, LANE, BOX, MARGIN = 104, 96, 58, 24, 64, 16
WORDS = {
    "read": "read",
    "weigh": "read with a learned weight",
    "add": "added",
    "gate": "written with a learned weight",
    "mix": "mixed by learned weights",
    "clip": "clip: cut off at a limit",
}


def draw(kind: str) -> str:
    """The picture of one kind of topology as SVG; it is light or dark as the page around it is."""
    choice = {t.model_fields["kind"].default: t for t in choices.TopologyChoice.alternatives()}[kind]
    torch.manual_seed(0)
    topology = build_topology(choice(**OPTIONS.get(kind, {})), SUBLAYERS, WIDTH).double()
    junctions = trace(topology)
    lanes = max(len(junction.lanes) for junction in junctions)
    bottom = TOP + 34 + LANE * (lanes - 1)
    parts, used = _boxes(), set()
    for lane in range(lanes):
        born = next(k for k, junction in enumerate(junctions) if lane < len(junction.lanes))
        parts.append(line(_write_x(born), _y(lane), _read_x(len(junctions) - 1), _y(lane), "lane"))
    for k, junction in enumerate(junctions):
        parts += _writes(k, junction, used) + _reads(k, junction, used)
    width = LEFT + COLUMN * SUBLAYERS + BOX + MARGIN
    legend = _legend([name for name in WORDS if name in used], bottom + 34)
    head = HEAD.format(width=width, height=bottom + 50, title=escape(_title(kind)), words=escape(_words(junctions)))
    return "\n".join([head, *parts, *legend, "</svg>", ""])


def _x(k: int) -> int:
    """The left edge of sublayer k's box; -1 is the embedding, the last is the head."""
    return LEFT + COLUMN * k


def _read_x(k: int) -> int:
    return _x(k) + 14


def _write_x(k: int) -> int:
    """Where the output of sublayer k - 1 comes down; for k = 0 the embedding's."""
    return _x(k - 1) + BOX - 14 if k else MARGIN + 54


def _y(lane: int) -> int:
    return TOP + 34 + LANE * lane


def line(x1: int, y1: int, x2: int, y2: int, style: str) -> str:
    """A straight line in one of the picture's styles."""
    return f'<path class="{style}" d="M{x1} {y1}L{x2} {y2}"/>'


def _boxes() -> list[str]:
    names = ["embedding", *("attention" if k % 2 == 0 else "FFN" for k in range(SUBLAYERS)), "head"]
    places = [(MARGIN, 68), *((_x(k), BOX) for k in range(SUBLAYERS)), (_x(SUBLAYERS), BOX)]
    return [
        f'<rect class="box" x="{x}" y="{MARGIN}" width="{width}" height="30" rx="5"/>'
        f'<text x="{x + width / 2:g}" y="{MARGIN + 19}" text-anchor="middle">{name}</text>'
        for name, (x, width) in zip(names, places, strict=True)
    ]


def _writes(k: int, junction: Junction, used: set[str]) -> list[str]:
    x, parts = _write_x(k), []
    written = [i for i, lane in enumerate(junction.lanes) if lane.output]
    parts.append(line(x, MARGIN + 30, x, _y(max(written)), "write"))
    for i in written:
        lane = junction.lanes[i]
        if lane.new and not lane.mixed:
            parts.append(f'<circle class="start" cx="{x}" cy="{_y(i)}" r="3.5"/>')
        elif _one(lane.output) and (_one(lane.kept) or lane.new):
            parts.append(_plus(x, _y(i)))
            used.add("add")
        else:
            parts.append(f'<path class="gate" d="M{x} {_y(i) - 7}l7 7l-7 7l-7 -7z"/>')
            used.add("gate")
        if lane.bent:
            parts.append(f'<text class="small" x="{x + 10}" y="{_y(i) - 5}">clip</text>')
            used.add("clip")
    mixing = [i for i, lane in enumerate(junction.lanes) if lane.mixed and not (lane.new and _one(lane.output))]
    if mixing:
        touched = sorted({*mixing, *(j for i in mixing for j in junction.lanes[i].mixed)})
        top, bottom = _y(touched[0]) - 8, _y(touched[-1]) + 8
        parts.append(f'<rect class="mix" x="{x + 12}" y="{top}" width="7" height="{bottom - top}" rx="3.5"/>')
        used.add("mix")
    return parts


def _reads(k: int, junction: Junction, used: set[str]) -> list[str]:
    x, seen = _read_x(k), sorted(junction.reads)
    parts = [line(x, _y(seen[-1]), x, MARGIN + 30, "read"), f'<path class="tip" d="M{x} {MARGIN + 31}l-4 8h8z"/>']
    for i in seen:
        plain = _one(junction.reads[i])
        style = "dot" if plain else "dot learned"
        used.add("read" if plain else "weigh")
        parts.append(f'<circle class="{style}" cx="{x}" cy="{_y(i)}" r="4.5"/>')
    return parts


def _one(weight: float) -> bool:
    return abs(weight - 1) < 1e-9


def _plus(x: int, y: int) -> str:
    return f'<circle class="add" cx="{x}" cy="{y}" r="7"/><path class="sign" d="M{x - 4} {y}h8M{x} {y - 4}v8"/>'


def _legend(names: list[str], y: int) -> list[str]:
    marks = {
        "read": f'<circle class="dot" cx="0" cy="{y - 4}" r="4.5"/>',
        "weigh": f'<circle class="dot learned" cx="0" cy="{y - 4}" r="4.5"/>',
        "add": _plus(0, y - 4),
        "gate": f'<path class="gate" d="M0 {y - 11}l7 7l-7 7l-7 -7z"/>',
        "mix": f'<rect class="mix" x="-3" y="{y - 12}" width="7" height="16" rx="3.5"/>',
        "clip": "",
    }
    parts, x = [], MARGIN + 8
    for name in names:
        word = f'<text class="small" x="12" y="{y}">{WORDS[name]}</text>'
        parts.append(f'<g transform="translate({x} 0)">{marks[name]}{word}</g>')
        x += 28 + 6 * len(WORDS[name])
    return parts


def _title(kind: str) -> str:
    return f"How information flows along depth in {kind}"


def _words(junctions: list[Junction]) -> str:
    """The picture in words."""
    names = ["the first sublayer", *(f"sublayer {k + 1}" for k in range(1, SUBLAYERS)), "the head"]
    said = []
    for k, junction in enumerate(junctions):
        lanes = ", ".join(str(i + 1) for i in sorted(junction.reads))
        said.append(f"{names[k]} reads lane{'s' * (len(junction.reads) > 1)} {lanes}")
    return f"{SUBLAYERS} sublayers, {len(junctions[-1].lanes)} lanes at the end: " + "; ".join(said) + "."


HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" \
font-family="system-ui, sans-serif" font-size="12">
<title>{title}</title><desc>{words}</desc>
<style>
.back{{fill:#fff}}.box{{fill:#eef2f8;stroke:#8a94a6}}text{{fill:#1c2430}}.small{{font-size:11px}}
.lane{{stroke:#8a94a6;stroke-width:2.5}}.write,.read{{stroke:#56607a;stroke-width:1.3;fill:none}}
.start,.tip{{fill:#56607a}}.dot{{fill:#56607a}}.learned{{fill:#b3470b}}
.add{{fill:#fff;stroke:#56607a;stroke-width:1.3}}.sign{{stroke:#56607a;stroke-width:1.3}}
.gate{{fill:#b3470b}}.mix{{fill:#7a4bb8}}
@media (prefers-color-scheme:dark){{.back{{fill:#1e2129}}.box{{fill:#2c3340;stroke:#7d889c}}text{{fill:#e6eaf2}}
.lane{{stroke:#7d889c}}.write,.read{{stroke:#a9b4c8}}.start,.tip,.dot{{fill:#a9b4c8}}.learned,.gate{{fill:#ff9a57}}
.add{{fill:#1e2129;stroke:#a9b4c8}}.sign{{stroke:#a9b4c8}}.mix{{fill:#bd93f9}}}}
</style>
<rect class="back" width="100%" height="100%"/>"""


def made() -> dict[Path, str]:
    """The content of every picture, by path."""
    ours = (t for t in choices.TopologyChoice.alternatives() if t.__module__.startswith("residua."))  # no plugin's
    kinds = [t.model_fields["kind"].default for t in ours]
    return {PICTURES / f"topology-{kind}.svg": draw(kind) for kind in kinds if kind not in DRAWN_AS}


def write(pictures: dict[Path, str]) -> None:
    """Write every picture that has changed, and name it."""
    for path, content in pictures.items():
        if not path.exists() or path.read_text(encoding="utf-8") != content:
            path.write_text(content, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    write(made())
