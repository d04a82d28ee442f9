"""plotly.js as pages carry it: the cartesian build, compressed, inside the page.

The whole plotly.js is 4.8 MB. The cartesian build draws all that Residua draws (lines, bars, heat maps) in 1.5 MB, and
0.66 MB as base64 of its gzip, which `page.js` unpacks. A file beside the page would be shared by the pages of one
folder only, and a page that is mailed alone would lose its plots; so each page carries its own copy.

The file is `plotly-cartesian.min.js` of npm's plotly.js-cartesian-dist-min, unchanged (MIT, plotly-LICENSE.txt).
"""

from __future__ import annotations

from base64 import b64encode
from functools import cache
from importlib.resources import files

VERSION = "4.1.1"
SHA256 = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"
"""Of the unpacked file."""
_FILE = "plotly-cartesian.min.js.gz"


def packed() -> bytes:
    """The gzip file."""
    return files("residua.report").joinpath(_FILE).read_bytes()


@cache
def script() -> str:
    """The element that carries it; `page.js` unpacks and runs it before it draws."""
    return f'<script type="application/gzip" id="plotly">{b64encode(packed()).decode()}</script>'
