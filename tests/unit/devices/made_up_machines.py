"""Made-up machines, on which a test chooses what is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class MadeUpMachine:
    """`versions` of distributions, `files` as "package/path", `libraries` without lib and .so, `paths` as patterns.

    `contents`: of the files that match a pattern.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    plugins: tuple[str, ...] = ()
    programs: tuple[str, ...] = ("g++",)
    environment: Mapping[str, str] = field(default_factory=dict)
    contents: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def version(self, distribution: str) -> str | None:
        return self.versions.get(distribution)

    def has_package_file(self, package: str, path: str) -> bool:
        return f"{package}/{path}" in self.files

    def has_library(self, name: str) -> bool:
        return name in self.libraries

    def has_path(self, pattern: str) -> bool:
        return pattern in self.paths

    def texts(self, pattern: str) -> tuple[str, ...]:
        return self.contents.get(pattern, ())

    def has_program(self, name: str) -> bool:
        return name in self.programs

    def entry_points(self, group: str) -> tuple[str, ...]:
        return self.plugins if group == "torch_xla.plugins" else ()

    def without(self, **lacks: object) -> MadeUpMachine:
        return replace(self, **lacks)  # pyright: ignore[reportArgumentType]


PLAIN = MadeUpMachine({"torch": "2.13.0+cpu"})
GPU = MadeUpMachine({"torch": "2.13.0"}, ("torch/lib/libtorch_cuda.so",), ("cuda",), ("/dev/nvidia[0-9]*",))
NPU = MadeUpMachine({"torch": "2.13.0", "torch_npu": "2.13.0"}, libraries=("hccl",), paths=("/dev/davinci[0-9]*",))
XLA = MadeUpMachine({"torch": "2.9.0+cpu", "torch_xla": "2.9.0"})
