"""What `layertap up`, `service` and `worker` refuse before anything is started."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from layertap.cli import app, run


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["up", "--model", str(tmp_path)])
    assert result.exit_code == 2
    assert "holds no config.json" in result.stderr


def test_a_port_in_use_is_refused_with_the_option_to_change(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["up", "--model", str(model), "--port", port, "--data-dir", str(tmp_path / "data")]
        result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "--port" in result.stderr
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("part", ["service", "worker"])
def test_a_part_that_is_not_installed_says_which_extra_it_needs(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    result = CliRunner().invoke(app, [part, "--port", "1"])
    assert result.exit_code == 2
    assert f"layertap[{part}]" in result.stderr


def test_arguments_of_the_service_are_passed_through(tmp_path: Path) -> None:
    # A folder of the same name where one happens to be must not be taken for the service.
    (tmp_path / "service").mkdir()
    (tmp_path / "service" / "__main__.py").write_text("print('wrong')")
    command = [sys.executable, "-m", "layertap.cli", "service", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert "--database-url" in done.stdout
    assert "wrong" not in done.stdout


def test_the_parts_run_with_this_interpreter() -> None:
    assert run.command("service") == [sys.executable, "-P", "-m", "service"]
