"""One device's part of a plan, run on one device in a process of its own (`Plan.rehearse`).

| module | holds |
|---|---|
| `rehearse` | from a plan to a rehearsal; its errors |
| `candidates` | the best of several plans as rehearsed |
| `layers` | the program with fewer layers, where one shard of all does not fit |
| `platforms` | how a process with one device takes part in a program for many, a row for each platform that can |
| `job` | what the other process is told, and what it answers |
| `child` | that process: it compiles, makes arguments, measures |
| `arguments` | made-up arguments |
| `kernels` | what the profiler saw |
"""
