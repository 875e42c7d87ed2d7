"""What a layout communicates, counted in a step that ran, is what closed forms say: kind, axes, count and bytes.

The formulas are written out from sizes alone, one function for each kind of parallelism, of one rank and one step. A
layout of several kinds costs the sum. Two rules say how many collectives the leaves of parameters share:

- gradients that are reduced behind the last microbatch (`Reducer`): one bucket a layer; of the leaves outside the layers
  the last norm and the head go with the last layer, whose backward comes first, and the embedding goes alone;
- what ZeRO-3 gathers, and reduces in every microbatch: one bucket a layer, and one for each group of `ENDS`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
import torch

from fmegatron import zero
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder, DecoderConfig
from fmegatron.precision import Precision
from fmegatron.recording import by_axes, record_collectives
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.simulation import simulate
from fmegatron.testing import Layout, ledger

VOCAB, EMBED, LAYERS, KV, GROUP, HEAD, MLP = 48, 16, 2, 2, 2, 4, 24
CONFIG = DecoderConfig(
    vocab=VOCAB, embed=EMBED, layers=LAYERS, heads=KV * GROUP, kv_heads=KV, head=HEAD, mlp=MLP, max_seq=64
)
MODEL = Decoder(CONFIG)
FLOAT, INT = 4, 8  # bytes
ENDS = (("embed",), ("norm", "head"))  # leaves outside the layers that ZeRO-3 gathers together

# what a part of a formula gives: [(kind, axes joined by "×", count, bytes)]
Cost = list[tuple[str, str, int, int]]


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------- sizes of a rank


def elements(tp: int) -> dict[str, int]:
    """{leaf: elements on a rank of tp} of one layer and of the ends. Of k and v each kv head lies on tp ÷ KV ranks where
    these are more than kv heads."""
    query, keys = EMBED * KV * GROUP * HEAD // tp, EMBED * KV * HEAD // min(tp, KV)
    found = {"norm1": EMBED, "norm2": EMBED, "q": query, "k": keys, "v": keys, "o": query}
    found |= dict.fromkeys(("gate", "up", "down"), EMBED * MLP // tp)
    return found | {"embed": VOCAB * EMBED // tp, "norm": EMBED, "head": VOCAB * EMBED // tp}


def layer_bytes(tp: int = 1) -> int:
    return FLOAT * sum(n for leaf, n in elements(tp).items() if leaf not in sum(ENDS, ()))


def end_bytes(*leaves: str, tp: int = 1) -> int:
    return FLOAT * sum(elements(tp)[leaf] for leaf in leaves or sum(ENDS, ()))


def tokens(layout: Layout) -> int:
    """Tokens on a rank, of all microbatches."""
    rows, seq = layout.batch
    return rows * seq // layout.size("dp", "fsdp", "cp")


# ------------------------------------------------------------------------------------------------------- the formulas


def tensor(layout: Layout) -> Cost:
    """Megatron-LM's (Shoeybi et al., 2019): the stream is summed behind the embedding, attention and the feed-forward
    part, and its gradient in front of attention, the feed-forward part and the head; of the logits each token's maximum,
    sum and the label's are."""
    stream, t, m = tokens(layout) * EMBED * FLOAT, tokens(layout), layout.micro
    joins = 2 * LAYERS + 1
    return [("all-reduce", "tp", 2 * joins * m, 2 * joins * stream), ("all-reduce", "tp", 3 * m, 3 * t * FLOAT)]


def sequence(layout: Layout, parts: int = 1) -> Cost:
    """With sequence parallelism (Korthikanti et al., 2022) each of these all-reduces is a reduce-scatter, and an
    all-gather on the other side of the norms, whose gradients are summed (parts: of which a rank holds one of)."""
    stream, t, m = tokens(layout) * EMBED * FLOAT, tokens(layout), layout.micro
    joins = 2 * LAYERS + 1
    return [
        ("all-gather", "tp", 2 * joins * m, 2 * joins * stream),
        ("reduce-scatter", "tp", 2 * joins * m, 2 * joins * stream),
        ("all-reduce", "tp", 3 * m, 3 * t * FLOAT),
        ("all-reduce", "tp", LAYERS, joins * EMBED // parts * FLOAT),
    ]


def tensor_again(layout: Layout) -> Cost:
    """What blocks that are computed again sum again."""
    return [("all-reduce", "tp", 2 * LAYERS * layout.micro, 2 * LAYERS * tokens(layout) * EMBED * FLOAT)]


def sequence_again(layout: Layout) -> Cost:
    """What blocks that are computed again gather and scatter again."""
    count, size = 2 * LAYERS * layout.micro, 2 * LAYERS * tokens(layout) * EMBED * FLOAT
    return [(kind, "tp", count, size) for kind in ("all-gather", "reduce-scatter")]


def replicated_keys(layout: Layout) -> Cost:
    """With more ranks of tp than kv heads the gradients of k and v are summed over those that share a head."""
    keys = elements(layout.size("tp"))["k"]
    return [("all-reduce", "tp_group", LAYERS, LAYERS * 2 * keys * FLOAT)]


def losses(axes: str) -> Cost:
    """The tokens that count, and the sum of their losses: once a step."""
    return [("all-reduce", axes, 2, INT + FLOAT)]


def gradients(axes: str, kind: str = "all-reduce", *, tp: int = 1, times: int = 1, parts: int = 1) -> Cost:
    """All gradients, behind the last microbatch or (`times`) every one. parts: of each leaf, which a rank holds one of."""
    whole = (LAYERS * layer_bytes(tp) + end_bytes(tp=tp)) // parts
    return [(kind, axes, times * (LAYERS + 1), times * whole)]


def data(layout: Layout) -> Cost:
    return gradients("dp") + losses("dp")


def zero_1(layout: Layout) -> Cost:
    """Gradients go to the owners of the optimizer's state once a step."""
    return gradients("dp", "reduce-scatter") + losses("dp")


def zero_2(layout: Layout) -> Cost:
    """In every microbatch, for nowhere are they whole."""
    return gradients("dp", "reduce-scatter", times=layout.micro) + losses("dp")


def gathered(axes: str, layout: Layout, *, tp: int = 1) -> Cost:
    """ZeRO-3 in every microbatch: layers are gathered for the forward and again for the backward, the ends once, and
    gradients reduced."""
    m, layers, ends = layout.micro, LAYERS * layer_bytes(tp), end_bytes(tp=tp)
    return [
        ("all-gather", axes, m * (2 * LAYERS + len(ENDS)), m * (2 * layers + ends)),
        ("reduce-scatter", axes, m * (LAYERS + len(ENDS)), m * (layers + ends)),
    ]


def zero_3(layout: Layout) -> Cost:
    return gathered("dp", layout) + losses("dp")


def hybrid(layout: Layout) -> Cost:
    """Shards within fsdp; their gradients are summed over the replicas of dp once a step."""
    return gathered("fsdp", layout) + gradients("dp", parts=layout.size("fsdp")) + losses("fsdp×dp")


def hybrid_state(layout: Layout) -> Cost:
    """The same with the optimizer's state cut over the replicas too."""
    return gathered("fsdp", layout) + gradients("dp", "reduce-scatter", parts=layout.size("fsdp")) + losses("fsdp×dp")


def heads(layout: Layout) -> tuple[int, int]:
    """Bytes on a rank of queries and of keys, in all microbatches, where cp cuts the sequence."""
    tp = layout.size("tp")
    t = tokens(layout) * FLOAT * HEAD
    return t * KV * GROUP // tp, t * KV // min(tp, KV)


def context(layout: Layout) -> Cost:
    """Parameters are used on every part of the sequence."""
    return gradients("cp") + losses("cp")


def gather(layout: Layout) -> Cost:
    """Of every layer keys and values, and of packed rows the documents; the gradients of keys and values."""
    n, m, (_, keys) = layout.size("cp"), layout.micro, heads(layout)
    found = [("all-gather", "cp", 2 * LAYERS * m, 2 * LAYERS * n * keys)]
    found += [("reduce-scatter", "cp", 2 * LAYERS * m, 2 * LAYERS * n * keys)]
    if layout.packed:
        found += [("all-gather", "cp", LAYERS * m, LAYERS * n * tokens(layout) * INT)]
    return found


def gather_again(layout: Layout) -> Cost:
    """Blocks computed again gather keys and values again, though attention itself be kept: its backward reads them."""
    return [(kind, axes, n, size) for kind, axes, n, size in gather(layout) if kind == "all-gather"]


def ring(layout: Layout, axes: str = "cp", n: int = 0, keys: int = 0, held: int = 0) -> Cost:
    """Of every layer keys and values go to the neighbour n - 1 times, forward and backward, and their gradients n times,
    back to their owner (Liu et al., 2023)."""
    n, keys, held, m = n or layout.size("cp"), keys or heads(layout)[1], held or tokens(layout), layout.micro
    sent = 2 * (2 * (n - 1) + n)
    found = [("exchange", axes, LAYERS * m * sent, LAYERS * sent * keys)]
    if layout.packed:
        found += [("exchange", axes, LAYERS * m * 2 * (n - 1), LAYERS * 2 * (n - 1) * held * INT)]
    return found


def ring_again(layout: Layout) -> Cost:
    """A ring computed again; one whose output is kept is not."""
    n, m, (_, keys) = layout.size("cp"), layout.micro, heads(layout)
    return [("exchange", "cp", LAYERS * m * 2 * (n - 1), LAYERS * 2 * (n - 1) * keys)]


def ulysses_again(layout: Layout) -> Cost:
    return [(kind, axes, n // 2, size // 2) for kind, axes, n, size in ulysses(layout)]


def ulysses(layout: Layout) -> Cost:
    """Queries, keys, values and the output of every layer change from parts of the sequence to parts of the heads or
    back, and their gradients (Jacobs et al., 2023)."""
    m, (queries, keys) = layout.micro, heads(layout)
    return [("all-to-all", "cp", LAYERS * m * 8, LAYERS * 4 * (queries + keys))]


def ulysses_shared(layout: Layout) -> Cost:
    """With fewer kv heads than ranks, keys and values first go to all that share a head, and their gradients are summed
    there."""
    m, (queries, keys), shared = layout.micro, heads(layout), layout.size("cp") // KV
    return [
        ("all-to-all", "cp", LAYERS * m * 4, LAYERS * 4 * queries),
        ("all-to-all", "cp_kv", LAYERS * m * 4, LAYERS * 4 * shared * keys),
        ("all-gather", "cp_group", LAYERS * m * 2, LAYERS * 2 * shared * keys),
        ("reduce-scatter", "cp_group", LAYERS * m * 2, LAYERS * 2 * shared * keys),
    ]


def hierarchical(layout: Layout) -> Cost:
    """All-to-all among the ranks of cp_kv, and a ring of cp_ring of what they hold then: longer parts of fewer heads."""
    m, (queries, keys), n = layout.micro, heads(layout), layout.size("cp") // KV
    found = [("all-to-all", "cp_kv", LAYERS * m * 8, LAYERS * 4 * (queries + keys))]
    if layout.packed:
        found += [("all-gather", "cp_kv", LAYERS * m, LAYERS * KV * tokens(layout) * INT)]
    return found + ring(layout, "cp_ring", n, keys, KV * tokens(layout))


def everything(layout: Layout) -> Cost:
    """Four kinds at once: each rank's part of the parameters by tp, gathered over dp and cp."""
    tp, stored = layout.size("tp"), layout.size("dp", "cp")
    return gathered("dp×cp", layout, tp=tp) + losses("dp×cp") + sequence(layout, parts=stored) + ring(layout)


def not_dividing(layout: Layout) -> Cost:
    """Three ranks that hold parameters: matrices are cut along a dim that divides by three, and leaves without one (q, k,
    v, o, norms) are whole on every rank, with gradients that are summed once a step."""
    whole = {"q", "k", "v", "o", "norm1", "norm2", "norm"}
    m, sizes = layout.micro, elements(1)
    layers = LAYERS * FLOAT * sum(n for leaf, n in sizes.items() if leaf in ("gate", "up", "down"))
    ends = end_bytes("embed", "head")
    return [
        ("all-gather", "dp", m * (2 * LAYERS + len(ENDS)), m * (2 * layers + ends)),
        ("reduce-scatter", "dp", m * (LAYERS + len(ENDS)), m * (layers + ends)),
        ("all-reduce", "dp", LAYERS, FLOAT * sum(sizes[n] * (1 if n == "norm" else LAYERS) for n in whole)),
        *losses("dp"),
    ]


# -------------------------------------------------------------------------------------- what a step adds to gradients


def norms(*axes: str, layouts: int = 1) -> Cost:
    """The norms of gradients and of parameters, over axes that cut them: a sum for each way in which leaves lie."""
    return [("all-reduce", a, 2, 2 * layouts * FLOAT) for a in axes]


def returned(axes: str, parts: int = 1) -> Cost:
    """ZeRO-1 and -2: the new parameters, in one bucket; the norm of the gradients, which alone are cut."""
    whole = (LAYERS * layer_bytes() + end_bytes()) // parts
    return [("all-gather", axes, 1, whole), ("all-reduce", axes, 1, FLOAT)]


# ------------------------------------------------------------------------------------------------------ the comparison


def added(cost: Cost) -> dict[tuple[str, frozenset[str]], tuple[int, int]]:
    """{(kind, axes): (count, bytes)}"""
    found = defaultdict(lambda: (0, 0))
    for kind, axes, count, size in cost:
        n, held = found[kind, frozenset(axes.split("×"))]
        found[kind, frozenset(axes.split("×"))] = n + count, held + size
    return dict(found)


def counted(line, part="gradients"):
    found = ledger(MODEL, line, part=part)
    return {(e.kind, frozenset(e.axes)): (e.count, e.bytes) for e in found.entries}


FORMULAS = {
    "tp=2 micro=2": [tensor],
    "tp=4": [tensor, replicated_keys],
    "tp=2 remat=attention": [tensor, tensor_again],
    "tp=2 sp micro=2": [sequence],
    "tp=4 sp": [sequence, replicated_keys],
    "tp=2 sp micro=2 remat=nothing": [sequence, sequence_again],
    "dp=4 micro=2": [data],
    "dp=4 zero=1 micro=2": [zero_1],
    "dp=4 zero=2 micro=2": [zero_2],
    "dp=4 zero=3": [zero_3],
    "dp=2 zero=3 micro=2 remat=nothing": [zero_3],  # gathered again in any case
    "dp=3 zero=3 micro=2": [not_dividing],
    "fsdp=2,dp=2 zero=3 store=fsdp micro=2": [hybrid],
    "fsdp=2,dp=2 zero=3 store=fsdp state=dp micro=2": [hybrid_state],
    "cp=4": [context, gather],
    "cp=2 micro=2 packed": [context, gather],
    "cp=2 packed remat=attention": [context, gather, gather_again],
    "cp=4 context=ring": [context, ring],
    "cp=2 context=ring micro=2 packed": [context, ring],
    "cp=2 context=ring packed remat=attention": [context, ring],
    "cp=2 context=ring remat=nothing": [context, ring, ring_again],
    "cp=2 context=ulysses micro=2 remat=nothing": [context, ulysses, ulysses_again],
    "cp=2 context=ulysses": [context, ulysses],
    "cp=4 context=ulysses": [context, ulysses_shared],
    "cp=4 context=ulysses+ring micro=2 packed": [context, hierarchical],
    "dp=2,cp=2,tp=2 sp zero=3 micro=2 context=ring": [everything],
}


@pytest.mark.parametrize("line", FORMULAS)
def test_what_ran_is_what_the_formulas_say(line):
    layout = Layout.parse(line)
    assert counted(line) == added(list(itertools.chain.from_iterable(f(layout) for f in FORMULAS[line])))


def by_wire(cost: Cost, sizes: list[tuple[str, str, int, list[int]]]) -> Cost:
    """The same with gradients in bfloat16 and added where they arrive: a reduce-scatter is an all-to-all of half the bytes,
    an all-reduce one and an all-gather, of buckets filled up to a multiple of the ranks. sizes: (kind, axes, ranks,
    elements of each bucket) of the sums that these take the place of."""
    found = [(kind, axes, -count, -size) for kind, axes, count, size in replaced(sizes)]
    for kind, axes, ranks, buckets in sizes:
        sent = 2 * sum(-(-n // ranks) * ranks for n in buckets)
        for one in ("all-to-all", *(["all-gather"] if kind == "all-reduce" else [])):
            found.append((one, axes, len(buckets), sent))
    return cost + found


def replaced(sizes: list[tuple[str, str, int, list[int]]]) -> Cost:
    return [(kind, axes, len(buckets), FLOAT * sum(buckets)) for kind, axes, _, buckets in sizes]


def buckets(parts: int = 1, tp: int = 1) -> list[int]:
    """Elements of the buckets of `gradients`: the last layer goes with the last norm and the head, the embedding alone."""
    layer, ends = layer_bytes(tp) // FLOAT, elements(tp)
    held = [*[layer] * (LAYERS - 1), layer + ends["norm"] + ends["head"], ends["embed"]]
    return [n // parts for n in held]


def gathered_buckets() -> list[int]:
    """Of `gathered`, in one microbatch."""
    return [*[layer_bytes() // FLOAT] * LAYERS, *(end_bytes(*leaves) // FLOAT for leaves in ENDS)]


WIRE = {
    "dp=4 micro=2": ([data], [("all-reduce", "dp", 4, buckets())]),
    "dp=3": ([data], [("all-reduce", "dp", 3, buckets())]),
    "dp=4 zero=1 micro=2": ([zero_1], [("reduce-scatter", "dp", 4, buckets())]),
    "dp=4 zero=2 micro=2": ([zero_2], [("reduce-scatter", "dp", 4, 2 * buckets())]),
    "dp=4 zero=3": ([zero_3], [("reduce-scatter", "dp", 4, gathered_buckets())]),
    "fsdp=2,dp=2 zero=3 store=fsdp micro=2": (
        [hybrid],
        [("reduce-scatter", "fsdp", 2, 2 * gathered_buckets()), ("all-reduce", "dp", 2, buckets(parts=2))],
    ),
    "cp=4": ([context, gather], [("all-reduce", "cp", 4, buckets())]),
}


@pytest.mark.parametrize("line", WIRE)
def test_gradients_that_travel_in_bfloat16_are_half_the_bytes(line):
    formulas, sizes = WIRE[line]
    layout = Layout.parse(line)
    found = ledger(MODEL, line, part="gradients", precision=Precision(wire=torch.bfloat16))
    counts = {(e.kind, frozenset(e.axes)): (e.count, e.bytes) for e in found.entries}
    cost = by_wire(list(itertools.chain.from_iterable(f(layout) for f in formulas)), sizes)
    assert counts == {what: (n, size) for what, (n, size) in added(cost).items() if n}


STEPS = {
    "tp=2": lambda layout: tensor(layout) + norms("tp"),
    "dp=4": data,
    "dp=4 zero=1": lambda layout: zero_1(layout) + returned("dp"),
    "dp=4 zero=2 micro=2": lambda layout: zero_2(layout) + returned("dp"),
    "dp=4 zero=3": lambda layout: zero_3(layout) + norms("dp"),
    "fsdp=2,dp=2 zero=3 store=fsdp": lambda layout: hybrid(layout) + norms("fsdp"),
    "fsdp=2,dp=2 zero=3 store=fsdp state=dp": lambda layout: hybrid_state(layout) + norms("fsdp") + returned("dp", 2),
}


@pytest.mark.parametrize("line", STEPS)
def test_what_a_whole_step_adds(line):
    """Clipping uses the norm that the step reports."""
    assert counted(line, "step") == added(STEPS[line](Layout.parse(line)))


def exchanged(axes: str, groups: list[tuple[int, int]], *, cut: int, copies: int = 1, over: str = "") -> Cost:
    """Muon's matrices, by groups of (how many, elements of one): each is made whole on one of the ranks that hold its
    parts or copies, and goes back: by an all-to-all each way among the parts (`cut` ranks over `axes`), and, where there
    are more matrices than parts, an all-gather among `copies` (over `over`)."""
    found = []
    for n, size in groups:
        shared = copies if n > cut else 1
        n = -(-n // (cut * shared)) * cut * shared  # each rank has as many
        if cut > 1:
            found.append(("all-to-all", axes, 2, 2 * FLOAT * (n // shared) * size // cut))
        if shared > 1:
            found.append(("all-gather", over, 1, FLOAT * n * size // cut))
    return found


STREAM, NARROW, WIDE = (
    EMBED * KV * GROUP * HEAD,
    EMBED * KV * HEAD,
    EMBED * MLP,
)  # elements of q or o, k or v, the others
WHOLE = [(2 * LAYERS, STREAM), (2 * LAYERS, NARROW), (3 * LAYERS, WIDE)]
CUT = [(LAYERS, STREAM), *WHOLE[1:], (LAYERS, STREAM)]  # q and o lie in other ways on the ranks

MUON = {
    "tp=2": lambda layout: tensor(layout) + norms("tp") + exchanged("tp", CUT, cut=2),
    "dp=4": lambda layout: data(layout) + exchanged("", WHOLE, cut=1, copies=4, over="dp"),
    "dp=4 zero=3": lambda layout: zero_3(layout) + norms("dp") + exchanged("dp", CUT, cut=4),
    "dp=4 zero=1": lambda layout: zero_1(layout) + returned("dp") + exchanged("dp", CUT, cut=4),
}


@pytest.mark.parametrize("line", MUON)
def test_what_muon_exchanges(line):
    found = ledger(MODEL, line, optimizer="muon")
    assert {(e.kind, frozenset(e.axes)): (e.count, e.bytes) for e in found.entries} == added(
        MUON[line](Layout.parse(line))
    )


def test_muon_shares_the_copies_out_too():
    """Of tensor parallelism's parts there are two copies: these share out the groups of more matrices than parts."""
    more, both = (ledger(MODEL, "dp=2,tp=2", optimizer=name) for name in ("muon", "adamw"))
    extra = [e for e in more.entries if e not in both.entries]
    assert {(e.kind, frozenset(e.axes)): (e.count, e.bytes) for e in extra} == added(
        exchanged("tp", CUT, cut=2, copies=2, over="dp")
    )


@pytest.mark.parametrize(
    "line", ["tp=2 sp remat=nothing", pytest.param("cp=2 context=ulysses", marks=pytest.mark.slow)]
)
def test_what_compiled_blocks_run_is_what_the_formulas_say(line):
    layout = Layout.parse(line)
    formulas = {"tp=2 sp remat=nothing": [sequence, sequence_again], "cp=2 context=ulysses": [context, ulysses]}[line]
    found = ledger(MODEL, line, part="gradients", compile="aot_eager")
    counts = {(e.kind, frozenset(e.axes)): (e.count, e.bytes) for e in found.entries}
    assert counts == added(list(itertools.chain.from_iterable(f(layout) for f in formulas)))


def test_what_a_ledger_cannot_count_it_says():
    with pytest.raises(UserError, match="compile='aot_eager'\\): only part=\"gradients\""):
        ledger(MODEL, "tp=2", compile="aot_eager")
    with pytest.raises(UserError, match="collectives are counted in graphs of the backend aot_eager"):
        ledger(MODEL, "tp=2", part="gradients", compile="inductor")
    with pytest.raises(UserError, match='use "adamw" or "muon"'):
        ledger(MODEL, "tp=2", optimizer="sgd")
    with pytest.raises(UserError, match='muon with part="step"'):
        ledger(MODEL, "tp=2", part="gradients", optimizer="muon")


def test_a_bucket_that_is_full_makes_another(monkeypatch):
    """What returns is cut into buckets of at most `BUCKET` elements, or a leaf that is larger."""
    monkeypatch.setattr(zero, "BUCKET", VOCAB * EMBED // 4)  # a quarter of the embedding is what a rank has of it
    sizes = [n // 4 for n in elements(1).values()]
    assert max(sizes) == zero.BUCKET
    found = ledger(MODEL, "dp=4 zero=1").of("all-gather", "dp")
    assert found.bytes == dict([(x[0], x[3]) for x in returned("dp")])["all-gather"]
    assert found.count > -(-found.bytes // FLOAT // 4 // zero.BUCKET) - 1 > 2


# -------------------------------------------------------------------------------------------------- what is printed


def test_a_ledger_is_a_table_with_sums_by_axes():
    found = ledger(MODEL, "dp=2,tp=2 sp zero=3")
    heading, names, *rows, last = str(found).splitlines()
    assert heading == "one step of dp=2,tp=2 sp zero=3, on each of 4 ranks"
    assert names.split() == ["collective", "over", "ranks", "count", "bytes", "sent", "by", "a", "rank"]
    read = [row.replace(",", "").split() for row in rows]
    for what, at in (("count", 3), ("bytes", 4), ("sent", 5)):
        for axes in ("dp", "tp"):
            of_kinds = [int(row[at]) for row in read if row[1] == axes and row[0] != "all"]
            (of_all,) = [int(row[at]) for row in read if row[:2] == ["all", axes]]
            assert sum(of_kinds) == of_all == sum(getattr(e, what) for e in found.entries if e.axes == (axes,)) > 0
        assert int(last.replace(",", "").split()[at - 2]) == sum(getattr(e, what) for e in found.entries)
    assert str(ledger(MODEL, "dp=1")) == "one step of dp=1 communicates nothing"


@pytest.mark.parametrize(
    ("equation", "sizes"),
    [
        ("batch seq mlp, mlp embed -> batch seq* embed", {"mlp": 6}),
        ("batch seq* embed -> batch seq embed | mlp", {}),
        ("batch seq mlp, mlp embed -> batch seq embed", {"mlp": 6}),
        ("batch seq embed vocab -> batch seq embed", {"vocab": 7}),  # filled up
    ],
)
def test_explain_says_what_runs(equation, sizes):
    """Its totals are those of a record of the equation, forward and backward."""
    dims = {"batch": 4, "seq": 6, "embed": 8, **sizes}
    inputs, _, output = equation.partition(" -> ")
    with simulate(4):
        mesh = make_mesh("dp=2,tp=2", device="cpu")
        rules = standard_rules(mesh, sequence_parallel=True, uneven={"vocab": 7})
        sh = Sharding(mesh, rules, precision=Precision(params=torch.float64))
        values = [torch.ones([dims[n.rstrip("*")] for n in side.split()]).double() for side in inputs.split(", ")]
        local = [sh.shard(x, side).requires_grad_() for x, side in zip(values, inputs.split(", "), strict=True)]
        with record_collectives() as found:
            if len(local) == 2:
                y = sh.dot(*local, equation)
            else:
                y = sh(*local, equation) if "vocab" not in dims else sh.sum(*local, equation)
            y.sum().backward()
    text = sh.explain(equation, **dims)
    for axes, some in by_axes(found).items():
        n, total, sent = len(some), sum(c.bytes for c in some), sum(c.sent for c in some)
        plural = "s" if n > 1 else ""
        assert f"in all over {axes[0]}: {n} collective{plural} of {total:,} bytes, {sent:,} sent by each rank" in text
        assert all(f"{c.kind} over tp" in text for c in some)
    assert found
