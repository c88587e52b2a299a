"""Each way to end has words of its own."""

from __future__ import annotations

import errno

from engine.exit_reason import explain_exit, explain_spawn_failure
from engine.failures import is_fatal

TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'


def test_kill_by_the_kernel_is_told_from_kill_by_a_person() -> None:
    by_kernel = explain_exit(-9, "", "python", oom_kills=1)
    by_person = explain_exit(-9, "", "python", oom_kills=0)
    assert by_kernel.out_of_memory and "ran out of memory" in by_kernel.text
    assert not by_person.out_of_memory and "killed from outside" in by_person.text


def test_gpu_memory_is_told_from_main_memory() -> None:
    gpu = explain_exit(1, TRACEBACK + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "python")
    ram = explain_exit(
        1, TRACEBACK + "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes", "python"
    )
    assert gpu.out_of_memory and "GPU memory" in gpu.text and "Tried to allocate 2 GiB" in gpu.text
    assert ram.out_of_memory and "GPU" not in ram.text
    native = explain_exit(-6, "terminate called after throwing an instance of 'std::bad_alloc'\n", "python")
    assert native.out_of_memory


def test_a_missing_package_says_what_to_install_and_where() -> None:
    reason = explain_exit(1, TRACEBACK + "ModuleNotFoundError: No module named 'torch'\n", "/opt/py")
    assert reason.text.endswith("/opt/py -m pip install torch")
    engine = explain_exit(1, "/opt/py: Error while finding module specification: No module named 'engine'", "/opt/py")
    assert "does not have Kvasir's engine" in engine.text


def test_a_missing_system_library_is_named() -> None:
    stderr = TRACEBACK + "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory\n"
    assert "system library libcudart.so.12 is missing" in explain_exit(1, stderr, "python").text


def test_the_last_exception_is_quoted() -> None:
    stderr = "ValueError: an early, handled one\n" + TRACEBACK + "RuntimeError: CUDA driver version is insufficient\n"
    assert (
        explain_exit(1, stderr, "python").text == "The engine failed: RuntimeError: CUDA driver version is insufficient"
    )


def test_every_end_has_words_of_its_own() -> None:
    texts = {explain_exit(code, "", "python").text for code in (0, 1, 2, -4, -6, -7, -8, -9, -11, -15, 0xC0000005)}
    texts.add(explain_exit(-1000, "", "python").text)
    texts.add(explain_spawn_failure(FileNotFoundError(errno.ENOENT, "no"), "python").text)
    texts.add(explain_spawn_failure(PermissionError(errno.EACCES, "no"), "python").text)
    texts.add(explain_spawn_failure(OSError(errno.ENOMEM, "no"), "python").text)
    assert len(texts) == 15


def test_a_lost_gpu_ends_the_process_whoever_meets_it_first() -> None:
    failed = "The engine failed in this step: "
    for lost in (
        "AcceleratorError: CUDA error: an illegal memory access was encountered",
        "RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered",
        "RuntimeError: Triton Error [CUDA]: unspecified launch failure",
    ):
        assert is_fatal(failed + lost)
    for passing in (
        "AcceleratorError: CUDA error: out of memory",
        "RuntimeError: Triton Error [CUDA]: out of memory",
        "RuntimeError: Triton Error [CUDA]: invalid argument",
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    ):
        assert not is_fatal(failed + passing)
