"""Ends the engine processes of vLLM when the server process ends, also after SIGKILL. Python imports this file at its start."""

import sys

if sys.platform == "linux" and "--multiprocessing-fork" in sys.orig_argv:
    import ctypes
    import signal

    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
