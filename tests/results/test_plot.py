"""What figures share: a legend below the panels is whole, whatever stands in it; colors follow from methods' names."""

from itertools import combinations

import numpy as np
import pytest
from helpers.made_runs import make_run
from matplotlib.colors import to_rgb

from immunization.checks import CONF
from immunization.results.collect import collect
from immunization.results.plot import INK, Look, legend_below, looks, panel_axes
from immunization.results.settings import METHODS, settings


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


EVERY = [*(path.stem for path in (CONF / "method").glob("*.yaml")), "unmodified", "mine", "another_of_mine"]


def looks_of(folder, methods) -> dict[str, list[Look]]:
    """How the settings of each method are drawn, of runs in `folder` where they are not there yet."""
    for i, method in enumerate(methods):
        make_run(folder / str(i), method)
    (group,) = settings(collect([folder]))
    return {setting.method: look for setting, look in looks(group).items()}


def test_every_method_has_one_color_of_its_own_whatever_stands_beside_it(tmp_path):
    together = looks_of(tmp_path / "together", EVERY)
    assert set(METHODS) == set(together) - {"mine", "another_of_mine"}
    for method in together:
        assert looks_of(tmp_path / method, [method, "clamp"])[method] == together[method]
    for one, other in combinations(together.values(), 2):
        assert np.linalg.norm(np.subtract(to_rgb(one.color), to_rgb(other.color))) > 0.15
        assert (one.color, one.marker, one.line) != (other.color, other.marker, other.line)
    assert INK not in {look.color for look in together.values()}  # the color of text, and of baselines


def test_settings_of_a_method_are_shades_of_its_color(tmp_path):
    for i in range(8):
        make_run(tmp_path / str(i), lambdas=(1.0, 10.0**i))
    make_run(tmp_path / "8", "identity")
    (group,) = settings(collect([tmp_path]))
    found = looks(group)
    own = [found[setting] for setting in group if setting.method == "condition_number"]
    assert len({(look.color, look.marker, look.line) for look in own}) == len({look.color for look in own}) == 8
    brightness = [sum(to_rgb(look.color)) for look in own]
    assert brightness == sorted(brightness)
    assert len({look.marker for look in own}) == 8


@pytest.mark.parametrize("counts", [(3, 1), (4, 2), (8, 1)])
def test_settings_of_two_methods_in_near_colors_have_other_lines(counts, tmp_path):
    for method, count in zip(("condition_number", "learning_curve"), counts, strict=True):
        for i in range(count):
            make_run(tmp_path / f"{method}{i}", method, lambdas=(1.0, 10.0**i))
    (group,) = settings(collect([tmp_path]))
    assert not any(one.like(other) for one, other in combinations(looks(group).values(), 2))
    alike = Look("#7FB8D8", ":", "o"), Look("#7FB8E0", ":", "o")
    assert alike[0].like(alike[1])
