"""What was measured, for people: a page and a plot for each table, and one HTML page of everything."""

from abc_attn.report.html import write_report
from abc_attn.report.page import write_page

__all__ = ["write_page", "write_report"]
