"""Kernels: attention on one device. `registry` chooses among them, `base` is what each of them keeps."""
