"""``microturn kernels`` on the command line. Imports nothing heavy before it runs."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from microturn.errors import MicroturnError

_KV_DTYPES = ("bfloat16", "float8_e4m3fn")


def add_kernels_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``microturn kernels``."""
    parser.add_argument(
        "--archs", nargs="+", metavar="CAPABILITY", required=True, help="GPUs to compile for, as 8.0 8.9 9.0a 10.0a"
    )
    parser.add_argument("--head-dims", nargs="+", type=int, choices=(64, 128, 256), default=[64, 128], help="(64 128)")
    parser.add_argument("--kv-dtypes", nargs="+", choices=_KV_DTYPES, default=["bfloat16"], help="(bfloat16)")
    parser.add_argument("--windows", action="store_true", help="also for layers with a sliding window")
    parser.add_argument("--soft-caps", action="store_true", help="also for layers with a soft cap of their scores")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where modules go (where FlashInfer looks for them)")
    parser.add_argument("--cuda-home", type=Path, metavar="DIR", help="has bin/nvcc (the wheels', else $CUDA_HOME)")
    parser.add_argument("--work", type=Path, metavar="DIR", help="for objects, to go on after a break (in the cache)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at a time (%(default)d)")


def run_kernels(arguments: argparse.Namespace) -> int:
    """Compiles the modules and prints each one's path and size as it is finished.

    Returns:
        The exit code: 1 where something cannot be compiled, with the reason on stderr.
    """
    import torch

    from microturn.model.gpu import ahead
    from microturn.zoo.cache import default_cache_dir

    types = ahead.kernel_types(
        arguments.head_dims,
        [getattr(torch, name) for name in arguments.kv_dtypes],
        (False, True) if arguments.windows else (False,),
        (False, True) if arguments.soft_caps else (False,),
    )
    work = arguments.work or default_cache_dir() / "flashinfer"
    started = time.monotonic()
    try:
        ahead.prepare(arguments.archs, arguments.cuda_home, work.absolute(), arguments.jobs)
        out = arguments.out or ahead.installed_modules()
        for library in ahead.build(types, out):
            print(f"{library} {library.stat().st_size:,} bytes, after {time.monotonic() - started:.0f} s", flush=True)
    except ImportError as error:
        print(f"microturn: error: {error}; FlashInfer comes with microturn[gpu]", file=sys.stderr)
        return 1
    except MicroturnError as error:
        print(f"microturn: error: {error.args[0]}", file=sys.stderr)
        return 1
    return 0
