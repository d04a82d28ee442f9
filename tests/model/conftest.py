import pytest

from residua.model import decoder
from tests.golden.attention import rotary


@pytest.fixture
def exact_rotary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary angles in float64 instead of the product's float32, so that whole models compare to rounding."""
    monkeypatch.setattr(decoder, "rotary_table", lambda *table: rotary(*table[:3]))
