"""The layers of a model in turn: `stack`, and `chain` for the parts of a pipeline stage.

`stack` is where ZeRO-3 (FSDP) lives: a layer's parameters are gathered one layer before it runs, forward and
backward, and dropped behind it; its gradients are reduced to their owners behind its backward. Blocks receive
gathered parameters and know nothing of it. Each layer is a node of autograd's graph of its own, so that gradients reach
the leaves, and whoever waits for them there, while the backward goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.function import apply_function, linear_map, under_torch_func
from fmegatron.random import fold_in, to_tensor
from fmegatron.remat import joined, remat
from fmegatron.sharding import Sharding
from fmegatron.split import Split, everything, split, uncompiled
from fmegatron.tree import add, is_float, is_tensor, leaves, like, structure, tree_map, unflatten
from fmegatron.zero import Awaited, moving


@dataclass(frozen=True)
class Store:
    """How the parameters of layers rest.

    `gather(params, index) -> started` begins to gather one layer's parameters, `reduce(gradients, index) -> started`
    to reduce its gradients into the layout at rest, and `wait(started) -> tree` ends either. None are leaves.
    `use(params, index)` is both together as one differentiable function, for torch.func; by default it is made of the
    others. `reduces(index)`: does the reduction of a layer take time? If not, it is awaited at once.
    """

    gather: Callable[[Any, int], Any]
    reduce: Callable[[Any, int], Any]
    wait: Callable[[Any], Any] = lambda started: started
    use: Callable[[Any, int], Any] | None = None
    reduces: Callable[[int], bool] = lambda index: True

    def differentiable(self, params: Any, index: int) -> Any:
        """The gathered parameters as a function that can be differentiated any number of times."""
        if self.use is not None:
            return self.use(params, index)
        flat = leaves(params)
        some = [t for t in flat if is_float(t)]

        def through(how: Callable) -> Callable:
            def run(ts: list[torch.Tensor]) -> list[torch.Tensor]:
                new = iter(ts)
                out = self.wait(how(like(params, [next(new) if is_float(t) else t for t in flat]), index))
                return [t for t, was in zip(leaves(out), flat, strict=True) if is_float(was)]

            return run

        new = iter(linear_map(through(self.gather), through(self.reduce), some))
        return like(params, [next(new) if is_float(t) else t for t in flat])


def sharded_store(sh: Sharding, spec: Mapping[int, Any]) -> Store:
    """The store of layers that rest as `sh` lays out the parameters of `spec`, a spec tree per layer index.

    All leaves of a layer go in one collective per axes and dtype, which runs beside other work until it is waited for.
    """

    def begin(what: str) -> Callable[[Any, int], Callable[[], Any]]:
        def run(values: Any, index: int) -> Callable[[], Any]:
            flat, params = leaves(values), leaves(spec[index])
            rows = [i for i, t in enumerate(flat) if is_float(t)]
            arrive = moving([flat[i] for i in rows], [params[i] for i in rows], sh, what)
            shape, kept = structure(values), [None if is_float(t) else t for t in flat]

            def wait() -> Any:
                new = list(kept)
                for i, t in zip(rows, arrive(), strict=True):
                    new[i] = t
                return unflatten(shape, new)

            return wait

        return run

    def use(values: Any, index: int) -> Any:
        if sh.mesh is None:
            usual, pairs = sh.precision.compute_dtype, zip(leaves(values), leaves(spec[index]), strict=True)
            if all([t.dtype == (p.dtype or usual) for t, p in pairs if is_float(t)]):
                return values
        return tree_map(lambda t, param: sh.use(t, param) if is_float(t) else t, values, spec[index])

    def reduces(index: int) -> bool:
        return any(sh.steps_of(param, "leave") for param in leaves(spec[index]))

    return Store(begin("enter"), begin("leave"), lambda started: started(), use, reduces)


def _used_as_stored(sh: Sharding, spec: Mapping[int, Any]) -> bool:
    """Are parameters at rest what equations read, neither gathered nor cast, and their gradients not reduced?"""
    cast = sh.precision.compute_dtype != sh.precision.params
    if sh.mesh is None or not sh.delayed:
        return sh.mesh is None and not cast
    return not cast and not any(sh.steps_of(p, "enter") for p in leaves(spec))


def stack(
    block: Callable,
    spec: Mapping[int, Any] | None = None,
    *,
    save: Callable[[str], bool] = everything,
    free: bool = True,
    compile: bool | Mapping[str, Any] = False,
    store: Store | Callable[[Ctx], Store | None] | None = None,
    context: Callable[[Ctx, int], Ctx] | None = None,
) -> Callable:
    """f(layers, carry, ctx, then=None) -> carry: block(params, carry, ctx) for every layer in turn.

    layers is {index: params}, run in the order of the indices. A layer's ctx has its index in `layer` and its own key,
    folded from ctx.key by that index. carry may be a function without arguments that makes it: it is called when the
    first layers' parameters are being gathered. then() is called before the last layer runs, such as
    `fmegatron.zero.Ahead.begin` of the parameters that are read behind it.

    spec: {index: spec tree}: the layers' parameters rest as ctx.sh lays these out; they are cast and gathered layer
        by layer, and their gradients reduced. Without it blocks get the parameters as they are.
    save: what is kept for a layer's backward (see `remat`).
    free: drop gathered parameters behind the forward and gather them again for the backward: at most two layers' are
        alive. If not, they are kept from forward to backward (ZeRO-2's exchange of memory for communication).
    compile: compile the block, innermost; or the arguments of torch.compile. fullgraph is the default.
    store: another way to keep parameters than `spec`; or a function of ctx that gives it.
    context: (ctx, index) -> ctx: what else layers of one kind find in their context. A block that reads `ctx.layer`
        is compiled once a layer, one that reads what its kind has in common once a kind.

    Under torch.func, in the checking mode, and where there is nothing to gather this is a plain loop over the layers.
    """
    inner = compiled(block, {} if compile is True else compile) if compile is not False else block
    body = inner if save is everything else remat(inner, save)
    if spec is not None and store is not None:
        raise UserError("stack takes spec=… or store=…, not both")

    def store_of(ctx: Ctx) -> Store | None:
        if spec is not None:
            return sharded_store(ctx.sh, spec)
        return store(ctx) if callable(store) else store

    def layer_ctx(ctx: Ctx, index: int, p: Any) -> Ctx:
        if ctx.sh.precision.fp8 is not None:
            from fmegatron.fp8.scaling import at_layer  # imported where something is in fp8

            ctx = ctx.replace(sh=at_layer(ctx.sh, index, max(spec) + 1 if spec else None))
        key = ctx.key
        if key is not None:
            key = fold_in(key, index)
            # Numbers in a key are constants of a graph: every layer would be compiled anew.
            if inner is not block:
                at = next((x.device for x in leaves(p) if is_tensor(x)), ctx.sh.device)
                key = to_tensor(key, at)
        ctx = ctx.replace(layer=index, key=key)
        return ctx if context is None else context(ctx, index)

    def plain(layers: Mapping[int, Any], carry: Any, ctx: Ctx, then: Callable[[], None] | None = None) -> Any:
        own = store_of(ctx)
        layer = uncompiled(block) if under_torch_func() and save is everything else body
        carry, order = carry() if callable(carry) else carry, sorted(layers)
        for index in order:
            if index == order[-1] and then is not None:
                then()
            p = layers[index] if own is None else own.differentiable(layers[index], index)
            carry = layer(p, carry, layer_ctx(ctx, index, p))
        return carry

    def parts(layers: Mapping[int, Any]) -> list[tuple[Split, Any, int]]:
        return [(halves, layers[index], index) for index in sorted(layers)]

    def place(layers: Mapping[int, Any], grads: list[Any]) -> dict[int, Any]:
        return dict(zip(sorted(layers), grads, strict=True))

    halves = split(body, hidden=spec is not None or store is not None)

    def f(layers: Mapping[int, Any], carry: Any, ctx: Ctx, then: Callable[[], None] | None = None) -> Any:
        own = store_of(ctx)
        stored = own is None or (spec is not None and _used_as_stored(ctx.sh, spec))
        if own is None or stored or ctx.sh.check is not None or under_torch_func():
            return plain(layers, carry, ctx, then)

        def alone(p: Any, x: Any, ctx: Ctx) -> Any:
            assert ctx.layer is not None
            layer = uncompiled(block) if save is everything else body
            return layer(own.differentiable(p, ctx.layer), x, ctx)

        run = _Layers([(layers[index], index) for index in sorted(layers)], own, halves, body, alone, free)
        return run(carry, lambda index: layer_ctx(ctx, index, layers[index]), then)

    f.split = _in_turn(parts, place, layer_ctx, store_of, free)  # type: ignore[attr-defined]
    return f


def chain(*parts: tuple[Callable, Callable]) -> Callable:
    """f(params, x, ctx): functions in turn, each given as a pair: which part of params it gets, and the function.

    A pipeline stage is chain((embedding_of, embed), (layers_of, stack(…)), (rest_of, head)). A leaf of two parts (a
    tied embedding) gets the sum of its gradients.
    """
    picks = [pick for pick, _ in parts]
    splits = [split(f, hidden=False) for _, f in parts]

    def place(p: Any, grads: list[Any]) -> Any:
        out: list[Any] = [None] * len(leaves(p))
        number = like(p, range(len(out)))
        for pick, g in zip(picks, grads, strict=True):
            for i, t in zip(leaves(pick(number)), leaves(g), strict=True):
                out[i] = add(out[i], t)
        return like(p, out)

    def plain(p: Any, x: Any, ctx: Ctx) -> Any:
        for pick, f in parts:
            x = f(pick(p), x, ctx)
        return x

    def run(p: Any) -> list[tuple[Split, Any, int]]:
        return [(s, pick(p), i) for i, (pick, s) in enumerate(zip(picks, splits, strict=True))]

    return joined(_in_turn(run, place, lambda ctx, index, p: ctx, lambda ctx: None, True), plain)


def compiled(block: Callable, options: Mapping[str, Any]) -> Callable:
    """torch.compile of a block, with room for the graphs that it needs.

    These are up to three for training and one for evaluation, for every shape of its inputs and structure of its
    parameters; dynamo's limit of 8 counts per function, and then fails.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 64)
    return torch.compile(block, **{"fullgraph": True, **options})


class _Layers:
    """Layers run in turn, each a node of the graph, and what these nodes have in common: what is under way.

    layers: [(parameters at rest, index)]. body(params, x, ctx): a layer; halves: its split; alone(params at rest, x,
    ctx): a layer with its gather as a function that can be differentiated any number of times.
    """

    def __init__(
        self,
        layers: list[tuple[Any, int]],
        store: Store,
        halves: Split,
        body: Callable,
        alone: Callable[[Any, Any, Ctx], Any],
        free: bool,
    ) -> None:
        self.layers, self.store, self.halves, self.body, self.alone, self.free = (
            layers,
            store,
            halves,
            body,
            alone,
            free,
        )
        self.gathers: dict[int, Any] = {}  # under way
        self.full: dict[int, Any] = {}  # gathered parameters that are kept for the backward
        self.backwards: set[int] = set()  # layers whose backward is to come
        self.reductions: dict[int, Any] = {}  # under way,
        self.reduced: dict[int, Any] = {}  # and at their end

    def __call__(self, x: Any, ctx_of: Callable[[int], Ctx], then: Callable[[], None] | None) -> Any:
        at_rest = [self.begin(n) for n in range(min(2, len(self.layers)))]
        x = x() if callable(x) else x
        for n, (_, index) in enumerate(self.layers):
            if n and n + 1 < len(self.layers):
                at_rest.append(self.begin(n + 1))
            if n + 1 == len(self.layers) and then is not None:
                then()
            x = self.node(n)(at_rest[n], x, ctx_of(index))
        return x

    def begin(self, n: int) -> Any:
        """Begins to gather a layer's parameters: as they rest, behind a node where their gradients are awaited."""
        p, index = self.layers[n]
        with torch.no_grad():
            self.gathers[n] = self.store.gather(p, index)
        flat = leaves(p)
        rows = [i for i, t in enumerate(flat) if is_float(t) and t.requires_grad]
        if not rows or not torch.is_grad_enabled() or not self.store.reduces(index):
            return p

        def awaited() -> list[Any] | None:
            self.settle(n)
            found = self.reduced.pop(n, None)
            return None if found is None else [leaves(found)[i] for i in rows]

        for i, t in zip(rows, apply_function(Awaited, awaited, *(flat[i] for i in rows)), strict=True):
            flat[i] = t
        return like(p, flat)

    def node(self, n: int) -> Callable[[Any, Any, Ctx], Any]:
        """A layer as a function of its parameters at rest, its input and its context."""
        index = self.layers[n][1]

        def forward(p: Any, x: Any, ctx: Ctx, joint: bool, trainable: Any) -> tuple[Any, Any]:
            q = self.store.wait(self.gathers.pop(n))
            self.backwards.add(n)
            if not self.free:
                self.full[n] = q
            return self.halves.forward(q, x, ctx, joint, trainable)

        def backward(residual: Any, g: Any, p: Any) -> tuple[Any, Any]:
            q = self.again(n)
            g, own = self.halves.backward(residual, g, q)
            del q
            self.settle(*self.reductions)
            if not self.store.reduces(index):
                return g, self.store.wait(self.store.reduce(own, index))
            wanted = [t is not None for t in leaves(own)]
            self.reductions[n] = self.store.reduce(own, index)
            # what stands for gradients under way; those themselves come where they are awaited
            return g, like(p, [t.detach() if w else None for t, w in zip(leaves(p), wanted, strict=True)])

        def plain(p: Any, x: Any, ctx: Ctx) -> Any:
            if under_torch_func():
                return self.alone(p, x, ctx)
            return self.body(self.store.wait(self.gathers.pop(n)), x, ctx)

        return joined(Split(forward, backward, self.halves.backward_input, self.halves.backward_weight), plain)

    def again(self, n: int) -> Any:
        """A layer's gathered parameters for its backward; those of the layer before begin to be gathered."""
        self.backwards.discard(n)
        if n in self.full:
            return self.full.pop(n)
        for m in (n, n - 1):
            if m not in self.gathers and (m == n or m in self.backwards):
                self.gathers[m] = self.store.gather(*self.layers[m])
        return self.store.wait(self.gathers.pop(n))

    def settle(self, *some: int) -> None:
        """Waits for the gradients of some layers, if they are under way."""
        for n in some:
            if n in self.reductions:
                self.reduced[n] = self.store.wait(self.reductions.pop(n))


@dataclass
class _Run:
    """The residual of functions in turn: theirs, and gathered parameters (full) where they are kept."""

    residuals: list[Any]
    full: list[tuple[Split, Any, int]]
    store: Store | None


@dataclass
class _LeftOver:
    """What is left to do for the weights of functions in turn."""

    params: Any
    left: list[tuple[Split, Any, int]]
    store: Store | None


def _gather(store: Store | None, p: Any, index: int) -> Any:
    return p if store is None else store.gather(p, index)


def _wait(store: Store | None, tree: Any) -> Any:
    return tree if store is None else store.wait(tree)


def _ahead(todo: list[tuple[Split, Any, int]], store: Store | None) -> Iterator[tuple[Split, Any, int]]:
    """The parts with their parameters gathered, each gather begun while the part before runs."""
    started: deque = deque()
    for n, (s, _, index) in enumerate(todo):
        started.extend(_gather(store, p, i) for _, p, i in todo[n + len(started) : n + 2])
        yield s, _wait(store, started.popleft()), index


class Giving(NamedTuple):
    """Who gets gradients as they are made: `take(numbers, gradients)` is called for each part, and none are given back.

    numbers: a tree like the parameters, by whose leaves `take` knows what it gets: a part of it, and gradients like that
    part. They come before the next part's backward, or, where they are first reduced to their owners, behind that.
    """

    numbers: Any
    take: Callable[[Any, Any], None]


class InTurn(Split):
    """The split of functions run in turn, such as `stack` and `chain`: `backward(…, giving=None)` and
    `backward_weight(left, giving=None)` may give gradients away part by part; they then return None for them."""

    __slots__ = ()


class _Behind:
    """Gradients on their way to their owners: those of one part are reduced while the next one's are made."""

    def __init__(self, store: Store | None) -> None:
        self.store = store
        self.started: list[tuple[Any, Giving | None]] = []
        self.done: list[Any] = []

    def add(self, g: Any, index: int, to: Giving | None = None) -> None:
        """Waits for the gradients before these, and begins to reduce these. to: who gets them."""
        self.all()
        self.started.append((g if self.store is None else self.store.reduce(g, index), to))
        if to is not None and (self.store is None or not self.store.reduces(index)):
            del g
            self.all()  # they are there

    def all(self) -> list[Any]:
        """The gradients of all parts so far, in the order in which they came, without those that others get."""
        while self.started:
            begun, to = self.started.pop(0)
            g = _wait(self.store, begun)
            if to is None:
                self.done.append(g)
            else:
                to.take(to.numbers, g)
        return self.done


def _in_turn(parts: Callable, place: Callable, ctx_of: Callable, store_of: Callable, free: bool) -> Split:
    """The split of functions run in turn.

    `parts(params) -> [(split, its params, index)]`; `place(params, their gradients) -> gradients`; `ctx_of(ctx, index,
    its params)`: the context of a part.
    """

    def forward(p: Any, x: Any, ctx: Ctx, joint: bool = False, trainable: Any = None) -> tuple[Any, _Run]:
        trainable = like(p, [is_float(t) for t in leaves(p)]) if trainable is None else trainable
        wanted = {index: t for _, t, index in parts(trainable)}
        run = _Run([], [], store_of(ctx))
        for s, q, index in _ahead(parts(p), run.store):
            x, residual = s.forward(q, x, ctx_of(ctx, index, q), joint, wanted[index])
            run.residuals.append(residual)
            if not free:
                run.full.append((s, q, index))
            del q  # before the next one is waited for
        return x, run

    def behind(run: _Run, p: Any) -> Iterator[tuple[Split, Any, int]]:
        """The parts from last to first, with their parameters."""
        if not run.full:
            return _ahead(parts(p)[::-1], run.store)
        return (run.full.pop() for _ in range(len(run.full)))

    def each(giving: Giving | None, count: int) -> list[Giving | None]:
        """Who gets the gradients of each part."""
        return [None] * count if giving is None else [Giving(t, giving.take) for _, t, _ in parts(giving.numbers)]

    def backward(run: _Run, g: Any, p: Any, giving: Giving | None = None) -> tuple[Any, Any]:
        reduced, to = _Behind(run.store), each(giving, len(run.residuals))
        for s, q, index in behind(run, p):
            if giving is not None and isinstance(s, InTurn):
                g, own = s.backward(run.residuals.pop(), g, q, to.pop())
            else:
                g, own = s.backward(run.residuals.pop(), g, q)
                reduced.add(own, index, to.pop())
            del q, own
        found = reduced.all()[::-1]
        return g, place(p, found) if giving is None else None

    def backward_input(run: _Run, g: Any, p: Any) -> tuple[Any, _LeftOver]:
        left: list[tuple[Split, Any, int]] = []
        for s, q, index in behind(run, p):
            g, own = s.backward_input(run.residuals.pop(), g, q)
            left.append((s, own, index))
            del q, own
        nothing = tree_map(lambda t: None, p)
        return g, _LeftOver(nothing, left, run.store)

    def backward_weight(todo: _LeftOver, giving: Giving | None = None) -> Any:
        reduced, to = _Behind(todo.store), each(giving, len(todo.left))[::-1]
        while todo.left:
            s, own, index = todo.left.pop()  # from the first to the last
            if giving is not None and isinstance(s, InTurn):
                s.backward_weight(own, to.pop())
            else:
                reduced.add(s.backward_weight(own), index, to.pop())
            del own
        found = reduced.all()
        return place(todo.params, found) if giving is None else None

    return InTurn(forward, backward, backward_input, backward_weight)
