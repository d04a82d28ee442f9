"""`python -m tests.fuzz`: 2,000 damaged files, one at a time, and the commands that read them; prints a table."""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_INTERPRET", "1")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run only this one and show what it printed")
    parser.add_argument("--quick", action="store_true", help="only what `make test` runs: no exports, no studies")
    asked = parser.parse_args()

    from tests.fuzz.fuzz import Fuzzer
    from tests.fuzz.preload import preload

    preload(full=not asked.quick)
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        fuzzer = Fuzzer(Path(folder), full=not asked.quick, seed=asked.seed)
        if asked.case is None:
            fuzzer.control(asked.cases)
        for number in range(asked.cases) if asked.case is None else [asked.case]:
            case = fuzzer.run(number)
            counts[case.reader.name, case.outcome] += 1
            if case.wrong or asked.case is not None:
                print(f"{case}\n", flush=True)
    print(f"{'command':<24}{'refused':>9}{'harmless':>9}{'failed':>9}")
    for name in [*dict.fromkeys(name for name, _ in counts), "all"]:
        row = [sum(n for (reader, o), n in counts.items() if o == kind and name in (reader, "all"))
               for kind in ("refused", "harmless", "failed")]  # fmt: skip
        print(f"{name:<24}" + "".join(f"{count:>9}" for count in row))
    sys.exit(any(outcome == "failed" for _, outcome in counts))


if __name__ == "__main__":
    main()
