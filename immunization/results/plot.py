"""What all pictures share: a picture with its name and caption, axes of fixed size, colors and lines."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from immunization.results.formatting import markdown
from immunization.results.settings import METHODS, Setting
from immunization.runs.numbers import number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.collections import PathCollection
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

INK = "#222222"
"""Takes the color of the page's text in the report, so that pictures can be read on dark pages too."""
PALETTE = tuple(METHODS.values())
LINES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (8, 2)), (0, (1, 1)), (0, (3, 1, 1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
CROWDED = 10
"""With more columns, cells of a heat map hold marks and no numbers."""
DPI = 200
"""Dots an inch of PNG files."""
NEAR = 64
"""Between colors, of 255 a channel; less is not told apart for sure."""

LINE, LETTER, HANDLE = 0.22, 0.075, 0.7
"""Inches that a line of a legend takes, a letter of it, and what precedes its text."""


@dataclass
class Plot:
    """A picture with a file name and what to read from it."""

    name: str
    caption: str
    figure: Figure

    def __post_init__(self) -> None:
        plain_text(self.figure)

    @property
    def width(self) -> int:
        """Inches, rounded up: a page does not draw it smaller than it can be read."""
        return math.ceil(self.figure.get_size_inches()[0])

    def svg(self) -> str:
        """An <svg> element for a page: INK is the color of the text around it, and text stays text."""
        import matplotlib

        with matplotlib.rc_context({"svg.fonttype": "none", "font.family": "sans-serif", "svg.hashsalt": self.name}):
            out = io.StringIO()
            self.figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
        content = out.getvalue()
        return content[content.index("<svg") :].replace(INK, "currentColor")

    def markdown(self, path: str) -> str:
        """The picture at `path` with its caption below."""
        return f"![{self.name}]({path})\n\n{markdown(self.caption)}\n"

    def png(self, folder: Path, pdf: bool = True) -> Path:
        """A picture on white in `folder`, and the same as PDF beside it; returns the path of the first."""
        path = folder / f"{self.name}.png"
        self.figure.savefig(path, dpi=DPI, facecolor="white")
        if pdf:
            self.figure.savefig(path.with_suffix(".pdf"), facecolor="white", metadata={"CreationDate": None})
        return path


def plain_text(figure: Figure) -> None:
    """Show what is between two dollar signs as it is, and not as a formula, but for powers of ten at axes."""
    from matplotlib.text import Text
    from matplotlib.ticker import LogFormatter

    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    logarithmic = [axis for axis in axes if isinstance(axis.get_major_formatter(), LogFormatter)]
    powers = {label for axis in logarithmic for label in axis.get_ticklabels(which="both")}
    for text in figure.findobj(Text):
        text.set_parse_math(text in powers)


@contextmanager
def inked() -> Iterator[None]:
    """Pictures made within have all of their text and axes in INK."""
    import matplotlib

    names = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    colors: dict[Any, Any] = dict.fromkeys(names, INK)
    with matplotlib.rc_context(colors):
        yield


class Look(NamedTuple):
    """How a line or the points of a setting are drawn: color, line and marker all tell it from others."""

    color: str
    line: str | tuple[int, tuple[int, ...]]
    marker: str

    def like(self, other: Look) -> bool:
        """Whether a reader takes both for one: the same line, in colors that are near."""
        one, two = (bytes.fromhex(look.color[1:]) for look in (self, other))
        return self.line == other.line and math.dist(one, two) < NEAR


def looks(group: Sequence[Setting]) -> dict[Setting, Look]:
    """One look a setting: the color of its method, in shades from dark to light where a method has several settings.

    Settings whose colors are near each other have other lines and markers, as far as there are some.
    """
    methods = [setting.method for setting in group]
    placed = [(setting, methods[:i].count(setting.method)) for i, setting in enumerate(group)]
    chosen: dict[Setting, Look] = {}
    for setting, place in sorted(placed, key=lambda item: item[1]):  # first those that look the same in every figure
        choices = [_look(setting.method, place, methods.count(setting.method), more) for more in range(len(LINES))]
        distinct = (look for look in choices if not any(look.like(other) for other in chosen.values()))
        chosen[setting] = next(distinct, choices[0])
    return {setting: chosen[setting] for setting in group}


def _look(method: str, place: int, count: int, more: int) -> Look:
    """That of setting `place` of `count` of a method, with the line and marker `more` places on.

    One's own methods have colors that follow from their names.
    """
    if method in METHODS:
        i = [*METHODS].index(method)
        color = [*bytes.fromhex(PALETTE[i][1:])]
    else:
        i, hue, dark, *_ = sha256(method.encode()).digest()
        color = [round(255 * part) for part in hls_to_rgb(hue / 256, 0.35 + dark / 1024, 0.6)]
    share = 0.9 * place / (count - 1) - 0.4 if count > 1 else 0.0  # of white, or below 0 of black
    shade = (round(c + abs(share) * (255 * (share > 0) - c)) for c in color)
    i += place + i // len(MARKERS) + more
    return Look(f"#{bytes(shade).hex()}".upper(), LINES[i % len(LINES)], MARKERS[i % len(MARKERS)])


def panel_axes(
    count: int,
    width: float,
    height: float,
    legend_rows: int = 0,
    left: float = 0.95,
    right: float = 0.2,
    top: float = 0.7,
    gap: float = 0.9,
    row_gap: float = 1.15,
    columns: int = 3,
    share: bool = False,
) -> tuple[Figure, list[Axes]]:
    """Axes of `width` x `height` inches each, at most `columns` side by side, on no background.

    Below them is room for a legend of `legend_rows` lines, unless `legend_below` makes it. `share`: one y axis for all.
    """
    from matplotlib.figure import Figure

    bottom = 0.75 + LINE * legend_rows
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    total = left + columns * width + (columns - 1) * gap + right
    tall = bottom + rows * height + (rows - 1) * row_gap + top
    figure = Figure(figsize=(total, tall), facecolor="none")
    axes: list[Axes] = []
    for i in range(count):
        row, column = divmod(i, columns)
        x, y = left + column * (width + gap), bottom + (rows - 1 - row) * (height + row_gap)
        place = (x / total, y / tall, width / total, height / tall)
        ax = figure.add_axes(place, facecolor="none", sharey=axes[0] if share and axes else None)
        ax.tick_params(labelleft=not (share and column))
        ax.grid(alpha=0.2, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        axes.append(ax)
    return figure, axes


def headline(figure: Figure, group: Sequence[Setting]) -> None:
    """Above all panels: method where there is one, data, model, and how many seeds, pairs and runs are behind them."""
    runs = [run for setting in group for run in setting.runs]
    seeds, pairs = len({run.result.seed for run in runs}), len({run.pair for run in runs})
    first, methods = runs[0].result, {setting.method for setting in group}
    words = [f"{first.method}: {first.dataset}" if len(methods) == 1 else first.dataset, first.model]
    words += [f"{pairs} pairs"] if pairs > 1 else [f"pair {runs[0].pair}"] * bool(runs[0].pair)
    words += [f"{seeds} seed{'s' * (seeds != 1)}", f"n = {len(runs)} run{'s' * (len(runs) != 1)}"]
    width, height = figure.get_size_inches()
    place = {"x": 0.12 / width, "y": 1 - 0.08 / height, "ha": "left", "va": "top"}
    figure.suptitle(", ".join(words), fontsize=10, **place)


def legend_below(figure: Figure, ax: Axes, columns: int = 2) -> None:
    """One legend for all panels, in room made below them; long labels take the whole width, in several lines."""
    handles, labels = ax.get_legend_handles_labels()
    width, rows = figure.get_size_inches()[0], math.ceil(len(labels) / columns)
    if HANDLE + LETTER * max(map(len, labels)) > width / columns:
        columns, letters = 1, int((width - HANDLE) / LETTER)
        labels = [textwrap.fill(label, letters, break_long_words=False, break_on_hyphens=False) for label in labels]
        rows = sum(label.count("\n") + 1 for label in labels)
    room, before = LINE * rows, figure.get_size_inches()[1]
    figure.set_size_inches(width, height := before + room)
    for panel in figure.axes:  # what is drawn keeps its size
        x, y, wide, tall = panel.get_position().bounds
        panel.set_position((x, (y * before + room) / height, wide, tall * before / height))
    figure.legend(handles, labels, loc="lower left", ncols=columns, frameon=False, handlelength=3.5, fontsize=9)


def fit_log(axis: Axis, values: Sequence[float] | np.ndarray) -> None:
    """A logarithmic axis, with labels inside of two decades; linear within a factor of 5, and near 0 where values are.

    Values that are not finite do not count. Minor ticks, which take longer than all the rest, are left out.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    known = np.asarray(values, dtype=float)
    known = known[np.isfinite(known)]
    if not (size := np.abs(known[known != 0])).size:
        return
    rescale = axis.axes.set_xscale if axis is axis.axes.xaxis else axis.axes.set_yscale
    if (known <= 0).any():
        rescale("symlog", linthresh=size.min())
    elif size.max() > 5 * size.min():
        rescale("log")
        if size.max() < 100 * size.min():
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter(lambda value, position: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def front(points: Mapping[Setting, tuple[float, float]]) -> list[Setting]:
    """The settings, from left to right, that none beats: none has less of the first and more of the second number."""
    found: list[Setting] = []
    for setting in sorted(points, key=lambda setting: (points[setting][0], -points[setting][1])):
        if not found or points[setting][1] > points[found[-1]][1]:
            found.append(setting)
    return found


def color_bar(
    figure: Figure,
    drawn: AxesImage | PathCollection,
    ax: Axes,
    label: str = "",
    extend: str = "neither",
    form: Callable[[float, int], str] | None = None,
) -> None:
    """A bar in the margin right of a heat map, as high as it; `form` makes its labels."""
    beside, width = ax.get_position(), figure.get_size_inches()[0]
    place = (beside.x1 + 0.1 / width, beside.y0, 0.13 / width, beside.height)
    figure.colorbar(drawn, cax=figure.add_axes(place), extend=extend, format=form).set_label(label)


def image(ax: Axes, values: np.ndarray, x: Sequence[str], y: Sequence[str], **options: Any) -> AxesImage:
    """A heat map with a name at every row and column."""
    ax.grid(False)
    ax.spines[:].set_visible(False)
    drawn = ax.imshow(values, **options)
    ax.set_xticks(range(len(x)), x)
    ax.set_yticks(range(len(y)), y)
    ax.tick_params(length=0)
    return drawn


def over_two(
    figure: Figure,
    ax: Axes,
    places: Mapping[Setting, tuple[float, float]],
    levels: Sequence[Sequence[float]],
    values: Mapping[Setting, float | None],
    marks: Mapping[Setting, str],
) -> None:
    """Positive values of settings at their places, with their marks, in colors by their logarithms.

    A heat map with the values in its cells, where `levels` of x and y make a grid; else points.
    """
    known = {setting: math.log10(value) for setting, value in values.items() if value and value > 0}
    drawn: AxesImage | PathCollection
    if levels:
        colors, texts = np.full((len(levels[1]), len(levels[0])), np.nan), {}
        for setting, (x, y) in places.items():
            cell = levels[1].index(y), levels[0].index(x)
            colors[cell] = known.get(setting, math.nan)
            text = number(values[setting] or 0) if setting in known and len(levels[0]) <= CROWDED else ""
            texts[cell] = (marks[setting] + text).strip()
        names = [[number(value) for value in level] for level in levels]
        drawn = image(ax, colors, *names, cmap="viridis", origin="lower", aspect="auto")
        ax.tick_params(axis="x", rotation=45 if len(levels[0]) > CROWDED else 0)
        write_values(ax, colors, drawn, texts=texts)
    else:
        x, y = np.array([places[setting] for setting in known]).T
        drawn = ax.scatter(x, y, c=[*known.values()], cmap="viridis", s=28)
        for setting in (setting for setting in places if marks[setting]):
            ax.text(*places[setting], marks[setting].strip(), ha="center", va="center", fontsize=11)
        for axis, coordinate in zip((ax.xaxis, ax.yaxis), zip(*places.values(), strict=True), strict=True):
            fit_log(axis, coordinate)
    color_bar(figure, drawn, ax, form=lambda value, position: number(10**value))


def write_values(
    ax: Axes,
    values: np.ndarray,
    drawn: AxesImage,
    form: str = ".2g",
    texts: Mapping[tuple[int, int], str] = MappingProxyType({}),
) -> None:
    """The value of every cell of a heat map in it, or its text in `texts`, dark on light and light on dark."""
    for (row, column), value in np.ndenumerate(values):
        color = INK
        if math.isfinite(value):
            red, green, blue, _ = drawn.cmap(drawn.norm(value))
            color = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
        text = texts.get((row, column), format(value, form) if math.isfinite(value) and not texts else "")
        ax.text(column, row, text, ha="center", va="center", fontsize=8, color=color)
