"""The installers that ask SGLang itself to call the capture, and change nothing on disk."""

import json
from pathlib import Path

from worker.capture.installed import INSTALLER_VARIABLE
from worker.patch import claims
from worker.patch.installer import Applied
from worker.patch.package import PatchState, check
from worker.patch.source import state_directory

PLUGIN_NAME = "layertap_capture"
"""The entry point in the group `sglang.srt.plugins`."""
_HOOK_FACTORY = "worker.capture.forward_hooks:attach_from_here"
_HOOK_SPEC = {"name": PLUGIN_NAME, "target_modules": [""], "hook_factory": _HOOK_FACTORY}
"""The pattern "" is the model itself, which SGLang runs by `model.forward(...)`: a hook there never fires."""


class _Attachment:
    def __init__(self, package: Path, root: Path | None = None) -> None:
        self._package = package.resolve()
        self._directory = state_directory(self._package, root)

    def revert(self) -> None:
        """There is nothing to undo."""

    def state(self) -> PatchState:
        """The package on disk, every file of it, against its own record."""
        return check(self._package, claims.holders(self._directory))


class PluginInstaller(_Attachment):
    """SGLang's plugin framework, 0.5.11 and newer: the capture's entry point is named in `SGLANG_PLUGINS`."""

    @property
    def edit_text(self) -> str:
        """The entry point."""
        return PLUGIN_NAME

    def apply(self) -> Applied:
        """What the engine's environment must say."""
        return Applied("plugin", plugins=(PLUGIN_NAME,), environment={INSTALLER_VARIABLE: "plugin"})


class ForwardHooksInstaller(_Attachment):
    """SGLang's `--forward-hooks`, 0.5.9 and newer: its hook factory runs once the model is loaded, and attaches."""

    @property
    def edit_text(self) -> str:
        """The hook specification."""
        return json.dumps([_HOOK_SPEC])

    def apply(self) -> Applied:
        """What the engine's command line and environment must say."""
        arguments = ("--forward-hooks", self.edit_text)
        return Applied("forward_hooks", arguments, environment={INSTALLER_VARIABLE: "forward_hooks"})
