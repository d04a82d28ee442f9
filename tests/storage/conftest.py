"""The small run of tests/train, and commands that must refuse."""

from tests.cli.conftest import say as say
from tests.cli.conftest import sentence as sentence
from tests.train.conftest import config as config
from tests.train.conftest import data as data
from tests.train.conftest import lab as lab
