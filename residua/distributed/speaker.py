"""Many ranks find the same mistake and one says it. Free of torch: the command line ends every mistake here."""

from __future__ import annotations

import os
import sys
import time
from typing import NoReturn

# Long enough for rank 0 to come as far as the others: the first rank to end makes torchrun end all of them.
GRACE = 20.0


def refuse(mistake: Exception) -> NoReturn:
    """Say a person's mistake in one sentence and end the process.

    Under torchrun rank 0 says it, and torchrun ends those that wait. One that is still there after that has found what
    rank 0 has not (a missing GPU, a file that another machine lacks), and says it; of several the first on a machine.
    """
    if int(os.environ.get("RANK", 0)) > 0:
        time.sleep(GRACE + int(os.environ.get("LOCAL_RANK", 0)))
    print(f"residua: {mistake}", file=sys.stderr, flush=True)
    sys.exit(2)
