"""From a question to a plan. There is one folder for each trade; each imports only those above it in the table.

| folder | holds |
|---|---|
| `meshes` | integers and meshes: mesh inference, named shardings |
| `workarounds` | what XLA computes wrong, and the functions rewritten around it |
| `layout_rules` | layout files as data, and how their rules apply |
| `inside` | shardings of values inside a function: inner entries, tags, constraints on ops |
| `call` | a call and its entries, traced and posed as a search problem |
| `plan` | the plan as data: its parts, its names, its differences |
| `diagnostics` | what a plan says of itself: diagnostics, hints on experts and fields |
| `answers` | from the search's answer to a plan |
| `questions` | what is asked of a finished plan: what-if analysis, causes of collectives |
"""
