"""Writes the tables and the plot of docs/benchmarks.md from a run's results; the words around them are left alone."""

import json
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "benchmarks.md"
PLOT = DOCS / "benchmarks.svg"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
_TICKS = (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 50)
_MET = {True: "yes", False: "**no**", None: "–"}


def newest(results: Path) -> dict[str, Any]:
    """The latest run that is kept. Raises `SystemExit` where there is none."""
    files = sorted(results.glob("*.json"))
    if not files:
        raise SystemExit("there is no result yet; run make bench")
    run: dict[str, Any] = json.loads(files[-1].read_text())
    return run


def render(run: dict[str, Any]) -> None:
    """Puts the run between the markers of the page, and draws the plot."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} lacks the lines {BEGIN} and {END}")
    body = "\n".join(lines(run))
    picture = f"![Every ratio with its spread]({PLOT.name})"
    PAGE.write_text(f"{before}{BEGIN}\n\n{picture}\n\n{body}\n\n{END}{after}")
    draw(run)


def lines(run: dict[str, Any]) -> list[str]:
    """The run as Markdown."""
    made = [f"Run of {run['began'].replace('T', ' ').replace('+00:00', ' UTC')}.", ""]
    made += ["| ratio | median | least – greatest | rounds | aim | met |", "|---|---|---|---|---|---|"]
    for benchmark in run["benchmarks"]:
        for ratio in benchmark["ratios"]:
            aim = ratio["aim"]
            met = _MET[None if aim is None else ratio["value"]["median"] >= aim]
            value = ratio["value"]
            span = f"{value['least']:.3g} – {value['greatest']:.3g}"
            shown = "–" if aim is None else f"≥ {aim:g}"
            made.append(
                f"| {ratio['name']} | **{value['median']:.3g}** | {span} | {value['count']} | {shown} | {met} |"
            )
    for benchmark in run["benchmarks"]:
        made += ["", f"### {benchmark['title']}", ""]
        made += ["| | median | least – greatest | unit |", "|---|---|---|---|"]
        for rate in benchmark["rates"]:
            value = rate["value"]
            span = f"{_number(value['least'])} – {_number(value['greatest'])}"
            made.append(f"| {rate['name']} | {_number(value['median'])} | {span} | {rate['unit']} |")
        facts = ", ".join(f"{name} {_fact(value)}" for name, value in benchmark["facts"].items())
        made += ["", f"{facts}. The machine's load before it was {benchmark['load_before']:g}."]
    made += ["", "### Machine", ""]
    made += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in run["machine"].items())]
    return made


def draw(run: dict[str, Any]) -> None:
    """Every ratio on one logarithmic axis: its median as a point, least to greatest as a line, its aim as a tick."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    ratios = [ratio for benchmark in run["benchmarks"] for ratio in benchmark["ratios"]][::-1]
    style = {"font.size": 9, "font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "layertap"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(8.5, 0.42 * len(ratios) + 0.9), layout="constrained")
        axes.axvline(1, color="#b8bec6", linewidth=1, zorder=0)
        for place, ratio in enumerate(ratios):
            value, aim = ratio["value"], ratio["aim"]
            colour = "#2f6f9f" if aim is None or value["median"] >= aim else "#b5483a"
            axes.plot([value["least"], value["greatest"]], [place, place], color=colour, linewidth=2, alpha=0.45)
            axes.plot([value["median"]], [place], "o", color=colour, markersize=6)
            axes.annotate(
                f"{value['median']:.3g}", (value["median"], place), (0, 6), textcoords="offset points", ha="center"
            )
            if aim is not None:
                axes.plot([aim], [place], "|", color="#33383f", markersize=12, markeredgewidth=1.5)
        axes.set_xscale("log")
        axes.set_yticks(range(len(ratios)), [ratio["name"] for ratio in ratios])
        axes.set_ylim(-0.6, len(ratios) - 0.2)
        least = min(ratio["value"]["least"] for ratio in ratios)
        greatest = max(ratio["value"]["greatest"] for ratio in ratios)
        axes.set_xlim(least / 1.3, greatest * 1.3)
        axes.set_xticks([tick for tick in _TICKS if least / 1.3 <= tick <= greatest * 1.3])
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        axes.set_xlabel("ratio (point: median, line: least to greatest, tick: aim)")
        axes.tick_params(axis="y", length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        figure.savefig(PLOT, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _fact(value: object) -> str:
    return _number(float(value)) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
