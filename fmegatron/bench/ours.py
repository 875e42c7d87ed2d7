"""The contenders of this library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fmegatron import optim, tree
from fmegatron.accumulate import accumulate
from fmegatron.bench.settings import FUSED
from fmegatron.bench.timing import Contender, bytes_of
from fmegatron.bench.works import Work
from fmegatron.context import Ctx
from fmegatron.fp8 import Fp8, scaling
from fmegatron.graphs import recorded
from fmegatron.mesh import make_mesh
from fmegatron.models import Decoder
from fmegatron.optim.moments import moments_name
from fmegatron.precision import Precision
from fmegatron.random import fold_in, key, randint
from fmegatron.rules import standard_rules
from fmegatron.sharding import Sharding
from fmegatron.spec import init
from fmegatron.split import everything
from fmegatron.step import TrainState, train_step

CLIP = 1.0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def precision_of(name: str, grads: torch.dtype | None) -> Precision:
    """The arithmetic policy that a name of the command line means; gradients in `grads`, or like the parameters."""
    params = torch.float32 if name == "fp32" else torch.bfloat16
    fp8 = Fp8(cast(Any, name.removeprefix("fp8-"))) if name.startswith("fp8-") else None
    return Precision(params=params, reduce=grads or params, fp8=fp8)


def tokens_of(work: Work, seed: int, device: torch.device) -> dict[str, Tensor]:
    """{"tokens", "labels"}, int64[batch seq]: uniform tokens, each one's label the next."""
    ids = randint(fold_in(key(seed), "tokens"), (work.batch, work.seq + 1), 0, work.config.vocab).to(device)
    return {"tokens": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


class Shared:
    """Parameters and optimizer state that all contenders of this library use in turn: on one rank they are plain
    tensors, whatever the mesh, and a whole step overwrites them."""

    def __init__(
        self,
        work: Work,
        precision: Precision,
        seed: int,
        device: torch.device,
        *,
        moments: torch.dtype = torch.float32,
        master: bool = True,
    ) -> None:
        self.spec = Decoder(work.config).spec()
        self.params = init(self.spec, key(seed), sh=Sharding(precision=precision), device=device)
        self.key = fold_in(key(seed), "step")
        self.extras = scaling.init(precision.fp8, self.spec, device=device)
        chained = optim.adamw(**ADAMW, mask=optim.decay_mask(self.spec), moments=moments, clip=CLIP)
        narrow = precision.params.itemsize < 4
        self.optimizer = optim.with_master(chained) if narrow and master else chained
        self.note = f"clipping and AdamW, {moments_name(moments)} moments"
        if narrow:
            self.note += ", float32 master copy" if master else ", no master copy"
        self.state: TrainState | None = None

    def prepare(self) -> None:
        """Make the optimizer's state, once."""
        if self.state is None:
            self.state = TrainState(0, self.params, self.optimizer.init(self.params), self.key, self.extras)

    def held(self) -> int:
        """Bytes of parameters and state."""
        state = self.state
        return bytes_of(tree.leaves(self.params if state is None else (state.params, state.opt, state.extras)))


def contenders(
    work: Work,
    precision: Precision,
    shared: Shared,
    batch: dict[str, Tensor],
    *,
    modes: Sequence[str],
    meshes: Sequence[str],
    save: Callable[[str], bool] = everything,
) -> list[Contender]:
    """One for each of `modes` (compiled, eager, graph) and `meshes` (none, one-rank). save: what layers keep for the backward
    (see `Decoder`)."""
    return [
        _contender(work, precision, shared, batch, save, mode=mode, on_mesh=mesh == "one-rank")
        for mode in modes
        for mesh in meshes
    ]


def _contender(
    work: Work,
    precision: Precision,
    shared: Shared,
    batch: dict[str, Tensor],
    save: Callable[[str], bool],
    *,
    mode: str,
    on_mesh: bool,
) -> Contender:
    sh = Sharding(precision=precision)
    if on_mesh:
        mesh = make_mesh("dp=1,tp=1", device=batch["tokens"].device.type)
        sh = Sharding(mesh, standard_rules(mesh, sequence_parallel=True, store="dp"), precision=precision)
    graph, on_gpu = mode == "graph", batch["tokens"].is_cuda  # a recorded step reads nothing on the host
    model = Decoder(work.config, save=save, compile=mode == "compiled" or (graph and on_gpu))
    spec = shared.spec if on_mesh else None
    one = accumulate(model.loss, weights=model.weights, spec=spec)
    options: dict[str, Any] = {"sh": sh, "spec": spec, "donate": True, "check_finite": not graph}
    whole = train_step(model.loss, shared.optimizer, weights=model.weights, **options)
    whole = recorded(whole) if graph else whole

    def forward_backward(extras: Any) -> tuple[Tensor, Any, list[Tensor]]:
        now = sh if precision.fp8 is None else scaling.begin(sh, extras, spec=shared.spec)
        (loss, _), grads = one(shared.params, batch, Ctx(sh=now))
        extras = extras if precision.fp8 is None else scaling.end(now, extras)
        return loss, extras, [g for g in tree.leaves(grads) if g is not None]

    found: list[Tensor] = []  # gradients in the memory of the recording, which every play overwrites

    def kept(state: Any, batch: Any) -> tuple[Any, Any]:
        loss, extras, grads = forward_backward(state["extras"])
        found[:] = grads if on_gpu else []
        return {**state, "extras": extras}, {"loss": loss, "grads": [] if on_gpu else grads}

    whole_graph = [recorded(kept)] if graph else []

    def gradients() -> tuple[Tensor, list[Tensor]]:
        if whole_graph:
            state, metrics = whole_graph[0]({"params": shared.params, "extras": shared.extras}, batch)
            shared.extras = state["extras"]
            return metrics["loss"], found or metrics["grads"]
        loss, shared.extras, grads = forward_backward(shared.extras)
        return loss, grads

    def prepare() -> None:
        whole_graph.clear()  # its memory is nobody else's
        found.clear()
        shared.prepare()

    def step() -> Tensor:
        assert shared.state is not None
        shared.state, metrics = whole(shared.state, batch)
        return metrics["loss"]

    where = ", one-rank mesh" if on_mesh else ""
    rules = "TP, SP and FSDP rules on axes of size one" if on_mesh else "no mesh"
    notes = {
        "blocks": "each by torch.compile" if model.compile else "eager",
        "layout": rules,
        "optimizer": shared.note,
    }
    together = [part for part in FUSED if getattr(work.config, f"fused_{part}")]
    if together:
        notes["one product"] = ", ".join(together)
    if precision.fp8 is not None:
        notes["fp8"] = (
            f"{precision.fp8.recipe}, backend {precision.fp8.backend}, kept in bf16: {', '.join(precision.fp8.keep)}"
        )
    if graph:
        form = "a CUDA graph" if on_gpu else "a list of calls"
        notes["recorded"] = f"forward and backward, and the whole step, each as {form}"
    return Contender(f"fmegatron {mode}{where}", gradients, prepare, step, shared.held, notes=notes)
