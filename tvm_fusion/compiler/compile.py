# SPDX-License-Identifier: Apache-2.0
"""The function ``compile``, which needs no compiler for a model that it finds in the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError, TargetError
from ..plugin import without_torch
from ..runtime.compiled_model import CompiledModel
from ..runtime.thread_pool import choose_threads
from .interrupts import interrupts_kept
from .model_cache import Entry, cache_folder
from .registry import front_end_of, rank_compiler

if TYPE_CHECKING:
    import onnx
    import tvm
    from torch.export import ExportedProgram

    from .pipeline import Progress


def compile(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto | ExportedProgram,
    target: str | Mapping[str, Any] | tvm.target.Target | Sequence[Any] = "native",
    shapes: Mapping[str, Any] | None = None,
    *,
    fuse: str | Callable[..., Any] = "auto",
    winograd: str = "auto",
    threads: int | None = None,
    records: str | os.PathLike[str] | None = None,
    fast_math: bool = False,
    precision: str = "fp32",
    weights: str | None = None,
    cuda_graph: bool = False,
    reproducible: bool = False,
    machine: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    ranks: int | None = None,
    check: bool = False,
    cache: bool | str | os.PathLike[str] | None = None,
    outputs: Sequence[str] | None = None,
) -> CompiledModel:
    """Compile an ONNX model, or an exported program of PyTorch, for a CPU or a GPU.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or torch.export.ExportedProgram
        The model; external data needs a path. A program needs the extra ``torch``; its weights are
        shared where the kernels read them as they are.
    target : str, mapping or tvm.target.Target, or a sequence of such
        The CPU: ``"native"``, ``"x86-64-v3"``, ``"cortex-a72"``, ``"llvm -mcpu=..."``; or the GPU:
        ``"cuda"`` for this machine's own, ``"cuda -arch=sm_90"``, ``"opencl"``; or a target of TVM.
        The code may be for another machine; it can be saved, and runs there. For ``cuda`` every
        kernel becomes machine code here, by NVRTC or nvcc, and no GPU is needed. Several CPUs make
        one model for all of them, whose file runs on each with the code for the best target that it
        has: the widest vectors, then the most features. Weights that are packed in the same way for
        several targets are stored once.
    shapes : mapping, optional
        Shape of each input, or size of each dimension, by its name, where the model has symbolic
        ones. Those of an exported program stay symbolic by default.
    fuse : str or callable
        ``"auto"`` fuses the pairs of convolutions that gain, ``"all"`` those that can be fused,
        ``"none"`` none; a callable decides itself.
    winograd : str
        On a CPU: ``"auto"`` computes 3x3 convolutions by Winograd's algorithm where that is
        predicted faster, ``"always"`` wherever possible, ``"never"`` nowhere. It rounds
        differently, with the error of the direct kernels or twice that, and spreads an infinity or
        NaN over a tile of 4x4 pixels.
    threads : int, optional
        Threads of a call; by default one a physical core. The code is compiled for that number,
        unless the target has ``num-cores``. There may be more than this machine has if the target
        is named, not ``"native"``; calls here then run on all of this one's.
    records : path, optional
        Winners of tuning jobs (:func:`tvm_fusion.tune`) for the knobs of kernels: a file, the
        folder of a job, or ``"none"``. They count for the same CPU, vectors and threads, or the
        same GPU, only, and before the records that come with the package, which ``"none"`` switches
        off, too.
    fast_math : bool
        For CUDA: whether functions of float32 may be replaced by instructions that approximate
        them, of which ``tanh`` is accurate to 2^-11 only.
    precision : str
        For CPUs: ``"bf16"`` rounds what convolutions and matrix products of float32 multiply,
        weights and activations, to bfloat16 (to nearest, halves to even), and stores these
        activations so. Products are exact; sums, biases, residuals, activations, norms, softmax and
        all other ops are float32. A sum differs by about 2^-8 of the sum of the magnitudes of its
        products. ``"auto"`` is that on CPUs that multiply bfloat16 faster than float32 (AMX, or
        AVX512-BF16 from Zen 4 on), and ``"fp32"`` elsewhere. For GPUs: ``"fp16"`` computes products
        and convolutions of float32 in float16, summed in float32, on tensor cores where there are
        some; what lies between them is float16, too, but for norms and softmax. Inputs and outputs
        stay as they are. Values beyond 65504 overflow. ``"tf32"``, from sm_80 on, only rounds the
        factors of matrix products and of dense convolutions to 10 bits behind the point, for tensor
        cores; attention stays float32.
    weights : str, optional
        For CPUs: ``"int8"`` or ``"int4"`` rounds the constant matrices of products to integers with
        a float32 scale for every 128 or 32 numbers of a column, ``"bf16"`` to bfloat16, and the
        compiled model holds these. Embeddings, constant matrices of which a Gather looks up rows,
        become integers, too, with a scale for as many numbers of a row, unless something else
        multiplies the rows, as sines of positions. A number changes by at most 1/254 or 1/8 of the
        largest of its block, or by 1/256 of itself. What is multiplied by 4 bits is rounded to 8
        bits, in blocks of 32 numbers; sums stay float32. ``"int8"`` rounds weights of convolutions,
        too, with a scale for each output channel, where kernels can widen them; they are computed
        without Winograd's algorithm and pairs. Matrices that a model stores in 8 or 4 bits, as by
        MatMulNBits, stay so without this option, as do large weights of convolutions in 8 bits, and
        in products of few rows matrices of 16-bit floats.
    cuda_graph : bool
        For CUDA: whether kernels are captured into CUDA graphs in the first call and replayed in
        the others, which saves the time of their launches. Those that read inputs or write outputs
        are not, nor those of unknown sizes.
    reproducible : bool
        For GPUs: whether sums are added in an order that does not depend on the GPU. How they are
        divided into blocks is then the same for all, in the order of a tree, without clusters,
        atomic updates of floats, records or ``machine``; reductions of sums, products and extremes
        have the same bits on all CUDA GPUs, whole models those with tensor cores of one
        architecture. ``tvm-fusion explain --reproducible`` tells what that is predicted to cost.
    machine : str or path, optional
        A file of ``tvm-fusion calibrate``, or the name of a known machine. On a CPU it is chosen by
        its figures, instead of those of the CPU's family, which pairs are fused, which convolutions
        use Winograd's algorithm, which reductions run on threads, and the knobs of convolutions.
        For ``cuda``: how many blocks share a result of a reduction, and how they combine theirs,
        by predicted times, none of which has been measured on a GPU. ``"cuda"`` without
        an architecture is then that machine.
    progress : callable, optional
        Called before each stage with its name, the number of stages done, and the number of all of
        them; at the end with ``"done"``. While kernels are built, also with texts such as
        ``"build, 8 of 40 kernels"``.
    ranks : int, optional
        Processes of MPI that compute the model together, each some rows of every image
        (:func:`tvm_fusion.distributed.compile_network` has more options); on CPUs. ``threads`` are
        those of each rank, by default its share of this machine's cores.
    check : bool
        Whether the compiled model is called once or twice on this machine, and its outputs compared
        with those of PyTorch's eager mode, or of ONNX Runtime on an ONNX model. A program is called
        on its example inputs, if it carries such of these shapes, and on random floats beside their
        integers; else floats are random, and integers 0 or 1, always the same ones. The largest
        error in parts of an output's largest magnitude may be 1e-3 in models of float32, 2e-2 with
        float16, 5e-2 with bfloat16 or quantised values, and 0.25 with weights of 4 bits; 1% of the
        elements of an integer output may differ, as where two scores are nearly equal.
    cache : bool or path, optional
        Whether a model that was compiled before, with the same options, on a CPU like this one and
        by the same versions, is loaded instead, and others are stored for the next time: True for
        ``$XDG_CACHE_HOME/tvm-fusion/models``, or a folder. By default it is what the environment
        variable ``TVM_FUSION_CACHE`` says: a folder, 1 or 0, which is the default. 4 GiB are kept,
        those that were used last. ``ranks`` and functions as options are not cached.
    outputs : sequence of str, optional
        Names of results of an ONNX model's nodes, in the order in which they are returned, instead
        of the outputs that it declares. Nodes that only others need are left out: the scores in
        front of a ZipMap, or the features of a network without its head.

    Returns
    -------
    CompiledModel
        Or, with ``ranks``, a :class:`tvm_fusion.distributed.DistributedModel`.

    Raises
    ------
    InvalidModelError, UnsupportedOperatorError
        If the model cannot be read, or holds operators that cannot be compiled.
    CompilationError
        If TVM fails in a later stage; the message names the stage. With ``check``, if an output
        differs; the message names it, its error and the tolerance.
    EngineError
        With ``check``, if ONNX Runtime is not installed, or does not run the model.
    TargetError
        If the target is unknown, if no compiler for its kernels is installed, or if Winograd's
        algorithm is requested for a GPU, approximations of functions or graphs elsewhere than on
        CUDA, float16 or ``reproducible`` on a CPU, or bfloat16 or narrow weights on a GPU; if the
        machine is another device than the target; or if ``machine`` or ``records`` come with
        ``reproducible``. If one of several targets is a GPU, or they come with ``machine`` or
        ``ranks``.
    InvalidInputError
        If ``threads`` is not possible, an option that is True or False is neither, or ``outputs``
        are not names of results. With ``check``, if
        sizes of inputs are not known, or an output is none that the model declares.
    TuningError
        If there are no such records.
    PredictionError
        If there is no such machine, its file is none, or it lacks a figure.

    Examples
    --------
    >>> compiled = tvm_fusion.compile("model.onnx")            # doctest: +SKIP
    >>> y = compiled(np.zeros((1, 3, 224, 224), "float32"))    # doctest: +SKIP
    """
    options: dict[str, Any] = {
        "fuse": fuse,
        "winograd": winograd,
        "records": records,
        "fast_math": fast_math,
        "precision": precision,
        "weights": weights,
        "cuda_graph": cuda_graph,
        "reproducible": reproducible,
        "machine": machine,
        "outputs": outputs,
    }
    for name, value in (("check", check), ("fast_math", fast_math), ("cuda_graph", cuda_graph)):
        if not isinstance(value, bool):
            raise InvalidInputError(f"{name} is {value!r:.60}; expected True or False")
    if ranks is not None:
        if check:
            raise InvalidInputError("check=True has no effect with ranks: leave it out")
        if isinstance(target, list | tuple):
            raise TargetError("a model for ranks is for one target; got a list of them")
        options |= {"threads": threads, "progress": progress}
        return rank_compiler().compile_for_ranks(model, ranks, target, shapes, **options)
    count = choose_threads(threads, elsewhere=target != "native")
    folder, entry = cache_folder(cache), None
    if folder is not None:
        asked = options | {"target": target, "shapes": shapes, "threads": (threads, count)}
        entry = Entry.of(folder, model, asked)
    compiled = None if entry is None else entry.load(count)
    if compiled is None:
        with interrupts_kept(), without_torch():  # extensions crash where Ctrl-C ends their import
            from .compile_model import compile_model, external_files
        external = None if entry is None else entry.external(external_files(model))
        compiled = compile_model(model, target, shapes, threads, count, progress, **options)
        if entry is not None and external is not None:
            entry.store(compiled, external)
    elif progress is not None:
        progress("done", 1, 1)
    if check:
        with interrupts_kept(), without_torch():
            from .options import chosen_precision
            from .reference import SEED, check_numbers

        chosen = chosen_precision(precision, compiled.target)
        rounds = {"bf16": "bfloat16", "fp32": "float16" if fast_math else None}
        coarsest = {"bf16": "bfloat16"}.get(weights or "", weights)
        reference = front_end_of(model).reference(model, compiled, SEED)
        check_numbers(reference, compiled, coarsest or rounds.get(chosen, "float16"))
    return compiled
