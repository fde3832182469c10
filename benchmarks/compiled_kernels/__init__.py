"""The kernels of both GPU backends as they are compiled, which takes no GPU, and what they should reach by that.

sass            a kernel's instructions, and the way through its main loop
pipes           what these cost
kernels         a compiled kernel, and what can be told of it
triton, cuda    the kernels of the two backends
predictions     how long products should take on an H200, and which plan is chosen
"""
