# SPDX-License-Identifier: Apache-2.0
"""Operators x element types x edge values: our numbers beside those of two references.

Each operator of ``operator_cases`` has a template, one of ONNX's own cases; the inputs of its data
type get every type that the schema allows, and numbers at the edges of that type. Nodes that do not
depend on each other share a model, so that few are compiled. What ONNX's reference evaluator and
ONNX Runtime agree on is right; ``PREFERRED`` says whom we follow where they do not.

``PYTHONPATH=.:docs python tests/tvm_fusion/edge_values.py [PATTERN]`` runs the operators whose
names match the pattern, all of them by default, and prints what is wrong, refused and undecided.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import warnings
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from node_suite import tensor_cases
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

import tvm_fusion
from operator_cases import Case
from tvm_fusion.errors import CompilationError, TVMFusionError
from tvm_fusion.onnx.frontend import import_onnx

HALVES = ("float16", "bfloat16")
FLOATS = ("float32", "float16", "float64", "bfloat16")
INTEGERS = tuple(f"{sign}int{bits}" for bits in (8, 16, 32, 64) for sign in ("", "u"))
TYPES = (*FLOATS, *INTEGERS, "bool")

VARIED = {"OneHot": "T3", "Where": "T"}
"""Type parameter of the inputs that are varied, where that is not the first input's."""

LEFT_OUT = frozenset(
    """BlackmanWindow HammingWindow HannWindow NonMaxSuppression Range TfIdfVectorizer
    Unique""".split()
)
"""Operators whose numbers are sizes, or are compared in ways that have no types."""

ACCUMULATING = frozenset(
    """Attention AveragePool BatchNormalization CausalConvWithState Col2Im Conv ConvTranspose
    CumProd CumSum DFT DeformConv Det Einsum GRU Gemm GlobalAveragePool GridSample
    GroupNormalization InstanceNormalization LRN LSTM LayerNormalization LinearAttention
    LogSoftmax LpNormalization
    LpPool MatMul Mean MeanVarianceNormalization NegativeLogLikelihoodLoss RMSNormalization RNN
    ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMean ReduceProd ReduceSum ReduceSumSquare
    Resize RoiAlign RotaryEmbedding STFT Shrink Softmax SoftmaxCrossEntropyLoss Sum
    SwiGLU""".split()
)
"""Operators that add many numbers: the largest of a type overflow in some orders only."""

BATCH = 48
"""Nodes that share a model."""

RELATIVE = {"float16": 4e-3, "bfloat16": 3e-2, "float32": 2e-5, "float64": 1e-9}


@dataclass(frozen=True)
class Probe:
    """A node with the types and shapes of its inputs.

    Parameters
    ----------
    name : str
        Operator, type, and what is special.
    node : onnx.NodeProto
        Its tensors have names of its own, so that nodes can share a model.
    opset : int
        Version of ONNX's operators.
    shapes : mapping
        Shapes of the inputs that are filled, all of type ``dtype``.
    dtype : str
        An element type.
    constants : mapping
        Its other inputs.
    """

    name: str
    node: onnx.NodeProto
    opset: int
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str
    constants: Mapping[str, np.ndarray]

    def feeds(self, fill: str) -> dict[str, np.ndarray]:
        """Numbers for the inputs."""
        seed = zlib.crc32(f"{self.name} {fill}".encode())
        generator = np.random.default_rng(seed)
        sums = self.node.op_type in ACCUMULATING
        edges = edges_of(self.dtype, not sums)
        found = {
            # Infinite weights meet padding in references only, where it is multiplied.
            name: _filled(shape, self.dtype, "ordinary" if sums and i else fill, edges, generator)
            for i, (name, shape) in enumerate(self.shapes.items())
        }
        return _defined(self.node.op_type, found)


def edges_of(dtype: str, with_extremes: bool = True) -> np.ndarray:
    """Numbers at the edges of a type, and a few others."""
    kind = _numpy_type(dtype)
    if dtype == "bool":
        return np.array([False, True])
    if dtype in INTEGERS:
        limits = np.iinfo(kind)
        values = {limits.min, limits.max, limits.max // 2 + 1, 0, 1, 2, 3, 7}
        values |= {-1, -2, -7, limits.min + 1} if limits.min else set()
        values = values if with_extremes else {v for v in values if abs(v) < 8}
        return np.array(sorted(values), kind)
    limits = ml_dtypes.finfo(kind)
    values = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 0.5, -0.5, 1.5, 2.5, -2.5, 6, -7.25, 100]
    values += [-30.0, 0.1, -3.1]
    if with_extremes:
        sizes = [limits.max, limits.smallest_normal, limits.smallest_subnormal, limits.eps, 1000]
        values += [sign * float(size) for size in sizes for sign in (1, -1)]
    with np.errstate(over="ignore"):
        return np.array(values).astype(kind)


def _filled(
    shape: tuple[int, ...], dtype: str, fill: str, edges: np.ndarray, generator: Any
) -> np.ndarray:
    """An array of a shape: ``fill`` says which of the edges are in it."""
    kind = _numpy_type(dtype)
    if dtype == "bool":
        ordinary = generator.random(shape) < 0.5
    elif dtype in INTEGERS:
        ordinary = generator.integers(-9 if "u" not in dtype else 0, 10, shape).astype(kind)
    else:
        ordinary = (generator.standard_normal(shape) * 2).astype(kind)
    if fill == "ordinary" or (dtype in INTEGERS and fill in ("nan", "inf", "-inf")):
        return ordinary
    if fill == "sparse":
        return np.where(generator.random(shape) < 0.1, generator.choice(edges, shape), ordinary)
    if fill == "rows":
        rows = generator.choice(edges, (*shape[:-1], 1) if shape else ())
        return np.array(np.broadcast_to(rows, shape), kind)
    if fill == "edges":
        if edges.size == np.prod(shape):  # the probe has a place for each
            return edges.reshape(shape)
        return generator.choice(edges, shape)
    with np.errstate(invalid="ignore"):
        return np.full(shape, float(fill)).astype(kind)


def _defined(op_type: str, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Feeds for which the operator is defined: no process may end of a division by zero."""
    if not feeds:
        return feeds
    last = list(feeds)[-1]
    value = feeds[last]
    if value.dtype.kind not in "iu":
        return feeds
    if op_type in ("Div", "Mod"):
        value = np.where(value == 0, 1, value)
        value = (
            np.where(value == value.dtype.type(-1), 3, value) if value.dtype.kind == "i" else value
        )
    elif op_type == "Pow":
        # Powers are not negative.
        value = value % 4 if len(feeds) > 1 else np.maximum(value % 4, 1)
    return feeds | {last: value.astype(feeds[last].dtype)}


SPECIAL = {
    "each": ("edges",),
    "number": ("ordinary", "nan"),
    "element": ("ordinary", "-inf"),
    "empty": ("ordinary",),
}
"""Fills of other shapes than those of the templates."""


def fills_of(probe: Probe) -> tuple[str, ...]:
    """Ways to fill the inputs of a probe."""
    special = probe.name.rpartition(" ")[2]
    if special in SPECIAL:
        return SPECIAL[special]
    if probe.dtype in FLOATS:
        return ("ordinary", "edges", "sparse", "rows", "nan", "inf", "-inf", "0")
    return ("ordinary", "edges", "0") if probe.dtype in INTEGERS else ("ordinary", "0")


def probes(pattern: str = "", per_operator: int = 2) -> list[Probe]:
    """Probes of all operators whose names match."""
    templates: dict[str, list[Case]] = defaultdict(list)
    seen = set()
    for case in tensor_cases():
        name = case.operator
        if not name or name in LEFT_OUT or not re.fullmatch(pattern or ".*", name):
            continue
        [node] = case.model.graph.node
        kind = (name, str(sorted(map(str, node.attribute))), len(node.input), len(node.output))
        if kind not in seen and len(templates[name]) < per_operator:
            seen.add(kind)
            templates[name].append(case)
    found: list[Probe] = []
    for cases in templates.values():
        for number, case in enumerate(cases):
            found += _typed(case, with_shapes=number == 0)
    return found


def _typed(case: Case, with_shapes: bool) -> Iterator[Probe]:
    """The template in all types, and in other shapes."""
    [node] = case.model.graph.node
    opset = case.model.opset_import[0].version
    schema = onnx.defs.get_schema(node.op_type, opset)
    formals = [schema.inputs[min(i, len(schema.inputs) - 1)] for i in range(len(node.input))]
    if not formals:
        return
    varied = VARIED.get(node.op_type, formals[0].type_str)
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}
    values = dict(zip([v.name for v in case.model.graph.input], case.inputs, strict=True))
    names = [n for n, f in zip(node.input, formals, strict=True) if n and f.type_str == varied]
    if not all(name in values for name in names):
        return
    for dtype in TYPES:
        if f"tensor({ONNX_NAMES.get(dtype, dtype)})" not in allowed.get(varied, ()):
            continue
        others = {name: value for name, value in values.items() if name not in names}
        shapes = {name: values[name].shape for name in names}
        yield _probe(f"{case.name[5:]} {dtype}", node, opset, shapes, dtype, others)
        if not with_shapes:
            continue
        count = edges_of(dtype, node.op_type not in ACCUMULATING).size
        special: dict[str, list[tuple[int, ...]]] = {
            "each": [(count,)] if len(names) == 1 else [(count, 1), (1, count)],
            "number": [()] * len(names),
            "element": [(1,)] * len(names),
            "empty": [(2, 0)] * len(names),
        }
        for what, sizes in special.items():
            if len(sizes) == len(names) <= 2:
                chosen = dict(zip(names, sizes, strict=True))
                label = f"{case.name[5:]} {dtype} {what}"
                yield _probe(label, node, opset, chosen, dtype, others)


ONNX_NAMES = {"float32": "float", "float64": "double"}


def _probe(
    name: str,
    node: onnx.NodeProto,
    opset: int,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    others: Mapping[str, np.ndarray],
) -> Probe:
    """A probe whose tensors are named after it."""
    own = onnx.NodeProto()
    own.CopyFrom(node)
    own.name = name
    for side in (own.input, own.output):
        for index, tensor in enumerate(side):
            side[index] = f"{name}: {tensor}" if tensor else ""
    shapes, others = (
        {f"{name}: {tensor}": value for tensor, value in group.items()}
        for group in (shapes, others)
    )
    return Probe(name, own, opset, shapes, dtype, others)


def model_of(chosen: Sequence[Probe], results: Mapping[str, str]) -> onnx.ModelProto:
    """A model of all nodes; ``results`` has the types of their outputs."""
    kinds = {name: helper.np_dtype_to_tensor_dtype(_numpy_type(t)) for name, t in results.items()}
    inputs = [
        helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(_numpy_type(probe.dtype)), shape
        )
        for probe in chosen
        for name, shape in probe.shapes.items()
    ]
    outputs = [
        helper.make_tensor_value_info(name, kinds[name], None)
        if name in kinds
        else onnx.ValueInfoProto(name=name)
        for probe in chosen
        for name in probe.node.output
        if name
    ]
    tensors = [
        numpy_helper.from_array(value, name)
        for probe in chosen
        for name, value in probe.constants.items()
    ]
    nodes = [probe.node for probe in chosen]
    graph = helper.make_graph(nodes, "edges", inputs, outputs, tensors)
    opsets = [helper.make_opsetid("", chosen[0].opset)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@functools.cache
def _numpy_type(dtype: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)


WIDER = {
    "wide onnx": dict.fromkeys(("float16", "bfloat16", "float32"), "float64"),
    "wide onnxruntime": {"float16": "float32", "bfloat16": "float32", "float32": "float64"},
}
"""Types in which references compute beside those of the probes."""


class References:
    """ONNX's reference evaluator and ONNX Runtime for one probe; either may lack it.

    Both round each step to the type of the probe. Where there is a wider type, "wide onnx" and
    "wide onnxruntime" compute in it, and round the result only.
    """

    def __init__(self, probe: Probe) -> None:
        self._dtype = probe.dtype
        self._sessions: dict[str, tuple[Any, str]] = {}
        self.types = _inferred_types(probe)
        for name in ("onnx", "onnxruntime", *WIDER):
            dtype = WIDER[name].get(probe.dtype) if name in WIDER else probe.dtype
            if name == "wide onnx" and probe.node.op_type in CUT:
                dtype = "float64"
            if dtype is not None:
                with contextlib.suppress(Exception):  # types and versions that it lacks
                    session = _session(name, replace(probe, dtype=dtype))
                    self._sessions[name] = session, dtype

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, list[np.ndarray]]:
        """Outputs of those that can run it, in the types of the results."""
        found = {}
        for name, (session, dtype) in self._sessions.items():
            given = {key: value.astype(_numpy_type(dtype)) for key, value in feeds.items()}
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")
                    results = session.run(None, given)
            except Exception:  # types that it lacks
                continue
            if all(isinstance(one, np.ndarray | np.generic) for one in results):
                found[name] = [np.asarray(one) for one in results]
        if found and not self.types:
            name, first = next(iter(found.items()))
            self.types = [self._dtype if name in WIDER else str(one.dtype) for one in first]
        with np.errstate(all="ignore"):
            return {
                name: [a.astype(_numpy_type(t)) for a, t in zip(results, self.types, strict=True)]
                for name, results in found.items()
            }


def _session(name: str, probe: Probe) -> Any:
    """One reference for one probe; it raises anything."""
    model = model_of([probe], {})
    if name.endswith("onnx"):
        return ReferenceEvaluator(model)
    model.opset_import[0].version = min(probe.opset, NEWEST_OF_ONNX_RUNTIME)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def _inferred_types(probe: Probe) -> list[str]:
    """Types of the results as ONNX infers them; nothing if it does not."""
    try:
        model = onnx.shape_inference.infer_shapes(model_of([probe], {}), strict_mode=True)
    except onnx.shape_inference.InferenceError:
        return []
    kinds = [value.type.tensor_type.elem_type for value in model.graph.output]
    return [str(helper.tensor_dtype_to_np_dtype(kind)) for kind in kinds] if all(kinds) else []


NEWEST_OF_ONNX_RUNTIME = 26


class Preference(NamedTuple):
    """Who is right where the references differ, and why; ``always``: of ordinary numbers, too."""

    who: str
    why: str
    always: bool = False


NOBODY = "nobody"

PREFERRED: dict[tuple[str, str], Preference] = {
    ("Shrink|Sign|Global.*|LogSoftmax|LRN|Softmax", ".*"): Preference(
        "onnx", "as numpy, where ONNX Runtime loses NaN or makes it of finite numbers"
    ),
    ("ArgMax|ArgMin|TopK", ".*"): Preference(
        "onnx", "NaN is the largest, as in numpy; ONNX Runtime loses the maximum beside NaN"
    ),
    ("Attention|AveragePool|LpPool", ".*"): Preference(
        "onnxruntime", "the reference leaves NaN out of means"
    ),
    ("LpNormalization", ".*"): Preference(
        "onnxruntime", "the reference sums the numbers, not their absolute values", always=True
    ),
    ("DFT|STFT", ".*"): Preference(
        NOBODY, "float64 has fewer digits in both, other types the tests of Fourier", always=True
    ),
    ("Compress", "bool"): Preference("onnx", "the condition is varied, and with it the size"),
    ("Reduce(L1|L2|SumSquare)", "u?int.*"): Preference(
        "onnxruntime", "the reference sums in int64 and returns that"
    ),
    ("MeanVarianceNormalization", ".*"): Preference(
        "onnx", "ONNX Runtime divides zero by zero where all numbers are equal"
    ),
    ("OneHot", ".*"): Preference(NOBODY, "the reference multiplies infinities by zero"),
    ("MaxPool", ".*"): Preference(NOBODY, "whether NaN stays depends on its place in both"),
    ("ReduceLogSumExp", ".*"): Preference(NOBODY, "one makes NaN of inf, the other inf of NaN"),
    ("(Dynamic)?QuantizeLinear|DequantizeLinear|Cast.*", ".*"): Preference(
        NOBODY, "floats out of range are undefined as integers, and so are overflows"
    ),
    ("Col2Im|Conv.*|DeformConv|GridSample|Resize|RoiAlign|RNN|RotaryEmbedding", ".*"): (
        Preference(NOBODY, "references multiply what is outside, or infinities, by zero weights")
    ),
}
"""Patterns of the preferred reference by operator and element type; finite numbers are compared
with both always."""

SHORT = frozenset(
    "AffineGrid Erf Gelu GroupNormalization HardSwish LayerNormalization Resize Shrink".split()
)
"""Operators of which we or a reference compute in float32 what is given in float64."""

CUT = frozenset({"GridSample", "Resize"})
"""Operators that make fractions of whole numbers; how to cut them, the standard leaves open."""


def preference(probe: Probe) -> Preference | None:
    """Whom we follow in a probe whose references differ."""
    for (operator, dtype), found in PREFERRED.items():
        if re.fullmatch(operator, probe.node.op_type) and re.fullmatch(dtype, probe.dtype):
            return found
    return None


def differs(found: np.ndarray, wanted: np.ndarray, limit: float) -> np.ndarray:
    """Places where an output is wrong; infinities and NaN must be in place."""
    if found.shape != wanted.shape:
        return np.ones(found.shape, bool)
    kind = str(found.dtype)
    if found.dtype.kind in "iub":
        return (
            abs(found.astype(object) - wanted.astype(object)) > limit if limit else found != wanted
        )
    least = float(ml_dtypes.finfo(found.dtype).smallest_normal) if kind in RELATIVE else 0
    wide = [
        array.astype("complex128" if kind[0] == "c" else "float64") for array in (found, wanted)
    ]
    return ~np.isclose(*wide, rtol=limit, atol=min(limit, 1e-6) + least, equal_nan=True)


@dataclass
class Report:
    """Findings of probes: texts by their kind."""

    counts: Counter[str]
    texts: dict[str, list[str]]

    def add(self, kind: str, text: str = "") -> None:
        """Count an outcome; ``text`` says what happened if it is not right."""
        self.counts[kind] += 1
        if text:
            self.texts[kind].append(text)


def run(chosen: Sequence[Probe]) -> Report:
    """Compile all probes, several in one model, and compare what they compute."""
    report = Report(Counter(), defaultdict(list))
    by_opset: dict[int, list[tuple[Probe, Trial]]] = defaultdict(list)
    for probe in chosen:
        trial = Trial(probe)
        if not trial.expected:
            report.add("without reference")
            continue
        try:
            import_onnx(model_of([probe], trial.types))
        except TVMFusionError as error:
            report.add("refused", f"{probe.name}: {_last_line(error)}")
            continue
        except Exception as error:
            report.add(
                "crash", f"{probe.name}: import: {type(error).__name__}: {_last_line(error)}"
            )
            continue
        by_opset[probe.opset].append((probe, trial))
    for trials in by_opset.values():
        for begin in range(0, len(trials), BATCH):
            _run_batch(trials[begin : begin + BATCH], report)
    return report


class Trial:
    """Outputs of the references for a probe, by the name of a fill."""

    def __init__(self, probe: Probe) -> None:
        references = References(probe)
        self.expected: dict[str, dict[str, list[np.ndarray]]] = {}
        self.types: dict[str, str] = {}
        for fill in fills_of(probe):
            found = references.run(probe.feeds(fill))
            if found and all(one.size for one in next(iter(found.values()))):
                self.expected[fill] = found
                names = [name for name in probe.node.output if name]
                self.types = dict(zip(names, references.types, strict=True))


def _run_batch(trials: Sequence[tuple[Probe, Trial]], report: Report) -> None:
    """Compile one model; where that fails, its halves."""
    chosen = [probe for probe, _ in trials]
    types = {name: dtype for _, trial in trials for name, dtype in trial.types.items()}
    try:
        compiled = tvm_fusion.compile(model_of(chosen, types), threads=1)
    except Exception as error:
        if len(trials) > 1:
            half = len(trials) // 2
            _run_batch(trials[:half], report)
            _run_batch(trials[half:], report)
        else:
            kind = "not compiled" if isinstance(error, CompilationError) else "crash"
            report.add(kind, f"{chosen[0].name}: {_last_line(error)}")
        return
    names = [value.name for value in compiled.outputs]
    for fill in dict.fromkeys(fill for _, trial in trials for fill in trial.expected):
        feeds: dict[str, np.ndarray] = {}
        for probe, trial in trials:
            own = fill if fill in trial.expected else next(iter(trial.expected))
            feeds |= probe.feeds(own)
        found = compiled(feeds)
        results = dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))
        for probe, trial in trials:
            if fill in trial.expected:
                _judge(probe, fill, trial.expected[fill], results, report)


def _judge(
    probe: Probe,
    fill: str,
    expected: Mapping[str, list[np.ndarray]],
    results: Mapping[str, np.ndarray],
    report: Report,
) -> None:
    """Compare the outputs of one probe with what the references agree on, or with the preferred.

    An element is wrong that no reference has, or the preferred one has not.
    """
    outputs = [np.asarray(results[name]) for name in probe.node.output if name]
    wrong = {
        who: [
            differs(one, other, _limit(probe, str(one.dtype)))
            for one, other in zip(outputs, wanted, strict=True)
        ]
        for who, wanted in expected.items()
    }
    is_same = {who: not any(one.any() for one in each) for who, each in wrong.items()}
    chosen = preference(probe)
    if all(is_same.values()) or is_same.get("wide onnx"):
        report.add("right")
        return
    who = ""
    if chosen is not None and (fill != "ordinary" or chosen.always):
        who = chosen.who
        known = {name for name in wrong if name.removeprefix("wide ") == who}
        if who == NOBODY or not known:
            report.add("right" if who == NOBODY else "undecided")
            return
        wrong = {name: wrong[name] for name in known}
    nowhere = [np.logical_and.reduce(each) for each in zip(*wrong.values(), strict=True)]
    is_wrong = any(one.any() for one in nowhere)
    if who and not is_wrong:
        report.add("right")
        return
    number = next(i for i, one in enumerate(nowhere) if one.any() or not is_wrong)
    marked = (
        nowhere[number] if is_wrong else np.logical_or.reduce([w[number] for w in wrong.values()])
    )
    at = np.unravel_index(int(np.argmax(marked)), marked.shape)
    others = ", ".join(
        f"{name} {e[number][at] if e[number].shape == marked.shape else e[number].shape}"
        for name, e in expected.items()
    )
    place = tuple(map(int, at))
    text = f"{outputs[number][at]} at {place} of output {number} ({marked.sum()} of {marked.size})"
    label = f"{probe.name} of {fill}"
    report.add("wrong" if is_wrong else "undecided", f"{label}: {text}; {others} [{who}]")


def _limit(probe: Probe, dtype: str) -> float:
    """Greatest relative error of floats, greatest difference of whole numbers."""
    if dtype in INTEGERS:
        return int(probe.node.op_type in CUT)
    is_short = dtype == "float64" and probe.node.op_type in SHORT
    return RELATIVE["float32"] if is_short else RELATIVE.get(dtype, 0)


def _last_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[-1][:300] if text else ''}"


def main(pattern: str = "", per_operator: str = "2") -> None:
    """Run the operators whose names match, and print what is not right."""
    report = run(probes(pattern, int(per_operator)))
    for kind, texts in report.texts.items():
        for text in texts:
            print(f"{kind}: {text}")
    print(", ".join(f"{count} {kind}" for kind, count in sorted(report.counts.items())))


if __name__ == "__main__":
    main(*sys.argv[1:])
