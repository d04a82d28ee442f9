"""Seconds of a first step with empty caches, by PyTorch's own clocks of its passes, inner ones included in outer.

python tools/first_step.py mgr-s-prenorm train.accumulate=1 train.compile=layers
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from tempfile import TemporaryDirectory


def main() -> None:
    """Build the step of a preset, run it once, and print clock, seconds and calls, the longest first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset")
    parser.add_argument("changes", nargs="*", metavar="SECTION.KEY=VALUE")
    given = parser.parse_args()
    with TemporaryDirectory() as empty, ExitStack() as open_ranks:
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{empty}/inductor", "TRITON_CACHE_DIR": f"{empty}/triton"}
        os.environ["XDG_CACHE_HOME"] = empty

        from torch._dynamo.utils import compilation_time_metrics

        from residua.bench.step import Case, build_case
        from residua.config.run import RunConfig
        from residua.config.variants import changed
        from residua.machine import choose_device
        from residua.train.timing import first_step

        config = changed(RunConfig.find(given.preset), given.changes)
        device = choose_device(config.train.device, "train.device")
        _, seconds = first_step(build_case(Case("first", config), device, open_ranks), config)
        print(f"{seconds:8.2f} s  the first step of {' '.join([given.preset, *given.changes])} on {device}")
        for name, times in sorted(compilation_time_metrics.items(), key=lambda pair: -sum(pair[1])):
            print(f"{sum(times):8.2f} s  {len(times):5}  {name}")


if __name__ == "__main__":
    main()
