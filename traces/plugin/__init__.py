"""The plugin that TensorBoard loads: its tab "SpecStream" shows traced runs. Needs the extra `tensorboard`."""

from specstream.traces.plugin.routes import SpecStreamPlugin

__all__ = ["SpecStreamPlugin"]
