"""What every installer offers, and what it asks of the engine's command line and environment."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

from worker.patch.package import PatchState

InstallerName = Literal["plugin", "forward_hooks", "source"]
INSTALLERS: tuple[InstallerName, ...] = get_args(InstallerName)


@dataclass(frozen=True)
class Applied:
    """What the engine must be started with for the patch to take hold.

    `installer` None leaves the engine unpatched; `plugins` are names for `SGLANG_PLUGINS`, whatever else that lists.
    """

    installer: InstallerName | None
    arguments: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


UNPATCHED = Applied(installer=None)
"""The engine as it is, without the capture: the baseline that tells the patch's faults from the environment's."""


class Installer(Protocol):
    """Puts the attachment point into one installed SGLang and takes it out again. Both may be repeated."""

    @property
    def edit_text(self) -> str:
        """Everything this installer adds to the engine, for the patch's digest."""

    def apply(self) -> Applied:
        """Makes the next engine start with the capture, until `revert`. Raises `PatchError`."""

    def revert(self) -> None:
        """Leaves the package as it was, unless another live worker still needs the patch. Raises `PatchError`."""

    def state(self) -> PatchState:
        """The package on disk, every file of it, against its own record."""
