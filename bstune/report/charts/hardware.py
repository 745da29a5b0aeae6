"""The survey of the hardware: its advice and its charts."""

from bstune.report.charts.memory import memory_chart
from bstune.report.charts.roofline import roofline_chart
from bstune.report.charts.step_times import step_time_chart
from bstune.report.html import paragraph, text
from bstune.report.schema import HardwareFile


def hardware_section(hardware: HardwareFile | None) -> str:
    """Show the device, the survey's advice and its charts. Empty without a survey."""
    if hardware is None:
        return ""
    lines = [*hardware.derived.advice]
    if hardware.derived.bound:
        lines.insert(0, hardware.derived.bound)
    advice = "".join(f"<li>{text(line)}</li>" for line in lines)
    facts = paragraph(f"{hardware.device} in {hardware.precision}")
    charts = [step_time_chart(hardware), memory_chart(hardware), roofline_chart(hardware)]
    return f'{facts}<ul>{advice}</ul><div class="pair">{"".join(charts)}</div>'
