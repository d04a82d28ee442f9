"""Text in, batches out: corpora, tokenizers, memory-mapped datasets, and a loader that resumes exactly."""

from residua.data.corpus import Corpus as Corpus
from residua.data.corpus import open_corpus as open_corpus
from residua.data.dataset import Dataset as Dataset
from residua.data.dataset import Split as Split
from residua.data.dataset import unigram_entropy as unigram_entropy
from residua.data.loader import Batch as Batch
from residua.data.loader import Loader as Loader
from residua.data.loader import validation_batches as validation_batches
from residua.data.loader import whole_text as whole_text
from residua.data.pipeline import prepare as prepare
from residua.data.pipeline import train_tokenizer as train_tokenizer
from residua.data.readers import DataError as DataError
from residua.data.stdlib import embedded as embedded
from residua.data.stdlib import standard_library as standard_library
from residua.data.tokenizer import Tokenizer as Tokenizer
