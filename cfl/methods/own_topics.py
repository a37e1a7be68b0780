"""The channel as a method uses it: without the topic of the clients' updates."""

from __future__ import annotations

from typing import Any

from cfl.federation.channel import UPDATE, Channel
from cfl.runtime.errors import ConfigError

_TAKE_A_TOPIC = frozenset({"uplink", "sum", "mean", "sum_of_nobody", "uplink_individually", "collect_individually"})


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
            return found(topic, *given, **named)

        return of_own_topic
