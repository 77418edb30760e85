"""What people look at: plots, the report page and the summary of a run. It reads run folders and imports no torch."""

from mvp_engine.report.page import Example, write_report

__all__ = ["Example", "write_report"]
