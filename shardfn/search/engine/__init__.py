"""The search itself: generators take turns to propose, and an archive evaluates and keeps.

| module | holds |
|---|---|
| `meshes` | the meshes that a search tries |
| `archive` | every candidate that was evaluated, for all objectives |
| `turns` | whose turn it is, until the budget is spent |
| `proposal_checks` | what is wrong with an answer or a proposal of a user's search |
"""

from shardfn.search.engine.archive import Archive, visits
from shardfn.search.engine.meshes import meshes, three_axis_meshes
from shardfn.search.engine.turns import CandidateGenerator, run

__all__ = ["Archive", "CandidateGenerator", "meshes", "run", "three_axis_meshes", "visits"]
