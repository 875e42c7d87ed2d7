"""`fmegatron verify MODEL`: does every layout compute the function that one device computes?

Draws layouts, checks each against one device, prints a table, and ends with exit code 1 and the smallest failing layout
where one fails.

    fmegatron verify llama --world 8                                      # simulated ranks, on CPU, in float64
    fmegatron verify llama --world 4 --engine processes                   # gloo processes, and pipelines as well
    fmegatron verify llama --world 8 --device cuda                        # the same on one GPU,
    fmegatron verify llama --world 8 --device cuda --dtype bfloat16       # and with its kernels for half precision
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from fmegatron.errors import UserError

# What a way to run the ranks cannot show, by (engine, device).
NOT_COVERED = {
    ("simulated", "cpu"): (
        "pipelines, real processes, messages between them and their order (--engine processes has these), GPUs"
    ),
    ("simulated", "cuda"): (
        "pipelines, NCCL, messages from rank to rank (a ring's are copies here), streams and so what overlaps in time, this "
        "library's own Triton kernels (pytest -m gpu has these; torch's fused ones run), CUDA graphs, the memory of one "
        "rank, Python that differs by rank; for these use torchrun and --engine processes"
    ),
    ("processes", "cpu"): "GPUs and NCCL; for these start it by torchrun, a GPU a rank, with --device cuda",
    ("processes", "cuda"): "layouts of other numbers of ranks than torchrun started",
}


@dataclass(frozen=True)
class VerifyConfig:
    """Check that a model computes the same function on every layout.

    On a GPU: fmegatron verify llama --world 8 --device cuda, and the same with --dtype bfloat16, in which the fused
    kernels run. Both compare with one device that computes in float64.
    """

    model: str = "llama"
    """A family or preset, in the smallest sizes that have all its parts; with changes behind commas, such as
    llama,heads=8,kv_heads=2,tied=1; or module:object, your own with spec and loss."""
    world: int = 8
    """Most ranks of a layout."""
    engine: Literal["simulated", "processes"] = "simulated"
    """How ranks run: all in one process, or as gloo processes."""
    examples: int = 36
    """Layouts at least; more until every legal pair of option values is among them."""
    seed: int = 0
    """Seed of the layouts, the parameters and the batches."""
    layout: str | None = None
    """One layout to check instead, such as "dp=2,tp=2 sp zero=3 micro=2"."""
    dtype: Literal["float64", "float32", "bfloat16"] = "float64"
    """Precision of the ranks; one device always computes in float64."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where simulated ranks compute: all of them on one GPU."""
    axes: str | None = None
    """Mesh axes to draw from; leave out what the model cannot use. None: dp,fsdp,cp,tp, and with the engine processes pp
    too, if the model has embed, block and head."""
    ledger: bool = False
    """Print the collectives of each layout's step too."""
    full: bool = False
    """Check three steps of AdamW and of SGD on every layout, instead of one of them in turn."""
    jobs: int | None = None
    """Layouts checked at a time, each in a process; None: one a core, at most 8, or 4 that share a GPU; 1 with the
    engine processes."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    case: Any
    ok: bool
    error: float
    leaf: str
    seconds: float
    message: str


def run(config: VerifyConfig) -> int:
    """Check the layouts of a model and print how far each is off; the exit code: 0 where all are equal, else 1.

    Raises UserError for a model or layout that is not there or not legal.
    """
    from fmegatron.testing.covering import Case, space
    from fmegatron.testing.engines import started_by_torchrun
    from fmegatron.testing.layout import Layout

    start = time.monotonic()
    _one_thread()
    if config.world < 1 or config.examples < 1:
        raise UserError(f"--world {config.world} --examples {config.examples}: both must be 1 or more")
    models = _models(config.model)
    if config.layout is not None:
        cases, every, legal = [Case(config.model, Layout.parse(config.layout))], None, None
    else:
        axes = _axes(config, models)
        legal = space(models, config.world, axes=axes)
        cases, every = list(legal.cases(config.examples, config.seed)), legal.pairs()
    if config.device == "cuda" and config.engine == "simulated":
        _needs_cuda()
    started = started_by_torchrun() if config.engine == "processes" else 0
    if started:
        cases = [c for c in cases if c.layout.world == started]
        if not cases:
            raise UserError(
                f"no layout that was drawn has the {started} ranks that torchrun started: use --world {started}, more "
                "--examples, or a --layout of as many"
            )
    with contextlib.redirect_stdout(io.StringIO() if started and os.environ["RANK"] != "0" else sys.stdout):
        return _table(config, cases, every, legal, start, shrinks=not started)


def _table(config: VerifyConfig, cases: Any, every: Any, legal: Any, start: float, *, shrinks: bool) -> int:
    """Checks and prints."""
    from fmegatron.testing.covering import pairs_of

    widths = [max(len(str(c.layout)) for c in cases), max(len(c.model) for c in cases)]
    failed, worst = None, 0.0
    for n, row in enumerate(_checked(config, cases), 1):
        if n == 1:
            print(
                f"{'#':>3}  {'layout':{widths[0]}}  {'model':{widths[1]}}  worst error  seconds  worst leaf", flush=True
            )
        line = f"{n:3}  {str(row.case.layout):{widths[0]}}  {row.case.model:{widths[1]}}  {row.error:11.1e}"
        print(f"{line}  {row.seconds:7.1f}  {row.leaf}{'' if row.ok else '  FAILED'}", flush=True)
        worst = max(worst, row.error)
        if config.ledger:
            from fmegatron.testing.ledger import ledger
            from fmegatron.testing.models import find_model

            print(ledger(find_model(row.case.model), row.case.layout), flush=True)
        if not row.ok:
            failed = row
            break
    if failed is not None:
        return _report(config, failed, shrinks)
    ranks = "simulated ranks" if config.engine == "simulated" else "ranks as processes"
    print(f"{ranks} on {config.device} in {config.dtype}; not covered: {NOT_COVERED[config.engine, config.device]}")
    took = f"{time.monotonic() - start:.0f} s"
    if legal is None or every is None:
        print(f"equal to one device, worst error {worst:.1e}, {took}")
        return 0
    have = {p for c in cases for p in pairs_of(legal.features(c))} & every
    distinct = len({str(c.layout) for c in cases})
    print(
        f"{distinct} layouts of up to {max(c.layout.world for c in cases)} ranks, all equal to one device: "
        f"worst error {worst:.1e}; {len(have)} of {len(every)} legal pairs of option values "
        f"({100 * len(have) / len(every):.0f} %), {took}"
    )
    return 0


def _models(text: str) -> list[str]:
    """The models to draw from: the variants of a family, or the one that is meant."""
    from fmegatron.testing.models import find_model, variants

    find_model(text)
    return [text] if ":" in text or "," in text else variants(text)


def _axes(config: VerifyConfig, models: Sequence[str]) -> tuple[str, ...]:
    """The axes to draw from."""
    from fmegatron.testing.models import find_model
    from fmegatron.testing.program import program_of
    from fmegatron.testing.strategies import AXES, PIPELINE_AXES

    if config.axes is None:
        stages = config.engine == "processes" and all(program_of(find_model(m)).has_stages for m in models)
        return PIPELINE_AXES if stages else AXES
    found = tuple(a.strip() for a in config.axes.split(",") if a.strip())
    if "pp" in found and config.engine != "processes":
        raise UserError(f"--axes {config.axes}: only the engine processes runs pipelines: give --engine processes")
    return found


def _checked(config: VerifyConfig, cases: Sequence[Any]) -> Iterator[Row]:
    """The row of each case, in order, while others are under way."""
    most = 1 if config.engine == "processes" else min(4, _cores()) if config.device == "cuda" else _cores()
    jobs = config.jobs or most
    if jobs == 1 or len(cases) == 1:
        yield from (check_case(config, case, n) for n, case in enumerate(cases))
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(cases)), mp_context=context, initializer=_one_thread) as pool:
        futures = [pool.submit(check_case, config, case, n) for n, case in enumerate(cases)]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


def check_case(config: VerifyConfig, case: Any, n: int | None = None) -> Row:
    """Compare one case with one device. n: its number in a table, by which it trains with AdamW or SGD; None: both."""
    from fmegatron.testing.equivalence import compare
    from fmegatron.testing.models import find_model
    from fmegatron.testing.running import CHECKS

    result = compare(
        find_model(case.model),
        case.layout,
        engine=config.engine,
        dtype=config.dtype,
        seed=config.seed,
        device=config.device,
        checks=CHECKS if config.full or config.layout or n is None else ("init", "gradients", ("adamw", "sgd")[n % 2]),
    )
    worst = result.worst
    return Row(case, result.ok, worst.error, f"{worst.what} {worst.leaf}", result.seconds, str(result))


def _report(config: VerifyConfig, row: Row, shrinks: bool = True) -> int:
    """What failed, and the smallest layout that still does; shrinks: can fewer ranks be tried?"""
    from fmegatron.testing.models import find_model
    from fmegatron.testing.shrinking import shrink

    print(row.message, flush=True)
    if not shrinks:
        return 1
    print("looking for the smallest layout that fails …", flush=True)
    found: dict[Any, Row] = {}

    def fails(layout: Any) -> bool:
        found[layout] = check_case(config, type(row.case)(row.case.model, layout))
        return not found[layout].ok

    small = shrink(find_model(row.case.model), row.case.layout, fails)
    if small in found:
        print(found[small].message)
    seed = f" --seed {config.seed}" if config.seed else ""
    more = "".join(
        f" --{n} {v}"
        for n, v, default in (
            ("engine", config.engine, "simulated"),
            ("dtype", config.dtype, "float64"),
            ("device", config.device, "cpu"),
        )
        if v != default
    )
    print(f"smallest failing layout: {type(row.case)(row.case.model, small).command}{seed}{more}")
    return 1


def _needs_cuda() -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU on this machine; leave it out to compute on CPU")


def _cores() -> int:
    return min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _one_thread() -> None:
    """Simulated ranks are many small operations, which threads only slow down."""
    import torch

    torch.set_num_threads(1)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m fmegatron.verify MODEL --world 8 …`."""
    import tyro

    given: Callable[..., Any] = tyro.cli
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    try:
        return run(given(VerifyConfig, args=arguments))
    except UserError as error:
        print(f"fmegatron verify: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
