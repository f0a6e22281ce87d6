"""Which installer to use on an installed SGLang, and what identifies the whole patch."""

from hashlib import sha256
from pathlib import Path
from typing import Literal

import worker.capture
from worker.patch.attachment import ForwardHooksInstaller, PluginInstaller
from worker.patch.installer import INSTALLERS, Installer, InstallerName
from worker.patch.package import TARGET, PatchError
from worker.patch.source import SourceInstaller

_NEEDS = {
    "plugin": "srt/plugins/__init__.py",
    "forward_hooks": "srt/model_executor/hook_manager.py",
    "source": TARGET,
}
"""The file of the package without which an installer has nothing to hold on to."""


def choose(asked: Literal["auto"] | InstallerName, package: Path) -> InstallerName:
    """The installer asked for, else the first that this SGLang offers. Raises `PatchError` where it does not."""
    offered = offers(package)
    if asked == "auto":
        if not offered:
            raise PatchError(f"{package} offers no way in for the capture; install SGLang 0.5.9 or newer")
        return offered[0]
    if asked not in offered:
        remedy = " or ".join(offered) or "SGLang 0.5.9 or newer"
        raise PatchError(f"--installer {asked}: {package} has no {_NEEDS[asked]}; use {remedy}")
    return asked


def offers(package: Path) -> list[InstallerName]:
    """The installers that this SGLang has something for to hold on to, the least invasive first."""
    return [name for name in INSTALLERS if (package / _NEEDS[name]).is_file()]


def make(name: InstallerName, package: Path, root: Path | None = None) -> Installer:
    """The installer of that name for one package. `root` is where the journals of `source` lie."""
    if name == "plugin":
        return PluginInstaller(package, root)
    if name == "forward_hooks":
        return ForwardHooksInstaller(package, root)
    return SourceInstaller(package, root)


def restore_abandoned(package: Path, root: Path | None = None) -> None:
    """Takes out what a dead worker left in the package, unless a live one needs it. Raises `PatchError`."""
    SourceInstaller(package, root).revert()


def patch_digest(installer: Installer) -> str:
    """Sha256 of everything that the patch adds to the engine: the capture's sources and the installer's edit."""
    digest = sha256()
    folder = Path(worker.capture.__file__).parent
    parts = [(path.name, path.read_bytes()) for path in sorted(folder.glob("*.py"))]
    for name, data in [*parts, ("edit", installer.edit_text.encode())]:
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()
