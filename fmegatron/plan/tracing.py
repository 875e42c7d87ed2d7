"""What one rank computes, keeps and communicates, found by running its program once without data.

    trace = trace_layer(program_of_layout, index=0, rows=1)
    trace.forward.products          # {Product(m, n, k, …): how many}
    trace.saved                     # bytes that live from the layer's forward to its backward

A model's `embed`, one layer of each kind and its `head` run forward and backward on tensors that have shapes alone (torch's device
meta, three times quicker than its FakeTensorMode), on a mesh of the layout's sizes whose groups are torch's fake ones: rank 0 of ranks that are not there. Every
operation is seen by a dispatch mode, and put into one of four kinds:

    products      matrix products, with their sizes
    attention     with its pairs of queries and keys (a causal mask sees half of them)
    collectives   kind, axes, elements
    the rest      bound by memory: between two of the others everything is taken for one fused kernel, which reads what was made
                  before it once, and writes what is read behind it or kept

The number of rows that a rank's experts get is a matter of values; they are taken to be even.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fmegatron.collectives import COST
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.fp8 import dot
from fmegatron.mesh import Mesh
from fmegatron.parallel import ring
from fmegatron.parallel.pipeline_stage import layers_of, with_context
from fmegatron.parallel.schedules import BACKWARD, FORWARD, INPUT
from fmegatron.primitives.cross_entropy import CHUNK_ELEMENTS_ELSEWHERE
from fmegatron.recording import Collective
from fmegatron.sharding import Sharding
from fmegatron.split import split
from fmegatron.tree import is_float, is_tensor, leaves, like, tree_map

DEVICE = "meta"  # where no primitive takes a way that is for CPUs alone
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Product:
    """Matrix products [m k] [k n], `batch` of them in one call. dtype: of the operands: "bf16", "fp8", "fp32", … weight: does it
    give a weight's gradient?"""

    m: int
    n: int
    k: int
    batch: int = 1
    dtype: str = "bf16"
    weight: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        size = {"fp8": 1, "bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8}[self.dtype]
        return self.batch * size * (self.m * self.k + self.k * self.n) + self.batch * self.m * self.n * max(size, 2)


@dataclass(frozen=True)
class Attention:
    """One call of attention, forward or backward. pairs: of a query and a key, of all rows and one head."""

    queries: int
    keys: int
    heads: int
    head: int
    pairs: float
    backward: bool = False
    dtype: str = "bf16"
    rows: int = 1

    @property
    def flops(self) -> float:
        """Two products of the forward, five of the backward."""
        return (10.0 if self.backward else 4.0) * self.pairs * self.heads * self.head


@dataclass
class Work:
    """What one direction of one part computes and communicates.

    bytes: read and written by what is bound by memory; kernels: how many such there are, each a launch.
    """

    products: Counter[Product] = field(default_factory=Counter)
    attention: Counter[Attention] = field(default_factory=Counter)
    bytes: float = 0.0
    kernels: int = 0
    collectives: Counter[Collective] = field(default_factory=Counter)
    of_weights: float = 0.0  # of the bytes, those of weights alone
    alive: Front = ()  # beside inputs and what is kept,
    alive_in_all: Front = ()  # and with what is kept, as long as that is

    @property
    def working(self) -> int:
        """Bytes at most alive beside inputs and what is kept."""
        return max((a + b for a, b in self.alive), default=0)

    @property
    def flops(self) -> float:
        """Of products and attention."""
        return sum(p.flops * n for p, n in self.products.items()) + sum(a.flops * n for a, n in self.attention.items())


# Bytes that are alive at moments: (of weights and their gradients, of activations, in proportion to the rows), without those
# moments when both are less than at another.
Front = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Halves:
    """A backward in two: by input, and by weight. left: bytes that live from the one to the other."""

    input: Work
    weight: Work
    left: int


Tensors = tuple[tuple[int, torch.dtype], ...]  # elements and dtype of each


@dataclass(frozen=True)
class Trace:
    """A part of a model, as one rank runs it.

    saved: bytes that live from its forward to its backward, what it gives to the next part included. outs: that. halves: of the
    backward, where a schedule splits it. saved_of_weights: what of `saved` is made of weights alone, whatever the rows.
    """

    forward: Work
    backward: Work
    saved: int
    outs: Tensors
    halves: Halves | None = None
    saved_of_weights: int = 0

    @property
    def out(self) -> int:
        """Bytes that it gives to the next part."""
        return sum(n * dtype.itemsize for n, dtype in self.outs)

    def work(self, kind: str) -> Work:
        """Of an action of a schedule."""
        if kind in (FORWARD, BACKWARD):
            return self.forward if kind == FORWARD else self.backward
        assert self.halves is not None
        return self.halves.input if kind == INPUT else self.halves.weight


# ----------------------------------------------------------------------------------------------------------- the ranks


class RanksNotThere(Mesh):
    """A mesh on which this process is rank 0 of ranks that are not there: its collectives give shapes."""

    def _make_group(self, key: tuple[str, ...]) -> Any:
        return _group(key, self.size(key))


def ranks_not_there(mesh: Mesh) -> RanksNotThere:
    """An abstract mesh on which programs without data run."""
    return RanksNotThere(mesh.sizes, mesh.names, mesh.order, mesh.device_type, False, None, None)


def _group(axes: tuple[str, ...], size: int) -> str:
    """The name of a fake process group over some axes, which belongs to no world."""
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    name = f"plan:{','.join(axes)}:{size}"
    try:
        c10d._resolve_process_group(name)
    except RuntimeError:  # it is new, or went with a world that ended
        _groups[name] = c10d.ProcessGroup(0, size)
        c10d._register_process_group(name, _groups[name])
    return name


_groups: dict[str, Any] = {}


# ------------------------------------------------------------------------------------------------------- the recording


@dataclass
class _Event:
    kind: str  # product, attention, collective, memory, opaque
    reads: list[tuple[int, int]]  # (storage, bytes)
    writes: list[tuple[int, int]]
    what: Any = None


@dataclass
class _Storage:
    bytes: int
    born: int
    ref: Any
    died: int | None = None
    given: bool = False  # an input: none of the part's own


_KINDS = {
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_reduce": "all-reduce",
    "all_reduce_": "all-reduce",
    "all_to_all_single": "all-to-all",
}
_OPAQUE = {
    "embedding",
    "embedding_dense_backward",
    "index_select",
    "index",
    "index_put",
    "index_add",
    "scatter_add",
    "sort",
    "topk",
}
_LOOKUPS = {"embedding", "index_select", "index", "gather"}
_FREE = {
    "new_zeros",
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "detach",
    "alias",
    "lift_fresh",
    "zeros",
    "ones",
    "arange",
}


class _Recorder(TorchDispatchMode):
    """Writes down every operation."""

    def __init__(self, mesh: Mesh | None, held: int) -> None:
        super().__init__()
        self.mesh, self.held = mesh, held
        self.events: list[_Event] = []
        self.storages: list[_Storage] = []
        self.at: dict[int, int] = {}  # where a storage is -> its number
        self.alive: set[int] = set()
        self.weights: set[int] = set()  # storages of parameters
        self.fixed: set[int] = set()  # whose size does not depend on rows: made of weights, or their gradients
        self.rows = 0  # of the last routing

    # what lies where

    def number(self, t: Any, *, given: bool = False) -> int:
        s = t.untyped_storage()
        found = self.at.get(s._cdata)
        if found is None or self.storages[found].ref.expired():
            found = self.new(t)
        self.storages[found].given |= given
        return found

    def new(self, t: Any) -> int:
        s = t.untyped_storage()
        self.storages.append(_Storage(s.nbytes(), len(self.events), StorageWeakRef(s)))
        self.at[s._cdata] = n = len(self.storages) - 1
        self.alive.add(n)
        return n

    def bury(self) -> None:
        """Notes which storages have gone."""
        for n in [n for n in self.alive if self.storages[n].ref.expired()]:
            self.storages[n].died = len(self.events)
            self.alive.discard(n)

    # what runs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        space, _, name = func._schema.name.partition("::")
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return args[0]
        if name == "_local_scalar_dense":
            return self.read(args[0])
        if name == "_to_copy" and args[0].is_meta and (kwargs.get("device") or args[0].device).type == "cpu":
            return torch.full(args[0].shape, self.read(args[0]), dtype=kwargs.get("dtype") or args[0].dtype)
        inputs = [t for t in _flat((args, kwargs)) if is_tensor(t)]
        out = func(*args, **kwargs)
        outs = [t for t in _flat(out) if is_tensor(t)]
        had = {t.untyped_storage()._cdata: self.number(t) for t in inputs}
        made = [t for t in outs if t.untyped_storage()._cdata not in had]
        written = [args[0]] if name.endswith("_") and is_tensor(args[0]) and name != "set_" else []
        if "out" in kwargs and is_tensor(kwargs["out"]):
            written = [kwargs["out"]]
        if not made and not written:
            return out  # a view
        most = sum(map(_size, outs)) if name in _LOOKUPS else 1 << 62  # of a table only some rows are read
        reads = [(had[t.untyped_storage()._cdata], min(_size(t), most)) for t in inputs]
        numbers = [self.new(t) for t in made]
        writes = [*zip(numbers, map(_size, made), strict=True), *((self.number(t), _size(t)) for t in written)]
        large = {n for n, b in reads if b > 256}
        if large and large <= self.weights and name not in ("mm", "bmm", "_scaled_mm", *_LOOKUPS):
            self.weights.update(numbers)  # a weight in another dtype or order
            self.fixed.update(numbers)
        elif large and large <= self.fixed:
            self.fixed.update(numbers)
        kind, what = self.kind(space, name, args, func)
        if kind == "product" and what[0].weight or name == "embedding_dense_backward":
            self.fixed.update(numbers)
        if kind is not None:
            self.bury()
            self.events.append(_Event(kind, reads, writes, what))
            if kind == "memory" and sum(b for _, b in writes) <= 512 < max((b for _, b in reads), default=0) >> 8:
                self.events.append(_Event("barrier", [], []))  # a number of all elements, which the next kernel reads
        return out

    def kind(self, space: str, name: str, args: Any, func: Any) -> tuple[str | None, Any]:
        if space == "_c10d_functional":
            if name not in _KINDS:
                return "memory", None
            x, group = args[0], args[-1]
            return "collective", Collective(_KINDS[name], _axes_of(group), _size_of(group), x.numel(), x.dtype)
        if name in ("mm", "bmm", "addmm", "addmm_", "_scaled_mm", "baddbmm"):
            a, b = args[1:3] if name.startswith(("addmm", "baddbmm")) else args[:2]
            batch = a.shape[0] if a.ndim == 3 else 1
            return "product", [Product(a.shape[-2], b.shape[-1], a.shape[-1], batch, _name(a.dtype), self.turned(a, b))]
        if space == "fmegatron":
            return self.own(name, args, {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)})
        if name in _FREE:
            return None, None
        return ("opaque" if name in _OPAQUE else "memory"), None

    def turned(self, a: Any, b: Any) -> bool:
        """Is neither operand of a product a parameter?"""
        return not any(self.at.get(t.untyped_storage()._cdata) in self.weights for t in (a, b))

    def own(self, name: str, args: Any, named: Mapping[str, Any]) -> tuple[str, Any]:
        """Operators of this library."""
        if name in ("attention", "attention_backward"):
            q, k, ordered = named["q"], named["k"], named["positions"] is None
            pairs = q.shape[0] * _pairs(q.shape[1], k.shape[1], named["causal"], named["window"], ordered=ordered)
            heads = math.prod(q.shape[2:-1])
            back = name.endswith("backward")
            return "attention", Attention(
                q.shape[1], k.shape[1], heads, q.shape[-1], pairs, back, _name(q.dtype), q.shape[0]
            )
        if name in ("ring_attention", "ring_attention_backward"):
            q, k, made = named["q"], named["k"], ring._rings[named["ring"]]
            back, causal, window = name.endswith("backward"), named["causal"], named["window"]
            keys = k.shape[1] * made.size
            pairs = q.shape[0] * _pairs(q.shape[1], keys, causal, window, ordered=False)
            heads = math.prod(q.shape[2:-1])
            one = Attention(q.shape[1], keys, heads, q.shape[-1], pairs, back, _name(q.dtype), q.shape[0])
            form = ring.Form(causal, window, named["scale"], named["softcap"])
            return "ring", (one, ring_exchanges(made, k, form, back))
        if name in ("linear_statistics", "linear_statistics_backward", "kept_statistics_backward"):
            return "loss", _loss(name, args)
        if name == "fp8_multiply_blocks":
            a, b = args[0], args[2]
            return "product", [Product(a.shape[0], b.shape[0], a.shape[1], 1, "fp8", self.turned(a, b))]
        if name in ("grouped_products", "products_by_group"):
            x, w = args[:2]
            groups = args[2].shape[0]
            m = -(-x.shape[0] // groups)
            if name == "grouped_products":
                return "product", [Product(m, w.shape[-1], w.shape[-2], groups, _name(x.dtype), False)]
            return "product", [Product(x.shape[1], w.shape[1], m, groups, _name(x.dtype), True)]
        if name == "fp8_grouped_products":
            x, w = args[0], args[2]
            groups = args[4].shape[0]
            return "product", [Product(-(-x.shape[0] // groups), w.shape[-2], w.shape[-1], groups, "fp8", False)]
        if name == "fp8_products_by_group":
            x, g = args[0], args[2]
            groups = args[4].shape[0]
            return "product", [Product(x.shape[0], g.shape[0], -(-x.shape[1] // groups), groups, "fp8", True)]
        if name in ("moe_wide_product", "moe_wide_gradients"):
            x, w = args[-2:] if name.endswith("gradients") else args[:2]
            n = w.shape[-1] if w.shape[0] == x.shape[-1] else w.shape[0]
            product = Product(math.prod(x.shape[:-1]), n, x.shape[-1], 1, _name(x.dtype), False)
            return "product", [product] * (2 if name.endswith("gradients") else 1)
        if name == "sort_by_expert":
            self.rows = args[0].numel()
        return "opaque", None

    def read(self, x: Any) -> Any:
        """What the program reads of a value: the rows of an even share of the choices."""
        if x.dtype.is_floating_point or x.dtype == torch.bool:
            raise UserError(
                "the planner runs a model without data, but the model reads a value of its tensors on the host: it cannot be "
                "planned as it is"
            )
        return self.rows // self.held


def _flat(x: Any) -> list[Any]:
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in _flat(y)]
    if isinstance(x, dict):
        return [t for y in x.values() for t in _flat(y)]
    return [x]


def _size(t: Any) -> int:
    return t.numel() * t.element_size()


def _name(dtype: torch.dtype) -> str:
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
    return "fp8" if dtype in FP8 else names[dtype]


def _size_of(group: str) -> int:
    return int(group.split(":")[2])


def _axes_of(group: str) -> tuple[str, ...]:
    return tuple(group.split(":")[1].split(","))


def _pairs(queries: int, keys: int, causal: bool, window: int | None, *, ordered: bool) -> float:
    """Of queries and the keys that they see. Not ordered: the queries are an even share of a sequence of all keys."""
    if not causal:
        return float(queries) * min(keys, 2 * window - 1 if window else keys)
    if window is not None and window < keys:
        return queries * window * (1 - window / (2 * keys))
    if ordered and queries < keys:
        return queries * (keys - queries / 2)
    return queries * keys / 2


def _loss(name: str, args: Any) -> tuple[list[Product], int, int]:
    """(the products inside the loss: logits, and the gradients by both operands; bytes of what is bound by memory there; room
    that it takes meanwhile), as it runs on a GPU."""
    x, w = args[:2]
    (tokens, embed), dtype, size = x.shape, _name(x.dtype), x.element_size()
    vocab = w.numel() // embed
    logits, gx = Product(tokens, vocab, embed, 1, dtype), Product(tokens, embed, vocab, 1, dtype)
    gw = Product(embed, vocab, tokens, 1, dtype, True)
    all_of, chunk = tokens * vocab, min(tokens, max(1, CHUNK_ELEMENTS_ELSEWHERE // vocab)) * vocab
    if name == "kept_statistics_backward":
        return [gx, gw], 2 * size * all_of, 0
    if name == "linear_statistics":
        return [logits], (4 + size * bool(args[-2])) * all_of, 4 * chunk
    return [logits, gx, gw], (4 + size) * all_of, (4 + size) * chunk + 4 * w.numel()


def ring_exchanges(made: Any, k: Any, form: Any, back: bool) -> list[Collective]:
    """The exchanges of ring attention, as `fmegatron.parallel.ring` makes them for keys like k."""
    size, part = made.size, k.shape[1]
    there, behind = ring.legs(size, ring.offsets_needed(size, part, made.zigzag, form.causal, form.window))

    def exchange(dtype: torch.dtype) -> list[Collective]:
        return [Collective("exchange", made.mesh.sorted(made.axes), size, k.numel(), dtype)] * 2  # keys and values

    found = exchange(k.dtype) * (there + behind)
    if back:
        # gradients, in float32 or wider, one step behind
        order = [*range(there + 1), *range(-1, -behind - 1, -1)]
        wide = torch.float64 if k.dtype == torch.float64 else torch.float32
        for offset in order:
            stays = offset == 0 and there < size - 1
            if stays or offset == there or offset == -behind < 0:
                steps = offset % size
                found += exchange(wide) * min(steps, size - steps)
            else:
                found += exchange(wide)
    return found


# ------------------------------------------------------------------------------------------------------- its evaluation


def _work(recorder: _Recorder, start: int, end: int, kept: set[int], saved: set[int]) -> Work:
    """The events of one direction. kept: storages that outlive it. saved: those that the forward keeps."""
    events, found = recorder.events[start:end], Work()
    last_read: dict[int, int] = {}
    for i, e in enumerate(recorder.events[:end]):
        for n, _ in e.reads:
            last_read[n] = i
    run_reads: dict[int, int] = {}
    run_writes: dict[int, int] = {}
    made: set[int] = set()
    stored: set[int] = set()
    rooms: dict[int, int] = {}  # that an operation takes for itself

    def close(at: int) -> None:
        """Ends a fused kernel."""
        if not run_writes and not run_reads:
            return
        outs = {n: b for n, b in run_writes.items() if n in kept or last_read.get(n, -1) >= at}
        if outs:
            size = sum(run_reads.values()) + sum(outs.values())
            found.bytes += size
            if set(outs) <= recorder.fixed:
                found.of_weights += size
            found.kernels += 1
            stored.update(outs)
        run_reads.clear()
        run_writes.clear()
        made.clear()

    for i, e in enumerate(events, start):
        if e.kind == "memory":
            for n, b in e.reads:
                if n not in made:
                    run_reads[n] = max(run_reads.get(n, 0), b)
            for n, b in e.writes:
                run_writes[n] = max(run_writes.get(n, 0), b)
                made.add(n)
            continue
        close(i)
        stored.update(n for n, _ in e.writes)
        if e.kind == "barrier":
            continue
        if e.kind == "loss":
            products, n, room = e.what
            found.products.update(products)
            found.bytes += n
            found.kernels += 2 * len(products)
            rooms[i] = room
        elif e.kind == "product":
            found.products.update(e.what)
            found.kernels += len(e.what)
        elif e.kind == "attention":
            found.attention[e.what] += 1
            found.kernels += 1
        elif e.kind == "ring":
            found.attention[e.what[0]] += 1
            found.collectives.update(e.what[1])
            found.kernels += 1
        elif e.kind == "collective":
            found.collectives[e.what] += 1
            found.kernels += 1
        else:
            size = sum(b for _, b in e.reads) + sum(b for _, b in e.writes)
            found.bytes += size
            found.kernels += 1
            if e.writes and {n for n, _ in e.writes} <= recorder.fixed:
                found.of_weights += size
    close(end)
    found.alive = _front(
        recorder, start, end, {n for n in stored if n not in kept and recorder.storages[n].born >= start}, rooms
    )
    before = {n for n in saved if recorder.storages[n].born < start}
    later = {n for n in stored if recorder.storages[n].born >= start and n not in kept}
    found.alive_in_all = _front(recorder, start, end, later | before, rooms)
    return found


def _front(recorder: _Recorder, start: int, end: int, some: set[int], rooms: Mapping[int, int]) -> Front:
    """The moments at which most of some storages is alive."""
    change: dict[int, list[int]] = {}
    for n in some:
        s = recorder.storages[n]
        if s.given:
            continue
        which = n in recorder.fixed
        change.setdefault(max(s.born, start), [0, 0])[1 - which] += s.bytes
        change.setdefault(end if s.died is None else s.died, [0, 0])[1 - which] -= s.bytes
    points, fixed, rest = set(), 0, 0
    for i in sorted({*change, *(r for r in rooms if start <= r < end)}):
        a, b = change.get(i, (0, 0))
        fixed, rest = fixed + a, rest + b
        points.add((fixed + rooms.get(i, 0), rest))
    return tuple(sorted(p for p in points if not any(q != p and q[0] >= p[0] and q[1] >= p[1] for q in points)))


@contextlib.contextmanager
def _recording(sh: Sharding) -> Iterator[_Recorder]:
    held = 1
    if sh.mesh is not None:
        with contextlib.suppress(Exception):
            held = sh.mesh.size(sh.axes("expert"))
    recorder = _Recorder(sh.mesh, held)
    native, dot.native_for = dot.native_for, lambda *_: True  # products in fp8 as matrix units run them
    try:
        with recorder:
            yield recorder
    finally:
        dot.native_for = native


def traced(run: Any, given: Iterable[Any], weights: Iterable[Any], recorder: _Recorder) -> Trace:
    """run() -> (outputs, backward); backward() -> gradients, or with halves (gradients of inputs, the second half), which again gives
    gradients. All are recorded."""
    for t in given:
        recorder.number(t, given=True)
    recorder.weights = {recorder.number(t, given=True) for t in weights}
    recorder.events.append(_Event("opaque", [], []))
    start = len(recorder.events)
    y, backward = run()
    middle = len(recorder.events)
    recorder.bury()
    alive = {n for n in recorder.alive if not recorder.storages[n].given and recorder.storages[n].bytes > 8}
    saved = sum(recorder.storages[n].bytes for n in alive)
    of_weights = sum(recorder.storages[n].bytes for n in alive & recorder.weights)
    outs = {recorder.number(t): (t.numel(), t.dtype) for t in leaves(y) if is_tensor(t)}
    gradients = backward()
    between, left = len(recorder.events), None
    if isinstance(gradients, SecondHalf):
        recorder.bury()
        mine = {recorder.number(t) for t in leaves(gradients.first) if is_tensor(t)} | set(outs)  # which others hold
        left = {n for n in recorder.alive if not recorder.storages[n].given and recorder.storages[n].bytes > 8} - mine
        gradients = [gradients.first, gradients.run()]
    end = len(recorder.events)
    recorder.bury()
    kept = {recorder.number(t) for t in leaves(gradients) if is_tensor(t)}
    forward, halves = _work(recorder, start, middle, alive, alive), None
    if left is not None:
        halves = Halves(
            _work(recorder, middle, between, left | kept, alive),
            _work(recorder, between, end, kept, left),
            sum(recorder.storages[n].bytes for n in left),
        )
    return Trace(forward, _work(recorder, middle, end, kept, alive), saved, tuple(outs.values()), halves, of_weights)


@dataclass
class SecondHalf:
    """first: what the first half of a backward gave; run() -> the gradients of parameters."""

    first: Any
    run: Any


# ------------------------------------------------------------------------------------------------------------ the parts


@dataclass(frozen=True, eq=False)
class Parts:
    """A model whose parts are traced, as one rank of a stage runs them.

    model: with `spec`, `embed`, `block` and `head`, as a pipeline wants it. sh: on a mesh of `ranks_not_there`, or without one.
    rows: of one microbatch on this rank. seq: tokens of a whole sequence. spec: of the model, with the layers that are asked for.
    """

    model: Any
    sh: Sharding
    rows: int
    seq: int
    spec: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "sh", self.sh.delaying())  # gradients of parameters are summed elsewhere

    def batch(self) -> dict[str, torch.Tensor]:
        """Tokens and labels, without data."""
        shape = (self.rows, self.sh.local_size("seq", self.seq))
        return {n: torch.zeros(shape, dtype=torch.int64, device=DEVICE) for n in ("tokens", "labels")}

    def values(self, spec: Any, *, grad: bool = False) -> Any:
        """Parameters as equations read them but for their dtype: whole over data ranks."""
        return tree_map(
            lambda p: torch.empty(
                self.sh.stored_shape(p), dtype=self.sh.param_dtype(p), device=DEVICE, requires_grad=grad
            ),
            spec,
        )

    def layer(self, index: int, *, halves: bool = False) -> Trace:
        """A layer, forward and backward (what `save` leaves out is run again there). halves: with the backward in two."""
        carry = self.carry
        with _recording(self.sh) as r:
            ctx = with_context(self.model, self.batch(), Ctx(sh=self.sh))
            p, x = {index: self.values(self.spec["layers"][index])}, tree_map(_like, carry)
            s = split(layers_of(self.model, self.spec))
            fixed = [*leaves(ctx.extras or {}), ctx.positions]

            def run() -> Any:
                if halves:
                    return self._in_halves(s, p, x, ctx)
                y, residual = s.forward(p, x, ctx, True)
                hold = [residual]

                def backward() -> Any:
                    gy = _gradient_of(y)
                    for t in leaves(gy):
                        if is_tensor(t):
                            r.number(t, given=True)  # none of the layer's own
                    return s.backward(hold.pop(), gy, p)

                return y, backward

            given = [*leaves(x), *(t for t in fixed if is_tensor(t))]
            return traced(run, given, leaves(p), r)

    @functools.cached_property
    def carry(self) -> Any:
        """What goes from layer to layer, without data."""
        with torch.no_grad():
            batch = self.batch()
            ctx = with_context(self.model, batch, Ctx(sh=self.sh))
            front = {n: p for n, p in self.spec.items() if n != "layers"}
            x = self.model.embed(self.values(front), batch, ctx)
        return like(x, [torch.empty(t.shape, dtype=t.dtype, device=DEVICE) for t in leaves(x)])

    def embed(self, *, halves: bool = False) -> Trace:
        """What comes before the layers."""
        batch = self.batch()

        def f(p: Any, x: Any, ctx: Ctx) -> Any:
            return self.model.embed(p, batch, ctx)

        return self._end(f, None, batch, halves)

    def head(self, *, halves: bool = False) -> Trace:
        """What comes behind the layers, with the loss."""
        batch = self.batch()

        def f(p: Any, x: Any, ctx: Ctx) -> Any:
            terms, _ = self.model.head(p, x, batch, ctx)
            terms = terms if isinstance(terms, Mapping) else {"loss": terms}
            return sum(t.items.float().sum() for t in terms.values())

        return self._end(f, self.carry, batch, halves)

    def _end(self, f: Callable[[Any, Any, Ctx], Any], carry: Any, batch: Any, halves: bool) -> Trace:
        """f(parameters outside the layers, carry, ctx), forward and backward."""
        with _recording(self.sh) as r:
            ctx = with_context(self.model, batch, Ctx(sh=self.sh))
            p = self.values({n: v for n, v in self.spec.items() if n != "layers"}, grad=not halves)
            x = (
                None
                if carry is None
                else tree_map(lambda t: _like(t).requires_grad_(is_float(t) and not halves), carry)
            )

            def run() -> Any:
                if halves:
                    return self._in_halves(split(f), p, x, ctx)
                with torch.enable_grad():
                    return self._graph(f(p, x, ctx), (p, x))

            return traced(run, [t for t in (*leaves(batch), *leaves(x)) if is_tensor(t)], leaves(p), r)

    @staticmethod
    def _in_halves(s: Any, p: Any, x: Any, ctx: Ctx) -> tuple[Any, Any]:
        """(y, its backward, by input and then by weight) of a split function. What comes to the backward is its own as far as the
        second half reads it again."""
        y, residual = s.forward(p, x, ctx, False)
        hold = [residual]

        def backward() -> SecondHalf:
            gx, left = s.backward_input(hold.pop(), _gradient_of(y), p)
            rest = [left]
            return SecondHalf(gx, lambda: s.backward_weight(rest.pop()))

        return y, backward

    def sums(self) -> Counter[Collective]:
        """The collectives by which a step sums its losses and statistics, and what they are divided by, over all ranks: those that
        are under way beside its backward (see `fmegatron.accumulate`)."""
        with torch.no_grad(), _recording(self.sh) as r:
            batch = self.batch()
            ctx = with_context(self.model, batch, Ctx(sh=self.sh))
            p = self.values({n: v for n, v in self.spec.items() if n != "layers"})
            terms, stats = self.model.head(p, tree_map(_like, self.carry), batch, ctx)
            terms = terms if isinstance(terms, Mapping) else {"loss": terms}
            weights = self.model.weights(batch) if hasattr(self.model, "weights") else {}
            found: Counter[Collective] = Counter()
            for t in [*terms.values(), *_terms(stats), *weights.values()]:
                start = len(r.events)
                items = t.items(self.sh) if callable(t.items) else t.items
                found.update(e.what for e in r.events[start:] if e.kind == "collective")
                if not is_tensor(items):
                    continue
                items = items.long() if items.dtype == torch.bool else items
                x, steps = self.sh.local_sum(items, t.dims if "->" in t.dims else f"{t.dims} ->")
                elements = x.numel()
                for step in steps:
                    assert self.sh.mesh is not None
                    cost, n = COST[step.kind], self.sh.mesh.size(step.axes)
                    if cost not in ("nothing", "slice"):
                        found[Collective(cost, step.axes, n, elements, x.dtype)] += 1
        return found

    def _graph(self, y: Any, inputs: Any) -> Any:
        """(y, its backward) of what has a graph."""
        outs = [t for t in leaves(y) if is_tensor(t) and t.requires_grad]
        hold = [outs]

        def backward() -> Any:
            outs = hold.pop()
            wanted = [t for t in leaves(inputs) if is_tensor(t) and t.requires_grad]
            gy = [torch.empty_like(t) for t in outs]
            return [g for g in torch.autograd.grad(outs, wanted, gy, allow_unused=True) if g is not None]

        return tree_map(lambda t: t.detach() if is_tensor(t) else t, y), backward


def _terms(stats: Any) -> list[Any]:
    """The sums in a tree of statistics."""
    if isinstance(stats, Mapping):
        return [t for v in stats.values() for t in _terms(v)]
    return [stats] if hasattr(stats, "items") and hasattr(stats, "dims") else []


def _gradient_of(y: Any) -> Any:
    return tree_map(lambda t: torch.empty_like(t) if is_float(t) else None, y)


def _like(t: torch.Tensor) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=DEVICE)
