"""The .bin/.idx files: Megatron's bytes exactly, round trips, atomic writing, and every kind of damage named."""

import struct
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from fmegatron.data import IndexedWriter, check_tokens, merge, open_indexed, token_dtype
from fmegatron.errors import UserError

# Five documents of one sequence each, uint16: the .idx that Megatron-LM itself writes for them.
LENGTHS = (7, 3, 9, 4, 6)
INDEX = bytes.fromhex(
    "4d4d49444944580000" "0100000000000000" "08" "0500000000000000" "0600000000000000"
    "07000000" "03000000" "09000000" "04000000" "06000000"
    "0000000000000000" "0e00000000000000" "1400000000000000" "2600000000000000" "2e00000000000000"
    "0000000000000000" "0100000000000000" "0200000000000000" "0300000000000000" "0400000000000000" "0500000000000000"
)  # fmt: skip


def corpus() -> list[list[int]]:
    """Document i holds 10i + 1, 10i + 2, …"""
    return [[10 * i + j + 1 for j in range(length)] for i, length in enumerate(LENGTHS)]


def write(prefix: Path, documents, dtype="u2") -> str:
    with IndexedWriter(prefix, dtype) as out:
        for sequences in documents:
            out.add_document(sequences)
    return str(prefix)


def test_bytes_are_megatrons(tmp_path):
    prefix = write(tmp_path / "a", [[document] for document in corpus()])
    assert len(INDEX) == 142
    assert Path(prefix + ".idx").read_bytes() == INDEX
    assert Path(prefix + ".bin").read_bytes() == struct.pack("<29H", *sum(corpus(), []))


def test_reads_megatrons_bytes(tmp_path):
    (tmp_path / "a.idx").write_bytes(INDEX)
    (tmp_path / "a.bin").write_bytes(struct.pack("<29H", *sum(corpus(), [])))
    data = open_indexed(tmp_path / "a")
    assert [data.sequence(i).tolist() for i in range(5)] == corpus()
    assert [[s.tolist() for s in data.document(k)] for k in range(5)] == [[document] for document in corpus()]
    assert data.document_bounds.tolist() == [0, 7, 10, 19, 23, 29]
    assert open_indexed(str(tmp_path / "a.bin")).prefix == str(tmp_path / "a")


def test_modes_at_the_end_are_read(tmp_path):
    (tmp_path / "a.idx").write_bytes(INDEX + bytes([0, 1, 0, 1, 1]))
    (tmp_path / "a.bin").write_bytes(bytes(58))
    assert open_indexed(tmp_path / "a").modes.tolist() == [0, 1, 0, 1, 1]


@pytest.mark.parametrize("size, name", [(None, "int32"), (100, "uint16"), (65499, "uint16"), (65500, "int32")])
def test_dtype_by_vocabulary(size, name):
    assert token_dtype(size).name == name


sequences = st.lists(st.integers(0, 127), max_size=6)
documents = st.lists(st.lists(sequences, max_size=3), max_size=8)


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(documents, st.sampled_from(["u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2"]))
def test_round_trip(tmp_path_factory, wanted, dtype):
    prefix = write(tmp_path_factory.mktemp("x") / "deep" / "a", wanted, dtype)
    data = open_indexed(prefix)
    assert data.tokens.dtype == np.dtype(dtype)
    assert [[s.tolist() for s in data.document(k)] for k in range(data.num_documents)] == wanted
    assert data.tokens.tolist() == [t for document in wanted for sequence in document for t in sequence]


@hypothesis.settings(deadline=None, max_examples=30)
@hypothesis.given(st.lists(sequences, max_size=8))
def test_many_documents_at_once_equal_one_by_one(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("x")
    write(folder / "a", [[text] if text else [] for text in texts])
    with IndexedWriter(folder / "b", "u2") as out:
        out.add_documents(np.array(sum(texts, []), np.int32), [len(text) for text in texts])
    assert (folder / "a.idx").read_bytes() == (folder / "b.idx").read_bytes()
    assert (folder / "a.bin").read_bytes() == (folder / "b.bin").read_bytes()


def test_merge(tmp_path):
    one, two = [[[1, 2], [3]], []], [[[4]], [[], [5, 6]]]
    merged = tmp_path / "c"
    merge([write(tmp_path / "a", one), write(tmp_path / "b", two)], merged)
    data = open_indexed(merged)
    assert [[s.tolist() for s in data.document(k)] for k in range(4)] == one + two
    with pytest.raises(UserError, match="one dtype"):
        merge([tmp_path / "a", write(tmp_path / "d", two, "i4")], tmp_path / "e")


def test_nothing_is_left_after_an_error(tmp_path):
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "new" / "a", "u2") as out:
        out.add_document([[1, 2]])
        assert not (tmp_path / "new" / "a.bin").exists()
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_an_old_pair_survives_a_failed_rewrite(tmp_path):
    prefix = write(tmp_path / "a", [[[1, 2, 3]]])
    with pytest.raises(RuntimeError), IndexedWriter(prefix, "u2") as out:
        out.add_document([[4]])
        raise RuntimeError
    assert open_indexed(prefix).tokens.tolist() == [1, 2, 3]


def test_ids_that_do_not_fit(tmp_path):
    for bad in ([70000], [-1], [0.5]):
        with pytest.raises(UserError, match="do not fit dtype=uint16"):
            write(tmp_path / "a", [[bad]])
    with pytest.raises(UserError, match="dtype=uint32"):
        IndexedWriter(tmp_path / "a", "u4")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot make the folder"):
        IndexedWriter(tmp_path / "file" / "a", "u2")


def damaged(at: int, new: bytes) -> bytes:
    return INDEX[:at] + new + INDEX[at + len(new) :]


@pytest.mark.parametrize(
    "index, size, message",
    [
        (b"", 58, "does not begin with MMIDIDX"),
        (INDEX[:20], 58, "does not begin with MMIDIDX"),
        (b"X" + INDEX[1:], 58, "does not begin with MMIDIDX"),
        (damaged(9, b"\2"), 58, "version 2"),
        (damaged(17, b"\x09"), 58, "dtype code 9"),
        (INDEX[:-1], 58, "has 141 bytes where its header"),
        (INDEX + b"ab", 58, "has 144 bytes where its header"),
        (damaged(25, b"\xff"), 58, "cut short"),
        (INDEX, 57, "57 bytes, no multiple of 2"),
        (INDEX, 56, "holds 28 tokens but"),
        (INDEX, 0, "holds 0 tokens but"),
        (damaged(62, b"\x10"), 58, "back to back"),
        (damaged(54, b"\x02"), 58, "back to back"),
        (damaged(102, b"\3"), 58, "document boundaries"),
        (damaged(134, b"\4"), 58, "document boundaries"),
        (damaged(94, b"\1"), 58, "document boundaries"),
    ],
)
def test_damage_is_named(tmp_path, index, size, message):
    (tmp_path / "a.idx").write_bytes(index)
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with pytest.raises(UserError, match=message) as caught:
        open_indexed(tmp_path / "a")
    assert str(tmp_path / "a.") in str(caught.value)


def test_missing_files(tmp_path):
    with pytest.raises(UserError, match="no file .*a.idx"):
        open_indexed(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(INDEX)
    with pytest.raises(UserError, match="no file .*a.bin"):
        open_indexed(tmp_path / "a")


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_token_outside_the_vocabulary_is_located(tmp_path, chunk):
    data = open_indexed(write(tmp_path / "a", [[[1, 2]], [], [[3], [4, 9, 9]]]))
    check_tokens(data, 10, chunk=chunk)
    with pytest.raises(UserError, match=r"token id 9 at position 2 of document 2 .* \[0, 9\)"):
        check_tokens(data, 9, chunk=chunk)


def test_first_token_of_a_document_is_located(tmp_path):
    data = open_indexed(write(tmp_path / "a", [[[1, 2]], [], [], [[9, 3]]]))
    with pytest.raises(UserError, match="token id 9 at position 0 of document 3"):
        check_tokens(data, 9)


def test_negative_token_is_located(tmp_path):
    data = open_indexed(write(tmp_path / "a", [[[1, 2]], [[3, -4]]], "i4"))
    with pytest.raises(UserError, match="token id -4 at position 1 of document 1"):
        check_tokens(data, 100)
