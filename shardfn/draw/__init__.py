"""Pictures of plans and of pipeline schedules, as SVG for light and dark pages."""

from shardfn.draw.kinds import KINDS, draw_plan
from shardfn.draw.picture import Picture
from shardfn.draw.pipeline import pipeline_picture

__all__ = ["KINDS", "Picture", "draw_plan", "pipeline_picture"]
