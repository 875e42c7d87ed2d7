"""`fmegatron bench`: what it counts, what it prints, and that its peers compute the same function."""

import dataclasses
import importlib
import json
import math
import statistics
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fmegatron import tree
from fmegatron.bench import kernels, ours, peers_hf, peers_megatron, report, run, works
from fmegatron.bench.settings import BenchConfig
from fmegatron.bench.timing import Phase, bytes_of, norm_of, paired_ratio, take_turns
from fmegatron.bench.works import WORKS, Work, stated_peak, work_of
from fmegatron.cli import main
from fmegatron.errors import UserError
from fmegatron.models import PRESETS, Decoder, DecoderConfig

CPU = torch.device("cpu")
LLAMA = Work("llama", DecoderConfig(vocab=96, embed=32, layers=2, heads=4, kv_heads=2, mlp=48, max_seq=32), 2, 16)
GPT2 = Work(
    "gpt2",
    dataclasses.replace(PRESETS["gpt2"], vocab=96, embed=32, layers=2, heads=4, kv_heads=4, head=8, mlp=48),
    2,
    16,
)
TIED = Work("tied", dataclasses.replace(LLAMA.config, tied=True), 2, 16)

# ------------------------------------------------------------------------------------------------------- operations


def test_operations_of_the_two_sizes_by_hand():
    # 1.21 B: a layer has q, k, v (2048 × 48 · 128), o (2048²) and three matrices of 2048 × 8192
    assert works.matrix_parameters(WORKS["1.2b"].config) == 16 * (12_582_912 + 4_194_304 + 50_331_648) + 67_108_864
    assert WORKS["1.2b"].flops == 16_384 * (6 * 1_140_850_688 + 6 * 16 * 4096 * 2048)
    # 3.02 B: 24 query and 8 kv heads of 128
    assert works.matrix_parameters(WORKS["3b"].config) == 28 * (15_728_640 + 9_437_184 + 75_497_472) + 100_663_296
    assert WORKS["3b"].flops == 16_384 * (6 * 2_919_235_584 + 6 * 28 * 4096 * 3072)
    # the published pair of time and rate: 225 ms are 556 TFLOP/s and 579 ms are 556
    assert WORKS["1.2b"].flops / 0.225 / 1e12 == pytest.approx(556, abs=1.5)
    assert WORKS["3b"].flops / 0.579 / 1e12 == pytest.approx(556, abs=1.5)


@pytest.mark.parametrize("name", ["1.2b", "3b", "8b", "gpt2-124m", "tiny", "mistral-7b-v0.1", "gemma2-2b"])
def test_operations_agree_with_the_models_own(name):
    work = work_of(name)
    own = Decoder(work.config).flops_per_token(work.seq) * work.tokens
    assert work.flops == pytest.approx(own, rel=1e-12)


@pytest.mark.parametrize("work", [LLAMA, GPT2], ids=lambda w: w.name)
def test_products_agree_with_torchs_counter(work):
    """Forward alone: torch counts 2 per multiply-add of what runs, in products outside attention."""
    shared = ours.Shared(work, ours.precision_of("fp32", None), 0, CPU)
    tokens = ours.tokens_of(work, 0, CPU)["tokens"]
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Decoder(work.config).logits(shared.params, tokens)
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    products = sum(n for op, n in counts.items() if any(p in op for p in ("aten.mm", "aten.addmm", "aten.bmm")))
    assert products == 2 * work.tokens * works.matrix_parameters(work.config)


def test_stated_peaks():
    assert stated_peak("NVIDIA H200", "bf16") == 989e12
    assert stated_peak("NVIDIA H200", "fp8-delayed") == 1979e12
    assert stated_peak("NVIDIA H100 80GB HBM3", "bf16") == 989e12
    assert stated_peak("NVIDIA H100 PCIe", "bf16") == 756e12
    assert stated_peak("NVIDIA H200", "fp32") is None and stated_peak("another", "bf16") is None


def test_works_take_other_sizes_and_refuse_bad_ones():
    work = work_of("tiny", batch=2, seq=2048, layers=1)
    assert (work.batch, work.seq, work.config.layers, work.config.max_seq) == (2, 2048, 1, 2048)
    assert work_of("llama3-8b").seq == 4096
    for arguments, word in (
        (("tinny",), "did you mean tiny"),
        (("gpt2", 1, 4096), "--seq 4096"),
        (("tiny", 0), "--batch 0"),
    ):
        name, *sizes = arguments
        with pytest.raises(UserError, match=word):
            work_of(name, **dict(zip(("batch", "seq"), sizes, strict=False)))
    fused = work_of("tiny", fused=("gate_up",)).config
    assert (
        fused.fused_gate_up
        and not fused.fused_qkv
        and works.flops(fused, 1, 8) == works.flops(work_of("tiny").config, 1, 8)
    )
    with pytest.raises(UserError, match="--fused gate_up: gpt2 has no gate"):
        work_of("gpt2", fused=("gate_up",))


# ------------------------------------------------------------------------------------------------------------ turns


def test_contenders_take_turns_in_changing_order():
    said, now = [], [0.0]

    def call(name, seconds):
        def run():
            said.append(name)
            now[0] += seconds

        return run

    calls = {"a": call("a", 0.25), "b": call("b", 0.5), "c": call("c", 1.0)}
    samples = take_turns(calls, 3, lambda: None, clock=lambda: now[0])
    assert "".join(said) == "abccbaabc"
    assert samples == {"a": [250.0] * 3, "b": [500.0] * 3, "c": [1000.0] * 3}


def test_a_contender_that_fails_loses_its_turns():
    left, told = [2], []

    def bad():
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError("no room")

    samples = take_turns(
        {"bad": bad, "good": lambda: None}, 4, lambda: None, failed=lambda n, e: told.append((n, str(e)))
    )
    assert told == [("bad", "no room")] and list(samples) == ["good"] and len(samples["good"]) == 4
    with pytest.raises(MemoryError):
        left[0] = 1
        take_turns({"bad": bad}, 1, lambda: None)


def test_every_round_is_told_of_at_once():
    told = []
    take_turns({"a": lambda: None}, 3, lambda: None, finished=lambda samples: told.append(len(samples["a"])))
    assert told == [1, 2, 3]


def test_ratios_are_of_pairs():
    # the medians of each alone would say 2 / 3
    assert paired_ratio([1.0, 9.0, 2.0], [1.0, 3.0, 4.0]) == 1.0


def test_bytes_count_a_storage_once():
    x = torch.zeros(6, 4)
    assert bytes_of([x, x[1:], x.T, 3, None, torch.zeros(2, dtype=torch.int64)]) == 96 + 16
    assert norm_of([torch.full((3,), 2.0), torch.full((4,), 1.0)]) == pytest.approx(4.0)


# --------------------------------------------------------------------------------------------------- kinds of kernels


@pytest.mark.parametrize(
    "name, kind",
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN", kernels.GEMM),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>", kernels.GEMM),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x256x64", kernels.GEMM),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", kernels.GEMM),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_7_64x128x128", kernels.ATTENTION),
        ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", kernels.ATTENTION),
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90>>", kernels.ATTENTION),
        ("void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits>", kernels.NORM),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2", kernels.NORM),
        ("_norm_backward", kernels.NORM),
        ("aten::linalg_vector_norm", kernels.OPTIMIZER),
        ("triton_poi_fused_mul_silu_4", kernels.ACTIVATION),
        ("triton_poi_fused__to_copy_mul_sigmoid_sub_7", kernels.ACTIVATION),
        ("void transformer_engine::gated_kernels::cast_bf16_gated_kernel<true>", kernels.ACTIVATION),
        ("void transformer_engine::fused_rope_forward_kernel<__nv_bfloat16>", kernels.ROTARY),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<L2Norm>", kernels.OPTIMIZER),
        ("void transformer_engine::multi_tensor_adam::AdamFunctorMasterParamRemainder", kernels.OPTIMIZER),
        ("cross_entropy_kernel", kernels.LOSS),
        ("triton_per_fused__log_softmax_sub_3", kernels.LOSS),
        ("Memcpy DtoD (Device -> Device)", kernels.COPIES),
        ("triton_poi_fused__to_copy_clone_transpose_1", kernels.COPIES),
        ("void at::native::bfloat16_copy_kernel_cuda", kernels.COPIES),
        ("triton_poi_fused__to_copy_add_mul_9", kernels.OTHER),
        ("void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<c10::BFloat16>>", kernels.OTHER),
        ("aten::mm", kernels.GEMM),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kernels.kind_of(name) == kind


def test_a_profile_adds_up():
    x = torch.randn(64, 64)
    found = kernels.profiled(lambda: torch.softmax(x @ x, -1).sum(), CPU)
    assert set(found.kinds) == set(kernels.KINDS)
    assert found.kinds[kernels.GEMM] > 0 and found.kinds[kernels.LOSS] > 0
    assert found.total == pytest.approx(sum(ms for ms, *_ in found.slowest))
    assert found.slowest == sorted(found.slowest, reverse=True)


# --------------------------------------------------------------------------------------------------------- the command

COMMAND = ["bench", "--model", "tiny", "--layers", "1", "--batch", "2", "--seq", "16", "--steps", "3", "--warmup", "0"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """(what it prints, bench.json, bench.svg) with all that runs on a CPU and without further packages."""
    out = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        text: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: text.append(" ".join(map(str, words))))
        assert main([*COMMAND, "--peers", "hf", "--device", "cpu", "--profile", "--out", str(out)]) == 0
    saved = json.loads((out / "bench.json").read_text())
    return "\n".join(text), saved, (out / "bench.svg").read_text()


def test_every_figure_follows_from_the_samples(outcome):
    _, saved, _ = outcome
    rows = {row["name"]: row for row in saved["rows"]}
    assert list(rows) == ["fmegatron eager", "fmegatron eager, one-rank mesh", "transformers"]
    about, reference = saved["work"], rows["transformers"]
    config = dataclasses.replace(PRESETS["tiny"], layers=1)
    # embed 192, 6 query and 2 kv heads of 32, mlp 512, vocabulary 4096; 2 × 16 tokens
    by_hand = 32 * (6 * (192 * 512 + 192 * 3 * 512 + 192 * 4096) + 6 * 1 * 16 * 192)
    assert about["tokens"] == 32 and about["flops"] == by_hand == works.flops(config, 2, 16)
    for row in rows.values():
        figures = row["figures"]
        for kind in ("backward", "whole"):
            samples = row[kind]["samples"]
            assert len(samples) == 3 and all(ms > 0 for ms in samples) and row[kind]["first"] > 0
            assert figures[f"{kind}_ms"] == statistics.median(samples)
            pairs = [a / b for a, b in zip(samples, reference[kind]["samples"], strict=True)]
            assert figures[f"{kind}_ratio"] == statistics.median(pairs)
            assert row[kind]["peak"] is None and figures[f"{kind}_gib"] is None  # not known on a CPU
        assert figures["tflops"] == pytest.approx(by_hand / figures["backward_ms"] / 1e9)
        assert figures["utilisation"] == pytest.approx(1e12 * figures["tflops"] / row["peak"])
        assert figures["tokens_per_second"] == pytest.approx(32e3 / figures["whole_ms"])
        assert row["notes"]["gradients"] == "float32"
    assert saved["versions"]["torch"] == str(torch.__version__) and saved["failures"] == []


def test_contenders_have_one_loss_and_one_gradient(outcome):
    _, saved, _ = outcome
    losses, norms = ([row[name] for row in saved["rows"]] for name in ("loss", "norm"))
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6) and norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert losses[0] == pytest.approx(math.log(4096), rel=0.02)  # of tokens drawn at random


def test_the_table_and_the_bars_show_what_is_saved(outcome):
    text, saved, picture = outcome
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in lines[:5]}) == 1  # aligned
    for row, shown in zip(saved["rows"], cells[2:5], strict=True):
        figures = row["figures"]
        named = dict(zip(cells[0][:3], shown, strict=False))
        assert named[""] == row["name"] and named["fwd+bwd ms"] == f"{figures['backward_ms']:.1f}"
        assert shown[9] == f"{figures['tokens_per_second']:,.0f}" and shown[11] == f"{row['loss']:.5f}"
    assert "transformers fp32: versions: transformers " in text and "GEMM" in text
    root = ElementTree.fromstring(picture)
    widths = [float(r.get("width")) for r in root.iter("{http://www.w3.org/2000/svg}rect")][1:]
    times = [row[kind]["samples"] for row in saved["rows"] for kind in ("whole", "backward")]
    ratios = [width / statistics.median(samples) for width, samples in zip(widths, times, strict=True)]
    assert ratios == pytest.approx([ratios[0]] * 6, rel=0.05)


def test_profiles_are_saved(outcome):
    _, saved, _ = outcome
    profiles = {row["name"]: row["profile"] for row in saved["rows"] if row["profile"]}
    assert list(profiles) == ["fmegatron eager", "transformers"]  # the mesh runs the same kernels
    for profile in profiles.values():
        assert profile["kinds"]["GEMM"] > 0 and profile["kinds"]["optimizer and clipping"] > 0
        assert profile["attention"]


def test_a_run_that_is_ended_leaves_its_rows(monkeypatch, tmp_path):
    """Samples are saved behind every round: here those of forward and backward, before the optimizer's first step."""

    def ended(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(ours.Shared, "prepare", ended)
    with pytest.raises(KeyboardInterrupt):
        run.run(
            BenchConfig(model="tiny", layers=1, batch=2, seq=16, steps=2, warmup=0, meshes="none", out=str(tmp_path))
        )
    (row,) = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert len(row["backward"]["samples"]) == 2 and row["whole"] is None


def test_a_failing_contender_leaves_the_others(monkeypatch, tmp_path, capsys):
    def broken(*arguments, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(peers_hf, "contender", broken)
    assert (
        main([*COMMAND, "--steps", "1", "--peers", "hf", "--no-whole", "--meshes", "none", "--out", str(tmp_path)]) == 1
    )
    saved = json.loads((tmp_path / "bench.json").read_text())
    assert [row["name"] for row in saved["rows"]] == ["fmegatron eager"] and saved["rows"][0]["whole"] is None
    assert saved["failures"] == ["hf: RuntimeError: out of memory"]
    assert "hf: RuntimeError: out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--model", "tinny"], "--model tinny is not known; did you mean tiny?"),
        (["--peers", "hf,megatrn"], "--peers megatrn is not known; did you mean megatron?"),
        (["--precision", "bf15"], "--precision bf15 is not known; did you mean bf16?"),
        (["--modes", "eager,compile"], "--modes compile is not known; did you mean compiled?"),
        (["--meshes", ","], "--meshes ',' names nothing"),
        (["--model", "tiny", "--peers", "hf", "--precision", "fp8-delayed"], "--peers hf has no fp8-delayed"),
        (["--model", "tiny", "--remat", "atention"], "'atention' is no computation"),
        (["--model", "tiny", "--steps", "0"], "--steps 0 must be 1 or more"),
        (["--model", "tiny", "--peers", "hf", "--grads", "bfloat16", "--device", "cpu"], "leave --grads out"),
    ],
)
def test_settings_that_do_not_fit_are_refused(arguments, words, capsys):
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr().err
    assert any(word in said for word in words.split("|")) and said.count("\n") == 1


@pytest.mark.parametrize(
    "peer, package, words",
    [
        ("hf", "transformers", "--peers hf needs transformers"),
        ("megatron", "megatron.core", "--peers megatron needs megatron.core on cpu"),
    ],
)
def test_a_missing_peer_is_named(monkeypatch, capsys, peer, package, words):
    found = importlib.import_module

    def without(name, *arguments):
        if name == package:
            raise ImportError(f"No module named {name!r}")
        return found(name, *arguments)

    monkeypatch.setattr(importlib, "import_module", without)
    assert main([*COMMAND, "--peers", peer, "--device", "cpu"]) == 2
    said = capsys.readouterr().err
    assert words in said and "pip install" in said and said.count("\n") == 1


def test_bench_runs_on_one_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="without torchrun"):
        run.run(BenchConfig(device="cpu"))


# --------------------------------------------------------------------------------------------------------------- peers


@pytest.fixture
def scaled(monkeypatch):
    """With a large eps an update depends on the gradients' scale, so that a missing or another clipping shows."""
    monkeypatch.setitem(ours.ADAMW, "eps", 1e-2)
    monkeypatch.setitem(ours.ADAMW, "lr", 1e-3)


def made(work, peers):
    """Contenders of this library and of others, with the same weights and tokens."""
    policy = ours.precision_of("fp32", None)
    shared, batch = ours.Shared(work, policy, 3, CPU), ours.tokens_of(work, 3, CPU)
    found = ours.contenders(work, policy, shared, batch, modes=["eager"], meshes=["none"])
    return [*found, *(peer(shared.params, batch) for peer in peers)]


def same(contenders):
    """One loss, one gradient norm, and the same losses over four whole steps: clipping and AdamW agree too."""
    first, *others = contenders
    loss, grads = first.gradients()
    assert norm_of(grads) > 1.2 * ours.CLIP
    for other in others:
        theirs, gradients = other.gradients()
        assert float(theirs) == pytest.approx(float(loss), rel=1e-6)
        assert norm_of(gradients) == pytest.approx(norm_of(grads), rel=1e-6)
        other.forget()
    curves = []
    for contender in contenders:
        contender.prepare()
        curves.append([float(contender.step()) for _ in range(4)])
        held = contender.held()
        assert held == pytest.approx(contenders[0].held(), rel=0.02)  # parameters and two moments; counts, tables
    assert curves[0][-1] < curves[0][0] - 1e-2
    for curve in curves[1:]:
        assert curve == pytest.approx(curves[0], rel=1e-6)


@pytest.mark.parametrize("recipe", ["fp8-tensorwise", "fp8-delayed"])
def test_fp8_contenders_are_near_bfloat16(recipe):
    exact, rounded = (
        ours.contenders(
            LLAMA,
            ours.precision_of(name, None),
            ours.Shared(LLAMA, ours.precision_of(name, None), 3, CPU),
            ours.tokens_of(LLAMA, 3, CPU),
            modes=["eager"],
            meshes=["none"],
        )[0]
        for name in ("bf16", recipe)
    )
    for _ in range(2):  # "delayed" has a history in the second
        (loss, grads), (other, theirs) = exact.gradients(), rounded.gradients()
        assert {g.dtype for g in theirs} == {torch.bfloat16}
        assert 0 < abs(float(other) - float(loss)) < 0.01 * float(loss)
        assert norm_of(theirs) == pytest.approx(norm_of(grads), rel=0.1)
    assert rounded.notes["fp8"].startswith(recipe.removeprefix("fp8-"))


@pytest.mark.parametrize("work", [LLAMA, GPT2, TIED], ids=lambda w: w.name)
def test_transformers_trains_the_same(work, scaled):
    same(made(work, [lambda params, batch: peers_hf.contender(work, params, batch, compile="none")]))


@pytest.mark.parametrize("work", [LLAMA, GPT2, TIED], ids=lambda w: w.name)
def test_megatron_trains_the_same(work, scaled):
    pytest.importorskip("megatron.core")
    peers_megatron.check(work, "fp32", CPU)
    with peers_megatron.session(CPU):
        same(made(work, [lambda params, batch: peers_megatron.contender(work, "fp32", params, batch)]))


def test_megatrons_layout_of_the_weights():
    """Row by row, without Megatron: queries of a kv head, its key, its value; gate above up; norms in the products."""
    shared = ours.Shared(LLAMA, ours.precision_of("fp32", None), 0, CPU)
    theirs = peers_megatron.weights_of(LLAMA, shared.params, fused_norms=True)
    ours_ = tree.named(shared.params)
    qkv = theirs["decoder.layers.1.self_attention.linear_qkv.weight"].view(
        2, 4, 8, 32
    )  # kv heads, q q k v, head, embed
    assert torch.equal(qkv[1, :2], ours_["layers.1.q"][:, 1].permute(1, 2, 0))
    assert torch.equal(qkv[1, 2], ours_["layers.1.k"][:, 1].T) and torch.equal(qkv[1, 3], ours_["layers.1.v"][:, 1].T)
    assert torch.equal(theirs["decoder.layers.0.mlp.linear_fc1.weight"][48:], ours_["layers.0.up"].T)
    assert torch.equal(theirs["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"], ours_["layers.0.norm2"])
    assert sum(x.numel() for x in theirs.values()) == sum(x.numel() for x in ours_.values())


def test_megatron_refuses_forms_that_it_is_not_set_up_for(monkeypatch):
    monkeypatch.setattr(importlib, "import_module", lambda name: sys.modules[__name__])
    for name, field in (("gemma2-2b", "activation"), ("qwen2.5-0.5b", "qkv_bias"), ("llama3.1-8b", "rope_scaling")):
        with pytest.raises(UserError, match=f"{name} has a form \\({field}"):
            peers_megatron.check(work_of(name), "bf16", CPU)
    with pytest.raises(UserError, match="has no fp8-rowwise"):
        peers_megatron.check(LLAMA, "fp8-rowwise", CPU)


def test_rows_without_a_peer_have_no_ratio():
    row = report.Row("a", "fp32", False, 1.0, 1.0, Phase([2.0, 4.0, 3.0], 1.0, 2**30), None, 1e12)
    found = report.numbers(row, LLAMA, report.reference_of([row], "fp32"))
    assert found["backward_ratio"] is None and found["backward_gib"] == 1.0 and found["backward_ms"] == 3.0
    assert found["tokens_per_second"] == pytest.approx(32e3 / 3)
