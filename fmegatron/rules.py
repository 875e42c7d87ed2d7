"""The table that says on which mesh axes each named dimension lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fmegatron.mesh import Axes, Mesh


@dataclass(frozen=True)
class Rules:
    """compute: dim -> mesh axis, ordered tuple of axes, or None (not sharded). Every dim needs a row: a misspelt
    name is an error, never "unsharded". A name with a mark (`seq*`, `batch'`: another layout of the same dim) falls
    back on the plain name's row.

    store: mesh axes that hold parameters at rest beside the compute axes (ZeRO-3/FSDP). They go together on the largest
    free dim that they divide, else behind a sharded one as the inner split, else nowhere.

    activations: dims that the parameters need not have, so that `placements` can tell a row for them from a typo.
    """

    compute: Mapping[str, Axes] = field(default_factory=dict)
    store: Axes = ()
    activations: tuple[str, ...] = ("batch", "seq", "kvseq", "position")


def base(name: str) -> str:
    """The dim of which a name is a layout: "seq*" -> "seq"."""
    return name.rstrip("*'")


def standard_rules(mesh: Mesh, *, sequence_parallel: bool = False, store: Axes = ()) -> Rules:
    """The usual table for the models of this library, of the axes that the mesh has.

    batch on dp, seq on cp, attention heads (kv and group), mlp and vocab on tp; with `sequence_parallel` the sequence
    between blocks, `seq*`, lies on tp too. `store` adds axes that hold parameters at rest.
    """

    def present(*names: str) -> tuple[str, ...]:
        return tuple(n for n in names if n in mesh.names or n in mesh.sizes)

    split = present("tp_kv", "tp_group")
    compute: dict[str, Axes] = {
        "batch": present("dp", "fsdp"),
        "seq": present("cp"),
        "kv": ("tp_kv",) if split else present("tp"),
        "group": ("tp_group",) if split else None,
        "mlp": present("tp"),
        "vocab": present("tp"),
        "embed": None,
        "head": None,
        "position": None,  # rows of a table of learned positions
        "kvseq": None,  # the sequence of keys and values, which attention reads whole
    }
    if sequence_parallel:
        compute["seq*"] = present("cp", "tp")
    return Rules(compute=compute, store=store)
