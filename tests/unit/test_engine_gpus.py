"""Which GPUs are an engine's own, as CUDA and SGLang would give them out."""

from dataclasses import replace

import pytest

from tests.unit.test_engine_spec import SPEC
from worker.engine.gpus import gpus_of

GPU = replace(SPEC, device="cuda", extra_args=())


@pytest.mark.parametrize(
    ("visible", "tensor_parallel", "extra", "names"),
    [
        (None, 1, (), ("0",)),
        (None, 2, (), ("0", "1")),
        ("3", 1, (), ("3",)),
        ("4,5,6", 2, (), ("4", "5")),
        ("GPU-8932f937,GPU-1b", 1, (), ("GPU-8932f937",)),
        ("MIG-e91edf3c-e297", 1, (), ("MIG-e91edf3c-e297",)),
        ("4, 5,6", 2, ("--base-gpu-id=1",), ("5", "6")),
        ("0,1,2,3", 2, ("--gpu-id-step=2",), ("0", "2")),
        (None, 2, ("--base-gpu-id", "4"), ("4", "5")),
        # CUDA sees none from the first bad name on.
        ("2,-1,3", 2, (), ("2",)),
        ("", 1, (), ()),
        # What SGLang itself will refuse is no reason to fail here.
        (None, 1, ("--base-gpu-id", "--gpu-id-step=two"), ("0",)),
    ],
)
def test_an_engine_has_the_gpus_of_its_ranks(
    visible: str | None, tensor_parallel: int, extra: tuple[str, ...], names: tuple[str, ...]
) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpus_of(replace(GPU, tensor_parallel=tensor_parallel, extra_args=extra), environ) == names


def test_an_engine_on_the_cpu_has_none() -> None:
    assert gpus_of(SPEC, {"CUDA_VISIBLE_DEVICES": "0"}) == ()
