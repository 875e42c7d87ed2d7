"""Data: text to token files (`prepare`, `preprocess`), and token files to batches (`TokenDataset`, `Blend`)."""

from fmegatron.data.blend import Blend, parse_blend
from fmegatron.data.corpus import Corpus, Document, builtin_corpus, find_corpus, read_documents
from fmegatron.data.dataset import TokenDataset, eval_batches, make_batch, unigram_entropy
from fmegatron.data.indexed import Indexed, IndexedWriter, check_tokens, merge, open_indexed, token_dtype
from fmegatron.data.prepare import Prepared, prepare, prepared
from fmegatron.data.preprocess import Stats, encode_documents, preprocess, write_documents
from fmegatron.data.tokenizer import (
    Tokenizer,
    bits_per_byte,
    check_vocab,
    load_tokenizer,
    save_tokenizer,
    text_bytes,
    train_bpe,
)

__all__ = [
    "Blend",
    "Corpus",
    "Document",
    "Indexed",
    "IndexedWriter",
    "Prepared",
    "Stats",
    "TokenDataset",
    "Tokenizer",
    "bits_per_byte",
    "builtin_corpus",
    "check_tokens",
    "check_vocab",
    "encode_documents",
    "eval_batches",
    "find_corpus",
    "load_tokenizer",
    "make_batch",
    "merge",
    "open_indexed",
    "parse_blend",
    "prepare",
    "prepared",
    "preprocess",
    "read_documents",
    "save_tokenizer",
    "text_bytes",
    "token_dtype",
    "train_bpe",
    "unigram_entropy",
    "write_documents",
]
