"""What only a GPU can show, in one command: `python -m tests.gpu`.

Sections run one after another, each in a process of its own, so that a crash, a hang or a lost CUDA context costs
one section alone. They take their device and their shapes as parameters: tests/test_gpu_script.py runs them all on
the CPU, tiny, with the kernels in Triton's interpreter.
"""
