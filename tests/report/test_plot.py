"""Plots: how axes are scaled, where the legend is, and smoothing."""

import pytest
from conftest import mvp
from run_folder import run_folder

from mvp_engine.report.page import Curve, draw_curves, new_figure, plot_overview, smoothed


def drawn(metric, *curves, label="curve"):
    axes = new_figure(5, 3).subplots()
    both = []
    for i, values in enumerate(curves):
        both.append(
            Curve(f"{label} {i}", "#2563eb", list(range(len(values))), values, is_eval=i == 1)
        )
    draw_curves(axes, both, metric)
    axes.figure.draw_without_rendering()
    return axes


@pytest.mark.parametrize(
    "metric, values, scale, tick",
    [
        ("loss", [9.0, 3.0, 0.5], "log", "1"),
        ("loss", [1.25, 1.5, 2.0], "linear", "1.4"),
        ("exact_web", [0.001, 0.5, 0.9], "linear", "60%"),
        ("mfu", [0.5, 0.52, 0.51], "linear", "51"),
    ],
)
def test_axis_is_percent_for_shares_and_log_only_for_losses_that_span_much(
    metric, values, scale, tick
):
    axes = drawn(metric, values)
    assert axes.get_yscale() == scale
    assert any(label.get_text().startswith(tick) for label in axes.get_yticklabels())


def test_legend_is_outside_of_the_axes_and_evaluations_are_joined_points():
    axes = drawn("loss", [3.0, 2.0, 1.0], [2.5, 2.0, 1.5])
    assert axes.get_legend().get_window_extent().y1 < axes.get_window_extent().y0
    figure = axes.figure.bbox
    names = drawn("loss", *[[2.0, 1.0]] * 5, label="a source with a long name")
    assert names.get_legend().get_window_extent().x1 < figure.x1
    assert names.get_window_extent().width > 0.8 * figure.width
    train, held_out = axes.get_lines()
    assert (train.get_marker(), held_out.get_marker(), held_out.get_linestyle()) == (
        "None",
        "o",
        "-",
    )


def test_long_curve_has_a_raw_and_a_smoothed_line():
    noisy = [2.0 + (-1) ** i for i in range(80)]
    raw, smooth = drawn("loss", noisy).get_lines()
    assert list(raw.get_ydata()) == noisy
    assert list(smooth.get_ydata()) == smoothed(noisy)
    assert max(abs(value - 2) for value in smoothed(noisy)[2:-2]) < 0.3
    assert smoothed([3.0]) == [3.0]


def test_overview_and_runs_plot_write_png_files(tmp_path, capsys):
    plot_overview(run_folder(tmp_path), tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert mvp(f"runs {tmp_path} --plot mfu --out {tmp_path}/mfu.png") == 0
    assert "(5 points)" in capsys.readouterr().out
    assert mvp(f"runs {tmp_path} --plot gone") == 2
    assert "exact_own, exact_web, fill, grad_norm" in capsys.readouterr().err
