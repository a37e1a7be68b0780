"""Learning to Prompt (Wang et al., CVPR 2022), with prompts, keys and head averaged over clients."""

from __future__ import annotations

from torch import Tensor, nn

from cfl.data.samples import Samples
from cfl.methods.base import Method
from cfl.methods.context import Context
from cfl.models.vit import PromptedViT
from cfl.runtime.errors import ConfigError
from cfl.runtime.option_checks import check_numbers


class L2P(Method):
    """Pulls the keys of prompts towards the queries that choose them, and masks other tasks' logits in training.

    Prompts, their keys and the head belong to the network (:class:`cfl.models.PromptedViT`), whose documentation
    describes queries and the choice of prompts. They are trained and averaged like any weights. Every local step
    minimises (eq 5)::

        CE(h(x), y) - strength * mean_i sum_{s in S_i} cos(q(x_i), key_s)

    over the k keys ``S_i`` that sample i has chosen. The sum over keys is that of paper and code; the mean is over the
    samples of the step. Samples that other methods add have the same weights here as in the cross-entropy.

    With ``mask_logits`` the cross-entropy of a sample is over the outputs of its own task alone, as in the authors'
    code; tests still choose among all classes. In class-incremental streams training then depends on the task, as if
    ``data.class_loss`` left out all other tasks, for every method and for the server's momentum. In task- and
    domain-incremental streams the cross-entropy is always over these outputs. Without ``mask_logits`` the method needs
    no tasks, and asynchronous clients (``data.exposure``) are possible.

    Sends: nothing beyond the model, which is prompts, keys and head. Storage per client: none; the frozen transformer
    is assumed to be present at the clients and is not counted. Extra compute: none beyond the network's two passes.
    Scenarios: task-, class- and domain-incremental. Optimizers: any; the authors take Adam with learning rate
    0.03 x batch size / 256 and gradients clipped to norm 1.

    Differs from the paper: there is no penalty on frequently chosen prompts, which is optional there and not used in
    the authors' runs.

    Args:
        strength: weight of the pull term, at least 0; 0.1 in the authors' code.
        mask_logits: whether other tasks' outputs are left out of the training loss of class-incremental streams.

    Raises:
        ConfigError: an option is out of range.
    """

    def __init__(self, strength: float = 0.1, mask_logits: bool = True) -> None:
        check_numbers("methods.l2p", "[0, inf)", strength=strength)
        self.strength, self.mask_logits = strength, mask_logits
        self.passes_forward = strength > 0
        self.task_free = not mask_logits

    def setup(self, context: Context) -> None:
        """Leave other tasks' outputs out of the training loss.

        Raises:
            ConfigError: the network has no prompts, or ``data.class_loss: seen`` would have no effect on masked logits.
        """
        super().setup(context)
        if not isinstance(context.network, PromptedViT):
            valid = f"PromptedViT while {self.key} is used"
            raise ConfigError("model.network", type(context.network).__name__, valid)
        if self.mask_logits and context.scenario == "class":
            if context.class_loss == "seen":
                raise ConfigError("data.class_loss", "seen", f"all while {self.key}.mask_logits is true")
            context.train_own_outputs()

    @property
    def computes_locally(self) -> bool:
        """Whether ``strength`` is above 0."""
        return self.strength > 0

    def forward_pass(self, network: nn.Module, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """Logits, and minus ``strength`` times the weighted sum of the chosen keys' cosines."""
        assert isinstance(network, PromptedViT)
        features, cosines = network.prompted(x)
        pull = (samples.weights.to(cosines.dtype) * cosines.sum(-1)).sum()  # weights are 0 where padded
        return network.head(features), -self.strength * pull
