"""Changes modules right after they have loaded, in a process that imports this at its start."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

Spoilers = Mapping[str, Callable[[ModuleType], None]]


def spoil(modules: Spoilers) -> None:
    """Has each of these modules, by name, changed by its function once it has loaded as ever."""
    sys.meta_path.insert(0, _Finder(modules))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, modules: Spoilers) -> None:
        self._modules = modules

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self._modules:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._modules[name])
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: importlib.abc.Loader, change: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._change = change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._change(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)
