"""The one error of this package that a person can cause."""


class DataError(ValueError):
    """A corpus, tokenizer or dataset cannot be used; the message is one sentence that says why and what to do."""
