"""A layout as one line that can be pasted back: `dp=2,tp=2 sp zero=3 micro=2 remat=attention packed`."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fmegatron.axes import PIPELINE, parse_axes
from fmegatron.errors import UserError
from fmegatron.parallel.dispatch import BACKENDS, PADDED
from fmegatron.parallel.schedules import SCHEDULES
from fmegatron.rules import CONTEXTS
from fmegatron.testing.own_rows import format_rows, parse_rows

DATA = ("dp", "fsdp")  # axes that divide the batch
STORES = (*DATA, "cp")  # axes over which parameters are used alike, so that they can hold trees at rest
MASKS = ("full", "uneven", "padded", "row", "none")


@dataclass(frozen=True, repr=False)
class Layout:
    """All that a layout says. `str(layout)` is one line, and `Layout.parse` reads it; only what differs from the
    defaults is written, and anything is legal that the model and the batch allow (`why_illegal`).

    mesh: axes in rank order, the last one's ranks adjacent: pp (layers), dp, fsdp (batch rows), cp (sequence), tp.
    sp: sequence parallelism: between blocks the sequence lies on tp too.
    zero: which trees rest cut over `store`: 0, none; 1, the optimizer's state; 2, gradients too; 3, parameters too.
    store: axes that hold these, joined by "+"; "" means all of dp, fsdp and cp. Fewer of them is hybrid sharding:
        `fsdp=2,dp=2 zero=3 store=fsdp`.
    state: further axes that hold the optimizer's state alone, such as dp there.
    rules: rows in place of the standard ones (`fmegatron.rules.standard_rules`), as dim:axis+axis or dim:none joined by
        ",": `dp=2,fsdp=2,tp=2 rules=batch:fsdp,mlp:tp+dp,vocab:none`.
    ep, etp: ranks over which experts lie, and over which their width does, folded over the mesh without pp.
    dispatch: how tokens reach their experts: all-to-all, all-gather or dense.
    overlap: into how many chunks products are cut whose gather or scatter over tp runs beside them (`Sharding.dot`); 0: none.
    micro: microbatches.
    schedule: of a pipeline over pp: one of `fmegatron.parallel.schedules.SCHEDULES`.
    virtual: stages of the model on each rank of pp; None: 2 where the schedule has several, else 1.
    stages: what each stage holds, in Megatron-LM's notation without spaces, such as Et|tttL; "" means all of them as
        many layers as can be.
    remat: what blocks keep for their backward: everything, nothing, or names of computations joined by "+".
    context: how attention reads a sequence that the axis cp cuts: gather, ring, ulysses or ulysses+ring.
    packed: each row is several documents.
    mask: which tokens count: all (full), unequally many a row (uneven), rows of unequal lengths (padded), none in the
        first microbatch of the first rank (row), or none at all (none), of which loss and gradients are 0.
    odd: the batch has one row, and each row one token, less than the layout can cut into equal parts.
    rows, seq: of the global batch; None means the smallest that the layout can cut, with an uneven last microbatch.
    """

    mesh: str = "dp=1"
    sp: bool = False
    zero: int = 0
    store: str = ""
    state: str = ""
    rules: str = ""
    ep: int = 1
    etp: int = 1
    dispatch: str = "all-to-all"
    overlap: int = 0
    micro: int = 1
    schedule: str = "1f1b"
    virtual: int | None = None
    stages: str = ""
    remat: str = "everything"
    context: str = "gather"
    packed: bool = False
    mask: str = "full"
    odd: bool = False
    rows: int | None = None
    seq: int | None = None

    def __post_init__(self) -> None:
        if not self.axes:
            raise UserError('layout: mesh is empty: name at least one axis, such as "dp=1"')
        if self.zero not in (0, 1, 2, 3):
            raise UserError(f"layout {self}: zero={self.zero} is not known: use 0, 1, 2 or 3")
        if self.context not in CONTEXTS:
            raise UserError(f"layout {self}: context={self.context} is not known: use one of {', '.join(CONTEXTS)}")
        if self.mask not in MASKS:
            raise UserError(f"layout {self}: mask={self.mask} is not known: use one of {', '.join(MASKS)}")
        if self.dispatch not in (known := (*BACKENDS, PADDED)):
            raise UserError(f"layout {self}: dispatch={self.dispatch} is not known: use one of {', '.join(known)}")
        if self.schedule not in SCHEDULES:
            raise UserError(f"layout {self}: schedule={self.schedule} is not known: use one of {', '.join(SCHEDULES)}")
        for name, there in (("schedule", self.schedule != "1f1b"), ("virtual", self.virtual), ("stages", self.stages)):
            if there and not self.pipelined:
                raise UserError(
                    f"layout {self}: {name}={getattr(self, name)} needs an axis pp in the mesh, such as pp=2"
                )
        for what in ("store", "state"):
            value = getattr(self, what)
            if value and not self.zero:
                raise UserError(f"layout {self}: {what}={value} needs zero=1, 2 or 3")
            for name in filter(None, value.split("+")):
                if name not in self.axes:
                    raise UserError(f"layout {self}: {what}={value} names an axis that the mesh lacks")
        for dim, names in self.own_rows.items():
            for name in names:
                if name not in self.axes and name.split("_")[0] not in self.axes or name == PIPELINE:
                    raise UserError(
                        f"layout {self}: rules={format_rows({dim: names})} names {name!r}, which is none of the mesh axes "
                        f"{', '.join(a for a in self.axes if a != PIPELINE)}"
                    )
                if dim in ("batch", "seq", "seq*") and name not in self.axes:
                    raise UserError(
                        f"layout {self}: rules={format_rows({dim: names})} names {name!r}, a part of an axis: {dim} lies on "
                        f"whole axes, such as {name.split('_')[0]}"
                    )
        if self.overlap and "tp" not in self.axes:
            raise UserError(f"layout {self}: overlap={self.overlap} needs an axis tp in the mesh, such as tp=2")
        stage = math.prod(n for a, n in self.axes.items() if a != PIPELINE)
        if self.ep < 1 or self.etp < 1 or stage % (self.ep * self.etp):
            raise UserError(
                f"layout {self}: ep={self.ep} times etp={self.etp} must divide the {stage} ranks of the mesh"
            )
        for name, value in (("micro", self.micro), ("virtual", self.virtual), ("rows", self.rows), ("seq", self.seq)):
            if value is not None and value < 1:
                raise UserError(f"layout {self}: {name}={value} must be 1 or more")

    @property
    def axes(self) -> dict[str, int]:
        """{axis: size}, in rank order."""
        return dict(_axes(self.mesh))

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    def size(self, *names: str) -> int:
        """The product of the sizes of some axes; an absent one counts as 1."""
        return math.prod(self.axes.get(n, 1) for n in names)

    @property
    def pipelined(self) -> bool:
        """Do the model's layers lie on stages of a pipeline?"""
        return PIPELINE in self.axes

    @property
    def inside(self) -> Layout:
        """The layout of one stage: without the pipeline."""
        rest = ",".join(f"{n}={s}" for n, s in self.axes.items() if n != PIPELINE)
        return dataclasses.replace(self, mesh=rest or "dp=1", schedule="1f1b", virtual=None, stages="")

    @property
    def store_axes(self) -> tuple[str, ...]:
        """The axes that hold trees at rest beside those that the equations use."""
        if not self.zero:
            return ()
        return tuple(self.store.split("+")) if self.store else tuple(a for a in self.axes if a in STORES)

    @property
    def state_axes(self) -> tuple[str, ...]:
        """Further axes that hold the optimizer's state alone."""
        return tuple(filter(None, self.state.split("+")))

    @property
    def own_rows(self) -> dict[str, tuple[str, ...]]:
        """{dim: axes} of `rules`. Raises UserError for what is no row."""
        return parse_rows(self.rules)

    @property
    def data(self) -> int:
        """Over how many ranks the rows of the batch lie."""
        return self.size(*self.own_rows.get("batch", DATA))

    @property
    def batch(self) -> tuple[int, int]:
        """(rows, tokens a row) of the global batch."""
        own = self.own_rows
        data, cp = math.lcm(self.data, self.size(*DATA)), self.size("cp")
        cuts = cp * (self.size("tp") if self.sp else 1) * (1 + (cp > 1))  # twice for a zigzag order
        cuts = math.lcm(cuts, *(self.size(*own[n]) for n in ("seq", "seq*") if n in own))
        each = max(self.micro + (self.micro > 1), -(-3 // data))
        rows, seq = data * each - self.odd, cuts * -(-6 // cuts) - self.odd
        return self.rows or rows, self.seq or seq

    @classmethod
    def parse(cls, text: str) -> Layout:
        """The layout of a line. Raises UserError for a word that is not known."""
        mesh, found = "dp=1", {}
        known = {f.name: f.type for f in dataclasses.fields(cls) if f.name != "mesh"}
        for n, word in enumerate(text.split()):
            name, _, value = word.partition("=")
            if n == 0 and name not in known:
                mesh = word
            elif name not in known or name in found:
                near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
                hint = f"; did you mean {near[0]!r}?" if near else "."
                raise UserError(
                    f"layout {text!r}: {word!r} is not known or there twice{hint} Words are {', '.join(known)}"
                )
            else:
                found[name] = _value(text, word, known[name], value)
        return cls(mesh, **found)

    def __str__(self) -> str:
        words = [self.mesh]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name != "mesh" and value != f.default:
                words.append(f.name if value is True else f"{f.name}={value}")
        return " ".join(words)

    def __repr__(self) -> str:
        return f'Layout.parse("{self}")'

    def simpler(self) -> Iterator[Layout]:
        """Layouts that ask for less, the greatest step first: fewer ranks, then one option at its default."""
        axes = self.axes
        for name, size in axes.items():
            for smaller in (n for n in range(1, size) if size % n == 0 or n == 2):
                rest = {n: smaller if n == name else s for n, s in axes.items() if n != name or smaller > 1}
                yield from self._changed(mesh=",".join(f"{n}={s}" for n, s in rest.items()) or "dp=1")
        for f in dataclasses.fields(self):
            if f.name != "mesh" and getattr(self, f.name) != f.default:
                yield from self._changed(**{f.name: f.default})
        for micro in range(2, self.micro):
            yield from self._changed(micro=micro)
        for dim in self.own_rows if self.rules.count(",") else ():
            yield from self._changed(rules=format_rows({n: row for n, row in self.own_rows.items() if n != dim}))
        if self.context == "ulysses+ring":
            yield from self._changed(context="ring")
            yield from self._changed(context="ulysses")
        if self.mask in ("padded", "row", "none"):
            yield from self._changed(mask="uneven")
        plain = sorted(axes, key=[PIPELINE, *STORES, "tp", *axes].index)
        if list(axes) != plain:
            yield from self._changed(mesh=",".join(f"{n}={axes[n]}" for n in plain))

    def _changed(self, **changes: Any) -> Iterator[Layout]:
        if "mesh" in changes:
            left = parse_axes(changes["mesh"])
            for what in ("store", "state"):
                changes[what] = "+".join(n for n in getattr(self, what).split("+") if n in left)
            if not any(n in left for n in STORES):
                changes["zero"] = 0
            stage = math.prod(n for a, n in left.items() if a != PIPELINE)
            changes["etp"] = math.gcd(self.etp, stage)
            changes["ep"] = math.gcd(self.ep, stage // changes["etp"])
            rows = {d: tuple(a for a in row if a.split("_")[0] in left) for d, row in self.own_rows.items()}
            changes["rules"] = format_rows(rows)
            if "tp" not in left:
                changes |= {"sp": False, "overlap": 0}
            if "cp" not in left:
                changes["context"] = "gather"
            if PIPELINE not in left:
                changes |= {"schedule": "1f1b", "virtual": None}
            if left.get(PIPELINE) != self.axes.get(PIPELINE):
                changes["stages"] = ""
        if "schedule" in changes or "virtual" in changes:
            changes["stages"] = ""  # which are of another number
        if changes.get("zero") == 0:
            changes |= {"store": "", "state": ""}
        try:
            yield dataclasses.replace(self, **changes)
        except UserError:
            return


@functools.lru_cache(maxsize=1 << 16)
def _axes(mesh: str) -> dict[str, int]:
    return parse_axes(mesh, argument="layout")


def _value(text: str, word: str, kind: Any, value: str) -> Any:
    if kind == "bool":
        if value:
            raise UserError(f"layout {text!r}: {word!r} takes no value")
        return True
    if kind.startswith("int"):
        if not value.isdigit():
            raise UserError(f"layout {text!r}: {word!r} needs a whole number")
        return int(value)
    if not value:
        raise UserError(f"layout {text!r}: {word!r} needs a value")
    return value
