"""Load DALI, keep its decoders from writing to standard error, and survive a fork.

libjpeg, libpng, libtiff, OpenCV and nvImageCodec print lines for each oddity of a file, again in
each epoch. None of them exports its error handler, and descriptor 2 belongs to the user: other
threads write there. So OpenCV and nvImageCodec get a log level from environment variables, which
are set only while they are loaded. And in nvImageCodec's libraries the addresses of C's `stderr`
and C++'s `std::cerr` are replaced by those of streams that drop all output. An address is replaced
only if it has the expected value: with another version or system the libraries still print.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from typing import TYPE_CHECKING, Any

from penstock.cache import MissingDependencyError, keep_forever, watch
from penstock.cache.base import refuse_shortage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from penstock.readers import Encoded

_LEVELS = {
    b"OPENCV_LOG_LEVEL": b"SILENT",
    b"DALI_NVIMGCODEC_LOG_LEVEL": b"0",
    b"PYNVIMGCODEC_VERBOSITY": b"0",
}
_LIBRARIES = b"/nvimgcodec/"
_STDERR, _CERR = b"stderr", b"_ZSt4cerr"
_NEW_OSTREAM = "_ZNSoC1EPSt15basic_streambufIcSt11char_traitsIcEE"
_OSTREAM_BYTES = 1024  # more than any libstdc++ needs
_PT_DYNAMIC = 2
_STRTAB, _SYMTAB, _RELA, _RELASZ = 5, 6, 7, 8
_GLOB_DAT = (6, 1025)  # of x86_64, of aarch64

_load_lock = threading.Lock()
_kept_alive: list[Any] = []  # objects to which the libraries have pointers


class _Segment(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("vaddr", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 4),
    )


class _Library(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("segments", ctypes.POINTER(_Segment)),
        ("count", ctypes.c_uint16),
    )


def load_quietly(load: Callable[[], object]) -> None:
    """Call `load`, which loads the decoders' libraries, once, and silence these."""
    with _load_lock:
        if _kept_alive:
            return
        libc = ctypes.CDLL(None)
        libc.getenv.restype = ctypes.c_char_p
        unset = [name for name in _LEVELS if libc.getenv(name) is None]
        for name in unset:
            libc.setenv(name, _LEVELS[name], 0)
        try:
            load()
        finally:
            for name in unset:
                libc.unsetenv(name)
        _kept_alive.append(libc)
        streams = _silent_streams(libc)
        for slot, now, silent in _slots(libc, streams):
            if ctypes.c_uint64.from_address(slot).value == now:
                _write(libc, slot, silent)


def _silent_streams(libc: Any) -> dict[bytes, tuple[int, int]]:
    """Return, for each name, its address and the address of its silent replacement."""
    libc.fopen.restype = ctypes.c_void_p
    sink = ctypes.c_void_p(libc.fopen(b"/dev/null", b"w"))
    streams: dict[bytes, tuple[int, int]] = {}
    if sink.value:
        _kept_alive.append(sink)
        streams[_STDERR] = _address(libc, _STDERR), ctypes.addressof(sink)
    try:
        cxx = ctypes.CDLL("libstdc++.so.6")
        stream = ctypes.create_string_buffer(_OSTREAM_BYTES)
        make = getattr(cxx, _NEW_OSTREAM)
        make.restype, make.argtypes = None, (ctypes.c_void_p, ctypes.c_void_p)
        make(stream, None)  # without a buffer it drops all output
        _kept_alive.append(stream)
        streams[_CERR] = _address(cxx, _CERR), ctypes.addressof(stream)
    except (OSError, AttributeError, ValueError):
        pass
    return streams


def _address(library: Any, name: bytes) -> int:
    return ctypes.addressof(ctypes.c_char.in_dll(library, name.decode()))


def _slots(libc: Any, streams: dict[bytes, tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield, for nvImageCodec's libraries, the location of an address, its expected value, and the
    value to write."""
    libraries: list[tuple[int, int]] = []

    def see(library: Any, _size: int, _data: object) -> int:
        found = library.contents
        if found.name and _LIBRARIES in found.name:
            libraries.extend(
                (found.base, found.base + found.segments[i].vaddr)
                for i in range(found.count)
                if found.segments[i].type == _PT_DYNAMIC
            )
        return 0

    kind = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p
    )
    libc.dl_iterate_phdr(kind(see), None)
    for base, dynamic in libraries:
        tags: dict[int, int] = {}
        while (tag := ctypes.c_int64.from_address(dynamic).value) != 0:
            tags[tag] = ctypes.c_uint64.from_address(dynamic + 8).value
            dynamic += 16
        if not {_STRTAB, _SYMTAB, _RELA, _RELASZ} <= tags.keys():
            continue
        for at in range(tags[_RELA], tags[_RELA] + tags[_RELASZ], 24):
            info = ctypes.c_uint64.from_address(at + 8).value
            if info & 0xFFFFFFFF not in _GLOB_DAT:
                continue
            symbol = tags[_SYMTAB] + 24 * (info >> 32)
            name = ctypes.string_at(tags[_STRTAB] + ctypes.c_uint32.from_address(symbol).value)
            if name in streams:
                yield base + ctypes.c_uint64.from_address(at).value, *streams[name]


def _write(libc: Any, slot: int, value: int) -> None:
    """Write an address into a page that the dynamic loader made read-only."""
    page = slot - slot % mmap.PAGESIZE
    size = ctypes.c_size_t(mmap.PAGESIZE)
    if libc.mprotect(ctypes.c_void_p(page), size, mmap.PROT_READ | mmap.PROT_WRITE) == 0:
        ctypes.c_uint64.from_address(slot).value = value


def load_dali() -> Any:
    """Return the module nvidia.dali. Raises MissingDependencyError with the remedy, and ReadError
    if memory or open files ran out."""
    try:
        import nvidia.dali
        import nvidia.dali.fn
    except ImportError as error:
        refuse_shortage(error, "NVIDIA DALI")
        if not sys.platform.startswith("linux"):
            remedy = f"DALI exists for Linux only, and this is {sys.platform}: use a Linux machine."
        else:
            remedy = (
                "Install it: pip install 'penstock[dali]' (CUDA 13, or no GPU), or "
                "'penstock[cuda12]'."
            )
        raise MissingDependencyError(
            f"Decoding images takes NVIDIA DALI, which can't be imported ({error}). {remedy}"
        ) from error
    load_quietly(_load_decoders)
    return nvidia.dali


def new_pipeline(batch_size: int, *, threads: int, device_id: int | None = None) -> Any:
    """Return an empty DALI pipeline that runs once for each schedule_run(). device_id: None: the
    CPU."""
    return load_dali().Pipeline(
        batch_size=batch_size,
        num_threads=threads,
        device_id=device_id,
        prefetch_queue_depth=1,
        exec_dynamic=True,
    )


class EncodedPipeline:
    """A DALI pipeline whose first input is samples, and whose runs are first in, first out. One
    thread uses it."""

    def __init__(
        self,
        define: Callable[[Any], Sequence[Any]],
        *,
        batch_size: int,
        threads: int,
        device_id: int | None = None,
        pixels: bool = False,
        resident: bool = False,
    ) -> None:
        """Build the pipeline.

        define: called inside the definition with the node of the samples; returns the outputs.
        pixels: samples are decoded images, uint8, HWC, instead of encoded ones. resident: they are
        in the GPU's memory.
        """
        tensors = load_dali().tensors
        from nvidia.dali import fn, types

        self._device_id = device_id
        self._tensor, self._tensors = tensors.TensorCPU, tensors.TensorListCPU
        self._resident = tensors.TensorListGPU if resident else None
        self._layout: dict[str, Any] = {"layout": "HWC"} if pixels else {}
        self._pipe = new_pipeline(batch_size, threads=threads, device_id=device_id)
        options: dict[str, Any] = {
            "ndim": 3 if pixels else 1,
            "device": "gpu" if resident else "cpu",
        }
        with self._pipe:
            samples: Any = fn.external_source(
                name="encoded", no_copy=True, dtype=types.UINT8, **options, **self._layout
            )
            self._pipe.set_outputs(*define(samples))
        self._pipe.build()
        watch(self)

    def disown(self) -> None:
        """Never destroy the pipeline in a forked child, which doesn't have DALI's threads."""
        disown_pipeline(self._pipe)

    def schedule(
        self, samples: Sequence[Encoded], arguments: Mapping[str, NDArray[Any]] | None = None
    ) -> tuple[Any, ...]:
        """Start one run. arguments: other inputs by name, one row per sample. Returns objects that
        must stay alive until the run is taken."""
        if self._resident is not None:
            views = self._resident(samples, layout="HWC", contiguous=False)
        else:
            tensor, layout = self._tensor, self._layout
            # An explicit layout, even an empty one, doubles the time of wrapping a view.
            if layout:
                wrapped = [tensor(view, **layout) for view in samples]
            else:
                wrapped = [tensor(view) for view in samples]
            views = self._tensors(wrapped, contiguous=False)
        inputs = {name: self._tensors(each) for name, each in (arguments or {}).items()}
        # DALI copies images that are scattered in the GPU's memory into a batch: by one kernel
        # instead of one copy for each.
        self._pipe.feed_input("encoded", views, use_copy_kernel=self._resident is not None)
        for name, values in inputs.items():
            self._pipe.feed_input(name, values)
        self._pipe.schedule_run()
        return (views, *inputs.values())

    def output(self) -> Any:
        """Return the oldest run's output. On CUDA the current stream waits for it, and the host
        doesn't. Raises DALI's RuntimeError."""
        if self._device_id is None:
            return self._pipe.outputs()[0]
        import torch

        stream = torch.cuda.current_stream(self._device_id)
        return self._pipe.outputs(cuda_stream=stream)[0]

    def run(
        self, samples: Sequence[Encoded], arguments: Mapping[str, NDArray[Any]] | None = None
    ) -> Any:
        """Return the output of these samples. Raises DALI's RuntimeError."""
        held = self.schedule(samples, arguments)
        output = self.output()
        del held  # DALI read it until here
        return output


RUN_SAMPLES = 64  # larger runs are not faster (64, 128, 256 measured), and lose more good samples
RUN_PIXELS = 2**24  # 50 MB of RGB


def decode_runs(pixels: Sequence[int], most_pixels: int = RUN_PIXELS) -> Iterator[list[int]]:
    """Yield the rows to decode together, so that memory is bounded: at most RUN_SAMPLES and
    most_pixels, and at least one. pixels: height times width of each sample."""
    run: list[int] = []
    held = 0
    for row, count in enumerate(pixels):
        if run and (len(run) == RUN_SAMPLES or held + count > most_pixels):
            yield run
            run, held = [], 0
        run.append(row)
        held += count
    if run:
        yield run


def _load_decoders() -> None:
    """Build a pipeline, since DALI then loads the libraries that decode."""
    from nvidia import nvimgcodec
    from nvidia.dali import Pipeline, fn, types

    del nvimgcodec
    pipe = Pipeline(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True)
    with pipe:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        pipe.set_outputs(fn.decoders.image(encoded))
    pipe.build()


def disown_pipeline(pipeline: Any) -> None:
    """Keep a pipeline alive for ever in a forked child: its destruction would wait for threads that
    the child doesn't have, even at exit."""
    handle = getattr(pipeline, "_pipe", None)
    if handle is not None:
        keep_forever(handle)
        pipeline._pipe = None
