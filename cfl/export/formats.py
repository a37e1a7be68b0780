"""Writes model files, and reads them back like a program without this package."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode

from cfl.export.answer import Answer
from cfl.runtime.atomic_write import OutputFile, replacing
from cfl.runtime.command_paths import require_file
from cfl.runtime.errors import ConfigError
from cfl.runtime.extras import install

PACKAGES: Mapping[str, tuple[str, ...]] = {
    ".pt2": (),
    ".safetensors": ("safetensors",),
    ".onnx": ("onnx", "onnxscript", "onnxruntime"),
}
"""Suffix of a file -> packages that its format needs beside torch."""


def check_format(path: Path) -> None:
    """Refuse a file that cannot be written, before the model is computed.

    Raises:
        ConfigError: an unknown suffix, a missing package, or a file that cannot be written.
    """
    if path.suffix not in PACKAGES:
        raise ConfigError("--out", str(path), f"a file named {', '.join(f'*{suffix}' for suffix in PACKAGES)}")
    missing = [name for name in PACKAGES[path.suffix] if find_spec(name) is None]
    if missing:
        raise ConfigError("--out", str(path), f"with {', '.join(missing)}: {install('export')}")
    require_file("--out", path)


def write(path: Path, answer: Answer, input_shape: tuple[int, int, int], metadata: Mapping[str, str]) -> float:
    """Write a model atomically, in the format given by the file's suffix.

    ``.pt2``: torch.export, for any number of samples. ``.onnx``: the same, with input ``input`` and output ``output``.
    ``.safetensors``: only the network's tensors, under the names of its state dict.

    Args:
        path: a format of :data:`PACKAGES`; the folder is made.
        answer: the model.
        input_shape: ``(C, H, W)``.
        metadata: for safetensors' header.

    Returns:
        The largest difference between the outputs of the file, read back, and of the model, on synthetic inputs.

    Raises:
        ConfigError: the format cannot hold this model.
        NotWritten: the file cannot be written.
        RuntimeError: the outputs of the written file differ; no file is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        _WRITERS[path.suffix](file, path.name, answer, input_shape, metadata)
        return _difference(answer, read(file.path, answer), input_shape)


def read(path: Path, answer: Answer) -> Callable[[Tensor], Tensor]:
    """Read a file as a function of ``[N, C, H, W]``; for safetensors, the structure is that of ``answer``."""
    if path.suffix == ".pt2":
        with _quiet():
            return torch.export.load(path).module()
    if path.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
    from safetensors.torch import load_file

    stored = load_file(path)
    copied = deepcopy(answer)
    for part, module in copied.frozen.items():
        # A copy of a network shares its frozen parts, which are therefore compared instead of loaded.
        for name, tensor in module.state_dict().items():
            if not torch.equal(tensor, stored.pop(f"{part}.{name}")):
                raise RuntimeError(f"{path}: {part}.{name} is not what the network computes with")
    copied.network.load_state_dict(stored)
    return copied


def example(answer: Answer, input_shape: tuple[int, int, int], samples: int) -> Tensor:
    """Synthetic input ``[samples, C, H, W]`` for comparisons: black and white pixels, which also suit densities."""
    some = next(answer.network.parameters())
    pixels = torch.arange(samples * torch.Size(input_shape).numel())
    return (pixels * 2654435761 % 2**32 >= 2**31).to(some.dtype).view(samples, *input_shape)


@torch.no_grad()
def _difference(answer: Answer, found: Callable[[Tensor], Tensor], input_shape: tuple[int, int, int]) -> float:
    largest = 0.0
    for samples in (1, 3):
        x = example(answer, input_shape, samples)
        expected = answer(x)
        difference = float((found(x) - expected).abs().max())
        if not difference <= 1e-3 * max(1.0, float(expected.abs().max())):
            raise RuntimeError(f"the written model's answers differ by {difference:.3g} from the network's")
        largest = max(largest, difference)
    return largest


def _save_tensors(
    file: OutputFile, name: str, answer: Answer, input_shape: tuple[int, int, int], metadata: Mapping[str, str]
) -> None:
    from safetensors.torch import save  # save_file makes the file readable for its owner only

    if answer.classifiers:
        names = ", ".join(type(method).__name__ for method in answer.classifiers)
        raise ConfigError("--out", name, f"*.pt2 or *.onnx: {names} scores by more than the network's weights")
    # Copies, because tensors of a file may not share memory.
    file.write(save({n: t.contiguous().clone() for n, t in answer.tensors().items()}, dict(metadata)))


def _save_program(
    file: OutputFile, name: str, answer: Answer, input_shape: tuple[int, int, int], metadata: Mapping[str, str]
) -> None:
    program = _program(name, answer, input_shape)
    with _quiet():
        torch.export.save(program, file)


def _save_onnx(
    file: OutputFile, name: str, answer: Answer, input_shape: tuple[int, int, int], metadata: Mapping[str, str]
) -> None:
    program = _program(name, answer, input_shape)
    try:
        with _quiet():
            torch.onnx.export(
                program,
                (),
                file.path,  # an open file is not accepted
                input_names=["input"],
                output_names=["output"],
                dynamo=True,
                external_data=False,
                verbose=False,
                custom_translation_table={torch.ops.aten.sort.stable: _stable_sort()},
            )
    except OSError:
        raise
    except ImportError as error:  # each release of torch imports modules that older onnxscripts lack
        valid = f"with packages that fit torch {torch.__version__}: {install('export')} ({_last(error)})"
        raise ConfigError("--out", name, valid) from error
    except Exception as error:  # torch may raise any of many errors
        raise ConfigError("--out", name, f"*.pt2: ONNX has no form of this network ({_last(error)})") from error


def _program(name: str, answer: Answer, input_shape: tuple[int, int, int]) -> ExportedProgram:
    """The model as a graph of torch's operations, for any number of samples."""
    # More than one sample, because torch treats a size of 1 as constant.
    arguments: Any = ((example(answer, input_shape, 3),),)
    shapes: Any = ({0: Dim("batch")},)
    failure: Exception | None = None
    # strict=False is much faster, but fails if a len() of Python fixes the number of samples.
    for strict in (False, True):
        try:
            with _quiet(), torch.no_grad(), _SpeltDistances():
                return torch.export.export(answer, *arguments, dynamic_shapes=shapes, strict=strict)
        except Exception as error:
            failure = failure or error
    assert failure is not None
    valid = "*.safetensors: no graph of this network"
    if names := ", ".join(type(method).__name__ for method in answer.classifiers):  # safetensors cannot hold it either
        valid = f"a network and a classify of {names} of which torch.export finds a graph"
    raise ConfigError("--out", name, f"{valid} ({_last(failure)})") from failure


class _SpeltDistances(TorchFunctionMode):
    """Computes torch.cdist as sums of squares, because torch's own changes its algorithm above 25 samples."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if function is torch.cdist and len(args) == 2 and named.get("p", 2.0) == 2.0:
            return (args[0].unsqueeze(-2) - args[1].unsqueeze(-3)).square().sum(-1).sqrt()
        return function(*args, **named)


def _stable_sort() -> Callable[..., Any]:
    """Return aten.sort.stable for ONNX, by its TopK, which returns the lower index first for equal values."""
    from onnxscript import INT64, opset18

    op: Any = opset18

    def sort(self: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
        size = op.Gather(op.Shape(self), op.Constant(value_ints=[dim]), axis=0)
        return op.TopK(self, op.Cast(size, to=INT64.dtype), axis=dim, largest=int(descending), sorted=1)

    return sort


def _last(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the context, suppress the messages of torch's exporters."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


_WRITERS: Mapping[str, Callable[[OutputFile, str, Answer, tuple[int, int, int], Mapping[str, str]], None]] = {
    ".pt2": _save_program,
    ".safetensors": _save_tensors,
    ".onnx": _save_onnx,
}
