"""`python -m shardfn plan module:function --shapes "f32[16,32]"`, and `explain`, `code`, `check`, `demo` and others."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax

import shardfn
from shardfn import layoutfile
from shardfn.cli import checkpoint, k8s, launch
from shardfn.cli.arguments import check_given, literal, load, made, model, numbers, shapes, tracing
from shardfn.cli.parser import Parser
from shardfn.cost.devices.hardware import resolve
from shardfn.errors import DeviceError, ShardError, StrategyError, fail, nearest
from shardfn.layoutfile.plan_file import plan_to_toml
from shardfn.runtime.layout_check import check_with_plan
from shardfn.search import MODES
from shardfn.search.generators import STYLES

VIRTUAL_DEVICES = 8
LAYOUT = 'a layout file, or a recipe by its name: "llama/fsdp-tp"'

COMMON = ("layout", "device", "level", "search_mode", "style", "assumed_trips")
SEARCH = ("memory_limit", "time_limit", "budget", "tolerance", "compile_candidates", "rehearse_candidates")
"""The options that bound a search."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status: 0, or 2 where the user has to correct something.

    Called without arguments, as the command itself does it, the process may restart itself with virtual devices.

    >>> main(["explain", "jax.numpy:matmul", "--shapes", "f32[8,4]", "f32[4,2]", "--device", "tpu-v4:8",
    ...       "--in-strategy", "((4, 1), (1, 2))", "--quiet"])
    0
    """
    if not (sys.argv[1:] if argv is None else argv):
        _parser().print_help()
        return 0
    options = _parser().parse_args(argv)
    if argv is None and getattr(options, "starts_devices", True):
        _start_with_devices(options.platform, max(1, getattr(options, "devices", None) or VIRTUAL_DEVICES))
    try:
        options.command(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ShardError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser("shardfn", description="Shard JAX functions from integer tuples.")
    parser.add_argument("--version", action="version", version=f"shardfn {shardfn.__version__}, jax {jax.__version__}")
    commands = parser.add_subparsers(
        required=True,
        metavar="demo | plan | explain | code | compare | rehearse | check | calibrate | checkpoint | launch | k8s",
    )

    def command(
        name: str, run: Any, text: str, description: str | None = None, epilog: str = "", platform: str | None = None
    ) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=description, epilog=epilog,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
        made.set_defaults(command=run, platform=platform)
        return made

    demo = command("demo", _demo, "a small training run on 8 virtual CPU devices, with its report", platform="cpu")
    demo.add_argument("--cluster", action="store_true", help="two processes instead, one of which is killed")

    plan = command(
        "plan", _plan, "search the shardings of a function, also for hardware you do not have",
        "Search the open shardings, print the report and save the plan. Nothing runs.\n"
        "With a target as --device no hardware is needed.",
        "example: python -m shardfn plan train.py:step --args train.py:shapes --device tpu-v5e:4x4 \\\n"
        "           --level time --memory-limit 14GiB --save layout.toml",
    )  # fmt: skip
    _add_call(plan, "auto, the default, is the exact search for small programs")
    _add_search(plan)
    _add_report(plan)
    add = plan.add_argument
    add("--save", metavar="FILE", help="write the plan as a layout file (TOML); - for standard output")

    explain = command(
        "explain", _explain, "report shardings, collectives and memory of a function",
        "Plan a function from shapes and print the report. Nothing runs, and with a target as --device no\n"
        "hardware is needed.",
        'example: python -m shardfn explain jax.numpy:matmul --shapes "f32[16,32]" "f32[32,64]" \\\n'
        '           --in-strategy "((4, 1), (1, 2))" --device tpu-v5e:4x4',
    )  # fmt: skip
    _add_call(explain, "the search for open shardings")
    _add_report(explain)
    add = explain.add_argument
    add("--compiled", action="store_true", help="compile, and compare the program with the prediction")
    add("--json", metavar="FILE", help="also write the data of the report; - writes it to standard output alone")
    add("--html", metavar="FILE", help="also write the full report as a web page")

    code = command(
        "code", _code, "print the plan as plain JAX",
        "Search the open shardings and print the plan as code that needs nothing of shardfn: a mesh, PartitionSpecs,\n"
        "sharding constraints by source line, and a jax.jit.",
        "example: python -m shardfn code train.py:step --args train.py:shapes --device tpu-v5e:4x4 > shardings.py",
    )  # fmt: skip
    _add_call(code, "auto, the default, is the exact search for small programs")
    _add_search(code)

    compare = command(
        "compare", _compare, "compare layouts of a function in one table",
        "Plan a function in several layouts and print one table: time, bytes, memory, whether each fits, and what\n"
        "each sends most. Without --styles and --layouts these are the search without a style, and every style.",
        "example: python -m shardfn compare train.py:step --args train.py:shapes --device tpu-v5e:4x4 \\\n"
        "           --styles fsdp tensor_parallel --layouts layout.toml --html layouts.html",
    )  # fmt: skip
    _add_call(compare, "the search for open shardings")
    _add_search(compare)
    add = compare.add_argument
    add("--styles", nargs="+", default=[], metavar="NAME", help=f"parallel styles: {', '.join(STYLES)}")
    add("--layouts", nargs="+", default=[], metavar="FILE", help="layout files, or recipes by their names")
    add("--html", metavar="FILE", help="also write the table as a web page")

    rehearse = command(
        "rehearse", _rehearse, "measure one device's part of a plan on the GPU that is here",
        "Plan a function for many GPUs, and run the part of one of them on one, with random arguments. The report has\n"
        "measured compute and memory beside the modelled ones. Communication stays modelled.",
        "example: python -m shardfn rehearse train.py:step --args train.py:shapes --donate 0 --device h100:64 \\\n"
        "           --level time --save layout.toml",
        platform="cpu",
    )  # fmt: skip
    _add_call(rehearse, "auto, the default, is the exact search for small programs")
    _add_search(rehearse)
    _add_report(rehearse)
    add = rehearse.add_argument
    add("--steps", type=int, default=10, metavar="N", help="calls in each of three rounds")
    add("--run-limit", type=float, default=600.0, metavar="S", help="seconds for compiling and measuring")
    add("--save", metavar="FILE", help="write the plan, with what was measured, as a layout file (TOML)")
    add("--json", metavar="FILE", help="also write the data of the report")
    add("--html", metavar="FILE", help="also write the full report as a web page")

    check = command(
        "check", _check, "check a layout file against a model",
        "List everything that does not match between a layout file and a model: arrays without a rule, rules\n"
        "without an array, ranks, mesh axes, strategies, the mesh. Nothing runs.",
        "example: python -m shardfn check llama/fsdp-tp --model model.py:make --device tpu-v5e:4x4",
    )  # fmt: skip
    check.add_argument("file", metavar="FILE", help=LAYOUT)
    check.add_argument("--model", required=True, metavar="MODULE:FUNCTION",
                       help="a function without parameters that returns (function, arguments), or a tree of parameters; "
                       "with --args or --shapes, as in plan, the function itself")  # fmt: skip
    _add_arguments(check, "as in plan", "as in plan")
    where = check.add_mutually_exclusive_group()
    where.add_argument("--devices", type=int, metavar="N", help="how many devices there are, of any kind")
    where.add_argument("--device", help="CPU, GPU, TPU, or a target such as tpu-v5e:4x4")

    calibrate = command(
        "calibrate", _calibrate, "measure the devices of this machine",
        "Measure what one device does per second while all are busy: matmuls, memory, launches, collectives.\n"
        "With --save, plans for such devices use the figures on this machine from then on.",
    )  # fmt: skip
    add = calibrate.add_argument
    add("--device", help="CPU, GPU or TPU; JAX's default if left out")
    add("--devices", type=int, metavar="N", help=f"how many: all, of the CPU {VIRTUAL_DEVICES}, if left out")
    add("--save", nargs="?", const="", metavar="FILE",
        help="write the figures as JSON, without FILE to where plans look for them")  # fmt: skip
    checkpoint.add(commands)
    launch.add(commands)
    k8s.add(commands)
    return parser


def _add_arguments(command: argparse.ArgumentParser, shapes: str, args: str) -> None:
    either = command.add_mutually_exclusive_group()
    either.add_argument("--shapes", nargs="+", default=[], metavar="SHAPE", help=shapes)
    either.add_argument("--args", metavar="MODULE:FUNCTION", help=args)


def _add_call(command: argparse.ArgumentParser, modes: str) -> None:
    """What `plan` and `explain` share: the function, its arguments, and their shardings."""
    add = command.add_argument
    add("function", help="module:function or file.py:function")
    _add_arguments(command, "one for each argument: f32[16,32], or for a pytree \"{'w': 'f32[4,4]'}\"",
                   "a function without parameters that returns the tuple of arguments")  # fmt: skip
    add("--in-strategy", metavar="TUPLE", help='one entry for each argument: "((4, 1), None, AUTO)"')
    add("--out-strategy", metavar="TUPLE", help='one entry for each result: "((4, 2),)"')
    add("--parameter-plan", metavar="DICT", help="entries by path: \"{'params/w1': (1, 4)}\"")
    add("--layout", metavar="FILE", help=LAYOUT)
    add("--donate", nargs="+", metavar="N", help="arguments whose memory the results reuse: 0 1, or 0,1")
    add("--device", help="CPU, GPU, TPU, or a target to plan for, such as tpu-v5e:4x4 or cpu:64")
    add("--level", type=_number_or_word, help="objective of the search: communication, memory or time (or 0, 1, 2)")
    add("--search-mode", metavar="NAME", help=f"{', '.join(MODES)}: {modes}")
    add("--style", metavar="NAME", help=f"the parallel style of the plan: {', '.join(STYLES)}")
    add("--assumed-trips", type=int, metavar="N", help="how often loops of unknown length count; default 1")


def _add_search(command: argparse.ArgumentParser) -> None:
    """What bounds the search, of commands that search."""
    add = command.add_argument
    add("--memory-limit", metavar="BYTES", help='memory of one device: 14GiB, "512 MB", 2e9; default: all of it')
    add(
        "--budget",
        type=_number_or_word,
        metavar="WORK",
        help='work of the search: "fast", "default", "thorough" or a number of ops visited',
    )
    add("--time-limit", type=float, metavar="S", help="seconds after which the search returns the best plan so far")
    add(
        "--tolerance",
        type=float,
        metavar="PART",
        help="a plan proved this near the optimum ends the search; default 0.01",
    )
    add(
        "--compile-candidates",
        type=_number_or_word,
        metavar="N",
        help='compile the N best plans, or "auto", and take the best compiled one',
    )
    add(
        "--rehearse-candidates",
        type=int,
        metavar="N",
        help="measure the N best plans on one GPU, and take the best one",
    )


def _add_report(command: argparse.ArgumentParser) -> None:
    command.add_argument("--detail", type=_detail, metavar="{short,full}", default="short",
        help="full adds dimension groups, op strategies, constraints, candidates and runners-up")  # fmt: skip
    command.add_argument("--quiet", action="store_true", help="do not print the report")


def _detail(text: str) -> str:
    if text not in ("short", "full"):
        raise argparse.ArgumentTypeError(f"a report is short or full, not {text!r}; {nearest(text, ('short', 'full'))}")
    return text


def _number_or_word(text: str) -> float | str:
    """A number of any kind, or the text, which the option's own check answers."""
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _start_with_devices(platform: str | None, devices: int = VIRTUAL_DEVICES) -> None:
    """Start this process anew with virtual CPU devices, where its environment does not say how many there are.

    XLA reads its settings when it starts, and the thread count (`NPROC`) must be at least twice the device count: JAX
    before 0.12 can wait for ever otherwise. So the environment of a new process is the place for both.
    """
    has_count = "JAX_NUM_CPU_DEVICES" in os.environ or "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if has_count and "NPROC" in os.environ:
        return
    environment = {"NPROC": str(4 * devices), **os.environ}
    if not has_count:
        environment["JAX_NUM_CPU_DEVICES"] = str(devices)
    if platform is not None:
        environment.setdefault("JAX_PLATFORMS", platform)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _demo(options: argparse.Namespace) -> None:
    if options.cluster:
        from shardfn.cli.demo_cluster import run
    else:
        from shardfn.cli.demo import run
    if not run(show):
        raise SystemExit(1)


def _calibrate(options: argparse.Namespace) -> None:
    from shardfn.cost.devices.calibrate import calibrate
    from shardfn.cost.devices.chips import save_chip
    from shardfn.cost.devices.hardware import CHIP_FILES, chip_file

    if options.devices is not None and options.devices < 1:
        fail(StrategyError, f"--devices {options.devices} is not a number of devices", where="calibrate", fix="write 8")
    hardware = resolve(options.device, count=options.devices)
    if hardware.devices is None:
        fail(DeviceError, f"{options.device} is not here to be measured", where=f"--device {options.device}",
             why="a target is only planned for", fix="name CPU, GPU or TPU, or leave --device out")  # fmt: skip
    found = calibrate(hardware.devices)
    print(found)
    if options.save is None:
        return
    kind = hardware.devices[0].device_kind
    place = chip_file(kind)
    path = options.save or place
    if not path:
        fail(DeviceError, "there is no directory to save the figures to", where=f"{CHIP_FILES} is empty",
             why="then plans look for no measured figures", fix="unset it, or write --save FILE")  # fmt: skip
    save_chip(found.chip, path)
    used = place and os.path.abspath(path) == os.path.abspath(place)
    print(f"saved: {path}" + (f"; plans for {kind} devices use it from now on" if used else ""))


def _arguments(options: argparse.Namespace) -> tuple[Any, ...]:
    return made(options.args) if options.args else tuple(map(shapes, options.shapes))


def _call(options: argparse.Namespace, *more: str) -> tuple[shardfn.ShardedFunction, tuple[Any, ...]]:
    """The function that the command line names, sharded with the options that are set, and its arguments."""
    function, arguments = load(options.function, "function"), _arguments(options)
    entries = {name: literal(getattr(options, name), f"--{name.replace('_', '-')}")
               for name in ("in_strategy", "out_strategy", "parameter_plan")}  # fmt: skip
    donated = None if options.donate is None else numbers(options.donate, "--donate")
    plain = {name: getattr(options, name) for name in (*COMMON, *more)}
    given = {**entries, **plain, "donate_argnums": donated}
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(function, shardfn.ShardedFunction):
        said = {field.name: getattr(function.options, field.name) for field in dataclasses.fields(function.options)}
        function, given = function.fn, said | given
    check_given(function, arguments, options.function)
    return shardfn.shard(function, **given), arguments


def _plan(options: argparse.Namespace) -> None:
    folder = pathlib.Path(options.save or ".").parent
    if options.save and pathlib.Path(options.save).is_dir():
        fail(StrategyError, f"{options.save} is a directory", where=f"--save {options.save}",
             why="the plan is one file", fix=f"name a file in it: --save {options.save}/layout.toml")  # fmt: skip
    if not folder.is_dir():
        fail(StrategyError, f"{options.save} cannot be written", where=f"--save {options.save}",
             why=f"there is no directory {folder}", fix="make it, or write the file elsewhere")  # fmt: skip
    function, arguments = _call(options, *SEARCH)
    with tracing(options.function):
        plan = function.plan(*arguments)
    if options.save == "-":
        print(plan_to_toml(plan))
        return
    if options.save:
        plan.save(options.save)  # before the report: its reader, `head` say, may leave
    if not options.quiet:
        show(function.explain(*arguments), options.detail)
        if options.save:
            print(f"saved: {options.save}")


def _rehearse(options: argparse.Namespace) -> None:
    function, arguments = _call(options, *SEARCH)
    with tracing(options.function):
        plan = function.plan(*arguments).rehearse(options.steps, options.run_limit)
    if options.save:
        plan.save(options.save)
    report = shardfn.explain(plan)
    for file in filter(None, (options.json, options.html)):
        report.save(file)
    if not options.quiet:
        show(report, options.detail)


def _code(options: argparse.Namespace) -> None:
    function, arguments = _call(options, *SEARCH)
    with tracing(options.function):
        print(function.plan(*arguments).code())


def _explain(options: argparse.Namespace) -> None:
    function, arguments = _call(options)
    with tracing(options.function):
        report = function.explain(*arguments, compiled=options.compiled)
    if options.json == "-":
        print(report.to_json())
    elif options.json:
        pathlib.Path(options.json).write_text(report.to_json() + "\n", encoding="utf-8")
    if options.html:
        pathlib.Path(options.html).write_text(report.to_html() + "\n", encoding="utf-8")
    if not options.quiet and options.json != "-":
        show(report, options.detail)


def _compare(options: argparse.Namespace) -> None:
    function, arguments = _call(options, *SEARCH)
    searched = not (options.styles or options.layouts)
    given: dict[str, dict[str, Any]] = {"searched": {}} if searched else {}
    given |= {style: {"style": style} for style in (STYLES if searched else options.styles)}
    given |= {file: {"layout": file} for file in options.layouts}
    said = {field.name: getattr(function.options, field.name) for field in dataclasses.fields(function.options)}
    layouts = {name: shardfn.shard(function.fn, **{**said, **own}) for name, own in given.items()}
    with tracing(options.function):
        found = shardfn.compare(layouts, *arguments)
    if options.html:
        found.save(options.html)
    show(found)


def _check(options: argparse.Namespace) -> None:
    if options.devices is not None and options.devices < 1:
        fail(StrategyError, f"--devices {options.devices} is not a number of devices", where="check", fix="write 8")
    if options.args or options.shapes:
        function, arguments = load(options.model, "function"), _arguments(options)
    else:
        function, arguments = model(options.model)
    device = f"cpu:{options.devices}" if options.devices is not None else options.device
    with tracing(options.model):
        problems, plan = check_with_plan(options.file, function, arguments, device=device)
    if problems:
        raise layoutfile.LayoutFileError(problems)
    layout = layoutfile.read_layout(options.file)
    count = len(plan.inputs) if plan is not None else len(jax.tree.leaves(function))
    rules = len(layout.arguments) + len(layout.results) + len(layout.activations) + len(layout.constraints)
    print(f"{options.file} fits: {rules} rules, {count} arrays")
    if plan is not None:
        print(plan)


def show(report: Any, detail: str = "short") -> None:
    """Print a report, or parts of one: in colours and fitted to a terminal, as plain unwrapped text into a pipe or a file."""
    report = report.full() if detail == "full" else report
    if sys.stdout.isatty():
        from rich.console import Console

        Console().print(report)
    else:
        print(report)
