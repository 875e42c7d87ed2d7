"""The checking mode: the good program passes on abstract tables that stand for all, each planted error is refused, and `over` is found."""

import pytest
import torch

from fmegatron.checking import check, infer_over
from fmegatron.errors import ShardingError
from fmegatron.initializers import Normal
from fmegatron.precision import Precision
from fmegatron.primitives import swiglu
from fmegatron.random import key
from fmegatron.rules import Rules
from fmegatron.sharding import Sharding
from fmegatron.spec import Param, init, params_of
from tests import exact_model as M

DOUBLE = Sharding(precision=Precision(params=torch.float64))
PARAMS = init(M.spec(), key(0), sh=DOUBLE)
G = torch.Generator().manual_seed(0)
BATCH = {n: torch.randint(0, M.V, (M.B, M.S), generator=G) for n in ("tokens", "labels")}
ALL = {n: n for n in M.NAMES} | {"seq*": ("seq", "mlp"), "batch'": "batch", "seq'": "seq"}
RULES = M.rules(**ALL)


def refusal(bug=None, kind="dense", probe=True, spec=None):
    """Why the program is refused, or None."""
    sp = spec or M.spec(bug)
    try:
        check(lambda p, b, sh: M.loss(p, b, sh, sp, kind, bug), sp, PARAMS, BATCH, RULES, probe=probe)
    except ShardingError as e:
        return str(e)
    return None


@pytest.mark.parametrize("kind", ["dense", "a2a"])
@pytest.mark.parametrize("probe", [False, True])
def test_the_good_program_passes(kind, probe):
    assert refusal(kind=kind, probe=probe) is None


# A local number of elements is a Python int, which no type reaches: the layouts' numbers find that one (test_sharding).
OPEN = {"mean_local"}
# what reduces or mixes along a sharded dim outside of sh is found by the probe alone
PROBE_ONLY = {"qnorm_local", "gate_local_norm", "max_local", "weights_local"}


@pytest.mark.parametrize("bug", [b for b in M.BUGS if b not in OPEN])
def test_every_planted_error_is_refused(bug):
    assert any(refusal(bug, kind) for kind in ("dense", "a2a"))
    if bug not in PROBE_ONLY:
        assert any(refusal(bug, kind, probe=False) for kind in ("dense", "a2a"))


def test_a_refusal_names_the_equation_and_the_axis():
    assert "batch seq embed, embed kv group head" in refusal("no_region") and "on_kv" in refusal("no_region")


@pytest.mark.parametrize("kind", ["dense", "a2a"])
def test_over_is_determined_by_the_program(kind):
    bare = M.spec(with_over=False)
    found = infer_over(lambda p, b, sh: M.loss(p, b, sh, bare, kind), bare, PARAMS, BATCH, RULES)
    for (path, p), q in zip(params_of(M.spec()).items(), params_of(found).values(), strict=True):
        assert set(p.over.split()) == set(q.over.split()), path
    assert refusal(spec=found, kind=kind) is None


def test_a_missing_over_is_an_error_on_a_mesh():
    from fmegatron.simulation import simulate
    from tests.test_sharding import TABLES, run

    with simulate(4), pytest.raises(ShardingError, match="infer_over"):
        run(TABLES[0], sp=M.spec(with_over=False))


def test_functions_of_one_s_own_are_seen():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, g):
            return 2 * g * ctx.saved_tensors[0]

    one = {"emb": M.Param((M.V, M.D), "vocab embed", over="")}

    def whole(p, b, sh):
        return sh.sum(Square.apply(sh.use(p["emb"], one["emb"])), "vocab embed ->")

    def part(p, b, sh):
        return Square.apply(sh.use(p["emb"], one["emb"])).sum()

    params = {"emb": PARAMS["emb"]}
    check(whole, one, params, BATCH, RULES)
    with pytest.raises(ShardingError, match="on_vocab"):
        check(part, one, params, BATCH, RULES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_is_no_mixing(dtype):
    """A kernel may round half of a tensor otherwise than the whole; a true mix of elements is refused all the same."""
    rules = Rules({"batch": "dp", "seq": None, "embed": None, "mlp": "tp"})
    spec = {"up": Param((12, 36), "embed mlp", Normal(1.0), over="batch seq")}
    params = init(spec, key(0), sh=Sharding(precision=Precision(params=dtype)))
    batch = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(0)).to(dtype)

    def program(activation):
        def loss(p, x, sh):
            p = sh.use(p, spec)
            h = sh.dot(
                sh(x, "batch seq embed -> batch seq embed | mlp"),
                p["up"],
                "batch seq embed, embed mlp -> batch seq mlp",
            )
            return sh.sum(activation(h), "batch seq mlp ->")

        return loss

    for good in (torch.nn.functional.silu, torch.tanh, lambda h: swiglu(h, h)):
        check(program(good), spec, params, batch, rules, dims="batch seq embed")
    with pytest.raises(ShardingError, match="mixes along the dim|reduces or merges"):
        check(program(lambda h: h.softmax(-1)), spec, params, batch, rules, dims="batch seq embed")
