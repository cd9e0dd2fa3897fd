"""The program ``relax-fusion``, which ends properly whenever it is asked to.

It is small and outside of the package, so that it watches while the package, and TVM, are imported.
A signal that asks the process to end (Ctrl-C, SIGTERM, SIGHUP) is answered by a thread: it removes
what is half-written, says so in one line, and ends the process with 128 + the number of the signal.
Nothing is raised in the main thread, where TVM's C++ would turn a KeyboardInterrupt into another
error, or swallow it, and which is not asked before a long call returns.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "the terminal was closed",
}


def main() -> int:
    """Run the command line in a process that ends properly when it is asked to."""
    _open_standard_files()
    tidy: list[Callable[[], None]] = []
    asked = threading.Event()
    _watch(tidy, asked)
    _own_temporary_files(tidy)
    tidy.append(_remove_stages)
    from relax_fusion.cli import main as command

    code = command()
    for number in WORDS:  # what is done is done; by default a signal would kill the exiting process
        signal.signal(number, signal.SIG_IGN)
    if asked.is_set():  # the command failed because what it wrote to is being removed
        threading.Event().wait()
    return code


def _open_standard_files() -> None:
    """Open what the caller closed, lest another file gets its number, and all that is printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # it gets the lowest number that is free: this one
            setattr(sys, name, os.fdopen(number, "w" if number else "r"))


def _remove_stages() -> None:
    """Remove half-written directories, of which there are none where nothing was imported."""
    artifact = sys.modules.get("relax_fusion.cli.artifact")
    if artifact is not None and hasattr(artifact, "remove_stages"):
        artifact.remove_stages()


def _own_temporary_files(tidy: list[Callable[[], None]]) -> None:
    """Give the process, and compilers that it calls, a directory that vanishes with it."""
    import shutil  # not above: nobody watches over what is imported there
    import tempfile

    with suppress(OSError):  # whoever needs one will complain
        directory = tempfile.mkdtemp(prefix="relax-fusion-")
        tempfile.tempdir = os.environ["TMPDIR"] = directory
        tidy.append(lambda: shutil.rmtree(directory, ignore_errors=True))
        atexit.register(tidy[-1])


def _watch(tidy: list[Callable[[], None]], asked: threading.Event) -> None:
    """Start the thread.  Signals that are ignored, as by nohup, stay so."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    threading.Thread(target=_wait, args=(reader, tidy, asked), daemon=True).start()
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in WORDS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_: None)  # the byte in the pipe is what matters


def _wait(reader: int, tidy: list[Callable[[], None]], asked: threading.Event) -> None:
    """Wait for a signal of `WORDS`, set `asked`, and end the process."""
    number = 0
    while number not in WORDS:
        number = os.read(reader, 1)[0]
    asked.set()
    try:
        with suppress(OSError):  # nobody may be reading
            os.write(2, f"relax-fusion: error: {WORDS[signal.Signals(number)]}\n".encode())
        # The main thread goes on until the end, and may complain of files that are gone.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for clean in tidy:
            clean()
    finally:
        os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
