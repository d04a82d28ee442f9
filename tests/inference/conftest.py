"""transformers copies the code of a folder it opens: here into a folder of the tests' own."""

import sys

import pytest


@pytest.fixture(autouse=True, scope="session")
def _copied_code(tmp_path_factory):
    if "transformers" not in sys.modules:
        try:
            import transformers  # noqa: F401
        except ImportError:
            yield
            return
    from transformers import dynamic_module_utils
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    before = dynamic_module_utils.HF_MODULES_CACHE
    dynamic_module_utils.HF_MODULES_CACHE = str(tmp_path_factory.mktemp("modules"))
    yield
    dynamic_module_utils.HF_MODULES_CACHE = before
