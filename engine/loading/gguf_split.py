"""Models that lie in several GGUF files, `name-00001-of-00003.gguf` and so on: opened as one.

The first part has all metadata; `split.no`, `split.count` and `split.tensors.count` stand in each:
https://github.com/ggml-org/llama.cpp/tree/master/tools/gguf-split
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from engine.loading.gguf import GGUFError, GGUFFile

if TYPE_CHECKING:
    import numpy as np

MAX_PARTS = 4096
"""Far above anything published."""

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a GGUF file; one that is a part of a split model together with all others, whichever is given.

    Raises `GGUFError` naming the part that is missing, damaged or of another model.
    """
    parts = parts_of(Path(path))
    if len(parts) > 1:
        return SplitGGUFFile(parts)
    file = GGUFFile(path)
    count = file.metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        file.close()
        raise GGUFError(
            f"{path}: is one of {count} parts of a split model, but its name does not end in "
            f"-00001-of-{count:05d}.gguf or the like, so that the others cannot be found; give them their names back"
        )
    return file


def parts_of(path: Path) -> list[Path]:
    """The files that belong together by their names, first part first; the file alone where its name tells of none.

    Raises `GGUFError` where some are missing.
    """
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    number, count = int(match[2]), int(match[3])
    if not 1 <= number <= count <= MAX_PARTS:
        raise GGUFError(f"{path}: its name calls it part {number} of {count}; give it its name back")
    parts = [path.with_name(f"{match[1]}-{index:05d}-of-{match[3]}{match[4]}") for index in range(1, count + 1)]
    missing = [part.name for part in parts if part != path and not part.is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise GGUFError(f"{path}: {len(missing)} of its {count} parts are missing ({listed}); download the rest")
    return parts


class SplitGGUFFile(GGUFFile):
    """The parts of a split model as one file: the first one's metadata, everyone's tensors, sizes added up.

    An offset in `tensors` counts from the start of the part that the tensor lies in.
    Raises `GGUFError` naming the part at fault.
    """

    def __init__(self, paths: list[Path]) -> None:
        super().__init__(paths[0])
        self._parts: list[GGUFFile] = []
        self._part_of: dict[str, GGUFFile] = dict.fromkeys(self.tensors, self)
        try:
            self._check_part(self, 0, len(paths))
            for index, path in enumerate(paths[1:], start=1):
                part = GGUFFile(path)
                self._parts.append(part)
                self._check_part(part, index, len(paths))
                for name, tensor in part.tensors.items():
                    if name in self.tensors:
                        part._fail(f"tensor {name!r} lies in another part too", "download all parts again")
                    self.tensors[name] = tensor
                    self._part_of[name] = part
                self.size += part.size
            count = self.metadata.get("split.tensors.count")
            if count != len(self.tensors):
                self._fail(
                    f"tells of {count} tensors, but its {len(paths)} parts have {len(self.tensors)}",
                    "the parts are of different models: download them again",
                )
        except BaseException:
            self.close()
            raise

    def _check_part(self, part: GGUFFile, index: int, count: int) -> None:
        for key, expected in (("split.no", index), ("split.count", count)):
            value = part.metadata.get(key)
            if isinstance(value, bool) or value != expected:
                part._fail(
                    f"its {key} is {value!r}, but its name makes it {expected}",
                    "it was renamed or is of another model: download it again",
                )
        total, others = part.metadata.get("split.tensors.count"), self.metadata.get("split.tensors.count")
        if total != others:
            part._fail(
                f"tells of {total} tensors in all parts, the first part of {others}",
                "the parts are of different models: download them again",
            )

    def read(self, name: str) -> np.ndarray:
        part = self._part_of.get(name, self)
        return super().read(name) if part is self else part.read(name)

    def _unmap(self) -> None:
        super()._unmap()
        for part in self._parts:
            part.close()
