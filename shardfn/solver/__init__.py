"""Labelling problems: one label for each node at the least total cost, with a limit on what is alive at once. Arrays in, arrays
out: it knows of no program and of no hardware, and solves the published instances as it does the choices of a grid.

- the problem: `labelling`; what may be done: `budget`; the whole road: `solve`
- made smaller: `contract`; solved exactly: `eliminate`, and through `narrow` where its tables are too large; equal arrays
  once: `content`
- the limit: `memory`, its prices `lagrange`, the least peak there is `peak`
- the bound: `bound`; better labellings: `local`; the rest: `branch`
"""
