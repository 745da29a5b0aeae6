"""DEVICES: the critical batch size, and how many devices are worth it."""

from collections.abc import Iterator

from bstune.report.lines.unreached import none_to_use
from bstune.report.words import critical_text
from bstune.result import DevicePlan, StudyResult
from bstune.system.console import format_count, format_number

# Below this efficiency more than half of each device is lost: that many devices do not pay.
LEAST_EFFICIENCY = 0.5
NOT_COUNTED = ", communication not counted"


def devices(result: StudyResult) -> Iterator[str]:
    """Give the critical batch size, and how much faster several devices would be."""
    critical = result.critical_batch_size
    if result.winner is None:
        if any(result.statuses.values()):
            yield f"not known: {none_to_use(result)}"
        return
    if critical is None:
        yield "not known yet"
        return
    # One batch size shows no slope, and so tells nothing of others.
    if critical.is_of_one_size:
        size = format_count(critical.smallest)
        yield f"critical batch size not known, as batch size {size} alone reached the target"
        return
    plan = _plan_text(result) or "not known yet"
    yield f"{plan}; critical batch size {critical_text(critical)}"


def _plan_text(result: StudyResult) -> str | None:
    """Write how much faster several devices are predicted to be, up to where they do not pay.

    ``up to 8 pay: predicted 2.9 times as fast on 4 (batch size 900 in all), 4.5 times on 8 (batch
    size 1,500), only 6.9 times on 16``. None without a plan.
    """
    paying = list[DevicePlan]()
    wasting = list[DevicePlan]()
    for row in result.scale_out:
        if row.devices <= 1:
            continue
        if row.efficiency >= LEAST_EFFICIENCY:
            paying.append(row)
        else:
            wasting.append(row)
    if not paying and not wasting:
        return None
    if not paying:
        count = wasting[0].devices
        speed_up = format_number(wasting[0].speed_up, 3)
        return f"no: {count} are predicted to be only {speed_up} times as fast{NOT_COUNTED}"
    # The largest number that pays and the one before it show what further devices still give.
    texts = list[str]()
    for row in paying[-2:]:
        speed_up = format_number(row.speed_up, 3)
        size = format_count(row.batch_size)
        if texts:
            texts.append(f"{speed_up} times on {row.devices} (batch size {size})")
        else:
            # The first one says in full what the numbers of both are.
            texts.append(f"{speed_up} times as fast on {row.devices} (batch size {size} in all)")
    most = paying[-1].devices
    text = f"up to {most} pay (each gives at least half): predicted {', '.join(texts)}"
    if wasting:
        text += f", only {format_number(wasting[0].speed_up, 3)} times on {wasting[0].devices}"
    return f"{text}{NOT_COUNTED}"
