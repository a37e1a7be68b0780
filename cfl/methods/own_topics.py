"""The channel as a method uses it: without the topic of the clients' updates, and with messages read in their round."""

from __future__ import annotations

from typing import Any

from cfl.data.schedule import RoundPlan
from cfl.federation.channel import UPDATE, Channel
from cfl.runtime.errors import ConfigError

_TAKE_A_TOPIC = frozenset({"uplink", "sum", "mean", "sum_of_nobody", "uplink_individually", "collect_individually"})
_READ_BY = {"uplink": "sum", "uplink_individually": "collect_individually"}
"""Function that sends messages -> the one that reads them."""


class OwnTopics:
    """Shows a run's channel to a method. Messages of the topic ``update`` would be added to the clients' updates.

    Args:
        channel: the run's.
        key: the method's key in the configuration.

    Raises:
        ConfigError: the method sends or reads messages of this topic.
    """

    def __init__(self, channel: Channel, key: str) -> None:
        self._channel, self._key = channel, key
        self._sent = set[tuple[str, str]]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # requested by Python itself, e.g. while an object is copied and still empty
            raise AttributeError(name)
        found = getattr(self._channel, name)
        if name not in _TAKE_A_TOPIC:
            return found

        def of_own_topic(topic: str, *given: Any, **named: Any) -> Any:
            if topic == UPDATE:
                valid = "another topic, such as self.name: clients send their updates under this one"
                raise ConfigError(self._key, f"channel.{name} with the topic {topic!r}", valid)
            if name in _READ_BY:
                self._sent.add((topic, name))
            return found(topic, *given, **named)

        return of_own_topic

    def check_all_read(self, plan: RoundPlan) -> None:
        """Refuse messages that the method has not read at the end of their round; a checkpoint would not have them.

        Raises:
            ConfigError: naming the method and the topic.
        """
        for topic, name in sorted(self._sent):
            if self._channel.is_unread(topic, single=name == "uplink_individually"):
                what = (
                    f"channel.{name} with the topic {topic!r}, which nobody has read at the end of round {plan.round}"
                )
                valid = (
                    f"channel.{_READ_BY[name]}({topic!r}) in end_round or, if sent in a task's last round only, "
                    "end_task; totals over several rounds belong into an attribute that state names"
                )
                raise ConfigError(self._key, what, valid)
        self._sent.clear()
