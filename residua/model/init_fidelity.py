"""How well a part that starts as another keeps what the model computes."""

from __future__ import annotations

from enum import IntEnum

from torch import nn

from residua.errors import UserError


class InitFidelity(IntEnum):
    """From best to worst, so that the worst of several parts is their maximum.

    UP_TO_EPS: what differs is a positive factor on the input of a norm that takes it out but for its eps. NEARLY: the
    part says in its docstring what differs. NOT: the function changes; weights that fit are taken all the same.
    """

    EXACTLY = 0
    UP_TO_EPS = 1
    NEARLY = 2
    NOT = 3

    @property
    def words(self) -> str:
        return {"EXACTLY": "exactly", "UP_TO_EPS": "up to the norms' eps", "NEARLY": "nearly", "NOT": "not"}[self.name]


class WeightsMismatch(UserError):
    """The parameters of one part do not fit into another; `retrofit` names the keys that differ."""


def take_parameters(part: nn.Module, old: nn.Module, *, but: str | None = None) -> None:
    """Give a part the parameters and buffers of another, which lacks the submodule `but` and has all the rest."""
    theirs = old.state_dict()
    ours = {name: own for name, own in part.state_dict().items() if name.partition(".")[0] != but}
    for name in sorted(ours | theirs):
        if name not in ours or name not in theirs or ours[name].shape != theirs[name].shape:
            raise WeightsMismatch(f"{name} of {type(part).__name__} does not fit the model to start from.")
    part.load_state_dict(theirs, strict=False)
