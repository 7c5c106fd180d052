"""A PJRT plugin for NPUs: gives torch_xla the path of the PJRT library, and the way in which a process uses it.

The library compiles and runs programs. It is not part of this package: a vendor provides it as a shared object that
exports `GetPjrtApi`. Its path is NPU_PJRT_LIBRARY, or libpjrt_npu.so in the folder of this package.
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
    """The plugin that torch_xla uses with PJRT_DEVICE=NPU.

    torch_xla creates it at every import, on any device; so the constructor does nothing, and only the methods may fail.
    """

    def library_path(self) -> str:
        """The path of the library.

        Raises:
            RuntimeError: the file is missing, cannot be loaded, or is no PJRT library.
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
        """The options of the library's client, from the JSON object in NPU_PJRT_OPTIONS; {} if it is not set.

        The library documents which options there are.

        Raises:
            RuntimeError: NPU_PJRT_OPTIONS is not a JSON object.
        """
        text = os.environ.get(OPTIONS, "{}")
        try:
            options = json.loads(text)
        except ValueError as error:
            raise RuntimeError(f"{OPTIONS}={text} is not a JSON object ({error})") from error
        if not isinstance(options, dict):
            raise RuntimeError(f"{OPTIONS}={text} is not a JSON object")
        return options

    def physical_chip_count(self) -> int:
        """The number of devices that this process sees: those in ASCEND_RT_VISIBLE_DEVICES, or all of the machine."""
        visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
        if visible is not None:
            return len([number for number in visible.split(",") if number.strip()])
        return len(glob.glob("/dev/davinci[0-9]*"))

    def configure_single_process(self) -> None:
        """Does nothing: each process is an XLA world of its own. The base class would raise an error."""

    def requires_xla_coordinator(self) -> bool:
        """False: XLA processes do not know of each other; the framework connects the workers."""
        return False
