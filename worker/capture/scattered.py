"""Ways to run SGLang in which no one rank sees every row at every boundary, and so cannot be captured. Pure.

Asked by the worker of the arguments it was given, before an engine starts, and in the engine of those it ended up with.
"""

from collections.abc import Mapping

_DP_ATTENTION = "with DP attention each rank holds other rows; run several workers instead"
_CONTEXT_PARALLEL = "with context parallelism each rank holds other tokens; use --tensor-parallel"
_WHY = {
    "enable_dp_attention": _DP_ATTENTION,
    "attn_dp_size": _DP_ATTENTION,
    "attn_cp_size": _CONTEXT_PARALLEL,
    "enable_prefill_cp": _CONTEXT_PARALLEL,
    "nnodes": "the worker starts an engine on one machine; run a worker on each",
    "enable_two_batch_overlap": "two-batch overlap runs a batch in halves, whose rows have no known place: leave it",
    "pp_size": "with pipeline parallelism no rank has every boundary; use --tensor-parallel",
    "dp_size": "the worker speaks to one engine; run several workers instead",
}
NAMES = frozenset(_WHY)
"""SGLang's names of the arguments in question."""


def refusal(arguments: Mapping[str, object]) -> str | None:
    """Why an engine with these server arguments cannot be captured, or None where nothing speaks against it."""
    for name, value in arguments.items():
        off = value is None or value is False or str(value) == "1"
        if name in _WHY and not off:
            return f"--{name.replace('_', '-')}: {_WHY[name]}"
    return None
