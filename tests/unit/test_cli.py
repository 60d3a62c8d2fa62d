from __future__ import annotations

import subprocess
import sys

import pytest

from microturn import __version__
from microturn.cli import main


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"microturn {__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["serf"], ["serve", "--modle", "x"]])
def test_what_is_not_known_is_refused(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "microturn" in capsys.readouterr().err


def test_help_needs_no_heavy_import():
    script = """
import sys
from microturn.cli import main
try:
    main(["serve", "--help"])
except SystemExit:
    pass
print(sorted({"torch", "numpy", "grpc", "transformers", "tritonclient"} & set(sys.modules)))
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True).stdout
    assert said.splitlines()[-1] == "[]"
    assert "--health-port" in said


def test_fetch_prints_where_the_model_is(smollm2_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.strip() == smollm2_dir


def test_fetch_of_an_unknown_model_is_one_line_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "smollm3"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "unknown model 'smollm3'" in captured.err
