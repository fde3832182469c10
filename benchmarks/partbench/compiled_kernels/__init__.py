"""The kernels of both GPU backends as they are compiled, which takes no GPU.

code            a kernel's instructions, and its main loop
kernels         a compiled kernel, and the table of them
triton, cuda    the kernels of the two backends
without_gpu     operators called for a GPU that is not there
"""
