"""Generation over the ranks of a pipeline equals one device, and what each rank reads and holds is its own."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch

from fmegatron import cli, init, job, key, make_mesh, make_schedule, parse_layout, pipeline, random
from fmegatron.config import GenerateConfig
from fmegatron.context import Ctx
from fmegatron.errors import UserError
from fmegatron.generate import generate_tokens, load_run, run_here
from fmegatron.initializers import Normal
from fmegatron.models import Decoder, save_hf
from fmegatron.parallel.folding import expert_factoring
from fmegatron.parallel.pipeline import inside_stage
from fmegatron.precision import Precision
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.testing.models import small_config
from fmegatron.tree import named
from tests.processes import processes
from tests.test_train_layouts import Allocations
from tests.train_runs import SIZES, flags_of, go, losses, write_corpus

PROMPTS = [[5, 17, 3], [8], [1, 2, 3, 4, 5, 6, 7], [44, 44]]
FLOAT64 = Sharding(precision=Precision(params=torch.float64))


def decoder(family: str, **changes: Any) -> Decoder:
    return Decoder(small_config(family, **{"layers": 5, "init_std": 0.3, **changes}))


# ------------------------------------------------------------------------------------------------------------ equal text


def generated(family: str, changes: dict[str, Any], stages: str | None, schedule: str, options: dict[str, Any]) -> Any:
    """On one rank: (new tokens, layers of the cache)."""
    model, world = decoder(family, **changes), torch.distributed.get_world_size()
    mesh = make_mesh(f"pp={world}", device="cpu")
    layout = None if stages is None else parse_layout(stages)
    pipe = pipeline(model, make_schedule(schedule, world, 1), mesh=mesh, assignment=layout)
    params = init(pipe.spec, key(3), sh=FLOAT64)
    found = generate_tokens(pipe, params, PROMPTS, tokens=7, sh=FLOAT64, **options)
    return found, sorted(pipe.cache(1, 2))


@pytest.mark.parametrize(
    ("world", "family", "changes", "stages", "schedule", "options"),
    [
        (2, "llama", {}, None, "gpipe", {}),
        (2, "gpt2", {"tied": True}, None, "zbv", {"temperature": 1.0, "top_k": 9, "seed": 4}),
        (4, "gemma2", {}, "|Ett||tttL", "gpipe", {}),
    ],
)
def test_tokens_are_those_of_one_device(
    world: int, family: str, changes: dict[str, Any], stages: str | None, schedule: str, options: dict[str, Any]
) -> None:
    """Also with prompts of unequal length, two stages on a rank, and stages that hold nothing."""
    model = decoder(family, **changes)
    params = init(model.spec(), key(3), sh=FLOAT64)
    want = generate_tokens(model, params, PROMPTS, tokens=7, sh=FLOAT64, **options)
    found = processes(world).run(generated, family, changes, stages, schedule, options)
    assert [tokens for tokens, _ in found] == [want] * world
    assert sorted(i for _, layers in found for i in layers) == list(range(5))


class Own(Decoder):
    """A model of one's own, by the public parts alone."""

    def cached(self, params: Any, tokens: Any, cache: Any, start: int, ctx: Any = None, **batch: Any) -> Any:
        batch = {"tokens": tokens, **batch}
        ctx = (ctx or Ctx()).replace(extras={"slots": (start, start + tokens.shape[1]), "kv_segments": None})
        ctx = self.context(batch, ctx)
        x, _ = self.stack(params["layers"], (self.embed(params, batch, ctx), cache), ctx)
        return self.unembed(params, x[:, -1:], ctx)[:, -1]


INSIDE = ("pp=2,tp=2", "pp=2,dp=2")


def on_meshes() -> list[Any]:
    """On one rank: the tokens of a pipeline whose stages are on two ranks each, for each of these meshes."""
    found = []
    for axes in INSIDE:
        model = Own(decoder("llama", heads=4, kv_heads=2, vocab=47).config)
        mesh = make_mesh(axes, device="cpu", kv_heads=2)
        rules = standard_rules(mesh, sequence_parallel="tp" in axes, zero=3, uneven={"vocab": 47})
        sh = inside_stage(Sharding(mesh, rules, precision=FLOAT64.precision), model.spec())
        pipe = pipeline(model, make_schedule("gpipe", 2, 1), mesh=mesh)
        params = init(pipe.spec, key(3), sh=sh)
        options = {"tokens": 6, "temperature": 1.0, "seed": 4, "sh": sh}
        found.append(generate_tokens(pipe, params, [[5, 17, 3], [8, 9, 2]], **options))
    return found


def test_stages_of_several_ranks_write_what_one_device_does() -> None:
    """Tensor parallelism with sequence parallelism, and ZeRO-3; a vocabulary that does not divide."""
    model = Own(decoder("llama", heads=4, kv_heads=2, vocab=47).config)
    params = init(model.spec(), key(3), sh=FLOAT64)
    options: dict[str, Any] = {"tokens": 6, "temperature": 1.0, "seed": 4, "sh": FLOAT64}
    want = generate_tokens(model, params, [[5, 17, 3], [8, 9, 2]], **options)
    assert processes(4).run(on_meshes) == [[want] * len(INSIDE)] * 4


class Unfit:
    """A pipeline's model without a cache."""

    def __init__(self, model: Decoder) -> None:
        self.spec, self.embed, self.block, self.head = model.spec, model.embed, model.block, model.head
        self.context, self.stack = model.context, model.stack


def test_what_generation_refuses() -> None:
    model, mesh = decoder("llama"), make_mesh("pp=1", device="cpu")
    pipe = pipeline(Unfit(model), make_schedule("gpipe", 1, 1), mesh=mesh)
    with pytest.raises(UserError, match="Unfit has no `cached`"):
        pipe.cached(init(pipe.spec, key(0)), torch.zeros(1, 1, dtype=torch.int64), {}, 0, Ctx())
    for given, message in (
        ({"mesh": "pp=2,cp=2"}, "generation runs over pp, tp and dp: leave cp out"),
        ({"stages": "Ett|tL"}, "is for several processes"),
    ):
        with pytest.raises(UserError, match=message):
            GenerateConfig(checkpoint="x", **given).ranks()


# ------------------------------------------------------------------------------------------------------- what is read


class Counted:
    """While it is on, `nbytes` is what is read of tensors in safetensors files, and `names` of which."""

    def __init__(self) -> None:
        self.nbytes, self.names = 0, set()
        self.plain = safetensors.safe_open

    def __enter__(self) -> Counted:
        count, plain = self, self.plain

        class Slice:
            def __init__(self, name: str, part: Any) -> None:
                self.name, self.part = name, part

            def __getattr__(self, name: str) -> Any:
                return getattr(self.part, name)

            def __getitem__(self, at: Any) -> torch.Tensor:
                x = self.part[at]
                count.nbytes += x.nbytes
                count.names.add(self.name)
                return x

        class Opened:
            def __init__(self, *args: Any, **options: Any) -> None:
                self.context = plain(*args, **options)

            def __enter__(self) -> Opened:
                self.file = self.context.__enter__()
                return self

            def __exit__(self, *error: Any) -> Any:
                return self.context.__exit__(*error)

            def __getattr__(self, name: str) -> Any:
                return getattr(self.file, name)

            def get_slice(self, name: str) -> Slice:
                return Slice(name, self.file.get_slice(name))

            def get_tensor(self, name: str) -> torch.Tensor:
                return self.get_slice(name)[:]

        safetensors.safe_open = Opened  # type: ignore[misc]
        return self

    def __exit__(self, *error: Any) -> None:
        safetensors.safe_open = self.plain  # type: ignore[misc]


def nbytes(tree: Any) -> int:
    """Of what this rank holds."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in named(tree).values()]
    return sum(t.nbytes for t in local if isinstance(t, torch.Tensor))


def loading(arguments: list[str], source: str) -> tuple[int, int, int, int, int, int]:
    """On one rank, (bytes read, the most alive meanwhile, those of what it then holds, of its part of the model,
    elements drawn at random, and those of its part that begin so) of a run's parameters: those of a new run, of
    --init-from, or of a run's state, from its checkpoint."""
    from fmegatron import checkpoint, train

    settings = cli.parse_train(arguments)
    world = torch.distributed.get_world_size()
    begun = checkpoint.info(settings.out) if source == "checkpoint" else None
    sizes = train.first_sizes(settings, begun)
    run = job.make_run(settings, sizes, job.make_setup(settings, torch.device("cpu"), world, sizes=sizes))
    assert run.pipe is not None
    drawn, normal = [0], random.normal

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        x = normal(*args, **options)
        drawn[0] += x.numel()
        return x

    with Counted() as read, Allocations() as alive, pytest.MonkeyPatch.context() as patch:
        patch.setattr(random, "normal", counted)
        if begun is not None:
            found: Any = train.saved_state(settings, run, begun)
            found = (found.params, found.opt)
        elif source == "init-from":
            found = job.load_pretrained(settings, run)
        else:
            found = job.initial_state(settings, run)
            found = (found.params, found.opt)
    elements = sum(p.numel for p in named_params(run.spec))
    own = sum(p.numel for p in named_params(run.spec) if isinstance(p.init, Normal))
    return read.nbytes, alive.peak, nbytes(found), 4 * elements, drawn[0], own


def named_params(spec: Any) -> list[Any]:
    from fmegatron.spec import params_of

    return list(params_of(spec).values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A corpus with a tokenizer and a model of several files in "hf", and a pipeline's run of it."""
    from fmegatron.data import save_tokenizer, train_bpe
    from tests.train_runs import WORDS

    root = tmp_path_factory.mktemp("pipeline")
    write_corpus(root / "text.jsonl")
    save_tokenizer(train_bpe([" ".join(WORDS)] * 9, vocab_size=290), root / "tokenizer")
    model = decoder("llama", vocab=300, max_seq=64, embed=32, mlp=96, tied=True)
    save_hf(root / "hf", model, init(model.spec(), key(5)), tokenizer=root / "tokenizer", max_shard_bytes=30_000)
    assert len(list((root / "hf").glob("*.safetensors"))) > 3
    assert processes(2).run(go, train_arguments(root, "run", "--mesh", "pp=2")) == [0, 0]
    return root


def train_arguments(root: Path, out: str, *more: object, **settings: object) -> list[str]:
    given = ("--init-from", root / "hf", *more)
    return flags_of(root / "text.jsonl", root / out, *given, **{"steps": 2, "batch_microbatches": 2, **settings})


@pytest.mark.parametrize("source", ["init", "init-from", "checkpoint"])
def test_a_rank_reads_and_holds_its_own_layers_alone(folder, source: str) -> None:
    """From the first moment: neither more bytes of any file, nor ever more memory than its own and one tensor."""
    if source == "init":
        sizes = [x for name, value in SIZES.items() for x in (f"--model-overrides.{name}", value)]
        arguments = flags_of(folder / "text.jsonl", folder / "new", *sizes, "--mesh", "pp=2", batch_microbatches=2)
    elif source == "init-from":
        arguments = train_arguments(folder, "new", "--mesh", "pp=2")
    else:
        arguments = ["--out", str(folder / "run"), "--resume"]
    model = Decoder(job.model_config(cli.parse_train(arguments), None))
    whole = 4 * sum(p.numel for p in named_params(model.spec()))
    table = 4 * model.config.vocab * model.config.embed
    found = processes(2).run(loading, arguments, source)
    for read, peak, held, own, drawn, own_drawn in found:
        states = 1 if source == "init-from" else 3  # parameters and two moments
        assert abs(held - states * own) <= 64, "counts of steps alone"
        assert own < whole
        assert abs(read - (0 if source == "init" else held)) <= 64
        # a matrix at a time; random numbers are made of integers of 64 bits
        assert held <= peak <= held + (30 if source == "init" else 3) * table, (peak, held, table)
        assert drawn == (own_drawn if source == "init" else 0)
    assert sum(own for _, _, _, own, *_ in found) == whole + (table if model.config.tied else 0)


def test_pretrained_layers_are_those_of_one_device(folder) -> None:
    """Losses, before and behind the first steps, of a vocabulary that grows, with fused matrices."""
    more = ("--resize-vocab", 310, "--model-overrides.fused-qkv", "True", "--model-overrides.fused-gate-up", "True")
    settings: dict[str, object] = {"precision_params": "float64", "optim_lr": 1e-3}
    assert go(train_arguments(folder, "one", *more, **settings)) == 0
    assert processes(2).run(go, train_arguments(folder, "two", *more, "--mesh", "pp=2", **settings)) == [0, 0]
    torch.testing.assert_close(losses(folder / "two"), losses(folder / "one"), rtol=1e-10, atol=0)
    samples = [
        (folder / out / "log.txt").read_text().split("\nsample\n")[1].split("\ncheckpoint ")[0]
        for out in ("one", "two")
    ]
    assert samples[0] == samples[1] and len(samples[0].strip()) > 9


# ---------------------------------------------------------------------------------------------------- the command line


def printed(settings: GenerateConfig) -> tuple[str, int, set[str]]:
    """On one rank: (what it prints, the bytes and the names it reads)."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), Counted() as read, worlds():
        assert run_here(settings, torch.device("cpu")) == 0
    return out.getvalue(), read.nbytes, read.names


@contextlib.contextmanager
def worlds() -> Any:
    """What a launcher sets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(torch.distributed.get_world_size()))
        yield


@pytest.mark.parametrize("source", ["hf", "run"])
def test_generate_reads_and_writes_what_one_process_does(folder, source: str, capsys) -> None:
    where = str(folder / source)
    common = {"checkpoint": where, "prompt": ("def return", "self value print"), "tokens": 12, "temperature": 0.0}
    assert run_here(GenerateConfig(**common), torch.device("cpu")) == 0
    want = capsys.readouterr().out
    one = load_run(where, device=torch.device("cpu"))
    layers = 4 * sum(t.numel() for n, t in named(one[1]).items() if n.startswith("layers"))
    rest = nbytes(one[1]) - layers
    found = processes(2).run(printed, GenerateConfig(**common, mesh="pp=2", stages="Et|ttttL"))
    assert [text for text, *_ in found] == [want, ""]
    assert found[0][1] + found[1][1] <= layers + 2 * rest
    assert found[0][1] <= layers / 5 + rest
    blocks = [{n.split("layers.")[1].split(".")[0] for n in names if "layers." in n} for *_, names in found]
    assert blocks == [{"0"}, {"1", "2", "3", "4"}]


@pytest.mark.parametrize("source", ["hf", "run"])
def test_generate_over_stages_of_several_ranks_writes_what_one_process_does(folder, source: str, capsys) -> None:
    """Each reads its part of its own layers."""
    common = {"checkpoint": str(folder / source), "prompt": ("def return",), "tokens": 8, "temperature": 0.0}
    assert run_here(GenerateConfig(**common, stream=False), torch.device("cpu")) == 0
    want = capsys.readouterr().out
    one = 4 * sum(p.numel for p in named_params(load_run(common["checkpoint"], device=torch.device("cpu"))[0].spec()))
    found = processes(4).run(printed, GenerateConfig(**common, stream=False, mesh="pp=2,tp=2"))
    assert [text for text, *_ in found] == [want, "", "", ""]
    assert all(read < 0.45 * one for _, read, _ in found), (found, one)


def test_the_command_starts_its_processes(folder, capfd) -> None:
    common = ["generate", "--checkpoint", str(folder / "hf"), "--prompt", "def", "--tokens", "9", "--temperature", "0"]
    texts = []
    for more in ([], ["--mesh", "pp=2"]):
        assert cli.main([*common, "--device", "cpu", *more]) == 0
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("def")


EXPERTS = Decoder(small_config("mixtral", heads=4, kv_heads=2))


def _with_experts(axes, ep, etp):
    mesh = make_mesh(axes, also=expert_factoring(axes, ep=ep, etp=etp), kv_heads=2, device="cpu")
    sh = inside_stage(Sharding(mesh, standard_rules(mesh), precision=FLOAT64.precision), EXPERTS.spec())
    pipe = pipeline(EXPERTS, make_schedule("gpipe", 2, 1), mesh=mesh)
    params = init(pipe.spec, key(0), sh=sh)
    cache = pipe.cache(2, 8, dtype=torch.float64, device="cpu", sh=sh)
    return pipe.cached(params, torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]), cache, 0, Ctx(sh=sh))


@pytest.mark.parametrize("layout", [("pp=2,dp=2", 2, 1), ("pp=2,tp=2", 2, 1)])
def test_experts_over_ranks_of_a_stage_generate_what_one_device_does(layout):
    """The rows of a prompt are whole on every rank, whatever the experts lie on."""
    sh = FLOAT64
    params, ids = init(EXPERTS.spec(), key(0), sh=sh), torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    want = EXPERTS.cached(params, ids, EXPERTS.cache(2, 8, dtype=torch.float64), 0, Ctx(sh=sh))
    for found in processes(4).run(_with_experts, *layout):
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)
