"""In the place of flash-attn 2.8 where there is no CUDA: the functions that the libraries compared call, on the CPU.

Signatures, shapes and conventions were read in Dao-AILab/flash-attention, v2.8.3, flash_attn/flash_attn_interface.py.
`benchmarks/peers/adapters.py` puts it on `sys.path`.
"""

from .flash_attn_interface import flash_attn_func, flash_attn_varlen_func

__version__ = "2.8.3"
__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
