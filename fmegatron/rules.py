"""The table that says on which mesh axes each named dimension lies."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from fmegatron.errors import UserError
from fmegatron.mesh import Axes, Mesh

# How attention reads a sequence that mesh axes cut: fmegatron.parallel.context
CONTEXTS = ("gather", "ring", "ulysses", "ulysses+ring")

# Dims of latent attention that no axis cuts: fmegatron.models.mla
LATENT = ("q_latent", "kv_latent", "latent_rope", "nope_value", "value")


@dataclass(frozen=True)
class Rules:
    """compute: dim -> mesh axis, ordered tuple of axes, or None (not sharded). Every dim needs a row: a misspelt
    name is an error, never "unsharded". A name with a mark (`seq*`, `batch'`: another layout of the same dim) falls
    back on the plain name's row.

    store: mesh axes that hold trees at rest beside the compute axes. They go together on the largest free dim of a
    parameter that they divide, else behind a sharded one as the inner split, else nowhere. Data axes that are not among
    them hold replicas (HSDP: "dp=2,fsdp=4" with store="fsdp").

    zero: which trees `store` holds (the stages of ZeRO, Rajbhandari et al., 2020). 1: the optimizer's state; gradients
    are added up whole and reduced once a step, to the shards that the optimizer needs, and the new parameters are
    gathered behind the update. 2: gradients too, which are reduced behind every layer's backward, so that they are
    never whole, but once a microbatch. 3 (FSDP): parameters too, gathered layer by layer. 0: none.

    store_optimizer: further axes that hold the optimizer's state alone, such as those of the replicas of HSDP.

    activations: dims that the parameters need not have, so that `placements` can tell a row for them from a typo.

    zigzag: dim -> mesh axes over which its parts are given out in the order that makes a causal mask cost every rank
    the same: of 2n chunks rank r of n holds chunks r and 2n - 1 - r (see fmegatron.zigzag). They are the first axes of
    the dim's row; further ones, also of a marked name (`seq*`), cut a rank's part as it lies. Gathered, the dim is in
    its global order. An activation moved by placements, not by names, keeps the order that it has.

    uneven: dim -> its size, for dims that need not divide by the axes that hold them (one that does divide may be
    listed). In equations each rank then holds as much as the largest part, filled up with zeros (see
    fmegatron.uneven); sums and products leave these out, and at rest they do not exist.

    context: how attention reads a sequence that mesh axes cut: "gather", "ring", "ulysses" or "ulysses+ring" (see
    fmegatron.parallel.context). The last two read the rows `seq**`, `kv**` and `group**`: the layout inside attention.
    """

    compute: Mapping[str, Axes] = field(default_factory=dict)
    store: Axes = ()
    activations: tuple[str, ...] = ("batch", "seq", "kvseq", "position")
    zero: int = 3
    store_optimizer: Axes = ()
    zigzag: Mapping[str, Axes] = field(default_factory=dict)
    context: str = "gather"
    uneven: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, n in self.uneven.items():
            if not isinstance(n, int) or n < 1 or base(name) != name:
                raise UserError(f"uneven {name!r}: {n!r} must be the size, 1 or more, of a dim named without a mark")
            if name in self.zigzag:
                raise UserError(f"dim {name!r} is in zigzag and in uneven: a zigzag order needs parts of one size")
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"zero={self.zero!r} must be 0, 1 (optimizer state), 2 (gradients) or 3 (parameters)")
        if self.context not in CONTEXTS:
            raise UserError(f"context={self.context!r} must be one of {', '.join(CONTEXTS)}")

    def stores(self, tree: str = "params") -> tuple[Axes, ...]:
        """The axes that hold a tree at rest beside the compute axes, in groups that are laid out one after the other:
        that of the "optimizer" is that of the "params" cut further."""
        if tree == "params":
            return (self.store,) if self.zero == 3 else ()
        return (self.store if self.zero else (), self.store_optimizer)


def base(name: str) -> str:
    """The dim of which a name is a layout: "seq*" -> "seq"."""
    return name.rstrip("*'")


def standard_rules(
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    store: Axes = (),
    zero: int | None = None,
    store_optimizer: Axes = (),
    context: str = "gather",
    zigzag: bool | None = None,
    uneven: Mapping[str, int] | None = None,
) -> Rules:
    """The usual table for the models of this library, of the axes that the mesh has.

    batch on dp, seq on cp, attention heads (kv and group), mlp and vocab on tp, experts on ep and their width on etp; with
    `sequence_parallel` the sequence between blocks, `seq*`, lies on tp too. `store` adds axes that hold trees at rest, `zero` says which trees (see
    `Rules`; None: 3). With a `zero` of 1 or more and no `store`, that is fsdp, or dp where the mesh has no fsdp.

    context: how attention reads a sequence on cp (see `Rules`); "ulysses" takes cp, or cp_kv and cp_group where the
    mesh has them, and "ulysses+ring" cp_ring beside: make_mesh(…, also=fmegatron.parallel.context.factoring(…)).
    zigzag: give out the sequence in the order that balances a causal mask; None: unless attention has whole sequences
    ("ulysses"). uneven: sizes of dims that need not divide by their axes (see `Rules`), such as {"vocab": 50257}.
    Raises UserError for a mesh without the axes that `context` needs.
    """

    def present(*names: str) -> tuple[str, ...]:
        return tuple(n for n in names if n in mesh.names or n in mesh.sizes)

    split = present("tp_kv", "tp_group")
    compute: dict[str, Axes] = {
        "batch": present("dp", "fsdp"),
        "seq": present("cp"),
        "kv": ("tp_kv",) if split else present("tp"),
        "group": ("tp_group",) if split else None,
        "qkv": None,  # of a fused leaf: the queries of a kv head, its key and its value
        "mlp": present("tp"),
        "gated": None,  # of a fused leaf: gate and up
        "both": None,  # an embedding and a hidden state, one behind the other (fmegatron.models.mtp)
        **dict.fromkeys(LATENT),
        "vocab": present("tp"),
        "embed": None,
        "head": None,
        "position": None,  # rows of a table of learned positions
        "kvseq": None,  # the sequence of keys and values, which attention reads whole
        **_expert_rows(mesh, sequence_parallel),
    }
    zigzag = context != "ulysses" if zigzag is None else zigzag
    if sequence_parallel:
        compute["seq*"] = present("cp", "tp")
    if context in ("ulysses", "ulysses+ring"):
        if context == "ulysses+ring" and not present("cp_ring"):
            raise UserError(
                'context="ulysses+ring" needs mesh axes cp_ring, cp_kv and cp_group: '
                'make_mesh(axes, also=factoring(axes, "ulysses+ring", …)) of fmegatron.parallel.context makes them'
            )
        cut = present("cp_kv", "cp_group")
        compute["seq**"] = present("cp_ring")
        compute["kv**"] = (*mesh.expand(compute["kv"]), *(present("cp_kv") if cut else present("cp")))
        compute["group**"] = (*mesh.expand(compute["group"]), *present("cp_group"))
    if zero and not store:
        store = present("fsdp") or present("dp")
    return Rules(
        compute=compute,
        activations=(
            *Rules.activations,
            "qkv",
            "gated",
            "both",
            "mlp",
            *LATENT,
            *_EXPERT_DIMS,
        ),  # not every model has them
        store=store,
        zero=3 if zero is None else zero,
        store_optimizer=store_optimizer,
        zigzag={"seq": present("cp_ring") if context == "ulysses+ring" else present("cp")} if zigzag else {},
        context=context,
        uneven=uneven or {},
    )


_EXPERT_DIMS = ("expert", "emlp", "shared_mlp", "route", "choice", "all", "all_rows", "layer")


def _expert_rows(mesh: Mesh, sequence_parallel: bool) -> dict[str, Axes]:
    """The rows of mixtures of experts: `expert` on ep and `emlp` (the experts' width) on etp; on tp where the mesh has
    neither. Tokens among experts lie on the first axes of the stream, up to one of these: batch' and seq' up to either,
    batch'' and seq'' up to one of `emlp`; expert' are the axes of `expert` on which no token lies then."""

    def present(*names: str) -> tuple[str, ...]:
        found = mesh.expand([n for n in names if n in mesh.names or n in mesh.sizes])
        return tuple(sorted(found, key=mesh.order.index))  # as parameters lie

    expert, emlp = present("ep"), present("etp")
    if not expert and not emlp:
        emlp = present("tp")
    batch, seq = ("dp", "fsdp"), ("cp", "tp") if sequence_parallel else ("cp",)

    def before(names: Iterable[str], some: tuple[str, ...]) -> tuple[str, ...]:
        """The first axes of these names, up to one of `some`: a dim loses its last axes first."""
        every = tuple(a for n in names if n in mesh.names or n in mesh.sizes for a in mesh.expand(n))
        return tuple(itertools.takewhile(lambda a: a not in some, every))

    among = before(batch, emlp) + before(seq, emlp)
    return {
        "expert": expert,
        "emlp": emlp,
        "shared_mlp": present("tp"),  # the width of the expert that every token has
        "route": None,  # the router's output: every rank has the scores of its tokens for all experts
        "choice": None,  # a token's experts
        "all": None,  # a sequence read whole, where decisions are made over it
        "all_rows": None,  # a batch read whole
        "layer": None,  # of statistics
        "batch'": before(batch, expert + emlp),
        "seq'": before(seq, expert + emlp),
        "batch''": before(batch, emlp),
        "seq''": before(seq, emlp),
        "expert'": tuple(a for a in expert if a not in among),
    }
