"""Processes as hard to end as vLLM's: in sessions of their own, deaf to SIGTERM, renamed, with shared memory."""

import ctypes
import multiprocessing
import os
import signal
import time
from multiprocessing.shared_memory import SharedMemory


def worker(segment: str) -> None:
    memory = SharedMemory(segment)
    memory.buf[0] = 1
    if os.fork() == 0:
        ctypes.CDLL(None).prctl(15, b"VLLM::Renamed")
        time.sleep(600)
    time.sleep(600)


def engine() -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = SharedMemory(create=True, size=4096)
    process = multiprocessing.get_context("spawn").Process(target=worker, args=(memory.name,))
    process.start()
    while not memory.buf[0]:
        time.sleep(0.01)
    print("engine is up", flush=True)
    process.join()
