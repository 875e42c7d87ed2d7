"""`fmegatron plan`: memory, time and communication of layouts, and the fastest ones, before any GPU is asked for."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from fmegatron.config import BatchConfig, ExpertConfig, ModelOverrides, TrainConfig
from fmegatron.errors import UserError

UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True)
class PlanConfig:
    """The fastest layouts of a model on GPUs that need not be there: what fits, how fast it would be, where time and memory go.

    With --layout one layout is explained. Runs on any machine, in seconds; nothing is allocated.
    """

    model: str | None = None
    """Preset, as for train: llama3-70b, deepseek-v3 and others, which the message for a wrong name lists."""
    init_from: str | None = None
    """Folder of a Hugging Face model, in place of --model."""
    model_overrides: ModelOverrides = field(default_factory=ModelOverrides)
    moe: ExpertConfig = field(default_factory=ExpertConfig)
    mtp: int | None = None
    """Prediction modules behind the layers, as for train."""
    gpus: int = 8
    """How many GPUs."""
    gpu: str = "h100"
    """Their kind, by the table: h100, h200, h100-pcie, a100, b200, gb200, l40s; or a file NAME.toml of `fmegatron bench --calibrate`."""
    seq: int = 8192
    """Tokens of a sequence."""
    batch: int | None = None
    """Sequences of a step; None: as --batch-tokens says."""
    batch_tokens: str = "4M"
    """Tokens of a step, K and M being 1024 and 1024² of them: rounded down to whole sequences."""
    mesh: str | None = None
    """Explain this layout in place of a search: axes of ranks, as for train, such as pp=2,dp=4,tp=8; with the flags below."""
    layout: str | None = None
    """Explain the layout of this line, such as "pp=2,dp=4,tp=8 sp zero=1 micro=16 remat=attention", as tables show them."""
    sp: bool = False
    """With --mesh: sequence parallelism."""
    zero: int = 0
    """With --mesh: stage of ZeRO."""
    cp: Literal["gather", "ring", "ulysses", "ulysses+ring"] = "gather"
    """With --mesh: how attention reads a sequence on cp."""
    ep: int = 1
    """With --mesh: ranks over which experts lie."""
    etp: int = 1
    """With --mesh: ranks that hold parts of each expert."""
    microbatches: int = 1
    """With --mesh: microbatches of a step."""
    schedule: str = "1f1b"
    """With --mesh: schedule of a pipeline."""
    virtual: int | None = None
    """With --mesh: stages on each rank of a pipeline."""
    remat: str = "everything"
    """With --mesh: what layers keep for the backward, as for train."""
    microbatch_overlap: Literal["none", "pairs", "1f1b"] = "none"
    """With --mesh or --layout: which microbatches compute while tokens of another one are on their way to experts, as for train."""
    precision: Literal["bf16", "fp32", "fp8-tensorwise", "fp8-rowwise", "fp8-blockwise"] = "bf16"
    """Of products. Parameters are in bf16 with a master copy in fp32, unless it is fp32."""
    grads: Literal["float32", "bfloat16"] = "float32"
    """Format in which gradients are summed."""
    wire: Literal["bfloat16"] | None = None
    """Format in which gradients travel between ranks, as train's --precision.wire; None: that of their sums."""
    moments: Literal["float32", "bfloat16", "float8"] = "float32"
    """Format of the optimizer's moments."""
    offload_optimizer: bool = False
    """The optimizer's state in host memory."""
    top: int = 8
    """How many layouts to show."""
    json: bool = False
    """Print JSON."""


def run(config: PlanConfig) -> int:
    """Prints the plan. Raises UserError for settings that mean nothing, and where nothing fits."""
    import torch

    from fmegatron.fp8 import Fp8
    from fmegatron.job_model import model_config, model_name
    from fmegatron.models import Decoder
    from fmegatron.optim.moments import moments_of
    from fmegatron.plan import Cluster, Model, Setting, estimate, hardware, plan, report
    from fmegatron.precision import Precision
    from fmegatron.testing.layout import Layout

    if config.gpus < 1 or config.seq < 1 or config.top < 1:
        raise UserError(f"--gpus {config.gpus} --seq {config.seq} --top {config.top}: each must be 1 or more")
    rows = rows_of(config)
    train = TrainConfig(
        model=config.model or (None if config.init_from else "llama3-8b"),
        init_from=config.init_from,
        model_overrides=config.model_overrides,
        moe=config.moe,
        mtp=config.mtp,
        batch=BatchConfig(size=rows, seq_len=config.seq),
    )
    sizes = model_config(train, None)
    model, cluster = Model(Decoder(sizes)), Cluster(hardware(config.gpu), config.gpus)
    half = torch.float32 if config.precision == "fp32" else torch.bfloat16
    fp8 = Fp8(config.precision.removeprefix("fp8-")) if config.precision.startswith("fp8") else None  # type: ignore[arg-type]
    grads = torch.float32 if config.grads == "float32" or half == torch.float32 else torch.bfloat16
    wire = None if config.wire is None else torch.bfloat16
    precision = Precision(params=half, reduce=None if grads == torch.float32 else grads, fp8=fp8, wire=wire)
    moments = moments_of(config.moments)
    master = None if half == torch.float32 else torch.float32
    flags = model_flags(config, model_name(train))
    if config.layout is not None and config.mesh is not None:
        raise UserError(f"--layout {config.layout} and --mesh {config.mesh}: give one of them")
    if config.layout is not None or config.mesh is not None:
        layout = Layout.parse(config.layout) if config.layout is not None else _layout(config)
        beside = config.microbatch_overlap
        setting = Setting(layout, rows, config.seq, precision, moments, master, config.offload_optimizer, beside)
        found = estimate(model, setting, cluster)
        if config.json:
            print(report.as_json([found], flags, model))
            return 0
        print(report.explained(model, found))
        print("\n" + "\n".join(report.honesty(found)) + "\n\n" + report.command(setting, flags))
        return 0
    if config.microbatch_overlap != "none":
        raise UserError(
            f"--microbatch-overlap {config.microbatch_overlap} goes with one layout: add --layout with a line of the table, or leave it out"
        )
    best = plan(
        model,
        cluster,
        seq=config.seq,
        rows=rows,
        precision=precision,
        moments=moments,
        master=master,
        offload=config.offload_optimizer,
        top=config.top,
    )
    if config.json:
        print(report.as_json(best.estimates, flags))
        return 0
    print(
        f"{model_name(train)}: {model.parameters / 1e9:.2f}B parameters, {rows} sequences of {config.seq} tokens a step, on {config.gpus} × "
        f"{cluster.hardware.name}, {config.precision}"
    )
    print(report.table(best))
    tried = ", ".join(f"{n} {what}" for what, n in sorted(best.tried.items()))
    print(f"\nlooked at: {tried}")
    if lines := report.lost(best):
        print("why the others lost, in parts of the best step:\n" + "\n".join(lines))
    print("\n" + "\n".join(report.honesty(best.best)))
    print(
        "\nTrain with the first (on as many processes, under torchrun):\n  " + report.command(best.best.setting, flags)
    )
    return 0


def rows_of(config: PlanConfig) -> int:
    """Sequences of a step. Raises UserError for text that is no number of tokens, and fewer than one sequence."""
    if config.batch is not None:
        if config.batch < 1:
            raise UserError(f"--batch {config.batch} must be 1 or more")
        return config.batch
    text = config.batch_tokens.strip().upper().replace(",", "").replace("_", "")
    unit = UNITS.get(text[-1:], 1)
    try:
        tokens = float(text[:-1] if unit > 1 else text) * unit
    except ValueError:
        raise UserError(
            f"--batch-tokens {config.batch_tokens} is no number of tokens: use such as 4M or 524288"
        ) from None
    if not config.seq <= tokens < float("inf"):
        raise UserError(
            f"--batch-tokens {config.batch_tokens} is less than one sequence of --seq {config.seq}: use more"
        )
    return int(tokens // config.seq)


def model_flags(config: PlanConfig, name: str) -> list[str]:
    """The flags that name the model."""
    found = [f"--init-from {config.init_from}" if config.init_from else f"--model {name}"]
    found += [] if config.mtp is None else [f"--mtp {config.mtp}"]
    for prefix, part in (("model-overrides", config.model_overrides), ("moe", config.moe)):
        for f in dataclasses.fields(part):
            value = getattr(part, f.name)
            if value is not None:
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
                found.append(f"--{prefix}.{f.name.replace('_', '-')} {shown}")
    return found


def _layout(config: PlanConfig):  # type: ignore[no-untyped-def]
    from fmegatron.testing.layout import Layout

    assert config.mesh is not None
    return Layout(
        config.mesh,
        sp=config.sp,
        zero=config.zero,
        ep=config.ep,
        etp=config.etp,
        micro=config.microbatches,
        schedule=config.schedule,
        virtual=config.virtual,
        remat=config.remat.replace(",", "+"),
        context=config.cp,
    )
