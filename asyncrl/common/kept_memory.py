"""Environment variables that make a process keep the memory that it has freed."""

KEPT_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**30)}
"""For the C library of Linux (glibc), in processes that compute on a CPU. By default it gives the memory of a freed
tensor back to the kernel, and each page of the next tensor is a page fault: 15,000 in one training pass of the
quickstart, 12 % of its time."""
