"""Programs compiled for a GPU without having one: read, counted and reported.

hlo           the optimized HLO as objects
count         bytes, kernels, sorts and conditionals of a module
kernel_rules  bytes of the Pallas kernels, which HLO shows as opaque calls
compile       the real XLA:GPU compiler, ahead of time, on a machine without a GPU
cases         the drafting functions that are reported, and their byte floors
profile       kernels and their times out of a profiler trace of a real GPU
"""
