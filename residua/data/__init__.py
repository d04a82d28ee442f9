"""Text in, batches out: corpora, tokenizers, memory-mapped datasets, and a loader that resumes exactly."""

from residua.data.corpus import Corpus, open_corpus
from residua.data.dataset import Dataset, Split, unigram_entropy
from residua.data.loader import Batch, Loader, validation_batches, whole_text
from residua.data.pipeline import prepare, train_tokenizer
from residua.data.readers import DataError
from residua.data.stdlib import embedded, standard_library
from residua.data.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "Corpus",
    "DataError",
    "Dataset",
    "Loader",
    "Split",
    "Tokenizer",
    "embedded",
    "open_corpus",
    "prepare",
    "standard_library",
    "train_tokenizer",
    "unigram_entropy",
    "validation_batches",
    "whole_text",
]
