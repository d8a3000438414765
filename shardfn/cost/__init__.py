"""What a laid-out program costs on a device. Where the rule for something is:

- the figures of a chip, with their source: `chips`; measured on this machine: `calibrate`; how many chips, and how they are
  linked: `hardware`, `links`
- bytes of a collective: `collectives`; work of an op: `compute`; all of it together: `cost`
- memory: which values take a place (`fusion`: the walk `fuser`, what XLA does with an op by its `kinds`, what CPUs with their
  `delegated` and TPUs do otherwise in `fusion_cpu` and `fusion_tpu`), in which order ops run (`schedule`, of flows
  that know the bytes of their pieces: `sized`), what is alive when (`memory`, and `loops` for what these carry), the copies that
  XLA's CPU backend makes (`cpu`), the parts in which GPUs make small products (`gpu`), and the tiles and the vector memory of
  a TPU (`tpu`)

The search prices an op by tables of the same figures (`search.strategies`); what its plans cost is said by `cost` alone.
"""
