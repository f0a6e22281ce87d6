"""The picture of a pulled job: norms by boundary beside the histogram of token lengths, as a PNG.

Needs matplotlib, the extra `plot`; nothing else of Layertap does.
"""

from pathlib import Path
from typing import Any

import numpy as np

from layertap.errors import LayertapError, MissingExtraError
from layertap.inspect import Summary
from layertap.schemas.shards import Manifest

INK, MUTED, GRID = "#1f2733", "#6b7685", "#e4e8ee"
TEAL, SAND, CORAL = "#0f766e", "#e9b44c", "#d1495b"


def draw(summary: Summary, manifest: Manifest, path: Path) -> None:
    """Writes the PNG to `path`. Raises `MissingExtraError` without matplotlib, `LayertapError` on a bad path."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtraError(
            "the picture needs matplotlib; install it with `pip install 'layertap[plot]'`"
        ) from None
    if not summary.rows:
        raise LayertapError("this job has no rows, so there is nothing to draw")
    figure = Figure(figsize=(12, 5.6), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    norms, lengths = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.15, 1], "wspace": 0.2})
    figure.subplots_adjust(left=0.07, right=0.975, top=0.73, bottom=0.12)
    model = Path(manifest.model).name
    figure.text(0.07, 0.935, model, fontsize=17, fontweight="bold", color=INK)
    state = "" if manifest.complete else "  ·  partial: the job did not succeed"
    subtitle = f"{manifest.job}  ·  {summary.rows:,} rows  ·  {summary.tokens:,} tokens{state}"
    figure.text(0.07, 0.885, subtitle, fontsize=10.5, color=MUTED)
    _draw_norms(norms, summary)
    _draw_lengths(lengths, summary)
    try:
        figure.savefig(path, format="png")
    except OSError as e:
        raise LayertapError(f"{path} can't be written ({e.strerror}); name another file") from None


def _style(axes: Any, title: str, note: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=22)
    axes.text(0, 1.03, note, transform=axes.transAxes, fontsize=9, color=MUTED)
    axes.grid(axis="y", color=GRID, linewidth=0.9)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=MUTED, labelsize=9, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def _draw_norms(axes: Any, summary: Summary) -> None:
    from matplotlib.ticker import NullFormatter

    norms = [n for n in summary.norms if np.isfinite(n.mean)]
    if summary.sampled_tokens == summary.tokens:
        sample = f"all {summary.tokens:,} tokens"
    else:
        sample = f"sample of {summary.sampled_tokens:,} of {summary.tokens:,} tokens"
    _style(axes, "Norm at each boundary", f"L2 norm of a token's vector, {sample}")
    # With many boundaries the final state would be lost among them as one more tick; it keeps its own colour.
    for x, n in enumerate(norms):
        colour = CORAL if n.place == "final" else TEAL
        axes.vlines(x, n.minimum, n.maximum, color=colour, linewidth=1.2, alpha=0.45)
        axes.vlines(x, n.low, n.high, color=colour, linewidth=7, alpha=0.3)
        axes.plot(
            [x], [n.mean], "o", color=colour, markersize=7, markeredgecolor="white", markeredgewidth=1.2, zorder=3
        )
        if len(norms) <= 8:
            axes.annotate(
                f"{n.mean:,.3g}", (x, n.mean), (10, 0), textcoords="offset points", fontsize=9, color=INK, va="center"
            )
    smallest = min((n.minimum for n in norms), default=1.0)
    largest = max((n.maximum for n in norms), default=1.0)
    if smallest > 0 and largest / smallest > 20:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_plain_numbers())
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, largest * 1.08)
    step = max(1, len(norms) // 16)
    last = len(norms) - 1
    ticks = [i for i in range(len(norms)) if i == last or (i % step == 0 and last - i >= 0.8 * step)]
    axes.set_xticks(ticks, [norms[i].place for i in ticks])
    axes.set_xlim(-0.6, max(0.6, len(norms) - 0.4))
    axes.set_xlabel("boundary   (dot: mean, band: 5–95 %, line: min–max)", fontsize=9, color=MUTED)
    broken = sum(n.non_finite for n in summary.norms)
    if broken:
        axes.text(
            0.99, 0.03, f"{broken:,} non-finite values", transform=axes.transAxes, ha="right", va="bottom", color=CORAL
        )


def _draw_lengths(axes: Any, summary: Summary) -> None:
    from matplotlib.ticker import MaxNLocator, NullFormatter

    values = np.asarray(summary.lengths)
    share = 100 * summary.supervised_tokens / max(1, summary.tokens)
    _style(axes, "Tokens per row", f"{share:.0f} % of all tokens are supervised")
    wide = values.max() / max(1, values.min()) > 20
    if wide:
        edges = np.unique(np.geomspace(values.min(), values.max() + 1, 25).round())
        axes.set_xscale("log")
    else:
        edges = np.linspace(values.min(), values.max() + 1, 25)
    counts, _, _ = axes.hist(values, bins=edges, color=SAND, edgecolor="white", linewidth=0.8)
    axes.set_ylim(0, 1.15 * counts.max())
    median = float(np.median(values))
    axes.axvline(median, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"median {median:,.0f}",
        (median, 0.97),
        (6, 0),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        fontsize=9,
        color=INK,
        va="top",
    )
    axes.xaxis.set_major_formatter(_plain_numbers())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("tokens" + (" (log scale)" if wide else ""), fontsize=9, color=MUTED)
    axes.set_ylabel("rows", fontsize=9, color=MUTED)


def _plain_numbers() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:,.10g}")
