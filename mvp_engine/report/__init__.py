"""What people look at: plots, the report page and the summary of a run. It reads run folders and imports no torch."""

from mvp_engine.report.page import Example, write_report
from mvp_engine.report.page_rollouts import PromptRollouts, RolloutText

__all__ = ["Example", "PromptRollouts", "RolloutText", "write_report"]
