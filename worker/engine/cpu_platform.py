"""Lets SGLang run on a machine without a GPU, on its pure-PyTorch paths: an out-of-tree platform that says "cpu".

Activates only for an engine that Layertap started for the CPU (`LAYERTAP_ENGINE_DEVICE=cpu`). Small models only: it is
meant for tests, demos and checking a set-up, not for extraction at scale.
"""

import os
from typing import TYPE_CHECKING

DEVICE_VARIABLE = "LAYERTAP_ENGINE_DEVICE"


def activate() -> str | None:
    """Entry point of the group `sglang.srt.platforms`: the platform's class path, or None to stand aside."""
    if os.environ.get(DEVICE_VARIABLE) != "cpu":
        return None
    return "worker.engine.cpu_platform.CpuPlatform"


if not TYPE_CHECKING and os.environ.get(DEVICE_VARIABLE) == "cpu":
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    class CpuPlatform(CpuDeviceMixin, SRTPlatform):
        """The CPU as an out-of-tree platform, with attention in plain PyTorch."""

        _enum = PlatformEnum.OOT

        def get_default_attention_backend(self) -> str:
            """Attention without any compiled kernel."""
            return "torch_native"
