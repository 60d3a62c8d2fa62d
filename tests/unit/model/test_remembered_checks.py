"""A restart does not check again what was checked; whatever could change the outcome is checked anew."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.model import probe, remembered_checks, rotary_fit, tracing
from microturn.model.batch import Batch, Row
from microturn.model.cpu import attention as native
from microturn.model.cpu import loading as cpu_loading
from microturn.model.cpu import probe_int8
from microturn.model.loaded import Loaded
from microturn.model.traits import Traits
from microturn.settings import Settings
from support import models
from support.tiny_model_dir import write_tiny_model

Make = Callable[[], PreTrainedModel]


class Checks:
    """How often models were checked, and passes looked for their traits."""

    num_float32 = 0
    num_int8 = 0
    num_traced = 0
    num_fitted = 0


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> Checks:
    checks = Checks()
    check_model, int8_decoder = probe.check_model, probe_int8.int8_decoder

    def counted_check(*args: object, **options: object) -> object:
        checks.num_float32 += 1
        return check_model(*args, **options)  # type: ignore[arg-type]

    def counted_int8(*args: object) -> object:
        checks.num_int8 += 1
        return int8_decoder(*args)  # type: ignore[arg-type]

    def counted_trace(model: PreTrainedModel) -> object:
        checks.num_traced += 1
        return trace_layers(model)

    def counted_fit(model: PreTrainedModel) -> None:
        checks.num_fitted += 1
        install(model)

    trace_layers, install = tracing.trace_layers, rotary_fit.install
    monkeypatch.setattr(tracing, "trace_layers", counted_trace)
    monkeypatch.setattr(rotary_fit, "install", counted_fit)
    monkeypatch.setattr(cpu_loading, "check_model", counted_check)
    monkeypatch.setattr(cpu_loading, "int8_decoder", counted_int8)
    return checks


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model_dir = write_tiny_model(tmp_path / "tiny")
    return Settings(model_dir=str(model_dir), kv_tokens=256, max_context=256, check_dir=str(tmp_path / "checks"))


def logits_of(loaded: Loaded) -> torch.Tensor:
    return loaded.runner.run(Batch([Row([3, 1, 4, 1, 5], 0, [0])])).clone()


@pytest.mark.parametrize("weights", ["auto", "float32"])
def test_a_second_start_checks_nothing_and_computes_the_same(settings: Settings, checks: Checks, weights: str) -> None:
    settings = replace(settings, weights=weights)
    first = cpu_loading.load(settings)
    counted = (checks.num_float32, checks.num_int8)
    assert counted == (1, int(weights == "auto"))
    second = cpu_loading.load(settings)
    assert (checks.num_float32, checks.num_int8) == counted
    assert (checks.num_traced, checks.num_fitted) == (1, 1)
    assert (first.weights, first.attention) == (second.weights, second.attention)
    assert type(first.runner.decoder) is type(second.runner.decoder)
    assert torch.equal(logits_of(first), logits_of(second))


def test_what_was_found_is_kept_whole(tmp_path: Path, checks: Checks) -> None:
    """A model on transformers' layers, whose window must not slide."""
    directory = tmp_path / "model"
    models.layer_norms().save_pretrained(directory)
    settings = Settings(
        model_dir=str(directory), kv_tokens=256, max_context=256, check_dir=str(tmp_path / "checks"), weights="float32"
    )
    first, second = cpu_loading.load(settings), cpu_loading.load(settings)
    assert checks.num_float32 == 1
    assert first.runner.decoder is second.runner.decoder is None
    assert first.runner.no_window_reason == second.runner.no_window_reason
    assert first.no_fused_reason == second.no_fused_reason
    assert first.no_int8_reason == second.no_int8_reason
    assert first.runner.accepts_embeds == second.runner.accepts_embeds


def _other_setting(settings: Settings, _: pytest.MonkeyPatch) -> Settings:
    return replace(settings, weights="float32")


def _other_attention(settings: Settings, _: pytest.MonkeyPatch) -> Settings:
    return replace(settings, attention="torch")


def _other_kernels(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """As where OpenMP's library is missing now."""
    reason = "Numba's OpenMP layer does not load"
    monkeypatch.setattr(native, "unavailable_reason", lambda *_: reason)
    return settings


def _other_weights(settings: Settings, _: pytest.MonkeyPatch) -> Settings:
    (path,) = Path(settings.model_dir).glob("*.safetensors")
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    return settings


def _touched(settings: Settings, _: pytest.MonkeyPatch) -> Settings:
    os.utime(Path(settings.model_dir) / "config.json", (1, 1))
    return settings


def _other_library(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Told by the library: one without metadata was ``unknown`` in every version, and an upgrade checked nothing."""
    monkeypatch.setattr("llvmlite.__version__", "99")
    return settings


def _other_build_of_torch(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(torch.__config__, "show", lambda: "with other kernels")
    return settings


def _other_sources(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    source = Path(settings.check_dir).parent / "sources" / "some.py"
    source.parent.mkdir()
    source.write_text("changed")
    monkeypatch.setattr(remembered_checks, "_PACKAGE", source.parent)
    return settings


def _other_variable(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    return settings


def _damaged(settings: Settings, _: pytest.MonkeyPatch) -> Settings:
    (file,) = Path(settings.check_dir).iterdir()
    file.write_text(file.read_text()[:-5])
    return settings


def _of_another_release(settings: Settings, _: pytest.MonkeyPatch) -> Settings:
    (file,) = Path(settings.check_dir).iterdir()
    file.write_text('{"is_fast": true}')
    return settings


def _of_other_traits(settings: Settings, _: pytest.MonkeyPatch) -> Settings:
    (file,) = Path(settings.check_dir).iterdir()
    file.write_text(json.dumps(json.loads(file.read_bytes()) | {"traits": {"layers": [[0]], "rotary": ["model"]}}))
    return settings


def _nowhere(settings: Settings, _: pytest.MonkeyPatch) -> Settings:
    return replace(settings, check_dir="")


@pytest.mark.parametrize(
    "change",
    [
        _other_setting,
        _other_attention,
        _other_kernels,
        _other_weights,
        _touched,
        _other_library,
        _other_build_of_torch,
        _other_sources,
        _other_variable,
        _damaged,
        _of_another_release,
        _of_other_traits,
        _nowhere,
    ],
)
def test_whatever_could_change_the_outcome_is_checked_anew(
    settings: Settings,
    checks: Checks,
    change: Callable[[Settings, pytest.MonkeyPatch], Settings],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu_loading.load(settings)
    changed = change(settings, monkeypatch)
    cpu_loading.load(changed)
    assert checks.num_float32 == 2
    cpu_loading.load(changed)
    assert checks.num_float32 == (2 if changed.check_dir else 3)


def test_a_refusal_is_found_again_at_every_start(
    settings: Settings, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "TOLERANCE", 0.0)
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="cannot be served"):
            cpu_loading.load(settings)
    assert checks.num_float32 == 2
    assert not Path(settings.check_dir).exists()


def test_where_nothing_can_be_kept_every_start_checks_and_says_why(
    settings: Settings, checks: Checks, caplog: pytest.LogCaptureFixture
) -> None:
    Path(settings.check_dir).write_text("a file where the directory should be")
    for _ in range(2):
        assert cpu_loading.load(settings).weights == "int8"
    assert checks.num_float32 == 2
    assert "the results of the checks at load are not cached" in caplog.text


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow: the system refuses each write, as on a disk that is full."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_leaves_no_partial_file(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    remembered = remembered_checks.RememberedChecks(
        Path(settings.check_dir), settings, no_native_reason=None, num_threads=1
    )
    with full_disk():
        remembered.remember(remembered_checks.Outcome("int8", None, None, True, None, Traits({}, None)))
    assert "the results of the checks at load are not cached" in caplog.text
    assert list(Path(settings.check_dir).iterdir()) == []


def test_a_link_that_leads_nowhere_does_not_keep_a_model_from_its_start(settings: Settings, checks: Checks) -> None:
    (Path(settings.model_dir) / "original").symlink_to("/nowhere/weights")
    for _ in range(2):
        assert cpu_loading.load(settings).weights == "int8"
    assert checks.num_float32 == 1


def test_a_library_that_is_not_installed_does_not_keep_a_model_from_its_start(
    settings: Settings, checks: Checks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(remembered_checks, "import_module", import_module)
    for _ in range(2):
        assert cpu_loading.load(settings).weights == "int8"
    assert checks.num_float32 == 1
