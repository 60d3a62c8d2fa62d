"""Modules compiled ahead of time are those that FlashInfer looks for when our steps are planned."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flashinfer
import pytest
import torch
from flashinfer.jit.attention import get_batch_prefill_uri

from microturn.cli import main
from microturn.errors import FailedPrecondition
from microturn.kv.layer_groups import LayerShape
from microturn.model.batch import Batch, Row
from microturn.model.gpu import ahead
from microturn.model.gpu.ahead import KernelType, kernel_types, without_kernels
from microturn.model.gpu.flashinfer_kernel import Kernel
from microturn.model.paged_step import PagedStep
from support import recorded_graphs

PAGE_SIZE = 16
BFLOAT16, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
TYPES = kernel_types([64, 128, 256], [BFLOAT16, FLOAT8], (False, True), (False, True))


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """URIs of the modules that FlashInfer's own wrapper has asked for."""
    recorded_graphs.install(monkeypatch)
    uris: list[str] = []

    def module(*arguments: Any) -> SimpleNamespace:
        uris.append(get_batch_prefill_uri(*arguments))
        return SimpleNamespace(plan=lambda *_: [])

    monkeypatch.setattr(flashinfer.prefill, "get_batch_prefill_module", module)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options | {"pin_memory": False}))
    return uris


@pytest.mark.parametrize("of", TYPES, ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_a_kernel_asks_for_the_module_of_its_type(of: KernelType, causal: bool, asked_for: list[str]) -> None:
    layer = LayerShape(2, of.head_dim, 40 if of.has_window else None)
    workspace = torch.empty(1 << 10, dtype=torch.uint8)
    soft_cap = 30.0 if of.has_soft_cap else None
    kernel = Kernel(workspace, layer, soft_cap, 8, PAGE_SIZE, of.dtype, of.kv_dtype, causal=causal)
    kernel.plan(_step())
    assert asked_for == [get_batch_prefill_uri(*of.module_arguments())]


def test_all_types_are_different_modules() -> None:
    uris = {get_batch_prefill_uri(*of.module_arguments()) for of in TYPES}
    assert len(uris) == len(list(product("abc", "ab", "ab", "ab")))


def test_those_without_a_window_and_of_the_first_type_come_first() -> None:
    ordered = kernel_types([64, 128], [BFLOAT16, FLOAT8], (False, True))
    assert [(of.head_dim, of.kv_dtype, of.has_window) for of in ordered[:3]] == [
        (64, BFLOAT16, False),
        (128, BFLOAT16, False),
        (64, FLOAT8, False),
    ]


@pytest.mark.parametrize("kind", ["Paged", "Ragged"])
def test_generated_files_are_such_that_kernels_can_be_left_out(kind: str) -> None:
    template = Path(flashinfer.__file__).parent / "data/csrc" / f"batch_prefill_{kind.lower()}_kernel_inst.jinja"
    source = re.sub(r"{[{%#].*?[}%#]}", "0", template.read_text(), flags=re.DOTALL)
    stub = without_kernels(source)
    assert "prefill.cuh" not in stub
    assert stub.index("return cudaErrorNotSupported") < stub.index(f"template cudaError_t BatchPrefillWith{kind}")
    # Functions of the same names as before are made: the other files call them.
    assert source[source.index("constexpr auto use_custom_mask") :] in stub


@pytest.mark.parametrize(
    "source", ["", "int main() {}", "namespace flashinfer {\nBatchPrefillWithPagedKVCacheDispatched<"]
)
def test_files_of_another_form_are_compiled_whole(source: str) -> None:
    assert without_kernels(source) == source


@pytest.mark.parametrize(
    ("has_nvcc", "reason"),
    [
        (False, "no CUDA compiler: there is no bin/nvcc in {}/cuda"),
        (True, "kernels are compiled with no-c++, which is not on the PATH"),
    ],
)
def test_what_is_needed_to_compile_is_told(has_nvcc: bool, reason: str, tmp_path: Path) -> None:
    if has_nvcc:
        (tmp_path / "cuda/bin").mkdir(parents=True)
        (tmp_path / "cuda/bin/nvcc").touch()
    command = ["kernels", "--archs", "9.0a", "--cuda-home", str(tmp_path / "cuda"), "--work", str(tmp_path)]
    script = f"import sys; from microturn.cli import main; sys.exit(main({command}))"
    environment = os.environ | {"CXX": "no-c++"}
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert ran.returncode == 1
    assert ran.stderr == f"microturn: error: {reason.format(tmp_path)}\n"


@pytest.mark.parametrize(
    "arguments", [[], ["--archs", "9.0a", "--head-dims", "96"], ["--archs", "9.0a", "--kv-dtypes", "int8"]]
)
def test_what_cannot_be_built_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["kernels", *arguments])


def test_what_the_compiler_says_is_told(tmp_path: Path) -> None:
    def fail(**_options: bool) -> None:
        raise RuntimeError("Ninja build failed. nvcc fatal: Unsupported gpu architecture")

    spec = SimpleNamespace(name="page", build=fail)
    with pytest.raises(FailedPrecondition, match=r"module page cannot be compiled: .*Unsupported gpu architecture"):
        ahead._built(spec, tmp_path)


def test_a_library_appears_whole_under_the_name_that_flashinfer_looks_for(tmp_path: Path) -> None:
    compiled = tmp_path / "compiled.so"
    compiled.write_bytes(Path(torch._C.__file__).read_bytes())
    spec = SimpleNamespace(name="page", build=lambda **_options: None, jit_library_path=compiled)
    library = ahead._built(spec, tmp_path / "aot")
    assert library == tmp_path / "aot" / "page" / "page.so"
    assert [path.name for path in library.parent.iterdir()] == ["page.so"]


def _step() -> PagedStep:
    (step,) = PagedStep.plan(Batch([Row([1, 2, 3], 20, [0, 1])]), PAGE_SIZE, 0, 1)
    return step
