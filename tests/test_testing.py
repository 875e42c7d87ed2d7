"""The harness: layouts as lines, what is drawn, what is compared, and the collectives that are counted."""

import itertools

import hypothesis
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import fmegatron as fm
from fmegatron import tree, zero
from fmegatron.errors import UserError
from fmegatron.models import Decoder
from fmegatron.simulation import per_rank, simulate
from fmegatron.testing import (
    Layout,
    Program,
    assert_equivalent,
    batches,
    compare,
    configs,
    families,
    layouts,
    make_batch,
    shrink,
    small_config,
    small_model,
)
from fmegatron.testing.covering import pairs_of, space
from fmegatron.testing.engines import run_on
from fmegatron.testing.models import find_model, model_text, variants
from fmegatron.testing.program import program_of
from fmegatron.testing.running import ADAMW_RATE, Job, inputs_of, slices_of
from fmegatron.testing.running import run as run_alone
from fmegatron.testing.strategies import meshes

QUICK = settings(deadline=None, derandomize=True, database=None)
LLAMA = small_model("llama", layers=1)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# ------------------------------------------------------------------------------------------------ layouts as lines


def test_a_layout_is_one_line():
    line = "dp=2,tp=2 sp zero=3 micro=2 remat=attention packed mask=row"
    layout = Layout.parse(line)
    assert layout == Layout("dp=2,tp=2", True, 3, micro=2, remat="attention", packed=True, mask="row")
    assert str(layout) == line and layout.world == 4
    assert str(Layout()) == "dp=1" and Layout.parse("") == Layout() and Layout.parse("cp=2").axes == {"cp": 2}
    assert Layout.parse("fsdp=2,dp=3 zero=3 store=fsdp").store_axes == ("fsdp",)
    assert Layout.parse("fsdp=2,dp=3,cp=2,tp=2 zero=3").store_axes == ("fsdp", "dp", "cp")


@QUICK
@given(layouts(LLAMA, 8))
def test_lines_are_read_back(layout):
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dp=2 ps", "'ps' is not known or there twice; did you mean 'sp'"),
        ("dp=2 sp sp", "'sp' is not known or there twice"),
        ("dp=two", 'is not "axis=size"'),
        ("dp=2 micro=0", "micro=0 must be 1 or more"),
        ("dp=2 micro=a", "needs a whole number"),
        ("dp=2 sp=1", "takes no value"),
        ("dp=2 zero=7", "zero=7 is not known"),
        ("dp=2 mask=some", "mask=some is not known: use one of full"),
        ("dp=2 store=dp", "store=dp needs zero=1, 2 or 3"),
        ("dp=2 zero=3 store=tp", "names an axis that the mesh lacks"),
    ],
)
def test_lines_that_mean_nothing_are_refused(line, message):
    with pytest.raises(UserError, match=message):
        Layout.parse(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tp=4", "6 query heads, which do not divide by tp=4"),
        ("xp=2", "nothing is divided over an axis 'xp'"),
        ("dp=2 rows=2 micro=2", "use fewer microbatches"),
    ],
)
def test_illegal_layouts_are_refused_with_the_reason(line, message):
    with pytest.raises(UserError, match=message):
        assert_equivalent(LLAMA, line)


def test_what_an_engine_cannot_express_it_says():
    with pytest.raises(UserError, match="runs on gloo and CPU, not on cuda"):
        assert_equivalent(LLAMA, "dp=2", engine="processes", device="cuda")
    with pytest.raises(UserError, match="17 processes are too many"):
        assert_equivalent(LLAMA, "dp=17", engine="processes")
    with pytest.raises(UserError, match="engine 'nccl' is not known"):
        assert_equivalent(LLAMA, "dp=2", engine="nccl")
    with pytest.raises(UserError, match="remat=nothing needs a model that is a dataclass with a field `save`"):
        assert_equivalent((spec, loss), "dp=1 remat=nothing")


# ---------------------------------------------------------------------------------------------- rules of one's own


def test_rules_are_part_of_the_line():
    line = "dp=2,fsdp=2,tp=2 sp zero=3 rules=batch:fsdp,mlp:tp+dp,vocab:none"
    layout = Layout.parse(line)
    assert layout.own_rows == {"batch": ("fsdp",), "mlp": ("tp", "dp"), "vocab": ()} and str(layout) == line
    assert layout.data == 2 and Layout("dp=2,fsdp=2").data == 4
    with simulate(8):
        program = Program(LLAMA)
        mesh = program.mesh(layout)
        rules = program.rules(mesh, layout)
        found = [mesh.live(mesh.expand(rules.compute[n])) for n in ("batch", "mlp", "vocab", "kv", "group")]
        assert found == [("fsdp",), ("tp", "dp"), (), (), ("tp",)]


OWN_RULES = {
    "tp=2 sp rules=mlp:none,vocab:none": {},  # heads alone are cut
    "dp=2,tp=2 zero=3 store=dp+tp rules=kv:none,group:none,mlp:none": {"tied": True},  # whole, but cut at rest
    "dp=2,fsdp=2,tp=2 zero=2 rules=batch:fsdp,mlp:tp+dp mask=uneven": {"vocab": 101, "mlp": 25},  # a data axis for mlp
    "fsdp=2,dp=2 zero=3 rules=batch:dp+fsdp mask=row": {"dropout": 0.2},  # rows in another order
    "dp=2,cp=2 zero=3 rules=seq:none,batch:dp+cp micro=2 packed odd": {"dropout": 0.2},  # cp for rows
    "dp=2,tp=2 rules=batch:dp+tp,kv:none,group:none,mlp:none,vocab:none": {},  # tp for rows
    "tp=4 sp rules=mlp:tp_group,vocab:tp_kv": {"heads": 8, "kv_heads": 2},  # each on a part of tp
}


@pytest.mark.parametrize("line", OWN_RULES)
def test_rules_of_one_s_own_are_equivalent(line):
    assert_equivalent(small_model("llama", layers=1, **OWN_RULES[line]), line, checks=("init", "gradients", "adamw"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("tp=2 rules=mlp", "rules=mlp: 'mlp' is no row: write dim:axis\\+axis, or dim:none"),
        ("tp=2 rules=mlp:none,mlp:tp", "dim 'mlp' has two rows"),
        ("tp=2 rules=mlp:tp+tp", "'mlp:tp\\+tp' names an axis twice"),
        ("tp=2 rules=mlp:dp", "rules=mlp:dp names 'dp', which is none of the mesh axes tp"),
        (
            "tp=2 rules=batch:tp_kv",
            "rules=batch:tp_kv names 'tp_kv', a part of an axis: batch lies on whole axes, such as tp",
        ),
        ("tp=2 rules=mpl:tp", "rules=mpl:tp: the model has no dim 'mpl'; did you mean 'mlp'"),
        ("tp=2 rules=embed:tp", "rules=embed:tp: no axis may hold 'embed', which the model reads whole"),
        (
            "dp=2,tp=2 rules=mlp:tp+dp",
            "mesh axis 'dp' would hold both 'batch' and 'mlp' of one value.* such as batch:none",
        ),
        ("tp=2 sp rules=batch:tp", "'tp' would hold both 'batch' and 'seq\\*' of one value.* such as seq\\*:none"),
        (
            "dp=2,tp=2 rules=batch:none,mlp:dp+tp",
            "rules=batch:none,mlp:dp\\+tp: .*dim 'mlp'.* but the mesh orders its axes",
        ),
        ("tp=4 rules=kv:tp,group:none", "rules=kv:tp,group:none: .*dim 'kv' of size 2 .* does not divide by 4"),
        ("cp=2 context=ring rules=seq:none", "rules=seq:none: context=ring needs the sequence on cp"),
        (
            "cp=2 context=ulysses rules=kv:none",
            "rules=kv:none: context=ulysses gives heads and sequence rows of its own",
        ),
        ("cp=2,tp=2 sp rules=seq*:tp", "seq\\* on tp, must begin with the axes of seq, cp"),
    ],
)
def test_rules_that_are_not_legal_are_refused_by_the_row(line, message):
    with pytest.raises(UserError, match=message):
        assert_equivalent(small_model("llama", layers=1, heads=8, kv_heads=2), line)


def test_rules_are_drawn_and_go_back_to_the_standard_ones():
    smallest = settings(QUICK, max_examples=300)
    found = hypothesis.find(layouts(LLAMA, 8), lambda x: "mlp" in x.own_rows, settings=smallest)
    assert found.world == 2 and found.zero == 0 and Program(LLAMA).why_illegal(found) is None
    assert hypothesis.find(layouts(LLAMA, 8), lambda x: "tp" in x.store_axes, settings=smallest).rules
    start = Layout.parse("dp=2,tp=2 sp zero=3 rules=mlp:none,vocab:tp,kv:none,group:none micro=2")
    assert str(shrink(LLAMA, start, lambda x: x.size("tp") > 1 and "mlp" in x.own_rows)) == "tp=2 rules=mlp:none"
    assert str(shrink(LLAMA, start, lambda x: x.size("dp") > 1)) == "dp=2"
    moved = Layout.parse("dp=2,fsdp=2,tp=2 rules=batch:fsdp,mlp:tp+dp")
    assert "dp=2,fsdp=2 rules=batch:fsdp,mlp:dp" in map(str, moved.simpler())


# ------------------------------------------------------------------------------------------------- what is drawn


@settings(QUICK, max_examples=30)
@given(st.data())
def test_only_legal_layouts_are_drawn(data):
    family = data.draw(st.sampled_from(list(families())))
    model = Decoder(data.draw(configs(family)))
    layout = data.draw(layouts(model, 8))
    assert layout.world <= 8 and Program(model).why_illegal(layout) is None
    batch = Program(model).batch_of(layout)
    rows, seq = layout.batch
    assert {x.shape for x in batch.values()} == {(rows, seq)}
    counts = model.weights(batch)["lm"].items
    assert counts.any() == (layout.mask != "none")
    if layout.mask == "row":
        each = rows // layout.size("dp", "fsdp")
        assert rows == 1 or not counts[: min(-(-each // layout.micro), rows - 1)].any()


def test_every_size_of_tp_is_drawn_that_the_model_allows():
    def sizes(model):
        return {Layout(m).size("tp") for m in meshes(model, 8)}

    assert sizes(small_model("llama", heads=8, kv_heads=2)) == {1, 2, 4, 8}
    assert sizes(small_model("llama")) == {1, 2, 3, 6}
    assert sizes(small_model("llama", vocab=101, mlp=13)) == {1, 2, 3, 6}


def test_what_is_drawn_shrinks_to_the_smallest():
    smallest = settings(QUICK, max_examples=300)
    assert str(hypothesis.find(layouts(LLAMA, 8), lambda x: True, settings=smallest)) == "dp=1"
    found = hypothesis.find(layouts(LLAMA, 8), lambda x: x.size("tp") > 1 and x.packed, settings=smallest)
    assert str(found) == "tp=2 packed"
    found = hypothesis.find(layouts(LLAMA, 8), lambda x: x.sp and x.zero, settings=smallest)
    assert found.world == 4 and found.micro == 1 and not found.packed
    assert hypothesis.find(configs("llama"), lambda c: c.tied, settings=smallest).layers == 1


def test_a_failing_layout_shrinks_in_few_tries():
    tried = []

    def fails(layout):
        tried.append(layout)
        return layout.size("cp") > 1 and layout.micro > 1

    start = Layout.parse("tp=2,dp=2,cp=2 sp zero=3 micro=3 remat=nothing packed mask=row")
    assert str(shrink(LLAMA, start, fails)) == "cp=2 micro=2"
    assert len(tried) < 25


@settings(QUICK, max_examples=20)
@given(batches(24))
def test_batches_have_documents_and_uneven_masks(batch):
    if "segments" in batch:
        first = torch.cat([torch.ones(4, 1).bool(), batch["segments"].diff(dim=1) > 0], 1)
        assert (first.sum(1) >= 2).all() and (batch["positions"][first] == 0).all()
        assert (batch["positions"].diff(dim=1)[~first[:, 1:]] == 1).all()


def test_a_row_without_a_token_and_unequal_rows():
    full = make_batch(24, 6, 8, mask="row", empty=2)["mask"].sum(1)
    assert (full[:2] == 0).all() and full[-1] > 0
    assert len(set((make_batch(24, 6, 8, mask="padded")["labels"] >= 0).sum(1).tolist())) > 3
    none = make_batch(24, 6, 8, mask="none")
    assert none["mask"].any() and (none["labels"] >= 0).any() and not ((none["labels"] >= 0) & none["mask"]).any()


@pytest.mark.parametrize("family", list(families()))
def test_small_models_by_name(family):
    for text in variants(family):
        model = find_model(text)
        assert model.config.family == family and find_model(model_text(model)).config == model.config
    assert small_config(family).kinds.count("window") == (0 if small_config(family).window is None else 1) or (
        "full" not in small_config(family).kinds
    )
    with pytest.raises(UserError, match="'speed=1' is not one of heads"):
        find_model(f"{family},speed=1")


def test_models_that_are_not_there():
    with pytest.raises(UserError, match="is no family"):
        find_model("lama")
    with pytest.raises(UserError, match="No module named 'nowhere'"):
        find_model("nowhere:model")
    with pytest.raises(UserError, match="is no model: it needs spec"):
        compare(find_model("math:pi"), "dp=1")


@pytest.mark.slow
def test_more_layouts_are_drawn_beside_those():
    assert len({str(c.layout) for c in space(variants("llama"), 8).cases(60, 0)}) >= 60


def test_few_layouts_have_every_pair_of_options():
    legal = space(variants("llama"), 8)
    cases, every = list(legal.cases(1, 0)), legal.pairs()
    assert set().union(*(pairs_of(legal.features(c)) for c in cases)) >= every
    assert sum(bool(c.layout.rules) for c in cases) >= 3 and any(c.layout.mask == "none" for c in cases)
    first = [list(itertools.islice(legal.cases(1, seed), 4)) for seed in (0, 1)]
    assert len(cases) < 52 and cases[:4] == first[0] != first[1]
    for case in cases:
        assert Program(find_model(case.model)).why_illegal(case.layout) is None


# ------------------------------------------------------------------------------------------------- what is compared


def test_the_place_of_a_shard_is_what_torch_says():
    whole = torch.arange(7 * 6).view(7, 6)
    for placements in ([Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)], [Shard(1), Shard(1)]):
        with simulate(6):
            mesh = fm.make_mesh("tp=3,dp=2", device="cpu").device_mesh
            parts = per_rank(distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local())
        for rank, part in enumerate(parts):
            (a, n), (b, m) = slices_of(whole.shape, placements, (3, 2), divmod(rank, 2))
            assert torch.equal(part, whole[a : a + n, b : b + m])


LINES = [
    "dp=1 micro=3 mask=uneven",
    "dp=3 zero=3 micro=2 packed mask=row",
    "cp=2,tp=2 sp remat=attention packed mask=padded",
    "tp=2,fsdp=2 zero=3 remat=nothing mask=row",
]


@pytest.mark.parametrize("line", LINES)
def test_layouts_are_equivalent(line):
    result = assert_equivalent(small_model("llama", layers=2 if "remat" in line else 1, dropout=0.2, tied=True), line)
    assert result.worst.error < 1e-12
    names = {d.what for d in result.differences}
    assert names == {"init", "loss", "gradients", "clipped", "norms"} | {
        f"adamw {n}" for n in ("parameters", "m", "v")
    } | {"sgd parameters"}


NOTHING_COUNTS = ["tp=2 sp micro=2", "cp=2 context=ring packed", "tp=2,fsdp=2 zero=3 micro=2 odd", "dp=2 zero=1"]


@pytest.mark.parametrize("line", NOTHING_COUNTS)
def test_a_batch_without_a_token_that_counts(line):
    """Loss and gradients are 0, and AdamW decays: on one device by the formula, on the layout as there."""
    layout = Layout.parse(f"{line} mask=none")
    assert assert_equivalent(LLAMA, layout, checks=("gradients", "adamw")).ok
    program, job = Program(LLAMA), Job(("gradients", "adamw"))
    inputs = inputs_of(program, layout, job)
    (one,) = run_alone(program, layout, job, inputs, reference=True)
    start = tree.named(inputs.params)
    assert all(p.value == 0 for p in one["loss"].values()) and not any(p.value.any() for p in one["gradients"].values())
    for name, piece in one["adamw parameters"].items():
        torch.testing.assert_close(piece.value, start[name] * (1 - ADAMW_RATE * 0.1) ** 3, rtol=1e-14, atol=0)


@pytest.mark.parametrize("family", [f for f in families() if f != "llama"])
def test_every_family_on_one_layout(family):
    line = {"gpt2": "tp=2 sp micro=2 mask=row", "gemma2": "cp=2 zero=3 packed"}.get(family, "tp=3 mask=uneven packed")
    assert_equivalent(small_model(family), line, checks=("gradients",))


@pytest.mark.slow
@settings(QUICK, max_examples=200)
@given(st.data())
def test_drawn_models_on_drawn_layouts(data):
    model = Decoder(data.draw(configs(data.draw(st.sampled_from(list(families()))))), label_smoothing=0.1, z_loss=0.01)
    assert_equivalent(model, data.draw(layouts(model, 8)))


def settled_times(patch, factor):
    """Gradients are multiplied where they are reduced, on more than one rank alone."""
    kept = zero.moving

    def moving(xs, params, sh, what):
        arrive = kept(xs, params, sh, what)
        if sh.mesh is None or sh.mesh.world == 1:
            return arrive
        return lambda: [x * factor(p) for x, p in zip(arrive(), params, strict=True)]

    patch.setattr(zero, "moving", moving)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lower_precisions_have_a_bound_that_finds_factors(dtype, monkeypatch):
    result = assert_equivalent(LLAMA, "tp=2 sp micro=2 mask=uneven", dtype=dtype)
    assert result.worst.error > 1e-9
    raw = max(d.allowed for d in result.differences if d.what == "gradients" and "norm" not in d.leaf)
    assert raw < {"float32": 1e-3, "bfloat16": 0.5}[dtype]

    settled_times(monkeypatch, lambda param: 2.0)
    with pytest.raises(AssertionError, match=r"gradients layers\.0\.\w+ .* leaves are off"):
        assert_equivalent(LLAMA, "tp=2 sp micro=2 mask=uneven", dtype=dtype, checks=("gradients",))


def test_an_error_names_the_layout_and_the_leaf(monkeypatch):
    settled_times(monkeypatch, lambda param: 2.0 if param.dims == "embed mlp" else 1.0)
    with pytest.raises(AssertionError) as error:
        assert_equivalent(LLAMA, "dp=2 micro=2", checks=("gradients",))
    text = str(error.value)
    assert "layout dp=2 micro=2 does not compute what one device computes" in text
    assert "embed 12 × mlp 24 at (dp:R): off by 1.0e+00 on rank" in text and "(2 of 12 leaves are off)" in text
    assert text.endswith('to check it again: fmegatron verify llama,layers=1 --layout "dp=2 micro=2"')
    assert find_model("llama,layers=1") == LLAMA


def test_drawn_layouts_that_fail_shrink_to_a_line(monkeypatch):
    """As a user sees it: the smallest layout, in the words of the command line."""
    settled_times(monkeypatch, lambda param: 2.0)

    @settings(
        QUICK, max_examples=4, phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink), report_multiple_bugs=False
    )
    @given(layouts(LLAMA, 2, axes=("dp",), masks=("full",)))
    def check(layout):
        assert_equivalent(LLAMA, layout, checks=("gradients",))

    with pytest.raises(AssertionError, match='to check it again: fmegatron verify llama,layers=1 --layout "dp=2"'):
        check()


@pytest.mark.parametrize("line", ["cp=2,tp=2 sp zero=3 context=ring micro=2 packed", "dp=4 zero=1"])
def test_a_layout_computes_the_same_bits_every_time(line):
    program, layout, job = (
        program_of(small_model("llama", dropout=0.2)),
        Layout.parse(line),
        Job(("gradients", "adamw")),
    )
    inputs = inputs_of(program, layout, job)
    first, again = (run_on("simulated", program, layout, job, inputs) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        for what, pieces in a.items():
            for path, piece in pieces.items():
                assert torch.equal(piece.value, b[what][path].value), f"{what} {path}"


def test_donation_that_changes_bits_is_found(monkeypatch):
    assert_equivalent(LLAMA, "dp=1", checks=("adamw", "donate"))
    from fmegatron.optim import clip

    kept = clip._scaled
    monkeypatch.setattr(clip, "_scaled", lambda g, c, donate: kept(g, c * (1 + 1e-12) if donate else c, donate))
    with pytest.raises(AssertionError, match="donate=True and False give different bits: donated"):
        assert_equivalent(LLAMA, "dp=1", checks=("adamw", "donate"))


# ------------------------------------------------------------------------------------------------- models of one's own


def spec():
    return {
        "table": fm.Param((24, 12), "vocab embed", fm.normal(0.5), over="batch seq"),
        "wide": fm.Param((12, 10), "embed hidden"),
        "back": fm.Param((10, 12), "hidden embed"),
    }


def loss(params, batch, ctx):
    sh, p = ctx.sh, ctx.sh.use(params, SPEC[0])
    x = fm.primitives.embedding(p["table"], batch["ids"], sh=sh, vocab_size=24)
    h = sh.dot(
        sh(x, "batch seq* embed -> batch seq embed | hidden"),
        p["wide"],
        "batch seq embed, embed hidden -> batch seq hidden",
    )
    y = sh.dot(torch.tanh(h), p["back"], "batch seq hidden, hidden embed -> batch seq* embed")
    items = (sh(y, "batch seq* embed -> batch seq embed") - batch["target"]).square().sum(-1)
    return fm.Term(items, "batch seq", weight=torch.ones_like(items)), None


SPEC = [spec()]


def data_of(rows, seq, seed):
    g = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 24, (rows, seq), generator=g),
        "target": torch.randn(rows, seq, 12, generator=g, dtype=torch.float64),
    }


OWN = {"rows": {"hidden": "tp"}, "batch": data_of, "dims": {"target": "batch seq embed"}}


def filled():
    """The spec with what each parameter is applied over, as the program determines it."""
    SPEC[0] = spec()
    SPEC[0] = Program((spec, loss), **OWN).spec()


@pytest.mark.parametrize("line", ["dp=2 zero=3 micro=2", "tp=2,dp=2 sp", "cp=3"])
def test_two_functions_with_dims_and_batches_of_their_own(line):
    filled()
    assert set(SPEC[0]["wide"].over.split()) == {"batch", "seq"}
    assert assert_equivalent((lambda: SPEC[0], loss), line, **OWN).ok


def test_parameters_may_be_given():
    filled()
    given = tree.tree_map(lambda p: torch.full(p.shape, 0.1, dtype=torch.float64), SPEC[0])
    result = assert_equivalent((lambda: SPEC[0], loss), "tp=2", params=given, **OWN)
    assert "init" not in {d.what for d in result.differences}
