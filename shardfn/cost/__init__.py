"""What a partitioned program costs on a device: FLOPs, bytes sent, memory and modelled time.

Entry point: `estimate.estimate_cost`. Where the rule for something is:

- chips and their figures: `devices.chips`; devices that a name stands for: `devices.hardware`; links between them:
  `devices.links`;
  measured figures of this machine: `devices.calibrate`
- FLOPs and time of an op: `compute`, by the op's row in `ir.op_traits`; bytes of a collective: `collectives`
- fusion: `fusion_walk`; the order of ops and combined collectives: `schedule`
- the time if collectives overlap with compute: `overlap`
- memory: `memory.live_memory`, from the live ranges of `memory.live_ranges`
- what one XLA backend does differently: `backends`, one row each in `platforms` and, for buffers, in `memory.platforms`
"""
