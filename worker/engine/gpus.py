"""Which GPUs of the machine an engine is given: the others are other workers'. Pure."""

from collections.abc import Mapping

from worker.engine.spec import EngineSpec, asked


def gpus_of(spec: EngineSpec, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The engine's GPUs as CUDA_VISIBLE_DEVICES names them: by number, or by the beginning of a UUID.

    Without that variable they are numbered, as in `nvidia-smi`. SGLang gives rank r the visible GPU
    `base_gpu_id + r * gpu_id_step`. Fewer than there are ranks, or none, where fewer can be seen.
    """
    if spec.device != "cuda":
        return ()
    arguments = asked(spec.extra_args)
    first, step = _number(arguments.get("base_gpu_id"), 0), _number(arguments.get("gpu_id_step"), 1)
    places = [first + rank * step for rank in range(spec.tensor_parallel)]
    seen = visible(environ)
    if seen is None:
        return tuple(map(str, places))
    return tuple(seen[place] for place in places if place < len(seen))


def visible(environ: Mapping[str, str]) -> list[str] | None:
    """The GPUs that CUDA_VISIBLE_DEVICES names; None where it is not set, and all can be seen."""
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    names = [name.strip() for name in value.split(",")]
    # CUDA sees no GPU from the first bad name on.
    return names[: next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))]


def _number(value: object, otherwise: int) -> int:
    return int(value) if isinstance(value, str) and value.isdecimal() else otherwise
