"""Evidence cut to a size: the log keeps its end, a stack its beginning, the rest is cut only where it must be.

Pure. Sizes are bytes of JSON in UTF-8, the form in which evidence is stored.
"""

from collections.abc import Sequence

from pydantic_core import to_json

from layertap.schemas.incidents import MAX_EVIDENCE_BYTES, Evidence, ProcessEvidence

_ENTRIES = (100, 50, 20, 10, 5, 2, 0)
"""How many processes, lines and names are kept, the first number that fits, where they alone are too many."""
_MAX_TEXT = 200
_CUT = "[cut to fit]"


def fitted(evidence: Evidence, limit: int = MAX_EVIDENCE_BYTES) -> Evidence:
    """The evidence in at most `limit` bytes (at least 200).

    The log and the stacks are cut first, the longest most, and keep half of `limit` between them; then the rest.
    """
    if size(evidence) <= limit:
        return evidence
    frame = _without_texts(evidence)
    for most in _ENTRIES:
        if size(frame) <= limit // 2:
            break
        frame = _without_texts(_shortened(evidence, most))
    kept = evidence.processes[: len(frame.processes)]
    texts = [evidence.log_tail, *(process.stack for process in kept)]
    share = _share([_bytes(text) for text in texts], limit - size(frame))
    processes = [
        process.model_copy(update={"stack": _beginning(whole.stack, share)})
        for process, whole in zip(frame.processes, kept, strict=True)
    ]
    return frame.model_copy(update={"log_tail": _end(evidence.log_tail, share), "processes": processes})


def size(evidence: Evidence) -> int:
    """Bytes of the evidence as it is stored."""
    return len(to_json(evidence))


def _bytes(text: str) -> int:
    """What a text adds to the JSON document it is in."""
    return len(to_json(text)) - 2


def _without_texts(evidence: Evidence) -> Evidence:
    processes = [process.model_copy(update={"stack": ""}) for process in evidence.processes]
    return evidence.model_copy(update={"log_tail": "", "processes": processes})


def _shortened(evidence: Evidence, most: int) -> Evidence:
    return Evidence(
        processes=[_short_process(process) for process in evidence.processes[:most]],
        gpu=[line[:_MAX_TEXT] for line in evidence.gpu[:most]],
        signals=_short_names(evidence.signals, most),
        engine=_short_names(evidence.engine, most),
    )


def _short_process(process: ProcessEvidence) -> ProcessEvidence:
    names = ("command", "state", "wait_channel")
    return process.model_copy(update={name: getattr(process, name)[:_MAX_TEXT] for name in names})


def _short_names(values: dict[str, str], most: int) -> dict[str, str]:
    return {name[:_MAX_TEXT]: value[:_MAX_TEXT] for name, value in list(values.items())[:most]}


def _share(sizes: Sequence[int], room: int) -> int:
    """The most that each text may take, so that all fit into `room` and short ones stay whole."""
    for rank, taken in enumerate(sorted(sizes)):
        left = len(sizes) - rank
        if taken * left > room:
            return max(0, room // left)
        room -= taken
    return max(sizes, default=0)


def _end(text: str, room: int) -> str:
    if _bytes(text) <= room:
        return text
    kept = text[len(text) - _longest(text[::-1], room - _bytes(_CUT + "\n")) :]
    # A line whose beginning is missing would mislead.
    return f"{_CUT}\n{kept.partition(chr(10))[2] or kept}" if kept else ""


def _beginning(text: str, room: int) -> str:
    if _bytes(text) <= room:
        return text
    kept = text[: _longest(text, room - _bytes("\n" + _CUT))]
    return f"{kept}\n{_CUT}" if kept else ""


def _longest(text: str, room: int) -> int:
    """How many characters from the beginning of `text` take at most `room` bytes."""
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        if _bytes(text[:middle]) <= room:
            low = middle
        else:
            high = middle - 1
    return low
