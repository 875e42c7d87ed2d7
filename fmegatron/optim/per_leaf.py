"""Values by leaf: where weight decay applies, and multipliers of the learning rate and the decay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from fmegatron import tree
from fmegatron.errors import UserError

if TYPE_CHECKING:
    from fmegatron.spec import Param

Mask = Any  # a tree of bools, or a function params -> tree of bools
Values = Any  # a number, a tree of numbers, or a function params -> tree of numbers
Pattern = str | Callable[[str, "Param"], bool]


class Setting(NamedTuple):
    """What one leaf has of its own: a multiplier of the learning rate, and its weight decay."""

    scale: float
    decay: float


def decay_mask(spec: Any) -> Any:
    """Where weight decay applies, from a spec tree: `Param.decay` if it is set, else True for two dims or more."""
    return tree.tree_map(lambda p: p.decay if p.decay is not None else len(p.dims.split()) >= 2, spec)


def per_leaf(spec: Any, default: Any, values: Mapping[Pattern, Any]) -> Any:
    """A tree like the spec: for each leaf the value of the last pattern that it matches, or the default.

        lr_scale = per_leaf(spec, 1.0, {"*.norm*": 0.5, "layers.0.*": 0.1, dims("*mlp*"): 256 / 4096})
        optimizer = adamw(3e-4, lr_scale=lr_scale)

    A pattern is a glob over the dotted path ("embed", "layers.*.q"; * also matches dots), or a predicate
    f(path, param), such as `dims("embed mlp")` makes. A value may be a function of the `Param`, as for a rate that goes
    with 1 / width: `lambda p: 256 / p.shape[0]`.

    Raises `UserError` for a pattern that no leaf matches.
    """
    paths, params = tree.paths(spec), tree.leaves(spec)
    found = [default] * len(params)
    for pattern, value in values.items():
        hits = [i for i, (path, p) in enumerate(zip(paths, params, strict=True)) if matches(pattern, path, p)]
        if not hits:
            shown = repr(pattern) if isinstance(pattern, str) else getattr(pattern, "text", repr(pattern))
            some = ", ".join(paths[:4])
            raise UserError(f"per_leaf: pattern {shown} matches no leaf; paths are like {some}: correct or remove it")
        for i in hits:
            found[i] = value
    return tree.like(spec, [v(p) if callable(v) else v for v, p in zip(found, params, strict=True)])


def dims(glob: str) -> Callable[[str, Param], bool]:
    """A pattern for `per_leaf` and its like: parameters whose dims match a glob.

    "embed mlp": these dims; "embed *": embed first of several; "*expert*": an expert dim among them.
    """

    def has_dims(path: str, param: Param) -> bool:
        return fnmatchcase(" ".join(param.dims.split()), glob)

    has_dims.text = f"dims({glob!r})"  # type: ignore[attr-defined]
    return has_dims


def matches(pattern: Pattern, path: str, param: Any) -> bool:
    """Does a leaf match a pattern?"""
    return fnmatchcase(path, pattern) if isinstance(pattern, str) else bool(pattern(path, param))


def settings_of(params: Any, lr_scale: Values, weight_decay: Values, mask: Mask) -> list[Setting]:
    """A Setting for every leaf of the parameters. Raises `UserError` for a tree of another structure."""
    shape = tree.structure(params)
    scales = _values("lr_scale", params, shape, 1.0 if lr_scale is None else lr_scale)
    decays = _values("weight_decay", params, shape, weight_decay)
    masked = _values("mask", params, shape, True if mask is None else mask)
    return [Setting(s, d if m else 0.0) for s, d, m in zip(scales, decays, masked, strict=True)]


def check_values(name: str, **values: Values) -> None:
    """Raises `UserError` for a negative value, or one that is no number."""
    for argument, given in values.items():
        found = {} if given is None or callable(given) else tree.named(given)
        for path, value in found.items():
            if isinstance(value, Tensor):
                continue  # not read: it may be one of an ensemble
            if not isinstance(value, int | float) or not value >= 0:
                where = f" for {path}" if path else ""
                raise UserError(f"{name} needs {argument} of at least 0, but got {argument}={value}{where}")


def _values(name: str, params: Any, shape: Any, given: Any) -> list[Any]:
    """The value of every leaf of params, whose structure is `shape`."""
    chosen = given(params) if callable(given) else given
    if isinstance(chosen, int | float | Tensor):  # a bool too
        return [chosen] * shape.num_leaves
    values, found = tree.flatten(chosen)
    if found != shape:
        kind = "bools" if name == "mask" else "numbers"
        raise UserError(f"{name} must be a tree of {kind} like params, {shape}, but is {found}")
    return values
