"""Keys that options of schedules had before ``parallel.schedule_options``: the only place in ``config`` that knows any.

What a schedule is called, which options it has and what they may be, its entry says (``schedule.entry``). A new option
needs no line here: it is given by its name in ``parallel.schedule_options``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vpipe.errors import UserError

if TYPE_CHECKING:
    from vpipe.config.pipeline import PipelineConfig


class OlderKey(NamedTuple):
    """``key`` means ``option`` of ``scheduler``; with the value ``unset`` it says nothing."""

    key: str
    option: str
    scheduler: str
    unset: Any

    def value(self, config: PipelineConfig) -> Any:
        """What the config gives, or None."""
        section, name = self.key.split(".")
        found = getattr(getattr(config, section), name)
        return None if found == self.unset else found


OLDER_KEYS = (
    OlderKey("parallel.waves", "num_waves", "hanayo", 1),
    OlderKey("parallel.vertical_sync", "vertical_sync", "pipedream", False),
    OlderKey("parallel.depths", "depths", "pipedream", None),
    OlderKey("training.update_interval", "update_interval", "pipedream", 1),
)


def given_options(config: PipelineConfig) -> dict[str, Any]:
    """The options of the config's schedule, by whichever key; whether it has them, its entry says."""
    chosen = dict(config.parallel.schedule_options)
    for older in OLDER_KEYS:
        value = older.value(config)
        if value is not None and chosen.setdefault(older.option, value) != value:
            raise UserError(
                f"parallel.schedule_options has {older.option}: {chosen[older.option]}, but {older.key} is {value}; "
                "give one of them"
            )
    return chosen
