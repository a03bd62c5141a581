"""A rank that counts the thread states which the interpreter makes while Horovod's thread reduces."""

from __future__ import annotations

import ctypes
import threading

import torch

import star_hvd as hvd
from tests.support.launch import write_result

REDUCTIONS = 50


def next_thread_state() -> int:
    """Return the number of a new thread's state; the interpreter numbers them in the order in which it makes them."""
    api, numbers = ctypes.pythonapi, list[int]()
    api.PyThreadState_Get.restype, api.PyThreadState_GetID.restype = ctypes.c_void_p, ctypes.c_uint64
    api.PyThreadState_GetID.argtypes = [ctypes.c_void_p]
    thread = threading.Thread(target=lambda: numbers.append(api.PyThreadState_GetID(api.PyThreadState_Get())))
    thread.start()
    thread.join()
    return numbers[0]


def main() -> None:
    hvd.init()
    hvd.allreduce(torch.ones(4), name="first")  # The thread makes its state.
    before = next_thread_state()
    for _ in range(REDUCTIONS):
        hvd.allreduce(torch.ones(4), name="next")
    write_result({"made": next_thread_state() - before - 1})
    hvd.shutdown()


if __name__ == "__main__":
    main()
