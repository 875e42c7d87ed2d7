"""Parameters as matrices: which dims are a matrix' inputs, which its outputs, and which count matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fmegatron import tree
from fmegatron.errors import UserError
from fmegatron.optim.per_leaf import Pattern, matches

if TYPE_CHECKING:
    from fmegatron.spec import Param

# the dim of the residual stream, which is one side of every matrix in a layer; of latent attention's, latents are
STREAMS = {"embed", "q_latent", "kv_latent"}
COUNTS = {"expert", "gated"}  # dims that count matrices: the first of experts, gate and up of a fused leaf
HEADS = {"kv", "group", "qkv", "head", "nope_value", "value"}  # dims that are only together one side
JOINED = "qkv"  # along it lie the queries of a kv head, its key and its value: three matrices


@dataclass(frozen=True)
class MatrixDims:
    """Positions of a leaf's dims: those that count matrices, those of the rows and those of the columns.

    inputs_first: the rows are the inputs (x @ w), as in this package; else the columns are (torch.nn.Linear).
    joined: a dim of a side along which several matrices lie (see `pieces`); None: the leaf is one, or counts equal ones.
    """

    counts: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]
    inputs_first: bool = True
    joined: int | None = None

    def pieces(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        """(start, length) of each matrix along `joined`, of a leaf of this shape: the queries of each kv head, its key and
        its value. Of another leaf, one that is all of it."""
        if self.joined is None:
            return [(0, 0)]
        queries = shape[self.joined] - 2
        return [(0, queries), (queries, 1), (queries + 1, 1)]


def matrix_of(param: Param) -> MatrixDims | None:
    """The matrix that a parameter is by its dims, or None.

    Two dims are a matrix as they are, unless both are of heads (a bias "kv head"). Of more, `embed` is one side and the
    rest the other ("embed kv group head" is embed x (kv group head)), whichever comes first being the rows. An
    `expert` dim in front counts matrices, and so does `gated`; `qkv` joins three (see `MatrixDims.pieces`).
    """
    names = param.dims.split()
    counts = tuple(i for i, n in enumerate(names) if n in COUNTS and (i == 0 or n != "expert"))
    rest = [i for i in range(len(names)) if i not in counts]
    if {names[i] for i in rest} <= HEADS:
        return None
    if len(rest) == 2:
        return MatrixDims(counts, (rest[0],), (rest[1],))
    stream = tuple(i for i in rest if names[i] in STREAMS)
    other = tuple(i for i in rest if names[i] not in STREAMS)
    if len(stream) != 1 or not other or (other[0] < stream[0] < other[-1]):
        return None
    rows, columns = (stream, other) if stream < other else (other, stream)
    return MatrixDims(counts, rows, columns, joined=names.index(JOINED) if JOINED in names else None)


def matrix_by(text: str, param: Param, where: str) -> MatrixDims:
    """The matrix that a text says: "embed -> kv group head" is inputs -> outputs; dims it leaves out count matrices.

    Raises `UserError` for a text that is not so, or names other dims than the parameter's.
    """
    names = param.dims.split()
    sides = [side.split() for side in text.split("->")]
    used = [n for side in sides for n in side]
    if len(sides) != 2 or not all(sides) or len(set(used)) != len(used) or not set(used) <= set(names):
        raise UserError(
            f"matrices {text!r} of {where}: write its dims as inputs -> outputs, out of {param.dims!r}, each once"
        )
    inputs, outputs = (tuple(names.index(n) for n in side) for side in sides)
    counts = tuple(i for i, n in enumerate(names) if n not in used)
    first = min(inputs) < min(outputs)
    rows, columns = (inputs, outputs) if first else (outputs, inputs)
    return MatrixDims(counts, rows, columns, inputs_first=first)


def matrices_of(spec: Any, overrides: Mapping[Pattern, str] | None) -> dict[str, MatrixDims | None]:
    """{path: the matrix of the leaf}. Raises `UserError` for an override that no leaf matches."""
    found = {path: matrix_of(p) for path, p in tree.named(spec).items()}
    for pattern, text in (overrides or {}).items():
        hits = {path: p for path, p in tree.named(spec).items() if matches(pattern, path, p)}
        if not hits:
            raise UserError(f"matrices: pattern {pattern!r} matches no leaf of the spec: correct or remove it")
        for path, p in hits.items():
            found[path] = matrix_by(text, p, path)
    return found


def matrix_without_spec(p: Tensor, inputs_first: bool = True) -> MatrixDims | None:
    """Two dims are a matrix, nothing else."""
    return MatrixDims((), (0,), (1,), inputs_first) if p.ndim == 2 else None
