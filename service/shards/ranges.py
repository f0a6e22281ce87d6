"""Conditional and partial downloads: what `If-None-Match`, `If-Range` and `Range` mean for one file. Pure.

RFC 9110, sections 13 and 14. Several ranges in one request are answered with the whole file, as the RFC allows.
"""

import re
from dataclasses import dataclass

_RANGE = re.compile(r"^\s*bytes\s*=\s*(\d*)\s*-\s*(\d*)\s*$", re.IGNORECASE)
_TAG = re.compile(r'(?:W/)?"[^"]*"')
_MAX_DIGITS = 18


@dataclass(frozen=True)
class Span:
    """Bytes `[start, stop)` of the file; `partial` asks for status 206."""

    start: int
    stop: int
    partial: bool


def matches(header: str | None, etag: str) -> bool:
    """Whether `If-None-Match` names `etag`, by weak comparison."""
    if header is None:
        return False
    if header.strip() == "*":
        return True
    return any(tag.removeprefix("W/") == etag for tag in _TAG.findall(header))


def span(header: str | None, if_range: str | None, etag: str, size: int) -> Span | None:
    """What to send of a file of `size` bytes; None where the asked range holds no byte of it (416).

    A `Range` that is malformed, or whose `If-Range` is not this very version, is ignored.
    """
    whole = Span(0, size, False)
    if header is None or (if_range is not None and if_range.strip() != etag):
        return whole
    match = _RANGE.match(header)
    if match is None or max(len(match[1]), len(match[2])) > _MAX_DIGITS:
        return whole
    first, last = match[1], match[2]
    if not first and not last:
        return whole
    if not first:
        length = min(int(last), size)
        return Span(size - length, size, True) if length else None
    start, stop = int(first), min(int(last) + 1, size) if last else size
    if last and int(last) < start:
        return whole
    return Span(start, stop, True) if start < size else None
