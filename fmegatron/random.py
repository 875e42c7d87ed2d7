"""Random numbers as pure functions of a key and of global positions.

A key is 64 bits. Element i (its row-major index in the *global* shape) of a draw is a function of the key and i alone:
the generator is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011; the Random123
library), and i is its counter. So a rank that holds a part of a tensor computes exactly its part, and initial values
and dropout masks are the same on every mesh. Draws with one key share their bits: use `split` or `fold_in` for
independent ones.

Words are unsigned 32-bit numbers held in int64 (torch has no arithmetic on uint32); everything is plain integer
mathematics, so `bits`, `uniform`, `bernoulli` and `randint` give the same bits on every device, eager or compiled.
`normal` and `truncated_normal` go through float64 functions whose last bit may depend on the device; cast to float32 or
less, two devices differ about once in 10^9 elements.

Every drawing function takes

- `shape`: the global shape;
- `index`: None (everything), or per dim None or a 1-D int64 tensor of the global positions that this rank holds, in any
  order;
- `dtype`, `device`: of the result. Without a device: that of `index`, else that of the key, else torch's default.

and returns the local part, of size `len(index[d])` where `index[d]` is given. They raise `UserError` when `index` does
not fit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import optree
import torch
from torch import Tensor

from fmegatron.capturing import folded, watched
from fmegatron.errors import UserError
from fmegatron.tree import NAMESPACE

Words = tuple[Any, Any, Any, Any]
Index = Sequence[Tensor | None] | None

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1
ROUNDS = 10

# x & ALL_BITS is x for a position. It keeps torch.compile from folding later products into its index arithmetic, which
# overflows in 32 bits: torch.arange(64) * -766435501 is wrong from the fourth element on (inductor on CPU, torch 2.13).
ALL_BITS = 2**63 - 1

# The third counter word says what a number is for, so that draws, split and fold_in never meet.
DRAW, FOLD, SPLIT, FOLD_TEXT = 0, 1, 2, 3

# Elements drawn at once: Philox needs about six int64 temporaries an element, which should stay in cache on a CPU.
CHUNK = {"cpu": 1 << 15}
CHUNK_ELSEWHERE = 1 << 22


@dataclass(frozen=True)
class Key:
    """64 bits: two Python ints below 2^32, or a tensor int64[2] (for compiled code, where another key then recompiles
    nothing).
    """

    words: tuple[int, int] | Tensor


_register: Any = optree.register_pytree_node  # its annotation wants a collection
_register(Key, lambda key: ((key.words,), None, ("words",)), lambda _, words: Key(*words), namespace=NAMESPACE)
# torch.func knows torch's own trees alone: with this a key can be an argument of a vmapped function.
torch.utils._pytree.register_pytree_node(Key, lambda key: ([key.words], None), lambda words, _: Key(*words))


# Keys


def key(seed: int) -> Key:
    """The key of a seed of up to 64 bits (a negative one counts as its two's complement).

    Raises `UserError` if the seed is wider.
    """
    return Key(_halves(_int64(seed, "seed")))


def split(key: Key, n: int) -> list[Key]:
    """n independent keys; the first of them do not depend on n, and none is a `fold_in` of the same key."""
    return [_derive(key, i, 0, SPLIT) for i in range(n)]


def fold_in(key: Key, data: int | str | Tensor) -> Key:
    """The key of `data` under `key`: an int of up to 64 bits (a layer, a step), a text (a name), or a tensor.

    A 0-d integer tensor gives the values that its int would; the result then has tensor words, as it has for a tensor
    key. Raises `UserError` for a wider int or another kind of data.
    """
    if (known := folded(key, data, fold_in)) is not None:
        return known
    if isinstance(data, str):
        return _derive(key, *_halves(_text_number(data)), FOLD_TEXT)
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.ndim:
            raise UserError(f"fold_in takes a 0-d tensor of integers, not {data.dtype} of shape {tuple(data.shape)}")
        wide = data.to(torch.int64)
        return _derive(key, wide & MASK, (wide >> 32) & MASK, FOLD)
    if not isinstance(data, int):
        raise UserError(f"fold_in takes an int, a str or a tensor, not {type(data).__name__}")
    return _derive(key, *_halves(_int64(data, "data")), FOLD)


def _text_number(text: str) -> int:
    """64 bits that stand for a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


# torch.compiler.assume_constant_result, without the second that importing it takes: torch.compile cannot trace a hash,
# so it calls the function, whose argument is a constant of the program.
_text_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def to_tensor(key: Key, device: torch.device | str | None = None) -> Key:
    """The same key with tensor words on a device, as compiled code takes it."""
    if isinstance(key.words, Tensor):
        return Key(key.words.to(device)) if device is not None else key
    words = torch.tensor(key.words, dtype=torch.int64)
    if torch.device(device or "cpu").type == "cuda":  # which then does not wait for the copy
        words = words.pin_memory()
    return Key(words.to(device, non_blocking=True) if device is not None else words)


# Draws


def bits(key: Key, shape: Sequence[int], *, index: Index = None, device: Any = None) -> Tensor:
    """Uniform int64 in [0, 2^32): the first word of each element."""
    return _draw(key, shape, index, torch.int64, device, lambda w: w[0])


def uniform(
    key: Key,
    shape: Sequence[int],
    *,
    low: float = 0.0,
    high: float = 1.0,
    index: Index = None,
    dtype: torch.dtype = torch.float32,
    device: Any = None,
) -> Tensor:
    """Uniform in [low, high).

    Without bounds, in [0, 1): as many leading bits as the dtype holds exactly (24 in float32, 8 in bfloat16, 53 in
    float64), so never 1. With bounds, low + (high - low) * u in float64, then cast, which may round up to `high`.
    """
    if (low, high) != (0.0, 1.0):
        return _draw(key, shape, index, dtype, device, lambda w: low + (high - low) * _fraction(w, torch.float64))
    return _draw(key, shape, index, dtype, device, lambda w: _fraction(w, dtype))


def normal(
    key: Key,
    shape: Sequence[int],
    *,
    std: float = 1.0,
    index: Index = None,
    dtype: torch.dtype = torch.float32,
    device: Any = None,
) -> Tensor:
    """Normal with mean 0: Box-Muller in float64 on the first two words (so never past 6.67 deviations)."""

    def box_muller(w: Words) -> Tensor:
        radius = torch.sqrt(torch.log((w[0] + 1).to(torch.float64) * 2.0**-32) * -2.0)
        return radius * torch.cos(w[1].to(torch.float64) * (2 * math.pi * 2.0**-32)) * std

    return _draw(key, shape, index, dtype, device, box_muller)


def truncated_normal(
    key: Key,
    shape: Sequence[int],
    *,
    lower: float = -2.0,
    upper: float = 2.0,
    std: float = 1.0,
    index: Index = None,
    dtype: torch.dtype = torch.float32,
    device: Any = None,
) -> Tensor:
    """`std` times a normal value that lies in [lower, upper] deviations: the inverse distribution, in float64.

    The deviation of the result is below `std`: 0.880 of it with bounds of 2, 0.987 with 3. Raises `UserError` unless
    lower < upper.
    """
    if not lower < upper:
        raise UserError(f"truncated_normal needs lower < upper, but got lower={lower}, upper={upper}")
    below, above = (math.erf(x / math.sqrt(2)) for x in (lower, upper))

    def inverse(w: Words) -> Tensor:
        # 52 bits and a half: strictly inside (0, 1), and exact
        u = (((w[0] << 20) | (w[1] >> 12)).to(torch.float64) + 0.5) * 2.0**-52
        x = torch.erfinv(below + (above - below) * u) * math.sqrt(2)
        return x.clamp(lower, upper) * std

    return _draw(key, shape, index, dtype, device, inverse)


def bernoulli(
    key: Key,
    p: float | Tensor,
    shape: Sequence[int],
    *,
    index: Index = None,
    dtype: torch.dtype = torch.bool,
    device: Any = None,
) -> Tensor:
    """True with probability p (to 2^-32): a number in [0, 1] or a 0-d tensor of one. Raises `UserError` outside."""
    if isinstance(p, Tensor):
        limit = (p.to(torch.float64) * 2.0**32).round().to(torch.int64)
        return _draw(key, shape, index, dtype, device, lambda w: w[0] < limit)
    if not 0.0 <= p <= 1.0:
        raise UserError(f"bernoulli needs a probability in [0, 1], but got p={p}")
    threshold = round(p * 2**32)
    return _draw(key, shape, index, dtype, device, lambda w: w[0] < threshold)


def randint(
    key: Key,
    shape: Sequence[int],
    low: int,
    high: int,
    *,
    index: Index = None,
    dtype: torch.dtype = torch.int64,
    device: Any = None,
) -> Tensor:
    """Uniform integers in [low, high): 63 random bits modulo high - low, so one value's probability is off by at most a
    part (high - low) / 2^63. Raises `UserError` unless low < high and both fit in int64."""
    if not -(2**63) <= low < high < 2**63 or high - low >= 2**63:
        raise UserError(f"randint needs low < high, less than 2^63 apart, but got low={low}, high={high}")
    return _draw(key, shape, index, dtype, device, lambda w: _int63(w) % (high - low) + low)


def permutation(key: Key, n: int) -> np.ndarray:
    """A random order of n items, int64[n] in numpy: the items by 63 random bits each (16 bytes of memory an item)."""
    order = _draw(key, (n,), None, torch.int64, "cpu", _int63)
    return np.argsort(order.numpy(), kind="stable").astype(np.int64, copy=False)


def linear_index(shape: Sequence[int], index: Index = None, device: Any = None) -> Tensor:
    """The row-major global index of every element held, int64 of the local shape."""
    device = _device(index, None, device)
    if index is None or all(at is None for at in index):
        return (torch.arange(math.prod(shape), device=device) & ALL_BITS).view(tuple(shape))
    total: Any = 0
    for dim, (size, stride, at) in enumerate(zip(shape, strides_of(shape), _index(shape, index), strict=True)):
        at = torch.arange(size, device=device) if at is None else at.to(device)
        total = total + (at & ALL_BITS).view((1,) * dim + (-1,) + (1,) * (len(shape) - dim - 1)) * stride
    return total


# The generator


def philox(counter: Sequence[Any], key: Sequence[Any]) -> Words:
    """Philox4x32-10: four random words of four counter words and two key words.

    A word is an int, or an int64 tensor (they broadcast), with a value in [0, 2^32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIERS[0])
        high1, low1 = _multiply(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


def _multiply(word: Any, constant: int) -> tuple[Any, Any]:
    """(high, low) words of the 64-bit product. The constants exceed 2^31; less 2^32, the product fits int64 (an
    overflow would be undefined in compiled C++), and its high word is then too small by `word`.
    """
    product = word * (constant - 2**32)
    return (product >> 32) + word, product & MASK


def _derive(key: Key, low: Any, high: Any, use: int) -> Key:
    a, b, _, _ = philox((low, high, use, 0), _pair(key))
    if isinstance(a, Tensor):
        return Key(torch.stack([a, b], -1))
    return Key((a, b))


def _pair(key: Key) -> tuple[Any, Any]:
    if isinstance(key.words, Tensor):
        return key.words.select(-1, 0), key.words.select(-1, 1)
    return key.words


def _halves(value: int) -> tuple[int, int]:
    return value & MASK, (value >> 32) & MASK


def _int64(value: int, name: str) -> int:
    if not -(2**63) <= value < 2**64:
        raise UserError(f"{name} must fit in 64 bits, but got {value}")
    return value


def _fraction(w: Words, dtype: torch.dtype) -> Tensor:
    """The leading bits of an element as a number in [0, 1) that the dtype holds exactly."""
    if dtype == torch.float64:
        return ((w[0] << 21) | (w[1] >> 11)).to(dtype) * 2.0**-53
    held = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}.get(dtype)
    if held is None:
        raise UserError(f"uniform gives float64, float32, float16 or bfloat16, not {dtype}")
    return (w[0] >> (32 - held)).to(dtype) * 2.0**-held


def _int63(w: Words) -> Tensor:
    return ((w[0] >> 1) << 32) | w[1]


def _draw(
    key: Key, shape: Sequence[int], index: Index, dtype: torch.dtype, device: Any, values: Callable[[Words], Tensor]
) -> Tensor:
    """`values` of the words of every element held, cast to the dtype."""
    shape = tuple(shape)
    index = _index(shape, index)
    device = _device(index, key, device)
    words = _pair(key)
    # beyond 2^32 elements the counter's second word counts on; this depends on the global shape alone
    wide = math.prod(shape) > 2**32

    def at(linear: Tensor) -> Tensor:
        counter = (linear & MASK, linear >> 32, DRAW, 0) if wide else (linear, 0, DRAW, 0)
        return values(philox(counter, words)).to(dtype)

    if not _plain(device, key.words, *index):
        return at(linear_index(shape, index, device))
    sizes = [n if held is None else len(held) for n, held in zip(shape, index, strict=True)]
    out = torch.empty(sizes, dtype=dtype, device=device)
    flat, chunk = out.view(-1), CHUNK.get(out.device.type, CHUNK_ELSEWHERE)
    held = [None if h is None else h.to(out.device) for h in index]
    for start in range(0, flat.numel(), chunk):
        stop = min(start + chunk, flat.numel())
        flat[start:stop] = at(linear_range(start, stop, sizes, strides_of(shape), held, out.device))
    return out


def _plain(device: Any, *tensors: Any) -> bool:
    """May we loop over pieces? Not when compiled, under torch.func or a dispatch mode, nor on simulated tensors."""
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if watched() or torch.empty(0, device=device).is_meta:
        return False
    return all(type(t) is Tensor for t in tensors if isinstance(t, Tensor))


def linear_range(
    start: int, stop: int, sizes: Sequence[int], strides: Sequence[int], index: Sequence[Tensor | None], device: Any
) -> Tensor:
    """`linear_index` of the local elements start..stop, in row-major order of the local sizes."""
    rest = torch.arange(start, stop, device=device)
    if all(held is None for held in index):
        return rest
    total: Any = 0
    for size, stride, held in reversed(list(zip(sizes, strides, index, strict=True))):
        at = rest % size
        total = total + (at if held is None else held[at]) * stride
        rest = rest // size
    return total


def strides_of(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _index(shape: Sequence[int], index: Index) -> list[Tensor | None]:
    if index is None:
        return [None] * len(shape)
    if len(index) != len(shape):
        raise UserError(
            f"index has {len(index)} entries for a shape of {len(shape)} dims, {tuple(shape)}: give one a dim"
        )
    for dim, held in enumerate(index):
        if held is not None and (held.ndim != 1 or held.dtype != torch.int64):
            raise UserError(
                f"index[{dim}] must be a 1-D int64 tensor of positions, "
                f"but is {held.dtype} of shape {tuple(held.shape)}"
            )
    return list(index)


def _device(index: Index, key: Key | None, device: Any) -> Any:
    if device is not None:
        return device
    for held in [*(index or ()), *([key.words] if key is not None else ())]:
        if isinstance(held, Tensor):
            return held.device
    return None
