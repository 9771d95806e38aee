"""Reports for people: tables, a trace, a drawing and a page.

They read the values of `hocket.ir` alone. Rich is imported when a table is made.
"""

from hocket.reporting.comparison import Comparison, Sample, lower_quartile
from hocket.reporting.content import Attempt, Gain, Report, gains_of
from hocket.reporting.corunning import corunning_of, corunning_svg
from hocket.reporting.drawing import timeline_svg
from hocket.reporting.page import page_html, write_report
from hocket.reporting.parts import bytes_between, parts_svg
from hocket.reporting.sections import schedule_html
from hocket.reporting.table import comparison_table, ops_table, plan_table, timeline_table
from hocket.reporting.trace import trace_events, write_trace

__all__ = [
    "Attempt",
    "Comparison",
    "Gain",
    "Report",
    "Sample",
    "bytes_between",
    "comparison_table",
    "corunning_of",
    "corunning_svg",
    "gains_of",
    "lower_quartile",
    "ops_table",
    "page_html",
    "parts_svg",
    "plan_table",
    "schedule_html",
    "timeline_svg",
    "timeline_table",
    "trace_events",
    "write_report",
    "write_trace",
]
