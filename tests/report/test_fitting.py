"""Tables on narrow terminals."""

from io import StringIO

import pytest
from rich.console import Console

from residua.report.terminal import new_table

HEADS = ("parameters", "step ms", "p10–p90", "time ×", "tokens/s", "memory ×", "reported")
ROWS = (
    ("prenorm", "0.92M", "728.38", "728.38–729.96", "1.000", "1,406", "1.000", "acc_norm"),
    ("mgr+exoformer_dynamic", "0.93M", "801.25", "800.10–803.44", "1.100", "1,279", "1.200", ""),
)


def printed(width: int) -> list[str]:
    table = new_table(("case",), HEADS)
    for row in ROWS:
        table.add_row(*row)
    console = Console(file=StringIO(), width=width)
    console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [24, 40, 60, 80, 85, 90, 100, 110])
def test_a_table_never_truncates_a_number(width: int) -> None:
    lines = printed(width)
    assert all(len(line.rstrip()) <= width for line in lines) and not any("…" in line for line in lines)
    words = " ".join(lines).split()
    for row in ROWS:
        for cell in row[1:]:
            for part in cell.replace("–", "– ").replace("_", "_ ").split():
                assert any(part in word for word in words), (part, width)


def test_a_table_that_fits_is_unchanged() -> None:
    lines = [line for line in printed(120) if line.strip()]
    assert len(lines) == 4  # heads, a line, two rows
    assert "800.10–803.44" in lines[3] and lines[3].split()[0] == "mgr+exoformer_dynamic"


def test_rows_become_paragraphs_if_words_do_not_fit() -> None:
    lines = [line.rstrip() for line in printed(60)]
    assert lines[0] == "prenorm"
    assert lines[1] == "  parameters 0.92M, step ms 728.38, p10–p90 728.38–729.96,"
    second = lines.index("mgr+exoformer_dynamic")
    assert lines[second - 1] == "  reported acc_norm" and "reported" not in " ".join(lines[second:])
