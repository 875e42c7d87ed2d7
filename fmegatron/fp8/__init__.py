"""Products in fp8, native and emulated: which run so is an argument, `Precision(fp8=Fp8("rowwise"))`.

policy.py   the argument: recipes, formats, what stays in the compute dtype
use.py      how one product of `sh.dot` runs, if it runs in fp8
dot.py      the product and its gradients
cast.py     a matrix in fp8 with its scales; kernels.py, triton_kernels.py: how that is made
multiply.py products of two such matrices
grouped.py  the products of experts; grouped_kernels.py, triton_grouped.py: their casts, and what multiplies
scaling.py  the state of a step: histories of delayed scaling, casts of weights kept over microbatches
"""

from fmegatron.fp8.policy import Fp8

__all__ = ["Fp8"]
