"""FlashInfer's kernels, compiled ahead of time: on a machine with a CUDA compiler, for machines that may have none.

FlashInfer compiles a module when it is first used, unless `flashinfer/data/aot/URI/URI.so` is there. A URI names types,
head size, and whether there is a window or a soft cap, but not FlashInfer's version and not the GPU: modules are for
one version, and for the architectures they are compiled for.

Of a module's attention kernels only those are compiled that `Kernel` runs: over pages, with a causal mask or none. They
take a third of the time of all. The others report `cudaErrorNotSupported`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from microturn.errors import FailedPrecondition, InvalidArgument

# FlashInfer's number for positions that a kernel does not rotate.
_NO_ROTATION = 0
# Its numbers for masks that `Kernel` never asks for, custom and of several items, in the names of generated files.
_UNUSED = ("ragged", "mask_2", "mask_3")

_KERNELS = "#include <flashinfer/attention/prefill.cuh>\n"
_MASKS = "#include <flashinfer/attention/mask.cuh>\n"
_CONFIG = '#include "batch_prefill_config.inc"\n'
_NAMESPACE = "namespace flashinfer {\n"
_NOT_SUPPORTED = """
template <uint32_t CTA_TILE_Q, uint32_t HEAD_DIM_QK, uint32_t HEAD_DIM_VO, PosEncodingMode POS_ENCODING_MODE,
          bool USE_FP16_QK_REDUCTION, MaskMode MASK_MODE, typename AttentionVariant, typename Params>
cudaError_t BatchPrefillWith{kind}KVCacheDispatched(Params, typename Params::DTypeO*, float*, bool, cudaStream_t) {{
  return cudaErrorNotSupported;
}}
"""


@dataclass(frozen=True)
class KernelType:
    """What FlashInfer compiles an attention module for; names as `Kernel` has them.

    Attributes:
        has_window: whether queries see a limited number of keys back.
        has_soft_cap: whether scores have a soft cap.
    """

    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    has_window: bool = False
    has_soft_cap: bool = False

    def module_arguments(self) -> tuple[Any, ...]:
        """The arguments of FlashInfer's `get_batch_prefill_uri` and `gen_batch_prefill_module`."""
        return (
            "fa2",
            self.dtype,
            self.kv_dtype,
            self.dtype,
            torch.int32,
            self.head_dim,
            self.head_dim,
            _NO_ROTATION,
            self.has_window,
            self.has_soft_cap,
            False,  # products in float16
        )


def kernel_types(
    head_dims: Sequence[int],
    kv_dtypes: Sequence[torch.dtype],
    windows: Sequence[bool] = (False,),
    soft_caps: Sequence[bool] = (False,),
    dtype: torch.dtype = torch.bfloat16,
) -> list[KernelType]:
    """Every combination, in the order of the arguments; the head size changes fastest."""
    return [
        KernelType(head_dim, dtype, kv_dtype, has_window, has_soft_cap)
        for has_soft_cap, has_window, kv_dtype, head_dim in product(soft_caps, windows, kv_dtypes, head_dims)
    ]


def prepare(archs: Sequence[str], cuda_home: Path | None, work_dir: Path, num_jobs: int) -> None:
    """Tells FlashInfer what to compile for, with which compiler and where. Call it before FlashInfer is imported.

    Args:
        archs: compute capabilities, as "9.0a".
        cuda_home: the directory above `bin/nvcc`; by default the compiler of the wheels `nvidia-cuda-nvcc`, else
            $CUDA_HOME, else /usr/local/cuda.
        work_dir: for generated sources and objects; what was compiled there is not compiled again.
        num_jobs: compilers at a time.

    Errors:
        FailedPrecondition: there is no compiler, or no ninja.
    """
    assert "flashinfer" not in sys.modules, "FlashInfer has read its environment already"
    home = _cuda_home(cuda_home)
    libraries = work_dir / "libraries"
    libraries.mkdir(parents=True, exist_ok=True)
    # Wheels have no libcudart.so without a version. A machine without a driver has no libcuda; no function of it is
    # used, and an empty archive satisfies the linker.
    (libraries / "libcuda.a").write_bytes(b"!<arch>\n")
    runtime = libraries / "libcudart.so"
    runtime.unlink(missing_ok=True)
    if found := sorted(home.glob("lib*/libcudart.so.*")):
        runtime.symlink_to(found[0])
    flags = f"{os.environ.get('FLASHINFER_EXTRA_LDFLAGS', '')} -L{libraries}"
    os.environ.update(
        CUDA_HOME=str(home),
        FLASHINFER_CUDA_ARCH_LIST=" ".join(archs),
        FLASHINFER_WORKSPACE_BASE=str(work_dir),
        FLASHINFER_EXTRA_LDFLAGS=flags.strip(),
        MAX_JOBS=str(num_jobs),
        PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",  # ninja may be beside Python
    )
    for program in (os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(program) is None:
            raise FailedPrecondition(f"kernels are compiled with {program}, which is not on the PATH")


def installed_modules() -> Path:
    """Where FlashInfer looks for modules before it compiles them."""
    from flashinfer.jit import env

    return Path(env.FLASHINFER_AOT_DIR)


def build(types: Sequence[KernelType], out: Path) -> Iterator[Path]:
    """Compiles what steps with layers of these types need, after `prepare`; the common modules first.

    Yields:
        Each library as it is finished: `out/URI/URI.so`.

    Errors:
        FailedPrecondition: the compiler failed; the message ends with what it printed.
        InvalidArgument: FlashInfer has no such module, or the compiler knows no such architecture.
    """
    from flashinfer.jit.attention import gen_batch_prefill_module
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.page import gen_page_module

    yield _built(gen_page_module(), out)
    for of in types:
        try:
            spec = gen_batch_prefill_module(*of.module_arguments())
        except (AssertionError, KeyError, ValueError) as error:
            raise InvalidArgument(f"FlashInfer has no module for {of}: {error}") from None
        spec.sources = [_without_unused(source) for source in spec.sources]
        yield _built(spec, out)
    yield _built(gen_cascade_module(), out)


def without_kernels(source: str) -> str:
    """A generated file with its kernels replaced by an error, or unchanged where it is not as expected."""
    kinds = [kind for kind in ("Paged", "Ragged") if f"BatchPrefillWith{kind}KVCacheDispatched<" in source]
    if len(kinds) != 1 or not all(source.count(part) == 1 for part in (_KERNELS, _CONFIG, _NAMESPACE)):
        return source
    stub = _NAMESPACE + _NOT_SUPPORTED.format(kind=kinds[0])
    return source.replace(_KERNELS, "").replace(_CONFIG, _CONFIG + _MASKS).replace(_NAMESPACE, stub)


def _without_unused(source: Path) -> Path:
    """The file to compile in the place of a generated one."""
    if not any(part in source.name for part in _UNUSED):
        return source
    text, instead = without_kernels(source.read_text()), source.with_name(f"no_{source.name}")
    if not instead.exists() or instead.read_text() != text:  # ninja goes by times
        instead.write_text(text)
    return instead


def _built(spec: Any, out: Path) -> Path:
    try:
        spec.build(verbose=False)
    except RuntimeError as error:
        raise FailedPrecondition(f"the module {spec.name} cannot be compiled: {str(error)[-2000:]}") from None
    to: Path = out / spec.name / f"{spec.name}.so"
    to.parent.mkdir(parents=True, exist_ok=True)
    partial = to.with_suffix(".partial")  # FlashInfer takes whatever has the final name
    shutil.copyfile(spec.jit_library_path, partial)
    if strip := shutil.which("strip"):
        subprocess.run([strip, "--strip-unneeded", partial], check=True)
    partial.rename(to)
    return to


def _cuda_home(chosen: Path | None) -> Path:
    homes = [chosen]
    if chosen is None:
        of_wheels = importlib.util.find_spec("nvidia")
        places = [] if of_wheels is None else of_wheels.submodule_search_locations or []
        homes = [*(Path(place) / "cu13" for place in places)]
        homes += [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))]
    for home in homes:
        if home is not None and (home / "bin" / "nvcc").is_file():
            return home.absolute()
    where = ", ".join(map(str, homes))
    raise FailedPrecondition(f"no CUDA compiler: there is no bin/nvcc in {where}")
