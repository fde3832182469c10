"""The compiled kernels of both GPU backends, examined without a GPU.

code            a kernel's instructions, and its main loop
kernels         a compiled kernel, and the table of them
triton, cuda    the kernels of the two backends
without_gpu     calls of operators for a simulated GPU
"""
