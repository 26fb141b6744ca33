"""Run a command and end it, with all its descendants, when the pipe on stdin closes; the kernel closes it even after kill -9.

This is a separate process, so that a server's whole process tree has one parent that outlives it.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress

import psutil

GRACE_S = 5.0
SET_PDEATHSIG, SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def main(command: list[str]) -> int:
    os.setpgid(0, 0)  # Ctrl-C is for our parent, which then closes the pipe
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc:
        libc.prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphaned grandchildren become our children

    def die_with_us() -> None:
        if libc:
            libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_us)
    try:
        while server.poll() is None:
            ready, _, _ = select.select([sys.stdin], [], [], 0.2)
            if ready and not os.read(sys.stdin.fileno(), 1):
                return 0
        code = server.returncode or 1  # a server that ends by itself has failed
        return 128 - code if code < 0 else code
    finally:
        stop()


def stop() -> None:
    """Ask every descendant to end, wait, then kill those that did not."""
    family = psutil.Process().children(recursive=True)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(family, timeout=GRACE_S)
    for process in {*alive, *psutil.Process().children(recursive=True)}:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
