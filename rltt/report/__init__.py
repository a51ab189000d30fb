"""`rltt report`: runs as one HTML file that needs nothing else, to be read on any screen and sent to anyone.

charts.py          what is drawn, one function a kind of chart
figures.py         how it is drawn: SVG that follows the page's colours, and PNG
page.py            what stands on the page, and in which order
page.html.jinja    the page
"""

from rltt.report.page import write_pngs, write_report

__all__ = ["write_pngs", "write_report"]
