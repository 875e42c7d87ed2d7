"""Metrics, log, TensorBoard, progress and the loss curve."""

import io
import json
import math
import re
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from fmegatron.plot import loss_curve, nice_ticks, smoothed, thinned, tick_labels
from fmegatron.report import Reporter, keep_rows_before, measure_matmul_flops

torch.set_num_threads(1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def rows(out: Path) -> list[dict]:
    def refuse(text: str) -> None:
        raise AssertionError(f"{text} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in (out / "metrics.jsonl").read_text().splitlines()]


def report_steps(report: Reporter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        loss = torch.tensor(5.0 / step)
        report.step(step, loss=loss, tokens=torch.tensor(4096), ms=50.0, lr=1e-3, grad_norm=torch.tensor(0.5))


def test_a_row_for_each_step_and_each_evaluation(tmp_path: Path) -> None:
    stream = io.StringIO()
    options = dict(flops_per_token=6e6, peak_flops=1e12, tensorboard=False, stream=stream)
    with Reporter(tmp_path, steps=4, **options) as report:
        report.print("hello")
        report_steps(report, 1, 2)
        report.evaluation(2, val_loss=torch.tensor(3.0), bits_per_byte=2.5)
        report.evaluation(2, val_loss=torch.tensor(3.0), bits_per_byte=2.5)
        report_steps(report, 3, 4)
    written = rows(tmp_path)
    assert [(row["step"], "val_loss" in row) for row in written] == [
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
    ]
    # 4096 tokens in 50 ms; 6 MFLOP a token on 1 TFLOP/s
    assert written[0] == {
        "step": 1,
        "loss": 5.0,
        "tokens": 4096,
        "lr": 1e-3,
        "grad_norm": 0.5,
        "ms": 50.0,
        "tokens_per_s": 81920.0,
        "mfu": pytest.approx(0.49152, rel=1e-12),
    }
    assert written[2] == {"step": 2, "val_loss": 3.0, "bits_per_byte": 2.5}
    said = stream.getvalue()
    assert said == (tmp_path / "log.txt").read_text()
    lines = said.splitlines()
    assert lines[0] == "hello"
    assert re.fullmatch(
        r"step 1/4  loss 5\.0000  lr 1\.00e-03  grad norm 0\.5000  81\.9k tokens/s  MFU 49\.2 %  0:00 left", lines[1]
    )
    assert lines[2] == "step 2/4  validation loss 3.0000  bits_per_byte 2.5000"
    assert lines[3].startswith("step 4/4") and len(lines) == 4  # the steps between come after `seconds`


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Reporter(tmp_path, steps=1, tensorboard=False, stream=stream) as report:
        report.step(1, loss=torch.tensor(math.nan), tokens=1, ms=1.0)
    assert rows(tmp_path)[0]["loss"] is None
    assert "loss not finite" in stream.getvalue()


def test_a_resume_leaves_every_step_once(tmp_path: Path) -> None:
    with Reporter(tmp_path, steps=10, tensorboard=False, stream=io.StringIO()) as report:
        report.print("first attempt")
        report_steps(report, 1, 4)
        report.evaluation(4, val_loss=1.0)
        report_steps(report, 5, 7)
        report.evaluation(6, val_loss=0.5)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "lo')  # killed while it wrote
    # the last checkpoint was made after step 4
    with Reporter(tmp_path, steps=6, first_step=5, tensorboard=False, stream=io.StringIO()) as report:
        report.evaluation(4, val_loss=1.0)
        report_steps(report, 5, 6)
        report.evaluation(6, val_loss=0.25)
        assert report.train == [(step, pytest.approx(5.0 / step, rel=1e-6)) for step in range(1, 7)]
        assert report.validation == [(4, 1.0), (6, 0.25)]
    written = rows(tmp_path)
    assert [row["step"] for row in written if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [(row["step"], row["val_loss"]) for row in written if "val_loss" in row] == [(4, 1.0), (6, 0.25)]
    assert (tmp_path / "log.txt").read_text().startswith("first attempt\n")
    assert keep_rows_before(tmp_path / "metrics.jsonl", 1) == [] and rows(tmp_path) == []


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Reporter(tmp_path / "run", steps=2, rank=1, stream=stream) as report:
        report.print("hello")
        report_steps(report, 1, 2)
        report.evaluation(2, val_loss=1.0)
        report.curve()
    assert stream.getvalue() == "" and not (tmp_path / "run").exists()


def test_lines_come_by_time(tmp_path: Path) -> None:
    stream = io.StringIO()
    with Reporter(tmp_path, steps=100, seconds=0.2, tensorboard=False, stream=stream) as report:
        start = time.monotonic()
        for step in range(1, 101):
            report.step(step, loss=1.0, tokens=1, ms=1.0)
            if step % 10 == 0:
                time.sleep(0.05)
        took = time.monotonic() - start
    assert 3 <= len(stream.getvalue().splitlines()) <= 2 + took / 0.2


def test_a_terminal_gets_a_bar_and_the_log_gets_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    with Reporter(tmp_path, steps=3, flops_per_token=6e6, peak_flops=1e12, tensorboard=False, stream=stream) as report:
        report.print("before [brackets]")
        report_steps(report, 1, 2)
        report.print("between " + "long " * 40)
        report_steps(report, 3, 3)
        report.end_progress()
        report.print("after")
    said = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    for text in (
        "before [brackets]",
        "between " + "long " * 40,
        "after",
        "step 3/3 ",
        "loss 1.6667",
        "81.9k tokens/s",
        "MFU 49.2 %",
        "left",
    ):
        assert text in said
    assert "…" not in said  # nothing was cut off
    assert "\x1b[" in stream.getvalue() and "step 3/3  loss" not in said
    log = (tmp_path / "log.txt").read_text()
    assert "\x1b" not in log and "step 3/3  loss 1.6667" in log and "between long" in log


def test_tensorboard_has_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Reporter(tmp_path, steps=3, stream=io.StringIO()) as report:
        report_steps(report, 1, 3)
        report.evaluation(3, val_loss=0.25)
    with Reporter(tmp_path, steps=4, first_step=3, stream=io.StringIO()) as report:
        report_steps(report, 3, 4)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(step, pytest.approx(5.0 / step, rel=1e-6)) for step in (1, 2, 3, 4)]
    assert "train/step" not in events.Tags()["scalars"]


def test_the_measured_product_is_plausible_and_quick() -> None:
    start = time.perf_counter()
    flops = measure_matmul_flops("cpu", torch.float32, seconds=0.3)
    assert time.perf_counter() - start < 2
    a = torch.rand(512, 512)
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - begin)
    assert 0.2 < flops / (2 * 512**3 / min(times)) < 5


# --- The picture ---


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def tag(element: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return element.findall(f"{{http://www.w3.org/2000/svg}}{name}")


def test_points_lie_where_the_axes_say() -> None:
    train = [(step, 8.0 - step / 100) for step in range(1, 601)]
    validation = [(100, 7.5), (400, 5.0)]
    svg = parse(loss_curve(train, validation, title="a < b & c"))
    assert tag(svg, "title")[0].text == "a < b & c"
    labels = {}
    for text in tag(svg, "text"):
        if text.text and re.fullmatch(r"[\d.]+", text.text):
            labels[(text.get("text-anchor"), float(text.text))] = float(text.get("x")), float(text.get("y"))
    # pixels of a number, from two labels of each axis: x labels are centred, y labels end left of the axis, 4.5 above
    (x0, _), (x1, _) = labels["middle", 0], labels["middle", 600]
    (_, y0), (_, y1) = labels["end", 2], labels["end", 8]
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in tag(svg, "circle")]
    expected = [(x0 + (x1 - x0) * x / 600, y0 - 4.5 + (y1 - y0) * (y - 2) / 6) for x, y in validation]
    assert len(circles) == 2
    for got, want in zip(circles, expected, strict=True):
        assert got == pytest.approx(want, abs=0.11)
    raw, smooth, _ = (line.get("points").split() for line in tag(svg, "polyline"))
    assert len(raw) == len(smooth) == 600
    assert raw == smooth  # the mean of as many neighbours before as after leaves a straight line as it is
    assert [float(v) for v in raw[299].split(",")] == pytest.approx(
        [x0 + (x1 - x0) / 2, y0 - 4.5 + (y1 - y0) * 0.5], abs=0.11
    )


@pytest.mark.parametrize(
    "train", [[], [(1, 2.0)], [(1, 2.0), (2, 2.0)], [(1, math.nan), (2, math.inf)], [(1, 5.0), (2, -5.0)]]
)
def test_few_points_still_make_a_picture(train: list) -> None:
    assert tag(parse(loss_curve(train)), "text")
    assert tag(parse(loss_curve([], train)), "text")


def test_a_spike_does_not_flatten_the_curve() -> None:
    train = [(step, 3.0) for step in range(1, 1001)]
    train[500] = (501, 1000.0)
    assert (
        max(
            float(t.text)
            for t in tag(parse(loss_curve(train)), "text")
            if re.fullmatch(r"[\d.]+", t.text or "") and t.get("text-anchor") == "end"
        )
        < 100
    )


@given(low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6), most=st.integers(3, 12))
@hypothesis_settings(max_examples=200, deadline=None)
def test_ticks_are_round_enclose_the_data_and_are_as_many_as_fit(low: float, span: float, most: int) -> None:
    high = low + span
    ticks = nice_ticks(low, high, most)
    step = ticks[1] - ticks[0]
    digit = step / 10.0 ** math.floor(math.log10(step * 1.0000001))
    assert min(abs(digit - round_digit) for round_digit in (1, 2, 5, 10)) < 1e-3
    slack = 1e-6 * step + 1e-9 * abs(low)
    assert ticks[0] <= low + slack and high <= ticks[-1] + slack
    assert ticks[0] > low - step - slack and ticks[-1] < high + step + slack
    assert most / 4 <= len(ticks) - 1 <= most or len(ticks) <= 3
    assert len(set(tick_labels(ticks))) == len(ticks)


def test_labels() -> None:
    assert tick_labels([0.0, 0.05, 0.1]) == ["0.00", "0.05", "0.10"]
    assert tick_labels([0.0, 20000.0, 40000.0]) == ["0", "20k", "40k"]
    assert tick_labels([0.0, 500000.0, 2000000.0]) == ["0.0", "0.5M", "2.0M"]


def test_smoothing_and_thinning() -> None:
    assert smoothed([(1, 0.0), (2, 3.0), (3, 6.0), (4, 0.0)], reach=1) == [(1, 0.0), (2, 3.0), (3, 3.0), (4, 0.0)]
    points = [(step, math.sin(step)) for step in range(100_000)]
    points[77_777] = (77_777, 9.0)
    thin = thinned(points)
    assert 1000 <= len(thin) <= 1600 and (77_777, 9.0) in thin
    assert thin == sorted(thin)


def test_the_load_of_experts_is_drawn_by_layer(tmp_path: Path) -> None:
    """A row for each layer, darkest where the load is most uneven."""
    report = Reporter(tmp_path, steps=3, tensorboard=False, stream=io.StringIO())
    for step, uneven in ((1, 1.0), (2, 2.0), (3, 3.0)):
        report.step(step, loss=1.0, tokens=4, ms=1.0, **{"max_load.0": 1.0, "max_load.2": uneven})
    path = report.load_map()
    report.close()
    text = path.read_text()
    assert text.count(">2</text>") == 1 and ">0</text>" in text and ">3.00</text>" in text
    assert text.count('fill="#800014"') == 2  # the last step of layer 2, and the legend


def test_without_experts_there_is_no_picture_of_their_load(tmp_path: Path) -> None:
    report = Reporter(tmp_path, steps=1, tensorboard=False, stream=io.StringIO())
    report.step(1, loss=1.0, tokens=4, ms=1.0)
    assert report.load_map() is None
    report.close()
