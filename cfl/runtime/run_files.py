"""The files of a run folder: whoever writes or reads one takes its name from here.

A method adds ``<its name>.csv``; pictures are named after what they draw.
"""

CONFIG = "config.yaml"
"""The whole configuration, resolved; it starts the run anew."""
CHECKPOINT = "last.ckpt"
"""The federation between two rounds, and the global model."""
PARTITION = "partition.csv"
"""Samples and classes of every client and task."""
PARTITION_PICTURE = "partition.png"
ROUNDS = "rounds.csv"
"""A row per round."""
SUMMARY = "summary.json"
"""Figures of a finished run, written last."""
CLIENTS = "clients"
"""Folder of single clients' tables."""


def matrix_file(measure: str, variant: str = "", ending: str = "csv") -> str:
    """What was measured on every task after every task.

    Args:
        measure: ``accuracy`` in percent, or ``nll`` in nats.
        variant: ``_task_il`` or ``_task_aware`` where the task of a test sample was known.
        ending: ``csv``, or ``png`` for the picture.
    """
    return f"{measure}_matrix{variant}.{ending}"


def client_matrix_file(measure: str, client: int) -> str:
    """The same of one client, in :data:`CLIENTS`."""
    return f"{measure}_matrix_{client:03d}.csv"
