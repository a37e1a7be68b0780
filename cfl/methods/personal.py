"""Personal layers: parameters that stay on their client."""

from __future__ import annotations

from fnmatch import fnmatchcase

from cfl.data.scenarios import EVERY_SCENARIO
from cfl.methods.base import Method
from cfl.methods.context import Context
from cfl.runtime.errors import ConfigError


class PersonalLayers(Method):
    """Keeps parameters and buffers whose names match a pattern on their client, which trains them and never sends them.

    ``["*"]`` is training without communication ("local" in FedWeIT's tables); ``["head.*"]``
    is FedPer (Arivazhagan et al., 2019, section 3). Each client is then evaluated with its own model on the tasks it
    holds. A client that has not trained yet has the initial values.

    Sends nothing of its own; storage per client: the personal tensors. Scenarios: all. Optimizers: any.

    Args:
        layers: patterns (as in file names) over the names of parameters and buffers, e.g. ``head.*``.

    Raises:
        ConfigError: before training, a pattern matches nothing, or all of them match running statistics alone.
    """

    scenarios = EVERY_SCENARIO
    task_free = True
    client_clocks = True

    def __init__(self, layers: list[str] | None = None) -> None:
        self.layers = ["*"] if layers is None else layers

    def setup(self, context: Context) -> None:
        """Check that every pattern matches something."""
        super().setup(context)
        names = list(context.state_tensors())
        for pattern in self.layers:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ConfigError(f"{self.key}.layers", pattern, f"patterns that match one of {names}")
        if self.layers and not any(self.keeps_local(name) for name, _ in context.network.named_parameters()):
            raise ConfigError(
                f"{self.key}.layers",
                self.layers,
                "patterns that match a parameter; federated.batchnorm=local keeps running statistics alone",
            )

    def keeps_local(self, name: str) -> bool:
        """Whether a pattern matches the name."""
        return any(fnmatchcase(name, pattern) for pattern in self.layers)
