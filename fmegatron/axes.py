"""The axes of a mesh as text, "dp=2,tp=4". No torch here: a mistake is told before anything else is loaded."""

from __future__ import annotations

from fmegatron.errors import UserError

PIPELINE = "pp"  # the axis on which a model's layers lie


def parse_axes(text: str, *, argument: str = "mesh") -> dict[str, int]:
    """ "dp=2,tp=4" -> {"dp": 2, "tp": 4}. Raises UserError naming the argument."""
    sizes: dict[str, int] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, number = (s.strip() for s in part.partition("="))
        if not name.isidentifier() or not number.isdigit() or int(number) < 1:
            raise UserError(
                f'{argument} {text!r}: {part!r} is not "axis=size" with a size of 1 or more, such as "dp=2,tp=2"'
            )
        if name in sizes:
            raise UserError(f"{argument} {text!r} names axis {name!r} twice")
        sizes[name] = int(number)
    return sizes
