"""What figures share: a legend below the panels is whole, whatever stands in it."""

import pytest

from immunization.results.plot import legend_below, panel_axes


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("label", ["a", "condition_number lambda_P=5e-5 lambda_H=2e6 balance=False optimizer.lr=1e-8"])
@pytest.mark.parametrize("panels", [1, 3])
def test_a_legend_is_within_the_figure_and_below_the_axes(panels, label, columns):
    count = 5
    figure, axes = panel_axes(panels, width=3.2, height=2.8)
    for i in range(count):
        axes[0].plot([0, 1], [0, i], label=f"{label} {i}")
    before = axes[0].get_window_extent().size
    legend_below(figure, axes[0], columns)
    figure.draw_without_rendering()
    box, whole = figure.legends[0].get_window_extent(), figure.bbox
    assert box.x0 >= whole.x0
    assert box.x1 <= whole.x1
    assert box.y1 <= min(ax.get_tightbbox().y0 for ax in axes)
    assert axes[0].get_window_extent().size == pytest.approx(before)
