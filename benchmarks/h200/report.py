"""Writes the table and the plot of the GPU section of docs/benchmarks.md from every result that is kept."""

import json
from pathlib import Path
from typing import Any

from benchmarks.h200 import shapes
from benchmarks.report import DOCS, PAGE

RESULTS = Path(__file__).resolve().parent / "results"
PLOT = DOCS / "benchmarks-h200.svg"
BEGIN, END = "<!-- h200: begin -->", "<!-- h200: end -->"
SHAPES = {"llama-8b": "Llama 8B", "llama-1b": "Llama 1B", "moe-30b-a3b": "Qwen3-MoE 30B-A3B"}
_KEPT_UP = 0.95
_DISK_BOUND = 0.8

Row = dict[str, Any]


def runs() -> list[tuple[str, dict[str, Any]]]:
    """(name, result) of every run that is kept."""
    return [(path.stem, json.loads(path.read_text())) for path in sorted(RESULTS.glob("*.json"))]


def rate(row: Row) -> float:
    """Tokens a second, without the ends of the run where that is known."""
    return float(row.get("steady_tokens_per_s", row["tokens_per_s"]))


def share(row: Row, run: dict[str, Any]) -> float | None:
    """Of the plain prefill of the same rows in the same run; None for plain prefill itself, or where there is none."""
    for plain in run["results"]:
        same = (plain["shape"], plain["rows"]) == (row["shape"], row["rows"])
        if same and plain["way"].startswith("plain") and plain is not row:
            return None if row["way"].startswith("plain") else rate(row) / float(plain["tokens_per_s"])
    return None


def limit(row: Row, run: dict[str, Any]) -> str:
    """What set the pace of an extraction, as far as its figures tell."""
    of_plain, disk = share(row, run), run["machine"]["dd_mb_per_s"]
    if not row["way"].startswith("extract") or of_plain is None:
        return ""
    if of_plain >= _KEPT_UP:
        return "the engine"
    return "storage" if row["mb_per_s"] >= _DISK_BOUND * disk else "beginning and end" if _short(row) else "the writer"


def _short(row: Row) -> bool:
    return "steady_tokens_per_s" not in row


def lines() -> list[str]:
    """A table for each shape, then the runs that they come from, as Markdown."""
    kept = runs()
    found = [(row, name, run) for name, run in kept for row in run["results"]]
    made: list[str] = []
    for shape, title in SHAPES.items():
        made += [f"### {title}", "", "| rows | way | tokens/s | steady | of plain | MB/s | limit | run |"]
        made += ["|---|---|---|---|---|---|---|---|"]
        of_shape = [each for each in found if each[0]["shape"] == shape]
        made += [_line(*each) for each in sorted(of_shape, key=lambda each: shapes.MIXES.index(each[0]["rows"]))] + [""]
    made += ["### Runs", ""]
    for name, run in kept:
        machine = run["machine"]
        made.append(
            f"- **{name}**: {machine['gpu']}, {machine['engine']}, chunks of {machine['chunk']:,} tokens; `dd` wrote "
            f"{machine['dd_mb_per_s']:,} MB/s there. {run['note']}"
        )
        made += _held([row for row in run["results"] if "gpu_mib" in row])
        if "endurance" in run:
            made += _endured(run["endurance"])
    return [*made, ""]


def _line(row: Row, name: str, run: dict[str, Any]) -> str:
    of_plain, steady = share(row, run), row.get("steady_tokens_per_s")
    cells = [
        row["rows"], row["way"], f"{row['tokens_per_s']:,}", "" if steady is None else f"{steady:,}",
        "" if of_plain is None else f"**{of_plain:.2f}**", f"{row['mb_per_s']:,}" if row["mb_per_s"] else "",
        limit(row, run), name,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _held(extractions: list[Row]) -> list[str]:
    """The memory while a run extracted, as a point below it; nothing for a run that did not look."""
    if not extractions:
        return []
    gpu, resident = (
        [row[name][when] for row in extractions for when in ("first", "most", "last")]
        for name in ("gpu_mib", "resident_mib")
    )
    return [
        f"  - Memory while it extracted: {min(gpu):,} to {max(gpu):,} MiB of the GPU, {min(resident):,} to "
        f"{max(resident):,} MiB resident in engine and worker."
    ]


def _endured(found: dict[str, Any]) -> list[str]:
    """The long run, as points below its run's."""
    windows = found["tokens_per_s_by_window"]
    gpu, resident = ([look[place] for look in found["looks"]] for place in (1, 2))
    return [
        f"  - {found['seconds']:.0f} s without a pause: {found['tokens']:,} tokens, {found['nbytes'] / 1e9:.0f} GB in "
        f"{found['shards']} shards, no row lost; by half minutes {min(windows[1:]):,} to {max(windows[1:]):,} tokens/s "
        "(of whole shards).",
        f"  - Memory of the GPU: {min(gpu):,} to {max(gpu):,} MiB. Resident in engine and worker: {resident[0]:,} MiB "
        f"at the start, {max(resident):,} MiB at the most, {resident[-1]:,} MiB at the end.",
    ]


def render() -> None:
    """Puts the runs between the markers of the page, and draws the plot."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE.name} lacks the lines {BEGIN} and {END}")
    picture = f"![Extraction of three boundaries over plain prefill]({PLOT.name})"
    PAGE.write_text("\n".join([before + BEGIN, "", picture, "", *lines(), end]) + after)
    draw()


def draw() -> None:
    """The share of plain prefill that extraction of three boundaries keeps, a bar for each shape and mix of rows."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    bars = [
        (f"{row['shape']}, {row['rows']} ({name})", of_plain, limit(row, run))
        for name, run in runs()
        for row in run["results"]
        if row["way"].startswith("extract 3") and (of_plain := share(row, run)) is not None
    ][::-1]
    style = {"font.size": 9, "font.family": "sans-serif", "svg.fonttype": "none", "svg.hashsalt": "layertap"}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(8.5, 0.32 * len(bars) + 0.9), layout="constrained")
        for place, (_, of_plain, limited) in enumerate(bars):
            axes.barh(place, of_plain, color="#2f6f9f" if limited == "the engine" else "#9fb6c9", height=0.7)
            axes.annotate(f"{of_plain:.2f}  {limited}", (of_plain, place), (4, -3), textcoords="offset points")
        axes.axvline(0.98, color="#33383f", linewidth=1)
        axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
        axes.set_xlim(0, 1.3)
        axes.set_xlabel("share of plain prefill (line: the aim, 0.98)")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        figure.savefig(PLOT, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


if __name__ == "__main__":
    render()
