"""JSON lines to Megatron's .bin/.idx: one document a line, tokenized in several processes, written as a stream."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fmegatron.data.corpus import Corpus, find_corpus, read_documents
from fmegatron.data.indexed import IndexedWriter, token_dtype
from fmegatron.data.tokenizer import Tokenizer, load_tokenizer
from fmegatron.errors import UserError

BATCH_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class Stats:
    """What was written. tokens counts end-of-document tokens too; bytes is the length of the text in UTF-8."""

    prefix: str
    documents: int
    tokens: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Encoded:
    """Some documents: token ids back to back (int32), length of each in tokens, bytes of their text in UTF-8."""

    tokens: np.ndarray
    lengths: list[int]
    bytes: int


def preprocess(
    input: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    tokenizer: Tokenizer | str | os.PathLike[str],
    *,
    key: str = "text",
    append_eod: bool = True,
    workers: int = 1,
) -> Stats:
    """Tokenize JSON lines (one file, several, or folders of them) into {output_prefix}_{key}_document.bin and .idx.

    Every line is a document; one with empty text adds a boundary and no token, as in Megatron-LM's preprocess_data.py.
    The output does not depend on `workers`, the number of processes; one works in this process, on the library's
    threads. Memory is bounded by a few batches of text. On any error nothing is left behind.
    Raises UserError for what `read_documents` refuses, no document at all, and append_eod without such a token.
    """
    start = time.perf_counter()
    tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else load_tokenizer(tokenizer)
    inputs = [input] if isinstance(input, (str, os.PathLike)) else list(input)
    corpora = [_jsonl_corpus(path, key) for path in inputs]
    documents = itertools.chain.from_iterable(read_documents(corpus) for corpus in corpora)
    prefix = f"{os.fspath(output_prefix)}_{key}_document"
    encoded = encode_documents((d.text for d in documents), tokenizer, append_eod=append_eod, workers=workers)
    return write_documents(encoded, prefix, tokenizer.vocab_size, start=start)


def write_documents(encoded: Iterable[Encoded], prefix: str, vocab_size: int, *, start: float | None = None) -> Stats:
    """Write encoded documents to PREFIX.bin/.idx. Raises UserError, leaving nothing, if they have no token."""
    start = time.perf_counter() if start is None else start
    documents = tokens = text_bytes = 0
    with IndexedWriter(prefix, token_dtype(vocab_size)) as out:
        for batch in encoded:
            out.add_documents(batch.tokens, batch.lengths)
            documents += len(batch.lengths)
            tokens += len(batch.tokens)
            text_bytes += batch.bytes
        if tokens == 0:
            raise UserError(
                f"no text at all for {prefix}.bin ({documents} documents, all empty): give a corpus with text in it"
            )
    return Stats(prefix, documents, tokens, text_bytes, time.perf_counter() - start)


def encode_documents(
    texts: Iterable[str], tokenizer: Tokenizer, *, append_eod: bool = True, workers: int = 1
) -> Iterator[Encoded]:
    """Token ids of texts, in order and in batches, each text a document; see `preprocess`."""
    if workers < 1:
        raise UserError(f"workers={workers} is not positive: give the number of processes")
    if append_eod and tokenizer.eod is None:
        raise UserError(
            "append_eod=True but the tokenizer has no end-of-document token: "
            "load it with eod_token=NAME, or set append_eod=False"
        )
    eod = tokenizer.eod if append_eod else None
    batches = _batches(texts)
    if workers == 1:
        return (encode_batch(tokenizer, batch, eod) for batch in batches)
    return _encode_in_processes(batches, tokenizer, eod, workers)


def encode_batch(tokenizer: Tokenizer, texts: Sequence[str], eod: int | None) -> Encoded:
    """Token ids of these texts, each that is not empty followed by `eod` unless that is None."""
    ids = tokenizer.encode_batch(texts)
    if eod is not None:
        for document in ids:
            if document:
                document.append(eod)
    lengths = [len(document) for document in ids]
    flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=sum(lengths))
    return Encoded(flat, lengths, sum(len(text.encode("utf-8")) for text in texts))


def _jsonl_corpus(path: str | os.PathLike[str], key: str) -> Corpus:
    """A file is read as JSON lines whatever its name; of a folder, its .jsonl files."""
    path = Path(path)
    if path.is_file():
        return Corpus(path.parent, (path.name,), key)
    if not path.is_dir():
        raise UserError(f"input={str(path)!r} does not exist: give a .jsonl file, several, or a folder of them")
    corpus = find_corpus(path, key=key)
    if corpus.key is None:
        names = tuple(sorted(p.relative_to(path).as_posix() for p in path.rglob("*.jsonl")))
        if not names:
            raise UserError(
                f"the folder input={str(path)!r} has no *.jsonl file: each line must be a JSON object with {key!r}"
            )
        corpus = Corpus(path, names, key)
    return corpus


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text) + 64  # so that many empty documents fill a batch too
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_in_processes(
    batches: Iterator[list[str]], tokenizer: Tokenizer, eod: int | None, workers: int
) -> Iterator[Encoded]:
    # Not forked from here: threads of torch and of the tokenizer may hold locks that the child would wait for. A clean
    # server process imports this module once, and the workers are forked from that.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    start = (tokenizer.backend.to_str(), eod)
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=start)
    waiting: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            waiting.append(pool.submit(_encode_in_worker, batch))
            if len(waiting) > 2 * workers:  # bounds the memory; results come back in order
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except (BrokenProcessPool, BrokenPipeError):  # the latter from a worker that dies while it starts
        raise UserError(
            f"one of workers={workers} processes died (no memory, or a script that calls preprocess without "
            "`if __name__ == '__main__':`): use workers=1 or fix that"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


_worker: tuple[Tokenizer, int | None] | None = None


def _start_worker(backend: str, eod: int | None) -> None:
    global _worker
    import tokenizers

    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process
    _worker = (Tokenizer(tokenizers.Tokenizer.from_str(backend), None), eod)


def _encode_in_worker(texts: list[str]) -> Encoded:
    assert _worker is not None
    tokenizer, eod = _worker
    return encode_batch(tokenizer, texts, eod)
