"""Toy parents: checkpoints with the real parent's structure, in sizes for tests, benchmarks and first tries.

Every byte follows from integers (a name, a counter, PCG64's raw bits) and from exactly rounded arithmetic, so
that the same size gives the same files on every machine, with every numpy, today and in a year.
"""
