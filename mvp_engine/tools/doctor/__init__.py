"""`mvp doctor`: does this machine train? Each finding is ok, or has a fix."""

from mvp_engine.tools.doctor.command import doctor

__all__ = ["doctor"]
