"""Tensors of a checkpoint's files, by their names in a network.

Only safetensors are read; `pickled_weights` converts other checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdecode_worker.models.errors import WeightMismatch
from specdecode_worker.models.headers import TensorHeader, read_tensor_headers

Part = Callable[[str, tuple[int, ...]], tuple[slice, ...]]
"""Function from a network's tensor name and shape to the part to read, one slice per dimension."""
Update = Callable[[Tensor, tuple[slice, ...]], Tensor]
"""Function from a tensor, or from the part of one that the slices name, to what the network has in its place."""
FLOATS = ("F16", "BF16", "F32", "F64")
"""Dtypes of plain weights."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Matrix of the network that is a part of a tensor [matrices, inputs, outputs] of the files."""

    index: int
    first: int
    """First of its outputs."""
    end: int
    """End of its outputs, exclusive."""

    def header(self, stacked: TensorHeader) -> TensorHeader:
        """Return the header of this matrix, which has the rows and columns of a matrix of a network."""
        return replace(stacked, shape=(self.end - self.first, stacked.shape[1]))

    def places(self, rows: slice, columns: slice) -> tuple[slice, slice, slice]:
        """Return the slices of the stacked tensor that hold these rows and columns."""
        outputs = slice(self.first + rows.start, self.first + rows.stop)
        return slice(self.index, self.index + 1), columns, outputs


def whole(name: str, shape: tuple[int, ...]) -> Mapping[str, Entry]:
    """Return no entries: the tensor is itself one of the network."""
    return {}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Tensors of a folder, by their names in the network.

    ``origins`` maps these names to the names in the files, ``entries`` those that are parts to their places, and
    ``updates`` those that an adapter changes to its updates.
    """

    folder: Path
    tensors: Mapping[str, TensorHeader]
    origins: Mapping[str, str]
    entries: Mapping[str, Entry] = field(default_factory=dict)
    updates: Mapping[str, Update] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def without(self, *names: str) -> Checkpoint:
        """Return this checkpoint without the given tensors."""
        return replace(self, tensors={k: v for k, v in self.tensors.items() if k not in names})

    def read(self, name: str) -> Tensor:
        """Return one tensor in its stored dtype."""
        return dict(self.read_all([name]))[name]

    def read_all(self, names: Iterable[str], part: Part | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors with their names in the network, file by file.

        ``part``, if given, selects the slices to read of each tensor.

        Raises:
            WeightMismatch: a file cannot be read.
        """
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self.tensors[name].file, []).append(name)
        for file_name, inside in by_file.items():
            try:
                with safe_open(self.folder / file_name, framework="pt") as file:
                    for name in inside:
                        origin, shape = self.origins[name], self.tensors[name].shape
                        places = part(name, shape) if part is not None else tuple(slice(0, size) for size in shape)
                        if entry := self.entries.get(name):
                            tensor = file.get_slice(origin)[entry.places(*places)][0].t()
                        elif part is None or not shape:
                            tensor = file.get_tensor(origin)
                        else:
                            tensor = file.get_slice(origin)[places]
                        update = self.updates.get(name)
                        yield name, tensor if update is None else update(tensor, places)
            except (SafetensorError, OSError) as error:
                raise WeightMismatch(
                    f"{self.folder / file_name} cannot be read as safetensors: {error}; copy it again"
                ) from None


def open_checkpoint(
    folder: Path,
    rename: Callable[[str], str | None] = str,
    entries_of: Callable[[str, tuple[int, ...]], Mapping[str, Entry]] = whole,
) -> Checkpoint:
    """Read the headers of ``folder``.

    Args:
        folder: Folder of the model.
        rename: Function from names in the files to names in the network; None leaves a tensor out.
        entries_of: Function from a renamed tensor and its shape to the matrices that it holds, if it is none itself.

    Raises:
        WeightMismatch: the headers are invalid, or two tensors have the same name in the network.
    """
    tensors: dict[str, TensorHeader] = {}
    origins: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    for origin, header in read_tensor_headers(folder).items():
        if (renamed := rename(origin)) is None:
            continue
        held = entries_of(renamed, header.shape)
        for name in held or (renamed,):
            if name in origins:
                raise WeightMismatch(f"{folder}: {origins[name]} and {origin} are the same tensor; keep one")
            origins[name], tensors[name] = origin, held[name].header(header) if held else header
        entries |= held
    return Checkpoint(folder, tensors, origins, entries)
