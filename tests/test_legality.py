"""Which layouts are legal, what the message says of one that is not, and that what it proposes can be typed and is legal."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from fmegatron import cli, job
from fmegatron.axes import parse_axes
from fmegatron.errors import UserError
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder
from fmegatron.parallel.context import factoring
from fmegatron.parallel.legality import (
    AXES,
    FLAGS,
    KINDS,
    WORDS,
    Choice,
    Sizes,
    check_layout,
    flags,
    head_shares,
    heads_on_tp,
    nearest,
    problem,
)
from fmegatron.rules import CONTEXTS, standard_rules
from fmegatron.sharding import Sharding
from fmegatron.testing.models import small_config

torch.set_num_threads(1)


def choice(text: str, **options) -> Choice:
    return Choice(parse_axes(text), **options)


def drawn(seed: int, *, axes: tuple[str, ...] = tuple(AXES), ranks: int = 16) -> tuple[Choice, Sizes]:
    """A layout and sizes, about half of which do not fit."""
    draw = random.Random(seed)
    names = draw.sample(axes, draw.randint(1, 3))
    found: dict[str, int] = {}
    for name in names:
        found[name] = draw.choice([n for n in (1, 2, 2, 3, 4, 5, 8) if n * math.prod(found.values()) <= ranks])
    stored = tuple(a for a in found if a in ("dp", "fsdp", "cp") and draw.random() < 0.3)
    kv = draw.choice((1, 2, 3, 4))
    sizes = Sizes(
        heads=kv * draw.choice((1, 2, 4)),
        kv_heads=kv,
        batch_size=draw.choice((1, 4, 6, 12, 16, 30)),
        seq_len=draw.choice((8, 12, 20, 24, 30, 48)),
        vocab=draw.choice((48, 48, 101)),
        mlp=draw.choice((24, 24, 22)),
        uneven=("vocab", "mlp") if draw.random() < 0.5 else (),
    )
    layout = Choice(
        found,
        sequence_parallel=draw.random() < 0.4,
        zero=draw.choice((None, 1, 3)) if stored else None,
        store=stored,
        context=draw.choice(CONTEXTS),
        microbatches=draw.choice((1, 1, 2, 4)),
    )
    return layout, sizes


# ------------------------------------------------------------------------------------------------- legal if it can run


def made(layout: Choice, sizes: Sizes) -> None:
    """Make what a run makes of a layout, on a mesh that runs nothing: raises UserError where a step would."""
    heads, kv = sizes.heads, sizes.kv_heads
    also = factoring(layout.mesh, layout.context, heads=heads, kv_heads=kv)
    mesh = make_mesh(layout.mesh, also=also, kv_heads=kv, device="cpu", abstract=True)
    uneven = {"vocab": sizes.vocab, "mlp": sizes.mlp} if sizes.uneven else None
    rules = standard_rules(
        mesh,
        sequence_parallel=layout.sequence_parallel,
        store=layout.store,
        zero=layout.zero,
        context=layout.context,
        uneven=uneven,
    )
    sh = Sharding(mesh, rules)
    config = small_config("llama", heads=heads, kv_heads=kv, vocab=sizes.vocab, mlp=sizes.mlp)
    sh.check_spec(Decoder(config).spec())
    rows = sh.local_size("batch", sizes.batch_size)
    if rows < layout.microbatches:
        raise UserError(f"{rows} rows cannot be cut into {layout.microbatches} microbatches")
    for name in rules.compute:
        for dim, size in (("seq", sizes.seq_len), ("kv", kv), ("group", heads // kv)):
            if name.rstrip("*") == dim:
                sh.local_size(name, size)


def test_refused_if_and_only_if_it_cannot_run() -> None:
    refused = 0
    for seed in range(400):
        layout, sizes = drawn(seed)
        try:
            made(layout, sizes)
            why = None
        except UserError as error:
            why = str(error)
        told = problem(layout, sizes)
        assert (told is None) == (why is None), (seed, layout, sizes, told, why)
        refused += told is not None
    assert 100 < refused < 300


def test_heads_are_shared_out_as_the_mesh_does_it() -> None:
    for cp, tp, kv, group in itertools.product((2, 3, 4, 6, 8), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4, 6)):
        if kv * group % tp == 0:
            shares = head_shares(cp, *heads_on_tp(kv * group, kv, tp))
            try:
                factoring(f"cp={cp},tp={tp}", "ulysses", heads=kv * group, kv_heads=kv)
                fits = True
            except UserError:
                fits = False
            assert fits == (cp in shares)
            (cut,) = factoring(f"cp={cp},tp={tp}", "ulysses+ring", heads=kv * group, kv_heads=kv)
            assert parse_axes(cut)["cp_ring"] == cp // max(n for n in shares if n < cp)


# --------------------------------------------------------------------------------------------------- what is proposed


def brute(layout: Choice, sizes: Sizes) -> list[tuple[int, Choice]]:
    """(axes that differ, layout) of every legal layout of as many ranks, whatever its options."""
    usable = [a for a in AXES if a in layout.axes or a in ("cp", "tp") or (a == "dp" and "fsdp" not in layout.axes)]
    divisors = [n for n in range(1, layout.world + 1) if layout.world % n == 0]
    found = []
    for chosen in itertools.product(divisors, repeat=len(usable)):
        if math.prod(chosen) != layout.world:
            continue
        axes = dict(zip(usable, chosen, strict=True))
        changes = sum(layout.axes.get(a, 1) != n for a, n in axes.items())
        for context, sp in itertools.product(CONTEXTS, {False, layout.sequence_parallel}):
            other = Choice(axes, sp, context=context)
            if problem(other, replace(sizes, batch_size=sizes.batch_size)) is None:
                found.append((changes, other))
    return found


def test_what_is_proposed_is_legal_and_no_legal_layout_is_nearer() -> None:
    asked = 0
    for seed in range(1000, 1200):
        layout, sizes = drawn(seed)
        layout = replace(layout, microbatches=1)
        near = nearest(layout, sizes)
        assert near and len(near) <= 3 and near == nearest(layout, sizes)
        assert all(problem(other, sizes) is None for other in near), (layout, sizes, near)
        assert len({flags(other, layout) for other in near}) == len(near)
        if problem(layout, sizes) is None:
            assert near[0].world == layout.world
            continue
        asked += 1
        every = brute(layout, sizes)
        worlds = {other.world for other in near}
        if every:
            assert worlds == {layout.world}
            same = sum(layout.axes.get(a, 1) != near[0].axes.get(a, 1) for a in AXES)
            assert same == min(changes for changes, _ in every), (layout, sizes, near, every)
        else:
            assert layout.world not in worlds
    assert asked > 60


def test_nonsense_is_put_right() -> None:
    sizes = Sizes(heads=8, kv_heads=4, batch_size=8, seq_len=96, vocab=48, mlp=24)

    def lines(text: str, world: int | None = None, **options) -> list[str]:
        asked = choice(text, **options)
        assert problem(asked, sizes, world=world) is not None
        near = nearest(asked, sizes, world=world)
        assert all(problem(other, sizes) is None for other in near)
        return [flags(other, asked, world) for other in near]

    assert lines("dp=2,pt=4")[0] == "--mesh dp=2,tp=4"
    assert lines("dp=2,ep=4")[0] == "--mesh dp=8"
    assert lines("tp=4", zero=3)[:2] == ["--mesh tp=4 --zero 0", "--mesh dp=2,tp=2 --zero 3"]
    assert lines("dp=4", zero=7)[0] == "--mesh dp=4 --zero 3"
    assert lines("dp=4", zero=0, store=("dp",))[:2] == [
        "--mesh dp=4 --zero 0 --store",
        "--mesh dp=4 --zero None --store dp",
    ]
    assert lines("dp=2,tp=2", store=("db",))[0] == "--mesh dp=2,tp=2 --store dp"
    assert lines("dp=2,tp=2", store=("",))[0] == "--mesh dp=2,tp=2 --store"
    assert lines("fsdp=2,dp=2", zero=3, store=("fsdp",), state=("tp",))[0] == "--mesh fsdp=2,dp=2 --zero 3 --store fsdp"
    assert lines("dp=4", microbatches=4)[0] == "--mesh dp=4 --batch.microbatches 2"
    assert lines("dp=2,tp=2", 1) == ["--mesh dp=2,tp=2 --nproc 4", "--mesh dp=1"]
    assert lines("cp=16", context="ulysses")[0] == "--mesh cp=16 --cp ring"
    assert lines("tp=16", sequence_parallel=True)[0] == "--mesh dp=2,tp=8 --sp"


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("dp=128,tp=8", {}),
        ("dp=16,fsdp=4,cp=4,tp=4", {"sequence_parallel": True, "zero": 3, "context": "ulysses"}),
        ("dp=1024", {}),
    ],
)
def test_a_thousand_ranks_take_milliseconds(text, options) -> None:
    """For sizes that no layout of so many ranks divides, so that all of them are looked at."""
    sizes = Sizes(heads=7, kv_heads=7, batch_size=35, seq_len=35)
    nearest(choice(text, **options), sizes)
    began = time.process_time()
    assert nearest(choice(text, **options), sizes)
    assert time.process_time() - began < 0.1


# -------------------------------------------------------------------------------------------------------- the messages


def test_the_message_ends_with_lines_that_can_be_typed() -> None:
    """Behind the flags that were refused: the last of a flag wins."""
    base = ["--model-overrides.heads", "6", "--model-overrides.kv-heads", "3", "--batch.size", "6"]
    base += ["--batch.seq-len", "24"]
    proposed = 0
    for refused in (
        ["--mesh", "dp=2,tp=4", "--nproc", "8", "--sp", "--zero", "2"],
        ["--mesh", "cp=4", "--nproc", "4", "--cp", "ulysses", "--batch.microbatches", "3"],
        ["--mesh", "dp=4", "--nproc", "4", "--store", "dp", "--batch.microbatches", "3"],
        ["--mesh", "dp=2", "--nproc", "2", "--store", "pd", "--zero", "0"],
        ["--mesh", "dp=8", "--nproc", "8", "--batch.microbatches", "2"],
    ):
        config = cli.parse_train([*base, *refused])
        with pytest.raises(UserError) as error:
            job.make_setup(config, torch.device("cpu"), config.nproc, check_only=True)
        first, *lines = str(error.value).splitlines()
        assert first.endswith(". Nearest legal layouts:") and 1 <= len(lines) <= 3
        for line in lines:
            assert line.startswith("  --mesh ")
            again = cli.parse_train([*base, *refused, *line.split()])
            job.make_setup(again, torch.device("cpu"), again.nproc, check_only=True)
            proposed += 1
    assert proposed > 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"mesh": "tp=4"},
            "the model has 6 query heads, which do not divide by tp=4 (layout tp=4): use a tp of 3 or 6",
        ),
        ({"mesh": "ep=2"}, "layout ep=2: nothing is divided over an axis 'ep'"),
        ({"mesh": "dp=4", "zero": 1, "store": ("tp",)}, "store=tp: the mesh dp=4 has no axis of this name; use dp"),
        ({"mesh": "dp=4", "zero": 4}, "zero=4: the stages are 0"),
        ({"mesh": "dp=4", "batch_size": 6}, "rows=6 does not divide by 4, the data-parallel ranks of layout dp=4"),
        ({"mesh": "dp=4", "microbatches": 3}, "micro=3 needs as many sequences on every rank, but rows=8 gives each"),
        ({"mesh": "cp=4", "context": "ulysses"}, "context=ulysses: the 3 kv heads on a tensor-parallel rank, with 2"),
        ({"mesh": "cp=2", "seq_len": 18}, "seq=18 does not divide by 4, the least multiple of cp and twice the ranks"),
        ({"mesh": "tp=2", "vocab": 101}, "the vocabulary of 101 does not divide by 2, the tensor-parallel ranks of"),
        ({"mesh": "tp=2", "mlp": 33}, "the mlp width of 33 does not divide by 2"),
        ({"mesh": "dp=2", "positions": 16}, "seq=24 is longer than the model's 16 learned positions"),
    ],
)
def test_each_rule_names_its_sizes(options, message) -> None:
    """In the words of a layout's line; a mesh that is made already has the same answer, without proposals."""
    given = {"heads": 6, "kv_heads": 3, "batch_size": 8, "seq_len": 24, "uneven": (), **options}
    with pytest.raises(UserError) as error:
        check_layout(words=WORDS, **given)
    assert message in str(error.value) and "\n" not in str(error.value)
    if options.get("context") != "ulysses":  # a mesh says how it shares heads out
        mesh = make_mesh(given.pop("mesh"), device="cpu", abstract=True)
        with pytest.raises(UserError) as same:
            check_layout(mesh, words=WORDS, **given)
        assert str(same.value) == str(error.value)


def test_sizes_that_may_be_filled_up_need_not_divide() -> None:
    sizes = Sizes(heads=6, kv_heads=3, batch_size=9, seq_len=23, vocab=101, mlp=33)
    layout = choice("dp=2,cp=2,tp=2", sequence_parallel=True, microbatches=5)
    for filled, told in (
        ((), "vocabulary of 101"),
        (("vocab",), "mlp width of 33"),
        (("vocab", "mlp"), "--batch.size 9"),
        (("vocab", "mlp", "batch"), "--batch.seq-len 23"),
        (("vocab", "mlp", "batch", "seq"), None),
    ):
        found = problem(layout, replace(sizes, uneven=filled))
        assert told in found if told else found is None
    every = replace(sizes, uneven=("vocab", "mlp", "batch", "seq"))
    assert "--batch.microbatches 6" in problem(replace(layout, microbatches=6), every)
    assert "query heads" in problem(choice("tp=4"), every)


def test_the_words_are_complete_and_torch_is_not_asked() -> None:
    assert FLAGS.keys() == WORDS.keys() and set(KINDS) == set(CONTEXTS)
    program = "import sys, fmegatron.parallel.legality, fmegatron.preflight; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
