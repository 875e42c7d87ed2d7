"""Why changes of the automatic sweep are not caught: {pattern of "module:function: old -> new": reason}; the change's number
among those of the same text may stand behind.

A reason that begins with "equivalent" says why no number, collective or place can differ, one that begins with
"unreachable" why nothing runs it; such changes are not counted, all others are.
"""

from tests.mutants.survivors_core import SURVIVORS_CORE
from tests.mutants.survivors_ring import SURVIVORS_RING

WORDING = "equivalent: the wording of a refusal"
NO_LESS = "equivalent: every number below 2 stands for the plain order"
FIRST = "equivalent: the axes of a zigzag order are the first of their dim"
NO_GRADIENT = "equivalent: its backward gives no gradient either way"
UNREAD = "equivalent: what is added at the end is not read"
KEY = "names a plan in a cache: wrong only where another function has the same equation under this name"

SURVIVORS: dict[str, str] = {
    "fmegatron.collectives:LargestOverRanks.setup_context: ctx.mark_non_differentiable(output) -> pass": NO_GRADIENT,
    "fmegatron.collectives:_my_part: 1 -> 0": "equivalent: a part taken by its positions is the part taken as a slice",
    "fmegatron.collectives:_divide: x.shape[dim] // n -> (x.shape[dim] + 1) // n": "equivalent: n divides, and is 2 or more",
    "fmegatron.layout:steps_between: kind == 'R>S' -> *": WORDING,
    "fmegatron.layout:axes_of: 1 -> 2": WORDING,
    "fmegatron.layout:steps_between: len(want) - len(have) -> *": UNREAD,
    "fmegatron.layout:steps_between: [()] * (len(want) - len(have)) -> *": UNREAD,
    "fmegatron.layout:steps_between: list(have) + * -> list(have)": "equivalent: both sides have as many dims",
    "fmegatron.layout:_reordered: set(zigzag) & set(less) -> set(less)": FIRST,
    "fmegatron.layout:_reordered: set(zigzag) & set(more) -> set(zigzag)": FIRST,
    "fmegatron.layout:_reordered: set(zigzag) & set(more) -> set(more)": "equivalent: an order over no axes is the plain one",
    "fmegatron.layout:resolve_plan: '?' -> 'I'": "equivalent: from ? to I there is no arrow",
    "fmegatron.layout:stored: * | set(seen) -> {a for by in rest for a in by}": "equivalent: at rest a dim keeps its axes",
    "fmegatron.sharding:Sharding.index: self._part(n, axes, dim, ranks) -> pass": "equivalent: a check that raises",
    "fmegatron.sharding:Sharding._zigzag: 1 -> 0": NO_LESS,
    "fmegatron.sharding:Sharding._zigzag: set(zigzag) & set(axes) -> *": FIRST,
    "fmegatron.sharding:Sharding.local_sum: 'sum' -> 'max'": KEY,
    "fmegatron.sharding:Sharding.sum: 'sum' -> 'max'": KEY,
    "fmegatron.sharding:Sharding.max: 'max' -> 'sum'": KEY,
    "fmegatron.zigzag:zigzag_positions: size // (2 * ranks) -> (size + 1) // (2 * ranks)": "equivalent: the size divides",
    "fmegatron.mesh:Mesh.expand: 0.5 -> 1.5": WORDING,
    "fmegatron.mesh:Mesh.expand: 1 -> *": WORDING,
    "fmegatron.mesh:_refine: 1 -> 2": "equivalent: 1 is always one of the cuts; or a check that raises",
    "fmegatron.parallel.ring:_sent_home: ring.size - steps <= steps -> ring.size - steps < steps": (
        "equivalent: both ways are as long"
    ),
    "fmegatron.parallel.ring:RingAttention.setup_context: ctx.mark_non_differentiable(output[1]) -> pass": (
        "equivalent: nothing asks for the gradient of the log-sum-exp"
    ),
    "fmegatron.accumulate:row_count: 1 -> 2": "equivalent: a check that raises",
    "fmegatron.primitives.cross_entropy:linear_cross_entropy: max(1, *": "equivalent: how many tokens go at a time",
    "fmegatron.primitives.cross_entropy:linear_cross_entropy: CHUNK_ELEMENTS.get(*": (
        "equivalent: how many tokens go at a time"
    ),
    "fmegatron.primitives.embedding:_rows: table.device.type == 'cpu' -> *": "a cast of half precision, which no layout here has",
    "fmegatron.optim.norm:_runs: x.*": "equivalent: how a sum of squares is cut",
    **SURVIVORS_CORE,
    **SURVIVORS_RING,
}
