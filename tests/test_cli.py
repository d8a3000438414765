"""The command line: what it prints, what it writes, and how it says what is wrong."""

import json
import os
import pathlib
import re
import subprocess
import sys
import tomllib

import jax
import jax.numpy as jnp
import pytest

import shardfn
from shardfn.cli import arguments
from shardfn.cli.main import main

ROOT = pathlib.Path(__file__).parent.parent
MATMUL = ["explain", "jax.numpy:matmul", "--shapes", "f32[16,32]", "f32[32,64]"]
CUT = ["--in-strategy", "((4,1),(1,2))"]


def run(*args, **env):
    """A process of its own, with nothing in its environment that says how many devices there are."""
    keep = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    return subprocess.run(args, cwd=ROOT, env={**keep, **env}, capture_output=True, text=True, timeout=120)


def explained(capsys, *args) -> dict:
    assert main(["explain", *args, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


# ---- explain


def test_explain_prints_the_report(capsys):
    assert main([*MATMUL, *CUT, "--device", "tpu-v5e:4x4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("matmul: tensor parallel over 2 × data parallel over 4 × replicated over 2\n")
    assert "devices: tpu-v5e:4x4 (16 devices, not here), mesh a=4 x b=2 x c=2\n" in out
    assert "in_strategy[1]" in out and "Op strategies" not in out
    assert main([*MATMUL, *CUT, "--device", "tpu-v5e:4x4", "--detail", "full"]) == 0
    assert "Op strategies" in capsys.readouterr().out


def test_explain_takes_every_option(capsys, tmp_path):
    done = main([
        *MATMUL, "--in-strategy", "((4, 1), AUTO)", "--out-strategy", "((4, 1),)", "--level", "2", "--device", "CPU",
        "--parameter-plan", "{'b': (1, 1)}", "--search-mode", "sharding_propagation", "--compiled",
        "--json", str(tmp_path / "report.json"), "--html", str(tmp_path / "report.html"), "--quiet",
    ])  # fmt: skip
    assert (done, capsys.readouterr().out) == (0, "")
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["level"] == 2
    assert data["compiled"] is not None
    assert data["arguments"][1]["reason"] == "parameter_plan['b']"
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_explain_of_a_function_in_a_file(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "from beside import WIDTH\n"
        "from shardfn import shard\n"
        "@shard(in_strategy=((8, 1), None))\n"
        "def forward(x, params): return x @ params['w']\n"
        "def arguments(): return jnp.zeros((16, WIDTH)), {'w': jnp.zeros((WIDTH, 4))}\n"
        "def one(): return jnp.zeros(4)\n"
        "def not_traceable(): return float(jnp.zeros(())) * jnp.ones(8), 'text'\n"
    )
    (tmp_path / "beside.py").write_text("WIDTH = 32\n")
    file = str(tmp_path / "mine.py")
    data = explained(capsys, f"{file}:forward", "--args", f"{file}:arguments", "--device", "cpu:8")
    assert [d["strategy"] for d in data["arguments"]] == [[8, 1], [8, 1]]
    assert [d["path"] for d in data["arguments"]] == ["x", "params/w"]
    data = explained(capsys, "jax.numpy:tanh", "--args", f"{file}:one", "--in-strategy", "((4,),)", "--device", "cpu:8")
    assert data["arguments"][0]["strategy"] == [4]


def test_arguments_are_made_as_shapes_only(capsys, monkeypatch):
    huge = type(sys)("huge")
    huge.make = lambda: (jnp.zeros((2**20, 2**20)), jnp.zeros((2**20, 2**20)))  # 4 TiB each
    monkeypatch.setitem(sys.modules, "huge", huge)
    data = explained(capsys, "jax.numpy:matmul", "--args", "huge:make", "--in-strategy", "((64, 1), (1, 64))",
                     "--device", "tpu-v5p:4096")  # fmt: skip
    assert data["results"][0]["strategy"] == [64, 64]


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("f32[16, 32]", [("float32", (16, 32))]),
        ("bf16[4]", [("bfloat16", (4,))]),
        ("pred[]", [("bool", ())]),
        ("s8[2,3]", [("int8", (2, 3))]),
        ("int32[7]", [("int32", (7,))]),
        ("['f32[2]', 'i32[3]']", [("float32", (2,)), ("int32", (3,))]),
        ('{"w1": "f32[4,4]", "b": ["f32[4]"]}', [("float32", (4,)), ("float32", (4, 4))]),
        ("('f32[1]',)", [("float32", (1,))]),
    ],
)
def test_shapes(text, shapes):
    assert [(str(s.dtype), s.shape) for s in jax.tree.leaves(arguments.shapes(text))] == shapes


# ---- plan

PLAN = ["plan", "jax.numpy:matmul", "--shapes", "f32[4096,1024]", "f32[1024,8192]", "--device", "tpu-v5e:4x4"]


def planned(capsys, *args) -> dict:
    assert main([*PLAN, *args, "--save", "-"]) == 0
    return tomllib.loads(capsys.readouterr().out)


def test_plan_prints_the_report_and_saves_the_plan(capsys, tmp_path):
    file = tmp_path / "layout.toml"
    args = [
        "--level",
        "2",
        "--memory",
        "14GiB",
        "--search-mode",
        "auto",
        "--time-limit",
        "30",
        "--tolerance",
        "0.05",
        "--compile-candidates",
        "0",
    ]
    assert main([*PLAN, *args, "--save", str(file)]) == 0
    out = capsys.readouterr().out
    assert "devices: tpu-v5e:4x4 (16 devices, not here), mesh " in out
    assert out.endswith(f"saved: {file}\n")
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4096, 1024), (1024, 8192)))
    made = shardfn.plan(
        jnp.matmul, x, w, device="tpu-v5e:4x4", level=2, memory_limit="14GiB", time_limit=30, tolerance=0.05
    )
    assert shardfn.load_layout(file) == made
    again = shardfn.plan(jnp.matmul, x, w, device="tpu-v5e:4x4", layout=file)
    assert [(d.spec, d.source) for d in again.inputs] == [(d.spec, "file") for d in made.inputs]
    assert f"{made.cost.bytes_sent:,} B sent" in file.read_text().splitlines()[0]


def test_plan_takes_a_layout(capsys, tmp_path):
    file = tmp_path / "layout.toml"
    assert main([*PLAN, "--in-strategy", "((4, 1), (1, 4))", "--save", str(file), "--quiet"]) == 0
    data = explained(capsys, "jax.numpy:matmul", "--shapes", "f32[4096,1024]", "f32[1024,8192]",
                     "--device", "tpu-v5e:4x4", "--layout", str(file))  # fmt: skip
    assert [(d["strategy"], d["chosen_by"]) for d in data["arguments"]] == [([4, 1], "file"), ([1, 4], "file")]


def test_plan_keeps_what_was_said(capsys):
    data = planned(capsys, "--in-strategy", "((4, 1), AUTO)", "--parameter-plan", "{'b': (1, 2)}", "--level", "1")
    assert data["mesh"] == {"a": 4, "b": 2, "c": 2}
    assert data["arguments"] == {"a": ["a", 1], "b": [1, "b"]}
    assert {(row["by"], row["why"]): row["of"] for row in data["sources"][:2]} == {
        ("you", "in_strategy[0]"): ["a"],
        ("you", "parameter_plan['b']"): ["b"],
    }


def test_code_prints_plain_jax(capsys):
    shapes = ["--shapes", "f32[16,8]", "f32[8,4]", "--in-strategy", "((4, 1), (1, 2))", "--device", "cpu:8"]
    assert main(["code", "jax.numpy:matmul", *shapes]) == 0
    code = capsys.readouterr().out
    compile(code, "code", "exec")
    assert 'in_specs = (P("a", None), P(None, "b"))' in code


def test_a_plan_is_saved_before_its_report_is_printed(monkeypatch, tmp_path):
    path, saved = tmp_path / "plan.toml", []
    monkeypatch.setattr("shardfn.cli.main.show", lambda *_: saved.append(path.exists()))
    assert main(["plan", *MATMUL[1:], *CUT, "--device", "cpu:8", "--save", str(path)]) == 0
    assert saved == [True]


@pytest.mark.slow
def test_what_plan_saves_is_the_same_each_time(capsys):
    assert planned(capsys) == planned(capsys)


def test_donated_arguments_take_no_memory_twice(capsys, tmp_path):
    (tmp_path / "step.py").write_text("def step(p, g): return p - g\n")
    args = [
        "plan",
        f"{tmp_path}/step.py:step",
        "--shapes",
        "f32[1024]",
        "f32[1024]",
        "--device",
        "cpu:2",
        "--save",
        "-",
    ]
    memory = []
    for more in ([], ["--donate", "0"], ["--donate", "0,"], ["--donate", "0,1"], ["--donate", "0", "1"]):
        assert main([*args, *more]) == 0
        found = re.search(r"peak memory ([\d,]+) B", capsys.readouterr().out)
        memory.append(int(found[1].replace(",", "")))
    assert memory[0] - memory[1] == 1024 * 4 // 2
    assert set(memory[1:]) == {memory[1]}, "there is one result to take a place"


def test_plan_of_a_sharded_function_keeps_its_options(capsys, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import jax.numpy as jnp\nfrom shardfn import shard\n"
        "@shard(in_strategy=((8, 1), None), level=1)\ndef forward(x, w): return x @ w\n"
    )
    shapes = ["--shapes", "f32[16,32]", "f32[32,64]", "--device", "cpu:8", "--save", "-"]
    assert main(["plan", f"{tmp_path}/mine.py:forward", *shapes]) == 0
    data = tomllib.loads(capsys.readouterr().out)
    assert (data["mesh"], data["arguments"]["x"], data["level"]) == ({"a": 8}, ["a", 1], "memory")
    assert main(["plan", f"{tmp_path}/mine.py:forward", *shapes, "--level", "2"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["level"] == "time"


# ---- mistakes: status 2, what is wrong and how to mend it, no traceback

OF_THE_CALL = {
    "a strategy that does not fit": [*MATMUL, "--in-strategy", "((3, 1), (1, 2, 1))", "--device", "cpu:8"],
    "a level that does not exist": [*MATMUL, "--level", "7"],
    "a target that does not exist": [*MATMUL, "--device", "tpu-v9:4"],
    "compiling for what is not here": [*MATMUL, "--device", "tpu-v5e:4", "--compiled"],
    "shapes that do not fit the function": ["explain", "jax.numpy:matmul", "--shapes", "f32[2,3]", "f32[2,3]"],
    "a search that does not exist": [*MATMUL, "--search-mode", "greedy"],
}
OF_THE_PLAN = {
    "no amount of memory": [*PLAN, "--memory", "14 gigs"],
    "no memory at all": [*PLAN, "--memory", "0"],
    "less than a byte": [*PLAN, "--memory", "0.0001"],
    "no time": [*PLAN, "--time-limit", "0"],
    "less than no tolerance": [*PLAN, "--tolerance", "-0.1"],
    "fewer finalists than none": [*PLAN, "--compile-candidates", "-1"],
    "a search that does not exist": [*PLAN, "--search-mode", "recursive"],
    "a budget that does not exist": [*PLAN, "--budget", "fsat"],
    "a word for a number of candidates": [*PLAN, "--compile-candidates", "atuo"],
    "a directory that does not exist": [*PLAN, "--save", "nowhere/at/all/layout.toml"],
    "a directory": [*PLAN, "--save", "tests"],
    "more finalists than are worth it": [*PLAN, "--compile-candidates", "1000000000"],
    "donating what is not there": [*PLAN, "--donate", "2"],
    "donating what is no number": [*PLAN, "--donate", "0,a"],
    "a file that is not there": ["plan", "models/nofile.py:step", *PLAN[2:]],
    "everything at once": [*PLAN, "--memory", "much", "--level", "3", "--time-limit", "-1", "--search-mode", "best"],
}
OF_THE_COMMAND = {
    "no literal": [*MATMUL, "--in-strategy", "__import__('os').getcwd()"],
    "an unknown name": [*MATMUL, "--in-strategy", "(auto, None)"],
    "half a tuple": [*MATMUL, "--in-strategy", "((4, 1),"],
    "no shape": ["explain", "jax.numpy:matmul", "--shapes", "16x32", "f32[32,64]"],
    "half a tree of shapes": ["explain", "jax.numpy:matmul", "--shapes", "{'w': f32[2]", "f32[32,64]"],
    "no element type": ["explain", "jax.numpy:matmul", "--shapes", "f33[16]", "f32[32,64]"],
    "64 bits": ["explain", "jax.numpy:matmul", "--shapes", "f64[16]", "f32[32,64]"],
    "no function": ["explain", "jax.numpy", "--shapes", "f32[2,3]"],
    "no such module": ["explain", "nowhere_at_all:f"],
    "no such function": ["explain", "jax.numpy:matmull"],
    "no such function of a module": ["explain", "examples.models:mpl"],
    "not a function": ["explain", "jax.numpy:pi"],
    "no arguments": ["plan", "jax.numpy:matmul", "--device", "cpu:8"],
    "an argument too few": ["explain", "jax.numpy:matmul", "--shapes", "f32[2,3]"],
    "an argument too many": ["explain", "jax.numpy:sin", "--shapes", "f32[2,3]", "f32[2,3]"],
}


MISTAKES = {
    f"{args[0]}: {name}": args for of in (OF_THE_CALL, OF_THE_COMMAND, OF_THE_PLAN) for name, args in of.items()
}


@pytest.mark.parametrize("args", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(args, capsys):
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert "  fix:   " in err


SHOWN = ("explain: no shape", "plan: no arguments", "plan: a directory that does not exist")


def test_message_of_a_mistake_reads_as_the_golden_file(capsys, golden):
    for name in SHOWN:
        main(MISTAKES[name])
    golden("messages_cli", capsys.readouterr().err)


def test_a_user_error_has_its_line(capsys, tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text("def f(x):\n    y = x + 1\n    return y.nothing\n")
    assert main(["explain", f"{file}:f", "--shapes", "f32[4]"]) == 2
    assert f"{file}:3" in capsys.readouterr().err
    file.write_text("def f(x):\n    return x\ndef arrays():\n    raise ValueError('no data')\n")
    assert main(["explain", f"{file}:f", "--args", f"{file}:arrays"]) == 2
    assert f"{file}:4" in capsys.readouterr().err
    file.write_text("import nowhere_at_all\n")
    assert main(["explain", f"{file}:f", "--shapes", "f32[4]"]) == 2
    assert f"{file}:1" in capsys.readouterr().err
    assert main(["explain", f"{tmp_path}/absent.py:f"]) == 2
    assert "absent.py" in capsys.readouterr().err


def test_usage_errors_are_status_2(capsys):
    for args in (["explain"], ["plan"], ["nothing"], [*PLAN, "--time-limit", "long"], [*PLAN, "--detail", "ful"]):
        with pytest.raises(SystemExit) as stop:
            main(args)
        assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "usage: shardfn" in said and "did you mean 'full'?" in said


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan train.py:step --devcie 8", "shardfn plan: error: there is no flag --devcie; did you mean '--device'?"),
        ("plan train.py:step --mesh=8", "did you mean '--device'?"),  # as another library calls it
        ("plan train.py:step --whatever", "shardfn plan --help lists the flags"),
        ("plan train.py:step 8", "shardfn plan: error: unexpected: 8"),
        ("plna", "shardfn: error: there is no command plna; did you mean 'plan'?"),
        ("checkpoint insepct here", "shardfn checkpoint: error: there is no command insepct; did you mean 'inspect'?"),
        ("launch --processes 2 --hsots a train.py --lr 3", "there is no flag --hsots; did you mean '--hosts'?"),
    ],
)
def test_misspelt_flag_or_command_is_told_what_was_meant(capsys, line, said):
    with pytest.raises(SystemExit) as stop:
        main(line.split())
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert shardfn.__version__ in capsys.readouterr().out


# ---- the process


@pytest.mark.slow
def test_the_command_gets_its_own_devices():
    done = run(sys.executable, "-m", "shardfn", *MATMUL, *CUT, "--compiled")
    assert done.returncode == 0, done.stderr
    assert "devices: 8 x cpu, mesh a=4 x b=2\n" in done.stdout


@pytest.mark.slow
def test_the_command_respects_what_is_set():
    done = run(sys.executable, "-X", "utf8", "-m", "shardfn", *MATMUL, JAX_NUM_CPU_DEVICES="4")
    assert done.returncode == 0, done.stderr
    assert "devices: 4 x cpu, mesh " in done.stdout


@pytest.mark.slow
def test_a_reader_that_stops_early_is_no_error():
    command = f'"{sys.executable}" -m shardfn {" ".join(MATMUL[:2])} --shapes "f32[16,32]" "f32[32,64]" --device cpu:8'
    done = run("bash", "-c", f"set -o pipefail; {command} | head -n 1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("matmul: ")
