"""Tokenizers of the `tokenizers` library: train a byte-level BPE, load, save, and count bytes.

The folder that `save_tokenizer` writes is one that transformers' AutoTokenizer loads.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fmegatron.data.files import make_folder, write_text
from fmegatron.errors import UserError

END_OF_TEXT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>")
SIDE_FILES = ("special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and its end-of-document token.

    backend: the `tokenizers.Tokenizer`; eod_token: text of the token that ends a document, None if it has none;
    config: the contents of tokenizer_config.json; side_files: further files to be saved beside it, {name: text}.
    """

    backend: tokenizers.Tokenizer
    eod_token: str | None = END_OF_TEXT
    config: dict[str, Any] = field(default_factory=dict)
    side_files: dict[str, str] = field(default_factory=dict)

    @property
    def eod(self) -> int | None:
        """The id of the token that ends a document."""
        return None if self.eod_token is None else self.backend.token_to_id(self.eod_token)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id: what a model's embedding must hold at least."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text; add_special_tokens adds what the tokenizer puts around a text, such as a first token.

        As in transformers, the written form of a special token inside the text becomes that token.
        """
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several texts, on all cores (the library's threads)."""
        return [encoding.ids for encoding in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


def train_bpe(texts: Iterable[str], *, vocab_size: int = 4096, eod_token: str = END_OF_TEXT) -> Tokenizer:
    """Train a byte-level BPE (as GPT-2's) that can encode any text without loss.

    A small corpus may have too few pairs for vocab_size: then the vocabulary is smaller.
    Raises UserError for a vocab_size below 257 (256 bytes and the end-of-document token).
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size <= len(alphabet):
        raise UserError(
            f"vocab_size={vocab_size} is too small for a byte-level tokenizer: give at least {len(alphabet) + 1}"
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[eod_token], initial_alphabet=sorted(alphabet), show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, eod_token)


def load_tokenizer(path: str | os.PathLike[str], *, eod_token: str | None = None) -> Tokenizer:
    """Load tokenizer.json, or a folder that holds one.

    The end-of-document token is eod_token, else the folder's `eos_token`, else a well-known name in the vocabulary.
    Raises UserError if there is no such file, it cannot be read, or eod_token is not in its vocabulary.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise UserError(
            f"tokenizer={str(path)!r} has no tokenizer.json: give that file or its folder "
            "(transformers writes one by AutoTokenizer(…).save_pretrained(folder))"
        )
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{file} is not a tokenizer of the `tokenizers` library ({error}): give a tokenizer.json"
        ) from None
    backend.no_truncation()  # a tokenizer saved with a length limit would silently drop the rest of each document
    backend.no_padding()
    config = _read_json(file.parent / "tokenizer_config.json")
    side_files = {
        name: (file.parent / name).read_text(encoding="utf-8") for name in SIDE_FILES if (file.parent / name).is_file()
    }
    if eod_token is None:
        named = config.get("eos_token") or _read_json(file.parent / "special_tokens_map.json").get("eos_token")
        eod_token = named.get("content") if isinstance(named, dict) else named
        candidates = [eod_token] if eod_token else list(KNOWN_ENDS)
        eod_token = next((token for token in candidates if backend.token_to_id(token) is not None), None)
    elif backend.token_to_id(eod_token) is None:
        raise UserError(f"eod_token={eod_token!r} is not in the vocabulary of {file}: name a token that is")
    return Tokenizer(backend, eod_token, config, side_files)


def save_tokenizer(tokenizer: Tokenizer, folder: str | os.PathLike[str]) -> None:
    """Write tokenizer.json and tokenizer_config.json (and a chat template, if it came with one), each at once."""
    folder = Path(folder)
    make_folder(folder)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False} | tokenizer.config
    if tokenizer.eod_token is not None:
        config.setdefault("eos_token", tokenizer.eod_token)
    for name, text in tokenizer.side_files.items():
        write_text(folder / name, text)
    write_text(folder / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    write_text(folder / "tokenizer.json", tokenizer.backend.to_str(pretty=True))


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises UserError if the tokenizer has ids that a model of this vocab_size has no row for."""
    if tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens but the model's vocab_size is {vocab_size}: "
            f"set vocab_size to at least {tokenizer.vocab_size}, or use the model's own tokenizer"
        )


def text_bytes(tokenizer: Tokenizer, documents: Iterable[np.ndarray], *, batch: int = 256) -> int:
    """UTF-8 bytes of the text of whole documents of token ids, special tokens not counted."""
    total = 0
    waiting: list[list[int]] = []

    def count() -> int:
        texts = tokenizer.backend.decode_batch(waiting, skip_special_tokens=True)
        return sum(len(text.encode("utf-8")) for text in texts)

    for document in documents:
        waiting.append(document.tolist())
        if len(waiting) == batch:
            total += count()
            waiting.clear()
    return total + count()


def bits_per_byte(loss: float, tokens: int, size: int) -> float:
    """A mean loss in nats per token as bits per byte, where `tokens` predictions cover a text of `size` bytes."""
    return loss * tokens / (size * math.log(2.0))


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): mend it or take it out") from None
    return value if isinstance(value, dict) else {}
