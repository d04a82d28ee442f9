"""Learning rates that a module asks for: some parameters should learn slower or faster than the rest of their group."""

from __future__ import annotations

from torch import nn

from residua.errors import UserError


class RatedModule(nn.Module):
    """A module that declares learning-rate factors for its own parameters.

    The optimizer, Muon or AdamW, trains such a parameter at factor · η instead of its group's η. Weight decay is part
    of a step and scales with it.
    """

    def rate_factors(self) -> dict[str, float]:
        """Factors above 0, by the name of a parameter or of a list or dictionary of parameters; the default is 1."""
        raise NotImplementedError(f"{type(self).__name__} is a RatedModule but does not define `rate_factors`")


def declared_factors(model: nn.Module) -> dict[str, float]:
    """All factors other than 1 in a model, by parameter name."""
    factors: dict[str, float] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, RatedModule):
            continue
        names = dict(module.named_parameters())
        for declared, factor in module.rate_factors().items():
            matches = [name for name in names if name == declared or name.startswith(f"{declared}.")]
            if not matches or factor <= 0:
                raise UserError(
                    f"{type(module).__name__}.rate_factors gives '{declared}' the factor {factor:g}: name a parameter "
                    "of the module, or a list or dictionary of them, and give it a factor above 0."
                )
            factors |= {f"{prefix}.{name}".lstrip("."): factor for name in matches if factor != 1}
    return factors
