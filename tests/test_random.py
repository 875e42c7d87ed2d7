"""Random numbers against Random123's known answers, closed forms of distributions, and slices of the global draw."""

import math
import shutil

import numpy as np
import optree
import pytest
import torch
import torch._dynamo.testing

from fmegatron import initializers, random, tree
from fmegatron.errors import UserError
from fmegatron.random import (
    Key,
    bernoulli,
    bits,
    fold_in,
    key,
    normal,
    permutation,
    philox,
    randint,
    split,
    to_tensor,
    truncated_normal,
    uniform,
)
from fmegatron.simulation import per_rank, simulate

# Random123, tests/kat_vectors: counter, key, words
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
DRAWS = {
    "bits": lambda k, s, **o: bits(k, s, **o),
    "uniform": lambda k, s, **o: uniform(k, s, **o),
    "uniform64": lambda k, s, **o: uniform(k, s, dtype=torch.float64, **o),
    "bounds": lambda k, s, **o: uniform(k, s, low=-2.0, high=3.0, **o),
    "normal": lambda k, s, **o: normal(k, s, **o),
    "normal64": lambda k, s, **o: normal(k, s, dtype=torch.float64, **o),
    "normal16": lambda k, s, **o: normal(k, s, dtype=torch.bfloat16, std=0.02, **o),
    "truncated": lambda k, s, **o: truncated_normal(k, s, dtype=torch.float64, **o),
    "bernoulli": lambda k, s, **o: bernoulli(k, 0.3, s, **o),
    "randint": lambda k, s, **o: randint(k, s, -5, 100, **o),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)


def words(text):
    return tuple(int(w, 16) for w in text.split())


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# The generator and keys


@pytest.mark.parametrize(("counter", "k", "want"), KNOWN)
def test_known_answers(counter, k, want):
    assert philox(words(counter), words(k)) == words(want)
    tensors = philox([torch.tensor([w]) for w in words(counter)], [torch.tensor(w) for w in words(k)])
    assert tuple(int(t) for t in tensors) == words(want)


def test_an_element_is_its_counter():
    k = key(0x299F31D0_A4093822)
    assert k == Key((0xA4093822, 0x299F31D0))
    drawn = bits(k, (3, 5))
    assert drawn[2, 1] == philox((11, 0, 0, 0), k.words)[0]


def test_counters_past_32_bits():
    shape, at = (3, 2**31), (torch.tensor([0, 2]), torch.tensor([5, 2**31 - 1]))
    k = key(1)
    want = [
        [philox((i % 2**32, i >> 32, 0, 0), k.words)[0] for i in (r * 2**31 + 5, (r + 1) * 2**31 - 1)] for r in (0, 2)
    ]
    assert bits(k, shape, index=at).tolist() == want


@pytest.mark.parametrize("data", [0, 1, -1, 2**31, 2**40 + 3, -(2**63), 2**63 - 1])
def test_host_and_tensor_keys_agree(data):
    host, device = key(77), to_tensor(key(77))
    want = fold_in(host, data).words
    for k, d in ((device, data), (host, torch.tensor(data)), (device, torch.tensor(data))):
        assert tuple(fold_in(k, d).words.tolist()) == want
    assert tuple(fold_in(device, "layers.3.q").words.tolist()) == fold_in(host, "layers.3.q").words
    assert [tuple(k.words.tolist()) for k in split(device, 3)] == [k.words for k in split(host, 3)]


def test_unsigned_and_signed_data_are_the_same_bits():
    assert fold_in(key(1), 2**64 - 1) == fold_in(key(1), -1)
    assert key(-1) == key(2**64 - 1)


def test_keys_are_all_different():
    k = key(0)
    children = [*split(k, 100), *(fold_in(k, i) for i in range(100)), *(fold_in(k, str(i)) for i in range(100)), k]
    children += [c for child in split(k, 10) for c in split(child, 10)]
    children += [fold_in(k, i << 32) for i in range(1, 100)]
    assert len({c.words for c in children}) == len(children)
    assert split(k, 5) == split(k, 9)[:5]
    # nor is a key a pair of words of its own draw
    drawn = bits(k, (400,)).tolist()
    assert not {c.words[0] for c in children[:300]} & set(drawn)


def test_a_key_is_a_pytree():
    assert tree.paths({"key": key(3)}) == ["key.words.0", "key.words.1"]
    assert tree.paths({"key": to_tensor(key(3))}) == ["key.words"]
    doubled = optree.tree_map(lambda x: x * 2, key(3), namespace=tree.NAMESPACE)
    assert doubled == Key((6, 0))


# Shards


@each_draw
@pytest.mark.parametrize(
    ("shape", "index"),
    [
        ((7,), ([3, 0, 6],)),
        ((7, 5, 9), ([6, 1], None, [8, 0, 4])),
        ((7, 5, 9), (None, [4, 2], None)),
        ((3, 1, 11), (None, None, [10, 9, 1])),
        ((7, 5), ([], [1, 2])),
        ((7, 5), (None, None)),
    ],
)
@pytest.mark.parametrize("chunk", [1 << 15, 4])
def test_shards_are_slices(draw, shape, index, chunk, monkeypatch):
    whole = draw(key(5), shape)
    monkeypatch.setitem(random.CHUNK, "cpu", chunk)
    positions = tuple(None if i is None else torch.tensor(i, dtype=torch.int64) for i in index)
    want = whole
    for dim, held in enumerate(positions):
        want = want if held is None else want.index_select(dim, held)
    got = draw(key(5), shape, index=positions)
    assert got.dtype == want.dtype and got.is_contiguous()
    assert torch.equal(got, want)
    assert torch.equal(draw(key(5), shape), whole)


def test_a_scalar_and_an_empty_shape():
    assert bits(key(2), ()).item() == philox((0, 0, 0, 0), key(2).words)[0]
    assert uniform(key(2), (0, 3)).shape == (0, 3)


@each_draw
def test_simulated_shards(draw):
    whole = draw(key(5), (5, 7))
    with simulate(3):
        from torch.distributed._local_tensor import LocalTensor

        rows = [[0, 3], [1, 4], [2]]  # uneven
        at = LocalTensor({r: torch.tensor(rows[r]) for r in range(3)})
        got = per_rank(draw(key(5), (5, 7), index=(at, None)))
        ones = per_rank(initializers.ones()(key(5), (5, 7), index=(at, None)))
    assert all(torch.equal(g, whole[r]) for g, r in zip(got, rows, strict=True))
    assert [o.shape for o in ones] == [(2, 7), (2, 7), (1, 7)]


# Distributions: 2^18 samples, bounds of about 5 deviations of the statistic

N = 1 << 18


def kolmogorov(samples, cdf):
    """The largest distance of the empirical distribution from cdf, times sqrt(n): beyond 2.2 once in 10^4."""
    x = samples.double().sort().values
    grid = torch.arange(1, len(x) + 1, dtype=torch.float64) / len(x)
    return ((cdf(x) - grid).abs().max() * math.sqrt(len(x))).item()


def phi(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_statistics(dtype):
    x = uniform(key(1), (N,), dtype=dtype)
    assert x.min() >= 0 and x.max() < 1
    assert kolmogorov(x, lambda t: t) < 2.2
    # neighbours and halves are uncorrelated
    centred = x.double() - 0.5
    for other in (centred.roll(1), centred.roll(N // 2), uniform(key(2), (N,)).double() - 0.5):
        assert abs((centred * other).mean().item()) * 12 * math.sqrt(N) < 5


@pytest.mark.parametrize(("dtype", "held"), [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24)])
def test_uniform_holds_the_leading_bits(dtype, held):
    x, w = uniform(key(1), (N,), dtype=dtype), bits(key(1), (N,))
    assert torch.equal(x.double(), (w >> (32 - held)).double() * 2.0**-held)
    assert x.max() < 1
    largest = tuple(torch.tensor([random.MASK]) for _ in range(4))
    assert all(random._fraction(largest, d).item() < 1 for d in (dtype, torch.float64))


def test_normal_statistics():
    x = normal(key(3), (N,), dtype=torch.float64)
    assert kolmogorov(x, phi) < 2.2
    assert abs(x.mean()) < 5 / math.sqrt(N)
    assert abs(x.var() - 1) < 5 * math.sqrt(2 / N)
    assert abs((x**4).mean() - 3) < 5 * math.sqrt(96 / N)
    assert torch.equal(normal(key(3), (N,)), x.float())
    assert torch.equal(normal(key(3), (N,), dtype=torch.bfloat16, std=0.02), (x * 0.02).bfloat16())


def test_normal_by_hand():
    """One element from the published algorithms, in Python's own mathematics."""
    a, b, _, _ = philox((7, 0, 0, 0), key(3).words)
    want = math.sqrt(-2 * math.log((a + 1) / 2**32)) * math.cos(2 * math.pi * b / 2**32)
    assert normal(key(3), (9,), dtype=torch.float64)[7].item() == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize(("lower", "upper"), [(-2.0, 2.0), (-3.0, 3.0), (0.5, 1.0)])
def test_truncated_normal_statistics(lower, upper):
    x = truncated_normal(key(4), (N,), lower=lower, upper=upper, dtype=torch.float64)
    below, above = phi(torch.tensor([lower, upper], dtype=torch.float64))
    assert lower <= x.min() and x.max() <= upper
    assert kolmogorov(x, lambda t: (phi(t) - below) / (above - below)) < 2.2
    if lower == -2.0:
        assert x.std().item() == pytest.approx(0.8796, rel=0.01)  # scipy.stats.truncnorm(-2, 2).std()


def test_truncated_normal_at_the_extremes(monkeypatch):
    def at(word):
        return tuple(torch.tensor([word]) for _ in range(4))

    values = []
    for word in (0, random.MASK):
        monkeypatch.setattr(random, "philox", lambda counter, k, word=word: at(word))
        values.append(truncated_normal(key(0), (1,), lower=-9.0, upper=9.0, dtype=torch.float64).item())
    assert values[0] == pytest.approx(-values[1]) and 8 < values[1] <= 9


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_bernoulli(p):
    x = bernoulli(key(6), p, (N,))
    assert x.dtype == torch.bool
    assert abs(x.double().mean().item() - p) <= 5 * math.sqrt(p * (1 - p) / N)
    assert torch.equal(bernoulli(key(6), torch.tensor(p, dtype=torch.float64), (N,)), x)


def test_bernoulli_counts_exactly(monkeypatch):
    """A quarter of the 2^32 words lies below 2^30."""
    drawn = (torch.tensor([2**30 - 1, 2**30, 0, random.MASK]),)
    monkeypatch.setattr(random, "philox", lambda counter, k: drawn)
    for p in (0.25, torch.tensor(0.25)):
        assert bernoulli(key(0), p, (4,)).tolist() == [True, False, True, False]
    assert not bernoulli(key(0), 0.0, (4,)).any() and bernoulli(key(0), 1.0, (4,)).all()


@pytest.mark.parametrize(("low", "high"), [(0, 10), (-3, 4), (-(2**62), 2**62 - 1)])
def test_randint(low, high):
    x = randint(key(7), (N,), low, high)
    assert low <= x.min() and x.max() < high
    if high - low < 100:
        counts = torch.bincount(x - low, minlength=high - low).double()
        cells = high - low
        chi2 = ((counts - N / cells) ** 2 / (N / cells)).sum().item()
        assert chi2 < cells - 1 + 5 * math.sqrt(2 * (cells - 1))
    else:
        assert abs(x.double().mean().item()) < 5 * (high - low) / math.sqrt(12 * N)


def test_permutation():
    order = permutation(key(8), 10_000)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(10_000))
    assert np.array_equal(order, permutation(key(8), 10_000))
    assert not np.array_equal(order, permutation(fold_in(key(8), 1), 10_000))
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.05
    assert permutation(key(8), 0).shape == (0,)
    # all orders of three items, equally often
    seen = {}
    for i in range(600):
        one = tuple(permutation(fold_in(key(9), i), 3))
        seen[one] = seen.get(one, 0) + 1
    assert len(seen) == 6 and min(seen.values()) > 55


# Compiled and transformed


@pytest.mark.parametrize("draw", [DRAWS["normal64"], DRAWS["bernoulli"]], ids=["normal64", "bernoulli"])
def test_compiled_once_for_all_keys(draw):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    index = (torch.tensor([4, 0]), None)
    f = torch.compile(lambda k, at: draw(fold_in(k, 3), (5, 7), index=(at, None)), backend=counter, fullgraph=True)
    for seed in (1, 2, -9):
        got = f(to_tensor(key(seed)), index[0])
        assert torch.equal(got, draw(fold_in(key(seed), 3), (5, 7), index=index))
    assert counter.frame_count == 1


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_to_code():
    """Inductor folds products of positions into index arithmetic of 32 bits, unless it is kept from it."""
    torch._dynamo.reset()
    f = torch.compile(lambda w: bits(Key(w), (64,)), fullgraph=True)
    assert torch.equal(f(to_tensor(key(3)).words), bits(key(3), (64,)))


@each_draw
def test_vmap_over_keys(draw):
    keys = split(key(1), 4)
    batch = torch.stack([to_tensor(k).words for k in keys])
    got = torch.func.vmap(lambda w: draw(Key(w), (3, 5)))(batch)
    assert torch.equal(got, torch.stack([draw(k, (3, 5)) for k in keys]))
    folded = torch.func.vmap(lambda i: fold_in(keys[0], i).words)(torch.arange(4))
    assert folded.tolist() == [list(fold_in(keys[0], i).words) for i in range(4)]


def test_inside_a_gradient():
    def f(x):
        return (x * bernoulli(key(1), 0.5, (8,), dtype=torch.float32)).sum()

    mask = bernoulli(key(1), 0.5, (8,)).float()
    assert torch.equal(torch.func.grad(f)(torch.ones(8)), mask)


def test_meta_and_devices():
    assert normal(key(1), (10**6, 10**6), device="meta").shape == (10**6, 10**6)
    assert bits(to_tensor(key(1), "cpu"), (3,)).device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@each_draw
def test_cuda_equals_cpu(draw):
    """The same bits; after a float64 function the last bit of the result may differ."""
    got, want = draw(key(5), (300, 1001), device="cuda").cpu(), draw(key(5), (300, 1001))
    if want.is_floating_point():
        differ = (got != want).double().mean().item()
        assert differ < (1e-5 if want.dtype != torch.float64 else 1)
        torch.testing.assert_close(got, want, rtol=2 * torch.finfo(want.dtype).eps, atol=1e-15)
    else:
        assert torch.equal(got, want)


# Initializers


def test_initializers():
    k, shape, index = key(1), (6, 4), (torch.tensor([5, 1]), None)
    for init, want in {
        initializers.normal(0.02): normal(k, shape, std=0.02),
        initializers.truncated_normal(0.02, 2.0): truncated_normal(k, shape, std=0.02),
        initializers.uniform(-1.0, 1.0): uniform(k, shape, low=-1.0, high=1.0),
        initializers.zeros(): torch.zeros(shape),
        initializers.ones(): torch.ones(shape),
        initializers.constant(3.0): torch.full(shape, 3.0),
        initializers.scaled(1.0, 4): normal(k, shape, std=0.5),
    }.items():
        assert torch.equal(init(k, shape), want)
        assert torch.equal(init(k, shape, index=index), want[[5, 1]])
        assert init(k, shape, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert repr(initializers.truncated_normal(0.02)) == "TruncatedNormal(std=0.02, bound=3.0)"


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: key(2**64), "seed"),
        (lambda: fold_in(key(1), 2**64), "data"),
        (lambda: fold_in(key(1), 1.5), "float"),
        (lambda: fold_in(key(1), torch.tensor([1, 2])), "(2,)"),
        (lambda: bits(key(1), (2, 3), index=(None,)), "2 dims"),
        (lambda: bits(key(1), (2,), index=(torch.tensor([0.5]),)), "index[0]"),
        (lambda: bernoulli(key(1), 1.5, (2,)), "p=1.5"),
        (lambda: randint(key(1), (2,), 3, 3), "low=3"),
        (lambda: truncated_normal(key(1), (2,), lower=1.0, upper=1.0), "lower=1.0"),
        (lambda: uniform(key(1), (2,), dtype=torch.int64), "int64"),
        (lambda: initializers.scaled(1.0, 0), "fan=0"),
    ],
)
def test_errors(make, part):
    with pytest.raises(UserError) as error:
        make()
    assert part in str(error.value)
