"""A PJRT plugin for NPUs: tells torch_xla where its library is, and how a process uses it.

The library, which compiles and runs programs, comes from whoever makes it: a shared object that exports `GetPjrtApi`.
It is looked for in NPU_PJRT_LIBRARY, and then in the folder of this package, as libpjrt_npu.so.
"""

from __future__ import annotations

import ctypes
import glob
import json
import os
from pathlib import Path

from torch_xla.experimental import plugins  # pyright: ignore[reportMissingImports]

LIBRARY = "NPU_PJRT_LIBRARY"
OPTIONS = "NPU_PJRT_OPTIONS"
IN_PACKAGE = Path(__file__).with_name("libpjrt_npu.so")


class NpuPlugin(plugins.DevicePlugin):
    """What torch_xla asks when PJRT_DEVICE=NPU. It is made, and asked nothing, whenever torch_xla is imported."""

    def library_path(self) -> str:
        """Where the library is.

        Raises:
            RuntimeError: there is none, or it is no PJRT library.
        """
        given = os.environ.get(LIBRARY)
        path = Path(given) if given else IN_PACKAGE
        if not path.is_file():
            found = f"{LIBRARY}={given} is no file" if given else f"{LIBRARY} is not set, and there is no {path}"
            raise RuntimeError(f"PJRT_DEVICE=NPU needs a PJRT library for NPUs: {found}. Give its path in {LIBRARY}.")
        try:
            exports = hasattr(ctypes.CDLL(str(path)), "GetPjrtApi")
        except OSError as error:
            raise RuntimeError(f"PJRT_DEVICE=NPU: {path} cannot be loaded: {error}") from error
        if not exports:
            raise RuntimeError(f"PJRT_DEVICE=NPU: {path} is no PJRT library: it does not export GetPjrtApi.")
        return str(path.resolve())

    def client_create_options(self) -> dict[str, object]:
        """Options of the library's client: a JSON object in NPU_PJRT_OPTIONS, which the library documents."""
        text = os.environ.get(OPTIONS, "{}")
        try:
            options = json.loads(text)
        except ValueError as error:
            raise RuntimeError(f"{OPTIONS} is a JSON object, got {text!r}: {error}") from error
        if not isinstance(options, dict):
            raise RuntimeError(f"{OPTIONS} is a JSON object, got {text!r}")
        return options

    def physical_chip_count(self) -> int:
        """Devices that this process can see: those in ASCEND_RT_VISIBLE_DEVICES, else those that there are."""
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        if visible is not None:
            return len([number for number in visible.split(",") if number.strip()])
        return len(glob.glob("/dev/davinci[0-9]*"))

    def configure_single_process(self) -> None:
        """A process is a world of its own: nothing is to be set. (The base class refuses.)"""

    def requires_xla_coordinator(self) -> bool:
        """No process knows of another one."""
        return False
