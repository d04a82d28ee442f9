"""The small run of tests/train."""

from tests.train.conftest import config as config
from tests.train.conftest import data as data
from tests.train.conftest import lab as lab
