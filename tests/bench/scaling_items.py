"""What `scaling.py` measures: parts, the items of each, and the jobs in which they run. Nothing is run here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fmegatron.bench.works import WORKS
from fmegatron.models import DecoderConfig
from fmegatron.models.moe import MoE
from fmegatron.parallel.routing import Routing
from fmegatron.parallel.schedules import SCHEDULES
from fmegatron.testing.layout import Layout

# By value: what is left when time runs out is left out from the end.
PARTS = ("check", "data", "tensor", "context", "experts", "pipeline", "check-more", "check-bf16", "drawn")
CHECKS = ("check", "check-more", "check-bf16", "drawn")
CONTEXTS = ("ring", "gather", "ulysses")
ONE = "one GPU"


@dataclass(frozen=True)
class Sizes:
    """The work: rows × seq tokens for each GPU of a step; one sequence of long_seq tokens under context parallelism."""

    dense: DecoderConfig
    experts: DecoderConfig
    rows: int
    seq: int
    long_seq: int
    warmup: int
    rounds: int


def _mixture(**sizes: int) -> DecoderConfig:
    experts, top_k = sizes.pop("experts"), sizes.pop("top_k")
    moe = MoE(routing=Routing(experts=experts, top_k=top_k), mlp=sizes["mlp"])
    return DecoderConfig(moe=moe, **sizes)  # type: ignore[arg-type]


LARGE = Sizes(
    dense=WORKS["3b"].config,
    experts=_mixture(
        vocab=32768, embed=2048, layers=8, heads=32, kv_heads=4, head=128, mlp=768, max_seq=4096, experts=128, top_k=8
    ),
    rows=4,
    seq=4096,
    long_seq=32768,
    warmup=2,
    rounds=6,
)
SMALL = Sizes(
    dense=DecoderConfig(vocab=128, embed=32, layers=8, heads=8, kv_heads=8, mlp=64, max_seq=32),
    experts=_mixture(
        vocab=128, embed=32, layers=2, heads=4, kv_heads=2, head=8, mlp=16, max_seq=32, experts=8, top_k=2
    ),
    rows=2,
    seq=32,
    long_seq=64,
    warmup=1,
    rounds=2,
)


@dataclass(frozen=True)
class Item:
    """One thing to check or to measure.

    kind: check (a layout computes what one device computes); train (a model's steps); attention (alone, forward and backward);
        megatron (its steps). name: its row of the table.
    ranks: processes that it runs on, a GPU each. layout: a line of `fmegatron.testing.Layout`; of one rank: each process by itself.
    model: dense or experts (of `Sizes`); of a check a model that `fmegatron.testing` finds. rows, seq: of the global batch.
    whole: whole steps too, with clipping and AdamW. limit: seconds.
    """

    part: str
    kind: str
    name: str
    ranks: int
    layout: str
    model: str = "dense"
    rows: int = 0
    seq: int = 0
    whole: bool = True
    dtype: str = "float64"
    limit: float = 90.0

    @property
    def alone(self) -> bool:
        """Does each process work by itself?"""
        return Layout.parse(self.layout).world == 1

    @property
    def key(self) -> str:
        """What is measured: what one GPU does counts for every part, on however many ranks it ran."""
        return f"{self.kind} {self.model} {self.rows}x{self.seq}" if self.alone else f"{self.part}: {self.name}"


@dataclass(frozen=True)
class Job:
    """Items that run in the same processes, one behind the other."""

    ranks: int
    items: tuple[Item, ...]
    environment: tuple[tuple[str, str], ...] = ()


def jobs(parts: Sequence[str], gpus: int, sizes: Sizes, seed: int = 0) -> list[Job]:
    """All jobs of some parts, as few as can be, the most valuable first."""
    speeds = {"data": _data, "tensor": _tensor, "context": _context, "experts": _experts, "pipeline": _pipeline}
    speed = [job for part, make in speeds.items() if part in parts for job in make(gpus, sizes)]
    main = [j for j in speed if j.ranks == gpus and not j.environment]
    made = [_checks("check", gpus, "float64", first_layouts(gpus))] if "check" in parts else []
    made += [*main, *sorted((j for j in speed if j not in main), key=lambda j: j.ranks)]
    if "check-more" in parts:
        made.append(_checks("check-more", gpus, "float64", more_layouts(gpus)))
    if "check-bf16" in parts:
        made.append(_checks("check-bf16", gpus, "bfloat16", [*first_layouts(gpus), *more_layouts(gpus)]))
    if "drawn" in parts:
        made.append(_checks("drawn", gpus, "float64", drawn_layouts(gpus, 30 if sizes == LARGE else 4, seed)))
    found: list[Job] = []
    for job in made:
        last = found[-1] if found else None
        if last is not None and (last.ranks, last.environment) == (job.ranks, job.environment):
            found[-1] = dataclasses.replace(last, items=(*last.items, *job.items))
        else:
            found.append(job)
    return found


# ----------------------------------------------------------------------------------------------------------- correctness

# Communicators of a check move little; with NCCL's own sizes hundreds of them would fill the memory.
FEW_BUFFERS = (("NCCL_BUFFSIZE", str(1 << 20)), ("NCCL_MAX_NCHANNELS", "2"))
# query heads that divide by 8 ranks, while kv heads do not
HEADS = "heads=8,kv_heads=2"


def first_layouts(ranks: int) -> list[tuple[str, str]]:
    """(model, layout): each parallelism alone on all ranks, and several together on four and on eight."""
    llama, experts = f"llama,{HEADS}", "mixtral"
    n, ep = ranks, min(ranks, 4)  # there are four experts
    found = [
        (llama, f"tp={n} sp"),
        (llama, f"dp={n} zero=3 micro=2"),
        (llama, f"cp={n} context=ring packed"),
        (f"{llama},tied=1", f"pp={n} schedule=zbv micro={2 * n}"),
        (experts, f"dp={n} ep={ep}"),
    ]
    if n >= 4:
        rest = f"dp={n // 4}," if n > 4 else ""
        found += [
            (llama, f"{rest}cp=2,tp=2 sp context=ulysses" + (" zero=3" if rest else "")),
            (llama, f"pp=2,{rest}tp=2 sp schedule=zbv micro=4" + (" zero=1" if rest else "")),
            (llama, f"{rest}fsdp=2,tp=2 sp zero=3 micro=2 mask=uneven"),
            (experts, f"dp={n // 2},tp=2 sp ep=2 etp=2"),
        ]
    return _lines(found)


def more_layouts(ranks: int) -> list[tuple[str, str]]:
    """The other kinds of each: ZeRO's stages, ways of attention, schedules, ways to experts."""
    llama, n = f"llama,{HEADS}", ranks
    found = [(llama, f"dp={n} zero=1"), (llama, f"dp={n} zero=2 micro=2"), (llama, f"tp={n}")]
    found += [(llama, f"cp={n} context=gather packed"), (llama, f"cp={n} context=ulysses packed mask=uneven")]
    found += [(llama, f"cp={n} context=ulysses+ring")] if n >= 4 else []
    found += [(llama, f"tp={n} sp overlap=2"), (f"{llama},vocab=101", f"tp={n} sp odd")]
    found += [(llama, f"pp={n} schedule={s} micro={2 * n}") for s in SCHEDULES if s != "zbv"]
    found += [("mixtral", f"dp={n} ep={min(n, 4)} dispatch={d}") for d in ("all-gather", "dense")]
    return _lines(found)


def _lines(found: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(model, str(Layout.parse(line))) for model, line in found]


def _checks(part: str, ranks: int, dtype: str, cases: Iterable[tuple[str, str]]) -> Job:
    items = (
        Item(part, "check", f"{model} {line}", ranks, line, model, dtype=dtype, limit=45.0) for model, line in cases
    )
    return Job(ranks, tuple(items), FEW_BUFFERS)


# ----------------------------------------------------------------------------------------------------------------- speed

# As its documentation asks for, so that its collectives begin before the products beside which they run.
MEGATRON = (("CUDA_DEVICE_MAX_CONNECTIONS", "1"),)


def _data(n: int, s: Sizes) -> list[Job]:
    rows = s.rows * n
    ours = (
        Item("data", "train", ONE, n, "dp=1", rows=s.rows, seq=s.seq),
        Item("data", "train", "FSDP", n, f"dp={n} zero=3", rows=rows, seq=s.seq),
        Item("data", "train", "ZeRO-1", n, f"dp={n} zero=1", rows=rows, seq=s.seq),
    )
    peer = Item("data", "megatron", "Megatron-core, distributed optimizer", n, f"dp={n} zero=1", rows=rows, seq=s.seq)
    return [Job(n, ours), Job(n, (peer,), MEGATRON)]


def _tensor(gpus: int, s: Sizes) -> list[Job]:
    made = []
    for n in [n for n in (2, 8, 4) if n <= gpus]:
        rows, line = s.rows * n, f"tp={n} sp"
        items = [Item("tensor", "train", ONE, n, "dp=1", rows=s.rows, seq=s.seq)]
        items.append(Item("tensor", "train", f"TP={n} with SP", n, line, rows=rows, seq=s.seq))
        if n == 2:
            items.append(
                Item("tensor", "train", f"TP={n}, products in 2", n, f"{line} overlap=2", rows=rows, seq=s.seq)
            )
        made.append(Job(n, tuple(items)))
        if n == 2:
            peer = Item("tensor", "megatron", f"Megatron-core TP={n} with SP", n, line, rows=rows, seq=s.seq)
            made.append(Job(n, (peer,), MEGATRON))
    return made


def _context(n: int, s: Sizes) -> list[Job]:
    # as many tokens for each GPU as elsewhere, in whole sequences
    rows = max(1, s.rows * s.seq * n // s.long_seq)
    items = [Item("context", "attention", "attention, one GPU", n, "dp=1", rows=1, seq=s.long_seq)]
    items += [
        Item("context", "attention", f"attention, {c}", n, f"cp={n} context={c}", rows=1, seq=s.long_seq)
        for c in CONTEXTS
    ]
    items += [Item("context", "train", f"{ONE}, long", n, "dp=1", rows=1, seq=s.long_seq, whole=False)]
    items += [
        Item("context", "train", f"CP, {c}", n, f"cp={n} context={c}", rows=rows, seq=s.long_seq, whole=False)
        for c in CONTEXTS
    ]
    return [Job(n, tuple(items))]


def _experts(n: int, s: Sizes) -> list[Job]:
    rows = s.rows * n
    items = (
        Item("experts", "train", f"{ONE}, experts", n, "dp=1", "experts", s.rows, s.seq, whole=False),
        Item("experts", "train", f"EP={n}", n, f"dp={n} ep={n}", "experts", rows, s.seq, whole=False),
    )
    return [Job(n, items)]


def _pipeline(n: int, s: Sizes) -> list[Job]:
    rows = s.rows * n
    items = [Item("pipeline", "train", ONE, n, "dp=1", rows=s.rows, seq=s.seq)]
    for schedule in ("1f1b", "zbv"):
        line = str(Layout.parse(f"pp={n} micro={rows} schedule={schedule}"))
        items.append(Item("pipeline", "train", f"PP={n}, {schedule}", n, line, rows=rows, seq=s.seq))
    return [Job(n, tuple(items))]


def reference_of(item: Item, sizes: Sizes) -> str:
    """The key of what one GPU does of the same work."""
    rows = 1 if item.seq == sizes.long_seq else sizes.rows
    kind = "train" if item.kind == "megatron" else item.kind
    return Item(item.part, kind, ONE, 1, "dp=1", item.model, rows, item.seq).key


def flops_of(item: Item, sizes: Sizes) -> float:
    """Floating-point operations of one forward and backward of the whole batch."""
    from fmegatron.models import Decoder

    config = dataclasses.replace(sizes.dense if item.model == "dense" else sizes.experts, max_seq=item.seq)
    if item.kind == "attention":  # two products forward and twice as many backward, of half of all pairs
        return 12.0 * item.rows * config.heads * config.head * item.seq * item.seq / 2
    return Decoder(config).flops_per_token(item.seq) * item.rows * item.seq


def drawn_layouts(ranks: int, count: int, seed: int) -> list[tuple[str, str]]:
    """So many (model, layout) of a number of ranks, drawn as `fmegatron verify` draws them, one in four with experts."""
    import random

    from fmegatron.testing.covering import space
    from fmegatron.testing.models import variants
    from fmegatron.testing.strategies import PIPELINE_AXES

    generator, found = random.Random(seed), dict[tuple[str, str], None]()
    spaces = [space(variants(family), ranks, axes=PIPELINE_AXES) for family in ("llama", "mixtral")]
    for _ in range(1000 * count):
        if len(found) == count:
            break
        case = spaces[len(found) % 4 == 3].draw(generator)
        if case.layout.world == ranks and _legal(case.model, case.layout):
            found[case.model, str(case.layout)] = None
    return list(found)


def _legal(model: str, layout: Layout) -> bool:
    from fmegatron.testing.models import find_model
    from fmegatron.testing.program import Program

    return Program(find_model(model)).why_illegal(layout) is None
