"""``microturn plan`` on the command line. Imports nothing heavy before it runs."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from microturn.bench.argument_types import count, not_negative, positive, share
from microturn.errors import InvalidArgument, MicroturnError, did_you_mean
from microturn.planning.machine import MACHINES, Machine

if TYPE_CHECKING:
    from microturn.planning.beat import ServingCost
    from microturn.planning.measuring import Measurement
    from microturn.planning.plan import Plan
    from microturn.planning.shape import ModelShape

# Share of memory for weights and KV: nearly all of a device's, half of a host's free memory, as the engine does.
_DEVICE_SHARE, _HOST_SHARE = 0.9, 0.5
# Default time of Triton, adapter and client per turn (`make bench-overhead`), unless measured.
_TURN_MS = 2.4
# Defaults for a device, unless measured: see docs/planning.md.
_REACHED, _FIXED_MS, _ROW_US = 0.6, 3.0, 30.0


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of ``microturn plan``."""
    parser.add_argument(
        "--model",
        default="smollm2-135m",
        help="a directory, config.json, GGUF file, or a shape that has a name (%(default)s)",
    )
    parser.add_argument("--weights", choices=["float32", "bfloat16", "int8"], help="(bfloat16; measured: int8)")
    parser.add_argument(
        "--kv-dtype",
        choices=["float32", "bfloat16", "float8", "int8"],
        help="(bfloat16; measured: int8, but bfloat16 for latent attention)",
    )
    parser.add_argument("--context", type=count, default=4000, metavar="TOKENS", help="of each session (%(default)s)")
    parser.add_argument("--beat-ms", type=positive, default=200.0, help="between two turns of a session (%(default)g)")
    parser.add_argument("--input", type=count, default=4, metavar="TOKENS", help="per turn (%(default)s)")
    parser.add_argument("--output", type=count, default=4, metavar="TOKENS", help="per turn (%(default)s)")
    parser.add_argument("--on-time", type=share, default=0.99, help="share of turns within the beat (%(default)g)")
    parser.add_argument("--phases", choices=["even", "random"], default="even", help="of the sessions (%(default)s)")
    where = parser.add_argument_group("the machine: a name, its figures, or this one")
    where.add_argument("--device", help="a name (an unknown one lists them)")
    where.add_argument("--memory-gb", type=positive, help="for weights and KV")
    where.add_argument("--bandwidth-gb-s", type=positive, help="at which it is read")
    where.add_argument("--tflops", type=positive, help="of dense products; left out of account by default")
    where.add_argument("--memory-share", type=share, help="of it that is used (0.9; of this machine's 0.5)")
    where.add_argument("--reached", type=share, help=f"share of these figures that steps reach ({_REACHED})")
    where.add_argument("--fixed-ms", type=not_negative, help=f"of each step, besides ({_FIXED_MS:g})")
    where.add_argument("--row-us", type=not_negative, help=f"of each session in a step, besides ({_ROW_US:g})")
    where.add_argument("--measure", action="store_true", help="time steps and a server on this machine (a minute)")
    where.add_argument("--most-rows", type=count, default=16, help="sessions of the largest such step (%(default)s)")
    where.add_argument("--steps", type=Path, metavar="FILE", help="of an earlier plan, or `microturn bench engine`")
    around = parser.add_argument_group("around the engine; what is not given is measured with the steps")
    around.add_argument("--turn-ms", type=not_negative, help=f"a turn, there and back ({_TURN_MS:g})")
    around.add_argument("--turn-hold-ms", type=not_negative, help="by which a turn holds up steps (0)")
    around.add_argument("--response-hold-ms", type=not_negative, help="by which each token before its last does (0)")
    parser.add_argument("--json", action="store_true", help="print the plan for programs")


def run_plan(arguments: argparse.Namespace) -> int:
    """Makes a plan and prints it.

    Returns:
        The exit code: 1 after one line on stderr.
    """
    try:
        plan = make_plan(arguments)
    except MicroturnError as error:
        print(f"microturn: error: {error.args[0]}", file=sys.stderr)
        return 1
    print(json.dumps(plan.as_json(), indent=1) if arguments.json else "\n".join(plan.lines()))
    return 0


def make_plan(arguments: argparse.Namespace) -> Plan:
    """The plan that the arguments ask for.

    Raises:
        InvalidArgument: the model or the machine is not supported.
    """
    from microturn.planning.beat import Beat
    from microturn.planning.known_shapes import read_shape
    from microturn.planning.plan import Plan, Question
    from microturn.planning.step_times import Interpolated, Roofline

    is_here = arguments.measure or arguments.steps is not None
    if arguments.measure and arguments.steps is not None:
        raise InvalidArgument("steps are measured (--measure) or read (--steps), not both")
    if arguments.measure and arguments.most_rows < 2:
        raise InvalidArgument("--most-rows is at least 2: steps of one session say nothing of more")
    if is_here and any(getattr(arguments, name) is not None for name in ("reached", "fixed_ms", "row_us")):
        raise InvalidArgument("--reached, --fixed-ms and --row-us are the roofline's: measured steps have it all")
    machine = _machine(arguments, is_here=is_here)
    shape = read_shape(arguments.model)
    if shape.max_context and arguments.context > shape.max_context:
        raise InvalidArgument(f"{shape.name} was trained for {shape.max_context} tokens: --context is at most that")
    weights = arguments.weights or ("int8" if is_here else "bfloat16")
    kv_dtype = arguments.kv_dtype or ("int8" if is_here and not shape.is_latent else "bfloat16")
    measured = _measured(arguments, shape, weights, kv_dtype)
    question = Question(
        shape=shape,
        machine=machine,
        weights=weights,
        kv_dtype=kv_dtype,
        context_len=arguments.context,
        beat=Beat(
            beat_s=arguments.beat_ms / 1e3,
            num_input=arguments.input,
            num_output=arguments.output,
            wanted_share=arguments.on_time,
            cost=_cost(arguments, measured),
            spread=arguments.phases,
        ),
        memory_share=arguments.memory_share or (_HOST_SHARE if is_here else _DEVICE_SHARE),
    )
    if measured is not None:
        source = "measured here" if arguments.measure else f"measured: {arguments.steps.name}"
        return Plan.of(question, Interpolated(measured.steps, question.context_len), source, measured.steps)
    reached, fixed_ms, row_us = (
        assumed if given is None else given
        for given, assumed in (
            (arguments.reached, _REACHED),
            (arguments.fixed_ms, _FIXED_MS),
            (arguments.row_us, _ROW_US),
        )
    )
    roofline = Roofline(
        machine,
        shape,
        weights,
        kv_dtype,
        question.context_len,
        reached=reached,
        fixed_s=fixed_ms / 1e3,
        row_s=row_us / 1e6,
    )
    source = f"assumed: {reached:.0%} of the roofline, {fixed_ms:g} ms a step and {row_us:g} µs a session besides"
    return Plan.of(question, roofline, source)


def _measured(arguments: argparse.Namespace, shape: ModelShape, weights: str, kv_dtype: str) -> Measurement | None:
    """The measurement, made now or read from a file, if requested."""
    from microturn.planning.measuring import longest_len, measure, read_measurement
    from microturn.zoo.store import resolve_model

    if not arguments.measure:
        return None if arguments.steps is None else read_measurement(arguments.steps)
    context_len, num_new = arguments.context, arguments.input + 1
    longest = longest_len(context_len, num_new)
    if shape.max_context and longest > shape.max_context:
        most = shape.max_context - (longest - context_len)
        raise InvalidArgument(
            f"to measure takes room besides: with --measure, --context is at most {most} for {shape.name}"
        )
    return measure(resolve_model(arguments.model), weights, kv_dtype, context_len, num_new, arguments.most_rows)


def _cost(arguments: argparse.Namespace, measured: Measurement | None) -> ServingCost:
    """The cost outside of the engine: as given, else as measured, else the default."""
    from microturn.planning.beat import ServingCost

    cost = ServingCost(turn_s=_TURN_MS / 1e3)
    if measured is not None and measured.cost is not None:
        cost = measured.cost
    given = {"turn_s": arguments.turn_ms, "turn_hold_s": arguments.turn_hold_ms}
    given["response_hold_s"] = arguments.response_hold_ms
    return replace(cost, **{name: time_ms / 1e3 for name, time_ms in given.items() if time_ms is not None})


def _machine(arguments: argparse.Namespace, *, is_here: bool) -> Machine:
    """The machine by name, by its figures, or this one; given figures override those of a name."""
    if arguments.device is not None:
        if arguments.device not in MACHINES:
            known = ", ".join(sorted(MACHINES))
            raise InvalidArgument(
                f"unknown device '{arguments.device}': {did_you_mean(arguments.device, MACHINES)}; known are {known}, "
                "others are given by --memory-gb and --bandwidth-gb-s"
            )
        machine = MACHINES[arguments.device]
    elif arguments.memory_gb is not None and arguments.bandwidth_gb_s is not None:
        machine = Machine("given", 0.0, 1.0)
    elif is_here:
        machine = _this_machine()
    else:
        raise InvalidArgument(
            "say what is to serve it: --device NAME, --memory-gb and --bandwidth-gb-s, or --measure for this machine"
        )
    if arguments.memory_gb is not None:
        machine = replace(machine, memory_bytes=arguments.memory_gb * 1e9)
    if arguments.bandwidth_gb_s is not None:
        machine = replace(machine, bandwidth=arguments.bandwidth_gb_s * 1e9)
    if arguments.tflops is not None:
        machine = replace(machine, flops=arguments.tflops * 1e12)
    return machine


def _this_machine() -> Machine:
    from microturn.bench.bandwidth import read_bandwidth
    from microturn.model.cpu.container_limits import free_memory

    return Machine("this one's free memory", free_memory(), read_bandwidth())
