"""Minimum-cost labelling under a memory limit. It knows nothing of programs or hardware; see `README.md`.

- the problem: `labelling`; the budget: `budget`; the entry function: `solve.solve`
- exact reductions: `contract`, `dominance`; exact solution: `eliminate`, and `narrow` where its tables are too large; `content`
  stores equal arrays once
- the memory limit: `memory`, its Lagrange multipliers `lagrange`, the least possible peak `peak`
- lower bounds: `bound`; better labellings: `local_search`; the remaining gap: `branch_and_bound`
"""
