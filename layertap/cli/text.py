"""How figures are written for people: sizes, durations, ages, counts. Pure functions."""

import re
from datetime import UTC, datetime

from layertap.schemas.figures import Figures
from layertap.schemas.jobs import JobState

STATE_STYLES = {
    JobState.QUEUED: "dim",
    JobState.PLANNING: "cyan",
    JobState.RUNNING: "cyan",
    JobState.FINALIZING: "cyan",
    JobState.CANCELLING: "yellow",
    JobState.SUCCEEDED: "green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "yellow",
}


def size(count: int | None) -> str:
    """Bytes with a decimal unit: 999 B, 12.3 MB."""
    if count is None:
        return "–"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 999.5 or unit == "TB":
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    raise AssertionError("the last unit returns")


def per_cent(share: float | None) -> str:
    """93 %; a dash where unknown."""
    return "–" if share is None else f"{100 * share:.0f} %"


def speed(figures: Figures) -> list[str]:
    """1,234 tokens/s, 40.4 MB/s, and 93 % of plain prefill where that is known."""
    words = [f"{figures.tokens_per_second:,.0f} tokens/s", f"{size(int(figures.bytes_per_second))}/s"]
    return words if figures.plain_share is None else [*words, f"{per_cent(figures.plain_share)} of plain prefill"]


def duration(seconds: float | None) -> str:
    """Seconds as 0:42, 3:07:00."""
    if seconds is None:
        return "–"
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours}:{minutes:02d}:{whole % 60:02d}" if hours else f"{minutes}:{whole % 60:02d}"


def age(moment: datetime) -> str:
    """How long ago: 12 s ago, 3 h ago."""
    seconds = max(0.0, (datetime.now(UTC) - moment.astimezone(UTC)).total_seconds())
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit} ago"
    return f"{seconds / 86_400:.0f} days ago"


def count(done: int | None, total: int | None = None) -> str:
    """12,345 or 12,345/67,890; a dash where unknown."""
    if done is None:
        return "–"
    return f"{done:,}" if total is None else f"{done:,}/{total:,}"


def counted(number: int, noun: str) -> str:
    """1 row, 12,345 rows."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


_CONTROL = re.compile(
    r"\x1b(?:\[[0-?]{0,200}[ -/]{0,20}[@-~]|\][^\x07\x1b]{0,2000}(?:\x07|\x1b\\)|[@-Z\\^_]?)"
    r"|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def printable(value: str) -> str:
    """Text of another program without anything that would steer the terminal; lines and tabs stay."""
    return _CONTROL.sub("", value)


def moment(value: datetime) -> str:
    """2026-11-30 02:11:22 UTC."""
    return f"{value.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def state(value: JobState) -> str:
    """The state with its colour, as rich markup."""
    return f"[{STATE_STYLES[value]}]{value}[/]"
