"""Compiles the kernels for this processor, once, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
# Errors of arithmetic need neither flags nor traps; but NaN and infinity must stay what they are.
FLAGS = [
    "-std=c++17",
    "-O3",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-w",
    "-shared",
    "-fPIC",
]
WIDE = ["-mprefer-vector-width=512"]  # on x86-64
COMPILE_SECONDS = 120

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_long, ctypes.c_int, ctypes.c_float
ARGUMENTS = {
    "glass_add_norm": [INT, *[POINTER] * 3, *[LONG] * 2, FLOAT, INT],
    "glass_silu_mul": [INT, *[POINTER] * 2, *[LONG] * 2, INT],
    "glass_rotate_store": [INT, *[POINTER] * 6, FLOAT, *[POINTER] * 2, *[LONG] * 4, INT],
    "glass_attend": [INT, POINTER, LONG, *[POINTER] * 3, LONG, POINTER, *[LONG] * 6, INT],
    "glass_linear": [*[POINTER] * 4, INT, *[LONG] * 3, INT],
    "glass_has_amx": [],
}


class NativeError(RuntimeError):
    """The kernels cannot be had here; the message says why."""


def load_library() -> ctypes.PyDLL:
    """The compiled kernels. Raises NativeError with the cause if this machine cannot compile or load them.

    The lock of Python's interpreter is kept while a kernel runs: giving it up for some microseconds, a
    hundred times a step, would hand it to whoever waits, and that may keep it for milliseconds.
    """
    compiler = find_compiler()
    file = library_file(compiler)
    try:
        library = ctypes.PyDLL(str(file))
    except OSError:  # not compiled yet, or damaged
        compile_library(compiler, file)
    try:
        library = ctypes.PyDLL(str(file))
        for name, arguments in ARGUMENTS.items():
            if name != "glass_linear" or hasattr(library, name):  # only where there is AMX
                getattr(library, name).argtypes = arguments
    except (OSError, AttributeError) as error:
        raise NativeError(f"cannot load the compiled kernels, {file}: {error}") from error
    return library


def find_compiler() -> str:
    """The one that the environment variable CXX names, else the system's. Raises NativeError if none is."""
    if platform.system() not in ("Linux", "Darwin"):
        raise NativeError(f"the kernels in C++ are not made for {platform.system()}")
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise NativeError("there is no C++ compiler (c++, g++ or clang++) to compile the kernels with")
    return compiler


def library_file(compiler: str) -> Path:
    """Where the kernels lie once they are compiled: under $GLASS_ENGINE_CACHE, or ~/.cache/glass-engine.

    The name changes with the sources, the compiler, and the processor, since homes and images travel.
    """
    root = Path(os.environ.get("GLASS_ENGINE_CACHE") or Path.home() / ".cache" / "glass-engine")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        processor = platform.processor()
    key = hashlib.sha256(
        "\0".join([compiler, *FLAGS, processor, platform.machine(), torch.__version__]).encode()
    )
    for source in sorted(HERE.glob("*.[ch]*")):
        key.update(source.read_bytes())
    return root / f"kernels-{key.hexdigest()[:16]}.so"


def compile_library(compiler: str, file: Path) -> None:
    """Written aside and renamed, so that who comes at the same time finds all of it or nothing."""
    wide = WIDE if platform.machine() in ("x86_64", "AMD64") else []
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            made = Path(folder) / file.name
            command = [compiler, *FLAGS, *wide, *map(str, sorted(HERE.glob("*.cpp"))), "-o", str(made)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            if done.returncode:
                raise NativeError(f"{compiler} cannot compile the kernels: {done.stderr.strip()[-500:]}")
            made.replace(file)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeError(f"cannot compile the kernels: {error}") from error
