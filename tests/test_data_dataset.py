"""Batches: a pure function of (data, seed, step), by global row and column; Megatron's order and blends; evaluation."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from fmegatron.data import Blend, IndexedWriter, TokenDataset, eval_batches, parse_blend, unigram_entropy
from fmegatron.data.blend import blend, blend_exhaustive, blend_sizes
from fmegatron.data.megatron_order import megatron_order, megatron_split
from fmegatron.errors import UserError

LENGTHS = (7, 3, 9, 4, 6)  # the corpus of Megatron's test vectors; document i holds 10i + 1, 10i + 2, …


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> str:
    prefix = tmp_path_factory.mktemp("small") / "a"
    with IndexedWriter(prefix, "u2") as out:
        for i, length in enumerate(LENGTHS):
            out.add_document([[10 * i + j + 1 for j in range(length)]])
    return str(prefix)


@pytest.fixture(scope="module")
def stream(tmp_path_factory) -> str:
    """20 documents of 50 tokens: 0, 1, 2, … 999."""
    prefix = tmp_path_factory.mktemp("stream") / "a"
    with IndexedWriter(prefix, "u2") as out:
        for i in range(20):
            out.add_document([list(range(50 * i, 50 * i + 50))])
    return str(prefix)


# --- our own order


def test_an_epoch_predicts_every_token_once(stream):
    data = TokenDataset(stream, seq_len=9, seed=3)
    assert len(data) == 111
    first = data.batch(0, batch_size=111)
    assert first["tokens"].dtype == first["labels"].dtype == torch.int64 and first["mask"].all()
    assert torch.equal(first["labels"], first["tokens"] + 1)
    assert first["labels"].flatten().sort().values.tolist() == list(range(1, 1000))
    second = data.batch(1, batch_size=111)
    assert not torch.equal(first["tokens"], second["tokens"])
    assert torch.equal(first["tokens"].sort(0).values, second["tokens"].sort(0).values)


def test_batch_is_a_function_of_seed_and_sample_number_only(stream):
    whole = TokenDataset(stream, seq_len=9, seed=3).batch(0, batch_size=400)["tokens"]  # over three epochs' ends
    data = TokenDataset(stream, seq_len=9, seed=3)
    for size in (1, 7, 64):
        for step in (5, 0, 3):  # in any order
            assert torch.equal(data.batch(step, batch_size=size)["tokens"], whole[step * size : (step + 1) * size])
    other = TokenDataset(stream, seq_len=9, seed=4).batch(0, batch_size=400)["tokens"]
    assert not torch.equal(whole, other)


def test_the_order_stays_what_it_was(stream):
    """A changed order would silently change every resumed run: these numbers may never change."""
    got = TokenDataset(stream, seq_len=9, seed=3).batch(0, batch_size=6)["tokens"][:, 0]
    again = TokenDataset(stream, seq_len=9, seed=3).batch(37, batch_size=6)["tokens"][:, 0]
    assert (got // 9).tolist() == FIRST_EPOCH and (again // 9).tolist() == THIRD_EPOCH


FIRST_EPOCH = [98, 28, 95, 46, 107, 88]
THIRD_EPOCH = [83, 105, 104, 69, 102, 77]


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(st.data())
def test_rows_and_columns_are_parts_of_the_whole(small, data):
    order = data.draw(st.sampled_from(["shuffled", "sequential"]))
    dataset = TokenDataset(small, seq_len=5, seed=1, eod=13, order=order, mask_eod=data.draw(st.booleans()))
    step = data.draw(st.integers(0, 9))
    whole = dataset.batch(step, batch_size=4, packed=True)
    rows = data.draw(st.lists(st.integers(0, 3), max_size=5))
    columns = data.draw(st.lists(st.integers(0, 4), max_size=6))
    form = data.draw(st.sampled_from([list, np.array, torch.tensor]))
    part = dataset.batch(step, batch_size=4, rows=form(rows or [0]), columns=form(columns or [4]), packed=True)
    assert part.keys() == whole.keys() and set(part) - {"real"} == {"tokens", "labels", "mask", "segments", "positions"}
    for name, value in whole.items():
        assert torch.equal(part[name], value[rows or [0]][:, columns or [4]]), name


def test_only_the_wanted_rows_are_read(stream):
    data = TokenDataset(stream, seq_len=9)
    read = []
    sample = data.sample
    data.sample = lambda index: read.append(index) or sample(index)
    data.batch(3, batch_size=8, rows=torch.tensor([1, 6]))
    assert read == [25, 30]


def test_packed_documents(tmp_path):
    with IndexedWriter(tmp_path / "a", "u2") as out:
        out.add_documents(np.array([5, 6, 0, 7, 0, 0, 8, 9, 4, 3]), [3, 2, 1, 4])
    data = TokenDataset(tmp_path / "a", seq_len=9, eod=0, order="sequential", mask_eod=True)
    batch = data.batch(0, batch_size=1, packed=True)
    assert batch["tokens"].tolist() == [[5, 6, 0, 7, 0, 0, 8, 9, 4]]
    assert batch["segments"].tolist() == [[0, 0, 0, 1, 1, 2, 3, 3, 3]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 0, 0, 1, 2]]
    assert batch["mask"].int().tolist() == [[1, 1, 0, 1, 0, 0, 1, 1, 1]]


def test_filling_is_a_segment_of_its_own_and_does_not_count(tmp_path):
    with IndexedWriter(tmp_path / "a", "u2") as out:
        out.add_document([[5, 6, 7, 8, 9]])
    data = TokenDataset(tmp_path / "a", seq_len=3, eod=0, order="sequential")
    batch = data.batch(0, batch_size=3, packed=True)
    assert batch["tokens"].tolist() == [[5, 6, 7], [8, 9, 0], [0, 0, 0]]
    assert batch["labels"].tolist() == [[6, 7, 8], [9, 0, 0], [0, 0, 0]]
    assert batch["mask"].int().tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert batch["segments"].tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2], [0, 0, 1], [0, 1, 2]]


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(st.integers(1, 40), st.integers(1, 7), st.booleans())
def test_evaluation_counts_each_token_once(small, seq_len, batch_size, packed):
    data = TokenDataset(small, seq_len=seq_len, order="sequential", eod=13)
    batches = list(eval_batches(data, batch_size, packed=packed))
    assert all(batch["tokens"].shape == (batch_size, seq_len) for batch in batches)
    labels = torch.cat([batch["labels"][batch["mask"]] for batch in batches])
    inputs = torch.cat([batch["tokens"][batch["mask"]] for batch in batches])
    assert labels.tolist() == data.tokens[1:].tolist() and inputs.tolist() == data.tokens[:-1].tolist()
    assert all(batch["mask"].any() for batch in batches)


def test_evaluation_of_a_shuffled_dataset_is_in_order(stream):
    shuffled, plain = TokenDataset(stream, seq_len=9), TokenDataset(stream, seq_len=9, order="sequential")
    for a, b in zip(eval_batches(shuffled, 16), eval_batches(plain, 16), strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert len(list(eval_batches(plain, 16, limit=2))) == 2


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(st.lists(st.floats(0, 1), max_size=4))
def test_splits_share_nothing_and_leave_nothing_out(stream, cuts):
    ends = [0.0, *sorted(cuts), 1.0]
    seen = []
    for a, b in zip(ends, ends[1:], strict=False):
        if round(a * 20) < round(b * 20):  # whole documents of 50 tokens
            part = TokenDataset(stream, seq_len=9, split=(a, b)).tokens.tolist()
            assert len(part) % 50 == 0
            seen += part
    assert seen == list(range(1000))


def test_sequence_longer_than_the_data(small):
    TokenDataset(small, seq_len=28)
    with pytest.raises(
        UserError, match="seq_len=29 needs at least 30 tokens, but .* has 29: set seq_len to at most 28"
    ):
        TokenDataset(small, seq_len=29)
    with pytest.raises(UserError, match="has 0 in its part 0 to 0.01: give more text"):
        TokenDataset(small, seq_len=1, split=(0.0, 0.01))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"order": "random"}, "order='random'"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"seed": -1}, "seed=-1"),
        ({"split": (0.5, 0.5)}, r"split=\(0.5, 0.5\)"),
        ({"mask_eod": True}, "mask_eod=True"),
        ({"num_samples": 3}, "num_samples=3"),
    ],
)
def test_bad_arguments(small, arguments, message):
    with pytest.raises(UserError, match=message):
        TokenDataset(small, **({"seq_len": 4} | arguments))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"step": -1}, "step=-1"),
        ({"rows": [4]}, "rows="),
        ({"rows": [-1]}, "rows="),
        ({"columns": [4]}, "columns="),
        ({"packed": True}, "packed=True"),
    ],
)
def test_bad_batches(small, arguments, message):
    arguments = {"step": 0, "batch_size": 4} | arguments
    with pytest.raises(UserError, match=message):
        TokenDataset(small, seq_len=4).batch(arguments.pop("step"), **arguments)


def test_no_token_ids(tmp_path):
    with IndexedWriter(tmp_path / "a", "f4") as out:
        out.add_document([[1.5, 2.0]])
    with pytest.raises(UserError, match="float32, no token ids"):
        TokenDataset(tmp_path / "a", seq_len=1)


# --- Megatron's order (vectors taken from Megatron-LM)


def test_megatron_one_epoch(small):
    order = megatron_order(np.array(LENGTHS), seq_len=8, seed=1234, num_samples=3)
    assert order.epochs == 1
    assert order.documents.tolist() == [4, 0, 1, 2, 3] and order.documents.dtype == np.int32
    assert order.samples.tolist() == [[0, 0], [1, 2], [3, 0], [3, 8]] and order.samples.dtype == np.int32
    assert order.shuffle.tolist() == [1, 2, 0] and order.shuffle.dtype == np.uint32
    data = TokenDataset(small, seq_len=8, seed=1234, order="megatron", num_samples=3)
    assert data.sample(0).tolist() == [3, 4, 5, 6, 7, 11, 12, 13] + [21]
    batch = data.batch(0, batch_size=3)
    assert batch["tokens"][0].tolist() == [3, 4, 5, 6, 7, 11, 12, 13]
    assert batch["labels"][0].tolist() == [4, 5, 6, 7, 11, 12, 13, 21]
    with pytest.raises(UserError, match="sample 3 is outside the 3"):
        data.batch(1, batch_size=3)


def test_megatron_separate_last_epoch():
    order = megatron_order(np.array(LENGTHS), seq_len=8, seed=1234, num_samples=8)
    assert order.epochs == 3
    assert order.documents.tolist() == [2, 2, 4, 1, 0, 3, 4, 0, 1, 3, 0, 4, 3, 2, 1]
    assert [tuple(row) for row in order.samples.tolist()] == [
        (0, 0), (0, 8), (1, 7), (3, 0), (4, 5), (6, 2), (7, 4), (9, 2), (10, 6), (12, 1), (13, 5),
    ]  # fmt: skip
    assert order.shuffle.tolist() == [1, 0, 3, 2, 5, 4, 6, 8, 9, 7]


@pytest.mark.parametrize("num_samples, separate", [(17, True), (18, False)])
def test_megatron_separates_a_last_epoch_that_is_used_to_less_than_four_fifths(num_samples, separate):
    order = megatron_order(np.array([4, 7]), seq_len=1, seed=5, num_samples=num_samples)  # 10 samples an epoch
    assert order.epochs == 2
    assert (sorted(order.shuffle[:10].tolist()) == list(range(10))) == separate


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(any),
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(0, 3),
)
def test_megatron_samples_equal_a_walk(lengths, seq_len, num_samples, seed):
    lengths = np.array(lengths)
    order = megatron_order(lengths, seq_len=seq_len, seed=seed, num_samples=num_samples)
    assert len(order.shuffle) >= num_samples
    at, offset, walked = 0, 0, [[0, 0]]  # the walk as Megatron-LM describes it
    for _ in range(len(order.shuffle)):
        remaining = seq_len + 1
        while True:
            length = lengths[order.documents[at]] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - 1
                break
            at, offset = at + 1, 0
        walked.append([at, offset])
    assert order.samples.tolist() == walked


def test_megatron_refuses_what_hangs_megatron(small):
    with pytest.raises(UserError, match="no tokens"):
        megatron_order(np.array([0, 0]), seq_len=8, seed=1, num_samples=5)
    with pytest.raises(UserError, match="no tokens"):
        TokenDataset(small, seq_len=8, order="megatron", num_samples=5, split=(0.999, 1.0))
    with pytest.raises(UserError, match="set seq_len to at most 28"):
        TokenDataset(small, seq_len=29, order="megatron")


def test_megatron_split(small):
    assert megatron_split("969, 30, 1", 1000) == [(0, 969), (969, 999), (999, 1000)]
    assert megatron_split("9,1", 5) == [(0, 4), (4, 5), None]
    assert megatron_split("1", 7) == [(0, 7), None, None]
    with pytest.raises(UserError, match="split='a'"):
        megatron_split("a", 7)
    data = TokenDataset(small, seq_len=3, order="megatron", split=(0.4, 0.8))
    assert set(np.concatenate([data.sample(i) for i in range(len(data))]).tolist()) <= set(range(21, 50))


# --- blends


def test_blend_is_megatrons():
    choice, number = blend([0.5, 0.3, 0.2], 12)
    assert choice.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1] and choice.dtype == np.int16
    assert number.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3] and number.dtype == np.int64
    assert blend([5, 3, 2], 12)[0].tolist() == choice.tolist()
    assert blend_sizes([0.5, 0.3, 0.2], 1000) == ([503, 302, 201], 1000)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(st.lists(st.floats(0.01, 10), min_size=1, max_size=6), st.integers(1, 300))
def test_blend_keeps_to_its_weights(weights, size):
    choice, _ = blend(weights, size)
    share = np.array(weights) / sum(weights)
    for i in range(size):
        drawn = np.bincount(choice[: i + 1], minlength=len(weights))
        assert np.abs(drawn - share * (i + 1)).max() <= len(weights)


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_exhaustive_blend_reads_everything_once(sizes):
    choice, number = blend_exhaustive(sizes)
    pairs = sorted(zip(choice.tolist(), number.tolist(), strict=True))
    assert pairs == [(d, i) for d, size in enumerate(sizes) for i in range(size)]


def test_blend_of_datasets(small, stream):
    a, b = TokenDataset(small, seq_len=4, seed=1), TokenDataset(stream, seq_len=4, seed=2)
    mixed = Blend([a, b], [0.75, 0.25])
    choice, number = blend([0.75, 0.25], 100)
    batch = mixed.batch(3, batch_size=8, rows=[1, 5])
    for row, index in enumerate((25, 29)):
        assert batch["tokens"][row].tolist() == (a, b)[choice[index]].sample(number[index])[:-1].tolist()
    late = mixed.sample(70_000).tolist()  # further than was prepared at first
    assert Blend([a, b], [0.75, 0.25]).sample(70_000).tolist() == late
    assert mixed.batch(3, batch_size=8, rows=[1, 5])["tokens"].tolist() == batch["tokens"].tolist()
    everything = Blend([a, b])
    rows = everything.batch(0, batch_size=len(a) + len(b))["tokens"]
    assert len({tuple(row) for row in rows.tolist()}) == len(a) + len(b)
    with pytest.raises(UserError, match="outside the 256 of the blend"):
        everything.batch(1, batch_size=len(a) + len(b))


def test_bad_blends(small):
    a, b = TokenDataset(small, seq_len=4), TokenDataset(small, seq_len=5)
    for datasets, weights, message in [
        ([], None, "datasets has 0"),
        ([a, b], [1, 1], "seq_len 4 and 5"),
        ([a, a], [1], "2 positive numbers"),
        ([a, a], [1, 0], "2 positive numbers"),
        ([a, a], [1, float("nan")], "2 positive numbers"),
        ([TokenDataset(small, seq_len=4, order="sequential")], [1], "order='sequential'"),
    ]:
        with pytest.raises(UserError, match=message):
            Blend(datasets, weights)


def test_parse_blend():
    assert parse_blend(["0.3", "a", "0.7", "b"]) == (["a", "b"], [0.3, 0.7])
    assert parse_blend(["a", "b"]) == (["a", "b"], None)
    assert parse_blend(["a"]) == (["a"], None)
    with pytest.raises(UserError, match="empty"):
        parse_blend([])


# --- entropy


@pytest.mark.parametrize("chunk", [3, 1 << 24])
def test_unigram_entropy(chunk):
    assert unigram_entropy(np.arange(64), chunk=chunk) == pytest.approx(math.log(64), rel=1e-12)
    mixed = np.array([0] * 8 + [1] * 4 + [5] * 2 + [9] * 2, np.uint16)
    assert unigram_entropy(mixed, 10, chunk=chunk) == pytest.approx(1.75 * math.log(2), rel=1e-12)
    assert unigram_entropy(np.zeros(5, np.int32)) == 0
    with pytest.raises(UserError, match="token id 9 is outside vocab_size=9"):
        unigram_entropy(mixed, 9)
    with pytest.raises(UserError, match="tokens is empty"):
        unigram_entropy(mixed[:0])
