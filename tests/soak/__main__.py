"""`python -m tests.soak`: 200 signals at random moments over runs of every kind of checkpoint; prints a table."""

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--signals", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", type=float, default=0.04, help="share of starts by torchrun and python -m")
    parser.add_argument("--out", type=Path, help="write the table to this Markdown file")
    asked = parser.parse_args()

    from tests.soak.faults import deal, open_disk
    from tests.soak.runs import KINDS
    from tests.soak.soak import Soak, page

    chance = random.Random(asked.seed)
    decks = {kind: deal(-(-asked.signals // len(KINDS)), chance) for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, open_disk(Path(folder) / "disk") as disk:
        soak = Soak(Path(folder), disk, decks, chance=chance, commands=asked.commands, tell=tell)
        soak.conduct()
    text = page(soak, f"python -m tests.soak --signals {asked.signals} --seed {asked.seed}")
    print(text)
    if asked.out is not None:
        asked.out.write_text(text, encoding="utf-8")
    sys.exit(any(fault.wrong for fault in soak.injected))


def tell(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
