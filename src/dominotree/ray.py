"""DominoTree as a Ray Serve application: see `application`."""

from dominotree.engines.ray import Options, application

__all__ = ["Options", "application"]
