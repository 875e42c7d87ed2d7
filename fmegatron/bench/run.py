"""The command `fmegatron bench`."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from fmegatron.bench import ours, peers_hf, peers_megatron
from fmegatron.bench.chart import bars
from fmegatron.bench.kernels import profiled
from fmegatron.bench.report import Row, notes, profile_table, save, table, versions
from fmegatron.bench.settings import FUSED, MESHES, MODES, PEERS, PRECISIONS, BenchConfig, listed
from fmegatron.bench.timing import Contender, Phase, first, norm_of, peak_of, take_turns, waiter
from fmegatron.bench.works import Work, stated_peak, work_of
from fmegatron.errors import UserError
from fmegatron.job_model import remat_policy
from fmegatron.optim.moments import moments_of
from fmegatron.precision import dtype_name, dtype_of
from fmegatron.report import measure_matmul_flops


def run(config: BenchConfig) -> int:
    """Time the steps, print the table and save it; the exit code: 0, or 1 where a contender failed.

    Raises UserError, before anything is allocated, for settings that do not fit and for a peer that is not installed.
    """
    device = _device(config)
    if config.calibrate is not None:
        return _calibrate(config.calibrate, device)
    on_gpu = device.type == "cuda"
    fused = listed("--fused", config.fused, FUSED, empty=True)
    name = config.model or ("1.2b" if on_gpu else "tiny")
    work = work_of(name, batch=config.batch, seq=config.seq, layers=config.layers, fused=fused)
    modes = listed("--modes", config.modes or ("compiled,eager" if on_gpu else "eager"), MODES)
    meshes = listed("--meshes", config.meshes, MESHES)
    peers = listed("--peers", config.peers, PEERS, empty=True)
    precisions = listed("--precision", config.precision or ("bf16" if on_gpu else "fp32"), PRECISIONS)
    _check(config, work, precisions, peers, device)
    known = versions(device)
    print(f"{work.name}: {work.batch} × {work.seq} tokens, {work.flops / 1e12:.4g} TFLOP forward and backward")
    print(", ".join(f"{name} {value}" for name, value in known.items()), flush=True)
    rows: list[Row] = []
    failures: list[str] = []
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)

    def keep(more: Sequence[Row]) -> None:
        """Save what is known so far: a long run may be ended before its last step."""
        about = {"versions": known, "steps": config.steps, "failures": list(failures)}
        save(out / "bench.json", work, [*rows, *more], about)

    with contextlib.ExitStack() as stack:
        if "megatron" in peers:
            stack.enter_context(peers_megatron.session(device))
        for precision in precisions:
            rows += _measured(config, work, precision, modes, meshes, peers, device, failures, keep)
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
    keep([])
    title = f"One training step of {work.name}, {known['device']}"
    (out / "bench.svg").write_text(bars(rows, work, title=title), encoding="utf-8")
    _report(config, work, rows, failures)
    print(f"\nsaved {out / 'bench.json'} and {out / 'bench.svg'}")
    return 1 if failures else 0


def _calibrate(path: str, device: torch.device) -> int:
    """Measures the machine for `fmegatron plan`."""
    from fmegatron.bench.calibrate import calibrate, report
    from fmegatron.plan.hardware import save

    if not path.endswith(".toml"):
        raise UserError(f"--calibrate {path}: name the file NAME.toml")
    if not (folder := Path(path).absolute().parent).is_dir():
        raise UserError(f"--calibrate {path}: there is no folder {folder}: make it first")
    machine = calibrate(device)
    save(machine, path)
    print(f"{report(machine)}\nsaved {path}: fmegatron plan --gpu {path}")
    return 0


def _check(
    config: BenchConfig, work: Work, precisions: Sequence[str], peers: Sequence[str], device: torch.device
) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("bench measures one rank: start it without torchrun")
    for flag, value, least in (("--steps", config.steps, 1), ("--warmup", config.warmup, 0)):
        if value < least:
            raise UserError(f"{flag} {value} must be {least} or more")
    for precision in precisions:
        remat_policy(cast(Any, config), work.config)
        # transformers takes no part where it has no such products
        if "hf" in peers and not (precision.startswith("fp8") and len(precisions) > 1):
            peers_hf.check(work, precision, config.grads)
        if "megatron" in peers:
            peers_megatron.check(work, precision, device, config.grads)


def _device(config: BenchConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: torch sees no GPU here: leave it out")
    return torch.device(config.device or ("cuda" if torch.cuda.is_available() else "cpu"))


# ------------------------------------------------------------------------------------------------------------ measuring


def _measured(
    config: BenchConfig,
    work: Work,
    precision: str,
    modes: Sequence[str],
    meshes: Sequence[str],
    peers: Sequence[str],
    device: torch.device,
    failures: list[str],
    keep: Callable[[Sequence[Row]], None],
) -> list[Row]:
    grads = None if config.grads is None else dtype_of(config.grads)
    policy = ours.precision_of(precision, grads)
    batch = ours.tokens_of(work, config.seed, device)
    moments = moments_of(config.moments)
    shared = ours.Shared(work, policy, config.seed, device, moments=moments, master=config.master)
    save = remat_policy(cast(Any, config), work.config)
    found = ours.contenders(work, policy, shared, batch, modes=modes, meshes=meshes, save=save)
    if "megatron" in peers:
        with _surviving("megatron", failures):
            options = {"optimizer": config.megatron_optimizer, "options": config.megatron_options}
            found.append(peers_megatron.contender(work, precision, shared.params, batch, grads=grads, **options))
    if "hf" in peers and not precision.startswith("fp8"):
        with _surviving("hf", failures):
            how = config.hf_compile or ("model" if device.type == "cuda" else "none")
            found.append(peers_hf.contender(work, shared.params, batch, compile=how))
    peak = _peak(config, device, precision, policy.compute_dtype)
    rows, alive = _backward(config, found, precision, peak, device, failures, keep)
    if config.whole:
        _whole(config, alive, rows, device, failures, keep)
    if config.profile:
        # compiled and eager each once: the mesh has the same kernels
        for contender in [c for c in alive if c.peer or not c.name.endswith("mesh")]:
            with _surviving(f"profile of {contender.name}", failures):
                call = contender.step if rows[contender.name].whole is not None else contender.gradients
                rows[contender.name].profile = profiled(call, device)
                contender.forget()
    return list(rows.values())


def _backward(
    config: BenchConfig,
    found: Sequence[Contender],
    precision: str,
    peak: float,
    device: torch.device,
    failures: list[str],
    keep: Callable[[Sequence[Row]], None],
) -> tuple[dict[str, Row], list[Contender]]:
    """Forward and backward of all: rows without whole steps, and those that did not fail."""
    wait, rows, alive = waiter(device), {}, []
    for contender in found:
        with _surviving(contender.name, failures):
            (loss, grads), seconds = first(contender.gradients, wait)
            values = float(loss), norm_of(grads)
            contender.notes["gradients"] = ", ".join(sorted({dtype_name(g.dtype) for g in grads}))
            del loss, grads
            contender.forget()
            phase = _settled(config, contender, contender.gradients, seconds, device)
            rows[contender.name] = Row(
                contender.name, precision, contender.peer, *values, phase, None, peak, contender.notes
            )
            alive.append(contender)
            print(f"  {contender.name}: first step {seconds:.1f} s, loss {values[0]:.5f}", flush=True)
    by_name = {c.name: c for c in alive}

    def finished(samples: dict[str, list[float]]) -> None:
        for name, taken in samples.items():
            rows[name].backward.samples = taken
        keep([rows[name] for name in samples])

    calls: dict[str, Callable[[], Any]] = {c.name: c.gradients for c in alive}
    failed = _failing(failures)
    samples = take_turns(calls, config.steps, wait, lambda name: by_name[name].forget(), failed, finished)
    _show("forward and backward", {name: rows[name].backward for name in samples})
    return {name: rows[name] for name in samples}, [by_name[name] for name in samples]


def _whole(
    config: BenchConfig,
    alive: Sequence[Contender],
    rows: dict[str, Row],
    device: torch.device,
    failures: list[str],
    keep: Callable[[Sequence[Row]], None],
) -> None:
    """Whole steps of all, entered into their rows."""
    wait, ready, phases = waiter(device), [], {}
    for contender in alive:
        with _surviving(f"whole step of {contender.name}", failures):
            contender.prepare()
            _, seconds = first(contender.step, wait)
            phases[contender.name] = _settled(config, contender, contender.step, seconds, device)
            ready.append(contender)

    def finished(samples: dict[str, list[float]]) -> None:
        for name, row in rows.items():
            row.whole = phases[name] if name in samples else None
            if row.whole is not None:
                row.whole.samples = samples[name]
        keep(list(rows.values()))

    calls: dict[str, Callable[[], Any]] = {c.name: c.step for c in ready}
    samples = take_turns(calls, config.steps, wait, failed=_failing(failures), finished=finished)
    _show("whole steps", {name: phases[name] for name in samples})


def _settled(
    config: BenchConfig, contender: Contender, call: Callable[[], Any], seconds: float, device: torch.device
) -> Phase:
    """A phase with its peak of memory, after the warm-up."""
    for _ in range(config.warmup):
        call()
        contender.forget()
    phase = Phase(first=seconds, peak=peak_of(call, contender.held(), device))
    contender.forget()
    return phase


@contextlib.contextmanager
def _surviving(what: str, failures: list[str]) -> Iterator[None]:
    """A contender that fails, for want of memory above all, is left out and told; the others go on."""
    try:
        yield
    except Exception as error:
        _failing(failures)(what, error)


def _failing(failures: list[str]) -> Callable[[str, Exception], None]:
    def failed(what: str, error: Exception) -> None:
        traceback.print_exception(error)
        failures.append(f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        print(f"  {failures[-1]}: left out", file=sys.stderr, flush=True)
        error.__traceback__ = None  # it holds what the failed step had allocated
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    return failed


def _show(what: str, phases: dict[str, Phase]) -> None:
    """Medians at once, lest a later failure takes them away."""
    print(f"  {what}: " + ", ".join(f"{name} {phase.median:.1f} ms" for name, phase in phases.items()), flush=True)


def _peak(config: BenchConfig, device: torch.device, precision: str, dtype: torch.dtype) -> float:
    """FLOP/s that utilisation refers to."""
    if config.peak_tflops is not None:
        return 1e12 * config.peak_tflops
    stated = stated_peak(torch.cuda.get_device_name(device), precision) if device.type == "cuda" else None
    return measure_matmul_flops(device, dtype) if stated is None else stated


# ------------------------------------------------------------------------------------------------------------- reporting


def _report(config: BenchConfig, work: Work, rows: Sequence[Row], failures: Sequence[str]) -> None:
    print()
    print(table(rows, work))
    print()
    peaks = ", ".join(f"{p} {row.peak / 1e12:.4g}" for p, row in {row.precision: row for row in rows}.items())
    print(
        f"medians of {config.steps} rounds; ÷ ref: median over rounds of the ratio to Megatron's time, else to another"
    )
    print(f"peer's; peak in TFLOP/s: {peaks}; GiB: most memory, parameters, gradients and state of a row included")
    print(notes(rows))
    if any(row.profile is not None for row in rows):
        print()
        print(profile_table(rows))
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
