"""What a program does, and what XLA makes of it once it is laid out. Where the rule for something is:

- the program as data: `model`
- from a lowered module to it: `read`, and what one op says: `opfacts`; all through `mlir`, the one door to JAX's MLIR
  bindings; what differs between releases of JAX: `release`; which line of the user's an op is from: `frames`
- laid out by Shardy: `shardy`, in the form that XLA propagates through: `xlaform`; rules Shardy lacks: `rules`
- which dims are the same dimension: `classes`; which op of a flow was which of the graph: `alike`
- from a laid-out program to its collectives: `roads`, which asks for each op `ways` (products: `products`, and `dots` in the
  words of `ingroup`; convolutions and slices: `windows`, and `halos` for what pieces send each other), in the words of `cases`;
  what XLA makes simpler then: `simplified`
- which sums are put together for accelerators: `together`, and those of a loop's rounds: `rounds`; which sums and gathers libtpu
  makes otherwise: `libtpu`; the tiles that a TPU lays arrays out in: `padding`; a flow made anew of other ops: `anew`
- what XLA computes wrongly then: `mistakes`
- from one layout of an array to another: `moves`, and among a group of devices `tiles`

The road of a call: trace, `place` what was given, `search` what is open, lay out (`shardy.propagate`, `roads`), price
(`cost.cost`), `Plan`. What a platform does of its own (CPU, TPU, GPU; `model.is_gpu`) is asked here in `roads`, `together`,
`libtpu`, `ways` and `simplified`, in `cost` in `fusion`, `schedule`, `memory`, `compute`, `links`, `cpu`, `gpu` and
`tpu`, in the search in `grid`, `facts`, `problem`, `beside` and `room`, and around them in `trace`, `guard`, `diagnostics`,
`compiled`, `comparison`, `targets` and `verify`.
"""
