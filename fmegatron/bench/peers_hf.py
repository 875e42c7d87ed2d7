"""Hugging Face transformers as a peer: its model, its loss, torch's fused AdamW and clipping."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from fmegatron import tree
from fmegatron.bench.ours import ADAMW, CLIP
from fmegatron.bench.timing import Contender, bytes_of
from fmegatron.bench.works import Work
from fmegatron.errors import UserError
from fmegatron.models import Decoder
from fmegatron.models.fused import unfuse, unfused
from fmegatron.models.hf import family_of, fields_of
from fmegatron.spec import params_of


def check(work: Work, precision: str, grads: str | None = None) -> None:
    """Raises UserError where transformers is missing, or cannot compute this model in this precision with gradients in
    this format."""
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise UserError(f"--peers hf needs transformers ({error}): pip install transformers") from None
    if precision.startswith("fp8"):
        raise UserError(f"--peers hf has no {precision}: leave hf out, or use --precision bf16")
    params = "float32" if precision == "fp32" else "bfloat16"
    if grads not in (None, params):
        raise UserError(f"--peers hf has gradients in the parameters' format, {params}, not {grads}: leave --grads out")
    fields_of(Decoder(work.config))


def contender(work: Work, params: Any, batch: dict[str, Tensor], *, compile: str = "model") -> Contender:
    """transformers' model with the weights of `params`, in their dtype.

    compile: "model" (one graph), "layers" (each layer) or "none".
    """
    model = model_of(work, params)
    dtype, device = next(model.parameters()).dtype, batch["tokens"].device
    run: Any = model
    if compile == "model":
        run = torch.compile(model, dynamic=False)
    elif compile == "layers":
        for layer in _layers_of(model):
            layer.compile(dynamic=False)
    trained: list[Any] = list(model.parameters())
    optimizer: Any = None
    master: list[Tensor] = []

    def forget() -> None:
        for p in trained:
            p.grad = None

    def backward() -> Tensor:
        forget()
        # its own shift is left out, since labels are shifted already
        loss = run(
            input_ids=batch["tokens"], labels=batch["labels"], shift_labels=batch["labels"], use_cache=False
        ).loss
        loss.backward()
        return loss.detach()

    def gradients() -> tuple[Tensor, list[Tensor]]:
        return backward(), [p.grad for p in trained if p.grad is not None]

    def prepare() -> None:
        nonlocal optimizer
        if dtype.itemsize < 4:
            master.extend(p.detach().float() for p in trained)
        updated = master or trained
        matrices = [x for x in updated if x.ndim > 1]
        others = [x for x in updated if x.ndim <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW([g for g in groups if g["params"]], **ADAMW, fused=True)

    def step() -> Tensor:
        loss = backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        if master:
            with torch.no_grad():
                for wide, p in zip(master, trained, strict=True):
                    assert p.grad is not None
                    wide.grad, p.grad = p.grad.float(), None
                optimizer.step()
                for wide in master:
                    wide.grad = None
                torch._foreach_copy_(trained, master)
        else:
            optimizer.step()
        forget()
        return loss

    def held() -> int:
        states = [] if optimizer is None else [x for s in optimizer.state.values() for x in s.values()]
        return bytes_of([*trained, *model.buffers(), *master, *states])

    transformers = importlib.import_module("transformers")
    how = {"model": "compiled as one graph", "layers": "each layer compiled", "none": "eager"}[compile]
    notes = {
        "versions": f"transformers {transformers.__version__}",
        "blocks": how,
        "attention": f"sdpa of torch {torch.__version__} on {device.type}",
        "optimizer": "torch.optim.AdamW(fused=True), clip_grad_norm_"
        + (", float32 master copy and moments" if dtype.itemsize < 4 else ""),
    }
    return Contender("transformers", gradients, prepare, step, held, forget, notes, peer=True)


def model_of(work: Work, params: Any) -> torch.nn.Module:
    """transformers' model with our weights, on their device and in their dtype."""
    transformers = importlib.import_module("transformers")
    first = tree.leaves(params)[0]
    fields = dict(fields_of(Decoder(work.config)))
    kind = fields.pop("model_type")
    config = transformers.AutoConfig.for_model(kind, **fields, attn_implementation="sdpa")
    make = transformers.AutoModelForCausalLM.from_config
    with torch.device(first.device):
        try:
            model = make(config, dtype=first.dtype)
        except TypeError:  # its name before version 5
            model = make(config, torch_dtype=first.dtype)
    lacking, unknown = model.load_state_dict(weights_of(work, params), strict=False)
    lacking = [name for name in lacking if not (name == "lm_head.weight" and work.config.tied)]
    if lacking or unknown:
        raise UserError(f"--peers hf: transformers has other weights than {work.name}: {[*lacking, *unknown][:3]}")
    return model.train()


def weights_of(work: Work, params: Any) -> dict[str, Tensor]:
    """{transformers' name: tensor} of our parameters."""
    config = unfused(work.config)
    spec = Decoder(config).spec()
    leaves = tree.named(unfuse(params, work.config) if config != work.config else params)
    declared = params_of(spec)
    parts: dict[str, list[tuple[int, int, Tensor]]] = {}
    for path, place in family_of(Decoder(config)).hf_map(config, spec).items():
        param = declared[path]
        order = [param.names.index(name) for group in place.groups for name in group]
        theirs = leaves[path].detach().permute(order).reshape(place.part_shape(param))
        parts.setdefault(place.name, []).append((place.start, place.dim, theirs))
    joined = {}
    for name, found in parts.items():
        found.sort(key=lambda part: part[0])
        joined[name] = torch.cat([x for *_, x in found], found[0][1]) if len(found) > 1 else found[0][2]
    return joined


def _layers_of(model: Any) -> list[torch.nn.Module]:
    """The blocks: the longest list of modules."""
    lists = [list(m) for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(lists, key=len)
