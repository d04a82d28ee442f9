"""What several tests of this folder share."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def copied_code(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """transformers copies the code of a folder it opens: here into a folder of the tests' own, and without a word."""
    from transformers import dynamic_module_utils
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    before = dynamic_module_utils.HF_MODULES_CACHE
    dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))
    yield
    dynamic_module_utils.HF_MODULES_CACHE = before
