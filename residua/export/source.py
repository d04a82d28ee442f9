"""The modelling file of an export, made of the source that the library itself runs."""

from __future__ import annotations

import hashlib

import residua
from residua.config.model import ModelConfig
from residua.export.emit import Emitter
from residua.export.facts import Facts
from residua.export.reachability import Reach
from residua.export.sources import Definition, Sources

MODELING = "residua.export.modeling"
CONFIGURATION = "residua.export.configuration"
WHOLE = frozenset({MODELING, "residua.export.bridge", "residua.export.plain"})

HEADER = '''"""A language model with Residua's depth architecture, for Hugging Face transformers.

Written by `residua export` (Residua {version}) from the library's own source, for exactly the parts this model uses;
a comment names the file that each part is from. Where Residua is installed, its decoder runs instead, with kernels.
"""

from __future__ import annotations

'''


def modeling_source(config: ModelConfig) -> str:
    """`modeling_residua.py` for a model of this configuration."""
    sources = Sources()
    # the head is outside the decoder, whose own is therefore the embedding
    facts = Facts(ModelConfig(**config.model_dump() | {"head": {"kind": "tied"}}), sources)
    roots = [Definition(MODELING, name) for name in ("ResiduaModel", "ResiduaForCausalLM")]
    reach = Reach(roots, sources, facts, whole=WHOLE, elsewhere=frozenset({CONFIGURATION}))
    reach.settle()
    return HEADER.format(version=residua.__version__) + Emitter(reach).source()


def configuration_source(modeling: str) -> str:
    """`configuration_residua.py` to stand beside a modelling file.

    transformers takes two configuration files with the same text for one class, and runs for both folders the
    modelling file it saw first: so the text names the modelling file it belongs to.
    """
    fingerprint = hashlib.sha256(modeling.encode()).hexdigest()[:16]
    return f'{Sources().text(CONFIGURATION).text}\n\nMODELING = "{fingerprint}"  # of modeling_residua.py\n'
