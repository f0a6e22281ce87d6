"""Installed SGLang packages to patch: small made-up ones, and the released wheels unpacked with nothing else."""

import base64
import csv
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

WHEELS = Path(__file__).resolve().parent.parent / ".layertap" / "test-wheels"
"""Downloaded once for a checkout."""
RELEASES = ("0.5.9", "0.5.10", "0.5.16", "0.5.23")
_DOWNLOAD_SECONDS = 300

MODEL_RUNNER = '''\
"""A model runner without a model."""

import logging

logger = logging.getLogger(__name__)


class ModelRunner:
    def __init__(self):
        self.model = None

    def load_model(self):
        self.model = object()
        if self.model is None:
            raise ValueError("no model")

    def forward(self):
        return self.model
'''
FILES = {
    "__init__.py": '__version__ = "9.8.7"\n',
    "srt/__init__.py": "",
    "srt/environ.py": "FLAGS = {}\n",
    "srt/model_executor/__init__.py": "",
    "srt/model_executor/hook_manager.py": "",
    "srt/model_executor/model_runner.py": MODEL_RUNNER,
    "srt/plugins/__init__.py": "",
    "kernels/a, b.json": "{}\n",
}


def install(site: Path, version: str = "9.8.7", files: dict[str, str] = FILES) -> Path:
    """A package of these files below `site`, with its record; what a package installer would leave."""
    package, info = site / "sglang", site / f"sglang-{version}.dist-info"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    info.mkdir()
    with (info / "RECORD").open("w", newline="") as file:
        rows = csv.writer(file)
        for name, text in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.writerow([f"sglang/{name}", f"sha256={digest}", len(text.encode())])
        rows.writerow(["sglang/__pycache__/__init__.cpython-311.pyc", "", ""])
        rows.writerow([f"{info.name}/RECORD", "", ""])
    return package


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder` by its path there."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small made-up SGLang."""
    return install(tmp_path / "site")


@pytest.fixture(scope="session")
def released(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Gives the package folder of a release, unpacked from its wheel once a run. Whoever changes it changes it back."""
    root, unpacked = tmp_path_factory.mktemp("releases"), dict[str, Path]()

    def package_of(version: str) -> Path:
        if version not in unpacked:
            with zipfile.ZipFile(wheel(version)) as archive:
                archive.extractall(root / version)
            unpacked[version] = root / version / "sglang"
        return unpacked[version]

    return package_of


def wheel(version: str) -> Path:
    """The wheel of that release, from the package index if need be."""
    found = list(WHEELS.glob(f"sglang-{version}-*.whl"))
    if not found:
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        WHEELS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=WHEELS) as partial:
            words += ["--disable-pip-version-check", "--dest", partial, f"sglang=={version}"]
            got = subprocess.run(words, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
            assert got.returncode == 0, f"the wheel of sglang {version} could not be downloaded:\n{got.stderr}"
            (path,) = Path(partial).iterdir()
            found = [path.rename(WHEELS / path.name)]
    return found[0]
