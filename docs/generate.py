# SPDX-License-Identifier: Apache-2.0
"""The generated parts of the pages: a hook of MkDocs.

A page says ``{{ name }}`` or ``{{ name argument }}``, and the function of that name below writes
what stands there: from the command line, the docstrings, the importer, LLVM, and the results of the
benchmarks. A name that is not there ends the build.
"""

from __future__ import annotations

import inspect
import json
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import operator_cases  # MkDocs looks in the folder of a hook

RESULTS = Path(__file__).resolve().parents[1] / "examples" / "benchmarks" / "results"
MARK = re.compile(r"\{\{ (\w+)(?: ([\w.]+))? \}\}")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Write the generated parts of a page; MkDocs calls this for each."""
    return MARK.sub(lambda mark: PARTS[mark[1]](*filter(None, mark.groups()[1:])), markdown)


def commands() -> str:
    """Every command of the command line with its options, from click."""
    import click

    from tvm_fusion.cli.command_line import cli

    parts = []
    for name, command in _all_commands(cli):
        context = click.Context(command, info_name=f"tvm-fusion {name}")
        records = [param.get_help_record(context) for param in command.get_params(context)]
        rows = [(f"`{names}`", _escape(text)) for names, text in filter(None, records) if text]
        usage = " ".join(command.collect_usage_pieces(context))
        parts += [f"## tvm-fusion {name}", f"```\n{context.info_name} {usage}\n```"]
        parts += [inspect.cleandoc(str(command.help)), _table(("option", "meaning"), rows)]
    return "\n\n".join(parts)


def _all_commands(group: Any) -> Iterable[tuple[str, Any]]:
    """Commands of a group, and those of its groups, by their full names."""
    import click

    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield name, command
        if isinstance(command, click.Group):
            yield from ((f"{name} {inner}", one) for inner, one in _all_commands(command))


def reference(module: str) -> str:
    """All names that a module exports, each from its docstring."""
    import relay_passes
    from relay_passes import op
    from tvm_fusion import errors

    names = {known.__name__: known for known in (relay_passes, op, errors)}[module].__all__
    kept = [name for name in names if name not in ("RULES", "errors", "op", "__version__")]
    return "\n\n".join(f"::: {module}.{name}" for name in kept)


def rules(device: str) -> str:
    """The schedule rules of ``cpu`` or ``gpu`` in the order in which they are asked."""
    from schedules import cpu, gpu

    asked = {"cpu": cpu, "gpu": gpu}[device].RULES
    return "\n\n".join(f"::: schedules.{device}.{type(rule).__name__}" for rule in asked)


def cpus(arch: str) -> str:
    """The CPUs of an architecture that LLVM compiles for."""
    from tvm_fusion.compiler.targets import known_cpus

    return " ".join(f"`{name}`" for name in sorted(known_cpus(arch)))


def architectures() -> str:
    """NVIDIA's architectures that a target can name."""
    from tvm_fusion.compiler.targets import ARCHITECTURES

    return " ".join(f"`{name}`" for name in ARCHITECTURES)


def operators() -> str:
    """Outcomes of each ONNX operator: its own test cases are imported."""
    # The last column is as wide as its heading, and long names of the others are wrapped.
    refused = "why others are refused".replace(" ", "\N{NO-BREAK SPACE}")
    columns = ("operator", "imported", "constant", "rewritten to", refused)
    rows = (
        [re.sub("[_.](?=[a-zA-Z])", r"\g<0><wbr>", _escape(cell)) for cell in row]
        for row in operator_cases.rows()
    )
    return _table(columns, rows)


def element_types() -> str:
    """The element types that inputs and outputs may have."""
    return ", ".join(f"`{name}`" for name in operator_cases.element_types())


def other_operators() -> str:
    """The operators of ONNX that are translated and that it has no test cases of."""
    from tvm_fusion.onnx.operators.table import TABLE

    names = {op.name for op in TABLE.values() if not (op.domain or op.refuse)}
    names -= {case.operator for case in operator_cases.cases()}
    return ", ".join(f"`{name}`" for name in sorted(names) if "." not in name)


def contrib_operators() -> str:
    """The operators of ``com.microsoft`` that are translated."""
    return _translated("com.microsoft")


def classical_operators() -> str:
    """The operators of ``ai.onnx.ml`` that are translated."""
    return _translated("ai.onnx.ml")


def _translated(domain: str) -> str:
    from tvm_fusion.onnx.operators.table import TABLE

    names = (op.name for op in TABLE.values() if op.domain == domain and op.expand)
    return ", ".join(f"`{name}`" for name in sorted(names))


def networks() -> str:
    """The races of whole networks, by CPU side by side."""
    return _races("networks", ("ONNX Runtime", "OpenVINO"))


def pairs(section: str = "results") -> str:
    """The races of pairs of convolutions, by CPU side by side."""
    return _races("pairs", ("ONNX Runtime", "OpenVINO", "unfused", "fused"), section)


def searches() -> str:
    """Share of the best recorded speed that each search reaches, by CPU."""
    parts = []
    for family, found in json.loads((RESULTS / "search.json").read_text()).items():
        headings = ["search", *found["searches"]["ours"]]
        rows = (
            [name, *("" if value is None else f"{value:.3f}" for value in figures.values())]
            for name, figures in found["searches"].items()
        )
        parts += [f"{_cpu(family)}, {found['kernels']} kernels:", _table(headings, rows)]
    return "\n\n".join(parts)


def tuned_pairs() -> str:
    """Pairs tuned by us and by MetaSchedule, for each CPU on which they were."""
    parts = []
    for path in sorted(RESULTS.glob("*/tuning.json")):
        stored = json.loads(path.read_text())
        pairs = {name: one for name, one in stored["results"].items() if "race" in one}
        races = [one["race"] for one in pairs.values()]
        ours, *peers = [engine["title"] for engine in races[0]["engines"]]
        rows = []
        for name, one in pairs.items():
            first, *others = one["race"]["engines"]
            trial = one["ours"]["seconds"] / max(1, one["ours"]["trials"])
            ratios = [f"{engine['ratio']:.2f}x" for engine in others]
            rows.append([name, f"{trial:.2f}", f"{first['median_ms']:.3g}", *ratios])
        rows.append(["geometric mean", "", "", *(_mean(races, peer) for peer in peers)])
        head = ["pair", "s a trial", f"{ours}, ms", *peers]
        about = f"{_cpu(path.parent.name)}, {stored['settings']['trials']} trials:"
        parts += [about, _table(head, rows)]
    return "\n\n".join(parts)


def zoo() -> str:
    """The races of exported architectures, by CPU side by side."""
    return _races("zoo", ("ONNX Runtime",))


def recurrent() -> str:
    """The races of recurrent layers, by CPU side by side."""
    return _races("recurrent", ("ONNX Runtime",))


def quantized() -> str:
    """The races of quantised models, by CPU side by side."""
    peers = {"quantized": "ONNX Runtime", "quantized_openvino": "OpenVINO"}
    return "\n\n".join(_races(name, (peer,)) for name, peer in peers.items())


def decoders() -> str:
    """The races of decoders, by CPU side by side."""
    return _races("decoders", ("ONNX Runtime", "OpenVINO"))


def pytorch() -> str:
    """The races of models of torchvision, by CPU side by side."""
    return _races("torch", ("Inductor, freezing", "eager"))


def reductions() -> str:
    """The races of reductions, by CPU side by side."""
    return _races("reductions_cpu", ("numpy", "stock TVM"))


def predicted_reductions() -> str:
    """Predicted shares of the bandwidth of GPUs side by side, and from what for the last one."""
    cases = json.loads((RESULTS / "reductions_gpu_predicted.json").read_text())
    machines = list(next(iter(cases.values()))["machines"])
    rows = []
    for name, case in cases.items():
        times = [case["machines"][machine]["predicted"] for machine in machines]
        kernel, time = case["machines"][machines[-1]]["kernel"], times[-1]
        rows.append(
            [
                name,
                f"{case['bytes'] / 1e6:.4g}",
                *(f"{each['share']:.0%}" for each in times),
                str(kernel["blocks"]),
                f"{time['waves']:.2f}",
                f"{time['waves'] % 1 or 1:.0%}",
                f"{time['flight_bytes'] / 1024:.0f}",
                f"{time['instructions_per_byte']:.2f}",
                f"{time['finish_seconds'] * 1e6:.2f}",
            ]
        )
    figures = ["blocks", "waves", "last wave", "KiB in flight", "instr. / byte", "finish, us"]
    return _table(["case", "MB", *machines, *figures], rows)


def predicted_lookups() -> str:
    """Errors of predicted lookups, by CPU and direction."""
    kinds = {
        "by_the_data": "by the data",
        "by_the_data_with_the_exchange_of_the_file": "exchange not measured beside",
        "without_the_data": "without the data",
        "by_sizes_alone": "by sizes alone",
        "by_the_data_of_the_sources_sizes": "by the data, B >= 128 and L >= 8",
        "without_the_data_of_the_sources_sizes": "without, B >= 128 and L >= 8",
        "repeat": "same launch again",
    }
    rows = [
        [cpu, direction, *(f"{found[kind]['gmae']:.1f} %" for kind in kinds if kind in found)]
        for cpu, results in _by_cpu("predict_lookups")
        for direction, found in results.items()
    ]
    return _table(["CPU", "direction", *kinds.values()], rows)


def predicted_trainings() -> str:
    """Errors of predicted steps of trainings, by CPU and number of ranks."""
    kinds = {
        "own_trace": "operators of its own trace",
        "other_batches": "operators of other batch sizes",
        "repeat": "same step again",
    }
    rows = [
        [cpu, ranks, *(f"{results[kind]['mape_percent']:.1f} %" for kind in kinds)]
        for ranks, name in (("1", "predict_training"), ("2", "predict_training_ranks"))
        for cpu, results in _by_cpu(name)
    ]
    return _table(["CPU", "ranks", *kinds.values()], rows)


def reshardings() -> str:
    """Errors of steps of traced trainings by other sharders, by CPU."""
    rows = [
        [cpu, str(found["shardings"]), *(f"{one['gmae_percent']:.1f} %" for one in kinds), told]
        for cpu, found in _by_cpu("predict_resharding")
        for kinds in [(found, found["as_traced"])]
        for told in [f"{found['direction']['right']} of {found['direction']['apart']}"]
    ]
    head = ["CPU", "shardings", "predicted", "as the traced one", "faster or slower, rightly"]
    return _table(head, rows)


def _by_cpu(name: str) -> list[tuple[str, dict[str, Any]]]:
    files = sorted(RESULTS.glob(f"*/{name}.json"))
    return [(_cpu(file.parent.name), json.loads(file.read_text())["results"]) for file in files]


def _races(name: str, peers: Sequence[str], section: str = "results") -> str:
    """One row a case: our latency, and how many times as long each peer takes."""
    files = sorted(RESULTS.glob(f"*/{name}.json"))
    read = {_cpu(file.parent.name): json.loads(file.read_text()) for file in files}
    stored = {cpu: {**one, "results": one[section]} for cpu, one in read.items() if section in one}
    # One table for all CPUs fits in a page if it has few columns for each.
    groups = [list(stored)] if len(peers) < 3 else [[cpu] for cpu in stored]
    tables = [_race_table({cpu: stored[cpu]["results"] for cpu in g}, peers) for g in groups]
    return "\n\n".join([*tables, *_settings(stored)])


def _race_table(results: dict[str, Any], peers: Sequence[str]) -> str:
    """Races on some CPUs side by side."""
    cases = dict.fromkeys(case for column in results.values() for case in column)
    rows = [
        [case, *(cell for column in results.values() for cell in _cells(column.get(case), peers))]
        for case in cases
    ]
    head, means = ["case"], ["geometric mean"]
    for cpu, column in results.items():
        head += [f"{cpu}, ms", *(f"{cpu}: {peer}" if len(results) > 1 else peer for peer in peers)]
        means += ["", *(_mean(column.values(), peer) for peer in peers)]
    return _table(head, [*rows, means])


def stencils() -> str:
    """Stencils on one rank and on two, for each CPU."""
    tables = []
    for path in sorted(RESULTS.glob("*/distributed.json")):
        results = json.loads(path.read_text())["results"]
        titles = list(next(iter(results.values()))["jobs"])
        rows = []
        for name, result in results.items():
            case, jobs = result["case"], result["jobs"]
            times = [jobs[title]["run_ms"] for title in titles]
            steps = f", {case['steps']} steps" if case["steps"] > 1 else ""
            sent = jobs[titles[-1]]
            predicted = sent.get("predicted_ms")
            rows.append(
                [
                    name,
                    f"{case['rows']} x {case['cols']}{steps}",
                    *(f"{ms:.4g}" for ms in times),
                    f"{predicted:.4g}" if predicted else "",
                    *(f"{ms / times[-1]:.2f}x" for ms in times[:-1]),
                    f"{sent['bytes']} in {sent['exchange_us']:.0f} us",
                ]
            )
        ratios = [f"to {title}" for title in titles[:-1]]
        head = ["case", "size", *titles, "predicted", *ratios, "bytes a step"]
        tables += [f"{_cpu(path.parent.name)}, milliseconds:", _table(head, rows)]
    return "\n\n".join(tables)


def stencil_peers() -> str:
    """Stencils on two ranks, and how many times as long peers take on two cores, for each CPU."""
    titles = {"numba": "Numba + mpi4py", "halide": "Halide", "devito": "Devito", "jax": "JAX"}
    rows = []
    for cpu, results in _by_cpu("distributed"):
        for name, result in results.items():
            if peers := result.get("peers"):
                ours = result["jobs"]["2 ranks"]["run_ms"]
                ratios = [f"{peers[p]['run_ms'] / ours:.2f}x" if p in peers else "" for p in titles]
                rows.append([cpu, name, f"{ours:.4g}", *ratios])
    return _table(["CPU", "case", "2 ranks, ms", *titles.values()], rows)


def cooperative_splits() -> str:
    """Stencils on a CPU and a device: each alone, the best of 17 splits, and the chosen ones."""
    rows = []
    for cpu, results in _by_cpu("cooperative"):
        for name, result in results.items():
            splits = result["splits"]
            ms = {title: split["typical_ms"] for title, split in splits.items()}
            # Splits between the device alone and the CPU.
            sweep = [title for title in splits if "/" in title]
            best = min(sweep, key=lambda title: ms[title])
            alone = ms[sweep[0]], ms[sweep[-1]]
            size = " x ".join(map(str, result["size"]))
            chosen = [f"{ms[title] / ms[best]:.2f}x" for title in ("measured", "model")]
            copied = [f"{ms[title]:.4g}" for title in splits if title.startswith("device, ")]
            times = [f"{each:.4g}" for each in (*alone, ms[best])]
            pair = f"{min(alone) / ms[best]:.2f}x"
            errors = [
                abs(split["predicted_of_sides_ms"] / ms[title] - 1)
                for title, split in splits.items()
                if "predicted_of_sides_ms" in split and ms[title] not in alone
            ]
            error = f"{100 * statistics.median(errors):.0f} %" if errors else ""
            cells = [cpu, result["device"], name, size, *times, best, pair, *chosen]
            rows.append([*cells, error, ", ".join(copied)])
    head = ["CPU", "device", "stencil", "size", "device alone, ms", "CPU alone", "best split"]
    head += ["CPU's rows", "pair", "measured split", "model's split", "error"]
    return _table([*head, "device, copies in 1 and 8 chunks, ms"], rows)


def shardings() -> str:
    """Tasks in which the choice among shardings and each sharder alone are near the best."""
    rows = [
        [cpu, name, f"{close} of {results['tasks']}", f"{results['mean_loss_percent'][name]:.1f} %"]
        for cpu, results in _by_cpu("predict_sharding")
        for name, close in results["close_to_the_best"].items()
    ]
    return _table(["CPU", "sharder", "within 10 % of the best", "mean loss"], rows)


def _cells(result: Any, peers: Sequence[str]) -> list[str]:
    if result is None:
        return ["not measured", *("" for _ in peers)]
    engines = {engine["title"]: engine for engine in result["engines"]}
    return [
        f"{engines['tvm-fusion']['median_ms']:.3g}",
        *(f"{engines[peer]['ratio']:.2f}x" if peer in engines else "" for peer in peers),
    ]


def _mean(results: Iterable[Any], peer: str) -> str:
    engines = [engine for result in results for engine in result["engines"]]
    ratios = [engine["ratio"] for engine in engines if engine["title"] == peer]
    return f"{statistics.geometric_mean(ratios):.2f}x" if ratios else ""


def _settings(stored: dict[str, Any]) -> list[str]:
    """Settings and dates of the measurements of each CPU."""
    lines = []
    for cpu, one in stored.items():
        settings = one["settings"]
        dates = [result["date"][:10] for result in one["results"].values() if "date" in result]
        when = " to ".join(sorted({min(dates), max(dates)})) + ", " if dates else ""
        packages = ", ".join(f"{k} {v}" for k, v in settings["machine"]["packages"].items())
        plan = settings["plan"]
        lines.append(
            f"{cpu}: {when}{settings['threads']} threads, {plan['rounds']} rounds of up to "
            f"{plan['runs']} runs; {packages}."
        )
    return lines


def _cpu(family: str) -> str:
    """A CPU's name from LLVM's: "Zen 4" from "znver4"."""
    named = re.sub(r"^znver(\d+)$", r"Zen \1", family)
    return re.sub(r"^emeraldrapids(-without-tiles)?$", _emerald_rapids, named)


def _emerald_rapids(found: re.Match[str]) -> str:
    return "Emerald Rapids" + (" without AMX" if found[1] else "")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(head)
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(text: str) -> str:
    """Text as a cell of a table."""
    return re.sub(r"([|<*_\[])", r"\\\1", text) if "`" not in text else text.replace("|", "\\|")


PARTS: dict[str, Callable[..., str]] = {
    part.__name__: part
    for part in (
        commands,
        reference,
        rules,
        cpus,
        architectures,
        operators,
        other_operators,
        element_types,
        classical_operators,
        contrib_operators,
        cooperative_splits,
        networks,
        pytorch,
        quantized,
        decoders,
        recurrent,
        zoo,
        pairs,
        reductions,
        predicted_reductions,
        predicted_lookups,
        predicted_trainings,
        reshardings,
        searches,
        shardings,
        stencil_peers,
        stencils,
        tuned_pairs,
    )
}
